"""The costs of a round: FLOPs of local training, counted on executed operations, and bytes sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from fl_core import models, tree
from fl_core.algorithms.base import Algorithm, Round
from fl_core.errors import UsageError, check_known
from fl_core.training.phases import batch_slices
from fl_core.training.workspace import Workspace


class _Everything(ModuleTracker):
    """A tracker that counts all operations together, without hooks on modules."""

    def __enter__(self) -> _Everything:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class FlopCounter(FlopCounterMode):
    """PyTorch's counter of FLOPs without its sums by module.

    Its hooks fail for modules that take a parameter. Such modules compute parametrised weights
    (``torch.nn.utils.parametrizations``).
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _Everything()


def training_flops(
    workspace: Workspace, shape: tuple[int, ...], trained: frozenset[str], held: frozenset[str] | None = None
) -> float:
    """Return the floating-point operations for one training sample, forward and backward.

    Only the tensors in ``trained`` are trained.

    PyTorch's own counter runs on a batch of two, and the result is halved. It counts matrix products, convolutions and
    attention. A multiply-add is two operations. Freezing early layers saves their weight gradients and the backward
    pass below them. Freezing late layers saves their weight gradients only. Blocks that are not ``held`` cost nothing.
    An algorithm's computations outside the model's own pass are not counted, such as views and keys of a second task or
    a teacher.
    """
    workspace.hold(held)
    x = models.example(shape).to(workspace.device)
    if x.is_floating_point():
        x = x.to(next(iter(workspace.params.values())).dtype)
    buffers = [(buffer, buffer.clone()) for buffer in workspace.model.buffers()]
    counter = FlopCounter()
    with torch.random.fork_rng(), workspace.trains(trained) as names, counter:
        logits = workspace.forward(workspace.params, x)
        if logits.requires_grad:
            torch.autograd.grad(logits.sum(), [workspace.params[name] for name in names], allow_unused=True)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return counter.get_total_flops() / 2


@dataclass(frozen=True)
class TrainingCost:
    """The cost of local training, over clients and batches of a round or of all rounds. Lower is cheaper.

    Attributes:
        naive: trained scalars, summed over batches. Table 4 of the layer-scheduling paper calls this FLOPs (Jang and
            Choi 2024). It ignores batch size, forward pass and errors passed back through frozen layers. A kernel's
            weight counts once although it is used at every position. It is proportional to the traffic.
        flops: floating-point operations, forward and backward, of every sample (see :func:`training_flops`).
        moved: bytes of the model's tensors that the clients receive and send. Other traffic (a variate, a mask, a
            number for each layer) is in a run's rows ``bytes_down`` and ``bytes_up`` only. Models sent for evaluation
            are in the rows ``bytes_evaluation``.
    """

    naive: int
    flops: float
    moved: int


def training_cost(algorithm: Algorithm, workspace: Workspace, shape: tuple[int, ...], batch: int) -> TrainingCost:
    """Return the cost of a whole run: the sum of :func:`round_costs`.

    The layer-scheduling paper's Table 4 has 300 rounds of one epoch, 100 clients with 500 samples, and batches of 10.

    Args, Raises: as of :func:`round_costs`.
    """
    rounds = round_costs(algorithm, workspace, shape, batch)
    return TrainingCost(
        sum(cost.naive for cost in rounds), math.fsum(cost.flops for cost in rounds), sum(cost.moved for cost in rounds)
    )


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
    if problem.rounds < 1 or batch < 1:
        raise UsageError(f"rounds and batch must be at least 1; got {problem.rounds} and {batch}.")
    sizes = {name: parameter.numel() for name, parameter in workspace.params.items() if parameter.requires_grad}

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
            moved += n_bytes(algorithm.shared(rnd, client)) + n_bytes(algorithm.uploaded(rnd, client))
            for phase in algorithm.phases(rnd, client):
                each = batch_slices(n, batch, workspace.couples)
                taken = phase.length(len(each))
                passes, rest = divmod(taken, len(each))
                steps[phase.train] += taken
                samples[phase.train, held] += passes * n + sum(part.stop - part.start for part in each[:rest])
        return TrainingCost(
            naive=sum(numel(train) * count for train, count in steps.items()),
            flops=math.fsum(flops(*case) * count for case, count in samples.items()),
            moved=moved,
        )

    return tuple(cost(Round(index)) for index in range(problem.rounds))


PFEDLA_BYTES = 3000
"""Bytes for a parameter sent one way in pFedLA's Table 3, for its run of 600 rounds with 10 clients.

A float for each of them would be 24,000 bytes. The table is an eighth of that.
"""


def retention_ledger(parameters: Mapping[str, int], retained: Iterable[str] = ()) -> float:
    """Return the MiB sent in a run of HeurpFedLA, counted as in pFedLA's Table 3 (Ma et al. 2022).

    This is u (2 P - sum of ``|l|`` over the retained layers) with u = :data:`PFEDLA_BYTES` / 2^20. Retained layers are
    always the same and not downloaded. The actual traffic of a run is in its rows ``bytes_down`` and ``bytes_up``.

    Args:
        parameters: scalars of each layer.
        retained: names of the layers that the clients keep.

    Raises:
        UsageError: a retained layer is not among them.
    """
    kept = sum(parameters[check_known("layer", name, parameters)] for name in retained)
    return PFEDLA_BYTES * (2 * sum(parameters.values()) - kept) / 2**20
