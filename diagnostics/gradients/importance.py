"""First-order importance of layers, summed during a pass or during training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_core.errors import UsageError, check_known, listing
from fl_core.layers import Layer

from ..measurement import TENSORS, tensors_of
from ..null import PARTS

REDUCE = ("pooled", "mean_of_tensors")

Result = Mapping[str, Any]
"""What :meth:`SensitivityAccumulator.result` gives."""


def trainable_names(layer: Layer, tensors: str) -> tuple[str, ...]:
    """Return the names of the layer's trainable parameters that importance reads: its weights, or all."""
    return tuple(
        name for name in tensors_of(layer, tensors) if name not in layer.frozen
    )


class SensitivityAccumulator:
    """Sum of the importance I_l = (1 / n_l) sum (w g)^2 of every layer over the steps of an epoch.

    I_l is the first-order Taylor importance of Molchanov et al. per weight (PLayer-FL, Eq. 1 and 2). Weights w and
    gradients g are taken at the step, before the optimiser moves w. An update costs one product and one norm a tensor.
    Nothing is copied to the host. The sums are float64: one for each tensor and each part. Steps are assigned in turn
    to the parts. A step on a short last batch counts as any other, as it does for the weights that it moves. So I_l is
    a mean over steps, not over samples. A tensor that is frozen or that no gradient reached counts neither in the sum
    nor in n. An embedding table counts at each step with the rows that have a gradient.

    Args:
        layers: in the order of the network.
        tensors: ``"weights"`` (default) or ``"all"`` parameters.
        reduce: ``"pooled"`` sums over all entries of a layer and divides by their number (Eq. 2). With
            ``"mean_of_tensors"`` a layer is the plain mean of its tensors' own importances (the published figures).

    Raises:
        UsageError: a choice is unknown. On the first update: no parameter of the layers is among the gradients.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        tensors: str = "weights",
        reduce: str = "pooled",
    ) -> None:
        self._tables = {name for layer in layers for name in layer.tables}
        self._touched: dict[str, Tensor] = {}
        self.tensors = check_known("choice of tensors", tensors, TENSORS)
        self.reduce = check_known("reduction of a layer", reduce, REDUCE)
        self._names = {layer.name: trainable_names(layer, tensors) for layer in layers}
        self._known = {name for names in self._names.values() for name in names}
        self._sums: dict[str, Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._steps = 0

    @torch.no_grad()
    def update(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], n: int = 1
    ) -> None:
        """Add one step; every step counts once, whatever its number ``n`` of samples."""
        names = [
            name for name in grads if name in self._known and grads[name] is not None
        ]
        if grads and self._known and not self._known & grads.keys():
            raise UsageError(
                f"gradients must be of the layers' parameters, such as {listing(sorted(self._known), 3)}; "
                f"got {listing(grads, 3)}. Pass the layers of the same model."
            )
        for name in names:
            w, g = params[name], grads[name]
            # the norm in float64 squares there too: products far below 1 do not vanish, and no copy is made
            norm = torch.linalg.vector_norm(w * g, dtype=torch.float64)
            if name in self._tables:
                touched = (g != 0).flatten(1).any(1).sum()
                self._add(name, norm.square_(), w[0].numel(), touched)
            else:
                self._add(name, norm.square_(), w.numel())
        self._steps += 1

    def _add(
        self, name: str, square: Tensor, size: int, rows: Tensor | int | None = None
    ) -> None:
        """Add one tensor's sum over ``size`` entries to the step's part.

        With ``rows``, ``size`` is the number of entries in each row.
        """
        if name not in self._sums:
            self._sums[name] = square.new_zeros(PARTS)
            self._sizes[name] = size
            if rows is not None:
                self._touched[name] = square.new_zeros(PARTS)
        part = self._steps % PARTS
        self._sums[name][part].add_(square)
        if rows is not None:
            self._touched[name][part].add_(rows)

    def _part_steps(self) -> list[int]:
        """Return the number of steps of each part that has any."""
        return [(self._steps - part - 1) // PARTS + 1 for part in range(self.parts)]

    def _totals(self, each: Tensor) -> Tensor:
        """Return a tensor's sum over all steps, then the sum of each part that has steps, [1 + parts]."""
        return torch.cat([each.sum(0, keepdim=True), each[: self.parts]])

    def _layer(self, reached: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return a layer's importance over all steps and over each part's, and each one's weight, [1 + parts].

        A weight is a number of steps, or of the entries that counted at them if tables were looked up.
        """
        sums = torch.stack([self._totals(self._sums[name]) for name in reached])
        steps = sums.new_tensor([self._steps, *self._part_steps()])
        sizes = sums.new_tensor([self._sizes[name] for name in reached])
        sizes = sizes[:, None].expand_as(sums).clone()
        weights = steps
        for k, name in enumerate(reached):
            if name in self._touched:  # rows a step; a table without any has a sum of 0
                rows = self._totals(self._touched[name]) / steps
                sizes[k] *= rows.clamp_min(1.0 / self._steps)
                weights = sizes.sum(0) * steps
        if self.reduce == "pooled":
            values = sums.sum(0) / sizes.sum(0)
        else:
            values = (sums / sizes).mean(0)
        return values / steps, weights

    def result(self) -> dict[str, Any]:
        """Return JSON: ``layers`` that gradients reached, their ``importance`` and the number of ``steps``.

        An importance of null is not finite. For resamples, ``parts`` has the steps and importances of each part, and
        the part's weight in a draw. Steps are assigned to parts in turn.
        """
        values, weights = {}, []
        for layer, names in self._names.items():
            reached = [name for name in names if name in self._sums]
            if reached:
                found, weight = self._layer(reached)
                values[layer] = [
                    v if math.isfinite(v) else None for v in found.tolist()
                ]
                weights.append(weight.tolist())
        parts = [
            {
                "steps": steps,
                "importance": [each[k] for each in values.values()],
                "weights": [each[k] for each in weights],
            }
            for k, steps in enumerate(self._part_steps(), 1)
        ]
        return {
            "layers": [*values],
            "importance": [each[0] for each in values.values()],
            "steps": self._steps,
            "parts": parts,
        }

    @property
    def parts(self) -> int:
        """Number of parts into which steps are divided for resampling."""
        return min(self._steps, PARTS)

    def redraw(self, times: Sequence[int]) -> ResampledImportance:
        """Return the accumulator that would have resulted if each part had come ``times`` times."""
        return ResampledImportance(resample(self.result(), times))


@dataclass(frozen=True)
class ResampledImportance:
    """A resampled result that takes the place of its accumulator."""

    given: Result

    def result(self) -> Result:
        """Return the resampled result, in the form of :meth:`SensitivityAccumulator.result`."""
        return self.given


def resample(result: Result, times: Sequence[int]) -> dict[str, Any]:
    """Return a result with each part's steps counted t_k times: sum_k t_k w_k I^k / sum_k t_k w_k.

    The weight w_k is the part's number of steps. For a layer with embedding tables it is the number of entries that
    counted in them, since its I^k is a mean over these. The result is the importance of the steps drawn, with one
    exception: with ``reduce="mean_of_tensors"`` a layer with a table and other tensors has means with a weight each.
    """
    parts = list(zip(times, result["parts"], strict=True))
    values: list[float | None] = []
    for k in range(len(result["layers"])):
        weights = [
            count * (part["weights"][k] if "weights" in part else part["steps"])
            for count, part in parts
        ]
        column = [part["importance"][k] for _, part in parts]
        known = not any(value is None for value in column)
        values.append(
            math.fsum(map(math.prod, zip(weights, column, strict=True))) / sum(weights)
            if known
            else None
        )
    return {
        "layers": result["layers"],
        "importance": values,
        "steps": sum(c * part["steps"] for c, part in parts),
    }
