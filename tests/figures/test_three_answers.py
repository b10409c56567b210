"""The picture of three answers and its page are made from their rows, and the README says the same ways."""

import platform

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from torch.profiler import profile

import fedlayers as fl
from fedlayers.cli.train import DEMO
from fedlayers.decision.answer import Answer, Line
from fedlayers.decision.ways import ALONE, SHARE_ALL, SHARE_SOME
from figures.decision import three_answers as made

ROWS = pd.read_csv(made.ROWS)


def test_the_page_is_made_from_the_rows():
    page = made.PAGE.read_text(encoding="utf-8")
    assert made.written(page) == page
    assert made.PAGE.with_suffix(".png").exists()


def test_there_are_three_answers():
    first = ROWS.groupby("data", sort=False).first()
    assert list(first.index) == list(made.NAMES)
    assert first["answer"].tolist() == [SHARE_ALL, SHARE_SOME, ALONE]
    assert first["way"].tolist() == ["fedavg", "head_local", "linear_local"]
    assert set(ROWS["way"]) <= set(made.ORDER)
    readme = (made.PAGE.parents[2] / "README.md").read_text(encoding="utf-8")
    assert "Sharing all layers, a local head and a logistic regression" in readme


def test_the_picture_has_a_dot_for_each_way_and_an_interval_for_each_rival():
    figure = made.picture(ROWS)
    assert len(figure.axes) == len(made.NAMES)
    for ax, name in zip(figure.axes, made.NAMES, strict=True):
        data_rows = ROWS[ROWS["data"] == name]
        *dots, level = ax.lines
        places = pd.concat([pd.Series(dot.get_xdata()).dropna() for dot in dots])
        assert sorted(places) == pytest.approx(sorted(data_rows["value"]))
        assert level.get_xdata()[0] == data_rows["value"].iloc[0]
        rivals = data_rows["low"].notna() & (
            data_rows["way"] != data_rows["way"].iloc[0]
        )
        ranges = ax.collections[0].get_segments()
        assert (
            sum(len(ends) > 0 and pd.notna(ends).all() for ends in ranges)
            == rivals.sum()
        )
        assert ax.get_title().startswith(f"{name}:\n")
    plt.close(figure)


def test_repeated_demos_give_the_demo_s_answers():
    repeats = pd.read_csv(made.REPEATS)
    assert set(repeats["data"]) == set(DEMO)
    whole = repeats[repeats["label"] == "as it is"]
    assert sorted(set(whole["seed"])) == [0, 10, 20]
    ways = repeats.groupby("data")["way"].unique().map(list).to_dict()
    assert ways == {
        "known_neither": ["fedavg"],
        "known_labels": ["head_local"],
        "heart": ["linear_local"],
    }


def test_lines_are_those_of_ways_with_an_action():
    lines = (Line("fedavg", SHARE_ALL, 0.2), Line("local", ALONE, 0.4, 0.2, 0.1, 0.3))
    base = Line("base_rate", "", 1.1, 0.9, 0.8, 1.0)
    answer = Answer(
        SHARE_ALL, "fedavg", (*lines, base), "loss", "test", 2, "classification", (0,)
    )
    table = made.lines_of("toy", answer)
    assert table["way"].tolist() == ["fedavg", "local"]
    assert table["answer"].tolist() == [SHARE_ALL] * 2


def computed_by_onednn(network, x):
    """Return the operations of a forward and a backward pass that oneDNN computes."""
    with profile() as profiler:
        network(x).sum().backward()
    keys = [event.key for event in profiler.key_averages()]
    return [key for key in keys if "mkldnn" in key or "onednn" in key]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the claim is of x86")
def test_onednn_computes_nothing_in_the_demo():
    """It does in a network of convolutions, where its level would matter."""
    convolution = torch.nn.Conv2d(16, 32, 3)
    assert computed_by_onednn(convolution, torch.ones(8, 16, 16, 16))
    for name in DEMO:
        task = fl.assemble(fl.RunConfig(dataset=name))
        x = task.data.clients[0].train.x[:32]
        assert not computed_by_onednn(task.model.train(), x), name
