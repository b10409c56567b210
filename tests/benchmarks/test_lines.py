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
