"""Load the models of a run directory."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

import fl_core
from fl_core import models, restore, tree
from fl_core.algorithms.base import Algorithm, Round, extends_model, find
from fl_core.data.inputs import Inputs
from fl_core.errors import UsageError, damaged, listing, warn
from fl_core.models import lora
from fl_core.models.adapter import original
from fl_core.models.building import TRIAL, drop_statistics
from fl_core.models.registry import check_stored, without_weights
from fl_core.records import store
from fl_core.restore import allowed_code, task_of
from fl_core.task import Task, wrapped
from fl_core.training import evaluate
from fl_core.tree import Tree

MODELS = ("local", "personal", "global")


def load_models(
    path: Path | str,
    round: int | str = "last",
    which: str = "local",
    *,
    data: Any = None,
    model: Any = None,
    allow_code: str | Collection[str] = (),
) -> tuple[dict[str, nn.Module], Task]:
    """Return the models of a checkpoint, one for each client, with their task.

    A model's ``label_names`` are the names of its classes.

    >>> from fl_core.config import RunConfig
    >>> from fl_core.runner import run
    >>> engine = run(RunConfig(dataset="heart", rounds=1), "runs/first", progress=False)
    >>> models, task = load_models("runs/first", which="global")
    >>> sorted(models)
    ['cleveland', 'hungarian', 'switzerland', 'va']
    >>> test = task.data.clients[0].test
    >>> models["cleveland"](test.x).shape == (len(test), len(task.data.classes))
    True

    Args:
        round: a round with a checkpoint, ``"last"``, or ``"best"``: these models' best round under a stopping rule.
        which: ``local`` (after local training, before aggregation; the clients sampled in that round), ``personal``
            (fine-tuned if the algorithm does this), or ``global``.
        data, model, allow_code: as in :func:`fl_core.runner.resume`.

    Raises:
        UsageError: the round or model does not exist (the message lists others), or data or model differ from the
            run's.
        CorruptError: stored files are damaged.
    """
    _, models, task = load_kind(
        path, round, which, data=data, model=model, allow_code=allow_code
    )
    return {
        name: with_labels(original(model), task.data.classes)
        for name, model in models.items()
    }, task


def with_labels(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return the model with the names of its classes, in the order of its outputs, as its ``label_names``."""
    model.label_names = tuple(names)  # type: ignore[assignment]
    return model


def load_kind(
    path: Path | str,
    round: int | str,
    which: str | None,
    *,
    data: Any = None,
    model: Any = None,
    allow_code: str | Collection[str] = (),
) -> tuple[str, dict[str, nn.Module], Task]:
    """Return the name of the models, and then what :func:`load_models` returns.

    For ``which`` None these are the personal models, or the global one if no model is personal.
    """
    if round == "best":
        round = store.Run(path).best_round(which)
    order = ("personal", "global") if which is None else (which,)
    own = {"data": data, "model": model, "allow_code": allow_code}
    _, which, models, task = next(load_rounds(path, [round], order, **own))
    return which, models, task


def load_rounds(
    path: Path | str, rounds: Sequence[int | str], which: Sequence[str], **own: Any
) -> Iterator[tuple[int, str, dict[str, nn.Module], Task]]:
    """Yield each round with the name of its models, the models and their task, which is made once.

    Args:
        which: names of models. The first one that the round has is taken.
        own: ``data``, ``model`` and ``allow_code``, as of :func:`load_models`.
    """
    found, task = store.Run(path), None
    for round in rounds:
        checkpoint = found.checkpoint(round)
        if task is None:
            task = _task_to_read(found, **own)
        algorithm = restore.check(found, checkpoint, task)
        kind, trees = _trees_of_first(found, checkpoint, algorithm, task, which)
        models = {name: copy_with(task.model, each) for name, each in trees.items()}
        yield checkpoint.round, kind, models, task


def _trees_of_first(
    found: store.Run,
    checkpoint: store.Checkpoint,
    algorithm: Algorithm,
    task: Task,
    order: Sequence[str],
) -> tuple[str, dict[str, tree.Tree]]:
    """Return the first of some kinds of models that a checkpoint has, and its whole models by client."""
    with damaged(
        found.checkpoint_path(checkpoint.round), Exception
    ):  # what a hook raises for states that do not fit
        trees = trees_of(checkpoint, algorithm)
    which = next((kind for kind in order if kind in trees), None)
    if which is None:
        raise UsageError(
            f"model must be one of {listing(trees)} after round {checkpoint.round}; got {order[0]!r}."
        )
    whole = tree.named_tensors(task.model).keys()
    for client, each in trees[which].items():
        if each.keys() < whole:
            raise UsageError(
                f"client {client!r} must have a whole {which!r} model to load; got a part of it."
            )
    names = (client.name for client in task.data.clients)
    return which, {name: trees[which][name] for name in names if name in trees[which]}


def trees_of(
    checkpoint: store.Checkpoint, algorithm: Algorithm
) -> dict[str, dict[str, tree.Tree]]:
    """Return the models of a checkpoint by kind and client. The algorithm is the run's, under its plan."""
    trees = {kind: dict(found) for kind, found in checkpoint.models.items()}
    for name, state in checkpoint.clients.items():
        for kind, each in algorithm.models(
            checkpoint.server, state, Round(checkpoint.round)
        ).items():
            trees.setdefault(kind, {}).setdefault(name, each)
    return trees


def _task_to_read(
    found: store.Run, allow_code: str | Collection[str] = (), **own: Any
) -> Task:
    """Return the task of a finished or interrupted run, for reading its models."""
    own = {"data": None, "model": None, **own}
    restore.check_own(found.path, found.task_config(), allow_code, True, **own)
    task = task_of(found, trained=True, **own)
    restore.check_same_start(task, found.path, weights=False)
    if changed := restore.changed_code(found, task):
        warn(
            f"{found.path} was trained with other code of its {listing(changed)}: its scores may be those of that code"
        )
    return task


def copy_with(model: nn.Module, source: tree.Tree) -> nn.Module:
    """Return a copy of a model with the tensors of a tree."""
    module = copy.deepcopy(model)
    tree.load(module, source)
    return module


def describe_model(
    found: store.Run,
    task: Task,
    trained: nn.Module,
    which: str,
    client: str | None,
    round: int | str,
) -> dict[str, Any]:
    """Return the description of a run's model, as in its JSON file."""
    config, data = task.config, task.data
    checkpoint = found.checkpoint(round, lazy=True)
    below = find(config.federation.algorithm).base_algorithm(config.federation.options)
    asked = {
        "algorithm": config.federation.algorithm,
        "options": dict(config.federation.options),
    }
    plan = checkpoint.server.meta.get("plan") or found.config.get("in_force")
    return {
        "model": {
            "outputs": evaluate.predict(trained, models.example(data.shape)).shape[1],
            "callable": "" if "model" in found.config["own"] else config.model.model,
            "class": f"{type(trained).__module__}.{type(trained).__qualname__}",
            "options": without_weights(
                str(config.model.model), config.model.model_options
            ),
            "seed": config.execution.seed,
            "bn": config.model.batchnorm,
            "extended_by": asked if extends_model(below) else None,
        },
        "inputs": Inputs.from_federation(data, config.data).to_json(),
        "classes": list(data.classes),
        "task": data.task,
        "layers": [asdict(layer) for layer in task.layers],
        "plan": plan,
        "weights": tree.digest(tree.state_dict(lora.merged(trained))),
        "run": {
            "id": found.id,
            "name": found.path.resolve().name,
            "algorithm": config.federation.algorithm,
            "model": which,
            "client": client,
            "round": checkpoint.round,
            "dataset": config.data.dataset,
            "data": data.digest,
            "source": data.source_digest,
        },
        "version": fl_core.__version__,
    }


def built_from(
    path: Path,
    about: Mapping[str, Any],
    model: nn.Module | None,
    allow_code: str | Collection[str],
    weights: Tree,
) -> nn.Module:
    """Return the model that a description names, with these weights.

    Their names and shapes are compared before the model is tried, so that no small file takes much memory. For samples
    of more than :data:`TRIAL` numbers it is not tried.

    Args:
        path: of the file of weights, for messages.
        model, allow_code: as of :meth:`fl_core.exported_model.ExportedModel.model`.

    Raises:
        UsageError: code or a model is missing, the weights do not fit, or the samples are too large for an algorithm
            that tries the model to extend it.
    """
    allowed = allowed_code(allow_code)
    said, inputs = about["model"], Inputs.from_json(about["inputs"])
    extended = said["extended_by"] or {"algorithm": Algorithm.name, "options": {}}
    named = {**extended, "model": said["callable"]}
    restore.check_code(
        path,
        {
            key: name
            for key, name in restore.code_of(named).items()
            if model is None or key != "model"
        },
        allowed,
    )
    shape, n_classes, seed = inputs.model_shape, said["outputs"], said["seed"]
    small, extends = math.prod(shape) <= TRIAL, said["extended_by"] is not None
    if extends and not small:
        raise UsageError(
            f"{path} must have samples of at most {TRIAL:,} numbers, since {extended['algorithm']} extends its model; "
            f"got shape {shape}. Train it on smaller samples."
        )
    if model is not None:
        made = models.copy_user_model(
            model, shape, n_classes, seed=seed, options=said["options"], trial=extends
        )
    elif not said["callable"]:
        raise UsageError(
            f"{path} must be loaded with its own model, {said['class']}; got none. Pass it again, model=..."
        )
    else:
        check_stored(str(path), said["callable"], said["options"], allowed)
        made = models.build(
            said["callable"],
            shape,
            n_classes,
            seed=seed,
            options=said["options"],
            trial=extends,
        )
    if said["bn"] == "drop":
        drop_statistics(made)
    if extends:
        sizes = {"shape": shape, "n_classes": n_classes, "seed": seed}
        algorithm = find(extended["algorithm"])
        made = wrapped(made, algorithm, extended["options"], said["bn"], **sizes)
    if said.get("code", now := restore.of_model(made, model, said["callable"])) != now:
        warn(
            f"{path} was exported with other code of its model: its predictions may be those of that code"
        )
    tree.load(made, weights)
    if small:
        models.check_fit(
            said["callable"] or type(made).__name__, made, shape, n_classes
        )
    return made
