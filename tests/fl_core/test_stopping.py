"""The stopping rule: when a run stops, which round counts, and that neither depends on interruptions."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
from hypothesis import example, given, strategies as st

from fl_core import tree
from fl_core.algorithms.base import Round
from fl_core.config import RunConfig
from fl_core.errors import CorruptError
from fl_core.records import store
from fl_core.records.stopping import BEST_ROUND, STATE, StoppingRule, best_round
from fl_core.rounds.clients import ClientReply
from fl_core.rounds.engine import EVALUATE, FINISH
from fl_core.rounds.recorder import Recorder
from fl_core.rounds.steering import EarlyStopping, rule_of
from fl_core.run import exported_model, runner
from tests.conftest import CONFIG, TOY, every_other, refuses
from tests.faults.injected import forge

NAN = math.nan
LONG = CONFIG.with_keys(
    rounds=40,
    patience=3,
    lr=0.3,
    model="mlp",
    model_options={"sizes": (8, 6)},
    checkpoint_every=9,
)
FINETUNES = {"algorithm": "fedbabu", "options": {"finetune_epochs": 1}, "lr": 0.1}
CASES = {
    "fedavg": {},
    "ditto, half the clients": {"algorithm": "ditto", "participation": 0.5},
    "fedbabu": FINETUNES,
    "fedper, every second round": {"algorithm": "fedper", "eval_every": 2},
}


def comparable(rows):
    return [{**row, "run": ""} for row in rows]


def by_brute_force(scores, patience):
    """The evaluation after which training stops, or the last, and the best one so far; both from 1."""
    best = None
    for end in range(1, len(scores) + 1):
        means = {k: sum(scores[k - 3 : k]) / 3 for k in range(3, end + 1)}
        if end < 3:
            means = {end: sum(scores[:end]) / end}
        means = {k: mean for k, mean in means.items() if mean == mean}
        best = min((k for k in means if means[k] == max(means.values())), default=None)
        if end - (best or 0) >= patience:
            return end, best
    return len(scores), best


@given(
    st.lists(
        st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, NAN]), min_size=1, max_size=20
    ),
    st.integers(1, 5),
    st.integers(1, 7),
)
@example([0.5, 0.5, 0.5, 0.5, 0.5, 0.5], 2, 1)  # of equal ones the first
@example([0.25, NAN, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25], 3, 5)
@example([NAN, NAN, NAN], 2, 1)
def test_it_stops_where_brute_force_does(scores, patience, every):
    rule = StoppingRule(patience, ("macro_f1",))
    for count, score in enumerate(scores, 1):
        rule.add(
            count * every, {"global": {"macro_f1": score}, "local": {"macro_f1": 0.5}}
        )
        again = StoppingRule.from_json(
            json.loads(json.dumps(rule.to_json(), allow_nan=False))
        )
        assert (again.best, again.stops, again.to_json()) == (
            rule.best,
            rule.stops,
            rule.to_json(),
        )
        if rule.stops:
            break
    stop, best = by_brute_force(scores, patience)
    assert count == stop
    assert rule.best.get("global") == (best and best * every)
    assert rule.stops == (stop - (best or 0) >= patience)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=4, max_size=12)
)
def test_of_two_scores_the_least_sum_of_ranks_is_best(
    pairs,
):
    f1, loss = (
        [float(score) for score in column] for column in zip(*pairs, strict=True)
    )
    smooth = [
        [sum(values[k - 3 : k]) / 3 for k in range(3, len(values) + 1)]
        for values in (f1, loss)
    ]

    def rank(values, of, end):
        seen = values[: end + 1]
        below, level = (
            sum(v < values[of] for v in seen),
            sum(v == values[of] for v in seen),
        )
        return below + level / 2

    best = 0
    for newest in range(1, len(smooth[0])):
        sums = {
            k: rank([-v for v in smooth[0]], k, newest) + rank(smooth[1], k, newest)
            for k in (best, newest)
        }
        if (sums[newest], -smooth[0][newest]) < (sums[best], -smooth[0][best]):
            best = newest
    rounds = range(1, len(f1) + 1)
    scores = {"macro_f1": f1, "loss": loss}
    chosen = best_round(
        {name: dict(zip(rounds, v, strict=True)) for name, v in scores.items()}
    )
    assert chosen == best + 3


@pytest.fixture(scope="module", name="stopped")
def _stopped(
    tmp_path_factory,
):
    folder, engines = tmp_path_factory.mktemp("stopped"), {}
    for case, changes in CASES.items():
        out = folder / str(len(engines)) / "run"
        engines[case] = (
            out,
            runner.run(LONG.with_keys(**changes), out, data=TOY),
        )
    return engines


@pytest.mark.parametrize("case", every_other(CASES))
def test_a_run_stops_with_the_rows_of_the_whole_run_and_keeps_its_best_models(
    case, stopped
):
    path, engine = stopped[case]
    assert rule_of(engine).stops
    assert 4 < engine.done < 40
    run = store.Run(path)
    frame = run.rows()[1]
    whole = runner.run(
        LONG.with_keys(**CASES[case], patience=None, rounds=engine.done),
        data=TOY,
    )
    of_rule = frame["metric"] == BEST_ROUND
    costs = []
    for rows in (frame, whole.listener(Recorder).frame()):
        finish_rows = rows[rows["variant"] == FINISH]
        is_last = finish_rows["round"] == engine.done
        assert set(finish_rows["metric"][~is_last]) <= {"bytes_evaluation"}
        costs.append(finish_rows[is_last][["client", "metric", "value"]].to_numpy())
    assert costs[0].tolist() == costs[1].tolist()
    if case == "fedbabu":
        assert {"bytes_down", "flops", "steps", "train_loss"} == set(costs[0][:, 1])
    if (
        case != "fedbabu"
    ):  # which without the rule fine-tunes after the last round alone
        written = (path / "rows.jsonl").read_text().splitlines()[1:]
        lines = [json.loads(line) for line in written]
        assert comparable(
            [row for row in lines if row["metric"] != BEST_ROUND]
        ) == comparable(whole.listener(Recorder).rows)
        assert {n: tree.digest(t) for n, t in engine.server.trees.items()} == {
            n: tree.digest(t) for n, t in whole.server.trees.items()
        }
    best = frame[of_rule].set_index("model")["value"].astype(int).to_dict()
    assert best == rule_of(engine).best
    assert "macro_f1" in frame.loc[of_rule, "estimator"].iloc[0]
    assert set(best.values()) < set(run.rounds)
    assert f"{engine.done} of" in "\n".join(run.verify())


def test_exports_and_starts_are_of_the_best_round_unless_another_is_asked_for(
    tmp_path,
):
    config = RunConfig(
        dataset="digits",
        max_samples=300,
        clients=3,
        partition="iid",
        rounds=30,
        eval_every=1,
    )
    config = config.with_keys(model="mlp", lr=0.1, patience=2)
    engine = runner.run(config, tmp_path / "run")
    assert rule_of(engine) is not None
    best = rule_of(engine).best["global"]
    assert best < engine.done < 30
    for round_name, done in ((None, best), ("best", best), ("last", engine.done)):
        exported = exported_model.export(
            tmp_path / "run",
            tmp_path / f"{round_name}.safetensors",
            which="global",
            round=round_name,
        )
        assert exported.about["run"]["round"] == done
    task = runner.assemble(config.with_keys(init=str(tmp_path / "run")))
    trained = store.Run(tmp_path / "run").checkpoint(best).server.trees["model"]
    assert tree.digest(tree.state_dict(task.model)) == tree.digest(trained)


def test_a_best_checkpoint_that_is_gone_or_a_rule_that_was_edited_is_refused(
    stopped, tmp_path
):
    path, engine = stopped["fedavg"]
    shutil.copytree(path, tmp_path / "gone")
    run = store.Run(tmp_path / "gone")
    run.checkpoint_path(rule_of(engine).best["global"]).unlink()
    with refuses("is missing", CorruptError):
        run.verify()
    shutil.copytree(path, tmp_path / "edited")
    run = store.Run(tmp_path / "edited")
    for wrong in (
        {"patience": -1},
        {"metrics": ["beauty"]},
        {"models": {"global": {"macro_f1": {"1": "x"}}}},
    ):
        path = run.checkpoint_path(engine.done)
        sound = path.read_bytes()

        def change(found, wrong=wrong):
            found["states"]["server"]["meta"][STATE] |= wrong

        forge(path, change)
        with refuses("is damaged", CorruptError):
            runner.resume(tmp_path / "edited", data=TOY)
        path.write_bytes(sound)


def test_without_scores_there_is_no_rule_and_no_best_round():
    assert best_round({}) is None
    with refuses("must have a score"):
        StoppingRule(3, ())


def test_a_client_without_the_score_is_named_before_any_round():
    stopping = EarlyStopping(StoppingRule(3, ("c_index", "loss")), None)
    client = SimpleNamespace(name="a", train=range(9))
    engine = SimpleNamespace(data=SimpleNamespace(clients=[client]))
    scores = {"validation": {"c_index": NAN, "loss": 0.5}}
    reply = ClientReply(0, scores={"global": scores})
    with refuses(r"patience.*'a'.*C-index"):
        stopping.on_reply(engine, Round(0, EVALUATE), reply)
    stopping.on_reply(engine, Round(1, EVALUATE), reply)
