"""The files of a choice's models: the recommended ones and the linear baselines, so that an export needs no data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fedlayers.studies.harmless import Bench, Predictor
from fedlayers.studies.jobs import TrainingJob
from fl_core.errors import UsageError
from fl_core.layers import layers_of
from fl_core.models import example
from fl_core.models.adapter import PackedShape
from fl_core.records.store import Run
from fl_core.run import stored_models
from fl_core.run.exported_model import describe_model, of_run
from fl_core.run.own_code import code_in
from fl_core.run.restore import load_rounds
from fl_core.run.task import Task
from fl_core.storage import Folder
from fl_core.training import evaluate


def store_models(
    out: Path,
    bench: Bench,
    job: TrainingJob | None,
    model: Predictor | None,
    others: Sequence[Predictor],
) -> None:
    """Store each client's recommended model and linear models below a choice's folder.

    A model that cannot be built again from a description is left out.

    Args:
        job: the recommended run, and ``model`` its predictor.
        others: the base rate and the baselines.
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
            layers = layers_of(next(iter(one.models.values())), example(shape))
            task = replace(bench.task, config=config, layers=layers)
            task = replace(task, own={**task.own, "model": None})
            run: dict[str, Any] = {
                "id": "",
                "name": out.name,
                "algorithm": one.name,
                "round": 0,
            }
            run |= {"model": "personal", "client": None}
            about = describe_model(task, next(iter(one.models.values())), None, run)
            _store(folder, one.name, bench, one, task, one.models, about)
    if job is None or model is None or isinstance(shape, PackedShape):
        return
    found = Run(job.path)
    at = "last" if found.stopping_rule() is None else "best"
    with suppress(UsageError), warnings.catch_warnings(action="ignore"):
        code, own = code_in(bench.task.config), bench.task.own
        loaded = load_rounds(job.path, [at], allow_code=code, **own)
        round, which, models, task = next(loaded)
        of_this = of_run(found, which, None, round)
        about = describe_model(task, next(iter(models.values())), **of_this)
        _store(folder, stored_models.RECOMMENDED, bench, model, task, models, about)


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
