"""Whole studies on federations where every cut was trained: does the sentence that leads a study's report say true?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from diagnostics.plots.drawing import COLOURS, MARKERS, style
from fedlayers.studies import inference, summary
from fedlayers.studies.answers import NO, OPEN, YES
from fedlayers.studies.study import CHOSEN, Outcome, study
from figures import items
from figures.decision.federations import FEDERATIONS
from figures.decision.methods import HELD_OUT
from figures.decision.runs import NAME as RUNS, TRAINED
from figures.differences import Difference, difference, joint
from figures.items import Drawing, Finding
from figures.page import markdown, missing_runs, percent, span
from figures.recipe import Recipe, labels
from fl_core import rows, runner
from fl_core.config import RunConfig
from fl_core.errors import UsageError

NAME = "decision.studies"
STUDIED = {"tweets_table": 5, "digits_turned": 5, "pacs": 3}
"""A table with 16 % positives, images turned by client, and four styles of pictures, with the seeds of each study: a
study's default, and fewer where that takes long."""
AGAINST = {"fedavg": "all", "local": "nothing"}
"""What the lead holds the choice against, and the cut that is the same in the runs of every cut."""
WON, GAIN = "races won", "gain in macro_f1"
DECIDED = "decided"
"""Metric of the row that has a study's first sentences, with 1 for a choice that was decided."""
QUESTIONS = {"split": "is a split better?", "which": "which one?", "guessing": "better than guessing?"}
"""The three answers of a race, by the codes of :mod:`fedlayers.studies.answers`."""
_FORMER = {
    "Not decided between ": {"split": OPEN, "which": inference.LEVEL_ARMS, "guessing": YES},
    "Not decided: no gain": {"split": OPEN, "which": inference.NOTHING_LEARNED, "guessing": OPEN},
    "Share nothing: ": {"split": NO, "which": inference.DECIDED, "guessing": YES},
}
"""Today's answers by the beginning of a former lead, which had one verdict for all three."""
SIGNS = {"not told apart": summary.LEVEL}
"""Signs of stored gains by today's words."""


def configurations() -> dict[str, RunConfig]:
    """The studied federations' configurations, by name."""
    return {name: FEDERATIONS[name].config for name in STUDIED}


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """A study with its defaults on other seeds than the runs of every cut have; its lead, its races, its gains."""
    first = 100 * (task.config.seed + 1)
    seeds = range(first, first + STUDIED[run])
    with TemporaryDirectory() as out:
        found = study(task.config, tuple(reversed(AGAINST)), tuple(seeds), Path(out) / "study", progress=False)
        return rows.frame([{**line, **labels(task)} for line in said(found)])


def said(found: Outcome) -> list[rows.Row]:
    """Return a study's result as rows: the words of its lead, the races that each arm won, and the gains."""
    assert found.choice is not None
    codes = found.lead.codes
    words = " ".join([found.lead.head, *found.lead.answers])
    lines = [rows.row(DECIDED, float(codes["which"] == inference.DECIDED), variant=words)]
    lines += [rows.row(name, 1.0, variant=codes[name]) for name in QUESTIONS]
    winners = [entry.arm.name for entry in found.choice.of_seed.values()]
    lines += [rows.row(WON, winners.count(arm), variant=arm) for arm in dict.fromkeys(winners)]
    for line in summary.gains(found.comparison, CHOSEN).itertuples():
        if line.metric == "macro_f1":
            half = (line.high - line.low) / 2
            lines.append(rows.row(GAIN, line.value, stderr=half, variant=line.against, estimator=line.sign))
    return lines


# --- held against the runs of every cut ------------------------------------------------------------------------


def known(frame: pd.DataFrame, federation: str, won: Mapping[str, float]) -> dict[str, Difference]:
    """Return the gains of the races' winners in the runs of every cut, for each arm that they are compared with.

    Args:
        frame: rows of :mod:`figures.decision.runs`, with held-out samples that the run did not see.
        won: races won by each arm, by which the arms' scores are weighted.
    """
    own = frame[(frame["run"] == federation) & (frame["metric"] == "macro_f1") & (frame["split"] == HELD_OUT)]
    scores = own[own["estimator"] == TRAINED].pivot(index="variant", columns="seed", values="value")
    scores.loc[CHOSEN] = sum(count * scores.loc[arm] for arm, count in won.items()) / sum(won.values())
    return {name: difference(scores, CHOSEN, cut) for name, cut in AGAINST.items()}


def answered(part: pd.DataFrame) -> dict[str, str]:
    """Return a stored study's three answers; for an older study the answers that its lead means.

    Raises:
        UsageError: a former lead with other words than the stored ones.
    """
    codes = part[part["metric"].isin(QUESTIONS)].set_index("metric")["variant"].to_dict()
    if codes:
        return {name: str(codes[name]) for name in QUESTIONS}
    lead = str(part.loc[part["metric"] == DECIDED, "variant"].iloc[0])
    for beginning, found in _FORMER.items():
        if lead.startswith(beginning):
            return found
    raise UsageError(f"{NAME} must have answers in each study; got lead {lead!r}. Train it again.")


def borne_out(sign: str, gap: Difference) -> bool | None:
    """Return whether a study's sign is that in the runs of every cut.

    No significant difference in either gives None.
    """
    if sign not in ("higher", "lower") or gap.above is None:
        return None
    return gap.above == (sign == "higher")


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    source: Any = items.find(RUNS)
    every_cut = source.read(source.path())[1]
    present = [name for name in STUDIED if (frame["run"] == name).any()]
    lines, codes = [], {}
    for name in present:
        part = frame[(frame["run"] == name) & (frame["seed"] == 0)]
        won = part[part["metric"] == WON].set_index("variant")["value"].to_dict()
        codes[name] = answered(part)
        gains = part[part["metric"] == GAIN].set_index("variant")
        for against, gap in known(every_cut, name, won).items():
            gain = gains.loc[against]
            sign = str(gain["estimator"])
            lines.append({
                "federation": name, "against": against, "gain": gain["value"], "half": gain["stderr"],
                "sign": SIGNS.get(sign, sign), "known": gap.interval.value, "known_low": gap.interval.low,
                "known_high": gap.interval.high, "runs": gap.pairs, "true": borne_out(sign, gap),
                "races": ", ".join(f"{arm} {count:g}" for arm, count in won.items()),
            })  # fmt: skip
    table = pd.DataFrame(lines)
    findings = []
    for name in present:
        own = table[table["federation"] == name]
        claims = own[own["sign"].isin(["higher", "lower"])]
        told = "; ".join(
            f"against {summary.AGAINST[line.against]} {line.sign} ({100 * line.gain:+.1f} points) and there "
            f"{percent(line.known, line.known_low, line.known_high, sign='+')}"
            for line in own.itertuples()
        )
        verdict = joint(list(claims["true"])) if len(claims) else None
        findings.append(Finding(
            f"{FEDERATIONS[name].title}: what is significant in the study is significant in the runs of every cut",
            told, verdict,
        ))  # fmt: skip
    caption = (
        "The choice's macro-F1 on test samples minus that of sharing every layer or none. A study has "
        f"{span(STUDIED.values())} seeds and simultaneous 95 % intervals. Next to it is the same difference on "
        f"held-out samples in other runs. There every cut was trained ({table['runs'].max()} seeds and 95 % "
        "intervals). The studies' races have other seeds."
    )
    cells: dict[str, list[str]] = {
        "federation": [FEDERATIONS[name].title for name in table["federation"]],
        "races won": list(table["races"]),
        "against": [summary.AGAINST[name] for name in table["against"]],
        "study": [f"{100 * line.gain:+.1f} ± {100 * line.half:.1f}, {line.sign}" for line in table.itertuples()],
        "runs of every cut": [
            percent(line.known, line.known_low, line.known_high, sign="+") for line in table.itertuples()
        ],
    }
    answers = {
        "federation": [FEDERATIONS[name].title for name in codes],
        **{words: [found[name] for found in codes.values()] for name, words in QUESTIONS.items()},
    }
    text = f"{markdown(cells)}\n\nThe races' three answers:\n\n{markdown(answers)}{missing_runs(header)}"
    true = table["true"].dropna()
    lead = (
        f"**Significant differences of the studies that have the same sign in the runs of every cut: {int(true.sum())} "
        f"of {len(true)}.** In {int((table['sign'] == summary.LEVEL).sum())} comparisons the studies find none."
    )
    return Drawing(_picture(table), table, caption, tuple(findings), text, lead)


def _picture(table: pd.DataFrame) -> plt.Figure:
    with style():
        figure = plt.figure(figsize=(7.4, 1.4 + 0.3 * len(table)), layout="constrained")
        ax = figure.subplots()
        y = pd.Series(range(len(table)))
        shown = {
            "the study": (table["gain"], table["half"]),
            "runs of every cut": (table["known"], (table["known_high"] - table["known_low"]) / 2),
        }
        for k, (label, (value, half)) in enumerate(shown.items()):
            ax.errorbar(
                100 * value, y + 0.2 * (k - 0.5), xerr=100 * half, linestyle="none", marker=MARKERS[k],
                color=COLOURS[k], markersize=4.5, lw=1.2, label=label,
            )  # fmt: skip
        ax.axvline(0, color="0.6", lw=0.8)
        names = [
            f"{FEDERATIONS[line.federation].title},\nagainst {summary.AGAINST[line.against]}"
            for line in table.itertuples()
        ]
        ax.set_yticks(y, names)
        ax.set(ylim=(len(table) - 0.5, -0.5), xlabel="points of macro-F1 that the choice gains")
        figure.legend(loc="outside upper center", ncols=2, fontsize=7.5)
    return figure


ITEM = items.register(
    Recipe(
        NAME,
        "Studies compared with runs of every cut: an imbalanced table, turned images and styles",
        configurations(),
        seeds=1,
        budget="about 20 minutes of one core",
        measure=_measure,
        draw=_draw,
    )
)
