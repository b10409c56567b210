"""Each promise of SECURITY.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_promises_name_tests_that_there_are():
    """Each row ends with the tests that hold it."""
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if re.match(r"\| (?!promise)", row)]
    assert rows
    for row in rows:
        named = re.findall(r"`(tests/[^`]+)`", row.split("|")[-2])
        assert named, row
        for test in named:
            file, _, function = test.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not function or f"def {function}(" in text, test
