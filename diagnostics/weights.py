"""What the weights alone say of a layer: their size, how far they moved, and how far the clients are apart.

No forward pass: a layer that the network does not use has values like any other. All sums are float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_core import tree
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.rows import Row, row
from fl_core.training.losses import Loss

from .gradient_similarity import cosine
from .gradients import TENSORS, Subject, Tick, entries, quiet, tensors_of

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Modules whose ``weight`` scales what they have normalised."""


def _vector(values: Mapping[str, Tensor], layer: Layer, tensors: str) -> Tensor:
    """The layer's floating tensors as one row of float64, [n]; empty where it has none."""
    found = [values[name] for name in tensors_of(layer, tensors) if values[name].is_floating_point()]
    return entries(found) if found else torch.empty(0, dtype=torch.float64)


def _lacking(layer: Layer, tensors: str, *vectors: Tensor) -> str:
    """Why there is nothing to compute from the layer's vectors, or ""."""
    if not all(map(len, vectors)):
        return "the layer has no weights" if tensors == "weights" else "the layer has no parameters"
    finite = all(bool(v.isfinite().all()) for v in vectors)
    return "" if finite else f"the weights of layer {layer.name!r} are not finite"


def _row(metric: str, variant: str, value: float, status: str, n: int, tensors: str, **columns: Any) -> Row:
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


def weight_divergence(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss | None = None,
    batch: int | None = None,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    tensors: str = "weights",
) -> list[Row]:
    """Two rows a pair of clients and layer, from the clients' weights a and b of the layer.

    * ``relative_l2``: ||a - b|| / (0.5 (||a|| + ||b||)), in [0, 2]; 0 = equal, higher = further apart.
    * ``cosine``: 1 - <a, b> / (||a|| ||b||), in [0, 2]; 0 = same direction, 1 = at right angles, 2 = opposite.

    Memory: one layer's weights of every client at a time, in float64.

    Raises:
        UsageError: an unknown choice of tensors.
    """
    check_known("choice of tensors", tensors, TENSORS)
    for subject in subjects:
        tick(subject.client)
    variants = ("relative_l2", "cosine")
    if len(subjects) < 2:
        status = "needs at least two models"
        return [
            _row("weight_divergence", variant, 0, status, 0, tensors, layer=layer.name)
            for layer in layers
            for variant in variants
        ]
    found = []
    params = [dict(subject.model.named_parameters()) for subject in subjects]
    for layer in layers:
        vectors = [_vector(own, layer, tensors).cpu() for own in params]  # one layer of every client at a time
        for i, j in itertools.combinations(range(len(subjects)), 2):
            a, b = vectors[i], vectors[j]
            status = _lacking(layer, tensors, a, b)
            lengths = [float(torch.linalg.vector_norm(v)) for v in (a, b)]
            zero = subjects[i if not lengths[0] else j].client
            both = sum(lengths)
            distance = float(torch.linalg.vector_norm(a - b)) / (0.5 * both) if both and not status else 0.0
            angle = 0.0 if 0 in lengths or status else 1 - cosine(a, b)
            whose = f"the weights of layer {layer.name!r} are zero at client {zero!r}" if 0 in lengths else ""
            where = {"client": subjects[i].client, "client_b": subjects[j].client, "layer": layer.name}
            for variant, value, why in (
                ("relative_l2", distance, "" if both else whose),
                ("cosine", angle, whose),
            ):
                found.append(_row("weight_divergence", variant, value, status or why, len(a), tensors, **where))
    return found


def update_magnitude(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss | None = None,
    batch: int | None = None,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    start: Mapping[str, Tensor] | nn.Module | None = None,
    tensors: str = "weights",
) -> list[Row]:
    """Two rows a client and layer: how far its weights w have moved from the weights w0 that all clients started with.

    ``relative_l2`` = ||w - w0|| / ||w0|| and ``l2`` = ||w - w0||; at least 0, 0 = not moved.

    Memory: one layer's weights of one client at a time, and those of the start, in float64.

    Args:
        start: the common start, as a model or as tensors by exact name. Without it no row has a value.

    Raises:
        UsageError: an unknown choice of tensors; a start that lacks a tensor or has one of another shape.
    """
    check_known("choice of tensors", tensors, TENSORS)
    origin = tree.live(start) if isinstance(start, nn.Module) else start
    found = []
    for subject in subjects:
        params = dict(subject.model.named_parameters())
        for layer in layers:
            names = tensors_of(layer, tensors)
            status = "" if origin is not None else "the common start is not known; give it as the option start"
            w, w0 = _vector(params, layer, tensors), torch.empty(0, dtype=torch.float64)
            if origin is not None:
                _check_start(origin, {name: params[name] for name in names})
                w0 = _vector(origin, layer, tensors).to(w.device)
                status = _lacking(layer, tensors, w, w0)
            moved = float(torch.linalg.vector_norm(w - w0)) if not status else 0.0
            base = float(torch.linalg.vector_norm(w0))
            zero = "" if base or status else f"the weights of layer {layer.name!r} were zero at the start"
            where = {"client": subject.client, "layer": layer.name, "n_train": subject.n_train}
            for variant, value, why in (("relative_l2", moved / (base or 1.0), zero), ("l2", moved, "")):
                found.append(_row("update_magnitude", variant, value, status or why, len(w), tensors, **where))
        tick(subject.client)
    return found


def _check_start(start: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    for name, tensor in params.items():
        check_known("tensor of the start", name, start)
        if start[name].shape != tensor.shape:
            raise UsageError(
                f"the start's {name!r} is {tuple(start[name].shape)}; the model's is {tuple(tensor.shape)}"
            )


def weight_magnitude(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss | None = None,
    batch: int | None = None,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    tensors: str = "weights",
) -> list[Row]:
    """Two rows a client and layer: ``mean_abs`` = (1/n) sum_j |w_j| and ``l2`` = ||w||_2 of its n weights; at least 0.

    The importance that magnitude pruning gives a layer's weights (Han et al. 2015; Li et al. 2017).

    Memory: one layer's weights of one client at a time, in float64.

    Raises:
        UsageError: an unknown choice of tensors.
    """
    check_known("choice of tensors", tensors, TENSORS)
    found = []
    for subject in subjects:
        params = dict(subject.model.named_parameters())
        for layer in layers:
            w = _vector(params, layer, tensors)
            status = _lacking(layer, tensors, w)
            where = {"client": subject.client, "layer": layer.name, "n_train": subject.n_train}
            mean = float(w.abs().mean()) if len(w) else 0.0
            for variant, value in (("mean_abs", mean), ("l2", float(torch.linalg.vector_norm(w)))):
                found.append(_row("weight_magnitude", variant, value, status, len(w), tensors, **where))
        tick(subject.client)
    return found


def bn_scale(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss | None = None,
    batch: int | None = None,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
) -> list[Row]:
    """One row a client and layer: (1/n) sum_j |gamma_j| over the scales of the layer's normalisations; at least 0.

    Network slimming's importance of channels (Liu et al. 2017), averaged over a layer. Batch, layer, group and RMS
    normalisation count; a layer without a scale has no value.

    Memory: one layer's scales of one client at a time.
    """
    found = []
    for subject in subjects:
        params = dict(subject.model.named_parameters())
        scales = {
            f"{path}.weight".lstrip(".")
            for path, module in subject.model.named_modules(remove_duplicate=False)
            if isinstance(module, NORMS)
        }
        for layer in layers:
            own = [params[name] for name in layer.parameters if name in scales]
            gamma = entries(own) if own else torch.empty(0, dtype=torch.float64)
            status = "" if len(gamma) else "no normalisation with a scale in the layer"
            if not status and not bool(gamma.isfinite().all()):
                status = f"the scales of layer {layer.name!r} are not finite"
            value = float(gamma.abs().mean()) if len(gamma) else 0.0
            where = {"client": subject.client, "layer": layer.name, "n_train": subject.n_train}
            found.append(_row("bn_scale", "mean_abs", value, status, len(gamma), "weights", **where))
        tick(subject.client)
    return found
