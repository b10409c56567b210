"""A decision from end to end: what is trained, what is stored, and that it goes on after a stop."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedlayers as fl
from fedlayers.backends.local import no_progress
from fedlayers.cli import app as cli
from fedlayers.decision import training
from fedlayers.decision.choose import choose
from fedlayers.decision.losses import SeedLosses, Tuning
from fedlayers.decision.price import round_steps
from fedlayers.decision.report import write_page
from fedlayers.decision.table import TEST, VALIDATION
from fedlayers.decision.training import make_question, tunings
from fl_core.config import RunConfig, resolve, with_own
from fl_core.data.federated import Split
from fl_core.errors import RunError
from fl_core.plan import LayerPlan
from fl_core.records.store import Run
from fl_core.rounds.clients import ClientRunner
from fl_core.run import runner
from fl_core.training.evaluate import predict
from tests.conftest import refuses, with_slow

CONFIG = RunConfig(dataset="heart", rounds=4, eval_every=1)
QUICK = {"baselines": False, "progress": False}
DEFAULT = {"base_rate", "fedavg", "local", "head_local"}


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    out, lines = tmp_path_factory.mktemp("decided") / "out", list[str]()
    return out, choose(CONFIG, out, seeds=2, progress=lines.append), lines


def test_all_ways_are_in_one_table(decided):
    _, answer, _ = decided
    simple = {"linear_local", "boosting_local", "linear_fedavg"}
    assert set(answer.table["way"]) == DEFAULT | simple
    assert answer.table["way"].iloc[0] == (answer.way or "base_rate")
    assert answer.seeds == (0, 1)


def test_test_samples_are_those_of_the_first_seed_and_others_are_dealt_again(decided):
    _, answer, _ = decided
    first, second = (answer.trained.question.tasks[seed].data for seed in (0, 1))
    for one, other in zip(first.clients, second.clients, strict=True):
        assert one.test.x.equal(other.test.x)
        assert not one.validation.x.equal(other.validation.x)
    table = answer.trained.table()
    assert table.overlap[TEST] == 1
    assert 0 < table.overlap[VALIDATION] < 0.6


def test_each_loss_is_that_of_the_stored_run_after_its_fine_tuning(decided):
    out, answer, _ = decided
    trained = answer.trained
    for name in ("fedavg", "local"):
        losses = trained.question.losses[0]
        plain = losses.of_models(name, losses.load(out / "arms" / f"{name}-0").models)
        scores = losses.scores(plain, VALIDATION)["loss"]
        assert losses.worth(plain) == pytest.approx(-scores, abs=1e-12)
        amount = trained.tuning[name]
        if amount == Tuning():
            loss = trained.table().parts[0, name, VALIDATION].mean
            assert loss == pytest.approx(scores)
        one = trained.runs[name][0]
        means = {
            tried: np.mean([
                trained.question.losses[seed].worth(run.tuned[tried])
                for seed, run in trained.runs[name].items()
            ])
            for tried in one.tuned
        }  # fmt: skip
        assert means[amount] == max(means.values())
        assert len(one.tuned) == len(tunings(trained.question.way(name)))


def test_what_is_stored_is_the_answer(decided):
    out, answer, lines = decided
    assert lines[0].startswith("Training 4 ways with 2 seeds: about 8 runs of 4 rounds")
    stored = json.loads((out / "choice.json").read_text())
    assert stored == json.loads(json.dumps(answer.to_json()))
    assert (out / "plan.json").exists() == (answer.plan is not None)
    names = {path.stem for path in (out / "plans").iterdir()}
    assert names == {"fedavg", "local", "head_local"}
    plan = LayerPlan.load(out / "plans" / "head_local.json")
    assert plan.why.rule == "choose"
    assert answer.cost["full_runs"] > 0


def test_the_exported_models_are_the_recommended_ones(decided, tmp_path):
    out, answer, _ = decided
    fl.export(out, tmp_path / "models")
    seed = answer.seeds[0]
    predictors = {
        name: one for at, name, one in answer.trained.predictors() if at == seed
    }
    one = predictors[answer.way]
    for client in answer.trained.question.task.data.clients:
        path = tmp_path / "models" / f"{client.name}.safetensors"
        about = json.loads(Path(f"{path}.json").read_text())
        outputs = fl.ExportedModel(path, about).model()(client.test.x).detach()
        scored_outputs = one.outputs[TEST][client.name]
        np.testing.assert_allclose(outputs.double(), scored_outputs, atol=1e-5)


def test_a_report_opens_with_the_headline(decided):
    out, answer, _ = decided
    page = write_page(answer, out, "the command").read_text()
    assert answer.headline().split(". ")[0] in page
    assert page.index("What to do next") < page.index("How sure the decision is")
    assert answer.next in page


def test_the_same_call_goes_on_and_another_is_refused(tmp_path, monkeypatch):
    answer = choose(CONFIG, tmp_path, seeds=2, **QUICK)
    monkeypatch.setattr(runner, "run", None)  # everything is there
    again = choose(CONFIG, tmp_path, seeds=2, **QUICK)
    pd.testing.assert_frame_equal(again.table, answer.table)
    fewer = choose(CONFIG, tmp_path, seeds=1, **QUICK)
    assert fewer.seeds == (0,)
    with refuses(r"lr=0"):
        choose(CONFIG.with_keys(lr=0.3), tmp_path, seeds=2, **QUICK)


def test_a_dry_run_says_the_price_and_writes_nothing(tmp_path):
    lines = []
    answer = choose(CONFIG, tmp_path, dry_run=True, progress=lines.append)
    assert not answer.lines
    assert re.fullmatch(r"Training 4 ways with 3 seeds: about 12 runs .*", lines[0])
    assert " ".join(answer.text().split()) == lines[0]
    assert lines[0] in repr(answer)


def test_a_quiet_dry_run_prints_the_price(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    how = ("--rounds", "1", "--no-baselines", "--out", "chosen")
    cli.main(["choose", "--dataset", "heart", *how, "--dry-run", "--quiet"])
    assert capsys.readouterr().out.startswith("Training ")
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_further_ways_are_added(tmp_path):
    arms = ("half", "nothing", "ditto")
    answer = choose(CONFIG.with_keys(rounds=1), tmp_path, arms=arms, seeds=1, **QUICK)
    assert set(answer.table["way"]) == DEFAULT | {"half", "ditto"}


def test_three_seeds_are_the_default_unless_a_run_is_long(tmp_path, monkeypatch):
    arguments = (*with_own(CONFIG), tmp_path, None, None, None, False, no_progress)
    assert make_question(*arguments).seeds == (0, 1, 2)
    monkeypatch.setattr(training, "THREE_SEEDS", 1)
    assert make_question(*arguments).seeds == (0,)


def test_rates_are_tuned_for_own_data_by_default(tmp_path):
    draw, few = np.random.default_rng(0), RunConfig(rounds=1)
    wards = {
        ward: (draw.normal(size=(40, 5)), np.arange(40) % 2)
        for ward in ("north", "south")
    }
    from_python = {"data": wards, "model": "mlp"}
    for name, config, objects, rates in (
        ("own", few, from_python, (0.001, 0.003, 0.01, 0.03)),
        ("given", few.with_keys(lr=0.1), from_python, ()),
        ("named", CONFIG, {}, ()),
    ):
        config, data = with_own(config, **objects)
        arguments = config, data, tmp_path / name, None, 1, None, True, no_progress
        assert make_question(*arguments).rates == rates


LR = float(resolve(CONFIG).training.lr)


def diverging(monkeypatch, wrong):
    """Let the runs diverge whose name has one of some texts, and return the names of all that trained."""
    names, train = [], training.train

    def some(jobs, *others):
        names.extend(job.name for job in jobs)
        bad = [job for job in jobs if any(text in job.name for text in wrong)]
        failed = train([job for job in jobs if job not in bad], *others)
        return failed | {job.name: "it diverged" for job in bad}

    monkeypatch.setattr(training, "train", some)
    return names


def test_a_way_that_diverges_trains_once_at_a_lower_rate(tmp_path, monkeypatch):
    names = diverging(monkeypatch, ["local-0"])
    answer = choose(CONFIG, tmp_path, seeds=1, **QUICK)
    lower = f"local-lr{0.3 * LR:.3g}-0"
    assert lower in names
    assert set(answer.table["way"]) == DEFAULT
    diverging(monkeypatch, ["local-"])
    answer = choose(CONFIG, tmp_path / "b", seeds=1, **QUICK)
    assert "local" not in set(answer.table["way"])
    assert "it diverged" in answer.not_tried[lower]


@pytest.mark.slow
def test_if_all_rates_diverge_a_lower_one_is_tried_and_then_one_line_says_so(
    tmp_path, monkeypatch
):
    names = diverging(monkeypatch, [f"lr{LR:g}-", f"lr{3 * LR:g}-"])
    answer = choose(CONFIG, tmp_path, seeds=1, tune_rates=2, **QUICK)
    assert f"fedavg-lr{0.3 * LR:.3g}-0" in names
    assert f"Used: {0.3 * LR:g}" in answer.rates
    diverging(monkeypatch, ["fedavg"])
    with refuses("failed at every rate", RunError) as error:
        choose(CONFIG, tmp_path / "b", seeds=1, tune_rates=2, **QUICK)
    assert len(str(error.value).splitlines()) == 1


def test_every_way_that_fails_is_one_line(tmp_path):
    config = CONFIG.with_keys(lr=1e30, optimizer="sgd")
    with refuses("every way", RunError):
        choose(config, tmp_path, seeds=1, **QUICK)


def rows(n, draw):
    x = draw.normal(size=(n, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(int)


def test_bad_federations_are_one_line_before_training(tmp_path):
    draw = np.random.default_rng(0)
    one = {"a": rows(40, draw)}
    with refuses("at least 2 clients"):
        choose(RunConfig(rounds=1), tmp_path, data=one, model="mlp", **QUICK)
    two = {"a": rows(40, draw), "b": rows(40, draw)}
    data = fl.from_clients(two)
    empty = Split(data.clients[0].train.x[:0], data.clients[0].train.y[:0])
    clients = [replace(client, validation=empty) for client in data.clients]
    none = replace(data, clients=clients)
    with refuses("validation samples"):
        choose(RunConfig(rounds=1), tmp_path, data=none, model="mlp", **QUICK)
    assert not any(tmp_path.iterdir())


def test_clients_of_one_sample_are_decided_together(tmp_path):
    draw = np.random.default_rng(0)
    data = {f"c{k:02}": rows(4, draw) for k in range(12)}
    config = RunConfig(rounds=2, lr=0.01)
    answer = choose(config, tmp_path, data=data, model="mlp", seeds=1, **QUICK)
    assert set(answer.table["way"]) == DEFAULT
    assert answer.text()


def test_groups_of_patients_stay_together(tmp_path):
    draw = np.random.default_rng(0)
    x, y = rows(240, draw)
    frame = pd.DataFrame(x, columns=list("abcd")).assign(
        label=y, ward=["n", "s"] * 120, patient=np.arange(240) // 4
    )
    keys = {"client_column": "ward", "label_column": "label", "lr": 0.01}
    config = RunConfig(rounds=2, group_column="patient", **keys)
    answer = choose(config, tmp_path, data=frame, seeds=2, progress=False)
    tests = [
        {int(k) for c in task.data.clients for k in c.test.groups}
        for task in answer.trained.question.tasks.values()
    ]
    validation_groups = [
        {int(k) for c in task.data.clients for k in c.validation.groups}
        for task in answer.trained.question.tasks.values()
    ]
    assert tests[0] == tests[1]
    assert not tests[0] & (validation_groups[0] | validation_groups[1])
    assert "linear_pooled" in set(answer.table["way"])
    assert answer.way != "linear_pooled"


@pytest.mark.parametrize(
    "task", with_slow(["regression", "multilabel", "survival"], ["survival"])
)
def test_other_tasks_are_decided_by_their_loss(task, tmp_path):
    draw, data = np.random.default_rng(0), {}
    for name in ("north", "south"):
        x = draw.normal(size=(60, 4)).astype(np.float32)
        y = {
            "regression": x[:, 0] + x[:, 1],
            "multilabel": (x[:, :2] > 0).astype(np.float32),
            "survival": np.stack([np.exp(x[:, 0]), np.arange(60) % 2], axis=1),
        }[task]
        data[name] = (x, y)
    config = RunConfig(task=task, rounds=3, epochs=4, lr=0.01)
    answer = choose(config, tmp_path, data=data, model="mlp", seeds=1, progress=False)
    assert {"fedavg", "local", "linear_local"} <= set(answer.table["way"])
    if task != "multilabel":
        assert "log loss" not in answer.text()


def test_adapters_are_decided_with_their_price(tmp_path):
    """The factors A alone are shared in place of a local head, and the price counts what is sent."""
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    data = {name: rows(60, draw) for name in ("north", "south")}
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    config = RunConfig(rounds=2, lr=0.01, adapt="lora:r=2,targets=0+2")
    answer = choose(config, tmp_path, data=data, model=model, seeds=1, **QUICK)
    assert set(answer.table["way"]) == {"base_rate", "fedavg", "local", "lora_A"}
    plan = LayerPlan.load(tmp_path / "plans" / "lora_A.json")
    assert {name.rpartition(".")[2] for name in plan.shared} == {"lora_A"}
    sent = 4 * (2 * (4 + 8) + 2 * (8 + 8) + 8 * 2 + 2)  # factors A and B, and the head
    assert answer.cost["bytes_a_round"] == 2 * sent
    assert answer.cost["rounds"] == 6


@pytest.mark.slow
def test_a_named_score_alone_selects(tmp_path):
    config = RunConfig(dataset="heart", rounds=4, eval_every=1, patience=2)
    score = "balanced_accuracy"
    how = {"tune_rates": 2, "seeds": 1, **QUICK}
    answer = choose(config, tmp_path, score=score, **how)
    runs = sorted((tmp_path / "arms").iterdir())
    assert {Run(path).stopping_rule().metrics for path in runs} == {(score,)}
    assert answer.score == score
    assert "Test balanced accuracy %" in answer.headline() or not answer.way
    table = answer.trained.table()
    losses = SeedLosses(answer.trained.question.task)
    base = losses.scores(losses.base_rate, VALIDATION)[score]
    assert table.parts[0, "base_rate", VALIDATION].mean == pytest.approx(base)
    # models that are tested for differences come from the last round, which validation samples did not choose
    clients = answer.trained.question.task.data.clients
    for way in ("fedavg", "local"):
        finished = answer.trained.runs[way][0]
        assert finished.last.round == max(Run(finished.job.path).rounds)
        outputs = [
            predict(finished.last.models[model_client.name], client.validation.x)
            for model_client, client in itertools.product(clients, clients)
        ]
        torch.testing.assert_close(finished.cross[Tuning()], torch.cat(outputs))


@pytest.mark.slow
def test_files_of_an_earlier_decision_do_not_stay(tmp_path):
    answer = choose(CONFIG.with_keys(rounds=1), tmp_path, seeds=1, progress=False)
    (tmp_path / "plan.json").write_text("of an earlier one")
    again = choose(CONFIG.with_keys(rounds=1), tmp_path, seeds=1, progress=False)
    assert again.way == answer.way
    if again.plan is None:
        assert not (tmp_path / "plan.json").exists()
    else:
        assert LayerPlan.load(tmp_path / "plan.json").digest == again.plan.digest


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "ditto", "fedrep", "pfedme", "playerfl", "fedcac"]
)
def test_steps_that_are_foreseen_are_those_that_are_made(algorithm, monkeypatch):
    from diagnostics.measure import instruments

    run, steps_made = ClientRunner.run, []

    def counted(self, job):
        result = run(self, job)
        work = result.work.items()
        steps_made.append(sum(value for name, value in work if name.endswith("/steps")))
        return result

    monkeypatch.setattr(ClientRunner, "run", counted)
    config = CONFIG.with_keys(algorithm=algorithm, rounds=1, epochs=3, stack="off")
    foreseen = round_steps(runner.assemble(config))
    runner.run(config, instruments=instruments, progress=False)
    assert foreseen == sum(steps_made)


@pytest.mark.slow
def test_one_model_a_group_is_a_way_where_groups_stand_out(tmp_path):
    config = RunConfig(dataset="known_clusters", rounds=12, eval_every=6)
    answer = choose(config, tmp_path, seeds=1, arms=["groups"], **QUICK)
    names = [f"client {k}" for k in range(1, 7)]
    assert answer.alike == (tuple(names[:3]), tuple(names[3:]))
    assert answer.line("groups").value < answer.line("fedavg").value
    trained = answer.trained.runs["groups"][0].loaded.models
    states = [trained[name].state_dict() for name in (names[0], names[5])]
    assert not all(states[0][key].equal(states[1][key]) for key in states[0])


def test_groups_that_do_not_stand_out_are_not_trained(tmp_path):
    config = RunConfig(dataset="known_neither", rounds=2, eval_every=1)
    answer = choose(config, tmp_path, seeds=1, arms=["groups"], **QUICK)
    assert "groups" not in set(answer.table["way"])
    assert "no groups of clients are shown" in answer.not_tried["groups"]
