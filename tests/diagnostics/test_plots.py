"""Pictures show what the rows hold: the right lines at the right values, gaps with reasons, and refusals."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from diagnostics import plots
from diagnostics.plots.drawing import COLOURS, stacked, with_notes
from diagnostics.plots.maps import FEDERATED, LOCAL
from tests.conftest import refuses
from tests.diagnostics.made import HOSPITALS, LAYERS, decision, diagnosis, results


def lines(ax):
    """The drawn values of each named line."""
    return {
        str(line.get_label()): np.asarray(line.get_ydata(), dtype=float)
        for line in ax.lines
    }


def entries(ax):
    legend = ax.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_metric_draws_every_client_over_the_layers():
    frame, mean = diagnosis(), "mean of clients"
    for name, variant, together, scale, words in (
        ("grad_variance", "epoch", mean, "log", "gradient variance, epoch"),
        ("hessian_trace", "per_parameter", mean, "log", "Hessian trace, per parameter"),
        ("federation_sensitivity", "after", "combined", "log", "first layer = 1"),
        ("cka", "flatten", mean, "linear", "0 = same representation"),
    ):
        ax = plots.metric(frame, name)
        drawn = lines(ax)
        assert [*drawn] == entries(ax) == [*HOSPITALS, together]
        assert [tick.get_text() for tick in ax.get_xticklabels()] == LAYERS
        assert ax.get_yscale() == scale
        assert words in ax.get_ylabel()
        bars = {"hessian_trace": len(HOSPITALS)}.get(name, 0)  # errors above 0
        assert len(ax.collections) == bars
        rows = frame[(frame["metric"] == name) & (frame["variant"] == variant)]
        weights = np.array([*HOSPITALS.values()]) / sum(HOSPITALS.values())
        client_lines = np.stack([drawn[client] for client in HOSPITALS])
        if name == "cka":  # the mean distance to the others
            weights = np.full(4, 0.25)
            apart = 0.01 * np.arange(1, 5) * np.array([[2], [8 / 3], [10 / 3], [4]])
            np.testing.assert_allclose(client_lines, apart, atol=1e-12)
        else:
            values = rows[rows["client"] != ""]["value"].to_numpy().reshape(4, 4)
            np.testing.assert_array_equal(client_lines, values)
        if together == mean:
            np.testing.assert_allclose(drawn[mean], weights @ client_lines, rtol=1e-12)


def test_missing_values_leave_gaps_with_their_reasons():
    assert max(map(len, with_notes("", ["ab " * 40]).split("\n"))) <= 64
    frame = diagnosis()
    gone = (frame["client"] == "VA") & (frame["layer"] == "fc3")
    gone &= frame["variant"] != "batch"
    frame.loc[gone, ["value", "status"]] = [np.nan, "constant features"]
    ax = plots.metric(frame, "grad_variance")
    for name, missing in (
        ("VA", True),
        ("mean of clients", True),
        ("Cleveland", False),
    ):
        assert np.isnan(lines(ax)[name]).tolist() == [False, False, missing, False]
    assert [(t.get_text(), t.get_position()[0]) for t in ax.texts] == [("×", 2)]
    assert "× fc3: " in " ".join(ax.get_xlabel().split())
    gone = (frame["client_b"] == "VA") & (frame["client"] == "Cleveland")
    gone &= frame["layer"] == "fc2"
    frame.loc[gone, ["value", "status"]] = [np.nan, "constant features"]
    axes = plots.cka_matrices(frame)
    assert np.ma.getmaskarray(axes[1].collections[0].get_array()).sum() == 2
    assert "constant features" in axes[0].figure.get_supxlabel()


def test_matrices_are_symmetric_with_ones_and_one_colour_bar():
    axes = plots.cka_matrices(diagnosis())
    assert [ax.get_title() for ax in axes] == LAYERS
    for k, ax in enumerate(axes):
        shown = np.asarray(ax.collections[0].get_array(), dtype=float).reshape(4, 4)
        np.testing.assert_array_equal(shown, shown.T)
        np.testing.assert_array_equal(np.diag(shown), 1)
        assert shown[1, 3] == pytest.approx(1 - 0.01 * (k + 1) * 4)
        assert ax.collections[0].get_clim() == (0, 1)
    assert len(axes[0].figure.axes) == len(LAYERS) + 1
    parts = [diagnosis().assign(variant=f"pairs {layer}") for layer in LAYERS]
    parts[3].loc[parts[3]["layer"] == "fc1", "value"] = 0.25
    ax = plots.cka_matrices(pd.concat(parts), variant="pairs")[0]
    assert ax.get_title() == "Cleveland (down), Hungarian"
    assert np.ravel(ax.collections[0].get_array())[3] == 0.25


def boxes(ax):
    return [tuple(patch.get_facecolor()[:3]) for patch in ax.patches]


def test_plan_shows_boxes_values_ratios_and_votes():
    ax = plots.plan(
        decision(
            LAYERS, 2, rule="sensitivity_ratio", metric="federation_sensitivity", threshold=1.9,
            values=(1.0, 1.5, 3.0, 9.0), votes={"Cleveland": "fc2", "VA": "fc3"}, status="the cut was clipped",
        )
    )  # fmt: skip
    federated, local = to_rgb(FEDERATED), to_rgb(LOCAL)
    assert boxes(ax) == [federated, federated, local, local]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == LAYERS
    shown = {(text.get_position()[0], text.get_text()) for text in ax.texts}
    values = {(0.5, "1"), (1.5, "1.5"), (2.5, "3"), (3.5, "9")}
    assert shown == values | {(1.0, "1.5"), (2.0, "2"), (3.0, "3"), (2, "1"), (3, "1")}
    cut = next(line for line in ax.lines if line.get_label() == "cut")
    assert list(cut.get_xdata()) == [2, 2]
    for words in ("2 of 4", "threshold 1.9", "clipped"):
        assert words in ax.get_title()


def test_more_layers_than_a_picture_has_room_for_are_refused():
    names = [f"l{k}" for k in range(plots.maps.MOST_LAYERS + 1)]
    with refuses("a picture must have at most 500 layers; got 501"):
        plots.plan(decision(names, 2))


def test_plan_names_a_metric_without_a_symbol_by_its_words():
    for metric, words in (("weight_magnitude", "weight magnitude"), ("", "value")):
        assert not plots.maps.facts_of(metric).look.symbol
        ax = plots.plan(decision(LAYERS, 2, metric=metric, values=(1.0, 2.0, 3.0, 4.0)))
        shown = [tick.get_text() for tick in ax.get_yticklabels()]
        assert words in shown


def test_numbers_of_a_bar_are_white_on_dark_colours_alone():
    ax = plots.partition(
        pd.DataFrame([[50.0] * 10], ["a"], [f"k{k}" for k in range(10)])
    )
    numbers = [text for text in ax.texts if text.get_text() == "50"]
    inks = {}
    for patch, text in zip(ax.patches, numbers, strict=True):
        light = np.dot(patch.get_facecolor()[:3], (0.299, 0.587, 0.114)) >= 0.55
        inks.setdefault(bool(light), set()).add(text.get_color())
    assert inks == {True: {"0.1"}, False: {"white"}}


def counted(n_clients, n_classes):
    table = np.random.default_rng(0).integers(0, 200, (n_clients, n_classes))
    return pd.DataFrame(
        table,
        index=[f"c{k}" for k in range(n_clients)],
        columns=[f"k{k}" for k in range(n_classes)],
    )


def test_partition_bars_add_up():
    for clients, classes in ((1, 1), (5, 12), (40, 62)):
        counts = counted(clients, classes)
        ax = plots.partition(counts)
        bars = np.array([(bar.get_x(), bar.get_width()) for bar in ax.patches])
        starts, widths = bars.reshape(classes, clients, 2).transpose(2, 1, 0)
        np.testing.assert_array_equal(widths, counts)
        np.testing.assert_allclose((starts + widths).max(1), counts.sum(axis=1))
        assert [tick.get_text() for tick in ax.get_yticklabels()] == [*counts.index]
        assert entries(ax) == (list(counts.columns) if classes <= 12 else [])
        assert len(ax.figure.axes) == (1 if classes <= 12 else 2)


def test_learning_is_the_weighted_mean_with_a_band_over_seeds():
    frame = results()
    ax = plots.learning(frame)
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


def test_clients_are_drawn_by_their_numbers_and_a_run_without_the_model_is_named():
    frame = results()
    names = dict(zip(HOSPITALS, ("w1", "w10", "w2", "w3"), strict=True))
    ax = plots.clients(frame.assign(client=frame["client"].map(names)))
    assert entries(ax)[:4] == ["w1", "w2", "w3", "w10"]
    for draw in (plots.learning, plots.clients):
        ax = draw(frame, model="global")
        assert "local: " in ax.get_xlabel()
        assert "local" not in entries(ax)


def test_clients_shows_everyone_after_the_last_round():
    ax = plots.clients(results())
    assert entries(ax) == [*HOSPITALS, "mean"]
    dots = {str(line.get_label()): line.get_xdata() for line in ax.lines}
    client_dots = np.stack([dots[client] for client in HOSPITALS])
    expected = 0.315 + 0.01 * np.arange(4)[:, None] + np.array([0, 0.0, 0.1])
    np.testing.assert_allclose(client_dots, expected, atol=1e-12)
    weights = np.array([*HOSPITALS.values()]) / sum(HOSPITALS.values())
    np.testing.assert_allclose(dots["mean"], weights @ client_dots, atol=1e-12)
    assert [tick.get_text() for tick in ax.get_yticklabels()][1] == "fedavg (global)"


def table(**changes):
    columns = {
        "algorithm": ["fedavg", "local"],
        "value": [0.5, 0.6],
        "low": [0.45, 0.5],
        "high": [0.55, 0.7],
    }
    return pd.DataFrame({**columns, "n": [10, 3], **changes})


def test_comparison_keeps_the_order_and_writes_the_values():
    ax = plots.comparison(table(), "macro_f1")
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["fedavg", "local"]
    first, second = "0.500  [0.450, 0.550]  n = 10", "0.600  [0.500, 0.700]  n = 3"
    assert texts(ax) == [first, second]
    assert ax.lines[0].get_xdata().tolist() == [0.5, 0.6]
    ends = [part[:, 0].tolist() for part in ax.collections[0].get_segments()]
    np.testing.assert_allclose(ends, [[0.45, 0.55], [0.5, 0.7]])
    without = {"low": [np.nan] * 2, "high": [np.nan] * 2}
    ax = plots.comparison(table(value=[np.nan, 0.6], **without), "loss")
    assert texts(ax) == ["no value  n = 10", "0.600  n = 3"]
    assert "lower is better" in ax.get_xlabel()


def refusals():
    """What cannot be drawn, after words of the refusal."""
    both = pd.concat([diagnosis().assign(round=r) for r in (1, 20)], ignore_index=True)
    twice = pd.concat([results(), results().assign(run="again")], ignore_index=True)
    lacking, wrong = table().drop(columns="low"), table(low=[0.45, 0.65])
    two = plt.subplots(1, 2)[1]
    yield "mean 'grad_variance'", lambda: plots.metric(diagnosis(), "grad_varianse")
    yield "mean 'flatten'", lambda: plots.metric(diagnosis(), "cka", variant="flaten")
    yield r"round \(1, 20\)", lambda: plots.metric(both, "cka")
    yield "at least 4.*2", lambda: plots.cka_matrices(diagnosis(), two)
    yield "have pairs", lambda: plots.cka_matrices(diagnosis(), variant="pairs")
    yield "3 .*4", lambda: plots.plan(decision(LAYERS, 1, values=(1.0, 2.0, 3.0)))
    yield "mean 'fc2'", lambda: plots.plan(decision(LAYERS, 1, votes={"VA": "fc22"}))
    yield r"run \(local-0, again\)", lambda: plots.learning(twice)
    yield "mean 'macro_f1'", lambda: plots.learning(results(), metric="macro_f2")
    yield "mean 'personal'", lambda: plots.clients(results(), model="persnal")
    yield "column.*'low'", lambda: plots.comparison(lacking, "macro_f1")
    yield "interval.*local", lambda: plots.comparison(wrong, "macro_f1")
    for bad in (-1, np.inf):
        counts = counted(2, 3).astype(float)
        counts.iloc[1, 2] = bad
        yield "counts", lambda counts=counts: plots.partition(counts)


def test_what_cannot_be_drawn_is_refused():
    for words, draw in refusals():
        with refuses(words):
            draw()


EVERY = {
    "metric": (diagnosis(), lambda f, ax: plots.metric(f, "cka", ax)),
    "gradients": (diagnosis(), lambda f, ax: plots.metric(f, "grad_variance", ax)),
    "partition": (counted(4, 5), plots.partition),
    "learning": (results(), lambda f, ax: plots.learning(f, ax=ax)),
    "comparison": (table(), lambda f, ax: plots.comparison(f, "macro_f1", ax)),
    "clients": (results(), lambda f, ax: plots.clients(f, ax=ax)),
}


@pytest.mark.parametrize("name", EVERY)
def test_draws_on_the_given_axes_within_the_figure_and_leaves_the_rest(
    name,
):
    _, axes = plt.subplots()
    before, (frame, draw) = dict(mpl.rcParams), EVERY[name]
    copy = frame.copy(deep=True)
    assert draw(frame, axes) is axes
    ax = draw(frame, None)
    assert ax is not axes
    assert dict(mpl.rcParams) == before
    pd.testing.assert_frame_equal(frame, copy)
    ax.figure.canvas.draw()
    box, whole = ax.get_tightbbox(), ax.figure.bbox
    assert 0 <= box.x0 < box.x1 <= whole.x1
    assert 0 <= box.y0 < box.y1 <= whole.y1


@pytest.mark.parametrize("more", [0, 1])
def test_many_parts_of_a_bar_have_a_colour_each(more):
    """The palette as far as it goes, else a map from its first colour to its last."""
    count = len(COLOURS) + more
    parts = pd.DataFrame([[1 / count] * count], columns=[str(k) for k in range(count)])
    _, ax = plt.subplots()
    stacked(ax, parts, str)
    colours = [bars[0].get_facecolor()[:3] for bars in ax.containers]
    assert len({*colours}) == count
    ends = (COLOURS[0], COLOURS[-1])
    if more:
        ends = mpl.colormaps["viridis"](0.0)[:3], mpl.colormaps["viridis"](1.0)[:3]
    assert colours[0] == pytest.approx(to_rgb(ends[0]))
    assert colours[-1] == pytest.approx(to_rgb(ends[1]))
    plt.close(ax.figure)
