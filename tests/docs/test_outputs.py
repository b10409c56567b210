"""The first commands of each page run, and print what the page shows."""

import re
import shlex
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

from docs import outputs
from fedlayers.cli.app import main

FIRST = {
    path.relative_to(outputs.ROOT).as_posix(): outputs.BLOCK.search(
        path.read_text("utf-8")
    )
    for path in outputs.PAGES
}


def words(text):
    return set(re.findall(r"[a-zA-Z_]{3,}", text))


QUICK = ("docs/first_ten_minutes.md", "docs/your_table.md", "docs/export.md")
"""Pages whose commands the fast tests run."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page not in QUICK))
        for page, block in FIRST.items()
        if block
    ],
)
def test_first_commands(
    page,
    tmp_path,
    monkeypatch,
    capsys,
):
    block = FIRST[page]
    assert block is not None
    assert not block["refused"]
    monkeypatch.chdir(outputs.folder(tmp_path))
    monkeypatch.setenv("COLUMNS", "110")
    for step in outputs.steps(block["text"]):
        program, *flags = outputs.replaced(
            shlex.split(step.command), shlex.split(block["short"] or "")
        )
        if (
            program == "fedlayers"
        ):  # in this process: a new one imports for longer than most commands work
            main(flags)
            printed = capsys.readouterr().out
        else:
            printed = outputs.run(step.command, tmp_path, block["short"] or "")
        shown = words(step.output)
        assert shown, f"python -m docs.outputs {page}"
        if not block[
            "short"
        ]:  # numbers, and so some verdicts, differ between processors
            assert len(words(printed) & shown) >= 0.8 * len(shown)


def test_the_messy_folder_becomes_a_tidy_table_as_shown(tmp_path, monkeypatch, capsys):
    text = (outputs.ROOT / "docs/your_table.md").read_text("utf-8")
    block = next(each for each in outputs.BLOCK.finditer(text) if "messy" in each["text"])  # fmt: skip
    monkeypatch.chdir(outputs.folder(tmp_path, text))
    steps = outputs.steps(block["text"])
    for step in steps:
        program, *words = shlex.split(step.command)
        if program == "python":
            exec(Path(words[0]).read_text("utf-8"), {})
            continue
        with suppress(SystemExit):
            main(words)
        assert capsys.readouterr().out == step.output
    follows = re.findall("fedlayers choose (tidy.csv.*)", steps[1].output)
    assert steps[3].command == f"fedlayers check {follows[0]}"
    assert "This works" in steps[3].output


@pytest.mark.slow
def test_every_command_of_the_first_ten_minutes(tmp_path):
    text = (outputs.ROOT / "docs/first_ten_minutes.md").read_text("utf-8")
    outputs.folder(tmp_path, text)
    count = 0
    for block in outputs.BLOCK.finditer(text):
        for step in outputs.steps(block["text"]):
            printed = words(
                outputs.run(
                    step.command, tmp_path, block["short"] or "", bool(block["refused"])
                )
            )
            shown = words(step.output)
            assert shown
            assert block["short"] or len(printed & shown) >= 0.8 * len(shown), (
                step.command
            )
            count += 1
    assert text.count("| `") == count  # the table has each step's seconds
    predicted = pd.read_csv(tmp_path / "predictions.csv")
    assert predicted["record_id"].is_unique
    assert set(predicted["predicted"]) <= {"died", "survived"}
