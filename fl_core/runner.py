"""Runs by configuration: assemble, run, resume, and read models back."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

import fl_core
from fl_core import data as datasets
from fl_core import losses, models, rows, store, tree
from fl_core.algorithms.base import Algorithm, Problem, Round, State, find, registry
from fl_core.algorithms.partial import MEASURED, PLayerFL
from fl_core.config import AUTO, RunConfig, resolved
from fl_core.data import FederatedData, Partition
from fl_core.data.partitions import SPLITS
from fl_core.engine import Engine, Instruments, Schedule
from fl_core.errors import UsageError, check_known, listing
from fl_core.executors import Serial, executor
from fl_core.layers import Layer, layers_of
from fl_core.losses import Loss
from fl_core.plan import LayerPlan
from fl_core.site import Site, TrainJob

MODELS = ("local", "personal", "global")


@dataclass
class Task:
    """A configuration made real: data, model, layers, criterion, and how to build the algorithm."""

    config: RunConfig
    data: FederatedData
    model: nn.Module
    layers: tuple[Layer, ...]
    criterion: Loss
    problem: Problem
    plan: LayerPlan | None

    def algorithm(self, plan: LayerPlan | None) -> Algorithm:
        """The configured algorithm under a plan."""
        return find(self.config.algorithm)(self.problem, plan, self.config.options)

    def header(self, command: str) -> dict[str, Any]:
        """The first line of every rows file that comes from this task."""
        return {
            "version": fl_core.__version__,
            "command": command,
            "dataset": self.config.dataset,
            "model": self.config.model,
            "seed": self.config.seed,
            "layers": [asdict(layer) for layer in self.layers],
            "data": self.data.digest,
            "checkpoint": tree.digest(tree.of(self.model)),
        }


def assemble(
    config: RunConfig,
    *,
    data: FederatedData | None = None,
    model: nn.Module | None = None,
    partition: Partition | None = None,
    plan: LayerPlan | None = None,
) -> Task:
    """Build everything a run needs, and refuse what does not fit together before any work starts.

    Args:
        data, model: your own objects in place of those that the configuration names.
        partition: a stored partition, used in place of a new draw.
        plan: a plan in place of the file that the configuration names.

    Raises:
        UsageError: anything unknown, missing, or not fitting; names the thing.
    """
    config = resolved(config)
    kind = find(config.algorithm)
    if config.plan is not None and plan is not None:
        raise UsageError(f"a plan was given, and the configuration has plan={config.plan!r}: choose one")
    if (config.plan is not None or plan is not None) and not kind.splits:
        obey = sorted(name for name, algorithm in registry().items() if algorithm.splits)
        raise UsageError(f"{config.algorithm} does not split the model and takes no plan; these do: {listing(obey)}")
    if data is None:
        kept = ("samples", "data_root", "download", "client_column", "label_column")
        drawn = ("clients", "partition", "alpha", "classes_per_client", "seed") if partition is None else ()
        chosen: dict[str, Any] = {name: getattr(config, name) for name in (*kept, *drawn)}
        data = datasets.load(config.dataset, indices=partition, **chosen)
    if model is None:
        model = models.build(
            str(config.model),
            data.shape,
            data.n_classes,
            seed=config.seed,
            options=config.model_options,
            weights=config.init,
        )
    else:
        model = copy.deepcopy(model)  # a run trains in it
        models._check_fit(type(model).__name__, model, data.shape, data.n_classes)
    if config.bn == "drop":
        _drop_statistics(model)
    criterion = losses.build(str(config.loss), **(config.loss_options or {}))
    criterion.check(data.n_classes)
    layers = layers_of(model, models.example(data.shape), by=config.by)
    problem = Problem(
        layers=layers,
        parameters=frozenset(name for layer in layers for name in layer.parameters),
        local_only=_statistics(model) if config.bn == "local" else frozenset(),
        n_train=data.weights,
        epochs=int(config.epochs or 0),
        seed=config.seed,
    )
    _check_batches(model, data, int(config.batch or 1), config.bn)
    if plan is None and config.plan not in (None, AUTO):
        plan = LayerPlan.load(str(config.plan))
    if plan is not None:
        plan.check_fits(model)
    elif kind.splits and config.plan is None and not kind(problem, None, config.options).decides:
        plan = LayerPlan.all_but_last(layers)
    task = Task(config, data, model, layers, criterion, problem, plan)
    task.algorithm(plan)  # its own configuration is checked here
    return task


def run(
    config: RunConfig,
    out: Path | str | None = None,
    *,
    instruments: Instruments | None = None,
    data: FederatedData | None = None,
    model: nn.Module | None = None,
    plan: LayerPlan | None = None,
    command: str = "",
    progress: bool = True,
) -> Engine:
    """Run to the end, into a run directory if ``out`` is given, and return the engine with its final state.

    Raises:
        UsageError: before anything is written.
        NonFiniteError, RunError: during the run; the directory keeps its last checkpoint.
    """
    task = assemble(config, data=data, model=model, plan=plan)
    instruments = instruments or Instruments()
    _check_decision(task, instruments)
    _check_device(task.config.device)
    if out is None:
        return _execute(task, instruments, None, progress)
    store.check_free(Path(out))
    stored = {**task.config.to_json(), "shape": list(task.data.shape), "classes": list(task.data.classes)}
    stored["given"] = None if task.plan is None else task.plan.to_json()
    stored["command"] = command
    with store.create(out, stored) as writer:
        _begin(task, writer, command)
        return _execute(task, instruments, writer, progress)


def resume(
    out: Path | str,
    *,
    instruments: Instruments | None = None,
    data: FederatedData | None = None,
    model: nn.Module | None = None,
    progress: bool = True,
) -> Engine:
    """Go on from the last complete checkpoint; the end is bit for bit that of an undisturbed run.

    Raises:
        UsageError: no run there.
        BusyError: it is running.
        CorruptError: what is stored is damaged.
    """
    with store.reopen(out) as writer:
        stored = writer.run.config
        config, plan = stored_config(stored)
        partition = None
        if writer.run.begun and data is None:
            partition = Partition.from_tree(writer.run.partition())
        task = assemble(config, data=data, model=model, partition=partition, plan=plan)
        instruments = instruments or Instruments()
        if not writer.run.rounds:  # later the decision has been made
            _check_decision(task, instruments)
        _check_device(task.config.device)
        if not writer.run.begun:
            _begin(task, writer, stored["command"])
            return _execute(task, instruments, writer, progress)
        done = writer.rewind()
        _check_same_start(task, writer, done)
        return _execute(task, instruments, writer, progress, resume_from=done)


def stored_config(stored: Mapping[str, Any]) -> tuple[RunConfig, LayerPlan | None]:
    """The configuration and the plan given to a run, from its ``config.json``."""
    rest = {name: value for name, value in stored.items() if name not in ("shape", "classes", "given", "command")}
    plan = None if stored["given"] is None else LayerPlan.from_json(stored["given"])
    config = RunConfig.from_json(rest)
    return (replace(config, plan=None) if plan is not None else config), plan


def _check_decision(task: Task, instruments: Instruments) -> None:
    if task.config.plan == AUTO or task.algorithm(task.plan).decides:
        if instruments.decide is None:
            raise UsageError(f"{task.config.algorithm} decides on a plan: pass diagnostics.instruments(), or a plan")
        check_known("rule", task.config.rule, instruments.rules)


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error


def _check_same_start(task: Task, writer: store.Writer, done: int) -> None:
    """Refuse to go on with other data or another model than the run began with, as the rows' header names them."""
    with (writer.path / "rows.jsonl").open(encoding="utf-8") as file:
        began = json.loads(file.readline())
    now = task.header("")
    if began["data"] != now["data"]:
        raise UsageError(f"{writer.path} began with other data; pass the same data to go on")
    names = [[layer["name"], *layer["parameters"], *layer["buffers"]] for layer in (*began["layers"], *now["layers"])]
    if names[: len(began["layers"])] != names[len(began["layers"]) :]:
        raise UsageError(f"{writer.path} began with a model of other layers; pass the same model to go on")
    if done == 0 and began["checkpoint"] != now["checkpoint"]:
        raise UsageError(f"{writer.path} began with other weights and has no checkpoint yet; pass the same model")


def _begin(task: Task, writer: store.Writer, command: str) -> None:
    environment = {
        "versions": {name: _version(name) for name in ("fedlayers", "torch", "torchvision", "timm", "numpy")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": task.config.device,
        "data": task.data.digest,
        "source": task.data.source_digest,
        "model": tree.digest(tree.of(task.model)),
        "commit": _commit(),
    }
    header = {"run": writer.path.name, **task.header(command)}
    if task.plan is not None:
        task.plan.save(writer.path / "plan.json")
    writer.begin(environment, task.data.partition.to_tree(), header)


def _execute(
    task: Task, instruments: Instruments, writer: store.Writer | None, progress: bool, resume_from: int = 0
) -> Engine:
    config = task.config
    site = Site(
        task.model, task.data, config.training, task.criterion, task.layers, instruments.observers, config.device
    )
    initial = tree.of(task.model)
    tree.check_unaliased(initial)
    schedule = Schedule(
        int(config.rounds or 1), config.participation, int(config.eval_every or 1), int(config.checkpoint_every or 1)
    )
    with closing(executor(site, config.workers)) as pool:
        engine = Engine(
            task.problem,
            task.algorithm,
            task.data,
            initial,
            site,
            pool,
            schedule,
            instruments,
            plan=task.plan,
            measure_first=config.plan == AUTO and not task.algorithm(None).decides,
            rule=config.rule,
            threshold=config.threshold,
            columns={"run": writer.path.name if writer else ""},
            writer=writer,
        )
        if writer and resume_from:
            engine.restore(writer.run.checkpoint(resume_from))
        engine.run(progress)
    return engine


def first_epoch(task: Task, observers: Mapping[str, Any]) -> tuple[dict[str, nn.Module], dict[str, dict[str, Any]]]:
    """Every client's model after one local epoch from the common start, and what the observers saw of it.

    It is the epoch in which PLayer-FL measures: the same batches, the same bits.

    Returns:
        The models by client, and each client's measurement by client.
    """
    site = Site(task.model, task.data, task.config.training, task.criterion, task.layers, observers, task.config.device)
    initial = tree.of(task.model)
    scout = PLayerFL(task.problem)
    serial = Serial(site)
    serial.use(scout)
    everyone = tuple(range(len(task.data.clients)))
    rnd = Round(0, "stats", everyone)
    server = State({"model": initial})
    jobs = (TrainJob(c, rnd, scout.send(server, c, rnd), scout.start(initial, c), keep_local=True) for c in everyone)
    trained, measured = {}, {}
    for client, result in zip(task.data.clients, serial.run(jobs), strict=True):
        trained[client.name] = result.tree or {}
        measured[client.name] = result.message.meta[MEASURED]
    tree.load(task.model, initial)
    return {name: _copy_with(task.model, each) for name, each in trained.items()}, measured


# --- reading models back ---------------------------------------------------------------------------------------


def load_models(
    path: Path | str, round: int | str = "last", which: str = "local", model: nn.Module | None = None
) -> tuple[dict[str, nn.Module], Task]:
    """The models of a checkpoint, one for each client, with the task they belong to.

    Args:
        round: a round with a checkpoint, or ``"last"``.
        which: ``local`` (after local training, before aggregation; the clients sampled in that round),
            ``personal`` (fine-tuned where the algorithm fine-tunes), or ``global``.

    Raises:
        UsageError: no such round or model; names what there is.
        CorruptError: what is stored is damaged.
    """
    found = store.Run(path)
    checkpoint = found.checkpoint(round)
    config, plan = stored_config(found.config)
    task = assemble(config, model=model, partition=Partition.from_tree(found.partition()), plan=plan)
    algorithm = task.algorithm(task.plan)
    if "plan" in checkpoint.server.meta:
        algorithm.plan = LayerPlan.from_json(checkpoint.server.meta["plan"])
    rnd = Round(checkpoint.round)
    trees = dict(checkpoint.models)
    for name, state in checkpoint.clients.items():
        for kind, each in algorithm.models(checkpoint.server, state, rnd).items():
            trees.setdefault(kind, {}).setdefault(name, each)
    if which not in trees:
        raise UsageError(f"{path} has no {which!r} models after round {checkpoint.round}; it has: {listing(trees)}")
    built = {}
    for client in (c.name for c in task.data.clients):
        if client in trees[which]:
            built[client] = _copy_with(task.model, trees[which][client])
    return built, task


def _copy_with(model: nn.Module, source: tree.Tree) -> nn.Module:
    module = copy.deepcopy(model)
    tree.load(module, source)
    return module


def frame(engine: Engine) -> pd.DataFrame:
    """The rows of a run that was not written to a directory."""
    return rows.frame(engine.rows)


# --- checks ----------------------------------------------------------------------------------------------------


def _batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def _statistics(model: nn.Module) -> frozenset[str]:
    return frozenset(f"{name}.{key}" for name, m in _batch_norms(model).items() for key, _ in m.named_buffers())


def _drop_statistics(model: nn.Module) -> None:
    for module in _batch_norms(model).values():
        module.track_running_stats = False  # type: ignore[assignment]
        for key in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(module, key, None)


def _check_batches(model: nn.Module, data: FederatedData, batch: int, bn: str) -> None:
    if not _batch_norms(model):
        return
    if batch < 2:
        raise UsageError("the model normalises over batches: batch must be at least 2, not 1")
    for client in data.clients:
        for split in SPLITS if bn == "drop" else SPLITS[:1]:  # without statistics, scoring normalises over batches too
            if len(client.split(split)) < 2:
                raise UsageError(
                    f"client {client.name!r} has {len(client.split(split))} {split} sample, and the model normalises "
                    "over batches: it needs at least 2"
                )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of the working directory's git repository, with a mark if it has changes; empty without one."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


__all__ = ["MODELS", "Task", "assemble", "first_epoch", "frame", "load_models", "resume", "run", "stored_config"]
