"""Cheaper and softer than a race of cuts: candidates that begin as one FedAvg, and layers that are shared in part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from diagnostics.plots.drawing import COLOURS, MARKERS, style
from figures import items
from figures.decision.federations import FEDERATIONS
from figures.decision.methods import RACE, THREE, Run, race, race_cost, runs_of, standing
from figures.decision.regret import trained_layers
from figures.decision.runs import NAME as RUNS, TRAINED, Scores, configurations, rounds_of
from figures.items import Drawing, Finding
from figures.page import markdown, missing_runs
from figures.recipe import Recipe, labels
from fl_core import rows, runner
from fl_core.algorithms.base import Message, Round, State
from fl_core.algorithms.fedper import FedPer
from fl_core.errors import UsageError
from fl_core.plan import CANDIDATE, Evidence, LayerPlan
from fl_core.statistics import mean_interval
from fl_core.training.context import Context
from fl_core.tree import Tree

NAME = "decision.beyond"
COMMON = 0.3
"""Of the rounds, how many the forked candidates have in common."""
FORKED, SOFT = "forked", "soft"
SEEDS = 2
LEFT_OUT = ("cifar10", "fed_isic", "pacs", "pacs_dirichlet", "vit_adapters")
"""The federations whose runs take longest."""
SETTINGS = "figures.decision.beyond"


class Forked(FedPer):
    """FedAvg for the first rounds, then FedPer: heads begin as the common one, and are each client's own from there."""

    name = "forked"

    @dataclass(frozen=True)
    class Config:
        common: float = COMMON

    def _forked(self, rnd: Round) -> bool:
        return rnd.index >= round(self.config.common * self.task_info.rounds)

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return self.task_info.tensors - self.task_info.not_sent(rnd)

    def uploaded(self, rnd: Round, client: int) -> frozenset[str]:
        return super().uploaded(rnd, client) - (self.head if self._forked(rnd) else frozenset())

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return self.head if self._forked(rnd) else frozenset()

    def client_start(self, state: State, message: Message, ctx: Context, rnd: Round, client: int) -> Tree:
        return {**message.trees["model"], **state.trees.get("model", {})}


class Soft(FedPer):
    """FedPer whose layers are shared in part: a client starts at own + w (server - own), a weight w for each layer.

    ``weights`` has a number for each layer that trains, separated by commas. 0 keeps the client's layer, 1 takes the
    server's. With zeros and ones it is FedPer, bit for bit.
    """

    name = "soft"

    @dataclass(frozen=True)
    class Config:
        weights: str = ""

    def _weights(self) -> dict[str, float]:
        """Each tensor's weight."""
        values = [float(text) for text in self.config.weights.split(",")]
        assert self.plan is not None
        layers = {layer.name: layer for layer in self.plan.layers}
        if len(values) != len(self.plan.trainable):
            raise UsageError(
                f"soft: weights must be one for each of {len(self.plan.trainable)} layers; got {len(values)}."
            )
        named = zip(self.plan.trainable, values, strict=True)
        return {tensor: value for name, value in named for tensor in layers[name].tensors}

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return self.task_info.tensors - self.task_info.not_sent(rnd)

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return self.task_info.tensors

    def client_start(self, state: State, message: Message, ctx: Context, rnd: Round, client: int) -> Tree:
        return self._mixed(state.trees["model"], message.trees["model"])

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        return {"personal": self._mixed(client.trees["model"], server.trees["model"])}

    def _mixed(self, own: Tree, common: Tree) -> Tree:
        weights = self._weights()
        mixed = dict(own)
        for name, tensor in common.items():
            weight = weights.get(name, 1.0)
            if weight == 1.0:
                mixed[name] = tensor
            elif weight > 0.0 and tensor.is_floating_point():
                mixed[name] = own[name] + weight * (tensor - own[name])
        return mixed


def layer_weights(run: Run, layers: int) -> list[float]:
    """Each layer's weight: the shares, by the race's own scores, of the arms that share it.

    An arm's share is exp(score) over the sum of the arms' exp(score), for the scores z(macro-F1) - z(loss) at 0.6 of
    the rounds.
    """
    scores = standing(run, THREE, 0.6, "both")
    share = np.exp(scores - scores.max())
    share /= share.sum()
    return [round(float(sum(share[arm] for arm in THREE if run.cuts[arm] > k)), 4) for k in range(layers)]


def _stored(names: Iterable[str] | None = None) -> tuple[list[Run], dict[str, int]]:
    """The stored runs of all cuts, and how many layers train in each federation."""
    source = items.find(RUNS).study
    header, frame = source.read(source.path())
    layers = {name: trained_layers(about) for name, about in header["runs"].items()}
    return [run for run in runs_of(frame, layers) if names is None or run.federation in names], layers


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Train the three candidates forked from a common start, and the network whose layers are shared in part."""
    stored, layers = _stored([run])
    plain = next((each for each in stored if each.seed == task.config.seed), None)
    if plain is None:
        raise UsageError(
            f"{NAME} must have rows of {run}, seed {task.config.seed}. Run {items.find(RUNS).study.command}."
        )
    scores, lines = Scores(task), []
    nothing = LayerPlan(task.layers, (), Evidence(rule=CANDIDATE))
    soft = ",".join(f"{weight:g}" for weight in layer_weights(plain, layers[run]))
    whole = layers[run]
    tries: list[tuple[str, type[FedPer], dict[str, str], int]] = [
        (f"{FORKED} {arm}", Forked, {}, plain.cuts[arm]) for arm in THREE
    ]
    tries.append((SOFT, Soft, {"weights": soft}, whole))
    for kind, algorithm, options, count in tries:
        config = replace(task.config, algorithm=f"{SETTINGS}:{algorithm.__name__}", options=options)
        engine = runner.run(config, loaded=task.data, plan=nothing.with_first(count), progress=False)
        lines += rounds_of(task, engine, kind)
        models = {number: engine.models(number)["personal"] for number in range(len(task.data.clients))}
        lines += scores.rows(TRAINED, kind, models, round=engine.done)
    lines.append(rows.row("weights", None, variant=soft, status="of the layers, for " + SOFT, **labels(task)))
    return rows.frame(lines)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    stored, layers = _stored(frame["run"].unique())
    by_key = {(run.federation, run.seed): run for run in stored}
    beyond = [run for run in runs_of(frame, layers) if (run.federation, run.seed) in by_key]
    lines = []
    for run in beyond:
        plain = by_key[run.federation, run.seed]
        winner = race()(plain)
        raced = float(plain.held_out.loc[winner, "macro_f1"])
        forked = standing(run, [f"{FORKED} {arm}" for arm in THREE], 0.6, "both").idxmax()
        rounds = FEDERATIONS[run.federation].config.rounds or 1
        end = (race_cost()(plain) - 1) / 2  # of three arms two are lost
        lines.append(
            {
                "federation": run.federation,
                "seed": run.seed,
                RACE: raced,
                FORKED: float(run.held_out.loc[(TRAINED, forked), "macro_f1"]) - raced,
                SOFT: float(run.held_out.loc[(TRAINED, SOFT), "macro_f1"]) - raced,
                "cost": race_cost()(plain),
                "forked cost": 1 + 2 * (end - round(COMMON * rounds) / rounds),
            }
        )
    table = pd.DataFrame(lines)
    means = table.groupby("federation", sort=False)[[FORKED, SOFT]].mean()
    found = {kind: mean_interval(means[kind].to_numpy()) for kind in (FORKED, SOFT)}
    with style():
        figure = plt.figure(figsize=(7.2, 5.0), layout="constrained")
        ax = figure.subplots()
        y = np.arange(len(means))
        for k, kind in enumerate((FORKED, SOFT)):
            ax.plot(
                100 * means[kind], y + 0.15 - 0.3 * k, linestyle="none", marker=MARKERS[k], color=COLOURS[k],
                label={FORKED: "common start", SOFT: "layers shared in part"}[kind],
            )  # fmt: skip
        ax.axvline(0, color="0.5", lw=0.9)
        for line in y[:-1] + 0.5:
            ax.axhline(line, color="0.9", lw=0.6)
        ax.set_yticks(y, [FEDERATIONS[str(name)].title for name in means.index], fontsize=7)
        ax.set_ylim(len(means) - 0.4, -0.6)
        ax.set_xlabel("macro-F1 minus the race's, points (right: better)")
        ax.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
    words = {
        FORKED: (
            "candidates with a common start end at most 0.5 points below the race of three",
            True if found[FORKED][1] > -0.005 else False if found[FORKED][2] < -0.005 else None,
        ),
        SOFT: (
            "layers shared in part end better than the race of three",
            True if found[SOFT][1] > 0 else False if found[SOFT][2] < 0 else None,
        ),
    }
    findings = tuple(
        Finding(
            expected,
            f"{100 * found[kind][0]:+.2f} points [{100 * found[kind][1]:+.2f}, {100 * found[kind][2]:+.2f}]",
            held,
        )
        for kind, (expected, held) in words.items()
    )
    caption = (
        f"{len(means)} federations with {header['seeds']} seeds ({len(table)} runs). Macro-F1 on held-out samples "
        f"minus that of the model with which the race of three ends (mean over runs). That race costs "
        f"{table['cost'].mean():.2f} full runs. Common start: the candidates begin as one FedAvg for the first "
        f"{COMMON:g} of the rounds ({table['forked cost'].mean():.2f} full runs). In part: a further full run after "
        "the race mixes each layer's weights of the client and the server."
    )
    columns = {
        "federation": [FEDERATIONS[str(name)].title for name in means.index],
        "common start": [f"{100 * value:+.1f}" for value in means[FORKED]],
        "shared in part": [f"{100 * value:+.1f}" for value in means[SOFT]],
    }
    return Drawing(figure, table, caption, findings, markdown(columns) + missing_runs(header))


ITEM = items.register(
    Recipe(
        NAME,
        "Candidates with a common start and layers shared in part against the race of cuts",
        {name: config for name, config in configurations(confirming=False).items() if name not in LEFT_OUT},
        seeds=SEEDS,
        budget="about half an hour of one core",
        measure=_measure,
        draw=_draw,
    )
)
