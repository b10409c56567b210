"""Regret of rules: every cut is trained, and a rule's regret is the loss of its cut against the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from diagnostics import measure, select
from diagnostics.metrics.base import METRICS
from diagnostics.select import RULES, curve_rule
from fedlayers.backends.local import Backend
from fedlayers.studies.arms import Arm
from fedlayers.studies.choice import bracket
from fedlayers.studies.comparison import gains_of, headline, scores_of
from fedlayers.studies.jobs import (
    TrainingJob,
    assembled,
    jobs_of,
    open_backend,
    seeds_of,
    study_folder,
    task_kind,
    train,
)
from fl_core import statistics
from fl_core.algorithms import find, registry
from fl_core.config import RunConfig, with_own
from fl_core.display import Displayed, Summary, csv_bytes
from fl_core.errors import RunError, UsageError, as_list, check_known, listing
from fl_core.plan import CANDIDATE, Evidence, LayerPlan
from fl_core.progress import with_progress
from fl_core.records import store
from fl_core.registry import is_outside
from fl_core.rows import (
    MAIN,
    SCORES,
    TABLE,
    check_score,
    in_column,
    of_class,
    positive_in,
)
from fl_core.run import runner
from fl_core.run.task import Task
from fl_core.storage import write_atomically

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
SPLITS = ("validation", "test")
LEGEND = (
    "regret: loss of the rule's cut on test samples against the best cut, the one with the best mean over the runs;\n"
    "below 0 if the rule's was better. No rule has seen test samples. The best cut is found on them, so chance adds\n"
    "to a regret. random cut: the mean of all cuts that a rule can choose. best in validation: each run's best cut by\n"
    "validation samples, after all cuts were trained."
)


@dataclass(repr=False)
class Regret(Displayed):
    """The scores of all cuts, and the comparison with each rule's choice.

    The reference is one cut for all seeds: that with the best mean test score.

    Attributes:
        score: the name of the scores.
        layers: names of the L layers that train; a cut k shares the first k, and the frozen ones.
        scores: one line per seed and cut (columns seed, cut, last, validation, test, and maybe positive): the headline
            model after the last round, or its best one under a stopping rule, combined over clients by training
            samples.
        decisions: one line per rule and seed (rule, seed, cut, status); no cut if the rule could not decide.
        choices: decisions and references with their scores on each split, and the difference in test scores.
            ``regret`` = the reference's - the choice's, below 0 if the choice did better in that seed. If a lower
            score is better, it has the other sign. A random cut has the mean over the cuts 1 .. L-1.
        table: one line per rule: how many seeds it decided, its cuts, and means over them; ``regret_low`` and
            ``regret_high`` are the ends of t intervals over seeds.
    """

    score: str
    layers: tuple[str, ...]
    scores: pd.DataFrame
    decisions: pd.DataFrame
    choices: pd.DataFrame = field(init=False)
    table: pd.DataFrame = field(init=False)

    def __post_init__(self) -> None:
        count, sign = len(self.layers), self._sign
        if not set(self.scores["cut"]) >= set(range(count + 1)):
            raise UsageError(
                f"scores must be of all cuts from 0 to {count}; got others."
            )
        lacking = self.scores[self.scores["test"].isna()]
        if len(lacking):
            cut, seed = lacking.iloc[0][["cut", "seed"]]
            raise UsageError(
                f"no {self.score} on the test samples of cut {cut} with seed {seed}"
            )
        inner = self.scores[self.scores["cut"].between(1, count - 1)]
        at_random = inner.groupby("seed")[list(SPLITS)].mean().assign(rule=RANDOM)
        made = [self.decisions]
        for seed, part in self.scores.groupby("seed", sort=False):
            validation = sign * part.set_index("cut")["validation"].dropna()
            best = validation.idxmax() if len(validation) else math.nan
            cuts = (0, count - 1, count, math.nan, best)
            about = {"rule": REFERENCES, "seed": seed, "cut": cuts, "status": "ok"}
            made.append(pd.DataFrame(about))
        found = pd.concat(made, ignore_index=True)
        found = found.astype({"cut": float}).assign(best=self.best)
        lacking = (found["rule"] == TRIED) & found["cut"].isna()
        found.loc[lacking, "status"] = f"no {self.score} on validation samples"
        scored = self.scores[["seed", "cut", *SPLITS]]
        found = found.merge(scored, how="left", on=["seed", "cut"])
        found = found.set_index(["rule", "seed"])
        found = found.fillna(at_random.reset_index().set_index(["rule", "seed"]))
        found = found.reset_index()
        best = found["seed"].map(self._test.loc[self.best])
        found["regret"] = sign * (best - found["test"]) + 0.0
        self.choices = found
        lines = []
        for rule, part in found.groupby("rule", sort=False):
            scored = part[part["test"].notna()]
            line = {"rule": rule, "seeds": len(scored)}
            line["cuts"] = " ".join(f"{cut:.0f}" for cut in scored["cut"].dropna())
            line |= scored[list(SPLITS)].mean().to_dict()
            regret = statistics.UNKNOWN
            if len(scored):
                regret = statistics.mean_interval(scored["regret"])
            lines.append(line | regret.columns("regret"))
        self.table = pd.DataFrame(lines)

    @property
    def _test(self) -> pd.DataFrame:
        """Test scores, cuts x seeds."""
        return self.scores.pivot(index="cut", columns="seed", values="test")

    def gains(self) -> pd.DataFrame:
        """Return what sharing up to each layer gains on validation over sharing nothing (layer, value, low, high)."""
        scores = self.scores.pivot(index="seed", columns="cut", values="validation")
        lasts = dict(enumerate(self.layers, 1))
        return gains_of(scores, 0, lasts, self._sign)

    @property
    def best(self) -> int:
        """The reference: the cut with the best mean test score; of equal ones the one that shares least."""
        return int((self._sign * self._test.mean(axis=1)).idxmax())

    @property
    def _sign(self) -> int:
        return 1 if SCORES[self.score] else -1

    def summary(self) -> Summary:
        """Return what each rule loses to the best cut."""
        return Summary.of_frame(f"Regret in {self.score}", self.table)

    def text(self) -> str:
        """Return the table for a terminal, with the best cuts and the meaning of the columns."""
        unit = " %" * TABLE[self.score].share
        shown = self.table[["rule", "seeds", "cuts"]].copy()
        for name in SPLITS:
            shown[name + unit] = self.table[name].map(self._number)
        ends = self.table[["regret_low", "regret_high"]].itertuples(index=False)
        brackets = [bracket(self.score, *pair) for pair in ends]
        shown["regret" + unit] = self.table["regret"].map(self._number) + brackets
        layers = ", ".join(f"{k} {name}" for k, name in enumerate(self.layers, 1))
        failed = self.choices[self.choices["status"] != "ok"]
        notes = [
            f"{line.rule} does not decide with seed {line.seed}: {line.status}"
            for line in failed.itertuples()
        ]
        positive = str(next(iter(self.scores.get("positive", ())), ""))
        head = (
            f"{self.score}{of_class(self.score, positive)} of every cut; "
            f"best mean on test samples: cut {self.best}\nlayers: {layers}"
        )
        runs = self.scores["seed"].nunique()
        spread = f"in brackets 95 % t intervals over {runs} runs"
        if runs < 2:
            spread = "one run: no interval"
        parts = [head, shown.to_string(index=False), *notes, f"{LEGEND}\n{spread}."]
        return "\n\n".join(parts)

    def _number(self, value: float) -> str:
        return "–" if pd.isna(value) else in_column(self.score, value)


def regret(
    config: RunConfig | None = None,
    rules: str | Sequence[str] = DEFAULT_RULES,
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
    **keys: Any,
) -> Regret:
    """Train every cut with several seeds, let every rule decide, and compare its choice with the best cut.

    There is one plan for each number 0 .. L of first layers, out of the L that train. Frozen layers are shared as well.
    Each plan is run under the configuration's algorithm, below ``out``/cuts. Every seed is measured after each client's
    first local training, below ``out``/measured. The rules read these measurements. Regret is counted on test samples,
    which neither training nor a rule saw.

    ``scores.csv`` has all cuts, ``regret.csv`` every rule and seed, ``table.csv`` the means. After a stop, the same
    call resumes: finished runs are read and interrupted ones are resumed. Every call measures
    again. Measuring takes one round of training per client.

    >>> config = RunConfig(dataset="heart", algorithm="fedper", rounds=1)
    >>> found = regret(config, ["sensitivity_ratio"], seeds=(0,), out="regret", progress=False)
    >>> found.table["rule"][0], len(found.scores)
    ('sensitivity_ratio', 5)

    Args:
        config: of the runs, small enough for L + 1 runs per seed. Its ``threshold`` is that of the rules.
        rules: ``"RULE"``, read on federation sensitivity, or ``"METRIC=RULE"``.
        data, model, keys: as of :func:`fedlayers.run <fedlayers.runs.run>`.
        seeds: the default is three, from the configuration's on.
        score: one of :data:`fl_core.rows.SCORES`; default macro-F1, for a regression R2.
        backend: where runs are trained; see :func:`~fedlayers.studies.compare.compare`.
        live: as of :func:`~fedlayers.studies.choose.choose`.

    Raises:
        UsageError: an unknown name or an invalid value, if possible before the first run.
        RunError: a run failed; the same call resumes from there. A rule that cannot decide gives a line with its
            reason.
    """
    out = study_folder(out)
    config, own = with_own(config, data, model, **keys)
    seeds = seeds_of(config, seeds, 3)
    kind = task_kind(config, own)
    score = check_score(score or MAIN[kind], kind)
    rules = as_list("rules", rules, distinct=True)
    parsed_rules = {text: _parse_rule(text) for text in rules}
    if config.federation.plan is not None:
        raise UsageError("regret makes its own plans. Leave the plan out.")
    if not find(config.federation.algorithm).uses_plan:
        using = sorted(name for name, kind in registry().items() if kind.uses_plan)
        raise UsageError(
            f"{config.federation.algorithm} uses no plan. These use one: {listing(using)}."
        )
    task = runner.assemble(config.with_keys(seed=seeds[0]), **own)
    nothing = LayerPlan(task.layers, (), Evidence(rule=CANDIDATE))
    names = nothing.trainable
    arms = [
        Arm(str(cut), config.federation.algorithm, nothing.with_first(cut))
        for cut in range(len(names) + 1)
    ]
    jobs = jobs_of(arms, config, seeds, out / "cuts", command=command, **own)
    list(assembled(jobs, announced=set()))  # which checks them
    decided: list[dict[str, Any]] = []
    shown = {"progress": progress, "live": live}
    with open_backend(backend, config.execution.workers, **shown) as place:
        for seed in with_progress(seeds, "measured", "seed", shown=progress):
            task = runner.assemble(config.with_keys(seed=seed), **own)
            decided += _decisions(task, parsed_rules, out, command)
        train(jobs, place)
    best = bool(task.config.federation.patience)
    scores = _score_cuts(jobs, names, score, best)
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
    task: Task,
    parsed_rules: dict[str, tuple[str, str | None]],
    out: Path,
    command: str,
) -> list[dict[str, Any]]:
    """Return each rule's decision for one seed after the clients' first local training."""
    config = task.config
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
    return decisions


def _score_cuts(
    jobs: Sequence[TrainingJob], names: Sequence[str], score: str, best: bool
) -> pd.DataFrame:
    """Return the scores of each cut's finished runs, one for each seed.

    Args:
        names: of the layers that train, in order.
        best: whether a stopping rule names the round that counts.
    """
    lines = []
    for job in jobs:
        cut, frame = int(job.arm), store.Run(job.path).rows()[1]
        line: dict[str, Any] = {"seed": job.config.execution.seed, "cut": cut}
        line["last"] = names[cut - 1] if cut else ""
        for split in SPLITS:
            final = headline(frame, split, best=best)
            line[split] = scores_of(final[final["metric"] == score])["value"].item()
        lines.append({**line, "positive": positive_in(final)})
    return pd.DataFrame(lines).sort_values("cut", kind="stable", ignore_index=True)
