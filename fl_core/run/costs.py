"""Costs of training: FLOPs of a step, counted on executed operations, and costs of layers, rounds and plans."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import signature
from math import prod
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fl_core import models, tree
from fl_core.algorithms.base import Algorithm, Round
from fl_core.errors import UsageError, check_known, listing, warn
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.run.task import Task
from fl_core.training.loop import batch_slices
from fl_core.training.workspace import Workspace
from fl_core.tree import preserve_state


def _product(a: Tensor, b: Tensor, *_: object, **__: object) -> int:
    """Return the FLOPs of a product of two vectors, matrices or batches of matrices."""
    return 2 * a.numel() * prod(b.shape[1:][-1:])


def _convolution(
    out: Tensor, x: Tensor, weight: Tensor, bias: object, stride: object, padding: object, dilation: object,
    transposed: bool, *_: object,
) -> int:  # fmt: skip
    """Return the FLOPs of a convolution's forward pass.

    The gradient of the input takes as many, and so does that of the weight.
    """
    positions = prod((x if transposed else out).shape[2:])
    return 2 * len(x) * positions * weight.numel()


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> int:
    """Return the FLOPs of the two products in softmax(Q K^T) V.

    A mask saves nothing, and the softmax costs nothing.
    """
    return (
        2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    )


FUSED = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)
FORMULAS: dict[str, Any] = {
    **dict.fromkeys(
        ("aten.dot", "aten.vdot", "aten.mv", "aten.mm", "aten.bmm"), _product
    ),
    **dict.fromkeys(
        ("aten.addmm", "aten.baddbmm"), lambda _, *given, **__: _product(*given)
    ),
    "aten.convolution": lambda *given, out_val: _convolution(out_val, *given),
    "aten.convolution_backward": lambda *given, **_: (
        _convolution(*given) * sum(given[-1][:2])
    ),
    **{f"aten._scaled_dot_product_{kind}": _attention for kind in FUSED},
    **{
        f"aten._scaled_dot_product_{kind}_backward": lambda grad, *given, **_: (
            2 * _attention(*given)
        )
        for kind in FUSED
    },
    "flex_attention_backward": lambda *given, **_: 2 * _attention(*given),
}
"""The function that returns an operation's FLOPs from its arguments, by operation.

The function also gets the result, as ``out_val``. Another operation that may contain
matrix products gets PyTorch's formula. Those here come first, since some of PyTorch's
are wrong."""
PRODUCTS = re.compile(
    r"(mm|mv|dot|qr|matmul|conv(?!ert)\w*|linear|attention|rnn|lstm|gru|linalg|solve|cholesky|eigh?"
    r"|trilinear|euclidean)(_|$)"
)
"""The pattern of names of operations that may contain matrix products."""
POINTWISE = re.compile(r"thnn_|_norm$|_cross$|_diagonal$|_check_errors$")
"""The pattern of names that match :data:`PRODUCTS` without any matrix product."""
VISIBLE = ("aten.", "prim.", "prims.", "profiler.")
"""Namespaces of PyTorch's own operations.

An operation of another namespace may contain matrix products, whatever its name."""


class FlopCounter(TorchDispatchMode):
    """A counter of the FLOPs of all operations inside its ``with`` block.

    It has no sums by module. The hooks that PyTorch's counter needs for them fail for
    modules that take a parameter. Such modules compute parametrised weights
    (``torch.nn.utils.parametrizations``).

    Attributes:
        total: the FLOPs so far.
        unknown: names of operations that may contain matrix products, and have no formula.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.unknown: set[str] = set()

    def _count(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        name = str(packet or func).rstrip("_")  # in place or not
        formula = FORMULAS.get(name)
        is_unknown = not name.startswith(VISIBLE) or (
            PRODUCTS.search(name) and not POINTWISE.search(name)
        )
        if is_unknown and not formula:
            from torch.utils.flop_counter import flop_registry  # imports Triton

            formula = {str(op): f for op, f in flop_registry.items()}.get(name)
        if packet and not formula:
            with self:
                result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        output = func(*args, **kwargs)
        if formula:
            self.total += formula(*args, **kwargs, out_val=output)
        elif is_unknown:
            self.unknown.add(name)
        return output


# As a method of the class, PyTorch would wrap it, and each first call would import its compiler.
setattr(FlopCounter, "__torch_dispatch__", FlopCounter._count)  # noqa: B010


@contextmanager
def unfused(model: nn.Module, allow_tf32: bool = True) -> Iterator[None]:
    """Run recurrent networks operation by operation inside the block, not in one kernel.

    Args:
        model: the model. If it has a recurrent module, cuDNN and oneDNN are off inside
            the block. Otherwise they stay as they are, with their other settings.
        allow_tf32: False: cuDNN does not compute in TensorFloat-32 inside the block,
            and precisions are PyTorch's defaults. True leaves these settings.
    """
    cudnn, onednn = torch.backends.cudnn, torch.backends.mkldnn
    # None leaves a setting as it is; PyTorch's defaults of these arguments do not
    cudnn_settings: dict[str, Any] = dict.fromkeys(signature(cudnn.flags).parameters)
    onednn_settings: dict[str, Any] = dict.fromkeys(signature(onednn.flags).parameters)
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        cudnn_settings["enabled"] = onednn_settings["enabled"] = False
    if not allow_tf32:
        cudnn_settings |= {"allow_tf32": False, "fp32_precision": "none"}
        onednn_settings["fp32_precision"] = "none"
    with cudnn.flags(**cudnn_settings), onednn.flags(**onednn_settings):
        yield


@contextmanager
def count_flops(model: nn.Module) -> Iterator[FlopCounter]:
    """Count the FLOPs of all operations inside the block, and warn after it of operations without a formula.

    The ``with`` statement gives the counter, whose ``total`` is the number. Recurrent
    networks and transformers run operation by operation, not in one fused kernel. An
    error inside the block leaves no warning.

    Args:
        model: the model that runs inside the block.
    """
    mha = torch.backends.mha
    fast_path = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with unfused(model), FlopCounter() as counter:
            yield counter
    finally:
        mha.set_fastpath_enabled(fast_path)
    if counter.unknown:
        unknown_names = listing(sorted(counter.unknown))
        warn(f"FLOPs are counted without {unknown_names}: no formula is known.")


def training_flops(
    workspace: Workspace,
    shape: tuple[int, ...],
    trained: frozenset[str],
    present: frozenset[str] | None = None,
) -> float:
    """Return the number of floating-point operations for one training sample, forward and backward.

    A batch of two is counted, and the result is halved. Matrix products, convolutions and attention count. A
    multiply-add is two operations. Everything elementwise is zero. A warning names operations that may contain matrix
    products and have no formula. Freezing early layers saves their weight gradients and the backward pass below them.
    Freezing late layers saves their weight gradients only. Blocks that are not ``present`` cost nothing. An algorithm's
    computations outside the model's own pass are not counted, such as views and keys of a second task or a teacher.

    Args:
        workspace: the model on its device. Afterwards it holds the ``present`` tensors,
            and their values are unchanged.
        shape: shape of one sample.
        trained: names of the tensors that are trained. All others are frozen.
        present: names of the tensors of a submodel. None means the whole model.
    """
    workspace.hold(present)
    x = models.example(shape).to(workspace.device)
    if x.is_floating_point():
        x = x.to(next(iter(workspace.params.values())).dtype)
    model = workspace.model
    with (
        preserve_state(model),
        workspace.trains(trained) as names,
        count_flops(model) as counter,
    ):
        logits = workspace.forward(workspace.params, x)
        if logits.requires_grad:
            torch.autograd.grad(
                logits.sum(),
                [workspace.params[name] for name in names],
                allow_unused=True,
            )
    return counter.total / 2


Node = Any  # torch.autograd.graph.Node


def layer_bytes(layers: Sequence[Layer], model: nn.Module) -> dict[str, float]:
    """Return the bytes that a client sends for each layer if it is shared, by name.

    Buffers count, and frozen tensors do not. Integer counters cost nothing
    (:func:`fl_core.tree.n_bytes`).
    """
    tensors = tree.named_tensors(model)
    sizes = {}
    for layer in layers:
        sent_tensors = tree.select(tensors, set(layer.tensors) - set(layer.frozen))
        sizes[layer.name] = float(tree.n_bytes(sent_tensors))
    return sizes


class Ledger:
    """A record of which layer ran when, by the sequence numbers of autograd's graph nodes.

    Args:
        layers: the model's layers in forward order. What runs before any of them counts
            for the first one that the forward pass uses.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        used_layers = [layer for layer in layers if layer.used] or list(layers)
        self.last = used_layers[0].name if used_layers else ""
        self._stack: list[str | None] = []
        self.numbers, self.names = [-1], [self.last]

    def enter(self, layer: str | None) -> None:
        """Record that a module of this layer starts; None for a module that is not part of a single layer."""
        self._stack.append(layer)
        self.last = layer or self.last
        self._note()

    def leave(self) -> None:
        self._stack.pop()
        layer = None
        if self._stack:
            layer = self._stack[-1]
        self.last = layer or self.last  # a layer goes on after a module inside it
        self._note()

    def _note(self) -> None:
        if self.names[-1] != self.last:
            self.numbers.append(torch._C._autograd._get_sequence_nr())
            self.names.append(self.last)

    def of(self, number: int) -> str:
        """Return the name of the layer that was running when the graph node of this sequence number was made."""
        return self.names[bisect_right(self.numbers, number) - 1]


def module_layers(model: nn.Module, layers: Sequence[Layer]) -> dict[str, str]:
    """Return the name of the layer to which each module's work is charged, by the module's path.

    It is the layer of all the module's tensors. If these belong to several layers, it is the layer of the first own
    tensor. A module with nothing but tied tensors is charged to the layer that has them.

    A module without tensors has no entry. Neither has one whose tensors belong to
    several layers, if none of them is its own. The whole model only has an entry if all
    tensors belong to a single layer.
    """
    layer_of: dict[str, str] = {}
    for layer in layers:
        layer_of |= dict.fromkeys(layer.tensors, layer.name)
    named_tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    layer_by_id = {
        id(tensor): layer_of[name] for name, tensor in named_tensors if name in layer_of
    }
    layer_of |= {
        name: layer_by_id[id(tensor)]
        for name, tensor in named_tensors
        if id(tensor) in layer_by_id
    }
    layers_below: dict[str, set[str]] = {}
    own_layer: dict[str, str] = {}
    for name, layer_name in layer_of.items():
        owner = name.rpartition(".")[0]
        own_layer.setdefault(owner, layer_name)
        path_parts = owner.split(".") if owner else []
        for k in range(len(path_parts) + 1):
            layers_below.setdefault(".".join(path_parts[:k]), set()).add(layer_name)
    only_layer = {
        path: next(iter(names))
        for path, names in layers_below.items()
        if len(names) == 1
    }
    own_layer.pop("", None)
    return own_layer | only_layer


def nodes(*roots: Node) -> list[Node]:
    """Return every node of an autograd graph that the roots depend on, each after its inputs. A single root is last."""
    order: list[Node] = []
    visited: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_expanded = stack.pop()
        if is_expanded:
            order.append(node)
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack.extend(
                (node_in, False)
                for node_in, _ in node.next_functions
                if node_in is not None
            )
    return order


def cost_steps(tasks: Mapping[str, Task]) -> pd.DataFrame:
    """Compute the cost of each round of several runs before anything is trained.

    The columns are run and round (from 1), then sums over all clients. Every client takes part in every round, as in
    the layer-scheduling paper's Table 4 and Fig. 7 (Jang and Choi 2024). Fine-tuning after the last round is not
    counted. Lower is cheaper.

    * naive: trained scalars, summed over batches. The paper's Table 4 calls this FLOPs. It ignores batch size, forward
      pass and errors passed back through frozen layers. A kernel's weight counts once although it is used at every
      position.
    * flops: floating-point operations, forward and backward, of every sample. See :func:`training_flops`.
    * moved: bytes of the model's tensors that the clients receive and send. Other traffic (a variate, a mask, a number
      for each layer) is in a run's rows ``bytes_down`` and ``bytes_up`` only. Models sent for evaluation are in the
      rows ``bytes_evaluation``.

    Args:
        tasks: name of the run -> its task from :func:`fl_core.run.task.assemble`.

    Raises:
        UsageError: an algorithm chooses its plan while it trains, its traffic is only known in a run, or its steps take
            more than a gradient.
    """
    lines = []
    for name, task in tasks.items():
        algorithm = task.algorithm(task.plan)
        if algorithm.decides:
            raise UsageError(
                f"run {name!r} must have a plan to compute its costs; got none. Give its task a plan."
            )
        own_steps = [
            phase.step for phase in algorithm.phases(Round(0), 0) if phase.step
        ]
        if own_steps or not algorithm.static_traffic:
            raise UsageError(
                f"the cost of {algorithm.name} is only known from a run. See its rows flops, bytes_down, bytes_up."
            )
        batch_size = int(task.config.training.batch_size or 1)
        workspace = task.client_runner().workspace
        cost = round_cost(algorithm, workspace, task.data.shape, batch_size)
        for index in range(algorithm.task_info.rounds):
            lines.append({"run": name, "round": index + 1, **cost(Round(index))})
    return pd.DataFrame(lines, columns=["run", "round", "naive", "flops", "moved"])


def round_cost(
    algorithm: Algorithm, workspace: Workspace, shape: tuple[int, ...], batch: int
) -> Callable[[Round], dict[str, float]]:
    """Return a function from a round to its costs by name: ``naive``, ``flops`` and ``moved``.

    It counts the FLOPs of each set of trained tensors once, however many rounds have it.

    Args:
        algorithm: the algorithm, with its plan if it uses one.
        workspace: the algorithm's model on its device.
        shape: shape of one sample.
        batch: samples per batch.

    Returns:
        A function whose costs are those of :func:`cost_steps`, summed over all clients.
    """
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
    def flops(train: frozenset[str], present: frozenset[str]) -> float:
        return training_flops(workspace, shape, train, present)

    def cost(rnd: Round) -> dict[str, float]:
        naive_cost = moved_bytes = 0
        operations = Counter[tuple[frozenset[str], frozenset[str]]]()
        for client, n in enumerate(algorithm.task_info.n_train):
            submodel = algorithm.submodel(rnd, client)
            moved_bytes += n_bytes(algorithm.shared(rnd, client))
            moved_bytes += n_bytes(algorithm.uploaded(rnd, client))
            for phase in algorithm.phases(rnd, client):
                slices = batch_slices(n, batch, workspace.couples)
                steps = phase.length(len(slices))
                passes, remainder = divmod(steps, len(slices))
                naive_cost += steps * numel(phase.train)
                operations[phase.train, submodel] += passes * n + sum(
                    batch_slice.stop - batch_slice.start
                    for batch_slice in slices[:remainder]
                )
        total_flops = math.fsum(
            flops(*case) * count for case, count in operations.items()
        )
        return {"naive": naive_cost, "flops": total_flops, "moved": moved_bytes}

    return cost


def plan_cost(plan: LayerPlan, costs: pd.DataFrame) -> dict[str, float]:
    """Return the bytes that a plan sends, and the saving compared with sharing all layers.

    Args:
        costs: rows of ``layer_cost``, such as a report's frame.

    Returns:
        A dict with these keys:

        * layers, layers_shared; parameters, parameters_shared: numbers
        * bytes_up, bytes_down: bytes that a client sends and receives each round
        * bytes_all: bytes that it would send if everything were shared
        * bytes_saved = bytes_all - bytes_up
        * saved = bytes_saved / bytes_all in [0, 1]. Higher means cheaper.
        * training_flops, training_flops_shared: FLOPs of one training sample, forward and backward, in all layers and
          in the shared ones

    Raises:
        UsageError: costs are missing, in whole or for a layer of the plan, or a layer
            has two different costs.
    """
    rows = costs[(costs["metric"] == "layer_cost") & costs["value"].notna()]
    if rows.empty:
        raise UsageError("The rows hold no layer_cost. Measure it first.")
    rows = rows.drop_duplicates(["layer", "variant", "value"])
    duplicates = rows[rows.duplicated(["layer", "variant"])]
    if len(duplicates):
        raise UsageError(
            f"The rows hold two costs of layer {duplicates['layer'].iloc[0]!r}. Keep those of one model."
        )
    table = rows.pivot(index="layer", columns="variant", values="value")
    for layer in plan.layers:
        check_known("layer with costs", layer.name, table.index)
    all_sums = table.loc[list(plan.names)].sum()
    shared_sums = table.loc[list(plan.shared)].sum()
    sent_bytes, all_bytes = shared_sums["bytes"], all_sums["bytes"]

    def flops(of: pd.Series[float]) -> float:
        return float(of["forward_flops"] + of["backward_flops"])

    return {
        "layers": float(len(plan.layers)),
        "layers_shared": float(len(plan.shared)),
        "parameters": all_sums["parameters"],
        "parameters_shared": shared_sums["parameters"],
        "bytes_up": sent_bytes,
        "bytes_down": sent_bytes,
        "bytes_all": all_bytes,
        "bytes_saved": all_bytes - sent_bytes,
        "saved": (all_bytes - sent_bytes) / all_bytes if all_bytes else 0.0,
        "training_flops": flops(all_sums),
        "training_flops_shared": flops(shared_sums),
    }
