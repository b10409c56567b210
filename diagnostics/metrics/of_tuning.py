"""Metrics of copies that clients train from one shared model. They name no plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch

from fl_core import tree
from fl_core.data.federated import Split
from fl_core.errors import NonFiniteError, UsageError, at_least
from fl_core.layers import Layer
from fl_core.models.building import batch_norms
from fl_core.rows import CLASSIFICATION, Row, row
from fl_core.run.costs import training_flops
from fl_core.statistics import Estimate, stratified_mean
from fl_core.training.phases import Training

from ..measurement import Measurement, batches
from ..null import null_samples
from ..tuning.copies import EPOCHS, Tuner
from ..tuning.differ import TOO_FEW, UNSURE, gains, rows_of
from ..tuning.profile import GRID, Gain, Profile, every, upper_limit
from .base import metric

NAME, ALL, STATISTICS = "layer_tuning", "all", "statistics"
Parts = Sequence[tuple[Split, Split]]


@dataclass(frozen=True)
class Shared:
    """Options of metrics that train copies of a shared model.

    Attributes:
        test: validation samples {client: (x, y)}. A run's are its own.
        training: settings of local training. Default: those of the run.
        round: of the shared model, which seeds the batches.
    """

    test: Mapping[str, Any] | None = None
    training: Training | None = None
    round: int = 0


@dataclass(frozen=True)
class DifferOptions(Shared):
    """Options of ``clients_differ``.

    Attributes:
        alone: models {client: module} that each client trained alone. Without them the lead has no value.
        score: the one that decides, ``loss`` or ``accuracy``.
    """

    alone: Mapping[str, Any] | None = None
    score: str = "loss"


@dataclass(frozen=True)
class LayerTuning(Shared):
    """Options of ``layer_tuning``.

    Attributes:
        grid: epochs to 8 and three rates, for six times the price.
        draws: draws of the null. 0 means no null; a gain above two standard errors is then shown.
        rounds: of the run, for the price.
    """

    grid: bool = False
    draws: Annotated[int, at_least(0)] = 5
    rounds: int = 0


def why_not(measurement: Measurement, options: Shared) -> str:
    """Return why no copy of a shared model can be tuned, or ""."""
    models = {id(s.model): s.model for s in measurement.subjects}.values()
    if len({tree.digest(tree.named_tensors(model)) for model in models}) > 1:
        return "needs one model for all clients: name the global one"
    if not any(len(_split(own)) for own in (options.test or {}).values()):
        return "needs validation samples"
    parts = [*parts_of(measurement, options).values()]
    finite = bool(tuner_of(measurement, options, parts).start.isfinite().all())
    return "" if finite else "the shared model's outputs are not finite"


def _split(data: Any) -> Split:
    """Return samples as a split."""
    if isinstance(data, Split):
        return data
    if isinstance(data, tuple) and len(data) == 2 and not len(data[1]):
        return Split(*data)
    x, y = (torch.cat(parts) for parts in zip(*batches(data, None), strict=True))
    return Split(x, y, getattr(data, "groups", None))


def parts_of(
    measurement: Measurement, options: Shared
) -> dict[str, tuple[Split, Split]]:
    """Return each client's training and validation samples. Clients without the latter take no part."""
    held = options.test or {}
    found = {
        s.client: (_split(s.data), _split(held[s.client]))
        for s in measurement.subjects
        if s.client in held
    }
    return {name: each for name, each in found.items() if len(each[1])}


def tuner_of(measurement: Measurement, options: Shared, parts: Parts) -> Tuner:
    """Return what tunes copies of a measurement's shared model."""
    model, training = measurement.subjects[0].model, options.training or Training()
    return Tuner(
        model, measurement.loss, training, parts, measurement.seed, options.round
    )


# --- whether clients differ -------------------------------------------------------------------------------------


@metric(
    description="what own epochs and training alone gain over the shared model, with their errors",
    direction="1 = clients differ in more than their samples",
    how="a few own epochs from the shared model, chosen on one half of validation samples and scored on the other",
    variants=("differ",),
    shared=True,
    separable=True,
    needs_all_layers=True,
    price="dear",
)
def clients_differ(measurement: Measurement, options: DifferOptions) -> list[Row]:
    """Return rows of the whole network on whether clients differ in more than their samples.

    Own epochs (1, 2 or 4, at a third of the rate or at the rate, or none) are chosen on one half of all validation
    samples and scored on the other, crosswise. Their gain over the shared model, and that of training alone, are in
    nats of the calibrated log loss and in points of accuracy. Clients differ if one of the gains is above two standard
    errors over samples (groups) in the score that decides. If not, and the error is above 1.5 points, there are too
    few samples to tell.

    Do not rely on it alone: on samples dealt at random it was called different more often than registered
    (``docs/results/what_each_command_sees.md``), probably where a few more epochs help any client.
    """
    if reason := why_not(measurement, options):
        return [row("clients_differ", None, status=reason, variant="differ")]
    parts = parts_of(measurement, options)
    tuner = tuner_of(measurement, options, [*parts.values()])
    rate, names = tuner.training.lr, every(measurement.layers)
    try:
        tuned = torch.cat([tuner.outputs(names, each) for each in (rate / 3, rate)])
    except NonFiniteError as error:
        return [row("clients_differ", None, status=str(error), variant="differ")]
    alone = None
    if options.alone is not None:
        starts = [tree.state_dict(options.alone[name]) for name in parts]
        alone = Tuner(
            measurement.subjects[0].model, measurement.loss, tuner.training,
            [*parts.values()], measurement.seed, options.round, starts,
        ).start  # fmt: skip
    given = measurement.loss, tuner.held, tuner.start, tuned, alone, measurement.seed
    found = {(what, score): each for what, score, each in gains(*given)}
    for subject in measurement.subjects:
        measurement.tick(subject.client)
    return rows_of(found, options.score)


@metric(
    description="how far tuning one layer alone from the shared model lowers a client's validation loss",
    direction="higher = the layer can absorb more of what differs",
    how="from the shared model each client trains one layer alone, and all layers",
    variants=("fall", "gain", "share"),
    look={"label": "fall of the loss", "meaning": "higher = absorbs more"},
    shared=True,
    separable=True,
    needs_all_layers=True,
    price="dear",
)
def layer_tuning(measurement: Measurement, options: LayerTuning) -> list[Row]:
    """Return what each client gains by tuning one layer alone from the shared model, and all layers together.

    - *Model*: the server's global model g after a round, the same for all clients.
    - *Tuning* of a part S at client k: from g, by a new optimiser of the run's kind, its loss without an algorithm's
      own terms and its batch size, on at most 200 training samples, for 1, 2 and 4 epochs at three times the run's
      rate. Batches and dropout are seeded by (seed, "layer_tuning", round, client). A normalisation of S trains and
      moves its statistics. Every other keeps those of g.
    - *Gain*: the validation samples of all clients are dealt once to two halves. For each S one number of epochs for
      all clients, 0 among them, has the least mean log loss on one half. G_k(S) is the fall of the log loss on the
      other; and crosswise. It is neither weighted by class nor calibrated. Other tasks have their training loss.
    - *Rows*: ``fall`` in nats and ``gain`` in points of accuracy by client and layer, and of the network; those of
      ``all`` layers and of ``statistics`` (no weight trains, batch statistics are taken again) have no layer; ``share``
      is G(S) / G(all), G the mean by training samples, where a difference is shown. Its error is of a bootstrap.
    - *Null*: all samples are dealt to clients of the same sizes, five draws, and all layers of the same g are tuned.
      A difference is shown if G(all) > mean + t(.95, 4) s sqrt(1 + 1/5). g has seen the true clients.
    - ``price``: floating-point operations over those of one run that shares all layers.

    It names no plan. On federations with known answers the profile did not choose better than training both ends.
    """
    if reason := why_not(measurement, options):
        return [
            row(NAME, None, status=reason, layer=layer.name, variant="fall", client=s.client)
            for s in measurement.subjects
            for layer in measurement.layers
        ]  # fmt: skip
    parts = parts_of(measurement, options)
    tuner = tuner_of(measurement, options, [*parts.values()])
    profile = Profile(tuner, options.grid)
    found: dict[str, Gain | str] = {ALL: _attempt(profile, every(measurement.layers))}
    for layer in measurement.layers:
        found[layer.name] = _reason(tuner, layer) or _attempt(profile, layer.tensors)
    if batch_norms(tuner.workspace.model):
        found[STATISTICS] = profile.chosen(tuner.with_new_statistics()[None])
    shown = _shown(measurement, options, parts, profile, found[ALL])
    made = [
        each
        for name, gain in found.items()
        for each in _rows(profile, [*parts], name, gain, found[ALL], shown)
    ]
    for subject in measurement.subjects:
        measurement.tick(subject.client)
    if options.rounds:
        made.append(row(NAME, price(measurement, options, tuner), variant="price"))
    return made


def _reason(tuner: Tuner, layer: Layer) -> str:
    """Return why a layer cannot be tuned, or ""."""
    if not layer.used:
        return "the layer is not used"
    params = tuner.workspace.params
    trains = any(params[name].requires_grad for name in layer.parameters)
    return "" if trains else "no weight of the layer trains"


def _attempt(profile: Profile, names: Any) -> Gain | str:
    try:
        return profile.of(frozenset(names))
    except NonFiniteError as error:
        return str(error)


def _shown(
    measurement: Measurement,
    options: LayerTuning,
    parts: dict[str, tuple[Split, Split]],
    profile: Profile,
    gain: Gain | str,
) -> str:
    """Return "" if a difference between clients is shown, or why no share has a value."""
    if isinstance(gain, str):
        return gain
    nats = profile.mean(gain.nats)
    if options.draws == 0:
        shown = nats.value > 2 * nats.error
    else:
        drawn = []
        for draw in range(1, options.draws + 1):
            dealt = _dealt(parts, measurement.seed, draw)
            again = Profile(tuner_of(measurement, options, dealt), options.grid)
            null = _attempt(again, every(measurement.layers))
            if isinstance(null, str):
                return null
            drawn.append(again.mean(null.nats).value)
        shown = nats.value > upper_limit(drawn)
    if shown:
        return ""
    right = profile.mean(gain.right)
    return TOO_FEW if 100 * right.error > UNSURE else "no difference shown"


def _dealt(parts: dict[str, tuple[Split, Split]], seed: int, draw: int) -> Parts:
    """Return all samples dealt to clients of the same sizes."""
    if len(parts) < 2:
        raise UsageError(
            "the null must have at least 2 clients; got one. Pass draws=0."
        )
    train, held = ({name: each[k] for name, each in parts.items()} for k in (0, 1))
    deal = partial(null_samples, null="clients", seed=seed, draw=draw)
    first, second = deal(train), deal(held, split="validation")
    return [(_split(first[name]), _split(second[name])) for name in parts]


def _rows(
    profile: Profile,
    clients: Sequence[str],
    name: str,
    gain: Gain | str,
    whole: Gain | str,
    shown: str,
) -> Iterator[Row]:
    """Yield the rows of one part: by client, of the network, and the share."""
    alone = name in (ALL, STATISTICS)
    where: dict[str, Any] = {"layer": "" if alone else name}
    extra = f", {name}" if alone else ""
    if isinstance(gain, str):
        yield row(NAME, None, status=gain, variant=f"fall{extra}", **where)
        return
    held = profile.tuner.held
    for variant, values, factor in (("fall", gain.nats, 1), ("gain", gain.right, 100)):
        if variant == "gain" and profile.tuner.loss.task != CLASSIFICATION:
            continue
        for k, client in enumerate(clients):
            own = held.client == k
            mean = stratified_mean(values[own], None, held.group[own])
            n_train = len(profile.tuner.train[k][2])
            yield _row(
                variant + extra, mean, factor, client=client, n_train=n_train, **where
            )
        yield _row(variant + extra, profile.mean(values), factor, **where)
    if alone and name == ALL:
        return
    if shown or isinstance(whole, str):
        yield row(
            NAME, None, status=shown or str(whole), variant=f"share{extra}", **where
        )
        return
    again = profile.resampled(gain.nats, whole.nats)
    share = profile.mean(gain.nats).value / profile.mean(whole.nats).value
    spread = float((again[:, 0] / again[:, 1]).std(ddof=1))
    yield row(NAME, share, stderr=spread, variant=f"share{extra}", **where)


def _row(variant: str, mean: Estimate, factor: float, **where: Any) -> Row:
    error = None if math.isnan(mean.error) else factor * mean.error
    return row(
        NAME,
        factor * mean.value,
        stderr=error,
        variant=variant,
        split="validation",
        **where,
    )


def price(measurement: Measurement, options: LayerTuning, tuner: Tuner) -> float:
    """Return the floating-point operations of the measurement over those of a run that shares all layers.

    Forward passes of frozen first layers are counted although a chain of modules keeps their outputs.
    """
    shape = tuple(tuner.train[0][0].shape[1:])
    flops = partial(training_flops, tuner.workspace, shape)
    whole = every(measurement.layers)
    epochs = max(GRID if options.grid else EPOCHS) * (3 if options.grid else 1)
    used = epochs * sum(len(y) for _, _, y in tuner.train)
    parts = [
        frozenset(layer.tensors)
        for layer in measurement.layers
        if not _reason(tuner, layer)
    ]
    tuned = sum(flops(names) for names in parts) + flops(whole) * (1 + options.draws)
    trained = options.rounds * sum(s.n_train for s in measurement.subjects)
    return used * tuned / (trained * flops(whole))
