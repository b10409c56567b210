"""How good the plans of a rule are: points of accuracy that they lose to the best of all subsets of layers.

``truth.csv`` has the test accuracy of every subset of layers of small federations, by federation and seed
(``python -m figures.decision.truth``). Of a network with adapters it has the plans of :func:`cuts_and_parts`. So a plan
is scored by looking it up, and no plan is trained.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_core.display import Displayed, Summary, aligned
from fl_core.errors import UsageError, check_known, listing, plural
from fl_core.statistics import Interval, mean_interval

TRUTH = Path(__file__).with_name("truth.csv")
BENCHMARK = Path(__file__).with_name("benchmark.csv")
"""The mean points lost of each metric and rule, a column a federation (``python -m figures.decision.rules``)."""
BENCHMARK_SEEDS = 3
"""Seeds of a federation in the benchmark, at most."""
LINE = ("metric", "rule", "rounds")
"""The columns that identify a line of the benchmark.

They are the metric, the rule, and the number of rounds before the measurement.
"""
PUBLIC = (
    "known_labels",
    "known_neither",
    "known_outlier",
    "heart",
    "fashion_labels",
    "fashion_neither",
    "fashion_outlier",
)
"""Federations for those who develop a rule. The others are held out: they alone say that a rule beats a constant."""
ADAPTED = ("tweets_adapters",)
"""Federations of a pretrained network with adapters. It has too many layers for all subsets."""
LEAST_SOURCES = 3
"""Sources of data below which there is no interval with a source as unit."""


def source_of(federation: str) -> str:
    """Return the source of a federation's samples: scikit-learn's digits, Fashion-MNIST, or a data set of its own.

    >>> source_of("known_labels"), source_of("fashion_both"), source_of("heart")
    ('digits', 'fashion', 'heart')
    """
    made_of = {"known": "digits", "fashion": "fashion"}
    return made_of.get(federation.partition("_")[0], federation)


@cache
def read_truth() -> pd.DataFrame:
    """Return the stored test scores: a row for each federation, seed and plan.

    Columns are ``federation``, ``seed``, ``shared``, ``lr`` (the learning rate),
    ``accuracy`` in percent, ``loss`` and ``seconds`` of processor time. Scores are NaN
    where the run diverged. ``shared`` has the names of the shared layers, joined by
    ``+``; it is empty for local training.
    """
    table = pd.read_csv(TRUTH, keep_default_na=False)
    for name in ("accuracy", "loss"):
        table[name] = pd.to_numeric(table[name])
    return table


# --- the stored lines of metrics and rules ------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchmarkLine:
    """The points that a rule loses with a metric, in each federation of the benchmark.

    Attributes:
        rounds: training rounds before the metric is measured.
        lost: {federation: points of accuracy that the rule's plan has less than the best plan}, a mean over seeds. It
            has the federations where the rule names a plan in every seed.
        head_local: {federation: points that are lost if the last layer alone is local}, for all federations.
        plans: the largest number of different plans that the rule named with one network, over federations whose
            answers are known. A rule that always names one plan has 1.
    """

    metric: str
    rule: str
    rounds: int
    lost: Mapping[str, float]
    head_local: Mapping[str, float]
    plans: int

    @property
    def name(self) -> str:
        """Return the rule, the metric and the number of rounds in words."""
        return f"{self.rule} of {self.metric} after {plural(self.rounds, 'round')}"

    @property
    def mean(self) -> float:
        """Return the mean points lost over the federations."""
        return float(np.mean([*self.lost.values()]))

    def text(self) -> str:
        """Return how far to trust a plan of this rule, in one to three sentences.

        With two or more federations outside of :data:`PUBLIC`, it gives an interval over these.
        """
        head = np.mean([self.head_local[name] for name in self.lost])
        sentence = (
            f"In {plural(len(self.lost), 'federation')} of known plans, by up to "
            f"{plural(BENCHMARK_SEEDS, 'seed')}, {self.name} loses "
            f"{self.mean:.2f} points of accuracy to the best plan, a local head {head:.2f}."
        )
        held_out = [name for name in self.lost if name not in PUBLIC]
        if len(held_out) > 1:
            gain = mean_interval(
                [self.head_local[name] - self.lost[name] for name in held_out]
            )
            sentence += (
                f" In {len(held_out)} of them, held out, it gains {gain.value:+.2f} "
                f"[{gain.low:+.2f}, {gain.high:+.2f}] points over a local head."
            )
        if self.plans == 1:
            sentence += " It names one plan for each network with a known answer, so it does not see what differs."
        return sentence


@cache
def read_benchmark() -> pd.DataFrame:
    """Return the stored table: a row for each metric, rule and number of rounds, a column for each federation.

    Values are mean points lost, and NaN where a seed has no plan. Rules that always
    name the same plan, such as ``fedavg``, have an empty metric and 0 rounds. A further
    column is ``plans`` (:class:`BenchmarkLine`).
    """
    table = pd.read_csv(BENCHMARK, keep_default_na=False)
    for name in table.columns.difference(["metric", "rule"]):
        table[name] = pd.to_numeric(table[name])
    return table


@cache
def benchmark_lines() -> tuple[BenchmarkLine, ...]:
    """Return a line for each stored metric, rule and number of rounds. Rules without a metric are left out."""
    table = read_benchmark()
    names = [name for name in table.columns if name not in (*LINE, "plans")]
    of_head = table[table["rule"] == "head_local"][names].iloc[0].to_dict()
    lines = []
    for row in table[table["metric"] != ""].to_dict("records"):
        lost = {name: row[name] for name in names if not math.isnan(row[name])}
        key = row["metric"], row["rule"], int(row["rounds"])
        lines.append(BenchmarkLine(*key, lost, of_head, int(row["plans"])))
    return tuple(lines)


def benchmark_line(metric: str, rule: str, rounds: float) -> BenchmarkLine | None:
    """Return the benchmark's line of a metric and rule with the nearest number of rounds; None without one.

    Distances between numbers of rounds are ratios.

    Args:
        metric: the metric's name.
        rule: the rule's name; ``top k=2`` for two local layers.
        rounds: rounds before the measurement. NaN or 0, which mean after the first local training, count as 1.
    """
    lines = [
        line for line in benchmark_lines() if (line.metric, line.rule) == (metric, rule)
    ]
    rounds_before = 1 if math.isnan(rounds) else max(rounds, 1)
    return min(
        lines, key=lambda line: abs(math.log(line.rounds / rounds_before)), default=None
    )


def mean_lost(lost: Mapping[str, float], half: str) -> float:
    """Return the mean points lost over some of the federations; NaN if there is none.

    Args:
        lost: points lost by federation.
        half: ``public`` for the federations of :data:`PUBLIC`, or ``held out`` for the others.
    """
    values = [v for name, v in lost.items() if (name in PUBLIC) == (half == "public")]
    if values:
        return float(np.mean(values))
    return math.nan


def ranked_lines() -> list[BenchmarkLine]:
    """Return the (metric, rule, rounds) lines whose rule names a plan in every federation of the benchmark.

    They are sorted by mean points of accuracy lost in the federations of :data:`PUBLIC`, least first.
    """
    lines = benchmark_lines()
    n_federations = max(len(line.lost) for line in lines)
    whole_lines = [line for line in lines if len(line.lost) == n_federations]
    return sorted(whole_lines, key=lambda line: mean_lost(line.lost, "public"))


def key_of(shared: Sequence[str], layers: Sequence[str]) -> str:
    """Return the key of a plan in the table: its shared layers, joined by ``+``.

    >>> key_of(["fc2", "fc1"], ["fc1", "fc2", "fc3"])
    'fc1+fc2'
    """
    return "+".join(name for name in layers if name in shared)


@dataclass(frozen=True)
class Truth:
    """All plans of one federation and seed.

    Attributes:
        layers: names of the layers, from input to output.
        accuracy: test accuracy of each plan in percent, by :func:`key_of`; NaN if the run diverged.
    """

    federation: str
    seed: int
    layers: tuple[str, ...]
    accuracy: Mapping[str, float]

    @property
    def best(self) -> float:
        """Return the accuracy of the best plan, in percent."""
        return max(
            accuracy for accuracy in self.accuracy.values() if not math.isnan(accuracy)
        )

    def lost(self, shared: Sequence[str]) -> float:
        """Return the points that a plan loses to the best one; NaN if it diverged or is not in the table."""
        return self.best - self.accuracy.get(key_of(shared, self.layers), math.nan)

    @property
    def fedavg(self) -> float:
        """Return the points lost by sharing all layers; NaN if that run diverged."""
        return self.lost(self.layers)

    @property
    def head_local(self) -> float:
        """Return the points lost with a local last layer; NaN if that run diverged."""
        return self.lost(self.layers[:-1])

    @property
    def random(self) -> float:
        """Return the mean points lost over all plans that did not diverge."""
        return self.best - float(np.nanmean([*self.accuracy.values()]))


def truth_of(federation: str, seed: int) -> Truth | None:
    """Return the plans of a federation and seed.

    It is None if the table has no such seed, or lacks one of its plans.
    """
    table = read_truth()
    seed_rows = table[(table["federation"] == federation) & (table["seed"] == seed)]
    if seed_rows.empty:
        return None
    longest = seed_rows.loc[seed_rows["shared"].str.count(r"\+").idxmax(), "shared"]
    layers = tuple(longest.split("+"))
    if {*seed_rows["shared"]} != {
        key_of(plan, layers) for plan in plans_of(federation, layers)
    }:
        return None
    accuracy = dict(zip(seed_rows["shared"], seed_rows["accuracy"], strict=True))
    return Truth(federation, seed, layers, accuracy)


def plans_of(federation: str, layers: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the plans that the table has for a federation with these layers. A plan is a tuple of shared layers."""
    if federation in ADAPTED:
        return cuts_and_parts(layers)
    return subsets(layers)


def subsets(layers: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all subsets of the layers, the smallest first.

    >>> subsets(["a", "b"])
    [(), ('a',), ('b',), ('a', 'b')]
    """
    sizes = range(len(layers) + 1)
    sized = (itertools.combinations(layers, size) for size in sizes)
    return [*itertools.chain.from_iterable(sized)]


def cuts_and_parts(layers: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the plans of a network with adapters, whose blocks have the layers ``NAME.lora_A`` and ``NAME.lora_B``.

    A plan is a tuple of shared layers. It has the first or the last layers, all but one layer, one block alone, or all
    but one block.

    >>> len(cuts_and_parts(["a.lora_A", "a.lora_B", "b.lora_A", "b.lora_B", "head"]))
    15
    """
    names = [*layers]
    plans = [tuple(names[:count]) for count in range(len(names) + 1)]
    plans += [tuple(names[count:]) for count in range(1, len(names))]
    grouped = itertools.groupby(names, block_of)
    blocks = [tuple(block) for _, block in grouped]
    local_parts = [*[(name,) for name in names], *blocks]
    plans += blocks
    plans += [
        tuple(name for name in names if name not in local_names)
        for local_names in local_parts
    ]
    return [*dict.fromkeys(plans)]


def block_of(layer: str) -> str:
    """Return the name of the layer that an adapter's layer belongs to; other names are returned as they are.

    >>> block_of("blocks.0.lora_A"), block_of("head")
    ('blocks.0', 'head')
    """
    return re.sub(r"\.lora_[AB]$", "", layer)


def known_seeds(federation: str) -> list[int]:
    """Return the seeds of a federation whose plans are all in the table."""
    table = read_truth()
    seeds = table.loc[table["federation"] == federation, "seed"].unique()
    return [int(seed) for seed in seeds if truth_of(federation, int(seed)) is not None]


def federations() -> list[str]:
    """Return the federations of the table that have a seed with all plans."""
    return [name for name in read_truth()["federation"].unique() if known_seeds(name)]


LOST = ("rule", "fedavg", "head_local", "random")
COLUMNS = ("federation", "seed", "shared", *LOST)


@dataclass(frozen=True, repr=False)
class Regret(Displayed):
    """The result of ``fl.regret``.

    Attributes:
        name: name of the rule, and of the metric that it reads.
        rows: a line for each federation and seed, with the columns :data:`COLUMNS`: the plan that the rule names, and
            the points lost by it (``rule``) and by the constants. These are to share all layers (``fedavg``), to keep
            the last layer local (``head_local``), and the mean of all plans (``random``).
        left_out: why a federation or seed has no line. Keys are ``FEDERATION seed N``, ``FEDERATION seeds from N`` for
            seeds that the table lacks, and ``FEDERATION`` for one without files.
    """

    name: str
    rows: pd.DataFrame
    left_out: Mapping[str, str]

    @property
    def table(self) -> pd.DataFrame:
        """Return a line for each federation: the plans that the rule named, and the mean points lost over seeds.

        Columns are ``federation``, ``half`` (``public`` or ``held out``), ``shared`` (the plans with their numbers of
        seeds), and the points lost by the rule and the constants, as in ``rows``.
        """
        lines = []
        for federation, federation_rows in self.rows.groupby("federation", sort=False):
            plans = federation_rows["shared"].replace("", "none").value_counts()
            plans_text = listing(f"{plan} ({count})" for plan, count in plans.items())
            half = "held out"
            if federation in PUBLIC:
                half = "public"
            means = federation_rows[[*LOST]].mean().round(2)
            lines.append((federation, half, plans_text, *means))
        columns = ["federation", "half", "shared", *LOST]
        return pd.DataFrame(lines, columns=columns)

    def mean(self, way: str = "rule", half: str = "") -> Interval:
        """Return the mean points lost, with a 95 % interval over federations (Student's t).

        Args:
            way: ``rule``, or a constant: ``fedavg``, ``head_local``, ``random``.
            half: ``public`` for the federations of :data:`PUBLIC` alone, ``held out`` for the others. Default: all.

        Raises:
            UsageError: no federation has a line, or ``way`` is unknown.
        """
        rows = self._of_half(half)
        if rows.empty:
            raise UsageError(
                f"the rule must have a line in a federation; got none. {listing(self.left_out.values(), 2)}"
            )
        return mean_interval(
            rows.groupby("federation")[check_known("way", way, LOST)].mean()
        )

    def gain(self, way: str = "head_local", half: str = "held out") -> Interval:
        """Return how many points the rule's plans gain over a constant, a mean of paired differences.

        The 95 % interval is over federations (Student's t). It alone says that a rule is better than the constant.

        Args:
            way: the constant: ``fedavg``, ``head_local`` or ``random``.
            half: as for :meth:`mean`.

        Raises:
            UsageError: no federation of the half has a line, or ``way`` is unknown.
        """
        self.mean(way, half)  # refuses what has no line
        rows = self._of_half(half)
        gains = rows[way] - rows["rule"]
        return mean_interval(gains.groupby(rows["federation"]).mean())

    def by_source(self, way: str = "rule", half: str = "") -> Interval:
        """Return the mean points lost over sources of data, with a 95 % interval (Student's t).

        Federations of one source resemble each other, so this interval is the more careful one.

        Args:
            way, half: as for :meth:`mean`.

        Raises:
            UsageError: there are fewer than :data:`LEAST_SOURCES` sources, or ``way``
                is unknown.
        """
        rows = self._of_half(half)
        source = rows["federation"].map(source_of)
        count = source.nunique()
        if count < LEAST_SOURCES:
            raise UsageError(
                f"sources of data must be at least {LEAST_SOURCES} for an interval; got {count}."
            )
        return mean_interval(rows.groupby(source)[check_known("way", way, LOST)].mean())

    def summary(self) -> Summary:
        """Return the mean points lost, and the table."""
        return Summary.of_frame(self.text(), self.table)

    def text(self) -> str:
        """Return a line for each federation, the means, and what is left out."""
        lines = [f"{self.name}: points of accuracy lost to the best plan"]
        if len(self.rows):
            table = self.table
            cells = [[str(cell) for cell in row] for row in table.to_numpy()]
            lines += aligned([[*table.columns], *cells])
            for half in ("", "public", "held out"):
                lines += self._means(half)
            lines += self._gains()
            lines += self._best_known()
        lines += self._left_out()
        if not len(self.rows):
            lines.append("No federation has a line, so there is no mean.")
        return "\n".join(lines)

    def _of_half(self, half: str) -> pd.DataFrame:
        """Return the rows of the public or held out federations; of all without a name."""
        if not half:
            return self.rows
        public = self.rows["federation"].isin(PUBLIC)
        return self.rows[public == (half == "public")]

    def _means(self, half: str) -> list[str]:
        count = self._of_half(half)["federation"].nunique()
        if not count:
            return [f"{half}: no federation"]
        means = {way: self.mean(way, half) for way in LOST}
        rule = means["rule"]
        interval = ""
        if not math.isnan(rule.low):
            interval = f" [{rule.low:.2f}, {rule.high:.2f}]"
        constants = ", ".join(f"{way} {means[way].value:.2f}" for way in LOST[1:])
        sources = self._of_half(half)["federation"].map(source_of).nunique()
        by_source = f"none, {sources} of at least {LEAST_SOURCES}"
        if sources >= LEAST_SOURCES:
            source_interval = self.by_source("rule", half)
            by_source = f"{source_interval.value:.2f} [{source_interval.low:.2f}, {source_interval.high:.2f}]"
        half_name = half or "all"
        return [
            f"{half_name}, mean over {count}: {rule.value:.2f}{interval}, by source {by_source}; {constants}"
        ]

    def _gains(self) -> list[str]:
        """Return a line on the gain over each constant in the held-out half, of at least two federations."""
        if self._of_half("held out")["federation"].nunique() < 2:
            return []
        gains, constants_beaten = [], []
        for way in LOST[1:]:
            value, low, high = self.gain(way)
            gains.append(f"over {way} {value:+.2f} [{low:+.2f}, {high:+.2f}]")
            if low > 0:
                constants_beaten.append(way)
        better_names = listing(constants_beaten) or "none"
        gains_text = ", ".join(gains)
        return [
            f"gain, held out: {gains_text}; shown to be better than: {better_names}"
        ]

    def _best_known(self) -> list[str]:
        best = ranked_lines()[0]
        names = [name for name in self.rows["federation"].unique() if name in best.lost]
        if not names:
            return []
        mean = np.mean([best.lost[name] for name in names])
        return [
            f"best known rule on the public half, {best.name}: mean over {len(names)}: {mean:.2f}"
        ]

    def _left_out(self) -> list[str]:
        """Return a line for each federation and reason, with its seeds."""
        seeds: dict[tuple[str, str], list[str]] = {}
        for key, reason in self.left_out.items():
            name, _, seed = key.partition(" seed ")
            seeds.setdefault((name, reason), []).append(seed)
        lines = []
        for (name, reason), numbers in seeds.items():
            label = f"{name} seed {numbers[0]}"
            if numbers == [""]:
                label = name
            if len(numbers) > 1:
                seed_names = listing(numbers)
                label = f"{name} seeds {seed_names}"
            lines.append(f"left out: {label}: {reason}")
        return lines

    def __repr__(self) -> str:
        return self.text()


def line_of(truth: Truth, shared: Sequence[str]) -> dict[str, Any]:
    """Return a plan's line of :attr:`Regret.rows`: a dict with the keys :data:`COLUMNS`.

    Args:
        truth: all plans of the federation and seed.
        shared: names of the layers that the plan shares.

    Raises:
        UsageError: the plan names an unknown layer, is not in the table, or its run diverged.
    """
    for name in shared:
        check_known("layer of the plan", name, truth.layers)
    plan = key_of(shared, truth.layers)
    lost = truth.lost(shared)
    if math.isnan(lost):
        raise UsageError(
            f"the table must have the plan {plan!r}; got none, or a run that diverged."
        )
    values = (
        truth.federation, truth.seed, plan, lost, truth.fedavg, truth.head_local, truth.random,
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))
