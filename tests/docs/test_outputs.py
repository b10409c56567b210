"""The first commands of each page run, and print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import outputs

FIRST = {
    path.relative_to(outputs.ROOT).as_posix(): outputs.BLOCK.search(path.read_text("utf-8")) for path in outputs.PAGES
}


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-zA-Z_]{3,}", text))


@pytest.mark.parametrize("page", [page for page, block in FIRST.items() if block])
def test_first_commands(page: str, tmp_path: Path) -> None:
    block = FIRST[page]
    assert block is not None
    for step in outputs.steps(block["text"]):
        printed = outputs.run(step.command, outputs.folder(tmp_path), block["short"] or "")
        shown = words(step.output)
        assert shown, f"python -m docs.outputs {page}"
        if not block["short"]:  # numbers, and so some verdicts, differ between processors
            assert len(words(printed) & shown) >= 0.8 * len(shown)
