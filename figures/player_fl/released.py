"""The quantities that PLayer-FL's released code computes for the Hessian and for the similarity of samples.

Both are metrics under the names that the paper gives them, with rows of the variant ``released``. Name one as
``figures.player_fl.released:hessian_trace`` or ``figures.player_fl.released:procrustes``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diagnostics.capture import Data
from diagnostics.client_model import ClientModel, Measurement
from diagnostics.curvature.exact import Verdict
from diagnostics.curvature.hessian import UNUSED, TraceResult, Way, check_probes, measured
from diagnostics.curvature.model import Differentiable, curvature
from diagnostics.curvature.sampled import Estimates, by_batch
from diagnostics.metrics.base import METRICS
from diagnostics.metrics.hessian_trace import rows_of
from diagnostics.representation.comparison import Faults, LayerComparison, SimilarityOptions, Spot, Value
from diagnostics.representation.moments import PROCRUSTES, Kept
from diagnostics.representation.passes import unseen
from diagnostics.representation.probe import NoValue, Place, along_one, arranged, by_position
from figures.player_fl.shifts import least_angle, unit_maps
from fl_core.layers import Layer
from fl_core.rows import Row
from fl_core.seeds import torch_generator


def released(
    run: Differentiable, data: Data, layers: Mapping[str, Sequence[str]], batch: int, probes: int
) -> tuple[Estimates, dict[str, str], int]:
    """Return the mean over a layer's weight tensors W of the nuclear norm of H_W v.

    The vector v is Gaussian of unit length. The value is neither a trace nor a sum of eigenvalues. It is at least 0,
    depends on v, and grows as the square root of the rank times ||H v||. The product H_W v is read as a matrix [out,
    rest], and its singular values are added up. For a convolution, each input channel gives a matrix [out, kernel], and
    their sums are averaged (PLayer-FL's released code). H is the Hessian of the mean loss over all samples. The
    released code took one batch.

    Returns:
        Values with their standard errors over ``probes`` draws of v; layer -> why there is no value; the number of
        samples. With one draw, as the authors used, the standard error is NaN.
    """
    names = [name for group in layers.values() for name in group]
    generator = {name: torch_generator(run.seed, "released probe", name) for name in names}
    directions = {name: [_direction(run.parameters[name], generator[name]) for _ in range(probes)] for name in names}
    totals = {
        name: [torch.zeros_like(run.parameters[name], dtype=torch.float64) for _ in range(probes)] for name in names
    }

    def probe(layer: str, names: Sequence[str], gradients: Mapping[str, Tensor]) -> None:
        for name in names:
            for v, total in zip(directions[name], totals[name], strict=True):
                total += curvature([gradients[name]], [v], [run.parameters[name]])[0]

    failures, n = by_batch(run, data, layers, batch, probe)
    estimates = {}
    for layer, group in layers.items():
        if layer not in failures:
            drawn = torch.tensor(
                [[nuclear_norm(total / n) for total in totals[name]] for name in group], dtype=torch.float64
            ).mean(0)
            estimates[layer] = (float(drawn.mean()), float(drawn.std()) / math.sqrt(probes) if probes > 1 else math.nan)
    return estimates, failures, n


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
                product.reshape(len(product), -1) if product.ndim else product.reshape(1, 1), "nuc"
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
        probes: number of random vectors, at least 1, which is the authors' number.
        dtype: floating type of the computation; None is the model's own.
    """

    probes: int = 1
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_probes(self.probes, 1)


def nuclear_norms(measurement: Measurement, options: NuclearNorm) -> list[Row]:
    """Return one row a client and layer: the nuclear norm of :func:`released` over the layer's weights, not biases."""

    def plan(verdict: Verdict, layer: Layer) -> Way:
        if not any(name in verdict.reached for name in layer.weights):
            return Way(status="the layer has no weights" if not layer.weights else UNUSED)
        return Way("nuclear norm of H v", options.probes, sample=released, only_weights=True)

    shared: dict[str, Any] = {"loss": measurement.loss, "batch": measurement.batch, "seed": measurement.seed}
    shared |= {"layers": measurement.layers, "plan": plan, "mode": measurement.mode, "dtype": options.dtype}
    return rows_of(measurement, partial(measured, **shared), {"released": _numbers})


def _numbers(result: TraceResult) -> tuple[float, float]:
    return result.trace, result.stderr


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
    return comparison.rows(*by_shifts(comparison), estimator="full, least over shifts", unit="rad")


def by_shifts(comparison: LayerComparison) -> tuple[Faults, Value]:
    """Return Procrustes angles over shifts, as PLayer-FL's authors measured them, layer by layer."""
    if comparison.empty:
        return unseen(comparison)
    faults: dict[Spot, str] = {}
    values: dict[tuple[Spot, Spot], float | str] = {}
    for path in comparison.paths:
        spots = [(path, client) for client in range(len(comparison.subjects))]
        maps, plain = {}, Kept(len(spots), len(comparison.x))
        for spot, subject in zip(spots, comparison.subjects, strict=True):
            try:
                seen = _seen(comparison, subject, path)
                if seen.ndim > 3 or (seen.ndim == 3 and along_one(subject.model.get_submodule(path))):
                    maps[spot] = unit_maps(seen)
                else:
                    seen = seen.sum(1) if seen.ndim == 3 else seen
                    plain.take(spot[1], (0, len(seen)), seen)
                    plain.done(spot[1])
            except NoValue as reason:
                faults[spot] = str(reason)
            if path == comparison.paths[-1]:
                comparison.measurement.tick(subject.client)
        plain.prepare(PROCRUSTES)
        faults |= {(path, client): reason for client, reason in plain.faults.items()}
        sound = [spot for spot in spots if spot not in faults]
        for k, a in enumerate(sound):
            for b in sound[k + 1 :]:
                if a in maps and b in maps and maps[a].shape[:-1] == maps[b].shape[:-1]:
                    values[a, b] = least_angle(maps[a], maps[b])
                elif a in maps or b in maps:
                    values[a, b] = "positions that differ between the two clients"
                else:
                    values[a, b] = float(PROCRUSTES.value(plain.product(a[1], b[1])))
    return faults, lambda a, b: values[a, b]


def _seen(comparison: LayerComparison, subject: ClientModel, path: str) -> Tensor:
    """Return a module's outputs for all probe samples, [n, *positions, d]."""
    parts: dict[Place, Tensor] = {}
    faults: list[NoValue] = []

    def take(path: str, place: Place, module: nn.Module, output: Tensor) -> None:
        try:
            arranged(module, output, place, "flatten")
        except NoValue as reason:
            faults.append(reason)
        else:
            x = by_position(module, output).clone()
            parts[place] = x if x.dtype in (torch.float32, torch.float64) else x.float()

    comparison.watch(subject, take, paths=[path])
    if faults:
        raise faults[0]
    if list(parts) != comparison.where:
        raise NoValue("not computed in every forward pass")
    shapes = list(dict.fromkeys(part.shape[1:] for part in parts.values()))
    if len(shapes) > 1:
        raise NoValue(f"shape {tuple(shapes[1])} after {tuple(shapes[0])} in an earlier batch")
    return torch.cat(list(parts.values()))


_VARIANTS = ("released",)
hessian_trace = replace(METRICS["hessian_trace"], compute=nuclear_norms, options_type=NuclearNorm, variants=_VARIANTS)
procrustes = replace(METRICS["procrustes"], compute=angles_over_shifts, options_type=Shifts, variants=_VARIANTS)
