"""Costs of the rounds of a run before it is trained: FLOPs of local training, and bytes sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache

import pandas as pd

from fl_core import tree
from fl_core.algorithms.base import Algorithm, Round
from fl_core.bounds import at_least, check_value
from fl_core.costs.flops import training_flops
from fl_core.costs.layers import SIZES
from fl_core.errors import UsageError, check_known, listing
from fl_core.plan import LayerPlan
from fl_core.task import Task
from fl_core.training.phases import batch_slices
from fl_core.training.workspace import Workspace


@dataclass(frozen=True)
class TrainingCost:
    """The cost of local training, over clients and batches of a round or of all rounds. Lower is cheaper.

    Attributes:
        naive: trained scalars, summed over batches. Table 4 of the layer-scheduling paper calls this FLOPs (Jang and
            Choi 2024). It ignores batch size, forward pass and errors passed back through frozen layers. A kernel's
            weight counts once although it is used at every position. It is proportional to the traffic.
        flops: floating-point operations, forward and backward, of every sample. See :mod:`fl_core.costs.flops`.
        moved: bytes of the model's tensors that the clients receive and send. Other traffic (a variate, a mask, a
            number for each layer) is in a run's rows ``bytes_down`` and ``bytes_up`` only. Models sent for evaluation
            are in the rows ``bytes_evaluation``.
    """

    naive: int
    flops: float
    moved: int


def round_costs(
    algorithm: Algorithm, workspace: Workspace, shape: tuple[int, ...], batch: int
) -> tuple[TrainingCost, ...]:
    """Return the cost of each round of a run with full participation (as in Jang and Choi's Table 4).

    Fine-tuning after the last round is not counted.

    Args:
        workspace: of the algorithm's own model. shape: of one sample. batch: samples per batch.

    Raises:
        UsageError: the number of rounds is unknown, a batch has no samples, the algorithm's traffic is only known in a
            run, or its steps take more than a gradient.
    """
    problem = algorithm.task_info
    own_steps = [phase.step for phase in algorithm.phases(Round(0), 0) if phase.step]
    if own_steps or not algorithm.static_traffic:
        raise UsageError(
            f"the cost of {algorithm.name} is only known from a run. Use its rows 'flops', 'bytes_down' and 'bytes_up'."
        )
    check_value("rounds", problem.rounds, at_least(1))
    check_value("batch", batch, at_least(1))
    sizes = {
        name: parameter.numel()
        for name, parameter in workspace.params.items()
        if parameter.requires_grad
    }

    @cache
    def numel(names: frozenset[str]) -> int:
        return sum(size for name, size in sizes.items() if name in names)

    @cache
    def n_bytes(names: frozenset[str]) -> int:
        return tree.n_bytes(tree.select(workspace.live, names))

    @cache
    def flops(train: frozenset[str], held: frozenset[str]) -> float:
        return training_flops(workspace, shape, train, held)

    def cost(rnd: Round) -> TrainingCost:
        steps: Counter[frozenset[str]] = Counter()
        samples: Counter[tuple[frozenset[str], frozenset[str]]] = Counter()
        moved = 0
        for client, n in enumerate(problem.n_train):
            held = algorithm.submodel(rnd, client)
            moved += n_bytes(algorithm.shared(rnd, client)) + n_bytes(
                algorithm.uploaded(rnd, client)
            )
            for phase in algorithm.phases(rnd, client):
                each = batch_slices(n, batch, workspace.couples)
                taken = phase.length(len(each))
                passes, rest = divmod(taken, len(each))
                steps[phase.train] += taken
                samples[phase.train, held] += passes * n + sum(
                    part.stop - part.start for part in each[:rest]
                )
        return TrainingCost(
            naive=sum(numel(train) * count for train, count in steps.items()),
            flops=math.fsum(flops(*case) * count for case, count in samples.items()),
            moved=moved,
        )

    return tuple(cost(Round(index)) for index in range(problem.rounds))


def cost_steps(tasks: Mapping[str, Task]) -> pd.DataFrame:
    """Compute the cost of each round of several runs before anything is trained.

    The columns are run and round (from 1), then the sums over all clients: naive [scalars x batches], flops [FLOP] and
    moved [bytes]. See :class:`TrainingCost`. Every client takes part in every round, as in the
    layer-scheduling paper's Table 4 and Fig. 7.

    Args:
        tasks: name of the run -> its task from :func:`fl_core.task.assemble`.

    Raises:
        UsageError: an algorithm chooses its plan while it trains, or as :func:`round_costs`.
    """
    lines = []
    for name, task in tasks.items():
        algorithm = task.algorithm(task.plan)
        if algorithm.decides:
            raise UsageError(
                f"run {name!r} must have a plan to compute its costs; got none. Give its task a plan."
            )
        workspace = task.client_runner().workspace
        each = round_costs(
            algorithm,
            workspace,
            task.data.shape,
            int(task.config.training.batch_size or 1),
        )
        lines += [
            {"run": name, "round": k, **asdict(cost)} for k, cost in enumerate(each, 1)
        ]
    return pd.DataFrame(lines, columns=["run", "round", "naive", "flops", "moved"])


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
