"""Partitions: who gets which sample, as a function of labels, parameters and seed alone."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fl_core.data.partitions import PARTITIONS, SPLITS, Partition, general, make
from fl_core.data.sources import Source
from tests.bounds import forbidden
from tests.conftest import refuses
from tests.made import LABELS, source


def parts_of(kind, labels, clients, seed=0, owner=None, min_size=None, **options):
    """Each client's positions in a pool, if asked with another least size of a client."""
    member = PARTITIONS[kind]
    if min_size is not None:
        member = type(kind, (member,), {"min_size": min_size})
    names = () if owner is None else tuple("abc"[: owner.max() + 1])
    pool = Source("toy", np.zeros((len(labels), 0)), labels, ("a", "b"), owner, names)
    return member(**options).fitted(pool, clients).assign(pool, clients, seed)


SEEDS = st.integers(0, 2**40)
DEALERS = {
    "iid": lambda labels: {},
    "dirichlet": lambda labels: {"alpha": 0.5, "min_size": 1},
    "capped_dirichlet": lambda labels: {"alpha": 0.5, "min_size": 1},
    "pathological": lambda labels: {"classes_per_client": 2},
    "non_iid_1": lambda labels: {"classes_per_client": 2, "samples_per_client": 2},
    "non_iid_2": lambda labels: {
        "classes_per_client": 2,
        "samples_per_client": len(set(labels)),
        "dominance": 0.5,
    },
}


def deal(kind, labels, clients, seed):
    return parts_of(kind, labels, clients, seed, **DEALERS[kind](labels))


@pytest.mark.parametrize("kind", DEALERS)
@settings(max_examples=40)
@given(clients=st.integers(1, 8), seed=st.integers(0, 2**40), data=st.data())
def test_no_sample_is_dealt_twice_and_torchs_generator_is_left_alone(
    kind, clients, seed, data
):
    labels = np.array(
        data.draw(st.lists(st.integers(0, 4), min_size=80, max_size=160))
        + [0, 1, 2, 3, 4] * 8
    )
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    parts = deal(kind, labels, clients, seed)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    again = deal(kind, labels.copy(), clients, seed)
    every = np.concatenate(parts)
    assert len(parts) == clients
    assert min(map(len, parts)) >= 1
    assert len(np.unique(every)) == len(every)
    assert all(
        np.array_equal(a, b) and (np.diff(a) > 0).all()
        for a, b in zip(parts, again, strict=True)
    )
    if kind in ("iid", "dirichlet", "capped_dirichlet"):
        assert np.array_equal(np.sort(every), np.arange(len(labels)))


@pytest.mark.parametrize("clients", [10, 100])
@pytest.mark.parametrize(
    ("classes", "few", "dominance", "own", "others"),
    [
        (10, 4, 1.0, {150}, {0}),
        (100, 12, 1.0, {50}, {0}),
        (10, 2, 0.5, {150}, {37, 38}),
        (10, 2, 0.8, {240}, {15}),
        (100, 6, 0.5, {50}, {3, 4}),
    ],
)
def test_non_iid_deals_a_few_classes_in_equal_counts_and_the_others_evenly(
    clients, classes, few, dominance, own, others
):
    labels = np.arange(60_000) % classes
    options = {"samples_per_client": 600, "classes_per_client": few}
    parts = parts_of("non_iid_2", labels, clients, 1, dominance=dominance, **options)
    counts = histogram(labels, parts)
    assert (counts.sum(1) == 600).all()
    ranked = np.sort(counts, axis=1)
    assert set(ranked[:, -few:].ravel()) == own
    assert set(ranked[:, :-few].ravel()) == others
    if dominance == 1:
        holders = (counts > 0).sum(0)
        assert holders.max() - holders.min() <= 1
        drawn = {tuple(row > 0) for row in counts}
        assert len(drawn) > min(clients, 90) // 2, "classes are not dealt in turn"


def test_dirichlet_shares_have_the_mean_and_variance_of_the_distribution():
    # a share of a class is Beta(alpha, alpha (K - 1)): mean 1/K, variance (K - 1) / (K^2 (K alpha + 1))
    clients, alpha, size = 4, 0.5, 20_000
    labels = np.zeros(size, dtype=np.int64)
    draws = [
        parts_of("dirichlet", labels, clients, seed, alpha=alpha, min_size=0)
        for seed in range(400)
    ]
    shares = np.array([[len(part) / size for part in parts] for parts in draws])
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    error = math.sqrt(variance / len(draws))
    assert np.abs(shares.mean(0) - 1 / clients).max() < 4 * error
    assert shares.var(0) == pytest.approx(variance, rel=0.25)


@given(clients=st.integers(1, 30), k=st.integers(1, 10), seed=st.integers(0, 1000))
def test_pathological_shares_classes_fairly(clients, k, seed):
    parts = parts_of("pathological", LABELS, clients, seed, classes_per_client=k)
    counts = np.array([np.bincount(LABELS[part], minlength=10) for part in parts])
    assert ((counts > 0).sum(1) == k).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    for label in np.flatnonzero(holders):
        shares = counts[:, label][counts[:, label] > 0]
        assert shares.sum() == 60
        assert shares.max() - shares.min() <= 1


def histogram(labels, parts):
    return np.array(
        [np.bincount(labels[part], minlength=labels.max() + 1) for part in parts]
    )


@pytest.mark.parametrize(("kind", "few"), [("non_iid_1", 4), ("non_iid_2", 2)])
def test_pfedlas_partitions_pool_an_official_split_and_divide_each_client_alike(
    kind, few
):
    toy = source(np.arange(9_000) % 10, is_train=np.arange(9_000) < 7_000)
    partition = make(toy, kind, clients=12, seed=4)
    wanted = {"clients": 12, "classes_per_client": few, "samples_per_client": 90}
    wanted |= {"splits": [0.56, 0.14, 0.3]}
    assert partition.params == wanted | (
        {"dominance": 0.5} if kind == "non_iid_2" else {}
    )
    if kind == "non_iid_2":
        whole = make(toy, kind, clients=12, dominance=1)
        assert isinstance(whole.params["dominance"], float)
    for splits in partition.indices.values():
        assert [len(splits[name]) for name in SPLITS] == [50, 13, 27]
    assert any(
        (splits["train"] >= 7_000).any() for splits in partition.indices.values()
    )


OWNER = np.repeat([0, 1, 2], [300, 200, 100])


def test_what_cannot_be_dealt_is_refused():
    for kind in PARTITIONS.own:
        options = {field.name for field in fields(PARTITIONS[kind])}
        for option, value in forbidden(PARTITIONS[kind]):
            if option not in options:
                continue
            clients = None if PARTITIONS[kind].natural else 3
            with refuses(option):
                make(source(owner=OWNER), kind, clients=clients, **{option: value})
    few = {"samples_per_client": 40, "classes_per_client": 2, "dominance": 1.0}
    few, two = {"kind": "non_iid_2", **few}, np.array([0, 1, 1, 1, 1])
    classes, natural = {"kind": "pathological", "classes_per_client": 11}, "natural"
    dirichlet = {"kind": "dirichlet", "alpha": 0.001}
    for case, message in (
        (dirichlet | {"labels": LABELS[:100], "clients": 10}, r"=0\.001.*larger alpha"),
        (dirichlet | {"alpha": 1.0, "clients": 61}, "60"),
        (few | {"classes_per_client": 11}, "classes_per_client.*10.*11"),
        (few | {"samples_per_client": 9, "dominance": 0.5}, r"per_client.*10.*9"),
        (
            few | {"clients": 2, "samples_per_client": 61, "classes_per_client": 1},
            r"class \d.*61.*60",
        ),
        (classes, "classes_per_client.*10.*11"),
        (
            classes | {"labels": two, "clients": 4, "classes_per_client": 2},
            "class 0.*4.*1",
        ),
        ({"kind": "iid", "clients": 601}, "600"),
        ({"kind": "iid", "clients": 0}, "clients.*got 0"),
        (
            {"kind": natural, "labels": LABELS[:3], "owner": np.array([0, 0, 2])},
            r"samples.*\bb\b",
        ),
    ):
        with refuses(message):
            parts_of(**({"labels": LABELS, "clients": case.get("clients", 5)} | case))
    owned, one_tested = {"owner": domains()}, {"is_train": np.arange(600) != 7}
    small = domains((580, 20))
    uneven = {"labels": np.minimum(LABELS, 9 * (1 - small)), "owner": small}
    for case, kind, options, message in (
        ({}, "natural", {}, "natural.*dirichlet, dirichlet"),
        ({"owner": OWNER}, "natural", {"clients": 2}, r"clients.*\b3\b"),
        ({}, "iid", {}, "clients.*'iid'"),
        ({}, "dirichlt", {"clients": 3}, "'dirichlet'"),
        ({}, "iid", {"clients": 3, "alpha": 1}, r"alpha.*'iid'.*none"),
        ({}, "dirichlet", {"clients": 3, "alfa": 1}, "alfa.*options: alpha"),
        ({}, "numpy:arange", {"clients": 3}, "'numpy:arange'"),
        ({}, "iid", {"clients": 300}, "got 2 at 'client_000'"),
        (one_tested, "iid", {"clients": 2}, "official test"),
        ({}, "natural_dirichlet", {}, "natural clients"),
        (owned, "natural_dirichlet", {"clients": 4}, "multiple.*3.*4"),
        (owned, "natural_dirichlet", {"clients": 33}, r"'site 2'.*10.*11"),
        (
            uneven,
            "natural_dirichlet",
            {"clients": 4, "alpha": 1e-3},
            r"'site 1': each client.*at least 10",
        ),
    ):
        with refuses(message):
            make(source(**case), kind, **options)


def domains(sizes=(300, 200, 100)):
    return np.repeat(np.arange(len(sizes)), sizes)[
        np.random.default_rng(0).permutation(sum(sizes))
    ]


def test_feature_and_label_skew_skews_labels_and_caps_sizes():
    owner = domains((400, 200))
    deals = [
        parts_of("natural_dirichlet", LABELS, 8, seed, owner) for seed in range(20)
    ]
    counts = np.array(
        [[np.bincount(LABELS[part], minlength=10) for part in parts] for parts in deals]
    )
    sizes = counts.sum(2)
    assert sizes.min() >= general.WithAlpha.min_size
    # a client is dealt at most one class more once it has its even share: 100 of 400, and 50 of 200
    assert (sizes[:, :4] < 100 + counts[:, :4].max(2)).all()
    assert (sizes[:, 4:] < 50 + counts[:, 4:].max(2)).all()
    shares = counts[:, :4] / counts[:, :4].sum(1, keepdims=True)
    assert shares.std() > 0.15  # dealt evenly they would all be a quarter


def test_feature_and_label_skew_as_a_partition_with_an_official_test_set():
    owner, official = domains(), np.random.default_rng(1).random(600) > 0.3
    data = source(owner=owner, is_train=official)
    partition = make(data, "natural_dirichlet", clients=6, alpha=0.5, seed=3)
    assert partition.names == tuple(f"site {k // 2}_{k % 2}" for k in range(6))
    tested = np.zeros(3, int)
    for number, splits in enumerate(partition.indices.values()):
        assert set(owner[np.concatenate(list(splits.values()))]) == {number // 2}
        tested[number // 2] += len(splits["test"])
    assert tested.tolist() == np.bincount(owner[~official]).tolist()
    assert len(make(data, "natural_dirichlet", seed=3, alpha=9.0).names) == 15


def test_capped_dirichlet_bounds_sizes_from_both_sides():
    labels, alpha = np.repeat(np.arange(10), 600), {"alpha": 0.1}
    counts, plain = (
        np.array(
            [
                histogram(
                    labels, parts_of(kind, labels, 20, seed, min_size=least, **alpha)
                )
                for seed in range(10)
            ]
        )
        for kind, least in (("capped_dirichlet", None), ("dirichlet", 0))
    )
    sizes = counts.sum(2)
    assert sizes.min() >= 40
    # at most one class more once a client has its even share of 300
    assert (sizes < 300 + counts.max(2)).all()
    assert sizes.std() < 0.8 * plain.sum(2).std()
    # 60 samples: half of an even share of 12 is asked for
    few = parts_of("capped_dirichlet", labels[::100], 5, 0, alpha=5.0)
    assert min(map(len, few)) >= 6


def test_splits_of_a_client_do_not_depend_on_the_other_clients():
    small = make(source(LABELS[:500], OWNER[:500]), "natural", seed=3)
    whole = make(source(owner=OWNER), "natural", seed=3)
    assert np.array_equal(
        small.indices["site 0"]["train"], whole.indices["site 0"]["train"]
    )


@pytest.mark.parametrize(
    ("place", "row", "samples", "message"),
    [
        (None, 0, source(LABELS[:599]), r"599.*600.*began"),
        (None, 0, source(LABELS[::-1]), r"other samples.*began"),
        ("train", 0, source(), "sample twice"),
        (None, 600, source(), "599"),
    ],
)
def test_a_partition_fits_only_its_samples(place, row, samples, message):
    partition = make(source(), "iid", clients=2)
    others = partition.indices["client_1"]
    partition.indices["client_0"]["test"][0] = others[place][0] if place else row
    with refuses(message):
        partition.check(samples)


@pytest.mark.parametrize("kind", PARTITIONS.own)
def test_every_partition_says_what_it_is_and_divides_a_source(kind):
    """Of any member: a first line, options with a default, three splits a client, none of which shares a sample."""
    assert 20 < len(PARTITIONS.summaries()[kind]) < 120
    PARTITIONS[kind]()
    labels = np.arange(6000) % 10
    toy = source(
        labels, owner=np.arange(6000) // 2000, is_train=np.arange(6000) // 10 % 4 > 0
    )
    partition = make(toy, kind, clients=None if PARTITIONS[kind].natural else 5, seed=2)
    partition.check(toy)
    Partition.from_tree(partition.to_tree()).check(toy)
    assert partition.params["clients"] == len(partition.names)
    every = []
    for splits in partition.indices.values():
        rows = np.concatenate([splits[split] for split in SPLITS])
        assert len(np.unique(rows)) == len(rows)
        assert min(map(len, splits.values())) >= 1
        assert PARTITIONS[kind].pools or not toy.is_train[splits["test"]].any()
        every += rows.tolist()
    if kind in ("iid", "dirichlet", "pathological", "natural"):
        assert sorted(every) == list(range(6000))


@pytest.mark.parametrize("kind", PARTITIONS.own)
@pytest.mark.parametrize("official", [False, True])
def test_a_split_seed_keeps_clients_and_test_samples(kind, official):
    labels = np.arange(6000) % 10
    sides = np.arange(6000) // 10 % 4 > 0 if official else None
    toy = source(labels, owner=np.arange(6000) // 2000, is_train=sides)
    clients = None if PARTITIONS[kind].natural else 5
    plain = make(toy, kind, clients=clients)
    assert "split_seed" not in plain.params
    drawn = [
        make(toy, kind, clients=clients, seed=seed, split_seed=0) for seed in range(3)
    ]
    assert drawn[0].digest == plain.digest
    assert make(toy, kind, clients=clients, seed=1).digest != drawn[1].digest
    for name, first in plain.indices.items():
        rest = np.union1d(first["train"], first["validation"])
        validations = [partition.indices[name]["validation"] for partition in drawn]
        for partition, seed in zip(drawn, range(3), strict=True):
            partition.check(toy)
            assert (partition.seed, partition.params["split_seed"]) == (seed, 0)
            splits = partition.indices[name]
            assert np.array_equal(splits["test"], first["test"])
            both = np.sort(np.concatenate([splits["train"], splits["validation"]]))
            assert np.array_equal(both, rest)
            if kind.startswith("fedpft"):
                for split in SPLITS:
                    counts = np.bincount(labels[splits[split]], minlength=10)
                    wanted = np.bincount(labels[first[split]], minlength=10)
                    assert np.array_equal(counts, wanted)
        assert len({tuple(validation) for validation in validations}) == 3
        assert len(set(map(len, validations))) == 1
        # a sixth to a fifth of the rest is for validation, and so of what it shares with another draw
        shared = np.intersect1d(*validations[1:])
        assert len(shared) < len(validations[1]) / 2


@pytest.mark.parametrize("kind", ["iid", "natural"])
@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 6), min_size=40, max_size=80), seed=SEEDS)
def test_a_split_seed_keeps_groups_whole(kind, sizes, seed):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    toy = source(np.arange(len(groups)) % 2, owner=groups % 3, groups=groups)
    clients = 3 if kind == "iid" else None
    first, other = (
        make(toy, kind, clients=clients, seed=number, split_seed=0)
        for number in (0, seed)
    )
    for name, splits in other.indices.items():
        groups_of_clients = [set(groups[splits[split]]) for split in SPLITS]
        assert sum(map(len, groups_of_clients)) == len(set.union(*groups_of_clients))
        wanted = [set(groups[first.indices[name][split]]) for split in SPLITS]
        assert list(map(len, groups_of_clients)) == list(map(len, wanted))
        assert groups_of_clients[2] == wanted[2]
