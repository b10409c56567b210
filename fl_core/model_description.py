"""Descriptions of exported models: what a model is, in plain data, and the model that is built from them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

import fl_core
from fl_core import models, own_code, restore, tree
from fl_core.algorithms.base import Algorithm, extends_model, find
from fl_core.algorithms.contract import configurations
from fl_core.data.inputs import Inputs
from fl_core.errors import UsageError, warn
from fl_core.models import lora
from fl_core.models.batch_norms import drop_statistics
from fl_core.models.building import TRIAL
from fl_core.models.options import check_stored, without_weights
from fl_core.records import store
from fl_core.restore import allowed_code
from fl_core.task import Task
from fl_core.training import evaluate
from fl_core.tree import Tree


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
        algorithm = find(extended["algorithm"])
        below = algorithm.base_algorithm(extended["options"])
        options = configurations(algorithm, extended["options"])[-1]
        made = below.wrap_model(
            made, options, shape=shape, n_classes=n_classes, seed=seed
        )
        if said["bn"] == "drop":
            drop_statistics(made)
    if said.get("code", now := own_code.of_model(made, model, said["callable"])) != now:
        warn(
            f"{path} was exported with other code of its model: its predictions may be those of that code"
        )
    tree.load(made, weights)
    if small:
        models.check_fit(
            said["callable"] or type(made).__name__, made, shape, n_classes
        )
    return made
