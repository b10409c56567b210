"""Measure the effect of privacy noise on the choice of shared layers, by the race and by a rule."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from diagnostics.decide.select import select
from diagnostics.plots.drawing import COLOURS, MARKERS, style
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.privacy import DELTA, Privacy
from fedlayers.remote.site import Site
from fedlayers.remote.site_data import SiteDataset
from fedlayers.remote.site_diagnosis import diagnose
from fedlayers.studies.arms import DEFAULT
from fedlayers.studies.choose import choose
from fedlayers.studies.comparison import headline
from figures import items
from figures.items import Drawing
from figures.page import markdown, missing_runs, seeds_in_words
from figures.recipe import Recipe, labels
from fl_core import rows, runner
from fl_core.config import RunConfig
from fl_core.errors import RunError
from fl_core.records.store import Run
from fl_core.statistics import mean_interval

NAME = "decision.privacy"
SEEDS = 6
CLIP, CLIP_NUMBERS = 1.0, 20.0
"""About the norm of a site's model update, and of what it measures, so that clipping alone changes little."""
NOISE = {"off": 0.0, "noise_0.001": 0.001, "noise_0.01": 0.01, "noise_0.1": 0.1, "noise_1": 1.0}
"""The multiplier of the clip, by the run's name."""
TEST, CHOSEN, SHARED, EPSILON = "macro_f1", "chosen", "shared layers", "epsilon"
RULE, METRIC = "sensitivity_ratio", "federation_sensitivity"


def configurations() -> dict[str, RunConfig]:
    """One federation for each strength of the noise: Fed-Heart's hospitals, as the race has them by default."""
    heart = RunConfig(dataset="heart", algorithm="fedper", rounds=20, eval_every=1, keep_optimizer=True, stack="off")
    return dict.fromkeys(NOISE, heart)


def _sites(task: runner.Task, noise: float, folder: Path) -> dict[str, Site]:
    privacy = Privacy(CLIP, CLIP_NUMBERS, noise) if noise else None
    config = task.config
    return {
        client.name: Site(
            SiteDataset(client.name, config.dataset, data_root=config.data_root), folder / client.name, privacy=privacy
        )
        for client in task.data.clients
    }


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Race the default's arms over the sites, and let the rule choose from what new ones measure."""
    lines, told = [], labels(task)
    with TemporaryDirectory() as out, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the")  # epsilon is told as what it is: large
        sites = _sites(task, NOISE[run], Path(out) / "race sites")
        race, seed = Path(out) / "race", task.config.seed
        choice = choose(task.config, race, seeds=(seed,), link=InMemoryTransport(sites))
        for path in sorted((race / "arms").iterdir()):
            final = headline(Run(path).rows()[1])
            score = float(final[final["metric"] == TEST]["value"].mean())
            arm = next(arm.name for arm in choice.arms if path.name == f"{arm.folder}-{seed}")
            lines.append(rows.row(TEST, score, split="test", variant=arm, **told))
        lines.append(rows.row(CHOSEN, 1.0, variant=choice.winner.name, **told))
        lines.append(rows.row(EPSILON, _spent(sites), variant="race", **told))
        measuring = _sites(task, NOISE[run], Path(out) / "rule sites")
        report = diagnose(task.config, InMemoryTransport(measuring), [METRIC])
        try:
            lines.append(rows.row(SHARED, len(select(report, RULE).shared), variant=RULE, **told))
        except RunError as error:  # noise has taken a layer's value below 0, of which there is no ratio
            lines.append(rows.row(SHARED, None, status=str(error), variant=RULE, **told))
        lines.append(rows.row(EPSILON, _spent(measuring), variant=RULE, **told))
    return rows.frame(lines)


def _spent(sites: Mapping[str, Site]) -> float:
    return max(site.account.spent() for site in sites.values())


def regrets(frame: pd.DataFrame) -> pd.DataFrame:
    """A line for each strength of the noise: the scores of the arms, and what the choices under it lose.

    Returns:
        ``run``; ``best``, ``random``: the mean test macro-F1 of that strength's best arm, and what an arm at random
        loses against it; ``regret``: what the race's choices lose against it, a mean over seeds; ``regret_without``:
        what the same choices would lose if they then were trained without noise; ``same``: how many are those without
        noise; ``rule_same``: of the rule's plans likewise.
    """
    clean = frame[frame["run"] == "off"]
    without = clean[clean["metric"] == TEST].groupby("variant")["value"].mean()
    first = {name: clean[clean["metric"] == name].set_index("seed") for name in (CHOSEN, SHARED)}
    lines = []
    for run in NOISE:
        part = frame[frame["run"] == run]
        chosen, shared = (part[part["metric"] == name].set_index("seed") for name in (CHOSEN, SHARED))
        if chosen.empty:
            continue
        means = part[part["metric"] == TEST].groupby("variant")["value"].mean()
        both = chosen.index.intersection(first[CHOSEN].index)
        lines.append(
            {
                "run": run,
                "seeds": len(chosen),
                "best": means.max(),
                "random": means.max() - means.mean(),
                "regret": means.max() - means[chosen["variant"]].mean(),
                "regret_without": without.max() - without[chosen["variant"]].mean(),
                "same": int((chosen.loc[both, "variant"] == first[CHOSEN].loc[both, "variant"]).sum()),
                "rule_same": int((shared.loc[both, "value"] == first[SHARED].loc[both, "value"]).sum()),
            }
        )
    return pd.DataFrame(lines)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    table = regrets(frame)
    places = np.arange(len(table))
    strengths = [f"{NOISE[run]:g}" if NOISE[run] else "none" for run in table["run"]]
    counts = frame[frame["metric"] == CHOSEN].groupby(["run", "variant"]).size()
    with style():
        figure = plt.figure(figsize=(7.4, 3.3), layout="constrained")
        scores, choices = figure.subplots(1, 2)
        below = np.zeros(len(table))
        for k, arm in enumerate(DEFAULT):
            values = [
                frame[(frame["run"] == run) & (frame["metric"] == TEST) & (frame["variant"] == arm)]["value"]
                for run in table["run"]
            ]
            found = [mean_interval(100 * each.to_numpy()) for each in values]
            means, low, high = (np.array([each[i] for each in found]) for i in range(3))
            scores.errorbar(
                places + 0.06 * (k - 1.5), means, yerr=[means - low, high - means], marker=MARKERS[k],
                color=COLOURS[k], markersize=4, lw=1, elinewidth=0.8, label=arm.replace("_", " "),
            )  # fmt: skip
            height = np.array([counts.get((run, arm), 0) for run in table["run"]])
            choices.bar(places, height, 0.86, bottom=below, color=COLOURS[k], edgecolor="white")
            for x in places[height > 0]:
                choices.text(x, below[x] + height[x] / 2, arm.replace("_", " "), ha="center", va="center", fontsize=5.5)
            below += height
        scores.set_ylabel("test macro-F1, mean of hospitals, %")
        choices.set_ylabel("races won")
        for ax in (scores, choices):
            ax.set_xticks(places, strengths)
            ax.set_xlabel("noise, as a multiple of the clip")
        figure.legend(*scores.get_legend_handles_labels(), loc="outside upper center", ncols=len(DEFAULT))
    spent = frame[frame["metric"] == EPSILON].groupby(["run", "variant"])["value"].max()
    columns = {
        "noise": strengths,
        "epsilon of the race": [_epsilon(spent[run, "race"]) for run in table["run"]],
        "best arm %": [f"{100 * value:.1f}" for value in table["best"]],
        "regret of the race": [f"{100 * value:.1f}" for value in table["regret"]],
        "of an arm at random": [f"{100 * value:.1f}" for value in table["random"]],
        "its choices, trained without noise": [f"{100 * value:.1f}" for value in table["regret_without"]],
        "choices as without noise": [f"{n} of {of}" for n, of in zip(table["same"], table["seeds"], strict=True)],
        f"plans of {RULE} as without": [
            f"{n} of {of}" for n, of in zip(table["rule_same"], table["seeds"], strict=True)
        ],
        "epsilon of its measurements": [_epsilon(spent[run, RULE]) for run in table["run"]],
    }
    caption = (
        f"{seeds_in_words(header['seeds'])} of Fed-Heart's hospitals. They clip what they send to the norm {CLIP:g} "
        f"(measurements: {CLIP_NUMBERS:g}) and add Gaussian noise. Left: means of the race's arms at the end with 95 % "
        "intervals. Right: races won on validation samples. Regret in the table is in points of test macro-F1 against "
        f"the best arm's mean. Epsilon is that of a hospital at delta {DELTA:g}. Its unit is all samples of the "
        "hospital."
    )
    changed = next(
        line for line in table.itertuples() if line.same < line.seeds / 2 or line.run == table["run"].iloc[-1]
    )
    lead = (
        f"**With noise of {NOISE[changed.run]:g} of the clip the race chooses as without noise in {changed.same} of "
        f"{changed.seeds} seeds.** Its epsilon is {_epsilon(spent[changed.run, 'race'])}. "
        "That is far too large to protect."
    )
    return Drawing(figure, pd.DataFrame(columns), caption, (), markdown(columns) + missing_runs(header), lead)


def _epsilon(value: float) -> str:
    return f"{value:.3g}" if value else "no limit"


ITEM = items.register(
    Recipe(
        NAME,
        "Noise for privacy, and the choice of shared layers",
        configurations(),
        seeds=SEEDS,
        budget="about 15 minutes of one core",
        measure=_measure,
        draw=_draw,
    )
)
