"""Shares of the machine: what is counted, and that a job's row says what share its rounds reach."""

from functools import partial

import pytest
import torch

from benchmarks.machine import Steps
from benchmarks.operations import least
from fl_core.data import Split
from tests.made import mlp

SGD = partial(torch.optim.SGD, lr=0.1)


def steps(layer=""):
    return Steps(
        mlp(10, 6, 5), Split(torch.randn(20, 10), torch.arange(20) % 5), 8, SGD, layer
    )


@pytest.mark.parametrize(
    ("layer", "products"),
    [
        (
            "",
            60 + 30 + 60 + 2 * 30,
        ),  # forward, and backward without the gradient of the input
        ("2", 60 + 30 + 30),
        ("0", 60 + 30 + 60 + 30),
    ],
)
def test_a_pass_counts_its_matrix_products(layer, products):
    assert steps(layer).operations() == 20 * 2 * products


@pytest.mark.parametrize(
    ("layer", "share"), [("0", (60 + 30 + 60 + 30) / 210), ("2", (30 + 30) / 210)]
)
def test_what_a_layer_alone_cannot_save_begins_where_it_stands(layer, share):
    model = mlp(10, 6, 5)
    frozen, *others = model.parameters()
    frozen.requires_grad_(False)
    assert least(
        model, layer, torch.zeros(1, 10), torch.zeros(1, dtype=torch.long)
    ) == pytest.approx(share)
    assert not frozen.requires_grad
    assert all(parameter.requires_grad for parameter in others)
