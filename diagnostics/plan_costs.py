"""Costs of a plan in each round, and costs of the rounds of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import pandas as pd

from fl_core import runner
from fl_core.costs import round_costs
from fl_core.errors import UsageError, check_known, listing
from fl_core.plan import LayerPlan

from .layer_flops import SIZES

# --- plans -----------------------------------------------------------------------------------------------------


def plan_cost(plan: LayerPlan, costs: pd.DataFrame | Mapping[str, Mapping[str, float]]) -> dict[str, float]:
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
            raise UsageError(f"the costs of layer {layer.name!r} lack {listing(lacking)}")

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
        for name, shared in (("training_flops", False), ("training_flops_shared", True)):
            result[name] = total("forward_flops", shared) + total("backward_flops", shared)
    return result


def _by_layer(costs: pd.DataFrame | Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    if not isinstance(costs, pd.DataFrame):
        return {name: dict(own) for name, own in costs.items()}
    rows = costs[(costs["metric"] == "layer_cost") & costs["value"].notna()]
    if rows.empty:
        raise UsageError("The rows hold no layer_cost. Measure it first.")
    rows = rows.drop_duplicates(["layer", "variant", "value"])
    twice = rows[rows.duplicated(["layer", "variant"])]
    if len(twice):
        raise UsageError(f"The rows hold two costs of layer {twice['layer'].iloc[0]!r}. Keep those of one model.")
    table: dict[str, dict[str, float]] = {}
    for layer, variant, value in zip(rows["layer"], rows["variant"], rows["value"], strict=True):
        table.setdefault(layer, {})[variant] = float(value)
    return table


# --- rounds ----------------------------------------------------------------------------------------------------


def cost_steps(tasks: Mapping[str, runner.Task]) -> pd.DataFrame:
    """Compute the cost of each round of several runs before anything is trained.

    The columns are run and round (from 1), then the sums over all clients: naive [scalars x batches], flops [FLOP] and
    moved [bytes]. See :class:`fl_core.costs.TrainingCost`. Every client takes part in every round, as in the
    layer-scheduling paper's Table 4 and Fig. 7.

    Args:
        tasks: name of the run -> its task from :func:`fl_core.runner.assemble`.

    Raises:
        UsageError: an algorithm chooses its plan while it trains, or as :func:`fl_core.costs.round_costs`.
    """
    lines = []
    for name, task in tasks.items():
        algorithm = task.algorithm(task.plan)
        if algorithm.decides:
            raise UsageError(f"run {name!r} must have a plan to compute its costs; got none. Give its task a plan.")
        workspace = runner.client_runner_of(task, {}).workspace
        each = round_costs(algorithm, workspace, task.data.shape, int(task.config.batch_size or 1))
        lines += [{"run": name, "round": k, **asdict(cost)} for k, cost in enumerate(each, 1)]
    return pd.DataFrame(lines, columns=["run", "round", "naive", "flops", "moved"])
