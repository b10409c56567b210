"""Own tables as people have them: columns left out, other separators and encodings, words, holes, Parquet."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    MinMaxScaler,
    OneHotEncoder,
    RobustScaler,
    StandardScaler,
)

import fedlayers as fl
from fedlayers.cli.app import main
from fl_core import data
from fl_core.config import RunConfig
from fl_core.data import loading, preprocessing
from fl_core.data.inputs import Inputs
from fl_core.data.loading import as_data
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.reading import PLAIN, Reading
from fl_core.data.table import read as tables
from fl_core.data.table.prepare import find_faults
from fl_core.data.values import texts_of
from fl_core.records.store import Run
from fl_core.run import runner
from fl_core.run.exported_model import Predictions
from tests.conftest import refuses
from tests.made import SPLITS, frame, samples, train_rows, written


def test_what_cannot_be_read_so_is_refused(tmp_path):
    table = written(tmp_path / "t.csv", frame())
    for how, message in (
        ({"exclude_columns": ["doze"]}, "exclude_columns.*'doze'.*'dose'"),
        ({"columns": ["label"]}, ": columns.*'label'"),
        ({"exclude_columns": ["client"]}, "exclude_columns.*'client'"),
        ({"columns": ["age"], "exclude_columns": ["age"]}, "column of features"),
        ({"columns": ["age", "age"]}, "columns.*'age'"),
        ({"csv": {"encoding": "utf-7000"}}, "'utf-7000'"),
        ({"separator": ";"}, "csv={'sep': VALUE}"),
        ({"keep_ids": True}, "columns=NAME"),
        ({"scale": "standrad"}, "'standard'"),
        ({"coulmns": ["age"]}, "'columns'"),
    ):
        with refuses(message):
            data.load(table, **how)
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 2)), y=np.arange(9) % 3)
    for dataset in ("digits", tmp_path / "a.npz"):
        for option, value in (("columns", ["age"]), ("csv", {"sep": ";"})):
            with refuses(option):
                data.load(dataset, **{option: value})
    np.savez(tmp_path / "b.npz", x=np.zeros((9, 4, 4), np.uint8), y=np.arange(9) % 3)
    lines = [f"a b,{k % 2}\n" for k in range(9)]
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(lines))
    for name in ("b.npz", "t.csv"):
        for how in ({"scale": "standard"}, {"impute": "mean"}):
            with refuses("scale.*no table of numbers"):
                data.load(tmp_path / name, **how)


WRITTEN = [
    *({"sep": sign} for sign in (";", "|", "\t")),
    *({"encoding": name} for name in ("latin-1", "cp1252", "utf-16-le")),
    {"sep": ";", "encoding": "latin-1"},
]


@pytest.mark.parametrize("how", WRITTEN)
def test_another_way_of_writing_is_named_with_the_option_that_reads_it(tmp_path, how):
    town = "Köln “West”" if "cp1252" in how.values() else "Köln"
    path = written(tmp_path / "t.csv", frame().replace({"ward_0": town}), **how)
    with refuses("csv=") as caught:
        data.load(path)
    for key, value in how.items():
        assert f"{key!r}: {value!r}" in str(caught.value)
    federated = data.load(path, scale="none", csv=how)
    assert federated.clients[0].name == town
    assert (samples(federated, *SPLITS)[:, 0] == frame()["age"].astype("float32")).all()
    if "sep" in how:
        with refuses("csv={'sep': ','"):
            data.load(written(path, frame()), csv=how)


def test_options_of_pandas_read_what_they_say(tmp_path):
    """Each in one file, with the same numbers."""
    table = frame(holes=True).replace({"ward_0": "Ward, south"}).assign(one=1)
    whole = written(tmp_path / "whole.csv", table)
    dose = table.dose.map(lambda cell: "-9" if cell != cell else f"{cell:.5f}")
    text = table.assign(
        dose=dose.str.replace(".", ","), age=(1000 * table.age).round()
    ).to_csv(index=False, sep=";", quotechar="'", quoting=1)
    text = re.sub(r"'([0-9]{1,2})([0-9]{3})\.0+'", r"'\1.\2'", text)
    path = tmp_path / "t.csv"
    path.write_text(f"Study 7\nof Bern\n{text}# the end\n")
    options = (
        "sep=; decimal=, thousands=. na_values=-9 skiprows=2 quotechar=' comment=#"
    )
    how = dict(pair.split("=", 1) for pair in options.split())
    keys = {"impute": "mean", "scale": "none"}
    one, two = data.load(path, csv=how, **keys), data.load(whole, **keys)
    read, wanted = samples(one, *SPLITS), samples(two, *SPLITS)
    assert read[:, 1:] == pytest.approx(wanted[:, 1:], abs=1e-6)
    assert read[:, 0] == pytest.approx(1000 * wanted[:, 0], rel=1e-6)
    assert one.classes == two.classes


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"engine": "python"}, "unknown option of csv 'engine'"),
        ({"converters": {"age": "print"}}, "unknown option of csv 'converters'"),
        ({"storage_options": {}}, "unknown option of csv"),
        ({"sep": r"\s+"}, "sep of csv must be one character"),
        ({"sep": ",", "decimal": ","}, "different signs; got ','"),
        ({"encoding": "zlib"}, "encoding of csv"),
        ({"skiprows": "[1]"}, "skiprows of csv must be a number"),
        ({"skiprows": -1}, "skiprows of csv must be a number"),
        ({"keep_default_na": "maybe"}, "true or false"),
        ({"na_values": [None]}, "na_values of csv must be texts or numbers; got None"),
        ({"na_values": {"age": 1}}, "na_values of csv must be texts or numbers"),
        ({"na_values": [["-9"]]}, "na_values of csv must be texts or numbers"),
    ],
)
def test_other_options_of_pandas_are_refused(tmp_path, option, message):
    with refuses(message):
        data.load(written(tmp_path / "t.csv", frame()), csv=option)


def test_a_column_whose_kind_changes_in_a_later_part_is_read_as_a_whole(tmp_path):
    """Pandas reads long files in parts, and each part has its own types."""
    rows = 30_000
    table = pd.DataFrame({"client": ["a", "b"] * (rows // 2)})
    table = table.assign(**{f"v{k}": 0.5 for k in range(30)}, label=[0, 0, 1] * 10_000)
    table["late"] = ["7"] * (rows - 1) + ["seven"]
    path = written(tmp_path / "t.csv", table)
    with refuses("the cell must be a number.*'seven'"):
        data.load(path, scale="none")
    table["late"] = ["7"] * (rows - 1) + ["7.25"]
    table["code"] = ["x"] * (rows // 2) + ["y"] * (rows // 2)
    source, _ = loading.opened(written(path, table))
    assert source.x[-1].tolist()[-2:] == [7.25, 1]
    assert source.x[0, -2] == 7


def test_a_path_is_a_file_here(tmp_path, monkeypatch):
    """Pandas would fetch an address, and unpack an archive."""
    monkeypatch.setattr("urllib.request.urlopen", None)
    for path in ("https://example.org/t.csv", "s3://bucket/t.csv", "t.csv.gz"):
        with refuses("t.csv"):
            data.load(path)
    archive = tmp_path / "t.csv"
    frame().to_csv(archive, index=False, compression="gzip")
    with refuses("must be a text table"):
        data.load(archive)


SCALERS = {"standard": StandardScaler, "minmax": MinMaxScaler, "robust": RobustScaler}


@pytest.mark.parametrize("scale", ["none", *SCALERS])
@pytest.mark.parametrize("impute", ["none", "mean", "median", "most_frequent"])
def test_a_table_is_prepared_as_a_column_transformer_does_on_training_samples(
    tmp_path, scale, impute
):
    """Numbers are filled and scaled, words are one-hot, and words that no training sample has are the last input."""
    table = frame(holes=impute != "none").assign(ward="icu", sex=["f", "m"] * 30)
    how = {"scale": scale, "impute": impute}
    path = tmp_path / "t.csv"
    train = train_rows(data.load(written(path, table), **how))
    table.loc[~table.index.isin(train), "ward"] = "nowhere else"
    table.loc[train[::3], "ward"] = ""
    federated = data.load(written(path, table), **how)
    steps = [SimpleImputer(strategy=impute)] if impute != "none" else []
    steps += [SCALERS[name]() for name in SCALERS if name == scale]
    parts = [("numbers", make_pipeline(*steps, "passthrough"), ["age", "dose", "one"])]
    parts += [
        (name, OneHotEncoder(handle_unknown="ignore", sparse_output=False), [name])
        for name in ("ward", "sex")
    ]
    made = ColumnTransformer(parts).fit(table.iloc[train])
    transformed = made.transform(
        table
    )  # a word that no training sample has is all zeros
    other = [1 - transformed[:, k : k + 2].sum(axis=1, keepdims=True) for k in (3, 5)]
    expected = np.hstack([transformed[:, :5], other[0], transformed[:, 5:], other[1]])
    assert other[0].sum() == 60 - len(train)
    assert samples(federated, *SPLITS) == pytest.approx(expected, rel=1e-5, abs=1e-6)

    made = federated.preprocessing
    assert made is not None
    again = Preprocessing.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made


def test_missing_numbers_are_named_by_row_and_column_if_nothing_fills_them(
    tmp_path,
):
    x, y = np.where(np.arange(60) == 7, np.nan, 1.0)[:, None], np.arange(60) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    with refuses("row 7.*nan.*impute='median'"):
        data.load(tmp_path / "a.npz")
    for filled in (
        data.load(tmp_path / "a.npz", impute="mean"),
        data.from_clients({"a": (x, y)}, impute="median"),
    ):
        assert (samples(filled, *SPLITS) == 1).all()


def test_a_run_keeps_what_was_fitted_and_goes_on_with_it(tmp_path, monkeypatch):
    path = written(tmp_path / "t.csv", frame(holes=True))
    how = {"exclude_columns": ["one"], "scale": "standard", "impute": "median"}
    config = RunConfig(dataset=str(path), rounds=2, batch_size=8, **how)
    runner.run(config, tmp_path / "run", progress=False, until=1)
    stored = Preprocessing.from_json(Run(tmp_path / "run").config["preprocessing"])
    assert stored == data.load(path, **how).preprocessing
    assert stored.columns == ("age", "dose")

    def again(*_):
        raise AssertionError("fitted once more")

    monkeypatch.setattr(preprocessing, "fitted", again)
    assert fl.resume(tmp_path / "run", progress=False).done == 2
    task = fl.load_models(tmp_path / "run")[1]
    assert task.data.preprocessing == stored
    assert abs(samples(task.data, "train").mean(axis=0)).max() < 1e-6


def test_without_pyarrow_a_parquet_file_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    for read in (data.load, data.recipe):
        with refuses(r"t\.parquet.*fedlayers\[parquet\]"):
            read(tmp_path / "t.parquet")


def test_a_parquet_table_is_read_as_the_same_csv(tmp_path):
    pytest.importorskip("pyarrow", reason="pip install 'fedlayers[parquet]'")
    table = frame(holes=True).assign(
        whole=range(60), flag=[k % 3 == 0 for k in range(60)]
    )
    path = tmp_path / "t.parquet"
    table.set_index("client").to_parquet(path, engine="pyarrow")
    table.assign(flag=table["flag"].astype(int)).to_csv(tmp_path / "t.csv", index=False)
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(path.read_bytes().replace(b'"index_col', b"\xd9index_col"))
    one, two, three = (
        data.load(p, impute="mean", scale="standard")
        for p in (path, tmp_path / "t.csv", damaged)
    )
    assert (samples(three, *SPLITS) == samples(one, *SPLITS)).all()
    assert (samples(one, *SPLITS) == samples(two, *SPLITS)).all()
    assert one.classes == two.classes
    with refuses("'dose', row 0.*impute='median'"):
        data.load(path)
    with refuses("csv"):
        data.load(path, csv={"sep": ";"})
    table.assign(dose=[[1.0]] * 60).to_parquet(path, engine="pyarrow")
    with refuses("'dose' must be numbers"):
        data.load(path)
    path.write_bytes(path.read_bytes()[:-9])
    with refuses(r"t\.parquet.*readable"):
        data.load(path)


def far(offset, spread):
    """Return a table whose column v has a large offset."""
    v = offset + spread * np.random.default_rng(0).normal(size=60)
    return pd.DataFrame({"client": ["a", "b"] * 30, "v": v, "label": np.arange(60) % 2})


def test_columns_keep_their_digits_until_they_are_scaled(tmp_path):
    """Seconds since 1970 to the half minute, pressures to 0.002 Pa."""
    draw = np.random.default_rng(0).normal(size=60)
    for values in (1.7e9 + 30 * draw, 101_325 + 0.002 * draw):
        x, y, client = values[:, None], np.arange(60) % 2, np.array(["a"] * 60)
        table = pd.DataFrame({"client": client, "v": values, "label": y})
        table.to_csv(tmp_path / "t.csv", index=False)
        np.savez(tmp_path / "t.npz", x=x, y=y, client=client)
        sources = (tmp_path / "t.csv", tmp_path / "t.npz", as_data(table))
        for federated in (
            *(data.load(source, scale="standard") for source in sources),
            data.from_clients({"a": (x, y)}, scale="standard"),
        ):
            train = federated.partition.indices["a"]["train"]
            expected = (x - x[train].mean()) / x[train].std()
            assert samples(federated, *SPLITS) == pytest.approx(expected, abs=1e-4)
            new = Inputs.from_federation(federated).samples(x)
            assert new.x.numpy() == pytest.approx(expected, abs=1e-4)
    for impute in ("none", "mean"):
        lost = "different values of column 'v' become equal in float32: scale them"
        with pytest.warns(UserWarning, match=lost):
            data.load(
                as_data(table.assign(v=1.7e9 + draw)), scale="none", impute=impute
            )


@pytest.mark.parametrize(
    ("targets", "scale", "columns"),
    [(1.7e9, "none", ""), (1.7e9, "none", "column 'x' and "), (0.0, "none", None), (1.7e9, "standard", None)],
)  # fmt: skip
def test_targets_that_lose_digits_are_noted(targets, scale, columns):
    """Seconds since 1970 are equal in float32. Scaling keeps them, and small numbers need none."""
    draw = np.random.default_rng(0)
    x = draw.permutation(60) + (1.7e9 if columns else 0.0)
    frame = pd.DataFrame({"client": ["a", "b"] * 30, "x": x, "label": targets + draw.permutation(60)})  # fmt: skip
    source = as_data(frame, Reading(task="regression", columns=["x"]))
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        data.load(source, scale=scale)
    printed = [str(note.message) for note in notes if "float32" in str(note.message)]
    assert len(printed) == (columns is not None)
    if printed:
        assert f"values of {columns}the targets become equal in float32" in printed[0]


@pytest.mark.parametrize("scale", ["standard", "none"])
def test_new_rows_are_compared_with_the_training_samples(scale):
    """Unknown words are refused if all are, and noted if some are; so are values far from the training samples'."""
    age = np.random.default_rng(0).normal(60, 9, 200)
    columns = {"client": ["a", "b"] * 100, "age": age, "sex": ["f", "m", "m", "f"] * 50}
    table = pd.DataFrame(columns)
    federated = data.load(as_data(table.assign(label=[0, 1] * 100)), scale=scale)
    samples_of = Inputs.from_federation(federated).samples
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples_of(table)
    with refuses(r"'sex'.*words.*such as 'f', 'm'"):
        samples_of(table.assign(sex=table.sex.str.upper()))
    with pytest.warns(UserWarning, match="'sex': 2 of 200 values are words that no"):
        samples = samples_of(table.assign(sex=["F"] * 2 + ["f"] * 198))
    assert samples.notes == ("'sex'",) * 2 + ("",) * 198
    outputs = torch.zeros(200, 2)
    predictions = Predictions(samples.names, ("0", "1"), outputs, notes=samples.notes)
    assert list(predictions.frame()["unlike training"]) == list(samples.notes)
    with pytest.warns(UserWarning, match="'age': 200 of 200 values are far outside"):
        samples_of(table.assign(age=table.age * 88.4))
    with refuses(r"'age', row 0.*got '1,5'.* Write new samples as training"):
        samples_of(table.assign(age="1,5"))


def test_a_column_without_a_value_in_new_rows_is_noted():
    table = frame(holes=True).assign(ward=["icu", "icu", "", "er"] * 15)
    source = as_data(table, Reading(impute="median"))
    inputs = Inputs.from_federation(data.load(source, impute="median"))
    for empty in ({"dose": np.nan}, {"ward": ""}):
        with pytest.warns(UserWarning, match="no row has a value") as caught:
            samples = inputs.samples(table.assign(**empty))
        assert len(caught) == 1
        assert set(samples.notes) == {repr(*empty)}


@pytest.mark.parametrize("lacking", [True, False])
def test_a_missing_column_of_words_is_as_one_of_missing_cells(lacking):
    """It is their category, or it is refused if training samples have none. It is never the first word."""
    table = frame().assign(ward=["icu", "icu", "" if lacking else "icu", "er"] * 15)
    reading = Reading(impute="median", fill_missing_columns=True)
    federated = data.load(as_data(table, reading), impute="median")
    inputs = Inputs.from_federation(federated, reading)
    for new in (table.drop(columns="ward"), table.assign(ward=""), table.assign(ward=np.nan)):  # fmt: skip
        if not lacking:
            with refuses("'ward'.*such as 'er', 'icu'; got none"):
                inputs.samples(new)
            continue
        with pytest.warns(UserWarning, match="no row has a value"):
            x = inputs.samples(new).x
        names = inputs.preprocessing.inputs
        places = [names.index(f"ward={word}") for word in ("", "er", "icu", "other")]
        assert (x[:, places].numpy() == [1, 0, 0, 0]).all()


def test_a_messy_folder_becomes_one_tidy_table(tmp_path, monkeypatch, capsys):
    """A separator, an encoding, a title and a decimal sign of one file; the script that check writes repairs them."""
    monkeypatch.chdir(tmp_path)
    Path("messy").mkdir()
    days = pd.date_range("2023-01-01", periods=60)
    plain = frame().drop(columns="client").replace({"ill": "müde"})
    plain = plain.assign(day=days.strftime("%d.%m.%Y"))
    for name, how in (
        ("a", {}),
        ("b", {"sep": ";", "encoding": "cp1252", "decimal": ","}),
    ):
        written(Path(f"messy/{name}.csv"), plain, **how)
    title = Path("messy/a.csv")
    title.write_text(f"Study of Bern\n{title.read_text()}")
    with pytest.raises(SystemExit):
        main(["check", "messy", "--write", "tidy.py"])
    printed = capsys.readouterr().out
    assert "got 3 faults" in printed
    assert "Then try: fedlayers choose tidy.csv" in printed
    with pytest.raises(SystemExit):
        main(["check", "messy", "--write", "messy/a.csv"])
    subprocess.run([sys.executable, "tidy.py"], check=True)
    source = data.files.read(Path("tidy.csv"))
    assert (source.owner_names, source.classes) == (("a", "b"), ("müde", "well"))
    assert np.array_equal(source.x[:60], source.x[60:])
    assert source.x[:, 0] == pytest.approx(np.tile(plain.age, 2))
    assert source.x[0, -1] == (days[0] - pd.Timestamp(0)).days - 0.5


LINES = [f"h{k % 2},{20 + k % 9 if k else 999},{k % 2}" for k in range(240)]
HEADER = "client,age,label"


def test_exports_of_spreadsheets_are_refused_or_said(tmp_path):
    """Titles above the header, cells without a name at its end, and a number that stands for a missing one."""
    path = tmp_path / "t.csv"
    path.write_text("\n".join([HEADER, *LINES]))
    source = data.files.read(path)
    assert source.table.columns[1].odd == "999 far from the others in 1 cell: missing?"
    assert source.counts().to_numpy().tolist() == [[120, 0], [0, 120]]
    for above, end, way in (
        ("Register,,\nMade in May,,\n\n", "", "csv={'skiprows': 3}"),
        ("Register,of Bern,2024\n", "", "csv={'skiprows': 1}"),
        ("", ",,", r"drop\(\['Unnamed: 3', 'Unnamed: 4'\], axis=1\)"),
    ):
        path.write_text(above + "\n".join(line + end for line in [HEADER, *LINES]))
        with refuses(way):
            data.files.read(path)
    path.write_text("Register\n\n" + "\n".join([HEADER, *LINES]))
    assert len(data.files.read(path, Reading(csv={"skiprows": 2}))) == 240
    path.write_text("\n".join([HEADER, *(f"{line}," for line in LINES)]))
    with refuses("line 2: .*got 4. Correct the line, or add cells to the header"):
        data.files.read(path)


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_a_column_that_a_client_lacks_is_left_out_or_filled(tmp_path, kind):
    table = frame().assign(ward=["icu", "er"] * 30)
    table.loc[table.client == "ward_1", ["age", "ward"]] = np.nan
    path = written(tmp_path / "t.csv", table)
    if kind == "folder":
        path = tmp_path / "folder"
        path.mkdir()
        for name, part in table.groupby("client"):
            client_rows = part.dropna(axis=1, how="all").drop(columns="client")
            written(path / f"{name}.csv", client_rows)
    with pytest.warns(UserWarning, match="left out: 'age', 'ward'"):
        out = data.load(path)
    seen = {column.name: (column.taken_as, column.odd) for column in out.table.columns}
    assert seen["age"] == ("left out", "no value at ward_1: left out")
    new = table.drop(columns=["age", "ward"]).head(3)
    assert Inputs.from_federation(out).samples(new).x.shape == (3, *out.shape)
    with refuses("must be a column of features"):
        data.load(path, columns=["age"])
    with refuses("impute='median'"):
        Reading(fill_missing_columns=True)
    reading = Reading(impute="median", fill_missing_columns=True)
    federated = data.load(path, impute="median", fill_missing_columns=True)
    odd = {column.name: column.odd for column in federated.table.columns}
    assert odd["age"] == odd["ward"] == "no value at ward_1: filled"
    preparation = federated.preprocessing
    age = preparation.columns.index("age")
    filled = (preparation.fill[age] - preparation.centre[age]) / preparation.spread[age]
    new = table[table.client == "ward_1"].drop(columns=["age", "label", "client"])
    for x in (
        federated.client("ward_1").train.x,
        Inputs.from_federation(federated, reading).samples(new).x,
    ):
        assert np.allclose(x[:, age], filled)


LAST = {
    "numbers": ("7", "2.5"),
    "missing": ("7", ""),
    "a late word": ("7", "many"),
    "a late mark": ("7", "-"),
    "truth values": ("True", "False"),
    "codes": ("007", "7"),
    "large": ("7", "9007199254740993"),
    "fractions": ("0.1", "1e-3"),
    "words": ("red", "blue"),
    "late kinds of words": ("red", "7"),
    "nothing": ("", ""),
}
"""What a column has in its first rows, and in its last one."""


@pytest.mark.parametrize("kind", LAST)
def test_a_large_file_is_read_in_parts_as_a_small_one_at_once(
    tmp_path, monkeypatch, kind
):
    """Cells, missing ones and words are equal, and so is what is found."""
    first, last = LAST[kind]
    end = "\r\n" if kind == "missing" else "\n"
    rows = [f"{k % 3}.5,{first},{k % 2},{'ab'[k % 2]}" for k in range(130)]
    lines = ["v,x,label,client", *rows, f"4,{last},1,b"]
    path = tmp_path / "t.csv"
    path.write_bytes(end.join(lines).encode())
    frames, faults = [], []
    for large, part in ((2**25, 50_000), (0, 40)):
        monkeypatch.setattr(tables, "LARGE", large)
        monkeypatch.setattr(tables, "PART", part)
        frames.append(tables.open_table(path, PLAIN).frame)
        faults.append(list(map(str, find_faults(path, PLAIN).faults)))
    small, parts = frames
    assert faults[0] == faults[1]
    for name in small:
        assert list(texts_of(small[name])) == list(texts_of(parts[name]))
