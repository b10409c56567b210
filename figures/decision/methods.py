"""Compute the score of each way of choosing in the stored runs, its loss against the best cut, and its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedlayers.studies.race import WINDOW
from figures.decision.federations import FEDERATIONS, cuts
from figures.decision.runs import DECISION, DITTO, HELD_OUT, PERSONALISED, RULES, TRAINED
from fl_core.config import RunConfig
from fl_core.statistics import mean_interval, ratio_interval

RANDOM = "random cut"
RACE = "race of three"
TO_THE_END = "race of four, to the end"
FINALISTS = "race of four, two from 60 % to the end"
FALLBACK = "all_but_last"
"""What runs where a rule cannot decide: FedPer's own plan."""
THREE = ("nothing", "half", "all_but_last")
Kind = tuple[str, str]
"""A trained model: ``trained`` with a cut or ``ditto``, or ``personalised N`` with a cut."""


@dataclass(frozen=True, eq=False)
class Run:
    """One stored run: one federation with one seed, every cut trained.

    Attributes:
        cuts: shared layers of each cut, by name.
        rounds: macro-F1 and loss on validation after each evaluated round: index (cut, round).
        validation, held_out: the same (and accuracy and the worst client's) of finished models: index (kind, variant).
        decided: cut of each one-epoch rule, in layers; None where it could not decide.
        others: the federation's other runs, the next seeds first and then from the first one on.
    """

    federation: str
    seed: int
    cuts: Mapping[str, int]
    rounds: pd.DataFrame
    validation: pd.DataFrame
    held_out: pd.DataFrame
    decided: Mapping[str, int | None]
    others: tuple[Run, ...] = ()

    @property
    def n_rounds(self) -> int:
        return int(FEDERATIONS[self.federation].config.rounds or 1)


@dataclass(frozen=True)
class Method:
    """A way of ending with a model.

    Attributes:
        name: as it is shown.
        ends: what it ends with in a run; None for the mean over the inner cuts.
        cost: of it in that run, in full runs of FedPer, the winner's completion included.
    """

    name: str
    ends: Callable[[Run], Kind] | None
    cost: Callable[[Run], float]


# --- reading ---------------------------------------------------------------------------------------------------


def runs_of(frame: pd.DataFrame, layers: Mapping[str, int]) -> list[Run]:
    """The stored runs, from the rows of :mod:`figures.decision.runs`.

    Args:
        layers: layers that train, by federation.
    """
    found = []
    for (federation, seed), part in frame.groupby(["run", "seed"], sort=False):
        finished = part[part["estimator"].ne("") & part["model"].eq("")]
        tables = {
            split: finished[finished["split"] == split].pivot(
                index=["estimator", "variant"], columns="metric", values="value"
            )
            for split in ("validation", HELD_OUT)
        }
        rounds = part[part["model"] == "personal"].pivot(index=["variant", "round"], columns="metric", values="value")
        decided = part[part["metric"] == DECISION].set_index("variant")["value"]
        found.append(
            Run(
                str(federation),
                int(seed),
                cuts(layers[str(federation)]),
                rounds,
                tables["validation"],
                tables[HELD_OUT],
                {str(rule): None if pd.isna(cut) else int(cut) for rule, cut in decided.items()},
            )
        )
    return [replace(run, others=_others(run, found)) for run in found]


def _others(run: Run, runs: Sequence[Run]) -> tuple[Run, ...]:
    own = sorted((each for each in runs if each.federation == run.federation), key=lambda each: each.seed)
    return tuple(each for each in own if each.seed > run.seed) + tuple(each for each in own if each.seed < run.seed)


# --- the methods -----------------------------------------------------------------------------------------------


def _standardised(values: pd.Series) -> pd.Series:
    spread = float(values.std(ddof=0))
    return (values - values.mean()) / spread if spread > 1e-12 else values * 0.0


def _judged(table: pd.DataFrame, by: str = "both") -> pd.Series:
    """z(macro-F1) - z(loss) over the lines of a table, or one of the two alone; higher is better."""
    if by == "both":
        return _standardised(table["macro_f1"]) - _standardised(table["loss"])
    return table["macro_f1"] if by == "macro_f1" else -table["loss"]


def standing(run: Run, names: Sequence[str], share: float, by: str) -> pd.Series:
    """Each arm's mean over the last evaluated rounds up to a share of all, of what it is judged by."""
    return _standing(run, tuple(names), share, by)


def race_end(config: RunConfig, share: float) -> int:
    """Return the first evaluated round at or after a share of all rounds, and at least the third evaluated one."""
    rounds, every = int(config.rounds or 1), int(config.eval_every or 1)
    evaluated = math.ceil(share * rounds / every)
    return min(rounds, every * max(evaluated, min(WINDOW, rounds // every)))


@cache  # many methods ask for the same
def _standing(run: Run, names: tuple[str, ...], share: float, by: str) -> pd.Series:
    rounds = run.rounds.loc[list(names)]
    rounds = rounds[rounds.index.get_level_values("round") <= race_end(FEDERATIONS[run.federation].config, share)]
    scores = pd.concat([_judged(part, by) for _, part in rounds.groupby(level="round")])
    return pd.Series({name: scores.loc[name].sort_index().tail(WINDOW).mean() for name in names})


def race(
    arms: Sequence[str] | None = THREE,
    share: float = 0.6,
    by: str = "both",
    seeds: int = 1,
    two_from: float | None = None,
) -> Callable[[Run], Kind]:
    """The winner among some cuts (None: all), judged after a share of the rounds.

    Args:
        seeds: how many runs' races decide together, by the mean of their scores.
        two_from: after this share of the rounds only the better two of the arms go on; a tie at the end is the leader's
            of then.
    """

    def winner(run: Run) -> Kind:
        names = [name for name in (arms or run.cuts) if name in run.cuts]
        together = (run, *run.others[: seeds - 1])
        if two_from is not None:
            names = list(sum(standing(each, names, two_from, by) for each in together).nlargest(2).index)
        means = sum(standing(each, names, share, by) for each in together)
        return TRAINED, str(means.idxmax())

    return winner


def race_cost(
    arms: Sequence[str] | None = THREE, share: float = 0.6, seeds: int = 1, two_from: float | None = None
) -> Callable[[Run], float]:
    """Return the cost of a race and of completing its winner, for all seeds that decide together."""

    def cost(run: Run) -> float:
        config = FEDERATIONS[run.federation].config
        raced = race_end(config, share) / run.n_rounds
        count = len([name for name in (arms or run.cuts) if name in run.cuts])
        early = raced if two_from is None else race_end(config, two_from) / run.n_rounds
        saved = (count - 2) * max(0.0, raced - early)
        return seeds * (raced * count + 1 - raced - saved)

    return cost


def rule(name: str) -> Callable[[Run], Kind]:
    """The cut nearest to what a one-epoch rule decides."""

    def nearest(run: Run) -> Kind:
        decided = run.decided.get(name)
        if decided is None:
            return TRAINED, FALLBACK
        return TRAINED, min(run.cuts, key=lambda cut: (abs(run.cuts[cut] - decided), run.cuts[cut]))

    return nearest


def personalised(epochs: int) -> Callable[[Run], Kind]:
    """FedAvg's model with own epochs of the layers above the depth that validation prefers."""

    def best(run: Run) -> Kind:
        kind = f"{PERSONALISED} {epochs}"
        scores = _judged(run.validation.loc[[kind]])
        return kind, str(scores.idxmax()[1])

    return best


def better_of(*candidates: Callable[[Run], Kind]) -> Callable[[Run], Kind]:
    """The candidate that finished models' validation scores prefer."""

    def best(run: Run) -> Kind:
        scores = _judged(run.validation.drop((TRAINED, DITTO)))
        return max((candidate(run) for candidate in candidates), key=lambda kind: scores.loc[kind])

    return best


def _fixed(kind: str, variant: str) -> Callable[[Run], Kind]:
    return lambda run: (kind, variant if variant in run.cuts or variant == DITTO else FALLBACK)


def _own(epochs: int, depths: bool) -> Callable[[Run], float]:
    return lambda run: 1 + epochs * ((len(run.cuts) - 1) if depths else 1) / run.n_rounds


def _one(run: Run) -> float:
    return 1.0


def methods() -> tuple[Method, ...]:
    """All that are compared, as :file:`PREREGISTERED.md` names them."""
    four = (*THREE, "all")
    return (
        Method(RANDOM, None, _one),
        Method("share nothing", _fixed(TRAINED, "nothing"), _one),
        Method("share the first half", _fixed(TRAINED, "half"), _one),
        Method("share all but the last", _fixed(TRAINED, "all_but_last"), _one),
        Method("share all", _fixed(TRAINED, "all"), _one),
        *(Method(name, rule(name), lambda run: 1 + 1 / run.n_rounds) for name in RULES),
        Method(RACE, race(), race_cost()),
        Method("race of three, to 50 %", race(share=0.5), race_cost(share=0.5)),
        Method("race of three, to 75 %", race(share=0.75), race_cost(share=0.75)),
        Method("race of three, by macro-F1", race(by="macro_f1"), race_cost()),
        Method("race of three, by loss", race(by="loss"), race_cost()),
        Method("race of four, with all", race(four), race_cost(four)),
        Method("race of every cut", race(None), race_cost(None)),
        Method("race of three, 3 seeds", race(seeds=3), race_cost(seeds=3)),
        Method("race of three, 3 seeds, to 75 %", race(share=0.75, seeds=3), race_cost(share=0.75, seeds=3)),
        Method(
            "race of three, two from 50 to 75 %",
            race(share=0.75, two_from=0.5),
            race_cost(share=0.75, two_from=0.5),
        ),
        Method("race of half and all but the last", race(THREE[1:]), race_cost(THREE[1:])),
        Method("race of four, with all, to 75 %", race(four, share=0.75), race_cost(four, share=0.75)),
        Method(TO_THE_END, race(four, share=1.0), race_cost(four, share=1.0)),
        Method(
            FINALISTS,
            race(four, share=1.0, two_from=0.6),
            race_cost(four, share=1.0, two_from=0.6),
        ),
        Method("FedAvg, 1 own epoch, depth chosen", personalised(1), _own(1, depths=True)),
        Method("FedAvg, 2 own epochs, depth chosen", personalised(2), _own(2, depths=True)),
        Method(
            "race, or FedAvg with 2 own epochs",
            better_of(race(), personalised(2)),
            lambda run: race_cost()(run) + _own(2, depths=True)(run),
        ),
        Method("FedAvg, 2 own epochs of all", _fixed(f"{PERSONALISED} 2", "nothing"), _own(2, depths=False)),
        Method("Ditto", _fixed(TRAINED, DITTO), lambda run: 2.0),
    )


# --- regret ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Federated:
    """Scores of one federation: methods and their costs are [M, runs], cuts are [C, runs]."""

    name: str
    seeds: tuple[int, ...]
    cut_names: tuple[str, ...]
    cuts: NDArray[np.float64]
    methods: NDArray[np.float64]
    costs: NDArray[np.float64]
    ends: tuple[tuple[str, ...], ...]

    @property
    def best(self) -> str:
        """The cut with the highest mean score."""
        return self.cut_names[int(self.cuts.mean(axis=1).argmax())]

    def regrets(self) -> NDArray[np.float64]:
        """Mean over runs of best cut's score - method's score, [M]."""
        means: NDArray[np.float64] = self.cuts.mean(axis=1).max() - self.methods.mean(axis=1)
        return means

    def crossfitted(self) -> NDArray[np.float64]:
        """The same where the best cut of each run is the best over the other runs, [M]; NaN of a single run."""
        n = self.cuts.shape[1]
        if n < 2:
            return np.full(len(self.methods), np.nan)
        lost = []
        for run in range(n):
            others = np.delete(self.cuts, run, axis=1).mean(axis=1)
            lost.append(self.cuts[others.argmax(), run] - self.methods[:, run])
        crossed: NDArray[np.float64] = np.mean(lost, axis=0)
        return crossed


def federated(runs: Sequence[Run], compared: Sequence[Method], score: str = "macro_f1") -> list[Federated]:
    """The scores of every federation on held-out samples, of one named score turned so that higher is better."""
    sign = -1.0 if score.endswith("loss") else 1.0
    result = []
    for name in FEDERATIONS:
        own = [run for run in runs if run.federation == name]
        if not own:
            continue
        names = tuple(own[0].cuts)
        by_cut = np.array([[run.held_out.loc[(TRAINED, cut), score] for run in own] for cut in names])
        inner = [k for k, cut in enumerate(names) if cut not in ("nothing", "all")]
        scores, ends = [], []
        for method in compared:
            if method.ends is None:
                scores.append(by_cut[inner].mean(axis=0))
                ends.append(("",) * len(own))
                continue
            kinds = [method.ends(run) for run in own]
            scores.append(np.array([run.held_out.loc[kind, score] for run, kind in zip(own, kinds, strict=True)]))
            ends.append(tuple(variant for _, variant in kinds))
        costs = np.array([[method.cost(run) for run in own] for method in compared])
        seeds = tuple(run.seed for run in own)
        result.append(Federated(name, seeds, names, sign * by_cut, sign * np.array(scores), costs, tuple(ends)))
    return result


def summary(parts: Sequence[Federated], compared: Sequence[Method]) -> pd.DataFrame:
    """Return one line a method with its cost and mean regrets, with t intervals over federations.

    The ratio is that of the regrets' sum to a random cut's, the first method.
    """
    regrets = np.stack([part.regrets() for part in parts])  # [federations, M]
    crossed = np.stack([part.crossfitted() for part in parts])
    costs = np.mean([part.costs.mean(axis=1) for part in parts], axis=0)
    lines: list[dict[str, Any]] = []
    for k, method in enumerate(compared):
        worst = int(regrets[:, k].argmax())
        mean, ratio = mean_interval(regrets[:, k]), ratio_interval(regrets[:, k], regrets[:, 0])
        lines.append(
            {
                "method": method.name,
                "cost": costs[k],
                **mean.columns("regret"),
                "crossfitted": crossed[:, k].mean(),
                **ratio.columns("ratio"),
                "worst": regrets[worst, k],
                "worst_federation": parts[worst].name,
                "federations": len(parts),
                "runs": sum(len(part.seeds) for part in parts),
            }
        )
    return pd.DataFrame(lines)
