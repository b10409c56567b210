"""Metrics of weights, of cost, and of layers that clients exchange."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from fl_core import tree
from fl_core.buffers import rules_of
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer, sizes
from fl_core.rows import Row
from fl_core.run.costs import layer_bytes
from fl_core.seeds import numpy_generator, seed_of, torch_seeded
from fl_core.tree import set_mode

from ..gradients import cosine, entries
from ..layer_work import step_work
from ..measurement import (
    SPENT,
    ClientModel,
    Measurement,
    NoValue,
    Tensors,
    batches,
    call_with,
    example,
    row_or_reason,
    tensors_of,
)
from .base import LayerProbe, layer_metric, metric, of_weights, variant_rows

SIMULATED = 100
"""Matrices with fewer rows have their random rank simulated, by this number of draws."""


@dataclass(frozen=True)
class WeightOptions:
    """The options of weight metrics: which tensors of a layer are read.

    Attributes:
        tensors: ``weights`` for a layer's parameters without biases, ``all`` for all of
            its parameters.

    Raises:
        UsageError: the choice of tensors is unknown (checked by ``Metric.settings``).
    """

    tensors: Tensors = "weights"


def vector_of(values: Mapping[str, Tensor], layer: Layer, tensors: str) -> Tensor:
    """Return the layer's floating tensors as one float64 vector [n].

    Args:
        values: tensors by exact name.
        layer: the layer.
        tensors: ``weights`` for its parameters without biases, or ``all`` parameters.

    Raises:
        NoValue: the layer has no such floating tensors, or they are not finite.
    """
    floating = [
        values[name]
        for name in tensors_of(layer, tensors)
        if values[name].is_floating_point()
    ]
    if not floating:
        tensor_kind = "parameters"
        if tensors == "weights":
            tensor_kind = "weights"
        raise NoValue(f"the layer has no {tensor_kind}")
    return finite_entries(floating, "weights", layer)


def finite_entries(tensors: Sequence[Tensor], what: str, layer: Layer) -> Tensor:
    """Return tensors of a layer as one float64 vector [n].

    Args:
        tensors: the tensors.
        what: what they are called in the message, in the plural.
        layer: the layer, for the message.

    Raises:
        NoValue: an entry is not finite.
    """
    vector = entries(tensors)
    if not vector.isfinite().all():
        raise NoValue(f"the {what} of layer {layer.name!r} are not finite")
    return vector


@layer_metric(
    description="mean absolute value and length of a layer's weights, the importance of magnitude pruning",
    direction="higher = larger weights",
    how="what magnitude pruning ranks by",
    variants=("mean_abs", "l2"),
    look={"label": "weight magnitude", "meaning": "higher = larger", "log": True},
    requires="weights",
)
def weight_magnitude(
    model: nn.Module, layer: Layer, probe: LayerProbe, options: WeightOptions
) -> dict[str, float]:
    """Return the mean absolute value and the length of a layer's n weights w.

    The values are ``mean_abs`` = (1/n) sum_j |w_j| and ``l2`` = ||w||_2. Both are at
    least 0. Magnitude pruning gives a layer's weights this importance (Han et al. 2015;
    Li et al. 2017). A layer without weights, or with weights that are not finite, has
    no value.

    Memory: one layer's weights of one client at a time, in float64.
    """
    w = vector_of(tree.named_tensors(model), layer, options.tensors)
    return {"mean_abs": float(w.abs().mean()), "l2": float(w.norm())}


NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Modules whose ``weight`` scales what they have normalised."""


@layer_metric(
    description="mean absolute scale of a layer's normalisations, the importance of network slimming",
    direction="higher = the normalised channels are let through stronger",
    how="what network slimming ranks by",
    variants=("mean_abs",),
    look={
        "label": "scale of normalisations",
        "meaning": "higher = let through stronger",
    },
    requires="weights",
)
def bn_scale(model: nn.Module, layer: Layer, probe: LayerProbe) -> float:
    """Return the mean absolute scale gamma of a layer's normalisations, (1/n) sum_j |gamma_j|.

    The value is at least 0. It is network slimming's importance of channels (Liu et al. 2017), averaged over a layer.
    Batch, instance, layer, group and RMS normalisation count. A layer without a scale
    has no value.

    Memory: one layer's scales of one client at a time.
    """
    modules = model.named_modules(remove_duplicate=False)
    scales = {
        f"{path}.weight".lstrip(".")
        for path, module in modules
        if isinstance(module, NORMS)
    }
    gammas = [model.get_parameter(name) for name in layer.parameters if name in scales]
    if not gammas:
        raise NoValue("no normalisation with a scale in the layer")
    return float(finite_entries(gammas, "scales", layer).abs().mean())


@dataclass(frozen=True)
class UpdateMagnitude(WeightOptions):
    """The options of update magnitude: the initial weights, and which tensors are read.

    Attributes:
        start: the common start, as a model or as tensors by exact name. Without it no row has a value.
    """

    start: Mapping[str, Tensor] | nn.Module | None = None


@layer_metric(
    description="how far a layer's weights have moved from the common start",
    direction="higher = moved further; 0 = not moved",
    differs="high",
    how="distance from the common start",
    variants=("relative_l2", "l2"),
    look={"label": "update magnitude", "meaning": "0 = not moved", "log": True},
    requires="weights",
)
def update_magnitude(
    model: nn.Module, layer: Layer, probe: LayerProbe, options: UpdateMagnitude
) -> dict[str, float | NoValue]:
    """Return how far a layer's weights w have moved from the common start w0.

    The values are ``relative_l2`` = ||w - w0|| / ||w0|| and ``l2`` = ||w - w0||. Both
    are at least 0, and 0 means not moved. If w0 is zero, ``relative_l2`` has no value.
    Without the option ``start`` neither has one.

    Memory: one layer's weights of one client at a time and of the start, in float64.

    Raises:
        UsageError: the start lacks a tensor or has one of another shape.
    """
    start_tensors, tensors = options.start, options.tensors
    if isinstance(start_tensors, nn.Module):
        start_tensors = tree.named_tensors(start_tensors)
    if start_tensors is None:
        raise NoValue("the common start is not known; give it as the option start")
    params = tree.named_tensors(model)
    for name in tensors_of(layer, tensors):
        check_known("tensor of the start", name, start_tensors)
        shape, start_shape = tuple(params[name].shape), tuple(start_tensors[name].shape)
        if start_shape != shape:
            raise UsageError(
                f"{name!r} of the start must be {shape}, as in the model; got {start_shape}."
            )
    w = vector_of(params, layer, tensors)
    w0 = vector_of(start_tensors, layer, tensors).to(w.device)
    moved_length, start_length = float((w - w0).norm()), float(w0.norm())
    zero_reason = NoValue(f"the weights of layer {layer.name!r} were zero at the start")
    return {
        "relative_l2": moved_length / start_length if start_length else zero_reason,
        "l2": moved_length,
    }


@metric(
    description="relative or angular distance between the clients' weights of a layer",
    direction="higher = further apart; 0 = equal",
    differs="high",
    how="relative distance, or one minus the cosine, of all pairs",
    variants=("relative_l2", "cosine"),
    look={"label": "mean distance of weights to the others", "meaning": "0 = equal"},
    pairs=True,
    distance=True,
    requires="weights",
)
def weight_divergence(measurement: Measurement, options: WeightOptions) -> list[Row]:
    """Return two rows a pair of clients and layer, from the clients' weights a and b of the layer.

    * ``relative_l2``: ||a - b|| / (0.5 (||a|| + ||b||)), in [0, 2]. 0 = equal, higher = further apart.
    * ``cosine``: 1 - <a, b> / (||a|| ||b||), in [0, 2]. 0 = same direction, 1 = at right angles, 2 = opposite.

    If both clients' weights are zero, ``relative_l2`` has no value. ``cosine`` has none
    if those of one client are zero.

    Memory: one layer's weights of every client at a time, in float64.
    """
    subjects, rows = measurement.subjects, []
    params = [dict(subject.model.named_parameters()) for subject in subjects]
    for layer in measurement.clock.turns(measurement.layers):
        zero_reason = NoValue(f"the weights of layer {layer.name!r} are zero")
        vectors: list[Tensor | NoValue] = []
        for params_of_client in params:
            try:
                measurement.clock.check()
                vectors.append(
                    vector_of(params_of_client, layer, options.tensors).cpu()
                )
            except NoValue as reason:
                vectors.append(reason)
        size = sum(
            params[0][name].numel() for name in tensors_of(layer, options.tensors)
        )
        for (a, v), (b, w) in itertools.combinations(
            zip(subjects, vectors, strict=True), 2
        ):
            if measurement.clock.over:
                v = NoValue(SPENT)
            rows += variant_rows(
                "weight_divergence",
                _distances(v, w, zero_reason),
                client=a.client,
                client_b=b.client,
                layer=layer.name,
                n_params=size,
                **of_weights(options.tensors),
            )
    return rows


def _distances(
    a: Tensor | NoValue, b: Tensor | NoValue, zero_reason: NoValue
) -> dict[str, float | NoValue]:
    """Return both distances of two clients' weights by variant, or why there are none.

    Args:
        a, b: the clients' weights as vectors [n], or why a client has none.
        zero_reason: the reason for weights that are zero.
    """
    if isinstance(a, NoValue):
        return {"relative_l2": a, "cosine": a}
    if isinstance(b, NoValue):
        return {"relative_l2": b, "cosine": b}
    norms = float(a.norm() + b.norm())
    return {
        "relative_l2": 2 * float((a - b).norm()) / norms if norms else zero_reason,
        "cosine": 1 - cosine(a, b) if a.any() and b.any() else zero_reason,
    }


SAMPLES = 2
"""Samples of the pass that is counted. Normalisation in train mode refuses a single one."""
COSTS = {
    "parameters": ("count", "", 0),
    "bytes": ("storage", "byte", 0),
    "forward_flops": ("flop_counter", "FLOP", SAMPLES),
    "backward_flops": ("flop_counter", "FLOP", SAMPLES),
    "activation_bytes": ("saved_tensors", "byte", SAMPLES),
}
"""How each cost of a layer is found, its unit, and the samples of its pass (0 = no pass)."""


@metric(
    description="parameters, bytes, training FLOPs and activation memory of a layer",
    direction="higher = costs more",
    how=(
        "FLOPs forward and backward, memory kept for the backward pass; `plan_cost` adds up what a plan sends and saves"
    ),
    variants=tuple(COSTS),
    look={"label": "cost of a layer", "log": True},
    requires="samples",
    needs_all_layers=True,
)
def layer_cost(measurement: Measurement) -> list[Row]:
    """Return five rows a client and layer: its parameters, bytes, FLOPs forward and backward, and activation memory.

    The clients' models have one architecture, so the first model's costs are everyone's. The measurement's layers must
    be all layers of the network.

    * ``parameters``: scalars of its parameters, frozen ones included.
    * ``bytes``: parameters and persistent buffers as they are stored, without frozen
      tensors, which are not sent. Sharing the layer sends this much one way.
    * ``forward_flops``, ``backward_flops``: FLOPs of one training sample when every
      parameter trains that is not frozen (:mod:`fl_core.run.costs`). Matrix products,
      convolutions and attention count. A multiply-add is two, everything elementwise is
      zero.
    * ``activation_bytes``: what the forward pass of one sample keeps for the backward pass, without parameters and
      buffers. A tensor that several operations keep counts once, at the first.

    An operation belongs to the layer whose module is running. Outside the layers'
    modules it belongs to the layer that ran last, or before any to the first. So the
    layers sum to the whole network. An unused layer has parameters and bytes, but no
    value for the other three.

    Memory: one training step on two samples, whatever the data.
    """
    rows, layers, first_client = [], measurement.layers, measurement.subjects[0]
    x, _ = example(first_client.model, first_client.data, measurement.seed)
    counts = sizes(layers, first_client.model)
    costs: dict[str, Any] = step_work(
        first_client.model,
        x if len(x) > 1 else torch.cat([x, x]),  # one sample twice
        layers,
        mode=measurement.mode,
        seed=measurement.seed,
    )
    costs |= {"parameters": counts, "bytes": layer_bytes(layers, first_client.model)}
    for subject, layer in itertools.product(measurement.subjects, layers):
        for variant, (method, unit, samples) in COSTS.items():
            is_unused = samples and not layer.used
            rows.append(
                row_or_reason(
                    "layer_cost",
                    costs[variant].get(layer.name, 0.0) / (samples or 1),
                    "unused in the forward pass" if is_unused else "",
                    variant=variant,
                    estimator=method,
                    unit=unit,
                    client=subject.client,
                    layer=layer.name,
                    stderr=0.0,
                    n_params=counts[layer.name],
                    n_samples=samples,
                    n_train=subject.n_train,
                )
            )
    return rows


@layer_metric(
    description="stable rank of a layer's weight matrices: squared Frobenius over squared spectral norm",
    direction="higher = the weights act in more directions; 1 = in one",
    how="by the singular values; the variant noise is that of random matrices of the same shapes",
    variants=("stable_rank", "noise", "spectral_norm"),
    look={"label": "stable rank of the weights", "meaning": "1 = one direction"},
    requires="weights",
)
def weight_spectrum(
    model: nn.Module, layer: Layer, probe: LayerProbe
) -> dict[str, float]:
    """Return three numbers of a layer's weight matrices W [m, k], each a mean over them.

    * ``stable_rank`` = ||W||_F^2 / ||W||_2^2, from 1 to min(m, k)
      (Rudelson and Vershynin 2007)
    * ``noise``: the stable rank of a matrix of this shape with independent normal entries.
      It is the null of ``stable_rank``. For at least 100 rows and columns it is
      m k / (sqrt(m) + sqrt(k))^2, and for fewer the mean of 100 such matrices.
    * ``spectral_norm`` = ||W||_2, the largest singular value

    The weight of a convolution, also of a transposed one, has a row for each output
    channel. Vectors do not count. A layer has no value if it has no matrix, or one that is
    zero or not finite.

    Memory: one matrix and its singular values, in float64.
    """
    weights = [_by_outputs(model, name) for name in layer.weights]
    matrices = [w for w in weights if w.ndim > 1 and w.is_floating_point()]
    if not matrices:
        raise NoValue("the layer has no weight matrix")
    finite_entries(matrices, "weights", layer)
    spectra = []
    for matrix in (w.double().flatten(1) for w in matrices):
        largest = float(torch.linalg.matrix_norm(matrix, 2))
        if not largest:
            raise NoValue(f"the weights of layer {layer.name!r} are zero")
        total, (m, k) = float(matrix.square().sum()), matrix.shape
        spectra.append(
            (total / largest**2, _random_rank(min(m, k), max(m, k)), largest)
        )
    names = ("stable_rank", "noise", "spectral_norm")
    return {
        name: sum(values) / len(values)
        for name, values in zip(names, zip(*spectra, strict=True), strict=True)
    }


def _by_outputs(model: nn.Module, name: str) -> Tensor:
    """Return a weight by its exact name, with a row for each output channel.

    The result is detached. A transposed convolution stores [in, out / groups, ...], and
    its result is [out, in / groups, ...]. Any other weight keeps its shape.
    """
    weight = model.get_parameter(name).detach()
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        grouped = weight.unflatten(0, (module.groups, -1))
        return grouped.transpose(1, 2).flatten(0, 1)
    return weight


@cache
def _random_rank(m: int, k: int) -> float:
    """Return the stable rank of a random m x k matrix, m <= k, with normal entries.

    From :data:`SIMULATED` rows on it is the formula m k / (sqrt(m) + sqrt(k))^2. For
    fewer rows it is the mean of :data:`SIMULATED` draws. A draw is the triangular
    factor [m, m] of the matrix's Gram matrix (Bartlett 1933). The factor has the
    matrix's singular values.
    """
    if m >= SIMULATED:
        return m * k / (m**0.5 + k**0.5) ** 2
    draws = numpy_generator(0, "weight_spectrum", m, k)
    factors = np.tril(draws.normal(size=(SIMULATED, m, m)), -1)
    places = np.arange(m)
    factors[:, places, places] = np.sqrt(draws.chisquare(k - places, (SIMULATED, m)))
    largest = np.linalg.norm(factors, 2, axis=(1, 2))
    return float((np.square(factors).sum((1, 2)) / largest**2).mean())


TOGETHER = 8
"""The most layers of other clients that one pass computes together."""


@dataclass(frozen=True)
class LayerSwap:
    """The options of layer_swap.

    Attributes:
        test: {client: data} on which each client's model is judged. Default: its own data.
        second: {client: model} of a second training with another seed. It is the null:
            it shows how much the loss rises with a layer of an equal training. Without
            it there are no rows of ``second_seed``.
    """

    test: Mapping[str, Any] | None = None
    second: Mapping[str, nn.Module] | None = None


@metric(
    description="rise of a client's loss if one layer comes from another client",
    direction="higher = the layer is less exchangeable; 0 = as good as the client's own",
    differs="high",
    how="every other client's layer, and the averaged layer; at most clients x clients x layers passes",
    variants=("swap", "average", "second_seed"),
    look={"label": "rise of the loss by a swap", "meaning": "0 = exchangeable"},
    needs_all_layers=True,
)
def layer_swap(measurement: Measurement, options: LayerSwap) -> list[Row]:
    """Return the rise of client B's loss with layer k of others in its model, for models of one round.

    * ``swap``: the mean over the other clients' layers, with the standard error over them
    * ``average``: with the layer's average over all clients, weighted by their samples
    * ``second_seed``: with the layer of B's own second training, if ``second`` is given; the null of both

    A value is in the unit of the loss, and may be below 0. A lone client has no value
    for ``swap`` and ``average``. A layer outside the forward pass has none.

    Other clients' layers pass together, :data:`TOGETHER` at a time, so that the layers before are computed once for
    them. A network that ``torch.func.vmap`` cannot take has a pass for each.

    Memory: the models, and :data:`TOGETHER` batches' activations.

    Raises:
        UsageError: ``test`` or ``second`` lacks a client.
    """
    subjects = measurement.subjects
    trees = [tree.state_dict(s.model) for s in subjects]
    weights = [s.n_train for s in subjects]
    rules = rules_of(subjects[0].model)
    rows = []
    for k, subject in enumerate(measurement.turns()):
        data = subject.data
        if options.test is not None:
            check_known("client with test data", subject.client, options.test)
            data = options.test[subject.client]
        (own_loss,), n = _losses(measurement, subject, data, [{}])
        for layer in measurement.clock.turns(measurement.layers):
            used_tensors = layer.tensors if layer.used else ()
            client_layers = [
                tree.select(params, used_tensors)
                for params in trees
                if used_tensors and n
            ]
            other_layers = client_layers[:k] + client_layers[k + 1 :]
            swaps = {
                "swap": other_layers,
                "average": [tree.mean(client_layers, weights, rules)]
                if other_layers
                else [],
            }
            if options.second is not None:
                check_known("client of the second seed", subject.client, options.second)
                second_tensors = tree.state_dict(options.second[subject.client])
                swaps["second_seed"] = (
                    [tree.select(second_tensors, used_tensors)] if used_tensors else []
                )
            sources = [*chain.from_iterable(swaps.values())]
            values_of, n_reached = _losses(measurement, subject, data, sources)
            losses = iter(values_of)
            for variant, group in swaps.items():
                values = [next(losses) - own_loss for _ in group]
                status = "unused in the forward pass"
                if layer.used:
                    status = ""
                status = status or ("" if n else SPENT)
                status = status or ("" if values else "needs at least two clients")
                value = math.nan
                if values:
                    value = float(np.mean(values))
                if not status and not n_reached:
                    status = SPENT
                if not status and not math.isfinite(value):
                    status = f"the loss with layer {layer.name!r} is not finite"
                error = None
                if len(values) > 1:
                    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
                rows.append(
                    row_or_reason(
                        "layer_swap", value, status,
                        client=subject.client, layer=layer.name, variant=variant, unit="loss",
                        stderr=error, estimator=f"{len(values)} layers", n_samples=n, n_train=subject.n_train,
                    )
                )  # fmt: skip
    return rows


@torch.no_grad()
def _losses(
    measurement: Measurement,
    subject: ClientModel,
    data: Any,
    sources: Sequence[tree.Tree],
) -> tuple[list[float], int]:
    """Return a client's mean loss with each source's tensors in place of its own, and the number of samples.

    If the budget is spent before the last batch, the losses are NaN and the number is 0.
    Without sources the list is empty and the number is 0.

    Args:
        measurement: the loss, the mode, the batch and the budget.
        subject: the client, whose model stays unchanged.
        data: the samples on which the loss is computed.
        sources: tensors by exact name, the same names in each. An empty dict leaves the
            client's model as it is.
    """
    totals, n = [0.0] * len(sources), 0
    if not sources:
        return totals, n
    stacked = {
        name: torch.stack([source[name] for source in sources]) for name in sources[0]
    }
    seeded = torch_seeded(seed_of(measurement.seed, "diagnose", "swap"))
    try:
        with (
            set_mode(subject.model, measurement.mode),
            seeded,
            warnings.catch_warnings(),
        ):
            # an operation that passes one after another
            warnings.filterwarnings("ignore", "There is a performance drop")
            for x, y in batches(data, measurement.batch, subject.model):
                if measurement.clock.over:
                    return [math.nan] * len(sources), 0

                def output(tensors: tree.Tree, x: Tensor = x) -> Any:
                    return call_with(subject.model, tensors, x)

                if len(sources) == 1:
                    z = [
                        output({name: tensors[0] for name, tensors in stacked.items()})
                    ]
                else:
                    z = vmap(output, randomness="same", chunk_size=TOGETHER)(stacked)
                for k, swapped in enumerate(z):
                    measurement.loss.check_batch(swapped, y)
                    totals[k] += float(
                        measurement.loss.per_sample(swapped, y).double().sum()
                    )
                n += len(y)
    except RuntimeError:
        if len(sources) == 1:
            raise
        single_losses = [
            _losses(measurement, subject, data, [source]) for source in sources
        ]
        return [total for (total,), _ in single_losses], min(
            n for _, n in single_losses
        )
    return [total / n for total in totals], n
