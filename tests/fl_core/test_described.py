"""A table is opened once, and what is proposed reads it as it is shown."""

import re
import shlex
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from fedlayers.cli.options import parse
from fl_core.data import load, recipe, roles, tables
from fl_core.data.columns import PLAIN, Reading
from fl_core.data.loading import as_data
from tests.conftest import refuses

N = 200
DRAW = np.random.default_rng(0)
PATIENT = np.repeat(np.arange(40), 5)
EID = DRAW.permutation(40)[PATIENT]
DROPPED = {"drop_missing_labels"}
DAYS = pd.date_range("2023-01-01", periods=N)
NUMBERS = {f"v{k}": DRAW.normal(size=N).round(3) for k in range(4)}


def words(*some):
    return DRAW.choice(some, N)


def sparse(values, others, share):
    """Return values of which a share is replaced."""
    return np.where(DRAW.random(N) < share, others, np.asarray(values, dtype=object))


def rows(cell):
    return list(map(cell, range(N)))


OUT = {"exclude_columns"}
NEAR = {f"v{k}": DRAW.normal(size=40)[PATIENT] + 0.1 * DRAW.normal(size=N) for k in range(4)}  # fmt: skip
ODD = {  # new columns, the settings that must be proposed, and the number of classes unless it is 2
    "nothing": ({}, set()),
    "a class named None": ({"label": words("None", "Some", "Marked")}, {"word_columns"}, 3),
    "letters and a number as classes": ({"label": words("4", "f", "r")}, {"word_columns"}, 3),
    "some labels are missing": ({"label": sparse(words("0", "1"), "#N/A", 0.02)}, DROPPED),
    "many labels are missing": ({"label": sparse(words("0", "1"), "", 0.2)}, None),
    "a typing mistake in a label": ({"label": sparse(words("0", "1"), "l", 0.01)}, {*DROPPED, "missing"}),
    "a number among words as labels": ({"label": sparse(words("x", "y"), "7", 0.02)}, {"word_columns"}, 3),
    "codes 007 and 7": ({"label": words("007", "7", "8")}, {"label_numbers"}),
    "a number as label": ({"label": NUMBERS["v0"] * 7}, {"task"}, 0),
    "counts as label": ({"label": DRAW.integers(0, 40, N)}, {"task"}, 0),
    "many words as label": ({"label": rows(lambda k: f"word {k}x")}, {"word_columns"}, N),
    "one word among numbers": ({"dose": sparse(NUMBERS["v0"], "unknown", 0.02)}, {"missing", "impute"}),
    "many marks among numbers": ({"dose": sparse(NUMBERS["v0"], "-", 0.1)}, {"missing", "impute"}),
    "a limit among numbers": ({"dose": sparse(NUMBERS["v0"], "<5", 0.02)}, OUT),
    "one number among words": ({"dose": sparse(words("low", "high"), "3", 0.02)}, set()),
    "numbers with units": ({"dose": rows(lambda k: f"{k} mg")}, OUT),
    "decimal commas": ({"dose": rows(lambda k: f"{k * 7 % 50},{k % 10}")}, {"decimal"}),
    "two readings": ({"dose": rows(lambda k: f"{k},{k % 900 + 100}")}, OUT),
    "nothing in it": ({"dose": np.nan}, OUT),
    "German dates": ({"day": DAYS.strftime("%d.%m.%Y")}, {"date_columns"}),
    "dates in two forms": (
        {"day": [f"{day:%d.%m.%Y}" if day.day % 2 else f"{day:%Y/%m/%d}" for day in DAYS]},
        OUT),
    "an index": ({"": np.cumsum(DRAW.integers(1, 9, N))}, OUT),
    "a count of rows by any name": ({"order": np.arange(N)}, OUT),
    "patients by their labels": (
        {"eid": EID, "label": DRAW.integers(0, 2, 40)[PATIENT]}, {"group_column"}),
    "patients by their values": ({"eid": EID, **NEAR}, {"group_column"}),
    "patients and visits": ({"patient": PATIENT, "visit_id": np.arange(N) // 2}, None, 0),
    "above 2**53": ({"big": 2**60 + np.arange(N)}, OUT),
    "codes above 2**53": ({"big": 2**60 + np.arange(N) % 9}, {"word_columns"}),
    "names with hyphens": (
        {"-x": sparse(words("1", "b"), "c", 0.1), "--y": DAYS.strftime("%Y-%m-%d")},
        {"word_columns", "date_columns"}),
    "labels with many marks": (
        {"label": sparse(words("0", "1"), words("NA", "N/A", "null", "?", "NaN", "", "<NA>"), 0.04)}, DROPPED),
    "an amount with a sign": ({"price": rows(lambda k: f"€{k}")}, OUT),
    "points and commas": ({"dose": rows(lambda k: f"1.{k + 100},5")}, {"decimal", "thousands"}),
    "blanks between thousands": ({"dose": rows(lambda k: f"1\u00a0{k % 50 + 100}")}, {"thousands"}),
    "apostrophes between thousands": ({"dose": rows(lambda k: f"1'{k + 100}.5")}, {"thousands"}),
    "times of a day": ({"at": rows(lambda k: f"{k % 24}:30")}, {"date_columns"}),
    "dates with names of months": ({"day": DAYS.strftime("%d%b%Y")}, {"date_columns"}),
    "years of two digits": ({"day": DAYS.strftime("%d/%m/%y")}, OUT),
    "durations": ({"stay": rows(lambda k: f"{k % 9} days 06:00:00")}, {"date_columns"}),
    "durations above a day": ({"stay": rows(lambda k: f"{7 * k % 90}:15:00")}, {"date_columns"}),
    "sorted by a measurement": ({"crp": np.sort(DRAW.normal(size=N))}, set()),
    "sorted by an amount": ({"income": np.sort(DRAW.choice(90_000, N))}, OUT),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_a_proposal_reads_the_table_as_it_was_shown(tmp_path, odd):
    """Rows, classes, clients and groups are those of the file; the command is what a shell takes."""
    columns, proposed, *classes = ODD[odd]
    frame = pd.DataFrame({"client": ["a", "b"] * (N // 2), **NUMBERS, "label": words("0", "1")})  # fmt: skip
    path = tmp_path / "t.csv"
    frame.assign(**columns).to_csv(path, index=False)
    found = tables.find_faults(path, PLAIN)
    if proposed is None:
        assert found.source is None or found.faults
        return
    assert set(found.reading.changed) == proposed, found
    assert bool(found.faults) == bool(proposed)
    source = found.source
    left_out = found.reading.drop_missing_labels
    assert N - left_out * N // 20 <= len(source) <= N
    assert [len(source.classes)] == (classes or [2])
    assert source.owner_names == ("a", "b")
    name = next(iter(columns), "v0")
    out = {"exclude_columns", "group_column"} & proposed or name == "label"
    assert (name in source.columns) == (not out)
    if "keep_ids" in str(found):  # the other way that is named works, too
        kept = tables.find_faults(path, Reading(keep_ids=True))
        assert (kept.faults, name in kept.source.columns) == ([], True)
    again = tables.find_faults(path, found.reading)
    assert not again.faults
    assert again.source.digest == source.digest
    assert str(again.source.table) == str(source.table)


@pytest.mark.parametrize(("column", "mark"), [("client", "None"), ("label", "-9")])
def test_a_mark_is_a_name_only_if_it_is_said_to_be_one(column, mark):
    frame = pd.DataFrame({"client": "1", **NUMBERS, "label": words("0", "1")})
    frame[column] = words("0", "1", mark)
    with refuses(rf"word_columns=\['{column}'\]"):
        tables.read_table(frame)
    source = tables.read_table(frame, Reading(word_columns=[column]))
    assert mark in (source.owner_names if column == "client" else source.classes)


PUBLIC = """iris sepal_length:n sepal_width:n petal_length:n petal_width:n species=3
wine class=3 alcohol:n malic_acid:n ash:n magnesium:i phenols:n hue:n proline:i
tumours id:k diagnosis=2 radius_mean:n texture_mean:n perimeter_mean:n area_mean:n
Titanic PassengerId:k Survived=2 Pclass:c Name:t Sex:w Age:h SibSp:c Ticket:t Fare:n Embarked:q
adult age:i workclass:q education:w education-num:c marital-status:w race:w hours-per-week:i native-country:w income=2
Pima Pregnancies:c Glucose:i BloodPressure:i BMI:n DiabetesPedigreeFunction:n Age:i Outcome=2
failure age:i anaemia:b diabetes:b platelets:n serum_sodium:i sex:b time:i DEATH_EVENT=2
Cleveland age:i sex:b cp:c chol:i fbs:b restecg:c thalach:i oldpeak:n ca:q thal:q num=5
stroke id:k gender:w age:n heart_disease:b ever_married:w bmi:h smoking_status:w stroke=2
bank age:i job:w default:w balance:i housing:w month:w duration:i poutcome:w y=2
German status:w duration:i history:w amount:i savings:w foreign:w class=2
mushroom class=2 cap-shape:w cap-color:w odor:w stalk-root:q habitat:w
car buying:w maint:w doors:x persons:x lug_boot:w safety:w class=4
penguins species=3 island:w bill_length_mm:h body_mass_g:h sex:q year:c
churn customerID:t gender:w SeniorCitizen:b tenure:i MonthlyCharges:n TotalCharges:h Churn=2
thyroid age:i sex:q sick:w TSH:h T3:h referral_source:w class=3
hepatitis Class=2 AGE:i SEX:b STEROID:q BILIRUBIN:h PROTIME:h
readmission encounter_id:k patient_nbr:p race:q time_in_hospital:c num_medications:i diag_1:w insulin:w readmitted=3
kidney id:k age:h bp:h al:c rbc:q hemo:h classification=2
Parkinson name:t MDVP:n Jitter:n Shimmer:n HNR:n status=2 RPDE:n DFA:n
liver Age:i Gender:w Total_Bilirubin:n Albumin:h Dataset=2
sepsis patient_id:p hour:i HR:h O2Sat:h Temp:h Gender:b SepsisLabel=2
cervix Age:i partners:q Smokes:q STDs:q Biopsy=2
abalone Sex:w Length:n Diameter:n Height:n Whole_weight:n Rings=28
cars mpg:n cylinders:c horsepower:h weight:i model_year:i origin=3
loan Loan_ID:t Gender:q Dependents:x ApplicantIncome:i LoanAmount:h Property_Area:w Loan_Status=2
spam free:n money:n george:n capital_run_length:i spam=2
centres hospital:C patient:p age:i lactate:h sofa:i admitted:d died=2
default ID:k LIMIT_BAL:i SEX:b EDUCATION:c PAY_0:c BILL_AMT1:i default=2
weather Date:d MinTemp:h Rainfall:h WindDir:q RainToday:q RainTomorrow=2"""
"""The shapes of 30 public tables: a name, and each column with its kind or its number of classes."""
KINDS = {
    "n": NUMBERS["v0"],
    "i": DRAW.integers(0, 400, N),
    "c": DRAW.integers(1, 6, N),
    "b": DRAW.integers(0, 2, N),
    "w": words("x", "y", "z"),
    "x": words("2", "3", "5more"),
    "q": sparse(words("x", "y"), "?", 0.05),
    "h": sparse(NUMBERS["v1"], "", 0.1),
    "d": DAYS.strftime("%Y-%m-%d"),
    "k": DRAW.permutation(N),
    "t": [f"no {k}, of {k}" for k in range(N)],
    "p": PATIENT + 1000,
    "C": PATIENT % 2,
}


@pytest.mark.parametrize("shape", PUBLIC.splitlines())
def test_public_tables_are_read_by_their_proposals(tmp_path, shape):
    """The label, its classes, all rows, the clients and the groups are those of the file."""
    columns, roles = {}, {}
    for name, sign, kind in re.findall(r"(\S+)([:=])(\w+)", shape):
        roles[kind if sign == ":" else "label"] = name
        columns[name] = KINDS[kind] if sign == ":" else DRAW.integers(0, int(kind), N)
    path = tmp_path / "t.csv"
    pd.DataFrame(columns).to_csv(path, index=False)
    found = tables.find_faults(path, PLAIN)
    reading, source = found.reading, found.source
    assert (reading.label_column, len(source)) == (roles["label"], N)
    classes = np.unique(columns[roles["label"]])
    assert len(source.classes) == len(classes) % 28  # so many are numbers
    assert source.owner_names == (("0", "1") if "C" in roles else ())
    assert reading.group_column == roles.get("p")
    again = tables.find_faults(path, reading)
    assert (again.faults, again.source.digest) == ([], source.digest)


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
    """Even one with faults in its separator, its encoding, its label, its dates and its numbers."""
    counts = {"opened": 0, "parsed": 0}
    read_bytes, read_csv = Path.read_bytes, pd.read_csv

    def opened(path):
        counts["opened"] += 1
        return read_bytes(path)

    def parsed(*args, **keys):
        counts["parsed"] += 1
        return read_csv(*args, **keys)

    lines = [
        f"{k % 2};{'jä' if k % 3 else 'nö'};{k},5;2024-01-{1 + k % 28:02};{'' if k == 9 else k}"
        for k in range(60)
    ]
    path = tmp_path / "t.csv"
    above = ["Study 7 of the north", "hospital;died;v;day;w"]
    path.write_bytes("\n".join([*above, *lines]).encode("latin-1"))
    monkeypatch.setattr(Path, "read_bytes", opened)
    monkeypatch.setattr(pd, "read_csv", parsed)
    found = tables.find_faults(path, PLAIN)
    assert counts == {"opened": 1, "parsed": 1}
    assert len(found.faults) == 6
    assert found.source.columns == ("v", "day", "w")
    keys = found.reading.changed
    assert recipe(path, **keys).partition == "natural"
    load(path, **keys)
    assert counts == {"opened": 2, "parsed": 2}
    with path.open("ab") as file:
        file.write("\n1;jä;7,5;2024-01-09;3".encode("latin-1"))
    assert load(path, **keys).partition.n_samples == 61
    assert counts == {"opened": 3, "parsed": 3}


def test_clients_are_compared_in_the_table():
    """Other units, other words, other classes and other capitals, and what is odd in a column alone."""
    other = np.arange(N) % 2 == 1
    frame = pd.DataFrame({
        "client": np.where(other, "b", "a"),
        "creatinine": DRAW.uniform(0.5, 2, N) * np.where(other, 88.4, 1),
        "ward": np.where(other, words("x", "y"), words("u", "v")),
        "sex": np.where(other, words("F", "M"), words("f", "m")),
        "far": np.where(np.arange(N) == 7, 1e30, DRAW.normal(size=N)),
        "until": sparse(DRAW.permutation(DAYS).astype(str), "9999-12-31", 0.1),
        "age": DRAW.permutation(N) / 7,
        "Age": DRAW.permutation(N) / 9,
        "label": np.where(other, words(">50K.", "<=50K."), words(">50K", "<=50K")),
    })  # fmt: skip
    frame["until"] = frame["until"].str[:10]
    copied = frame.assign(copy=frame.label.map(len))
    source = as_data(copied, Reading(date_columns=["until"]))
    odd = {column.name: column.odd for column in source.table.columns}
    for name, said in (
        ("creatinine", "another unit?"),
        ("ward", "shares no word"),
        ("sex", "'F' and 'f'"),
        ("far", "1e+30"),
        ("until", "9999-12-31"),
        ("age", "'Age'"),
        ("label", "shares no word"),
    ):
        assert said in odd[name]
    folded = as_data(frame, Reading(fold_case=True, date_columns=["until"]))
    assert folded.categories[folded.columns.index("sex")] == ("f", "m")
    alike = frame.assign(copy=frame.label.str.strip("."), label=frame.label.str.strip("."))  # fmt: skip
    odd = {c.name: c.odd for c in as_data(alike, Reading(date_columns=["until"])).table.columns}  # fmt: skip
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
    made = as_data(frame, Reading(impute="median"))
    odd = {each.name: each.odd for each in made.table.columns}
    assert ("gives the label away" in odd.pop("leak")) == said
    assert not any("gives the label away" in each for each in odd.values())


@settings(max_examples=20, deadline=None)
@given(st.integers(31, 60), st.integers(2, 6), st.booleans(), st.integers(0, 99))
def test_numbers_that_measure_something_are_no_groups(distinct, times, sorts, seed):
    """A value decides about a label by a threshold, and goes with other columns: it is a feature, and no patient."""
    draw = np.random.default_rng(seed)
    values = np.repeat(np.arange(distinct), times).astype(float)
    values = values if sorts else draw.permutation(values)
    others = [values + draw.normal(size=len(values)) for _ in range(4)]
    y = (values > distinct / 2).astype(int)
    assert not roles.binds_rows(values, y, others)
    person = draw.permutation(distinct)
    others = [draw.normal(size=distinct)[values.astype(int)] for _ in range(4)]
    assert roles.binds_rows(person[values.astype(int)].astype(float), y, others)


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
        made = load(as_data(frame, Reading(impute="mean")), impute="mean")
    used = [column for column in made.table.columns if column.inputs]
    assert [column.name for column in used] == names
    assert made.table.inputs == made.shape[0]
    inputs = [name.partition("=")[0] for name in made.preprocessing.inputs]
    assert [inputs.count(column.name) for column in used] == [column.inputs for column in used]  # fmt: skip
