"""Final models keep a pattern: each part asks its own curve, and every comparable part must hold."""

from dataclasses import replace

import pandas as pd
import pytest

from figures.player_fl import retained
from figures.player_fl.layers import NETWORKS

CNN, MLP = NETWORKS["fashion_mnist"], NETWORKS["heart"]
LAYERS = ["conv1", "conv2", "conv3", "fc1", "fc2"]


@pytest.mark.parametrize(
    ("quantity", "there", "not_there"),
    [
        ("gradient variance", [3, 2, 1, 20, 300], [3, 2, 1, 20, 90]),
        ("curvature per parameter", [3, 2, 1, 10, 100], [3, 2, 1, 9, 300]),
        ("federation sensitivity", [1, 1.1, 1.2, 2, 9], [1, 3, 3.1, 4, 5]),
        ("1 - CKA", [0.0, 0.1, 0.1, 0.3, 0.4], [0.0, 0.1, 0.3, 0.2, 0.4]),
    ],
)
def test_a_part_asks_what_the_paper_describes(quantity, there, not_there):
    holds = retained.pattern(quantity, CNN)
    assert holds(pd.Series(there, LAYERS))
    assert not holds(pd.Series(not_there, LAYERS))


def test_without_convolutions_the_last_layer_is_asked_and_no_dissimilarity():
    assert retained.pattern("1 - CKA", MLP) is None
    holds = retained.pattern("gradient variance", MLP)
    assert holds(pd.Series([1.0, 2.0, 1.5, 3.0]))
    assert not holds(pd.Series([1.0, 2.0, 3.0, 1.5]))


def part(held, network=CNN, moment="federated"):
    counts = {True: 4, False: 0, None: 2}
    return retained.Part(
        "gradient variance", network, moment, "", held, counts[held], 4
    )


def test_every_comparable_part_must_hold_and_others_never_contradict():
    far = replace(MLP, incomparable="few images")
    assert retained.in_final_models([part(True), part(True, MLP)]).held is True
    assert retained.in_final_models([part(True), part(None)]).held is None
    assert retained.in_final_models([part(True), part(False, far)]).held is None
    assert (
        retained.in_final_models([part(True), part(False, moment="first")]).held is True
    )
    against = retained.in_final_models([part(True), part(False, MLP)])
    assert against.held is False
    assert against.measured == (
        "1 of 2 comparable parts are there; not shown: gradient variance of Fed-Heart, federated in 0 of 4"
    )
