"""Table 1 of FedRA from a longer pretraining, so that the full models learn enough to compare with the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import save

from figures import items
from figures.fedra import depth
from figures.items import Drawing
from figures.recipe import Recipe, trained
from fl_core import runner
from fl_core.config import RunConfig
from fl_core.data.federated import FederatedData, Split
from fl_core.storage.files import write_atomically

NAME = "fedra.longer"
SLOWER = 0.2
"""Learning rate of the second part of the pretraining, as a share of the first part's."""
ROUNDS = (20, 6)
"""Rounds of both parts. In a round every client sees each of its images, and its mirror image."""
METHODS = ("alllarge", "fedra", "inclusivefl", "depthfl", "inclusivefl_plain", "depthfl_plain", "allsmall")
"""The most wanted first: time may end before the last."""
PRETRAIN = replace(
    depth.PRETRAIN, clients=2, workers=2, keep_optimizer=True, rounds=ROUNDS[0], checkpoint_every=ROUNDS[0]
)
"""Two clients, so that two cores share the work."""
RUNS = {depth.PRETRAINING: PRETRAIN} | {name: depth.RUNS[name] for name in METHODS}
PARTLY = "part.safetensors"


def mirrored(data: FederatedData) -> FederatedData:
    """Return the data with the mirror image of every training image next to it."""

    def both(split: Split) -> Split:
        return Split(torch.cat([split.x, split.x.flip(-1)]), torch.cat([split.y, split.y]))

    return replace(data, clients=tuple(replace(each, train=both(each.train)) for each in data.clients))


def pretrained(task: runner.Task, folder: Path) -> pd.DataFrame:
    """Pretrain in two parts, the second with a smaller learning rate; store the weights and return the rows."""
    first, rows = trained(replace(task, data=mirrored(task.data)))
    tree = {name: each.contiguous() for name, each in first.server.trees["model"].items()}
    write_atomically(folder / PARTLY, save(tree))
    lr = SLOWER * float(task.config.training.lr)
    later = replace(task.config, lr=lr, rounds=ROUNDS[1], checkpoint_every=ROUNDS[1], init=str(folder / PARTLY))
    more = runner.assemble(later)
    frame = depth.pretrained(replace(more, data=mirrored(more.data)), folder)
    (folder / PARTLY).unlink()
    done = frame[frame["round"] > 0]
    return pd.concat([rows, done.assign(round=done["round"] + task.config.rounds)], ignore_index=True)


def _prepare(config: RunConfig, run: str, folder: Path) -> RunConfig:
    return depth.prepared(RUNS[depth.PRETRAINING], config, run, folder, pretrained)


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    return depth.measured(task, run, folder, pretrained)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    return depth.drawn(header, frame)


ITEM = items.register(Recipe(
    NAME, "Clients of unequal depth from a longer pretraining (FedRA)", RUNS, seeds=3,
    one_seed=frozenset({depth.PRETRAINING}), budget="about 4 hours of one core, 1.3 of them pretraining",
    prepare=_prepare, measure=_measure, draw=_draw, paper_rounds=depth.PAPER_ROUNDS,
))  # fmt: skip
