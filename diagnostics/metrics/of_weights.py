"""Metrics of weights and of cost. They need no forward pass of the samples. All sums are float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_core import tree
from fl_core.costs.layers import SIZES, WORK, step_work
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.rows import Row, row
from fl_core.seeds import seed_of, torch_seeded

from ..gradients.statistics import cosine, entries
from ..measurement import (
    ClientModel,
    Measurement,
    Tensors,
    batches,
    tensors_of,
    to_device,
)
from .base import metric


@dataclass(frozen=True)
class WeightOptions:
    """The options of weight metrics: which tensors of a layer are read, ``weights`` or ``all``.

    Raises:
        UsageError: the choice of tensors is unknown.
    """

    tensors: Tensors = "weights"


def vector_of(values: Mapping[str, Tensor], layer: Layer, tensors: str) -> Tensor:
    """Return the layer's floating tensors as one float64 vector [n], empty without any."""
    floating = [
        values[name]
        for name in tensors_of(layer, tensors)
        if values[name].is_floating_point()
    ]
    return entries(floating) if floating else torch.empty(0, dtype=torch.float64)


def reason_missing(layer: Layer, tensors: str, *vectors: Tensor) -> str:
    """Return why nothing can be computed from the layer's vectors, or ""."""
    if not all(map(len, vectors)):
        return (
            "the layer has no weights"
            if tensors == "weights"
            else "the layer has no parameters"
        )
    finite = all(bool(v.isfinite().all()) for v in vectors)
    return "" if finite else f"the weights of layer {layer.name!r} are not finite"


def each_layer(
    measurement: Measurement,
) -> Iterator[tuple[ClientModel, dict[str, nn.Parameter], Layer, dict[str, Any]]]:
    """Yield every client's parameters with each layer, and the columns that name client and layer in a row.

    The measurement's progress moves after each client.
    """
    for subject in measurement.subjects:
        params = dict(subject.model.named_parameters())
        for layer in measurement.layers:
            where = {
                "client": subject.client,
                "layer": layer.name,
                "n_train": subject.n_train,
            }
            yield subject, params, layer, where
        measurement.tick(subject.client)


def weight_row(
    metric: str,
    variant: str,
    value: float,
    status: str,
    n: int,
    tensors: str,
    **columns: Any,
) -> Row:
    """Return a row of a metric of ``n`` weights, without a value if ``status`` gives a reason."""
    return row(
        metric,
        None if status else value,
        status=status or "ok",
        variant=variant,
        stderr=None if status else 0.0,
        estimator="weights" + (", all tensors" if tensors == "all" else ""),
        n_params=n,
        **columns,
    )


@metric(
    description="mean absolute value and length of a layer's weights, the importance of magnitude pruning",
    direction="higher = larger weights",
    how="what magnitude pruning ranks by",
    variants=("mean_abs", "l2"),
    look={"label": "weight magnitude", "meaning": "higher = larger", "log": True},
    requires="weights",
)
def weight_magnitude(measurement: Measurement, options: WeightOptions) -> list[Row]:
    """Return two rows a client and layer: ``mean_abs`` = (1/n) sum_j |w_j| and ``l2`` = ||w||_2 of its n weights.

    Both are at least 0. Magnitude pruning gives a layer's weights this importance (Han et al. 2015; Li et al. 2017).

    Memory: one layer's weights of one client at a time, in float64.
    """
    rows = []
    for _, params, layer, where in each_layer(measurement):
        w = vector_of(params, layer, options.tensors)
        status = reason_missing(layer, options.tensors, w)
        mean = float(w.abs().mean()) if len(w) else 0.0
        for variant, value in (
            ("mean_abs", mean),
            ("l2", float(torch.linalg.vector_norm(w))),
        ):
            rows.append(
                weight_row(
                    "weight_magnitude",
                    variant,
                    value,
                    status,
                    len(w),
                    options.tensors,
                    **where,
                )
            )
    return rows


NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Modules whose ``weight`` scales what they have normalised."""


@metric(
    description="mean absolute scale of a layer's normalisations, the importance of network slimming",
    direction="higher = the normalised channels are let through stronger",
    how="what network slimming ranks by",
    variants=("mean_abs",),
    look={
        "label": "scale of normalisations",
        "meaning": "higher = let through stronger",
    },
    requires="weights",
)
def bn_scale(measurement: Measurement) -> list[Row]:
    """Return one row a client and layer: (1/n) sum_j |gamma_j| over the scales of the layer's normalisations.

    The value is at least 0. It is network slimming's importance of channels (Liu et al. 2017), averaged over a layer.
    Batch, layer, group and RMS normalisation count. A layer without a scale has no value.

    Memory: one layer's scales of one client at a time.
    """
    rows = []
    for subject, params, layer, where in each_layer(measurement):
        scales = _scales(subject.model)
        gammas = [params[name] for name in layer.parameters if name in scales]
        gamma = entries(gammas) if gammas else torch.empty(0, dtype=torch.float64)
        status = "" if len(gamma) else "no normalisation with a scale in the layer"
        if not status and not bool(gamma.isfinite().all()):
            status = f"the scales of layer {layer.name!r} are not finite"
        value = float(gamma.abs().mean()) if len(gamma) else 0.0
        rows.append(
            weight_row(
                "bn_scale", "mean_abs", value, status, len(gamma), "weights", **where
            )
        )
    return rows


def _scales(model: nn.Module) -> set[str]:
    """Return the names of the scales of a model's normalisations."""
    modules = model.named_modules(remove_duplicate=False)
    return {
        f"{path}.weight".lstrip(".")
        for path, module in modules
        if isinstance(module, NORMS)
    }


@dataclass(frozen=True)
class UpdateMagnitude(WeightOptions):
    """The options of update magnitude: the initial weights, and which tensors are read.

    Attributes:
        start: the common start, as a model or as tensors by exact name. Without it no row has a value.
    """

    start: Mapping[str, Tensor] | nn.Module | None = None

    @property
    def origin(self) -> Mapping[str, Tensor] | None:
        """The initial weights, by exact name."""
        return (
            tree.named_tensors(self.start)
            if isinstance(self.start, nn.Module)
            else self.start
        )


@metric(
    description="how far a layer's weights have moved from the common start",
    direction="higher = moved further; 0 = not moved",
    how="distance from the common start",
    variants=("relative_l2", "l2"),
    look={"label": "update magnitude", "meaning": "0 = not moved", "log": True},
    requires="weights",
)
def update_magnitude(measurement: Measurement, options: UpdateMagnitude) -> list[Row]:
    """Return two rows a client and layer: how far its weights w have moved from the common start w0.

    The rows are ``relative_l2`` = ||w - w0|| / ||w0|| and ``l2`` = ||w - w0||. Both are at least 0, and 0 means not
    moved.

    Memory: one layer's weights of one client at a time and of the start, in float64.

    Raises:
        UsageError: the start lacks a tensor or has one of another shape.
    """
    origin = options.origin
    rows = []
    for _, params, layer, where in each_layer(measurement):
        status = (
            ""
            if origin is not None
            else "the common start is not known; give it as the option start"
        )
        w, w0 = (
            vector_of(params, layer, options.tensors),
            torch.empty(0, dtype=torch.float64),
        )
        if origin is not None:
            _check_start(
                origin,
                {name: params[name] for name in tensors_of(layer, options.tensors)},
            )
            w0 = vector_of(origin, layer, options.tensors).to(w.device)
            status = reason_missing(layer, options.tensors, w, w0)
        moved = float(torch.linalg.vector_norm(w - w0)) if not status else 0.0
        base = float(torch.linalg.vector_norm(w0))
        zero = (
            ""
            if base or status
            else f"the weights of layer {layer.name!r} were zero at the start"
        )
        for variant, value, why in (
            ("relative_l2", moved / (base or 1.0), zero),
            ("l2", moved, ""),
        ):
            rows.append(
                weight_row(
                    "update_magnitude",
                    variant,
                    value,
                    status or why,
                    len(w),
                    options.tensors,
                    **where,
                )
            )
    return rows


def _check_start(start: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    for name, tensor in params.items():
        check_known("tensor of the start", name, start)
        if start[name].shape != tensor.shape:
            raise UsageError(
                f"{name!r} of the start must be {tuple(tensor.shape)}, as in the model; got {tuple(start[name].shape)}."
            )


@metric(
    description="relative or angular distance between the clients' weights of a layer",
    direction="higher = further apart; 0 = equal",
    how="relative distance, or one minus the cosine, of all pairs",
    variants=("relative_l2", "cosine"),
    look={"label": "mean distance of weights to the others", "meaning": "0 = equal"},
    pairs=True,
    distance=True,
    requires="weights",
)
def weight_divergence(measurement: Measurement, options: WeightOptions) -> list[Row]:
    """Return two rows a pair of clients and layer, from the clients' weights a and b of the layer.

    * ``relative_l2``: ||a - b|| / (0.5 (||a|| + ||b||)), in [0, 2]. 0 = equal, higher = further apart.
    * ``cosine``: 1 - <a, b> / (||a|| ||b||), in [0, 2]. 0 = same direction, 1 = at right angles, 2 = opposite.

    Memory: one layer's weights of every client at a time, in float64.
    """
    for subject in measurement.subjects:
        measurement.tick(subject.client)
    variants = ("relative_l2", "cosine")
    subjects = measurement.subjects
    if len(subjects) < 2:
        status = "needs at least two models"
        return [
            weight_row(
                "weight_divergence",
                variant,
                0,
                status,
                0,
                options.tensors,
                layer=layer.name,
            )
            for layer in measurement.layers
            for variant in variants
        ]
    rows = []
    params = [dict(subject.model.named_parameters()) for subject in subjects]
    for layer in measurement.layers:
        vectors = [
            vector_of(own, layer, options.tensors).cpu() for own in params
        ]  # one layer of every client at a time
        for i, j in itertools.combinations(range(len(subjects)), 2):
            a, b = vectors[i], vectors[j]
            status = reason_missing(layer, options.tensors, a, b)
            lengths = [float(torch.linalg.vector_norm(v)) for v in (a, b)]
            zero = subjects[i if not lengths[0] else j].client
            both = sum(lengths)
            distance = (
                float(torch.linalg.vector_norm(a - b)) / (0.5 * both)
                if both and not status
                else 0.0
            )
            angle = 0.0 if 0 in lengths or status else 1 - cosine(a, b)
            whose = (
                f"the weights of layer {layer.name!r} are zero at client {zero!r}"
                if 0 in lengths
                else ""
            )
            where = {
                "client": subjects[i].client,
                "client_b": subjects[j].client,
                "layer": layer.name,
            }
            for variant, value, why in (
                ("relative_l2", distance, "" if both else whose),
                ("cosine", angle, whose),
            ):
                rows.append(
                    weight_row(
                        "weight_divergence",
                        variant,
                        value,
                        status or why,
                        len(a),
                        options.tensors,
                        **where,
                    )
                )
    return rows


UNITS = {
    "bytes": "byte",
    "forward_flops": "FLOP",
    "backward_flops": "FLOP",
    "activation_bytes": "byte",
}
SAMPLES = 2
"""Samples of the pass that is counted; normalisation in train mode refuses a single one."""


@metric(
    description="parameters, bytes, training FLOPs and activation memory of a layer",
    direction="higher = costs more",
    how=(
        "FLOPs forward and backward, memory kept for the backward pass; `plan_cost` adds up what a plan sends and saves"
    ),
    unit={
        "bytes": "byte",
        "forward_flops": "FLOP",
        "backward_flops": "FLOP",
        "activation_bytes": "byte",
    },
    variants=(
        "parameters",
        "bytes",
        "forward_flops",
        "backward_flops",
        "activation_bytes",
    ),
    look={"label": "cost of a layer", "log": True, "beside": ("costs",)},
    requires="samples",
    needs_all_layers=True,
)
def layer_cost(measurement: Measurement) -> list[Row]:
    """Return five rows a client and layer.

    The clients' models are alike, so the first model's costs are everyone's. The measurement's layers must be all
    layers of the network.

    * ``parameters``: scalars of its parameters, frozen ones included. Sharing the layer sends them too.
    * ``bytes``: parameters and persistent buffers as they are stored. Sharing the layer sends this much one way.
    * ``forward_flops``, ``backward_flops``: FLOPs of one training sample when every parameter trains
      (:mod:`fl_core.costs.flops`). Matrix products, convolutions and attention count. A multiply-add is two, everything
      elementwise is zero.
    * ``activation_bytes``: what the forward pass of one sample keeps for the backward pass, without parameters and
      buffers. A tensor that several operations keep counts once, at the first.

    An operation belongs to the layer whose module is running. Outside the layers' modules it belongs to the layer that
    ran last, or before any to the first. So the layers sum to the whole network. An unused layer has a size but no
    work.

    Memory: one training step on two samples, whatever the data.
    """
    rows: list[Row] = []
    work, layers, seed = None, measurement.layers, measurement.seed
    for subject in measurement.subjects:
        if work is None:
            with torch_seeded(seed_of(seed, "diagnose", "cost")):
                x, _ = next(batches(subject.data, SAMPLES))
            x = to_device(subject.model, x[:SAMPLES])
            # one sample twice where there is only one
            work = step_work(
                subject.model,
                x if len(x) > 1 else torch.cat([x, x]),
                layers,
                mode=measurement.mode,
                seed=seed,
            )
        tensors, known = (
            tree.named_tensors(subject.model),
            {name for name, _ in subject.model.named_parameters()},
        )
        for layer in layers:
            n = sum(tensors[name].numel() for name in layer.tensors if name in known)
            sizes = {
                "parameters": n,
                "bytes": tree.n_bytes(tree.select(tensors, layer.tensors)),
            }
            for variant in (*SIZES, *WORK):
                lacking = variant in WORK and not layer.used
                value = (
                    sizes.get(variant, 0.0)
                    if variant in SIZES
                    else getattr(work, variant).get(layer.name, 0.0)
                )
                rows.append(
                    row(
                        "layer_cost",
                        None
                        if lacking
                        else value / (1 if variant in SIZES else SAMPLES),
                        status="unused in the forward pass" if lacking else "ok",
                        client=subject.client,
                        layer=layer.name,
                        variant=variant,
                        stderr=None if lacking else 0.0,
                        estimator={
                            "bytes": "storage",
                            "parameters": "count",
                            "activation_bytes": "saved_tensors",
                        }.get(variant, "flop_counter"),
                        unit=UNITS.get(variant, ""),
                        n_params=n,
                        n_samples=0 if variant in SIZES else SAMPLES,
                        n_train=subject.n_train,
                    )
                )
        measurement.tick(subject.client)
    return rows
