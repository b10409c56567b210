"""What newcomers type: each line is answered with the next command, the nearest name, or that nothing is there."""

import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedlayers as fl
from fedlayers.cli import app as cli
from fl_core.errors import nearest
from fl_core.kinds import Kind, kind_of
from tests.conftest import every_other
from tests.fedlayers.conftest import Terminal

WARDS = "--client-column ward --label-column died"


def icu():
    """A table of 240 patients in three wards. Age decides who dies."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "ward": draw.choice(["neuro", "cardio", "surgery"], 240),
            "age": draw.integers(20, 90, 240),
            "lactate": draw.gamma(2, 1, 240).round(2),
        }
    )
    frame["died"] = (frame.age + draw.normal(0, 5, 240) > 55).astype(int)
    return frame


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with a table, a run, a decision and its exported models."""
    folder = tmp_path_factory.mktemp("desk")
    before = Path.cwd()
    os.chdir(folder)
    try:
        icu().to_csv("icu.csv", index=False)
        icu().drop(columns="ward").to_csv("no_ward.csv", index=False)
        icu().replace("neuro", "eye").to_csv("other.csv", index=False)
        Path("new").mkdir()
        icu().drop(columns="ward").to_csv("new/neuro.csv", index=False)
        cli.main(["run", "heart", "--rounds", "1", "--out", "r1"])
        how = "--rounds 3 --seeds 1 --lr 0.05 --no-baselines --quiet --out out"
        cli.main(f"choose icu.csv {WARDS} {how}".split())
        cli.main(["export", "out", "--out", "models"])
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def typed(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    monkeypatch.delenv("FEDLAYERS_DATA_ROOT", raising=False)
    return Terminal(capsys)


TYPED = {
    # a table, by position or by name
    "choose icu.csv": "--label-column died --client-column ward",
    "run icu.csv": "--label-column died --client-column ward",
    "study icu.csv": "--label-column died --client-column ward",
    "choose icu.csv --client-column ward": "Name it: --label-column died",
    "choose icu.csv --client-column Ward --label-column died": "--client-column ward",
    "choose icu.csv --dataset heart": "--dataset must be given once",
    "choose icu.csv missing.csv": "got 'missing.csv'",
    "choose new icu.csv": "got the folder 'new'",
    "choose hart": "did you mean 'heart'?",
    "choose https://example.com/icu.csv": "Download it first",
    "check heart": "Write fedlayers choose heart.",
    "check r1": "fedlayers plot r1",
    "diagnose icu.csv": "fedlayers diagnose --dataset icu.csv",
    "diagnose heart": "fedlayers diagnose --dataset heart",
    "map heart": "fedlayers map --dataset heart",
    f"choose icu.csv {WARDS} --exclude-columns agge": "did you mean 'age'?",
    f"choose icu.csv {WARDS} --impute zero": "none, mean, median, most_frequent",
    f"choose icu.csv {WARDS} --positive 2": "unknown positive class '2': known: 0, 1",
    # options of other tools
    "run icu.csv --mu 0.1": "write --option mu=0.1",
    "run icu.csv --mu=0.1": "write --option mu=0.1",
    "compare heart --mu 0.1": "write --option fedprox.mu=0.1",
    "run heart --sizes 64,32": "write --model-option sizes=64,32",
    "choose --target died icu.csv": "did you mean --label-column?",
    "choose --learning-rate 0.1": "did you mean --lr?",
    "run heart --n-rounds 3": "did you mean --rounds?",
    "run heart --output x": "did you mean --out?",
    "run heart --gpu": "did you mean --device?",
    "run heart --exclude age": "did you mean --exclude-columns?",
    "run heart --resume": "it is a command, fedlayers resume",
    "run heart -a fedprox": "two hyphens; got -a. Write such as --adapt, --algorithm",
    "run heart --foo 3": "unknown option --foo. For options",
    "resume r1 --rounds 5": "--rounds, which a new run takes",
    "predict models --dataset icu.csv": "did you mean --data?",
    "diagnose r1 --metric cka": "did you mean --metrics?",
    "compare heart --seeds 1 1": "--seeds must be distinct; got 1 twice",
    "compare heart --seeds 0": "--seeds must be from 1",
    "compare heart --seeds 3 -1": "--seeds must be at least 0; got -1",
    "select diagnosis more": "unexpected words: more",
    # several values, and none
    "compare heart --algorithms all": "'all': name each one that you mean. known: local",
    "compare heart --seed 0,1,2": "Several are written --seeds 0,1,2.",
    "run heart --seed 0 1 2": "Several are written fedlayers compare --seeds 0,1,2.",
    "run heart --seeds 3": "did you mean --seed? Or fedlayers compare takes it.",
    "run heart --lr 0.1,0.01": "fedlayers tune --search 'lr=0.1,0.01'",
    "run heart --algorithm fedavg,local": "compare --algorithms fedavg,local",
    "run heart rounds=3": "got 'rounds=3'. Write --rounds 3.",
    "run heart,digits": "got 'heart' and more. Name 'heart' alone.",
    "choose --client-column site": "Leave out --client-column, or name a table.",
    "choose --version": "write fedlayers --version",
    "run heart --batch-size 0": "--batch-size must be at least 1; got 0",
    # names of other tools
    "fit icu.csv": "did you mean 'run'?",
    "train icu.csv": "did you mean 'run'?",
    "measure r1": "did you mean 'diagnose'?",
    "run heart --model logistic": "did you mean 'linear'?",
    "run heart --model resnet18": "--model torchvision:resnet18",
    "run heart --loss ce": "did you mean 'cross_entropy'?",
    "choose heart --score auc": "did you mean 'auroc'?",
    "diagnose r1 --metrics hessian": "did you mean 'hessian_trace'?",
    "run heart --algorithm FedAvg": "did you mean 'fedavg'?",
    "compare heart --algorithms fedavg,locl": "unknown algorithm 'locl'",
    "run heart --device gpu": "--device cpu",
    "choose heart --backend slurm --out new_choice": "local:N, ray",
    "tune heart --algorithms fedavg --search lr": "--search must be KEY=VALUE",
    "regret top --k 0": "k must be at least 1; got 0",
    # paths of another kind
    "select r1": "fedlayers diagnose r1",
    "select r1/rows.jsonl": "fedlayers diagnose RUN",
    "select nowhere": "got 'nowhere', nothing there",
    "select out": "got 'out', a decision",
    "plot nowhere": "got 'nowhere', nothing there",
    "plot out": "got 'out', a decision",
    "plot icu.csv/b": "Correct the path.",
    "run heart --algorithm fedper --plan {bad": "plan must be a file, a run, or a plan as JSON",
    "plot icu.csv": "fedlayers diagnose --dataset icu.csv",
    "export nowhere": "got 'nowhere', nothing there",
    "export r1": "fedlayers export r1 --out model.safetensors",
    "export out": "fedlayers export out --out out_models",
    "export icu.csv --out x": "fedlayers run icu.csv",
    "verify icu.csv": "fedlayers check icu.csv",
    "verify out": "Its runs are below out/arms",
    "resume .": "Name one of its runs: r1",
    "runs nowhere": "got 'nowhere', nothing there",
    "clean icu.csv": "fedlayers check icu.csv",
    "predict r1": "fedlayers export r1 --out model.safetensors",
    "predict out --data icu.csv": "fedlayers export out --out out_models",
    "predict icu.csv": "fedlayers predict MODELS --data icu.csv",
    "predict nowhere --data icu.csv": "got 'nowhere', nothing there",
    "predict models": "fedlayers predict models --data TABLE",
    "predict models icu.csv": "unexpected words: icu.csv. Name the data: --data icu.csv.",
    "choose icu.csv --label-column time event": "by a comma: --label-column time,event.",
    "predict models --data no_ward.csv": "must have the column 'ward'",
    "predict models --data other.csv": "got 'eye'",
    "predict models --data new icu.csv": "got the folder 'new'",
    "run heart --out r1": "fedlayers resume r1",
    "run heart --out /": "--out runs/NAME",
    "choose heart --out /": "--out out/NAME",
    "diagnose --dataset heart --out /": "--out out/NAME",
    "run heart --plan plan.json": "--algorithm fedper",
    "plan r1": "fedlayers plan export PLAN --to FORM",
    "plan export r1": "fedlayers plan export r1 --to names",
}


LATER = {
    # numbers and names of options
    "choose heart --seeds three": "--seeds: must be a whole number; got 'three'",
    "run heart --rounds ten": "--rounds: must be a whole number; got 'ten'",
    "run heart --rounds 0": "--rounds must be from 1 to 1,000,000; got 0",
    "run heart --lr -0.1": "--lr must be above 0; got -0.1",
    "run heart --lr auto": "--lr: must be a number; got 'auto'",
    "run heart --epochs 1.5": "--epochs: must be a whole number; got '1.5'",
    "run heart --seed -1": "--seed must be at least 0; got -1",
    "run heart --participation 2": "--participation must be above 0 and at most 1",
    "run heart --max-samples 0": "--max-samples must be a whole number from 1 to 740",
    "run heart --checkpoint-every -1": "--checkpoint-every must be at least 1",
    "run heart --local-epochs 0": "did you mean --epochs?",
    "run heart --algorithms fedavg": "Or fedlayers compare takes it.",
    "run heart --model-option 64": "--model-option must be KEY=VALUE; got '64'",
    "run heart --rounds=": "--rounds: must be a whole number; got ''",
    "run heart --backend gpu": "Use local:2 for two processes",
    "run heart --impute drop": "known: none, mean, median, most_frequent",
    "run heart --scale zscore": "known: none, standard, minmax, robust",
    "run heart --dataset digits": "--dataset must be given once",
    "run --help-al": "did you mean --help-all?",
    "run cifar10": "--data-root FOLDER",
    "run iris": "unknown dataset or path 'iris': known: ",
    "run digits --alpha 1": "--alpha must be left out with partition 'iid'",
    "demo --seeds 1": "fedlayers compare takes it.",
    "plan heart": "fedlayers plan export PLAN --to FORM",
    "list all": "'all': name each one that you mean. known: algorithms",
    "choose titanic.csv": "got titanic.csv, which does not exist",
    "run heart --optimizer Adam": "did you mean 'adam'?",
    "run heart --algorithm fed_avg": "did you mean 'fedavg'?",
    "run heart --clients 10": "--clients must be 4, the number of natural clients",
    "run heart --backend dask": "Use local:2 for two processes",
    "run heart --device cuda:9": "Use --device cpu",
    "run digits --partition non-iid": "did you mean 'non_iid_2'?",
    "run heart --model mlp:64": "--model mlp --model-option NAME=64",
    "run heart --model my_net.py": "Name the module without .py: my_net:NAME",
    "run heart --model my_net:Net": "got 'my_net', which does not exist",
    "run --data heart": "did you mean --dataset?",
    "compare heart --algorithm fedavg": "did you mean --algorithms?",
    "compare r1 out": "got the folder 'r1'",
    "chose heart": "did you mean 'choose'?",
    "list algorithm": "did you mean 'algorithms'?",
    # columns
    "choose icu.csv --label died --client ward": "did you mean --label-column?",
    "choose icu.csv --client-column ward --label-column age": "--task regression",
    "choose icu.csv --client-column age --label-column died": "at least 3 samples",
    f"choose icu.csv {WARDS} --positive yes": "known: 0, 1",
    f"choose icu.csv {WARDS} --columns agge": "did you mean 'age'?",
    "check missing.csv": "got missing.csv, which does not exist. Correct its path.",
    # what commands wrote
    "run heart --algorithm fedper --plan icu.csv": "icu.csv must be a plan",
    "diagnose r1 --round 7": "one with a checkpoint (1); got 7",
    "diagnose r1 --model globall": "did you mean 'global'?",
    "diagnose out": "Its runs are below out/arms",
    "export models": "fedlayers predict models --data TABLE",
    "export out --client nero --out z": "did you mean 'neuro'?",
    "resume out": "Its runs are below out/arms",
    "map r1 --width 0": "--width must be from 4 to 100; got 0",
    # names without their option, and what lacks
    "run heart --algorithm fedavg local": "fedlayers compare --algorithms fedavg,local",
    "run heart --algorithm fedavg --algorithm local": "fedlayers compare --algorithms",
    "run heart fedavg": "Write --algorithm fedavg.",
    "run fedprox": "Write --algorithm fedprox.",
    "run heart fedavg local": "Write fedlayers compare --algorithms fedavg,local.",
    "run heart heart_mlp": "Write --model heart_mlp.",
    "compare heart fedavg local": "Write --algorithms fedavg,local.",
    "diagnose r1 cka": "Write --metrics cka.",
    "regret": "must have RULE; got none. Such as: fedlayers regret sensitivity_ratio",
    "resume": "must have DIR; got none. Such as: fedlayers resume runs/playerfl",
    "predict": "must have FILE; got none. Such as: fedlayers predict",
    "tune heart": "must have --search NAME [NAME ...] and --algorithms NAME",
    "tune heart --algorithms fedavg": "must have --search NAME [NAME ...]; got none",
    "predict models --data icu.csv --out": "--out must have a value; got none",
    "check": "fedlayers: DATA: must be a name, a folder or files; got none",
    "run heart --client-fraction 0.5": "did you mean --participation?",
    "run heart --config r1/config.json": "fedlayers resume r1",
    "choose icu.csv --csv delimiter=;": "did you mean 'sep'?",
    "export out --baseline linear --out y": "known: none",
    # paths of another kind, or nearly typed
    "predict models/neuro --data icu.csv": "Did you mean 'models/neuro.safetensors'?",
    "predict models --data r1": "got 'r1', a run",
    "predict models --data models": "got 'models', exported models",
    "choose r1": "got 'r1', a run",
    "study out": "got 'out', a decision",
    "run models": "fedlayers predict models --data TABLE",
    "verify r11": "Did you mean 'r1'?",
    "select ot": "Did you mean 'out'?",
    "export r1 --client nobody --out x": "known: cleveland, hungarian",
    "plot r1 --metrics lss": "did you mean 'loss'?",
    "plan export out/plan.json --to flower2": "did you mean 'flower'?",
}
"""Typed at a later visit. Those that are not slow stand for the others."""


@pytest.mark.parametrize("line", [*TYPED, *every_other(LATER, of=8)])
def test_a_line_of_a_newcomer_is_answered(typed, line):
    assert {**TYPED, **LATER}[line] in typed.refused(line)


X, Y = np.zeros((40, 4), np.float32), np.arange(40) % 2
SAMPLES = {"n": (X, Y), "s": (X, Y)}


def mistakes():
    """What is typed in a notebook, by what its answer says."""
    import torch
    from torch import nn

    nets = {"n": nn.Linear(4, 2), "s": nn.Linear(4, 2)}
    lists = dict.fromkeys("ns", (torch.from_numpy(X), Y.tolist()))
    run, diagnose = fl.run, fl.diagnose
    return {
        "Name it: label_column='died', client_column='ward'": partial(run, data=icu()),
        "got 40 samples and 30 values": partial(run, data={"n": (X, Y[:30])}),
        "Change its last layer": partial(run, data=SAMPLES, model=nn.Linear(4, 1)),
        "Correct it until it takes": partial(run, data=SAMPLES, model=nn.Linear(5, 2)),
        "did you mean 'rounds'": partial(run, data=SAMPLES, n_rounds=5),
        "Pass models first, then data": partial(diagnose, SAMPLES, nets),
        "did you mean 'metrics'": partial(diagnose, nets, SAMPLES, metric="cka"),
        "did you mean 'cka'": partial(diagnose, nets, SAMPLES, ["CKA"]),
        "Name a dataset by dataset=": partial(run, "heart"),
        "Name the clients: ": partial(run, data=[(X, Y), (X, Y)]),
        "pd.concat": partial(run, data={"a": icu(), "b": icu()}),
        "pairs of tensors or arrays": partial(fl.cross_scores, nets, lists),
        "at least 2 clients to choose": partial(fl.choose, data={"n": (X, Y)}),
        "nothing there. Correct the path": partial(fl.select, "nowhere.jsonl"),
        "Pass your own network as own_model=": partial(diagnose, "r", model=nets["n"]),
        "as own_model=": partial(fl.through_time, "r", model=nets["n"]),
        "fl.compare(algorithms=NAMES)": partial(run, algorithm=["fedavg", "local"]),
        "got dict. Measure it first: fl.diagnose": partial(fl.select, nets),
        "got list. Give {client: (x, y)}": partial(fl.from_clients, [(X, Y)]),
        "must be str or Callable; got dict": partial(fl.regret, nets),
    }


def test_a_mistake_in_a_notebook_is_answered():
    for answer, call in mistakes().items():
        with pytest.raises(fl.UsageError, match=re.escape(answer)):
            call()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("choose icu.csv --print-config", 'dataset = "icu.csv"'),
        ("choose --print-config icu.csv", 'dataset = "icu.csv"'),
        ("run icu.csv other.csv --print-config", 'dataset = "icu.csv,other.csv"'),
        ("choose --help", "--impute STR"),
        ("choose --help", "--exclude-columns NAME"),
        ("choose --help", "--positive STR"),
        ("choose --help", "--text-column STR"),
        (f"check icu.csv {WARDS}", f"fedlayers choose icu.csv {WARDS}"),
        ("version", "fedlayers 0."),
    ],
)
def test_a_line_of_a_newcomer_works(typed, line, shown):
    assert shown in typed(line)


@pytest.mark.parametrize(
    ("words", "seeds"),
    [("--seeds 2", (4, 5)), ("--seeds 2 7", (2, 7)), ("--seeds=2,7,1", (2, 7, 1))],
)
def test_one_number_counts_seeds_and_several_are_seeds(words, seeds):
    line = f"compare heart --seed 4 --algorithms fedavg,local {words}"
    command = cli.parse_command(line.split())
    assert command.arguments()["seeds"] == seeds
    assert command.algorithms == ("fedavg", "local")


def test_predict_takes_the_table_that_choose_took(typed, tmp_path):
    out = tmp_path / "new.csv"
    typed(f"predict models --data icu.csv --out {out}")
    predicted, table = pd.read_csv(out), icu()
    assert list(predicted["sample"]) == list(range(240))
    assert list(predicted["client"]) == list(table["ward"])
    predictions = fl.predict("models", table)
    for client, of_client in predictions.items():
        alone = fl.predict(f"models/{client}.safetensors", table[table.ward == client])
        assert of_client.outputs.tolist() == alone.outputs.tolist()
        assert list(of_client.samples) == [
            str(row) for row in np.flatnonzero(table.ward == client)
        ]
        rows = predicted[predicted["client"] == client]
        assert np.allclose(rows["probability 1"], of_client.probabilities[:, 1])
    typed(f"predict models --data new --out {tmp_path / 'folder.csv'}")
    with pytest.raises(fl.UsageError, match="must be a table with the column 'ward'"):
        fl.predict("models", np.zeros((3, 2)))
    with pytest.raises(KeyError, match="unknown client 'nuro': did you mean 'neuro'"):
        predictions["nuro"]


def test_a_kind_of_path_is_known(desk):
    kinds = {
        "nowhere": Kind.NOTHING,
        "r1": Kind.RUN,
        "r1/rows.jsonl": Kind.DIAGNOSIS,
        "out": Kind.DECISION,
        "out/arms": Kind.RUNS,
        "models": Kind.MODELS,
        "models/neuro.safetensors": Kind.MODELS,
        "icu.csv": Kind.SAMPLES,
        "new": Kind.SAMPLES,
        ".": Kind.RUNS,
    }
    assert {path: kind_of(desk / path) for path in kinds} == kinds


@pytest.mark.parametrize("name", ["measur", "fitt", "zzz", "isi", "log"])
def test_a_proposal_has_something_in_common(name):
    proposal = nearest(name, cli.COMMANDS)
    assert not proposal or {*re.findall("..", proposal)} & {*re.findall("..", name)}


def test_choose_needs_no_configuration(tmp_path):
    import torch
    from torch import nn

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=draw)
    data = {"north": (x, (x[:, 0] > 0).long()), "south": (-x, (x[:, 1] > 0).long())}
    answer = fl.choose(
        data=data,
        model=nn.Linear(4, 2),
        rounds=1,
        seeds=1,
        tune_rates=0,
        baselines=False,
        progress=False,
        out=tmp_path,
    )
    assert {"fedavg", "local"} <= {*answer.table["way"]}
    with pytest.raises(fl.UsageError, match="pass samples as data="):
        fl.choose(data)
    run = fl.run(data=data, model=nn.Linear(4, 2), rounds=1, progress=False)
    with pytest.raises(KeyError, match="unknown client 'z': known: north, south"):
        run.models["z"]
