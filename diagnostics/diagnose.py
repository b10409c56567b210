"""One call from models and data to tidy rows: :func:`diagnose`, and the :class:`Report` that it gives."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from diagnostics import gradients, sensitivity, similarity
from diagnostics.capture import Batch, Data, batches, untouched
from diagnostics.gradients import GradientMetric, Subject, Tick, placed, quiet
from diagnostics.hessian import hessian_trace
from fl_core import losses, rows, tree
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer, layers_of
from fl_core.losses import Loss
from fl_core.plan import layer_from_json
from fl_core.rows import Row, row
from fl_core.seeds import seed_of, torch_seeded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTEXT = ("run", "algorithm", "seed", "round", "model", "split")
"""Columns that only the caller knows."""
_COMMON = ("subjects", "layers", "loss", "batch", "seed", "mode", "tick")


@dataclass(frozen=True)
class Metric:
    """A metric by name.

    Attributes:
        compute: ``compute(subjects, layers, *, loss, batch, seed, mode, tick, **options) -> list[Row]``.
        description, direction: one line each; the direction says what a higher value means.
        variants: of its rows, the default first.
        shared: gives, for the same options, what reads a pass over the gradients together with other metrics.
        pairs: whether a value belongs to two clients.
    """

    name: str
    compute: Callable[..., list[Row]]
    description: str
    direction: str
    variants: tuple[str, ...]
    shared: Callable[..., GradientMetric | None] | None = None
    pairs: bool = False

    @property
    def variant(self) -> str:
        """The default variant."""
        return self.variants[0]

    @property
    def options(self) -> dict[str, Any]:
        """Names and defaults of the metric's own options."""
        parameters = inspect.signature(self.compute).parameters
        return {name: p.default for name, p in parameters.items() if name not in _COMMON}


def hessian_rows(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss,
    batch: int = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    estimator: str = "auto",
    probes: int = 32,
    dtype: torch.dtype | None = None,
) -> list[Row]:
    """Two rows a client and layer: the trace of the layer's Hessian block over its parameters' number, and undivided.

    Both are signed; PLayer-FL, Eq. A.2, divided by the number of parameters as its section 5.1 says. The options are
    those of :func:`diagnostics.hessian.hessian_trace`.
    """
    found: list[Row] = []
    for subject in subjects:
        options: dict[str, Any] = {"estimator": estimator, "probes": probes, "dtype": dtype, "mode": mode}
        data = _Placed(subject, batch)
        for result in hessian_trace(subject.model, data, layers, loss=loss, batch=batch, seed=seed, **options):
            ok = result.status == "ok"
            for variant, value, stderr in (
                ("per_parameter", result.per_parameter, result.stderr_per_parameter),
                ("absolute", result.trace, result.stderr),
            ):
                found.append(
                    row(
                        "hessian_trace",
                        value if ok else None,
                        status=result.status,
                        client=subject.client,
                        layer=result.layer,
                        variant=variant,
                        stderr=stderr if ok else None,
                        estimator=result.estimator,
                        unit="loss/weight^2",
                        n_params=result.n_params,
                        n_samples=result.n_samples,
                        n_train=subject.n_train,
                    )
                )
        tick(subject.client)
    return found


class _Placed:
    """A subject's batches, where its model is and in the model's type."""

    def __init__(self, subject: Subject, batch: int) -> None:
        self._subject, self._batch = subject, batch

    def __iter__(self) -> Iterator[Batch]:
        for x, y in batches(self._subject.data, self._batch):
            x = placed(self._subject.model, x)
            yield x, y.to(x.device)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "grad_variance",
            gradients.grad_variance,
            "variance over the entries of a layer's weight gradient",
            "higher = the entries of the gradient are spread wider",
            gradients.REDUCTIONS,
            shared=gradients.GradVariance,
        ),
        Metric(
            "hessian_trace",
            hessian_rows,
            "trace of a layer's block of the loss's Hessian, exact where the network allows it",
            "higher = the loss curves more upwards in the layer's weights",
            ("per_parameter", "absolute"),
        ),
        Metric(
            "cka",
            similarity.cka,
            "linear CKA between the clients' representations of the same samples",
            "higher = more similar; 1 = same",
            ("flatten",),
            pairs=True,
        ),
        Metric(
            "federation_sensitivity",
            sensitivity.federation_sensitivity,
            "importance of the layers up to one, relative to the first layer",
            "higher = the layers up to here matter more to the loss; 1 at the first layer",
            (*sensitivity.WHEN, "importance"),
            shared=sensitivity.sharing,
        ),
    )
}


@dataclass(frozen=True, eq=False)
class Report:
    """What a diagnosis found: rows of the one schema, and the header that says of what."""

    frame: pd.DataFrame
    header: dict[str, Any]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers of the model, from input to output, with their tensors."""
        return tuple(layer_from_json(item) for item in self.header["layers"])

    def values(self, metric: str, variant: str | None = None) -> pd.DataFrame:
        """Values of one metric, layers x clients; NaN where there is none (the frame's status says why).

        Of a metric of pairs: each client's mean over the others. Default variant: the metric's first that was measured.

        Raises:
            UsageError: a metric or variant that was not measured.
        """
        found = self._rows(metric)
        present = list(dict.fromkeys(found["variant"]))
        if variant is None:
            preferred = METRICS[metric].variants if metric in METRICS else ()
            variant = next((name for name in preferred if name in present), present[0])
        check_known(f"variant of {metric}", variant, present)
        found = found[found["variant"] == variant]
        paired = found[found["client_b"] != ""]
        found = pd.concat([found, paired.assign(client=paired["client_b"])])
        found = found[found["client"] != ""]
        table = found.groupby(["layer", "client"], sort=False)["value"].mean(skipna=False).unstack()
        order = [layer.name for layer in self.layers if layer.name in table.index]
        return table.reindex(index=order, columns=list(dict.fromkeys(found["client"])))

    def cka(self, layer: str) -> pd.DataFrame:
        """CKA between all clients at one layer, clients x clients, symmetric, with ones on the diagonal.

        Raises:
            UsageError: CKA was not measured, there or at all.
        """
        found = self._rows("cka")
        check_known("layer", layer, dict.fromkeys(found["layer"]))
        found = found[found["layer"] == layer]
        names = [name for name in dict.fromkeys([*found["client"], *found["client_b"]]) if name]
        if not names:
            raise UsageError(f"no CKA at layer {layer!r}: {found['status'].iloc[0]}")
        matrix = pd.DataFrame(np.eye(len(names)), index=names, columns=names)
        for a, b, value in zip(found["client"], found["client_b"], found["value"], strict=True):
            matrix.loc[a, b] = matrix.loc[b, a] = value
        return matrix

    def plot(self, metric: str, ax: Axes | None = None) -> Axes:
        """One metric drawn over the layers."""
        from diagnostics import plots

        self._rows(metric)
        return plots.metric(self.frame, metric, ax)

    def write(self, path: Path | str) -> None:
        """Write header and rows as JSON lines."""
        records = self.frame.astype(object).where(self.frame.notna(), None).to_dict("records")
        rows.write(Path(path), self.header, ({str(name): value for name, value in r.items()} for r in records))

    @classmethod
    def read(cls, path: Path | str) -> Report:
        """Read what :meth:`write` wrote.

        Raises:
            UsageError: no such file, or not a diagnosis; CorruptError: a damaged line.
        """
        header, frame = rows.read(Path(path))
        if "layers" not in header:
            raise UsageError(f"{path} is not a diagnosis: its header names no layers")
        return cls(frame, header)

    def _rows(self, metric: str) -> pd.DataFrame:
        check_known("metric of this report", metric, dict.fromkeys(self.frame["metric"]))
        return self.frame[self.frame["metric"] == metric]

    def __repr__(self) -> str:
        clients = len({name for name in self.frame["client"] if name})
        metrics = ", ".join(dict.fromkeys(self.frame["metric"]))
        missing = int((self.frame["status"] != "ok").sum())
        return f"Report({metrics}; {len(self.layers)} layers, {clients} clients, {missing} rows without a value)"


def diagnose(
    models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    data: Any,
    metrics: Sequence[str] = ("grad_variance", "hessian_trace", "cka", "federation_sensitivity"),
    *,
    loss: Loss | str | None = None,
    layers: Sequence[str] | None = None,
    probe: Data | None = None,
    by: str = "block",
    batch: int = 256,
    seed: int = 0,
    mode: str = "eval",
    n_train: int | Sequence[int] | Mapping[str, int] | None = None,
    progress: bool = True,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    context: Mapping[str, Any] | None = None,
) -> Report:
    """Measure ``metrics`` on clients' models; the models and torch's random state are left as they were.

    Args:
        models: one model, a list, or {client: model}; all with the same tensors. Clients without names are called
            client_0, client_1 and so on.
        data: a pair (x, y), an object with such ``x`` and ``y``, or a re-iterable loader; or one of these for each
            client, as a list or {client: data}. One model may be measured on many clients' data, and many on one.
        metrics: names in :data:`METRICS`. Those that read gradients share one pass over the data.
        loss: default cross-entropy.
        layers: exact names of the layers to report; default all of the model's.
        probe: the samples of CKA; default the first 512 of the clients' data, equally many of each.
        by: how tensors are grouped into layers, see :func:`fl_core.layers.layers_of`.
        batch: samples at a time; a loader's own batches are left as they are.
        seed: of everything that is drawn.
        mode: ``"eval"`` or ``"train"``.
        n_train: training samples of each client, its weight in combined rows; default the samples of its data.
        progress: show a bar.
        options: of single metrics, {metric: {option: value}}.
        context: columns for all rows: run, algorithm, seed, round, model, split.

    Raises:
        UsageError: an unknown name or option, numbers or names of models and data that do not agree, models that
            differ in their tensors, or data that do not fit.
    """
    chosen = [METRICS[check_known("metric", name, METRICS)] for name in dict.fromkeys(metrics)]
    settings = _settings(chosen, options or {}, probe)
    for name in context or {}:
        check_known("column of the context", name, CONTEXT)
    check_known("mode", mode, ("eval", "train"))
    criterion = _loss(loss)
    subjects, n_models = _subjects(models, data, n_train, seed)
    with untouched(*{id(s.model): s.model for s in subjects}.values()):
        with torch_seeded(seed_of(seed, "diagnose", "example")):
            x, _ = next(batches(subjects[0].data, 2))
        every = layers_of(subjects[0].model, placed(subjects[0].model, x[:2]), by=by)
        names = [layer.name for layer in every]
        wanted = {check_known("layer", name, names) for name in (names if layers is None else layers)}
        kept = [layer for layer in every if layer.name in wanted]
        together = {m.name: r for m in chosen if m.shared and (r := m.shared(**settings[m.name]))}
        common: dict[str, Any] = {"loss": criterion, "batch": batch, "seed": seed, "mode": mode}
        tasks = (bool(together) + len(chosen) - len(together)) * len(subjects)
        found: list[Row] = []
        with tqdm(total=tasks, desc="diagnose", disable=not progress, leave=False) as bar:

            def tick(label: str) -> Tick:
                def done(client: str) -> None:
                    bar.set_postfix_str(f"{label} {client}".rstrip(), refresh=False)
                    bar.update()

                return done

            if together:
                readers = list(together.values())
                found += gradients.measure(subjects, every, readers, tick=tick(" + ".join(together)), **common)
            for metric in chosen:
                if metric.name not in together:
                    # a single model has no pair, however many clients it is measured on
                    whom = subjects[:n_models] if metric.pairs else subjects
                    which = every if metric.shared else kept  # what is relative to the first layer needs all of them
                    found += metric.compute(whom, which, tick=tick(metric.name), **common, **settings[metric.name])
    place = {metric.name: k for k, metric in enumerate(chosen)}
    found = sorted((r for r in found if r["layer"] in wanted), key=lambda r: place[r["metric"]])
    columns = {"seed": seed, **(context or {})}
    header = {
        "schema": rows.SCHEMA,
        "version": version("fedlayers"),
        "command": "diagnose",
        "seed": seed,
        "model": type(subjects[0].model).__name__,
        "layers": [asdict(layer) for layer in every],
        "data": _digest({s.client: _data_digest(s.data) for s in subjects}),
        "checkpoint": _digest({s.client: tree.digest(tree.live(s.model)) for s in subjects}),
        "metrics": {name: {key: _plain(value) for key, value in own.items()} for name, own in settings.items()},
        "loss": criterion.name,
        "mode": mode,
        "by": by,
        "batch": batch,
    }
    return Report(rows.frame({**r, **columns} for r in found), json.loads(rows.dumps(header)))


def _settings(
    chosen: Sequence[Metric], options: Mapping[str, Mapping[str, Any]], probe: Data | None
) -> dict[str, dict[str, Any]]:
    """The checked options of each chosen metric."""
    settings: dict[str, dict[str, Any]] = {metric.name: {} for metric in chosen}
    for name, own in options.items():
        check_known("metric with options", name, settings)
        for option in own:
            check_known(f"option of {name}", option, METRICS[name].options)
        settings[name].update(own)
    if probe is not None and "cka" in settings:
        settings["cka"]["probe"] = probe
    return settings


def _loss(loss: Loss | str | None) -> Loss:
    if isinstance(loss, Loss):
        return loss
    if loss is None or isinstance(loss, str):
        return losses.build(loss or "cross_entropy")
    raise UsageError(f"loss must be a name or one of fl_core.losses, not {type(loss).__name__}")


# --- who is measured on what -----------------------------------------------------------------------------------


def _subjects(models: Any, data: Any, n_train: Any, seed: int) -> tuple[list[Subject], int]:
    """The subjects, and the number of models that were given."""
    model_names, own_models = _listed("models", models, isinstance(models, nn.Module))
    data_names, own_data = _listed("data", data, _is_one(data))
    for model in own_models:
        if not isinstance(model, nn.Module):
            raise UsageError(f"models must be torch modules; one of them is {type(model).__name__}")
    m, d = len(own_models), len(own_data)
    if m != d and 1 not in (m, d):
        raise UsageError(f"{m} models and {d} sets of data; give as many of each, or one of either")
    if model_names and data_names and m == d:
        for name in model_names:
            check_known("client with data", name, data_names)
        own_data = [own_data[data_names.index(name)] for name in model_names]
    count = max(m, d)
    names = next(
        (own for own in (model_names, data_names) if own and len(own) == count), [f"client_{k}" for k in range(count)]
    )
    own_models, own_data = own_models * (count // m), own_data * (count // d)
    first = tree.live(own_models[0])
    for name, model in zip(names, own_models, strict=True):
        tree.check_same(first, tree.live(model), f"the model of client {names[0]!r}", f"that of client {name!r}")
    return [
        Subject(name, model, own, _n_train(n_train, name, k, count, own, seed))
        for k, (name, model, own) in enumerate(zip(names, own_models, own_data, strict=True))
    ], m


def _listed(what: str, given: Any, one: bool) -> tuple[list[str], list[Any]]:
    """Names (none for a list) and items."""
    if one:
        return [], [given]
    items = list(given.values()) if isinstance(given, Mapping) else list(given)
    if not items:
        raise UsageError(f"no {what} given")
    return [str(name) for name in given] if isinstance(given, Mapping) else [], items


def _is_one(data: Any) -> bool:
    """Whether this is one client's data: a pair of tensors or a loader, not a list or mapping of such."""
    if isinstance(data, (list, tuple)):
        return len(data) == 2 and all(isinstance(part, Tensor) for part in data)
    return not isinstance(data, Mapping)


def _n_train(given: Any, name: str, k: int, count: int, data: Data, seed: int) -> int:
    if isinstance(given, Mapping):
        return int(given[check_known("client in n_train", name, given)])
    if isinstance(given, Sequence):
        if len(given) != count:
            raise UsageError(f"n_train has {len(given)} numbers for {count} clients")
        return int(given[k])
    if given is not None:
        return int(given)
    with torch_seeded(seed_of(seed, "diagnose", "count")):
        return sum(len(y) for _, y in batches(data, None))


# --- the header ------------------------------------------------------------------------------------------------


def _data_digest(data: Data) -> str | None:
    """SHA-256 of a pair; None for a loader, whose samples may come in any order."""
    if hasattr(data, "x") and hasattr(data, "y"):
        data = (data.x, data.y)
    if not (isinstance(data, (tuple, list)) and all(isinstance(part, Tensor) for part in data)):
        return None
    return tree.digest(dict(zip("xy", data, strict=True)))


def _digest(clients: Mapping[str, str | None]) -> str:
    """One digest over every client's; empty if one is not known (a loader's data are not read for it)."""
    if None in clients.values():
        return ""
    return hashlib.sha256(json.dumps(clients, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """An option as JSON: of a pair its digest, of anything else that is no JSON its type."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value) if isinstance(value, torch.dtype) else _data_digest(value) or type(value).__name__
    return value
