"""Wrong inputs that people make are answered with one line that says what to do."""

from pathlib import Path

import pandas as pd
import pytest

from tests.made import frame, written


def changed(value):
    return frame().assign(age=[value, *frame()["age"][1:]])


def labelled(*names):
    return frame().assign(label=["", "", *(names * 29)])


FEW = [frame(), *(frame()[:k].assign(client=f"c{k}") for k in (1, 2))]
HEART = "--dataset heart"
ANSWERS = [
    (pd.concat(FEW), "", ("at least 3", "c1", "c2", "Remove")),
    (
        changed("F"),
        "--impute median",
        ("got 'F' (1 of 60", "`table['age'] = pd.to_numeric"),
    ),
    (changed("7,5"), "", ("line 2", "got '7,5' (1 of 60", "Write `table")),
    (labelled("ill", "well"), "", ("(2 of 60 rows)", "--drop-missing-labels")),
    (
        frame().rename(columns={"client": "groups"}),
        "--client-column ward",
        ("--client-column groups",),
    ),
    (frame(), f"{HEART} --device gpu", ("Use --device c",)),
    (frame(), f"{HEART} --model models/my.py:ok", ("models.my:ok",)),
    (frame(), f"{HEART} --model ./my.py", ("my:NAME",)),
    (
        frame(),
        f"{HEART} --algorithm fedper --plan t.csv",
        ("must be a plan", "fedlayers choose"),
    ),
]


@pytest.mark.parametrize(("table", "words", "answers"), ANSWERS)
def test_an_answer_is_one_line_that_says_what_to_do(fedlayers, table, words, answers):
    path = written(Path("t.csv"), table).absolute()
    data = f"--dataset {path}"
    command = words if HEART in words else f"{data} {words}"
    text = fedlayers.refused("run --rounds 1", command)
    assert str(path) not in text, "a path below the working folder is relative"
    for answer in answers:
        assert answer in text
