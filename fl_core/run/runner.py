"""Training by configuration: run, resume, and train once to measure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_core import storage, tree
from fl_core.algorithms.fedper import MEASURED, Scout
from fl_core.config import AUTO, KEYS, RunConfig
from fl_core.data import FederatedData
from fl_core.errors import (
    RunError,
    UsageError,
    about,
    as_list,
    check_known,
    end_unguarded,
    listing,
    spelled,
    warn,
)
from fl_core.plan import LayerPlan
from fl_core.progress import progress_bar
from fl_core.records import store, writing
from fl_core.records.stopping import StoppingRule
from fl_core.rounds.batched import BatchedClients
from fl_core.rounds.clients import (
    ClientRunner,
    Executor,
    LocalClients,
    MakesExecutor,
    Serial,
)
from fl_core.rounds.engine import Engine, Listener, Schedule
from fl_core.rounds.recorder import Costs, Logger, Recorder, Timer, loggers_of
from fl_core.rounds.steering import (
    Divergence,
    EarlyStopping,
    Instruments,
    PlanSelection,
    Saver,
)
from fl_core.rounds.workers import Workers
from fl_core.rows import selecting_scores
from fl_core.run import own_code, restore
from fl_core.run.costs import training_flops
from fl_core.run.restore import copy_with, task_of
from fl_core.run.task import Task, assemble
from fl_core.training.losses import guessing_loss

KEPT_BYTES = 1 << 30
"""The most bytes of locally trained models that a run without a directory keeps in memory."""
MakesClients = Callable[[Task, str, ClientRunner, Executor], LocalClients]


MakesInstruments = Callable[[], Instruments]


def executor(
    client_runner: ClientRunner, workers: int, stack: bool = False
) -> Executor:
    """Return the executor that trains clients: in one batched pass, in this process, or in worker processes.

    Args:
        client_runner: what trains a client.
        workers: number of processes. With 0 or 1 this process trains.
        stack: whether several clients train in one batched pass. Then ``workers`` is ignored.

    Raises:
        WorkerError, UsageError: worker processes cannot start (:class:`fl_core.rounds.workers.Workers`).
    """
    if stack:
        return BatchedClients(client_runner)
    if workers < 2:
        return Serial(client_runner)
    return Workers(client_runner, workers)


def local_clients(
    task: Task, run: str, client_runner: ClientRunner, pool: Executor
) -> LocalClients:
    """Return a task's clients in this process.

    Args:
        run: the run's digest. It is ignored here, and clients at sites need it.
        client_runner: what trains a client of the task.
        pool: the executor that runs the clients' work.
    """
    initial = tree.state_dict(task.model)
    dropout = task.config.federation.client_dropout
    return LocalClients(client_runner, pool, initial, dropout)


@dataclass(frozen=True)
class Execution:
    """Options of a run's execution. They do not change its bits.

    Attributes:
        progress: whether a progress bar is shown.
        until: the round after which the run stops with a checkpoint. :func:`resume` continues, and the end has the same
            bits. None means the last round.
        save_seconds: least time between two checkpoints. Those of the last and the best round are written at once.
        log: further loggers that receive the rows, or their classes as ``package.module:Class``.
        trained_by: a function (client runner) that makes the executor of clients. By default they train in this
            process, or in the configuration's number of workers.
        clients: a function (task, the run's digest, client runner, executor) that makes the clients, in this process or
            at sites.

    Raises:
        UsageError: a name in ``log`` leads to no class made of :class:`fl_core.rounds.recorder.Logger`.
    """

    progress: bool = True
    until: int | None = None
    save_seconds: float = 0.0
    log: Iterable[Any] = ()
    trained_by: MakesExecutor | None = None
    clients: MakesClients = local_clients

    def __post_init__(self) -> None:
        object.__setattr__(self, "log", loggers_of(self.log))


def run(
    config: RunConfig,
    out: Path | str | None = None,
    *,
    instruments: MakesInstruments = Instruments,
    data: Any = None,
    loaded: FederatedData | None = None,
    model: Any = None,
    plan: LayerPlan | None = None,
    initial: tree.Tree | None = None,
    command: str = "",
    announce: bool = True,
    **execution: Any,
) -> Engine:
    """Train to the end or a pause, into a run directory if ``out`` is given, and return the engine with its last state.

    Args:
        config: the run's configuration.
        out: the run directory, new or empty. None keeps nothing on disk.
        instruments: a function that returns what measures layers and chooses a plan. It
            is called if the run measures, chooses a plan, or names another rule than
            the default.
        data, loaded, model, plan: as for :func:`fl_core.run.task.assemble`; ``initial`` is its ``start``.
        command: the user's command, for the record.
        announce: show the table of columns and the notes on the data.
        execution: options of :class:`Execution`.

    Warns:
        UserWarning: a client has a single class; the plan was edited by hand, or shares no layer that trains, or
            all of them.

    Raises:
        UsageError: something in the configuration is unknown or does not fit, or ``out`` is not free. Before the first
            checkpoint nothing is left in ``out`` then.
        BusyError: another process is writing to ``out``.
        NonFiniteError, RunError: training diverged or failed. The directory keeps its last checkpoint.
    """
    end_unguarded()
    task = assemble(
        config, data=data, loaded=loaded, model=model, plan=plan, start=initial
    )
    run_instruments = _used(instruments, task)
    plan_selection_of(task, run_instruments).check(task.algorithm(task.plan))
    _measuring(task, run_instruments)
    if out is not None:
        writing.check_free(Path(out))
    settings = Execution(**execution)
    if announce:
        task.announce()
    if out is None:
        return _execute(task, run_instruments, None, settings)
    data, config = task.data, task.config
    stored_config = {
        **config.to_json(),
        "shape": list(data.shape),
        "classes": list(data.classes),
    }
    if data.words is not None:
        stored_config["words"] = list(data.words)
    if data.preprocessing is not None:
        stored_config["preprocessing"] = data.preprocessing.to_json()
    if data.table.columns:
        stored_config["table"] = data.table.to_json()
    plan_in_force = task.algorithm(task.plan).plan
    stored_config["given"] = None if task.plan is None else task.plan.to_json()
    stored_config["in_force"] = (
        None if plan_in_force is None else plan_in_force.to_json()
    )
    own_kinds = [
        object_name
        for object_name, own_object in task.own.items()
        if own_object is not None
    ]
    stored_config |= {
        "command": command,
        "code": own_code.digests(task),
        "own": own_kinds,
    }
    header = {"run": Path(out).name, **task.header(command)}
    stored_config["environment"] = {
        **writing.current_environment(),
        "device": config.execution.device,
        "data": data.digest,
        "source": data.source_digest,
        "model": header["checkpoint"],
        "loss": task.criterion.name,
    }
    for key, value in stored_config.items():
        with about(f"{key} must be plain numbers and text", (TypeError, ValueError)):
            storage.json_bytes(value)
    partition = data.partition.to_tree()
    with writing.create(out, stored_config, partition, header, task.start) as writer:
        return _execute(task, run_instruments, writer, settings)


def resume(
    out: Path | str,
    *,
    instruments: MakesInstruments = Instruments,
    data: Any = None,
    model: Any = None,
    loss: Any = None,
    allow_code: str | Collection[str] = (),
    allow_changed_code: bool = False,
    data_root: Path | str | None = None,
    **execution: Any,
) -> Engine:
    """Continue a run from its last complete checkpoint. The end is bit for bit that of an uninterrupted run.

    This needs the same versions of Python and its packages. A warning names the changed ones.

    Args:
        out: the run directory.
        instruments: as for :func:`run`.
        data, model, loss: your own, if the run was given them.
        allow_code: the ``package.module:name`` of all your own code in the run (model, algorithm, dataset or rule), to
            allow it. A run directory from elsewhere must not choose the code that runs here. Also ``KEY=VALUE`` of
            model options other than sizes and rates (:func:`fl_core.run.own_code.check_allowed_options`).
        allow_changed_code: continue although your own code was edited since the run trained. The run records it.
        data_root: folder of the datasets' files, if it is another one now.
        execution: options of :class:`Execution`.

    Raises:
        UsageError: there is no run, an option is unknown, or the run's own data, model
            or code is missing or was edited.
        BusyError: it is running.
        CorruptError: stored files are damaged.
        NonFiniteError, RunError: as for :func:`run`.
    """
    for name in execution:
        if name in KEYS and not hasattr(Execution, name):
            raise UsageError(
                f"{name} must be that of the run; got {execution[name]!r}. Begin a run from its models: init={out}."
            )
        check_known("option of resume", name, Execution.__dataclass_fields__)
    with writing.reopen(out) as writer:
        run, path = writer.run, writer.path
        restore.check_current(run)
        weights = run.start() is not None
        restore.check_own(path, run.config, allow_code, weights, data=data, model=model)
        task = task_of(run, data_root=data_root, data=data, model=model, loss=loss)
        run_instruments = _used(instruments, task)
        if not run.rounds:  # later the plan has been chosen
            plan_selection_of(task, run_instruments).check(task.algorithm(task.plan))
        changed_parts: list[str] = []

        def accept(checkpoint: store.Checkpoint | None) -> None:
            if not run.finished:
                changed_parts[:] = own_code.changed_code(run, task)
            if changed_parts and not allow_changed_code:
                raise UsageError(
                    f"{path} must be resumed with the code that it began with; got other code of its "
                    f"{listing(changed_parts)}. Pass allow_changed_code=True to use it."
                )
            restore.check_same_start(task, path, weights=weights or checkpoint is None)
            if checkpoint is not None:
                restore.check(run, checkpoint, task)

        round_number = writer.rewind(accept)
        changed_versions = restore.changes(run.config["environment"])
        if changed_versions and not run.finished:
            warn(
                f"{path} began with {listing(changed_versions)}: what follows may differ in its last bits from an "
                "undisturbed run's"
            )
        settings = Execution(**execution)
        code = own_code.digests(task) if changed_parts else {}
        return _execute(task, run_instruments, writer, settings, round_number, code)


def check_device(name: str, task: Task | None = None) -> None:
    """Raise a UsageError unless PyTorch can use this device here, in the precision of a task.

    In bfloat16 a CPU's convolutions have wrong gradients on small maps, and write past their memory
    (https://github.com/pytorch/pytorch/issues/169688). So no weight may have three or more dimensions there.

    Args:
        name: the device's name, such as ``cuda``.
        task: the task whose precision is checked. None checks the device alone.

    >>> check_device("meta")  # which has no numbers
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: device must be one that works here: cpu...; got 'meta' ... Use device='cpu'.
    """
    try:
        torch.empty(0, device=name).cpu()
    except (RuntimeError, AssertionError) as error:
        modules = {"cuda": torch.cuda, "mps": torch.backends.mps}
        available_devices = [
            "cpu",
            *(
                device_type
                for device_type, module in modules.items()
                if module.is_available()
            ),
        ]
        reason = str(error).splitlines()[0]
        if reason.startswith("Expected one of"):  # a list of all that PyTorch knows
            reason = "PyTorch calls a graphics card cuda, or mps on a Mac"
        devices = " or ".join(available_devices)
        raise UsageError(
            f"device must be one that works here: {devices}; got {name!r} ({reason}). "
            f"Use {spelled(device=available_devices[-1])}."
        ) from error
    if not task or task.config.training.precision != "bf16":
        return
    device_type = torch.device(name).type
    is_possible = torch.amp.is_autocast_available(device_type)
    is_possible &= device_type != "cuda" or torch.cuda.is_bf16_supported(False)
    is_possible &= device_type != "cpu" or all(
        parameter.ndim < 3 for parameter in task.model.parameters()
    )
    if not is_possible:
        raise UsageError(
            f"precision must be one that the device has for the model, and a CPU has no bf16 for convolutions; got "
            f"bf16 on {name!r}. Use precision='float32'."
        )


def _fits_memory(task: Task, model: tree.Tree) -> bool:
    """Return whether one model of each client may stay in memory after the run.

    Together they may have at most :data:`KEPT_BYTES` bytes.
    """
    return len(task.data.clients) * tree.n_bytes(model) <= KEPT_BYTES


def _execute(
    task: Task,
    instruments: Instruments,
    writer: writing.Writer | None,
    how: Execution,
    resume_from: int = 0,
    code: Mapping[str, str] | None = None,
) -> Engine:
    config = task.config
    client_runner = task.client_runner(instruments.observers)
    initial = tree.state_dict(task.model)
    schedule = Schedule(
        int(config.federation.rounds or 1),
        config.federation.participation,
        int(config.execution.eval_every or 1),
        int(config.execution.checkpoint_every or 1),
        pause=how.until,
        save_seconds=how.save_seconds,
        keeps=writer is not None,
        keeps_last=writer is None and _fits_memory(task, initial),
        may_stop=bool(config.federation.patience),
        measure_every=config.execution.measure_every if config.execution.measure else 0,
    )
    make_executor = how.trained_by or (
        lambda runner: executor(
            runner, config.execution.workers, config.execution.stack == "on"
        )
    )
    listeners = listeners_of(
        task, client_runner, instruments, writer, tuple(how.log), how.progress
    )
    with closing(make_executor(client_runner)) as pool:
        run_id = ""
        if writer is not None:
            run_id = writer.run.id
        clients = how.clients(task, run_id, client_runner, pool)
        algorithm = task.algorithm(task.plan)
        engine = Engine(algorithm, task.data, initial, clients, schedule, listeners)
        if writer and resume_from:
            engine.restore(writer.run.checkpoint(resume_from, lazy=True))
        if code:
            engine.server.meta[store.CODE] = [
                *engine.server.meta.get(store.CODE, []),
                {"round": resume_from, "code": dict(code)},
            ]
        try:
            engine.run()
        except (RunError, OSError):
            raise
        except Exception as error:  # a hook may raise it for a forged state
            if writer and resume_from and engine.done == resume_from:
                checkpoint = writer.run.checkpoint_path(resume_from)
                next_round = f"the round after {checkpoint}"
                error_type = type(error).__name__
                reason = f"{error_type}: {error}"
                raise RunError(
                    f"{next_round} failed, perhaps because of its stored states: {reason}"
                ) from error
            raise
    return engine


@dataclass
class Progress(Listener):
    """A listener that shows the number of completed rounds and their pace on a bar.

    Attributes:
        title: the text before the bar.
        begun: the number of rounds that were complete when the run began or resumed.
        bar: the bar; None before the run.
    """

    title: str
    begun: int = 0
    bar: Any = None

    def before_run(self, engine: Engine) -> None:
        self.begun, rounds = engine.done, engine.schedule.end
        self.bar = progress_bar(rounds, self.title, "round", initial=self.begun)
        self.bar.__enter__()

    def after_round(self, engine: Engine) -> None:
        if engine.done > self.begun:
            pace = engine.listener(Timer).pace
            text = f"{pace.rate:,.0f} steps/s: {pace.shares()}"
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()

    def after_run(self, engine: Engine) -> None:
        if self.bar is not None:
            self.bar.__exit__(None, None, None)


def listeners_of(
    task: Task,
    client_runner: ClientRunner,
    instruments: Instruments,
    writer: writing.Writer | None = None,
    loggers: Sequence[Logger] = (),
    progress: bool = False,
) -> list[Listener]:
    """Return the listeners to a run of a task. They choose the plan, record, stop and save.

    Args:
        instruments: what measures layers and chooses a plan.
        writer: the writer of the run directory. None means that nothing is stored.
        loggers: further loggers that receive the rows.
        progress: whether a progress bar is shown.
    """
    config, data = task.config, task.data
    columns = {
        "algorithm": task.algorithm(task.plan).name,
        "seed": config.execution.seed,
        "run": writer.path.name if writer else "",
    }
    timer = Timer(writer)
    recorder = Recorder(data, columns, timer, writer, loggers, config.to_json())
    flops = cache(partial(training_flops, client_runner.workspace, data.shape))
    frozen_tensors = tree.frozen_base(client_runner.workspace.model)
    costs = Costs(
        recorder, flops, tree.n_bytes(frozen_tensors) if frozen_tensors else 0
    )
    guess = guessing_loss(client_runner.criterion, data.n_classes)
    divergence = Divergence(recorder, guess)
    selection = plan_selection_of(task, instruments)
    listeners = [selection, divergence, costs]
    stopping = None
    if config.federation.patience:
        ranking_scores = selecting_scores(data.task, config.federation.monitor)
        rule = StoppingRule(config.federation.patience, ranking_scores)
        stopping = EarlyStopping(rule, recorder, keeps_best=writer is None)
        listeners.append(stopping)
    listeners += _measuring(task, instruments)
    listeners.append(recorder)
    if writer:
        listeners.append(Saver(writer, timer, stopping))
    listeners.append(timer)
    if progress:
        seed = config.execution.seed
        listeners.append(Progress(f"{columns['algorithm']} seed {seed}"))
    return listeners


def _measuring(task: Task, instruments: Instruments) -> list[Listener]:
    """Return the listener that measures the layers while a task trains, in a list.

    The list is empty if the configuration asks for no measurement.

    Raises:
        UsageError: it asks for one, and the instruments cannot measure during a run.
    """
    if not task.config.execution.measure:
        return []
    if instruments.measuring is None:
        raise UsageError(
            "a run that measures must have instruments; got none. Use fl.run."
        )
    return [instruments.measuring(task)]


def _used(instruments: MakesInstruments, task: Task) -> Instruments:
    """Return the instruments of a task.

    They are empty if the task measures nothing, chooses no plan, and has the default
    rule.

    Args:
        instruments: the function that makes instruments.
        task: the task.

    Raises:
        UsageError: PyTorch cannot use the task's device here, or not in its precision.
    """
    config = task.config
    if not task.data.elsewhere:  # sites check their own
        check_device(config.execution.device, task)
    chooses = config.federation.plan == AUTO or task.algorithm(task.plan).decides
    chooses |= config.federation.rule != RunConfig().federation.rule  # to be checked
    if chooses or config.execution.measure:
        return instruments()
    return Instruments()


def plan_selection_of(task: Task, instruments: Instruments) -> PlanSelection:
    """Return the listener that chooses a task's plan, by the rule of its configuration.

    Args:
        instruments: what measures the layers.
    """
    config = task.config
    measures_first = config.federation.plan == AUTO and not task.algorithm(None).decides
    return PlanSelection(
        instruments, measures_first, config.federation.rule, config.federation.threshold
    )


def train_first_round(
    task: Task, observers: Mapping[str, Any], clients: str | Sequence[str] | None = None
) -> tuple[dict[str, nn.Module], dict[str, dict[str, Any]]]:
    """Train the first round, and return each client's local model and its measurement over the first epoch.

    A run of PLayer-FL measures in this same training: the same batches give the same
    bits.

    Args:
        task: the task. Every client trains the whole model in the first exchange of
            PLayer-FL, whatever the task's algorithm and plan.
        observers: makers of the observers of local training, by name. The one named
            ``federation_sensitivity`` measures, and is required.
        clients: names of the clients to train. The default is all.

    Returns:
        The models by client, and by client the measurement of the first epoch. A
        measurement is a dict with ``layers``, their ``importance``, and what else the
        observer reports. ``client`` is the client's position, and ``weight`` its number
        of training samples.

    Raises:
        UsageError: there is no such client or device.
        NonFiniteError: training diverged.
    """
    check_device(task.config.execution.device, task)
    client_runner = task.client_runner(observers)
    schedule = Schedule(1, 1.0, eval_every=1, checkpoint_every=1)
    initial = tree.state_dict(task.model)
    clients_here = LocalClients(client_runner, Serial(client_runner), initial)
    engine = Engine(Scout(task.task_info), task.data, initial, clients_here, schedule)
    names = engine.names
    chosen_names = names if clients is None else as_list("clients", clients)
    for name in chosen_names:
        check_known("client", name, names)
    engine.measure(
        tuple(k for k, n in enumerate(names) if n in chosen_names), keep=True
    )
    local_models = {
        name: copy_with(task.model, model)
        for name, model in clients_here.kept["local"].items()
    }
    return local_models, {
        names[reply["client"]]: reply for reply in engine.server.meta[MEASURED]
    }
