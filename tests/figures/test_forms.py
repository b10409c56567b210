"""The forms of pictures draw what they are given, at its place, and published values alike."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from figures import forms
from fl_core.statistics import mean_interval


@pytest.fixture
def ax():
    with forms.sheet(3, 2) as figure:
        yield figure.subplots()
    plt.close(figure)


def test_a_curve_stands_at_its_index_or_at_its_names(ax):
    values = pd.Series([0.2, 0.4, 0.3], index=[5, 10, 20])
    ends = values - 0.1, values + 0.1
    forms.curves(
        ax, [forms.Line(values, "a", ends), forms.Line(values + 1)], factor=100
    )
    first, second = ax.lines
    np.testing.assert_allclose(first.get_xydata(), [[5, 20], [10, 40], [20, 30]])
    np.testing.assert_allclose(second.get_ydata(), [120, 140, 130])
    assert ax.get_legend_handles_labels()[1] == ["a"]
    band = ax.collections[0].get_datalim(ax.transData)
    np.testing.assert_allclose([band.y0, band.y1], [10, 50])
    other = ax.figure.add_subplot()
    forms.curves(other, [forms.Line(values)], names=list("xyz"), verticals=[1])
    vertical, curve = other.lines
    np.testing.assert_allclose(curve.get_xdata(), [0, 1, 2])
    assert list(vertical.get_xdata()) == [1, 1]
    assert [tick.get_text() for tick in other.get_xticklabels()] == list("xyz")


def test_lines_of_a_frame_have_one_name_and_a_published_range_lies_behind(ax):
    frame = pd.DataFrame([[1.0, 2.0], [3.0, 4.0]])
    ends = pd.DataFrame({"low": [0.0, np.nan, 1.0], "high": [1.0, np.nan, 2.0]})
    bands = [forms.Band(ends, "published")]
    forms.curves(ax, [forms.Line(frame, "a")], bands=bands, level=2.5)
    assert sorted(ax.get_legend_handles_labels()[1]) == ["a", "published"]
    *lines, level = ax.lines
    assert [list(line.get_ydata()) for line in lines] == [[1, 3], [2, 4]]
    assert lines[0].get_color() == lines[1].get_color()
    assert list(level.get_ydata()) == [2.5, 2.5]
    (band,) = ax.collections
    assert band.get_zorder() < min(line.get_zorder() for line in lines)
    assert to_hex(band.get_facecolor()[0]) == to_hex("0.85")


@pytest.mark.parametrize("upright", [False, True])
def test_marks_stand_in_lines_with_their_intervals(ax, upright):
    seeds = pd.DataFrame([[0.1, 0.3], [0.5, 0.7]], index=["b", "a"])
    kinds = [
        forms.with_intervals(forms.over_seeds(seeds, ["a", "c", "b"]), "here", 0.1),
        forms.from_paper([0.4, np.nan, 0.2], "published"),
    ]
    forms.marks(ax, kinds, ["A", "C", "B"], factor=100, upright=upright, level=0.5)
    ours, theirs, level = (line.get_xydata() for line in ax.lines)
    if upright:
        ours, theirs, level = (places[:, ::-1] for places in (ours, theirs, level))
    np.testing.assert_allclose(ours, [[60, 0.1], [np.nan, 1.1], [20, 2.1]])
    np.testing.assert_allclose(theirs, [[40, 0], [np.nan, 1], [20, 2]])
    np.testing.assert_allclose(level[:, 0], 50)
    assert ax.lines[1].get_markerfacecolor() == "none"
    assert to_hex(ax.lines[1].get_color()) == to_hex("0.45")
    ends = ax.collections[0].get_segments()[0][:, int(upright)]
    np.testing.assert_allclose(ends, 100 * np.array(mean_interval([0.5, 0.7])[1:]))


def test_published_marks_stand_at_the_height_of_ours():
    keys = pd.MultiIndex.from_product([["a", "b"], ["before", "after"]])
    values = pd.DataFrame(np.arange(8.0).reshape(4, 2), index=keys)
    printed = pd.Series({("b", "after"): 9.0})
    words = {"before": "before training", "after": "after it"}
    before, after, paper = forms.beside_paper(values, printed, ["b", "a"], words)
    assert list(before.values["value"]) == [4.5, 0.5]
    assert list(after.values["value"]) == [6.5, 2.5]
    assert before.offset < after.offset == paper.offset
    assert paper.look == forms.PUBLISHED
    np.testing.assert_array_equal(paper.values["value"], [9, np.nan])


def test_a_dot_stands_for_each_seed_and_a_bar_for_their_mean():
    values = pd.DataFrame({0: [1.0, 2.0], 1: [3.0, np.nan]})
    *dots, bar = forms.seeds_and_mean(values)
    assert [list(dot.values["value"].dropna()) for dot in dots] == [[1, 2], [3]]
    assert list(bar.values["value"]) == [2, 2]


def test_a_matrix_shows_its_values_from_the_top(ax):
    table = pd.DataFrame([[0.0, 1.0], [3.0, 2.0]], index=["a", "b"], columns=["x", "y"])
    image = forms.matrix(ax, table, with_names=True, bar="size")
    np.testing.assert_array_equal(np.ravel(image.get_array()), [0, 1, 3, 2])
    assert image.get_clim() == (0, 3)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["a", "b"]
    assert ax.yaxis_inverted()
    other = ax.figure.add_subplot()
    texts = pd.DataFrame([["p", "q"], ["r", "s"]])
    forms.matrix(other, table, texts=texts, vmin=0)
    assert [text.get_text() for text in other.texts] == list("pqrs")


def test_a_legend_above_names_each_line_once():
    with forms.sheet(3, 2) as figure:
        for ax in figure.subplots(1, 2):
            forms.curves(ax, [forms.Line(pd.Series([1.0, 2.0]), "a")])
        forms.key_above(figure, 2, panel=ax)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a"]
    plt.close(figure)


def test_planes_share_their_colours():
    places = pd.DataFrame(
        {
            "client": ["a", "b"],
            "class": ["u", "v"],
            "sample": [0, 0],
            "x": [0.0, 1.0],
            "y": [1.0, 0.0],
        }
    )
    frames = {"one": places, "two": places[::-1]}
    with forms.sheet(5, 2) as figure:
        forms.planes(frames, figure)
    one, two = figure.axes
    assert [ax.get_title() for ax in (one, two)] == ["one", "two"]
    colours = [
        dict(
            zip(
                map(tuple, ax.collections[0].get_offsets()),
                map(tuple, ax.collections[0].get_facecolors()),
                strict=True,
            )
        )
        for ax in (one, two)
    ]
    assert colours[0] == colours[1]
    assert len(set(colours[0].values())) == 2
    plt.close(figure)
