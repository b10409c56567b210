"""Regret of rules: every cut is trained, and a rule's regret is how much its cut loses against the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from fedlayers.diagnostics import measure
from fedlayers.diagnostics.decide import select
from fedlayers.diagnostics.decide.rules.base import RULES, deciding
from fedlayers.diagnostics.metrics.base import DEFAULT, METRICS
from fedlayers.studies.compare import check_folder, compare, headline
from fl_core import runner, statistics
from fl_core.algorithms import find, registry
from fl_core.config import RunConfig, resolved
from fl_core.errors import RunError, UsageError, check_distinct, listing
from fl_core.layers import Layer
from fl_core.plan import CANDIDATE, Evidence, LayerPlan
from fl_core.records.files import write_atomically
from fl_core.scores import MAIN, SCORES, TABLE, check_score
from fl_core.training.losses import LOSSES

DEFAULT_RULES = ("sensitivity_ratio", "largest_jump", "change_point", "vote")
RANDOM = "random cut"
REFERENCES = ("share nothing", "all but the last layer", "share every layer", RANDOM)
LEGEND = (
    "regret: the best cut's validation score minus the rule's, 0 is best; over random: the rule's score minus the mean "
    "over the cuts\nthat a rule can choose. Each is paired by seed; mean ± half the 95 % interval over seeds. Test "
    "scores choose nothing: test\nregret is the test score of the cut that is best in validation minus the rule's, and "
    "can be below 0. The best of several\nnoisy scores is too high on average, so that even the right cut has some "
    "regret."
)


@dataclass
class Regret:
    """The scores of all cuts, and how each rule's choice compares.

    Attributes:
        score: the name of the scores.
        layers: names of the layers that train, L of them; a cut k shares the first k, and the frozen ones.
        scores: one line a seed and cut (columns seed, cut, last, validation, test): the headline model after the last
            round, combined over clients by training samples.
        decisions: one line a rule and seed (rule, seed, cut, status); no cut where the rule could not decide.
        choices: decisions and references with their scores: validation, test, and ``regret`` = best validation score
            of the seed - validation, at least 0; ``over_random`` = validation - mean validation over the cuts
            1 .. L-1; ``test_regret`` = test score of the seed's best cut by validation - test. For a score of which
            lower is better the differences are turned round.
        table: one line a rule: how many seeds it decided, its cuts, and means over them with 95 % intervals.
    """

    score: str
    layers: tuple[str, ...]
    scores: pd.DataFrame
    decisions: pd.DataFrame
    choices: pd.DataFrame = field(init=False)
    table: pd.DataFrame = field(init=False)

    def __post_init__(self) -> None:
        if not set(self.scores["cut"]) >= set(range(len(self.layers) + 1)):
            raise UsageError(f"regret needs the scores of all cuts from 0 to {len(self.layers)}")
        lines = []
        for seed, part in self.scores.groupby("seed", sort=False):
            of_seed = self.decisions[self.decisions["seed"] == seed]
            lines += self._lines(seed, part.set_index("cut"), of_seed)
        self.choices = pd.DataFrame(lines)
        order = [*self.decisions["rule"].unique(), *REFERENCES]
        self.table = pd.DataFrame([self._summary(rule, self.choices[self.choices["rule"] == rule]) for rule in order])

    def _lines(self, seed: Any, scores: pd.DataFrame, decisions: pd.DataFrame) -> list[dict[str, Any]]:
        """One seed's rules and references, each beside the best cut."""
        sign, count = (1 if SCORES[self.score] else -1), len(self.layers)
        inner = scores.loc[range(1, count)]
        best = scores.loc[(sign * scores["validation"]).idxmax()]
        decided = [(line.rule, line.cut, line.status) for line in decisions.itertuples()]
        decided += [(name, cut, "ok") for name, cut in zip(REFERENCES, (0, count - 1, count, None), strict=True)]
        lines = []
        for rule, cut, status in decided:
            scored = dict.fromkeys(("validation", "test"), math.nan)
            if rule == RANDOM:
                scored = {split: float(inner[split].mean()) for split in scored}
            elif not pd.isna(cut):
                scored = {split: float(scores.loc[cut, split]) for split in scored}
            differences = {
                "regret": best["validation"] - scored["validation"],
                "over_random": scored["validation"] - inner["validation"].mean(),
                "test_regret": best["test"] - scored["test"],
            }
            lost = {name: sign * float(value) + 0.0 for name, value in differences.items()}
            cut = None if pd.isna(cut) else int(cut)
            lines.append({"rule": rule, "seed": seed, "cut": cut, "best": int(best.name), **scored, **lost})
            lines[-1]["status"] = status
        return lines

    def _summary(self, rule: str, part: pd.DataFrame) -> dict[str, Any]:
        scored = part[part["validation"].notna()]
        line: dict[str, Any] = {"rule": rule, "seeds": len(scored)}
        line["cuts"] = " ".join(f"{int(cut)}" for cut in scored["cut"].dropna())
        for name in ("validation", "regret", "over_random", "test", "test_regret"):
            interval = statistics.mean_interval(scored[name]) if len(scored) else (math.nan,) * 3
            line |= dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))
        return line

    def text(self) -> str:
        """The table as text for a terminal, the best cuts, and the meaning of the columns."""
        scale, digits = (100, 1) if TABLE[self.score].share else (1, 3)
        unit = " %" if scale == 100 else ""
        shown = pd.DataFrame({"rule": self.table["rule"], "seeds": self.table["seeds"], "cuts": self.table["cuts"]})
        for name in ("validation", "regret", "over_random", "test", "test_regret"):
            shown[name.replace("_", " ") + unit] = [
                "–"
                if pd.isna(m)
                else f"{scale * m:.{digits}f}" + ("" if pd.isna(high) else f" ± {scale * (high - m):.{digits}f}")
                for m, high in zip(self.table[name], self.table[f"{name}_high"], strict=True)
            ]
        best = self.choices.drop_duplicates("seed")
        cuts = ", ".join(f"{line.best} (seed {line.seed})" for line in best.itertuples())
        layers = ", ".join(f"{k} {name}" for k, name in enumerate(self.layers, 1))
        failed = self.choices[self.choices["status"] != "ok"]
        notes = [f"{line.rule} does not decide with seed {line.seed}: {line.status}" for line in failed.itertuples()]
        head = f"{self.score} of every cut; best in validation: {cuts}\nlayers: {layers}"
        return "\n\n".join([head, shown.to_string(index=False), *notes, LEGEND])


def regret(
    config: RunConfig,
    rules: Sequence[str] = DEFAULT_RULES,
    seeds: Sequence[int] = (0, 1, 2),
    out: Path | str = Path("out/regret"),
    *,
    score: str = "",
    command: str = "",
    progress: bool = True,
) -> Regret:
    """Train every cut with several seeds, let every rule decide, and compare its choice with the best cut.

    With L layers that train, each of the plans that share the first 0 .. L of them (and the frozen ones) is run under
    the configuration's algorithm (below ``out``/cuts), and every seed is measured after every client's first local
    training (``out``/measured), which is what the rules read. Cuts are judged by their score on the validation split;
    the test split is only reported. ``scores.csv`` has all cuts, ``regret.csv`` every rule and seed, ``table.csv`` the
    means. Finished runs are read and interrupted ones resumed, so that the same call goes on after a stop; every call,
    also one with other rules, measures anew, which trains each client for one round.

    Args:
        config: what is trained, small enough that L + 1 runs a seed can be afforded; its ``threshold`` is the rules'.
        rules: ``"RULE"``, read on federation sensitivity, or ``"METRIC=RULE"``; ``vote`` reads the default metrics.
        score: one of :data:`fl_core.scores.SCORES`; default macro-F1, of numbers R2.

    Raises:
        UsageError: anything unknown or not fitting; before the first run where it can be known then.
        RunError: a run failed; the same call goes on from there. A rule that cannot decide is a line with its reason.
    """
    task = LOSSES[str(resolved(config).loss)].task
    score = check_score(score or MAIN[task], task)
    parsed_rules = {text: _parsed(text) for text in rules}
    check_distinct("regret", "rule", rules)
    check_distinct("regret", "seed", seeds)
    if config.plan is not None:
        raise UsageError("regret makes every plan itself; leave the plan out")
    if not find(config.algorithm).splits:
        obey = sorted(name for name, kind in registry().items() if kind.splits)
        raise UsageError(f"{config.algorithm} takes no plan; these do: {listing(obey)}")
    out = Path(out)
    check_folder(out)

    decided: list[dict[str, Any]] = []
    layers: tuple[Layer, ...] = ()
    for seed in tqdm(seeds, desc="measured", unit="seed", disable=not progress):
        layers, decisions = _decisions(replace(config, seed=seed), parsed_rules, out, command)
        decided += decisions
    nothing = LayerPlan(layers, (), Evidence(rule=CANDIDATE))
    names = nothing.trainable
    frames = []
    for cut in tqdm(range(len(names) + 1), desc="cuts", unit="cut", disable=not progress):
        frames.append(_trained(config, seeds, nothing.with_first(cut), cut, out, score, command))
        frames[-1]["last"] = names[cut - 1] if cut else ""
    result = Regret(score, names, pd.concat(frames, ignore_index=True), pd.DataFrame(decided))
    for name, table in (("scores", result.scores), ("regret", result.choices), ("table", result.table)):
        write_atomically(out / f"{name}.csv", table.to_csv(index=False).encode())
    return result


def _parsed(text: str) -> tuple[str, str | None]:
    """The rule and the metric in an argument ``RULE`` or ``METRIC=RULE``; no metric in the first."""
    metric, equals, rule = text.rpartition("=")
    joint = RULES[rule].reads == "curves"
    if not joint:
        deciding(rule)
    if equals and joint:
        raise UsageError(f"rule {rule!r} reads several metrics; it is named alone")
    return rule, (METRICS[metric].name if equals else None)


def _decisions(
    config: RunConfig, parsed_rules: dict[str, tuple[str, str | None]], out: Path, command: str
) -> tuple[tuple[Layer, ...], list[dict[str, Any]]]:
    """The layers of one seed's model, and each rule's decision after the clients' first local training."""
    task = runner.assemble(config, plan=None)
    metrics = [metric or measure.SENSITIVITY for rule, metric in parsed_rules.values() if RULES[rule].reads != "curves"]
    metrics += DEFAULT if any(RULES[rule].reads == "curves" for rule, _ in parsed_rules.values()) else ()
    report = measure.of_task(task, tuple(dict.fromkeys(metrics)), command=command, progress=False)
    (out / "measured").mkdir(parents=True, exist_ok=True)
    report.write(out / "measured" / f"{config.seed}.jsonl")
    decisions = []
    for text, (rule, metric) in parsed_rules.items():
        line: dict[str, Any] = {"rule": text, "seed": config.seed, "cut": None, "status": "ok"}
        try:
            plan = select.select(report, rule, metric=metric, threshold=config.threshold)
            line["cut"] = plan.cut
        except RunError as error:
            line["status"] = str(error)
        decisions.append(line)
    return task.layers, decisions


def _trained(
    config: RunConfig, seeds: Sequence[int], plan: LayerPlan, cut: int, out: Path, score: str, command: str
) -> pd.DataFrame:
    """Validation and test scores of one cut, for every seed."""
    run = compare(
        config,
        [config.algorithm],
        seeds,
        out / "cuts" / str(cut),
        options={config.algorithm: config.options},
        plan=plan,
        command=command,
        progress=False,
    )
    columns = {}
    for split in ("validation", "test"):
        final = headline(run.frame, split)
        final = final[final["metric"] == score]
        columns[split] = {
            seed: statistics.combine(part["value"], part["n_train"]) for seed, part in final.groupby("seed")
        }
    return pd.DataFrame([{"seed": s, "cut": cut, **{split: columns[split][s] for split in columns}} for s in seeds])
