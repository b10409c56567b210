"""Regret of rules: every cut is trained, and a rule's regret is the loss of its cut against the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from diagnostics import measure
from diagnostics.decide import select
from diagnostics.decide.rules.base import RULES, curve_rule
from diagnostics.metrics.base import METRICS
from fedlayers.backends.base import Backend
from fedlayers.backends.names import open_backend
from fedlayers.studies.arms import Arm
from fedlayers.studies.comparison import gains_of, headline
from fedlayers.studies.held_out import held_out, score_of
from fedlayers.studies.jobs import (
    TrainingJob,
    assembled,
    checked_call,
    jobs_of,
    seeds_of,
    task_kind,
    train,
)
from fl_core import runner, statistics
from fl_core.algorithms import find, registry
from fl_core.config import RunConfig, in_memory
from fl_core.data import Split
from fl_core.display import Displayed, Summary
from fl_core.errors import RunError, UsageError, check_distinct, check_known, listing
from fl_core.layers import Layer
from fl_core.names import csv_bytes
from fl_core.plan import CANDIDATE, Evidence, LayerPlan
from fl_core.progress import with_progress
from fl_core.records import store
from fl_core.registry import is_outside
from fl_core.restore import allowed_by
from fl_core.scores import (
    MAIN,
    OF_CLASS,
    SCORES,
    TABLE,
    check_score,
    in_column,
    of_class,
)
from fl_core.statistics import Interval
from fl_core.storage.files import write_atomically
from fl_core.stored_models import load_models

DEFAULT_RULES = ("sensitivity_ratio", "largest_jump", "change_point")
RANDOM = "random cut"
TRIED = "best in validation"
REFERENCES = (
    "share nothing",
    "all but the last layer",
    "share every layer",
    RANDOM,
    TRIED,
)
SPLITS = ("validation", "test", "held_out")
LEGEND = (
    "regret: loss of the rule's cut on held-out samples against the best cut, the one with the best mean over the\n"
    "runs; below 0 if the rule's was better. random: the mean\n"
    "regret of all cuts that a rule can choose, in the same runs. Held-out samples: the test split, and unused\n"
    "samples of the dataset; no choice has seen them. best in validation: each run's best cut by validation samples,\n"
    "after all cuts were trained."
)


@dataclass(repr=False)
class Regret(Displayed):
    """The scores of all cuts, and the comparison with each rule's choice.

    The reference is one cut for all seeds: that with the best mean held-out score.

    Attributes:
        score: the name of the scores.
        layers: names of the L layers that train; a cut k shares the first k, and the frozen ones.
        scores: one line per seed and cut (columns seed, cut, last, validation, test, held_out, and maybe
            held_out_samples and positive): the headline model after the last round, combined over clients by training
            samples.
        decisions: one line per rule and seed (rule, seed, cut, status); no cut if the rule could not decide.
        choices: decisions and references with their scores on each split, and differences in held-out scores.
            ``regret`` = the reference's - the choice's, below 0 if the choice did better in that seed; ``random`` =
            the reference's - the mean over the cuts 1 .. L-1. If a lower score is better, differences have the other
            sign.
        table: one line per rule: how many seeds it decided, its cuts, and means over them; ``regret_low`` and
            ``regret_high`` come from :meth:`interval`, also those of ``random``.
    """

    score: str
    layers: tuple[str, ...]
    scores: pd.DataFrame
    decisions: pd.DataFrame
    choices: pd.DataFrame = field(init=False)
    table: pd.DataFrame = field(init=False)

    def __post_init__(self) -> None:
        if not set(self.scores["cut"]) >= set(range(len(self.layers) + 1)):
            raise UsageError(
                f"scores must be of all cuts from 0 to {len(self.layers)}; got others."
            )
        self.scores = self.scores.assign(held_out=self.scores["held_out"].astype(float))
        lacking = self.scores[self.scores["held_out"].isna()]
        if len(lacking):
            cut, seed = lacking.iloc[0][["cut", "seed"]]
            raise UsageError(
                f"no {self.score} on the held-out samples of cut {cut} with seed {seed}"
            )
        self.choices = pd.concat(
            [self._of_seed(seed) for seed in self.held_out.columns], ignore_index=True
        )
        order = [*self.decisions["rule"].unique(), *REFERENCES]
        self.table = pd.DataFrame(
            [
                self._summary(rule, self.choices[self.choices["rule"] == rule])
                for rule in order
            ]
        )

    @property
    def held_out(self) -> pd.DataFrame:
        """Held-out scores, cuts x seeds."""
        seeds = self.scores["seed"].unique()
        return self.scores.pivot(
            index="cut", columns="seed", values="held_out"
        ).sort_index()[seeds]

    def gains(self) -> pd.DataFrame:
        """Return what sharing up to each layer gains on validation over sharing nothing (layer, value, low, high)."""
        scores = self.scores.pivot(index="seed", columns="cut", values="validation")
        lasts = dict(enumerate(self.layers, 1))
        return gains_of(scores, 0, lasts, self._sign)

    @property
    def best(self) -> int:
        """The reference: the cut with the best mean held-out score; of equal ones the one that shares least."""
        return int((self._sign * self.held_out.mean(axis=1)).idxmax())

    @property
    def _sign(self) -> int:
        return 1 if SCORES[self.score] else -1

    def _of_seed(self, seed: Any) -> pd.DataFrame:
        """Return one seed's rules and references, each with its regrets."""
        scores = self.scores[self.scores["seed"] == seed].set_index("cut")
        decisions = self.decisions[self.decisions["seed"] == seed]
        sign, count, best = self._sign, len(self.layers), self.best
        at_random = {
            split: scores.loc[range(1, count), split].mean() for split in SPLITS
        }
        validation = scores["validation"]
        tried = None if validation.isna().all() else int((sign * validation).idxmax())
        cuts = np.array(
            [*decisions["cut"], 0, count - 1, count, None, tried], dtype=float
        )
        found = pd.DataFrame(
            {
                "rule": [*decisions["rule"], *REFERENCES],
                "seed": seed,
                "cut": cuts,
                "best": best,
            }
        )
        for split in SPLITS:
            found[split] = scores[split].reindex(cuts).to_numpy(float)
            found.loc[found["rule"] == RANDOM, split] = at_random[split]
        own, at_best = found["held_out"], scores.loc[best, "held_out"]
        found["regret"] = sign * (at_best - own) + 0.0
        found["random"] = np.where(
            own.notna(), sign * (at_best - at_random["held_out"]) + 0.0, math.nan
        )
        status = [*decisions["status"], *["ok"] * len(REFERENCES)]
        status[-1] = (
            "ok" if tried is not None else f"no {self.score} on validation samples"
        )  # of TRIED, the last
        return found.assign(status=status)

    def _summary(self, rule: str, part: pd.DataFrame) -> dict[str, Any]:
        scored = part[part["held_out"].notna()]
        line: dict[str, Any] = {"rule": rule, "seeds": len(scored)}
        line["cuts"] = " ".join(f"{int(cut)}" for cut in scored["cut"].dropna())
        line |= {name: scored[name].mean() for name in SPLITS}
        for name, own in (("regret", rule), ("random", RANDOM)):
            among = self.choices[
                (self.choices["rule"] == own)
                & self.choices["seed"].isin(scored["seed"])
            ]
            line |= self.interval(among.set_index("seed")["held_out"]).columns(name)
        return line

    def interval(self, held_out: pd.Series) -> Interval:
        """Return the mean regret over runs with its 95 % t interval.

        One run has no interval (NaN). Nor has a choice with the same regret in every run, such as the best cut itself.
        """
        cuts = self._sign * self.held_out.to_numpy(float)  # [C, S]
        at = self.held_out.columns.get_indexer(held_out.index)
        if not len(at):
            return statistics.UNKNOWN
        own = self._sign * held_out.to_numpy(float)
        each = cuts[int(cuts.mean(axis=1).argmax()), at] - own
        if np.ptp(each) < 1e-12:
            return Interval(float(each.mean()), math.nan, math.nan)
        return statistics.mean_interval(each)

    @property
    def spread(self) -> str:
        """The meaning of the brackets after a regret, in words."""
        runs = self.held_out.shape[1]
        return (
            "one run: no interval"
            if runs < 2
            else f"in brackets 95 % t intervals over {runs} runs"
        )

    def _number(self, value: float) -> str:
        return "–" if pd.isna(value) else in_column(self.score, value)

    def summary(self) -> Summary:
        """Return what each rule loses to the best cut."""
        return Summary.of_frame(f"Regret in {self.score}", self.table)

    def text(self) -> str:
        """Return the table for a terminal, with the best cuts and the meaning of the columns."""
        unit = " %" * TABLE[self.score].share
        shown = pd.DataFrame(
            {
                "rule": self.table["rule"],
                "seeds": self.table["seeds"],
                "cuts": self.table["cuts"],
            }
        )
        for name in ("validation", "held_out"):
            shown[name.replace("_", "-") + unit] = [
                self._number(value) for value in self.table[name]
            ]
        for name in ("regret", "random"):
            shown[name + unit] = [
                self._number(mean)
                + (
                    ""
                    if pd.isna(low)
                    else f" [{self._number(low)}, {self._number(high)}]"
                )
                for mean, low, high in self.table[
                    [name, f"{name}_low", f"{name}_high"]
                ].itertuples(index=False)
            ]
        layers = ", ".join(f"{k} {name}" for k, name in enumerate(self.layers, 1))
        failed = self.choices[self.choices["status"] != "ok"]
        notes = [
            f"{line.rule} does not decide with seed {line.seed}: {line.status}"
            for line in failed.itertuples()
        ]
        what = self.score + of_class(
            self.score, str(next(iter(self.scores.get("positive", ())), ""))
        )
        head = f"{what} of every cut; best mean on held-out samples: cut {self.best}\nlayers: {layers}"
        if "held_out_samples" in self.scores:
            sizes = self.scores["held_out_samples"]
            least, most = int(sizes.min()), int(sizes.max())
            head += f"\nheld-out samples per run: {least:,}" + (
                f" to {most:,}" if most > least else ""
            )
        return "\n\n".join(
            [head, shown.to_string(index=False), *notes, f"{LEGEND}\n{self.spread}."]
        )


@checked_call
def regret(
    config: RunConfig,
    rules: Sequence[str] = DEFAULT_RULES,
    seeds: Sequence[int] | None = None,
    out: Path | str = Path("out/regret"),
    *,
    data: Any = None,
    model: Any = None,
    score: str = "",
    backend: Backend | str = "",
    command: str = "",
    progress: bool = True,
    live: bool = False,
) -> Regret:
    """Train every cut with several seeds, let every rule decide, and compare its choice with the best cut.

    There is one plan for each number 0 .. L of first layers, out of the L that train. Frozen layers are shared as well.
    Each plan is run under the configuration's algorithm, below ``out``/cuts. Every seed is measured after each client's
    first local training, below ``out``/measured. The rules read these measurements. Regret is counted on held-out
    samples (:mod:`fedlayers.studies.held_out`), which neither training nor a rule saw.

    ``scores.csv`` has all cuts, ``regret.csv`` every rule and seed, ``table.csv`` the means. After a stop, the same
    call resumes: finished runs are read and interrupted ones are resumed. Every call measures and scores held-out
    samples again. Measuring takes one round of training per client.

    >>> config = RunConfig(dataset="heart", algorithm="fedper", rounds=1)
    >>> found = regret(config, ["sensitivity_ratio"], seeds=(0,), out="regret", progress=False)
    >>> found.table["rule"][0], len(found.scores)
    ('sensitivity_ratio', 5)

    Args:
        config: of the runs, small enough for L + 1 runs per seed. Its ``threshold`` is that of the rules.
        rules: ``"RULE"``, read on federation sensitivity, or ``"METRIC=RULE"``.
        data, model: your own, as of :func:`fedlayers.run <fedlayers.runs.run>`.
        seeds: the default is three, from the configuration's on.
        score: one of :data:`fl_core.scores.SCORES`; default macro-F1, for a regression R2.
        backend: where runs are trained; see :func:`~fedlayers.studies.compare.compare`.
        live: as of :func:`~fedlayers.studies.choose.choose`.

    Raises:
        UsageError: an unknown name or an invalid value, if possible before the first run.
        RunError: a run failed; the same call resumes from there. A rule that cannot decide gives a line with its
            reason.
    """
    config = in_memory(config, data, model)
    seeds = seeds_of(config, seeds, 3)
    task = task_kind(config)
    score = check_score(score or MAIN[task], task)
    parsed_rules = {text: _parse_rule(text) for text in rules}
    check_distinct("regret", "rule", rules)
    if config.federation.plan is not None:
        raise UsageError("regret makes its own plans. Leave the plan out.")
    if not find(config.federation.algorithm).uses_plan:
        using = sorted(name for name, kind in registry().items() if kind.uses_plan)
        raise UsageError(
            f"{config.federation.algorithm} uses no plan. These use one: {listing(using)}."
        )
    out = Path(out)

    decided: list[dict[str, Any]] = []
    layers: tuple[Layer, ...] = ()
    for seed in with_progress(seeds, "measured", "seed", shown=progress):
        layers, decisions = _decisions(
            config.with_keys(seed=seed), parsed_rules, out, command
        )
        decided += decisions
    nothing = LayerPlan(layers, (), Evidence(rule=CANDIDATE))
    names = nothing.trainable
    arms = [
        Arm(str(cut), config.federation.algorithm, nothing.with_first(cut))
        for cut in range(len(names) + 1)
    ]
    jobs = jobs_of(arms, config, seeds, out / "cuts", command=command)
    list(assembled(jobs))  # which checks them
    shown = {"progress": progress, "live": live}
    with open_backend(backend, config.execution.workers, **shown) as place:
        train(jobs, place)
    scores = _score_cuts(config, jobs, names, score, progress)
    write_atomically(out / "scores.csv", csv_bytes(scores))
    result = Regret(score, names, scores, pd.DataFrame(decided))
    for name, table in (("regret", result.choices), ("table", result.table)):
        write_atomically(out / f"{name}.csv", csv_bytes(table))
    return result


def _parse_rule(text: str) -> tuple[str, str | None]:
    """Return the rule and the metric in an argument ``RULE`` or ``METRIC=RULE``. The first has no metric."""
    metric, equals, rule = text.rpartition("=")
    if not is_outside(rule):
        judged = [name for name, each in RULES.members().items() if each.decides]
        check_known("rule that decides by itself", rule, judged)
    curve_rule(rule)
    return rule, (METRICS[metric].name if equals else None)


def _decisions(
    config: RunConfig,
    parsed_rules: dict[str, tuple[str, str | None]],
    out: Path,
    command: str,
) -> tuple[tuple[Layer, ...], list[dict[str, Any]]]:
    """Return the layers of one seed's model, and each rule's decision after the clients' first local training."""
    task = runner.assemble(config, plan=None)
    metrics = [metric or measure.SENSITIVITY for _, metric in parsed_rules.values()]
    report = measure.diagnose_task(
        task, tuple(dict.fromkeys(metrics)), command=command, progress=False
    )
    (out / "measured").mkdir(parents=True, exist_ok=True)
    report.write(out / "measured" / f"{config.execution.seed}.jsonl")
    decisions = []
    for text, (rule, metric) in parsed_rules.items():
        line: dict[str, Any] = {
            "rule": text,
            "seed": config.execution.seed,
            "cut": None,
            "status": "ok",
        }
        try:
            plan = select.select(
                report, rule, metric=metric, threshold=config.federation.threshold
            )
            line["cut"] = plan.cut
        except RunError as error:
            line["status"] = str(error)
        decisions.append(line)
    return task.layers, decisions


def _score_cuts(
    config: RunConfig,
    jobs: Sequence[TrainingJob],
    names: Sequence[str],
    score: str,
    progress: bool,
) -> pd.DataFrame:
    """Return the scores of each cut's finished runs, one for each seed. Nothing is trained.

    Args:
        jobs: those of one seed in a row.
        names: of the layers that train, in order.
    """
    own = {
        "data": config.own_data,
        "model": config.own_model,
        "allow_code": allowed_by(config),
    }
    lines: list[dict[str, Any]] = []
    samples: dict[str, Split] = {}
    for job in with_progress(jobs, "held-out samples", "run", shown=progress):
        seed, cut = job.config.execution.seed, int(job.arm)
        if not lines or lines[-1]["seed"] != seed:
            task = runner.assemble(config.with_keys(seed=seed))
            samples = held_out(task)
        line: dict[str, Any] = {"seed": seed, "cut": cut}
        frame = store.Run(job.path).rows()[1]
        for split in ("validation", "test"):
            final = headline(frame, split, best=bool(task.config.federation.patience))
            final = final[final["metric"] == score]
            line[split] = statistics.combine(final["value"], final["n_train"])
        line["model"] = str(final["model"].iloc[0])
        line["last"] = names[cut - 1] if cut else ""
        which, _, best = line["model"].partition("@")
        models, _ = load_models(job.path, "best" if best else "last", which, **own)
        line["held_out"] = score_of(models, samples, task, score)
        line["held_out_samples"] = sum(map(len, samples.values()))
        if score in OF_CLASS and task.data.positive:
            line["positive"] = task.data.positive
        lines.append(line)
    return pd.DataFrame(lines).sort_values("cut", kind="stable", ignore_index=True)
