"""Lines of code are those with more than a docstring or a comment."""

from __future__ import annotations

import pytest

from benchmarks import lines


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("", 0),
        ('"""About."""\n\n# a remark\nx = 1  # metres\n"""Metres."""\n', 1),
        ('def f():\n    """Add.\n\n    Much.\n    """\n    return (\n        1\n\n    )\n', 4),
        ('TEXT = """two\nlines"""\n', 2),
    ],
)
def test_lines_with_code_are_counted(source: str, count: int) -> None:
    assert lines.lines(source) == count


def test_every_package_of_the_product_is_counted() -> None:
    assert all(count > 5000 for count in lines.counts().values())
