"""Studies and runs take data and models from Python, with the bits of the same data under a name."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import fedlayers as fl
from fl_core.data.registry import DATASETS
from fl_core.models.building import MODELS
from tests.conftest import refuses
from tests.fedlayers import command

CONFIG = fl.RunConfig(
    algorithm="fedper",
    rounds=2,
    epochs=10,
    batch_size=8,
    lr=0.1,
    eval_every=1,
    optimizer="sgd",
)


FRAME = pd.DataFrame({"j": [1.0, 2.0], "k": [3.0, 4.0]})


def samples(seed=0):
    """Three clients' samples with a learnable rule."""
    draw = np.random.default_rng(seed)
    pairs = {}
    for name, count in (("north", 40), ("south", 30), ("west", 36)):
        x = draw.standard_normal((count, 6)).astype(np.float32)
        pairs[name] = x, (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    return pairs


def network(shape, n_classes):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.ReLU(), nn.Linear(5, n_classes))


class Pairs(Dataset):
    """Samples one by one."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, k):
        return torch.from_numpy(self.x[k]), int(self.y[k])


@pytest.fixture
def named(own_members):
    """A configuration that names the same samples and network."""
    own_members(DATASETS)
    own_members(MODELS)
    fl.dataset(
        "of_this_test", clients=None, partition="natural", patience=10, batch_size=32
    )(samples)
    fl.model(network)
    return CONFIG.with_keys(dataset="of_this_test", model="network")


def rows(frame):
    return frame.drop(columns=["run"])


@pytest.mark.slow
def test_every_study_gives_the_rows_of_the_same_data_under_a_name(named, tmp_path):
    from_python = {"data": samples(), "model": network}
    calls = {
        "choose": lambda config, **more: (
            fl.choose(config, tmp_path / f"choose{len(more)}", seeds=(0,), **more).table
        ),
        "compare": lambda config, **more: rows(
            fl.compare(
                config,
                ["local", "fedavg"],
                (0,),
                tmp_path / f"compare{len(more)}",
                progress=False,
                **more,
            ).frame
        ),
        "tune": lambda config, **more: (
            fl.tune(
                config.with_keys(lr=None),
                ["fedavg"],
                {"lr": "0.01,0.1"},
                tmp_path / f"tune{len(more)}",
                **more,
            ).table
        ),
        "run": lambda config, **more: rows(
            fl.run(config, progress=False, **more).to_frame()
        ),
    }
    for name, call in calls.items():
        pd.testing.assert_frame_equal(
            call(named), call(CONFIG, **from_python), obj=name
        )


def test_each_seed_splits_own_data_anew():
    firsts = [
        fl.assemble(CONFIG.with_keys(seed=seed), data=samples()).data.clients[0].train.x
        for seed in (0, 1, 0)
    ]
    assert torch.equal(firsts[0], firsts[2])
    assert not torch.equal(firsts[0], firsts[1])


def test_a_factory_that_no_worker_can_import_is_refused(tmp_path):
    local = {
        "data": samples(),
        "model": lambda shape, n_classes: network(shape, n_classes),
    }
    with refuses("sendable"):
        fl.choose(
            CONFIG,
            tmp_path / "race",
            backend="local:2",
            **local,
        )


@pytest.mark.parametrize(
    "kind",
    [
        Pairs,
        lambda x, y: TensorDataset(torch.from_numpy(x), torch.from_numpy(y)),
        lambda x, y: DataLoader(
            Pairs(x, y), batch_size=7, shuffle=True, drop_last=True
        ),
        lambda x, y: Subset(
            Pairs(np.concatenate([x, x]), np.concatenate([y, y])), range(len(y))
        ),
        lambda x, y: DataLoader(
            Pairs(np.concatenate([x, x]), np.concatenate([y, y])),
            batch_sampler=BatchSampler(SubsetRandomSampler(range(len(y))), 7, False),
        ),
        lambda x, y: DataLoader(
            Pairs(2 * x, y),
            collate_fn=lambda found: [
                torch.stack([x for x, _ in found]) / 2,
                torch.tensor([y for _, y in found]),
            ],
        ),
    ],
)
def test_samples_may_come_in_any_usual_form(kind):
    in_form = {name: kind(*pair) for name, pair in samples().items()}
    expected = fl.assemble(CONFIG, data=samples()).data.digest
    assert fl.assemble(CONFIG, data=in_form).data.digest == expected


@pytest.mark.parametrize(
    ("data", "changes", "said"),
    [
        ("heart.csv", {}, "dataset="),
        ({"a": 3}, {}, "client 'a' must have a pair"),
        (pd.DataFrame({"age": [], "label": []}), {}, "must have rows"),
        (samples(), {"client_column": "ward"}, "client_column"),
        ((np.ma.masked_less(FRAME.to_numpy(), 2), [0, 1]), {}, "got nan.*impute"),
        (FRAME.assign(j=1j, label=[0, 1]), {}, "numbers or words; got complex"),
        (
            DataLoader([0, 1], sampler=RandomSampler([0])),
            {},
            "got RandomSampler",
        ),
        (DataLoader([0, 1], collate_fn=list), {}, "one batch"),
    ],
)
def test_what_is_no_data_is_refused_in_one_line(data, changes, said):
    with refuses(said) as caught:
        fl.run(CONFIG, data=data, progress=False, **changes)
    assert "\n" not in str(caught.value)


def test_a_folder_goes_on_with_its_own_data_alone(tmp_path):
    arguments = {"seeds": 1}
    from_python = {"data": samples(), "model": network}
    first = fl.choose(CONFIG, tmp_path, **from_python, **arguments)
    again = fl.choose(CONFIG, tmp_path, **from_python, **arguments)
    pd.testing.assert_frame_equal(first.table, again.table)
    with refuses("other data"):
        fl.choose(CONFIG, tmp_path, data=samples(1), model=network, **arguments)
    run = tmp_path / "arms" / "fedavg-0"
    assert fl.resume(run, **from_python, progress=False).done == 2
    with refuses("other samples"):
        fl.resume(run, data=samples(1), model=network, progress=False)
    with refuses("data="):
        fl.resume(run, model=network, progress=False)
    models, _ = fl.load_models(run, which="personal", **from_python)
    with refuses("data=VALUE must be left out for a choice"):
        fl.export(tmp_path, tmp_path / "all", data=FRAME)
    path = tmp_path / "north.safetensors"
    fl.export(run, path, client="north", **from_python)
    new = samples()["north"][0]
    with torch.no_grad():
        expected = models["north"](torch.from_numpy(new))
    assert torch.equal(fl.predict(path, new, model=network).outputs, expected)


def test_the_result_of_own_data_is_measured_as_it_was_read(tmp_path):
    """Keys that read a frame, or deal samples, are the run's; so is a loss from Python."""
    wards = {"ward": ["a", "b"] * 30, "age": range(60), "sick": [0, 0, 1] * 20}
    named = {"client_column": "ward", "label_column": "sick"}
    pool, dealt = samples()["north"], {"clients": 2, "partition": "dirichlet"}
    for k, (data, keys) in enumerate(((pd.DataFrame(wards), named), (pool, dealt))):
        from_python = {"data": data, "model": network, "loss": nn.CrossEntropyLoss()}
        result = fl.run(CONFIG.with_keys(**keys), tmp_path / str(k), **from_python)
        for of_run in (result, fl.resume(tmp_path / str(k), **from_python)):
            assert not fl.diagnose(of_run, metrics="weight_magnitude").frame.empty


def test_choose_without_a_folder_is_in_one_named_by_its_question(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fl.choose(CONFIG, data=samples(), seeds=1)
    assert len([*(tmp_path / "out").glob("choose-*/choice.json")]) == 1


def test_check_of_what_no_setting_reads_fails_in_one_line(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("age,label\n50,0\n60,1,7\n")
    with pytest.raises(SystemExit) as left:
        command(f"check {path}")
    (error,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert "line 3" in error


@pytest.mark.parametrize(
    ("made", "option", "faults"),
    [
        ({"label": [k / 9 for k in range(40)]}, "--task regression", 2),
        ({"v": [f"{k % 7},{k % 9 + 100}" for k in range(40)]}, "", 2),
        ({"v": ["5", "", "7", "8"] * 10}, "--impute median", 2),
    ],
)
def test_check_writes_a_script_and_names_the_command_that_follows(
    tmp_path, capsys, monkeypatch, made, option, faults
):
    """Each fault has one option or one line of pandas, which the script has."""
    monkeypatch.chdir(tmp_path)
    table = {"label": [0, 1] * 20, **made, "at": [f"{k % 9}:30" for k in range(40)]}
    pd.DataFrame(table).to_csv("t.csv", index=False)
    with pytest.raises(SystemExit) as left:
        command("check t.csv --write tidy.py")
    printed = capsys.readouterr().out
    assert f"{faults} fault" in printed
    assert left.value.code == 1
    exec(compile(Path("tidy.py").read_text(), "tidy.py", "exec"), {})
    (works,) = re.findall(r"Then try: fedlayers (.*)", printed)
    assert works.startswith("choose tidy.csv")
    assert option in works
    command(f"check {works.removeprefix('choose ')}")
    assert "This works" in capsys.readouterr().out.splitlines()[1]
    with pytest.raises(SystemExit):
        command("check t.csv --write t.csv")
    assert "--out" not in capsys.readouterr().err


def test_a_removed_flag_answers_with_its_new_form(capsys):
    for line, message in (
        ("run --separator ;", "--csv sep=VALUE"),
        ("check t.csv --word-columns dose", "--categories NAME"),
        ("run --keep-ids", "--columns NAME"),
        ("run --date-columns=day", "pd.to_datetime(table[NAME], format=FORMAT"),
    ):
        with pytest.raises(SystemExit) as left:
            command(line)
        assert left.value.code == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert message in error


def test_pairs_without_names_are_refused_with_the_call_that_names_them():
    pair = samples()["north"]
    with refuses("Name the clients"):
        fl.run(data=[pair, pair], rounds=1)


def test_check_refuses_clients_that_are_alike_and_says_if_they_are_made_up(
    tmp_path, capsys
):
    path = tmp_path / "t.csv"
    names = ["North", "north ", "east", "East", "NORTH"]
    lines = [f"{names[k % 5]},{k % 2},{k % 7}" for k in range(70)]
    path.write_text("\n".join(["ward,label,age", *lines]) + "\n")
    with pytest.raises(SystemExit):
        command(f"check {path}")
    assert "'North'" in capsys.readouterr().out
    command(f"check {path} --exclude-columns ward")
    assert "--client-column NAME" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command(f"check {path} --client-column ward")
    printed = capsys.readouterr().out
    assert all(repr(name) in printed for name in names)
