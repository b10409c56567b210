"""Tuned defaults: for each method, the settings that did best in the leaderboard's tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fedlayers.leaderboard.federations import FEDERATIONS
from fedlayers.leaderboard.methods import METHODS, RATES, TRAIN, TUNING, Setting, best_setting, next_setting
from fedlayers.leaderboard.runs import STORED, Row, number, read
from fl_core.config import RunConfig
from fl_core.defaults import resolve
from fl_core.errors import UsageError, check_known

OPTIMIZER = "adamw"
"""The optimiser of all tuning. A rate means little for another one."""
TUNED = {method.algorithm: name for name, method in METHODS.items() if method.kind == TRAIN}
"""Names of the methods that have tuned defaults, by algorithm."""
DEFAULT = "default"
Trials = dict[str, list[tuple[Setting, float]]]


def trials(rows: Sequence[Row], name: str) -> Trials:
    """Return the trials of a method in the order of tuning, by federation. Unfinished tuning is left out."""
    found: Trials = {}
    for row in rows:
        if row["method"] == name and row["seed"] == TUNING:
            found.setdefault(row["federation"], []).append((row["setting"], number(row["validation"])))
    return {key: tried for key, tried in found.items() if next_setting(METHODS[name], tried) is None}


def rates(tried: Trials) -> pd.DataFrame:
    """Return the validation score of each of the four rates (columns) in each federation (rows)."""
    return _frame({key: {setting["lr"]: score for setting, score in each[: len(RATES)]} for key, each in tried.items()})


def tuned_default(name: str, rows: Sequence[Row], without: str = "") -> Setting:
    """Return a method's tuned default: each key has the value with the best mean rank on validation.

    Ranks are means over federations of a data family, then over families. Of equal ones the default wins, or the
    lower rate. The own key was tried at each federation's best rate, and the optimiser's state at its best setting.
    A plan's threshold is never unset, so it has no tuned default.

    Args:
        name: a method of :data:`TUNED`.
        without: a data family that is left out.

    >>> tuned_default("ditto", read(STORED)).keys() >= {"lr", "keep_optimizer"}
    True
    """
    method, tried = METHODS[name], trials(rows, name)
    tried = {key: each for key, each in tried.items() if FEDERATIONS[key].family != without}
    if not tried:
        raise UsageError(f"{method.title} must have finished tuning; got none. Run fedlayers leaderboard --run.")
    own, state = {}, {}
    for federation, each in tried.items():
        *before, (_, kept) = each  # the last trial keeps the optimiser's state at the best setting
        best = best_setting(before)
        own[federation] = {s.get(method.key, DEFAULT): score for s, score in before if s["lr"] == best["lr"]}
        state[federation] = {False: next(score for setting, score in before if setting is best), True: kept}
    chosen = {"lr": float(first_ranked(rates(tried))), "keep_optimizer": bool(first_ranked(_frame(state)))}
    value = first_ranked(_frame(own))
    return chosen if value == DEFAULT or method.key == "threshold" else {**chosen, method.key: value}


def with_tuned_defaults(config: RunConfig) -> tuple[RunConfig, Setting]:
    """Return a configuration with tuned defaults in the place of keys that are not set, and these settings.

    Raises:
        UsageError: the leaderboard has not tuned the algorithm, or it had another optimiser.
    """
    name = TUNED[check_known("algorithm with tuned defaults", config.algorithm, TUNED)]
    found = tuned_default(name, read(STORED))
    optimizer = config.optimizer or resolve(config).optimizer
    if config.lr is None and optimizer != OPTIMIZER:
        raise UsageError(
            f"optimizer must be {OPTIMIZER} for tuned defaults; got {optimizer}. Add --optimizer {OPTIMIZER}, or --lr."
        )
    taken = {key: found[key] for key in ("lr", "keep_optimizer") if getattr(config, key) is None}
    key = METHODS[name].key
    options = {key: found[key]} if key in found and key not in config.options else {}
    return replace(config, **taken, options={**config.options, **options}), taken | options


def in_words(setting: Setting, nothing: str = "none") -> str:
    """Return settings as text, or ``nothing`` without any.

    >>> in_words({"lr": 0.01, "keep_optimizer": False})
    'lr=0.01 keep_optimizer=False'
    """
    return " ".join(f"{key}={value}" for key, value in setting.items()) or nothing


def _frame(scores: Mapping[str, Mapping[Any, float]]) -> pd.DataFrame:
    """Return scores by federation (rows) and value (columns). A failed run has the lowest score of its federation."""
    frame = pd.DataFrame(list(scores.values()), index=list(scores))
    return frame.T.fillna(frame.min(axis=1)).T


def first_ranked(scores: pd.DataFrame) -> Any:
    """Return the value with the best mean rank over data families, of equal ones the first."""
    ranks = scores.rank(axis=1, ascending=False)
    ranks = ranks.groupby([FEDERATIONS[name].family for name in ranks.index]).mean().mean()
    return ranks.index[int(np.argmin(ranks.round(9).to_numpy()))]
