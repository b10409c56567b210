"""The metrics by name: what each computes, what a high value means, and which variants it has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.rows import Row
from fl_core.training import losses

from . import costs, gradient_similarity, gradient_statistics, noise, probes, scatter, sensitivity, similarity, weights
from .curvature.rows import hessian_rows, spectrum_rows
from .gradients import GradientMetric, quiet

_COMMON = ("subjects", "layers", "loss", "batch", "seed", "mode", "tick")


@dataclass(frozen=True)
class Metric:
    """A metric by name.

    Attributes:
        compute: ``compute(subjects, layers, *, loss, batch, seed, mode, tick, **options) -> list[Row]``. It checks its
            options before it looks at a client.
        description, direction: one line each; the direction says what a higher value means.
        variants: of its rows, the default first.
        shared: gives, for the same options, what reads a pass over the gradients together with other metrics.
        pairs: whether a value belongs to two clients.
        reads: what of a client: the ``losses`` of its samples, ``samples`` without labels, or only the ``weights``.
        whole: whether it needs all layers of the network to give the value of one.
        distance: of pairs: whether a value is a distance, 0 = same, and not a similarity, 1 = same.
    """

    name: str
    compute: Callable[..., list[Row]]
    description: str
    direction: str
    variants: tuple[str, ...]
    shared: Callable[..., GradientMetric | None] | None = None
    pairs: bool = False
    distance: bool = False
    reads: str = "losses"
    whole: bool = False

    @property
    def variant(self) -> str:
        """The default variant."""
        return self.variants[0]

    def check(self, layers: Sequence[Layer], *, batch: int | None = 256, mode: str = "eval", **options: Any) -> None:
        """Refuse options that the metric cannot take: without clients it checks them and does no more.

        Raises:
            UsageError: names the metric, and the option or its value and what it may be.
        """
        for name in options:
            check_known(f"option of {self.name}", name, self.options)
        loss = losses.build("cross_entropy")
        try:
            self.compute((), layers, loss=loss, batch=batch, seed=0, mode=mode, tick=quiet, **options)
        except UsageError as error:
            raise UsageError(str(error) if self.name in str(error) else f"{self.name}: {error}") from error

    def apart(self, value: Any) -> Any:
        """How far the two clients of a value are apart: a distance itself, 1 - value of a similarity."""
        return value if self.distance else 1 - value

    @property
    def options(self) -> dict[str, Any]:
        """Names and defaults of the metric's own options."""
        parameters = inspect.signature(self.compute).parameters
        return {name: p.default for name, p in parameters.items() if name not in _COMMON}


DEFAULT = ("grad_variance", "hessian_trace", "cka", "federation_sensitivity")
"""What is measured where no metric is named."""

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "grad_variance",
            gradient_statistics.grad_variance,
            "variance over the entries of a layer's weight gradient",
            "higher = the entries of the gradient are spread wider",
            gradient_statistics.REDUCTIONS,
            shared=gradient_statistics.GradVariance,
        ),
        Metric(
            "hessian_trace",
            hessian_rows,
            "trace of a layer's block of the loss's Hessian, exact where the network allows it",
            "higher = the loss curves more upwards in the layer's weights",
            ("per_parameter", "absolute", "released"),
        ),
        Metric(
            "cka",
            similarity.cka,
            "linear CKA between the clients' representations of the same samples",
            "higher = more similar; 1 = same",
            similarity.POSITIONS,
            pairs=True,
            reads="samples",
        ),
        Metric(
            "federation_sensitivity",
            sensitivity.federation_sensitivity,
            "importance of the layers up to one, relative to the first layer",
            "higher = the layers up to here matter more to the loss; 1 at the first layer",
            (*sensitivity.WHEN, "importance"),
            shared=sensitivity.sharing,
        ),
        Metric(
            "rbf_cka",
            similarity.rbf_cka,
            "CKA with a radial kernel between the clients' representations of the same samples",
            "higher = more similar; 1 = same",
            similarity.RADIAL,
            pairs=True,
            reads="samples",
        ),
        Metric(
            "procrustes",
            similarity.procrustes,
            "orthogonal Procrustes angle between the clients' representations of the same samples",
            "higher = less similar; 0 = same up to a rotation, pi/2 = unrelated",
            similarity.PROCRUSTES,
            pairs=True,
            distance=True,
            reads="samples",
        ),
        Metric(
            "cca",
            similarity.cca,
            "mean canonical correlation between the clients' representations of the same samples",
            "higher = more similar; 1 = same up to a linear map",
            similarity.POSITIONS,
            pairs=True,
            reads="samples",
        ),
        Metric(
            "svcca",
            similarity.svcca,
            "mean canonical correlation of the principal directions that hold 99 % of the variance",
            "higher = more similar; 1 = same up to a linear map of these",
            similarity.POSITIONS,
            pairs=True,
            reads="samples",
        ),
        Metric(
            "grad_norm",
            gradient_statistics.grad_norm,
            "length and mean of a layer's weight gradient",
            "higher = the loss is steeper in the layer's weights",
            gradient_statistics.NORM_VARIANTS,
            shared=gradient_statistics.GradNorm,
        ),
        Metric(
            "grad_noise",
            noise.grad_noise,
            "trace of the covariance of a layer's per-sample gradients",
            "higher = the samples disagree more on the layer's weights",
            ("trace", "per_parameter"),
            shared=noise.GradNoise,
        ),
        Metric(
            "grad_similarity",
            gradient_similarity.grad_similarity,
            "cosine between the clients' gradients of a layer",
            "higher = more alike; 1 = same direction, -1 = opposite",
            ("cosine",),
            shared=gradient_similarity.GradSimilarity,
            pairs=True,
        ),
        Metric(
            "weight_divergence",
            weights.weight_divergence,
            "relative or angular distance between the clients' weights of a layer",
            "higher = further apart; 0 = equal",
            ("relative_l2", "cosine"),
            pairs=True,
            distance=True,
            reads="weights",
        ),
        Metric(
            "update_magnitude",
            weights.update_magnitude,
            "how far a layer's weights have moved from the common start",
            "higher = moved further; 0 = not moved",
            ("relative_l2", "l2"),
            reads="weights",
        ),
        Metric(
            "weight_magnitude",
            weights.weight_magnitude,
            "mean absolute value and length of a layer's weights, the importance of magnitude pruning",
            "higher = larger weights",
            ("mean_abs", "l2"),
            reads="weights",
        ),
        Metric(
            "bn_scale",
            weights.bn_scale,
            "mean absolute scale of a layer's normalisations, the importance of network slimming",
            "higher = the normalised channels are let through stronger",
            ("mean_abs",),
            reads="weights",
        ),
        Metric(
            "layer_cost",
            costs.layer_cost,
            "parameters, bytes, training FLOPs and activation memory of a layer",
            "higher = costs more",
            (*costs.SIZES, *costs.WORK),
            reads="samples",
            whole=True,
        ),
        Metric(
            "linear_probe",
            probes.linear_probe,
            "accuracy of a logistic regression on a layer's output, on samples that it was not trained on",
            "higher = a linear classifier tells the classes apart better; 1 = all right",
            probes.VARIANTS,
        ),
        Metric(
            "knn_probe",
            probes.knn_probe,
            "accuracy of the vote of the nearest neighbours by a layer's output",
            "higher = neighbours are of one class more often; 1 = all right",
            probes.VARIANTS,
        ),
        Metric(
            "separability",
            scatter.separability,
            "scatter between the classes over scatter within them, of a layer's output",
            "higher = the classes lie further apart",
            probes.VARIANTS,
        ),
        Metric(
            "hessian_spectrum",
            spectrum_rows,
            "largest eigenvalues of a layer's block of the loss's Hessian",
            "higher = the loss curves more upwards along the sharpest direction of the layer's weights",
            ("top1", "top2", "top3"),
        ),
    )
}
