"""The files of a choice's models: the recommended ones and the linear baselines, so that an export needs no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from diagnostics.tuning.profile import every
from fedlayers.studies.harmless import Bench, Predictor
from fedlayers.studies.race import Trained
from fl_core import tree
from fl_core.errors import UsageError
from fl_core.layers import layers_of
from fl_core.models import example
from fl_core.models.adapter import PackedShape
from fl_core.records.store import Run
from fl_core.run import stored_models
from fl_core.run.exported_model import describe_model, of_run
from fl_core.run.own_code import code_in
from fl_core.run.task import Task
from fl_core.storage import Folder
from fl_core.training import evaluate

if TYPE_CHECKING:
    from fedlayers.studies.choice import Fallback


def store_models(
    out: Path,
    bench: Bench,
    best: Trained | None,
    others: Sequence[Predictor],
    alone: Trained | None = None,
    fallback: Fallback | None = None,
) -> None:
    """Store each client's recommended model, linear models and the fallback below a choice's folder.

    A model that cannot be built again from a description is left out.

    Args:
        best: the recommended run. ``alone``: that of training alone in its seed.
        others: the base rate and the baselines.
        fallback: for whom the models of training alone take the place of the recommended ones.
    """
    folder, shape = out / "models", bench.task.data.shape
    for name in Folder(folder).names():  # of an earlier decision
        Folder(folder).remove(name)
    for one in others:
        if one.models:
            config = bench.task.config.with_keys(
                model="linear",
                model_options={},
                adapt=None,
                algorithm="fedavg",
                options={},
            )
            first = next(iter(one.models.values()))
            layers = layers_of(first, example(shape))
            task = replace(bench.task, config=config, layers=layers)
            task = replace(task, own={**task.own, "model": None})
            run: dict[str, Any] = {
                "id": "",
                "name": out.name,
                "algorithm": one.name,
                "round": 0,
                "model": "personal",
                "client": None,
            }
            about = describe_model(task, first, None, run)
            _store(folder, one.name, bench, one, task, one.models, about)
    if best is None or isinstance(shape, PackedShape):
        return
    with suppress(UsageError):
        models, task, about = _described(bench, best)
        _store(
            folder, stored_models.RECOMMENDED, bench, best.model, task, models, about
        )
        if alone is None or fallback is None:
            return
        single = _described(bench, alone)[0]
        models |= {client: single[client] for client in fallback.clients}
        _store(
            folder, stored_models.FALLBACK, bench, fallback.model, task, models, about
        )


def _described(
    bench: Bench, one: Trained
) -> tuple[dict[str, nn.Module], Task, dict[str, Any]]:
    """Return a run's models after their own epochs, their task, and their description."""
    loaded = bench.load(one.job.path)
    models, names = loaded.models, every(loaded.task.layers)
    if one.epochs:
        tuner = bench.tuner(one.job, loaded)
        for k, client in enumerate(models):
            own = tuner.tuned(k, names, one.rate, one.epochs)
            tree.load(models[client], own)
    about = of_run(Run(one.job.path), loaded.kind, None, loaded.round)
    about["run"] |= {"own_epochs": one.epochs, "own_rate": one.rate}
    task = loaded.task
    return models, task, describe_model(task, next(iter(models.values())), **about)


def _store(
    folder: Path,
    name: str,
    bench: Bench,
    one: Predictor,
    task: Task,
    models: Mapping[str, nn.Module],
    about: dict[str, Any],
) -> None:
    """Store clients' models with the calibration with which they are scored."""
    about["temperature"], weight = bench.calibration(one)
    bases = {client: weight * base for client, base in bench.bases.items()}
    base = weight * evaluate.base_outputs(bench.task.data, bench.task.criterion)
    about["base_rate"] = base.tolist() if task.data.classes else []
    code, own = code_in(bench.task.config), task.own["model"]
    stored_models.store(folder, name, about, models, bases, task, own, code)
