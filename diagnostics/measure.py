"""Diagnoses of a run, or of a dataset and a model: the functions behind the command line."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from fl_core import rows, tree
from fl_core.errors import (
    RunError,
    UsageError,
    about,
    as_list,
    check_known,
    check_type,
    listing,
)
from fl_core.layers import Layer, layers_of
from fl_core.models import example
from fl_core.models.adapter import adapt, tensor
from fl_core.models.building import with_loss
from fl_core.run import runner
from fl_core.run.restore import load_models
from fl_core.run.runner import Instruments, Task
from fl_core.training import losses
from fl_core.training.phases import Training
from fl_core.tree import preserve_state

from . import select
from .cross_scores import cross_scores
from .curve import SENSITIVITY
from .diagnosis import measure_models
from .inputs import client_models, fit_outputs
from .load_weights import folder_kind
from .metrics.base import DEFAULT
from .null import NO_NULLS, NULLS, Nulls, null_data, rows_of_nulls
from .report import Report
from .representation.embedding import embed, pool
from .representation.features import PROBE, probe_set
from .request import RARE, Request, chosen_metrics
from .sensitivity import SensitivityAccumulator, recorded_rows


def instruments() -> Instruments:
    """Return the diagnostics with which a run chooses a plan, for :func:`fl_core.run.runner.run`."""
    return Instruments(
        observers={SENSITIVITY: SensitivityAccumulator},
        decide=select.decide,
        check_rule=select.curve_rule,
    )


def diagnose(
    models: Any,
    data: Any = None,
    metrics: str | Sequence[str] = DEFAULT,
    *,
    loss: Any = None,
    layers: str | Sequence[str] | None = None,
    batch: int = 256,
    seed: int | None = None,
    samples: int | None = None,
    budget: float | None = None,
    null: Nulls | str | Sequence[str] = (),
    model: Any = "local",
    round: int | str = "",
    progress: bool = True,
    options: Mapping[str, Any] | None = None,
    **others: Any,
) -> Report:
    """Measure ``metrics`` on clients' models.

    The models and torch's random state are left as they were. If 2 to 12 clients have
    own models and data by name, the summary begins with the result of
    :func:`who_could_use`. With ``samples`` or a ``budget`` this is left out, and also if
    no metric reads losses.

    >>> import torch
    >>> from torch import nn
    >>> models = {silo: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for silo in ("north", "south")}
    >>> data = {silo: (torch.randn(40, 4), torch.arange(40) % 3) for silo in models}
    >>> report = diagnose(models, data, ["grad_norm", "cka"], progress=False)
    >>> print(report.summary().lead)
    No client is shown to gain by another's model. This holds only if no model was trained on these samples.
    Report(grad_norm, cka; 2 layers, 2 clients, loss cross_entropy, 0 rows without a value)
    >>> report.values("grad_norm").shape  # layers x clients
    (2, 2)
    >>> diagnose(models, data, "grad_norm", null="labels", progress=False).nulls["model"].unique().tolist()
    ['null labels 1, models kept']

    Args:
        models: one model, a list, or {client: model}; or a run: its directory, or what ``fl.run`` returned. All models
            must have the same tensors. Metrics of pairs that read features alone compare other architectures too, at
            layers of the same name. Clients without names are called client_0, client_1 and so on. A model takes a
            tensor, a tuple or a dict. It returns a tensor, ``.logits``, ``["logits"]`` or a tuple that begins with one.
        data: a pair (x, y) of tensors or arrays, an object with such ``x`` and ``y``, a dataset, or a re-iterable
            loader; or one of these for each client, as a list or {client: data}. x is a tensor, or a tuple or dict of
            tensors. A dict may hold the ``labels``. One model may be measured on many clients' data, and many on one.
            Integer labels [n] are classes, and [n, ...] classes of positions. Other labels are numbers.
        metrics: names in :data:`~diagnostics.metrics.base.METRICS`, or ``package.module:function``. All metrics of
            gradients share one pass over the data.
        loss: a name of :data:`fl_core.training.losses.LOSSES` (cross_entropy, focal, player_focal, bce, mse, mae,
            huber, cox, multilabel_bce), a torch loss, or a callable ``loss(output, y)`` that returns the loss of each
            sample. Metrics read its mean over samples. Default: cross_entropy, and mse for numbers.
        layers: exact names of the layers to report. Default: all layers of the model. ``"network"`` alone is the whole
            network as one layer, with one trace and one spectrum.
        batch: samples at a time. A loader keeps its own batches.
        seed: seed of all random draws. Default: 0, or the run's.
        samples: maximum number of samples of each client. Default: all.
        budget: seconds for all metrics, and as many for each draw of a null. What was not reached has a row with a
            status. Other values are those without a budget. Only means over batches or probes may end early: their
            errors are larger, and the column n_samples has the samples that were reached. A pass or a fit that has
            begun is completed, such as a layer's at one client.
        null: names of :data:`diagnostics.null.NULLS`, or :class:`~diagnostics.null.Nulls`. All metrics are measured
            again on each null, for the report's ``nulls``. :func:`~diagnostics.select.select` compares them. Data of a
            metric's option ``test`` are shuffled too. A probe that you give is not.
        model, round: the kind of a run's models, ``local``, ``personal`` or ``global``, and their round. By default it
            is the round of ``result.models``. See :func:`diagnose_run`.
        progress: show a bar. All rows come at the end, so there is no picture to draw before (``live``).
        options: options of single metrics, {metric: {option: value}}, and the rarer settings of
            :class:`~diagnostics.request.Request` by name.
        others: ``own_model`` and ``allow_code`` for a run of your own model or code. A run's own loss is ``loss``.

    Raises:
        UsageError: a name or option is unknown, an option is out of range, models and data differ in numbers or names,
            models differ in their tensors, data do not fit, or a null cannot be made of them.
        CorruptError: a file of the run is damaged.
    """
    check_which(model)
    objects = own_parts(models, data, others, loss)
    for name in others:
        if name in RARE:
            raise UsageError(
                f"{name} must be among the options; got an argument. Pass options={{{name!r}: ...}}."
            )
        check_known("argument of diagnose", name, KEYWORDS)
    arguments: dict[str, Any] = {
        "loss": loss,
        "layers": layers,
        "batch": batch,
        "seed": seed,
        "samples": samples,
        "budget": budget,
        "progress": progress,
        "null": null,
        "options": options,
    }
    path, engine = getattr(models, "path", models), getattr(models, "engine", None)
    if isinstance(path, str | Path):
        arguments |= {"round": round, "which": model, **objects}
        return diagnose_run(path, metrics, **arguments)
    if engine is not None:  # the result of a run that no directory holds
        if (model, round) != ("local", ""):
            raise UsageError(
                f"model and round must be left out for a result without a directory; got {model!r} and {round!r}. "
                "Pass out= to fl.run."
            )
        models = _models_in_memory(models, metrics)
        if data is None:
            clients = [
                client for client in engine.data.clients if client.name in models
            ]
            data = replace(engine.data, clients=clients)
    request = Request.of(metrics, arguments)
    report = measure_models(models, data, request)
    if samples is None and budget is None and request.differentiates:
        sentence = who_could_use(models, data, loss, batch)
        if sentence:
            report.header["cross_scores"] = sentence
    return report


MOST_CROSSED = 12
"""The most clients whose models are scored on each other's samples in a diagnosis."""


def who_could_use(models: Any, data: Any, loss: Any, batch: int) -> str:
    """Return in words which clients could use another's model; empty if this cannot be measured.

    It needs {client: model} and {client: samples} of 2 to :data:`MOST_CROSSED` clients, and at least two models.

    Args:
        models, data, loss, batch: as for :func:`diagnose`.
    """
    has_own_models = isinstance(models, Mapping) and isinstance(data, Mapping)
    if (
        not has_own_models
        or not 2 <= len(models) <= MOST_CROSSED
        or len(data) != len(models)
    ):
        return ""
    if len({id(model) for model in models.values()}) < 2:
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the diagnosis has given them
        try:
            scores = cross_scores(models, data, loss=loss, batch=batch)
        except (UsageError, RunError):
            return ""
    lead = scores.summary().lead.splitlines()[0]
    return f"{lead} This holds only if no model was trained on these samples."


def _models_in_memory(result: Any, metrics: str | Sequence[str]) -> Any:
    """Return the models to measure of a run without a directory: the locally trained ones.

    If all metrics read the shared model, they are the models with which clients
    predict. The same holds if the run kept no locally trained models.

    Raises:
        UsageError: the run kept no locally trained models, and the clients' models are
            equal.
    """
    prediction_models = result.models
    if model_for(metrics, "local") == "global":
        return prediction_models
    local_models = result.local_models
    if local_models:
        return local_models
    digests = {
        tree.digest(tree.named_tensors(model)) for model in prediction_models.values()
    }
    if len(digests) == 1 < len(prediction_models):
        raise UsageError(
            "the clients' locally trained models must be kept to be measured; got a result in memory with "
            f"{len(prediction_models)} equal models. Pass out= to fl.run."
        )
    return prediction_models


def model_for(metrics: str | Sequence[str], which: str) -> str:
    """Return which of a run's models metrics read: ``global`` in place of ``local`` if all read the shared model.

    Raises:
        UsageError: some metrics read the shared model, and others the local models.
    """
    requested_metrics = chosen_metrics(metrics)
    shared_metrics = [layer.name for layer in requested_metrics if layer.shared]
    if which != "local" or not shared_metrics:
        return which
    if len(shared_metrics) < len(requested_metrics):
        raise UsageError(
            f"{listing(shared_metrics)} must be measured at the server's model; "
            "got other metrics and the local models. Measure it alone, or all at model='global'."
        )
    return "global"


KEYWORDS = [*inspect.signature(diagnose).parameters][2:-1]


def check_which(model: Any) -> None:
    """Check that ``model``, the kind of a run's models to measure, is a string.

    Raises:
        UsageError: it is something else, such as a network.
    """
    check_type("model", model, str, "Pass your own network as own_model=.")


def own_parts(
    models: Any, data: Any, options: dict[str, Any], loss: Any = None
) -> dict[str, Any]:
    """Return the user's own objects for a run, by name: ``data``, ``model`` and ``allow_code``, without missing ones.

    An object that is given again takes the place of that in the result of ``fl.run``.
    An own model is joined with the loss.

    Args:
        models: the result of ``fl.run``, or something else, which holds no objects.
        data: the user's samples; None without any.
        options: arguments; ``own_model`` and ``allow_code`` are removed from them.
        loss: the run's loss, if it came from Python.
    """
    model = options.pop("own_model", None)
    if model is not None and not isinstance(loss, str):
        model = with_loss(model, loss)
    parts = {
        "data": data,
        "model": model,
        "allow_code": options.pop("allow_code", None),
    }
    objects = {name: part for name, part in parts.items() if part is not None}
    return getattr(models, "own", {}) | objects


def diagnose_features(
    features: Mapping[str, Mapping[str, Any]],
    y: Any = None,
    metrics: str | Sequence[str] = ("cka",),
    **arguments: Any,
) -> Report:
    """Measure metrics of features on features that you saved.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> saved = {client: {"block1": rng.normal(size=(40, 6)), "head": rng.normal(size=(40, 3))} for client in "ab"}
    >>> diagnose_features(saved, metrics=["cka", "svcca"], progress=False).summary().lead
    'Report(cka, svcca; 2 layers, 2 clients, loss cross_entropy, 0 rows without a value)'

    Args:
        features: {client: {layer: array [n, ...]}} of the same samples in the same order. Layers of one name are
            compared.
        y: classes [n] of the samples, for probes and separability. Other metrics need
            none. Floating labels are ignored.
        metrics: metrics that read features alone.
        arguments: further arguments of :func:`diagnose`.

    Raises:
        UsageError: arrays have different numbers of samples, a metric reads weights or
            losses, or it needs classes and ``y`` has none.
    """
    features_by_client: dict[str, dict[str, Tensor]] = {}
    for client, layers in features.items():
        with about(f"client {client!r}"):
            check_type("features", layers, dict)
            features_by_client[str(client)] = {
                name: tensor(a).float() for name, a in layers.items()
            }
    names = list(dict.fromkeys(chain.from_iterable(features_by_client.values())))
    arrays = chain.from_iterable(
        layers.values() for layers in features_by_client.values()
    )
    sizes = {len(array) if array.ndim else 0 for array in arrays}
    if len(sizes) != 1 or 0 in sizes:
        counts = listing(map(str, sorted(sizes))) or "no"
        raise UsageError(
            "features must be arrays [n, ...] of the same samples; got "
            f"{counts} samples."
        )
    if y is None:
        label_tensor = None
    else:
        label_tensor = tensor(y)
    for metric in chosen_metrics(metrics):
        if not metric.features:
            raise UsageError(
                f"metrics of saved features must read features alone; got {metric.name!r}."
            )
        if metric.classes and (
            label_tensor is None or label_tensor.is_floating_point()
        ):
            label_dtype = getattr(label_tensor, "dtype", "none")
            raise UsageError(
                f"{metric.name} must have y, the samples' classes as whole numbers; got "
                f"{label_dtype}."
            )
    count = sizes.pop()
    labels = torch.zeros(
        count if label_tensor is None else len(label_tensor), dtype=torch.long
    )
    if label_tensor is not None and not label_tensor.is_floating_point():
        labels = label_tensor.unique(return_inverse=True)[
            1
        ]  # classes may have any numbers
    models = {
        client: _Saved(
            {k: arrays[n] for k, n in enumerate(names) if n in arrays},
            len(names),
            labels,
        )
        for client, arrays in features_by_client.items()
    }
    layering = [Layer(name, (), output=f"_{k}") for k, name in enumerate(names)]
    arguments["options"] = {**(arguments.get("options") or {}), "layering": layering}
    return diagnose(models, (torch.arange(count), labels), metrics, **arguments)


def tsne(
    models: Any,
    data: Any,
    layer: str | None = None,
    *,
    samples: int = 1000,
    perplexity: float = 30.0,
    iterations: int = 1000,
    seed: int = 0,
    loss: Any = None,
) -> pd.DataFrame:
    """Embed one layer's features over all clients by t-SNE.

    The default shows the classifier's inputs, as FedPFT does (Figs. 2 and 3). :func:`fl.plots.tsne
    <diagnostics.plots.layers.tsne>` draws the table.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> data = {"a": (torch.randn(20, 3), torch.arange(20) % 2)}
    >>> tsne(net, data, iterations=250).columns.tolist()
    ['client', 'class', 'x', 'y', 'sample']

    Args:
        models, data, loss: as for :func:`diagnose`. Samples without class labels have no class in the table.
        layer: exact name of the layer, whose output is shown. Default: the input of the last layer.
        samples: maximum number of samples, drawn with the seed, equally many of each client.
        perplexity: about how many neighbours count. For n samples at most (n - 1) / 3
            is used.
        iterations: steps of t-SNE, at least 250.
        seed: seed of the drawn samples and of t-SNE.

    Returns:
        A row for each sample: client, class, its place x and y, and its position in the client's data.

    Raises:
        UsageError: the layer is unknown, features do not vary, there are fewer than 4
            samples or 250 iterations, or the perplexity is not above 0.
    """
    request = Request.of("cka", {"seed": seed, "loss": loss})
    subjects, _ = client_models(models, data, request)
    models_by_id = {id(subject.model): subject.model for subject in subjects}
    with preserve_state(*models_by_id.values()):
        subjects, _ = fit_outputs(subjects, request)
        pooled = pool(
            {subject.client: subject.model for subject in subjects},
            {subject.client: subject.data for subject in subjects},
            layer,
            samples=samples,
            seed=seed,
        )
    return embed(pooled, perplexity=perplexity, iterations=iterations, seed=seed)


class _Saved(nn.Module):
    """Saved features as a model: a sample's number goes in, and each layer's features pass a module."""

    def __init__(
        self, features: Mapping[int, Tensor], count: int, labels: Tensor
    ) -> None:
        super().__init__()
        self.features, self.classes = features, int(labels.max()) + 1
        for k in range(count):
            self.add_module(f"_{k}", nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        for k, values in self.features.items():
            self.get_submodule(f"_{k}")(values[x])
        return nn.functional.one_hot(x * 0, self.classes).float()


def diagnose_run(
    path: Path | str,
    metrics: Sequence[str] = DEFAULT,
    *,
    round: int | str = "",
    which: str = "local",
    data: Any = None,
    model: Any = None,
    allow_code: str | Collection[str] = (),
    command: str = "",
    **options: Any,
) -> Report:
    """Diagnose the models of a run's checkpoint, each on its own client's training data.

    Validation samples serve to compare clients and to score probes. The rows' column ``split`` names the samples. It is
    ``probe`` if you give the samples yourself.

    Args:
        path: a run directory.
        metrics: registry names, or ``package.module:function``.
        round: a round with a checkpoint, ``"last"``, or ``"best"``: these models' best
            round under a stopping rule. Default: their best round under a stopping
            rule, else the last. If all metrics read the server's model, the default is
            the first stored round of at least 20 and of a tenth of all, else the last.
        which: ``local`` (after local training, before aggregation), ``personal`` or ``global``. A client without such a
            model was not sampled in that round. The header lists these clients under ``absent``.
        data, model, allow_code: your own, if the run was given them. See :func:`fl_core.run.runner.resume`.
        command: name of the command, for the header.
        options: further arguments of :func:`diagnose`. With ``null`` the same models are measured again. Nothing is
            trained, so the models have seen the real data, and the rows record that. ``fresh`` measures the weights
            that the run started from. A run does not store those of your own model: pass it with the same weights.

    Raises:
        UsageError, CorruptError: as :func:`fl_core.run.restore.load_models` and
            :func:`diagnose`. Or ``fresh`` is asked for and the weights that the run started from
            are not known.
    """
    request = Request.of(metrics, options)
    which = model_for(metrics, which)
    if kind := folder_kind(path):
        raise UsageError(
            f"{path} must be a run directory; it is {kind}. Load it with fl.load_weights, "
            "then measure them with fl.diagnose."
        )
    stored_run = runner.store.Run(path)
    if round == "best":
        round = stored_run.best_round(which)
    elif round == "" and all(metric.shared for metric in request.metrics):
        round = stored_run.early_round
    elif round == "":
        round = stored_run.used_round(which)
    models, task = load_models(
        path, round, which, data=data, model=model, allow_code=allow_code
    )
    # an own model may have others
    knows_start = stored_run.header()["checkpoint"] == task.header("")["checkpoint"]
    shuffles = all(NULLS[name].shuffles for name in request.null.names)
    if not knows_start and not shuffles:
        raise UsageError(
            f"model must have the weights that {path} started from to measure null 'fresh'; got others. "
            "Pass the model as it was before the run."
        )
    if round == "last":
        checkpoint = stored_run.rounds[-1]
    else:
        checkpoint = int(round)
    context = {
        "run": Path(path).name,
        "algorithm": task.config.federation.algorithm,
        "seed": task.config.execution.seed,
        "round": checkpoint,
        "model": which,
    }
    command = command or f"diagnose {path}"
    return _at_models(task, models, request, context, command, knows_start)


def diagnose_models(
    task: Task,
    models: Mapping[str, Any],
    metrics: Sequence[str] = DEFAULT,
    *,
    context: Mapping[str, Any],
    command: str = "diagnose",
    **options: Any,
) -> Report:
    """Diagnose models of a task's clients, each on its own client's training data.

    Args:
        task: the data, the loss and the configuration of a run.
        models: {client: model}, of some or all clients.
        metrics: registry names, or ``package.module:function``.
        context: {column: value} for all rows.
        command: name of the command, for the header.
        options: further arguments of :func:`diagnose`. The task's model need not have the weights that training
            started from.

    Raises:
        UsageError: a client is not in the data, or as :func:`diagnose`.
    """
    return _at_models(task, models, Request.of(metrics, options), context, command)


def _at_models(
    task: Task,
    models: Mapping[str, Any],
    request: Request,
    context: Mapping[str, Any],
    command: str,
    knows_start: bool = False,
) -> Report:
    """Diagnose models of a task's clients, also on the nulls that the request names.

    Args:
        task, models, context, command: as for :func:`diagnose_models`.
        request: the other arguments, checked.
        knows_start: whether the task's model has the weights that training started from.

    Raises:
        UsageError: a client is not in the data, or as for :func:`diagnose`.
    """
    for name in models:
        check_known("client of the data", name, task.data.names)

    def measured(on: Task, uses_trained: bool, request: Request) -> Report:
        if uses_trained:
            null_models = models
        else:
            null_models = dict.fromkeys(models, task.model)
        return _diagnose(on, null_models, request, context, command, knows_start)

    return _with_nulls(task, measured, request, kept=True)


def _with_nulls(
    task: Task,
    measured: Callable[[Task, bool, Request], Report],
    request: Request,
    kept: bool = False,
) -> Report:
    """Return the report of a measurement, with the rows of the request's nulls, if any.

    Args:
        task: the task of the measurement. A null changes its data.
        measured: (task, whether its models are trained, request) -> the report.
        request: the arguments, with the nulls.
        kept: as in :func:`diagnostics.null.rows_of_nulls`.
    """
    nulls, real_request = request.null, replace(request, null=NO_NULLS)
    report = measured(task, True, real_request)
    if not nulls.names:
        return report

    def rows_of(null: str, draw: int) -> pd.DataFrame:
        data = null_data(task.data, null, task.config.execution.seed, draw)
        uses_trained = NULLS[null].shuffles
        null_request = replace(real_request, resamples=0)
        return measured(replace(task, data=data), uses_trained, null_request).frame

    return report.with_rows(rows_of_nulls(nulls, rows_of, kept))


def diagnose_task(
    task: Task,
    metrics: Sequence[str] = DEFAULT,
    *,
    command: str = "",
    clients: Sequence[str] | None = None,
    **options: Any,
) -> Report:
    """Diagnose after every client's first round of local training from the common start.

    PLayer-FL measures at this point. The round is one epoch, unless the configuration has more. The rows also hold what
    training itself measured in its first epoch: federation sensitivity, variant ``training``. PLayer-FL decides on that
    variant. It was measured in the task's own layers, so it is missing if ``by`` or ``layering`` asks for others. The
    options ``tensors`` and ``reduce`` of federation sensitivity hold for it too.

    Args:
        task: the data, the model and the configuration of a run.
        metrics: registry names, or ``package.module:function``.
        command: name of the command, for the header. Default: diagnose.
        clients: the only clients that train and are measured. Default: all. Their values do not depend on this choice.
        options: further arguments of :func:`diagnose`. Each draw of a ``null`` trains and measures again. ``fresh`` has
            one draw and needs no training.

    Raises:
        UsageError: as :func:`diagnose`.
    """
    request = Request.of(metrics, options)
    names = [c.name for c in task.data.clients if len(c.train)]
    full_request, _ = _for_task(task, request, names)
    full_request.check(  # before training
        full_request.layering
        or layers_of(task.model, example(task.data.shape), by=full_request.by)
    )

    def measured(task_to_measure: Task, trained: bool, request: Request) -> Report:
        measuring = _of_start
        if trained:
            measuring = _of_first_training
        return measuring(task_to_measure, request, clients, command or "diagnose")

    return _with_nulls(task, measured, request)


def _of_start(
    task: Task, request: Request, clients: Sequence[str] | None, command: str
) -> Report:
    names = task.data.names
    chosen_clients = as_list("clients", names if clients is None else clients)
    for name in chosen_clients:
        check_known("client", name, names)
    models = {name: task.model for name in names if name in chosen_clients}
    context = {"seed": task.config.execution.seed, "round": 0, "model": "global"}
    return _diagnose(task, models, request, context, command)


def _of_first_training(
    task: Task, request: Request, clients: Sequence[str] | None, command: str
) -> Report:
    """Train each client's first round from the common start, and return a report on it.

    The report also has the federation sensitivity of training. This is left out if that
    metric was not asked for, or in other layers than the task's.

    Args:
        task, clients, command: as for :func:`diagnose_task`.
        request: the other arguments, checked.
    """
    if clients is None:
        training_arguments = {}
    else:
        training_arguments = {"clients": clients}
    options = request.options.get(SENSITIVITY, {})
    sensitivity_options = {
        name: options[name] for name in ("tensors", "reduce") if name in options
    }
    observers = {
        **instruments().observers,
        SENSITIVITY: partial(SensitivityAccumulator, **sensitivity_options),
    }
    models, measurements = runner.train_first_round(
        task, observers, **training_arguments
    )
    context = {"seed": task.config.execution.seed, "round": 0, "model": "local"}
    report = _diagnose(task, models, request, context, command)
    # the common start
    report = replace(
        report, header={**report.header, "checkpoint": task.header("")["checkpoint"]}
    )
    if SENSITIVITY not in report.header["metrics"] or report.layers != tuple(
        task.layers
    ):
        return report
    weights = {client.name: len(client.train) for client in task.data.clients}
    sizes = {name: t.numel() for name, t in tree.named_tensors(task.model).items()}
    training_rows = recorded_rows(
        measurements,
        task.layers,
        n_train=weights,
        sizes=sizes,
        resamples=request.resamples,
        seed=task.config.execution.seed,
        **sensitivity_options,
    )
    reported_layers = set(report.frame["layer"])
    training_table = rows.frame(
        {**row, **context, "split": "train"}
        for row in training_rows
        if row["variant"].startswith("training") and row["layer"] in reported_layers
    )
    return report.with_rows(training_table)


def _diagnose(
    task: Task,
    models: Mapping[str, Any],
    request: Request,
    context: Mapping[str, Any],
    command: str = "",
    knows_start: bool = True,
) -> Report:
    absent_clients = [
        client.name for client in task.data.clients if client.name not in models
    ]
    if not models:
        raise UsageError(
            f"There are no models to diagnose. Clients without one: {listing(absent_clients)}."
        )
    data = {c.name: c.train for c in task.data.clients if c.name in models}
    layout = getattr(task.data.shape, "layout", None)
    if layout is not None:
        models = {name: adapt(model, layout) for name, model in models.items()}
    round_number = int(context.get("round") or 0)
    full_request, splits = _for_task(task, request, models, knows_start, round_number)
    report = measure_models(models, data, replace(full_request, context=context))
    facts = {
        name: report.header[name] for name in ("layers", "checkpoint")
    }  # what was measured, not what was trained
    header = {
        **report.header,
        **task.header(command),
        **facts,
        "absent": absent_clients,
    }
    if report.header["loss"] != task.criterion.name:  # another than that of training
        header |= {"loss": report.header["loss"], "trained_with": task.criterion.name}
    split = report.table["metric"].map(splits)
    return Report(report.table.assign(split=split), header)


def _for_task(
    task: Task,
    request: Request,
    clients: Collection[str],
    knows_start: bool = True,
    round: int = 0,
) -> tuple[Request, dict[str, str]]:
    """Return the request completed by the task, and each metric's split of samples.

    Args:
        task: the run's task. Its loss, seed and layers are used where the request has
            none.
        request: the arguments, checked.
        clients: names of the clients that are measured.
        knows_start: whether the task's model has the weights of the common start.
        round: the round of the models.

    Returns:
        The request, and ``train``, ``validation`` or ``probe`` for each metric by name.
    """
    run_options = {"round": round, "training": Training.of(task.config.training)}
    options, splits = {}, {}
    validation = {
        c.name: (c.validation.x, c.validation.y)
        for c in task.data.clients
        if c.name in clients
    }
    for metric in request.metrics:
        name = metric.name
        values = options[name] = dict(request.options[name])
        splits[name] = "train"
        for key in run_options.keys() & metric.options.keys() if metric.shared else ():
            values.setdefault(key, run_options[key])
        if "start" in metric.options and knows_start:
            values.setdefault("start", task.model)
        if "probe" in metric.options:
            splits[name] = "probe"
            if values.get("probe") is None:
                values["probe"] = probe_set(task.data, values.pop("samples", PROBE))
                splits[name] = "validation"
        if (
            "test" in metric.options
        ):  # a probe is judged on what its client did not train on
            if values.get("test") is not None:
                splits[name] = "probe"
            elif "folds" not in values and all(len(y) for _, y in validation.values()):
                values["test"], splits[name] = validation, "validation"
    granularity = task.config.model.layer_granularity
    granularity_of_layers, loss, seed = (
        request.by or granularity,
        request.loss,
        request.seed,
    )
    if loss is None:
        loss = task.criterion
    elif isinstance(loss, str) and isinstance(task.criterion, losses.Standardised):
        loss = replace(task.criterion, base=losses.build(loss))
    return replace(
        request,
        options=options,
        by=granularity_of_layers,
        layering=request.layering
        or (task.layers if granularity_of_layers == granularity else None),
        loss=loss,
        seed=task.config.execution.seed if seed is None else seed,
    ), splits
