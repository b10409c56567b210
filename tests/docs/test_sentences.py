"""Sentences that were published and are not true must not come back."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "docs",
    "figures",
    "notebooks",
    "fedlayers",
    "fl_core",
    "diagnostics",
    "benchmarks",
    "examples",
)
REGISTRATIONS = ("PREREGISTERED", "REGISTERED")
UNTRUE = (
    "no choice saw",
    "samples that it never saw",
    "come level with the best cut",
    "state from round to round lowers the score",
    "-1.4 [-2.7, -0.1] |",
    "each client, against the best cut | -1.5",
)
PAGES = [
    ROOT / "README.md",
    *(
        path
        for folder in FOLDERS
        for kind in ("md", "py", "ipynb")
        for path in (ROOT / folder).rglob(f"*.{kind}")
    ),
]


@pytest.mark.parametrize("sentence", UNTRUE)
def test_untrue_sentences_are_on_no_page(sentence: str) -> None:
    texts = {path: " ".join(path.read_text(encoding="utf-8").split()) for path in PAGES}
    found = [path for path, text in texts.items() if sentence.lower() in text.lower()]
    assert not [path for path in found if not path.name.startswith(REGISTRATIONS)]
