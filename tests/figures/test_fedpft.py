"""FedPFT: what is sent is counted right, and features pass the prompts asked for."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from figures import items, training
from figures.fedpft import apart, insides as fedpft
from fl_core.models.extended import PROMPTS, Prompted, Transform
from fl_core.seeds import torch_seeded
from tests.diagnostics.made import parted

pytestmark = pytest.mark.filterwarnings("ignore:client")


def test_modules_have_the_published_numbers_and_the_message_is_their_sum(
    tmp_path,
):
    file, y = str(tmp_path / "hundred.npz"), np.arange(600) % 100
    x, names = np.zeros((600, 32, 32, 3), np.uint8), np.arange(100).astype(str)
    np.savez(file, x=x, y=y, classes=names)
    item = items.find("fedpft.table10")
    path = tmp_path / "rows"
    runs = {name: config.with_keys(dataset=file) for name, config in item.runs.items()}
    training.train(replace(item, runs=runs), path)
    frame = item.read(path)[1]
    counted = frame.pivot(index=["run", "layer"], columns="metric", values="value")
    states = {
        "extractor": 1_235_401,
        "transform": 263_168,
        "classifier": 25_700,
        "projection": 32_896,
    }
    for part, size in states.items():
        assert counted.loc[("resnet8.fedpft", part), "numbers"] == size
    assert counted.loc[("resnet8.fedpft", "extractor"), "parameters"] == 1_232_704
    assert counted.loc[("resnet8.fedpft", ""), "numbers_sent"] == sum(states.values())
    assert counted.loc[("resnet10.fedavg", ""), "numbers_sent"] == 4_911_564 + 51_300
    stored = item.read(item.path())[1]
    same = ["run", "layer", "metric", "value"]
    pd.testing.assert_frame_equal(
        stored[same], frame[same]
    )  # CIFAR-100's sizes, with whatever images


def prompted():
    with torch_seeded(0):
        tokens = {
            name: torch.randn(k, 8) for name, k in zip(PROMPTS, (2, 5), strict=True)
        }
        return Prompted(nn.Linear(3, 8), nn.Linear(8, 4), Transform(8), tokens, True)


def test_the_classifier_takes_in_what_passed_the_prompts_asked_for():
    model, x = prompted(), torch.randn(6, 3)
    for name in PROMPTS:
        wanted = model.head(model.transform(model.body(x), getattr(model, name)))
        torch.testing.assert_close(fedpft.behind(model, name)(x), wanted)
    assert model.contrast_prompts is not None  # the model itself stays as it was
    kinds = dict(fedpft.by_prompts({"a": model}, fedpft.FEDPFT))
    assert list(kinds) == list(PROMPTS)
    assert list(dict(fedpft.by_prompts({"a": model}, "personal_head"))) == [PROMPTS[0]]
    assert list(dict(fedpft.by_prompts({"a": nn.Linear(3, 4)}, "fedavg"))) == [""]


def across_by_definition(pooled):
    """The silhouette across clients, sample by sample."""
    scores = []
    for x, kind, client in zip(pooled.x, pooled.classes, pooled.clients, strict=True):
        means = {}
        for other in set(pooled.classes):
            of_other = (pooled.classes == other) & (pooled.clients != client)
            if of_other.any():
                gaps = pooled.x[of_other] - x
                means[other] = np.linalg.norm(gaps, axis=1).mean()
        if kind not in means or len(means) < 2:
            continue
        a = means.pop(kind)
        b = min(means.values())
        scores.append((b - a) / max(a, b))
    return np.mean(scores)


def test_classes_within_a_client_and_across_clients_are_two_things():
    pooled = parted()
    assert apart.within(pooled) > 0.7
    assert apart.across(pooled) > 0.7
    np.testing.assert_allclose(apart.across(pooled), across_by_definition(pooled))
    moved = parted()  # client b's classes stand where other classes of client a stand
    moved.x[moved.clients == "b"] = np.roll(moved.x[moved.clients == "b"], 1, axis=1)
    assert apart.within(moved) > 0.7
    assert apart.across(moved) < -0.3
    np.testing.assert_allclose(apart.across(moved), across_by_definition(moved))


def test_across_clients_counts_only_classes_that_others_have():
    pooled = parted()
    pooled.classes[pooled.clients == "b"] = "p"
    np.testing.assert_allclose(apart.across(pooled), across_by_definition(pooled))
    pooled.clients[:] = "a"
    assert apart.across(pooled) is None
    pooled.classes[:] = "p"
    assert apart.within(pooled) is None


def test_without_contrast_accuracy_is_flat_from_round_32_on():
    frame = pd.read_parquet(items.HERE / "rows" / "fedpft.longer.parquet")
    own = frame.query(
        "run == 'no_contrast' and metric == 'origin_accuracy' and variant == ''"
    )
    means = own.groupby("round")["value"].mean()
    assert means.loc[32:].between(0.505, 0.545).all()
    assert means.loc[20] < 0.49
