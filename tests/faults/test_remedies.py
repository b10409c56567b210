"""Each remedy that an error names is followed. The same call must then work."""

import re
import shlex
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedlayers as fl
from fedlayers.cli import app
from fl_core.data.loading import load
from fl_core.data.reading import PLAIN
from fl_core.data.table.prepare import find_faults
from tests.conftest import TOY, network, refuses
from tests.made import mlp, normal

pytestmark = pytest.mark.filterwarnings("ignore")

OMIT = object()
"""The value of an argument that a remedy says to leave out."""
ROWS = 60


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLAYERS_DATA_ROOT", raising=False)


# --- tables ----------------------------------------------------------------------------------------------------


def column(form):
    """Return a column whose cells are made from the numbers of their rows."""
    return [form(row) for row in range(ROWS)]


def read(columns=None, text=b"", **keys):
    """Read a table with clients, a feature and a label, with other columns or cells, or of a file's bytes."""
    table = {
        "client": column(lambda row: "abc"[row % 3]),
        "x": np.random.default_rng(0).normal(size=ROWS).round(3),
        "label": column(lambda row: ("no", "yes")[row * row % 7 % 2]),
    }
    table = {k: v for k, v in (table | (columns or {})).items() if v is not OMIT}
    if text:
        Path("t.csv").write_bytes(text)
    else:
        pd.DataFrame(table).to_csv("t.csv", index=False)
    return load("t.csv", **keys)


def file_of(separator=",", clients="abc", encoding="utf-8"):
    """Return the bytes of a table's file."""
    rows = [[clients[row % 3], f"{row * 0.3:g}", str(row % 2)] for row in range(ROWS)]
    lines = [separator.join(row) for row in [["client", "x", "label"], *rows]]
    return "\n".join(lines).encode(encoding)


TABLES = {
    "ambiguous dates": {"d": column(lambda k: f"{1 + k % 12}/{1 + k * 5 % 12}/2020")},
    "dates": {"d": column(lambda k: f"2020-{1 + k % 12:02d}-{1 + k % 28:02d}")},
    "times": {"d": column(lambda k: f"{k % 24}:{k % 60:02d}")},
    "commas": {"d": column(lambda k: f"{k},{k % 10}5")},
    "points and commas": {"d": column(lambda k: f"{k + 1}.{100 + k},5")},
    "units": {"d": column(lambda k: f"{k + 1} mg")},
    "per cent": {"d": column(lambda k: f"{k + 1}%")},
    "words": {"d": column(lambda k: str(k) if k % 7 else "unknown")},
    "bounds": {"d": column(lambda k: str(k) if k != 7 else "<5")},
    "gaps": {"d": column(lambda k: k * 1.7 if k % 7 else None)},
    "a missing label": {"label": column(lambda k: "ab"[k % 2] if k != 3 else "")},
    "none as a label": {"label": column(lambda k: "ab"[k % 2] if k % 3 else "None")},
    "patients": {"patient_id": column(lambda k: k // 2)},
    "row numbers": {"id": column(lambda k: f"p{k}")},
    "many labels": {"label": column(lambda k: k)},
    "fractions as labels": {"label": column(lambda k: k * 0.37)},
    "a mark among labels": {"label": column(lambda k: k % 2 if k != 5 else 999)},
    "free text": {"d": column(lambda k: f"word {k % 26} {chr(97 + k // 26)} told")},
    "large numbers": {"d": column(lambda k: 2**53 + 2 * k + 1)},
    "infinity": {"d": column(lambda k: k if k != 3 else "inf")},
    "another label": {"label": OMIT, "outcome": column(lambda k: k % 2)},
    "times and events": {
        "label": OMIT,
        "time": column(lambda k: k % 11 + 1),
        "event": column(lambda k: k % 2),
    },
}
"""Columns that are refused without settings. Their errors propose some."""


@pytest.mark.parametrize("name", TABLES)
def test_each_setting_and_line_that_a_table_is_proposed(name):
    """Each setting alone, and the script of all lines with the settings next to them."""
    with refuses("") as refused:
        read(TABLES[name])
    findings = find_faults(Path("t.csv"), PLAIN)
    single = getattr(refused.value, "ways", ())
    for settings in [keys for _, keys in single if keys]:
        spelled_settings = [f"{key}={value!r}" for key, value in settings.items()]
        assert all(words in str(refused.value) for words in spelled_settings)
        read(TABLES[name], **settings)
    if findings.repairs:
        exec(compile(findings.script("t.csv"), "tidy.py", "exec"), {})
    header = pd.read_csv("t.csv", nrows=1).columns
    left_out = [k for k in findings.reading.exclude_columns or () if k in header]
    keys = findings.reading.changed | {"exclude_columns": left_out or None}
    assert findings.repairs or findings.reading.changed
    load("t.csv", **keys)


# --- calls of Python -------------------------------------------------------------------------------------------


DATA = {
    client: (normal(24, 6, seed=k), torch.arange(24) % 3)
    for k, client in enumerate("abc")
}
NUMBERS = {client: (x, x[:, 0]) for client, (x, _) in DATA.items()}
WORDS = {client: (x, np.array([*"pqr"])[y]) for client, (x, y) in DATA.items()}
LABELLED = {
    client: (x, nn.functional.one_hot(y, 3).float()) for client, (x, y) in DATA.items()
}
FLOATS = {client: (x, y.float()) for client, (x, y) in DATA.items()}


def frame_of(client):
    """Return a client's samples as a table."""
    return pd.DataFrame({"x": DATA[client][0][:, 0], "label": DATA[client][1]})


def train(**keys):
    """Train one round, on own data with an own model unless told otherwise."""
    usual = {
        "data": TOY,
        "model": network("plain"),
        "rounds": 1,
        "epochs": 1,
        "batch_size": 8,
        "lr": 0.05,
        "progress": False,
    }
    return fl.run(**arguments(usual | keys))


def measure(metrics="grad_norm", models=None, data=DATA, **keys):
    models = models or {
        client: mlp(6, 5, 4, 3, seed=k) for k, client in enumerate("abc")
    }
    return fl.diagnose(models, data, metrics, progress=False, **keys)


@cache
def rows(*metrics):
    return measure(list(metrics))


def federate(clients, **keys):
    return fl.from_clients(clients, **keys)


def select(rule="largest_rise", metrics=("grad_variance",), **keys):
    return fl.select(rows(*metrics), rule, **keys)


VIT = {"model": network("vit")}
TABULAR = {
    "data": {client: (normal(60, 6), torch.arange(60) % 3) for client in "ab"},
    "model": mlp(6, 5, 4, 3),
}
CURVATURE = {"metrics": "hessian_trace"}


def of_cka(**options):
    return {"metrics": "cka", "options": {"cka": options}}


CALLS = {
    # settings of tables
    "sep of csv must be one character": (
        read,
        {"text": file_of(";"), "csv": {"sep": "::"}},
        {"csv": {"sep": ";"}},
    ),
    "Read it so: csv={'sep': ';'}": (
        read,
        {"text": file_of(";")},
        {"csv": {"sep": ";"}},
    ),
    "csv={'encoding': 'latin-1'}": (
        read,
        {"text": file_of(clients="\xe4bc", encoding="latin-1")},
        {"csv": {"encoding": "latin-1"}},
    ),
    "csv={'encoding': 'utf-16'}": (
        read,
        {"text": file_of(encoding="utf-16")},
        {"csv": {"encoding": "utf-16"}},
    ),
    "encoding of csv .*utf-8, latin-1 or cp1252": (
        read,
        {"csv": {"encoding": "utf9"}},
        {"csv": {"encoding": "cp1252"}},
    ),
    "separator .*csv={'sep': VALUE}": (
        read,
        {"text": file_of(";"), "separator": ";"},
        {"separator": OMIT, "csv": {"sep": ";"}},
    ),
    "fill_missing_columns .*Add impute='median'": (
        read,
        {"fill_missing_columns": True},
        {"impute": "median"},
    ),
    "label_column='label'": (
        read,
        {"label_column": "lable"},
        {"label_column": "label"},
    ),
    "task='multilabel'": (
        read,
        {
            "columns": {
                "l": column(lambda k: k // 2 % 2),
                "m": column(lambda k: k % 2),
            },
            "label_column": "l,m",
        },
        {"task": "multilabel"},
    ),
    "label_column='TIME,EVENT'": (
        read,
        {"columns": TABLES["times and events"], "task": "survival"},
        {"label_column": "time,event"},
    ),
    "scale imagenet .*Leave it out": (read, {"scale": "imagenet"}, {"scale": OMIT}),
    "clients must be 3.*another partition": (
        read,
        {"clients": 7},
        {"partition": "iid"},
    ),
    "clients must be 3.*Leave it out": (read, {"clients": 7}, {"clients": OMIT}),
    "alpha .*left out with partition 'iid'": (
        read,
        {"partition": "iid", "clients": 3, "alpha": 0.1},
        {"alpha": OMIT},
    ),
    "partition 'dirichlet' must have classes.*iid": (
        read,
        {
            "columns": {"label": TABLES["many labels"]["label"]},
            "task": "regression",
            "partition": "dirichlet",
            "clients": 2,
        },
        {"partition": "iid"},
    ),
    "group_column .*Use one of iid": (
        read,
        {
            "columns": {"g": column(lambda k: k // 3)},
            "group_column": "g",
            "partition": "dirichlet",
            "clients": 2,
        },
        {"partition": "iid"},
    ),
    # data of Python
    "y.argmax": (
        federate,
        {"clients": {c: (x.numpy(), y.numpy()) for c, (x, y) in LABELLED.items()}},
        {
            "clients": {
                c: (x.numpy(), y.numpy().argmax(axis=1))
                for c, (x, y) in LABELLED.items()
            }
        },
    ),
    "impute='median'": (
        federate,
        {"clients": {c: (x.where(x < 1, torch.nan), y) for c, (x, y) in DATA.items()}},
        {"impute": "median"},
    ),
    r"pd.concat\(.*names=\['client'\]": (
        train,
        {"data": {c: frame_of(c) for c in "ab"}, "model": None},
        {"data": pd.concat({c: frame_of(c) for c in "ab"}, names=["client"])},
    ),
    "Name the clients: {'client_0'": (
        train,
        {"data": [*DATA.values()], "model": mlp(6, 5, 4, 3)},
        {"data": {f"client_{k}": pair for k, pair in enumerate(DATA.values())}},
    ),
    "Name a file or a dataset with dataset=": (
        train,
        {"data": "heart", "model": None},
        {"data": None, "dataset": "heart"},
    ),
    "clients must be left out for data": (train, {"clients": 3}, {"clients": OMIT}),
    "positive must be left out": (train, {"positive": "class 1"}, {"positive": OMIT}),
    # models
    "Pass model=": (
        train,
        {"model": None, "loss": nn.CrossEntropyLoss()},
        {"model": network("plain")},
    ),
    "'mlpp'.*'mlp'": (train, {"model": "mlpp"}, {"model": "mlp"}),
    "heart_mlp.*Use mlp": (train, {"model": "heart_mlp"}, {"model": "mlp"}),
    "vit: .*Use mlp": (train, {**TABULAR, "model": "vit"}, {"model": "mlp"}),
    "residual blocks.*mixer": (
        train,
        {"algorithm": "fedra", "options": {"lora_targets": "none"}},
        {"model": "mixer", "model_options": {"patch": 3, "depth": 2, "width": 8}},
    ),
    # training
    "batch_size must be at least 2": (
        train,
        {"model": network("norm"), "batch_size": 1},
        {"batch_size": 8},
    ),
    "momentum must be left out": (
        train,
        {"optimizer": "adamw", "momentum": 0.9},
        {"momentum": OMIT},
    ),
    "amsgrad must be left out": (
        train,
        {"optimizer": "sgd", "amsgrad": True},
        {"amsgrad": OMIT},
    ),
    "stack must be auto or off": (
        train,
        {"precision": "bf16", "stack": "on"},
        {"stack": "off"},
    ),
    "precision='float32'": (
        train,
        {"precision": "bf16", "model": network("norm")},
        {"precision": "float32"},
    ),
    "device='cpu'": (train, {"device": "gpu"}, {"device": "cpu"}),
    "loss for 3 classes.*focal": (train, {"loss": "mse"}, {"loss": "focal"}),
    "alpha of loss .*Leave it out": (
        train,
        {"loss": "focal", "loss_options": {"alpha": None}},
        {"loss_options": {}},
    ),
    "class_weights .*3 classes; got 2": (
        train,
        {"class_weights": "1,2"},
        {"class_weights": "1,2,3"},
    ),
    "monitor|score .*'r2'.*auroc": (
        train,
        {"monitor": "r2", "patience": 2},
        {"monitor": "auroc"},
    ),
    "'cak'.*'cka'": (train, {"measure": ["cak"]}, {"measure": ["cka"]}),
    "backend='ray'|workers=N": (
        train,
        {"backend": "local:2"},
        {"backend": OMIT, "workers": 1},
    ),
    # algorithms and plans
    "fedavg must have no options.*Leave it out": (
        train,
        {"options": {"mu": 1}},
        {"options": {}},
    ),
    "contrast=false": (
        train,
        {**TABULAR, "algorithm": "fedpft"},
        {"options": {"contrast": False}},
    ),
    "fedper with plan=auto": (
        train,
        {"algorithm": "vanilla", "options": {"base": "playerfl", "unfreeze": "0"}},
        {"options": {"base": "fedper", "unfreeze": "0"}, "plan": "auto"},
    ),
    "unfreeze .*2 layers": (
        train,
        {"algorithm": "vanilla", "options": {"unfreeze": "0"}},
        {"options": {"unfreeze": "0,0"}},
    ),
    "depths .*random_depths.*Choose one": (
        train,
        {
            **VIT,
            "algorithm": "fedra",
            "options": {"depths": (1,), "random_depths": True, "lora_targets": "none"},
        },
        {"options": {"random_depths": True, "lora_targets": "none"}},
    ),
    "lora_targets=none": (
        train,
        {**VIT, "algorithm": "fedra", "options": {"lora_targets": ()}},
        {"options": {"lora_targets": "none"}},
    ),
    "options={'lora_targets': 'none'}": (
        train,
        {**VIT, "algorithm": "fedra", "adapt": "lora:r=2"},
        {"options": {"lora_targets": "none"}},
    ),
    r"Separate targets by \+": (
        train,
        {"adapt": "lora:r=2,targets=fc1,targets=fc2"},
        {"adapt": "lora:r=2,targets=fc1+fc2"},
    ),
    "batchnorm must be global": (
        train,
        {"adapt": "lora", "batchnorm": "local"},
        {"batchnorm": "drop"},
    ),
    "r of adapt must be at most 36": (
        train,
        {"adapt": "lora:r=37"},
        {"adapt": "lora:r=36"},
    ),
    "batch_size must be below.*Lower it": (
        train,
        {"adapt": "lora:r=2", "algorithm": "playerfl", "batch_size": 20},
        {"batch_size": 4},
    ),
    "plan='auto'": (
        train,
        {"algorithm": "fedper", "plan": "none.json"},
        {"plan": "auto"},
    ),
    r"plan must be a LayerPlan.*choice\.plan": (
        train,
        {"algorithm": "fedper", "plan": {"fc1": True}},
        {
            "plan": fl.LayerPlan(
                fl.layers_of(network("plain"), torch.zeros(2, 1, 6, 6)), ("fc1",)
            )
        },
    ),
    r"uses? a plan \(.*fedper": (train, {"plan": "auto"}, {"algorithm": "fedper"}),
    # measurements
    "Pass the pair or the loader": (
        measure,
        {"data": {c: iter([pair]) for c, pair in DATA.items()}},
        {"data": DATA},
    ),
    r"Write y\.long\(\)": (measure, {"data": FLOATS}, {"data": DATA}),
    r"y\.argmax\(1\) if": (measure, {"data": LABELLED}, {"data": DATA}),
    "loss='mse'": (measure, {"data": LABELLED}, {"loss": "mse"}),
    "Pass indices of classes": (measure, {"data": WORDS}, {"data": DATA}),
    r"Pass pairs \(x, y\)": (measure, {"data": None}, {"data": DATA}),
    r"Call to_dense\(\)": (
        measure,
        {"data": {c: (x.to_sparse(), y) for c, (x, y) in DATA.items()}},
        {"data": DATA},
    ),
    r"Pass Linear\(\.\.\.\)": (
        measure,
        {"models": nn.Linear},
        {"models": nn.Linear(6, 3)},
    ),
    "a probe or samples, not both": (
        measure,
        of_cka(probe=DATA["a"], samples=9),
        of_cka(probe=DATA["a"]),
    ),
    r"Pass options={'mode'": (
        measure,
        {"mode": "train"},
        {"mode": OMIT, "options": {"mode": "train"}},
    ),
    r"Pass options={'by'": (
        measure,
        {"by": "module"},
        {"by": OMIT, "options": {"by": "module"}},
    ),
    "estimator 'minibatch' and positions 'flatten'": (
        measure,
        of_cka(backend="torch_cka"),
        {**of_cka(backend="torch_cka", estimator="minibatch"), "batch": 8},
    ),
    "positions='samples' must have estimator 'full'": (
        measure,
        of_cka(positions="samples", estimator="minibatch"),
        of_cka(positions="samples", estimator="full"),
    ),
    "'flatten' or 'mean' with variant 'pairs'": (
        measure,
        of_cka(positions="samples", variant="pairs"),
        of_cka(positions="mean", variant="pairs"),
    ),
    "batch must be at least 4": (
        measure,
        {**of_cka(estimator="minibatch"), "batch": 2},
        {"batch": 4},
    ),
    "Pass k=60": (
        measure,
        {
            "metrics": "hessian_spectrum",
            "options": {"hessian_spectrum": {"density": True, "k": 3}},
        },
        {"options": {"hessian_spectrum": {"density": True, "k": 60}}},
    ),
    "'reductions'.*'reduction'": (
        measure,
        {"options": {"grad_norm": {"reductions": "batch"}}},
        {"options": {"grad_norm": {"reduction": "batch"}}},
    ),
    "null 'label'.*'labels'": (measure, {"null": "label"}, {"null": "labels"}),
    r"Raise|linear_probe must have y": (
        fl.diagnose_features,
        {
            "features": {c: {"l": normal(24, 4)} for c in "ab"},
            "metrics": "linear_probe",
        },
        {"y": np.arange(24) % 3},
    ),
    # rules
    "Add layers=NAMES": (select, {"rule": "manual"}, {"layers": ["0", "2"]}),
    "Only rule 'manual'": (select, {"layers": ["0"]}, {"rule": "manual"}),
    r"metrics=\['federation_sensitivity'\]": (
        select,
        {},
        {"metrics": ("federation_sensitivity",)},
    ),
    "rule='largest_rise'": (
        select,
        {"rule": None, "metric": "layer_cost", "metrics": ("layer_cost",)},
        {"rule": "largest_rise"},
    ),
    "'largest_ris'.*'largest_rise'": (
        select,
        {"rule": "largest_ris", "metrics": ("federation_sensitivity",)},
        {"rule": "largest_rise"},
    ),
    r"null=\('labels',\)": (
        lambda **keys: fl.select(
            measure("federation_sensitivity", **keys), "above_null"
        ),
        {},
        {"null": ("labels",)},
    ),
}
"""By words of the error: a call, its arguments, and the arguments that the error names."""


@pytest.mark.parametrize("words", CALLS)
def test_calls(words):
    call, call_arguments, remedy = CALLS[words]
    with refuses(words):
        call(**arguments(call_arguments))
    call(**arguments(call_arguments | remedy))


def arguments(given):
    return {key: value for key, value in given.items() if value is not OMIT}


# --- lines -----------------------------------------------------------------------------------------------------

RUN = "run --dataset heart --rounds 1"
LINES = {
    "'hearts'.*'heart'": ("run --dataset hearts --rounds 1 --out a", f"{RUN} --out a"),
    "did you mean --rounds": ("run --dataset heart --rond 1 --out b", f"{RUN} --out b"),
    "given once.*Leave one out": (f"{RUN} --rounds 2 --out c", f"{RUN} --out c"),
    "KEY=VALUE": (
        f"{RUN} --algorithm fedprox --option mu --out d",
        f"{RUN} --algorithm fedprox --option mu=1 --out d",
    ),
    "no options.*Leave it out": (f"{RUN} --option mu=1 --out e", f"{RUN} --out e"),
    "choose another directory": (f"{RUN} --out run", f"{RUN} --out f"),
    "Resume it": (f"{RUN} --out run", "resume run"),
    "--csv sep=VALUE": ("check t.csv --separator ,", "check t.csv --csv decimal=,"),
    "--workers N": (f"{RUN} --backend local:2 --out g", f"{RUN} --workers 1 --out g"),
    "--device cpu": (f"{RUN} --device gpu --out h", f"{RUN} --device cpu --out h"),
    "--patience N": (
        "diagnose run --round best --metrics grad_norm --out i",
        f"{RUN} --patience 2 --out stopped",
    ),
    r"checkpoint \(1\)": (
        "diagnose run --round 7 --metrics grad_norm --out j",
        "diagnose run --round 1 --metrics grad_norm --out j",
    ),
    "local, global after round 1": (
        "diagnose run --model personal --metrics grad_norm --out k",
        "diagnose run --model global --metrics grad_norm --out k",
    ),
    "Name one of the two": (
        "diagnose --metrics grad_norm --out l",
        "diagnose run --metrics grad_norm --out l",
    ),
    "go with --dataset": (
        "diagnose run --lr 0.1 --metrics grad_norm --out m",
        "diagnose --dataset heart --lr 0.1 --metrics grad_norm --out m",
    ),
    "goes with a run directory": (
        "diagnose --dataset heart --round 1 --metrics grad_norm --out n",
        "diagnose run --round 1 --metrics grad_norm --out n",
    ),
    "goes with --null": (
        "diagnose run --null-draws 2 --metrics grad_norm --out o",
        "diagnose run --null-draws 2 --null labels --metrics grad_norm --out o",
    ),
    "Write --option METRIC.reduction": (
        "diagnose run --metrics grad_norm --option reduction=batch --out q",
        "diagnose run --metrics grad_norm --option grad_norm.reduction=batch --out q",
    ),
    "out .*Choose another folder": (
        "diagnose run --metrics grad_norm --out run",
        "diagnose run --metrics grad_norm --out r",
    ),
    "--layers NAMES": (
        "select rows --rule manual",
        "select rows --rule manual --layers fc1",
    ),
    "Only rule 'manual'": (
        "select rows --rule largest_rise --layers fc1",
        "select rows --rule manual --layers fc1",
    ),
    "--metrics federation_sensitivity": (
        "select rows --rule top",
        "diagnose run --metrics federation_sensitivity --out s",
    ),
    "fedlayers diagnose": (
        "select none",
        "diagnose run --metrics grad_norm --out none",
    ),
    "--dpi must be from 20": (
        "plot rows --dpi 3 --out t",
        "plot rows --dpi 20 --out t",
    ),
    "Write fedlayers plan export PLAN --to FORM": (
        "plan exprt personal --to names",
        "plan export personal --to names",
    ),
    "'metrcs'.*'metrics'": ("list metrcs", "list metrics"),
    ".safetensors": ("export run --out m.pt", "export run --out m.safetensors"),
    "--client NAME": (
        "export run --model local --out v.safetensors",
        "export run --model local --client va --out v.safetensors",
    ),
    r"below \[federation\]": (
        "run --config wrong.toml --out w",
        "run --config right.toml --out w",
    ),
    "Add one, such as fedper": (
        "compare --dataset heart --rounds 1 --algorithms fedavg --plan personal --out x --seeds 1",
        "compare --dataset heart --rounds 1 --algorithms fedavg fedper --plan personal --out x --seeds 1",
    ),
    "'rn'.*'run'": ("rn --dataset heart", f"{RUN} --out y"),
}
"""By words of the error: a line, and one with what the error names. Runs and rows that they read are there."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a folder with a run, a run with a plan, rows, a table and two configurations."""
    folder = tmp_path_factory.mktemp("lines")
    heart = {"dataset": "heart", "rounds": 1, "progress": False}
    fl.run(**heart, out=folder / "run")
    fl.run(**heart, algorithm="fedper", out=folder / "personal")
    fl.diagnose(folder / "run", metrics="grad_norm", progress=False).write(
        folder / "rows"
    )
    commas = pd.DataFrame(
        {"client": [*"abc"] * 20, "d": TABLES["commas"]["d"], "label": [0, 1] * 30}
    )
    commas.to_csv(folder / "t.csv", index=False)
    (folder / "wrong.toml").write_text("rounds = 1\n")
    (folder / "right.toml").write_text("[federation]\nrounds = 1\n")
    return folder


@pytest.mark.parametrize("words", LINES)
def test_lines(words, stored, monkeypatch, capsys):
    monkeypatch.chdir(stored)
    refused, followed = LINES[words]
    code = typed(refused)
    printed = capsys.readouterr()
    assert code in (1, 2)
    assert re.search(words, printed.err + printed.out), printed.err
    assert typed(followed) == 0, capsys.readouterr().err


def typed(line):
    """Return the exit code of a command."""
    try:
        app.main(shlex.split(line))
    except SystemExit as end:
        return end.code or 0
    return 0
