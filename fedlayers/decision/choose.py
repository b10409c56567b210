"""Choose what to federate: a few ways are trained, validation samples choose one, and test samples judge it once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from fedlayers.backends.local import Backend, no_progress
from fedlayers.decision.answer import Answer
from fedlayers.decision.files import store_models
from fedlayers.decision.jobs import Tell, open_backend, study_folder, task_kind
from fedlayers.decision.price import bytes_a_round, measured_cost
from fedlayers.decision.training import (
    Question,
    Trained,
    describe_rates,
    differing,
    foreseen,
    make_question,
    train_ways,
)
from fedlayers.decision.verdict import actions_of, answer
from fedlayers.decision.ways import LINEAR, Ways
from fl_core import __version__, tree
from fl_core.config import RunConfig, with_own
from fl_core.keys import RunKeys
from fl_core.plan import LayerPlan
from fl_core.progress import say
from fl_core.rows import check_score
from fl_core.storage import write_json


def choose(
    config: RunConfig | None = None,
    out: Path | str | None = None,
    *,
    data: Any = None,
    model: Any = None,
    arms: Ways = None,
    seeds: Sequence[int] | int | None = None,
    score: str = "",
    tune_rates: int | None = None,
    baselines: bool = True,
    dry_run: bool = False,
    backend: Backend | str = "",
    progress: bool | Tell = True,
    live: bool = False,
    **keys: Unpack[RunKeys],
) -> Answer:
    """Train the network together, alone and with a local head, simple models too, and recommend a way.

    The recommended way has the best mean validation score over the seeds. FedAvg with
    fine-tuning is the default, which the best way must beat by half a standard error
    (:func:`fedlayers.decision.table.recommended`). The score is the calibrated
    validation loss (:func:`fl_core.training.evaluate.fit`), or the named ``score``. A
    way that is not better than the base rate by 1.64 standard errors is no candidate.
    Test samples are the same in all seeds, and do not influence the choice.

    After a stop, the same call resumes. Below ``out`` are ``arms/`` (run directories), ``models/``, ``plans/``,
    ``choice.json``, and ``plan.json`` if the recommended way has a plan.

    Args:
        config: the runs' configuration. If its algorithm uses a plan, it trains the
            ways that are named by their shared layers; otherwise FedPer does.
        out: the output folder. The default is a folder below ``out`` whose name is a digest of the arguments.
        data, model, keys: as for :func:`fedlayers.run <fedlayers.runs.run>`.
        arms: further ways; see :func:`~fedlayers.decision.ways.ways_of`.
        seeds: a number of seeds, or a list. The default is three, or one where a run is long.
        score: one of the task's scores (:data:`fl_core.rows.TABLE`). It selects in place of the loss.
        tune_rates: number of learning rates to try with all layers shared, 2 to 5, or 0. The default is 4 for your own
            data here, else 0: a named dataset has its own rate. A rate in the configuration is kept.
        baselines: try the simple models too (:mod:`fedlayers.decision.simple`), and FedAvg of a linear model.
        dry_run: train nothing, and print the runs and their estimated cost, as
            ``progress`` says. The answer then names no way, and has the cost in
            ``rates``.
        backend: where runs are trained: ``local:N``, ``ray`` or ``ray:HOST:PORT`` (:mod:`fedlayers.backends.local`);
            default this process, with the configuration's number of ``workers``.
        progress: print the estimated cost, and show the runs that are done. A function receives each step as a line.
        live: draw the runs' main score in the notebook's cell, again at most once a second.

    Raises:
        UsageError: an unknown name or an invalid value, or runs of another configuration below ``out``, before any
            training.
        RunError: every way failed.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = RunConfig(dataset="heart", rounds=4, eval_every=1)
    >>> answer = choose(config, folder.name, seeds=1, baselines=False, progress=False)
    >>> answer.seeds, sorted(answer.table["way"])
    ((0,), ['base_rate', 'fedavg', 'head_local', 'local'])
    """
    if out is not None:
        out = study_folder(out)
    config, objects = with_own(config, data, model, **keys)
    tell = progress if callable(progress) else no_progress
    if score:
        config = config.with_keys(
            monitor=check_score(score, task_kind(config, objects))
        )
    begin_time = time.monotonic()
    question = make_question(
        config, objects, out, arms, seeds, tune_rates, baselines, tell
    )
    display_options = {"parallel": True, "progress": progress is True, "live": live}
    with open_backend(backend, config.execution.workers, **display_options) as place:
        line = foreseen(question, place.side_by_side)
        if progress is True:
            say(line)
        else:
            tell(line)
        if dry_run:
            return unanswered(question, line)
        trained_ways = train_ways(question, place, tell)
        workers = place.side_by_side
    chosen_answer = replace(
        answered(trained_ways), cost=cost_of(trained_ways, workers, begin_time)
    )
    if not chosen_answer.way:
        chosen_answer = replace(chosen_answer, next="")
    return store(chosen_answer, question.out)


def unanswered(question: Question, line: str) -> Answer:
    """Return the answer of a dry run. It has the estimated cost in ``rates``, and no recommendation.

    Args:
        question: the setting of the decision.
        line: the estimated cost in words.
    """
    return Answer(
        "",
        "",
        (),
        question.score,
        "",
        2,
        question.losses[question.seeds[0]].kind,
        question.seeds,
        not_tried=question.not_tried,
        rates=line,
    )


def answered(trained: Trained) -> Answer:
    """Score the trained ways, and return the answer with its plan and tests, without its cost."""
    question = trained.question
    table = trained.table()
    losses = table if question.score == "loss" else trained.table("loss")
    plans = {
        way.name: _plan_of(trained, way.name)
        for way in question.ways
        if way.own_network and way.name in trained.runs
    }
    tuning = {}
    for name, by_seed in trained.runs.items():
        finished_run = by_seed[question.seeds[0]]
        tuning[name] = (
            trained.tuning[name].epochs,
            finished_run.rate(trained.tuning[name]),
        )
    return answer(
        table,
        losses,
        actions_of(question.ways),
        plans,
        task=question.losses[question.seeds[0]].kind,
        tuning=tuning,
        differ=differing(trained),
        alike=_groups(trained),
        rates=describe_rates(trained),
        not_tried={**question.not_tried, **trained.failed},
        next=f"fedlayers export {question.out} --out {question.out}_models",
        trained=trained,
    )


def _plan_of(trained: Trained, name: str) -> LayerPlan | None:
    """Return a way's plan with its fine-tuning and evidence; None without a plan."""
    question = trained.question
    plan = question.way(name).plan
    if plan is None:
        return None
    finished_run, tuning = trained.runs[name][question.seeds[0]], trained.tuning[name]
    detail: dict[str, Any] = {"lr": finished_run.lr}
    if tuning.epochs:
        detail |= {
            "fine_tuning": tuning.epochs,
            "fine_tuning_rate": finished_run.rate(tuning),
        }
    return plan.with_shared(
        plan.shared,
        rule="choose",
        metric=question.task.config.federation.monitor or "calibrated loss",
        detail=detail,
        data=question.task.data.digest,
        checkpoint=tree.digest(tree.state_dict(question.task.model)),
        seed=question.seeds[0],
        version=__version__,
    )


def _groups(trained: Trained) -> tuple[tuple[str, ...], ...]:
    """Return the groups of clients that stand out; empty without any."""
    alike = trained.alike
    if alike is None or not alike.significant:
        return ()
    by_group: dict[int, list[str]] = {}
    for client, group in alike.groups.items():
        by_group.setdefault(group, []).append(client)
    return tuple(map(tuple, by_group.values()))


def cost_of(trained: Trained, workers: int, began: float) -> dict[str, float]:
    """Return the cost of a decision by name.

    Keys are ``bytes_a_round`` (with FedAvg, mean over all clients), ``rounds``,
    ``full_runs`` (the rounds and fine-tuning as a number of full runs), ``bytes`` (of
    all clients in all rounds) and ``seconds`` (of this call). Runs of the linear model
    count in the seconds alone.

    Args:
        trained: the trained ways.
        workers: the number of runs that trained side by side.
        began: the time at which the decision began, of ``time.monotonic``.
    """
    question = trained.question
    epochs = trained.fine_tuning_epochs()
    jobs = [job for job in trained.jobs if job.arm != LINEAR]
    cost = measured_cost(question.task, jobs, workers, epochs)
    clients = len(question.task.data.clients)
    return {
        "bytes_a_round": bytes_a_round(question.task) / clients,
        "rounds": cost.rounds,
        "full_runs": round(cost.full_runs, 2),
        "bytes": cost.n_bytes,
        "seconds": round(time.monotonic() - began, 1),
    }


def store(answer: Answer, out: Path) -> Answer:
    """Write the files of an answer below ``out``: models, plans, and last ``choice.json``. Return the answer.

    Models and ``plan.json`` of an earlier answer are removed. Over sites no models are
    written, since they stay there.
    """
    trained = answer.trained
    if trained is not None:
        if not trained.question.over_sites:
            store_models(out, answer, trained)
        for name in trained.runs:
            if (plan := _plan_of(trained, name)) is not None:
                (out / "plans").mkdir(parents=True, exist_ok=True)
                folder_name = trained.question.way(name).folder
                plan.save(out / "plans" / f"{folder_name}.json")
    save_plan(answer.plan, out)
    write_json(out / "choice.json", answer.to_json())
    return answer


def save_plan(plan: LayerPlan | None, out: Path) -> None:
    """Write ``plan.json``. Without a plan, remove that of an earlier decision."""
    if plan is None:
        (out / "plan.json").unlink(missing_ok=True)
    else:
        plan.save(out / "plan.json")
