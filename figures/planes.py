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
    pooled: Pool, label_columns: Mapping[str, Any], neighbours: int = 10
) -> Iterator[rows.Row]:
    """Yield rows of how well the features separate classes and clients.

    * ``silhouette_class``, ``silhouette_client``: mean silhouette with the classes (clients) as clusters, from -1 to 1
      (Rousseeuw 1987). Higher means further apart. Good shared features are high in the first and low in the second.
    * ``purity_class``, ``purity_client``: share of a sample's nearest neighbours that have its class (client).

    With a single class or client a score has a status and no value.

    Args:
        label_columns: columns of every row.
    """
    x = pooled.x.astype(np.float64)
    neighbour_search = NearestNeighbors(
        n_neighbors=min(neighbours, len(x) - 1), algorithm="brute"
    )
    neighbour_index = neighbour_search.fit(x).kneighbors(return_distance=False)
    columns = {"n_samples": len(x), **label_columns}
    for group_name, group_labels in (
        ("class", pooled.classes),
        ("client", pooled.clients),
    ):
        if not 1 < len(set(group_labels)) < len(x):
            columns["status"] = (
                "one class or client only, or as many as there are samples"
            )
            yield rows.row(f"silhouette_{group_name}", None, **columns)
            yield rows.row(f"purity_{group_name}", None, **columns)
            continue
        is_same_group = group_labels[neighbour_index] == group_labels[:, None]
        yield rows.row(
            f"silhouette_{group_name}", silhouette_score(x, group_labels), **columns
        )
        yield rows.row(f"purity_{group_name}", is_same_group.mean(), **columns)


def placed(
    pooled: Pool, seed: int, label_columns: Mapping[str, Any]
) -> Iterator[rows.Row]:
    """Yield every sample's place in the plane of t-SNE, and the perplexity; :func:`plane` reads them back.

    Args:
        label_columns: columns of every row.
    """
    positions = embed(pooled, seed=seed)
    yield rows.row(
        PERPLEXITY,
        positions.attrs["perplexity"],
        n_samples=len(pooled.x),
        **label_columns,
    )
    for position in positions.to_dict("records"):
        sample_columns = {
            "client": str(position["client"]),
            "variant": f"sample {position['sample']}>{position['class']}",
            **label_columns,
        }
        yield rows.row(X, position["x"], **sample_columns)
        yield rows.row(Y, position["y"], **sample_columns)


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
    plane_rows = where(frame, run=run, seed=seed)
    plane_rows = plane_rows[plane_rows["metric"].isin([X, Y, PERPLEXITY])]
    plane_rows = plane_rows[
        plane_rows["layer"] == (plane_rows["layer"].iloc[0] if layer is None else layer)
    ]
    samples = (
        plane_rows[plane_rows["metric"] != PERPLEXITY]
        .pivot(index=["client", "variant"], columns="metric", values="value")
        .reset_index()
        .rename(columns={X: "x", Y: "y"})
    )
    name_parts = samples.pop("variant").str.removeprefix("sample ").str.partition(">")
    samples["sample"], samples["class"] = name_parts[0].astype(int), name_parts[2]
    (perplexity,) = where(plane_rows, metric=PERPLEXITY)["value"]
    samples.attrs = {"perplexity": perplexity}
    return samples
