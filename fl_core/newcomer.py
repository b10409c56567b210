"""A new client of a trained federation: it takes the shared layers, trains a few epochs alone, and is scored."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from fl_core import rows, runner, stored_models, tree
from fl_core.choices import JOIN_EPOCHS
from fl_core.config import DEALING, READING, RunConfig
from fl_core.data import FederatedData, Partition
from fl_core.data.federated import ClientData
from fl_core.data.partitions import SPLITS
from fl_core.errors import RunError, UsageError
from fl_core.plan import LayerPlan
from fl_core.scores import MAIN, SCORES, label_of
from fl_core.task import class_weights_of
from fl_core.tree import Tree

JOINED, HEAD, ALONE = "joined", "joined_head", "alone"
"""The models of a new client: shared layers, then all layers train; then its own alone; and no shared layers."""


@dataclass(frozen=True)
class Newcomer:
    """The scores and the model of a client that took no part in training.

    Attributes:
        client: its name.
        rows: its scores, in the schema of rows. ``model`` is ``joined`` (it starts with the shared layers, and trains
            all), ``joined_head`` (it trains its own layers alone), or ``alone`` (it starts with the initial model).
            ``variant`` is the number of its own epochs.
        best: the model and the number of epochs with the best main score on its validation samples, of those that
            joined; without a score ``joined`` without own epochs.
        alone: the number of epochs that is best alone, judged alike.
        main: the score that decides.
        model: the module of ``best``.
    """

    client: str
    rows: Sequence[rows.Row]
    best: tuple[str, int]
    alone: int
    main: str
    model: nn.Module

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The rows as a tidy table."""
        return rows.frame(self.rows)

    @property
    def table(self) -> pd.DataFrame:
        """The main score on test samples, a line per number of epochs and a column per model."""
        test = self.frame[(self.frame["split"] == "test") & (self.frame["metric"] == self.main)]
        table = test.assign(epochs=test["variant"].astype(int)).pivot(index="epochs", columns="model", values="value")
        return table[[name for name in (JOINED, HEAD, ALONE) if name in table]]

    def text(self) -> str:
        """Return the answer in one line: what a new client may expect."""
        which, epochs = self.best
        table = self.table
        n = int(self.frame["n_samples"].dropna().iloc[-1]) if self.frame["n_samples"].notna().any() else 0

        def score(model: str, count: int) -> str:
            there = count in table.index and pd.notna(table.loc[count, model])
            return f"{table.loc[count, model]:.3f}" if there else "no score"

        how = "the other layers" if which == HEAD else "all layers"
        return (
            f"New client {self.client}: {label_of(self.main)} is {score(which, epochs)} with the shared layers and "
            f"{epochs} epochs on {how}. It is {score(JOINED, 0)} without these epochs, and {score(ALONE, self.alone)} "
            f"after {self.alone} epochs alone. Its validation samples chose the epochs. It has {n} test samples."
        )


def check_epochs(epochs: Sequence[int]) -> None:
    """Check numbers of own epochs.

    Raises:
        UsageError: there are none, or one is no whole number from 0.
    """
    if not epochs or any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in epochs):
        raise UsageError(
            f"epochs of a new client must be whole numbers from 0; got {list(epochs)}. Write such as --own-epochs 0 5."
        )


def train_newcomer(
    config: RunConfig,
    data: FederatedData,
    client: ClientData,
    model: nn.Module,
    start: Tree,
    initial: Tree,
    plan: LayerPlan | None,
    epochs: Sequence[int] = JOIN_EPOCHS,
    *,
    round: int = 0,
    run: str = "",
) -> Newcomer:
    """Train a new client from the shared layers for a few epochs, and alone, and score it.

    Alone it trains up to the largest number of epochs, and also the epochs of a client of the run.

    Args:
        config: the run's, resolved.
        data: the run's; of it only what samples and classes are.
        client: its samples, prepared as the run's.
        model: of the run; its weights do not matter.
        start: the server's model, in which layers that are not shared are those of ``initial``.
        plan: the plan in force.
        epochs: numbers of own epochs.
        round, run: of the rows.

    Raises:
        UsageError: ``epochs`` are no whole numbers from 0.
    """
    check_epochs(epochs)
    alone = _federation_of(client, data)
    own = _alone(config, data)
    whole = int(config.rounds or 1) * int(config.epochs or 0)
    ways: dict[str, tuple[str, Tree, LayerPlan | None, list[int]]] = {JOINED: ("local", start, None, sorted(epochs))}
    if plan is not None and plan.body and any(layer.name not in plan.shared for layer in plan.layers):
        ways[HEAD] = ("local_head", start, plan, sorted(epochs))
    ways[ALONE] = ("local", initial, None, sorted({*epochs, whole}))
    found: list[rows.Row] = []
    for name, (algorithm, weights, its_plan, counts) in ways.items():
        asked = replace(own, algorithm=algorithm, rounds=max(1, counts[-1]))
        try:
            scored = _train(asked, alone, model, weights, its_plan).rows
        except RunError as error:
            scored = [
                rows.row(MAIN[data.task], None, status=str(error), round=count, model="personal", split="test")
                for count in counts
            ]
        for each in scored:
            if each["metric"] in SCORES and each["model"] == "personal" and each["round"] in counts:
                columns = {"run": run, "algorithm": config.algorithm, "seed": config.seed, "client": client.name}
                found.append(
                    {**each, **columns, "model": name, "variant": str(each["round"]), "round": round}
                    | {"n_samples": len(client.split(each["split"]))}
                )
    frame, main = rows.frame(found), MAIN[data.task]
    which, count = _best(frame[frame["model"] != ALONE], main)
    epochs_alone = _best(frame[frame["model"] == ALONE], main)[1]
    algorithm, weights, its_plan, _ = ways[which]
    chosen, trained = tree.clone(weights), None
    if count:
        trained = _train(replace(own, algorithm=algorithm, rounds=count), alone, model, weights, its_plan)
        chosen = dict(trained.models(0)["personal"])
    module = stored_models.copy_with(model, chosen).eval()
    return Newcomer(client.name, found, (which, count), epochs_alone, main, module)


def _federation_of(client: ClientData, data: FederatedData) -> FederatedData:
    """Return a federation of one client, with samples in the form of another federation's."""
    digest = tree.digest({"x": client.train.x, "y": client.train.y})
    ends = np.cumsum([0, *(len(client.split(split)) for split in SPLITS)])
    indices = {split: np.arange(*ends[k : k + 2]) for k, split in enumerate(SPLITS)}
    partition = Partition("natural", {"clients": 1}, 0, {client.name: indices}, int(ends[-1]), digest)
    return replace(data, clients=(client,), left_out=None, partition=partition, digest=digest)


_OF_MANY = ("plan", "init", "adapt", "leave_out_client", "participation", "client_dropout", "workers")
"""Keys that a client alone leaves at their defaults. The run's model has its adapters."""


def _alone(config: RunConfig, data: FederatedData) -> RunConfig:
    """Return the configuration of the client's own training: one epoch a round, scored in every round.

    Class weights stay as in the run, since a new client may lack a class.
    """
    plain = {key: getattr(RunConfig, key) for key in (*READING, *DEALING, *_OF_MANY)}
    weights = class_weights_of(config, data)
    own = "none" if weights is None else ",".join(map(str, weights))
    return replace(config, **plain, class_weights=own, options={}, epochs=1, eval_every=1, patience=0)


def _train(config: RunConfig, data: FederatedData, model: nn.Module, start: Tree, plan: LayerPlan | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # on the data, and on a plan that keeps all layers at the client
        return runner.run(config, data=data, model=model, initial=tree.clone(start), plan=plan, progress=False)


def _best(frame: pd.DataFrame, main: str) -> tuple[str, int]:
    """Return the model and the epochs with the best main score on validation samples; of equal ones the fewest."""
    judged = frame[(frame["split"] == "validation") & (frame["metric"] == main)]
    judged = judged.dropna(subset="value").assign(epochs=lambda part: part["variant"].astype(int))
    if judged.empty:
        return JOINED, 0
    order = judged.sort_values(["value", "epochs"], ascending=[not SCORES[main], True], kind="stable")
    return str(order["model"].iloc[0]), int(order["epochs"].iloc[0])
