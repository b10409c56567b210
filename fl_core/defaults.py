"""The defaults of a configuration: from its dataset's recipe, and the absolute paths of its files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_core import choices, data
from fl_core.config import KEYS, RunConfig
from fl_core.data.columns import BETWEEN
from fl_core.data.registry import DATASETS, ROOT_VARIABLE
from fl_core.errors import UsageError
from fl_core.registry import is_outside

OF_RECIPE = (
    "model",
    "rounds",
    "epochs",
    "batch_size",
    "lr",
    "optimizer",
    "keep_optimizer",
    "loss",
    "patience",
)


def resolve(config: RunConfig) -> RunConfig:
    """Return the configuration with the dataset's defaults, after a check of names and numbers.

    Data from Python give their name, and their recipe or the general one.

    Raises:
        UsageError: a value is invalid, or a key about reading or partitioning data is set for a federation from Python.
    """
    from fl_core.training.phases import Training

    given = config.own_data
    if given is not None and isinstance(given, data.FederatedData):
        config = config.with_keys(
            scale=None if config.data.scale == choices.SCALES[0] else config.data.scale
        )
        _check_undealt(config, given.name)
        natural = given.partition.kind == "natural"
        recipe = data.datasets().get(given.name) or data.general(
            given.shape, natural, given.task, stops=False
        )
    else:
        keys = config.data.reading_options()
        named = config.data.dataset if given is None else given
        recipe = data.recipe(
            named,
            data_root=config.data.data_root,
            download=config.data.download,
            **keys,
        )
        config = config.with_keys(
            scale=config.data.scale or data.default_scale(named, **keys)
        )
    root = config.data.data_root or os.environ.get(ROOT_VARIABLE)
    own_model = (
        recipe.model_options
        if config.model.model in (None, recipe.model) and config.own_model is None
        else {}
    )
    config = _fill(config, {key: getattr(recipe, key) for key in OF_RECIPE})
    own = (
        recipe.optimizer_options
        if config.training.optimizer == recipe.optimizer
        else {}
    )
    own_loss = recipe.loss_options if config.training.loss == recipe.loss else {}
    rounds = int(config.federation.rounds or 0)
    interval = evaluation_interval(
        rounds, config.federation.participation, int(config.training.epochs or 0)
    )
    interval = (
        min(interval, choices.STOPPING_INTERVAL)
        if config.federation.patience
        else interval
    )
    config = _fill(
        config, {"eval_every": interval, "checkpoint_every": max(1, rounds // 20)}
    )
    config = _fill(
        config, {"momentum": 0.0, "weight_decay": 0.0, "amsgrad": False, **own}
    )
    dataset = config.data.dataset if given is None else given.name
    files = {"data_root": root, "init": config.model.init}
    if given is None and is_file(dataset):
        files["dataset"] = dataset
    paths = {key: absolute(key, path) for key, path in files.items() if path}
    filled = config.with_keys(
        model_options={**own_model, **config.model.model_options},
        loss_options={**own_loss, **(config.training.loss_options or {})},
        **{"dataset": dataset, **paths},
    )
    Training.of(filled.training)  # checks its numbers
    return filled


def _fill(config: RunConfig, defaults: Mapping[str, Any]) -> RunConfig:
    return config.with_keys(
        **{key: value for key, value in defaults.items() if config.value(key) is None},
    )


def evaluation_interval(rounds: int, participation: float, epochs: int) -> int:
    """Return the default number of rounds between evaluations.

    It is a twentieth of the run, or more if evaluation is expensive.

    Evaluation should take at most a tenth of the time. Scoring all validation and test samples costs about a quarter of
    a local epoch of all clients. A forward pass takes a third of a training step's time. The two splits together have
    half of training's samples. The round's locally trained models are scored as well. The interval is at most a third
    of the rounds, rounded up.
    """
    cost = (
        0.25 * (1 + participation) / (participation * epochs) if epochs else 0.0
    )  # in rounds of training
    count = min(20, max(3, rounds // max(1, math.ceil(min(10 * cost, rounds)))))
    return math.ceil(rounds / count)


def is_file(dataset: str) -> bool:
    """Return whether a dataset is a file or folder, or several files, and no name."""
    return dataset not in DATASETS and not is_outside(dataset)


def absolute(key: str, path: Path | str) -> str:
    """Return the absolute path of a key's file or folder. A dataset may be several files, with commas between them.

    The name of a package of weights stays.
    """
    if key == "init" and str(path).startswith("package:"):
        return str(path)
    several = key == "dataset" and not Path(path).exists()
    parts = str(path).split(BETWEEN) if several else [path]
    return BETWEEN.join(str(Path(part).absolute()) for part in parts)


def _check_undealt(config: RunConfig, name: str) -> None:
    """Check that options on reading and partitioning are unset for data that are given from Python."""
    for key, value in config.data.load_options().items():
        if key not in ("data_root", "download") and value != KEYS[key].default:
            raise UsageError(
                f"{key} must be left out for data from Python; got {key}={value!r} with {name!r}, "
                "whose samples and clients are fixed."
            )
