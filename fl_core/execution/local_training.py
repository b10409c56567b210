"""Local training: the training loop of every algorithm.

Clients of small perceptrons may train together instead (:mod:`fl_core.execution.batched_clients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_core import seeds, tree
from fl_core.algorithms.base import Algorithm
from fl_core.errors import NonFiniteError, UsageError, check_known
from fl_core.layers import tensor_in_layer
from fl_core.training import optimizer_state
from fl_core.training.context import Context
from fl_core.training.phases import Observer, Phase, Training, batch_slices
from fl_core.training.steps import Steps
from fl_core.tree import Tree

if TYPE_CHECKING:
    from fl_core.data import Split
    from fl_core.training.workspace import Workspace

GATHERED = 1 << 26  # bytes of a client's data that may be copied in each epoch's order


def train(
    workspace: Workspace,
    algorithm: Algorithm,
    phase: Phase,
    source: Tree,
    split: Split,
    training: Training,
    ctx: Context,
    observers: Mapping[str, Callable[[], Observer]],
    kept: Tree | None = None,
) -> tuple[Tree, Tree]:
    """Run one phase from ``source`` on a client's training split.

    Batches are drawn from the stream (run seed, "batches", round, client, ``phase.stream``). Modules such as dropout
    draw from the stream "modules" with the same parts.

    Returns:
        The trained tree, and the optimiser's state as a tree (empty unless ``training.keep_optimizer``).

    Raises:
        NonFiniteError: a loss or a trained tensor is NaN or infinite; names algorithm, round, client, phase and step,
            and the layer whose weights are so, too.
        UsageError: a loss is no tensor of one number.
    """
    workspace.load(source, ctx.submodel)
    seed, parts = algorithm.task_info.seed, (ctx.round, ctx.client, phase.batch_stream)
    watching = {
        name: observers[check_known("observer", name, observers)]()
        for name in phase.observe
    }
    objective = _scalar(
        algorithm.method(phase.loss), f"{ctx.location(phase.name)}: {phase.loss}"
    )
    x, y = workspace.place(split.x), split.y.to(workspace.device)
    draws = seeds.torch_generator(seed, "batches", *parts)
    slices = batch_slices(len(y), training.batch_size, whole=workspace.couples)
    left = phase.length(len(slices))
    total, samples, taken = 0.0, 0, 0
    state: Tree = {}
    with (
        workspace.trains(phase.train) as names,
        seeds.torch_seeded(seeds.seed_of(seed, "modules", *parts)),
    ):
        params: list[Tensor] = [workspace.params[name] for name in names]
        if params and phase.epochs and slices:
            by_name = dict(zip(names, params, strict=True))
            optimizer = training.build(
                _parameter_groups(phase, by_name, training), *phase.rates
            )
            optimizer_state.restore(
                optimizer, names, params, optimizer_state.entries_of(kept or {}, phase)
            )
            seen, data, layers = (
                list(watching.values()),
                (x, y),
                algorithm.task_info.layers,
            )
            steps = Steps(
                phase,
                workspace,
                by_name,
                objective,
                optimizer,
                training,
                ctx,
                data,
                seed,
                seen,
                layers,
            )
            step = algorithm.method(phase.step) if phase.step else Steps.plain
            frozen = workspace.frozen_outputs(ctx.client, split.x, x)
            for _ in range(phase.epochs):
                for bx, by, ahead in _batches((x, y, frozen), slices[:left], draws):
                    if ahead is not None:
                        workspace.continue_from(bx, ahead)
                    step(steps, (bx, by), ctx)
                    steps.taken += 1
                left = max(0, left - len(slices))
                seen.clear()  # observers see the first epoch
            total, samples, taken = steps.loss, steps.samples, steps.taken
            if training.keep_optimizer:
                state = optimizer_state.to_tree(
                    optimizer_state.read(optimizer, names, params), phase
                )
    result = workspace.read()
    bad = tree.first_nonfinite(tree.select(result, phase.train), before=source)
    if bad is not None:
        tensor = tensor_in_layer(bad, algorithm.task_info.layers)
        raise NonFiniteError(
            f"{ctx.location(phase.name)}: {tensor} is not finite. Use a smaller lr."
        )
    ctx.observed.update(
        {name: observer.result() for name, observer in watching.items()}
    )
    ctx.work.update({f"{phase.name}/steps": taken, f"{phase.name}/samples": samples})
    if samples:
        ctx.work[f"{phase.name}/loss"] = total / samples
        ctx.work.update(
            {
                f"{phase.name}/loss/{name}": part / samples
                for name, part in ctx.parts.items()
            }
        )
    ctx.parts.clear()
    return result, state


def _scalar(loss: Callable[..., Any], name: str) -> Callable[..., Tensor]:
    """The loss unchanged, with an error if its value is not one number."""

    def objective(*args: Any) -> Tensor:
        value = loss(*args)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shown = (
                f"a tensor of shape {list(value.shape)}"
                if isinstance(value, Tensor)
                else repr(value)
            )
            raise UsageError(
                f"{name} must return a tensor of one number, for the whole batch; got {shown}."
            )
        return value

    return objective


def _batches(
    data: tuple[Tensor, Tensor, Tensor | None],
    slices: list[slice],
    draws: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """One epoch of samples, labels and further values per sample, in a new random order."""
    x, y, extra = data
    order = torch.randperm(len(y), generator=draws).to(y.device)
    x_at, y_at, extra_at = (
        _in_order(values, order) for values in (x, y, y if extra is None else extra)
    )
    for part in slices:
        yield x_at(part), y_at(part), None if extra is None else extra_at(part)


def _in_order(values: Tensor, order: Tensor) -> Callable[[slice], Tensor]:
    """A function from slices of the order to batches. Small data are ordered at once, for speed."""
    if values.nbytes > GATHERED:
        return lambda part: values[order[part]]
    ordered = values[order]
    return lambda part: ordered[part]


def _parameter_groups(
    phase: Phase, params: Mapping[str, Tensor], training: Training
) -> list[Tensor] | list[dict[str, Any]]:
    """The parameters for the optimiser, in groups if the phase has any."""
    if not phase.groups:
        return list(params.values())
    rest, groups = dict(params), []
    usual = training.lr if phase.lr is None else phase.lr
    for group in phase.groups:
        lr = usual / group.lr_divisor if group.lr is None else group.lr
        rates = {
            "lr": lr,
            "momentum": group.momentum,
            "weight_decay": group.weight_decay,
        }
        set_rates: dict[str, Any] = {
            key: value for key, value in rates.items() if value is not None
        }
        groups.append(
            set_rates
            | {"params": [rest.pop(name) for name in sorted(group.train & rest.keys())]}
        )
    return [
        group for group in (*groups, {"params": list(rest.values())}) if group["params"]
    ]
