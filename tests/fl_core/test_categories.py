"""Columns of words become one column a category, learned on the training samples of all clients."""

import numpy as np
import pandas as pd
import pytest
from sklearn.preprocessing import OneHotEncoder

from fl_core import data
from fl_core.data.inputs import Inputs
from fl_core.data.preprocessing import MOST_LISTED, Preprocessing
from tests.conftest import refuses
from tests.made import SPLITS, frame, samples, train_rows, written


def people():
    """Ages with a sex, which some lack, and a ward's colour."""
    draw = np.random.default_rng(2)
    table = frame()[["client", "age", "label"]]
    table.insert(
        1, "sex", [("f", "m", "")[k] for k in draw.choice(3, 60, p=(0.45, 0.45, 0.1))]
    )
    table.insert(3, "colour", [("red", "green", "blue")[k] for k in draw.choice(3, 60)])
    return table


@pytest.mark.parametrize("scale", ["none", "standard"])
def test_words_become_columns_as_scikit_learn_makes_them(tmp_path, scale):
    table = people()
    federated = data.load(written(tmp_path / "t.csv", table), scale=scale)
    train = train_rows(federated)
    words = table[["sex", "colour"]].to_numpy()
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(
        words[train]
    )
    expected = encoder.transform(words)
    x = samples(federated, *SPLITS)
    assert federated.shape == (1 + 4 + 4,) == x.shape[1:]
    assert (x[:, :3] == expected[:, :3]).all()
    assert (x[:, 5:8] == expected[:, 3:]).all()
    assert not x[:, [3, 8]].any()
    age = table["age"].to_numpy()
    wanted = age if scale == "none" else (age - age[train].mean()) / age[train].std()
    assert x[:, 4] == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_a_word_that_no_training_sample_has_gets_a_column_of_its_own(
    tmp_path,
):
    table = people()
    first = data.load(written(tmp_path / "t.csv", table))
    (row, *_) = sorted(set(range(60)) - set(train_rows(first).tolist()))
    table.loc[row, "colour"] = "aubergine"
    federated = data.load(written(tmp_path / "t.csv", table))
    assert federated.preprocessing is not None
    assert federated.preprocessing.categories == (
        ("", "f", "m"),
        (),
        ("blue", "green", "red"),
    )
    assert samples(federated, *SPLITS)[row, 5:].tolist() == [0, 0, 0, 1]
    assert federated.digest != first.digest


def test_new_rows_are_encoded_alike(tmp_path):
    path = written(tmp_path / "t.csv", people())
    federated = data.load(path)
    inputs = Inputs.from_json(Inputs.from_federation(federated).to_json())
    assert (inputs.samples(path).x.numpy() == samples(federated, *SPLITS)).all()
    shuffled = people()[["colour", "age", "sex"]]
    assert (inputs.samples(shuffled).x.numpy() == samples(federated, *SPLITS)).all()
    other = written(
        tmp_path / "new.csv",
        pd.DataFrame({"sex": ["x", "f"], "age": [50, 60], "colour": ["red", "pink"]}),
    )
    x = inputs.samples(other).x
    assert x[:, :4].tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert x[:, 5:].tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]
    with refuses("words in 'sex'"):
        inputs.samples(np.zeros((2, 3)))


MANY = [f"n{k}" for k in range(MOST_LISTED + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("fill", [(), (0.0, 40.0)])
def test_a_missing_word_is_refused_and_never_filled(fill):
    preparation = Preprocessing(
        ("sex", "age"), impute="mean", fill=fill, categories=(("f", "m"), ())
    )
    assert preparation.transform(np.array([[2.0, 7.0]])).tolist() == [[0, 0, 1, 7]]
    with refuses("row 1: the value of column 'sex' must not be missing"):
        preparation.transform(np.array([[0.0, 7.0], [np.nan, 7.0]]))
    if fill:
        filled = preparation.transform(np.array([[1.0, np.nan]]))
        assert filled.tolist() == [[0, 1, 0, 40]]


def test_more_columns_than_a_model_takes_are_refused():
    """Otherwise a small file makes a table many times as large."""
    table = {"columns": ["a", "b"], "categories": [["f", "m"], []]}
    assert Inputs.from_json({"shape": [4], "preprocessing": table}).samples(
        pd.DataFrame({"a": ["m"], "b": [7]})
    )
    for shape in ([2], [3], [5], [4, 1], [10**6]):
        with refuses(r"shape of a table must be \[4\]"):
            Inputs.from_json({"shape": shape, "preprocessing": table})
    for words in (MANY, [""] * 10**6):
        with refuses("categories of a column must be at most 10,000 words"):
            Preprocessing.from_json({"columns": ["a"], "categories": [words]})
    with refuses("one number for each column"):
        Preprocessing.from_json({"columns": ["a"], "categories": [["f"], ["m"]]})
