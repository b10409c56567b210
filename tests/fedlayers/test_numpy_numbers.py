"""A number of NumPy is a number at the doors of runs and diagnoses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedlayers as fl

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
    found = config.to_json()[key]
    assert found == value.item()
    assert isinstance(found, int | float)
    assert config == fl.RunConfig(**{key: value.item()})


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
