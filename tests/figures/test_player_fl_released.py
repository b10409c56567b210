"""The quantities of PLayer-FL's released code: a nuclear norm, the angle over shifts, and one batch."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics.measurement import ClientModel
from figures.player_fl.released import _direction, _draw, nuclear_norm
from fl_core.layers import layers_of
from fl_core.seeds import torch_generator
from tests.diagnostics.calls import call
from tests.diagnostics.dense import CE, block, images, loose, pair

HESSIAN, SENSITIVITY = (
    f"figures.player_fl.released:{name}"
    for name in ("hessian_trace", "federation_sensitivity")
)


def test_released_is_a_nuclear_norm_of_the_product_with_a_unit_vector():
    model, data = images(), pair(9, 2, 5, 5)
    layers = loose(model)
    client = [ClientModel("a", model, data, 9)]
    (row,) = call(HESSIAN, client, layers[2:3], loss=CE, batch=4, seed=3)
    assert row["estimator"] == "nuclear norm of H v(probes=1)"
    assert row["stderr"] is None
    assert row["n_params"] == 72
    weight = model.get_parameter("3.weight").detach()
    v = _direction(weight, torch_generator(3, "released probe", "3.weight"))
    assert float(v.norm()) == pytest.approx(1)
    product = (block(model, data, ("3.weight",)) @ v.reshape(-1)).reshape(weight.shape)
    norms = [np.linalg.norm(product[:, i].reshape(4, 9), "nuc") for i in range(2)]
    assert row["value"] == pytest.approx(np.mean(norms), rel=1e-10)


@pytest.mark.parametrize("shape", [(5,), (4, 3), (4, 2, 3, 3)])
def test_nuclear_norms(shape):
    x = torch.randn(shape, dtype=torch.float64)
    slices = [x] if x.ndim < 3 else list(x.transpose(0, 1))
    sums = [np.linalg.norm(matrix.reshape(len(x), -1), "nuc") for matrix in slices]
    assert nuclear_norm(x) == pytest.approx(np.mean(sums))
    assert math.isnan(nuclear_norm(x * math.nan))


def test_a_table_is_averaged_over_the_batch_before_the_product():
    model = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(6, 4)).double()
    client = ClientModel("a", model, (torch.randint(9, (5, 2)), torch.arange(5) % 4), 5)
    x, y = _draw(client, 3, 0)
    CE(model(x), y).backward()
    rows = call(SENSITIVITY, [client], layers_of(model, x), loss=CE, single_batch=3)
    importance = [row["value"] for row in rows if row["variant"] == "importance"]
    (w, g), (dense, slope) = (
        (model[k].weight.detach(), model[k].weight.grad) for k in (0, 2)
    )
    wanted = [w[x].mean(0) * g[x].mean(0), dense * slope]
    assert importance == pytest.approx([float(p.square().mean()) for p in wanted])
