"""The pictures of a decision's report: the recommended way is on top, and the ways rule the axis."""

import pandas as pd

from fedlayers.decision.report import draw_clients

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
    orders = {each.get_label(): each.get_zorder() for each in axes.collections[1:]}
    assert max(orders, key=orders.get) == "fedavg (recommended)"
    assert "lower loss than local training at 2 of 3 clients" in axes.get_title()


def test_a_far_base_rate_is_an_arrow_at_the_edge():
    (axes,) = draw_clients(pd.DataFrame(LOSSES)).axes
    assert axes.get_xlim()[1] < 0.6
    assert [text.get_text() for text in axes.texts] == ["0.69 →", "2.20 →", "0.70 →"]
    near = {**LOSSES, "base_rate": [0.5, 0.5, 0.5]}
    (axes,) = draw_clients(pd.DataFrame(near)).axes
    assert not axes.texts
