"""Numbers far outside of the clients' training samples are clipped in training and prediction, and named."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.preprocessing import StandardScaler

from fl_core import data
from fl_core.data.inputs import Inputs
from fl_core.data.loading import as_data
from fl_core.data.preprocessing import NO_FENCE, Preprocessing, fence, fences
from fl_core.data.reading import Reading
from tests.conftest import refuses
from tests.made import SPLITS, samples, train_rows

WRONG = [17.0, 73.0, 95.0, 139.55, 74.0, -0.7]


def table(wrong=WRONG, n=1200):
    """Two wards with a pH, of which some cells are absurd, and another column."""
    draw = np.random.default_rng(0)
    ph = 7.4 + 0.05 * draw.normal(size=n)
    ph[np.arange(len(wrong)) * 150] = wrong
    columns = {"client": ["a", "b"] * (n // 2), "ph": ph, "age": draw.normal(60, 9, n)}
    return pd.DataFrame(columns).assign(label=draw.integers(0, 2, n))


def reference(x, owner):
    """Return the fences of a column without equal quartiles, and where values outside go, by the definition."""
    ends = []
    for client in np.unique(owner):
        first, third = np.quantile(x[owner == client], (0.25, 0.75))
        ends.append((first - 10 * (third - first), third + 10 * (third - first)))
    lows, highs = zip(*ends, strict=True)
    return min(lows), max(highs)


def test_training_samples_are_clipped_before_they_are_scaled():
    frame = table()
    with pytest.warns(UserWarning, match=r"'ph' \(\d\).*clip='none'"):
        federated = data.load(as_data(frame), scale="standard")
    train = train_rows(federated)
    x = frame[["ph", "age"]].to_numpy(copy=True)
    owner = (frame.client == "b").to_numpy().astype(int)
    low, high = reference(x[train, 0], owner[train])
    distance = (high - low) / 21
    inside = x[:, 0].clip(low + 8.5 * distance, high - 8.5 * distance)
    x[:, 0] = np.where((x[:, 0] < low) | (x[:, 0] > high), inside, x[:, 0])
    expected = StandardScaler().fit(x[train]).transform(x)
    assert samples(federated, *SPLITS) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    preparation = federated.preprocessing
    assert (preparation.lowest[0], preparation.highest[0]) == pytest.approx(
        (low, high), rel=1e-12
    )
    assert (
        Preprocessing.from_json(json.loads(json.dumps(preparation.to_json())))
        == preparation
    )


def test_wrong_cells_hardly_move_the_scale():
    right = data.load(as_data(table(wrong=[])), scale="standard").preprocessing
    with pytest.warns(UserWarning, match="are clipped"):
        wrong = data.load(as_data(table()), scale="standard").preprocessing
    assert wrong.centre[0] == pytest.approx(right.centre[0], abs=0.05 * right.spread[0])
    assert wrong.spread[0] == pytest.approx(right.spread[0], rel=0.05)


def test_nothing_changes_without_such_cells_or_by_the_setting():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = data.load(as_data(table(wrong=[])), scale="standard")
        unclipped = data.load(as_data(table(wrong=[])), scale="standard", clip="none")
        raw = data.load(as_data(table()), scale="standard", clip="none")
    assert (samples(plain, *SPLITS) == samples(unclipped, *SPLITS)).all()
    assert raw.preprocessing.lowest == ()
    assert np.abs(samples(raw, *SPLITS)).max() > 20
    with refuses("clip"):
        Reading(clip="fence")


def test_predictions_name_the_clipped_columns():
    with pytest.warns(UserWarning, match="are clipped"):
        federated = data.load(as_data(table()), scale="standard")
    inputs = Inputs.from_json(Inputs.from_federation(federated).to_json())
    new = table(wrong=[]).head(40)
    assert inputs.samples(new).clipped == ()
    new.loc[3, "ph"] = 740.0
    with pytest.warns(UserWarning, match=r"clipped: 'ph' \(1\)"):
        samples = inputs.samples(new)
    assert samples.clipped == ("",) * 3 + ("'ph'",) + ("",) * 36
    moved = federated.preprocessing.transform(np.array([[740.0, 60.0], [7.4, 60.0]]))
    assert samples.x[3, 0] == pytest.approx(moved[0, 0])
    assert moved[1, 0] < moved[0, 0] < 3


def test_a_column_with_many_cells_outside_is_not_clipped():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        many = table(wrong=[74.0] * 8, n=1200)
        many.loc[::40, "ph"] = 74.0
        federated = data.load(as_data(many), scale="standard")
    preparation = federated.preprocessing
    assert preparation.lowest == () or preparation.highest[0] == NO_FENCE


@pytest.mark.parametrize(
    ("values", "has"),
    [
        (np.repeat([0.0, 1.0], [95, 19]), False),
        (np.repeat([0.0, 1.0], [95, 25]), True),  # yes and no
        (np.repeat([0.0, 5.0], [90, 25]), True),
        (np.repeat([0.0, 5.0], [90, 19]), False),
        (np.r_[np.zeros(90), np.arange(1.0, 20)], False),
        (np.r_[np.zeros(90), np.arange(1.0, 21)], True),
        (np.empty(0), False),
        (np.arange(4.0), True),
    ],
)
def test_equal_quartiles_give_way_to_those_of_the_other_values(values, has):
    low, high = fence(values)
    assert (low < high) == has
    if has and (values == 0).sum() > 1:
        first, third = np.quantile(values[values > 0], (0.25, 0.75))
        if first == third:  # two values, whose distance counts
            first = 0.0
        reach = 10 * (third - first)
        assert (low, high) == pytest.approx((first - reach, third + reach))


def test_the_widest_fences_of_all_clients_hold():
    draw = np.random.default_rng(1)
    x = np.concatenate([draw.normal(size=(50, 2)), 100 + draw.normal(size=(60, 2))])
    x[:, 1] = np.arange(110) % 3
    owner = np.repeat([1, 0], [50, 60])
    low, high, outside = fences(x, owner, ((), ("x", "y", "z")))
    assert (low[0], high[0]) == pytest.approx(reference(x[:, 0], owner))
    assert (low[1], high[1]) == (-NO_FENCE, NO_FENCE)
    assert outside.tolist() == [0, 0]


def test_names_above_2_to_the_53_keep_their_digits():
    """Two neighbours are two clients, and two classes."""
    big, draw = 2**53, np.random.default_rng(0)
    numbers = np.array([big, big + 1] * 60)
    for column, other in (("client", "label"), ("label", "client")):
        frame = pd.DataFrame({"v": draw.normal(size=120), column: numbers})
        frame[other] = ["x", "y", "y"] * 40
        source = as_data(frame)
        names = source.owner_names if column == "client" else source.classes
        assert names == (str(big), str(big + 1))
