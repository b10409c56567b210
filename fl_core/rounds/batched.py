"""Joint training of clients of a small perceptron along a leading client axis, with each step's overhead shared.

The forward pass is written out, since ``torch.func.vmap`` takes more than twice the time (``benchmarks/README.md``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fl_core import seeds, tree
from fl_core.algorithms.base import Algorithm
from fl_core.rounds.clients import (
    ClientReply,
    ClientRequest,
    ClientRunner,
    Part,
    Parts,
    Serial,
)
from fl_core.training import loop
from fl_core.training.loop import MOMENTUM, Entries, batch_slices
from fl_core.training.losses import Loss
from fl_core.training.phases import Training
from fl_core.training.workspace import chain
from fl_core.tree import Tree

TOGETHER = 50
"""The most clients that train together. More bring no gain."""
LARGEST = 100_000
"""The number of parameters from which training one by one is faster on a CPU."""


def stacks(model: nn.Module, device: str, wanted: str = "auto") -> bool:
    """Return whether clients are trained together.

    The rule is fixed, since stacking changes the order of sums and so the rounding. It is True only for a chain of
    Linear, ReLU and Flatten on a CPU, without buffers or tied weights. See :func:`fl_core.training.workspace.chain`.

    Args:
        model: the model.
        device: name of the device, such as ``cpu``.
        wanted: ``auto`` also requires fewer than :data:`LARGEST` parameters. With ``on`` the size does not matter. With
            ``off`` the result is False.
    """
    if wanted == "off" or device.partition(":")[0] != "cpu":
        return False
    is_small = sum(param.numel() for param in model.parameters()) < LARGEST
    return (is_small or wanted == "on") and _perceptron(model) is not None


class BatchedClients(Serial):
    """Executor in this process that trains clients together if their phases allow it, otherwise one by one.

    A phase must minimise the common objective, the mean loss of a batch. No code may observe its steps or replace them.
    It must have no groups and no limit of steps, and the client the whole model. Clients whose phases have the same
    tensors, epochs and settings train together. The batches are the same as one by one. Results and optimiser states
    are the same up to rounding.
    """

    def __init__(self, client_runner: ClientRunner) -> None:
        super().__init__(client_runner)
        model = client_runner.workspace.model
        self._operations = _perceptron(model) or []
        first_module, *_ = chain(model) or [model]
        self._flat = isinstance(first_module, nn.Flatten)

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield the replies in the requests' order. Clients whose phases agree train together.

        An error in a request is raised in the place of its reply.
        """
        queue = map(self.client_runner.parts, requests)
        while group := list(islice(queue, TOGETHER)):
            for outcome in self._outcomes(group):
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome

    def _outcomes(self, generators: list[Parts]) -> list[ClientReply | Exception]:
        """Return the reply or the error of each request, in order.

        All requests are advanced to their next phase, which is trained, until they end.
        """
        runs = dict(enumerate(generators))
        outcomes: dict[int, ClientReply | Exception] = {}
        answers: dict[int, tuple[Tree, Tree] | None] = dict.fromkeys(runs)
        with tree.one_thread():
            while answers:
                parts: dict[int, Part] = {}
                for k, answer in answers.items():
                    try:
                        parts[k] = runs[k].send(answer)
                    except StopIteration as end:
                        outcomes[k] = end.value
                    except Exception as error:
                        outcomes[k] = error  # raised in the place of the reply
                results = self._together(parts)
                answers = {}
                for k, part in parts.items():
                    try:
                        answers[k] = results.get(k) or self.client_runner.phase(part)
                    except Exception as error:  # as above
                        outcomes[k] = error
        return [outcomes[k] for k in range(len(generators))]

    def _together(self, parts: dict[int, Part]) -> dict[int, tuple[Tree, Tree]]:
        """Train the phases that can be stacked, and return their results by request.

        A result is the trained tree and the optimiser's state to keep. Other phases, and
        one that agrees with no other, have none here. The caller trains them one by one.
        """
        groups: dict[tuple[Any, ...], list[int]] = {}
        for k, part in parts.items():
            if self._allows(part):
                phase = part.phase
                settings = phase.settings(self.client_runner.training)
                group_key = phase.train, phase.epochs, settings, _age(part)
                groups.setdefault(group_key, []).append(k)
        results: dict[int, tuple[Tree, Tree]] = {}
        for indices in groups.values():
            if len(indices) > 1:
                group_results = self._train([parts[k] for k in indices])
                results.update((indices[k], group_results[k]) for k in group_results)
        return results

    def _allows(self, part: Part) -> bool:
        phase = part.phase
        method = self.client_runner.algorithm.method(phase, "loss")
        is_plain = (
            not (phase.step or phase.observe or phase.groups) and phase.steps is None
        )
        is_common = getattr(method, "__func__", None) is Algorithm.loss
        x = self.client_runner.data.clients[part.ctx.client].train.x
        is_flat = bool(self._operations) and (self._flat or x.ndim == 2)
        submodel = part.ctx.submodel
        has_all = (
            submodel is None or submodel >= self.client_runner.workspace.live.keys()
        )
        return (
            is_plain
            and is_common
            and is_flat
            and has_all
            and len(x) > 0
            and phase.epochs > 0
        )

    def _train(self, parts: list[Part]) -> dict[int, tuple[Tree, Tree]]:
        """Return the trained trees and the optimiser's states to keep, by position.

        A client with non-finite numbers has none. It is then trained alone for its error.
        If no parameter of the phase can train, the result is empty.
        """
        workspace = self.client_runner.workspace
        phase = parts[0].phase
        training = phase.settings(self.client_runner.training)
        for part in parts:
            tree.check_same(workspace.live, part.source, "the model", "the tree")
        with workspace.trains(
            phase.train - self.client_runner.algorithm.task_info.frozen
        ) as names:
            if not names:
                return {}
        states = [loop.entries_of(part.optimizer, part.phase) for part in parts]
        batches = _Batches.draw(
            self.client_runner, parts, phase.epochs, training.batch_size
        )
        values = {
            name: torch.stack([parts[k].source[name] for k in batches.order])
            for name in workspace.live
        }
        state = _stack_states(
            [states[k] for k in batches.order], {name: values[name] for name in names}
        )
        losses = _descend(
            self._operations,
            values,
            state,
            batches,
            training,
            self.client_runner.criterion,
        )
        results: dict[int, tuple[Tree, Tree]] = {}
        is_finite = _finite(
            losses, *(value for name, value in values.items() if name in phase.train)
        )
        counts = (batches.weights > 0).sum((0, 2)).tolist()
        for position, k in enumerate(batches.order):
            if is_finite[position]:
                work = parts[k].ctx.work
                work[f"{phase.name}/steps"] = batches.steps[position]
                work[f"{phase.name}/samples"] = counts[position]
                work[f"{phase.name}/loss"] = float(losses[position]) / counts[position]
                optimizer_tree = Tree()
                if training.keep_optimizer:
                    client_entries = {
                        name: {key: value[position] for key, value in values.items()}
                        for name, values in state.items()
                    }
                    optimizer_tree = loop.to_tree(client_entries, parts[k].phase)
                results[k] = (
                    {n: v[position].clone() for n, v in values.items()},
                    optimizer_tree,
                )
        return results


def _finite(*values: Tensor) -> list[bool]:
    """Return for each client whether all its numbers in [clients, ...] are finite."""
    is_finite = [value.isfinite().reshape(len(value), -1).all(1) for value in values]
    return torch.stack(is_finite).all(0).tolist()


@dataclass(frozen=True)
class _Batches:
    """The batches of all clients in one phase, drawn as one by one.

    They are padded with samples of weight 0. Clients with the most steps come first.
    """

    order: list[int]  # positions of the clients
    steps: list[int]  # of each, descending
    x: Tensor  # all samples, [n, d]
    y: Tensor
    indices: Tensor  # [steps, clients, b], into x
    weights: Tensor  # [steps, clients, b]: one over the size of the batch

    @classmethod
    def draw(
        cls, client_runner: ClientRunner, parts: list[Part], epochs: int, batch: int
    ) -> _Batches:
        splits = [
            client_runner.data.clients[batch_slice.ctx.client].train
            for batch_slice in parts
        ]
        steps_per_epoch = [
            len(batch_slices(len(split), batch, whole=False)) for split in splits
        ]
        order = sorted(range(len(parts)), key=lambda k: -steps_per_epoch[k])
        size = min(batch, max(map(len, splits)))
        x = torch.cat([splits[k].x.flatten(1) for k in order])
        indices = torch.zeros(
            epochs, max(steps_per_epoch), len(parts), size, dtype=torch.int64
        )
        weights = torch.zeros(indices.shape, dtype=x.dtype)
        first_sample = 0
        for position, k in enumerate(order):
            ctx = parts[k].ctx
            n = len(splits[k])
            n_steps = steps_per_epoch[k]
            draws = seeds.torch_generator(
                client_runner.algorithm.task_info.seed,
                "batches",
                ctx.round,
                ctx.client,
                parts[k].phase.batch_stream,
            )
            sample_indices = torch.full((epochs, n_steps * size), first_sample)
            shares = torch.zeros(n_steps * size, dtype=x.dtype)
            for epoch in range(epochs):
                sample_indices[epoch, :n] = (
                    torch.randperm(n, generator=draws) + first_sample
                )
            for batch_slice in batch_slices(n, size, whole=False):
                shares[batch_slice] = 1 / (batch_slice.stop - batch_slice.start)
            indices[:, :n_steps, position] = sample_indices.view(epochs, n_steps, size)
            weights[:, :n_steps, position] = shares.view(n_steps, size)
            first_sample += n
        steps = [epochs * steps_per_epoch[k] for k in order]
        # a client's epochs have no gaps between them, so at every step the remaining clients are the first ones
        joined_tensors = [
            _close_up(values, steps_per_epoch, order) for values in (indices, weights)
        ]
        return cls(
            order, steps, x, torch.cat([splits[k].y for k in order]), *joined_tensors
        )

    def iterate(
        self, start: int, end: int, left: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the samples, labels and weights of each of some steps.

        They are those of the first ``left`` clients: samples [left, b, d], labels
        [left, b, ...] and weights [left, b]. The steps are from ``start`` to before
        ``end``.
        """
        size = left * self.indices.shape[2] * self.x[0].nbytes or 1
        # steps whose samples are fetched at once, to save time
        steps_at_once = loop.GATHERED // size or 1
        for step in range(start, end, steps_at_once):
            steps = slice(step, min(step + steps_at_once, end))
            sample_indices = self.indices[steps, :left]
            yield from zip(
                self.x[sample_indices],
                self.y[sample_indices],
                self.weights[steps, :left],
                strict=True,
            )


def _close_up(values: Tensor, per_epoch: list[int], order: list[int]) -> Tensor:
    """Join the epochs of each client without gaps: [epochs, steps, clients, b] -> [all steps, clients, b].

    A client's steps that are left over at the end are 0.

    Args:
        values: the values of all epochs.
        per_epoch: each client's steps in an epoch.
        order: positions of the clients in ``per_epoch``, along the axis of clients.
    """
    epochs, most_steps, *_ = values.shape
    joined_steps = values.new_zeros(epochs * most_steps, *values.shape[2:])
    for position, k in enumerate(order):
        joined_steps[: epochs * per_epoch[k], position] = values[
            :, : per_epoch[k], position
        ].flatten(0, 1)
    return joined_steps


# --- the steps -------------------------------------------------------------------------------------------------


def _descend(
    operations: list[tuple[str, str] | None],
    values: dict[str, Tensor],
    state: Entries,
    batches: _Batches,
    training: Training,
    criterion: Loss,
) -> Tensor:
    """Train the stacked weights ``values`` [clients, ...] in place and return each client's loss, summed over samples.

    Args:
        operations: the model's operations, from :func:`_perceptron`.
        values: all tensors of the model by name, [clients, ...].
        state: the optimiser's state of the trained tensors of all clients, [clients, ...], changed in place. It is
            complete at the end only if ``training`` keeps it.
        batches: the clients' batches, in the order of the clients in ``values``.
        training: the settings of the phase.
        criterion: the loss.
    """
    totals = torch.zeros(len(batches.order), dtype=torch.float64)
    max_norm = training.max_grad_norm
    steps_done = 0
    while steps_done < batches.steps[0]:
        n_left = sum(steps > steps_done for steps in batches.steps)
        end = batches.steps[n_left - 1]
        values_before = {name: value[:n_left].clone() for name, value in values.items()}
        params = [values_before[name].requires_grad_() for name in state]
        optimizer = training.build(params)
        for param, entries in zip(params, state.values(), strict=True):
            for key, value in entries.items():  # all have one count of steps
                entry = value[0] if value.ndim == 1 else value[:n_left]
                optimizer.state[param][key] = entry.clone()
        del optimizer.defaults["differentiable"]  # the function has no such option
        step_losses = []
        for x, y, weights in batches.iterate(steps_done, end, n_left):
            losses = criterion.per_sample(
                _forward(operations, values_before, x).flatten(0, 1), y.flatten(0, 1)
            ).view_as(weights)
            # weights as an argument of backward would import sympy
            (losses * weights).sum().backward()
            step_losses.append(losses.detach())
            grads = [param.grad for param in params if param.grad is not None]
            if max_norm is not None:
                _clip_each(grads, max_norm)
            is_plain_sgd = training.optimizer == "sgd" and not training.momentum
            # a layer may have a parameter that its operation does not use
            if is_plain_sgd and len(grads) == len(params):
                # the function, without the time of its object
                sgd(params, grads, [None] * len(grads), **optimizer.defaults)
            else:
                optimizer.step()
            for param in params:
                param.grad = None
        is_padding = batches.weights[steps_done:end, :n_left] == 0
        stacked_losses = torch.stack(step_losses).double().masked_fill(is_padding, 0)
        totals[:n_left] += stacked_losses.sum((0, 2))
        for (name, entries), param in zip(state.items(), params, strict=True):
            values[name][:n_left] = param.detach()
            for key, value in optimizer.state[param].items():
                if not isinstance(value, Tensor):
                    continue
                if value.ndim == 0:
                    value = value.repeat(n_left)
                if training.keep_optimizer and n_left < len(values[name]):
                    entries[key][:n_left] = value
                else:  # finished clients take no further steps
                    entries[key] = value
        steps_done = end
    return totals


def _age(part: Part) -> tuple[float, ...]:
    """Return a client's step counts in the optimiser's state, in order of tensor names.

    Clients with other counts cannot train together: Adam corrects a tensor's means by
    one count for all. The result is empty without such counts.
    """
    entries = loop.entries_of(part.optimizer, part.phase)
    counts = (state["step"] for _, state in sorted(entries.items()) if "step" in state)
    return tuple(map(float, counts))


def _stack_states(clients: list[Entries], params: dict[str, Tensor]) -> Entries:
    """Stack the clients' states [clients, ...] for stacked parameters [clients, ...]. Missing states start at zero."""
    joined_states: Entries = {name: {} for name in params}
    for name in params:
        examples: Tree = {}
        for entries in clients:
            examples |= entries.get(name, {})
        for key, example in examples.items():
            zero_state = torch.zeros_like(example)
            joined_states[name][key] = torch.stack(
                [entries.get(name, {}).get(key, zero_state) for entries in clients]
            )
    # as in loop.restore
    if any(MOMENTUM in entries for entries in joined_states.values()):
        for name, param in params.items():
            joined_states[name].setdefault(MOMENTUM, torch.zeros_like(param))
    return joined_states


def _clip_each(grads: list[Tensor], max_norm: float) -> None:
    """Clip each client's gradients [clients, ...] in place.

    The norm of all gradients of a client together is then at most ``max_norm``. If it
    is not finite, they stay.
    """
    norms = torch.stack(
        [torch.linalg.vector_norm(grad.flatten(1), dim=1) for grad in grads]
    ).norm(dim=0)
    # as one by one
    scales = torch.where(
        norms.isfinite(), (max_norm / (norms + 1e-6)).clamp(max=1.0), 1.0
    )
    for grad in grads:
        grad.mul_(scales.view(-1, *[1] * (grad.ndim - 1)))


def _forward(
    operations: list[tuple[str, str] | None], values: dict[str, Tensor], x: Tensor
) -> Tensor:
    """Return the logits [clients, b, C] of samples [clients, b, d].

    Args:
        operations: the model's operations, from :func:`_perceptron`.
        values: the weights by name, [clients, ...].
        x: the samples.
    """
    for operation in operations:
        if operation is None:
            x = x.relu()
            continue
        weight = values[operation[0]].transpose(1, 2)
        bias = values.get(operation[1])
        if bias is None:
            x = torch.bmm(x, weight)
        else:
            x = torch.baddbmm(bias.unsqueeze(1), x, weight)
    return x


def _perceptron(model: nn.Module) -> list[tuple[str, str] | None] | None:
    """Return the names of weight and bias of each Linear and None for each ReLU, in order.

    The result is None if the model is no chain, or has any other module than these and
    Flatten to one axis. It is None, too, without a Linear, and with a persistent buffer or
    tied weights. The name of a bias may be that of no tensor.
    """
    modules = chain(model)
    names = {module: name for name, module in model.named_modules()}
    buffers = len(tree.named_tensors(model)) != len(list(model.parameters()))
    if modules is None or buffers:
        return None
    operations: list[tuple[str, str] | None] = []
    for module in modules:
        if type(module) is nn.Linear:
            operations.append((f"{names[module]}.weight", f"{names[module]}.bias"))
        elif type(module) is nn.ReLU:
            operations.append(None)
        elif type(module) is not nn.Flatten or (module.start_dim, module.end_dim) != (
            1,
            -1,
        ):
            return None
    linear_names = [operation for operation in operations if operation is not None]
    tensors = [param for _, param in model.named_parameters(remove_duplicate=False)]
    is_distinct = len(linear_names) == len(set(linear_names)) and len(tensors) == len(
        {id(param) for param in tensors}
    )
    if linear_names and is_distinct:
        return operations
    return None
