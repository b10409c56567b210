"""The files of an answer's models: recommended, simple and fallback, so that an export needs no data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from diagnostics.tuning.profile import every
from fedlayers.decision.boosting import MODEL, OPTIONS
from fedlayers.decision.losses import Predictor, SeedLosses
from fl_core import tree
from fl_core.errors import UsageError, warn
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
    from fedlayers.decision.answer import Answer
    from fedlayers.decision.training import Trained


def store_models(out: Path, answer: Answer, trained: Trained) -> None:
    """Store each client's model of the recommended way, of the simple ways and of the fallback, in the first seed.

    The files are in the folder ``models`` below ``out``. Models of an earlier answer
    are removed. A model that cannot be built again from a description is left out, with
    a warning. Models of samples with several inputs are left out without one.
    """
    question = trained.question
    seed, folder = question.seeds[0], out / "models"
    losses = question.losses[seed]
    for name in Folder(folder).names():  # of an earlier decision
        Folder(folder).remove(name)
    for name, by_seed in trained.simple.items():
        predictor = by_seed.get(seed)
        if predictor is not None and predictor.models:
            names = [name]
            if name == answer.way:
                names.append(stored_models.RECOMMENDED)
            for file_name in names:
                _store_simple(folder, file_name, losses, predictor, out.name)
    if answer.way not in trained.runs or isinstance(
        losses.task.data.shape, PackedShape
    ):
        return
    try:
        models, task, description = _described(trained, answer.way)
        predictor = trained.runs[answer.way][seed].tuned[trained.tuning[answer.way]]
        name = stored_models.RECOMMENDED
        _store(folder, name, losses, predictor, task, models, description)
        if answer.fallback:
            local_models, *_ = _described(trained, "local")
            models |= {client: local_models[client] for client in answer.fallback}
            mixed_predictor = _mixed(trained, predictor, answer.fallback)
            _store(
                folder,
                stored_models.FALLBACK,
                losses,
                mixed_predictor,
                task,
                models,
                description,
            )
    except UsageError as error:
        warn(
            f"the models of {answer.way} are not stored, so they cannot be exported: {error}"
        )


def _mixed(trained: Trained, one: Predictor, clients: tuple[str, ...]) -> Predictor:
    """Return a predictor of local training for some clients, and of a way for the others.

    Args:
        trained: the trained ways. Of local training the first seed is taken.
        one: the way's predictor in that seed.
        clients: names of the clients that get local training.
    """
    seed = trained.question.seeds[0]
    local_predictor = trained.runs["local"][seed].tuned[trained.tuning["local"]]
    outputs = {}
    for split, by_client in one.outputs.items():
        replaced_outputs = {
            c: local_predictor.outputs[split][c] for c in clients if c in by_client
        }
        outputs[split] = {**by_client, **replaced_outputs}
    return Predictor("fallback", outputs)


def _store_simple(
    folder: Path, name: str, losses: SeedLosses, one: Predictor, choice: str
) -> None:
    """Store each client's simple model.

    Args:
        folder: the folder of the models.
        name: the name of the stored models in it.
        losses: the samples of the first seed.
        one: the predictor, with a model for each client.
        choice: the name of the decision's folder, for the description.
    """
    model, options = "linear", dict[str, Any]()
    if one.name.startswith("boosting"):
        model, options = MODEL, OPTIONS
    config = losses.task.config.with_keys(
        model=model, model_options=options, adapt=None, algorithm="fedavg", options={}
    )
    first_model = next(iter(one.models.values()))
    layers = layers_of(first_model, example(losses.task.data.shape))
    task = replace(losses.task, config=config, layers=layers)
    task = replace(task, own={**task.own, "model": None})
    run: dict[str, Any] = {
        "id": "",
        "name": choice,
        "algorithm": one.name,
        "round": 0,
        "model": "personal",
        "client": None,
    }
    description = describe_model(task, first_model, None, run)
    _store(folder, name, losses, one, task, one.models, description)


def _described(
    trained: Trained, way: str
) -> tuple[dict[str, nn.Module], Task, dict[str, Any]]:
    """Return a way's models in the first seed, their task, and their description.

    The models are those after fine-tuning.

    Raises:
        UsageError: clients hold parts of the model, or it cannot be built again from a
            description.
    """
    seed = trained.question.seeds[0]
    losses, finished_run = trained.question.losses[seed], trained.runs[way][seed]
    tuning = trained.tuning[way]
    loaded = losses.load(finished_run.job.path, finished_run.job.model)
    models, names = loaded.models, every(loaded.task.layers)
    if tuning.epochs:
        tuner = losses.tuner(finished_run.job, loaded)
        for k, client in enumerate(models):
            tuned_weights = tuner.tuned(
                k, names, finished_run.rate(tuning), tuning.epochs
            )
            tree.load(models[client], tuned_weights)
    description = of_run(Run(finished_run.job.path), loaded.kind, None, loaded.round)
    description["run"] |= {
        "fine_tuning": tuning.epochs,
        "fine_tuning_rate": finished_run.rate(tuning),
    }
    task = loaded.task
    return (
        models,
        task,
        describe_model(task, next(iter(models.values())), **description),
    )


def _store(
    folder: Path,
    name: str,
    losses: SeedLosses,
    one: Predictor,
    task: Task,
    models: Mapping[str, nn.Module],
    about: dict[str, Any],
) -> None:
    """Store clients' models with the calibration with which they are scored.

    Args:
        folder: the folder of the models.
        name: the name of the stored models in it.
        losses: the samples of the first seed.
        one: the predictor of these models, which is calibrated.
        task: the task of the models.
        models: the model of each client.
        about: the description, to which the calibration is added in place.
    """
    about["temperature"], weight = losses.calibration(one)
    bases = {client: weight * base for client, base in losses.bases.items()}
    base = weight * evaluate.base_outputs(losses.task.data, losses.task.criterion)
    about["base_rate"] = base.tolist() if task.data.classes else []
    code, model = code_in(losses.task.config), task.own["model"]
    stored_models.store(folder, name, about, models, bases, task, model, code)
