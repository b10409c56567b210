"""Trains clients of a small perceptron together along a leading client axis: one step's overhead serves them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fl_core import seeds, tree
from fl_core.algorithms.base import Algorithm
from fl_core.choices import STACKS
from fl_core.errors import NonFiniteError, check_known
from fl_core.execution.client_runner import ClientRunner, Job, Part, Result
from fl_core.execution.prefix import chain, hooked
from fl_core.training.local import GATHERED, Phase, Training, batch_slices
from fl_core.training.losses import Loss
from fl_core.tree import Tree

TOGETHER = 50
"""Clients that are trained together; more of them gain nothing."""
LARGEST = 100_000
"""Parameters of a model beyond which clients are faster one by one on a CPU."""


def stacks(model: nn.Module, device: str, wanted: str = "auto") -> bool:
    """Whether clients are trained together; a fixed rule, since the order of sums and so the rounding differs.

    ``auto`` is yes for a chain of Linear, ReLU and Flatten with fewer than :data:`LARGEST` parameters on a CPU; ``on``
    leaves the size out of account.

    Raises:
        UsageError: ``wanted`` is unknown.
    """
    if check_known("value of stack", wanted, STACKS) == "off" or device.partition(":")[0] != "cpu":
        return False
    small = sum(param.numel() for param in model.parameters()) < LARGEST
    return (small or wanted == "on") and _perceptron(model) is not None


class Stacked:
    """Executor in this process that trains clients together where their phases allow it, else one by one.

    A phase allows it if its objective is the algorithms' common one, the mean loss of a batch, and nobody looks at its
    steps or makes its own. The batches are those of the plain path, and so are the results up to rounding.
    """

    moved = 0.0

    def __init__(self, client_runner: ClientRunner) -> None:
        self.client_runner = client_runner
        self._operations = _perceptron(client_runner.workspace.model) or []
        parts = chain(client_runner.workspace.model)
        self._flat = parts is not None and isinstance(next(iter(parts), None), nn.Flatten)

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm."""
        self.client_runner.use(algorithm)

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield results in order; whatever crosses is cloned, as between processes."""
        queue = iter(jobs)
        while some := list(islice(queue, TOGETHER)):
            for outcome in self._outcomes(some):
                if isinstance(outcome, Exception):
                    raise outcome
                outcome.message = outcome.message.clone()
                yield outcome

    def close(self) -> None:
        """Do nothing: there are no processes."""

    def _outcomes(self, jobs: list[Job]) -> list[Result | Exception]:
        """Advance all jobs to their next phase, train those phases, and repeat until every job has its result.

        A job that met NaN or infinity has as its outcome the error that names what was not finite first.
        """
        runs = dict(enumerate(self.client_runner.parts(job) for job in jobs))
        outcomes: dict[int, Result | Exception] = {}
        answers: dict[int, tuple[Tree, Tree] | None] = dict.fromkeys(runs)
        with tree.one_thread():
            while answers:
                parts: dict[int, Part] = {}
                for k, answer in answers.items():
                    try:
                        parts[k] = runs[k].send(answer)
                    except StopIteration as end:
                        outcomes[k] = end.value
                    except Exception as error:  # raised where the job's result would have come
                        outcomes[k] = error
                together = self._together(parts)
                answers = {}
                for k, part in parts.items():
                    try:
                        answers[k] = together[k] if k in together else self.client_runner.phase(part)
                    except Exception as error:  # as above
                        outcomes[k] = error
        for k, outcome in outcomes.items():
            if isinstance(outcome, NonFiniteError):
                outcomes[k] = self.client_runner.cause(jobs[k], outcome)
        return [outcomes[k] for k in range(len(jobs))]

    def _together(self, parts: dict[int, Part]) -> dict[int, tuple[Tree, Tree]]:
        """Train the phases that can be stacked; returns their results by job."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for k, part in parts.items():
            if self._allows(part):
                phase = part.phase
                groups.setdefault((phase.train, phase.epochs, *phase.rates, phase.clip), []).append(k)
        trained_phases: dict[int, tuple[Tree, Tree]] = {}
        for members in groups.values():
            if len(members) > 1:
                trained = self._train([parts[k] for k in members])
                trained_phases |= {k: (each, {}) for k, each in zip(members, trained, strict=True) if each is not None}
        return trained_phases

    def _allows(self, part: Part) -> bool:
        phase, algorithm = part.phase, self.client_runner.loaded()
        plain = not (phase.step or phase.observe or phase.groups) and phase.steps is None
        common = getattr(algorithm.method(phase.loss), "__func__", None) is Algorithm.loss
        x = self.client_runner.data.clients[part.ctx.client].train.x
        flat = bool(self._operations) and (self._flat or x.ndim == 2)
        whole = part.ctx.submodel is None or part.ctx.submodel >= self.client_runner.workspace.live.keys()
        return (
            plain
            and common
            and flat
            and whole
            and len(x) > 0
            and phase.epochs > 0
            and not self.client_runner.training.keep_optimizer
        )

    def _train(self, parts: list[Part]) -> list[Tree | None]:
        """The trained trees; None for a client whose numbers are not finite, to be trained alone for its error."""
        workspace, training, phase = self.client_runner.workspace, self.client_runner.training, parts[0].phase
        for part in parts:
            tree.check_same(workspace.live, part.source, "the model", "the tree")
        with workspace.trains(phase.train) as names:
            if not names:
                return [None] * len(parts)
        batches = _Batches.of(self.client_runner, parts, phase.epochs, training.batch)
        values = {name: torch.stack([parts[k].source[name] for k in batches.order]) for name in workspace.live}
        losses = _descend(self._operations, values, names, batches, training, phase, self.client_runner.criterion)
        results: list[Tree | None] = [None] * len(parts)
        sound = _finite(losses, *(value for name, value in values.items() if name in phase.train))
        counts = (batches.weights > 0).sum((0, 2)).tolist()
        for at, k in enumerate(batches.order):
            if sound[at]:
                steps, samples = batches.steps[at], counts[at]
                work = {"steps": steps, "samples": samples, "loss": float(losses[at]) / samples}
                parts[k].ctx.work.update({f"{phase.name}/{key}": value for key, value in work.items()})
                results[k] = {name: value[at].clone() for name, value in values.items()}
        return results


def _finite(*values: Tensor) -> list[bool]:
    """For each client whether all its numbers in [clients, ...] are finite."""
    floating = [value.detach().reshape(len(value), -1) for value in values if value.is_floating_point()]
    return torch.stack([value.isfinite().all(1) for value in floating]).all(0).tolist()


@dataclass(frozen=True)
class _Batches:
    """The batches of all clients, those with the most steps first; short ones are padded with samples of weight 0."""

    order: list[int]  # positions of the clients
    steps: list[int]  # of each, descending
    x: Tensor  # all samples, [n, d]
    y: Tensor
    indices: Tensor  # [steps, clients, b], into x
    weights: Tensor  # [steps, clients, b]: one over the size of the batch

    @classmethod
    def of(cls, client_runner: ClientRunner, parts: list[Part], epochs: int, batch: int) -> _Batches:
        splits = [client_runner.data.clients[part.ctx.client].train for part in parts]
        per_epoch = [len(batch_slices(len(split), batch, whole=False)) for split in splits]
        order = sorted(range(len(parts)), key=lambda k: -per_epoch[k])
        size = min(batch, max(len(split) for split in splits))
        x = torch.cat([splits[k].x.flatten(1) for k in order])
        indices = torch.zeros(epochs, max(per_epoch), len(parts), size, dtype=torch.int64)
        weights = torch.zeros(indices.shape, dtype=x.dtype)
        first = 0
        for at, k in enumerate(order):
            ctx, n, most = parts[k].ctx, len(splits[k]), per_epoch[k]
            where = (ctx.round, ctx.client, parts[k].phase.stream)
            draws = seeds.torch_generator(client_runner.loaded().problem.seed, "batches", *where)
            filled = torch.full((epochs, most * size), first)
            shares = torch.zeros(most * size, dtype=x.dtype)
            for epoch in range(epochs):
                filled[epoch, :n] = torch.randperm(n, generator=draws) + first
            for part in batch_slices(n, size, whole=False):
                shares[part] = 1 / (part.stop - part.start)
            indices[:, :most, at] = filled.view(epochs, most, size)
            weights[:, :most, at] = shares.view(most, size)
            first += n
        steps = [epochs * per_epoch[k] for k in order]
        # a client's epochs follow each other without a gap, so that at every step the first clients are the ones left
        joined = [(_close_up(values, per_epoch, order)) for values in (indices, weights)]
        return cls(order, steps, x, torch.cat([splits[k].y for k in order]), *joined)

    def between(self, start: int, end: int, left: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Samples [left, b, d], labels and weights [left, b] of a range of steps, for the first ``left`` clients."""
        step_bytes = left * self.indices.shape[2] * self.x[0].nbytes
        some = max(1, GATHERED // max(step_bytes, 1))  # steps whose samples are fetched at once, which saves time
        for at in range(start, end, some):
            steps = slice(at, min(at + some, end))
            chosen = self.indices[steps, :left]
            yield from zip(self.x[chosen], self.y[chosen], self.weights[steps, :left], strict=True)


def _close_up(values: Tensor, per_epoch: list[int], order: list[int]) -> Tensor:
    """Join the epochs of each client without gaps: [epochs, steps, clients, b] -> [all steps, clients, b]."""
    epochs, most, _, _ = values.shape
    joined = values.new_zeros(epochs * most, *values.shape[2:])
    for at, k in enumerate(order):
        joined[: epochs * per_epoch[k], at] = values[:, : per_epoch[k], at].flatten(0, 1)
    return joined


def _descend(
    operations: list[tuple[str, str] | None],
    values: dict[str, Tensor],
    names: list[str],
    batches: _Batches,
    training: Training,
    phase: Phase,
    criterion: Loss,
) -> Tensor:
    """Train the stacked weights ``values`` [clients, ...] in place; returns each client's loss summed over samples."""
    totals = torch.zeros(len(batches.order), dtype=torch.float64)
    longest = training.longest(phase)
    state: dict[str, dict[str, Any]] = {}
    done = 0
    while done < batches.steps[0]:
        left = sum(steps > done for steps in batches.steps)
        end = batches.steps[left - 1]
        now = {name: value[:left].clone() for name, value in values.items()}
        params = [now[name].requires_grad_() for name in names]
        optimizer = training.build(params, *phase.rates)
        for name, param in zip(names, params, strict=True):
            if name in state:
                optimizer.state[param].update({key: _first(value, left) for key, value in state[name].items()})
        step_losses = []
        for x, y, weights in batches.between(done, end, left):
            losses = criterion.per_sample(_forward(operations, now, x).flatten(0, 1), y.flatten()).view_as(weights)
            losses.backward(weights, inputs=params)
            step_losses.append(losses.detach())
            if longest is not None:
                _clip_each(params, longest)
            optimizer.step()
            for param in params:
                param.grad = None
        losses = torch.stack(step_losses).double().masked_fill(batches.weights[done:end, :left] == 0, 0)
        totals[:left] += losses.sum((0, 2))
        state = {name: dict(optimizer.state[param]) for name, param in zip(names, params, strict=True)}
        for name, param in zip(names, params, strict=True):
            values[name][:left] = param.detach()
        done = end
    return totals


def _clip_each(params: list[Tensor], longest: float) -> None:
    """Clip each client's gradients [clients, ...] to a norm of at most ``longest``, in place."""
    grads = [param.grad for param in params if param.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(grad.flatten(1), dim=1) for grad in grads]).norm(dim=0)
    scales = torch.where(norms.isfinite(), (longest / (norms + 1e-6)).clamp(max=1.0), 1.0)  # as one by one
    for grad in grads:
        grad.mul_(scales.view(-1, *[1] * (grad.ndim - 1)))


def _first(value: Any, count: int) -> Any:
    """The optimiser's state for the first ``count`` clients; a count of steps is the same for all."""
    return value[:count].clone() if isinstance(value, Tensor) and value.ndim > 0 else value


def _forward(operations: list[tuple[str, str] | None], values: dict[str, Tensor], x: Tensor) -> Tensor:
    """Logits [clients, b, C] of samples [clients, b, d]."""
    for operation in operations:
        if operation is None:
            x = x.relu()
            continue
        weight, bias = values[operation[0]].transpose(1, 2), values.get(operation[1])
        x = torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)
    return x


def _perceptron(model: nn.Module) -> list[tuple[str, str] | None] | None:
    """Names of weight and bias of each Linear, None for each ReLU, in order; None if the model has any other module."""
    parts = chain(model)
    names = {module: name for name, module in model.named_modules()}
    buffers = len(tree.live(model)) != len(list(model.parameters()))
    if parts is None or buffers or any(hooked(module) for module in model.modules()):
        return None
    operations: list[tuple[str, str] | None] = []
    for module in parts:
        if type(module) is nn.Linear:
            operations.append((f"{names[module]}.weight", f"{names[module]}.bias"))
        elif type(module) is nn.ReLU:
            operations.append(None)
        elif type(module) is not nn.Flatten or (module.start_dim, module.end_dim) != (1, -1):
            return None
    linear = [operation for operation in operations if operation is not None]
    tensors = [param for _, param in model.named_parameters(remove_duplicate=False)]
    distinct = len(linear) == len(set(linear)) and len(tensors) == len({id(param) for param in tensors})
    return operations if linear and distinct else None
