"""A number of NumPy is a number at the doors of runs and diagnoses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedlayers as fl
from fedlayers.decision.search import parse_search

NUMBERS = {
    "rounds": np.int64(1),
    "epochs": np.int32(2),
    "batch_size": np.int64(8),
    "seed": np.uint8(3),
    "patience": np.int64(0),
    "lr": np.float32(0.125),
    "weight_decay": np.float16(0.5),
    "participation": np.float64(0.5),
    "max_grad_norm": np.float32(1),
    "eval_every": np.int16(1),
}


@pytest.mark.parametrize("key", NUMBERS)
def test_a_configuration_has_python_s_numbers(key):
    value = NUMBERS[key]
    config = fl.RunConfig(**{key: value})
    stored = config.to_json()[key]
    assert stored == value.item()
    assert isinstance(stored, int | float)
    assert config == fl.RunConfig(**{key: value.item()})


def test_a_configuration_has_python_s_truth_values():
    config = fl.RunConfig(keep_optimizer=np.True_, amsgrad=np.bool_(False))
    assert config == fl.RunConfig(keep_optimizer=True, amsgrad=False)


def test_options_have_python_s_numbers():
    numpy_options = {
        "model_options": {"sizes": (np.int64(4), np.int64(3))},
        "loss_options": {"alpha": np.array([1.0, 2.0])},
        "options": {"mu": np.float32(0.5)},
    }
    config = fl.RunConfig(**numpy_options)
    assert config.model.model_options == {"sizes": (4, 3)}
    assert config.training.loss_options == {"alpha": [1.0, 2.0]}
    assert type(config.federation.options["mu"]) is float


def test_values_to_search_are_python_s_numbers():
    values = parse_search("lr", [np.float32(0.5), np.int64(1)])
    assert [type(value) for value in values] == [float, int]


def test_a_run_and_a_diagnosis_take_them():
    data = {name: (torch.randn(30, 5), torch.arange(30) % 3) for name in "ab"}
    result = fl.run(data=data, model=nn.Linear(5, 3), progress=False, **NUMBERS)
    assert len(result.scores)
    how = {"batch": np.int64(8), "seed": np.int64(1), "budget": np.float32(60)}
    frame = fl.diagnose(result.models, data, "grad_norm", progress=False, **how).frame
    assert (frame["seed"] == 1).all()


@pytest.mark.parametrize("value", [np.float32(1.5), np.bool_(True)])
def test_other_values_are_refused_as_before(value):
    with pytest.raises(fl.UsageError, match="rounds must be int"):
        fl.RunConfig(rounds=value)
