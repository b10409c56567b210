"""Compares algorithms over several seeds on the same federation and budget: scores, ranks and differences."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedlayers.backends.base import Backend
from fedlayers.backends.names import open_backend
from fedlayers.studies.baselines import BASELINES as NAIVE
from fedlayers.studies.baselines import baseline_rows
from fedlayers.studies.called import checked_call
from fedlayers.studies.training_job import TrainingJob, train
from fedlayers.studies.tuned import Tuned
from fl_core import rows, runner, statistics
from fl_core.algorithms import find
from fl_core.config import RunConfig, in_memory, resolved
from fl_core.data import Partition
from fl_core.errors import UsageError, check_distinct, check_known, listing
from fl_core.names import csv_bytes
from fl_core.plan import LayerPlan
from fl_core.plan_selection import Instruments
from fl_core.records import store, writing
from fl_core.restore import check_given
from fl_core.scores import REGRESSION, SCORES, SHOWN, TABLE, check_score, label_of, main_score, positive_in
from fl_core.stopping import WINDOW, best_round, weighted_mean
from fl_core.storage.files import write_atomically
from fl_core.training.losses import LOSSES

BASELINES = ("local", "fedavg")
_GAP = "\N{NO-BREAK SPACE}"  # so that a page does not wrap within a number
BEST = "@best_val"
"""The suffix of a model's name if it is scored at its best round on validation."""
MOMENTS = {
    False: "after the last round",
    True: f"at each model's best round on validation (main score, mean over clients and {WINDOW} evaluations)",
}
LEGEND = (
    "Test split {moment}; clients weighted by training samples; mean ± half the 95 % interval over seeds.\n"
    "fairness: variance of {score} over clients, lower is fairer. incentive: share of clients with {score} {better}\n"
    "both local's and fedavg's. rank: by {score}, mean over seeds, 1 is best."
)


@dataclass
class Comparison:
    """The result of a comparison.

    Attributes:
        frame: the rows of all runs.
        best: whether models are scored at their best round on validation and not at the last (:func:`headline`).
        training: the local training in words, per algorithm if they differ.
        score: the score by which algorithms are ranked, one of :data:`fl_core.scores.SCORES`; default macro-F1, for a
            regression R2.
        scores: one value per run and metric: the headline model on the test split, combined over clients by training
            samples (columns algorithm, seed, model, metric, value).
        table: one line per algorithm: each metric's mean and 95 % interval over seeds, then fairness, incentive and
            mean rank (by the score). Baselines (:mod:`fedlayers.studies.baselines`) have no rank.
        unranked: why there are no ranks; "" if there are.
        clients: the mean over seeds for each algorithm, client and metric.
        positive: the class of two whose AUROC and AUPRC are scored, as in the rows; also in the table.
        friedman: Friedman's test that the algorithms' scores differ, with seeds as blocks.

    Raises:
        UsageError: no finished run, or rows without the score.
    """

    frame: pd.DataFrame
    best: bool = False
    training: str = ""
    score: str = field(default="", kw_only=True)
    scores: pd.DataFrame = field(init=False)
    table: pd.DataFrame = field(init=False)
    clients: pd.DataFrame = field(init=False)
    friedman: statistics.FriedmanTest = field(init=False)
    unranked: str = field(default="", init=False)
    positive: str = field(default="", init=False)

    def __post_init__(self) -> None:
        final = headline(self.frame, best=self.best)
        if final.empty:
            raise UsageError("no test scores of a finished run in these rows")
        there = list(final["metric"].unique())
        self.score = check_known("score in these rows", self.score or main_score(there), there)
        self.positive = positive_in(final)
        means = final.groupby(["algorithm", "client", "metric"], sort=False)["value"].mean()
        self.clients = means.reset_index()
        keys = ["algorithm", "seed", "model", "metric"]
        self.scores = pd.DataFrame(
            [
                {**dict(zip(keys, key, strict=True)), "value": statistics.combine(part["value"], part["n_train"])}
                for key, part in final.groupby(keys, sort=False)
            ]
        )
        blocks = self._blocks(self.score).drop(index=list(NAIVE), errors="ignore")
        self.friedman = statistics.friedman(blocks)
        try:
            ranks = statistics.ranks(blocks, higher_is_better=SCORES[self.score])
        except UsageError as error:  # the other columns are still valid
            ranks, self.unranked = pd.Series(dtype=float), str(error)
        self.table = self._table(ranks)

    def _blocks(self, metric: str) -> pd.DataFrame:
        """Return a metric's scores as a table algorithms x seeds."""
        chosen = self.scores[self.scores["metric"] == metric]
        return chosen.pivot(index="algorithm", columns="seed", values="value").loc[chosen["algorithm"].unique()]

    def _table(self, ranks: pd.Series) -> pd.DataFrame:
        lines = []
        there = self.scores["metric"].unique()
        metrics = [name for name in dict.fromkeys((*_shown(there), *SCORES)) if name in there]
        for name, part in self.scores.groupby("algorithm", sort=False):
            line: dict[str, Any] = {"algorithm": name, "model": part["model"].iloc[0], "seeds": part["seed"].nunique()}
            for metric in metrics:
                values = part.loc[part["metric"] == metric, "value"]  # none in the runs of an earlier version
                mean, low, high = statistics.mean_interval(values) if len(values) else (np.nan,) * 3
                line |= {metric: mean, f"{metric}_low": low, f"{metric}_high": high}
            line["fairness"] = statistics.fairness(self._of(str(name), self.score))
            line["incentive"] = self._incentive(str(name))
            line["rank"] = ranks.get(name, np.nan)
            line |= {"positive": self.positive} if self.positive else {}
            lines.append(line)
        return pd.DataFrame(lines)

    def _of(self, algorithm: str, metric: str) -> pd.Series:
        chosen = (self.clients["algorithm"] == algorithm) & (self.clients["metric"] == metric)
        return self.clients[chosen].set_index("client")["value"]

    def _incentive(self, name: str) -> float:
        if name in BASELINES or not set(BASELINES) <= set(self.clients["algorithm"]):
            return float("nan")
        local, fedavg = (self._of(base, self.score) for base in BASELINES)
        return statistics.incentive(self._of(name, self.score), local, fedavg, SCORES[self.score])

    def differences(self, reference: str, metric: str = "") -> pd.DataFrame:
        """Return each other algorithm's score minus the reference's, paired by seed.

        The table has the mean, its 95 % interval and the number of seeds. The score is the comparison's own, or another
        ``metric``.

        Raises:
            UsageError: the reference is not in this comparison.
        """
        blocks = self._blocks(metric or self.score)
        check_known("algorithm of this comparison", reference, blocks.index)
        lines = []
        for name in blocks.index.drop(reference):
            paired = (blocks.loc[name] - blocks.loc[reference]).dropna()
            mean, low, high = statistics.mean_interval(paired)
            lines.append({"algorithm": name, "value": mean, "low": low, "high": high, "n": len(paired)})
        return pd.DataFrame(lines, columns=["algorithm", "value", "low", "high", "n"])

    @property
    def legend(self) -> str:
        """The meaning of the table's columns, the local training, the baselines, and why ranks are missing."""
        better = "above" if SCORES[self.score] else "below"
        columns = LEGEND.format(moment=MOMENTS[self.best], score=label_of(self.score, self.positive), better=better)
        trained = [f"local training: {self.training}."] if self.training else []
        naive = [f"{name}: {NAIVE[name].words}." for name in self.table["algorithm"] if name in NAIVE]
        unranked = [f"{self.unranked}."] if self.unranked else []
        return "\n".join([columns, *unranked, *trained, *naive])

    def text(self) -> str:
        """Return the table for a terminal, with the meaning of its columns."""
        return f"{display_name(self.table, self.score).to_string(index=False)}\n\n{self.legend}"


def _shown(there: Iterable[str]) -> tuple[str, ...]:
    """Return the scores to show, out of the available ones."""
    return SHOWN[TABLE[main_score(list(there))].task]


def display_name(table: pd.DataFrame, score: str = "") -> pd.DataFrame:
    """Format a comparison's table: shares in percent, intervals after the mean, and a further score if named."""
    shown = pd.DataFrame({"algorithm": table["algorithm"], "model": table["model"], "seeds": table["seeds"]})
    usual, positive = _shown(table.columns), str(next(iter(table.get("positive", ())), ""))
    for metric in usual if score in ("", *usual) else (score, *usual):
        scale, digits = (100, 1) if TABLE[metric].share else (1, 3)
        title = label_of(metric, positive) + f"{_GAP}%" * (scale == 100)
        spread = (table[f"{metric}_high"] - table[f"{metric}_low"]) / 2 * scale
        means = ["–" if np.isnan(m) else f"{m * scale:.{digits}f}" for m in table[metric]]
        shown[title] = [
            mean + (f"{_GAP}±{_GAP}{s:.{digits}f}" if np.isfinite(s) else "")
            for mean, s in zip(means, spread, strict=True)
        ]
    shown["fairness"] = ["–" if np.isnan(v) else f"{v:.1e}" for v in table["fairness"]]
    shown[f"incentive{_GAP}%"] = ["–" if np.isnan(v) else f"{100 * v:.0f}" for v in table["incentive"]]
    shown["rank"] = ["–" if np.isnan(v) else f"{v:.1f}" for v in table["rank"]]
    return shown


def headline(frame: pd.DataFrame, split: str = "test", best: bool = False) -> pd.DataFrame:
    """Return the scores of each run's main model after its last round: ``personal`` if there is one, else global.

    With ``best`` the scores are those of the model's best round, one for all clients. The model's name then ends in
    ``@best_val``. A personal model that is made at the end has no other round.

    Raises:
        UsageError: a run without a validation score, and so without a best round.
    """
    run = ["algorithm", "seed"]
    scored = frame[frame["metric"].isin(list(SCORES)) & (frame["model"] != "local")]
    test = scored[scored["split"] == split]
    final = test[test["round"] == test.groupby(run)["round"].transform("max")]
    has_personal = final.groupby(run)["model"].transform(lambda m: (m == "personal").any())
    final = final[final["model"] == np.where(has_personal, "personal", "global")]
    if not best:
        return final
    of_model = [*run, "model"]
    found = best_rounds(scored)
    wanted = final[of_model].drop_duplicates().merge(found, how="left")
    if wanted["round"].isna().any():
        name, seed, model = wanted.loc[wanted["round"].isna(), of_model].iloc[0]
        raise UsageError(f"the run of {name} with seed {seed} has no {model} model with a score on validation samples")
    at_best = test.merge(wanted)
    return at_best.assign(model=at_best["model"] + BEST)


def best_rounds(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the best round of each run's models, as a stopping rule finds it (:mod:`fl_core.stopping`).

    Args:
        frame: Rows of runs.

    Returns:
        A line for each model that has one: algorithm, seed, model, round.
    """
    main = main_score(frame["metric"].unique())
    judged = frame[(frame["split"] == "validation") & (frame["metric"] == main) & (frame["round"] > 0)]
    lines = []
    for (algorithm, seed, model), part in judged.groupby(["algorithm", "seed", "model"], sort=False):
        scores = {
            int(str(done)): weighted_mean(zip(of_round["value"].astype(float), of_round["n_train"], strict=True))
            for done, of_round in part.groupby("round")
        }
        lines.append((algorithm, seed, model, best_round(scores, SCORES[main])))
    found = pd.DataFrame(lines, columns=["algorithm", "seed", "model", "round"])
    return found.dropna(subset="round").astype({"seed": frame["seed"].dtype, "round": frame["round"].dtype})


Plans = LayerPlan | Mapping[str, LayerPlan] | None


def jobs_of(
    config: RunConfig,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    out: Path | str | None,
    options: Mapping[str, dict[str, Any]] | None = None,
    plan: Plans = None,
    settings: Mapping[str, dict[str, Any]] | None = None,
) -> list[TrainingJob]:
    """Return the runs of a comparison, checked against those already below ``out``. Nothing is written.

    Without ``out`` only the runs themselves are checked.

    Args:
        settings: keys of the configuration that are an algorithm's own, by algorithm.

    Warns:
        UserWarning: a plan was measured on samples that some seeds test on.

    Raises:
        UsageError: as for :func:`compare`.
    """
    check_distinct("a comparison", "algorithm", algorithms)
    check_distinct("a comparison", "seed", seeds)
    for name in options or {}:
        check_known("algorithm of this comparison", name, algorithms)
    plans = dict.fromkeys(algorithms, plan) if isinstance(plan, LayerPlan) else dict(plan or {})
    obey = {name for name in algorithms if find(name).uses_plan}
    if (plan is not None or config.plan is not None) and not obey:
        raise UsageError(f"none of {listing(algorithms)} takes a plan")
    jobs: list[TrainingJob] = []
    dealt: dict[int, tuple[str, Partition]] = {}
    for seed in seeds:
        data = None  # the same for all algorithms of a seed
        for name in algorithms:
            run_config = replace(config, algorithm=name, seed=seed, options=(options or {}).get(name, {}))
            run_config = replace(run_config, **(settings or {}).get(name, {}))
            its_plan = plans.get(name) if name in obey else None
            run_config = run_config if name in obey else replace(run_config, plan=None)
            jobs.append(TrainingJob(Path(out or "") / "runs" / f"{name}-{seed}", run_config, its_plan))
            task = runner.assemble(jobs[-1].config, plan=jobs[-1].plan, loaded=data)
            data = task.data
            dealt[seed] = data.digest, data.partition
            if out is not None:
                check_stored(jobs[-1].path, task)
    for each_plan in {id(job.plan): job.plan for job in jobs if job.plan is not None}.values():
        _warn_of_seen(each_plan, config, dealt)
    return jobs


@checked_call
def compare(
    config: RunConfig,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    out: Path | str = "out/compare",
    *,
    data: Any = None,
    model: Any = None,
    instruments: Instruments | None = None,
    options: Mapping[str, dict[str, Any]] | None = None,
    plan: Plans = None,
    tuned: Tuned | Path | str | None = None,
    best: bool | None = None,
    score: str = "",
    baselines: bool = False,
    beside: pd.DataFrame | None = None,
    backend: Backend | str = "",
    command: str = "",
    progress: bool = True,
) -> Comparison:
    """Run every algorithm with every seed below ``out``/runs, compare, and write ``rows.jsonl`` and ``table.csv``.

    Finished runs are read and interrupted runs are resumed, so a comparison can be stopped and started again. It
    refuses runs whose configuration, plan, data or initial model differ. All algorithms of a seed have the same initial
    model, data split, client sample and batches.

    >>> config = RunConfig(dataset="heart", rounds=1)
    >>> comparison = compare(config, ["local", "fedavg"], seeds=[0, 1], out="comparison", progress=False)
    >>> comparison.table[["algorithm", "model", "seeds"]].values.tolist()
    [['local', 'personal', 2], ['fedavg', 'global', 2]]

    Args:
        out: the folder; default ``out/compare``, as of the command.
        data, model: your own, as of :func:`fedlayers.run <fedlayers.runs.run>`.
        instruments: how runs measure and decide; by default the diagnostics.
        options: each algorithm's own configuration, by name.
        plan: one for all algorithms that obey one, or one per algorithm by name; the others use their default.
        tuned: the choice of :func:`~fedlayers.studies.tune.tune` for each algorithm, or the path of its file.
        best: score models at their best round on validation (:func:`headline`); the runs are the same. The default
            is true under a stopping rule (``patience``).
        score: by which algorithms are ranked; see :class:`Comparison`.
        baselines: add rows of baselines that need no federation (:mod:`fedlayers.studies.baselines`).
        beside: rows of other runs with these seeds, to show as a further algorithm.
        backend: where runs are trained: ``local:N``, ``ray`` or ``ray:HOST:PORT`` (:mod:`fedlayers.backends.base`);
            default this process.

    Raises:
        UsageError: an unknown name or an invalid value, before the first run.
        RunError: a run failed; the same call resumes from there.
    """
    out, config = Path(out), in_memory(config, data, model)
    check_folder(out)
    kind = LOSSES[str(resolved(config).loss)].task
    if score:
        check_score(score, kind)
    if baselines and kind == REGRESSION:
        raise UsageError("the baselines are classifiers; leave them out for a regression")
    settings: Mapping[str, dict[str, Any]] = {}
    if tuned is not None:
        tuned = tuned if isinstance(tuned, Tuned) else Tuned.load(tuned)
        settings, options = tuned.applied(config, algorithms, seeds, options)
    jobs = jobs_of(config, algorithms, seeds, out, options, plan, settings)
    with open_backend(backend, config.workers) as place:
        train([replace(job, instruments=instruments, command=command) for job in jobs], place, progress=progress)
    frames = [*([] if beside is None else [beside]), *(store.Run(job.path).rows()[1] for job in jobs)]
    for job in jobs[:: len(algorithms)] if baselines else ():
        frames.append(rows.frame(baseline_rows(runner.assemble(job.config, plan=job.plan))))
    task = runner.assemble(jobs[0].config, plan=jobs[0].plan)
    best = config.patience is not None if best is None else best
    result = Comparison(pd.concat(frames, ignore_index=True), best, _training(jobs[: len(algorithms)]), score=score)
    header = {**task.header(command), "runs": len(jobs)}
    rows.write(out / "rows.jsonl", header, (_record(r) for r in result.frame.to_dict("records")))
    write_atomically(out / "table.csv", csv_bytes(result.table))
    return result


def _training(jobs: Sequence[TrainingJob]) -> str:
    """Describe the local training of some runs, per algorithm if they differ."""
    names: dict[str, list[str]] = {}
    for job in jobs:
        names.setdefault(resolved(job.config).training.description, []).append(job.config.algorithm)
    return next(iter(names)) if len(names) == 1 else "; ".join(f"{listing(who)}: {how}" for how, who in names.items())


def check_folder(out: Path) -> None:
    """Refuse an output folder that is itself a run, or a file.

    Raises:
        UsageError: names it.
    """
    if (out / "config.json").exists() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is {'a run' if out.is_dir() else 'a file'}; choose another folder")


def _warn_of_seen(plan: LayerPlan, config: RunConfig, dealt: Mapping[int, tuple[str, Partition]]) -> None:
    """Warn of seeds that test on samples on which the plan was measured. Each seed draws its own splits."""
    seed = plan.why.seed
    if seed is None or not plan.why.data:
        return
    if seed not in dealt:
        try:
            data = runner.assemble(replace(config, algorithm="fedavg", plan=None, options={}, seed=seed)).data
        except UsageError:  # the plan was not measured on data of this partition
            return
        measured = data.digest, data.partition
    else:
        measured = dealt[seed]
    if measured[0] != plan.why.data:
        return  # measured on other data: which samples it has seen is not known
    training_samples = _samples(measured[1], "train")
    leaking = [seed for seed, (_, partition) in dealt.items() if training_samples & _samples(partition, "test")]
    if leaking:
        warnings.warn(
            f"the plan was measured on training data of seed {seed} that hold test samples of "
            f"{'seeds' if len(leaking) > 1 else 'seed'} {listing(map(str, leaking))}; with --plan auto, and under "
            "playerfl, every run decides on its own training data",
            stacklevel=3,
        )


def _samples(partition: Partition, split: str) -> set[int]:
    return {int(place) for places in partition.indices.values() for place in places[split]}


def _record(record: Mapping[Any, Any]) -> rows.Row:
    """Return a row of a frame as the record that was written, with None for missing numbers."""
    return {name: None if pd.isna(value) else value for name, value in record.items()}


def check_stored(path: Path, task: runner.Task) -> None:
    """Refuse a directory with anything other than this run, begun or complete."""
    if not (path / "config.json").exists():
        return writing.check_free(path)
    run = store.Run(path)
    check_given(path, run.task_config(), data=task.config.own_data, model=task.config.own_model)
    stored, plan = runner.stored_config(run.task_config())
    config = replace(task.config, plan=None) if task.plan is not None else task.config
    free = {"workers", "device", "data_root", "download", "keep_ids"}  # these do not change results
    for name in (f.name for f in fields(RunConfig) if f.name not in free):
        if json.dumps(getattr(stored, name)) != json.dumps(getattr(config, name)):  # a stored tuple is a list
            raise UsageError(
                f"{path} was run with {name}={getattr(stored, name)!r}, now it is {getattr(config, name)!r}: "
                "choose another directory"
            )
    if (plan and plan.digest) != (task.plan and task.plan.digest):
        raise UsageError(f"{path} was run under another plan ({plan or 'its own'}): choose another directory")
    if run.begun:
        began, now = run.rows()[0], task.header("")
        for key, what in {"data": "other data", "checkpoint": "another initial model"}.items():
            if began[key] != now[key]:
                raise UsageError(f"{path} was run with {what}: choose another directory")
        if began["version"] != now["version"]:
            warnings.warn(f"{path} was run by fedlayers {began['version']}, this is {now['version']}", stacklevel=4)
    return None
