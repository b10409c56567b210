"""Near copies over a split: the shares by all distances, on which data the note is given, and in federations."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.spatial.distance import cdist

from examples.intensive_care import tables
from fl_core import data
from fl_core.data import near_copies
from fl_core.data.loading import as_data, opened
from fl_core.data.reading import Reading
from fl_core.data.registry import ROOT_VARIABLE
from fl_core.errors import UsageError
from tests.conftest import refuses
from tests.made import repeated

PART = "have a near copy among the training rows"


def frame_of(rows, client=None):
    """A table with a class from the first column, of four clients."""
    names = [f"c{k}" for k in range(rows.shape[1])]
    clients = np.arange(len(rows)) % 4 if client is None else client
    return pd.DataFrame(rows, columns=names).assign(
        client=[f"ward {k}" for k in clients], label=(rows[:, 0] > 0).astype(int)
    )


def recording(n=600, width=8):
    """Rows that change slowly along the file."""
    steps = np.random.default_rng(1).normal(size=(n, width))
    for row in range(1, n):
        steps[row] += 0.95 * steps[row - 1]
    return steps


def by_all_distances(train, test, train_places, test_places):
    centre, spread = train.mean(axis=0), train.std(axis=0)
    distances = cdist((test - centre) / spread, (train - centre) / spread)
    gaps = np.abs(train_places - test_places[:, None])
    nearest = gaps[np.arange(len(test)), distances.argmin(axis=1)]
    ordered = np.sort(distances, axis=1)
    copies = (ordered[:, 0] < 0.3 * ordered[:, 9]).mean()
    return (nearest <= 5).mean(), (gaps <= 5).mean(), copies


@pytest.mark.parametrize("make", [repeated, recording])
def test_the_shares_are_those_of_all_distances_in_any_blocks(make, monkeypatch):
    rows = 1000 + make()
    places = np.sort(np.random.default_rng(2).permutation(900)[: len(rows)])
    tests = np.random.default_rng(3).random(len(rows)) < 0.3
    parts = (rows[~tests], rows[tests], places[~tests], places[tests])
    whole = near_copies.near_copies(*parts)
    shares = (whole.neighbours, whole.chance, whole.copies)
    assert shares == pytest.approx(by_all_distances(*parts))
    monkeypatch.setattr(near_copies, "BLOCK", 70)
    monkeypatch.setattr(near_copies, "NUMBERS", 700)
    assert near_copies.near_copies(*parts) == whole
    monkeypatch.setattr(near_copies, "MOST_TESTED", int(tests.sum()) // 2)
    thinned = near_copies.near_copies(*parts)
    assert thinned.copies == pytest.approx(whole.copies, abs=0.15)


def test_equal_rows_are_at_no_distance():
    """Rows of few values are equal many times. This is no copy: the tenth row is as near."""
    rows = 1e6 + np.random.default_rng(0).integers(0, 2, size=(500, 3)).astype(float)
    places = np.arange(250)
    copies = near_copies.near_copies(rows[:250], rows[250:], places, places + 250)
    assert copies.copies == 0


FIRES = {
    "repeated": repeated,
    "equal": lambda: repeated(noise=0),
    "recording": recording,
}


@pytest.mark.parametrize("name", FIRES)
def test_copies_are_noted_before_the_partition_and_in_the_federation(name):
    source = as_data(frame_of(FIRES[name]()))
    assert PART in near_copies.copies_of(source).note
    federated = data.load(source)
    assert PART in federated.copies_note
    hidden = federated.without_samples()
    assert hidden.copies_note == ""
    with refuses("samples of .* must be on this machine"):
        hidden.class_counts()
    grouped = replace(source, groups=np.arange(len(source)) // 60 * 4 + source.owner)
    assert near_copies.copies_of(grouped).note == data.load(grouped).copies_note == ""


def natural(name):
    """Data without copies: of the package, of scikit-learn, and constructed wards."""
    if name == "wards":
        return pd.concat(tables(), names=["client"]).reset_index(level=0)
    from sklearn import datasets

    frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
    return frame.rename(columns={"target": "label"}).assign(client="all")


@pytest.mark.parametrize("name", ["wards", "iris", "wine", "breast_cancer", "digits"])
def test_tables_without_copies_have_no_note(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frame = natural(name)
        label = "outcome" if name == "wards" else "label"
        how = Reading(
            label_column=label,
            impute="median",
            exclude_columns=("record_id",) if name == "wards" else None,
        )
        source = as_data(frame, how)
        assert near_copies.copies_of(source).note == ""
        assert data.load(source, impute="median").copies_note == ""


NAMED = ["heart", "digits", "coded_digits", "known_labels", "known_neither", "known_inputs"]  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_named_datasets_have_no_note(name):
    assert data.load(name).copies_note == ""


def test_activity_has_the_note_without_its_bouts_only():
    try:
        source, _ = opened("activity")
    except UsageError:
        pytest.skip(f"needs har.npz below {ROOT_VARIABLE}")
    assert data.load("activity").copies_note == ""
    assert PART in data.load(replace(source, groups=None)).copies_note


def test_missing_numbers_are_means(tmp_path):
    rows = repeated()
    rows[::7, 1] = np.nan
    source = as_data(frame_of(rows), Reading(impute="mean"))
    assert PART in near_copies.copies_of(source).note
    assert PART in data.load(source, impute="mean").copies_note
