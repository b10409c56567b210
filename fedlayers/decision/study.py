"""A study: decide on training and validation samples in each seed, and judge every way on test samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pandas as pd

from fedlayers.backends.local import Backend, no_progress
from fedlayers.decision.jobs import Tell, open_backend, study_folder, task_kind
from fedlayers.decision.table import (
    BASE_RATE,
    TEST,
    LossTable,
    recommended,
)
from fedlayers.decision.training import foreseen, make_question, train_ways
from fedlayers.decision.verdict import actions_of
from fedlayers.decision.ways import Ways
from fl_core.config import RunConfig, with_own
from fl_core.display import Displayed, Summary, csv_bytes
from fl_core.errors import UsageError, listing, plural
from fl_core.keys import Keys
from fl_core.progress import say
from fl_core.rows import check_score, in_column, label_of
from fl_core.statistics import mean_interval
from fl_core.storage import write_atomically

POLICY = "choose"
"""The line of what each seed's own decision names."""


@dataclass(frozen=True, repr=False)
class Study(Displayed):
    """The result of a study.

    Attributes:
        named: the way that the decision names in each seed; the base rate if no way is better.
        table: a line for each way, and one for ``choose``, which uses the way named in each seed. Columns are ``way``,
            ``test`` (the mean test score), ``regret``, ``low`` and ``high`` (its 95 % interval over seeds), and
            ``named`` (the number of seeds that name the way). The regret is how much worse the score is than that of
            the best single way by test samples.
        score: the score that ranks the ways.
    """

    named: dict[int, str]
    table: pd.DataFrame
    score: str

    def summary(self) -> Summary:
        """Return the regret of the decision, and the table."""
        return Summary.of_frame(self.lead(), self.shown())

    def lead(self) -> str:
        """Return a sentence with the decision's regret and its interval."""
        line = self.table.set_index("way").loc[POLICY]
        lowest = in_column(self.score, line["low"])
        highest = in_column(self.score, line["high"])
        ends = f"[{lowest}, {highest}]"
        if np.isnan(line["low"]):
            ends = "(one seed gives no interval)"
        score_label = label_of(self.score)
        regret_text = in_column(self.score, line["regret"])
        return (
            f"Over {plural(len(self.named), 'seed')} the named way's {score_label} on test samples is "
            f"{regret_text} {ends} from that of the best single way."
        )

    def shown(self) -> pd.DataFrame:
        """Return the table with its numbers formatted as text."""
        shown_table = self.table[["way"]].copy()
        for name in ("test", "regret"):
            shown_table[name] = [
                in_column(self.score, value) for value in self.table[name]
            ]
        ends = self.table[["low", "high"]].map(partial(in_column, self.score))
        interval = "[" + ends["low"] + ", " + ends["high"] + "]"
        shown_table["interval"] = interval.where(self.table["low"].notna(), "")
        shown_table["named"] = self.table["named"]
        return shown_table

    def text(self) -> str:
        """Return the sentence on the regret and the table, as text for a terminal."""
        return f"{self.lead()}\n\n{self.shown().to_string(index=False)}"


def study(
    config: RunConfig | None = None,
    out: Path | str = "out/study",
    *,
    arms: Ways = None,
    seeds: Sequence[int] | int = 5,
    data: Any = None,
    model: Any = None,
    score: str = "",
    tune_rates: int | None = None,
    baselines: bool = True,
    backend: Backend | str = "",
    progress: bool | Tell = True,
    live: bool = False,
    **keys: Unpack[Keys],
) -> Study:
    """Decide in each seed as :func:`~fedlayers.decision.choose.choose` does, and score what it names on test samples.

    Every seed draws its own split, unless the data come from Python with a fixed one.
    It decides by its training and validation samples alone, and its test samples judge
    that decision. So the regret is that of the policy, not of one answer. ``out``
    receives the runs in ``arms/``, and ``table.csv``. After a stop, the same call
    resumes.

    Args:
        config: the configuration of the runs.
        out: the output folder, by default ``out/study`` as for the command.
        seeds: a number of seeds, or a list. The default is 5.
        arms, data, model, score, tune_rates, baselines, backend, progress, live, keys:
            as for :func:`~fedlayers.decision.choose.choose`. Algorithms by name are
            ways, too.

    Raises:
        UsageError: an unknown name or an invalid value, or a folder with another study;
            nothing is written then. Or, after training, some seed has no test samples.
        RunError: every way failed.

    >>> import numpy as np
    >>> draw = np.random.default_rng(0)
    >>> wards = {ward: (draw.normal(size=(40, 5)), np.arange(40) % 2) for ward in ("north", "south")}
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> how = {"model": "mlp", "baselines": False, "progress": False}
    >>> result = study(RunConfig(rounds=1), folder.name, seeds=2, data=wards, **how)
    >>> result.table["way"].tolist()[0], sorted(result.named)
    ('choose', [0, 1])
    """
    out = study_folder(out)
    config, objects = with_own(config, data, model, **keys)
    tell = progress if callable(progress) else no_progress
    if score:
        config = config.with_keys(
            monitor=check_score(score, task_kind(config, objects))
        )
    question = make_question(
        config, objects, out, arms, seeds, tune_rates, baselines, tell, one_split=False
    )
    display_options = {"parallel": True, "progress": progress is True, "live": live}
    with open_backend(backend, config.execution.workers, **display_options) as place:
        line = foreseen(question, place.side_by_side)
        (say if progress is True else tell)(line)
        trained_ways = train_ways(question, place, tell)
    judged_study = judged(trained_ways.table(), list(actions_of(question.ways)))
    write_atomically(out / "table.csv", csv_bytes(judged_study.table))
    return judged_study


def judged(table: LossTable, names: Sequence[str]) -> Study:
    """Return the study that a table of losses gives.

    Args:
        table: the score of each way in each seed.
        names: the ways that a decision may name.

    Raises:
        UsageError: there are no test samples, or none of the ways is in the table.
    """
    if TEST not in table.splits:
        raise UsageError(
            "a study must have test samples to judge a decision; got none. Give clients more samples."
        )
    ways = [way for way in names if way in table.ways]
    if not ways:
        named_ways, present_ways = listing(names), listing(table.ways)
        raise UsageError(
            f"a study must have a result of one of its ways ({named_ways}); got {present_ways} alone. Train one."
        )
    ways_by_seed = {}
    for seed in table.seeds:
        parts = {key: part for key, part in table.parts.items() if key[0] == seed}
        ways_by_seed[seed] = recommended(replace(table, parts=parts), ways) or BASE_RATE
    scores = {way: table.means(way, TEST) for way in (*ways, BASE_RATE)}
    best_way = max(ways, key=lambda way: table.sign * scores[way].mean())
    policy_scores = [
        table.parts[seed, way, TEST].mean for seed, way in ways_by_seed.items()
    ]
    lines = []
    for way, values in ({POLICY: np.array(policy_scores)} | scores).items():
        regret = mean_interval(table.sign * (scores[best_way] - values))
        count = list(ways_by_seed.values()).count(way)
        lines.append((way, float(values.mean()), *regret, count))
    columns = ["way", "test", "regret", "low", "high", "named"]
    frame = pd.DataFrame(lines, columns=columns)
    order = frame.iloc[1:].sort_values("regret", kind="stable")
    frame = pd.concat([frame.iloc[:1], order], ignore_index=True)
    return Study(ways_by_seed, frame, table.score)
