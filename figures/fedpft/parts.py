"""FedPFT's parts and settings: its ablation (Table 3) and accuracy by prompts and epochs (Figs. 7 and 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from figures import items
from figures.differences import difference
from figures.fedpft import fitted
from figures.fedpft.fitted import ALPHA, ORIGIN, Table
from figures.fedpft.insides import BASE
from figures.forms import marks, sheet, with_intervals
from figures.items import Drawing, Finding, Item, set_apart
from figures.page import markdown, missing_runs, percent
from figures.recipe import labels, tested, trained, where
from figures.verdicts import LEVEL, MARGIN, judged
from fl_core import rows
from fl_core.algorithms.fedpft import SETTINGS
from fl_core.run import runner
from fl_core.statistics import mean_interval

NAME, OURS = "fedpft.parts", "setting_V"
COUNTS = (1, 5, 10, 20, 40)
"""Numbers of prompts; the paper's are lost from its text, but for the default, 10."""
_WHOLE = BASE.with_keys(alpha=ALPHA, algorithm="fedpft")
_EPOCHS = int(_WHOLE.training.epochs or 0)


@dataclass(frozen=True)
class Sweep:
    """A setting of FedPFT with an accuracy in the paper.

    Attributes:
        place: the place in the paper.
        option: the algorithm's.
        axis: what it is, in words.
        values: those that are tried, in order.
        usual: the default, with which FedPFT runs elsewhere.
    """

    place: str
    option: str
    axis: str
    values: tuple[int, ...]
    usual: int

    def run(self, value: int) -> str:
        """Return the name of the run with a value."""
        if value == self.usual:
            return OURS
        return f"{self.option}_{value}"


SWEEPS = {
    "fedpft.fig7": Sweep("Fig. 7", "prompts", "classification prompts of a client", COUNTS, 10),
    "fedpft.fig8": Sweep("Fig. 8", "contrast_prompts", "contrastive prompts of a client", COUNTS, 20),
    "fedpft.fig9": Sweep(
        "Fig. 9", "feature_epochs", f"of a round's {_EPOCHS} epochs, those for the features",
        tuple(range(_EPOCHS + 1)), _EPOCHS - 1,
    ),
}  # fmt: skip


_OPTIONS: dict[str, Mapping[str, Any]] = {
    f"setting_{name}": options for name, options in SETTINGS.items()
}
CONTRAST = SWEEPS["fedpft.fig8"]
"""Its runs are a study of their own. Its default is the ablation's."""
for _sweep in SWEEPS.values():
    for _value in _sweep.values:
        if _value != _sweep.usual and _sweep is not CONTRAST:
            _OPTIONS[_sweep.run(_value)] = {_sweep.option: _value}
RUNS = {
    run: _WHOLE.with_keys(options=dict(options)) for run, options in _OPTIONS.items()
}
CONTRAST_RUNS = {
    CONTRAST.run(value): _WHOLE.with_keys(options={CONTRAST.option: value})
    for value in CONTRAST.values
    if value != CONTRAST.usual
}


def measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Return each client's test accuracy after the last round, with the model as it is (Origin)."""
    engine, frame = trained(task)
    final_rows = tested(frame)
    final_rows = where(
        final_rows, round=task.config.federation.rounds, model="personal"
    )
    label_columns = {
        "round": task.config.federation.rounds,
        "split": "test",
        **labels(task),
    }
    client_rows = final_rows[final_rows["client"].isin(list(engine.names))]
    return rows.frame([
        rows.row(ORIGIN, accuracy, client=client, n_samples=sample_count, **label_columns)
        for client, accuracy, sample_count in zip(
            client_rows["client"], client_rows["value"], client_rows["n_samples"], strict=True
        )
    ])  # fmt: skip


STUDY = items.register(Item(
    NAME, "What FedPFT's parts, prompts and epochs do to its accuracy on CIFAR-10", RUNS, seeds=3,
    budget="some ten hours of one core; a run takes 3 to 17 minutes", measure=measure,
))  # fmt: skip


# --- Table 3 ---------------------------------------------------------------------------------------------------

PARTS = {
    "I": "none",
    "II": "prompts",
    "III": "prompts, alternating",
    "IV": "prompts, alternating, contrast",
    "V": "all: contrastive prompts too",
    "VI": "contrast",
    "VII": "prompts, contrast",
    "VIII": "all but alternating",
}


TABLE = Table(
    "Table 3",
    {f"setting_{name}": name.lower() for name in PARTS},
    (ORIGIN,),
    tuple(
        (f"setting_{more}", [f"setting_{less}"])
        for more, less in (
            ("II", "I"),
            ("III", "II"),
            ("IV", "III"),
            ("V", "IV"),
            ("V", "VIII"),
        )
    ),
    dataset="cifar100",
    usual=OURS,
    names={f"setting_{name}": f"{name}: {words}" for name, words in PARTS.items()},
    whole="every part adds accuracy",
)


# --- Figs. 7 to 9 ----------------------------------------------------------------------------------------------


def _draw(header: Mapping[str, Any], frame: pd.DataFrame, sweep: Sweep) -> Drawing:
    accuracies = fitted.measured(frame)
    run_keys = {
        option_value: (sweep.run(option_value), ORIGIN) for option_value in sweep.values
    }
    shown_values = accuracies.loc[
        [run_keys[option_value] for option_value in sweep.values]
    ]
    intervals = {
        option_value: mean_interval(accuracies.loc[run_keys[option_value]].dropna())
        for option_value in sweep.values
    }
    gaps = {
        option_value: difference(
            accuracies, run_keys[option_value], run_keys[sweep.usual]
        ).interval
        for option_value in sweep.values
    }
    tick_names = {option_value: f"{option_value}" for option_value in sweep.values}
    tick_names[sweep.usual] += "\n(default)"
    with sheet(4.8, 3.0) as figure:
        ax = figure.subplots()
        if sweep.option != "feature_epochs":
            ax.axhspan(-100 * MARGIN, 100 * MARGIN, color="0.88", zorder=0)
        marks(
            ax,
            [with_intervals(gaps.values(), look={"linestyle": "-"})],
            list(tick_names.values()),
            factor=100,
            upright=True,
            level=0,
            level_look={"zorder": 1},
            xlabel=sweep.axis,
            ylabel="points above the default",
        )
    setting_text = fitted.setting(header, shown_values)
    missing_text = missing_runs(
        header, [sweep.run(option_value) for option_value in sweep.values]
    )
    caption = (
        "Mean test accuracy of the clients minus that of the default, paired by seed, with 95 % intervals. "
        f"{setting_text} The paper shows its numbers only in a picture.{missing_text}"
    )
    table = pd.DataFrame([
        {
            sweep.option: option_value, **intervals[option_value]._asdict(),
            "seeds": int(accuracies.loc[run_keys[option_value]].notna().sum()),
        }
        for option_value in sweep.values
    ])  # fmt: skip
    page_text = markdown({
        sweep.axis: [f"{option_value}" for option_value in sweep.values],
        "Accuracy %": [percent(*intervals[option_value]) for option_value in sweep.values],
    })  # fmt: skip
    return Drawing(
        figure,
        table,
        caption,
        set_apart(
            [_finding(accuracies, sweep)], fitted.far(frame, BASE.data.dataset, OURS)
        ),
        page_text,
    )


def _draw_contrast(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    """Draw Fig. 8 with the stored run of the default, in the seeds that the other runs have."""
    default_rows = where(STUDY.read(STUDY.path())[1], run=OURS)
    default_rows = default_rows[default_rows["seed"].isin(frame["seed"].unique())]
    all_rows = pd.concat([default_rows, frame], ignore_index=True)
    return _draw(header, all_rows, CONTRAST)


def _finding(values: pd.DataFrame, sweep: Sweep) -> Finding:
    """Return the paper's claims on a sweep. Prompts matter little on CIFAR-10; epochs have a best number between."""
    default_key = (OURS, ORIGIN)
    if sweep.option == "feature_epochs":
        gaps = {
            f"{sweep.usual} over {option_value}": difference(
                values, default_key, (sweep.run(option_value), ORIGIN)
            )
            for option_value in (sweep.values[0], sweep.values[-1])
        }
        verdict = judged(gaps)
        return verdict.finding(
            f"accuracy first rises with the epochs for the features and then falls: {sweep.usual} are better than none "
            f"and than all {sweep.values[-1]}",
            "points more: ",
        )
    gaps = {
        f"{option_value}:": difference(
            values, (sweep.run(option_value), ORIGIN), default_key
        )
        for option_value in sweep.values
        if option_value != sweep.usual
    }
    verdict = judged(gaps, LEVEL)
    return verdict.finding(
        f"the number of {sweep.axis} changes accuracy by no more than {100 * MARGIN:g} point from the default's",
        "points above the default, by number ",
    )


_TITLES = {
    "fedpft.fig7": "Accuracy by the number of classification prompts",
    "fedpft.fig8": "Accuracy by the number of contrastive prompts",
    "fedpft.fig9": "Accuracy by the epochs given to the features",
}
items.register(Item(
    "fedpft.table3", f"Ablation of FedPFT's parts, CIFAR-10 for CIFAR-100 (FedPFT, Table 3, α = {ALPHA:g})",
    source=NAME, draw=partial(fitted.draw, table=TABLE), shown=[f"setting_{name}" for name in SETTINGS],
))  # fmt: skip
for _name, _sweep in SWEEPS.items():
    _title = f"{_TITLES[_name]}, CIFAR-10 (FedPFT, {_sweep.place}, α = {ALPHA:g})"
    if _sweep is CONTRAST:
        items.register(Item(
            _name, _title, CONTRAST_RUNS, seeds=3, budget="some two hours of one core; a run takes ten minutes",
            measure=measure, draw=_draw_contrast,
        ))  # fmt: skip
    else:
        _drawn = [_sweep.run(value) for value in _sweep.values]
        items.register(Item(_name, _title, source=NAME, draw=partial(_draw, sweep=_sweep), shown=_drawn))  # fmt: skip
