"""The pages list every fault, and each promise names tests that exist."""

import re
from pathlib import Path

import pytest

from tests.faults import table

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def faults():
    """Every test in this folder."""
    return table.collected()


def test_the_table_of_faults_is_up_to_date(faults):
    """If not, ``make lists`` updates it."""
    assert table.PAGE.read_text(encoding="utf-8") == table.page(faults)


def test_every_file_of_faults_says_what_it_is_about(faults):
    """The page consists of names, so the names must be clear."""
    assert all(fault.about.endswith(".") for fault in faults), (
        "the first line of a file is a sentence"
    )
    assert all(len(fault.words.split()) > 1 for fault in faults)


def test_promises_name_tests_that_there_are(faults):
    """Each row of SECURITY.md ends with the tests that hold it."""
    known = {f"tests/faults/{fault.file}" for fault in faults}
    known |= {f"tests/faults/{fault.file}::{fault.name}" for fault in faults}
    rows = [
        row
        for row in SECURITY.splitlines()
        if row.startswith("| ") and not row.startswith("| promise")
    ]
    assert rows
    for row in rows:
        named = re.findall(r"`(tests/[^`]+)`", row.split("|")[-2])
        assert named, row
        for test in named:
            file, _, function = test.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert test in known or not function or f"def {function}(" in text, test
