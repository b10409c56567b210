"""The configuration of a run, by names and numbers: everything that is needed to repeat it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from fl_core import choices, data
from fl_core.data import columns as tables
from fl_core.data.columns import BETWEEN, CLIENT_COLUMN, ENCODING, LABEL_COLUMN, SEPARATOR, TEXT_COLUMN, Reading
from fl_core.data.registry import DATASETS, ROOT_VARIABLE
from fl_core.errors import UsageError, check_known
from fl_core.registry import is_outside
from fl_core.scores import CLASSIFICATION

if TYPE_CHECKING:
    from fl_core.training.local import Training

AUTO = "auto"
READING = ("max_samples", *tables.READING)
DEALING = ("clients", "partition", "alpha", "classes_per_client", "samples_per_client", "dominance")
"""Keys that say what of a dataset is read, and how that is dealt to clients."""


@dataclass(frozen=True)
class RunConfig:
    """One run. What is None is the dataset's default; :func:`resolved` fills it in.

    >>> config = RunConfig(dataset="digits", algorithm="fedprox", options={"mu": 0.01}, clients=3)
    >>> resolved(config).model, resolved(config).batch_size
    ('mlp', 32)
    >>> RunConfig.from_json({"algoritm": "fedavg"})
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: unknown configuration key 'algoritm': did you mean 'algorithm'? known: ...
    """

    dataset: str = "heart"
    """Registered name, package.module:function, your file, or folder; or several tables, one for each client."""
    model: str | None = None
    """Registered name, timm:NAME, torchvision:NAME or package.module:callable."""
    algorithm: str = "fedavg"
    """Registered name, or package.module:Class."""
    plan: str | None = None
    """Path of a plan, auto to measure and decide first, or, of run alone, choose to race first; without it the
    algorithm's own default."""
    rule: str = "sensitivity_ratio"
    """How auto and PLayer-FL decide: registered name, or package.module:function."""
    threshold: float = 1.2
    """Of the rule: layers before the first jump above it are shared."""
    rounds: int | None = None
    """Communication rounds."""
    seed: int = 0
    """Of all that is drawn: split, initial model, clients, batches."""
    clients: int | None = None
    """Number of clients."""
    partition: str | None = None
    """natural, natural_dirichlet, iid, dirichlet, capped_dirichlet, pathological, non_iid_1, non_iid_2, or FedPFT's:
    fedpft_dirichlet, fedpft_pathological."""
    alpha: float | None = None
    """Concentration of a Dirichlet partition; the smaller, the less alike the clients."""
    classes_per_client: int | None = None
    """Of the pathological ones and non_iid_1; dominant ones of non_iid_2."""
    samples_per_client: int | None = None
    """Of non_iid_1 and non_iid_2, default a hundredth, at most 700; training ones of FedPFT's, default 500."""
    dominance: float | None = None
    """Share of the dominant classes in non_iid_2; default 0.5."""
    max_samples: int | None = None
    """Size of the pool that is dealt."""
    task: str = CLASSIFICATION
    """Of your own data: classification, or regression."""
    participation: float = 1.0
    """Fraction of the clients in a round; at least one takes part."""
    client_weights: str = "samples"
    """Of clients in a mean: samples (of training) or uniform."""
    client_dropout: float = 0.0
    """Probability with which a client's reply is lost in a round."""
    dropout_trace: str | None = None
    """A .csv with columns round (from 1) and client: whose replies are lost."""
    epochs: int | None = None
    """Local epochs a round."""
    batch_size: int | None = None
    """Samples a batch."""
    lr: float | None = None
    """Local learning rate."""
    optimizer: str | None = None
    """sgd, adam or adamw."""
    momentum: float | None = None
    """Of sgd."""
    weight_decay: float | None = None
    """Coupled for sgd and adam, decoupled for adamw."""
    amsgrad: bool | None = None
    """Of adam and adamw."""
    max_grad_norm: float | None = None
    """Scale a step's gradient down to this norm where it is longer."""
    keep_optimizer: bool | None = None
    """Keep each client's optimiser state between rounds; default for adam, adamw."""
    loss: str | None = None
    """cross_entropy, focal, player_focal or bce (one output); of numbers mse, mae or huber."""
    loss_options: dict[str, Any] | None = None
    """Of the loss; what is not given is the dataset's own, if the loss is."""
    class_weights: str = "none"
    """In the loss: none, balanced, or W,W,... one a class."""
    batchnorm: str = "global"
    """Running statistics of batch normalisation: averaged (global), kept by each client (local), or none (drop)."""
    layer_granularity: str = "block"
    """A layer: module, or block (with normalisations and groups)."""
    options: dict[str, Any] = field(default_factory=dict)
    """The algorithm's own configuration."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """The model's own options."""
    init: str | None = None
    """Weights to start from: a run's directory, or a file."""
    workers: int = 0
    """Worker processes; the results are the same bits with any number."""
    device: str = "cpu"
    """Where clients train."""
    recompute_frozen: bool = False
    """Compute frozen first layers in every step, not once."""
    stack: str = "auto"
    """Train clients together: on, off or auto."""
    memory_format: str = "auto"
    """auto, contiguous, or channels_last."""
    precision: str = "float32"
    """float32, or bf16: the model's passes in local training; all else stays float32."""
    eval_every: int | None = None
    """Rounds between evaluations of all clients; default a twentieth, or what costs a tenth of the time."""
    checkpoint_every: int | None = None
    """Rounds between checkpoints; default a twentieth of the rounds."""
    on_divergence: str = "note"
    """note or stop (with exit code 1) once a client's loss is 20 times that of the start and that of guessing."""
    local_scores: bool = False
    """Score trained local models in every round."""
    local_models: int = 100
    """Locally trained models that a checkpoint keeps for diagnoses: those of the first so many clients of the round."""
    data_root: str | None = None
    """Folder with the named datasets' files; default: the environment's FEDLAYERS_DATA_ROOT."""
    download: bool = False
    """Let torchvision fetch missing files."""
    positive: str | None = None
    """Of two classes, the one whose AUROC and AUPRC are scored; default the second."""
    client_column: str = CLIENT_COLUMN
    """Of your own file."""
    label_column: str = LABEL_COLUMN
    """Of your own file."""
    text_column: str = TEXT_COLUMN
    """Of your own file of texts."""
    columns: list[str] | None = None
    """Feature columns of your own table to read; default all."""
    exclude_columns: list[str] | None = None
    """Feature columns of your own table that are not read."""
    separator: str = SEPARATOR
    """Of your own .csv file: one character, or tab."""
    encoding: str = ENCODING
    """Of your own .csv or .jsonl file, such as latin-1."""
    scale: str | None = None
    """Scale a table's columns, as fitted on the training samples of all clients: none, standard, minmax or robust;
    default standard for your own table, none for other data."""
    impute: str = choices.IMPUTES[0]
    """Fill a table's missing numbers with the training samples' mean, median or most_frequent; none refuses them."""
    keep_ids: bool = False
    """Allow a column that numbers the records, such as record_id, as a feature of your own table."""

    @property
    def training(self) -> Training:
        """The local training (optimiser, rates, epochs) that a resolved configuration asks for."""
        from fl_core.training.local import Training

        names = {f.name for f in fields(Training)}
        return Training(**{name: value for name, value in vars(self).items() if name in names})

    def to_json(self) -> dict[str, Any]:
        """The configuration as a dictionary that JSON can hold."""
        return asdict(self)

    @property
    def reading(self) -> Reading:
        """How the configuration's own data are read.

        Raises:
            UsageError: names the key and what it may be.
        """
        return Reading.of({name: getattr(self, name) for name in tables.READING})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunConfig:
        """The configuration that :meth:`to_json` wrote.

        Raises:
            UsageError: an unknown key.
        """
        for name in values:
            check_known("configuration key", name, [f.name for f in fields(cls)])
        return cls(**values)


def check(config: RunConfig) -> None:
    """Refuse values that are wrong for every dataset, model and algorithm: a wrong type, range or choice.

    Raises:
        UsageError: names the key and what it may be.
    """
    _check_types(config)
    _ = config.reading  # checks its keys
    for what, value, known in (
        ("value of batchnorm", config.batchnorm, choices.BN),
        ("way of grouping layers", config.layer_granularity, choices.WAYS),
        ("optimizer", config.optimizer, choices.OPTIMIZERS),
        ("loss", config.loss, choices.LOSSES),
        ("value of client_weights", config.client_weights, choices.WEIGHTS),
        ("value of stack", config.stack, choices.STACKS),
        ("memory format", config.memory_format, choices.FORMATS),
        ("precision", config.precision, choices.PRECISIONS),
        ("value of on_divergence", config.on_divergence, choices.ON_DIVERGENCE),
    ):
        if value is not None:
            check_known(what, value, known)
    for name, least in (("rounds", 1), ("workers", 0), ("local_models", 0), ("eval_every", 1), ("checkpoint_every", 1)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise UsageError(f"{name} must be at least {least}, not {value}")
    weights_of(config.class_weights)
    if not config.threshold > 0:
        raise UsageError(f"threshold must be above 0, not {config.threshold}")
    if not 0 < config.participation <= 1:
        raise UsageError(f"participation must be above 0 and at most 1, not {config.participation}")
    if not 0 <= config.client_dropout < 1:
        raise UsageError(f"client_dropout must be at least 0 and below 1, not {config.client_dropout}")


def weights_of(class_weights: str) -> tuple[float, ...] | str | None:
    """The class weights that a configuration asks for: None, ``balanced``, or one number a class.

    >>> weights_of("none"), weights_of("balanced"), weights_of("1,2.5")
    (None, 'balanced', (1.0, 2.5))

    Raises:
        UsageError: neither these words nor numbers.
    """
    if class_weights in choices.CLASS_WEIGHTS:
        return None if class_weights == choices.CLASS_WEIGHTS[0] else class_weights
    try:
        return tuple(float(weight) for weight in class_weights.split(","))
    except ValueError:
        check_known("value of class_weights (none, balanced, or W,W,...)", class_weights, choices.CLASS_WEIGHTS)
        raise


def resolved(config: RunConfig, given: data.FederatedData | None = None) -> RunConfig:
    """The configuration with the dataset's defaults filled in, checked as far as names and numbers go.

    Args:
        given: data that take the place of the configuration's dataset: their name, and their recipe or the general one.

    Raises:
        UsageError: names the key and what it may be; with ``given``, a key that says how data are read or dealt.
    """
    check(config)
    if given is not None:
        config = replace(config, scale=None if config.scale == choices.SCALES[0] else config.scale)
        _check_undealt(config, given.name)
        natural = given.partition.kind == "natural"
        recipe = data.datasets().get(given.name) or data.general(given.shape, natural, given.task)
    else:
        keys = {name: getattr(config.reading, name) for name in tables.READING}
        recipe = data.recipe(config.dataset, data_root=config.data_root, download=config.download, **keys)
        config = replace(config, scale=config.scale or data.default_scale(config.dataset, **keys))
    optimizer = config.optimizer or recipe.optimizer
    own = recipe.optimizer_options if optimizer == recipe.optimizer else {}
    own_model = recipe.model_options if config.model in (None, recipe.model) else {}
    loss = config.loss or recipe.loss
    own_loss = recipe.loss_options if loss == recipe.loss else {}
    rounds = recipe.rounds if config.rounds is None else config.rounds
    default = max(1, rounds // 20)
    epochs = recipe.epochs if config.epochs is None else config.epochs
    root = config.data_root or os.environ.get(ROOT_VARIABLE)

    def or_else(value: Any, otherwise: Any) -> Any:
        return otherwise if value is None else value

    filled = replace(
        config,
        model=or_else(config.model, recipe.model),
        model_options={**own_model, **config.model_options},
        rounds=rounds,
        epochs=epochs,
        batch_size=or_else(config.batch_size, recipe.batch_size),
        lr=or_else(config.lr, recipe.lr),
        optimizer=optimizer,
        momentum=or_else(config.momentum, own.get("momentum", 0.0)),
        weight_decay=or_else(config.weight_decay, own.get("weight_decay", 0.0)),
        amsgrad=or_else(config.amsgrad, own.get("amsgrad", False)),
        keep_optimizer=or_else(config.keep_optimizer, optimizer in choices.KEPT_OPTIMIZERS),
        loss=loss,
        loss_options={**own_loss, **(config.loss_options or {})},
        eval_every=or_else(config.eval_every, evaluation_interval(rounds, config.participation, epochs)),
        checkpoint_every=or_else(config.checkpoint_every, default),
        data_root=None if root is None else str(Path(root).absolute()),
        dataset=given.name if given is not None else _located(config.dataset),
        init=None if config.init is None else str(Path(config.init).absolute()),
        dropout_trace=None if config.dropout_trace is None else str(Path(config.dropout_trace).absolute()),
    )
    _ = filled.training  # checks its numbers
    return filled


def evaluation_interval(rounds: int, participation: float, epochs: int) -> int:
    """Rounds between evaluations by default: a twentieth, or more where evaluating would take over a tenth of the time.

    To score everyone's validation and test samples costs about a quarter of a local epoch of everyone: a forward pass
    takes a third of a training step's time, and the two splits have half as many samples as training. The round's
    locally trained models are scored as well. However dear that is, the interval is at most a third of the rounds,
    rounded up.
    """
    cost = 0.25 * (1 + participation) / (participation * epochs) if epochs else 0.0  # in rounds of training
    count = min(20, max(3, rounds // max(1, math.ceil(10 * cost))))
    return math.ceil(rounds / count)


def _located(dataset: str) -> str:
    if dataset in DATASETS or is_outside(dataset):
        return dataset
    parts = [dataset] if Path(dataset).exists() else dataset.split(BETWEEN)
    return BETWEEN.join(str(Path(part).absolute()) for part in parts)


def _check_undealt(config: RunConfig, name: str) -> None:
    """Refuse options on reading and partitioning for data that were given as they are, clients and all."""
    for key in (*READING, *DEALING):
        if getattr(config, key) != getattr(RunConfig, key):
            raise UsageError(
                f"{key}={getattr(config, key)!r} says how a dataset is read and dealt to clients, and {name!r} was "
                f"given as it is: leave {key} out"
            )


def _shown(value: object) -> str:
    """A value as an error shows it: by its type alone where it is not short and plain, as it may hold clients' data."""
    text = repr(value) if isinstance(value, str | int | float | Path | None) else ""
    return text if 0 < len(text) <= 80 else type(value).__name__


def _check_types(config: RunConfig) -> None:
    for name, hint in get_type_hints(RunConfig).items():
        value = getattr(config, name)
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = [get_origin(part) or part for part in parts]
        accepted = (*kinds, int) if float in kinds else tuple(kinds)
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join("none" if kind is NoneType else kind.__name__ for kind in kinds)
            hint = "; fl.run takes data in memory as data=" if name == "dataset" else ""
            raise UsageError(f"{name} must be {wanted}, not {_shown(value)}{hint}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name} must be finite, not {value}")
