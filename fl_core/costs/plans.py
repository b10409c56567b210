"""The cost of a plan in each round."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from fl_core.costs.layers import SIZES
from fl_core.errors import UsageError, check_known, listing
from fl_core.plan import LayerPlan


def plan_cost(
    plan: LayerPlan, costs: pd.DataFrame | Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return what a plan sends, and what it saves compared with sharing everything.

    Args:
        costs: rows of ``layer_cost`` (a report's frame), or {layer: {variant: value}}.

    Returns:
        A dict with these keys:

        * layers, layers_shared; parameters, parameters_shared: numbers
        * bytes_up, bytes_down: bytes that a client sends and receives each round
        * bytes_all: bytes that it would send if everything were shared
        * bytes_saved = bytes_all - bytes_up
        * saved = bytes_saved / bytes_all in [0, 1]. Higher means cheaper.
        * training_flops, training_flops_shared: FLOPs of one training sample, forward and backward, in all layers and
          in the shared ones. They are absent if the costs do not have them.

    Raises:
        UsageError: costs are missing, in whole or for a layer of the plan.
    """
    table = _by_layer(costs)
    for layer in plan.layers:
        check_known("layer with costs", layer.name, table)
        lacking = [name for name in SIZES if name not in table[layer.name]]
        if lacking:
            raise UsageError(
                f"costs of layer {layer.name!r} must have {listing(lacking)}. Measure layer_cost again."
            )

    def total(variant: str, shared: bool) -> float:
        chosen = plan.body if shared else plan.layers
        return sum(table[layer.name].get(variant, 0.0) for layer in chosen)

    sent, everything = total("bytes", True), total("bytes", False)
    result = {
        "layers": float(len(plan.layers)),
        "layers_shared": float(len(plan.shared)),
        "parameters": total("parameters", False),
        "parameters_shared": total("parameters", True),
        "bytes_up": sent,
        "bytes_down": sent,
        "bytes_all": everything,
        "bytes_saved": everything - sent,
        "saved": (everything - sent) / everything if everything else 0.0,
    }
    if any("forward_flops" in own for own in table.values()):
        for name, shared in (
            ("training_flops", False),
            ("training_flops_shared", True),
        ):
            result[name] = total("forward_flops", shared) + total(
                "backward_flops", shared
            )
    return result


def _by_layer(
    costs: pd.DataFrame | Mapping[str, Mapping[str, float]],
) -> dict[str, dict[str, float]]:
    if not isinstance(costs, pd.DataFrame):
        return {name: dict(own) for name, own in costs.items()}
    rows = costs[(costs["metric"] == "layer_cost") & costs["value"].notna()]
    if rows.empty:
        raise UsageError("The rows hold no layer_cost. Measure it first.")
    rows = rows.drop_duplicates(["layer", "variant", "value"])
    twice = rows[rows.duplicated(["layer", "variant"])]
    if len(twice):
        raise UsageError(
            f"The rows hold two costs of layer {twice['layer'].iloc[0]!r}. Keep those of one model."
        )
    table: dict[str, dict[str, float]] = {}
    for layer, variant, value in zip(
        rows["layer"], rows["variant"], rows["value"], strict=True
    ):
        table.setdefault(layer, {})[variant] = float(value)
    return table
