"""Runs PFLlib's own servers and clients, from a checkout, on the samples and the first model of a task here.

PFLlib (github.com/TsingZ0/PFLlib) is on no package index. The environment variable ``PFLLIB`` is the path to a
checkout of it; nothing of it is copied. Its servers' ``train`` runs as it is, with three changes. Clients read their
samples from memory. Nothing is written. Evaluations are recorded client by client.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

from fl_core.errors import UsageError
from fl_core.run import runner

VARIABLE = "PFLLIB"
SERVERS = {"fedavg": ("serveravg", "FedAvg"), "fedper": ("serverper", "FedPer")}
"""Modules and classes of PFLlib's servers, by the names of algorithms here."""
UNUSED = (
    "auto_break", "batch_num_per_client", "client_drop_rate", "dlg_eval", "dlg_gap", "few_shot",
    "fine_tuning_epoch_new", "goal", "learning_rate_decay", "learning_rate_decay_gamma", "num_new_clients",
    "random_join_ratio", "save_folder_name", "send_slow_rate", "time_select", "top_cnt", "train_slow_rate",
)  # fmt: skip


def checkout() -> Path:
    """Return the folder of PFLlib's modules, from the environment.

    Raises:
        UsageError: no checkout is named, or the path has none.
    """
    named = os.environ.get(VARIABLE, "")
    folder = Path(named).resolve() / "system"
    if not (folder / "flcore" / "servers" / "serveravg.py").is_file():
        raise UsageError(
            f"{VARIABLE} must name a checkout of PFLlib; got {named!r}. Clone github.com/TsingZ0/PFLlib."
        )
    return folder


def arguments(**used: Any) -> SimpleNamespace:
    """Return PFLlib's parsed arguments, with everything else switched off."""
    own = {"device": "cpu", "eval_gap": 1, "time_threthold": float("inf")}
    return SimpleNamespace(**dict.fromkeys(UNUSED, 0), **{**own, **used})


def scores(task: runner.Task) -> Iterator[tuple[int, str, float]]:
    """Train with PFLlib. Yield (rounds done, client, test accuracy) for each round and client.

    Args:
        task: whose algorithm has a server in :data:`SERVERS`; local training is plain SGD.

    Raises:
        UsageError: there is no checkout, or a client has less than a batch: PFLlib drops batches that are not full.
    """
    config, least = task.config, min(task.data.weights)
    batch = int(config.training.batch_size or 0)
    if least < batch:
        raise UsageError(
            f"clients must have a batch of {batch} training samples; got {least:g}. Choose a smaller batch."
        )
    *body, last = copy.deepcopy(task.model).children()
    model = nn.Sequential()
    model.base, model.head = nn.Sequential(*body), last  # as its clients expect it
    given = arguments(
        algorithm=config.federation.algorithm,
        batch_size=batch,
        dataset="task",
        global_rounds=config.federation.rounds,
        join_ratio=config.federation.participation,
        local_epochs=config.training.epochs,
        local_learning_rate=config.training.lr,
        model=model,
        num_classes=task.data.n_classes,
        num_clients=len(task.data.clients),
    )
    told: list[list[float]] = []

    def record() -> None:
        server.rs_test_acc.append(0.0)  # whose best it prints
        found = [client.test_metrics() for client in server.clients]
        told.append([float(correct) / samples for correct, samples, *_ in found])

    kind = _server(task)
    with contextlib.redirect_stdout(io.StringIO()):
        server = kind(given, 0)
        server.save_results = server.save_global_model = lambda: None
        server.evaluate = record
        np.random.seed(config.execution.seed)  # by which clients are drawn
        server.train()
    for done, values in enumerate(told):
        for client, value in zip(task.data.clients, values, strict=True):
            yield done, client.name, value


def _server(task: runner.Task) -> Any:
    """Return the class of PFLlib's server, whose clients read the task's samples. The package h5py may be missing."""

    def read(
        dataset: str, idx: int, is_train: bool = True, few_shot: int = 0
    ) -> list[tuple[Any, Any]]:
        part = task.data.clients[idx].split("train" if is_train else "test")
        return list(zip(part.x, part.y, strict=True))

    sys.path.append(str(checkout()))
    try:
        importlib.import_module("h5py")
    except ImportError:
        sys.modules["h5py"] = ModuleType("h5py")
    module, name = SERVERS[task.config.federation.algorithm]
    kind = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
    for each in ("servers.serverbase", "clients.clientbase"):
        sys.modules[f"flcore.{each}"].read_client_data = read  # type: ignore[attr-defined]
    return kind
