"""Pictures show what the rows hold: the right lines at the right values, gaps with reasons, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from diagnostics import plots
from diagnostics.plots.drawing import MOST
from diagnostics.plots.plan import FEDERATED, LOCAL
from fl_core import rows as schema
from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.plan import Evidence, LayerPlan

HOSPITALS = {"Cleveland": 193, "Hungarian": 167, "Switzerland": 29, "VA": 83}
LAYERS = ["fc1", "fc2", "fc3", "fc4"]


pytestmark = pytest.mark.usefixtures("closed")


def diagnosis(
    clients: dict[str, int] | None = None, layers: list[str] | None = None
) -> pd.DataFrame:
    """Rows as a diagnosis gives them, with different values for every client and layer."""
    clients, layers = clients or HOSPITALS, layers or LAYERS
    found = []
    for c, (client, n) in enumerate(clients.items()):
        for k, layer in enumerate(layers):
            at: dict[str, Any] = {"client": client, "layer": layer, "n_train": n}
            found.append(
                schema.row(
                    "grad_variance",
                    1e-6 * (c + 1) * 5**k,
                    variant="epoch",
                    stderr=0.0,
                    **at,
                )
            )
            found.append(
                schema.row(
                    "grad_variance",
                    2e-6 * (c + 1) * 5**k,
                    variant="batch",
                    stderr=1e-7,
                    **at,
                )
            )
            found.append(
                schema.row(
                    "hessian_trace",
                    0.01 * (c + k + 1),
                    variant="per_parameter",
                    stderr=1e-3,
                    **at,
                )
            )
            found.append(
                schema.row(
                    "hessian_trace",
                    5.0 * (c + k + 1),
                    variant="absolute",
                    stderr=0.0,
                    **at,
                )
            )
            found.append(
                schema.row(
                    "federation_sensitivity", 1 + k * (c + 1) / 2, variant="after", **at
                )
            )
            found.append(
                schema.row(
                    "federation_sensitivity", 1e-9 * (k + 1), variant="importance", **at
                )
            )
    for k, layer in enumerate(layers):
        found.append(
            schema.row("federation_sensitivity", 1.0 + k, variant="after", layer=layer)
        )
    names = list(clients)
    for k, layer in enumerate(layers):
        for a in range(len(names)):
            for b in range(a + 1, len(names)):
                value = 1 - 0.01 * (k + 1) * (a + b)
                pair = {
                    "client": names[a],
                    "client_b": names[b],
                    "layer": layer,
                    "variant": "flatten",
                }
                found.append(schema.row("cka", value, **pair))
    return schema.frame(found)


def lines(ax: Axes) -> dict[str, np.ndarray]:
    """The drawn values of each named line."""
    return {
        str(line.get_label()): np.asarray(line.get_ydata(), dtype=float)
        for line in ax.lines
    }


def entries(ax: Axes) -> list[str]:
    legend = ax.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def texts(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize(
    ("name", "variant", "together", "scale", "words"),
    [
        (
            "grad_variance",
            "epoch",
            "mean of clients",
            "log",
            "gradient variance, epoch",
        ),
        (
            "hessian_trace",
            "per_parameter",
            "mean of clients",
            "log",
            "Hessian trace, per parameter",
        ),
        ("federation_sensitivity", "after", "combined", "log", "first layer = 1"),
        ("cka", "flatten", "mean of clients", "linear", "0 = same representation"),
    ],
)
def test_metric_draws_every_client_over_the_layers(
    name: Any, variant: Any, together: Any, scale: str, words: str
) -> None:
    frame = diagnosis()
    ax: Any = plots.metric(frame, name)
    drawn = lines(ax)
    assert list(drawn) == [*HOSPITALS, together]
    assert entries(ax) == [*HOSPITALS, together]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == LAYERS
    assert ax.get_yscale() == scale
    assert words in ax.get_ylabel()
    assert len({(line.get_color(), line.get_marker()) for line in ax.lines}) == 5
    if name != "cka":
        rows = frame[(frame["metric"] == name) & (frame["variant"] == variant)]
        for client in HOSPITALS:
            np.testing.assert_array_equal(
                drawn[client], rows[rows["client"] == client]["value"]
            )


def test_cka_line_is_the_mean_distance_to_the_others() -> None:
    drawn = lines(plots.metric(diagnosis(), "cka"))
    for a, client in enumerate(HOSPITALS):
        expected = [
            np.mean([0.01 * (k + 1) * (a + b) for b in range(4) if b != a])
            for k in range(4)
        ]
        np.testing.assert_allclose(drawn[client], expected, atol=1e-12)
    np.testing.assert_allclose(
        drawn["mean of clients"],
        np.mean([drawn[c] for c in HOSPITALS], axis=0),
        atol=1e-12,
    )


def test_mean_of_clients_is_weighted_by_training_samples() -> None:
    drawn = lines(plots.metric(diagnosis(), "grad_variance"))
    weights = np.array(list(HOSPITALS.values()), dtype=float)
    expected = (
        weights / weights.sum() @ np.stack([drawn[client] for client in HOSPITALS])
    )
    np.testing.assert_allclose(drawn["mean of clients"], expected, rtol=1e-12)


def test_standard_errors_above_zero_are_bars() -> None:
    assert len(plots.metric(diagnosis(), "hessian_trace").collections) == len(HOSPITALS)
    assert len(plots.metric(diagnosis(), "grad_variance").collections) == 0


def test_missing_value_leaves_a_gap_with_its_reason() -> None:
    frame = diagnosis()
    gone = (
        (frame["client"] == "VA")
        & (frame["layer"] == "fc3")
        & (frame["metric"] == "grad_variance")
    )
    frame.loc[gone, ["value", "status"]] = [
        np.nan,
        "a variance needs at least two weights",
    ]
    ax: Any = plots.metric(frame, "grad_variance")
    assert np.isnan(lines(ax)["VA"]).tolist() == [False, False, True, False]
    assert np.isnan(lines(ax)["mean of clients"]).tolist() == [
        False,
        False,
        True,
        False,
    ]
    assert not np.isnan(lines(ax)["Cleveland"]).any()
    assert [(text.get_text(), text.get_position()[0]) for text in ax.texts] == [
        ("×", 2)
    ]
    note = " ".join(ax.get_xlabel().split())
    assert "× fc3: " in note


def test_one_missing_pair_is_a_gap_for_both_clients_and_in_the_matrix() -> None:
    frame = diagnosis()
    gone = (
        (frame["client"] == "Cleveland")
        & (frame["client_b"] == "VA")
        & (frame["layer"] == "fc2")
    )
    frame.loc[gone, ["value", "status"]] = [np.nan, "constant features"]
    ax: Any = plots.metric(frame, "cka")
    assert np.isnan(lines(ax)["Cleveland"][1])
    assert np.isnan(lines(ax)["VA"][1])
    assert not np.isnan(lines(ax)["Hungarian"]).any()
    assert "Cleveland–VA" in ax.get_xlabel()
    axes: list[Any] = plots.cka_matrices(frame)
    assert np.ma.getmaskarray(axes[1].collections[0].get_array()).sum() == 2
    assert "constant features" in axes[0].figure.get_supxlabel()


def test_negative_traces_are_drawn_on_symlog() -> None:
    frame = diagnosis()
    frame.loc[(frame["client"] == "VA") & (frame["layer"] == "fc2"), "value"] = -0.02
    ax: Any = plots.metric(frame, "hessian_trace")
    assert ax.get_yscale() == "symlog"
    assert lines(ax)["VA"][1] == -0.02
    with pytest.raises(UsageError, match=r"'VA' at 'fc2'"):
        plots.metric(frame, "hessian_trace", scale="log")


def test_many_clients_share_one_legend_entry() -> None:
    clients = {f"c{k}": 10 for k in range(MOST + 15)}
    ax: Any = plots.metric(diagnosis(clients), "grad_variance")
    assert len(ax.lines) == len(clients) + 1
    assert entries(ax) == [f"each of {len(clients)} clients", "mean of clients"]


def test_metric_refuses_several_rounds_and_names_them() -> None:
    both = pd.concat(
        [diagnosis().assign(round=1), diagnosis().assign(round=20)], ignore_index=True
    )
    for name in ("grad_variance", "cka"):
        with pytest.raises(UsageError, match=r"round \(1, 20\)"):
            plots.metric(both, name)
    with pytest.raises(UsageError, match=r"round \(1, 20\)"):
        plots.cka_matrices(both)


def test_matrices_are_symmetric_with_ones_and_one_colour_bar() -> None:
    axes: list[Any] = plots.cka_matrices(diagnosis())
    assert [ax.get_title() for ax in axes] == LAYERS
    for k, ax in enumerate(axes):
        shown = np.asarray(ax.collections[0].get_array(), dtype=float).reshape(4, 4)
        np.testing.assert_array_equal(shown, shown.T)
        np.testing.assert_array_equal(np.diag(shown), 1)
        assert shown[1, 3] == pytest.approx(1 - 0.01 * (k + 1) * 4)
        assert ax.collections[0].get_clim() == (0, 1)
        assert len(texts(ax)) == 16
    assert len(axes[0].figure.axes) == len(LAYERS) + 1
    assert [tick.get_text() for tick in axes[0].get_yticklabels()] == list(HOSPITALS)


def test_matrices_on_given_figure_and_axes() -> None:
    figure = plt.figure()
    assert all(ax.figure is figure for ax in plots.cka_matrices(diagnosis(), figure))
    _, given = plt.subplots(1, 4)
    assert plots.cka_matrices(diagnosis(), list(given)) == list(given)
    with pytest.raises(UsageError, match=r"at least 4.*2"):
        plots.cka_matrices(diagnosis(), list(given[:2]))


def decision(names: list[str], cut: int, **why: Any) -> LayerPlan:
    layers = tuple(Layer(name, (f"{name}.weight",)) for name in names)
    return LayerPlan.prefix(layers, cut, Evidence(**why))


def boxes(ax: Any) -> list[tuple[float, ...]]:
    return [tuple(patch.get_facecolor()[:3]) for patch in ax.patches]


def test_plan_shows_boxes_values_ratios_and_votes() -> None:
    ax: Any = plots.plan(
        decision(
            LAYERS, 2, rule="sensitivity_ratio", metric="federation_sensitivity", threshold=1.9,
            values=(1.0, 1.5, 3.0, 9.0), votes={"Cleveland": "fc2", "VA": "fc3"}, status="the cut was clipped",
        )
    )  # fmt: skip
    federated, local = to_rgb(FEDERATED), to_rgb(LOCAL)
    assert boxes(ax) == [federated, federated, local, local]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == LAYERS
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [
        "S",
        "ratio",
        "vote of Cleveland",
        "vote of VA",
    ]
    weight = {
        (text.get_text(), text.get_position()[0]): text.get_weight()
        for text in ax.texts
    }
    assert weight == {
        ("1", 0.5): "normal", ("1.5", 1.5): "normal", ("3", 2.5): "normal", ("9", 3.5): "normal",
        ("1.5", 1.0): "normal", ("2", 2.0): "bold", ("3", 3.0): "bold",
    }  # fmt: skip
    cut = next(line for line in ax.lines if line.get_label() == "cut")
    assert list(cut.get_xdata()) == [2, 2]
    assert [line.get_xdata()[1] for line in ax.lines if line is not cut] == [2, 3]
    assert "2 of 4" in ax.get_title()
    assert "threshold 1.9" in ax.get_title()
    assert "clipped" in ax.get_title()
    assert entries(ax) == ["federated", "local", "cut"]


@pytest.mark.parametrize("values", [(None, 1.0, 2.0, None), (-1.0, 1.0, 0.0, 3.0)])
def test_plan_marks_ratios_that_do_not_exist(values: Any) -> None:
    ax: Any = plots.plan(decision(LAYERS, 1, values=values, metric="hessian_trace"))
    ratios = [
        text.get_text() for text in ax.texts if text.get_position()[0] in (1, 2, 3)
    ]
    assert ratios == (["–", "2", "–"] if values[0] is None else ["–", "–", "–"])


def test_plan_with_frozen_layers_has_its_cut_and_its_ratios_where_the_layers_are() -> (
    None
):
    """Frozen layers have a box and no value, and no part in the cut."""
    first, second = (
        Layer(name, (name,), frozen=(name,)) for name in ("first", "second")
    )
    a, b, c = (Layer(name, (name,)) for name in "abc")
    plan = LayerPlan(
        (first, a, second, b, c),
        ("first", "a", "second"),
        Evidence(values=(None, 1.0, None, 2.0, 6.0)),
    )
    ax: Any = plots.plan(plan)
    assert plan.cut == 1
    assert [list(line.get_xdata()) for line in ax.lines] == [[2, 2]]
    ratios = {
        text.get_position()[0]: text.get_text()
        for text in ax.texts
        if text.get_position()[0] in (1, 2, 3, 4)
    }
    assert ratios == {1: "–", 2: "–", 3: "2", 4: "3"}
    ax = plots.plan(LayerPlan((first, a, b), ("first",), Evidence()))
    assert [list(line.get_xdata()) for line in ax.lines] == [[0, 0]]


def counted(n_clients: int, n_classes: int) -> pd.DataFrame:
    table = np.random.default_rng(0).integers(0, 200, (n_clients, n_classes))
    return pd.DataFrame(
        table,
        index=[f"c{k}" for k in range(n_clients)],
        columns=[f"k{k}" for k in range(n_classes)],
    )


@pytest.mark.parametrize(
    ("n_clients", "n_classes"), [(1, 1), (4, 5), (5, 12), (40, 62)]
)
def test_partition_bars_add_up(n_clients: int, n_classes: int) -> None:
    counts = counted(n_clients, n_classes)
    ax: Any = plots.partition(counts)
    widths = np.array([bar.get_width() for bar in ax.patches]).reshape(
        n_classes, n_clients
    )
    np.testing.assert_array_equal(widths.T, counts)
    ends = np.array([bar.get_x() + bar.get_width() for bar in ax.patches]).reshape(
        n_classes, n_clients
    )
    np.testing.assert_allclose(ends.max(axis=0), counts.sum(axis=1))
    assert [f"n = {total}" for total in counts.sum(axis=1)] == [
        text for text in texts(ax) if "n =" in text
    ]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == list(counts.index)
    if n_classes <= 12:
        assert entries(ax) == list(counts.columns)
        assert len({bar.get_facecolor() for bar in ax.patches}) == n_classes
    else:
        assert not entries(ax)
        assert len(ax.figure.axes) == 2


@pytest.mark.parametrize("bad", [-1, np.nan, np.inf])
def test_partition_refuses_what_cannot_be_counts(bad: float) -> None:
    counts = counted(2, 3).astype(float)
    counts.iloc[1, 2] = bad
    with pytest.raises(UsageError, match="counts"):
        plots.partition(counts)


def results(
    algorithms: tuple[str, ...] = ("local", "fedavg", "player_fl"), seeds: int = 2
) -> pd.DataFrame:
    """Scores of runs; FedAvg has only a global model, Local only a personal one."""
    found = []
    for a, algorithm in enumerate(algorithms):
        models = {"fedavg": ["global"], "local": ["personal"]}.get(
            algorithm, ["global", "personal"]
        )
        for seed in range(seeds):
            for rnd in (0, 5, 10):
                for c, (client, n) in enumerate(HOSPITALS.items()):
                    for model in models:
                        value = (
                            0.1
                            + 0.05 * a
                            + 0.02 * rnd
                            + 0.01 * c
                            + 0.03 * seed
                            - 0.05 * (model == "global")
                        )
                        at: dict[str, Any] = {
                            "run": f"{algorithm}-{seed}",
                            "algorithm": algorithm,
                            "seed": seed,
                        }
                        at |= {
                            "round": rnd,
                            "model": model,
                            "split": "test",
                            "client": client,
                            "n_train": n,
                        }
                        found.append(schema.row("macro_f1", value, **at))
    return schema.frame(found)


def test_learning_is_the_weighted_mean_with_a_band_over_seeds() -> None:
    frame = results()
    ax: Any = plots.learning(frame)
    names = ["local (personal)", "fedavg (global)", "player_fl (personal)"]
    assert entries(ax) == names
    weights = np.array(list(HOSPITALS.values())) / sum(HOSPITALS.values())
    base = weights @ (0.01 * np.arange(4))
    expected = 0.1 + 0.05 * 2 + 0.02 * np.array([0, 5, 10]) + base + 0.03 * 0.5
    np.testing.assert_allclose(lines(ax)[names[2]], expected, atol=1e-12)
    np.testing.assert_array_equal(ax.lines[2].get_xdata(), [0, 5, 10])
    band = ax.collections[2].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(expected[0] - 0.015)
    assert band.max() == pytest.approx(expected[-1] + 0.015)
    assert "2 seeds" in ax.get_legend().get_title().get_text()
    assert ax.get_ylabel() == "test macro-F1 (higher is better)"


def test_learning_draws_the_same_rounds_of_all() -> None:
    """One algorithm is evaluated in every round, as a race is; another stops early."""
    frame = results()
    often = pd.concat([frame.assign(round=frame["round"] + by) for by in range(5)])
    often = often[
        (often["round"] <= 10) & (often["algorithm"] == "local")
    ].drop_duplicates(
        ["algorithm", "seed", "round", "client", "model", "metric", "split"]
    )
    short = frame[(frame["algorithm"] == "fedavg") & (frame["round"] <= 5)]
    rest = frame[~frame["algorithm"].isin(["local", "fedavg"])]
    assert sorted(often["round"].unique()) == list(range(11))
    ax: Any = plots.learning(pd.concat([often, short, rest]))
    assert [list(line.get_xdata()) for line in ax.lines] == [
        [0, 5, 10],
        [0, 5],
        [0, 5, 10],
    ]
    alone: Any = plots.learning(often)
    assert list(alone.lines[0].get_xdata()) == list(range(11))


@pytest.mark.parametrize(
    ("start", "outside"), [(9.0, True), (-0.5, True), (0.25, False), (np.nan, False)]
)
def test_an_untrained_start_that_would_take_the_axis_lies_outside(
    start: float, outside: bool
) -> None:
    frame = results()
    later = frame.loc[frame["round"] > 0, "value"]
    frame.loc[frame["round"] == 0, "value"] = start
    frame.loc[frame["round"] == 0, "status"] = (
        "ok" if np.isfinite(start) else "the loss is not finite"
    )
    ax: Any = plots.learning(frame)
    low, high = ax.get_ylim()
    assert ("outside" in ax.get_xlabel()) == outside
    assert (f"outside: {start:.3g}" in ax.get_xlabel()) == outside
    if outside:
        assert not low < start < high
    assert low < later.min() + 0.1
    assert high > later.max() - 0.1
    own: Any = plots.learning(frame, ax=Figure().subplots())
    assert "outside" not in own.get_xlabel()


def test_clients_are_drawn_by_their_numbers() -> None:
    frame = results()
    names = dict(zip(HOSPITALS, ("w1", "w10", "w2", "w3"), strict=True))
    ax: Any = plots.clients(frame.assign(client=frame["client"].map(names)))
    assert entries(ax)[:4] == ["w1", "w2", "w3", "w10"]


def test_a_run_that_lacks_the_model_is_named() -> None:
    for draw in (plots.learning, plots.clients):
        ax = draw(results(), model="global")
        assert "local: " in ax.get_xlabel()
        assert "local" not in entries(ax)


def test_missing_score_is_a_gap_with_its_reason() -> None:
    frame = results(seeds=1)
    gone = (
        (frame["algorithm"] == "player_fl")
        & (frame["round"] == 5)
        & (frame["client"] == "VA")
    )
    frame.loc[gone, ["value", "status"]] = [np.nan, "the loss is not finite"]
    ax: Any = plots.learning(frame)
    assert np.isnan(lines(ax)["player_fl (personal)"]).tolist() == [False, True, False]
    assert "(VA)" in " ".join(ax.get_xlabel().split())


@pytest.mark.parametrize("draw", [plots.learning, plots.clients])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "macro_f2"}, "mean 'macro_f1'"),
        ({"split": "tset"}, "mean 'test'"),
        ({"model": "persnal"}, "mean 'personal'"),
    ],
)
def test_scores_refuse_unknown_names(
    draw: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        draw(results(), **options)


def test_clients_shows_everyone_after_the_last_round() -> None:
    ax: Any = plots.clients(results())
    assert entries(ax) == [*HOSPITALS, "mean"]
    dots = {
        str(line.get_label()): np.asarray(line.get_xdata(), dtype=float)
        for line in ax.lines
    }
    for c, client in enumerate(HOSPITALS):
        expected = [
            0.1 + 0.05 * a + 0.2 + 0.01 * c + 0.015 - 0.05 * (a == 1) for a in range(3)
        ]
        np.testing.assert_allclose(dots[client], expected, atol=1e-12)
    weights = np.array(list(HOSPITALS.values())) / sum(HOSPITALS.values())
    np.testing.assert_allclose(
        dots["mean"], weights @ np.stack([dots[c] for c in HOSPITALS]), atol=1e-12
    )
    assert [tick.get_text() for tick in ax.get_yticklabels()][1] == "fedavg (global)"


def table(**changes: object) -> pd.DataFrame:
    columns = {
        "algorithm": ["fedavg", "local"],
        "value": [0.5, 0.6],
        "low": [0.45, 0.5],
        "high": [0.55, 0.7],
    }
    return pd.DataFrame({**columns, "n": [10, 3], **changes})


def test_comparison_keeps_the_order_and_writes_the_values() -> None:
    ax: Any = plots.comparison(table(), "macro_f1")
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["fedavg", "local"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    assert texts(ax) == [
        "0.500  [0.450, 0.550]  n = 10",
        "0.600  [0.500, 0.700]  n = 3",
    ]
    assert [list(line.get_xdata()) for line in ax.lines] == [
        [0.45, 0.55],
        [0.5],
        [0.5, 0.7],
        [0.6],
    ]
    assert ax.get_xlim()[0] > 0.3


def test_comparison_says_where_there_is_no_value_or_interval() -> None:
    ax: Any = plots.comparison(
        table(value=[np.nan, 0.6], low=[np.nan, np.nan], high=[np.nan, np.nan]), "loss"
    )
    assert texts(ax) == ["no value  n = 10", "0.600  n = 3"]
    assert "lower is better" in ax.get_xlabel()


def refusals() -> dict[str, Callable[[], Any]]:
    """What cannot be drawn, by words of the refusal."""
    one = schema.frame(
        [
            schema.row(
                "cka",
                None,
                status="needs at least two models",
                layer="fc1",
                client="VA",
            )
        ]
    )
    twice = pd.concat([results(), results().assign(run="again")], ignore_index=True)
    return {
        "mean 'grad_variance'": lambda: plots.metric(diagnosis(), "grad_varianse"),
        "mean 'flatten'": lambda: plots.metric(diagnosis(), "cka", variant="flaten"),
        "mean 'log'": lambda: plots.metric(diagnosis(), "cka", scale="logg"),
        "two models": lambda: plots.cka_matrices(one),
        "3 .*4": lambda: plots.plan(decision(LAYERS, 1, values=(1.0, 2.0, 3.0))),
        "mean 'fc2'": lambda: plots.plan(decision(LAYERS, 1, votes={"VA": "fc22"})),
        r"run \(local-0, again\)": lambda: plots.learning(twice),
        "column.*'low'": lambda: plots.comparison(
            table().drop(columns="low"), "macro_f1"
        ),
        "interval.*local": lambda: plots.comparison(
            table(low=[0.45, 0.65]), "macro_f1"
        ),
    }


@pytest.mark.parametrize("words", refusals())
def test_what_cannot_be_drawn_is_refused(words: str) -> None:
    with pytest.raises(UsageError, match=words):
        refusals()[words]()


EVERY = {
    "metric": lambda ax: plots.metric(diagnosis(), "cka", ax),
    "plan": lambda ax: plots.plan(decision(LAYERS, 2), ax),
    "partition": lambda ax: plots.partition(counted(4, 5), ax),
    "learning": lambda ax: plots.learning(results(), ax=ax),
    "comparison": lambda ax: plots.comparison(table(), "macro_f1", ax),
    "clients": lambda ax: plots.clients(results(), ax=ax),
}


@pytest.mark.parametrize("name", EVERY)
def test_draws_on_the_given_axes_within_the_figure_and_leaves_the_settings(
    name: str,
) -> None:
    _, ax = plt.subplots()
    before = dict(mpl.rcParams)
    assert EVERY[name](ax) is ax
    assert EVERY[name](None) is not ax
    assert dict(mpl.rcParams) == before
    ax: Any = EVERY[name](None)
    ax.figure.canvas.draw()
    box = ax.get_tightbbox()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= ax.figure.bbox.x1
    assert box.y1 <= ax.figure.bbox.y1


@pytest.mark.parametrize(
    ("draw", "frame"),
    [
        (lambda f: plots.metric(f, "cka"), diagnosis()),
        (lambda f: plots.metric(f, "grad_variance"), diagnosis()),
        (plots.cka_matrices, diagnosis()),
        (plots.learning, results()),
        (plots.clients, results()),
        (plots.partition, counted(3, 4)),
        (lambda f: plots.comparison(f, "loss"), table()),
    ],
)
def test_the_frame_is_left_as_it_was(draw: Any, frame: Any) -> None:
    copy = frame.copy(deep=True)
    draw(frame)
    pd.testing.assert_frame_equal(frame, copy)


def test_clients_that_lie_upon_each_other_are_one_line() -> None:
    frame = diagnosis()
    own = frame["metric"] == "grad_variance"
    frame.loc[own, "value"] = 2.0
    assert list(lines(plots.metric(frame, "grad_variance"))) == [
        f"each of {len(HOSPITALS)} clients,\nwithin 3%"
    ]
    frame.loc[own & (frame["client"] == "VA"), "value"] = 2.1
    assert set(HOSPITALS) <= set(lines(plots.metric(frame, "grad_variance")))
