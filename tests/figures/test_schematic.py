"""The papers' schematic figures, drawn from what was drawn or chosen in stored runs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from figures import items
from figures.fedra import allocations, depth
from figures.pfedla import retained_layers
from fl_core.errors import UsageError

CONFIG = {
    "algorithm": "fedra",
    "model_options": {"depth": 12},
    "options": {"depths": [12, 10, 6, 4]},
}


def test_nested_clients_have_the_first_blocks_and_random_ones_as_many() -> None:
    nested = allocations.allocations({**CONFIG, "algorithm": "inclusivefl"}, 4, 0, 3)
    random = allocations.allocations(CONFIG, 4, 0, 3)
    assert nested.shape == random.shape == (3, 4, 12)
    assert (np.diff(nested.astype(int), axis=2) <= 0).all()
    for held in (nested, random):
        assert held.sum(axis=2).tolist() == [[12, 10, 6, 4]] * 3
    assert (random[0] != random[1]).any()
    assert (random == allocations.allocations(CONFIG, 4, 0, 5)[:3]).all()
    assert (random != allocations.allocations(CONFIG, 4, 1, 3)).any()
    changing = allocations.allocations(
        {**CONFIG, "options": {"random_depths": True}}, 4, 0, 40
    ).sum(axis=2)
    assert changing.min() == 1
    assert changing.max() == 12
    with pytest.raises(UsageError, match="cover"):
        allocations.allocations({**CONFIG, "options": {"allocation": "cover"}}, 4, 0, 3)


@pytest.mark.usefixtures("read_once")
def test_a_run_that_held_other_blocks_than_its_rows_say_does_not_agree() -> None:
    header, frame = items.find(depth.NAME).read(items.find(depth.NAME).path())
    assert allocations.Run(header, frame, "fedra").agrees
    held = frame["metric"] == depth.BLOCKS
    wrong = frame.assign(value=frame["value"].where(~held, frame["value"] - 1))
    assert not allocations.Run(header, wrong, "fedra").agrees
    with pytest.raises(UsageError, match=r"run .*fedra"):
        allocations.Run({**header, "had": {}}, frame, "fedra")


def chosen(weights: list[float], kept: list[bool]) -> bool:
    table = pd.DataFrame(
        {
            "client": "a",
            "round": 1,
            "layer": range(3),
            "value": weights,
            retained_layers.RETAINED: kept,
        }
    )
    return bool(retained_layers.as_chosen(table).all())


def test_the_kept_layers_are_those_with_the_largest_weights() -> None:
    assert chosen([0.1, 0.7, 0.2], [False, True, False])
    assert chosen([0.7, 0.7, 0.2], [True, False, False])
    assert not chosen([0.1, 0.7, 0.8], [False, True, False])


@pytest.mark.usefixtures("read_once")
def test_weights_and_choices_of_every_client_layer_and_round_are_joined() -> None:
    _, frame = items.find(retained_layers.NAME).read(
        items.find(retained_layers.NAME).path()
    )
    weights = retained_layers.own_weights(frame)
    assert weights[["value", retained_layers.RETAINED]].notna().all(axis=None)
    assert (
        len(weights)
        == weights["client"].nunique()
        * weights["layer"].nunique()
        * weights["round"].nunique()
    )
    with pytest.raises(UsageError, match="heurpfedla"):
        retained_layers.own_weights(frame[frame["run"] != retained_layers.RUN])
