"""Lines of code are those with more than a docstring or a comment."""

from __future__ import annotations

from pathlib import Path

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


def test_every_package_of_the_product_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for k, name in enumerate(lines.PACKAGES, 1):
        assert (lines.ROOT / name / "__init__.py").is_file()
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text('"""About."""\n')
        (tmp_path / name / "inner" / "a.py").write_text("x = 1\n" * k)
    monkeypatch.setattr(lines, "ROOT", tmp_path)
    assert lines.counts() == {"fl_core": 1, "diagnostics": 2, "fedlayers": 3}
