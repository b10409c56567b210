"""Cells of a column as text and as numbers, faults of rows, and the table of a table's columns."""

import numpy as np
import pandas as pd
import pytest

from fl_core.data import faults, names, values
from fl_core.data.columns import LONGEST, Column, ColumnTable
from fl_core.data.faults import DataFault
from tests.conftest import refuses

COLUMNS = {
    "numbers": (np.array([1.0, np.nan, 2.5]), ["1", "", "2.5"]),
    "whole": (np.array([3, 3, -1]), ["3", "3", "-1"]),
    "truth": (pd.Series([True, None, False], dtype="boolean"), ["True", "", "False"]),
    "mixed": (np.array([1.0, "1.0", None, 2], dtype=object), ["1", "1.0", "", "2"]),
    "two forms of a letter": (np.array(["é", "e\u0301"], dtype=object), ["é", "é"]),
    "words": (pd.Series(["b", "a", "b"], dtype="category"), ["b", "a", "b"]),
    "unused words": (pd.Series(pd.Categorical(["a"], ["a", "z"])), ["a"]),
    "missing words": (pd.Series(pd.Categorical(["a", None])), ["a", ""]),
    "nothing": (np.array([], dtype=object), []),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_a_column_as_text_has_each_word_once(case):
    cells, texts = COLUMNS[case]
    found = values.texts_of(cells)
    assert list(found) == texts
    assert {*found.categories} == {*texts}
    assert values.texts_of(found) is found


@pytest.mark.parametrize("cell", [[1], {"a": 1}, np.zeros(2)])
def test_a_cell_of_several_values_is_refused_where_it_stands(cell):
    column = pd.Series(["a", cell, "b", cell], dtype=object)
    with refuses(r"one number or text; got .*\(2 of 4 rows\)") as caught:
        values.texts_of(column)
    assert caught.value.row == 1


def test_some_rows_keep_the_words_that_stand_there():
    words = values.texts_of(np.array(["a", "b", "c"], dtype=object))
    some = values.taken(words, [2, 0])
    assert (list(some), sorted(some.categories)) == (["c", "a"], ["a", "c"])
    assert values.taken(np.array([1.0, 2.0]), [1]).tolist() == [2.0]


def test_what_lacks_a_value():
    words = values.texts_of(np.array(["", " ", "NA", "x"], dtype=object))
    assert values.lacks_value(words).tolist() == [True, True, False, False]
    assert values.is_marked(words).tolist() == [True, True, True, False]
    assert values.lacks_value(np.array([np.nan, 0.0])).tolist() == [True, False]
    plain = values.texts_of(np.array(["x", "y"], dtype=object))
    assert values.is_marked(plain).tolist() == [False, False]


def test_text_becomes_numbers():
    words = values.texts_of(np.array(["1", "-2.5e3", " ", ".5", "1", "nan", "-inf"], dtype=object))  # fmt: skip
    expected = [1.0, -2500.0, np.nan, 0.5, 1.0, np.nan, -np.inf]
    np.testing.assert_array_equal(values.numbers(words), expected)
    given = np.array([1.0])
    assert values.numbers(given) is given
    bad = values.texts_of(np.array(["1", "x", "", "1,5"], dtype=object))
    message = r"a number; got 'x' \(2 of 4 rows\)\. Mend it: scale='none'\.$"
    with refuses(message) as caught:
        values.numbers(bad, ("Mend it", {"scale": "none"}))
    assert caught.value.row == 1
    assert caught.value.repair == {"scale": "none"}


def test_a_fault_names_the_first_row_and_what_to_do():
    bad = np.array([False, False, True, True])
    values.refuse_where(np.zeros(4, bool), bad, "never")
    fault = values.fault_where(bad, 7, "x must be few", "Cut it.", "Leave it.", line="a = 1")  # fmt: skip
    text = "x must be few; got 7 (2 of 4 rows). Write `a = 1`. Or cut it. Or leave it."
    assert str(fault) == text
    assert (fault.row, fault.line, fault.repair) == (2, "a = 1", {})
    assert str(fault.at("t.csv")) == f"t.csv, row 2 (rows count from 0): {text}"
    assert str(DataFault("odd.").at("t.csv")) == "t.csv: odd."
    assert DataFault("odd.").repair == {}
    with refuses("must be text; got ''"):
        values.refuse_where(bad, ["a", "b", "", "c"], "it must be text")


def test_rows_of_several_parts_have_the_names_of_their_own():
    parts = [("a.csv", 2, lambda row: f"line {row + 2}"), ("b.csv", 3, lambda row: f"row {row}")]  # fmt: skip
    place = faults.place_in(parts)
    assert [place(row) for row in (0, 1, 2, 4)] == [
        "a.csv, line 2", "a.csv, line 3", "b.csv, row 0", "b.csv, row 2",
    ]  # fmt: skip
    assert place(5) == faults.row_of_array(0)
    with refuses("^a.csv, line 3: odd$"), faults.located("a.csv", parts[0][2]):
        raise DataFault("odd", row=1)
    with pytest.raises(KeyError), faults.located("a.csv"):
        raise KeyError("others pass")


def test_names_that_are_nearly_equal():
    assert names.first_duplicate(["a", "b", "b", "a"]) == "a"
    assert names.first_duplicate(["a", "b"]) is None
    assert names.nearly_equal(["É", "e\u0301", "a", "A b", "ab\u200b", "b"]) == [
        ["É", "e\u0301"], ["A b", "ab\u200b"],
    ]  # fmt: skip
    numbers = ("+1", "1.", ".5", "1e-3", "inf", "-Infinity", "NaN")
    assert all(map(names.is_number, numbers))
    assert not any(
        map(names.is_number, ("", ".", "+", "1e", "e1", "٣", "1_0", "infinit"))
    )
    assert all(map(names.is_mark, ("NULL", " ? ", "#DIV/0!", "")))
    assert not names.is_mark("0")


def test_the_table_of_columns():
    long = "x " * LONGEST
    exact = "y" * LONGEST
    table = ColumnTable((
        Column("age", "number", 1, 2, "50", "two lines\nof text"),
        Column("ward", "words", 4, 0, long),
        Column("dose", "left out", 0, 9, exact),
    ))  # fmt: skip
    assert table.inputs == 5
    shown = table.summary()
    assert shown.lead == "3 columns, 5 inputs"
    assert shown.rows[0] == ["age", "number", "1", "2", "50", "two lines\nof text"]
    assert shown.rows[1][4] == long[: LONGEST - 1] + "…"
    assert shown.rows[2][4] == exact
    changed = table.with_inputs({"ward": ["a", "b"], "dose": ["c"], "age": []})
    assert [column.inputs for column in changed.columns] == [1, 3, 0]
    assert changed.to_json()[1] == {
        "name": "ward", "taken_as": "words", "inputs": 3, "missing": 0, "example": long, "odd": "",
    }  # fmt: skip
