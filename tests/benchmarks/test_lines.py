"""The tokens of the code are counted without docstrings and comments, and no part grows."""

import pytest

from benchmarks import lines


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("", 0),
        ('"""About."""\n\n# a remark\nx = 1  # metres\n"""Metres."""\n', 3),
        (
            'def f():\n    """Add.\n\n    Much.\n    """\n    return (\n        1\n\n    )\n',
            9,
        ),
        ('TEXT = """two\nlines"""\n', 3),
        ("f'{f\"{1}\"} {2:{3}}' + f(x)\n", 6),
    ],
)
def test_tokens_of_code_are_counted(source, count):
    assert lines.tokens(source) == count


def test_no_part_has_more_tokens_than_stored():
    """Delete as much as you add. ``make budget`` only lowers the numbers."""
    limits = lines.stored()
    assert {
        name: count for name, count in lines.counts().items() if count > limits[name]
    } == {}


def test_stored_numbers_only_sink(monkeypatch):
    """Down to what there is, never below the design, and never up."""
    monkeypatch.setattr(lines, "DESIGN", {"a": 10, "b": 10, "c": 10})
    limits = {"a": 20, "b": 20, "c": 20}
    assert lines.lowered(limits, {"a": 15, "b": 5, "c": 30}) == {"a": 15, "b": 10, "c": 20}  # fmt: skip
