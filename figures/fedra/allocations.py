"""FedRA's schematic drawings (Figs. 2, 3 and 6) from what was really drawn: who had which blocks, round by round.

The rows of the study say how many blocks a client held at most. Which they were in every round follows from the run's
seed and depths alone: it is computed here by the algorithms' own functions (:mod:`fl_core.algorithms.fedra`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from scipy import stats

from diagnostics.plots.drawing import COLOURS, style
from figures import items
from figures.drawing import enumeration
from figures.fedra.depth import BLOCKS, NAME
from figures.items import Drawing, Finding, View
from figures.names import title
from fl_core.algorithms import fedra
from fl_core.errors import UsageError

NESTED, RANDOM = "inclusivefl", "fedra"
SHOWN = 3
"""Rounds of which each is drawn in Fig. 3."""
CERTAIN = 0.05
"""Probability below which draws are told from even ones."""
COMPUTED = (
    "The algorithm's own code draws the blocks again from the run's seed. The rows keep only the largest number of "
    "blocks of each client."
)
GRID = ListedColormap(["0.93", COLOURS[0]])


def allocations(
    config: Mapping[str, Any], clients: int, seed: int, rounds: int
) -> np.ndarray:
    """Which blocks the clients of a run held: bool, rounds x clients x blocks, the first round first.

    Args:
        config: of a run of FedRA without ``cover``, or of a method whose clients have the first blocks, as rows'
            headers have it; all clients take part.

    Raises:
        UsageError: FedRA's other allocation.
    """
    options, blocks = config["options"], int(config["model_options"]["depth"])
    if options.get("allocation", "keep") != "keep":
        raise UsageError(
            "allocation must be one that is drawn; got cover. Choose another."
        )
    fixed = fedra.fixed_depths(options.get("depths", ()), clients, blocks)
    held = np.zeros((rounds, clients, blocks), dtype=bool)
    for index in range(rounds):
        for client in range(clients):
            depth = (
                fedra.random_depth(blocks, seed, index, client)
                if options.get("random_depths")
                else fixed[client]
            )
            random = config["algorithm"] == RANDOM
            chosen = (
                fedra.draw_depths(depth, blocks, seed, index, client)
                if random
                else range(depth)
            )
            held[index, client, list(chosen)] = True
    return held


class Run:
    """A stored run and what its clients held in every round."""

    def __init__(
        self, header: Mapping[str, Any], frame: pd.DataFrame, run: str, **changed: Any
    ) -> None:
        seeds = header["had"].get(run, [])
        if not seeds:
            raise UsageError(
                f"{NAME} must have a run of {run}; got none. Train with --train."
            )
        self.seed = int(seeds[0])
        config = header["runs"][run]["config"]
        self.config = {**config, "options": {**config["options"], **changed}}
        own = frame[(frame["run"] == run) & (frame["seed"] == self.seed)]
        own = own.assign(client=own["client"].str.replace("_", " "))
        self.names = list(
            own.loc[own["metric"] == "accuracy", "client"].unique()
        )  # in the federation's order
        self.held = allocations(
            self.config, len(self.names), self.seed, int(config["rounds"])
        )
        self.stored = (
            own[own["metric"] == BLOCKS]
            .set_index("client")["value"]
            .reindex(self.names)
        )

    @property
    def agrees(self) -> bool:
        """Return whether no client held more blocks than the rows say."""
        most = pd.Series(self.held.sum(axis=2).max(axis=0), index=self.names)
        return bool((most == self.stored).all())


def even(counts: np.ndarray) -> float:
    """The p-value of counts by a chi-squared test against equal ones."""
    return float(stats.chisquare(counts).pvalue)


# --- pictures --------------------------------------------------------------------------------------------------


def _grid(ax: Axes, held: np.ndarray, names: Sequence[str], heading: str) -> None:
    """Draw who has which block in a round, clients x blocks."""
    ax.pcolormesh(np.arange(held.shape[1] + 1) + 0.5, np.arange(len(names) + 1) - 0.5, held, cmap=GRID, vmin=0, vmax=1,
                  edgecolors="w", linewidth=1.0)  # fmt: skip
    ax.set_yticks(range(len(names)), names, fontsize=7.5)
    ax.set(ylim=(len(names) - 0.5, -0.5), title=heading)
    ax.xaxis.set_major_locator(
        ticker.FixedLocator([1, held.shape[1] // 2, held.shape[1]])
    )
    ax.grid(False)


def _holders(held: np.ndarray) -> np.ndarray:
    """Count the clients that have each block, rounds x blocks."""
    return np.asarray(held.sum(axis=1))


def _where(run: Run) -> str:
    depths = enumeration(run.config["options"].get("depths", ()))
    return f"On PACS {len(run.names)} clients can hold {depths} of {run.held.shape[2]} blocks."


def _rows(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Return every block that a client held. Rounds and blocks count from 1."""
    parts = []
    for name, run in runs.items():
        index, client, block = np.nonzero(run.held)
        parts.append(
            pd.DataFrame(
                {
                    "run": name,
                    "round": index + 1,
                    "client": np.array(run.names)[client],
                    "block": block + 1,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def _agreement(runs: Sequence[Run]) -> Finding:
    told = "; ".join(
        f"{title(str(run.config['algorithm']))} {', '.join(f'{n:g}' for n in run.stored)}"
        for run in runs
    )
    expected = "the numbers of blocks that are computed are those in the rows"
    return Finding(expected, f"at most {told}", all(run.agrees for run in runs))


# --- sub-models by depth, and by random layers (Fig. 2) --------------------------------------------------------


def _draw_submodels(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    runs = {name: Run(header, frame, name) for name in (NESTED, RANDOM)}
    with style():
        figure = plt.figure(figsize=(7.6, 3.7), layout="constrained")
        axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=[1.3, 1])
        panels = (("(b) the first blocks: ", NESTED), ("(c) random blocks: ", RANDOM))
        for (upper, lower), (letter, name) in zip(axes.T, panels, strict=True):
            run = runs[name]
            _grid(upper, run.held[0], run.names, f"{letter}{title(name)}, round 1")
            upper.tick_params(labelbottom=False)
            lower.bar(
                range(1, run.held.shape[2] + 1),
                _holders(run.held).mean(axis=0),
                color=COLOURS[0],
                width=0.8,
            )
            lower.set(xlabel="block, input to output", ylim=(0, len(run.names)))
        axes[1, 0].set_ylabel("clients that have it,\nmean of the rounds")
    nested, random = (
        _holders(runs[name].held).mean(axis=0) for name in (NESTED, RANDOM)
    )
    clients, p = (
        len(runs[RANDOM].names),
        even(_holders(_partial(runs[RANDOM])).sum(axis=0)),
    )
    findings = (
        Finding(
            "where clients have the first blocks the last ones are left to few of them",
            f"the first block has {nested[0]:g} of {clients} clients, the last {nested[-1]:g}",
            bool(nested[-1] < nested[0]),
        ),
        Finding(
            "random blocks of those who cannot hold all are not told from even draws",
            f"p = {p:.2f}; a block has {random.min():.1f} to {random.max():.1f} of {clients} clients on average over "
            f"{len(runs[RANDOM].held)} rounds",
            p > CERTAIN,
        ),
        _agreement(list(runs.values())),
    )
    caption = (
        "Above: the blocks of each client in the first round. Below: the number of clients that have each block. "
        f"{_where(runs[RANDOM])} Drawn: seed {runs[RANDOM].seed} of {header['seeds']} seeds. {COMPUTED} "
        "The paper's panel (a) is left out: it shows sub-models by width."
    )
    return Drawing(figure, _rows(runs), caption, findings)


def _partial(run: Run) -> np.ndarray:
    """Return the blocks of clients that cannot hold every block. The others hold all, without chance."""
    return run.held[:, ~run.held.all(axis=(0, 2))]


# --- a round after another (Fig. 3) ----------------------------------------------------------------------------


def _draw_rounds(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    run = Run(header, frame, RANDOM)
    counts = _holders(run.held)
    with style():
        figure = plt.figure(figsize=(7.6, 4.0), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=[1, 1.25])
        upper, lower = halves
        for index, ax in enumerate(
            upper.subplots(1, min(SHOWN, len(run.held)), sharey=True, squeeze=False)[0]
        ):
            _grid(ax, run.held[index], run.names, f"allocation, round {index + 1}")
            ax.set_xlabel("block")
        ax = lower.subplots()
        drawn = ax.pcolormesh(np.arange(len(counts) + 1) + 0.5, np.arange(counts.shape[1] + 1) + 0.5, counts.T,
                              cmap="viridis", vmin=0, vmax=len(run.names))  # fmt: skip
        ax.set(
            xlabel="round",
            ylabel="block",
            title="clients over whom a block's adapters are averaged",
        )
        ax.grid(False)
        lower.colorbar(drawn, ax=ax, ticks=range(len(run.names) + 1))
    empty = int((counts == 0).sum())
    again = float(
        np.mean(
            [(run.held[k] == run.held[k + 1]).all() for k in range(len(run.held) - 1)]
        )
    )
    findings = (
        Finding(
            "the allocation is drawn anew in every round",
            f"in {100 * again:.0f} % of the rounds it is the one before",
            again == 0,
        ),
        Finding(
            "a block is averaged over those who had it; one that nobody had stays as it was",
            f"{empty} of {counts.size} blocks and rounds had nobody"
            + (
                ""
                if empty
                else f": {run.names[int(run.held.all(axis=(0, 2)).argmax())]} has all in every round"
            ),
            None,
        ),
        _agreement([run]),
    )
    caption = (
        "Above: FedRA's allocation of blocks to clients in the first rounds. Below: the number of clients over which "
        f"each block is averaged. {_where(run)} Drawn: seed {run.seed} of {header['seeds']} seeds. {COMPUTED}"
    )
    return Drawing(figure, _rows({RANDOM: run}), caption, findings)


# --- depths that change (Fig. 6) -------------------------------------------------------------------------------


def _draw_changing(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    run = Run(header, frame, RANDOM, random_depths=True, depths=())
    depths, blocks = run.held.sum(axis=2), run.held.shape[2]
    rounds = np.arange(1, len(depths) + 1)
    with style():
        figure = plt.figure(figsize=(7.6, 3.9), layout="constrained")
        axes = figure.subplots(len(run.names), 1, sharex=True, sharey=True)
        for client, (ax, name) in enumerate(zip(axes, run.names, strict=True)):
            ax.bar(rounds, depths[:, client], width=0.85, color=COLOURS[0])
            ax.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
            ax.set(
                ylim=(0, blocks),
                yticks=[0, blocks // 2, blocks],
                xlim=(0.3, len(rounds) + 0.7),
            )
        axes[-1].set_xlabel("round")
        figure.suptitle("blocks that a client can hold", fontsize=9)
    counts = np.bincount(depths.ravel(), minlength=blocks + 1)[1:]
    p = even(counts)
    changes = float((depths[1:] != depths[:-1]).mean())
    findings = (
        Finding(
            "depths from one block to all are not told from even draws",
            f"p = {p:.2f}; mean {depths.mean():.1f} of {blocks}, each {counts.min()} to {counts.max()} times in "
            f"{depths.size} draws",
            p > CERTAIN,
        ),
        Finding(
            "a client's depth changes from round to round",
            f"in {100 * changes:.0f} % of them, {100 * (1 - 1 / blocks):.0f} % expected",
            bool(changes > 1 / 2),
        ),
    )
    caption = (
        f"The depths of {len(run.names)} clients when they change in every round (FedRA's Table 4). "
        f"Drawn: seed {run.seed} of {header['seeds']} seeds. The option `random_depths` draws them from the seed. "
        "Table 4 has the accuracies of models that train with such depths."
    )
    table = (
        pd.DataFrame(depths, columns=run.names)
        .assign(round=rounds)
        .melt("round", var_name="client", value_name="blocks")
    )
    return Drawing(figure, table, caption, findings)


FIG2 = items.register(
    View(
        "fedra.fig2",
        "Sub-models by depth and by random layers, as they were drawn",
        NAME,
        _draw_submodels,
        settings=True,
    )
)
FIG3 = items.register(
    View(
        "fedra.fig3",
        "FedRA's allocation, round after round, as it was drawn",
        NAME,
        _draw_rounds,
        settings=True,
    )
)
FIG6 = items.register(
    View(
        "fedra.fig6",
        "Depths that change from round to round",
        NAME,
        _draw_changing,
        settings=True,
    )
)
