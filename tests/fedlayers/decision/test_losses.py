"""The losses of one seed: each sample of validation has the loss of a fit on the other half."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedlayers.decision.files import _mixed
from fedlayers.decision.losses import Predictor, SeedLosses
from fl_core.config import RunConfig
from fl_core.run import runner
from fl_core.training import evaluate


@pytest.fixture(scope="module")
def losses():
    return SeedLosses(runner.assemble(RunConfig(dataset="heart")))


def test_validation_losses_are_cross_fitted_and_test_losses_are_not(losses):
    """The reference fits each half by itself, on the samples of the other one."""
    draws = torch.Generator().manual_seed(0)

    def outputs(client, x):
        return 3 * torch.randn(len(x), 5, generator=draws).double()

    one = losses.predictor("one", outputs)
    sets = {}
    for split in ("validation", "test"):
        names = [*losses.labels[split]]
        y = torch.cat([losses.labels[split][name] for name in names])
        base = torch.cat(
            [
                losses.bases[name].expand(len(losses.labels[split][name]), -1)
                for name in names
            ]
        )
        logits = torch.cat([one.outputs[split][name] for name in names])
        sets[split] = logits, y, base
    logits, y, base = sets["validation"]
    weights = torch.tensor(losses.samples["validation"]["weight"].to_numpy(float))
    half = torch.from_numpy(np.concatenate([*losses.dealt.values()]))
    assert {*half.tolist()} == {0, 1}
    wanted = torch.empty(len(y), dtype=torch.float64)
    for k in (0, 1):
        own, other = half == k, half != k
        heat, share = evaluate.fit(logits[other], y[other], weights[other], base[other])
        softened = logits[own] / heat + share * base[own]
        wanted[own] = cross_entropy(softened, y[own], reduction="none")
    got = losses.losses(one, "validation")
    torch.testing.assert_close(torch.cat([*got.values()]), wanted)
    heat, share = evaluate.fit(logits, y, weights, base)
    logits, y, base = sets["test"]
    wanted = cross_entropy(logits / heat + share * base, y, reduction="none")
    got = losses.losses(one, "test")
    torch.testing.assert_close(torch.cat([*got.values()]), wanted)


def test_without_a_second_half_there_is_one_fit(losses, monkeypatch):
    """Its temperature is at least 1."""
    draws = torch.Generator().manual_seed(1)
    right = losses.predictor(
        "right",
        lambda client, x: torch.randn(len(x), 5, generator=draws).double(),
    )
    for split, labels in losses.labels.items():
        for name, y in labels.items():
            right.outputs[split][name][torch.arange(len(y)), y] += 0.3
            right.outputs[split][name].mul_(0.1)
    assert losses.calibration(right)[0] < 1
    monkeypatch.setitem(vars(losses), "halves", None)
    assert losses.calibration(right)[0] == 1.0
    assert losses.calibration(right, 1) == losses.calibration(right)


def test_a_fallback_predicts_some_clients_by_local_training():
    """Of its first seed, after its own amount of fine-tuning. A client without samples has no outputs."""

    def predictor(value, **sets):
        outputs = {
            split: {name: torch.full((2,), value) for name in names}
            for split, names in sets.items()
        }
        return Predictor(str(value), outputs)

    way = predictor(1.0, validation="abc", test="bc")
    local, other = (
        predictor(value, validation="abc", test="bc") for value in (2.0, 3.0)
    )
    runs = {
        7: SimpleNamespace(tuned={"few": local}),
        8: SimpleNamespace(tuned={"few": other}),
    }
    trained = SimpleNamespace(
        question=SimpleNamespace(seeds=(7, 8)),
        runs={"local": runs},
        tuning={"local": "few"},
    )
    mixed = _mixed(trained, way, ("a", "c"))
    values = {
        split: {name: float(outputs[0]) for name, outputs in by_client.items()}
        for split, by_client in mixed.outputs.items()
    }
    assert values == {
        "validation": {"a": 2.0, "b": 1.0, "c": 2.0},
        "test": {"b": 1.0, "c": 2.0},
    }
