"""The pictures of a decision's report: the recommended way is on top, and the ways rule the axis."""

import matplotlib.pyplot as plt
import pandas as pd

from fedlayers.decision.report import draw_clients, learning_title, partition_title

LOSSES = {
    "client": ["_north", "south", "east"],
    "fedavg": [0.30, 0.35, 0.40],
    "local": [0.31, 0.33, 0.50],
    "base_rate": [0.69, 2.20, 0.70],
    "shown": "",
}


def test_the_clients_picture_has_the_recommended_way_on_top():
    (axes,) = draw_clients(pd.DataFrame(LOSSES)).axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["fedavg (recommended)", "local", "base_rate"]
    orders = {drawn.get_label(): drawn.get_zorder() for drawn in axes.collections[1:]}
    assert max(orders, key=orders.get) == "fedavg (recommended)"
    assert "lower loss than local training at 2 of 3 clients" in axes.get_title()


def test_a_far_base_rate_is_an_arrow_at_the_edge():
    (axes,) = draw_clients(pd.DataFrame(LOSSES)).axes
    assert axes.get_xlim()[1] < 0.6
    assert [text.get_text() for text in axes.texts] == ["0.69 →", "2.20 →", "0.70 →"]
    near = {**LOSSES, "base_rate": [0.5, 0.5, 0.5]}
    (axes,) = draw_clients(pd.DataFrame(near)).axes
    assert not axes.texts


def test_titles_say_what_is_seen():
    """The score's direction decides which way is best."""
    _, axes = plt.subplots()
    axes.plot([0, 1], [0.9, 0.2], label="fedavg")
    axes.plot([0, 1, 2], [0.1, 0.2, 0.8], label="local")
    assert learning_title(axes, "macro_f1") == "local is best at its last round: 0.8"
    assert learning_title(axes, "loss") == "fedavg is best at its last round: 0.2"
    axes.lines[1].set_ydata([0.1, 0.2, float("nan")])
    assert learning_title(axes, "macro_f1") == "fedavg is best at its last round: 0.2"
    axes.lines[0].set_ydata([0.9, float("nan")])
    assert learning_title(axes, "macro_f1").startswith("no way has a score")
    counts = pd.DataFrame({"b": [3, 1], "c": [1, 9]}, index=["n", "s"])
    assert partition_title(counts) == "s: 90% of its samples are c"
