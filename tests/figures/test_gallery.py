"""The gallery: a picture of every metric from the committed rows, and commands that parse."""

import re

import numpy as np
import pytest

from diagnostics.metrics.base import METRICS
from fedlayers.cli.app import command_class, parse_command
from figures import gallery, items
from figures.__main__ import main

ROOM = 120_000
STORED = gallery.STUDY.read(gallery.STUDY.path())


@pytest.mark.slow
@pytest.mark.usefixtures("no_training")
def test_the_committed_page_and_pictures_are_of_the_stored_rows(tmp_path):
    main(["gallery", "--out", str(tmp_path)])
    fresh = (
        (tmp_path / "gallery.md")
        .read_text()
        .replace("](gallery/", "](pictures/gallery/")
    )
    assert fresh == gallery.PAGE.read_text()
    names = [entry.name for entry in gallery.entries(*STORED)]
    assert re.findall(r"!\[.*\]\(pictures/gallery/(\w+)\.png\)", fresh) == names
    pictures = {path.name for path in (items.PICTURES / "gallery").iterdir()}
    assert pictures == {f"{name}.png" for name in names}
    assert pictures == {path.name for path in (tmp_path / "gallery").iterdir()}
    assert all(
        (items.PICTURES / "gallery" / name).stat().st_size < ROOM for name in pictures
    )


def test_each_picture_says_its_direction_and_how_it_is_made():
    entries = {entry.name: entry for entry in gallery.entries(*STORED)}
    assert set(METRICS) - set(entries) == {"clients_differ", "layer_tuning"}
    for name, entry in entries.items():
        assert entry.says.endswith("."), name
        says = entry.says.casefold()
        if name in METRICS:
            parts = METRICS[name].direction.casefold().split("; ")
            assert all(part in says for part in [*parts, "unit: "])
        lines = entry.command.splitlines()
        if lines[0].startswith("fedlayers"):
            for line in lines:
                words = line.removeprefix("fedlayers ").split()
                assert isinstance(parse_command(words), command_class(words[0]))
        else:
            compile(entry.command, name, "exec")


LOW = {"cca", "cka", "rbf_cka", "svcca", "grad_similarity"}
"""Metrics with a low value where clients differ."""


def place_of(metric):
    """The layer and the client at the end that matters, by loops; the client is None where all are alike."""
    frame = STORED[1]
    rows = frame[(frame["metric"] == metric) & frame["value"].notna()]
    chosen = {"hessian_spectrum": "top1", "layer_cost": "parameters"}.get(metric)
    values = {}
    for row in rows.itertuples():
        if chosen in (None, row.variant):
            for client in {row.client, row.client_b} - {""}:
                values.setdefault(row.layer, {}).setdefault(client, []).append(
                    row.value
                )
    sign = -1 if metric in LOW else 1

    def mean(layer):
        return sign * np.mean(
            [np.mean(client_values) for client_values in values[layer].values()]
        )

    layer = max(values, key=mean)
    at_layer = {
        client: sign * np.mean(client_values)
        for client, client_values in values[layer].items()
    }
    low, high = min(at_layer.values()), max(at_layer.values())
    client = max(at_layer, key=at_layer.get) if high - low > 0.01 * abs(high) else None
    return layer, client


def test_each_picture_concludes_at_a_layer_or_client_that_its_rows_name():
    frame = STORED[1]
    entries = {entry.name: entry.concludes for entry in gallery.entries(*STORED)}
    page = gallery.PAGE.read_text()
    clients = {*frame["client"]} - {""}
    for name, sentence in entries.items():
        words = set(re.findall(r"[\w.]*\w", sentence))
        assert re.fullmatch(r"[^.]+(?:\.\w[^.]*)*\.", sentence), name
        assert f"**{sentence}** " in page, name
        assert words & (clients | ({*frame["layer"]} - {""})), name
        if name in METRICS:
            layer, client = place_of(name)
            assert name == "output_disagreement" or layer in words, name
            assert client in words if client else "as at the others" in sentence, name
            assert not words & clients - {client} or client is None, name
    first, second = re.findall(r"client_\d", entries["cka_matrices"])
    cka = frame[frame["metric"] == "cka"]
    least = cka[(cka["client"] == first) & (cka["client_b"] == second)]["value"].min()
    assert least == cka["value"].min()
    counts = frame[frame["metric"] == "samples"].set_index(["client", "variant"])
    shares = counts["value"] / counts["value"].groupby("client").sum()
    client, name = shares.idxmax()
    assert entries["partition"].startswith(f"{client} ")
    assert f"{shares.max():.0%} are {name}" in entries["partition"]
    costs = frame[frame["metric"] == "layer_cost"].groupby(["variant", "layer"])
    sent = costs["value"].mean()["bytes"].idxmax()
    assert entries["costs"].startswith(f"{sent} is most of what is sent")
    points = frame[frame["metric"].isin(["tsne_x", "tsne_y"])]
    middle = points.groupby("metric")["value"].mean()
    centres = points.groupby(["client", "metric"])["value"].mean().unstack()
    furthest = ((centres - middle) ** 2).sum(axis=1).idxmax()
    assert f" {furthest} " in entries["tsne"]
    plan = gallery.select.select(
        (STORED[0]["runs"]["images"], frame[frame["run"] == "images"]),
        threshold=1.2,
        variant="training",
    )
    same = [*plan.why.votes.values()].count(plan.shared[-1])
    assert f"up to {plan.shared[-1]}: {same} of 4 clients" in entries["plan"]
