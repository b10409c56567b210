"""FedPFT's partitions: as many samples for every client, one label distribution for training and test."""

import numpy as np
import pytest

from fl_core.data.partitions import SPLITS, make
from tests.made import source

FEDPFT = ("fedpft_dirichlet", "fedpft_pathological")
CLASSES, PER_CLASS = 10, 700
LABELS = np.arange(CLASSES * PER_CLASS) % CLASSES
OFFICIAL = np.arange(len(LABELS)) // CLASSES % 6 > 0  # five sixths to train on


def made(kind="fedpft_dirichlet", official=True, clients=12, seed=0, **options):
    origin = source(LABELS, is_train=OFFICIAL if official else None)
    return origin, make(origin, kind, clients=clients, seed=seed, **options)


def shares(part):
    return np.bincount(LABELS[part], minlength=CLASSES) / len(part)


@pytest.mark.parametrize("kind", FEDPFT)
@pytest.mark.parametrize("official", [True, False])
def test_every_client_has_as_many_samples_of_one_distribution(kind, official):
    origin, partition = made(kind, official)
    partition.check(origin)
    distances = []
    for splits in partition.indices.values():
        assert [len(splits[split]) for split in SPLITS] == [500, 100, 100]
        distances += [
            abs(shares(splits["train"]) - shares(splits[other])).sum() / 2
            for other in SPLITS[1:]
        ]
    assert np.mean(distances) < 0.05
    if official:
        assert all(
            OFFICIAL[s["train"]].all() and not OFFICIAL[s["test"]].any()
            for s in partition.indices.values()
        )


def test_pathological_clients_have_few_even_classes():
    _, partition = made("fedpft_pathological")
    assert partition.params == {
        "clients": 12, "samples_per_client": 500, "classes_per_client": 2, "splits": [5 / 7, 1 / 7, 1 / 7]
    }  # fmt: skip
    for splits in partition.indices.values():
        assert sorted(np.bincount(LABELS[splits["train"]], minlength=CLASSES))[-3:] == [
            0,
            250,
            250,
        ]
    _, uneven = made("fedpft_pathological", classes_per_client=3)
    counts = [
        sorted(np.bincount(LABELS[s["train"]], minlength=CLASSES))[-3:]
        for s in uneven.indices.values()
    ]
    assert counts == [[166, 167, 167]] * 12


def test_clients_share_samples_but_never_a_tested_one():
    _, partition = made("fedpft_dirichlet", False, clients=40, alpha=0.1)
    trained = [
        np.concatenate([s["train"], s["validation"]])
        for s in partition.indices.values()
    ]
    tested = np.unique(np.concatenate([s["test"] for s in partition.indices.values()]))
    assert len(np.unique(np.concatenate(trained))) < sum(map(len, trained))
    assert not np.intersect1d(np.concatenate(trained), tested).size


@pytest.mark.parametrize("kind", FEDPFT)
def test_a_seed_is_a_draw_and_clients_do_not_depend_on_their_number(kind):
    assert made(kind, seed=0)[1].digest != made(kind, seed=1)[1].digest
    few, many = (
        list(made(kind, clients=clients)[1].indices.values()) for clients in (12, 20)
    )
    for ours, theirs in zip(few, many[:12], strict=True):
        assert all(np.array_equal(ours[split], theirs[split]) for split in ours)
