"""Tuning: what is tried, that it is judged on validation samples alone, goes on after a stop, and is taken over."""

import json

import numpy as np
import pandas as pd
import pytest

import fedlayers as fl
from fedlayers.decision.losses import SeedLosses
from fedlayers.decision.search import Tuned, points, spaces
from fl_core import statistics
from fl_core.config import RunConfig
from fl_core.errors import RunError
from tests.conftest import refuses

pytestmark = pytest.mark.filterwarnings("ignore:client")
CONFIG = RunConfig(dataset="heart", rounds=4, eval_every=1)
OVER = {"lr": "1e-4..1e-1:log", "mu": "0.01,0.1,1"}


def test_algorithms_try_the_same_values_of_the_keys_that_they_share():
    searched = spaces({**OVER, "fedprox.max_grad_norm": "1,10"}, ["fedavg", "fedprox"])
    assert {name: list(space) for name, space in searched.items()} == {
        "fedavg": ["lr"],
        "fedprox": ["lr", "mu", "max_grad_norm"],
    }
    fedavg, fedprox = (points(space, 6, seed=0) for space in searched.values())
    assert [point["lr"] for point in fedavg] == [point["lr"] for point in fedprox]
    assert len({point["lr"] for point in fedavg}) == 6
    assert all(1e-4 <= point["lr"] <= 1e-1 for point in fedavg)
    assert points(searched["fedavg"], 6, seed=1) != fedavg


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out, lines = tmp_path_factory.mktemp("tune"), []
    with pytest.MonkeyPatch.context() as patch:
        part = SeedLosses.part

        def on_validation(self, one, split, score="loss"):
            assert split == "validation"
            return part(self, one, split, score)

        patch.setattr(SeedLosses, "part", on_validation)
        result = fl.tune(
            CONFIG,
            ["fedavg", "fedprox"],
            OVER,
            out,
            trials=2,
            seeds=[1000, 1001],
            tell=lines.append,
        )
    return out, result, lines


def test_a_trial_is_worth_its_models_validation_score_over_clients_and_seeds(done):
    out, result, _ = done
    for _, line in result.table.iterrows():
        values = []
        for seed in (1000, 1001):
            name = f"{line['algorithm']}-{line['trial']:03}-{seed}"
            _, frame = fl.Run(out / "trials" / name).rows()
            scored = frame.query(
                "split == 'validation' and metric == 'macro_f1' and model == 'global' and round == round.max()"
            )
            values.append(statistics.combine(scored["value"], scored["n_train"]))
        assert line["value"] == pytest.approx(sum(values) / 2, abs=1e-12)
    for _, part in result.table.groupby("algorithm"):
        assert part.loc[part["best"], "value"].tolist() == [part["value"].max()]


def test_what_is_fine_tuned_at_the_end_is_worth_its_fine_tuned_models_score(
    tmp_path,
):
    result = fl.tune(
        CONFIG, ["local_adaptation"], {"lr": [0.01, 0.1]}, tmp_path, trials=2
    )
    for _, line in result.table.iterrows():
        frame = fl.Run(
            tmp_path / "trials" / f"local_adaptation-{line['trial']:03}-1000"
        ).rows()[1]
        tuned = frame.query(
            "split == 'validation' and metric == 'macro_f1' and model == 'personal' and round == 4"
        )
        assert line["value"] == pytest.approx(
            statistics.combine(tuned["value"], tuned["n_train"]), abs=1e-12
        )


def test_the_budget_is_equal_and_its_cost_is_said_first(done):
    _, result, lines = done
    assert result.trials == {"fedavg": 2, "fedprox": 2}
    assert lines[0].startswith("8 runs, 32 rounds ")
    assert len(lines) == 1 + 4


def test_the_same_call_trains_nothing_again_and_more_trials_go_on(done):
    out, result, _ = done

    def stamps():
        files = (out / "trials").rglob("rows.jsonl*")
        return {path: path.stat().st_mtime_ns for path in files}

    before, both = stamps(), ["fedavg", "fedprox"]
    assert before
    again = fl.tune(CONFIG, both, OVER, out, trials=2, seeds=[1000, 1001])
    pd.testing.assert_frame_equal(again.table, result.table)
    again = Tuned.load(out / "tuned.json")
    assert again == result
    assert again.text() == result.text()
    more = fl.tune(CONFIG, both, OVER, out, trials=3, seeds=[1000])
    assert more.trials == {"fedavg": 3, "fedprox": 3}
    assert before.items() <= stamps().items()
    with refuses(r"fedavg-000-1000 .*lr="):
        fl.tune(CONFIG, ["fedavg"], {"lr": "0.1,0.2"}, out)
    result.save(out / "tuned.json")


def test_trials_that_fail_are_told_and_never_chosen(tmp_path):
    result = fl.tune(
        CONFIG, ["fedavg"], {"lr": [0.01, 1e30]}, tmp_path, trials=5, score="loss"
    )
    table = result.table.set_index("lr")
    assert (table["best"][0.01], table["failed"][0.01]) == (True, "")
    assert "fedavg, round 1" in table["failed"][1e30]
    assert pd.isna(table["value"][1e30])
    assert "1 of fedavg's" in result.text()
    with refuses(r"fedavg.*fedavg, round 1", RunError):
        fl.tune(CONFIG, ["fedavg"], {"lr": [1e30]}, tmp_path / "all", trials=5)
    assert (tmp_path / "all" / "trials.csv").is_file()


def test_a_trial_whose_outputs_are_not_finite_fails_alone(tmp_path, monkeypatch):
    """Outputs of numbers raise another error than those of classes."""
    load = SeedLosses.load

    def with_bad_outputs(self, path, *names):
        loaded = load(self, path, *names)
        if path.name.startswith("fedavg-000"):
            for model in loaded.models.values():
                next(model.parameters()).data.fill_(float("nan"))
        return loaded

    monkeypatch.setattr(SeedLosses, "load", with_bad_outputs)
    draw = np.random.default_rng(0)
    x = {name: draw.normal(size=(60, 2)).astype(np.float32) for name in "ab"}
    data = {name: (values, values.sum(1)) for name, values in x.items()}
    config, rates = RunConfig(rounds=1, task="regression"), {"lr": [0.01, 0.02]}
    result = fl.tune(config, ["fedavg"], rates, tmp_path, data=data, trials=2)
    assert result.table["best"].tolist() == [False, True]
    assert "finite" in result.table["failed"][0]


def test_of_losses_the_smallest_is_chosen(tmp_path):
    config = RunConfig(dataset="heart", rounds=3, eval_every=1)
    rates = {"lr": [1e-6, 1e-5, 1e-3]}
    result = fl.tune(config, ["local"], rates, tmp_path / "out", score="loss")
    assert result.settings == {"local": {"lr": 1e-3}}
    assert result.table["value"].idxmin() == result.table["best"].idxmax()


def test_a_comparison_takes_what_was_chosen(done, tmp_path):
    out, result, _ = done
    names = ["local", "fedavg", "fedprox"]
    how = {"tuned": out / "tuned.json", "progress": False}
    with pytest.warns(UserWarning, match="local not"):
        fl.compare(CONFIG, names, [0], tmp_path, **how)
    configs = {name: fl.Run(tmp_path / "runs" / f"{name}-0").config for name in names}
    for name, settings in result.settings.items():
        options = {key: value for key, value in settings.items() if key != "lr"}
        assert configs[name]["lr"] == settings["lr"]
        assert configs[name]["options"] == options
    assert configs["local"]["lr"] == 0.05


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"seeds": [7, 1000]}, "1000.*1002"),
        ({"algorithms": ["local", "ditto"]}, "fedavg, fedprox.*local, ditto"),
        ({"config": RunConfig(dataset="heart", lr=0.1)}, "lr of fedavg"),
        ({"options": {"fedprox": {"mu": 1.0}}}, "mu of fedprox"),
    ],
)
def test_comparisons_that_tuning_does_not_fit_are_refused(
    done, tmp_path, asked, message
):
    keys = {"config": CONFIG, "algorithms": ["fedavg", "fedprox"], "seeds": [0]}
    with refuses(message):
        fl.compare(**keys | asked, out=tmp_path / "c", tuned=done[1])
    assert not (tmp_path / "c").exists()


def test_another_dataset_is_noted(done):
    with pytest.warns(UserWarning, match="heart.*digits"):
        done[1].apply(RunConfig(dataset="digits"), ["fedavg"], [0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "fedlayers tune"),
        ("{}", "fedlayers tune"),
        (json.dumps({"format": "fedlayers.tuned/2"}), "newer fedlayers"),
    ],
)
def test_files_that_are_no_tuning_are_refused(tmp_path, text, message, monkeypatch):
    with refuses(r"tuned\.json"):
        Tuned.load(tmp_path / "tuned.json")
    (tmp_path / "tuned.json").write_text(text)
    for most, refusal in ((2**30, message), (1, "at most the 1 B")):
        monkeypatch.setattr("fl_core.storage.JSON_BYTES", most)
        with refuses(refusal):
            Tuned.load(tmp_path / "tuned.json")
