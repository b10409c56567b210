"""Pictures of an algorithm's insides show the recorded values at their places, and refuse what they cannot show."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from diagnostics import plots
from diagnostics.plots.collect import OWN, album
from diagnostics.report import Report
from fl_core import rows as schema
from fl_core.errors import UsageError

CLIENTS, LAYERS, ROUNDS = ["north", "south", "west"], ["conv", "fc1", "fc2", "out"], [1, 2, 5]


pytestmark = pytest.mark.usefixtures("closed")


def weight(receiver: int, sender: int, layer: int, round: int) -> float:
    """Rows sum to 1, and every place has another value."""
    raw = np.exp(-np.abs(np.arange(3) - receiver) * (layer + 1) * round / 4) + 0.01 * np.arange(3)
    return float(raw[sender] / raw.sum())


def mixing() -> pd.DataFrame:
    return schema.frame(
        schema.row("aggregation_weight", weight(i, j, k, r), client=a, client_b=b, layer=layer, round=r)
        for r in ROUNDS
        for k, layer in enumerate(LAYERS)
        for i, a in enumerate(CLIENTS)
        for j, b in enumerate(CLIENTS)
    )


def attention(client: str = "north") -> pd.DataFrame:
    shares = np.random.default_rng(0).dirichlet(np.ones(4), size=7)
    keys = ["feature", "prompt 1", "prompt 2", "prompt 3"]
    return schema.frame(
        schema.row("prompt_attention", shares[q, k], client=client, round=3, variant=f"{q}>{key}")
        for q in range(7)
        for k, key in enumerate(keys)
    )


def trained() -> pd.DataFrame:
    return schema.frame(
        schema.row("trained", float(r >= 2 * k), layer=layer, round=r)
        for r in range(7)
        for k, layer in enumerate(LAYERS)
    )


def held() -> pd.DataFrame:
    drawn = np.random.default_rng(1).integers(0, 2, size=(3, 3, 4))
    drawn[0, :, 1] = [0, 1, 0]
    drawn[:, :, 0] = 1
    drawn[1:, 0] = 1
    return schema.frame(
        schema.row("held", float(drawn[t, i, k]), client=a, layer=layer, round=r)
        for t, r in enumerate(ROUNDS)
        for i, a in enumerate(CLIENTS)
        for k, layer in enumerate(LAYERS)
    )


def retained() -> pd.DataFrame:
    return held().assign(metric="retained")


ROWS = {
    "aggregation_weight": mixing, "prompt_attention": attention, "trained": trained, "retained": retained, "held": held
}  # fmt: skip
DRAW: dict[str, Any] = {name: draw for pictures in OWN.values() for name, draw in pictures.items()}
METRIC = {name: metric for metric, pictures in OWN.items() for name in pictures}


def matrix(ax: Any) -> np.ndarray:
    """The values of a heat map, rows from the top."""
    mesh = ax.collections[0]
    return np.ma.filled(mesh.get_array().astype(float), np.nan).reshape(mesh.get_coordinates().shape[0] - 1, -1)


def names(ticks: Any) -> list[str]:
    return [tick.get_text() for tick in ticks]


def first(drawn: Any) -> Any:
    return drawn[0] if isinstance(drawn, list) else drawn


@pytest.mark.parametrize("round", [None, 1, 2])
def test_a_heat_map_of_weights_a_layer(round: int | None) -> None:
    axes: list[Any] = plots.aggregation_weights(mixing(), round)
    assert [ax.get_title() for ax in axes] == LAYERS
    for k, ax in enumerate(axes):
        expected = [[weight(i, j, k, round or 5) for j in range(3)] for i in range(3)]
        np.testing.assert_allclose(matrix(ax), expected)
        assert ax.collections[0].get_clim() == (0, 1)
    assert names(axes[0].get_yticklabels()) == CLIENTS
    assert names(axes[0].get_xticklabels()) == CLIENTS
    assert f"round {round or 5}" in axes[0].figure.axes[-1].get_ylabel()


def test_a_missing_weight_is_grey_with_its_reason() -> None:
    frame = mixing()
    gone = (frame["client"] == "west") & (frame["client_b"] == "north") & (frame["layer"] == "fc2")
    frame.loc[gone, ["value", "status"]] = [np.nan, "not sampled"]
    axes: list[Any] = plots.aggregation_weights(frame)
    assert np.argwhere(np.isnan(matrix(axes[2]))).tolist() == [[2, 0]]
    assert not np.isnan(matrix(axes[1])).any()
    assert "fc2: not sampled (west–north)" in axes[0].figure.get_supxlabel()


def test_history_is_the_mean_self_weight() -> None:
    ax: Any = plots.aggregation_history(mixing())
    for k in range(len(LAYERS)):
        np.testing.assert_array_equal(ax.lines[k].get_xdata(), ROUNDS)
        selves = [np.mean([weight(i, i, k, r) for i in range(3)]) for r in ROUNDS]
        np.testing.assert_allclose(ax.lines[k].get_ydata(), selves)
    assert ax.lines[-1].get_ydata()[0] == pytest.approx(1 / 3)
    assert names(ax.get_legend().get_texts()) == [*LAYERS, "equal weights"]


def test_attention_is_queries_by_keys_in_the_order_of_the_rows() -> None:
    frame = attention()
    ax: Any = plots.prompt_attention(frame)
    np.testing.assert_allclose(matrix(ax), frame["value"].to_numpy().reshape(7, 4))
    assert names(ax.get_xticklabels()) == ["feature", "prompt 1", "prompt 2", "prompt 3"]
    assert names(ax.get_yticklabels()) == [str(q) for q in range(7)]
    assert ax.collections[0].get_clim() == (0, frame["value"].max())
    assert ax.get_title() == "north, round 3"


def test_unfreezing_is_layers_by_recorded_rounds() -> None:
    ax: Any = plots.unfreezing(trained())
    expected = [[float(r >= 2 * k) for r in range(7)] for k in range(4)]
    assert matrix(ax).tolist() == expected
    assert names(ax.get_yticklabels()) == LAYERS
    assert names(ax.get_xticklabels()) == [str(r) for r in range(7)]


def test_retained_layers_are_drawn_alike() -> None:
    ax: Any = plots.unfreezing(retained(), metric="retained")
    np.testing.assert_allclose(matrix(ax), retained()["value"].to_numpy().reshape(3, 3, 4).mean(axis=1).T)
    assert "keep" in ax.figure.axes[-1].get_ylabel()
    with pytest.raises(UsageError, match="mean 'retained'"):
        plots.unfreezing(retained(), metric="retaind")


@pytest.mark.parametrize("round", [None, 1])
def test_allocation_is_who_holds_what_and_how_many_hold_it(round: int | None) -> None:
    frame = held()
    left, right = plots.allocation(frame, round)
    now = frame[frame["round"] == (round or 5)]
    np.testing.assert_array_equal(matrix(left), now["value"].to_numpy().reshape(3, 4))
    every = frame["value"].to_numpy().reshape(3, 3, 4)
    np.testing.assert_allclose(matrix(right), every.mean(axis=1).T)
    fewest = every.sum(axis=1).min()
    assert right.get_title() == f"least held layer: {fewest:g} client" + "s" * bool(fewest != 1)


@pytest.mark.parametrize("name", DRAW)
def test_rows_without_the_metric_are_refused(name: str) -> None:
    metric = METRIC[name]
    others = next(rows() for other, rows in ROWS.items() if other != metric)
    with pytest.raises(UsageError, match=metric):
        DRAW[name](others)
    with pytest.raises(UsageError, match="got none"):
        DRAW[name](schema.frame([]))


@pytest.mark.parametrize("name", DRAW)
@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_values_that_are_no_shares_are_refused(name: str, value: float) -> None:
    frame = ROWS[METRIC[name]]()
    frame.loc[3, "value"] = value
    with pytest.raises(UsageError, match=f"between.*{value:g}"):
        DRAW[name](frame)


@pytest.mark.parametrize("name", DRAW)
def test_rows_of_two_runs_are_refused(name: str) -> None:
    frame = ROWS[METRIC[name]]()
    with pytest.raises(UsageError, match=r"seed \(0, 1\)"):
        DRAW[name](pd.concat([frame.assign(seed=0), frame.assign(seed=1)], ignore_index=True))


@pytest.mark.parametrize("name", ["aggregation_weights", "prompt_attention", "allocation"])
def test_an_unrecorded_round_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="round 4"):
        DRAW[name](ROWS[METRIC[name]](), round=4)


def test_unknown_clients_are_refused() -> None:
    both = pd.concat([attention(), attention("south")], ignore_index=True)
    with pytest.raises(UsageError, match="north, south"):
        plots.prompt_attention(both)
    assert plots.prompt_attention(both, "south").get_title() == "south, round 3"
    with pytest.raises(UsageError, match="client"):
        plots.prompt_attention(both, "moon")
    sets = pd.concat([attention().assign(layer=layer) for layer in ("prompts", "contrast")], ignore_index=True)
    with pytest.raises(UsageError, match="prompts, contrast"):
        plots.prompt_attention(sets)
    assert plots.prompt_attention(sets, layer="contrast").get_title() == "north, round 3, contrast"
    pictures = album(pd.concat([sets, sets.assign(client="south")], ignore_index=True))
    assert list(pictures) == ["prompt_attention_prompts", "prompt_attention_contrast"]
    assert all(picture().axes for picture in pictures.values())


def test_weights_without_any_of_oneself_have_no_history() -> None:
    frame = mixing()
    with pytest.raises(UsageError, match="aggregation_weight"):
        plots.aggregation_history(frame[frame["client"] != frame["client_b"]])


@pytest.mark.parametrize("name", DRAW)
def test_given_axes_are_filled_and_the_style_is_left(name: str) -> None:
    before = dict(mpl.rcParams)
    figure, given = plt.subplots(1, 4)
    many = isinstance(DRAW[name](ROWS[METRIC[name]]()), list)
    drawn = DRAW[name](ROWS[METRIC[name]](), **({"axes": list(given)} if many else {"ax": given[0]}))
    assert first(drawn) is given[0]
    assert first(drawn).figure is figure
    if many:
        with pytest.raises(UsageError, match="got 1"):
            DRAW[name](ROWS[METRIC[name]](), axes=[given[0]])
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("metric", OWN)
def test_a_report_draws_them_on_a_figure_of_their_own(metric: str) -> None:
    report = Report(ROWS[metric](), {"layers": []})
    drawn: Any = report.plot(metric)
    assert np.isfinite(matrix(drawn)).all()
    with pytest.raises(UsageError, match="Axes"):
        report.plot(metric, drawn)


@pytest.mark.parametrize("metric", OWN)
def test_the_album_finds_them(metric: str) -> None:
    pictures = album(ROWS[metric]())
    assert list(pictures) == list(OWN[metric])
    assert all(draw().axes for draw in pictures.values())
