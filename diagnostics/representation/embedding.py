"""Features of all clients embedded in a plane by t-SNE, and class centres there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor, nn

from fl_core.errors import (
    ABOVE_0,
    UsageError,
    about,
    at_least,
    check_known,
    check_value,
)
from fl_core.layers import Layer, layers_of
from fl_core.seeds import seed_of, torch_seeded
from fl_core.tree import set_mode

from ..measurement import Data, NoValue, example
from .features import Array, collect, constant

LEAST_ITERATIONS = at_least(250)
"""The fewest iterations of t-SNE. In the first 250 it exaggerates distances."""
COLUMNS = ("client", "class", "x", "y", "sample")


@dataclass(frozen=True, eq=False)
class Pool:
    """Features of all clients' samples, with the class and the client of each sample.

    Attributes:
        x: the features, [n, d].
        classes: the name of each sample's class, [n]. It is "" for labels that are no
            classes.
        clients: the name of each sample's client, [n].
        sample: the position of each sample in its client's data, [n].
    """

    x: Array
    classes: Array
    clients: Array
    sample: Array


def pool(
    models: nn.Module | Mapping[str, nn.Module],
    data: Mapping[str, Data],
    layer: str | None = None,
    *,
    at: str = "output",
    classes: Sequence[str] | None = None,
    samples: int = 1000,
    seed: int = 0,
) -> Pool:
    """Collect one layer's features of every client's samples, by the client's own model, flattened.

    Args:
        models: {client: model}, or one model for all.
        data: {client: data}.
        layer: exact name of the layer. Default: the last layer, whose input is read, whatever ``at`` is.
        at: the layer's ``"output"`` or ``"input"``.
        classes: names of the classes. Default: their numbers.
        samples: maximum number of samples, drawn with the seed, equally many of each client.
            Each client has at least one.
        seed: seed of the drawn samples.

    Raises:
        UsageError: there are no models, the layer is unknown, a client has no data,
            features are missing or not finite or differ in width, or there are fewer
            names than classes.
    """
    if isinstance(models, nn.Module):
        models = dict.fromkeys(data, models)
    if not models:
        raise UsageError("models must have at least one entry; got no models.")
    parts, labels, clients, sample_positions = [], [], [], []
    for client, model in models.items():
        client_data = data[check_known("client with data", client, data)]
        x, _ = example(model, client_data, seed)
        used_layers = {layer.name: layer for layer in layers_of(model, x) if layer.used}
        if layer is not None:
            name, input_or_output = (layer, at)
        else:
            name, input_or_output = ([*used_layers][-1], "input")
        chosen_layer = used_layers[check_known("layer", name, used_layers)]
        path = chosen_layer.output
        if input_or_output == "input":
            path = _first_module(model, chosen_layer, x)
        samples_of_client = max(samples // len(models), 1)
        features = collect(
            model,
            [path],
            client_data,
            at=input_or_output,
            samples=samples_of_client,
            seed=seed,
        )
        with about(
            f"{input_or_output} of layer {name!r} at client {client!r}", NoValue
        ):
            parts.append(features.at(path))
        labels.append(features.y)
        clients += [str(client)] * len(features.y)
        sample_positions.append(features.sample)
    widths = {part.shape[1] for part in parts}
    if len(widths) > 1:
        widths_there = sorted(widths)
        raise UsageError(
            f"features must have one width at all clients; got {widths_there}."
        )
    y = np.concatenate(labels)
    if y.ndim > 1 or y.dtype.kind == "f":  # numbers, or labels by position
        y, classes = np.zeros(len(y), dtype=int), ("",)
    if classes is not None and len(classes) <= y.max():
        raise UsageError(
            f"classes must have a name for each label; got {len(classes)} names and label {y.max()}."
        )
    class_names = np.array(
        [str(k) if classes is None else classes[k] for k in y], dtype=object
    )
    return Pool(
        np.concatenate(parts),
        class_names,
        np.array(clients, dtype=object),
        np.concatenate(sample_positions),
    )


def _first_module(model: nn.Module, layer: Layer, x: Tensor) -> str:
    """Return the path of the module whose input is the layer's: the layer itself, or the first of its modules.

    If a forward pass calls none of them, it is the module whose output is the layer's.

    Args:
        model: the model, which is left as it was.
        layer: the layer.
        x: samples for the forward pass, [n, ...].
    """
    names = {
        layer.name,
        *(
            name.rpartition(".")[0].partition(".parametrizations")[0]
            for name in layer.tensors
        ),
    }
    called_paths: list[str] = []
    with (
        set_mode(model, "eval"),
        torch_seeded(0),
        torch.no_grad(),
    ):  # which also takes the hooks away
        for path, module in model.named_modules():
            if path in names:
                module.register_forward_pre_hook(
                    lambda module, inputs, path=path: called_paths.append(path)
                )
        model(x)
    if layer.name in called_paths:
        return layer.name
    prefixes = {path: f"{path}." if path else "" for path in called_paths}
    inner_paths = [
        path
        for path in called_paths
        if not any(
            other_path != path and other_path.startswith(prefixes[path])
            for other_path in called_paths
        )
    ]
    return [*inner_paths, layer.output][0]


def embed(
    pooled: Pool, *, perplexity: float = 30.0, iterations: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """Embed pooled features by t-SNE: a row per sample with client, class, x, y and sample.

    The method is that of van der Maaten and Hinton 2008. It starts from the first two principal components and runs in
    one thread. So the same features give the same picture. Distances are Euclidean between features as they are. Axes
    have no meaning, neither by themselves nor between two pictures. For n samples the
    perplexity is at most (n - 1) / 3. The one that is used is
    ``frame.attrs["perplexity"]``.

    Args:
        pooled: the features, of at least 4 samples.
        perplexity: about how many neighbours of a sample count.
        iterations: number of steps, at least 250.
        seed: seed of t-SNE.

    Raises:
        UsageError: there are fewer than 4 samples or 250 iterations, the perplexity is not above 0, or features do not
            vary.
    """
    check_value("perplexity", perplexity, ABOVE_0)
    check_value("iterations", iterations, LEAST_ITERATIONS)
    n = len(pooled.x)
    if n < 4:
        raise UsageError(f"samples of t-SNE must be at least 4; got {n}.")
    if constant(pooled.x):
        raise UsageError(
            "features of t-SNE must vary over the samples; got constant ones."
        )
    from sklearn.manifold import TSNE

    x = pooled.x.astype(np.float64)
    x -= x.mean(axis=0)
    x /= np.abs(x).max()
    x = np.pad(x, ((0, 0), (0, max(0, 2 - x.shape[1]))))  # two components to start from
    used_perplexity = min(perplexity, (n - 1) / 3)
    model = TSNE(
        2, perplexity=used_perplexity, max_iter=iterations, init="pca",
        random_state=seed_of(seed, "diagnose", "tsne") % 2**32,
        learning_rate="auto", method="barnes_hut" if n >= 100 else "exact", n_jobs=1,
    )  # fmt: skip
    with threadpool_limits(1):
        positions = model.fit_transform(x)
    frame = pd.DataFrame(
        {
            "client": pooled.clients, "class": pooled.classes, "x": positions[:, 0].astype(float),
            "y": positions[:, 1].astype(float), "sample": pooled.sample,
        }
    )  # fmt: skip
    frame.attrs = {"perplexity": float(used_perplexity)}
    return frame


def centroids(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the mean position of each client's samples of each class.

    Rows have client, class, x, y and the number n of samples.

    Args:
        frame: the samples, as :func:`embed` returns them.
    """
    groups = frame.groupby(["client", "class"], sort=False)
    return groups.agg(x=("x", "mean"), y=("y", "mean"), n=("x", "size")).reset_index()
