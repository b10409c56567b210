"""The dataset of activities: its file made from a tiny archive, its samples and groups, and damaged files."""

import numpy as np
import pytest

from fl_core import data
from fl_core.data.loading import opened
from fl_core.data.named.activity import CHANNELS, STEPS, bouts, write_file
from tests.conftest import refuses

HALF = STEPS // 2
RUNS = {
    "train": [(2, 1, 8), (2, 4, 6), (2, 4, 5), (1, 6, 9), (1, 2, 7)],
    "test": [(4, 3, 6), (4, 5, 8), (4, 3, 6)],
}
"""Person, label from 1, and windows of each bout, in the order of the files."""


def write_archive(folder, runs=RUNS, seed=0):
    """Write the layout of the archive, and return windows, labels, persons and bouts, sorted by person."""
    draw, recordings = np.random.default_rng(seed), []
    for side, sequence in runs.items():
        signals = folder / side / "Inertial Signals"
        signals.mkdir(parents=True)
        windows = []
        for person, label, n in sequence:
            long = draw.normal(size=(len(CHANNELS), (n + 1) * HALF)).round(7)
            parts = [long[:, k * HALF : k * HALF + STEPS] for k in range(n)]
            recordings.append((person, label - 1, np.stack(parts)))
            windows += parts
        x = np.stack(windows)
        for k, channel in enumerate(CHANNELS):
            np.savetxt(signals / f"{channel}_{side}.txt", x[:, k], fmt=" %.7e")
        for name, column in (("subject", 0), ("y", 1)):
            marks = np.repeat([run[column] for run in sequence], [r[2] for r in sequence])  # fmt: skip
            np.savetxt(folder / side / f"{name}_{side}.txt", marks, fmt="%d")
    recordings.sort(key=lambda run: run[0])
    sizes = [len(run[2]) for run in recordings]
    persons, labels = ([run[k] for run in recordings] for k in (0, 1))
    x = np.concatenate([run[2] for run in recordings])
    return (
        x,
        np.repeat(labels, sizes),
        np.repeat(persons, sizes),
        np.repeat(range(len(sizes)), sizes),
    )


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    return folder, write_archive(folder)


def test_the_archive_becomes_the_dataset(archive, tmp_path):
    folder, (x, y, person, bout) = archive
    write_file(folder, tmp_path / "har.npz")
    source, _ = opened("activity", data_root=tmp_path)
    assert source.owner_names == ("person 01", "person 02", "person 03")
    assert source.owner.tolist() == np.unique(person, return_inverse=True)[1].tolist()
    assert source.y.tolist() == y.tolist()
    assert source.groups.tolist() == bout.tolist()
    means = [x[..., 4 * k : 4 * k + 4].mean(-1) for k in range(32)]
    assert source.x == pytest.approx(np.stack(means, axis=-1), abs=1e-6)


def test_a_bout_stays_in_one_split(tmp_path):
    few = {  # each person must have three bouts
        side: [(person, label, 4) for person, label, _ in runs for _ in range(3)]
        for side, runs in RUNS.items()
    }
    write_archive(tmp_path / "few", few)
    write_file(tmp_path / "few", tmp_path / "har.npz")
    federated = data.load("activity", data_root=tmp_path)
    for client in federated.clients:
        splits = (client.train, client.validation, client.test)
        groups = [set(split.groups.tolist()) for split in splits]
        assert sum(map(len, groups)) == len(set.union(*groups)) >= 3


def test_bouts_end_with_the_person_the_activity_and_the_overlap():
    steps = np.arange(12).reshape(6, 1, 2) // 2 * 0  # every window overlaps the next
    y, person = np.array([0, 0, 1, 1, 1, 1]), np.array([5, 5, 5, 5, 6, 6])
    assert bouts(steps, y, person)[0].tolist() == [0, 0, 1, 1, 2, 2]
    steps[5] = 1
    bout, position = bouts(steps, y, person)
    assert bout.tolist() == [0, 0, 1, 1, 2, 3]
    assert position.tolist() == [0, 1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "name", ["Inertial Signals/body_gyro_y_test.txt", "y_test.txt", "subject_test.txt"]
)
def test_a_missing_file_is_named_in_one_line(tmp_path, name):
    write_archive(tmp_path)
    (tmp_path / "test" / name).unlink()
    with refuses(rf"^\S+ must have the archive's files; got no test/{name}\. Unpack"):
        write_file(tmp_path, tmp_path / "har.npz")
    assert not (tmp_path / "har.npz").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("y_train.txt", "1\n" * 34, "y_train.txt must have 35 rows"),
        ("y_train.txt", "7\n" * 35, "labels from 1 to 6; got 7 to 7"),
        ("subject_train.txt", "1 2\n" * 35, "rows of 1 finite numbers"),
        ("subject_train.txt", "one\n" * 35, "rows of 1 finite numbers"),
        ("Inertial Signals/total_acc_x_train.txt", "", "rows of 128 finite numbers"),
        ("Inertial Signals/total_acc_x_train.txt", "nan " * 128, "128 finite numbers"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, text, message):
    write_archive(tmp_path)
    (tmp_path / "train" / name).write_text(text)
    with refuses(message):
        write_file(tmp_path, tmp_path / "har.npz")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": np.zeros((4, 9, 64), np.float32)}, r"x must be finite floats"),
        ({"x": np.full((4, 9, 128), np.nan)}, r"x must be finite floats"),
        ({"y": np.array([0, 1, 2])}, r"y must be 4 integers"),
        ({"y": np.array([0, 1, 2, 6])}, r"y must be from 0 to 5; got 0 to 6"),
        ({"bout": np.zeros(4)}, r"bout must be 4 integers; got float64"),
        ({"person": None}, r"array in .*har.npz.*person"),
    ],
)
def test_a_packed_file_of_another_form_is_refused(tmp_path, changed, message):
    four = np.arange(4)
    arrays = {"x": np.zeros((4, 9, 128)), "y": four, "person": four, "bout": four}
    arrays = {k: v for k, v in (arrays | changed).items() if v is not None}
    np.savez(tmp_path / "har.npz", **arrays)
    with refuses(message):
        data.load("activity", data_root=tmp_path)


def test_the_way_to_the_file_is_said(tmp_path):
    with refuses(r"har\.npz.*activity\.write_file"):
        data.load("activity", data_root=tmp_path)
