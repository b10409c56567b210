"""Odd data and odd requests are noted in a plain line each, and ordinary ones are not."""

import numpy as np
import pandas as pd
import pytest

from fl_core.data import from_clients, load
from fl_core.data.federated import notes
from fl_core.data.loading import as_data
from fl_core.data.reading import Reading
from fl_core.run import runner
from tests.conftest import CONFIG, TOY, network

RANDOM = np.random.default_rng(0)


def table(n=60, clients=("north", "south"), **changed):
    """Three features and two classes at each client; ``column`` takes the place of the last feature, in file order."""
    x = RANDOM.normal(size=(n * len(clients), 3))
    if "column" in changed:
        x[:, 2] = changed["column"]
    y = changed.get("y", np.arange(len(x)) % 2)
    return from_clients(
        {
            name: (x[k * n : (k + 1) * n], y[k * n : (k + 1) * n])
            for k, name in enumerate(clients)
        }
    )


NUMBERS = np.arange(120)
CASES = {
    "huge features": (
        {"column": 1e30 * RANDOM.normal(size=120)},
        r"e.30.*feature 2",
    ),
    "a class each": (
        {"n": 200, "y": np.arange(400)},
        "^400 of 400",
    ),
    "a class of one sample": (
        {"y": np.where(NUMBERS == 9, 2, NUMBERS % 2)},
        "single sample has class '2'",
    ),
    "clients alike": (
        {"clients": ("north", "north ", "south")},
        "'north', 'north '",
    ),
    "one client": ({"clients": ("north",)}, "one client"),
    "the usual class": (
        {"y": (NUMBERS % 4 > 0).astype(int)},
        "AUROC.*'1'.*positive='0'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_odd_is_noted_in_one_line(case):
    changed, message = CASES[case]
    (note,) = notes(table(**changed))
    assert "\n" not in note
    with pytest.warns(UserWarning, match=message):
        runner.run(
            CONFIG.with_keys(rounds=1, epochs=0), data=table(**changed), progress=False
        )


def test_a_note_names_the_column_next_to_words():
    columns = {
        "sex": ["f", "m", "m", "f"] * 30,
        "serial": NUMBERS,
        "dose": 1e9 * RANDOM.normal(size=120),
    }
    frame = pd.DataFrame(columns).assign(client=["a", "b"] * 60, label=NUMBERS % 2)
    source = as_data(frame, Reading(columns=["sex", "serial", "dose"]))
    (note,) = notes(load(source, scale="none"))
    assert "in column 'dose'" in note


@pytest.mark.parametrize("name", ["heart", "digits"])
def test_nothing_is_said_of_ordinary_data(name):
    assert notes(load(name)) == []
    tokens = from_clients({"a": ({"ids": 999 * NUMBERS[:, None]}, NUMBERS % 2)})
    assert notes(TOY) == notes(tokens, alone=True) == []


@pytest.mark.parametrize("options", [{}, {"base": "fedbn"}])
def test_keeping_normalisations_of_a_model_without_any_is_noted(
    options,
):
    config = CONFIG.with_keys(
        algorithm="vanilla" if options else "fedbn", options=options
    )
    plain, normalised = (
        runner.assemble(config, data=TOY, model=network(kind)).notes()
        for kind in ("plain", "norm")
    )
    assert any("fedbn" in note for note in plain)
    assert not any("fedbn" in note for note in normalised)


def test_samples_that_are_in_two_splits_are_noted_from_one_in_a_hundred_on():
    x = RANDOM.normal(size=(400, 3))
    for copies in (0, 1, 2, 60):
        again = x.copy()
        again[200 : 200 + copies] = x[:copies]  # at the other client
        y = np.arange(200) % 2
        data = from_clients({"north": (again[:200], y), "south": (again[200:], y)})
        train = {
            row.tobytes() for client in data.clients for row in client.train.x.numpy()
        }
        wanted = []
        for split in ("validation", "test"):
            rows = [
                row
                for client_data in data.clients
                for row in client_data.split(split).x.numpy()
            ]
            in_training = sum(row.tobytes() in train for row in rows)
            if in_training > 0.01 * len(rows):
                wanted.append(f"{in_training} of {len(rows)} {split}")
        printed = [note for note in notes(data) if "training sample" in note]
        assert [" ".join(note.split()[:4]) for note in printed] == wanted
        assert len(wanted) == {0: 0, 60: 2}.get(copies, len(wanted))
