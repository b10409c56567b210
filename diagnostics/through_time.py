"""Layers through time: one measurement after several rounds, as one report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diagnostics.metrics.base import METRIC_ALIASES
from fl_core import rows, tree
from fl_core.data.federated import FederatedData
from fl_core.errors import (
    UsageError,
    as_list,
    at_least,
    check_known,
    check_value,
    listing,
)
from fl_core.progress import Cell, progress_bar
from fl_core.records.store import Run
from fl_core.rounds.engine import Listener
from fl_core.rounds.recorder import Recorder, Timer
from fl_core.run.restore import copy_with, load_rounds
from fl_core.run.task import Task
from fl_core.seeds import seed_of
from fl_core.storage import json_bytes, sha

from .measure import (
    check_which,
    diagnose,
    diagnose_models,
    diagnose_task,
    model_for,
    own_parts,
)
from .metrics.base import METRICS
from .null import mark_null, null_data
from .report import Report

if TYPE_CHECKING:
    from fl_core.rounds.engine import Engine

GRADIENTS, PROBE, MOVED = "grad_similarity", "knn_probe", "weight_divergence"
"""The metrics of the layer map: at the global model, and after one more local round from it."""
MAP, NULL = (GRADIENTS, PROBE, MOVED), "clients"
ROUNDS, CLIENTS, DRAWS = 6, 20, 4
"""What a layer map measures at most, unless said otherwise: rounds, clients, and draws of the null."""
WATCHED = 8
"""The clients that are measured while a run trains, at most.

Metrics of the shared model are measured at all clients.
"""
LEAST_DRAWS = at_least(2)
SUFFIX = "-time"
"""The suffix of the folder with a run's rows, after the run's name."""


def through_time(
    models: Any,
    metrics: str | Sequence[str] | None = None,
    data: Any = None,
    *,
    model: Any = "local",
    rounds: int | Sequence[int] | None = None,
    clients: str | Sequence[str] | None = None,
    draws: int = DRAWS,
    out: Path | str | None = None,
    progress: bool = True,
    live: bool = False,
    **options: Any,
) -> Report:
    """Measure the layers after several rounds, and return all rows in one report.

    >>> import fedlayers as fl
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> result = fl.run(dataset="heart", rounds=2, out=f"{folder.name}/heart", progress=False)
    >>> report = fl.through_time(f"{folder.name}/heart", ["weight_divergence"], progress=False)
    >>> sorted(report.frame["round"].unique().tolist())
    [1, 2]

    Args:
        models: a run directory, or what ``fl.run`` returned; or models from elsewhere, {round: {client: model}}.
        data: the clients' samples for models from elsewhere, as in :func:`fl.diagnose <diagnostics.measure.diagnose>`.
            For a run directory: your own data again, if the run was given them.
        metrics: names of metrics. Without any, those of the layer map are measured: the clients' gradients and
            nearest neighbours at the global model, and their weights after one more local round from it, each with
            ``draws`` of the null ``clients``. Models that differ between clients have
            no such null. Models from elsewhere are measured as they are, without a null.
        model: the kind of a run's models, if metrics are named: local, personal or global.
        rounds, clients: the rounds and the clients to measure. Default: all; for the layer map at most 6 and 20,
            evenly spaced.
        draws: draws of the layer map's null, at least 2.
        out: the folder in which rows of a run are kept, round by round. A second call
            with the same ``metrics``, ``model``, ``clients``, ``draws`` and ``options``
            reads them. Default: next to the run, with ``-time`` after its name. No rows
            are kept if ``options`` have objects that only Python knows, such as modules
            or loaders.
        progress: show a bar of the rounds.
        live: draw what is measured so far in the notebook's cell, again at most once a second.
        options: further arguments of :func:`fl.diagnose <diagnostics.measure.diagnose>`; for your own code also
            ``own_model`` and ``allow_code``.

    Raises:
        UsageError: as :func:`fl.diagnose <diagnostics.measure.diagnose>`, a round or a
            client is unknown, or the run has no stored rounds. Or ``out`` or ``clients``
            is given for models from elsewhere, or ``out`` with options whose rows
            cannot be kept.
    """
    check_value("draws", draws, LEAST_DRAWS)
    check_which(model)
    if metrics is None:
        names = ()
    else:
        names = as_list("metrics", metrics)
    if clients is not None:
        clients = as_list("clients", clients)
    path = getattr(models, "path", models)
    if isinstance(path, str | Path):
        run = Run(path)
        stored_rounds: Sequence[int] = [number for number in run.rounds if number]
        request = {"run": run.id, "model": model, "draws": draws}
    elif isinstance(models, Mapping) and all(isinstance(n, int) for n in models):
        stored_rounds, request = sorted(models), {}
        for name, value in (("out", out), ("clients", clients)):
            if value is not None:
                raise UsageError(
                    f"{name} must be left out for models from elsewhere; got {value!r}. "
                    "Pass the clients to measure, and keep the rows by report.write."
                )
    else:
        models_type = type(models).__name__
        raise UsageError(
            "models must be a run directory or {round: {client: model}}; got "
            f"{models_type}. Pass out= to fl.run to store its rounds."
        )
    if rounds is None:
        if names:
            rounds = stored_rounds
        else:
            rounds = spaced(stored_rounds, ROUNDS)
    rounds = as_list("rounds", rounds)
    for number in rounds:
        check_known("round", str(number), map(str, stored_rounds))
    objects = own_parts(models, data, options, options.get("loss"))
    request |= {"metrics": names or (MAP, CLIENTS), "clients": clients}
    request |= {"options": options}
    file, unknown_types = None, set[str]()
    if isinstance(path, str | Path):
        texts = {
            key: repr(_with_digests(value, unknown_types))
            for key, value in request.items()
        }
        if unknown_types and out is not None:
            type_names = listing(sorted(unknown_types))
            raise UsageError(
                "out must be left out for options with objects that only Python knows; "
                f"got {type_names}. Keep the rows by report.write."
            )
        if not unknown_types:
            folder = Path(out or Path(path).with_name(Path(path).name + SUFFIX))
            digest = sha(json_bytes(texts))[:8]
            file = folder / f"rows-{digest}.jsonl"
    report = None
    if file is not None and file.exists():
        report = Report.read(file)
    if report is None:
        measured_rounds = set()
    else:
        measured_rounds = set(report.frame["round"])
    remaining_rounds = [number for number in rounds if number not in measured_rounds]

    def chosen(models_of_round: Mapping[str, Any], most: int) -> dict[str, Any]:
        for name in clients or ():
            check_known("client", name, models_of_round)
        names_chosen = clients or spaced(list(models_of_round), most)
        return {
            name: client_model
            for name, client_model in models_of_round.items()
            if name in names_chosen
        }

    def measured() -> Iterator[tuple[int, Report]]:
        if not request.get("run"):
            for number in remaining_rounds:
                settings = {**options.get("options", {}), "context": {"round": number}}
                arguments = {**options, "options": settings, "progress": False}
                yield number, diagnose(models[number], data, names or MAP, **arguments)
            return
        if names:
            model_kinds = (model_for(names, model),)
        else:
            model_kinds = ("global", "personal", "local")
        for number, kind, round_models, task in load_rounds(
            path, remaining_rounds, model_kinds, **objects
        ):
            round_models = chosen(round_models, len(round_models) if names else CLIENTS)
            context = {"round": number, "model": kind, "run": Path(path).name}
            context["seed"] = task.config.execution.seed
            digests = {
                tree.digest(tree.state_dict(client_model))
                for client_model in round_models.values()
            }
            one_model = kind == "global" or len(round_models) > len(digests) == 1
            if names or not one_model:
                diagnosis_arguments = {"context": context, "progress": False, **options}
                round_report = diagnose_models(
                    task, round_models, names or MAP, **diagnosis_arguments
                )
            else:
                round_report = _with_null(task, round_models, context, draws, options)
            plan = run.plan()
            yield (
                number,
                replace(round_report, header={**round_report.header, "plan": plan}),
            )

    with progress_bar(
        len(remaining_rounds), "through time", "round", shown=progress
    ) as bar:
        cell = Cell()
        for number, measured_report in measured():
            if report is None:
                report = measured_report
            else:
                report = _joined(report, measured_report)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                report.write(file)
            if live and (cell.due or number == remaining_rounds[-1]):
                if names:
                    picture = report.plot(names[0])
                else:
                    picture = report.layer_map()
                cell.show_figure(picture)
            bar.update()
    if report is None:
        raise UsageError(f"{path} must have stored rounds; got none. Train it first.")
    return report.of_rounds(rounds)


def _with_digests(value: Any, unknown_types: set[str]) -> Any:
    """Return an option with digests in place of its arrays, for a text that identifies it.

    Args:
        value: the option. Arrays may stand inside lists, tuples, mappings and dataclasses.
        unknown_types: receives the types of objects that have no such text.
    """
    if isinstance(value, Mapping):
        return {
            key: _with_digests(entry, unknown_types) for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        entries = [_with_digests(entry, unknown_types) for entry in value]
        return tuple(entries) if isinstance(value, tuple) else entries
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: getattr(value, part.name) for part in fields(value)}
        return type(value).__name__, _with_digests(parts, unknown_types)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        return tree.digest({"": value})
    if not isinstance(value, str | bool | int | float | Path | np.generic | None):
        unknown_types.add(type(value).__name__)
    return value


class Measuring(Listener):
    """A listener of a run that measures the locally trained models of a few clients, and records the rows.

    If the metrics read the shared model, it measures the server's model at all clients.

    Args:
        task: the run's task. Its configuration names the metrics.

    Raises:
        UsageError: a metric is not registered, or some metrics read the shared model
            and others the local models.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.metrics = task, tuple(task.config.execution.measure or ())
        for name in self.metrics:  # and no code that a stored run could name
            check_known("metric", METRIC_ALIASES.get(name, name), METRICS.names())
        if self.metrics:
            model_for(self.metrics, "local")

    def after_round(self, engine: Engine) -> None:
        """Measure the models if the schedule asks for it.

        It does so after every ``measure_every`` rounds, and after the last one.
        Nothing is measured if no client has a locally trained model.
        """
        if not engine.done or not engine.schedule.measures(engine.done):
            return
        trees = dict(engine.clients.kept.get("local", {}))
        names = spaced(list(trees), WATCHED)
        if not names:
            return
        model = model_for(self.metrics, "local")
        if model == "global":
            names = list(engine.names)
            trees = dict.fromkeys(names, engine.server.trees["model"])
        with engine.listener(Timer).charge("evaluate"):
            models = {name: copy_with(self.task.model, trees[name]) for name in names}
            report = diagnose_models(
                self.task,
                models,
                self.metrics,
                context={"round": engine.done, "model": model},
                progress=False,
            )
            engine.listener(Recorder).add(rows.records(report.frame))


def spaced(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` items, evenly spaced, with the first and the last.

    If ``most`` is 1, it is the first one.
    """
    places = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[k] for k in places]


def _with_null(
    task: Task,
    models: Mapping[str, Any],
    context: Mapping[str, Any],
    draws: int,
    options: Mapping[str, Any],
) -> Report:
    """Measure the layer map's metrics at one model for all clients, and again on the null ``clients``."""
    shared_model = next(iter(models.values()))
    seed = seed_of(task.config.execution.seed, "through time", context["round"])
    arguments: dict[str, Any] = {"progress": False, **options}
    kept_context = {key: context[key] for key in ("round", "run")}

    def on(data: FederatedData) -> tuple[Report, Report]:
        null_task = replace(task, data=data, model=shared_model)
        # a client's own training samples shaped the model: at them, gradients of clients that do not differ agree
        # less than those of samples dealt at random, and the null would not hold
        clients = tuple(
            replace(client, train=client.validation) for client in data.clients
        )
        validation_task = replace(null_task, data=replace(data, clients=clients))
        fixed_report = _joined(
            diagnose_models(
                validation_task, models, [GRADIENTS], context=context, **arguments
            ),
            diagnose_models(null_task, models, [PROBE], context=context, **arguments),
        )
        moved_report = diagnose_task(
            null_task, [MOVED], clients=list(models), **arguments
        )
        return fixed_report, replace(
            moved_report, table=moved_report.table.assign(**kept_context)
        )

    report, nulls = _joined(*on(task.data)), []
    for draw in range(1, draws + 1):
        fixed_report, moved_report = on(null_data(task.data, NULL, seed, draw))
        nulls.append(mark_null(fixed_report.frame, NULL, draw, kept=True))
        nulls.append(mark_null(moved_report.frame, NULL, draw))
    return report.with_rows(*nulls)


def _joined(report_a: Report, report_b: Report) -> Report:
    """Return one report with the rows of two reports of the same layers.

    Its header is the second one's, with the metrics of both.
    """
    names = {**report_a.header["metrics"], **report_b.header["metrics"]}
    joined_report = report_a.with_rows(report_b.table)
    return replace(joined_report, header={**report_b.header, "metrics": names})
