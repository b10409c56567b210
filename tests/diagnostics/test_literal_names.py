"""Dollar signs in names are drawn as they are, in every picture: they begin no formula and raise nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.text import Text
from torch import nn

from diagnostics import plots
from diagnostics.measure import diagnose
from diagnostics.plots import drawing
from diagnostics.plots.page import figure_of
from diagnostics.report import Report
from diagnostics.through_time import through_time
from tests.diagnostics.test_collect import network, samples
from tests.diagnostics.test_plots import counted, decision, diagnosis, results, table

pytestmark = pytest.mark.usefixtures("closed")
NO_PICTURES = {"style"}


def named(text: object) -> str:
    """A name that no formula can be."""
    return f"{text}$x^$" if text else ""


def renamed(frame: pd.DataFrame) -> pd.DataFrame:
    """The same rows, and every client, layer and algorithm has a name with dollar signs."""
    names = ("client", "client_b", "layer", "algorithm", "class", "run", "rule", "last")
    return frame.assign(
        **{name: frame[name].map(named) for name in names if name in frame}
    )


def measured(metric: str, **options: Any) -> pd.DataFrame:
    models, data = (
        {"a": network(0), "b": network(1)},
        {"a": samples(0), "b": samples(1)},
    )
    return renamed(
        diagnose(
            models,
            data,
            metric,
            options={metric: options} if options else {},
            progress=False,
        ).frame
    )


def cloud() -> pd.DataFrame:
    draw = np.random.default_rng(0).normal(size=(12, 2))
    clients, classes = ["a", "b"] * 6, ["p", "p", "q", "q"] * 3
    return renamed(
        pd.DataFrame(
            {"x": draw[:, 0], "y": draw[:, 1], "class": classes, "client": clients}
        )
    )


def cuts() -> list[pd.DataFrame]:
    scores = [
        {"seed": s, "cut": k, "last": f"l{k}", "test": 0.1 * k + s}
        for s in (0, 1)
        for k in (0, 1, 2)
    ]
    choices = [
        {"rule": rule, "seed": s, "cut": 1.0}
        for rule in ("near", "far")
        for s in (0, 1)
    ]
    return [renamed(pd.DataFrame(scores)), renamed(pd.DataFrame(choices))]


def through_rounds() -> Report:
    """Rows of two rounds, of a model whose layer has dollar signs in its name."""
    model = nn.Sequential(OrderedDict({named("l"): nn.Linear(4, 3)}))
    models = {number: {"a": model, "b": model} for number in (1, 2)}
    data = {"a": samples(0), "b": samples(1)}
    return through_time(models, "weight_divergence", data, progress=False)


def steps() -> pd.DataFrame:
    columns = {"naive": [1.0, 2.0], "flops": [1.0, 2.0], "moved": [1.0, 2.0]}
    return renamed(pd.DataFrame({"run": ["a", "a"], "round": [1, 2], **columns}))


def probabilities() -> pd.DataFrame:
    curve = {
        "client": ["a", "a", "", ""],
        "false_positive": [0.0, 1.0] * 2,
        "true_positive": [0.0, 1.0] * 2,
    }
    return renamed(pd.DataFrame({**curve, "auroc": 0.5}))


def groups() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "predicted": [0.2, 0.8],
            "share": [0.1, 0.9],
            "low": [0.0, 0.8],
            "high": [0.3, 1.0],
            "n": 9,
        }
    )


PICTURES: dict[str, Callable[[], Any]] = {
    "calibration": lambda: plots.calibration(groups(), positive=named("died")),
    "cka_matrices": lambda: plots.cka_matrices(renamed(diagnosis())),
    "clients": lambda: plots.clients(renamed(results())),
    "comparison": lambda: plots.comparison(renamed(table()), "macro_f1"),
    "cost_steps": lambda: plots.cost_steps(steps()),
    "costs": lambda: plots.costs(measured("layer_cost")),
    "layer_map": lambda: plots.layer_map(through_rounds()),
    "learning": lambda: plots.learning(renamed(results())),
    "metric": lambda: plots.metric(renamed(diagnosis()), "grad_variance"),
    "partition": lambda: plots.partition(
        counted(3, 2).rename(index=named, columns=named)
    ),
    "plan": lambda: plots.plan(
        decision(
            [named("a"), named("b")],
            1,
            rule=named("r"),
            values=(1.0, 2.0),
            votes={named("c"): named("a")},
        )
    ),
    "regret": lambda: plots.regret(*cuts()),
    "roc": lambda: plots.roc(probabilities(), positive=named("died")),
    "tsne": lambda: plots.tsne(cloud()),
    "tsne_panels": lambda: plots.tsne_panels(
        {named("before"): cloud(), named("after"): cloud()}
    ),
}


def test_no_picture_is_left_out() -> None:
    assert PICTURES.keys() | NO_PICTURES == {
        name for name, each in vars(plots).items() if callable(each)
    }


@pytest.mark.parametrize("name", PICTURES)
def test_dollar_signs_in_names_are_drawn_as_they_are(name: str) -> None:
    figure = figure_of(PICTURES[name]())
    figure.canvas.draw()
    drawn = [
        text
        for text in figure.findobj(Text)
        if isinstance(text, Text) and "$x^$" in text.get_text()
    ]
    assert drawn
    assert not any(text.get_parse_math() for text in drawn)


def test_given_axes_and_a_heat_map_of_them() -> None:
    figure, axes = plt.subplots(1, 5)
    plots.metric(renamed(diagnosis()), "cka", axes[0])
    plots.cka_matrices(renamed(diagnosis()), axes=list(axes[1:]))
    figure.canvas.draw()
    shown = [label.get_text() for label in axes[1].get_xticklabels()]
    assert shown
    assert all("$x^$" in each for each in shown)


def test_powers_of_ten_and_titles_of_the_user_stay_formulas() -> None:
    with drawing.canvas(None) as axes:
        axes.set_yscale("log")
        axes.plot([1, 2], [1e-9, 1e3], label=named("a"))
        drawing.legend(axes)
    figure_of(axes).canvas.draw()
    powers = [label for label in axes.get_yticklabels() if "$" in label.get_text()]
    assert powers
    assert all(label.get_parse_math() for label in powers)
    axes.set_title(r"$\alpha$")
    assert axes.title.get_parse_math()
