"""Mixtures of the models of a race: one weight per arm for all clients, fitted on validation samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlayers.studies.race import Entry
from fl_core import __version__, tree
from fl_core.errors import UsageError, listing, plural
from fl_core.limits import format_bytes
from fl_core.mixture import Member, Mixture
from fl_core.models import lora
from fl_core.records import store
from fl_core.restore import allowed_by
from fl_core.scores import CLASSIFICATION
from fl_core.stored_models import load_kind
from fl_core.task import Task
from fl_core.training import evaluate

Array = NDArray[np.float64]
GAP = 1e-6
"""Nats per sample by which fitted weights may lie below the best ones."""
MOST = 200_000
"""Steps of EM, at most. The gap is then at most log(arms) / steps."""
LEAST = 0.001
"""A model with a smaller weight is left out, since a prediction costs all models that are left."""


def fit_weights(logs: Any, weights: Any = None) -> Array:
    """Fit the weights of a mixture by EM to what its models give the true classes.

    The weights w maximise the concave sum_n s_n log(sum_k w_k p_k(y_n | x_n)). A step multiplies w_k by its derivative
    g_k = sum_n s_n p_k / sum_j w_j p_j (Dempster et al. 1977). No weights are better by more than max_k g_k - 1, so EM
    ends where that is at most :data:`GAP`.

    Args:
        logs: log-probabilities [K, n] that K models give the true classes of n samples.
        weights: of the samples, s [n], at least 0 with a positive sum; default all equal.

    Returns:
        The weights [K], at least 0 with sum 1.

    Raises:
        UsageError: no model, no sample, a NaN, or weights that do not fit.

    >>> fit_weights(np.log([[0.9, 0.8, 0.7], [0.1, 0.2, 0.3]])).round(3)
    array([1., 0.])
    """
    logs = np.asarray(logs, dtype=np.float64)
    if logs.ndim != 2 or not logs.size or np.isnan(logs).any():
        raise UsageError(f"log-probabilities must be numbers [models, samples]; got shape {logs.shape} or NaN.")
    given = np.ones(logs.shape[1]) if weights is None else np.asarray(weights, dtype=np.float64)
    if given.shape != logs.shape[1:] or not (given >= 0).all() or not given.sum() > 0:
        raise UsageError(f"sample weights must be {logs.shape[1]} numbers of at least 0; got {given}.")
    top = logs.max(axis=0)
    chances = np.exp(logs - np.where(np.isfinite(top), top, 0))[:, np.isfinite(top) & (given > 0)]
    counts = given[np.isfinite(top) & (given > 0)]  # a sample that every model excludes says nothing
    found = np.full(len(logs), 1 / len(logs))
    for _ in range(MOST if counts.size else 0):
        slopes = chances @ (counts / counts.sum() / (found @ chances))
        if slopes.max() - 1 <= GAP:
            break
        found = found * slopes
    return found / found.sum()


def mixture_log_probabilities(logs: Any, weights: Any) -> Array:
    """Return the log-probabilities [n, C] of a mixture of models.

    Args:
        logs: of the models, [K, n, C]. weights: of the models, [K].

    >>> np.exp(mixture_log_probabilities(np.log([[[0.9, 0.1]], [[0.5, 0.5]]]), [0.25, 0.75])).round(2)
    array([[0.6, 0.4]])
    """
    weights = np.asarray(weights, dtype=np.float64)
    used = weights > 0
    found: Array = np.logaddexp.reduce(np.asarray(logs)[used] + np.log(weights[used])[:, None, None], axis=0)
    return found


# --- of the runs of a race -------------------------------------------------------------------------------------


def check_mix(task: Task) -> None:
    """Refuse a mixture of models without classes, before any training.

    Raises:
        UsageError: names the task.
    """
    if task.data.task != CLASSIFICATION:
        raise UsageError(f"mix must have a task of classes; got {task.data.task}. Leave --mix out.")


def fit_mixture(entries: Sequence[Entry], winner: str) -> Mixture:
    """Fit the weights of a mixture to the finished runs of one seed, on validation samples.

    A sample of a client weighs (training samples) / (validation samples). So EM minimises the mean log loss over
    clients by training samples. The models are the clients' models for prediction, under a stopping rule at their best
    round. An arm is left out if its model gives NaN or infinity, or if its weight is below :data:`LEAST`.

    Args:
        entries: the runs, below ``out``/arms. winner: the name of the arm that the race chose.

    Raises:
        UsageError: no run has a finite log loss, or a client has only a part of a model.
    """
    logs: dict[str, Array] = {}
    sizes: dict[str, int] = {}
    counts = np.empty(0)
    for entry in entries:
        models, task = _models(entry)
        name, clients = entry.arm.name, [client for client in task.data.clients if len(client.validation)]
        logs[name] = np.concatenate([_truths(models[client.name], client.validation, task) for client in clients])
        sizes[name] = max(tree.n_bytes(tree.state_dict(lora.merged(model))) for model in models.values())
        counts = np.concatenate([np.full(n := len(c.validation), len(c.train) / n) for c in clients])
    finite = [entry for entry in entries if np.isfinite(logs[entry.arm.name]).all()]
    table = np.stack([logs[entry.arm.name] for entry in finite]) if finite else np.empty((0, 0))
    weights = fit_weights(table, counts)
    weights = np.where(weights < LEAST, 0, weights)
    weights /= weights.sum()
    members = tuple(
        Member(
            entry.arm.name, float(weight), f"arms/{entry.path.name}", store.Run(entry.path).id, sizes[entry.arm.name]
        )
        for entry, weight in zip(finite, weights, strict=True)
        if weight
    )
    evidence = {
        "seed": entries[0].config.seed,
        "winner": winner,
        "losses": {e.arm.name: -float(np.average(of, weights=counts)) for e, of in zip(finite, table, strict=True)},
        "loss": -float(np.average(mixture_log_probabilities(table[:, :, None], weights)[:, 0], weights=counts)),
        "data": task.data.digest,
        "version": __version__,
    }
    return Mixture(members, evidence=evidence)


def describe_mixture(found: Mixture, out: Path) -> str:
    """Return the weights, the log loss next to the winner's, and the price of a prediction, a line each."""
    said, losses = found.evidence, found.evidence["losses"]
    weights = listing(f"{member.name} {member.weight:.3f}" for member in found.members)
    alone = f"{losses[said['winner']]:.3f}" if said["winner"] in losses else "without a finite value"
    return (
        f"Mixture, seed {said['seed']}: {weights}.\n"
        f"- Log loss on validation samples: {said['loss']:.3f}; of {said['winner']} alone {alone}. "
        "The weights were fitted on these samples.\n"
        f"- A prediction needs {plural(len(found.members), 'model')}, {format_bytes(found.n_bytes)} in all. "
        f"To use it: fedlayers export {out} --out NEW."
    )


def _models(entry: Entry) -> tuple[dict[str, Any], Task]:
    """Return the models with which clients predict, and their task."""
    round = "last" if store.Run(entry.path).stopping_rule() is None else "best"
    own = {"data": entry.config.own_data, "model": entry.config.own_model}
    return load_kind(entry.path, round, None, allow_code=allowed_by(entry.config), **own)[1:]


def _truths(model: Any, samples: Any, task: Task) -> Array:
    """Return the log-probability of each sample's class, [n]."""
    with tree.one_thread():
        outputs = evaluate.predict(model, samples.x)
    logs = task.criterion.logits(outputs).double().log_softmax(dim=1)
    found: Array = logs.gather(1, samples.y[:, None])[:, 0].numpy()
    return found
