"""Many runs side by side: the same federation, seeds and budget under several algorithms, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from fl_core import rows, runner, statistics, store
from fl_core.algorithms import find
from fl_core.config import RunConfig, resolved
from fl_core.engine import Instruments
from fl_core.errors import UsageError, check_known
from fl_core.plan import LayerPlan

METRICS = ("macro_f1", "accuracy", "loss")
BASELINES = ("local", "fedavg")


@dataclass
class Comparison:
    """What a comparison gives.

    Attributes:
        frame: the rows of all runs.
        scores: one value a run and metric: the headline model on the test split after the last round, combined over
            clients by training samples (columns algorithm, seed, model, metric, value).
        table: one line an algorithm: for each metric mean and 95 % interval over seeds, then fairness, incentive and
            mean rank (by macro-F1).
        clients: the mean over seeds for each algorithm, client and metric.
        friedman: test over seeds as blocks that the algorithms' macro-F1 differ.
    """

    frame: pd.DataFrame
    scores: pd.DataFrame = field(init=False)
    table: pd.DataFrame = field(init=False)
    clients: pd.DataFrame = field(init=False)
    friedman: statistics.FriedmanTest = field(init=False)

    def __post_init__(self) -> None:
        final = headline(self.frame)
        if final.empty:
            raise UsageError("no test scores of a finished run in these rows")
        means = final.groupby(["algorithm", "client", "metric"], sort=False)["value"].mean()
        self.clients = means.reset_index()
        keys = ["algorithm", "seed", "model", "metric"]
        self.scores = pd.DataFrame(
            [
                {**dict(zip(keys, key, strict=True)), "value": statistics.combine(part["value"], part["n_train"])}
                for key, part in final.groupby(keys, sort=False)
            ]
        )
        blocks = self._blocks("macro_f1")
        self.friedman = statistics.friedman(blocks)
        self.table = self._table(statistics.ranks(blocks, higher_is_better=True))

    def _blocks(self, metric: str) -> pd.DataFrame:
        """Algorithms x seeds."""
        chosen = self.scores[self.scores["metric"] == metric]
        return chosen.pivot(index="algorithm", columns="seed", values="value").loc[chosen["algorithm"].unique()]

    def _table(self, ranks: pd.Series) -> pd.DataFrame:
        lines = []
        for name, part in self.scores.groupby("algorithm", sort=False):
            line: dict[str, Any] = {"algorithm": name, "model": part["model"].iloc[0], "seeds": part["seed"].nunique()}
            for metric in METRICS:
                mean, low, high = statistics.mean_interval(part.loc[part["metric"] == metric, "value"])
                line |= {metric: mean, f"{metric}_low": low, f"{metric}_high": high}
            own = self._of(str(name), "macro_f1")
            line["fairness"] = statistics.fairness(own)
            line["incentive"] = self._incentive(str(name))
            line["rank"] = ranks[name]
            lines.append(line)
        return pd.DataFrame(lines)

    def _of(self, algorithm: str, metric: str) -> pd.Series:
        own = (self.clients["algorithm"] == algorithm) & (self.clients["metric"] == metric)
        return self.clients[own].set_index("client")["value"]

    def _incentive(self, name: str) -> float:
        known = set(self.clients["algorithm"])
        if name in BASELINES or not set(BASELINES) <= known:
            return float("nan")
        local, fedavg = (self._of(base, "macro_f1") for base in BASELINES)
        return statistics.incentive(self._of(name, "macro_f1"), local, fedavg, higher_is_better=True)

    def differences(self, reference: str, metric: str = "macro_f1") -> pd.DataFrame:
        """Each other algorithm's score minus the reference's, paired by seed: mean, 95 % interval, number of seeds.

        Raises:
            UsageError: the reference is not in this comparison.
        """
        blocks = self._blocks(metric)
        check_known("algorithm of this comparison", reference, blocks.index)
        lines = []
        for name in blocks.index.drop(reference):
            mean, low, high = statistics.mean_interval((blocks.loc[name] - blocks.loc[reference]).dropna())
            lines.append({"algorithm": name, "value": mean, "low": low, "high": high, "n": blocks.shape[1]})
        return pd.DataFrame(lines, columns=["algorithm", "value", "low", "high", "n"])

    def text(self) -> str:
        """The table for a terminal; percentages, mean and 95 % interval over seeds."""
        return pretty(self.table).to_string(index=False)


def pretty(table: pd.DataFrame) -> pd.DataFrame:
    """A comparison's table in words: scores in percent, intervals behind the mean."""
    shown = pd.DataFrame({"algorithm": table["algorithm"], "model": table["model"], "seeds": table["seeds"]})
    for metric, title, scale in (("macro_f1", "macro-F1 %", 100), ("accuracy", "accuracy %", 100), ("loss", "loss", 1)):
        spread = (table[f"{metric}_high"] - table[f"{metric}_low"]) / 2 * scale
        digits = 1 if scale == 100 else 3
        shown[title] = [
            f"{m * scale:.{digits}f}" + (f" ± {s:.{digits}f}" if np.isfinite(s) else "")
            for m, s in zip(table[metric], spread, strict=True)
        ]
    shown["variance of clients' F1"] = [f"{v:.1e}" for v in table["fairness"]]
    shown["clients above both %"] = ["–" if np.isnan(v) else f"{100 * v:.0f}" for v in table["incentive"]]
    shown["mean rank"] = [f"{v:.1f}" for v in table["rank"]]
    return shown


def headline(frame: pd.DataFrame) -> pd.DataFrame:
    """Test scores of each run's headline model after its last round: ``personal`` where there is one, else global."""
    test = frame[(frame["split"] == "test") & frame["metric"].isin(METRICS) & (frame["model"] != "local")]
    last = test.groupby(["algorithm", "seed"])["round"].transform("max")
    test = test[test["round"] == last]
    has_personal = test.groupby(["algorithm", "seed"])["model"].transform(lambda m: (m == "personal").any())
    return test[test["model"] == np.where(has_personal, "personal", "global")]


def compare(
    config: RunConfig,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    out: Path | str,
    *,
    instruments: Instruments,
    options: Mapping[str, dict[str, Any]] | None = None,
    plan: LayerPlan | None = None,
    command: str = "",
    progress: bool = True,
) -> Comparison:
    """Run every algorithm with every seed below ``out``/runs and compare.

    Runs that are finished are read, runs that were interrupted are resumed, so a comparison can be stopped and
    started again; it refuses finished runs whose configuration differs. All algorithms of a seed have the same
    initial model, data split, client sample and batches.

    Args:
        options: each algorithm's own configuration, by name.
        plan: given to the algorithms that obey one.

    Raises:
        UsageError: anything unknown or not fitting, before the first run.
    """
    out = Path(out)
    options = dict(options or {})
    for name in options:
        check_known("algorithm of this comparison", name, algorithms)
    wanted: list[tuple[Path, RunConfig, LayerPlan | None]] = []
    for seed in seeds:
        for name in algorithms:
            obeys = find(name).splits
            each = replace(config, algorithm=name, seed=seed, options=options.get(name, {}))
            each = each if obeys else replace(each, plan=None)
            wanted.append((out / "runs" / f"{name}-{seed}", each, plan if obeys else None))
    for path, each, its_plan in wanted:  # all is checked before the first run
        task = runner.assemble(each, plan=its_plan)
        if (path / "config.json").exists():
            _check_same(path, task)
    frames = []
    for path, each, its_plan in tqdm(wanted, desc="runs", unit="run", disable=not progress):
        if not (path / "config.json").exists():
            runner.run(each, path, instruments=instruments, plan=its_plan, command=command, progress=False)
        elif store.Run(path).rounds[-1:] != [resolved(each).rounds]:
            runner.resume(path, instruments=instruments, progress=False)
        frames.append(store.Run(path).rows()[1])
    result = Comparison(pd.concat(frames, ignore_index=True))
    header = {**runner.assemble(wanted[0][1], plan=wanted[0][2]).header(command), "runs": len(wanted)}
    rows.write(out / "rows.jsonl", header, (_record(r) for r in result.frame.to_dict("records")))
    result.table.to_csv(out / "table.csv", index=False)
    return result


def _record(record: Mapping[Any, Any]) -> rows.Row:
    """A row as it was before it went through a frame: missing numbers are None again."""
    return {name: None if pd.isna(value) else value for name, value in record.items()}


def _check_same(path: Path, task: runner.Task) -> None:
    stored, plan = runner.stored_config(store.Run(path).config)
    asked = replace(task.config, plan=None) if task.plan is not None else task.config
    free = {"workers", "device", "data_root", "download"}  # these do not change results
    for name in (f.name for f in fields(RunConfig) if f.name not in free):
        if json.dumps(getattr(stored, name)) != json.dumps(getattr(asked, name)):  # a stored tuple is a list
            raise UsageError(
                f"{path} was run with {name}={getattr(stored, name)!r}, now it is {getattr(asked, name)!r}: "
                "choose another directory"
            )
    if plan is not None and task.plan is not None and plan.digest != task.plan.digest:
        raise UsageError(f"{path} was run under another plan ({plan!r}): choose another directory")
