"""``fl.run`` and ``fl.resume``: runs that can use diagnostics to choose their plan."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fl_core.config import RunConfig, with_own
from fl_core.errors import UsageError, as_list
from fl_core.keys import RunKeys

if TYPE_CHECKING:
    from fedlayers.run_result import RunResult
    from fl_core.plan import LayerPlan
    from fl_core.rounds.clients import MakesExecutor
    from fl_core.rounds.recorder import Logger
    from fl_core.run.runner import Instruments


def run(
    config: RunConfig | None = None,
    out: Path | str | None = None,
    *,
    data: Any = None,
    model: Any = None,
    plan: LayerPlan | Path | str | None = None,
    command: str = "",
    progress: bool = True,
    live: bool = False,
    log: str | Logger | Collection[str | Logger] = (),
    backend: str = "",
    **keys: Unpack[RunKeys],
) -> RunResult:
    """Train one algorithm on one federation. Return its scores, plan and models.

    >>> import fedlayers as fl
    >>> result = fl.run(dataset="heart", algorithm="playerfl", rounds=2, progress=False)
    >>> result.done
    2
    >>> result.plan
    LayerPlan([fc1] fc2 fc3 fc4; [] = shared, by sensitivity_ratio t=1.2)

    Your own samples and your own network:

    >>> import numpy as np
    >>> from torch import nn
    >>> draw = np.random.default_rng(0)
    >>> wards = {ward: (draw.normal(size=(40, 5)), np.arange(40) % 2) for ward in ("north", "south")}
    >>> fl.run(data=wards, model=nn.Linear(5, 2), algorithm="fedper", rounds=1, progress=False).scores.shape[0]
    4

    Args:
        config: the run's configuration. Keys of :class:`fl_core.config.RunConfig` can also be given by name, alone or
            to change it: ``fl.run(dataset="digits", clients=3, lr=0.1)``.
        out: the run directory, new or empty. None keeps nothing on disk.
        data: your own data instead of a dataset's name: ``{client: samples}``, where samples are a pair (x, y) of
            tensors or arrays, a Dataset or a DataLoader. Or a DataFrame with a column of clients, read as a table. The
            seed splits them. A federation from :func:`fl.from_clients <fl_core.data.loading.from_clients>` keeps
            its splits.
        model: a registered name, ``package.module:callable``, your own module, which is copied, or a callable that
            builds one.
        plan: the layers that are shared: a plan or its path. With ``auto`` the run measures, and a rule decides.
        command: the command line, for the record.
        progress: show a progress bar.
        live: draw the main score over the rounds in the notebook's cell, again at most once a second.
        log: loggers that receive the rows during the run: ``trackio``, ``wandb`` (offline, unless WANDB_MODE says
            otherwise), ``tensorboard``, objects of subclasses of :class:`fl.Logger <fl_core.rounds.recorder.Logger>`,
            or ``package.module:Class``.
        backend: ``ray`` or ``ray:HOST:PORT``: clients are trained on a cluster
            (:mod:`fedlayers.backends.cluster`), with the same bits as ``stack="off"``.

    Raises:
        UsageError: an unknown name or an invalid value, before anything is written.
        DivergedError, RunError: during the run; the directory keeps its last checkpoint.
    """
    from fedlayers.run_result import Live, LiveRun, RunResult
    from fl_core.plan import LayerPlan
    from fl_core.run import runner

    log = as_list("log", log, empty=True)
    run_keys: dict[str, Any] = {**keys}
    if isinstance(plan, str | Path):
        run_keys["plan"], plan = str(plan), None
    if not isinstance(plan, LayerPlan | None):
        plan_type = type(plan).__name__
        raise UsageError(
            f"plan must be a LayerPlan or its path; got {plan_type}. Pass its plan, such as choice.plan."
        )
    config, objects = with_own(config, data, model, **run_keys)
    trained_by = _clients_on(backend, config)
    if trained_by is not None:
        config = config.with_keys(stack="off")
    with Live() if live else nullcontext() as picture:
        engine = runner.run(
            config,
            out,
            **objects,
            instruments=default_instruments,
            plan=plan,
            command=command,
            progress=progress,
            log=[*log, LiveRun(picture)] if picture else log,
            trained_by=trained_by,
        )
    return RunResult(engine, None if out is None else Path(out), **objects)


def _clients_on(place: str, config: RunConfig) -> MakesExecutor | None:
    if not place:
        return None
    from fedlayers.backends.cluster import clients_on

    return clients_on(place, config.execution)


def resume(
    out: Path | str,
    *,
    live: bool = False,
    log: str | Logger | Collection[str | Logger] = (),
    backend: str = "",
    **options: Any,
) -> RunResult:
    """Continue an interrupted run. The result has the same bits as an uninterrupted one.

    >>> import fedlayers as fl, tempfile
    >>> folder = tempfile.mkdtemp() + "/run"
    >>> result = fl.run(dataset="heart", rounds=1, out=folder, progress=False)
    >>> fl.resume(folder, progress=False).done  # it is done: nothing is left to train
    1

    Args:
        out: the run directory.
        live, log, backend: as for :func:`run`.
        options: ``data``, ``model``, ``loss``, ``allow_code``, ``allow_changed_code``,
            ``data_root`` and ``progress``, as for :func:`fl_core.run.runner.resume`.

    Raises:
        UsageError: there is no run, an option is unknown, its own data or model are
            missing from the call, or its code is not allowed or was edited.
        BusyError: the run is in progress.
        CorruptError: stored files are damaged.
        DivergedError, RunError: as for :func:`run`.
    """
    from fl_core.records.store import Run

    stored_config = Run(out).config

    from fedlayers.run_result import Live, LiveRun, RunResult
    from fl_core.models.building import with_loss
    from fl_core.run import restore, runner

    config = restore.stored_config(stored_config)[0]
    trained_by = _clients_on(backend, config.with_keys(workers=0))
    log = as_list("log", log, empty=True)
    with Live() if live else nullcontext() as picture:
        engine = runner.resume(
            out,
            instruments=default_instruments,
            log=[*log, LiveRun(picture)] if picture else log,
            trained_by=trained_by,
            **options,
        )
    objects = with_loss(options.get("model"), options.get("loss")), options.get("data")
    return RunResult(engine, Path(out), *objects)


def default_instruments() -> Instruments:
    """Return the observers, rules and listeners of diagnostics. They are imported at the first call."""
    from diagnostics.measure import instruments
    from diagnostics.through_time import Measuring

    return replace(instruments(), measuring=Measuring)
