"""``fl.run`` and ``fl.resume``: runs that can use the diagnostics to decide on their plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_core.config import RunConfig
from fl_core.errors import check_known

if TYPE_CHECKING:
    from torch import nn

    from fl_core.data import FederatedData
    from fl_core.decision import Instruments
    from fl_core.engine import Engine
    from fl_core.loggers.base import Logger
    from fl_core.plan import LayerPlan


def run(
    config: RunConfig | None = None,
    out: Path | str | None = None,
    *,
    data: FederatedData | None = None,
    model: nn.Module | str | None = None,
    plan: LayerPlan | Path | str | None = None,
    instruments: Instruments | None = None,
    command: str = "",
    progress: bool = True,
    log: Collection[str | Logger] = (),
    **keys: Any,
) -> Engine:
    """Train one algorithm on one federation to the end; returns the run's last state and its rows.

    >>> import fedlayers as fl
    >>> engine = fl.run(dataset="heart", algorithm="playerfl", rounds=2, progress=False)
    >>> engine.done
    2
    >>> engine.algorithm.plan
    LayerPlan([fc1] fc2 fc3 fc4; [shared], by sensitivity_ratio t=1.2)

    Args:
        config: what the run is; keys of :class:`fl_core.config.RunConfig` may be given by name, in its place or to
            change it: ``fl.run(dataset="digits", clients=3, lr=0.1)``.
        out: the run directory, new or empty; None keeps nothing on disk.
        data: your own, as :func:`fl.of_silos <fl_core.data.silos.of_silos>` makes them, in place of a dataset's name.
        model: a registered name, ``package.module:callable``, or your own module, which is copied.
        plan: which layers are shared: a plan, the path of one, or ``auto`` to measure and decide first.
        instruments: what measures and decides in mid-run; the diagnostics' by default.
        command: what was typed, for the record.
        progress: show a bar over the rounds.
        log: where else its rows go, live: ``tensorboard``, ``mlflow``, ``package.module:Class``, or an object of a
            class made of :class:`fl.Logger <fl_core.loggers.base.Logger>`.

    Raises:
        UsageError: anything unknown or not fitting, before anything is written.
        NonFiniteError, RunError: during the run; the directory keeps its last checkpoint.
    """
    from fl_core import runner
    from fl_core.plan import LayerPlan

    for key in keys:
        check_known("key of a run", key, [field.name for field in fields(RunConfig)])
    own_model, own_plan = None, None
    if isinstance(model, str):
        keys["model"] = model
    elif model is not None:
        own_model = model
    if isinstance(plan, LayerPlan):
        own_plan = plan
    elif plan is not None:
        keys["plan"] = str(plan)
    config = replace(config or RunConfig(), **keys)
    return runner.run(
        config,
        out,
        instruments=instruments or of_diagnostics(),
        data=data,
        model=own_model,
        plan=own_plan,
        command=command,
        progress=progress,
        log=log,
    )


def resume(out: Path | str, *, instruments: Instruments | None = None, **options: Any) -> Engine:
    """Continue an interrupted run, to exactly the bits of an undisturbed one.

    >>> import fedlayers as fl, tempfile
    >>> folder = tempfile.mkdtemp() + "/run"
    >>> done = fl.run(dataset="heart", rounds=1, out=folder, progress=False)
    >>> fl.resume(folder, progress=False).done  # it is done: nothing is left to train
    1

    Args:
        options: ``data``, ``model``, ``model_code``, ``progress`` and ``log``, as of :func:`fl_core.runner.resume`.

    Raises:
        UsageError: no run there, or its own data, model or code not given again.
        BusyError: it is running. CorruptError: what is stored is damaged.
    """
    from fl_core import runner

    return runner.resume(out, instruments=instruments or of_diagnostics(), **options)


def of_diagnostics() -> Instruments:
    """How a run decides in its first round: by the diagnostics' observers and rules."""
    from fedlayers.diagnostics.measure import instruments

    return instruments()
