"""The configuration of a run: its keys, everything needed to repeat it, and the defaults of its dataset."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import (
    Annotated,
    Any,
    NamedTuple,
    Self,
    TypedDict,
    Unpack,
    get_args,
    get_type_hints,
)

from fl_core import data as datasets, storage
from fl_core.data.reading import BETWEEN, SCALES, Reading, check_removed
from fl_core.data.registry import DATASETS, ROOT_VARIABLE
from fl_core.display import Displayed, Summary
from fl_core.errors import (
    ABOVE_0,
    BELOW_1,
    SHARE,
    WAYS,
    Bound,
    OneOf,
    UsageError,
    about,
    as_list,
    at_least,
    check_fields,
    check_known,
    check_type,
    python_values,
    with_named_keys,
)
from fl_core.keys import AllKeys
from fl_core.models.tokens import FILE as TOKENIZER, pixels_of
from fl_core.plan import LayerPlan
from fl_core.registry import Registry, is_outside

AUTO = "auto"
STOPPING_INTERVAL = 2
"""Rounds between evaluations, at most, of a run that may stop when validation no longer improves."""
LOSSES = (
    "cross_entropy",
    "focal",
    "player_focal",
    "bce",
    "mse",
    "mae",
    "huber",
    "cox",
    "multilabel_bce",
)
CLASS_WEIGHTS = ("none", "balanced")
"""Named class weights of the loss: none, or balanced, which gives every class the same total weight.

A configuration may have numbers W,W,... instead.
"""
BATCHNORM = ("global", "local", "drop")
"""What happens to the running statistics of batch normalisation."""
MOST_TURNS = 1_000_000
"""The largest number of rounds, and of epochs."""
ROUNDS = Bound(f"from 1 to {MOST_TURNS:,}", lambda value: 1 <= value <= MOST_TURNS)
EPOCHS = Bound(f"from 0 to {MOST_TURNS:,}", lambda value: 0 <= value <= MOST_TURNS)
OWN = "own"
"""The name in a configuration of a model or a loss that is given from Python."""


class Mark(Enum):
    """A mark of a configuration key, in addition to its type. The value says what it means."""

    CODE = "may name code, package.module:name"
    DRAW = "an option of the partition over clients"


@dataclass(frozen=True)
class Also:
    """The type that a key takes in a call from Python, in addition to the stored type.

    Attributes:
        hint: the further type.
    """

    hint: Any


@dataclass(frozen=True, kw_only=True)
class DataConfig(Reading):
    """The data, and their partition over clients. Defaults: see ``fedlayers list datasets``."""

    dataset: Annotated[str, Mark.CODE, Also(Path | Sequence[str | Path])] = "heart"
    """Dataset: a name, your file or folder, several tables (one per client), or package.module:function."""
    data_root: str | None = None
    """Folder of the datasets' files. Default: $FEDLAYERS_DATA_ROOT."""
    download: bool = False
    """Download missing files (torchvision)."""
    clients: Annotated[int | None, Mark.DRAW] = None
    """Number of clients of an artificial partition."""
    partition: Annotated[str | None, Mark.DRAW, Mark.CODE] = None
    """Partition: natural, natural_dirichlet, iid, dirichlet, capped_dirichlet, pathological, non_iid_1, non_iid_2,
    fedpft_dirichlet or fedpft_pathological."""
    alpha: Annotated[float | None, Mark.DRAW] = None
    """Concentration of a Dirichlet partition, above 0. Small values make clients differ more."""
    classes_per_client: Annotated[int | None, Mark.DRAW] = None
    """Classes per client of pathological and non_iid_1; dominant classes of non_iid_2."""
    samples_per_client: Annotated[int | None, Mark.DRAW] = None
    """Samples per client of non_iid_1 and non_iid_2 (default: a hundredth of all, at most 700), and training samples
    per client of fedpft_* (default: 500)."""
    dominance: Annotated[float | None, Mark.DRAW] = None
    """Fraction of samples from the dominant classes in non_iid_2. Default: 0.5."""
    max_samples: int | None = None
    """Number of samples to partition among clients."""
    split_seed: Annotated[int | None, Mark.DRAW, at_least(0)] = None
    """Seed of the partition and of the test samples. --seed then draws training and validation samples from the rest.
    Default: that of --seed."""
    positive: str | None = None
    """Positive class of two, for AUROC and AUPRC. Default: the second."""

    def load_options(self) -> dict[str, Any]:
        """Return the keys that are options of :func:`fl_core.data.load`, with their values.

        These are all keys of the group but ``dataset`` and ``positive``.
        """
        keys = vars(self).items()
        return {key: v for key, v in keys if key not in ("dataset", "positive")}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model and its layers."""

    model: str | None = None
    """Model: a name (see fedlayers list models), timm:NAME, torchvision:NAME, hf:FOLDER or package.module:callable."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """The model's own options."""
    init: str | None = None
    """Initial weights: a run directory, or a file."""
    batchnorm: Annotated[str, OneOf("value of batchnorm", BATCHNORM)] = "global"
    """Running statistics of batch normalisation: global (averaged), local (each client's own) or drop (removed)."""
    layer_granularity: Annotated[str, OneOf("way of grouping layers", WAYS)] = "block"
    """What counts as a layer: module, or block (a module with its normalisation, or a group of modules)."""
    adapt: str | None = None
    """Train only LoRA adapters and the classifier, such as lora:r=8,targets=attn. Default: train all layers."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Local training of a client in a round. Options that you omit use the dataset's defaults."""

    epochs: Annotated[int | None, EPOCHS] = None
    """Local epochs per round."""
    batch_size: Annotated[int | None, at_least(1)] = None
    """Samples per batch."""
    lr: Annotated[float | None, ABOVE_0] = None
    """Learning rate of local training."""
    optimizer: Annotated[str | None, OneOf("optimizer", ("sgd", "adam", "adamw"))] = (
        None
    )
    """Optimiser: sgd, adam or adamw."""
    momentum: Annotated[float | None, at_least(0)] = None
    """Momentum of sgd."""
    weight_decay: Annotated[float | None, at_least(0)] = None
    """Weight decay, coupled for sgd and adam, decoupled for adamw."""
    amsgrad: bool | None = None
    """Use the AMSGrad variant of adam or adamw."""
    max_grad_norm: Annotated[float | None, ABOVE_0] = None
    """Maximum norm of the gradient in a step. Larger gradients are scaled down."""
    keep_optimizer: bool | None = None
    """Keep each client's optimiser state between rounds."""
    loss: Annotated[
        str | None, OneOf("loss", (*LOSSES, OWN)), Also(Callable[..., Any])
    ] = None
    """Loss: cross_entropy, focal, player_focal or bce (two classes only). For regression: mse, mae or huber."""
    loss_options: dict[str, Any] | None = None
    """Options of the loss. If it is the dataset's own, omitted options are the dataset's."""
    class_weights: str = "none"
    """Class weights in the loss: none, balanced, or one number per class, such as 1,5."""
    precision: Annotated[str, OneOf("precision", ("float32", "bf16"))] = "float32"
    """Arithmetic of training passes: float32, or bf16 under torch's autocast. Weights and scores stay float32."""


@dataclass(frozen=True, kw_only=True)
class FederationConfig:
    """The algorithm, its plan, and who takes part in a round."""

    algorithm: Annotated[str, Mark.CODE, Also(type[Any])] = "fedavg"
    """Algorithm: a name (see fedlayers list algorithms), or package.module:Class."""
    options: dict[str, Any] = field(default_factory=dict)
    """The algorithm's own configuration."""
    plan: Annotated[str | None, Also(Path | LayerPlan)] = None
    """Layers to share: path of a plan or of a run, or auto to measure first. Default: the algorithm's own plan."""
    rule: Annotated[str, Mark.CODE] = "sensitivity_ratio"
    """Rule for --plan auto and PLayer-FL: a name (see fedlayers list rules), or package.module:function."""
    threshold: Annotated[float, ABOVE_0] = 1.2
    """Threshold of the rule. Layers before the first ratio above it are shared."""
    rounds: Annotated[int | None, ROUNDS] = None
    """Number of communication rounds."""
    patience: Annotated[int | None, at_least(0)] = None
    """Stop after this many evaluations without a better validation score; 0: never. Default: 10 for your own data."""
    monitor: str | None = None
    """Score that finds the best round under patience, such as auroc. Default: the main score and the loss together."""
    participation: Annotated[float, SHARE] = 1.0
    """Fraction of clients that train in a round, above 0 and at most 1."""
    client_weights: Annotated[
        str, OneOf("value of client_weights", ("samples", "uniform"))
    ] = "samples"
    """Weights of clients in the average: samples or uniform."""
    client_dropout: Annotated[float, BELOW_1] = 0.0
    """Probability that a client's reply is lost in a round, from 0 to below 1."""


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """The device, the processes, and the records of a run."""

    seed: Annotated[int, at_least(0)] = 0
    """Seed of all random draws: split, initial model, clients, batches."""
    workers: Annotated[int, at_least(0)] = 0
    """Number of processes that train clients, or whole runs in choose and tune. The results do not depend on it."""
    device: str = "cpu"
    """Device for training, such as cpu or cuda."""
    stack: Annotated[str, OneOf("value of stack", ("auto", "on", "off"))] = "auto"
    """Train several clients in one batched pass: on, off or auto."""
    eval_every: Annotated[int | None, at_least(1)] = None
    """Rounds between evaluations. Default: a twentieth of the rounds, or more if evaluation is slow; with --patience at
    most 2."""
    checkpoint_every: Annotated[int | None, at_least(1)] = None
    """Rounds between checkpoints. Default: a twentieth of the rounds."""
    measure: Annotated[list[str] | None, Also(str)] = None
    """Metrics of layers to measure while training, such as cka grad_similarity: see fedlayers list metrics."""
    measure_every: Annotated[int, at_least(1)] = 5
    """Rounds between two measurements while training. The last round is measured, too."""


@dataclass(frozen=True, init=False, repr=False)
class RunConfig(Displayed):
    """The configuration of one run: five groups of keys.

    A value None means the default that the key's description names, often the
    dataset's. Data and a model from Python are no part of it, but are passed next to it
    (:class:`Own`). Keys are given flat, because a key's name is unique over the groups.
    :func:`resolve` fills in defaults.

    >>> config = RunConfig(dataset="digits", algorithm="fedprox", options={"mu": 0.01}, clients=3)
    >>> config.federation.algorithm, config.with_keys(lr=0.1).training.lr
    ('fedprox', 0.1)
    >>> resolve(config).model.model, resolve(config).training.batch_size
    ('mlp', 32)
    >>> RunConfig(algoritm="fedavg")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: unknown configuration key 'algoritm': did you mean 'algorithm'? known: ...
    >>> RunConfig(model="hf:/a", tokenizer="/b")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: tokenizer must be that of the model /a; got another. Leave out tokenizer='/b'.

    Args:
        given: values of keys by name. Omitted keys have their defaults.

    Raises:
        UsageError: a key is unknown, or a value has another type or is invalid.
    """

    data: DataConfig
    model: ModelConfig
    training: TrainingConfig
    federation: FederationConfig
    execution: ExecutionConfig

    @with_named_keys
    def __init__(self, **given: Unpack[AllKeys]) -> None:
        keys: dict[str, Any] = {k: python_values(v) for k, v in given.items()}
        if isinstance(keys.get("algorithm"), type):
            algorithms = Registry.of_kind.get("algorithm")
            if algorithms is None:  # then no class can be one
                raise UsageError(
                    f"algorithm must be a name or a class made of fl.Algorithm; got {keys['algorithm']!r}."
                )
            keys["algorithm"] = algorithms.name_of(keys["algorithm"])
        library, _, folder = str(keys.get("model")).partition(":")
        if library == "hf":  # its own tokenizer reads texts
            folder = absolute("model", folder)
            if absolute("tokenizer", keys.get("tokenizer") or folder) != folder:
                raise UsageError(
                    f"tokenizer must be that of the model {folder}; got another. Leave out "
                    f"tokenizer={keys['tokenizer']!r}."
                )
            keys["model"] = f"hf:{folder}"
            if os.path.lexists(Path(folder, TOKENIZER)):
                keys["tokenizer"] = folder
        check_removed(keys)
        for key, value in keys.items():
            check_known("configuration key", key, KEYS)
            if value is KEYS[key].default:
                continue
            advice = ""
            if key == "dataset":
                advice = "Pass data in memory as data=."
                if isinstance(value, list | tuple):
                    value = keys[key] = BETWEEN.join(map(str, value))
            if key == "algorithm" and isinstance(value, list | tuple):
                advice = "Compare several: fl.compare(algorithms=NAMES)."
            if key == "plan":
                advice = "Pass a LayerPlan, or the path of one."
                if isinstance(value, LayerPlan):
                    value = keys[key] = json.dumps(value.to_json())
                elif isinstance(value, os.PathLike):
                    value = keys[key] = os.fspath(value)
            if isinstance(value, str) and list[str] in get_args(KEYS[key].hint):
                value = keys[key] = list(as_list(key, value))
            check_type(key, value, KEYS[key].hint, advice)
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{key} must be finite; got {value}.")
        for group, group_class in GROUPS.items():
            names = [name for name in keys if KEYS[name].group == group]
            settings = group_class(**{name: keys[name] for name in names})
            check_fields(settings)
            object.__setattr__(self, group, settings)
        weights_of(self.training.class_weights)

    def flat(self) -> dict[str, Any]:
        """Return a new dictionary with the value of each key by its name, without the groups."""
        values: dict[str, Any] = {}
        for group in GROUPS:
            values |= vars(getattr(self, group))
        return values

    def summary(self) -> Summary:
        """Return a table of the keys that differ from their defaults: group, key and value."""
        defaults = RunConfig().flat()
        keys = [
            [KEYS[key].group, key, value]
            for key, value in self.flat().items()
            if value != defaults[key]
        ]
        return Summary(
            "RunConfig; other keys have their defaults", ["", "key", "value"], keys
        )

    def value(self, key: str) -> Any:
        """Return the value of a key by its name.

        Raises:
            KeyError: the key is unknown.
        """
        return getattr(getattr(self, KEYS[key].group), key)

    def with_keys(self, **keys: Any) -> Self:
        """Return a new configuration with other values of some keys.

        Args:
            keys: the new values by name. Other keys stay the same.

        Raises:
            UsageError: a key is unknown, or a value is invalid.
        """
        return type(self)(**{**self.flat(), **keys})

    def to_json(self) -> dict[str, Any]:
        """Return the value of each key by its name, as a deep copy for JSON."""
        return copy.deepcopy(self.flat())


GROUPS: dict[str, type] = {
    "data": DataConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
    "federation": FederationConfig,
    "execution": ExecutionConfig,
}
"""The class of each group of a configuration's keys, by the group's name."""


class Key(NamedTuple):
    """A key of the configuration: its group, stored type, default, marks, and the type that a call may give."""

    group: str
    hint: Any
    default: Any
    marks: frozenset[Mark]
    accepts: Any


def _keys() -> Iterator[tuple[str, Key]]:
    for group, group_class in GROUPS.items():
        hints = get_type_hints(group_class, include_extras=True)
        default, annotations = group_class(), vars(group_class)["__annotations__"]
        for name in sorted(hints, key=lambda name: name not in annotations):
            hint = hints[name]
            annotations_of_key = getattr(hints[name], "__metadata__", ())
            plain_type = hint
            if annotations_of_key:
                plain_type = hint.__origin__
            marks = frozenset(
                mark for mark in annotations_of_key if isinstance(mark, Mark)
            )
            accepted_type = plain_type
            for annotation in annotations_of_key:
                if isinstance(annotation, Also):
                    accepted_type |= annotation.hint
            yield (
                name,
                Key(group, plain_type, getattr(default, name), marks, accepted_type),
            )


KEYS = dict(_keys())
"""Each key of a configuration by its name, which is unique over the groups."""


def marked(mark: Mark) -> list[str]:
    """Return the names of the keys that carry a mark."""
    return [name for name, key in KEYS.items() if mark in key.marks]


class Own(TypedDict):
    """Objects from Python in place of what a configuration names.

    Keys:
        data: a source or a federation. None: the configuration's dataset.
        model: a module, or a callable that builds one. None: the configuration's model.
    """

    data: Any
    model: Any


def with_own(
    config: RunConfig | None, data: Any = None, model: Any = None, **keys: Any
) -> tuple[RunConfig, Own]:
    """Return the configuration with other values of keys, and with it the data and the model from Python.

    Args:
        config: None for the default one.
        data: as for :func:`fl_core.data.loading.as_data`. The configuration's keys say
            how a table is read. None means the configuration's dataset.
        model: a module, or a callable that builds one. A name becomes the
            configuration's model. None means the configuration's model.
        keys: values of configuration keys by name. ``loss`` may also be a callable,
            which needs a model.

    Raises:
        UsageError: a key is unknown, a value is invalid, a callable loss has no model,
            or the data or the model are of another kind.
    """
    if not isinstance(loss := keys.get("loss"), str | None):
        from fl_core.models.building import with_loss

        model, keys["loss"] = with_loss(model, loss), OWN
    config = (config or RunConfig()).with_keys(**keys)
    if isinstance(model, str):
        config, model = config.with_keys(model=model), None
    if data is not None:
        from fl_core.data.loading import as_data

        data = as_data(data, config.data)
    if model is not None and not callable(model):
        model_class = type(model).__name__
        raise UsageError(
            f"model must be a module, or a callable that builds one; got {model_class}. Give an nn.Module."
        )
    return config, {"data": data, "model": model}


def weights_of(class_weights: str) -> tuple[float, ...] | str | None:
    """Return the class weights of a configuration: None, ``balanced``, or one number for each class.

    >>> weights_of("none"), weights_of("balanced"), weights_of("1,2.5")
    (None, 'balanced', (1.0, 2.5))

    Raises:
        UsageError: the text is neither ``none``, ``balanced`` nor numbers with commas
            between them.
    """
    if class_weights in CLASS_WEIGHTS:
        if class_weights == CLASS_WEIGHTS[0]:
            return None
        return class_weights
    try:
        return tuple(float(weight) for weight in class_weights.split(","))
    except ValueError:
        check_known(
            "value of class_weights (none, balanced, or W,W,...)",
            class_weights,
            CLASS_WEIGHTS,
        )
        raise


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
    "scale",
)


def resolve(config: RunConfig, data: Any = None, model: Any = None) -> RunConfig:
    """Return the configuration with the dataset's defaults, after a check of names and numbers.

    Data from Python bring their own name and defaults. Paths of files become absolute.
    A key that is given keeps its value, also a zero:

    >>> given = {"epochs": 0, "weight_decay": 0.0, "amsgrad": False, "loss_options": {}, "rounds": 40, "eval_every": 7}
    >>> found = resolve(RunConfig(dataset="heart", loss="focal", **given))
    >>> {key: found.value(key) for key in given} == given, found.execution.checkpoint_every
    (True, 2)

    Args:
        config: the configuration, in which None stands for a default.
        data, model: the data and the model from Python, as in :class:`Own`.

    Raises:
        UsageError: a value is invalid, the optimiser has no use for a key, the model
            ``own`` is not given, or a key about reading or partitioning data is set for
            a federation from Python.
    """
    if isinstance(data, datasets.FederatedData):
        config = config.with_keys(
            scale=None if config.data.scale == SCALES[0] else config.data.scale
        )
        for key, value in config.data.load_options().items():
            if key not in ("data_root", "download") and value != KEYS[key].default:
                raise UsageError(
                    f"{key} must be left out for data from Python; got {key}={value!r} with {data.name!r}, "
                    "whose samples and clients are fixed."
                )
        is_natural = data.partition.kind == "natural"
        recipe = datasets.datasets().get(data.name) or datasets.general(
            data.shape, is_natural, data.task, stops=False
        )
    else:
        if data is None:
            config = with_pixels(config)
        keys = config.data.reading_options()
        source = data
        if source is None:
            source = config.data.dataset
        recipe = datasets.recipe(
            source,
            data_root=config.data.data_root,
            download=config.data.download,
            **keys,
        )
    root = config.data.data_root or os.environ.get(ROOT_VARIABLE)
    if model is not None:
        config = config.with_keys(model=OWN)
    elif config.model.model == OWN:
        raise UsageError(
            "model 'own' must be given with its configuration; got none. Pass model=."
        )
    if config.model.model in (None, recipe.model):
        default_model_options = recipe.model_options
    else:
        default_model_options = {}
    config = _fill(config, {key: getattr(recipe, key) for key in OF_RECIPE})
    if config.training.optimizer == recipe.optimizer:
        optimizer_options = recipe.optimizer_options
    else:
        optimizer_options = {}
    default_loss_options = (
        recipe.loss_options if config.training.loss == recipe.loss else {}
    )
    rounds = int(config.federation.rounds or 0)
    interval = evaluation_interval(
        rounds, config.federation.participation, int(config.training.epochs or 0)
    )
    if config.federation.patience:
        interval = min(interval, STOPPING_INTERVAL)
    defaults = {
        "momentum": 0.0,
        "weight_decay": 0.0,
        "amsgrad": False,
        **optimizer_options,
    }
    defaults |= {"eval_every": interval, "checkpoint_every": max(1, rounds // 20)}
    config = _fill(config, defaults)
    uses_sgd = config.training.optimizer == "sgd"
    for key, is_used in (("momentum", uses_sgd), ("amsgrad", not uses_sgd)):
        if config.value(key) and not is_used:
            got = config.value(key)
            raise UsageError(
                f"{key} must be left out with optimizer {config.training.optimizer!r}; got {got}."
            )
    dataset = config.data.dataset
    if data is not None:
        dataset = data.name
    files = {"data_root": root, "init": config.model.init}
    if data is None and is_file(dataset):
        files["dataset"] = dataset
    paths = {key: absolute(key, path) for key, path in files.items() if path}
    return config.with_keys(
        model_options={**default_model_options, **config.model.model_options},
        loss_options={**default_loss_options, **(config.training.loss_options or {})},
        **{"dataset": dataset, **paths},
    )


def with_pixels(config: RunConfig) -> RunConfig:
    """Return the configuration with the ``image_size`` of its model, for a model ``hf:FOLDER`` and a folder of images.

    Any other configuration is returned unchanged. So is one that has an ``image_size``,
    or whose model has no square images.

    Raises:
        UsageError: the model's config.json is missing, too large, or no JSON.
    """
    library, _, folder = str(config.model.model).partition(":")
    if library != "hf" or config.data.image_size:
        return config
    from fl_core.data.table.read import is_table  # with pandas

    path = Path(config.data.dataset)
    is_image_folder = path.is_dir() and not is_table(path)
    if not is_image_folder:
        return config
    with about(f"model hf:{folder} must be built from its files", Exception):
        model_folder = storage.Folder(folder, links=True)
        content = model_folder.read("config.json", storage.HEADER_BYTES)
        description = storage.parsed_json(content)
        side = pixels_of(description if isinstance(description, dict) else {})
    if side is None:
        return config
    return config.with_keys(image_size=side)


def _fill(config: RunConfig, defaults: Mapping[str, Any]) -> RunConfig:
    return config.with_keys(
        **{key: value for key, value in defaults.items() if config.value(key) is None}
    )


def evaluation_interval(rounds: int, participation: float, epochs: int) -> int:
    """Return the default number of rounds between evaluations.

    It is a twentieth of the rounds, or more if evaluation is expensive, and at most a third
    of them, rounded up. Evaluation shall take about a tenth of the time. Scoring a model on
    all validation and test samples is taken as a quarter of a local epoch of all clients.
    The locally trained models of the round are scored as well.

    >>> evaluation_interval(1000, 0.1, 1), evaluation_interval(400, 0.1, 1), evaluation_interval(3, 0.01, 1)
    (50, 29, 1)
    >>> [evaluation_interval(rounds, 1.0, epochs) for rounds, epochs in ((40, 1), (40, 5), (8, 1), (40, 0))]
    [5, 2, 3, 2]

    Args:
        rounds: number of rounds of the run.
        participation: fraction of clients that train in a round, above 0 and at most 1.
        epochs: local epochs per round.
    """
    # in rounds of training
    relative_cost = (
        0.25 * (1 + participation) / (participation * epochs) if epochs else 0.0
    )
    n_evaluations = min(
        20, max(3, rounds // max(1, math.ceil(min(10 * relative_cost, rounds))))
    )
    return math.ceil(rounds / n_evaluations)


def is_file(dataset: str) -> bool:
    """Return whether a dataset is one or several paths: neither a known name nor ``package.module:name``."""
    return dataset not in DATASETS and not is_outside(dataset)


def absolute(key: str, path: Path | str) -> str:
    """Return the absolute path of a key's file or folder. A dataset may be several files, with commas between them.

    Args:
        key: the name of the key. Only ``dataset`` may have several files.
        path: the key's value. A text that exists as one path is not split at commas.
    """
    several_files = key == "dataset" and not Path(path).exists()
    paths = str(path).split(BETWEEN) if several_files else [path]
    return BETWEEN.join(str(Path(path_text).absolute()) for path_text in paths)
