"""Clients' features in a plane: what is pooled, the same picture every time, the numbers beside it, what is drawn."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from torch import nn

from diagnostics import plots
from diagnostics.measure import tsne
from diagnostics.plots.drawing import COLOURS, MARKERS
from diagnostics.representation.embedding import centroids, embed, pool
from tests.conftest import refuses
from tests.diagnostics.made import pair, parted
from tests.made import Wired, mlp


def test_the_pool_holds_each_client_s_features_by_its_own_model():
    models, data = (
        {"a": mlp(4, 40, 3, seed=0), "b": mlp(4, 40, 3, seed=1)},
        {"b": pair(20, 1), "a": pair(30, 0)},
    )
    for layer, end in (("0", 1), (None, 2)):  # by default what the classifier takes in
        pooled = pool(models, data, *filter(None, [layer]), classes=["p", "q", "r"])
        x = torch.cat([models[c][:end](data[c][0]) for c in "ab"]).detach().numpy()
        np.testing.assert_allclose(pooled.x, x, atol=1e-6)
        assert pooled.clients.tolist() == ["a"] * 30 + ["b"] * 20
        assert pooled.classes.tolist() == ["pqr"[k] for c in "ab" for k in data[c][1]]
        assert pooled.sample.tolist() == [*range(30), *range(20)]
    few = pool(models, data, samples=12)
    assert [few.clients.tolist().count(c) for c in "ab"] == [6, 6]
    arguments = {"models": {"a": mlp(4, 40, 3)}, "data": {"a": pair()}}
    for how, words in (
        ({"layer": "1"}, "layer '1'"),
        ({"models": {"c": mlp(4, 40, 3)}}, "data 'c'"),
        ({"classes": ["p"]}, "1 .*label 2"),
        ({"at": "inside"}, "side"),
        ({"models": {}}, "no models"),
    ):
        with refuses(words):
            pool(**{"layer": "0", **arguments, **how})


def test_the_input_of_a_layer_is_that_of_its_first_module():
    """A normalisation belongs to the layer before it, and takes that layer's output. A list is never called."""
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(5), nn.BatchNorm1d(3)
    parts = [nn.Linear(4, 5), norms[0], nn.ReLU(), nn.Linear(5, 3), norms[1]]
    model, (x, y) = nn.Sequential(*parts).eval(), pair()
    body = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 6)])
    listed = Wired(
        lambda m, x: m.head(m.body[1](m.body[0](x + m.token))),
        token=nn.Parameter(torch.ones(4)),
        body=body,
        head=nn.Linear(6, 3),
        layer_groups=("body",),
    )
    for network, layer, how, expected in (
        (model, ["0"], {"at": "input"}, x),
        (model, [], {}, model[:3](x)),
        (listed, ["body"], {"at": "input"}, x + 1),
        (listed, [], {}, body[1](body[0](x + 1))),
    ):
        features = pool(network, {"a": (x, y)}, *layer, **how).x
        np.testing.assert_allclose(features, expected.detach().numpy(), atol=1e-6)


def drawn(ax):
    """Colour of every sample, by place."""
    markers = {}
    for part in ax.collections:
        for (x, y), colour in zip(
            part.get_offsets(), part.get_facecolors(), strict=True
        ):
            markers[round(float(x), 6), round(float(y), 6)] = to_hex(colour)
    return markers


def test_colour_is_class_marker_is_client_and_centres_are_large():
    frame = embed(parted(), iterations=250)
    ax = plots.tsne(frame)
    colours = drawn(ax)
    by_class = dict(zip("pqr", COLOURS, strict=False))
    centres = centroids(frame)
    for place in centres.itertuples():
        of_place = (frame["client"] == place.client) & (frame["class"] == place[2])
        assert (place.x, place.y) == pytest.approx(
            frame.loc[of_place, ["x", "y"]].values.sum(0) / 10
        )
    for table in (frame, centres):
        for place in table.itertuples():
            assert colours[round(place.x, 6), round(place.y, 6)] == by_class[place[2]]
    assert sum(len(part.get_offsets()) for part in ax.collections) == 60 + 6
    legend = ax.get_legend()
    keys = {
        text.get_text(): line.get_marker()
        for text, line in zip(legend.get_texts(), legend.legend_handles, strict=True)
    }
    assert [name for name in keys if len(name) == 1] == ["p", "q", "r", "a", "b"]
    assert [keys[name] for name in "ab"] == list(MARKERS[:2])


def test_the_perplexity_fits_the_number_of_samples_and_is_said():
    for n, wanted, used in ((4, 30.0, 1.0), (31, 30.0, 10.0), (60, 5.0, 5.0)):
        frame = embed(parted(n), perplexity=wanted, iterations=250)
        assert frame.attrs["perplexity"] == used
        assert (
            f"{n} samples, t-SNE, perplexity {used:g}" in plots.tsne(frame).get_xlabel()
        )
        assert np.isfinite(frame[["x", "y"]].to_numpy()).all()
    one = embed(parted(9, d=1), iterations=250)  # a layer of one feature
    assert len(one) == 9
    for how, words in (
        ({}, "at least 4; got 3"),
        ({"perplexity": 0.0}, "perplexity must be above 0"),
        ({"iterations": 249}, "iterations must be at least 250"),
    ):
        with refuses(words):
            embed(parted(60 if how else 3), **how)


def test_panels_share_colours_and_markers_and_take_given_axes():
    data = {"a": pair(30), "b": pair(30, 1)}
    before, after = (tsne(mlp(4, 40, 3), data, layer, iterations=250) for layer in "02")
    frames = {"before": before, "after": after[after["class"] != "0"]}
    _, given_axes = plt.subplots(1, 3)
    axes = plots.tsne_panels(frames, list(given_axes))
    assert axes == list(given_axes[:2])
    shown = [set(drawn(ax).values()) for ax in axes]
    assert shown == [set(COLOURS[:3]), set(COLOURS[1:3])]
    with refuses(r"at least 2.*1"):
        plots.tsne_panels(frames, [given_axes[0]])
