"""What each layer costs: parameters, bytes on the wire, FLOPs and memory of training; what a plan saves; rounds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from fl_core import runner, tree
from fl_core.costs import round_costs
from fl_core.errors import UsageError, check_known, listing
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.rows import Row, row
from fl_core.seeds import seed_of, torch_seeded
from fl_core.training.losses import Loss

from .capture import batches, first_tensor, set_mode
from .curvature.linear import nodes
from .gradients import Subject, Tick, placed, quiet

SIZES = ("parameters", "bytes")
WORK = ("forward_flops", "backward_flops", "activation_bytes")
UNITS = {"bytes": "byte", "forward_flops": "FLOP", "backward_flops": "FLOP", "activation_bytes": "byte"}
SAMPLES = 2
"""Samples of the pass that is counted; normalisation in train mode refuses a single one."""


@dataclass
class Work:
    """Of one training step, by layer and for all its samples: FLOPs, and bytes that the backward pass waits for."""

    forward_flops: dict[str, float] = field(default_factory=dict)
    backward_flops: dict[str, float] = field(default_factory=dict)
    activation_bytes: dict[str, float] = field(default_factory=dict)


def layer_cost(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss | None = None,
    batch: int | None = None,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
) -> list[Row]:
    """Five rows a client and layer. The clients' models are alike, so that the first one's costs are everyone's.

    * ``parameters``: scalars that train.
    * ``bytes``: parameters and persistent buffers as they are stored, which is what sharing the layer sends one way.
    * ``forward_flops``, ``backward_flops``: of one training sample when every parameter trains, by PyTorch's counter
      (matrix products, convolutions and attention; a multiply-add is two, everything elementwise is none).
    * ``activation_bytes``: what the forward pass of one sample keeps for the backward pass, parameters and buffers
      apart; a tensor that several operations keep counts once, at the first.

    An operation belongs to the layer whose module is running; outside the layers' modules to the layer that ran last
    (before any, to the first). So the layers sum to the whole network. An unused layer has a size but no work.

    Memory: one training step on two samples, whatever the data.

    Args:
        layers: all layers of the network.
    """
    found: list[Row] = []
    work = None
    for subject in subjects:
        if work is None:
            with torch_seeded(seed_of(seed, "diagnose", "cost")):
                x, _ = next(batches(subject.data, SAMPLES))
            x = placed(subject.model, x[:SAMPLES])
            # one sample twice where there is only one
            work = step_work(subject.model, x if len(x) > 1 else torch.cat([x, x]), layers, mode=mode, seed=seed)
        tensors, known = tree.live(subject.model), {name for name, _ in subject.model.named_parameters()}
        for layer in layers:
            n = sum(tensors[name].numel() for name in layer.tensors if name in known)
            sizes = {"parameters": n, "bytes": tree.n_bytes(tree.pick(tensors, layer.tensors))}
            for variant in (*SIZES, *WORK):
                lacking = variant in WORK and not layer.used
                value = sizes.get(variant, 0.0) if variant in SIZES else getattr(work, variant).get(layer.name, 0.0)
                found.append(
                    row(
                        "layer_cost",
                        None if lacking else value / (1 if variant in SIZES else SAMPLES),
                        status="unused in the forward pass" if lacking else "ok",
                        client=subject.client,
                        layer=layer.name,
                        variant=variant,
                        stderr=None if lacking else 0.0,
                        estimator={"bytes": "storage", "parameters": "count", "activation_bytes": "saved_tensors"}.get(
                            variant, "flop_counter"
                        ),
                        unit=UNITS.get(variant, ""),
                        n_params=n,
                        n_samples=0 if variant in SIZES else SAMPLES,
                        n_train=subject.n_train,
                    )
                )
        tick(subject.client)
    return found


# --- counting --------------------------------------------------------------------------------------------------


class _Ledger:
    """Which layer is at work, and when in the order of the graph's nodes that changed."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        used = [layer for layer in layers if layer.used] or list(layers)
        self.last = used[0].name if used else ""
        self._stack: list[str | None] = []
        self.numbers, self.names = [-1], [self.last]

    def enter(self, layer: str | None) -> None:
        """A module begins; None if it is no single layer's."""
        self._stack.append(layer)
        self.last = layer or self.last
        self._note()

    def leave(self) -> None:
        self._stack.pop()
        running = self._stack[-1] if self._stack else None
        self.last = running or self.last  # a layer goes on after a module inside it
        self._note()

    def _note(self) -> None:
        if self.names[-1] != self.last:
            self.numbers.append(torch._C._autograd._get_sequence_nr())
            self.names.append(self.last)

    def of(self, number: int) -> str:
        """The layer that was at work when the graph's node with this number was made."""
        return self.names[bisect_right(self.numbers, number) - 1]


def step_work(model: nn.Module, x: Tensor, layers: Sequence[Layer], *, mode: str = "eval", seed: int = 0) -> Work:
    """FLOPs and kept bytes of one forward and backward pass over ``x`` [n, ...], by layer; the model is left alone.

    Every floating parameter is differentiated, also a frozen one; the input is not.
    """
    work, ledger = Work(), _Ledger(layers)
    x = x.clone()  # of a storage that is no larger
    owners = _owners(model, layers)
    seeded = torch_seeded(seed_of(seed, "diagnose", "cost"))
    with set_mode(model, mode), seeded, torch.enable_grad(), _countable(model), ExitStack() as stack:
        params = [p.requires_grad_(True) for p in model.parameters() if p.is_floating_point()]
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        counter = FlopCounterMode(display=False)
        booked = 0.0

        def book(flops: dict[str, float], layer: str) -> None:
            nonlocal booked
            total = counter.get_total_flops()
            if total != booked:
                flops[layer] = flops.get(layer, 0.0) + total - booked
            booked = total

        def entering(layer: str | None) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                book(work.forward_flops, ledger.last)
                ledger.enter(layer)

            return hook

        def leaving(*_: Any) -> None:
            book(work.forward_flops, ledger.last)
            ledger.leave()

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                own.add(storage.data_ptr())
                kept.append(storage)  # alive until the end, so that no other tensor gets its address
                size = float(storage.nbytes())
                work.activation_bytes[ledger.last] = work.activation_bytes.get(ledger.last, 0.0) + size
            return tensor

        kept: list[Any] = [x.untyped_storage()]
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(entering(owners.get(path))).remove)
            stack.callback(module.register_forward_hook(leaving).remove)
        with counter:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                output = first_tensor(model(x))
            book(work.forward_flops, ledger.last)
            if output is None:
                raise UsageError(f"{type(model).__name__} puts out no tensor")
            if output.requires_grad and output.grad_fn is not None:
                current = ledger.last

                def starting(layer: str) -> Callable[..., None]:
                    def hook(*_: Any) -> None:
                        nonlocal current
                        book(work.backward_flops, current)
                        current = layer

                    return hook

                for node in nodes(output.grad_fn):
                    node.register_prehook(starting(ledger.of(node._sequence_nr())))
                torch.autograd.grad(output.sum(), params, allow_unused=True)
                book(work.backward_flops, current)
    return work


def _owners(model: nn.Module, layers: Sequence[Layer]) -> dict[str, str]:
    """The layer of each module that has tensors of one layer only; a module with several layers' own tensors: its
    first own tensor's layer."""
    layer_of = {name: layer.name for layer in layers for name in layer.tensors}
    beneath: dict[str, set[str]] = {}
    direct: dict[str, str] = {}
    for name, layer in layer_of.items():
        owner = name.rpartition(".")[0]
        direct.setdefault(owner, layer)
        parts = owner.split(".") if owner else []
        for k in range(len(parts) + 1):
            beneath.setdefault(".".join(parts[:k]), set()).add(layer)
    single = {path: next(iter(found)) for path, found in beneath.items() if len(found) == 1}
    return {**{path: layer for path, layer in direct.items() if path}, **single}


@contextmanager
def _countable(model: nn.Module) -> Iterator[None]:
    """Recurrent networks as the matrix products that they are: the fused kernels are not counted."""
    with ExitStack() as stack:
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False, allow_tf32=None))
        yield


# --- plans -----------------------------------------------------------------------------------------------------


def plan_cost(plan: LayerPlan, costs: pd.DataFrame | Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What a plan sends, and what it saves against sharing everything.

    Args:
        costs: rows of ``layer_cost`` (a report's frame), or {layer: {variant: value}}.

    Returns:
        layers, layers_shared; parameters, parameters_shared; bytes_up and bytes_down: what a client sends and receives
        each round; bytes_all: what it would send if everything were shared; bytes_saved = bytes_all - bytes_up, and
        ``saved`` = bytes_saved / bytes_all in [0, 1], higher = cheaper. Where the costs have them, training FLOPs of
        one sample (forward and backward): training_flops, and training_flops_shared of the layers that are shared.

    Raises:
        UsageError: no costs, or none for a layer of the plan.
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
        raise UsageError("the rows hold no layer_cost; measure it first")
    rows = rows.drop_duplicates(["layer", "variant", "value"])
    twice = rows[rows.duplicated(["layer", "variant"])]
    if len(twice):
        raise UsageError(f"the rows hold two costs of layer {twice['layer'].iloc[0]!r}; keep those of one model")
    table: dict[str, dict[str, float]] = {}
    for layer, variant, value in zip(rows["layer"], rows["variant"], rows["value"], strict=True):
        table.setdefault(layer, {})[variant] = float(value)
    return table


# --- rounds ----------------------------------------------------------------------------------------------------


def cost_steps(tasks: Mapping[str, runner.Task]) -> pd.DataFrame:
    """What each round of several runs costs, before anything is trained: columns run, round (from 1), then of all
    clients together naive [scalars x batches], flops [FLOP] and moved [bytes] (:class:`fl_core.costs.TrainingCost`).

    Everyone takes part in every round (the layer-scheduling paper's Table 4 and Fig. 7).

    Args:
        tasks: as :func:`fl_core.runner.assemble` gives them, by the name of the run.

    Raises:
        UsageError: an algorithm that decides on its plan while it trains, or as :func:`fl_core.costs.round_costs`.
    """
    lines = []
    for name, task in tasks.items():
        algorithm = task.algorithm(task.plan)
        if algorithm.decides:
            raise UsageError(f"what {name} costs hangs on the plan that it will decide on: give it one")
        workspace = runner.client_runner_of(task, {}).workspace
        each = round_costs(algorithm, workspace, task.data.shape, int(task.config.batch or 1))
        lines += [{"run": name, "round": k, **asdict(cost)} for k, cost in enumerate(each, 1)]
    return pd.DataFrame(lines, columns=["run", "round", "naive", "flops", "moved"])
