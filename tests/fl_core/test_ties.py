"""What a site keeps does not leave it under another name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedlayers as fl
from fl_core.layers import layers_of
from fl_core.plan import LayerPlan


class Tied(nn.Module):
    """An embedding whose weights are those of the output, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(9, 4)
        self.body = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 9, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.body(self.wte(x)).mean(1))


class Viewed(nn.Module):
    """Two parameters on one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = nn.Parameter(self.first.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


class Repeated(nn.Module):
    """A module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.a = nn.Linear(4, 4)
        self.b = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.body(x)))


IDS = torch.ones(2, 3, dtype=torch.int64)
NUMBERS = torch.ones(2, 4)


def exclude(
    state: dict[str, torch.Tensor], names: list[str]
) -> dict[str, torch.Tensor]:
    """Return what a filter such as NVFlare's ExcludeVars lets pass."""
    return {name: tensor for name, tensor in state.items() if name not in names}


@pytest.mark.parametrize(
    ("model", "x", "shared"), [(Tied(), IDS, "body"), (Repeated(), NUMBERS, "body")]
)
def test_negative_lists_have_all_names_of_a_storage(model, x, shared):
    layers = layers_of(model, x)
    plan = LayerPlan(layers, (shared,))
    stored = LayerPlan.from_json(plan.to_json())
    assert stored == plan
    pointers = {
        tensor.data_ptr()
        for name, tensor in model.state_dict().items()
        if name not in ("body.weight", "body.bias")
    }
    for plan_form in (plan, stored):
        excluded = plan_form.to("nvflare")["args"]["exclude_vars"]
        assert sorted(excluded) == sorted({*excluded})
        assert excluded == plan_form.to("names")["local"]["tensors"]
        sent = exclude(model.state_dict(), excluded)
        assert sent.keys() == {"body.weight", "body.bias"}
        assert not pointers & {tensor.data_ptr() for tensor in sent.values()}


def test_the_filter_of_nvflare_keeps_a_tied_tensor():
    module = pytest.importorskip("nvflare.app_common.filters.exclude_vars")
    model = Tied()
    plan = LayerPlan(layers_of(model, IDS), ("body",))
    names = plan.to("nvflare")["args"]["exclude_vars"]
    filtered = module.ExcludeVars(exclude_vars=names)
    assert {"wte.weight", "lm_head.weight"} <= set(filtered.exclude_vars)


def test_a_plan_that_splits_a_storage_is_refused():
    layers = layers_of(Viewed(), NUMBERS)
    plan = LayerPlan(layers, ("first",))
    for form in ("names", "nvflare"):
        with pytest.raises(fl.UsageError, match="tied tensors must be shared or kept"):
            plan.to(form)
    whole = LayerPlan(layers, ("first", "last")).to("names")
    assert whole["local"]["tensors"] == []
    none = LayerPlan(layers, ()).to("names")
    assert set(none["local"]["tensors"]) == set(Viewed().state_dict())


def test_the_plan_of_a_run_knows_the_names():
    data = {name: (torch.randint(1, 9, (30, 3)), torch.arange(30) % 9) for name in "ab"}
    result = fl.run(
        data=data, model=Tied(), algorithm="fedper", plan=None, rounds=1, patience=0, progress=False
    )  # fmt: skip
    excluded = result.plan.with_shared("body").to("nvflare")["args"]["exclude_vars"]
    assert set(excluded) == {"wte.weight", "lm_head.weight"}
