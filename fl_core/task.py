"""Building of the objects that a configuration names, and checks that they fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

import fl_core
from fl_core import data as datasets, initial, models, tree
from fl_core.algorithms.base import Algorithm, TaskInfo, find, registry
from fl_core.algorithms.options import configurations
from fl_core.config import AUTO, Mark, RunConfig, in_memory, marked, weights_of
from fl_core.data import FederatedData, Partition
from fl_core.data.notes import client_notes, notes
from fl_core.data.partitions import SPLITS
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.roles import by_name
from fl_core.defaults import resolve
from fl_core.errors import UsageError, listing
from fl_core.execution.batched_clients import stacks
from fl_core.execution.client_runner import ClientRunner
from fl_core.execution.executors import check_sendable
from fl_core.layer_mapping import BaseModel, ExtendedModel
from fl_core.layers import Layer, layers_of
from fl_core.models import lora, weights
from fl_core.models.batch_norms import (
    batch_norms,
    drop_statistics,
    statistics_of,
    tensors_of,
)
from fl_core.models.blocks import paths_of_blocks
from fl_core.models.options import PRETRAINED, wants_weights
from fl_core.plan import LayerPlan
from fl_core.scores import CLASSIFICATION, REGRESSION, SURVIVAL
from fl_core.training import losses
from fl_core.training.losses import Loss
from fl_core.training.phases import Training
from fl_core.training.workspace import memory_format
from fl_core.tree import Tree


@dataclass
class Task:
    """The objects that a configuration names: data, model, layers, criterion, and the algorithm's arguments."""

    config: RunConfig
    data: FederatedData
    model: nn.Module
    layers: tuple[Layer, ...]
    criterion: Loss
    task_info: TaskInfo
    plan: LayerPlan | None
    start: Tree | None = (
        None  # the base model's initial weights, if they are not the seed's
    )
    said: tuple[str, ...] = ()

    def algorithm(self, plan: LayerPlan | None) -> Algorithm:
        """Return the configured algorithm with the plan that it derives from the given one."""
        algorithm = find(self.config.federation.algorithm)(
            self.task_info, None, self.config.federation.options
        )
        return (
            algorithm
            if plan is None
            else algorithm.with_plan(algorithm.resolve_plan(plan))
        )

    def client_runner(self, observers: Mapping[str, Any] | None = None) -> ClientRunner:
        """Return a runner of the task's clients."""
        config = self.config
        return ClientRunner(
            self.model,
            self.data,
            Training.of(config.training),
            self.criterion,
            self.layers,
            observers or {},
            config.execution.device,
            memory_format(self.model, models.example(self.data.shape)),
            not config.execution.recompute_frozen,
        )

    def notes(self) -> list[str]:
        """Return warnings on unusual data, small clients, the targets' scale, and the plan."""
        batch = int(self.config.training.batch_size or 1)
        algorithm = self.algorithm(self.plan)
        own = [
            *(() if algorithm.plan is None else algorithm.plan.notes()),
            *algorithm.notes(),
        ]
        others = [
            *self._measured_elsewhere(),
            *notes(self.data),
            *client_notes(self.data, batch),
        ]
        return [*self.said, *own, *others]

    def _measured_elsewhere(self) -> list[str]:
        """Return a note if the given plan was measured on other samples than this run trains on."""
        measured = "" if self.plan is None else self.plan.why.data
        if (
            not measured
            or measured == self.data.digest
            or measured == self.data.training_digest
        ):
            return []
        return [
            "the plan was measured on other data, or on other splits of them, than this run trains on"
        ]

    def header(self, command: str) -> dict[str, Any]:
        """Return the first line of every rows file of this task."""
        return {
            "version": fl_core.__version__,
            "command": command,
            "dataset": self.config.data.dataset,
            "model": self.config.model.model,
            "seed": self.config.execution.seed,
            "optimizer": self.config.training.optimizer,
            "keep_optimizer": self.config.training.keep_optimizer,
            "layers": [asdict(layer) for layer in self.layers],
            "data": self.data.digest,
            "checkpoint": tree.digest(lora.full_state(self.model)),
        }


def assemble(
    config: RunConfig,
    *,
    data: Any = None,
    loaded: FederatedData | None = None,
    model: Any = None,
    partition: Partition | None = None,
    preprocessing: Preprocessing | None = None,
    plan: LayerPlan | None = None,
    start: Tree | None = None,
) -> Task:
    """Build everything that a run needs, and check that it fits together before any work starts.

    Args:
        data, model: your own objects in place of those that the configuration names
            (:func:`fl_core.config.in_memory`). With a federation the configuration has no options on reading or
            partitioning data.
        loaded: the configuration's own data, if they are loaded already.
        partition: a stored partition in place of a new draw.
        preprocessing: the stored fitted numbers of a table's preparation.
        plan: a plan in place of the file that the configuration names.
        start: stored initial weights, in place of those that the configuration's ``init`` names.

    Raises:
        UsageError: something is unknown, missing or does not fit. The message names it.
    """
    asked = in_memory(config, data, model)
    config = resolve(asked)
    adapters = None if config.model.adapt is None else lora.parse(config.model.adapt)
    if adapters and config.model.batchnorm == "local":
        raise UsageError(
            "batchnorm must be global or drop with adapt; got local. Adapters leave statistics unchanged."
        )
    given, own_model = config.own_data, config.own_model
    algorithm = find(config.federation.algorithm)
    below, options = (
        algorithm.base_algorithm(config.federation.options),
        configurations(algorithm, config.federation.options)[-1],
    )
    splits = algorithm.uses_plan or below.uses_plan
    if config.federation.plan is not None and plan is not None:
        raise UsageError(
            f"plan must be given once; got an object and plan={config.federation.plan!r}. Choose one."
        )
    if (config.federation.plan is not None or plan is not None) and not splits:
        using = sorted(name for name, member in registry().items() if member.uses_plan)
        raise UsageError(
            f"algorithm must be one that uses a plan ({listing(using)}); got {config.federation.algorithm}."
        )
    fixed = isinstance(given, FederatedData)
    data = loaded or (given if isinstance(given, FederatedData) else None)
    if data is None:
        chosen = {**config.data.load_options(), "seed": config.execution.seed}
        if partition is not None:
            for key in ("seed", *marked(Mark.DRAW)):
                del chosen[key]
        data = datasets.load(
            config.data.dataset if given is None else given,
            indices=partition,
            preprocessing=preprocessing,
            **chosen,
        )
    if config.data.positive is not None:
        data = data.with_positive(config.data.positive)
    known = config.data.dataset in datasets.DATASETS or datasets.is_code(
        config.data.dataset
    )
    said = [] if fixed or known else _made_up(config, data)
    empty = [client.name for client in data.clients if not len(client.train)]
    if empty:
        raise UsageError(
            f"{data.name}: each client must have training samples; got none for {listing(empty)}. Use fewer clients."
        )
    judged = (
        2 if data.task in (REGRESSION, SURVIVAL) else 1
    )  # the samples of an R2, or of a pair
    blind = [client.name for client in data.clients if len(client.validation) < judged]
    if config.federation.patience and blind:
        without = f"{data.name} has too few for {listing(blind)}"
        if asked.federation.patience:
            raise UsageError(
                f"patience must have validation samples to judge by; {without}. Use --patience 0."
            )
        config = config.with_keys(patience=0)
        said.append(
            f"the run trains all rounds, because only validation samples can stop it, and {without}"
        )
    criterion = _criterion(config, data)
    outputs = criterion.outputs(data.n_classes)
    _check_outputs(below, criterion, outputs, data.n_classes)
    if own_model is None:
        named, own = str(config.model.model), config.model.model_options
        pretrained = wants_weights(named, own)
        if pretrained and start is not None:  # a copy of them
            own = {key: value for key, value in own.items() if key != PRETRAINED}
        model = models.build(
            named, data.shape, outputs, seed=config.execution.seed, options=own
        )
    else:
        model = models.copy_user_model(
            own_model,
            data.shape,
            outputs,
            seed=config.execution.seed,
            options=config.model.model_options,
        )
        pretrained = False
    if start is not None:
        weights.copy_into(model, start, "the run's start.safetensors")
    elif config.model.init is not None:
        said += initial.start(
            model, config.model.init, models.example(data.shape), data.words
        )
        start = tree.state_dict(model)
    elif pretrained:
        start = tree.state_dict(model)  # the run and its workers get them as tensors
    if own_model is not None or str(config.model.model) not in models.MODELS.own:
        said += models.output_notes(model, data.shape, criterion.task)
    if config.model.batchnorm == "drop":
        drop_statistics(model)
    plain_layers = layers_of(
        model, models.example(data.shape), by=config.model.layer_granularity
    )
    if adapters:
        if lora.ALL in adapters.targets and (
            grouped := lora.grouped_convolutions(model)
        ):
            said.append(
                f"{listing(grouped)} get no adapters and stay fixed, because they are grouped convolutions"
            )
        model, plain_layers = lora.with_adapters(
            model,
            adapters,
            plain_layers,
            models.example(data.shape),
            config.execution.seed,
        )
    plain = BaseModel(model)
    model = below.wrap_model(
        model, options, shape=data.shape, n_classes=outputs, seed=config.execution.seed
    )
    if config.model.batchnorm == "drop":
        drop_statistics(model)
    built = ExtendedModel(
        plain,
        model,
        below.added_modules,
        models.example(data.shape),
        config.model.layer_granularity,
        cuts=below.removes_layers,
    )
    if built.changed:
        models.check_fit(
            f"{type(model).__name__}, built for {algorithm.name},",
            model,
            data.shape,
            outputs,
        )
    layers = built.layers(plain_layers)
    problem = TaskInfo(
        layers=layers,
        never_sent=built.personal
        | (statistics_of(model) if config.model.batchnorm == "local" else frozenset()),
        n_train=data.weights,
        epochs=int(config.training.epochs or 0),
        seed=config.execution.seed,
        norms=frozenset[str]().union(
            *(tensors_of(*each) for each in batch_norms(model).items())
        ),
        rounds=int(config.federation.rounds or 0),
        blocks=paths_of_blocks(model),
        mean=data.mean,
        std=data.std,
        uniform=config.federation.client_weights == "uniform",
        may_stop_every=int(config.execution.eval_every or 1)
        if config.federation.patience
        else 0,
    )
    stack = config.execution.stack
    if criterion.couples:  # which a sum of single samples' losses does not allow
        if stack == "on":
            raise UsageError(
                f"stack must be auto or off for loss {criterion.name!r}; got on."
            )
        stack = "off"
    config = config.with_keys(
        stack="on"
        if stacks(model, config.execution.device, stack, config.training.precision)
        else "off"
    )
    if config.execution.workers > 1 and config.execution.stack == "off":
        check_sendable(model)
    _check_batches(
        model, data, int(config.training.batch_size or 1), config.model.batchnorm
    )
    if plan is None and config.federation.plan not in (None, AUTO):
        plan = LayerPlan.load(str(config.federation.plan))
    if plan is None and splits and config.federation.plan is None:
        plan = algorithm(problem, None, config.federation.options).default_plan(
            plain_layers
        )
    if plan is not None:
        plan = built.plan(plan)
    task = Task(
        config, data, model, layers, criterion, problem, plan, start, tuple(said)
    )
    decides = task.algorithm(plan).decides  # its own configuration is checked here, too
    if adapters and plan is None and (decides or config.federation.plan == AUTO):
        _check_steps(data, int(config.training.batch_size or 1))
    return task


def _class_weights(config: RunConfig, data: FederatedData) -> tuple[float, ...] | None:
    """Return the weights of classes in the loss, or None without any.

    Balanced weights use all clients' training samples together. The clients' losses then add up to the centralised loss
    with the same weights. Weights by each client's own frequencies would change the common objective if the clients'
    classes differ. They would also increase the mismatch of local and global imbalance (Wang et al., Addressing Class
    Imbalance in Federated Learning, AAAI 2021).
    """
    weights = weights_of(config.training.class_weights)
    if isinstance(weights, str):
        known = data.task == CLASSIFICATION
        return (
            losses.balanced_weights(data.class_counts().sum().tolist(), data.classes)
            if known
            else ()
        )
    return weights


def _criterion(config: RunConfig, data: FederatedData) -> Loss:
    """Return the loss that a configuration names, with its class weights."""
    criterion = losses.build(
        str(config.training.loss), **(config.training.loss_options or {})
    )
    criterion.check(data.n_classes, data.task)
    weights = _class_weights(config, data)
    if weights is None:
        return criterion
    weighted = losses.ClassWeighted(criterion, weights)
    weighted.check(data.n_classes, data.task)
    return weighted


# --- checks ----------------------------------------------------------------------------------------------------


def _check_outputs(
    algorithm: type[Algorithm], criterion: Loss, outputs: int, n_classes: int
) -> None:
    """Check that a model has more than a single output if its algorithm compares the logits of classes."""
    if algorithm.needs_logits and criterion.task not in (CLASSIFICATION, REGRESSION):
        raise UsageError(
            f"{algorithm.name} must have classes; got task {criterion.task}. Use another algorithm."
        )
    if algorithm.needs_logits and outputs != n_classes:
        raise UsageError(
            f"{algorithm.name}: the loss must have one output for each class; got {criterion.name!r}, with one output."
        )


def _made_up(config: RunConfig, data: FederatedData) -> list[str]:
    """Return a warning if samples are partitioned over artificial clients by default.

    There is none if a partition or a number of clients is given.
    """
    if (
        config.data.partition is not None
        or config.data.clients is not None
        or data.partition.kind == "natural"
    ):
        return []
    columns = () if data.preprocessing is None else data.preprocessing.columns
    likely = by_name("client_column", columns)
    flag = f"--client-column {likely[0]}" if likely else "--client-column NAME"
    return [
        f"{config.data.dataset} names no clients: its samples are divided among {len(data.clients)} made-up clients "
        f"({data.partition.kind!r}). Name the column with clients: {flag}. Or confirm with --partition or --clients."
    ]


def _check_steps(data: FederatedData, batch: int) -> None:
    """Check that the first epoch has more than a step. In the first one B is zero, so that A has no gradient."""
    single = [client.name for client in data.clients if len(client.train) <= batch]
    if single:
        raise UsageError(
            f"batch_size must be below each client's training samples to measure adapters; got {batch}, which is one "
            f"step at {listing(single)}. Lower it, or give a plan."
        )


def _check_batches(model: nn.Module, data: FederatedData, batch: int, bn: str) -> None:
    if not any(
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        for module in model.modules()
    ):
        return
    if batch < 2:
        raise UsageError(
            "the model normalises over batches: batch_size must be at least 2; got 1. Choose a larger one."
        )
    for client in data.clients:
        for split in (
            SPLITS if bn == "drop" else SPLITS[:1]
        ):  # without statistics, scoring normalises over batches too
            if len(client.split(split)) < 2:
                raise UsageError(
                    f"client {client.name!r} must have at least 2 {split} samples, since the model normalises over "
                    f"batches; got {len(client.split(split))}."
                )
