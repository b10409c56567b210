"""The answer of a decision: one frozen object, and its headline, bullets and table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from diagnostics.tuning.permutation import Difference
from fedlayers.decision.ways import (
    ALONE,
    ELSEWHERE,
    LINEAR,
    NONE,
    SHARE_ALL,
    SHARE_SOME,
)
from fl_core import __version__
from fl_core.display import Displayed, Summary
from fl_core.errors import listing
from fl_core.plan import LayerPlan
from fl_core.rows import (
    CLASSIFICATION,
    MULTILABEL,
    REGRESSION,
    SCORES,
    SURVIVAL,
    TABLE,
    label_of,
)

if TYPE_CHECKING:
    from fedlayers.decision.training import Trained

FORMAT = "fedlayers.choice/2"
LOSES, GAINS, NONE_SHOWN = "loses", "gains", "none shown"
WIDTH = 88
LINES = 8
"""The most lines of an answer in the terminal."""
WORDS = 120
"""The most words of a headline with its bullets."""
NAMED = 3
"""Clients, or layers, that a sentence names at most."""
EPOCHS = {1: "one epoch", 2: "two epochs", 4: "four epochs"}
LINEAR_WORDS = {
    REGRESSION: "a ridge regression",
    SURVIVAL: "a Cox regression",
}
"""The linear model of a task in words; of classes and labels it is a logistic regression."""


class Line(NamedTuple):
    """A way in the answer's table.

    Attributes:
        way: the way's name.
        action: ``share_all``, ``share_some`` or ``alone``; empty for the base rate and for pooled models.
        value: the way's score in the answer's split as it is printed, shares in
            percent.
        difference: ``value`` minus the value of the recommended way, or else of the
            base rate. It is 0 in that way's own line.
        low, high: the ends of the difference's 95 % interval, which holds for all lines together; NaN if unknown.
        error: the standard error of the difference; NaN if unknown.
    """

    way: str
    action: str
    value: float
    difference: float = 0.0
    low: float = math.nan
    high: float = math.nan
    error: float = math.nan

    @property
    def shown(self) -> bool:
        """Return whether the printed interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, repr=False)
class Answer(Displayed):
    """What to federate, and the evidence. Every text, table and file of a decision is a view of this object.

    Attributes:
        action: ``share_all``, ``share_some``, ``alone``, or ``none`` if no way is better than the base rate.
        way: the name of what to use; empty for ``none``.
        plan: the layers of your network to share; None for a way without a plan, such
            as a simple model.
        fine_tuning, rate: epochs that every client trains after the last round, and their learning rate.
        network: the name of the way that would be recommended if only those of your
            network were compared; empty if none of them is better than the base rate.
            Its plan, if it has one, is in ``plans/``.
        lines: every way and the base rate: its score, and its difference to the first
            line. First is the recommended way, or else the base rate. Empty in a dry
            run.
        better_than: the lines of local training, the best simple model of each client,
            the best way of each other action, FedAvg and the base rate.
        also_good: at most two lines of other actions within one standard error, those that do not federate first.
        pooled: the line of a model of all rows together, if it is shown to be better.
        clients: ``gains``, ``loses`` or ``none shown`` for each client with samples in
            ``split``. A client gains if the way is shown to have a lower loss than both
            local training and the client's own linear model. It loses if one of these
            is shown to have a lower loss than the way. A rival that was not trained, or
            is the way itself, does not count.
        fallback: the clients whose validation loss is shown to be lower alone.
        differ: whether clients differ; None if it was not tested.
        alike: groups of clients, if they stand out; else empty.
        new_client: the way whose shared model fits a client that joins later; empty without one.
        score: the score that ranks the ways.
        split: the split that is scored: ``test``, or ``validation`` without test
            samples.
        digits: digits after the decimal point.
        samples, smallest: the number of samples in this split in the first seed, and
            the smallest difference that they can show; NaN if unknown. For a score
            other than the loss the number is that of the jackknife's blocks of samples.
        task: the kind of task, of :data:`fl_core.rows.TASKS`.
        seeds: the seeds of the runs.
        cost: ``bytes_a_round`` of a client, ``rounds``, ``full_runs``, ``bytes`` of all clients, and ``seconds``.
        rates: the learning rates in words, if any were tried. In a dry run it has the
            estimated cost.
        not_tried: why a way was not tried or has no result, by name.
        next: a command that exports the recommended way; empty without one.
        layers: the shared and the local layers of the recommended plan, as people read them.
        trained: the runs behind the answer, for pictures; None for an answer from a file.
    """

    action: str
    way: str
    lines: tuple[Line, ...]
    score: str
    split: str
    digits: int
    task: str
    seeds: tuple[int, ...]
    plan: LayerPlan | None = None
    fine_tuning: int = 0
    rate: float = 0.0
    network: str = ""
    better_than: tuple[Line, ...] = ()
    also_good: tuple[Line, ...] = ()
    pooled: Line | None = None
    clients: Mapping[str, str] = field(default_factory=dict)
    fallback: tuple[str, ...] = ()
    differ: Difference | None = None
    alike: tuple[tuple[str, ...], ...] = ()
    new_client: str = ""
    samples: int = 0
    smallest: float = math.nan
    cost: Mapping[str, float] = field(default_factory=dict)
    rates: str = ""
    not_tried: Mapping[str, str] = field(default_factory=dict)
    next: str = ""
    layers: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    trained: Trained | None = field(default=None, compare=False)

    @property
    def best(self) -> Line:
        """Return the line of the recommended way, or of the base rate if no way is recommended.

        Raises:
            IndexError: the answer is that of a dry run, which has no lines.
        """
        return self.lines[0]

    def line(self, way: str) -> Line | None:
        """Return the line of a way; None if the answer has none."""
        return next((line for line in self.lines if line.way == way), None)

    @property
    def table(self) -> pd.DataFrame:
        """Return a line for each of ``lines``, in their order, as a table of numbers.

        Columns are ``way``, the score by its name, ``difference`` to the first line, and
        ``low`` and ``high``, the ends of the difference's 95 % interval. A share is in
        percent. Ends are NaN if unknown. The table is empty in a dry run.
        """
        columns = ["way", self.score, "difference", "low", "high"]
        rows = [
            (line.way, line.value, line.difference, line.low, line.high)
            for line in self.lines
        ]
        return pd.DataFrame(rows, columns=columns)

    def headline(self) -> str:
        """Return what to do, and how much better it is, in at most 60 words."""
        return headline(self)

    def text(self) -> str:
        """Return the headline and its bullets, in lines of at most 88 characters."""
        return text(self)

    def summary(self) -> Summary:
        """Return the headline, the table and the layers."""
        layers = None if self.plan is None else self.plan.by_layer()
        return Summary.of_frame(self.headline(), self.shown(), layers)

    def shown(self) -> pd.DataFrame:
        """Return the ways as a table of text, with a note on each difference.

        Columns are ``way``, the score, the difference to the recommended way, or else to
        the base rate, with its interval, and ``note``.
        """
        return table(self)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as a dictionary for JSON, as in ``choice.json``."""
        differ = self.differ
        return {
            "format": FORMAT,
            "version": __version__,
            "action": self.action,
            "way": self.way,
            "shared": self.plan and list(self.plan.shared),
            "fine_tuning": self.fine_tuning,
            "rate": self.rate,
            "network": self.network,
            "headline": self.headline(),
            "score": self.score,
            "split": self.split,
            "seeds": list(self.seeds),
            "samples": self.samples,
            "smallest": _number(self.smallest),
            "table": [_plain(line) for line in self.lines],
            "better_than": [line.way for line in self.better_than],
            "also_good": [line.way for line in self.also_good],
            "pooled": self.pooled and self.pooled.way,
            "clients": dict(self.clients),
            "fallback": list(self.fallback),
            "differ": differ
            and {
                "p": differ.p_value,
                "shown": differ.shown,
                "lead": differ.lead,
                "samples": differ.samples,
            },
            "alike": [list(group) for group in self.alike],
            "new_client": self.new_client,
            "cost": dict(self.cost),
            "not_tried": dict(self.not_tried),
            "next": self.next,
        }


def _number(value: float) -> float | None:
    if math.isfinite(value):
        return value
    return None


def _plain(line: Line) -> dict[str, Any]:
    numbers = {"value": line.value, "difference": line.difference}
    ends = {"low": _number(line.low), "high": _number(line.high)}
    return {
        "way": line.way,
        "action": line.action,
        **numbers,
        **ends,
        "shown": line.shown,
    }


# --- words -----------------------------------------------------------------------------------------------------


def describe(way: str, task: str) -> str:
    """Return a way's name as a phrase for a sentence, such as ``local training``.

    A name without a phrase, such as an algorithm's, stays as it is.

    Args:
        way: the way's name.
        task: the kind of task, of :data:`fl_core.rows.TASKS`. The phrase for a linear
            model depends on it.

    >>> describe("local", "classification"), describe("linear_local", "survival")
    ('local training', 'a Cox regression of each client')
    """
    linear = LINEAR_WORDS.get(task, "a logistic regression")
    words = {
        "fedavg": "sharing all layers",
        "local": "local training",
        "head_local": "keeping the last layer local",
        "lora_A": "sharing the factors A of the adapters",
        "groups": "sharing all layers within groups",
        "linear_local": f"{linear} of each client",
        "boosting_local": "gradient boosting of each client",
        "linear_pooled": f"{linear} of all rows together",
        "boosting_pooled": "gradient boosting of all rows together",
        LINEAR: "a federated linear model",
        "base_rate": "the base rate",
    }
    return words.get(way, way)


def score_name(answer: Answer) -> str:
    """Return the name of the score that ranks the ways.

    It is the log loss of classes or labels, else the loss, or the named score. A score
    that is a share has its unit, %, after the name.
    """
    if answer.score != "loss":
        unit = ""
        if TABLE[answer.score].share:
            unit = " %"
        label = label_of(answer.score)
        return f"{label}{unit}"
    if answer.task in (CLASSIFICATION, MULTILABEL):
        return "log loss"
    return "loss"


def number(answer: Answer, value: float) -> str:
    """Return a value formatted with the answer's digits after the point."""
    rounded = round(value, answer.digits) + 0.0  # no minus before a 0
    return f"{rounded:.{answer.digits}f}"


def difference(answer: Answer, line: Line, reverse: bool = False) -> str:
    """Return the difference of a line to the recommended way, in words with its interval.

    >>> best, other = Line("fedavg", "share_all", 0.22), Line("local", "alone", 0.94, 0.72, 0.39, 1.02)
    >>> one = Answer("share_all", "fedavg", (best, other), "loss", "test", 2, "classification", (0,))
    >>> difference(one, other), difference(one, other, reverse=True)
    ('0.72 higher [0.39, 1.02]', '0.72 lower [0.39, 1.02]')

    Without an interval its brackets are left out.

    Args:
        answer: the answer, which has the digits.
        line: a line of the answer.
        reverse: state the recommended way against the line, in place of the line against the recommended way.
    """
    sign = -1 if reverse else 1
    value, low, high = sign * line.difference, line.low, line.high
    if reverse:
        low, high = -line.high, -line.low
    word = "lower"
    if value > 0:
        word = "higher"
    if value <= 0:
        low, high = -high, -low
    ends = ""
    if math.isfinite(low):
        lowest = number(answer, low)
        highest = number(answer, high)
        ends = f" [{lowest}, {highest}]"
    amount = number(answer, abs(value))
    return f"{amount} {word}{ends}"


# --- the headline ----------------------------------------------------------------------------------------------


def headline(answer: Answer) -> str:
    """Return what to do and how much better it is, in at most 60 words and eight numbers besides names.

    Of a dry run it is the estimated cost.
    """
    if not answer.lines:
        return answer.rates
    base_line = answer.line("base_rate")
    score_text = score_name(answer)
    name = f"{answer.split.capitalize()} {score_text}"
    if answer.action == NONE:
        opening = "No way is better than the base rate: use none of them."
        value_text = number(answer, answer.best.value)
        score = f"{name} of the base rate {value_text}"
        if len(answer.lines) > 1:
            second_line = answer.lines[1]
            simple_name = describe(second_line.way, answer.task)
            gap_words = difference(answer, second_line)
            score += f"; {simple_name}: {gap_words}"
        return f"{opening} {score}."
    opening, rivals = _what_to_do(answer), _headline_rivals(answer)
    if base_line is not None and not (base_line.shown and _worse(answer, base_line)):
        gap = difference(answer, base_line, reverse=True)
        opening += f", which is not shown to be better than the base rate ({gap})"
        rivals = rivals[:1]
    comparisons = []
    for line in rivals:
        gap, other_name = (
            difference(answer, line, reverse=True),
            describe(line.way, answer.task),
        )
        comparisons.append(f"{gap} than {other_name}")
    value_text = number(answer, answer.best.value)
    score = f"{name} {value_text}"
    if comparisons:
        comparisons_text = " and ".join(comparisons)
        score += f": {comparisons_text}"
    return f"{opening}. {score}."


def _worse(answer: Answer, line: Line) -> bool:
    """Return whether a line's score is worse than that of the recommended way."""
    return (line.difference < 0) == SCORES[answer.score] and line.difference != 0


def _headline_rivals(answer: Answer) -> list[Line]:
    """Return at most two lines that the headline compares with."""
    first_rival = "fedavg"
    if answer.action == SHARE_ALL:
        first_rival = "local"
    rival_names = [first_rival, "linear_local", "boosting_local", "local", "fedavg"]
    if answer.action in (SHARE_SOME, ALONE):
        rival_names = ["fedavg", "local", "linear_local", "boosting_local"]
    line_of = {line.way: line for line in answer.better_than}
    return [line_of[way] for way in dict.fromkeys(rival_names) if way in line_of][:2]


def _what_to_do(answer: Answer) -> str:
    """Return the headline's first sentence, without a full stop."""
    task_kind, way = answer.task, answer.way
    if answer.action == ALONE:
        way_text = describe(way, task_kind)
        if way not in ("linear_local", "boosting_local"):
            way_text = "train the network at each client alone"
            return f"Do not federate: {way_text}"
        return f"Do not federate: use {way_text}"
    shared, local = answer.layers
    if way == LINEAR:
        text = "Share a linear model in place of the network"
    elif answer.action == SHARE_SOME:
        local_names = layer_names(local)
        shared_names = layer_names(shared)
        text = f"Keep {local_names} local and share {shared_names}"
    elif way == "groups":
        text = "Share all layers within groups of clients"
    elif way == "fedavg":
        text = "Share all layers"
    else:
        text = f"Train by {way}"
    if answer.fine_tuning:
        epochs = EPOCHS.get(answer.fine_tuning, f"{answer.fine_tuning} epochs")
        text += f", then let each client fine-tune for {epochs}"
    return text


def layer_names(names: tuple[str, ...]) -> str:
    """Return a few layers by name, and many by their number; ``its layers`` for none.

    >>> layer_names(("fc1", "fc2")), layer_names(("a", "b", "c", "d"))
    ('fc1 and fc2', '4 layers')
    """
    if not names:
        return "its layers"
    if len(names) > NAMED:
        return f"{len(names)} layers"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


# --- bullets ---------------------------------------------------------------------------------------------------


def bullets(answer: Answer) -> list[str]:
    """Return further sentences, the most important first, as many as fit into 120 words with the headline."""
    words, sentences = len(headline(answer).split()), []
    for sentence in _all_bullets(answer):
        words += len(sentence.split())
        if words > WORDS:
            break
        sentences.append(sentence)
    return sentences


def _all_bullets(answer: Answer) -> list[str]:
    task_kind, sentences = answer.task, []
    if answer.also_good:
        alternatives = []
        for line in answer.also_good:
            other_name, gap = describe(line.way, task_kind), difference(answer, line)
            alternatives.append(f"{other_name} ({gap})")
        all_alone = all(line.action == ALONE for line in answer.also_good)
        ending = ""
        if all_alone:
            ending = " without federating"
        sentences.append(f"Within one standard error{ending}: {listing(alternatives)}.")
    network = answer.line(answer.network)
    if network is not None and answer.network != answer.way:
        gap = difference(answer, network)
        network_name = describe(network.way, task_kind)
        sentences.append(f"Of your network, {network_name} is best: {gap}.")
    if answer.differ is not None:
        has_probabilities = task_kind in (CLASSIFICATION, MULTILABEL)
        sentences.append(
            answer.differ.text("log loss" if has_probabilities else "loss")
        )
    sentences += _client_bullets(answer)
    if answer.alike:
        count = len(answer.alike)
        sentences.append(
            f"Clients form {count} groups. Add --arms groups to try a model a group."
        )
    if answer.pooled is not None:
        gap = difference(answer, answer.pooled)
        subject = describe(answer.pooled.way, task_kind)
        sentences.append(f"If the rows may be pooled, {subject} is better: {gap}.")
    elsewhere = [way for way, reason in answer.not_tried.items() if reason == ELSEWHERE]
    if elsewhere:
        sentences.append(f"Not asked over sites: {listing(elsewhere)}.")
    failed = [way for way in answer.not_tried if way not in (LINEAR, *elsewhere)]
    if failed:
        sentences.append(f"Not tried, or failed: {listing(failed, NAMED)}.")
    if len(answer.seeds) == 1:
        sentences.append("One seed: another split may name another way. Add --seeds 3.")
    return sentences


def _client_bullets(answer: Answer) -> list[str]:
    """Return sentences on the clients that are shown to gain or lose, and on the fallback."""
    effects = answer.clients
    if not effects:
        return []
    losers = [client for client, effect in effects.items() if effect == LOSES]
    winners = [client for client, effect in effects.items() if effect == GAINS]
    sentences = []
    if losers:
        sentences.append(
            f"Shown to lose against training alone: {listing(losers, NAMED)}."
        )
    if winners and answer.action != ALONE:
        sentences.append(
            f"Shown to gain over local training: {len(winners)} of {len(effects)} clients."
        )
    elif not winners and not losers and answer.action != ALONE:
        sentences.append("No single client is shown to gain over local training.")
    if answer.fallback:
        clients = listing(answer.fallback, NAMED)
        sentences.append(
            f"Lower validation loss alone: {clients}. Export with --fallback."
        )
    return sentences


def text(answer: Answer) -> str:
    """Return the headline and as many bullets as fit into eight lines of 88 characters."""
    text_lines = textwrap.wrap(headline(answer), WIDTH)
    if not answer.lines:
        return "\n".join(text_lines)
    for bullet in bullets(answer):
        bullet_lines = textwrap.wrap(
            bullet, WIDTH, initial_indent="- ", subsequent_indent="  "
        )
        if len(text_lines) + len(bullet_lines) > LINES:
            break
        text_lines += bullet_lines
    return "\n".join(text_lines)


# --- the table -------------------------------------------------------------------------------------------------


def table(answer: Answer) -> pd.DataFrame:
    """Return the table as text: each way, its score, its difference, and a note on it.

    The difference is that to the recommended way, or else to the base rate.
    """
    rows = []
    for line in answer.lines:
        gap = ""
        if line is not answer.best:
            gap = f"{line.difference + 0.0:+.{answer.digits}f}"
            if math.isfinite(line.low):
                lowest = number(answer, line.low)
                highest = number(answer, line.high)
                gap += f" [{lowest}, {highest}]"
        rows.append((line.way, number(answer, line.value), gap, _note(answer, line)))
    score_text = score_name(answer)
    score = f"{answer.split} {score_text}"
    reference = answer.way or "base_rate"
    return pd.DataFrame(rows, columns=["way", score, f"against {reference}", "note"])


def _note(answer: Answer, line: Line) -> str:
    if line is answer.best:
        if answer.way:
            return "recommended"
        return ""
    if not line.shown:
        return "no significant difference"
    if _worse(answer, line):
        return "worse"
    return "better"


def legend(answer: Answer) -> str:
    """Return the legend of the table: what its columns and signs mean."""
    seeds = "one seed"
    if len(answer.seeds) > 1:
        seeds = f"{len(answer.seeds)} seeds"
    better_word = "Lower"
    if SCORES[answer.score]:
        better_word = "Higher"
    remark = ""
    if answer.score == "loss" and answer.task in (CLASSIFICATION, MULTILABEL):
        remark = " It is calibrated on validation samples."
    counted = f"{answer.split} samples"
    if answer.score != "loss":
        counted = f"blocks of {counted}"
    return (
        f"{answer.samples} {counted}, {seeds}. {better_word} is better.{remark} "
        "Intervals hold together (95 %, Bonferroni). Validation samples chose the way."
    )
