"""Runs PFLlib's own servers and clients, from a checkout, on the samples and the first model of a task here.

PFLlib (github.com/TsingZ0/PFLlib) is on no package index. The environment variable ``PFLLIB`` is the path to a
checkout of it; nothing of it is copied. Its servers' ``train`` runs as it is, with three changes. Clients read their
samples from memory. Nothing is written. Evaluations are recorded client by client.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_core import runner
from fl_core.algorithms.base import Round
from fl_core.errors import UsageError

VARIABLE = "PFLLIB"
SERVERS = {
    "fedavg": ("serveravg", "FedAvg"),
    "fedper": ("serverper", "FedPer"),
    "fedrep": ("serverrep", "FedRep"),
    "ditto": ("serverditto", "Ditto"),
    "scaffold": ("serverscaffold", "SCAFFOLD"),
    "fedbabu": ("serverbabu", "FedBABU"),
    "feddyn": ("serverdyn", "FedDyn"),
    "fedcac": ("servercac", "FedCAC"),
    "pfedme": ("serverpFedMe", "pFedMe"),
    "fedala": ("serverala", "FedALA"),
}
"""Modules and classes of PFLlib's servers, by the names of algorithms here."""
UNUSED = (
    "auto_break", "batch_num_per_client", "client_drop_rate", "dlg_eval", "dlg_gap", "few_shot",
    "fine_tuning_epoch_new", "goal", "learning_rate_decay", "learning_rate_decay_gamma", "num_new_clients",
    "random_join_ratio", "save_folder_name", "send_slow_rate", "time_select", "top_cnt", "train_slow_rate",
)  # fmt: skip


def checkout() -> Path | None:
    """The folder of PFLlib's modules, from the environment; None where no checkout is named.

    Raises:
        UsageError: the path that is named has none.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = Path(named).resolve() / "system"
    if not (folder / "flcore" / "servers" / "serveravg.py").is_file():
        raise UsageError(
            f"{VARIABLE} must name a checkout of PFLlib; got {named}. Clone github.com/TsingZ0/PFLlib."
        )
    return folder


class Split(nn.Module):
    """A network as PFLlib's clients expect it: all layers but the last, and the last."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        *body, last = model.children()
        self.base, self.head = nn.Sequential(*body), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x))


def scores(
    task: runner.Task, folder: Path, repaired: bool = False
) -> Iterator[tuple[int, str, float]]:
    """Train with PFLlib. Yield (rounds done, client, test accuracy) for each round and client.

    Args:
        task: whose algorithm has a server in :data:`SERVERS`; local training is plain SGD.
        repaired: whether what departs from the paper is put right from outside, see :data:`REPAIRS`.
    """
    config = task.config
    with _imported(folder) as load:
        module, name = SERVERS[config.federation.algorithm]
        torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()
        try:
            kind = getattr(load(f"flcore.servers.{module}"), name)
            _from_memory(task)
            with contextlib.redirect_stdout(io.StringIO()):
                server = kind(_arguments(task), 0)
                told = _watched(server, config.federation.algorithm, repaired)
                if repaired and config.federation.algorithm in REPAIRS:
                    REPAIRS[config.federation.algorithm](server, load)
                np.random.seed(config.execution.seed)  # by which clients are drawn
                server.train()
        finally:
            torch.set_rng_state(torch_state)
            np.random.set_state(numpy_state)
    names = [client.name for client in task.data.clients]
    for done, correct in enumerate(told[: (config.federation.rounds or 0) + 1]):
        yield from (
            (done, client, value) for client, value in zip(names, correct, strict=True)
        )


def _watched(server: Any, algorithm: str, repaired: bool) -> list[list[float]]:
    """Record the score of every client wherever the server would evaluate: at first, and after each round."""
    told: list[list[float]] = []

    def score(client: Any) -> float:
        own = getattr(client, "test_metrics_personalized", client.test_metrics)
        correct, samples, *_ = own()
        return float(correct) / samples

    def record(*_: Any) -> None:
        server.rs_test_acc.append(0.0)
        told.append([score(copy.deepcopy(client)) for client in server.clients])

    def tuned(*_: Any) -> None:
        server.rs_test_acc.append(0.0)
        told.append([])
        for client in copy.deepcopy(
            server.clients
        ):  # as at the end of its training, here after every round
            client.fine_tune()
            told[-1].append(score(client))

    server.save_results = server.save_global_model = lambda: None
    server.evaluate = record
    if hasattr(
        server, "evaluate_personalized"
    ):  # of the two that it evaluates, the personal models
        server.evaluate, server.evaluate_personalized = lambda: None, record
        server.rs_test_acc.append(0.0)
    if hasattr(server, "rs_test_acc_per"):
        server.rs_test_acc_per.append(0.0)
    if algorithm == "fedbabu":
        server.evaluate = tuned
    if algorithm == "fedala" or (algorithm == "fedbabu" and not repaired):
        send, last = server.send_models, server.evaluate
        server.evaluate = lambda: None

        def before() -> None:
            last()  # the last local models, before the averaged one reaches them
            send()

        server.send_models = before
    return told


# --- what departs from the papers, put right ---------------------------------------------------------------------


def _squared(server: Any, load: Callable[[str], ModuleType]) -> None:
    """FedDyn's penalty is (alpha / 2) times a squared norm."""

    class Squared:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def norm(self, value: torch.Tensor, p: int) -> torch.Tensor:
            return (value**2).sum()

    load("flcore.clients.clientdyn").torch = Squared()  # type: ignore[attr-defined]


def _merge_first(server: Any, load: Callable[[str], ModuleType]) -> None:
    """FedCAC's first merge is of the clients' models, as are all later ones."""
    base: Any = type(server).__mro__[1]

    def merged() -> None:
        if server.uploaded_models:
            server.get_customized_global_models()
        base.send_models(server)

    server.send_models = merged


def _kept(server: Any, load: Callable[[str], ModuleType]) -> None:
    """PFedMe's personal parameters are copies. The global ones replace the model's own tensors."""
    for client in server.clients:
        step = client.optimizer.step
        client.optimizer.step = lambda *given, step=step: [
            each.detach().clone() for each in step(*given)
        ]


REPAIRS: Mapping[str, Callable[[Any, Callable[[str], ModuleType]], None]] = {
    "fedbabu": lambda server, load: (
        None
    ),  # the averaged body is fine-tuned: recorded after it was sent
    "feddyn": _squared,
    "fedcac": _merge_first,
    "pfedme": _kept,
}
"""Where PFLlib departs from a paper, what makes it follow the paper."""


# --- what it is given --------------------------------------------------------------------------------------------


def _arguments(task: runner.Task) -> SimpleNamespace:
    """PFLlib's parsed arguments for the task, with everything else switched off.

    Raises:
        UsageError: a client has less than a batch: PFLlib drops batches that are not full.
    """
    config, least = task.config, min(task.data.weights)
    batch = int(config.training.batch_size or 0)
    if least < batch:
        raise UsageError(
            f"clients must have a batch of {batch} training samples; got {least:g}. Choose a smaller batch."
        )
    options = task.algorithm(task.plan).config
    used: dict[str, Any] = {
        "algorithm": config.federation.algorithm,
        "alpha": getattr(options, "alpha", 0),
        "batch_size": batch,
        "beta": getattr(options, "until", None) or getattr(options, "beta", 0),
        "dataset": "task",
        "device": "cpu",
        "eta": getattr(options, "rate", 0),
        "eval_gap": 1,
        "fine_tuning_epochs": getattr(options, "finetune_epochs", 0),
        "global_rounds": config.federation.rounds,
        "join_ratio": config.federation.participation,
        "K": getattr(options, "inner_steps", 0),
        "lamda": getattr(options, "lam", 0),
        "layer_idx": 2
        * getattr(options, "layers", 0),  # counted in tensors: weights and biases
        "local_epochs": config.training.epochs,
        "local_learning_rate": config.training.lr,
        "model": Split(copy.deepcopy(task.model)),
        "mu": getattr(options, "lam", 0),
        "num_classes": task.data.n_classes,
        "num_clients": len(task.data.clients),
        "p_learning_rate": getattr(options, "personal_lr", 0),
        "plocal_epochs": config.training.epochs,
        "rand_percent": 100 * getattr(options, "share", 0),
        "server_learning_rate": getattr(options, "server_lr", 1.0),
        "tau": getattr(options, "critical", 0),
        "time_threthold": float("inf"),
    }
    if config.federation.algorithm == "fedrep":
        head, body = task.algorithm(task.plan).phases(Round(0), 0)
        used |= {"plocal_epochs": head.epochs, "local_epochs": body.epochs}
    return SimpleNamespace(**dict.fromkeys(UNUSED, 0), **used)


def _from_memory(task: runner.Task) -> None:
    """Let PFLlib's clients read the task's samples instead of files."""

    def read(
        dataset: str, idx: int, is_train: bool = True, few_shot: int = 0
    ) -> list[tuple[Any, Any]]:
        part = task.data.clients[idx].split("train" if is_train else "test")
        return list(zip(part.x, part.y, strict=True))

    for name, module in sys.modules.items():
        if name.startswith("flcore.") and hasattr(module, "read_client_data"):
            module.read_client_data = read  # type: ignore[attr-defined]


@contextmanager
def _imported(folder: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that imports PFLlib's modules and forgets them afterwards. The package h5py may be missing."""
    before = set(sys.modules)
    if importlib.util.find_spec("h5py") is None:
        sys.modules["h5py"] = ModuleType("h5py")
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if name == "h5py" or name.partition(".")[0] in ("flcore", "utils"):
                del sys.modules[name]
