"""Building of the objects that a configuration names, and checks that they fit together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import fl_core
from fl_core import data as datasets, models, tree
from fl_core.algorithms.base import Algorithm, TaskInfo, extends_model, find, registry
from fl_core.buffers import rules_of
from fl_core.config import (
    AUTO,
    OWN,
    Mark,
    Own,
    RunConfig,
    marked,
    resolve,
    weights_of,
    with_own,
)
from fl_core.data import FederatedData, Partition
from fl_core.data.federated import client_notes, notes
from fl_core.data.partitions import SPLITS
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.table.describe import likely_columns
from fl_core.display import ROWS, Displayed, Summary
from fl_core.errors import UsageError, about, listing, plural, spelled, warn
from fl_core.layers import Layer, layers_of
from fl_core.models import lora
from fl_core.models.adapter import OWN_LOSS, check_real
from fl_core.models.building import (
    FITTED,
    batch_norms,
    drop_statistics,
    normalises_batches,
    statistics_of,
    tensors_of,
    wants_weights,
    with_loss,
    without_weights,
)
from fl_core.models.extended import paths_of_blocks
from fl_core.plan import LayerPlan, labels_of
from fl_core.records.store import Run
from fl_core.rounds.batched import stacks
from fl_core.rounds.clients import ClientRunner
from fl_core.rounds.workers import check_sendable
from fl_core.rows import CLASSIFICATION, POSITIONS, REGRESSION, SURVIVAL, check_score
from fl_core.run import initial
from fl_core.storage import parsed_json
from fl_core.training import losses
from fl_core.training.border import fit_module
from fl_core.training.losses import Loss
from fl_core.training.phases import Training
from fl_core.training.workspace import memory_format
from fl_core.tree import Tree


@dataclass(repr=False)
class Task(Displayed):
    """The objects that a configuration names: data, model, layers, criterion, and the algorithm's arguments.

    ``own`` has the data and the model from Python that the task was made of, or None
    for each. ``start`` has the base model's initial weights; it is None if the seed
    drew them. ``said`` has notes from building the task.
    """

    config: RunConfig
    own: Own
    data: FederatedData
    model: nn.Module
    layers: tuple[Layer, ...]
    criterion: Loss
    task_info: TaskInfo
    plan: LayerPlan | None
    # the base model's initial weights, if they are not the seed's
    start: Tree | None = None
    said: tuple[str, ...] = ()

    def summary(self) -> Summary:
        data, layers = self.data, listing(labels_of(self.layers).values())
        title = f"{self.config.federation.algorithm} on {data.name}"
        return Summary(
            f"{title}: {plural(len(data.clients), 'client')}; layers {layers}"
        )

    def algorithm(self, plan: LayerPlan | None) -> Algorithm:
        """Return the configured algorithm with the plan that it makes of a given one.

        Args:
            plan: the plan. None gives the algorithm without a plan.

        Raises:
            UsageError: the algorithm cannot use the plan.
        """
        name = self.config.federation.algorithm
        options = self.config.federation.options
        algorithm = find(name, options)(self.task_info, None, options)
        if plan is None:
            return algorithm
        return algorithm.with_plan(algorithm.resolve_plan(plan))

    def client_runner(self, observers: Mapping[str, Any] | None = None) -> ClientRunner:
        """Return a runner of the task's clients.

        Args:
            observers: makers of the observers of local training, by name. None means
                none.
        """
        config, adapt = self.config, self.config.model.adapt
        rates = lora.parse(adapt).factors if adapt else ()
        return ClientRunner(
            self.model,
            self.data,
            replace(Training.of(config.training), rates=rates),
            self.criterion,
            observers or {},
            config.execution.device,
            memory_format(self.model, models.example(self.data.shape)),
        )

    def announce(self, earlier_notes: set[str] | None = None) -> None:
        """Log the table of the data's columns, and warn of what is unusual.

        Args:
            earlier_notes: tables and notes that other runs of a study have announced. They are not repeated, and new
                ones are added.
        """
        if earlier_notes is None:
            earlier_notes = set()
        logger = logging.getLogger(__name__)
        table = self.data.table
        if table.columns and logger.isEnabledFor(logging.INFO):
            text = repr(table) if len(table.columns) > ROWS else str(table)
            if text not in earlier_notes:
                logger.info("%s", text)
            earlier_notes.add(text)
        for note in self.notes():
            if note not in earlier_notes:
                warn(note)
            earlier_notes.add(note)

    def notes(self) -> list[str]:
        """Return notes from building the task, on its plan, and on unusual data.

        The algorithm's own notes are among them. Unusual are, for instance, clients of
        one class or the scale of targets. Without the clients' samples, as on a server of
        sites, there are no notes on data.
        """
        algorithm = self.algorithm(self.plan)
        own_notes = [
            *(() if algorithm.plan is None else algorithm.plan.notes()),
            *algorithm.notes(),
        ]
        if self.data.elsewhere:
            return [*self.said, *own_notes]
        data_notes = [
            *self._chosen_elsewhere(),
            *notes(self.data, algorithm.name == "local"),
            *client_notes(self.data),
        ]
        return [*self.said, *own_notes, *data_notes]

    def _chosen_elsewhere(self) -> list[str]:
        """Return notes if the given plan was measured on other samples, or chosen at another learning rate."""
        if self.plan is None:
            return []
        notes, evidence, lr = [], self.plan.why, self.config.training.lr
        if evidence.data not in ("", self.data.digest, self.data.training_digest):
            notes.append(
                "the plan was measured on other data, or on other splits of them, than this run trains on"
            )
        plan_rate = evidence.detail.get("lr")
        if isinstance(plan_rate, float) and plan_rate != lr:
            notes.append(
                f"the plan was chosen at learning rate {plan_rate:g}, and this run has {lr:g}. Pass lr={plan_rate:g}"
            )
        return notes

    def header(self, command: str) -> dict[str, Any]:
        """Return the entries of the first line of every file of rows of this task.

        Args:
            command: the user's command, for the record.
        """
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
            "checkpoint": tree.digest(tree.full_state(self.model)),
        }


def assemble(
    config: RunConfig,
    *,
    data: object = None,
    loaded: FederatedData | None = None,
    model: object = None,
    loss: object = None,
    partition: Partition | None = None,
    preprocessing: Preprocessing | None = None,
    plan: LayerPlan | None = None,
    start: Tree | None = None,
) -> Task:
    """Build everything that a run needs, and check that it fits together before any work starts.

    Args:
        data, model, loss: your own objects in place of those that the configuration names
            (:func:`fl_core.config.with_own`). With a federation the configuration has no options on reading or
            partitioning data.
        loaded: the configuration's own data, if they are loaded already.
        partition: a stored partition in place of a new draw.
        preprocessing: the stored fitted numbers of a table's preparation.
        plan: a plan. The configuration must then name none.
        start: stored initial weights, in place of those that the configuration's ``init`` names.

    A function may build lazy layers, which get their shapes from the samples. The samples of this example are token
    ids:

    >>> import numpy as np
    >>> ids = np.ones((20, 3), int), np.arange(20) % 2
    >>> def net(n_classes):
    ...     return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.LazyLinear(n_classes))
    >>> task = assemble(RunConfig(rounds=1), data={"a": ids, "b": ids}, model=net)
    >>> task.model[2].weight.shape, task.data.clients[0].train.x.dtype
    (torch.Size([2, 12]), torch.int64)
    >>> task
    fedavg on own: 2 clients; layers 0 Embedding, 2 Linear

    Raises:
        UsageError: something is unknown, missing or does not fit. The message names it.
    """
    config_given, objects = with_own(config, data, with_loss(model, loss))
    config = resolve(config_given, **objects)
    if str(config.model.model).startswith(FITTED):
        raise UsageError(
            f"model must be one that gradients train; got {config.model.model}. See fedlayers list models."
        )
    algorithm = find(config.federation.algorithm, config.federation.options)
    _check_plan(algorithm, config, plan)
    data = load(config, objects["data"], loaded, partition, preprocessing)
    if isinstance(objects["model"], nn.Module):
        data = _as_in_torch(data, objects["model"])
    config, task_notes = _with_stopping(config, data, config_given.federation.patience)
    task_notes = [*_made_up(config, objects["data"], data), *task_notes]
    has_default_data = config_given.data == RunConfig().data
    if objects["model"] is not None and objects["data"] is None and has_default_data:
        task_notes.append(
            f"your model trains on the dataset {data.name!r}, the default: pass data= or dataset= for other data"
        )
    criterion = _criterion(config, data, objects["model"])
    model_built: Any = config.model.model
    if objects["model"] is not None:
        model_built = objects["model"]
    if not isinstance(model_built, str) or models.is_code(model_built):
        model_built, data = _built_by_user(config, model_built, data, criterion)
        model_built, criterion = fit_module(model_built, data, criterion)
        task_notes += criterion.notes()
        if criterion.task != data.task:
            data = replace(data, kind=criterion.task)
    elif data.task == POSITIONS:
        raise UsageError(
            f"labels at positions must have a module of your own; got {config.model.model}. Pass model=, or "
            "task='multilabel' for labels of 0 and 1."
        )
    if algorithm.needs_logits:
        _check_outputs(algorithm, criterion, data.n_classes)
    model, start = build(config, model_built, data, criterion, start, task_notes)
    plain_layers = layers_of(
        model, models.example(data.shape), by=config.model.layer_granularity
    )
    model, plain_layers = _adapt(config, data, model, plain_layers, task_notes)
    extended_model, layers, personal_tensors = None, plain_layers, frozenset[str]()
    if extends_model(algorithm):
        extended_model = initial.extend(config, data, model, criterion)
        model, personal_tensors = extended_model.model, extended_model.personal
        layers = extended_model.layers(layers)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        task_notes.append(
            "all parameters of the model are frozen, so nothing trains: call requires_grad_(True) on some of them"
        )
    task_info = _task_info(config, data, algorithm, model, layers, personal_tensors)
    config = _with_stack(config, criterion, model)
    _check_batches(model, data, config)
    if plan is None and config.federation.plan not in (None, AUTO):
        plan = plan_at(str(config.federation.plan))
        if _is_plan(config.federation.plan):
            config = config.with_keys(plan=None)  # the task has the plan itself
    if plan is None and algorithm.uses_plan and config.federation.plan is None:
        plain_algorithm = algorithm(task_info, None, config.federation.options)
        plan = plain_algorithm.default_plan(plain_layers)
    if plan is not None:
        if extended_model is not None:
            plan = extended_model.plan(plan)
        plan.check_fits(model)
    task = Task(
        config,
        objects,
        data,
        model,
        layers,
        criterion,
        task_info,
        plan,
        start,
        tuple(task_notes),
    )
    # its own configuration is checked here, too
    decides = task.algorithm(plan).decides or config.federation.plan == AUTO
    if config.model.adapt and plan is None and decides:
        _check_steps_of_adapters(data, int(config.training.batch_size or 1))
    return task


def load(
    config: RunConfig,
    own: Any = None,
    loaded: FederatedData | None = None,
    partition: Partition | None = None,
    preprocessing: Preprocessing | None = None,
) -> FederatedData:
    """Load the data of a resolved configuration, or take those from Python, and partition them over clients.

    Args:
        own: the data from Python, a source or a federation; None for the configuration's dataset.
        loaded: the configuration's own data, if they are loaded already.
        partition: a stored partition in place of a new draw.
        preprocessing: the stored fitted numbers of a table's preparation.

    Raises:
        UsageError: files are missing or do not fit, or a client has no training samples.
    """
    data = loaded
    if isinstance(own, FederatedData):
        data = own
    if data is None:
        options = {**config.data.load_options(), "seed": config.execution.seed}
        if partition is not None:
            for key in ("seed", *marked(Mark.DRAW)):
                del options[key]
        data = datasets.load(
            config.data.dataset if own is None else own,
            indices=partition,
            preprocessing=preprocessing,
            **options,
        )
    if config.data.positive is not None:
        data = data.with_positive(config.data.positive)
    empty_clients = [client.name for client in data.clients if not len(client.train)]
    if empty_clients:
        raise UsageError(
            f"{data.name}: each client must have training samples; "
            f"got none for {listing(empty_clients)}. Use fewer clients."
        )
    return data


def _as_in_torch(data: FederatedData, module: nn.Module) -> FederatedData:
    """Return data from Python in the form that the user's module takes.

    Integers become token ids if the module does not take them as numbers. Labels that
    are whole numbers become indices of the outputs, if the module has two or more.

    Raises:
        UsageError: a label is no index of an output.
    """
    check_real(module)
    data = _with_ids(data, module)
    outputs = models.outputs_of(module, data.shape)
    if data.indices and hasattr(module, OWN_LOSS):  # it reads labels as they are
        outputs = 1 + max(map(int, data.classes))
    if not data.indices or outputs is None or outputs < 2:
        return data
    return data.with_indices(outputs)


def _with_ids(data: FederatedData, module: nn.Module) -> FederatedData:
    """Return data from Python with integers as token ids, if the user's module does not take them as numbers."""
    if data.integers and models.outputs_of(module, data.shape) is None:
        return data.with_token_ids()
    return data


def _built_by_user(
    config: RunConfig, module_or_builder: Any, data: FederatedData, criterion: Any
) -> tuple[nn.Module, FederatedData]:
    """Return the user's module, or what the user's function builds for the data, and the data that it takes.

    A module is returned as it is, with the same data. If the function fails, or its
    module does not take integers as numbers, integers in the data become token ids.

    Raises:
        UsageError: the function builds no module for the data.
    """
    if isinstance(module_or_builder, nn.Module):
        return module_or_builder, data
    make_model = partial(
        models.copy_user_model,
        module_or_builder,
        # a function of the user's has no number of outputs: one for each class
        n_classes=getattr(criterion, "outputs", int)(data.n_classes or 1),
        seed=config.execution.seed,
        options=config.model.model_options,
        trial=False,
    )
    try:
        model = make_model(data.shape)
    except UsageError:
        if not data.integers:
            raise
        data = data.with_token_ids()
        model = make_model(data.shape)
    return model, _with_ids(data, model)


def build(
    config: RunConfig,
    own: Any,
    data: FederatedData,
    criterion: Loss,
    start: Tree | None,
    notes: list[str],
) -> tuple[nn.Module, Tree | None]:
    """Build the model of a resolved configuration, or copy the one from Python, and give it its initial weights.

    Args:
        own: the module, or what builds it: a callable or the model's name.
        criterion: the loss, which sets the number of outputs.
        start: stored initial weights, or None.
        notes: a list to which notes are added.

    Returns:
        The model, and its initial weights. They are None if the seed drew them.

    Raises:
        UsageError: the model cannot be built or does not fit the data, or the initial
            weights do not fit the model.
    """
    model_name = str(config.model.model)
    options = config.model.model_options
    if start is not None:  # a copy of them
        options = without_weights(model_name, options)
    model = models.copy_user_model(
        own,
        data.shape,
        criterion.outputs(data.n_classes),
        seed=config.execution.seed,
        options=options,
    )
    if start is not None:
        initial.copy_into(model, start, "the run's start.safetensors")
    elif config.model.init is not None:
        notes += initial.start(
            model, config.model.init, models.example(data.shape), data.words
        )
        start = tree.state_dict(model)
    elif wants_weights(model_name, options):
        start = tree.state_dict(model)  # the run and its workers get them as tensors
    if model_name not in models.MODELS.own:
        notes += models.output_notes(model, data.shape, criterion.task)
    if config.model.batchnorm == "drop":
        drop_statistics(model)
    return model, start


def plan_at(path: str) -> LayerPlan:
    """Return the plan in a file, that of the run in a directory, or the one that the text itself is as JSON.

    Raises:
        UsageError: there is no plan at the path, or the run has none.
    """
    if _is_plan(path):
        rule = "plan must be a file, a run, or a plan as JSON"
        with about(rule, ValueError, way="Correct its path."):
            content = parsed_json(path)
        return LayerPlan.from_json(content)
    if not Path(path).is_dir():
        return LayerPlan.load(path)
    stored = Run(path).plan()
    if stored is None:
        raise UsageError(
            f"plan must be a file, or a run with a plan; got {path}, a run without."
        )
    return LayerPlan.from_json(stored)


def _with_stopping(
    config: RunConfig, data: FederatedData, given_patience: int | None
) -> tuple[RunConfig, list[str]]:
    """Return the configuration without patience if a client has too few validation samples, and a note.

    Otherwise the configuration stays unchanged, and the list of notes is empty.

    Args:
        config: the configuration.
        data: the federation.
        given_patience: the patience that the user gave; None for the default.

    Raises:
        UsageError: the user gave a patience, and samples are too few. Or the task has
            no score of the name in ``monitor``.
    """
    if config.federation.monitor is not None:
        check_score(config.federation.monitor, data.task)
    # the samples of an R2, or of a pair
    least_samples = 2 if data.task in (REGRESSION, SURVIVAL) else 1
    lacking_clients = [
        client.name for client in data.clients if len(client.validation) < least_samples
    ]
    if not config.federation.patience or not lacking_clients:
        return config, []
    reason = f"{data.name} has too few for {listing(lacking_clients)}"
    if given_patience:
        raise UsageError(
            f"patience must have validation samples to judge by; {reason}. Use patience=0."
        )
    return config.with_keys(patience=0), [
        f"the run trains all rounds, because only validation samples can stop it, and {reason}"
    ]


def _adapt(
    config: RunConfig,
    data: FederatedData,
    model: nn.Module,
    layers: tuple[Layer, ...],
    notes: list[str],
) -> tuple[nn.Module, tuple[Layer, ...]]:
    """Return the model and its layers with the adapters that a configuration names, if any.

    Notes on layers without adapters are added to ``notes``.

    Raises:
        UsageError: the model has adapters of its own, or cannot have these. Or clients
            keep the statistics of batch normalisations.
    """
    if config.model.adapt is None:
        return model, layers
    adapters = lora.parse(config.model.adapt)
    if lora.has_adapters(model):
        raise UsageError(
            f"adapt must be left out for a model with adapters of its own; got {config.model.adapt!r}. Leave adapt out."
        )
    if config.model.batchnorm == "local":
        raise UsageError(
            "batchnorm must be global or drop with adapt; got local. Adapters leave statistics unchanged."
        )
    wide_targets = {lora.ALL, lora.ATTENTION}.intersection(adapters.targets)
    if wide_targets and (left_paths := lora.left_out(model)):
        notes.append(
            f"{listing(left_paths)} get no adapters and stay fixed: grouped convolutions, nn.MultiheadAttention and "
            "parametrised layers have none"
        )
    return lora.with_adapters(
        model, adapters, layers, models.example(data.shape), config.execution.seed
    )


def _task_info(
    config: RunConfig,
    data: FederatedData,
    algorithm: type[Algorithm],
    model: nn.Module,
    layers: tuple[Layer, ...],
    never_sent: frozenset[str],
) -> TaskInfo:
    """Return what an algorithm knows of its task.

    Args:
        never_sent: names of tensors that never travel. Frozen tensors are added to
            them, and running statistics if clients keep these.
    """
    if config.model.batchnorm == "local":
        never_sent |= statistics_of(model)
    never_sent = never_sent.union(*(layer.frozen for layer in layers))
    return TaskInfo(
        layers=layers,
        never_sent=never_sent,
        n_train=data.weights,
        epochs=int(config.training.epochs or 0),
        seed=config.execution.seed,
        norms=frozenset[str]().union(
            *(tensors_of(*norm) for norm in batch_norms(model).items())
        ),
        rounds=int(config.federation.rounds or 0),
        blocks=paths_of_blocks(model) if algorithm.needs_blocks else (),
        mean=data.mean,
        std=data.std,
        uniform=config.federation.client_weights == "uniform",
        n_classes=data.n_classes,
        buffers=rules_of(model),
        may_stop_every=int(config.execution.eval_every or 1)
        if config.federation.patience
        else 0,
    )


def _with_stack(config: RunConfig, criterion: Loss, model: nn.Module) -> RunConfig:
    """Return the configuration with ``stack`` set to on or off.

    It is on if clients train in one batched pass.

    Raises:
        UsageError: ``stack`` is on with a loss or precision that does not allow it. Or
            workers are to train, and the loss or the model cannot be sent to them.
    """
    stack = config.execution.stack
    precision = config.training.precision
    # which a sum of single samples' losses does not allow
    if criterion.couples or config.training.loss == OWN or precision == "bf16":
        if stack == "on":
            raise UsageError(
                f"stack must be auto or off for loss {criterion.name!r} in {precision}; got on."
            )
        stack = "off"
    is_stacked = stacks(model, config.execution.device, stack)
    if config.execution.workers > 1 and not is_stacked:
        check_sendable(criterion)
        check_sendable(model)
    return config.with_keys(stack="on" if is_stacked else "off")


def _criterion(config: RunConfig, data: FederatedData, model: object) -> Any:
    """Return the loss that a configuration names, with its class weights, or the model's own from Python.

    If the preprocessing standardises the targets, the loss does so, too.

    Raises:
        UsageError: the loss does not fit the task, its classes or its weights. Or a
            loss from Python is missing, or has options or weights. Or labels at
            positions have weights.
    """
    training = config.training
    options, weights = training.loss_options or {}, weights_of(training.class_weights)
    if training.loss == OWN:
        own_loss = getattr(model, OWN_LOSS, None)
        if own_loss is None or options or weights:
            got_text = "these" if own_loss else "none"
            raise UsageError(
                "a loss from Python must be passed with its module, without loss_options and class_weights; got "
                f"{got_text}. Pass the same loss=... again, or leave them out."
            )
        return own_loss
    criterion = losses.build(str(training.loss), **options)
    if weights is not None and data.task in (POSITIONS, REGRESSION):
        raise UsageError(
            f"class_weights must be left out for {data.task}; got loss {criterion.name!r}."
        )
    if data.task == POSITIONS:
        return criterion
    criterion.check(data.n_classes, data.task)
    if data.preprocessing is not None and data.preprocessing.target:
        mean, deviation = data.preprocessing.target
        return losses.Standardised(criterion, mean, deviation)
    if isinstance(weights, str):
        weights = ()
        if data.task == CLASSIFICATION:
            counts = data.class_counts().sum().tolist()
            weights = losses.balanced_weights(counts, data.classes)
    if weights is None:
        return criterion
    weighted_loss = losses.ClassWeighted(criterion, weights)
    weighted_loss.check(data.n_classes, data.task)
    return weighted_loss


# --- checks ----------------------------------------------------------------------------------------------------


def _is_plan(text: str | None) -> bool:
    """Return whether a configuration's ``plan`` is a plan itself, as JSON, and not the path of one."""
    return str(text).startswith("{")


def _check_plan(
    algorithm: type[Algorithm], config: RunConfig, plan: LayerPlan | None
) -> None:
    """Check that a plan is given at most once, as an object or in the configuration.

    Raises:
        UsageError: it is given twice, or the algorithm uses no plan.
    """
    plan_name = config.federation.plan
    if plan_name is not None and plan is not None:
        second_plan = f"plan={plan_name!r}"
        if _is_plan(config.federation.plan):
            second_plan = "another one in the configuration"
        raise UsageError(
            f"plan must be given once; got an object and {second_plan}. Choose one."
        )
    if (plan_name is not None or plan is not None) and not algorithm.uses_plan:
        algorithm_names = sorted(
            name for name, member in registry().items() if member.uses_plan
        )
        raise UsageError(
            f"algorithm must be one that uses a plan ({listing(algorithm_names)}); got {config.federation.algorithm}. "
            f"Use one of them: {spelled(algorithm='fedper')}."
        )


def _check_steps_of_adapters(data: FederatedData, batch: int) -> None:
    """Check that each client makes two steps in an epoch, so that both factors of its adapters have gradients.

    In the first step the factor B is zero, so that A has no gradient.

    Raises:
        UsageError: a client's training samples fit into one batch.
    """
    small_clients = [
        client.name for client in data.clients if len(client.train) <= batch
    ]
    if small_clients:
        raise UsageError(
            f"batch_size must be below each client's training samples to measure adapters; got {batch}, which is one "
            f"step at {listing(small_clients)}. Lower it, or give a plan."
        )


def _check_outputs(algorithm: type[Algorithm], criterion: Loss, n_classes: int) -> None:
    """Check that a loss has an output for each class.

    Algorithms that compare logits need this.

    Raises:
        UsageError: the task is neither classification nor regression, or the loss has
            another number of outputs than there are classes.
    """
    if criterion.task not in (CLASSIFICATION, REGRESSION):
        raise UsageError(
            f"{algorithm.name} must have classes; got task {criterion.task}. Use another algorithm."
        )
    if criterion.outputs(n_classes) != n_classes:
        raise UsageError(
            f"{algorithm.name}: the loss must have one output for each class; got {criterion.name!r}, "
            "with one output."
        )


def _made_up(config: RunConfig, own: object, data: FederatedData) -> list[str]:
    """Return a warning in a list if samples have artificial clients by default.

    The list is empty for a dataset by name or function, a federation and natural
    clients, and if a partition or a number of clients is given.
    """
    dataset_name = config.data.dataset
    if (
        isinstance(own, FederatedData)
        or dataset_name in datasets.DATASETS
        or datasets.is_code(dataset_name)
        or config.data.partition is not None
        or config.data.clients is not None
        or data.partition.kind == "natural"
    ):
        return []
    columns: tuple[str, ...] = ()
    if data.preprocessing is not None:
        columns = data.preprocessing.columns
    likely_names = likely_columns("client_column", "client", columns)
    column = "NAME"
    if likely_names:
        column = repr(likely_names[0])
    advice = f"Name the column with clients: client_column={column}"
    if own is not None and not columns:
        advice = "Pass data={client: (x, y)}"
    elif Path(dataset_name).is_dir():
        layout = Path(dataset_name) / "CLIENT/CLASS"
        advice = f"Sort the images as {layout}"
    elif Path(dataset_name).suffix == ".npz":
        advice = "Add an array named client"
    return [
        f"{dataset_name} names no clients: its samples are divided among {len(data.clients)} made-up clients "
        f"({data.partition.kind!r}). {advice}. Or confirm with partition or clients."
    ]


def _check_batches(model: nn.Module, data: FederatedData, config: RunConfig) -> None:
    batch = int(config.training.batch_size or 1)
    if not normalises_batches(model, training=True):
        return
    if batch < 2:
        raise UsageError(
            "the model normalises over batches: batch_size must be at least 2; got 1. Choose a larger one."
        )
    for client in data.clients:
        for split in (
            SPLITS if config.model.batchnorm == "drop" else SPLITS[:1]
        ):  # without statistics, scoring normalises over batches too
            if (size := len(client.split(split))) < 2:
                raise UsageError(
                    f"client {client.name!r} must have at least 2 {split} samples, since the model normalises over "
                    f"batches; got {size}."
                )
