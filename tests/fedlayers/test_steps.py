"""The steps of a decision: rates, own epochs, whether clients differ, the two ends, and what fails on the way."""

import json
import re

import numpy as np
import pytest

import fedlayers as fl
from diagnostics.tuning.differ import compared
from fedlayers.backends.local import no_progress
from fedlayers.studies import race
from fedlayers.studies.choose import choose
from fedlayers.studies.harmless import TEST, VALIDATION
from fedlayers.studies.hint import planned
from fedlayers.studies.race import finished
from fedlayers.studies.report import write_page
from fl_core.config import RunConfig, resolve, with_own
from fl_core.errors import RunError
from fl_core.plan import LayerPlan
from fl_core.records.store import Run
from fl_core.run import runner
from tests.conftest import refuses

CONFIG = RunConfig(dataset="heart", rounds=4, eval_every=1, epochs=1)
ARMS = ("nothing", "head_local")
QUICK = {"baselines": False, "progress": False}


def test_rates_are_tried_with_all_layers_shared_without_it_among_the_arms(tmp_path):
    few = CONFIG.with_keys(rounds=1)
    choice = choose(few, tmp_path, arms=ARMS, tune_rates=2, baselines=False)
    assert choice.measured.runs == 4
    assert set(choice.table["arm"]) == set(ARMS)
    page = write_page(choice, tmp_path).read_text()
    assert re.search(r"amsgrad\), lr ([0-9.]+)", page)[1] == f"{choice.rates.lr:g}"


def test_rates_are_tuned_for_own_data_by_default(tmp_path):
    draw, few = np.random.default_rng(0), RunConfig(rounds=1)
    wards = {
        ward: (draw.normal(size=(40, 5)), np.arange(40) % 2)
        for ward in ("north", "south")
    }
    own = {"data": wards, "model": "mlp"}
    for name, config, asked, rates in (
        ("own", few, own, [0.001, 0.003, 0.01, 0.03]),
        ("given", few.with_keys(lr=0.1), own, []),
        ("named", CONFIG.with_keys(rounds=1), {}, []),
    ):
        config, data = with_own(config, **asked)
        given = config, data, tmp_path / name, ARMS
        race = planned(*given, None, None, False, no_progress)
        assert [job.config.training.lr for job in race.probes] == rates


def wards(kind, n=480, clients=4):
    """Return clients of two classes; with ``coded`` every second one has them exchanged."""
    draw, found = np.random.default_rng(1), {}
    for k in range(clients):
        x = draw.normal(size=(n, 6)).astype(np.float32)
        y = (x[:, 0] + x[:, 1] > 0).astype(int)
        found[f"ward {k}"] = (x, 1 - y if kind == "coded" and k % 2 else y)
    return found


@pytest.fixture(scope="module", params=["coded", "alike"])
def decided(request, tmp_path_factory):
    out, told = tmp_path_factory.mktemp("decided") / "out", list[str]()
    config = RunConfig(rounds=20, model="mlp", eval_every=1, patience=0)
    data = wards(request.param)
    how = {"progress": told.append, "baselines": False, "data": data}
    return request.param, choose(config, out, **how), told, out, data


def test_two_rates_train_on_and_the_ends_follow_where_clients_differ(decided):
    kind, choice, told, out, _ = decided
    lengths = {path.name: Run(path).rounds[-1] for path in (out / "arms").iterdir()}
    rates = [done for name, done in lengths.items() if name.startswith("all-lr")]
    assert sorted(rates) == [2, 2, 20, 20]
    ends = {name for name in lengths if "local" in name}
    assert (len(ends) == 2) == (kind == "coded")
    answers = {
        "coded": "Clients differ (p = ",
        "alike": "Clients are not shown to differ",
    }
    assert any(line.startswith(answers[kind]) for line in told)
    suffix = f"-lr{choice.rates.lr:g}-0"
    others = {name for name in lengths if not name.startswith("all")}
    assert all(name.endswith(suffix) for name in others)
    if kind == "alike":
        assert choice.measured.full_runs <= 3.9
        assert choice.cost.n_bytes == choice.measured.n_bytes
        return
    spent = choice.measured.full_runs  # 6.3, and a run for groups
    assert spent == pytest.approx(choice.cost.full_runs)
    assert spent <= 8.5
    assert choice.winner.name != "all" or choice.winner.epochs
    groups = choice.arms[-1]
    assert (groups.name, groups.options) == ("groups", {"groups": [1, 2, 1, 2]})
    assert "ward 0, ward 2; ward 1, ward 3." in choice.text()


def test_a_verdict_on_clients_is_that_of_the_metric(decided):
    """The candidates of a decision's own epochs give the leads of :func:`compared`, which trains them again."""
    choice = decided[1]
    bench, runs = choice.benches[0], {one.arm: one for one in choice.runs}
    both = [
        finished(runs[arm].job, bench, (race.THIRD, 1.0), True)
        for arm in ("all", "nothing")
    ]
    first, second = (bench.tuner(one.job, bench.load(one.job.path)) for one in both)
    splits = [(one.train, one.validation) for one in bench.task.data.clients]
    same = ("loss", "training", "seed", "round", "starts")
    given = {name: getattr(first, name) for name in same}
    model = bench.task.model
    plain = compared(second.starts, **given, model=model, clients=splits, samples=None)
    found = race.difference(*both, bench)
    assert found.leads == pytest.approx(plain.leads, rel=1e-2)
    assert found.shown == plain.shown


def test_own_epochs_are_those_of_a_search_by_hand_and_leave_the_run_alone(decided):
    """The least calibrated validation loss of none, 1, 2 and 4 epochs; the stored models are the scored ones."""
    _, choice, _, out, _ = decided
    bench = choice.benches[0]
    one = choice.recommended[0]
    before = bench.of_models("run", bench.load(one.job.path).models)
    factors = (race.THIRD, 1.0) if one.arm == "all" else (race.THIRD,)
    again = finished(one.job, bench, factors)
    assert (again.epochs, again.rate) == (one.epochs, one.rate)
    assert again.price == 4 * len(factors)
    assert bench.worth(one.model) >= bench.worth(before)
    folder = out.parent / "models"
    fl.export(out, folder)
    for client in choice.task.data.clients:
        name = client.name.replace(" ", "_")
        about = json.loads((folder / f"{name}.safetensors.json").read_text())
        exported = fl.ExportedModel(folder / f"{name}.safetensors", about)
        found = exported.model()(client.test.x).detach().double()
        kept = one.model.outputs[TEST][client.name]
        np.testing.assert_allclose(found, kept, atol=1e-5)
        assert about["run"]["own_epochs"] == one.epochs


def test_the_fallback_takes_training_alone_where_validation_says_so(decided):
    _, choice, _, out, _ = decided
    if choice.fallback is None:
        with refuses("no fallback"):
            fl.export(out, out.parent / "none", fallback=True)
        return
    bench, alone = choice.benches[0], choice.fallback
    table = bench.by_client(alone.model, VALIDATION)
    assert set(alone.clients) < set(table.index)
    made = fl.export(out, out.parent / "fallback", fallback=True)
    assert set(made) == set(table.index)


def test_a_plan_carries_its_own_epochs_into_a_run_and_an_export(decided, tmp_path):
    _, choice, _, out, data = decided
    if choice.winner.name == "groups":
        assert not (out / "plan.json").exists()
        return
    plan = LayerPlan.load(out / "plan.json")
    assert plan.own_epochs == (choice.winner.epochs, choice.winner.rate)
    assert plan.why.detail["lr"] == choice.rates.lr
    detail = {"own_epochs": 2, "own_rate": 0.003}
    own = plan.with_shared(plan.shared, detail=detail)
    assert own.digest != plan.with_shared(plan.shared, detail={}).digest
    assert own.to("names")["own_epochs"] == 2
    with pytest.warns(UserWarning, match="own epochs"):
        own.to("flower")
    config = RunConfig(rounds=2, model="mlp", lr=0.01, patience=0, algorithm="fedper")
    ends = {}
    for name, each in (("own", own), ("none", own.with_shared(own.shared, detail={}))):
        engine = runner.run(
            config, tmp_path / name, data=data, plan=each, progress=False
        )
        ends[name] = engine.models(0)["personal"]
    layer = next(iter(ends["own"]))
    assert not np.allclose(ends["own"][layer], ends["none"][layer])
    made = fl.export(
        tmp_path / "own", tmp_path / "m.safetensors", client="ward 0", data=data
    )
    np.testing.assert_array_equal(made.model().state_dict()[layer], ends["own"][layer])
    for wrong in (1.5, -1, 10**9, True):
        with refuses("own_epochs"):
            _ = plan.with_shared(plan.shared, detail={"own_epochs": wrong}).own_epochs


LR = float(resolve(CONFIG).training.lr)


def diverging(monkeypatch, wrong):
    """Let the runs diverge whose name has one of some texts, and return the names of all that trained."""
    trained, train = [], race.train

    def some(jobs, *others):
        trained.extend(job.name for job in jobs)
        bad = [job for job in jobs if any(text in job.name for text in wrong)]
        failed = train([job for job in jobs if job not in bad], *others)
        return failed | {job.name: "it diverged" for job in bad}

    monkeypatch.setattr(race, "train", some)
    return trained


def test_an_arm_that_diverges_trains_once_at_a_lower_rate(tmp_path, monkeypatch):
    trained = diverging(monkeypatch, ["nothing-0"])
    choice = choose(CONFIG, tmp_path, arms=("nothing", "all"), **QUICK)
    lower = f"nothing-lr{0.3 * LR:.3g}-0"
    assert trained == ["nothing-0", "all-0", lower]
    assert set(choice.table["arm"]) == {"nothing", "all"}
    trained.clear()
    diverging(monkeypatch, ["nothing"])
    choice = choose(CONFIG, tmp_path / "b", arms=("nothing", "all"), **QUICK)
    assert choice.inference.unfinished == ("nothing",)
    assert f"{lower} failed" in choice.text()


def test_if_all_rates_diverge_one_lower_is_tried_and_then_one_line_says_so(
    tmp_path, monkeypatch
):
    trained = diverging(monkeypatch, [f"lr{LR:g}-", f"lr{3 * LR:g}-"])
    choice = choose(CONFIG, tmp_path, arms=("nothing", "all"), tune_rates=2, **QUICK)
    assert choice.rates.lr == pytest.approx(0.3 * LR)
    assert f"all-lr{0.3 * LR:.3g}-0" in trained
    diverging(monkeypatch, ["all"])
    with refuses("failed at every rate", RunError) as error:
        choose(CONFIG, tmp_path / "b", tune_rates=2, **QUICK)
    assert len(str(error.value).splitlines()) == 1


def test_bad_federations_are_one_line_before_training(tmp_path):
    x, y = np.zeros((40, 3), np.float32), np.arange(40) % 2
    with refuses("at least 2 clients"):
        choose(RunConfig(rounds=1), tmp_path, data={"a": (x, y)}, model="mlp", **QUICK)
    assert not any(tmp_path.iterdir())
