"""The study of mixtures and of one run in place of four: what is run, and the limits of stitching."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from figures import items, packing, recipe
from figures.decision import finished, finished_runs, finished_ways, mix, mix_page, stitch
from figures.decision.finished import STUDY
from figures.decision.finished_ways import ARMS
from fl_core import runner, tree
from fl_core.config import RunConfig
from fl_core.plan import LayerPlan

pytestmark = pytest.mark.filterwarnings("ignore:client")
CONFIG = RunConfig(
    dataset="digits", model="mlp", model_options={"sizes": (8, 8)}, algorithm="fedper", keep_optimizer=True,
    clients=3, max_samples=150, rounds=4, eval_every=1, checkpoint_every=1, lr=1e-2, batch_size=16, patience=15,
)  # fmt: skip


@pytest.fixture(scope="module")
def task():
    return runner.assemble(CONFIG)


@pytest.fixture(scope="module")
def ditto(task):
    return finished_runs.to_stop(task, replace(CONFIG, algorithm="ditto"), None)


def test_every_federation_of_the_finished_study_is_run_with_stored_rates():
    assert set(mix.ITEM.runs) == set(STUDY)
    assert tuple(mix.ITEM.runs)[-len(mix.SLOW) :] == mix.SLOW
    rates = mix.tuned_rates("chile", 1)
    assert set(rates) == set(ARMS)
    assert set(rates.values()) <= set(STUDY["chile"].rates)


def test_a_run_is_trained_and_stored_and_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.setitem(STUDY, "tiny", finished.Finished("digits", "digits", "dealt", False, CONFIG, (1e-2,), seeds=1))
    monkeypatch.setattr(mix, "tuned_rates", lambda run, seed: dict.fromkeys(ARMS, 1e-2))
    item = replace(mix.ITEM, runs={"tiny": CONFIG}, seeds=1)
    recipe.train(item, tmp_path / "rows", progress=False)
    before = recipe.rows_file(tmp_path / "rows", "tiny", 0).stat().st_mtime_ns
    recipe.train(item, tmp_path / "rows", progress=False)
    assert recipe.rows_file(tmp_path / "rows", "tiny", 0).stat().st_mtime_ns == before
    _, frame = item.read(tmp_path / "rows")
    weights = frame[(frame["metric"] == mix.WEIGHT) & (frame["estimator"] == mix.FITTED)]["value"]
    assert weights.sum() == pytest.approx(1)
    loss = frame[(frame["metric"] == "loss") & (frame["split"] == "validation")]
    mean = {
        key: np.average(part["value"], weights=part["n_train"]) for key, part in loss.groupby(["estimator", "variant"])
    }
    assert mean[mix.MIXTURE, mix.FITTED] <= min(mean[mix.ARM, arm] for arm in ARMS) + 1e-6
    assert mean[mix.MIXTURE, mix.FITTED] <= mean[mix.MIXTURE, mix.EQUAL] + 1e-6
    assert all(mean[mix.SCALED, arm] <= mean[mix.ARM, arm] + 1e-6 for arm in ARMS)
    f1 = frame[(frame["metric"] == "macro_f1") & (frame["split"] == "validation") & (frame["estimator"] == mix.STITCH)]
    f1 = {key: np.average(part["value"], weights=part["n_train"]) for key, part in f1.groupby("variant")}
    assert f1[mix.STITCHED] >= f1["ditto"]  # nothing of the server's is one of the depths
    assert set(f1) == {"ditto", mix.STITCHED, mix.CONTINUED}


def test_stitched_at_either_end_are_ditto_s_two_models(task, ditto):
    nothing = LayerPlan(task.layers, ())
    none = stitch.stitched(nothing.with_first(0), ditto.server, ditto.models)
    every = stitch.stitched(nothing.with_first(len(nothing.trainable)), ditto.server, ditto.models)
    for client, own in ditto.models.items():
        assert all(torch.equal(none[client][name], own[name]) for name in own)
        assert all(torch.equal(every[client][name], ditto.server[name]) for name in own)


def test_the_last_rounds_start_from_the_stitched_models(task, ditto, tmp_path):
    plan = LayerPlan(task.layers, ()).with_first(1)
    stitch.save_heads(tmp_path / "heads", ditto.models)
    options = {"algorithm": stitch.NAME, "options": {"heads": str(tmp_path / "heads")}, "patience": 0, "rounds": 1}
    begun = runner.assemble(replace(CONFIG, **options), loaded=task.data, plan=plan, start=ditto.server)
    algorithm = begun.algorithm(plan)
    server = algorithm.server_state(tree.state_dict(begun.model))
    for client, model in stitch.stitched(plan, ditto.server, ditto.models).items():
        found = algorithm.models(server, algorithm.client_state(tree.state_dict(begun.model), client), None)["personal"]
        assert found.keys() == model.keys()
        assert all(torch.equal(found[name], model[name]) for name in model)


def test_the_last_rounds_are_fedper_s_when_the_heads_are_the_start_s(task, tmp_path):
    plan = LayerPlan(task.layers, ()).with_first(1)
    stitch.save_heads(tmp_path / "heads", dict.fromkeys(range(3), tree.state_dict(task.model)))
    options = {"algorithm": stitch.NAME, "options": {"heads": str(tmp_path / "heads")}}
    fedper, continued = (
        finished_runs.to_stop(task, config, plan, tree.state_dict(task.model))
        for config in (CONFIG, replace(CONFIG, **options))
    )
    assert fedper.curve == continued.curve
    for client, model in fedper.models.items():
        assert all(torch.equal(model[name], continued.models[client][name]) for name in model)


def test_a_temperature_sharpens_models_that_are_always_right(task):
    federation = mix.Federation(task)
    sharp = []
    for part in federation.samples["validation"]:
        sharp.append(np.log(np.full((len(part), 10), 0.05) + 0.5 * np.eye(10)[part.y.numpy()]))
    logs = {"validation": sharp, "held_out": sharp}
    assert mix.temperature(federation, logs) < 0.07  # always right, so as sure as may be
    flat = {"validation": [np.zeros_like(log) - np.log(10) for log in sharp]}
    _, loss = federation.validation(flat)
    assert loss == pytest.approx(-np.log(10))


# --- the analysis ----------------------------------------------------------------------------------------------


def test_log_losses_of_stored_logs_are_the_stored_losses():
    folder = items.ROWS / finished_runs.NAME
    rows = pd.concat([frame for _, frame in packing.read(folder / "chile.rows.parquet")])
    (part,) = finished_ways.parts_of(rows)
    found = mix_page.log_losses(part, pd.read_parquet(folder / "chile.logs.parquet"))
    own = rows[(rows["metric"] == "loss") & (rows["split"] == "held_out") & (rows["estimator"] == "cuts")]
    for (seed, cut, run), each in own.groupby(["seed", "variant", "run"]):
        rate = STUDY["chile"].rates.index(float(run.partition("@")[2]))
        stored = np.average(each["value"].astype(float), weights=each["n_train"].astype(float))
        assert found[seed, part.cut(cut), rate] == pytest.approx(stored, abs=0.005)


def test_a_random_cut_loses_all_of_a_random_cut_s_loss_and_way_minus_itself_is_nothing():
    seeds = [
        mix_page.Seed(name, 0, dict.fromkeys(WAYS, lost), dict.fromkeys(WAYS, lost), (True,))
        for name, lost in (("chile", 0.1), ("smoking", 0.3))
    ]
    found = mix_page.table(seeds, mix_page.LOSS, draws=50).set_index("way")
    assert found.loc[mix_page.RANDOM, "share"] == pytest.approx(1)
    assert found.loc[mix_page.MIXED, "regret"] == pytest.approx(0.2)
    assert mix_page.gain(seeds, mix_page.F1, mix_page.MIXED, mix_page.PICK).value == pytest.approx(0)


WAYS = (*mix_page.KEPT, mix_page.PICK, "pick, scaled", mix_page.RANDOM)
