"""The types of a run's keys for editors. ``make lists`` writes them from :mod:`fl_core.config`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from fl_core.plan import LayerPlan


class Keys(TypedDict, total=False):
    """The keys of a configuration by name that every study takes."""

    dataset: str | Path | Sequence[str | Path]
    data_root: str | None
    download: bool
    clients: int | None
    partition: str | None
    alpha: float | None
    classes_per_client: int | None
    samples_per_client: int | None
    dominance: float | None
    max_samples: int | None
    split_seed: int | None
    positive: str | None
    client_column: str
    label_column: str
    text_column: str
    tokenizer: str | None
    columns: list[str] | None
    exclude_columns: list[str] | None
    categories: list[str] | None
    csv: dict[str, Any] | None
    scale: str | None
    impute: str
    clip: str
    task: str
    group_column: str | None
    drop_missing_labels: bool
    fill_missing_columns: bool
    image_size: int | None
    model_options: dict[str, Any]
    init: str | None
    batchnorm: str
    layer_granularity: str
    adapt: str | None
    epochs: int | None
    batch_size: int | None
    lr: float | None
    optimizer: str | None
    momentum: float | None
    weight_decay: float | None
    amsgrad: bool | None
    max_grad_norm: float | None
    keep_optimizer: bool | None
    loss: str | Callable[..., Any] | None
    loss_options: dict[str, Any] | None
    class_weights: str
    precision: str
    algorithm: str | type[Any]
    rule: str
    threshold: float
    rounds: int | None
    patience: int | None
    monitor: str | None
    participation: float
    client_weights: str
    client_dropout: float
    seed: int
    workers: int
    device: str
    stack: str
    eval_every: int | None
    checkpoint_every: int | None
    measure: list[str] | str | None
    measure_every: int


class RunKeys(Keys, total=False):
    """Keys, with the options of the one algorithm."""

    options: dict[str, Any]


class AllKeys(RunKeys, total=False):
    """All keys of :class:`~fl_core.config.RunConfig`."""

    model: str | None
    plan: str | Path | LayerPlan | None
