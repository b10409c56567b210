"""Odd tables, and the shapes of public ones: each is read right, or refused with a repair that works.

The table of outcomes says for each how it was read while settings were guessed, and how it is now.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fl_core import formats
from fl_core.data.reading import PLAIN, Reading
from fl_core.data.table.prepare import find_faults

N = 200
DRAW = np.random.default_rng(0)
PATIENT = np.repeat(np.arange(40), 5)
EID = DRAW.permutation(40)[PATIENT]
DAYS = pd.date_range("2023-01-01", periods=N)
STAMP = pd.date_range("2023-01-01", periods=40, freq="9D")[np.arange(N) % 40]
NUMBERS = {f"v{k}": DRAW.normal(size=N).round(3) for k in range(4)}
NEAR = {
    f"v{k}": DRAW.normal(size=40)[PATIENT] + 0.1 * DRAW.normal(size=N) for k in range(4)
}


def words(*some):
    return DRAW.choice(some, N)


def sparse(values, others, share):
    """Return values of which a share is replaced."""
    return np.where(DRAW.random(N) < share, others, np.asarray(values, dtype=object))


def rows(cell):
    return list(map(cell, range(N)))


def repaired(path, reading):
    """Return what is found in a table after all repairs that its faults propose."""
    findings = find_faults(path, reading)
    how = findings.reading
    if findings.repairs:
        exec(compile(findings.script("tidy.csv"), "tidy.py", "exec"), {})
        path, how = Path("tidy.csv"), replace(how, csv=None)
        header = pd.read_csv(path, nrows=1).columns
        excluded = [name for name in how.exclude_columns or () if name in header]
        how = replace(how, exclude_columns=excluded or None)
    return findings, find_faults(path, how)


def outcome(found):
    """Return the settings that a table was refused with, "line" for lines of pandas, "marked" or "read"."""
    changed = sorted(found.reading.changed.keys() - {"label_column", "client_column"})
    lines = ["dropped" if ".drop(" in line else "line" for line in found.repairs]
    if found.faults:
        return " ".join([*sorted({*lines}), *changed])
    return "marked" if "missing values" in " ".join(found.notes) else "read"


DROPPED, OUT = "drop_missing_labels", "exclude_columns"
ODD = {  # new columns, the settings that were guessed, the outcome now, and the number of classes unless it is 2
    "nothing": ({}, "read", "read"),
    "a class named None": ({"label": words("None", "Some", "Marked")}, "word_columns", DROPPED, 2),
    "letters and a number as classes": ({"label": words("4", "f", "r")}, "word_columns", "categories", 3),
    "some labels are missing": ({"label": sparse(words("0", "1"), "#N/A", 0.02)}, DROPPED, DROPPED),
    "many labels are missing": ({"label": sparse(words("0", "1"), "", 0.2)}, "undecided", DROPPED),
    "a typing mistake in a label": ({"label": sparse(words("0", "1"), "l", 0.01)}, f"{DROPPED} missing", "line"),
    "a number among words as labels": ({"label": sparse(words("x", "y"), "7", 0.02)}, "word_columns", "categories", 3),
    "codes 007 and 7": ({"label": words("007", "7", "8")}, "label_numbers", "line"),
    "a number as label": ({"label": NUMBERS["v0"] * 7}, "task", "task", 0),
    "counts as label": ({"label": DRAW.integers(0, 40, N)}, "task", "task", 0),
    "many words as label": ({"label": rows(lambda k: f"word {k}x")}, "word_columns", "categories", N),
    "one word among numbers": ({"dose": sparse(NUMBERS["v0"], "unknown", 0.02)}, "impute missing", "line impute"),
    "many marks among numbers": ({"dose": sparse(NUMBERS["v0"], "-", 0.1)}, "impute missing", "line impute"),
    "a limit among numbers": ({"dose": sparse(NUMBERS["v0"], "<5", 0.02)}, OUT, "dropped"),
    "one number among words": ({"dose": sparse(words("low", "high"), "3", 0.02)}, "read", "read"),
    "numbers with units": ({"dose": rows(lambda k: f"{7 * k % 90} mg")}, OUT, "line"),
    "units on a count of rows": ({"dose": rows(lambda k: f"{k} mg")}, OUT, "dropped"),
    "decimal commas": ({"dose": rows(lambda k: f"{k * 7 % 50},{k % 10}")}, "decimal", "line"),
    "two readings": ({"dose": rows(lambda k: f"{k},{k % 900 + 100}")}, OUT, "dropped"),
    "nothing in it": ({"dose": np.nan}, OUT, "dropped"),
    "German dates": ({"day": DAYS.strftime("%d.%m.%Y")}, "date_columns", "line"),
    "dates in two forms": (
        {"day": [f"{day:%d.%m.%Y}" if day.day % 2 else f"{day:%Y/%m/%d}" for day in DAYS]}, OUT, "dropped"),
    "an index": ({"": np.cumsum(DRAW.integers(1, 9, N))}, OUT, "dropped"),
    "a count of rows by any name": ({"order": np.arange(N)}, OUT, OUT),
    "patients by their labels": ({"eid": EID, "label": DRAW.integers(0, 2, 40)[PATIENT]}, "group_column", "read"),
    "patients by their values": ({"eid": EID, **NEAR}, "group_column", "read"),
    "patients and visits": ({"patient": PATIENT, "visit_id": np.arange(N) // 2}, "undecided", f"{OUT} group_column"),
    "above 2**53": ({"big": 2**60 + np.arange(N)}, OUT, "dropped"),
    "codes above 2**53": ({"big": 2**60 + np.arange(N) % 9}, "word_columns", "categories"),
    "names with hyphens": (
        {"-x": sparse(words("1", "b"), "c", 0.1), "--y": DAYS.strftime("%Y-%m-%d")},
        "date_columns word_columns", "line categories"),
    "labels with many marks": (
        {"label": sparse(words("0", "1"), words("NA", "N/A", "null", "?", "NaN", "", "<NA>"), 0.04)},
        DROPPED, DROPPED),
    "an amount with a sign": ({"price": rows(lambda k: f"€{7 * k % 90}")}, OUT, "line"),
    "points and commas": ({"dose": rows(lambda k: f"1.{k + 100},5")}, "decimal thousands", "line"),
    "blanks between thousands": ({"dose": rows(lambda k: f"1\u00a0{k % 50 + 100}")}, "thousands", "line"),
    "apostrophes between thousands": ({"dose": rows(lambda k: f"1'{k + 100}.5")}, "thousands", "line"),
    "times of a day": ({"at": rows(lambda k: f"{k % 24}:30")}, "date_columns", "line"),
    "dates with names of months": ({"day": DAYS.strftime("%d%b%Y")}, "date_columns", "line"),
    "years of two digits": ({"day": DAYS.strftime("%d/%m/%y")}, OUT, "dropped"),
    "durations": ({"stay": rows(lambda k: f"{k % 9} days 06:00:00")}, "date_columns", "line"),
    "durations above a day": ({"stay": rows(lambda k: f"{7 * k % 90}:15:00")}, "date_columns", "line"),
    "sorted by a measurement": ({"crp": np.sort(DRAW.normal(size=N))}, "read", "read"),
    "sorted by an amount": ({"income": np.sort(DRAW.choice(90_000, N))}, OUT, OUT),
    # new ones
    "codes with zeros before them": ({"ward": words("0150", "0300", "1200")}, "read", "line"),
    "yes and no": ({"ill": words("TRUE", "FALSE")}, "read", "read"),
    "NA as a word": ({"ward": words("NA", "north", "south")}, "read", "read"),
    "a minus sign of Unicode": ({"v4": rows(lambda k: f"\u2212{7 * k % 90}.5")}, "read", "line"),
    "words in two spellings": ({"sex": words("f", "F", "m")}, "read", "line"),
    "classes in two spellings": ({"label": words("ill", "Ill ", "well")}, "read", "line"),
    "a class of nines": ({"label": sparse(words("0", "1", "2"), "999", 0.03)}, "undecided", "line", 3),
    "a client without a name": ({"client": sparse(words("a", "b"), "", 0.03)}, "undecided", "line"),
    "a client named NA": ({"client": sparse(words("a", "b"), "NA", 0.03)}, "undecided", "line"),
    "clients in two spellings": ({"client": words("a", "b", "B")}, "read", "line"),
    "infinite numbers": ({"v4": sparse(NUMBERS["v0"], "inf", 0.03)}, OUT, "line"),
    "percent": ({"v4": rows(lambda k: f"{7 * k % 90} %")}, OUT, "line"),
    "large numbers with a gap": ({"big": sparse(2**60 + 2**40 * DRAW.integers(0, 7, N), "", 0.03)}, "impute", "categories"),  # noqa: E501
    "different large numbers": ({"v4": DRAW.permutation(90_000)[:N]}, "read", OUT),
    # a third set
    "two numbers in a cell": ({"bp": rows(lambda k: f"{100 + k % 60}/{60 + k % 30}")}, "read", "dropped"),
    "fractions": ({"v4": rows(lambda k: f"{k % 9 + 1}/{k % 7 + 2}")}, "read", "dropped"),
    "hexadecimal numbers": ({"v4": rows(lambda k: hex(1000 + k % 50))}, "read", "dropped"),
    "numbers of Fortran": ({"v4": rows(lambda k: f"{k % 90}.5D+02")}, "read", "dropped"),
    "digits of another script": (
        {"v4": rows(lambda k: "".join(chr(0x660 + int(sign)) for sign in str(10 + k % 90)))}, "read", "dropped"),
    "two units": ({"v4": rows(lambda k: f"{k % 70} mg" if k % 2 else f"{k % 70} g")}, "read", "dropped"),
    "months": ({"v4": rows(lambda k: f"{2019 + k % 4}-{1 + k % 12:02}")}, "read", "line"),
    "weeks": ({"v4": rows(lambda k: f"2023-W{1 + k % 52:02}")}, "read", "dropped"),
    "clients with a sign that nobody sees": ({"client": words("a", "b", "b\u200b")}, "read", "line"),
    "a minus behind": ({"v4": rows(lambda k: f"{k % 70}.5" + "-" * (k % 3 > 0))}, OUT, "dropped"),
    "numbers in brackets": ({"v4": rows(lambda k: f"({k % 70}.5)" if k % 3 else f"{k % 70}.5")}, OUT, "dropped"),
    "truth values and numbers": ({"v4": words("TRUE", "1", "FALSE", "0")}, "word_columns", "categories"),
    "blanks that do not break": ({"v4": words("red\u00a0", "red", "blue")}, "read", "line"),
    "postal codes": ({"v4": rows(lambda k: f"{k % 9 + 1}0{k % 10}{k % 7}")}, "read", OUT),
    "telephones": ({"v4": rows(lambda k: f"+41 44 {100 + k} 00 {10 + k % 80}")}, OUT, "dropped"),
    "bands": ({"band": rows(lambda k: f"{10 * (k % 9)}-{10 * (k % 9) + 9}")}, "read", "read"),
    "codes of diseases": ({"icd": words("I21.4", "I50.0", "E11.9")}, "read", "read"),
    # a fourth set
    "feet and inches": ({"v4": rows(lambda k: f"{5 + k % 2}'{k % 11}\"")}, "read", "dropped"),
    "hours and minutes": ({"v4": rows(lambda k: f"{k % 7}h {k % 6}0m")}, "read", "dropped"),
    "pounds and ounces": ({"v4": rows(lambda k: f"{5 + k % 5} lb {k % 16} oz")}, "read", "dropped"),
    "means with errors": ({"v4": rows(lambda k: f"{10 + k % 31} \u00b1 {k % 3 + 1}")}, "read", "dropped"),
    "means with intervals": ({"v4": rows(lambda k: f"{10 + k % 31} ({k % 31}-{20 + k % 31})")}, "read", "dropped"),
    "powers of ten": ({"v4": rows(lambda k: f"{k % 31}.5\u00d710^{k % 3}")}, "read", "dropped"),
    "places on earth": ({"v4": rows(lambda k: f"{50 + k % 9}.5, {10 + k % 7}.2")}, "read", "dropped"),
    "titres": ({"v4": rows(lambda k: f"1:{2 ** (3 + k % 7)}")}, "read", "dropped"),
    "scores of ten": ({"v4": rows(lambda k: f"{k % 11} of 10")}, "read", "dropped"),
    "objects": ({"v4": rows(lambda k: f'{{"a": {k % 5}, "b": {k % 3}}}')}, "read", "dropped"),
    "lists": ({"v4": rows(lambda k: f"['a{k % 5}', 'b']")}, "read", "dropped"),
    "quarters": ({"v4": rows(lambda k: f"{2015 + k % 7}Q{k % 4 + 1}")}, "read", "dropped"),
    "months with names": ({"v4": rows(lambda k: f"{STAMP[k]:%b %Y}")}, "read", "dropped"),
    "dates of America": ({"v4": rows(lambda k: f"{STAMP[k]:%B %d, %Y}")}, "read", "line"),
    "days of the week": ({"v4": rows(lambda k: f"{STAMP[k]:%a %d %b %Y}")}, "read", "line"),
    "dates as numbers": ({"v4": rows(lambda k: f"{STAMP[k]:%Y%m%d}")}, "read", "line"),
    "footnotes": ({"v4": rows(lambda k: f"{k % 31}.5" + "*" * (k % 4 < 1))}, "word_columns", "categories"),
    "nines below zero": ({"v4": rows(lambda k: NUMBERS["v0"][k] if k % 9 else -999)}, "read", "marked"),
    "nines above all": ({"v4": rows(lambda k: k % 51 if k % 9 else 9999)}, "read", "marked"),
    "nines for a few codes": ({"v4": rows(lambda k: k % 5 if k % 9 else 99)}, "read", "marked"),
    "amounts up to nines": ({"v4": rows(lambda k: k % 100)}, "read", "read"),
    "grades": ({"v4": rows(lambda k: f"grade {k % 4}")}, "read", "read"),
    "stages": ({"v4": rows(lambda k: f"T{k % 4}N{k % 3}")}, "read", "read"),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_table_is_read_right_or_refused_with_a_repair(
    tmp_path, monkeypatch, odd
):
    """All repairs are proposed at once. Rows, classes and clients are then those of the file."""
    monkeypatch.chdir(tmp_path)
    columns, _, now, *classes = ODD[odd]
    clients = {"client": ["a", "b"] * (N // 2)}
    frame = pd.DataFrame({**clients, **NUMBERS, "label": words("0", "1")})
    path = Path("t.csv")
    frame.assign(**columns).to_csv(path, index=False)
    read, again = repaired(path, PLAIN)
    assert outcome(read) == now, read
    assert (read.source is None) == bool(read.faults)
    assert not again.faults
    source = again.source
    fewer = "drop_missing_labels" in now or {*columns} & {"label", "client", "v4"}
    assert (len(source) == N) or (fewer and len(source) > N / 2)
    assert [len(source.classes)] == (classes or [2])
    assert source.owner_names == ("a", "b")
    name = next(iter(columns), "v0")
    gone = {"dropped", "exclude_columns", "group_column"} & {*now.split()}
    gone |= {"label", "client"} & {name}
    assert (name in source.columns) == (not gone)


def test_what_is_said_of_a_table_is_printed_once_a_column(tmp_path):
    """Columns with one fault are one fault, and each fault is one line."""
    columns = {f"w{k}": rows(lambda k: f"no {k}x") for k in range(3)}
    path = tmp_path / "t.csv"
    holes = {f"h{k}": sparse(NUMBERS["v0"], "", 0.1) for k in range(3)}
    pd.DataFrame({**columns, **holes, "label": words("0", "1")}).to_csv(path)
    findings = find_faults(path, PLAIN)
    assert len(findings.faults) == 3  # a column without a name, words, and holes
    assert findings.lines[1:] == [f"  {k}. {fault}" for k, fault in enumerate(findings.faults, 1)]  # fmt: skip
    assert "'w0', 'w1', 'w2'" in str(findings.faults[-1])


PUBLIC = """iris sepal_length:n sepal_width:n petal_length:n petal_width:n species=3 | read | read
wine class=3 alcohol:n malic_acid:n ash:n magnesium:i phenols:n hue:n proline:i | read | read
tumours id:k diagnosis=2 radius_mean:n texture_mean:n perimeter_mean:n area_mean:n | OUT | exclude_columns
Titanic PassengerId:k Survived=2 Pclass:c Name:t Sex:w Age:h SibSp:c Ticket:t Fare:n Embarked:q | OUT impute | dropped OUT impute
adult age:i workclass:q education:w education-num:c marital-status:w race:w hours-per-week:i country:w income=2 | read | read
Pima Pregnancies:c Glucose:i BloodPressure:i BMI:n DiabetesPedigreeFunction:n Age:i Outcome=2 | read | read
failure age:i anaemia:b diabetes:b platelets:n serum_sodium:i sex:b time:i DEATH_EVENT=2 | read | read
Cleveland age:i sex:b cp:c chol:i fbs:b restecg:c thalach:i oldpeak:n ca:q thal:q num=5 | read | read
stroke id:k gender:w age:n heart_disease:b ever_married:w bmi:h smoking_status:w stroke=2 | OUT impute | exclude_columns impute
bank age:i job:w default:w balance:i housing:w month:w duration:i poutcome:w y=2 | read | read
German status:w duration:i history:w amount:i savings:w foreign:w class=2 | read | read
mushroom class=2 cap-shape:w cap-color:w odor:w stalk-root:q habitat:w | read | read
car buying:w maint:w doors:x persons:x lug_boot:w safety:w class=4 | word_columns | categories
penguins species=3 island:w bill_length_mm:h body_mass_g:h sex:q year:c | impute | impute
churn customerID:t gender:w SeniorCitizen:b tenure:i MonthlyCharges:n TotalCharges:h Churn=2 | OUT impute | exclude_columns impute
thyroid age:i sex:q sick:w TSH:h T3:h referral_source:w class=3 | impute | impute
hepatitis Class=2 AGE:i SEX:b STEROID:q BILIRUBIN:h PROTIME:h | impute | impute
readmission encounter_id:k patient_nbr:p race:q time:c num_medications:i diag_1:w insulin:w readmitted=3 | OUT GROUP | OUT GROUP
kidney id:k age:h bp:h al:c rbc:q hemo:h classification=2 | OUT impute | exclude_columns impute
Parkinson name:t MDVP:n Jitter:n Shimmer:n HNR:n status=2 RPDE:n DFA:n | OUT | dropped
liver Age:i Gender:w Total_Bilirubin:n Albumin:h Dataset=2 | impute | impute
sepsis patient_id:p hour:i HR:h O2Sat:h Temp:h Gender:b SepsisLabel=2 | GROUP impute | group_column impute
cervix Age:i partners:q Smokes:q STDs:q Biopsy=2 | read | read
abalone Sex:w Length:n Diameter:n Height:n Whole_weight:n Rings=28 | task | task
cars mpg:n cylinders:c horsepower:h weight:i model_year:i origin=3 | impute | impute
loan Loan_ID:t Gender:q Dependents:x ApplicantIncome:i LoanAmount:h Area:w Loan_Status=2 | OUT impute word_columns | categories OUT impute
spam free:n money:n george:n capital_run_length:i spam=2 | read | read
centres hospital:C patient:p age:i lactate:h sofa:i admitted:d died=2 | date_columns GROUP impute | line group_column impute
default ID:k LIMIT_BAL:i SEX:b EDUCATION:c PAY_0:c BILL_AMT1:i default=2 | OUT | exclude_columns
weather Date:d MinTemp:h Rainfall:h WindDir:q RainToday:q RainTomorrow=2 | date_columns impute | line impute"""  # noqa: E501
"""The shapes of 30 public tables: a name, each column with its kind or its number of classes, the settings that were
guessed, and the outcome."""
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


def parts_of(line):
    """Return the shape of a public table, the settings that were guessed, and the outcome."""
    return line.replace("OUT", OUT).replace("GROUP", "group_column").split(" | ")


def page():
    """Return the table of outcomes: how each table was read while settings were guessed, and how it is now."""
    outcomes = [(odd, before, now) for odd, (_, before, now, *_) in ODD.items()]
    for line in PUBLIC.splitlines():
        shape, before, now = parts_of(line)
        name, *_ = shape.split()
        outcomes.append((f"public: {name}", before, now))
    return "\n".join(f"| {odd} | {before} | {now} |" for odd, before, now in outcomes)


def test_the_page_has_all_outcomes():
    """Their test holds them: write page() into the page after a change."""
    root = Path(__file__).parents[2]
    text = (root / "docs" / "results" / "odd_tables.md").read_text(encoding="utf-8")
    assert page() in text


@pytest.mark.parametrize("line", PUBLIC.splitlines())
def test_public_tables_are_read_with_their_label_and_client(
    tmp_path, monkeypatch, line
):
    """The classes, all rows, the clients and the groups are those of the file."""
    monkeypatch.chdir(tmp_path)
    shape, _, now = parts_of(line)
    columns, roles = {}, {}
    for name, sign, kind in re.findall(r"(\S+)([:=])(\w+)", shape):
        roles[kind if sign == ":" else "label"] = name
        columns[name] = KINDS[kind] if sign == ":" else DRAW.integers(0, int(kind), N)
    path = Path("t.csv")
    pd.DataFrame(columns).to_csv(path, index=False)
    client = roles.get("C", "client")
    reading = Reading(label_column=roles["label"], client_column=client)
    read, again = repaired(path, reading)
    assert outcome(read) == now, read
    assert not again.faults
    source, classes = again.source, np.unique(columns[roles["label"]])
    assert len(source) == N
    assert len(source.classes) == len(classes) % 28  # so many are numbers
    assert source.owner_names == (("0", "1") if "C" in roles else ())
    assert read.reading.group_column == roles.get("p")


STAMPS = pd.date_range("2150-01-01", periods=N, freq="37h")
SUBJECT = [f"OAS2_{k:04d}" for k in PATIENT]
YES = words("Y", "N")
NEW = {  # the columns, of which the last one is the label, and the outcome
    "admissions": (
        {
            "subject_id": KINDS["p"],
            "hadm_id": KINDS["k"],
            "admittime": STAMPS,
            "died": YES,
        },
        f"line {OUT} group_column",
    ),
    "unit stays": (
        {
            "patientunitstayid": KINDS["k"],
            "age": sparse(DRAW.integers(18, 90, N), "> 89", 0.05),
            "died": YES,
        },
        f"categories {OUT}",
    ),
    "loans": (
        {
            "int_rate": rows(lambda k: f" {5 + k % 90 / 7:.2f}%"),
            "emp_length": words("10+ years", "n/a"),
            "paid": YES,
        },
        "line",
    ),
    "nuclei": (
        {
            "Sample number": KINDS["k"],
            "Nuclei": sparse(KINDS["c"], "?", 0.04),
            "Class": DRAW.choice([2, 4], N),
        },
        f"line {OUT} impute",
    ),
    "credit": (
        {
            "": np.arange(N),
            "Income": sparse(DRAW.permutation(9000)[:N], "NA", 0.2),
            "v": NUMBERS["v0"],
            "late": YES,
        },
        "dropped",
    ),
    "brains": (
        {
            "Subject ID": SUBJECT,
            "MRI ID": rows(lambda k: f"{SUBJECT[k]}_MR{k % 5}"),
            "SES": KINDS["c"],
            "Group": YES,
        },
        f"{OUT} group_column",
    ),
    "kidneys": (
        {
            "dm": words("yes", "no", "\tno"),
            "sc": NUMBERS["v0"],
            "class": words("ckd", "ckd\t", "notckd"),
        },
        "line",
    ),
    "watches": (
        {
            "timestamp": 1.6e9 + 60.0 * np.arange(N),
            "ax": NUMBERS["v0"],
            "activity": YES,
        },
        OUT,
    ),
    "bands of age": (
        {
            "age": words("[0-10)", "[10-20)"),
            "weight": words("?", "[75-100)"),
            "readmitted": words("NO", "<30"),
        },
        "read",
    ),
    "a code at each row": (
        {
            "sample": rows(lambda k: f"TCGA-{k:04d}"),
            "gene": NUMBERS["v0"],
            "subtype": words("A", "B", "H"),
        },
        "dropped",
    ),
}


@pytest.mark.parametrize("shape", NEW)
def test_new_shapes_are_read_right_or_refused_with_a_repair(
    tmp_path, monkeypatch, shape
):
    """The lines run at once, and all rows and classes are those of the file. No identifier is a feature."""
    monkeypatch.chdir(tmp_path)
    columns, now = NEW[shape]
    label = list(columns)[-1]
    table = pd.DataFrame({"client": ["a", "b"] * (N // 2), **columns})
    table.to_csv("t.csv", index=False)
    source, again = repaired(Path("t.csv"), Reading(label_column=label))
    assert outcome(source) == now, source
    assert not again.faults
    assert len(again.source) == N
    assert len(again.source.classes) == len({*map(str.strip, map(str, columns[label]))})
    codes = {"subject_id", "hadm_id", "patientunitstayid", "Sample number", "timestamp"}
    assert not {*again.source.columns} & {*codes, "Subject ID", "MRI ID", "sample"}


def test_a_table_of_another_country_is_read_with_the_options_that_are_proposed(
    tmp_path,
):
    """Semicolons and decimal commas in one command; numbers are those that were meant."""
    path, wine = tmp_path / "t.csv", NUMBERS["v0"].round(1) + 0.05
    table = pd.DataFrame({"acidity": wine, "quality": words("good", "poor")})
    table.to_csv(path, sep=";", decimal=",", index=False)
    findings = find_faults(path, Reading(label_column="quality"))
    assert len(findings.faults) == 1
    assert findings.reading.csv == {"sep": ";", "decimal": ","}
    assert find_faults(path, findings.reading).source.x[:, 0] == pytest.approx(wine)


COMMAS = {  # cells of a column, the numbers of each reading, and the options that read them so
    "thousands or decimals": (["1,234", "5"], {"thousands": [1234, 5], "decimal": [1.234, 5]}),
    "commas alone": (["1,234", "-2,500"], {"thousands": [1234, -2500], "decimal": [1.234, -2.5]}),
    "larger numbers": (["1,234", "5000"], {"thousands": [1234, 5000], "decimal": [1.234, 5000]}),
    "many": ([f"{k},{k + 200}" for k in range(1, 20)], {}),
    "decimals": (["1,234", "5", "12,5"], {"decimal": [1.234, 5, 12.5]}),
    "decimals below one": (["0,123", "1,234"], {"decimal": [0.123, 1.234]}),
    "decimals of large numbers": (["1234,567", "5"], {"decimal": [1234.567, 5]}),
}  # fmt: skip


@pytest.mark.parametrize("kind", COMMAS)
def test_a_comma_with_two_readings_is_refused_with_both(tmp_path, kind):
    """None of them is chosen. Each repair gives the numbers that it names."""
    some, readings = COMMAS[kind]
    cells = [some[k % len(some)] for k in range(N)]
    table = pd.DataFrame({"v": cells, "label": words("0", "1")})
    path = tmp_path / "t.csv"
    table.to_csv(path, sep=";", index=False)
    given = Reading(csv={"sep": ";"})
    (fault,) = (findings := find_faults(path, given)).faults
    if len(readings) == 1:
        assert findings.reading.csv == {"sep": ";", "decimal": ","}
    else:
        assert findings.reading == given
        ways = [say for say, _ in fault.ways]
        assert len(ways) == 2
        for way, key in zip(ways, ("thousands", "decimal"), strict=True):
            assert f"{{'sep': ';', '{key}': ','}}" in way
        lines = [say for say, _ in find_faults(table, PLAIN).faults[0].ways]
        target = Reading(csv={"sep": ";"}, task="regression", label_column="v")
        (labels,) = find_faults(path, target).faults
        assert [say for say, _ in labels.ways] == ways
        assert not labels.line
    for key, numbers in readings.items():
        how = replace(given, csv={"sep": ";", key: ","})
        source = find_faults(path, how).source
        assert source.x[: len(some), 0].tolist() == numbers
        if len(readings) == 2:
            way = lines[["thousands", "decimal"].index(key)]
            scope = {"pd": pd, "table": table.copy()}
            exec(way.split("`")[1], scope)
            assert scope["table"]["v"].tolist()[: len(some)] == numbers


def test_points_are_between_thousands_where_commas_are_decimal(tmp_path):
    """A point that the settings leave one reading gets this one."""
    path = tmp_path / "t.csv"
    table = pd.DataFrame({"v": ["1.234", "5"] * (N // 2), "label": words("0", "1")})
    table.to_csv(path, sep=";", index=False)
    reading = Reading(csv={"sep": ";", "decimal": ","})
    (fault,) = find_faults(path, reading).faults
    assert "'thousands': '.'" in str(fault)
    scope = {"pd": pd, "table": table}
    exec(fault.line, scope)
    assert table["v"].tolist()[:2] == [1234, 5]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_nines_are_missing_after_what_their_mark_says(tmp_path, suffix):
    """The note's own words read the table again. Marks that were asked for stay."""
    path = tmp_path / f"t{suffix}"
    amounts = np.where(np.arange(N) % 9, NUMBERS["v0"], -999)
    frame = pd.DataFrame({"v": amounts, "w": NUMBERS["v1"], "label": words("0", "1")})
    getattr(frame, f"to_{suffix[1:]}")(path, index=False)
    found = find_faults(path, Reading(label_column="label"))
    (note,) = found.notes
    way = note.partition("Say it: ")[2]
    asked = {"label_column": "label", "impute": "median"}
    if suffix == ".csv":
        again = find_faults(path, Reading(**asked, **eval(f"dict({way})")))
    else:
        table = frame
        exec(way)
        again = find_faults(table, Reading(**asked))
    assert not again.notes
    assert np.isnan(again.source.x[:, 0]).sum() == (amounts == -999).sum()


def test_a_header_that_comes_again_is_mended(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame({"v0": NUMBERS["v0"], "label": words("0", "1")})
    text = frame.to_csv(index=False)
    Path("t.csv").write_text(text + text)
    found, again = repaired(Path("t.csv"), Reading(label_column="label"))
    assert found.faults
    assert not again.faults
    assert len(again.source) == 2 * N


@pytest.mark.parametrize("sign", [",", ";"])
def test_a_table_at_the_bound_of_columns_is_read_and_one_more_is_refused(
    tmp_path, monkeypatch, sign
):
    """Any usual separator counts, before the table is read by one of them."""
    monkeypatch.setattr(formats, "COLUMNS", 4)
    for names in ("abcy", "abcdy"):
        lines = [
            sign.join(names),
            *(
                sign.join([f"{k}.5"] * (len(names) - 1) + ["yn"[k % 2]])
                for k in range(9)
            ),
        ]
        path = tmp_path / f"{names}.csv"
        path.write_text("\n".join(lines))
        found = find_faults(path, Reading(label_column="y"))
        faults = "".join(map(str, found.faults))
        assert ("at most 4 columns; got 5" in faults) == (len(names) > 4)
        if len(names) == 4:
            assert ("more than one column" in faults) == (sign == ";")
            assert (found.source is None) == (sign == ";")
