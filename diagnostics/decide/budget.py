"""Costs of layers: bytes that a client uploads in a round, and FLOPs of training on one sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from torch import nn

from fl_core import tree
from fl_core.costs.layers import layer_bytes
from fl_core.errors import UsageError, listing
from fl_core.layers import Layer

COST = "layer_cost"
FLOAT = 4  # bytes of a float32
FLOPS = ("forward_flops", "backward_flops")


@dataclass(frozen=True)
class Costs:
    """A cost for each layer, all in one unit.

    Attributes:
        unit: ``bytes`` or ``flops``.
        basis: the source of the numbers, in words.
        values: layer -> its cost. A layer that is missing has an unknown cost.
    """

    unit: str
    basis: str
    values: dict[str, float]

    def layer_costs(self, layers: Sequence[Layer]) -> list[float]:
        """Return the costs of the given layers, in order.

        Raises:
            UsageError: the cost of a layer is unknown.
        """
        unknown = [layer.name for layer in layers if layer.name not in self.values]
        if unknown:
            way = "" if self.unit == "flops" else ", or pass the model"
            raise UsageError(f"The {self.unit} of {listing(unknown)} are not known. Measure {COST} first{way}.")
        return [self.values[layer.name] for layer in layers]

    def detail(self, layers: Sequence[Layer], shared: Sequence[str]) -> dict[str, Any]:
        """Return the costs as evidence, with their sums over the shared layers and over all.

        The result is empty if a cost is unknown.
        """
        if any(layer.name not in self.values for layer in layers):
            return {}
        values = {layer.name: self.values[layer.name] for layer in layers}
        return {
            "unit": self.unit,
            "basis": self.basis,
            "layers": values,
            "shared": sum(values[name] for name in shared),
            "all": sum(values.values()),
        }


def bytes_of(
    layers: Sequence[Layer],
    table: pd.DataFrame,
    model: nn.Module | None = None,
    recorded: Mapping[str, float] | None = None,
) -> Costs:
    """Return the bytes of each layer's tensors.

    A client that takes part uploads them in a round, and downloads them again. They are exact, buffers included, if
    they come from the model, from measured ``layer_cost``, or from ``recorded``. The latter is the result of
    :func:`layer_bytes` when the model was measured.

    Otherwise they are 4 bytes for each parameter that some row of the layer covers (``n_params``). That is complete if
    a metric of all parameters was measured, such as ``hessian_trace`` or ``cka``. Else it is weights without biases. It
    never includes buffers.
    """
    if model is not None:
        live = tree.named_tensors(model)
        absent = [name for layer in layers for name in layer.tensors if name not in live]
        if absent:
            raise UsageError(f"the model must be that of the rows; got one without {listing(absent, 4)}.")
        return Costs("bytes", "tensors of the model", layer_bytes(layers, model))
    measured = _sum_costs(layers, table, ("bytes",))
    if measured:
        return Costs("bytes", f"measured {COST}", measured)
    if recorded:
        return Costs("bytes", "tensors of the model", {name: float(size) for name, size in recorded.items()})
    counts = table[table["layer"] != ""].groupby("layer")["n_params"].max().dropna()
    sizes = {layer.name: 0.0 for layer in layers if not layer.parameters}
    sizes |= {layer.name: FLOAT * float(counts[layer.name]) for layer in layers if layer.name in counts.index}
    return Costs("bytes", f"{FLOAT} bytes a parameter, counted in the rows", sizes)


def flops_of(layers: Sequence[Layer], table: pd.DataFrame) -> Costs:
    """Return the FLOPs of each layer, forward and backward, for one training sample, from ``layer_cost``."""
    return Costs("flops", f"measured {COST}, forward and backward, one sample", _sum_costs(layers, table, FLOPS))


def _sum_costs(layers: Sequence[Layer], table: pd.DataFrame, variants: Sequence[str]) -> dict[str, float]:
    """Return the sum of some variants of ``layer_cost`` for each layer that has them all.

    The highest value of the clients counts.
    """
    rows = table[(table["metric"] == COST) & table["variant"].isin(variants) & table["value"].notna()]
    values = rows.groupby(["layer", "variant"])["value"].max()
    return {
        layer.name: float(sum(values[layer.name, variant] for variant in variants))
        for layer in layers
        if all((layer.name, variant) in values.index for variant in variants)
    }
