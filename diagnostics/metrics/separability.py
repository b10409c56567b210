"""Separability: how far apart the classes lie in a layer's output, compared with each class's own spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fl_core.bounds import at_least
from fl_core.layers import Layer
from fl_core.rows import Row, row

from ..representation.classifiers import SAMPLES
from ..representation.features import Array, NoValue, features_of, folds_of
from ..representation.scatter import Ratio, scatter_ratio
from .base import Measurement, metric


@dataclass(frozen=True)
class Separability:
    """The options of separability: how many samples are read.

    Attributes:
        samples: maximum number of samples of each client, drawn with the seed, and of all clients together in the
            pooled set.

    Raises:
        UsageError: there are fewer than 2 samples.
    """

    samples: Annotated[int, at_least(2)] = SAMPLES


@metric(
    description="scatter between the classes over scatter within them, of a layer's output",
    direction="higher = the classes lie further apart",
    how="scatter between the classes over scatter within them, with a jackknife error",
    variants=("own", "pooled"),
    pooled_variants=("pooled",),
    classes=True,
    features="own",
    look={
        "label": "class scatter, between / within",
        "meaning": "higher = classes further apart",
        "log": True,
    },
)
def separability(measurement: Measurement, options: Separability) -> list[Row]:
    """Return the scatter between the classes over the scatter within them, for each layer's flattened output.

    See :func:`diagnostics.representation.scatter.scatter_ratio`. Higher means that the classes lie further apart.
    Variant ``"own"`` uses each client's samples. Variant ``"pooled"``, client "", uses the samples of all clients, each
    with its own model. If it falls short of the clients' own values, the clients' models place a class differently.

    Memory: a forward pass of ``batch`` samples. The outputs of all layers are stored for at most ``samples`` samples of
        one client, and for ``samples`` of all clients together.

    Raises:
        UsageError: data do not fit.
    """
    subjects, layers, seed = measurement.subjects, measurement.layers, measurement.seed
    if not subjects:
        return []
    paths = sorted({layer.output for layer in layers if layer.used})
    share = max(options.samples // len(subjects), 1)
    ratios_of: list[dict[str, str | Ratio]] = []
    kept: dict[str, list[tuple[Array, Array]]] = {path: [] for path in paths}
    faults: dict[str, str] = {}
    sizes = []
    for subject in subjects:
        features = features_of(measurement, subject, paths, options.samples)
        few = np.flatnonzero(
            folds_of(features.y, -(-len(features.y) // share), seed) == 0
        )[:share]
        ratios: dict[str, str | Ratio] = {}
        for path in paths:
            try:
                x = features.at(path)
                kept[path].append((x[few], features.y[few]))
                ratios[path] = scatter_ratio(x, features.y, seed)
            except NoValue as reason:
                ratios[path] = f"at client {subject.client!r}: {reason}"
                if len(kept[path]) == len(ratios_of):
                    faults.setdefault(path, str(ratios[path]))
        ratios_of.append(ratios)
        sizes.append((len(features.y), len(few)))
        measurement.tick(subject.client)
    pooled = {path: faults.get(path) or _pool(kept[path], seed) for path in paths}
    rows = []
    for layer in layers:
        rows.append(
            _row(
                layer,
                "pooled",
                pooled.get(layer.output, ""),
                sum(few for _, few in sizes),
            )
        )
        for subject, ratios, (n, _) in zip(subjects, ratios_of, sizes, strict=True):
            where = {"client": subject.client, "n_train": subject.n_train}
            rows.append(_row(layer, "own", ratios.get(layer.output, ""), n, **where))
    return rows


def _pool(kept: Sequence[tuple[Array, Array]], seed: int) -> str | Ratio:
    if len({x.shape[1] for x, _ in kept}) > 1:
        return "at all clients: features of different widths"
    try:
        x, y = (np.concatenate(arrays) for arrays in zip(*kept, strict=True))
        return scatter_ratio(x, y, seed)
    except NoValue as reason:
        return f"at all clients: {reason}"


def _row(
    layer: Layer, variant: str, ratio: str | Ratio, n: int, **where: object
) -> Row:
    columns: dict[str, Any] = {
        "layer": layer.name,
        "variant": variant,
        "estimator": "traces, jackknife error",
        **where,
    }
    if not layer.used:
        return row(
            "separability",
            None,
            status="unused in the forward pass",
            n_samples=0,
            **columns,
        )
    if isinstance(ratio, str):
        return row(
            "separability",
            None,
            status=f"output of layer {layer.name!r} {ratio}",
            n_samples=0,
            **columns,
        )
    return row("separability", ratio[0], stderr=ratio[1], n_samples=n, **columns)
