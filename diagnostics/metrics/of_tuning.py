"""Metrics of copies that clients train from one shared model. They name no plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fl_core import tree
from fl_core.data.arrays import nested_groups
from fl_core.data.federated import Split
from fl_core.errors import NonFiniteError, UsageError, listing
from fl_core.layers import Layer
from fl_core.models.building import batch_norms
from fl_core.rows import CLASSIFICATION, Row, row
from fl_core.statistics import stratified_mean
from fl_core.training.phases import Training
from fl_core.tree import set_mode

from ..measurement import Measurement, NoValue, batches
from ..tuning.copies import Tuner, estimated
from ..tuning.differ import (
    FEW_CLIENTS,
    comparable_losses,
    compared,
    fine_tuned,
    rows_of,
)
from ..tuning.permutation import CrossLosses, Difference, blocks, permutation_test
from ..tuning.profile import Gain, Profile, every
from .base import metric

OWN_MODELS = "own models"
NAME, ALL, STATISTICS = "layer_tuning", "all", "statistics"


@dataclass(frozen=True)
class Shared:
    """Options of metrics that train copies of a shared model.

    Attributes:
        test: validation samples {client: (x, y)}. For a run they are the run's own. A
            metric of a shared model has no value without them.
        training: settings of local training. For a run they are the run's own.
            Otherwise the default is ``Training()``.
        round: the round of the shared model. It seeds the batches.
    """

    test: Mapping[str, Any] | None = None
    training: Training | None = None
    round: int = 0


@dataclass(frozen=True)
class DifferOptions(Shared):
    """Options of ``clients_differ``.

    Attributes:
        alone: models {client: module} that each client trained alone, one for every
            client with validation samples. Without them only fine-tuned models are
            compared.
    """

    alone: Mapping[str, Any] | None = None


def _split(data: Any) -> Split:
    """Return samples as one :class:`Split`.

    A split is returned unchanged. Batches of a loader are joined.

    Args:
        data: a split, a pair (x, y), an object with such ``x`` and ``y``, or a loader.
    """
    if isinstance(data, Split):
        return data
    if isinstance(data, tuple) and len(data) == 2 and not len(data[1]):
        return Split(*data)
    x, y = (torch.cat(parts) for parts in zip(*batches(data, None), strict=True))
    return Split(x, y, getattr(data, "groups", None))


def of_tuner(
    measurement: Measurement, options: Shared
) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the clients with validation samples, and the arguments of a :class:`Tuner` for them by name.

    Args:
        measurement: the clients with their models and data.
        options: the options of the metric.

    Raises:
        NoValue: clients have models of their own, or none has validation samples.
    """
    if one_for_each(measurement):
        raise NoValue("needs one model for all clients: name the global one")
    tests = {name: _split(data) for name, data in (options.test or {}).items()}
    parts = {
        s.client: (_split(s.data), tests[s.client])
        for s in measurement.subjects
        if len(tests.get(s.client, ()))
    }
    if not parts:
        raise NoValue("needs validation samples")
    return [*parts], {
        "model": measurement.subjects[0].model,
        "loss": measurement.loss,
        "training": options.training or Training(),
        "clients": [*parts.values()],
        "seed": measurement.seed,
        "round": options.round,
        "clock": measurement.clock,
    }


def one_for_each(measurement: Measurement) -> bool:
    """Return True if two clients' models differ in a tensor; False for equal models."""
    models = {id(s.model): s.model for s in measurement.subjects}.values()
    return len({tree.digest(tree.named_tensors(model)) for model in models}) > 1


def own_losses(measurement: Measurement, options: Shared) -> CrossLosses:
    """Return the losses of clients' own models on each other's samples.

    The samples are those of the option ``test``, or else the measured ones. Clients
    without such samples are left out. Clients are divided into blocks
    (:func:`diagnostics.tuning.permutation.blocks`). A model's losses on samples of
    other blocks are NaN.

    Args:
        measurement: the clients with their models and data.
        options: the options of the metric.

    Raises:
        NoValue: fewer than two clients have samples.
    """
    subjects = measurement.subjects
    tests = {s.client: _split(s.data) for s in subjects}
    if options.test is not None:
        tests = {name: _split(data) for name, data in options.test.items() if len(data)}
    subjects = [s for s in subjects if s.client in tests]
    if len(subjects) < 2:
        raise NoValue(FEW_CLIENTS)
    splits = [tests[s.client] for s in subjects]
    y = torch.cat([split.y for split in splits])
    outputs = []
    for subject in subjects:
        with torch.no_grad(), set_mode(subject.model, "eval"):
            for split in splits:
                pairs = batches((split.x, split.y), measurement.batch, subject.model)
                outputs += [subject.model(x).cpu() for x, _ in pairs]
    count, sizes = len(subjects), [len(split) for split in splits]
    losses = comparable_losses(
        measurement.loss, torch.cat(outputs), y.repeat(count), [len(y)] * count
    ).reshape(1, count, len(y))
    client = np.repeat(np.arange(count), sizes)
    for block in blocks(count, measurement.seed):
        in_block = np.isin(np.arange(count), block)
        not_in_block = in_block[:, None] != np.isin(client, block)[None, :]
        losses[:, not_in_block] = np.nan
    sample_numbers: list[Any] = [np.arange(size) for size in sizes]
    if options.test is None:
        groups = [s.groups for s in subjects]
        sample_numbers = [
            numbers if group is None else group
            for group, numbers in zip(groups, sample_numbers, strict=True)
        ]
    share = np.array([s.n_train for s in subjects], dtype=np.float64)
    return CrossLosses(losses, client, share, nested_groups(sample_numbers))


# --- whether clients differ -------------------------------------------------------------------------------------


@metric(
    description="whether a client's own model beats other clients' models on its validation samples",
    direction="1 = clients differ in more than their samples",
    how="clients fine-tune the shared model; their models predict each other's samples, which then change clients",
    variants=("differ", "p"),
    shared=True,
    separable=True,
    needs_all_layers=True,
)
def clients_differ(measurement: Measurement, options: DifferOptions) -> list[Row]:
    """Return rows of the whole network on whether clients differ in more than their samples.

    Each client fine-tunes the shared model (1, 2 or 4 epochs, at a third of the rate or at the rate). These models, and
    with the option ``alone`` one that the client trained alone, predict the validation
    samples of all clients. With more than nine clients they predict those of a random
    block of at most five. The lead of a client's own model over the others at its
    samples is compared with its leads after 999 random assignments of the samples
    (whole groups) to the clients
    (:func:`diagnostics.tuning.permutation.permutation_test`). Where clients do not
    differ, they are called different in 5 % of the runs, however well or badly the
    models are trained. A round that the validation samples chose, such as ``best``,
    breaks this.

    The row ``differ`` is 1 if p is at most 0.05, and else 0: no difference is shown. The log loss has one temperature,
    from 1 to 20, for all pairs. Regression has its training loss. ``smallest, nats`` is
    the smallest lead that would have been shown. A difference does not say that local
    layers help.

    Clients with models of their own are compared by these, without fine-tuning. Their
    samples are those of the option ``test``, or else the measured ones. The test is
    exact only if no model was trained on its samples.

    If there is no value, one row gives the reason. This is so with fewer than two
    clients that have validation samples.
    """
    try:
        if one_for_each(measurement):
            cross_losses, kinds = own_losses(measurement, options), [OWN_MODELS]
        else:
            cross_losses, kinds = _fine_tuned_losses(measurement, options)
    except (NonFiniteError, NoValue) as reason:
        return [row("clients_differ", None, status=str(reason), variant="differ")]
    client_blocks = blocks(cross_losses.losses.shape[1], measurement.seed)
    return rows_of(
        permutation_test([cross_losses], client_blocks, seed=measurement.seed), kinds
    )


def _fine_tuned_losses(
    measurement: Measurement, options: DifferOptions
) -> tuple[CrossLosses, list[str]]:
    """Return the losses of models that each client fine-tunes from the shared one, and the kind of each.

    Models that clients trained alone are the last kind, if the options have them.

    Raises:
        NonFiniteError: a loss or an output is not finite.
        NoValue: fewer than two clients have validation samples, or the budget is spent.
        UsageError: a client with validation samples has no model in ``alone``.
    """
    names, arguments = of_tuner(measurement, options)
    if len(names) < 2:
        raise NoValue(FEW_CLIENTS)
    local_weights = None
    if options.alone is not None:
        missing = [name for name in names if name not in options.alone]
        if missing:
            raise UsageError(
                "alone must have a model for each client with validation samples; "
                f"got none for {listing(missing)}."
            )
        local_weights = [tree.state_dict(options.alone[name]) for name in names]
    return fine_tuned(local_weights, **arguments)


@metric(
    description="how far tuning one layer alone from the shared model lowers a client's validation loss",
    direction="higher = the layer can absorb more of what differs",
    differs="high",
    how="from the shared model each client trains one layer alone, and all layers",
    variants=("fall", "gain", "share"),
    look={"label": "fall of the loss", "meaning": "higher = absorbs more"},
    shared=True,
    separable=True,
    needs_all_layers=True,
)
def layer_tuning(measurement: Measurement, options: Shared) -> list[Row]:
    """Return each client's gain by tuning one layer alone from the shared model, and by tuning all layers together.

    - *Model*: the server's global model g after a round, the same for all clients. Of a run it is by default the
      first stored round of at least 20 and of a tenth of all, else the last.
    - *Tuning* of a part S at client k: from g, by a new optimiser of the run's kind, its loss without an algorithm's
      own terms and its batch size, on at most 200 training samples, for 1, 2 and 4 epochs at three times the run's
      rate, or at the run's rate if that diverges. Batches and dropout are seeded by
      (seed, "layer_tuning", round, client). A normalisation of S trains and moves its
      statistics. Every other keeps those of g.
    - *Gain*: the validation samples of all clients are split at random into two halves, once. For each S one number of
      epochs for all clients, which may be 0, has the least mean log loss on one half. G_k(S) is the fall of the log
      loss on the other half, and the same with the halves exchanged. It is neither weighted by class nor calibrated.
      Other tasks have their training loss.
    - *Rows*: ``fall`` in nats and ``gain`` in points of accuracy, by client and layer,
      and over all clients. Rows of ``all`` layers and of ``statistics`` have no layer.
      For ``statistics`` no weight trains, and batch statistics are taken again.
      ``share`` is G(S) / G(all), with G the mean by training samples, where a
      difference is shown and G(all) is above 0. Its error is a quarter of the width of
      a bootstrap's middle 95 %. The bootstrap draws samples (groups) within clients.
      With 8 clients or more it draws clients.
    - *Shown*: where ``clients_differ`` says so of fine-tuning. Its null is exact. Samples that are assigned to clients
      at random before tuning would not give an exact one, because the shared model was trained on the real clients.

    The result is no plan. On federations with known answers, layers chosen by these gains were not better than those of
    a choice that trains plans with either end local, nor than always keeping the head local. This also holds for
    residual networks and adapters. A further test compared a run with two references, the same network trained with
    planted differences of labels or of inputs. It claimed an end in 2 of 22 federations, the input or the output, at
    which clients differ. Both claims were right, but the references need two more runs, so no option makes this test.
    """
    try:
        clients, arguments = of_tuner(measurement, options)
    except NoValue as reason:
        reasons: list[Row] = []
        for subject in measurement.subjects:
            columns = {"client": subject.client, "variant": "fall"}
            reasons += [
                row(NAME, None, status=str(reason), layer=layer.name, **columns)
                for layer in measurement.layers
            ]
        return reasons
    tuner = Tuner(**arguments)
    profile = Profile(tuner)
    all_gain = _attempt(lambda: profile.of(every(measurement.layers)))
    gains = {ALL: all_gain}
    for layer in measurement.clock.turns(measurement.layers):
        gains[layer.name] = _reason(tuner, layer) or _attempt(
            partial(profile.of, frozenset(layer.tensors))
        )
    if batch_norms(tuner.workspace.model):
        gains[STATISTICS] = _attempt(
            lambda: profile.chosen(tuner.with_new_statistics()[None])
        )
    reason_not_shown = ""
    if not isinstance(all_gain, str):
        reason_not_shown = _not_shown(arguments)
        if not reason_not_shown and not profile.mean(all_gain.nats).value > 0:
            reason_not_shown = "all layers together gain nothing"
    tuning_rows: list[Row] = []
    for name, gain in gains.items():
        tuning_rows += _rows(profile, clients, name, gain, all_gain, reason_not_shown)
    return tuning_rows


def _not_shown(arguments: Mapping[str, Any]) -> str:
    """Return why no difference between clients is shown, or "" if one is.

    Args:
        arguments: the arguments of a :class:`Tuner` by name.
    """
    if len(arguments["clients"]) < 2:
        return FEW_CLIENTS
    difference = _attempt(lambda: compared(**arguments))
    if isinstance(difference, Difference):
        if difference.shown:
            return ""
        return "no difference shown"
    return str(difference)


def _reason(tuner: Tuner, layer: Layer) -> str:
    """Return why a layer cannot be tuned, or ""."""
    if not layer.used:
        return "the layer is not used"
    params = tuner.workspace.params
    trains = any(params[name].requires_grad for name in layer.parameters)
    if trains:
        return ""
    return "no weight of the layer trains"


def _attempt(gain: Callable[[], Any]) -> Any:
    try:
        return gain()
    except (NonFiniteError, NoValue) as error:
        return str(error)


def _rows(
    profile: Profile,
    clients: Sequence[str],
    name: str,
    gain: Gain | str,
    all_gain: Gain | str,
    reason_not_shown: str,
) -> Iterator[Row]:
    """Yield the rows of one part: by client, over all clients, and the share.

    Args:
        profile: the measured gains.
        clients: the clients' names.
        name: name of the layer, or :data:`ALL` or :data:`STATISTICS`.
        gain: the part's gain, or why it has none.
        all_gain: the gain of all layers together, or why there is none.
        reason_not_shown: why the part has no share; empty if it has one.
    """
    has_no_layer = name in (ALL, STATISTICS)
    place: dict[str, Any] = {"layer": "" if has_no_layer else name}
    layer_suffix = ""
    if has_no_layer:
        layer_suffix = f", {name}"
    if isinstance(gain, str):
        for client in (*clients, ""):
            yield row(
                NAME,
                None,
                status=gain,
                variant=f"fall{layer_suffix}",
                client=client,
                **place,
            )
        return
    samples = profile.tuner.held
    kinds = {"fall": (gain.nats, 1), "gain": (gain.right, 100)}
    if profile.tuner.loss.task != CLASSIFICATION:
        del kinds["gain"]
    for variant, (values, factor) in kinds.items():
        for k, client in enumerate(clients):
            is_client = samples.client == k
            mean = stratified_mean(values[is_client], None, samples.group[is_client])
            yield estimated(
                NAME, variant + layer_suffix, mean, factor,
                client=client, n_train=len(profile.tuner.train[k][2]), **place,
            )  # fmt: skip
        mean = profile.mean(values)
        yield estimated(NAME, variant + layer_suffix, mean, factor, **place)
    if name == ALL:
        return
    if reason_not_shown or isinstance(all_gain, str):
        yield row(
            NAME,
            None,
            status=reason_not_shown or str(all_gain),
            variant=f"share{layer_suffix}",
            **place,
        )
        return
    yield estimated(
        NAME, f"share{layer_suffix}", profile.share(gain, all_gain), 1, **place
    )
