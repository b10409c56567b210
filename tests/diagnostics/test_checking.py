"""What cannot be measured is refused by name, before anything is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diagnostics import diagnosis
from diagnostics.measure import diagnose
from fl_core.errors import UsageError

X, Y = (
    torch.randn(40, 4, generator=torch.Generator().manual_seed(0)),
    torch.arange(40) % 3,
)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


class Block(nn.Module):
    """A layer whose activation is computed anew in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 8), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(
            lambda z: self.layer(z).relu(), x, use_reentrant=self.reentrant
        )  # type: ignore[no-any-return]


CASES: dict[str, tuple[Any, Any, str]] = {
    "integers": (
        model(),
        {"north": (X, Y), "south": (X.long(), Y)},
        r"client 'south', int64 \[4\] .*'0', a Linear, .*int64 \[2, 4\].*float32: x\.float\(\)",
    ),
    "booleans": (model(), (X > 0, Y), r"'client_0', bool \[4\].*x\.float\(\)"),
    "too wide": (
        [model(), model()],
        [(X, Y), (torch.randn(9, 5), Y[:9])],
        r"^Sequential .*'client_1', float32 \[5\] .*'0', a Linear, .*float32 \[2, 5\]: mat1",
    ),
    "a width amid": (
        nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(9, 3))),
        (X, Y),
        r"'1\.1', a Linear.*\[2, 8\]",
    ),
    "a function": (model().forward, (X, Y), "'forward', a method"),
    "a function among models": (
        [model(), torch.relu],
        (X, Y),
        "'relu', a builtin_function_or_method",
    ),
    "a class": (nn.Linear, (X, Y), r"Linear\(\.\.\.\)"),
    "a lazy module": (nn.Sequential(nn.LazyLinear(3)), (X, Y), "'0.weight'.*shape"),
    "a reentrant checkpoint": (
        nn.Sequential(Block(reentrant=True), nn.Linear(8, 3)),
        (X, Y),
        "use_reentrant=False",
    ),
}


@pytest.fixture
def never_measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def fail(*given: Any, **named: Any) -> None:
        raise AssertionError("it was measured all the same")

    monkeypatch.setattr(diagnosis.passes, "one_pass", fail)
    return fail


def hooks(models: Any) -> list[int]:
    modules = models.modules() if isinstance(models, nn.Module) else ()
    return [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("never_measured")
def test_what_cannot_be_measured_is_refused_by_name(case: str) -> None:
    models, data, said = CASES[case]
    before = hooks(models)
    with pytest.raises(UsageError, match=said) as caught:
        diagnose(models, data, ["grad_norm"], progress=False)
    assert "\n" not in str(caught.value)
    assert hooks(models) == before


@pytest.mark.parametrize(
    "metric", ["grad_norm", "grad_noise", "hessian_trace", "hessian_spectrum"]
)
@pytest.mark.parametrize("n", [3, 40])
def test_targets_and_outputs_of_numbers_are_one_a_sample(metric: str, n: int) -> None:
    """Else each output would be held against every target, or an output against the target of another sample."""
    one, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), X[:n]
    y = x.sum(1)
    assert (
        diagnose(one, (x, y), [metric], loss="mse", progress=False).frame["status"]
        == "ok"
    ).all()
    for wrong, targets in ((model(), y), (model(), Y[:n])):
        with pytest.raises(UsageError, match=r"\[n, 1\]"):
            diagnose(wrong, (x, targets), [metric], loss="mse", progress=False)


@pytest.mark.parametrize(
    ("dtype", "loss"),
    [
        (torch.int32, "cross_entropy"),
        (torch.bool, "cross_entropy"),
        (torch.uint8, "focal"),
    ],
)
def test_labels_may_be_integers_of_any_type(dtype: torch.dtype, loss: str) -> None:
    metrics = ["grad_norm", "grad_noise", "hessian_trace", "linear_probe"]
    network, labels = model(), Y.clamp(max=1)
    expected, found = (
        diagnose(network, (X, y), metrics, loss=loss, progress=False).frame
        for y in (labels, labels.to(dtype))
    )
    assert found.equals(expected)


def test_a_checkpoint_of_the_other_kind_and_metrics_without_gradients_are_fine() -> (
    None
):
    two = [
        nn.Sequential(Block(reentrant=False), nn.Linear(8, 3)),
        nn.Sequential(Block(reentrant=True), nn.Linear(8, 3)),
    ]
    assert (
        diagnose(two[0], (X, Y), ["grad_norm"], progress=False).frame["status"] == "ok"
    ).all()
    assert (
        diagnose(two, (X, Y), ["cka"], progress=False).frame["status"] == "ok"
    ).all()
