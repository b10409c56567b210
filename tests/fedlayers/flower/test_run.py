"""Runs over sites: bits, states at the sites, resume, time-outs, and what is refused."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from flwr.app import Error, Message

import fedlayers as fl
from diagnostics.measure import diagnose_task
from diagnostics.report import Report
from fedlayers.flower import federation, server_app
from fedlayers.flower.clients import Sites
from fl_core.errors import RunError
from fl_core.plan import LayerPlan
from fl_core.records.store import Run
from fl_core.run.task import assemble
from tests.conftest import refuses
from tests.fedlayers.flower.grid import (
    PLAIN,
    WARDS,
    LocalGrid,
    assert_same,
    at_home,
    over_sites,
    site_files,
)


def test_a_class_that_nobody_has_is_left_out_as_at_home(tmp_path):
    """Weights as drawn predict it for some samples."""
    files = site_files(tmp_path)
    names = ("dead", "ill", "well")
    for file in files:
        file.write_text(f"classes = {list(names)}\n{file.read_text()}")
    keys = {**PLAIN, "algorithm": "fedavg", "rounds": 1, "lr": 1e-6}
    over_sites(tmp_path / "run", LocalGrid(files), **keys)
    tables = ",".join(str(tmp_path / f"{ward}.csv") for ward in WARDS)
    data = fl.load(tables, scale="none")
    data = data._changed(lambda part: replace(part, y=part.y + 1), classes=names)
    home = {**keys, "data": data, "stack": "off", "checkpoint_every": 1}
    fl.run(out=tmp_path / "home", **home)
    assert_same(tmp_path / "run", tmp_path / "home")


def test_a_federation_scales_as_one_table(tmp_path):
    files = site_files(tmp_path, 'scale = "standard"\nimpute = "mean"')
    for ward in WARDS:
        table = pd.read_csv(tmp_path / f"{ward}.csv")
        pd.concat([table] * 4).to_csv(tmp_path / f"{ward}.csv", index=False)
    table = pd.read_csv(tmp_path / "east.csv")
    table.loc[3, "age"] = np.nan
    tables = ",".join(str(tmp_path / f"{ward}.csv") for ward in WARDS)
    trained = fl.load(tables).partition.indices["east"]["train"]
    table.loc[trained[-1], "age"] = 300.0
    table.loc[trained[:5], "dose"] = -9e4  # more than 1 % of the cells
    table.to_csv(tmp_path / "east.csv", index=False)
    sites = Sites(LocalGrid(files), 3)
    sites.connect()
    common = sites.common(0)
    with pytest.warns(UserWarning, match=r"are clipped: 'age' \(1\)"):
        data = fl.load(tables, scale="standard", impute="mean")
    preparation = data.preprocessing
    assert preparation is not None
    assert common["preprocessing"]["categories"] == [[], [], ["a", "b", "c"]]
    for key in ("fill", "centre", "spread", "lowest", "highest"):
        assert common["preprocessing"][key] == pytest.approx(getattr(preparation, key))
    assert preparation.highest[0] < 100 < 1e38 < preparation.highest[1]
    assert common["shape"] == list(data.shape)
    assert common["sites"] == {
        client.name: [len(client.split(s)) for s in ("train", "validation", "test")]
        for client in data.clients
    }


def test_a_client_s_tensors_stay_at_its_site(tmp_path):
    heads = []

    def watch(asked, reply):
        for message in (asked, reply):
            packet = federation.packet_of(message.content, 10**9)
            heads.extend(name for tree in packet.trees.values() for name in tree)
        return reply

    files = site_files(tmp_path)
    over_sites(tmp_path / "run", LocalGrid(files, watch), algorithm="fedper", rounds=4)
    assert any("fc1" in name for name in heads)
    assert not any("fc4" in name for name in heads)
    states = tmp_path / "east-states" / Run(tmp_path / "run").id
    stored = sorted(path.name for path in states.glob("0*"))
    assert stored == ["000003-train", "000004-train"]
    state = Run(tmp_path / "run").checkpoint().clients["east"]
    assert state.meta["version"] == "000004-train"
    assert not any(state.trees.values())


def test_a_killed_server_resumes_to_the_same_bits(tmp_path):
    files = site_files(tmp_path / "a")
    keys = {"algorithm": "fedper", "rounds": 4}
    grid = LocalGrid(files, stop_after(trains=8))
    with pytest.raises(KeyboardInterrupt):
        over_sites(tmp_path / "run", grid, **keys)
    assert Run(tmp_path / "run").rounds == [1, 2]
    over_sites(tmp_path / "run", LocalGrid(files), **keys)
    over_sites(tmp_path / "whole", LocalGrid(site_files(tmp_path / "b")), **keys)
    assert_same(tmp_path / "run", tmp_path / "whole")
    with refuses("must be resumed with the same data"):
        over_sites(tmp_path / "run", LocalGrid(files[:2]), sites=2, **keys)


def stop_after(trains):
    """Return a change of replies that interrupts the server after some of training."""
    seen = []

    def change(asked, reply):
        seen.extend([1] * (asked.metadata.message_type == "train"))
        if len(seen) == trains:
            raise KeyboardInterrupt
        return reply

    return change


def test_a_round_goes_on_without_a_late_site(tmp_path):
    def late(asked, reply):
        trains = asked.metadata.message_type == "train"
        return None if trains and b"west" in name_of(asked, grid) else reply

    grid = LocalGrid(site_files(tmp_path), late)
    keys = {"algorithm": "fedper", "rounds": 1, "timeout": 1.0}
    with pytest.warns(UserWarning, match="no reply within 1 s from west"):
        over_sites(tmp_path / "run", grid, **keys)
    rows = Run(tmp_path / "run").rows()[1]
    lost = rows[rows["metric"] == "reply_lost"]
    assert lost[["client", "round", "variant"]].values.tolist() == [
        ["west", 1, "timeout"]
    ]
    with (
        pytest.warns(UserWarning, match="west"),
        pytest.raises(RunError, match="at least 3 sites must reply within 1"),
    ):
        over_sites(tmp_path / "few", grid, min_sites=3, **keys)


def name_of(message, grid):
    """Return the site file of a message's node."""
    return str(grid.files[message.metadata.dst_node_id]).encode()


def test_a_lost_process_is_asked_again(tmp_path):
    seen = []

    def lose(asked, reply):
        seen.append(asked.metadata.message_type)
        if seen.count("train") == 2 and seen[-1] == "train":
            return Message(Error(5, "killed"), reply_to=asked)
        return reply

    for name, change in (("run", lose), ("home", lambda _, reply: reply)):
        grid = LocalGrid(site_files(tmp_path / name / "sites"), change)
        over_sites(tmp_path / name / "out", grid, algorithm="fedper")
    assert_same(tmp_path / "run/out", tmp_path / "home/out")


def test_sites_measure_what_one_process_measures(tmp_path):
    names = ["federation_sensitivity", "grad_norm"]
    grid = LocalGrid(site_files(tmp_path))
    report = over_sites(tmp_path / "diagnosis", grid, metrics=names)
    tables = ",".join(str(tmp_path / f"{ward}.csv") for ward in WARDS)
    config = fl.RunConfig(dataset=tables, scale="none", stack="off", **PLAIN)
    home = diagnose_task(assemble(config), names)
    order = ["metric", "variant", "client", "layer"]
    over_sites_rows, wanted = (
        measured.frame[measured.frame["client"] != ""].sort_values(order)[
            [*order, "value"]
        ]
        for measured in (report, home)
    )
    assert len(over_sites_rows) > 20
    assert over_sites_rows.values.tolist() == wanted.values.tolist()
    assert Report.read(tmp_path / "diagnosis" / "rows.jsonl").layers == home.layers
    for key in ("metrics", "measure"):
        with refuses(f"{key}.* sites?"):
            over_sites(tmp_path / key, grid, **{key: ["cka"]})


@pytest.mark.slow
def test_flower_adds_noise_as_the_page_shows(tmp_path):
    page = (Path(__file__).parents[3] / "docs/federation_privacy.md").read_text()
    shown = {}
    exec(page.partition("```python\n")[2].partition("```")[0], shown)
    models = []
    for name in ("noisy", "plain"):
        grid = LocalGrid(site_files(tmp_path))
        grid.app = shown["app"] if name == "noisy" else grid.app
        over_sites(tmp_path / name, grid, algorithm="fedavg", rounds=1)
        models.append(Run(tmp_path / name).checkpoint().server.trees["model"])
    apart = [float((models[0][n] - models[1][n]).abs().max()) for n in models[0]]
    assert 0 < max(apart) < 1


@pytest.mark.slow
def test_a_decision_over_sites_trains_no_finished_way_again(tmp_path):
    keys = {"arms": ["nothing", "half", "all"], "seeds": [0], "algorithm": "fedper"}
    grid = LocalGrid(site_files(tmp_path), stop_after(trains=14))
    with refuses("got workers"):
        over_sites(tmp_path / "race", grid, workers=2, **keys)
    with pytest.raises(KeyboardInterrupt):
        over_sites(tmp_path / "race", grid, **keys)
    grid = LocalGrid(site_files(tmp_path))
    choice = over_sites(tmp_path / "race", grid, **keys)
    assert grid.asked.count("train") == 18  # the last three ways have no round
    ways = {"fedavg", "local", "head_local", "half", "linear_fedavg", "base_rate"}
    assert ways == set(choice.table["way"])
    path = tmp_path / "race" / "arms" / "head_local-0"
    again = LocalGrid(site_files(tmp_path))
    repeated = over_sites(tmp_path / "race", again, **keys)
    assert not {"train", "evaluate", "query.begin"} & set(again.asked)
    assert repeated.table.equals(choice.table)
    plan = LayerPlan.load(tmp_path / "race" / "plans" / "head_local.json")
    plan = plan.with_shared(plan.shared, detail={})  # without fine-tuning
    at_home(tmp_path, tmp_path / "home", algorithm="fedper", plan=plan)
    assert_same(path, tmp_path / "home")


def images(folder):
    """Write pictures of each ward, and of all together. Return where those are."""
    draw, arrays = np.random.default_rng(0), {"client": np.repeat(WARDS, 30)}
    arrays["x"] = draw.integers(256, size=(90, 6, 6), dtype=np.uint8)
    arrays["y"] = draw.integers(2, size=90)
    for k, ward in enumerate(WARDS):
        part = slice(30 * k, 30 * (k + 1))
        np.savez(folder / f"{ward}.npz", x=arrays["x"][part], y=arrays["y"][part])
    np.savez(folder / "all.npz", **arrays)
    return str(folder / "all.npz")


def texts(folder):
    """Write texts of each ward, and of all together with their words. Return where those are."""
    draw, how = np.random.default_rng(0), {"orient": "records", "lines": True}
    words = draw.choice(["ill", "well", "x"], (90, 5))
    table = pd.DataFrame({"text": map(" ".join, words)})
    table = table.assign(label=draw.integers(2, size=90), client=np.repeat(WARDS, 30))
    table.to_json(folder / "all.jsonl", **how)
    for ward, part in table.groupby("client"):
        part.to_json(folder / f"{ward}.jsonl", **how)
    vocabulary = fl.load(str(folder / "all.jsonl")).words
    (folder / "words").write_text("\n".join(vocabulary))
    return str(folder / "all.jsonl")


@pytest.mark.parametrize(
    ("written", "more"), [(images, ""), (texts, 'vocabulary = "words"')]
)
def test_other_samples_have_the_bits_of_one_process(tmp_path, written, more):
    whole = written(tmp_path)
    end = whole.rpartition(".")[2]
    files = [tmp_path / f"{ward}.toml" for ward in WARDS]
    for ward, file in zip(WARDS, files, strict=True):
        file.write_text(f'name = "{ward}"\npath = "{ward}.{end}"\n{more}\n')
    keys = {"model": None} if written is texts else {}
    keys |= {"algorithm": "fedper", "lr": 0.001}
    if written is images:  # no measurement of a plan is lost
        keys |= {"plan": "auto", "client_dropout": 0.5}
    over_sites(tmp_path / "run", LocalGrid(files), **keys)
    at_home(tmp_path, tmp_path / "home", dataset=whole, **keys)
    assert_same(tmp_path / "run", tmp_path / "home")


@pytest.mark.slow
def test_simulated_nodes_are_the_clients_of_one_table(tmp_path):
    site_files(tmp_path)
    tables = [pd.read_csv(tmp_path / f"{w}.csv").assign(client=w) for w in WARDS]
    pd.concat(tables).to_csv(tmp_path / "all.csv", index=False)
    file = tmp_path / "all.toml"
    file.write_text('name = "all"\npath = "all.csv"\n[columns]\nscale = "none"\n')
    grid = LocalGrid([file] * 3)
    grid.simulated = True
    over_sites(tmp_path / "run", grid, algorithm="fedper")
    at_home(tmp_path, tmp_path / "home", algorithm="fedper")
    assert_same(tmp_path / "run", tmp_path / "home")
    assert {entry.name for entry in (tmp_path / "all-states").iterdir()} == set("012")
    grid.files[4] = file
    with refuses("sites must be at most 3"):
        over_sites(tmp_path / "more", grid, sites=4)


@pytest.mark.parametrize("algorithm", ["apfl", "per_fedavg"])
def test_models_that_are_computed_or_tuned_at_sites_are_those_of_one_process(
    tmp_path, algorithm
):
    """A mixture of two models, and one that the site keeps after its step, for the scores."""
    files = site_files(tmp_path)
    over_sites(tmp_path / "run", LocalGrid(files), algorithm=algorithm, rounds=1)
    at_home(tmp_path, tmp_path / "home", algorithm=algorithm, rounds=1)
    assert_same(tmp_path / "run", tmp_path / "home")


def test_an_error_of_a_federation_is_one_line_without_a_traceback(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "tracebacklimit", 7, raising=False)
    context = SimpleNamespace(
        run_config={server_app.RUN_KEY: str(tmp_path / "no.toml")}
    )
    with refuses(r"^fedlayers: .*no\.toml", RunError) as caught:
        server_app.main(LocalGrid([]), context)
    assert caught.value.__cause__ is None
    assert sys.tracebacklimit == 0
