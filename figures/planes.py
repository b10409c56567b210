"""Features in a plane as rows and back: t-SNE of pooled samples, and how far their classes and clients part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from sklearn.metrics import silhouette_score
from sklearn.neighbors import NearestNeighbors

from diagnostics.representation.embedding import Pool, embed
from figures.recipe import where
from fl_core import rows

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


def scored(
    pooled: Pool, named: Mapping[str, Any], neighbours: int = 10
) -> Iterator[rows.Row]:
    """Yield rows of how well the features separate classes and clients.

    * ``silhouette_class``, ``silhouette_client``: mean silhouette with the classes (clients) as clusters, from -1 to 1
      (Rousseeuw 1987). Higher means further apart. Good shared features are high in the first and low in the second.
    * ``purity_class``, ``purity_client``: share of a sample's nearest neighbours that have its class (client).

    With a single class or client a score has a status and no value.

    Args:
        named: columns of every row.
    """
    x = pooled.x.astype(np.float64)
    neighbour_search = NearestNeighbors(
        n_neighbors=min(neighbours, len(x) - 1), algorithm="brute"
    )
    nearest = neighbour_search.fit(x).kneighbors(return_distance=False)
    columns = {"n_samples": len(x), **named}
    for name, groups in (("class", pooled.classes), ("client", pooled.clients)):
        if not 1 < len(set(groups)) < len(x):
            columns["status"] = (
                "one class or client only, or as many as there are samples"
            )
            yield rows.row(f"silhouette_{name}", None, **columns)
            yield rows.row(f"purity_{name}", None, **columns)
            continue
        same_group = groups[nearest] == groups[:, None]
        yield rows.row(f"silhouette_{name}", silhouette_score(x, groups), **columns)
        yield rows.row(f"purity_{name}", same_group.mean(), **columns)


def placed(pooled: Pool, seed: int, named: Mapping[str, Any]) -> Iterator[rows.Row]:
    """Yield every sample's place in the plane of t-SNE, and the perplexity; :func:`plane` reads them back.

    Args:
        named: columns of every row.
    """
    places = embed(pooled, seed=seed)
    yield rows.row(
        PERPLEXITY, places.attrs["perplexity"], n_samples=len(pooled.x), **named
    )
    for place in places.to_dict("records"):
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
    """Return a run's samples in the plane, as :func:`diagnostics.representation.embedding.embed` returns them.

    A sample's two rows have the metrics ``tsne_x`` and ``tsne_y``. The column ``layer`` names the place of the
    feature, or FedPFT's prompts. ``variant`` has its place among the client's test samples and its class: ``sample
    12>cat``.

    Args:
        layer: default the first that was stored.
    """
    part = where(frame, run=run, seed=seed)
    part = part[part["metric"].isin([X, Y, PERPLEXITY])]
    part = part[part["layer"] == (part["layer"].iloc[0] if layer is None else layer)]
    samples = (
        part[part["metric"] != PERPLEXITY]
        .pivot(index=["client", "variant"], columns="metric", values="value")
        .reset_index()
        .rename(columns={X: "x", Y: "y"})
    )
    named = samples.pop("variant").str.removeprefix("sample ").str.partition(">")
    samples["sample"], samples["class"] = named[0].astype(int), named[2]
    (perplexity,) = where(part, metric=PERPLEXITY)["value"]
    samples.attrs = {"perplexity": perplexity}
    return samples
