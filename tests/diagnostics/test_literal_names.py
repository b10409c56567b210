"""Dollar signs in names are drawn as they are: they begin no formula and raise nothing."""

import warnings

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from diagnostics import plots
from diagnostics.plots.drawing import LONGEST, as_label, asian_fonts
from diagnostics.plots.page import figure_of
from tests.diagnostics.made import decision, diagnosis, results


def named(text):
    """A name that no formula can be."""
    return f"{text}$x^$" if text else ""


def renamed(frame):
    """The same rows, and every client, layer and algorithm has a name with dollar signs."""
    names = ("client", "client_b", "layer", "algorithm", "class", "run", "rule", "last")
    return frame.assign(
        **{name: frame[name].map(named) for name in names if name in frame}
    )


def cloud():
    draw = np.random.default_rng(0).normal(size=(12, 2))
    clients, classes = ["a", "b"] * 6, ["p", "p", "q", "q"] * 3
    return renamed(
        pd.DataFrame(
            {"x": draw[:, 0], "y": draw[:, 1], "class": classes, "client": clients}
        )
    )


PICTURES = {
    "cka_matrices": lambda: plots.cka_matrices(renamed(diagnosis())),
    "learning": lambda: plots.learning(renamed(results())),
    "metric": lambda: plots.metric(renamed(diagnosis()), "grad_variance"),
    "plan": lambda: plots.plan(
        decision([named("a"), named("b")], 1, rule=named("r"), values=(1.0, 2.0))
    ),
    "tsne": lambda: plots.tsne(cloud()),
}


@pytest.mark.parametrize("name", PICTURES)
def test_dollar_signs_in_names_are_drawn_as_they_are(name):
    figure = figure_of(PICTURES[name]())
    figure.canvas.draw()
    drawn = [
        text
        for text in figure.findobj(Text)
        if isinstance(text, Text) and "$x^$" in text.get_text()
    ]
    assert drawn
    assert not any(text.get_parse_math() for text in drawn)


LONG = "the ward for patients with one very long name"


@pytest.mark.parametrize("name", ["_north", LONG, "北京"])
def test_a_legend_names_each_client(name):
    rows = diagnosis()
    first = rows["client"].iloc[0]
    rows = rows.replace({"client": {first: name}, "client_b": {first: name}})
    fonts = asian_fonts()
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        axes = plots.metric(rows, "grad_variance")
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    wanted = as_label(name)
    assert wanted in shown
    assert len(wanted) <= LONGEST + 1
    assert name in wanted or name is LONG
    boxes = [
        str(note.message) for note in notes if "fonts lack the letters" in str(note)
    ]
    assert len(boxes) == (name == "北京" and not fonts)
