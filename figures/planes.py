"""Features in a plane as rows and back: t-SNE of pooled samples, and how far their classes and clients part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from sklearn.metrics import silhouette_score
from sklearn.neighbors import NearestNeighbors

from diagnostics.representation.embedding import Pool, embed
from fl_core import rows
from fl_core.errors import UsageError

X, Y, PERPLEXITY = "tsne_x", "tsne_y", "tsne_perplexity"
CLUSTERED = {
    "silhouette_class": "silhouette by class",
    "purity_class": "purity by class",
    "silhouette_client": "silhouette by client",
    "purity_client": "purity by client",
}
"""Scores of pooled features and what they are called."""
MEANING = (
    "A silhouette lies between -1 and 1 and is higher if groups are further apart. A purity is the share of the 10 "
    "nearest features of the same class or client. Both are of the features themselves and not of the plane."
)


def scores(pooled: Pool, neighbours: int = 10) -> dict[str, float]:
    """Measure how well the features separate classes and clients; NaN with a single class or client.

    * ``silhouette_class``, ``silhouette_client``: mean silhouette with the classes (clients) as clusters, from -1 to 1
      (Rousseeuw 1987). Higher means further apart. Good shared features are high in the first and low in the second.
    * ``purity_class``, ``purity_client``: share of a sample's nearest neighbours that have its class (client).
    """
    x = pooled.x.astype(np.float64)
    k = min(neighbours, len(x) - 1)
    if k < 1:
        raise UsageError(f"samples must be at least 2; got {len(x)}.")
    near = (
        NearestNeighbors(n_neighbors=k, algorithm="brute")
        .fit(x)
        .kneighbors(return_distance=False)
    )
    numbers = {}
    for name, groups in (("class", pooled.classes), ("client", pooled.clients)):
        many = len(set(groups))
        sound = 2 <= many < len(x)
        numbers[f"silhouette_{name}"] = (
            float(silhouette_score(x, groups)) if sound else float("nan")
        )
        numbers[f"purity_{name}"] = (
            float((groups[near] == groups[:, None]).mean())
            if many > 1
            else float("nan")
        )
    return numbers


def scored(pooled: Pool, named: Mapping[str, Any]) -> Iterator[rows.Row]:
    """The scores of pooled features. With only one class or client a score has a status and no value."""
    for name, value in scores(pooled).items():
        status = (
            "ok"
            if np.isfinite(value)
            else "one class or client only, or as many as there are samples"
        )
        yield rows.row(name, value, n_samples=len(pooled.x), status=status, **named)


def placed(pooled: Pool, seed: int, named: Mapping[str, Any]) -> Iterator[rows.Row]:
    """Every sample's place in the plane of t-SNE, and the perplexity; :func:`plane` reads them back.

    Args:
        named: columns of every row.
    """
    found = embed(pooled, seed=seed)
    yield rows.row(
        PERPLEXITY, found.attrs["perplexity"], n_samples=len(pooled.x), **named
    )
    for place in found.to_dict("records"):
        what = {
            "client": str(place["client"]),
            "variant": f"sample {place['sample']}>{place['class']}",
            **named,
        }
        yield rows.row(X, place["x"], **what)
        yield rows.row(Y, place["y"], **what)


def plane(
    frame: pd.DataFrame, run: str, layer: str | None = None, seed: int = 0
) -> pd.DataFrame:
    """A run's samples in the plane, as :func:`diagnostics.representation.embedding.embed` returns them.

    A sample's two rows have the metrics ``tsne_x`` and ``tsne_y``. The column ``layer`` names the place of the
    feature, or FedPFT's prompts. ``variant`` has its place among the client's test samples and its class: ``sample
    12>cat``.

    Args:
        layer: default the first that was stored.
    """
    part = frame[
        (frame["run"] == run)
        & (frame["seed"] == seed)
        & frame["metric"].isin([X, Y, PERPLEXITY])
    ]
    part = part[part["layer"] == (part["layer"].iloc[0] if layer is None else layer)]
    places = part[part["metric"] != PERPLEXITY]
    table = places.pivot(
        index=["client", "variant"], columns="metric", values="value"
    ).reset_index()
    named = table["variant"].str.partition(">")
    sample = named[0].str.removeprefix("sample ").astype(int)
    samples = pd.DataFrame(
        {
            "client": table["client"],
            "class": named[2],
            "x": table[X],
            "y": table[Y],
            "sample": sample,
        }
    )
    samples.attrs = {
        "perplexity": float(part.loc[part["metric"] == PERPLEXITY, "value"].iloc[0])
    }
    return samples
