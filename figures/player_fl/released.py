"""The quantities that PLayer-FL's released code computes for the Hessian, similarity and federation sensitivity.

They are metrics under the names that the paper gives them, with rows of the variant ``released`` or ``figure``. Name
one as ``figures.player_fl.released:hessian_trace``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diagnostics.curvature.exact import verdicts
from diagnostics.curvature.model import (
    CUT,
    Differentiable,
    curvature,
    differentiable_once,
    twice_differentiable,
)
from diagnostics.gradients import one_pass
from diagnostics.measurement import (
    ClientModel,
    Data,
    Measurement,
    NoValue,
    batches,
    why_unreadable,
)
from diagnostics.metrics.base import METRICS
from diagnostics.metrics.of_gradients import UNIT
from diagnostics.representation.similarity import (
    PROCRUSTES,
    Faults,
    LayerComparison,
    SimilarityOptions,
    Spot,
    Value,
    along_one,
    by_position,
)
from diagnostics.sensitivity import Sensitivity, SensitivityAccumulator
from figures.player_fl.shifts import least_angle, unit_maps
from fl_core.layers import Layer
from fl_core.rows import Row, row
from fl_core.seeds import seed_of, torch_generator, torch_seeded
from fl_core.tree import Hook, Tree, set_mode, with_hooks

FIGURE_BATCH = 64
"""Samples of the one batch behind the published figures."""


def released(
    run: Differentiable,
    data: Data,
    layers: Mapping[str, Sequence[str]],
    batch: int,
) -> tuple[dict[str, float], dict[str, str], int]:
    """Return the mean over a layer's weight tensors W of the nuclear norm of H_W v.

    The vector v is Gaussian of unit length. The value is neither a trace nor a sum of eigenvalues. It is at least 0,
    depends on v, and grows as the square root of the rank times ||H v||. The product H_W v is read as a matrix [out,
    rest], and its singular values are added up. For a convolution, each input channel gives a matrix [out, kernel], and
    their sums are averaged (PLayer-FL's released code). H is the Hessian of the mean loss over all samples. The
    released code took one batch.

    Returns:
        Values with one draw of v, as the authors used; layer -> why there is no value; the number of samples.
    """
    parameter_names = list(itertools.chain.from_iterable(layers.values()))
    directions = {
        parameter_name: _direction(
            run.parameters[parameter_name],
            torch_generator(run.seed, "released probe", parameter_name),
        )
        for parameter_name in parameter_names
    }
    totals = {
        parameter_name: torch.zeros_like(
            run.parameters[parameter_name], dtype=torch.float64
        )
        for parameter_name in parameter_names
    }

    def probe(
        layer: str, layer_parameters: Sequence[str], gradients: Mapping[str, Tensor]
    ) -> None:
        for parameter_name in layer_parameters:
            totals[parameter_name] += curvature(
                [gradients[parameter_name]],
                [directions[parameter_name]],
                [run.parameters[parameter_name]],
            )[0]

    failures, sample_count = by_batch(run, data, layers, batch, probe)
    norm_by_layer = {
        layer: fmean(
            nuclear_norm(totals[parameter_name] / sample_count)
            for parameter_name in group
        )
        for layer, group in layers.items()
        if layer not in failures
    }
    return norm_by_layer, failures, sample_count


def by_batch(
    run: Differentiable,
    data: Data,
    layers: Mapping[str, Sequence[str]],
    batch: int,
    probe: Callable[[str, Sequence[str], Mapping[str, Tensor]], None],
) -> tuple[dict[str, str], int]:
    """Probe every layer in every batch, by the gradients of the batch's summed loss.

    The gradients keep their graph.

    Args:
        layers: names of the parameters of each layer.
        probe: a function of a layer, its parameters' names, and the gradients by name.

    Returns:
        Layer -> why it cannot be probed, and the number of samples.
    """
    all_parameters = list(itertools.chain.from_iterable(layers.values()))
    tensors = [run.parameters[parameter_name] for parameter_name in all_parameters]
    failures: dict[str, str] = {}
    sample_count = 0
    for index, (x, y) in enumerate(batches(data, batch, run.model)):
        _, losses = run.forward(x, y, index)
        gradients = torch.autograd.grad(
            losses.sum(), tensors, create_graph=True, allow_unused=True
        )
        gradient_by_name = dict(zip(all_parameters, gradients, strict=True))
        for layer, parameter_names in layers.items():
            if layer in failures:
                continue
            if index == 0 and differentiable_once(
                gradient_by_name[parameter_name] for parameter_name in parameter_names
            ):
                failures[layer] = CUT
                continue
            try:
                probe(layer, parameter_names, gradient_by_name)
            except NoValue as reason:
                failures[layer] = str(reason)
        sample_count += len(y)
        del (
            losses,
            gradients,
            gradient_by_name,
        )  # this batch's graph, before the next one's is built
    return failures, sample_count


def nuclear_norm(product: Tensor) -> float:
    """Return the sum of singular values of a tensor [out, rest].

    For [out, in, kernel] it is their mean over the input channels. A vector counts as one column. The result is NaN if
    an entry is not finite.
    """
    if not bool(torch.isfinite(product).all()):
        return math.nan
    if product.ndim < 3:
        return float(
            torch.linalg.matrix_norm(
                product.reshape(len(product), -1)
                if product.ndim
                else product.reshape(1, 1),
                "nuc",
            )
        )
    slices = product.transpose(0, 1).flatten(2)
    return float(torch.linalg.matrix_norm(slices, "nuc").mean())


def _direction(like: Tensor, generator: torch.Generator) -> Tensor:
    v = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    return (v / v.norm()).to(like)


@dataclass(frozen=True)
class NuclearNorm:
    """The options of the nuclear norm.

    Attributes:
        dtype: floating type of the computation; None is the model's own.
    """

    dtype: torch.dtype | None = None


def nuclear_norms(measurement: Measurement, options: NuclearNorm) -> list[Row]:
    """Return one row a client and layer: the nuclear norm of :func:`released` over the layer's weights, not biases."""
    rows, batch = [], measurement.batch or 256
    for subject in measurement.subjects:
        model, data = subject.model, subject.data
        run = Differentiable(model, measurement.loss, options.dtype, measurement.seed)
        modes = set_mode(model, measurement.mode), twice_differentiable(model)
        with modes[0], modes[1], torch.enable_grad():
            norm_by_layer, failures, sample_count = _norms(
                run, data, measurement.layers, batch
            )
        for layer in measurement.layers:
            norm = norm_by_layer.get(layer.name, math.nan)
            status = failures.get(layer.name, "ok")
            if status == "ok" and not math.isfinite(norm):
                status = f"the norm of layer {layer.name!r} is not finite"
            rows.append(
                row(
                    "hessian_trace", norm if status == "ok" else None, status=status, client=subject.client,
                    layer=layer.name, variant="released", unit=UNIT,
                    estimator="nuclear norm of H v(probes=1)" if status == "ok" else "",
                    n_params=sum(run.parameters[parameter_name].numel() for parameter_name in layer.weights),
                    n_samples=sample_count, n_train=subject.n_train,
                )
            )  # fmt: skip
        measurement.tick(subject.client)
    return rows


def _norms(
    run: Differentiable, data: Data, layers: Sequence[Layer], batch: int
) -> tuple[dict[str, float], dict[str, str], int]:
    """Return what :func:`released` does, and why other layers have no value."""
    first_batch = next(batches(data, batch, run.model))
    try:
        reached_names, _ = verdicts(run.forward(*first_batch, 0)[0], run.parameters)
        groups = {
            layer.name: [
                parameter_name
                for parameter_name in layer.weights
                if parameter_name in reached_names
            ]
            for layer in layers
        }
        used_groups = {
            parameter_name: group for parameter_name, group in groups.items() if group
        }
        norm_by_layer, failures, sample_count = released(run, data, used_groups, batch)
    except NoValue as error:
        reason = str(error)
        sample_count = sum(len(y) for _, y in batches(data, batch))
        return {}, {layer.name: reason for layer in layers}, sample_count
    for layer in layers:
        if layer.name not in used_groups:
            failures[layer.name] = why_unreadable(layer, "weights", False)
    return norm_by_layer, failures, sample_count


@dataclass(frozen=True)
class Shifts(SimilarityOptions):
    """The options of the angle over shifts. There is only one treatment of positions."""

    positions: str = "released"
    treatments: ClassVar[tuple[str, ...]] = ("released",)


def angles_over_shifts(measurement: Measurement, options: Shifts) -> list[Row]:
    """Return one row a layer and pair of clients: the angle in radians that PLayer-FL's authors computed.

    * Convolutions: the least angle over all circular shifts of one side's maps, with samples x positions as rows
      (:func:`figures.player_fl.shifts.least_angle`).
    * Token sequences: the angle of the sums over tokens. They include padding. The authors' were masked.
    * Others: the plain angle.

    The authors' figures added 0.5 to layers after convolutions. This does not. It holds the maps of one layer of all
    models, and passes the probe once a layer.
    """
    comparison = LayerComparison("procrustes", measurement, options)
    return comparison.rows(
        *by_shifts(comparison), estimator="full, least over shifts", unit="rad"
    )


def by_shifts(comparison: LayerComparison) -> tuple[Faults, Value]:
    """Return Procrustes angles over shifts, as PLayer-FL's authors measured them, layer by layer."""
    faults: dict[Spot, str] = {}
    angle_by_pair: dict[tuple[Spot, Spot], float | str] = {}
    for path in comparison.paths:
        flat = [False]

        def arrange(module: nn.Module, output: Tensor, flat: list[bool] = flat) -> Tensor:  # fmt: skip
            x = by_position(module, output)
            flat[0] = x.ndim < 3 or (x.ndim == 3 and not along_one(module))
            if flat[0] and x.ndim == 3:
                return x.sum(1)
            return x

        def side(x: Tensor, flat: list[bool] = flat) -> Tensor:
            dtype = torch.promote_types(x.dtype, torch.float32)
            if flat[0]:
                return PROCRUSTES.side(x)
            return unit_maps(x.to(dtype))

        sides, new_faults = comparison.sides(side, [path], arrange)
        faults |= new_faults
        for a, b in itertools.combinations(sides, 2):
            if flat[0]:
                angle_by_pair[a, b] = PROCRUSTES.between(sides[a], sides[b])
            elif sides[a].shape[:-1] != sides[b].shape[:-1]:
                angle_by_pair[a, b] = "positions that differ between the two clients"
            else:
                angle_by_pair[a, b] = least_angle(sides[a], sides[b])
    return faults, lambda a, b: angle_by_pair[a, b]


class ReleasedTables(SensitivityAccumulator):
    """An accumulator that treats embedding tables as PLayer-FL's released code does: means before the product.

    Take tokens x [n, T]. The rows that the batch looks up are averaged over its samples: W[t] = (1/n) sum_i w[x_it] and
    G[t] = (1/n) sum_i g[x_it]. The table's importance is the mean over the T d entries of (W G)^2. Other tensors have
    the mean over entries of (w g)^2 as always. A table that is not looked up by [n, T] is used whole.

    Args:
        ids: the rows that the batch looks up, by the table's name. They are removed when they are read.
    """

    def __init__(
        self, layers: Sequence[Layer], tensors: str, reduce: str, ids: Looked
    ) -> None:
        super().__init__(layers, tensors, reduce)
        self._ids = ids

    @torch.no_grad()
    def update(self, params: Tree, grads: Tree, n: int = 1) -> None:
        """Add one step of ``n`` samples."""
        for table_name in self._tables & self._known & grads.keys():
            table_tensors, width = (
                (params[table_name], grads[table_name]),
                params[table_name][0].numel(),
            )
            for ids in self._ids.pop(table_name, []):
                is_batched = ids.ndim > 1 and len(ids) == n
                w, g = (
                    tensor[ids].mean(0) if is_batched else tensor
                    for tensor in table_tensors
                )
                norm = torch.linalg.vector_norm(w * g, dtype=torch.float64)
                self._add(table_name, norm.square_(), width, w.numel() // width)
        other_grads = {
            table_name: g
            for table_name, g in grads.items()
            if table_name not in self._tables
        }
        super().update(params, other_grads, n)


Looked = dict[str, list[Tensor]]


def _looks(model: nn.Module, looked_rows: Looked) -> AbstractContextManager[None]:
    """Record which rows the model's embedding tables look up inside a block."""

    def hook_for(name: str) -> Hook:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            looked_rows.setdefault(name, []).append(inputs[0].detach())

        return hook

    hooks = {
        path: hook_for(f"{path}.weight")
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    return with_hooks(model, hooks)


@dataclass(frozen=True)
class Published(Sensitivity):
    """The options of federation sensitivity as in the published figures: one batch and the mean over a layer's tensors.

    Attributes:
        single_batch: samples of the batch, which is drawn with replacement as in the released code.
        seen: what the batch looks up in embedding tables.
    """

    reduce: str = "mean_of_tensors"
    single_batch: int = FIGURE_BATCH
    seen: Looked = field(default_factory=dict)

    when: ClassVar[str] = "figure"
    estimator: ClassVar[str] = "single_batch"
    of_tables: ClassVar[str] = "mean rows, released code"

    def meter(self, layers: Sequence[Layer]) -> ReleasedTables:
        return ReleasedTables(layers, self.tensors, self.reduce, self.seen)


def published_sensitivity(measurement: Measurement, options: Published) -> list[Row]:
    """Return rows of S_l for each client and combined (client ""), and of I_l for each client."""
    batch_clients = [
        replace(subject, data=_draw(subject, options.single_batch, measurement.seed))
        for subject in measurement.subjects
    ]
    with ExitStack() as hook_stack:
        for client in batch_clients:
            hook_stack.enter_context(_looks(client.model, options.seen))
        return one_pass(
            replace(measurement, subjects=batch_clients, batch=None), [options]
        )


def _draw(subject: ClientModel, size: int, seed: int) -> Data:
    """Draw ``size`` samples of the subject's data with replacement."""
    with torch_seeded(
        seed_of(seed, "diagnose", subject.client)
    ):  # a shuffling loader draws its order
        data_batches = list(batches(subject.data, None))
    x, y = (torch.cat([data_batch[k] for data_batch in data_batches]) for k in (0, 1))
    index = torch.randint(
        len(x),
        (size,),
        generator=torch_generator(seed, "sensitivity batch", subject.client),
    )
    return x[index.to(x.device)], y[index.to(y.device)]


_VARIANTS = ("released",)
hessian_trace = replace(
    METRICS["hessian_trace"],
    compute=nuclear_norms,
    options_type=NuclearNorm,
    variants=_VARIANTS,
)
procrustes = replace(
    METRICS["procrustes"],
    compute=angles_over_shifts,
    options_type=Shifts,
    variants=_VARIANTS,
)
federation_sensitivity = replace(
    METRICS["federation_sensitivity"], compute=published_sensitivity, options_type=Published, default_variant="figure",
    variants=("figure", "importance"), uses_gradient_pass=False, needs_all_layers=True,
)  # fmt: skip
