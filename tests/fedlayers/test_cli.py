"""The command line as a newcomer meets it: what works, and what each mistake is answered with."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedlayers as fl
from fedlayers.cli import app as cli, options
from fedlayers.cli.options import ConfiguredCommand
from fl_core import rows
from fl_core.config import GROUPS, KEYS
from fl_core.plan import LayerPlan
from fl_core.records import store
from tests.conftest import every_other

SMALL = "--rounds 2 --workers 0"


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory):
    """Two short runs on heart, of FedAvg and of PLayer-FL, made by the command line."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("fedavg", "playerfl"):
        cli.main(f"run --algorithm {name} {SMALL} --out {folder / name}".split())
    return folder


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What diagnose writes for heart with seed 1."""
    path = tmp_path_factory.mktemp("rows")
    line = "diagnose --dataset heart --model heart_mlp --seed 1 --metrics federation_sensitivity cka"
    cli.main([*line.split(), "--out", str(path)])
    return path / "rows.jsonl"


@pytest.fixture
def own_data(fedlayers):
    """A table as .npz in the working folder: three clients, one with a single class, one with few samples."""
    rng = np.random.default_rng(0)
    sizes = {"many": 40, "one_class": 20, "few": 8}
    client = np.repeat(list(sizes), list(sizes.values()))
    y = np.arange(len(client)) % 3
    y[client == "one_class"] = 1
    x = rng.normal(size=(len(client), 5)).astype(np.float32)
    np.savez("own.npz", x=x, y=y, client=client)
    return fedlayers


@pytest.mark.parametrize("words", ["", "--help", "-h", "help"])
def test_overview_has_one_line_for_each_command(fedlayers, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    out = fedlayers(words)
    for name in cli.COMMANDS:
        line = next(
            line for line in out.splitlines() if re.match(rf"\W*{name}  ", line)
        )
        assert line.rstrip(" │|").endswith("."), f"{name} takes more than its line"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_has_examples_that_parse(fedlayers, name):
    out = fedlayers(name, "--help")
    assert fedlayers("help", name) == out
    examples = re.findall(rf"^ +fedlayers ({name}\b.*)$", out, flags=re.MULTILINE)
    assert examples, out
    assert len(out.splitlines()) < 160
    assert not re.search("None|MISSING", out)
    for line in examples:
        assert isinstance(cli.parse_command(line.split()), cli.command_class(name))


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("check own.csv --client-column hospital", {"command", "columns", "clients"}),
        ("diagnose --dataset heart --metrics grad_norm", {"notes", "rows"}),
        ("choose --rounds 1 --seeds 1 --no-baselines", {"way", "headline"}),
    ],
)
def test_json_is_one_object(fedlayers, words, keys):
    Path("own.csv").write_text("hospital,age,label\n" + "a,1,0\nb,2,1\n" * 40)
    assert keys <= json.loads(fedlayers(words, "--json")).keys()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("run --round 3", "unknown option --round: did you mean --rounds\\?"),
        ("run --rounds three", ".*--rounds: must be a whole number; got 'three'\\."),
        ("run --out=", ".*--out: must be a name, a folder or files; got none"),
        ("run --out", "--out must have a value; got none"),
        ("verify", "fedlayers verify must have DIR; got none"),
    ],
)
def test_flags_that_do_not_parse_are_refused_in_one_line(
    fedlayers, monkeypatch, words, reason
):
    monkeypatch.setenv("COLUMNS", "30")
    message = fedlayers.refused(words)
    assert re.match(f"fedlayers: {reason}", message)
    assert f"fedlayers {words.split()[0]} --help" in message


def test_every_field_of_the_configuration_has_a_flag_with_help(fedlayers):
    keys = {*KEYS} - {*options.OPTIONS}
    for kind in GROUPS.values():
        assert {field.name for field in fields(kind)} <= {*options.descriptions(kind)}
    shown = [fedlayers("run", flag) for flag in ("--help", "--help-all")]
    usual, every = (
        re.findall(r"^[^\w-]*(--[\w-]+)", text, re.MULTILINE) for text in shown
    )
    named = {f"--{name.replace('_', '-')}": name for name in keys}
    assert {named[flag] for flag in every if flag in named} == keys
    assert {named[flag] for flag in usual if flag in named} == {*options.USUAL}


def test_diagnose_groups_clients_when_asked(fedlayers, tmp_path):
    run = tmp_path / "run"
    fedlayers(f"run --dataset heart --algorithm local --rounds 1 --out {run}")
    metrics = "--metrics weight_magnitude"
    shown = fedlayers(f"diagnose {run} {metrics} --groups --out {tmp_path / 'rows'}")
    assert re.search(
        r"(Clients form groups|No groups of clients are shown) \(silhou", shown
    )


CONFIGURED = [
    name
    for name in cli.COMMANDS
    if issubclass(cli.command_class(name), ConfiguredCommand)
]
NEEDED = {"tune": "--algorithms fedavg --search weight_decay=0.1,0.2"}


@pytest.mark.parametrize("name", every_other(CONFIGURED))
def test_a_printed_configuration_is_read_again(fedlayers, name):
    command = f"{name} {NEEDED.get(name, '')}"
    flags = "--dataset digits --lr 0.2 --amsgrad False --model-option sizes=8,4"
    tables = "--dataset a.csv b.csv --csv sep=; decimal=,"
    for flags_or_tables in (flags, tables)[: 1 + (name == "run")]:
        text = fedlayers(command, flags_or_tables, "--print-config")
        Path("run.toml").write_text(text)
        assert fedlayers(command, "--config run.toml --print-config") == text
        stored = tomllib.loads(text)
        if flags_or_tables == flags:
            assert (stored["training"]["lr"], stored["training"]["amsgrad"]) == (
                0.2,
                False,
            )
            assert stored["model"]["model_options"] == {"sizes": [8, 4]}
        else:
            assert stored["data"] == {
                "dataset": "a.csv,b.csv",
                "csv": {"sep": ";", "decimal": ","},
            }
        own_flags = "--lr 0.3 --batch_size 7 --config=run.toml --print-config"
        changed = tomllib.loads(fedlayers(command, own_flags))["training"]
        assert (changed["lr"], changed["batch_size"]) == (0.3, 7)


@pytest.mark.parametrize(
    ("command", "named"),
    [("compare", "algorithm, options"), ("choose", "rule"), ("diagnose", "algorithm")],
)
def test_a_key_that_the_command_has_no_flag_for_is_named_with_its_file(
    fedlayers, command, named
):
    Path("run.toml").write_text(
        fedlayers(
            "run --algorithm fedprox --option mu=0.1 --rule examples.rules.knee:knee --print-config"
        )
    )
    message = fedlayers.refused(command, "--config run.toml")
    assert re.search(rf"run\.toml must be .*{command}; got .*{named}", message)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[data]\ndatset = 'heart'", "mean 'dataset'"),
        ("[dta]", "mean 'data'"),
        ("lr = 0.1", "below [training]"),
        ("data = 3", "data of run.toml must be dict"),
        ("[model]\nmodel = {a = 1}", "must be str or none"),
        ("[training]\nlr = 'fast'", "lr must be float or none; got 'fast'"),
        ("[", "must be TOML"),
    ],
)
def test_a_wrong_configuration_file_is_one_line(fedlayers, tmp_path, text, says):
    (tmp_path / "run.toml").write_text(text)
    assert says in fedlayers.refused("run --config", str(tmp_path / "run.toml"))
    assert "must be a file of TOML" in fedlayers.refused("run --config nowhere.toml")


@pytest.mark.parametrize(
    ("words", "kept"),
    [("", None), ("--keep-optimizer", True), ("--keep-optimizer False", False)],
)
def test_a_switch_says_yes_by_itself_and_yes_or_no_by_a_word(words, kept):
    line = f"run --seed 1 {words} --rounds 2"
    assert cli.parse_command(line.split()).keys.training.keep_optimizer is kept


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("runn", "mean 'run'?"),
        ("run --dataset heat", "mean 'heart'?"),
        ("run --dataset heart.npz", "heart.npz"),
        ("run --model heart_ml", "mean 'heart_mlp'?"),
        ("run --model nowhere:network", "got 'nowhere'"),
        ("run --algorithm playrfl", "mean 'playerfl'?"),
        ("run --algorithm playrfl --print-config", "mean 'playerfl'?"),
        ("run --algorithm playerfl --rule manual", "'manual'"),
        ("run --rule sensitivity", "mean 'sensitivity_ratio'?"),
        ("run --algorithm fedprox --option nu=1", "fedprox 'nu'"),
        ("run --model-option width=3", "got 'width'"),
        ("run --device cuda:99", "'cuda:99'"),
        ("run --dataset mnist", "FEDLAYERS_DATA_ROOT"),
        ("run --dataset mnist --data-root nowhere", "data root"),
        ("run --algorithm fedavg --plan auto", "(anti, fedbabu"),
        ("run --algorithm fedper --plan nope.json", "nope.json"),
        ("verify nowhere", "got 'nowhere', nothing"),
        ("diagnose", "or --dataset"),
        ("diagnose nowhere", "got 'nowhere', nothing"),
        ("diagnose --dataset heart --round 3", "--round"),
        ("diagnose --dataset heart --groups", "--groups goes with a run directory"),
        (
            "diagnose --dataset heart --option hessian_spectrum.k=50",
            "metric of --metrics 'hessian_spectrum'",
        ),
        ("diagnose --dataset heart --option hessian_spectrm.k=5", "'hessian_spectrm'"),
        (
            "diagnose --dataset heart --option hessian_trace.probes=many",
            "int or none; got 'many'",
        ),
        ("diagnose --dataset heart --option cka.probe=3", "from Python"),
        ("diagnose --dataset heart --by-position", "goes with --models"),
        ("select nowhere.jsonl", "nowhere.jsonl"),
        ("list metric", "mean 'metrics'?"),
        ("check heart", "Write fedlayers choose heart."),
        ("compare --algorithms local fedavgg", "mean 'fedavg'?"),
        ("compare --algorithms fedprox --option mu=1", "--option ALGORITHM.mu=..."),
        ("compare --algorithms local fedavg --plan auto", "local, fedavg"),
        ("choose --algorithm fedprox", "fedprox, which uses no plan"),
        ("run --model own.py", "module without .py: own:NAME"),
        ("run --loss mse", "cross_entropy, focal, player_focal;"),
    ],
)
def test_a_wrong_word_is_answered_with_one_line_and_nothing_is_written(
    fedlayers, line, said
):
    assert said in fedlayers.refused(line)


def test_map_trains_and_draws_one_picture(fedlayers):
    shown = fedlayers("map --dataset heart --rounds 1 --draws 2")
    assert shown.splitlines()[-1] == "layer_map/layer_map.png"
    facts = Image.open("layer_map/layer_map.png").text
    assert facts["command"].startswith("fedlayers map --dataset heart")
    assert facts["data"] == store.Run("layer_map/run").header()["data"]
    assert "commit" in facts
    drawn = fedlayers("map layer_map/run --out again --draws 2")
    assert "again/layer_map.png" in drawn
    assert "Name one of the two" in fedlayers.refused("map")
    assert "go with --dataset" in fedlayers.refused("map layer_map/run --lr 1")
    for flag in ("--width", "--draws"):
        untrained = f"map --dataset heart --out none {flag} -1"
        assert f"{flag} must be" in fedlayers.refused(untrained)
    assert not Path("none").exists()


def test_a_run_with_patience_shows_its_best_rounds(fedlayers):
    words = "--dataset heart --rounds 30 --eval-every 1 --lr 0.1 --patience 2"
    shown = fedlayers("run", words, "--out run")
    run = store.Run("run")
    best = run.best_round("global")
    assert best < run.rounds[-1] < 30
    assert f"global {best}" in shown.splitlines()[0]
    assert f"{run.rounds[-1]} of at most 30" in shown
    assert f"global models: {best}" in fedlayers("verify run")


def test_run_records_the_command_as_it_was_typed(finished_runs):
    header, frame = rows.read(finished_runs / "fedavg" / "rows.jsonl")
    assert header["command"].startswith("fedlayers run --algorithm fedavg --rounds 2")
    assert set(frame["algorithm"]) == {"fedavg"}


@pytest.mark.parametrize("existing", ["run", "file", "folder"])
def test_run_refuses_a_directory_that_is_taken(fedlayers, finished_runs, existing):
    if existing == "run":
        shutil.copytree(finished_runs / "fedavg", "taken")
    elif existing == "file":
        Path("taken").write_text("mine")
    else:
        Path("taken").mkdir()
        Path("taken/thesis.txt").write_text("mine")
    message = fedlayers.refused("run --out taken", SMALL)
    assert {"run": "a run", "file": "a file", "folder": "be empty"}[existing] in message


def test_training_that_diverges_is_a_failure_that_names_where(fedlayers):
    fedlayers("run --lr 1e30 --out big", SMALL, code=1)
    assert "Traceback" not in fedlayers.err
    last = fedlayers.err.splitlines()[-1]
    assert last.startswith("fedlayers: fedavg, round 1, client 'cleveland'")
    assert "layer 'fc" in last


def test_debug_shows_the_traceback_and_keeps_the_exit_code(fedlayers):
    fedlayers("run --dataset heat --debug", code=2)
    assert "Traceback" in fedlayers.err
    assert fedlayers.err.splitlines()[-1].startswith("fedlayers: ")


def test_an_error_that_nobody_foresaw_is_a_failure_with_its_name(
    fedlayers, monkeypatch
):
    Path("own_broken_model.py").write_text(
        "def network(shape, n_classes):\n    raise KeyError('oops')\n"
    )
    message = fedlayers.refused("run --model own_broken_model:network")
    assert "own_broken_model:network" in message
    assert "KeyError: 'oops'" in message
    monkeypatch.setattr("fedlayers.runs.run", lambda *_, **__: {}["oops"])
    message = fedlayers.refused("run", code=1)
    assert message.startswith("fedlayers: KeyError: 'oops'")


def test_own_table_and_own_model_of_the_working_folder(own_data):
    Path("own_model_of_a_test.py").write_text(
        "from torch import nn\n\n\n"
        "def network(shape, n_classes, width=8):\n"
        "    first = nn.Sequential(nn.Linear(*shape, width), nn.BatchNorm1d(width), nn.ReLU())\n"
        "    return nn.Sequential(first, nn.Linear(width, n_classes))\n"
    )
    model = (
        "--model own_model_of_a_test:network --model-option width=4 --batchnorm local"
    )
    out = own_data("run --dataset own.npz", model, SMALL, "--out mine")
    assert all(name in out for name in ("many", "one_class", "few"))
    measure = "diagnose mine --metrics federation_sensitivity"
    # a run from elsewhere must not choose what is imported and called
    for allowed in ("", "--allow-code own_model_of_a_test:other"):
        assert "own_model_of_a_test:network" in own_data.refused(measure, allowed)
    own_data(measure, "--allow-code own_model_of_a_test:network")
    own_data("select diagnosis")
    assert len(LayerPlan.load("plan.json").layers) == 2
    fedper = f"run --dataset own.npz {SMALL} --algorithm fedper --plan plan.json"
    own_data(fedper, model, "--out two")
    message = own_data.refused(fedper)
    assert "only in the plan: " in message


@pytest.mark.parametrize("words", [["list", "datasets"], ["run", "--help"], ["help"]])
def test_output_that_nobody_reads_to_the_end_is_no_error(words, tmp_path):
    """As in ``fedlayers list datasets | head -1``: no traceback at the end."""
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(cli.__file__).parents[2]),
        "PYTHONUNBUFFERED": "1",
    }
    code = "from fedlayers.cli.app import main; main()"
    line = [sys.executable, "-c", code, *words]
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=tmp_path,
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(30) == 0


def test_a_run_that_ends_diverged_is_a_failure(fedlayers):
    fedlayers(
        "run",
        SMALL,
        "--algorithm per_fedavg --lr 1e6 --out steep",
        code=1,
    )
    assert "personal" in fedlayers.err.splitlines()[-1]
    assert store.Run("steep").rounds[-1] == 2, "all of it is there"


def test_diagnose_reads_options_and_shows_the_variants_that_they_make(fedlayers):
    options = (
        "hessian_trace.probes=null grad_norm.reduction=batch "
        "cka.positions=mean cka.samples=64"
    )
    flags = (f"--option {option}" for option in options.split())
    metrics = "--metrics hessian_trace grad_norm cka"
    out = fedlayers("diagnose --dataset heart", metrics, *flags)
    assert "norm_batch" in out
    header, frame = rows.read(Path("diagnosis/rows.jsonl"))
    assert header["metrics"]["hessian_trace"] == {"probes": None}
    assert set(frame.loc[frame["metric"] == "cka", "variant"]) == {"mean"}


def test_a_run_is_diagnosed_and_decided_on(fedlayers, finished_runs):
    only = "--metrics federation_sensitivity --out"
    run = finished_runs / "fedavg"
    fedlayers("diagnose", run, "--round 1 --model global", only, "one")
    fedlayers("diagnose", run, only, "last")
    _, one = rows.read(Path("one/rows.jsonl"))
    _, last = rows.read(Path("last/rows.jsonl"))
    assert {*one["round"], *one["model"]} == {1, "global"}
    assert {*last["round"], *last["model"], *last["algorithm"]} == {
        2,
        "local",
        "fedavg",
    }
    assert "federation_sensitivity (after)" in fedlayers("select last")
    assert LayerPlan.load("plan.json").names == ("fc1", "fc2", "fc3", "fc4")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--round 7", "(1, 2); got 7"),
        ("--lr 0.1", "go with --dataset"),
        ("--metrics kca", "mean 'cka'?"),
    ],
)
def test_what_a_run_cannot_be_asked(fedlayers, finished_runs, line, said):
    assert said in fedlayers.refused("diagnose", finished_runs / "fedavg", line)


def test_names_of_others_print_no_control_characters(
    fedlayers, finished_runs, measured
):
    """A layer and a run whose names would move a terminal's cursor. Other letters and the lines stay."""
    name = "fc1é\x1b[31mΩ\x9b2J\u202e"
    Path("rows.jsonl").write_text(
        Path(measured).read_text().replace('"fc1', json.dumps(name)[:-1])
    )
    shutil.copytree(finished_runs / "fedavg", Path("runs") / name)
    for words in ("select rows.jsonl", "runs runs"):
        printed = fedlayers(words)
        assert r"fc1é\x1b[31mΩ\x9b2J\u202e" in printed, words
        assert all(line.isprintable() for line in printed.split("\n"))
        assert printed.count("\n") > 1


def test_an_earlier_diagnosis_is_replaced_and_named(fedlayers):
    words = "diagnose --dataset heart --metrics weight_magnitude"
    fedlayers(words)
    assert "replaced" not in fedlayers.err
    fedlayers(words, "--seed 1")
    assert "diagnosis/rows.jsonl will be replaced" in fedlayers.err
    assert rows.read_header(Path("diagnosis/rows.jsonl"))["seed"] == 1


def test_a_plan_that_is_replaced_is_named(fedlayers, measured):
    fedlayers("select", measured, "--rule manual --layers fc1,fc3")
    assert "note" not in fedlayers.err
    fedlayers("select", measured, "--rule manual --layers fc1")
    assert "fedlayers: note: plan.json will be replaced" in fedlayers.err.splitlines()
    assert LayerPlan.load("plan.json").shared == ("fc1",)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--rule manual --layers fc1,fc22", "mean 'fc2'?"),
        (
            "--rule examples.rules.knee:knee --threshold 1.2",
            "sensitivity_ratio; got 'examples.rules.knee:knee'",
        ),
    ],
)
def test_what_select_refuses(fedlayers, measured, line, said):
    assert said in fedlayers.refused("select", measured, line)


def test_rows_that_are_none_are_refused(fedlayers, measured):
    Path("plain.txt").write_text("a,b\n1,2\n")
    assert "no header" in fedlayers.refused("select plain.txt")
    torn = measured.read_text()[:-20]
    Path("torn.jsonl").write_text(torn)
    assert "torn.jsonl, line" in fedlayers.refused("select torn.jsonl", code=1)


def test_options_of_somebodys_own_algorithm_are_told_by_its_place():
    place = "pkg.mod:Mine"
    options_by_name = options.by_name(
        [f"{place}.mu=1", "fedprox.mu=2"],
        "algorithm",
        [place, "fedprox"],
    )
    assert options_by_name == {place: {"mu": 1}, "fedprox": {"mu": 2}}


@pytest.mark.parametrize("command", ["diagnose", "select", "predict"])
def test_files_of_others_are_not_overwritten(
    fedlayers, finished_runs, measured, command
):
    shutil.copytree(finished_runs / "fedavg", "run")
    Path("mine").write_text("sample,age\nas I predicted,3\n")
    subjects = {
        "diagnose": "run",
        "select": measured,
        "predict": "model --data new.csv",
    }
    subject, existing = subjects[command], "run/config.json"
    if command == "diagnose":
        existing = "run"
    assert "run directory" in fedlayers.refused(command, subject, "--out", existing)
    assert "got mine" in fedlayers.refused(command, subject, "--out mine")


@pytest.mark.parametrize("name", cli.GROUPS["Decide"])
def test_flags_of_a_study_are_arguments_of_its_function(name):
    command = cli.parse_command([name, *NEEDED.get(name, "").split()])
    inspect.signature(getattr(fl, name)).bind(**command.arguments())
