"""Diagnostics on a model of texts: token ids in, against dense references in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diagnostics.measure import diagnose
from diagnostics.metrics.base import METRICS
from fl_core import models
from fl_core.tokens import PAD, TokenShape

SHAPE = TokenShape((7,), 12)
LAYERS = ["embedding", "attention", "fc1", "fc2"]


def model(seed: int = 0) -> nn.Module:
    return models.build(
        "text_transformer", SHAPE, 3, seed=seed, options={"width": 4, "hidden": 6}
    ).double()


def samples(n: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    ids = models.example(SHAPE, n)
    for row in range(n):
        ids[row, 3 + row % 5 :] = PAD
    return ids, torch.arange(n) % 3


def gradients(
    net: nn.Module, ids: torch.Tensor, y: torch.Tensor
) -> dict[str, torch.Tensor]:
    loss = nn.functional.cross_entropy(net(ids), y)
    return dict(
        zip(
            dict(net.named_parameters()),
            torch.autograd.grad(loss, list(net.parameters())),
            strict=True,
        )
    )


def in_layer(name: str, layer: str) -> bool:
    return name.startswith(f"{layer}.")


def found(metric: str, variant: str) -> dict[str, float]:
    frame = diagnose(model(), samples(), metrics=[metric], progress=False).frame
    assert set(frame.status) == {"ok"}
    frame = frame[(frame.variant == variant) & (frame.client == "client_0")]
    return dict(zip(frame.layer, frame.value, strict=True))


@pytest.mark.parametrize(
    "metric",
    sorted(
        set(METRICS) - {"bn_scale", "update_magnitude", "cca", "output_disagreement"}
    ),
)
def test_every_metric_has_a_value_for_every_layer(metric: str) -> None:
    ids, y = samples(40)
    frame = diagnose(
        {"a": model(), "b": model(1)},
        {"a": (ids, y), "b": (ids[:30], y[:30])},
        metrics=[metric],
    ).frame
    assert set(frame.layer) == set(LAYERS)
    assert set(frame.status) == {"ok"}
    assert frame.value.notna().all()


def test_noise_is_the_variance_of_the_samples_own_gradients() -> None:
    net, (ids, y) = model(), samples()
    each = [gradients(net, ids[k : k + 1], y[k : k + 1]) for k in range(len(y))]
    whole = gradients(net, ids, y)
    wanted = {}
    for layer in LAYERS:
        weights = [
            name for name in whole if in_layer(name, layer) and name.endswith("weight")
        ]
        spread = sum(
            float((own[name] - whole[name]).square().sum())
            for own in each
            for name in weights
        )
        wanted[layer] = spread / (len(y) - 1)
    assert found("grad_noise", "trace") == pytest.approx(wanted, rel=1e-10)


def test_sensitivity_of_the_tables_counts_the_rows_that_are_there() -> None:
    net, (ids, y) = model(), samples()
    grads = gradients(net, ids, y)
    own = {name: parameter.detach() for name, parameter in net.named_parameters()}
    raw = {}
    for layer in LAYERS:
        total = count = 0.0
        for name, grad in grads.items():
            if in_layer(name, layer) and name.endswith("weight"):
                total += float((own[name] * grad).square().sum())
                rows = (
                    int(grad.abs().sum(1).gt(0).sum())
                    if layer == "embedding"
                    else len(grad)
                )
                count += rows * grad.shape[1]
        raw[layer] = total / count
    sums = (
        torch.tensor([raw[layer] for layer in LAYERS], dtype=torch.float64).cumsum(0)
        / raw["embedding"]
    )
    wanted = dict(zip(LAYERS, sums.tolist(), strict=True))
    # the tokens of the texts, and as many places as the longest has
    assert int(grads["embedding.position.weight"].abs().sum(1).gt(0).sum()) == int(
        (ids != PAD).sum(1).max()
    )
    assert found("federation_sensitivity", "after") == pytest.approx(wanted, rel=1e-10)


def test_trace_is_that_of_the_dense_hessian_within_its_error() -> None:
    net, (ids, y) = model(), samples()
    own = {name: parameter.detach() for name, parameter in net.named_parameters()}
    frame = diagnose(net, (ids, y), metrics=["hessian_trace"], progress=False).frame
    told = frame[frame.variant == "absolute"].set_index("layer")
    for layer in LAYERS:
        chosen = {name: value for name, value in own.items() if in_layer(name, layer)}

        def loss(
            *values: torch.Tensor, names: tuple[str, ...] = tuple(chosen)
        ) -> torch.Tensor:
            params = own | dict(zip(names, values, strict=True))
            return nn.functional.cross_entropy(
                torch.func.functional_call(net, params, (ids,)), y
            )

        blocks = torch.autograd.functional.hessian(loss, tuple(chosen.values()))
        trace = sum(
            float(blocks[k][k].reshape(v.numel(), -1).trace())
            for k, v in enumerate(chosen.values())
        )
        exact = told.estimator[layer] == "exact"
        assert exact == (layer in ("fc1", "fc2"))  # before them lies a softmax
        assert told.value[layer] == pytest.approx(
            trace, rel=1e-9, abs=0 if exact else 4 * told.stderr[layer]
        )
