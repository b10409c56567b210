"""Wrong inputs that people make are answered with one line that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedlayers as fl
from fl_core import data
from fl_core.errors import UsageError
from tests.fedlayers import command
from tests.fl_core.test_tables import frame, written


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command(f"run --rounds 1 {' '.join(words)}")
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def changed(column: str, row: int, value: str) -> str:
    table = frame().astype(object)
    table.loc[row, column] = value
    return str(written(Path("t.csv"), table))


def test_clients_with_too_few_samples(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        frame(),
        frame().iloc[:1].assign(client="tiny"),
        frame().iloc[:2].assign(client="small"),
    ]
    text = said(capsys, "--dataset", str(written(Path("t.csv"), pd.concat(rows))))
    assert "at least 3" in text
    assert "tiny" in text
    assert "small" in text
    assert "Remove" in text


def test_a_word_among_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--dataset", changed("age", 7, "F"))
    assert "got 'F' (1 of 60" in text
    assert "--exclude-columns age" in text


def test_a_path_below_the_working_folder_is_relative(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, "--dataset", str(Path(changed("age", 7, "F")).absolute()))
    assert str(Path.cwd()) not in text
    assert "t.csv" in text


def test_a_comma_in_a_number_keeps_its_own_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "decimal point" in said(capsys, "--dataset", changed("age", 7, "7,5"))


@pytest.mark.parametrize("numbers", [False, True])
def test_an_empty_label(numbers: bool, capsys: pytest.CaptureFixture[str]) -> None:
    table = frame()
    labels = [str(k % 2) if numbers else ("ill", "well")[k % 2] for k in range(60)]
    table["label"] = ["" if k in (7, 9) else label for k, label in enumerate(labels)]
    text = said(capsys, "--dataset", str(written(Path("t.csv"), table)))
    assert "line 9" in text
    assert "(2 of 60 rows)" in text
    assert "--drop-missing-labels" in text


def test_a_doubled_column(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("client,age,dose,age,label\na,1,2,3,0\n")
    text = said(capsys, "--dataset t.csv")
    assert "columns 2 and 4" in text
    assert "Rename" in text


@pytest.mark.parametrize("name", ["gpu", "GPU:0", "cuba"])
def test_a_device_of_another_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "--dataset heart --device", name)
    assert "--device cuda" in text
    assert "privateuse" not in text


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("mymodel.py:ok", "mymodel:ok"),
        ("models/mymodel.py:ok", "models.mymodel:ok"),
        ("./mymodel.py", "mymodel:NAME"),
    ],
)
def test_a_file_in_place_of_a_module(
    path: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "--dataset heart --model", path)
    assert place in text


@pytest.mark.parametrize("way", ["file", "memory"])
def test_one_hot_labels_are_refused_and_one_column_is_squeezed(way: str) -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3

    def read(labels: np.ndarray) -> Any:
        np.savez("a.npz", x=x, y=labels)
        if way == "file":
            return data.load("a.npz", clients=2)
        return fl.from_clients({"a": (x, labels)})

    with pytest.raises(UsageError, match=r"y\.argmax\(axis=1\)"):
        read(np.eye(3)[y])
    assert read(y[:, None]).classes == read(y).classes == ("0", "1", "2")


def test_another_name_for_the_clients(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(
        "a.npz", x=np.zeros((60, 3)), y=np.arange(60) % 3, groups=np.arange(60) % 2
    )
    text = said(capsys, "--dataset a.npz")
    assert "'groups'" in text
    assert "client," in text
    path = written(Path("t.csv"), frame().rename(columns={"client": "groups"}))
    assert "--client-column groups" in said(
        capsys, "--dataset", str(path), "--client-column ward"
    )


def test_a_plan_that_is_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plan.json").write_text("fc1 shared\n")
    text = said(capsys, "--dataset heart --algorithm fedper --plan plan.json")
    assert "must be a plan" in text
    assert "fedlayers choose" in text
