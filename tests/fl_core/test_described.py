"""A table is opened and described once, and what is odd about its columns is marked."""

import shlex
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from fedlayers.cli.options import parse
from fl_core import storage
from fl_core.data import load, recipe
from fl_core.data.loading import as_data
from fl_core.data.names import composed
from fl_core.data.reading import PLAIN, Reading
from fl_core.data.table import describe
from fl_core.data.table.prepare import find_faults, read_table
from tests.conftest import refuses
from tests.fl_core.test_odd_tables import (
    DAYS,
    DRAW,
    EID,
    NEAR,
    NUMBERS,
    PATIENT,
    N,
    sparse,
    words,
)


@pytest.mark.parametrize(("column", "mark"), [("client", "None"), ("label", "-9")])
def test_a_mark_is_a_name_only_if_it_is_said_to_be_one(column, mark):
    frame = pd.DataFrame({"client": "1", **NUMBERS, "label": words("0", "1")})
    frame[column] = words("0", "1", mark)
    with refuses(rf"categories=\['{column}'\]"):
        read_table(frame)
    source = read_table(frame, Reading(categories=[column]))
    assert mark in (source.owner_names if column == "client" else source.classes)


NAMED = (
    "eid",
    "ptid",
    "pid",
    "usubjid",
    "mrnum",
    "kennziffer",
    "dossier",
    "hn",
    "Chart",
    "mdr",
)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("how", ["labels", "values", "words"])
def test_rows_that_belong_together_are_marked_under_any_name(name, how):
    """No list has these names. The remedy keeps the rows of one value in one split."""
    assert not describe.is_named_as_identifier(name)
    columns = {name: EID, "label": DRAW.integers(0, 2, 40)[PATIENT]}
    if how != "labels":
        columns = {name: EID, **NEAR, "label": words("0", "1")}
    if how == "words":
        columns[name] = np.char.add("P", EID.astype(str))
    frame = pd.DataFrame({**NUMBERS, **columns})
    with pytest.warns(UserWarning, match=rf"one '{name}' .*group_column='{name}'"):
        source = as_data(frame)
    (odd,) = (column.odd for column in source.table.columns if column.name == name)
    assert "belong together" in odd
    grouped = as_data(frame, Reading(group_column=name))
    assert len(np.unique(grouped.groups)) == 40


def test_a_column_that_is_named_is_taken_whatever_it_looks_like():
    frame = pd.DataFrame(
        {"record_id": np.arange(N), "amount": 5000 + 7 * np.arange(N), **NUMBERS}
    )
    frame["label"] = words("0", "1")
    findings = find_faults(frame, PLAIN)
    assert [
        column.name for column in findings.table.columns if column.taken_as == "refused"
    ] == ["record_id", "amount"]
    source = as_data(frame, Reading(columns=["record_id", "amount"]))
    assert source.columns == ("record_id", "amount")


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_role_is_text_but_for_labels_of_numbers(task):
    """Digits as text name clients and groups. As features, and as numbers to predict, they are refused."""
    digits = [str(k % 4) for k in range(N)]
    columns = dict.fromkeys(("client", "stay", "label"), digits)
    table = pd.DataFrame({**NUMBERS, **columns})
    reading = Reading(task=task, group_column="stay")
    findings = find_faults(table, reading)
    if task == "regression":
        (fault,) = findings.faults
        assert "column 'label'" in str(fault)
        exec(fault.line, {"pd": pd, "table": table})
        findings = find_faults(table, reading)
    assert not findings.faults
    assert findings.source.owner_names == ("0", "1", "2", "3")
    assert len(np.unique(findings.source.groups)) == 4
    if task == "regression":
        assert findings.source.y.tolist() == [float(digit) for digit in digits]
    else:
        assert findings.source.classes == ("0", "1", "2", "3")
    assert findings.source.columns == tuple(NUMBERS)
    (fault,) = find_faults(table.assign(dose=digits), reading).faults
    assert "column 'dose'" in str(fault)


@pytest.mark.parametrize("name", ["client", "stay", "label", "tint"])
def test_cells_that_are_no_words_are_one_fault_in_any_role(name):
    columns = {"client": words("a", "b"), "stay": words("r", "s")}
    columns |= {"label": words("0", "1"), "tint": words("red", "blue")}
    columns[name] = [[1, 2]] * N
    table = pd.DataFrame({**NUMBERS, **columns})
    for task in ("classification", "regression"):
        if task == "regression" and name != "label":
            table["label"] = 1.5
        reading = Reading(task=task, group_column="stay")
        (fault,) = find_faults(table, reading).faults
        assert f"column {name!r}" in str(fault)


@pytest.mark.parametrize("name", ["client", "stay", "label", "tint"])
def test_one_word_in_two_forms_is_a_fault_in_any_role(name):
    """The line that repairs it makes one word of both."""
    columns = {"client": words("a", "b"), "stay": words("r", "s")}
    columns |= {"label": words("0", "1"), "tint": words("red", "blue")}
    columns[name] = words("Köln", "Ko\u0308ln", "Bern")
    table = pd.DataFrame({**NUMBERS, **columns})
    reading = Reading(group_column="stay")
    (fault,) = find_faults(table, reading).faults
    assert f"column {name!r}" in str(fault)
    exec(fault.line, {"table": table})
    assert table[name].nunique() == 2
    assert not find_faults(table, reading).faults


FORMS = {  # cells of a column with a letter beyond ASCII, and its words if it is no fault
    "empty cells": (["Zürich", "", "Bern"], {"", "Bern", "Zürich"}),
    "two sorts of missing cells": (["Zürich", "", None, "Bern"], {"", "Bern", "Zürich"}),
    "one letter in its other form": (["Zu\u0308rich", "", "Bern"], {"", "Bern", "Zürich"}),
    "a number twice": (["Zürich", 5, "5", "Bern", *["Genf"] * 60], {"5", "Bern", "Genf", "Zürich"}),
    "two forms": (["Zürich", "Zu\u0308rich", ""], None),
    "two forms and numbers": (["Zürich", "Zu\u0308rich", 5, *["Genf"] * 30], None),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
def test_only_one_word_in_two_forms_is_a_fault_of_forms(kind):
    """Empty cells and numbers are no second form. The repair loses none of them."""
    some, wanted = FORMS[kind]
    cells = [some[k % len(some)] for k in range(N)]
    table = pd.DataFrame({**NUMBERS, "town": cells, "label": words("0", "1")})
    findings = find_faults(table, PLAIN)
    if wanted is None:
        (fault,) = findings.faults
        assert "Unicode's form" in str(fault)
        exec(fault.line, {"table": table})
        assert not table["town"].isna().any()
        findings = find_faults(table, PLAIN)
        wanted = {composed(str(cell)) for cell in some}
    assert not findings.faults
    assert {*findings.source.categories[-1]} == wanted


SHOWN = {  # cells, and what they are shown as
    "zeros": ([0], "number"),
    "ones": ([1.0], "number"),
    "zeros and ones": ([0, 1], "yes/no"),
    "zeros, ones and missing cells": ([0, 1, np.nan, 1], "yes/no"),
    "zeros and missing cells": ([0, np.nan, 0, 0], "number"),
    "a half": ([0, 0.5, 1], "number"),
    "truth values": ([True, False], "yes/no"),
    "one word": (["x"], "words"),
    "one word and missing cells": (["x", "", "x", None], "words"),
    "two words": (["x", "y"], "yes/no"),
    "two words and missing cells": (["x", "y", None, " ", "y"], "yes/no"),
    "three words": (["x", "y", "z"], "words"),
}


def test_two_values_are_shown_as_yes_and_no():
    """Missing cells are no value."""
    columns = {
        kind: pd.Series([cells[k % len(cells)] for k in range(N)])
        for kind, (cells, _) in SHOWN.items()
    }
    table = pd.DataFrame({**columns, "label": words("0", "1")})
    findings = find_faults(table, Reading(impute="median"))
    assert not findings.faults
    seen = {column.name: column.taken_as for column in findings.table.columns}
    assert seen == {kind: shown for kind, (_, shown) in SHOWN.items()} | {"label": "label"}  # fmt: skip


TYPES = {
    "dates": (pd.Series(DAYS), "line"),
    "dates with a zone": (pd.Series(DAYS.tz_localize("Europe/Berlin")), "line"),
    "durations": (pd.Series(pd.to_timedelta(np.arange(N) % 90, "D")), "line"),
    "complex": (pd.Series(1j * np.arange(N)), "drop"),
    "lists": (pd.Series([[1, 2]] * N), "drop"),
    "texts of numbers": (pd.Series(NUMBERS["v1"]).astype(str), "line"),
    "Python's numbers": (pd.Series(NUMBERS["v1"]).astype(object), ""),
    "nullable numbers": (pd.Series(DRAW.integers(0, 5, N)).astype("Int64"), ""),
    "truth values": (pd.Series(NUMBERS["v1"] > 0), ""),
    "categories": (pd.Series(words("x", "y")).astype("category"), ""),
    "large numbers": (pd.Series(2**53 + 1 + np.arange(N)), "drop"),
}


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_a_frame_are_taken_or_refused_with_their_line(kind):
    cells, wanted = TYPES[kind]
    table = pd.DataFrame({"v": cells, **NUMBERS, "label": words("0", "1")})
    findings = find_faults(table, PLAIN)
    assert bool(findings.faults) == bool(wanted)
    for line in findings.repairs:
        assert ("drop" in line) == (wanted == "drop")
        space = {"pd": pd, "table": table}
        exec(line, space)
        table = space["table"]
    source = as_data(table)
    assert ("v" in source.columns) == (wanted != "drop")
    if kind == "durations":
        assert source.x[:, 0].tolist() == [k % 90 for k in range(N)]


@pytest.mark.parametrize(
    ("cell", "message", "keys"),
    [
        (2**60, "got '1152921504606846976'", {}),
        ([1, 2], "column 'v', row 1", {}),
        ([1, 2], "column 'v', row 1", {"categories": ["v"]}),
    ],
)
def test_a_refusal_names_the_column_and_the_cell(cell, message, keys):
    cells = pd.Series([5, *[cell] * (N - 1)])
    table = pd.DataFrame({"v": cells, **NUMBERS, "label": words("0", "1")})
    with refuses(message):
        as_data(table, Reading(**keys))


@pytest.mark.parametrize("names", [["-x", "a b", "it's"], ["--y=1"], ["z"]])
def test_names_of_columns_are_typed_as_proposed(names):
    """Whatever a column is called, a shell and the command read its name back."""
    from fedlayers.cli.app import command_class
    from fedlayers.cli.options import FLAGS
    from fl_core.display import with_flags
    from fl_core.errors import spelled

    line = with_flags(spelled(exclude_columns=names, label_column=names[0]), FLAGS)
    command = parse(command_class("check"), "check", ["t.csv", *shlex.split(line)])
    assert sorted(command.keys.data.exclude_columns) == sorted(names)
    assert command.keys.data.label_column == names[0]


def test_a_table_is_opened_and_parsed_once(tmp_path, monkeypatch):
    """Even one with faults. Only the first lines are parsed again, for the header and for codes."""
    counts = {"opened": 0, "parsed": 0}
    read_bytes, read_csv = storage.read_bytes, pd.read_csv

    def opened(path):
        counts["opened"] += 1
        return read_bytes(path)

    def parsed(*args, **keys):
        counts["parsed"] += "nrows" not in keys
        return read_csv(*args, **keys)

    lines = [
        f"{k % 2};{'jä' if k % 3 else 'nö'};{k % 9}.5;{2024 + k % 28}"
        for k in range(60)
    ]
    path = tmp_path / "t.csv"
    above = ["Study 7 of the north", "hospital;died;v;day"]
    path.write_bytes("\n".join([*above, *lines]).encode("latin-1"))
    monkeypatch.setattr(storage, "read_bytes", opened)
    monkeypatch.setattr(pd, "read_csv", parsed)
    findings = find_faults(path, Reading(label_column="died", client_column="hospital"))
    assert counts == {"opened": 1, "parsed": 1}
    assert len(findings.faults) == 1
    keys = findings.reading.changed
    assert keys["csv"] == {"encoding": "latin-1", "sep": ";", "skiprows": 1}
    assert recipe(path, **keys).partition == "natural"
    load(path, **keys)
    assert counts == {"opened": 2, "parsed": 2}
    with path.open("ab") as file:
        file.write("\n1;jä;7.5;2024".encode("latin-1"))
    assert load(path, **keys).partition.n_samples == 61
    assert counts == {"opened": 3, "parsed": 3}


def test_clients_are_compared_in_the_table():
    """Other units, other words and other classes, and what is odd in a column alone."""
    other = np.arange(N) % 2 == 1
    frame = pd.DataFrame({
        "client": np.where(other, "b", "a"),
        "creatinine": DRAW.uniform(0.5, 2, N) * np.where(other, 88.4, 1),
        "ward": np.where(other, words("x", "y"), words("u", "v")),
        "far": np.where(np.arange(N) == 7, 1e30, DRAW.normal(size=N)),
        "age": DRAW.permutation(N) / 7,
        "Age": DRAW.permutation(N) / 9,
        "constant": 1.0,
        "label": np.where(other, words(">50K.", "<=50K."), words(">50K", "<=50K")),
    })  # fmt: skip
    source = as_data(frame)
    odd = {column.name: column.odd for column in source.table.columns}
    for name, remark in (
        ("creatinine", "another unit?"),
        ("ward", "shares no word"),
        ("far", "1e+30"),
        ("age", "'Age'"),
        ("constant", "one value only"),
        ("label", "shares no word"),
    ):
        assert remark in odd[name]
    label = frame.label.str.strip(".")
    alike = frame.assign(copy=label, label=label)
    odd = {column.name: column.odd for column in as_data(alike).table.columns}
    assert "gives the label away" in odd["copy"]
    assert not odd["label"]


@pytest.mark.parametrize(
    ("errors", "sign", "said"), [(0, 1, True), (4, -1, True), (12, 1, False)]
)
def test_a_column_of_numbers_that_gives_the_label_away_is_named(errors, sign, said):
    """One threshold predicts 99 of 100 labels, on whichever side. The other columns say nothing."""
    draw = np.random.default_rng(0)
    sick = draw.random(400) < 0.4
    shown = sick.copy()
    shown[draw.choice(400, errors, replace=False)] ^= True
    frame = pd.DataFrame({
        "client": ["a", "b"] * 200,
        "noise": draw.normal(size=400),
        "gaps": np.where(draw.random(400) < 0.1, np.nan, sick + draw.random(400)),
        "leak": sign * (shown + 0.9 * draw.random(400)),
        "label": np.where(sick, "ill", "well"),
    })  # fmt: skip
    source = as_data(frame, Reading(impute="median"))
    odd = {column.name: column.odd for column in source.table.columns}
    assert ("gives the label away" in odd.pop("leak")) == said
    assert not any("gives the label away" in remark for remark in odd.values())


@settings(max_examples=20, deadline=None)
@given(st.integers(31, 60), st.integers(2, 6), st.booleans(), st.integers(0, 99))
def test_numbers_that_measure_something_are_no_groups(distinct, times, sorts, seed):
    """A value decides about a label by a threshold, and goes with other columns: it is a feature, and no patient."""
    draw = np.random.default_rng(seed)
    values = np.repeat(np.arange(distinct), times).astype(float)
    values = values if sorts else draw.permutation(values)
    others = [values + draw.normal(size=len(values)) for _ in range(4)]
    y = (values > distinct / 2).astype(int)
    assert not describe.binds_rows(values, y, others)
    person = draw.permutation(distinct)
    others = [draw.normal(size=distinct)[values.astype(int)] for _ in range(4)]
    assert describe.binds_rows(person[values.astype(int)].astype(float), y, others)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_the_table_shows_what_the_model_sees(data):
    """Kinds of columns, in any order, with holes or without: names and inputs are those of the samples."""
    kinds = {
        "number": NUMBERS["v0"],
        "words": words("x", "y", "z"),
        "yes/no": np.arange(N) % 2,
        "holes": sparse(NUMBERS["v1"], np.nan, 0.1),
        "gaps": sparse(words("p", "q"), "", 0.1),
    }
    names = data.draw(st.lists(st.sampled_from(list(kinds)), min_size=1, unique=True))
    frame = pd.DataFrame({name: kinds[name] for name in names})
    frame = frame.assign(client=["a", "b"] * (N // 2), label=words("0", "1"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        federated = load(as_data(frame, Reading(impute="mean")), impute="mean")
    used = [column for column in federated.table.columns if column.inputs]
    assert [column.name for column in used] == names
    assert federated.table.inputs == federated.shape[0]
    inputs = [name.partition("=")[0] for name in federated.preprocessing.inputs]
    assert [inputs.count(column.name) for column in used] == [column.inputs for column in used]  # fmt: skip


def test_at_most_three_columns_are_named_for_a_role():
    header = ["age", "died", "event", "status", "result"]
    names = describe.likely_columns("label_column", "y", header)
    assert names == ["died", "event", "status"]
