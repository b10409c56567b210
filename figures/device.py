"""Runs that wait for a GPU, with the lines of the scorecard that they can decide, and two studies made for one.

``python -m figures gpu`` lists and trains them. None of them is drawn until its rows are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from figures import items
from figures.fedpft import fitted, parts
from figures.fedra import features, further
from figures.fedra.depth import PACS, PRETRAIN, PRETRAINING, prepared, pretrained
from figures.items import Item
from figures.page import span
from fl_core.config import RunConfig
from fl_core.run import runner

PARTS, FEDRA = "fedpft.parts_longer", "fedra.longer"
ROUNDS = 100
"""The paper's of FedRA."""


@dataclass(frozen=True)
class Waiting:
    """Runs of one study that a GPU makes.

    Attributes:
        study: its name.
        seeds: number of seeds of each run.
        lines: lines that wait for these runs: of the scorecard, or registered for it.
        runs: their names; default all runs of the study.
    """

    study: str
    seeds: int
    lines: tuple[str, ...]
    runs: tuple[str, ...] = ()

    def missing(self, folder: Path | None = None) -> Iterator[str]:
        """Yield a line for each run that lacks seeds: which, and how long one took elsewhere.

        Args:
            folder: the folder of the stored runs; default the project's.
        """
        study = items.find(self.study)
        stored_headers = study.headers(study.path(folder))
        time_by_run = {
            run: f"{header['seconds'] / 60:.1f} min a seed"
            for (run, _), header in stored_headers.items()
        }
        missing_keys = [
            run_key
            for run_key in study.planned(self.seeds)
            if run_key not in stored_headers
        ]
        for run in self.runs or study.runs:
            if seeds := [seed for keyed_run, seed in missing_keys if keyed_run == run]:
                seeds_text = span(seeds)
                seeds_words = f"seed {seeds_text}"
                time_text = time_by_run.get(run, "not measured")
                yield f"{run}, {seeds_words}: {time_text}"


WAITING = (
    Waiting(
        fitted.NAME, 10, ("fedpft.best", "fedpft.matched"), runs=("fedpft", "fedper")
    ),
    Waiting(PARTS, 5, ("fedpft.feature_epochs", "fedpft.prompts", "fedpft.every_part")),
    Waiting(
        FEDRA,
        3,
        (
            "fedra.over_inclusivefl",
            "fedra.over_depthfl",
            "fedra.full_above",
            "fedra.features",
            "fedra.tables_2_to_6",
        ),
    ),
    Waiting("fedpft.few_classes", 3, ("fedpft.few_classes",)),
    Waiting("pfedla.table2", 3, ("pfedla.best_second",)),
    Waiting("fedpft.fig8", 3, ("fedpft.contrast_prompts",)),
    Waiting("fedpft.hundred", 3, ("fedpft.best_cifar100",)),
    Waiting("fedpft.tiny", 3, ("fedpft.best_tiny",)),
)
"""The studies in the order in which they are trained: those that decide most in an hour go first.

Lines that are registered enter the scorecard with their first three seeds.
"""


def _of_parts() -> Iterator[tuple[str, RunConfig]]:
    """Yield FedPFT's settings on CIFAR-10, and its ablation on CIFAR-100, at the size of its Table 7 here."""
    for run, config in parts.RUNS.items():
        long_config = fitted.RUNS["fedpft"].with_keys(options=config.federation.options)
        if run == parts.OURS or not run.startswith("setting_"):
            yield run, long_config
        if run.startswith("setting_"):
            yield f"cifar100.{run}", long_config.with_keys(dataset="cifar100")


def _of_fedra() -> Iterator[tuple[str, RunConfig]]:
    """Yield a pretraining of four times the rounds, and from it the methods of FedRA's tables on all of PACS."""
    yield PRETRAINING, PRETRAIN.with_keys(rounds=60, eval_every=20, checkpoint_every=60)
    round_keys = {"rounds": ROUNDS, "eval_every": 10, "checkpoint_every": ROUNDS}
    for method, config in features.RUNS.items():
        yield method, config.with_keys(**round_keys)
    for run, config in further.RUNS.items():
        yield run, config.with_keys(**round_keys, max_samples=PACS.data.max_samples)


def _measure_fedra(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record accuracy at every client, and of the methods of Table 1 how far features set classes apart."""
    if run == PRETRAINING:
        return pretrained(task, folder)
    measure = features.measure
    if "." in run:
        measure = further.measure
    return measure(task, run, folder)


RUNS = {PARTS: dict(_of_parts()), FEDRA: dict(_of_fedra())}
items.register(Item(
    PARTS, "FedPFT's parts, prompts and epochs with more images and rounds, on CIFAR-10 and CIFAR-100", RUNS[PARTS],
    seeds=5, budget="some three hours of a GPU, not measured", measure=parts.measure,
))  # fmt: skip
items.register(Item(
    FEDRA, "FedRA's methods from a longer pretraining, on all of PACS", RUNS[FEDRA], seeds=3,
    own_seeds={PRETRAINING: 1}, budget="some two hours of a GPU, not measured",
    prepare=partial(prepared, RUNS[FEDRA][PRETRAINING]), measure=_measure_fedra,
))  # fmt: skip
