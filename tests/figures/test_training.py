"""Runs of an item are made once, resume, stop at their budget, are packed and refused."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest

from figures import device, items, scorecard, training
from figures.__main__ import main
from figures.items import rows_file
from fl_core import rows
from fl_core.algorithms import find, registry
from fl_core.algorithms.base import read_config
from fl_core.errors import CorruptError
from fl_core.run import runner
from tests.conftest import refuses
from tests.figures.conftest import NAME, made

STUDIES = {item.study.name: item.study for item in items.REGISTRY.values()}
train = partial(training.train, progress=False)
pytestmark = pytest.mark.filterwarnings("ignore:client")


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_item_names_what_there_is(name):
    item = STUDIES[name]
    for config in item.runs.values():
        if config.federation.algorithm in registry():
            options = config.federation.options
            read_config(find(config.federation.algorithm, options), options)
    assert item.planned(1) == [(run, 0) for run in item.runs]


def test_runs_are_made_once_and_a_partial_figure_says_what_is_missing(
    check,
    tmp_path,
    monkeypatch,
):
    folder, out = tmp_path / NAME, ["--out", str(tmp_path)]
    main([NAME, "--train", "--only", "local", "fedavg", "--seeds", "1", *out])
    assert made(folder) == {"local-0", "fedavg-0"}
    before = {path: path.read_bytes() for path in folder.iterdir()}
    text = (tmp_path / f"{NAME}.md").read_text()
    assert "Missing: fedper 0, local 1, fedavg 1, fedper 1." in text
    main([NAME, "--train", *out])
    assert made(folder) == {f"{run}-{seed}" for run, seed in check.planned()}
    assert all(path.read_bytes() == content for path, content in before.items())
    assert "Missing" not in (tmp_path / f"{NAME}.md").read_text()
    monkeypatch.setattr(runner, "assemble", None)  # nothing is left to make
    main([NAME, "--train", *out])


def test_budget_stops_between_runs(check, tmp_path, monkeypatch):
    folder, clock = tmp_path / NAME, [0.0]

    def ten_minutes(*args):
        clock[0] += 600
        return check.measure(*args)

    monkeypatch.setattr(training.time, "perf_counter", lambda: clock[0])
    slow = replace(check, measure=ten_minutes)
    train(slow, folder, budget=15)
    assert made(folder) == {"local-0", "fedavg-0"}  # the second began at 10 of 15
    train(slow, folder, budget=5)  # two runs' time is known
    assert made(folder) == {"local-0", "fedavg-0", "fedper-0"}
    with refuses("budget"):
        train(slow, folder, budget=0)


def test_a_gpu_takes_what_waits_in_order_and_nothing_twice(
    check, tmp_path, monkeypatch, capsys
):
    first = device.Waiting(NAME, 1, ("a.line",), runs=("fedavg", "local"))
    whole = device.Waiting(NAME, 2, ("another.line",))
    monkeypatch.setattr(device, "WAITING", (first, whole))
    train(check, tmp_path / NAME, only=["fedavg"], seeds=1)
    gpu = ["gpu", "--out", str(tmp_path)]
    main([*gpu, "--budget", "0"])
    listed = capsys.readouterr().out.splitlines()
    assert listed[0] == f"{NAME}, for a.line:"
    assert listed[1] == "  local, seed 0: not measured"
    assert listed[-1] == "  fedper, seed 0-1: not measured"
    with pytest.raises(SystemExit):
        main(gpu)
    assert "device must be" in capsys.readouterr().err
    assert made(tmp_path / NAME) == {"fedavg-0"}
    main([*gpu, "--device", "cpu"])
    assert check.headers(tmp_path / NAME).keys() == set(check.planned())
    capsys.readouterr()
    main(gpu)
    assert not capsys.readouterr().out


def test_processes_share_a_study_and_make_no_run_twice(check, tmp_path):
    """Of two that begin at once, the second goes on with the next run."""
    begun = []

    def nested(task, run, to):
        begun.append(f"{run}-{task.config.execution.seed}")
        if len(begun) == 1:
            train(item, to, seeds=1)
        return check.measure(task, run, to)

    item = replace(check, measure=nested)
    train(item, tmp_path / NAME, seeds=1)
    assert begun == ["local-0", "fedavg-0", "fedper-0"]
    assert {path.suffix for path in (tmp_path / NAME).iterdir()} == {".jsonl"}


def test_a_diverged_run_is_kept_with_its_reason_and_the_others_go_on(check, tmp_path):
    folder = tmp_path / NAME
    wild = check.runs["fedavg"].with_keys(lr=1e30, epochs=3)
    item = replace(check, runs={**check.runs, "fedavg": wild})
    train(item, folder, seeds=1)
    _, frame = rows.read(folder / "fedavg-0.jsonl")
    assert frame["value"].isna().all()
    header, frame = item.read(folder)
    assert ", round 1" in header["failed"].pop("fedavg 0")
    assert not header["failed"]
    assert set(frame["run"]) == {"local", "fedper"}
    assert "fedavg 0" not in header["missing"]
    for name in ("local", "fedper"):
        rows_file(folder, name, 0).unlink()
    with refuses(f"finished run.*{NAME} --train"):
        item.read(folder)


def test_packed_runs_are_read_resumed_and_packed_again(check, tmp_path, capsys):
    folder, whole = tmp_path / NAME, tmp_path / f"{NAME}.parquet"
    pack = [NAME, "--pack", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(pack)
    assert "to pack" in capsys.readouterr().err
    train(check, folder, only=["local", "fedavg"])
    header, frame = check.read(folder)
    main(pack)
    assert not folder.exists()
    first = whole.read_bytes()
    packed, same = check.read(folder)
    assert json.dumps(packed) == json.dumps(header)
    rounded = frame.assign(value=frame["value"].astype("float32").astype("float64"))
    pd.testing.assert_frame_equal(same, rounded, check_exact=True)
    train(check, folder)
    assert made(folder) == {"fedper-0", "fedper-1"}, "packed runs are not trained again"
    main(pack)
    assert check.headers(folder).keys() == set(check.planned())
    whole.write_bytes(first)
    main(pack)
    assert whole.read_bytes() == first


def test_another_configuration_is_refused_but_a_default_that_is_spelled_out(
    check, tmp_path
):
    folder = tmp_path / NAME
    train(check, folder, only=["local"], seeds=1)
    for keys, refused in (
        ({"lr": 0.1}, f"{NAME}: local, seed 0, .* another lr"),
        ({"scale": "standard"}, "another scale"),
        ({"scale": "none"}, ""),
    ):
        changed = {"local": check.runs["local"].with_keys(**keys)}
        with refuses(refused) if refused else nullcontext():
            train(replace(check, runs=changed), folder, seeds=1)  # fmt: skip
    for wrong, message in (({"only": ["fedpr"]}, "mean 'fedper'"), ({"seeds": 0}, "at least 1")):  # fmt: skip
        with refuses(message):
            train(check, folder, **wrong)


@pytest.mark.parametrize("name", sorted(items.REGISTRY))
def test_rows_that_are_missing_or_of_another_format_are_one_line_with_the_command(
    name, tmp_path
):
    item = items.find(name)
    path, command = item.path(tmp_path), item.study.command
    with refuses(f"got none.*{command}"):
        item.read(path)
    items.packed_file(path).write_bytes(b"PAR1")
    with refuses(f"^.*parquet.*{command}$", CorruptError):
        item.read(path)
    if type(item.study) is not items.Item:
        return  # whose rows are one table
    items.packed_file(path).unlink()
    path.mkdir()
    for bad in ("", '{"format": 1, "run": "a", "seed": 0}\n'):
        rows_file(path, "a", 0).write_text(bad)
        for read in (item.study.headers, item.read):
            with refuses(f"^.*jsonl.*{command}$", CorruptError):
                read(path)


def test_every_line_that_waits_for_a_gpu_has_runs_and_is_open(capsys):
    waiting = [line for entry in device.WAITING for line in entry.lines]
    verdicts = scorecard.verdicts()
    assert len(waiting) == len(set(waiting))
    registered = (items.HERE / "REGISTERED_LINES.md").read_text(encoding="utf-8")
    for line in waiting:
        assert f"`{line}`" in registered
        assert verdicts.get(line, "undecided") in {"undecided", "not comparable"}
    main(["gpu", "--budget", "0"])
    text = capsys.readouterr().out
    for line in waiting:
        assert line in text
    assert "\n  fedpft, seed 5-9: " in text
    assert "\n  cifar100.setting_V, seed 0-4: not measured\n" in text
    for study in ("fedra.longer", "pfedla.table2", "fedpft.hundred"):
        assert f"\n{study}, for " in text


def test_rows_of_another_item_are_refused(check, tmp_path):
    train(check, tmp_path / NAME, only=["local"], seeds=1)
    with refuses(r"rows of 'toy.check'.*figures toy.other"):
        replace(check, name="toy.other").read(tmp_path / NAME)
