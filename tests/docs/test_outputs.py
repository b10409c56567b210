"""The first commands of each page run, and print what the page shows."""

import re
import shlex
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

from docs import outputs
from fedlayers.cli.app import main
from tests.conftest import with_slow

TEXTS = {
    path.relative_to(outputs.ROOT).as_posix(): path.read_text("utf-8")
    for path in outputs.PAGES
}
FIRST = {page: outputs.in_one_go(text) for page, text in TEXTS.items()}


def words(text):
    return set(re.findall(r"[a-zA-Z_]{3,}", text))


WITH_COMMANDS = [page for page, blocks in FIRST.items() if blocks]
QUICK = {"docs/first_ten_minutes.md", "docs/your_table.md", "docs/export.md"}
"""Pages whose commands the fast tests run."""


@pytest.mark.parametrize("page", with_slow(WITH_COMMANDS, {*WITH_COMMANDS} - QUICK))
def test_first_commands(
    page,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(outputs.folder(tmp_path))
    monkeypatch.setenv("COLUMNS", "110")
    for block in FIRST[page]:
        assert not block["refused"]
        for step in outputs.steps(block):
            program, *flags = outputs.replaced(
                shlex.split(step.command), shlex.split(block["short"] or "")
            )
            # in this process: a new one imports for longer than most commands work
            if program == "fedlayers":
                main(flags)
                printed = capsys.readouterr().out
            else:
                printed = outputs.run(step.command, tmp_path, block["short"] or "")
            shown = words(step.output)
            assert shown, f"python -m docs.outputs {page}"
            # numbers, and so some verdicts, differ between processors
            if not block["short"]:
                assert len(words(printed) & shown) >= 0.8 * len(shown)


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_folds_long_output(page):
    """What is folded is in the block's output, and written as it was."""
    blocks = [*outputs.BLOCK.finditer(TEXTS[page])]
    assert len(blocks) == TEXTS[page].count("```console")
    for block in blocks:
        shown = block["text"].count("\n")
        assert 0 < shown <= 15
        printed = block["text"] + (block["rest"] or "")
        summary = block["summary"] or ""
        assert block[0].startswith(outputs.folded(printed, shown, summary))


def test_long_output_is_folded_at_an_empty_line():
    lines = ["$ fedlayers list", *map(str, range(9)), "", *map(str, range(9))]
    printed = "\n".join(lines)
    (block,) = outputs.BLOCK.finditer(outputs.folded(printed))
    assert block["text"].splitlines() == lines[:11]
    assert block["text"] + block["rest"] == f"{printed}\n"
    (block,) = outputs.BLOCK.finditer(outputs.folded(printed.replace("\n\n", "\n")))
    assert block["text"].count("\n") == 15
    short = outputs.folded("\n".join(lines[:15]))
    assert "details" not in short


@pytest.mark.parametrize("word", ["doses.py", "messy.py"])
def test_tables_are_checked_and_tidied_as_shown(word, tmp_path, monkeypatch, capsys):
    text = (outputs.ROOT / "docs/your_table.md").read_text("utf-8")
    blocks = outputs.in_one_go(text, word)
    monkeypatch.chdir(outputs.folder(tmp_path, text))
    steps = [step for block in blocks for step in outputs.steps(block)]
    for step in steps:
        program, *words = shlex.split(step.command)
        if program == "python":
            exec(Path(words[0]).read_text("utf-8"), {})
            continue
        with suppress(SystemExit):
            main(words)
        assert capsys.readouterr().out == step.output
    follows = re.findall("fedlayers choose (tidy.csv.*)", steps[1].output)
    if word == "messy.py":
        assert steps[3].command == f"fedlayers check {follows[0]}"
        assert "This works" in steps[3].output


@pytest.mark.slow
def test_every_command_of_the_first_ten_minutes(tmp_path):
    text = (outputs.ROOT / "docs/first_ten_minutes.md").read_text("utf-8")
    outputs.folder(tmp_path, text)
    count = 0
    for block in outputs.BLOCK.finditer(text):
        for step in outputs.steps(block):
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
