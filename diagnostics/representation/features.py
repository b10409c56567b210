"""Features of a layer as matrices: collected in one pass, standardised, reduced, divided into folds; common samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_core.errors import UsageError, check_known, listing
from fl_core.seeds import numpy_generator, seed_of, torch_seeded
from fl_core.training.workspace import memory_format
from fl_core.tree import Tree, first_tensor, set_mode

from ..measurement import (
    NO_LIMIT,
    SPENT,
    Batch,
    ClientModel,
    Clock,
    Data,
    Measurement,
    NoValue,
    as_taken,
    batches,
    cannot_take,
    one_line,
)

if TYPE_CHECKING:
    from fl_core.data import FederatedData

Array = np.ndarray[Any, Any]
SIDES = ("output", "input")
Arrange = Callable[[nn.Module, Tensor], Tensor]
"""A function (module, output [n, ...]) -> features [n, ...]."""


def flattened(module: nn.Module, z: Tensor) -> Tensor:
    """Return an output as [n, d] on the CPU; float64 keeps its type, others become float32.

    Args:
        module: the module that gave the output, which is not used.
        z: the output, [n, ...].
    """
    z = z.reshape(len(z), -1).cpu()
    if z.dtype == torch.float64:
        return z
    return z.float()


@dataclass(frozen=True, eq=False)
class Features:
    """Features of one client's samples, by module path.

    Attributes:
        x: features [n, ...] by module path, for paths that have them.
        y: labels [n, ...].
        sample: position [n] of each sample in the client's data.
        faults: why a path has no features.
    """

    x: Tree
    y: Array
    sample: Array
    faults: dict[str, str]

    def at(self, path: str) -> Array:
        """Return the features of the module at a path, [n, d] in their own type.

        Raises:
            NoValue: there are no features, or they are not finite.
        """
        x = self.tensor(path)
        if not torch.isfinite(x).all():
            raise NoValue("not finite")
        return x.numpy()

    def tensor(self, path: str) -> Tensor:
        """Return the features, finite or not, [n, ...].

        Raises:
            NoValue: there are no features.
        """
        if path in self.faults:
            raise NoValue(self.faults[path])
        return self.x[path]


def collect(
    model: nn.Module,
    paths: Sequence[str],
    data: Data,
    *,
    at: str = "output",
    samples: int | None = None,
    batch: int | None = 256,
    seed: int = 0,
    mode: str = "eval",
    arrange: Arrange = flattened,
    clock: Clock = NO_LIMIT,
) -> Features:
    """Return outputs (or inputs) of the named modules for all data, from one forward pass.

    Data are read once, so a loader may shuffle: labels and features stay together. If
    one pass calls a module several times, its last call counts. The model is left as it
    was. A path whose outputs are not features of each sample has the reason in
    ``faults`` of the result.

    Args:
        model, data: the model, and the samples with their labels.
        paths: paths of the modules in the model.
        at: ``"output"``, or ``"input"`` for a module's first argument.
        samples: maximum number of samples, drawn with ``seed``. None means all.
        batch: number of samples in a forward pass. None means all. A loader keeps its
            own batches.
        mode: ``"eval"`` or ``"train"``.
        arrange: a function (module, output) -> features [n, ...]. Default: [n, d] on the CPU.
        clock: the time budget. If it is spent before the last batch, no path has features.

    Raises:
        UsageError: a path is unknown, or data and labels do not fit the model.
    """
    check_known("side of a module", at, SIDES)
    modules = dict(model.named_modules(remove_duplicate=False))
    features: Tree = {}
    repeated: dict[str, str] = {}  # faults of the last calls in a batch
    size = 0
    parts: dict[str, list[Tensor]] = {path: [] for path in paths}
    faults: dict[str, str] = {}

    def keep(path: str, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is None:
            return
        tensor, repeated[path] = tensor.detach(), ""
        if tensor.ndim == 0 or len(tensor) != size:
            got_shape = tuple(tensor.shape)
            repeated[path] = (
                f"shape {got_shape} for {size} samples, which must come first"
            )
        elif not tensor.numel():
            repeated[path] = "no features"
        if repeated[path]:
            return
        z = arrange(modules[path], tensor)
        shares_memory = (
            z.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        )
        features[path] = (
            z.clone() if shares_memory else z
        )  # a later module may work in place

    seeded = torch_seeded(seed_of(seed, "diagnose", "probe"))
    with (
        set_mode(model, mode),
        seeded,
        torch.no_grad(),
    ):  # which also takes the hooks away
        for path in paths:
            module = modules[check_known("module", path, modules)]
            if at == "input":
                module.register_forward_pre_hook(
                    lambda module, inputs, path=path: keep(path, inputs)
                )
            else:
                module.register_forward_hook(
                    lambda module, inputs, output, path=path: keep(path, output)
                )
        pairs = list(batches(data, batch))
        chosen_positions = np.arange(sum(len(y) for _, y in pairs))
        if samples is not None and len(chosen_positions) > samples:
            order = numpy_generator(seed, "diagnose", "probe").permutation(
                len(chosen_positions)
            )
            chosen_positions = np.sort(order[:samples])
        layout = None
        labels = torch.cat([y for _, y in pairs]).cpu()
        for x, y in as_taken(_select(pairs, chosen_positions), model):
            if layout is None:  # pooling is several times as fast so on a CPU
                is_fast = not model.training and x.device.type == "cpu"
                channels_last = (
                    is_fast and memory_format(model, x[:1]) == "channels_last"
                )
                layout = torch.preserve_format
                if channels_last:
                    layout = torch.channels_last
            if clock.over:
                faults = dict.fromkeys(paths, SPENT)
                break
            features.clear()
            repeated.clear()
            size = len(y)
            with one_line(cannot_take(model, x)):
                model(x.to(memory_format=layout))
            for path, outputs in parts.items():
                fault = repeated.get(path, "not computed in every forward pass")
                if fault:
                    z = None
                else:
                    z = features[path]
                if z is not None and outputs and z.shape[1:] != outputs[0].shape[1:]:
                    got_shape = tuple(z.shape[1:])
                    earlier_shape = tuple(outputs[0].shape[1:])
                    fault = (
                        f"shape {got_shape} after {earlier_shape} in an earlier batch"
                    )
                if z is None or fault:
                    faults.setdefault(path, fault)
                else:
                    outputs.append(z)
    features_by_path = {
        path: torch.cat(outputs)
        for path, outputs in parts.items()
        if path not in faults
    }
    return Features(
        features_by_path, labels.numpy()[chosen_positions], chosen_positions, faults
    )


def features_of(
    measurement: Measurement,
    subject: ClientModel,
    paths: Sequence[str],
    samples: int,
    data: Data | None = None,
) -> Features:
    """Return the features of a client's samples, with the settings of a measurement (:func:`collect`).

    Args:
        measurement: the settings.
        subject: the client, whose model gives the features.
        paths: paths of the modules in the model.
        samples: maximum number of samples.
        data: the samples to read. Default: the client's own.
    """
    return collect(
        subject.model,
        paths,
        subject.data if data is None else data,
        samples=samples,
        batch=measurement.batch,
        seed=measurement.seed,
        mode=measurement.mode,
        clock=measurement.clock,
    )


def _select(batches: Sequence[Batch], chosen: Array) -> Iterator[Batch]:
    """Yield the samples at the chosen positions, in the batches in which they came.

    Batches without such a sample are left out.

    Args:
        batches: all samples.
        chosen: positions among all samples, int [m], in ascending order.
    """
    start = 0
    for x, y in batches:
        rows = torch.from_numpy(
            chosen[(chosen >= start) & (chosen < start + len(y))] - start
        )
        start += len(y)
        if len(rows):
            yield x[rows.to(x.device)], y[rows.to(y.device)]


# --- features as numbers ---------------------------------------------------------------------------------------


def constant(x: Array) -> bool:
    """Return True if features [n, d] are the same for all samples, up to rounding in their type."""
    return bool((_spread(x)[1] == 0).all())


def _spread(x: Array) -> tuple[Array, Array]:
    """Return mean and standard deviation [d] of each feature, in float64.

    Deviations within rounding are 0.
    """
    eps = np.finfo(x.dtype).eps
    mean = x.mean(axis=0, dtype=np.float64)
    deviation = x.std(axis=0, dtype=np.float64)
    return mean, np.where(deviation > 8 * eps * np.abs(mean), deviation, 0.0)


def standardise(train: Array, *others: Array) -> list[Array]:
    """Return features in float64 with mean 0 and deviation 1 over the training samples; constant ones become 0.

    The list has the training samples [n, d], then the others [m, d] on the same scale.
    """
    mean, deviation = _spread(train)
    scale = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=deviation > 0)
    return [(x.astype(np.float64) - mean) * scale for x in (train, *others)]


def reduce_to_span(train: Array, *others: Array) -> list[Array]:
    """Return features in the span of the training samples: [n, r], r <= n, with the same inner products.

    The coordinates are along the eigenvectors of the n x n Gram matrix K = X X^T = U S
    U^T. They are U S^(1/2) for the training samples and Z X^T U S^(-1/2) for others Z.
    The omitted part of the others is at a right angle to all training samples. So no
    L2-regularised linear model has a weight there. If the training samples X are zero,
    the result is one feature that is 0.

    Args:
        train: the training samples X, float64 [n, d].
        others: further samples, each float64 [m, d].

    Returns:
        The coordinates of the training samples, then those of the others, in a list.
    """
    values, vectors = np.linalg.eigh(train @ train.T)
    in_span = values > max(values[-1], 0.0) * len(values) * np.finfo(np.float64).eps
    values, vectors = values[in_span], vectors[:, in_span]
    if not len(values):
        return [np.zeros((len(x), 1)) for x in (train, *others)]
    root = np.sqrt(values)
    return [vectors * root, *((x @ train.T) @ (vectors / root) for x in others)]


# --- samples that are held out ---------------------------------------------------------------------------------


def folds_of(y: Array, folds: int, seed: int, groups: Array | None = None) -> Array:
    """Return the fold of each sample, a number from 0 to ``folds`` - 1, int64 [n].

    Folds have equal size (within one). Each class is spread evenly over them. With
    ``groups`` [n], such as patients, this holds for the groups by their first label,
    and each group is in one fold. With fewer samples or groups than ``folds`` there are
    as many folds as these.

    >>> labels = np.arange(37) % 3
    >>> fold = folds_of(labels, 5, seed=0)
    >>> np.bincount(fold).tolist()
    [8, 8, 7, 7, 7]
    >>> [int(np.ptp(np.bincount(fold[labels == label]))) for label in range(3)]
    [1, 1, 1]
    >>> patients = np.random.default_rng(0).permutation(np.repeat(np.arange(40), 5))
    >>> fold = folds_of(patients % 3, 5, 0, patients)
    >>> np.bincount(fold).tolist(), {len({*fold[patients == k]}) for k in range(40)}
    ([40, 40, 40, 40, 40], {1})
    """
    if groups is not None:
        _, first_samples, group = np.unique(
            groups, return_index=True, return_inverse=True
        )
        return folds_of(y[first_samples], folds, seed)[group]
    order = numpy_generator(seed, "diagnose", "folds").permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    fold = np.empty(len(y), dtype=np.int64)
    fold[order] = np.arange(len(y)) % min(folds, len(y))
    return fold


_PARTS = 10
Ratio = tuple[float, float | None]
"""A ratio of scatters and its standard error."""


def scatter_ratio(
    x: Array, y: Array, seed: int = 0, groups: Array | None = None
) -> Ratio:
    """Return tr(S_b) / tr(S_w) of features x [n, d] with labels y [n], and its standard error.

    Higher means more separable. With the classes' means m_c, S_b = sum_c n_c (m_c - m)(m_c - m)^T and S_w = sum_n (x_n
    - m_y)(x_n - m_y)^T (Fisher's scatter matrices). The ratio is at least 0, without an upper bound. It is invariant to
    rotation, isotropic scale and offset. Classes that do not differ at all give about (C - 1) / (n - C), not 0.

    The error is the jackknife's over ten parts of the samples, with each class spread
    evenly over them. It is None if leaving out a part leaves no value, or if there are
    at most two parts. With ``groups`` [n], such as patients, each of them is in one
    part. The seed draws the parts.

    Raises:
        NoValue: there is one class, or features are not finite, or do not vary at all or within the classes.
    """
    classes, label_number = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise NoValue("samples of one class")
    if not np.isfinite(x).all():
        raise NoValue("not finite")
    if constant(x):
        raise NoValue("constant over the samples")
    parts = folds_of(y, _PARTS, seed, groups)
    n_parts = int(parts.max()) + 1
    x = x.astype(np.float64)
    x -= x.mean(axis=0)
    x /= np.abs(x).max()  # so that squares fit
    squares, is_of_class = (
        np.square(x).sum(axis=1),
        label_number == np.arange(len(classes))[:, None],
    )

    def ratio(included: Array) -> float | None:
        members = (is_of_class & included).astype(float)
        n = members.sum(axis=1)
        if (n > 0).sum() < 2:
            return None
        sums, total = members @ x, squares[included].sum()
        explained = (np.square(sums).sum(axis=1) / n.clip(1)).sum()
        within = total - explained
        if within <= 1e-12 * total:
            return None
        return float((explained - np.square(sums.sum(axis=0)).sum() / n.sum()) / within)

    value = ratio(parts >= 0)
    if value is None:
        raise NoValue("no scatter within the classes")
    if n_parts > 2:
        partial_ratios = [ratio(parts != k) for k in range(n_parts)]
    else:
        partial_ratios = [None]
    ratios = np.array(
        [partial_ratio for partial_ratio in partial_ratios if partial_ratio is not None]
    )
    if len(ratios) < len(partial_ratios):
        return value, None
    return value, float(
        np.sqrt((n_parts - 1) / n_parts * np.square(ratios - ratios.mean()).sum())
    )


PROBE = 512
"""The default number of samples of a probe set, all clients together."""

# --- common samples --------------------------------------------------------------------------------------------


def probe_set(data: FederatedData, n: int = PROBE) -> Batch:
    """Return the first validation samples of every client, equally many: (x [m, ...], y [m, ...]).

    There are about ``n`` in all, m <= n. If ``n`` does not divide evenly, the first clients give one more. A client
    with fewer gives all that it has.

    Raises:
        UsageError: there are fewer samples than clients, or a client has no validation samples.
    """
    empty = [client.name for client in data.clients if not len(client.validation.y)]
    if empty:
        raise UsageError(
            f"each client must have validation samples to compare models on; got none for {listing(empty)}. "
            "Pass a probe, or measure other metrics."
        )
    return shared_probe(
        [(client.validation.x, client.validation.y) for client in data.clients], n
    )


def shared_probe(sources: Sequence[Data], n: int = PROBE) -> Batch:
    """Return the first samples of several data sets, equally many: (x [m, ...], y [m, ...]).

    There are at most ``n`` in all. If ``n`` does not divide evenly, the first data sets
    give one more. A data set with fewer gives all that it has. One that is given twice
    counts once.

    Raises:
        UsageError: ``n`` is below the number of sources, samples have different shapes,
            or as :func:`diagnostics.measurement.batches`.
    """
    distinct_sources = list({id(source): source for source in sources}.values())
    if n < len(distinct_sources):
        raise UsageError(
            f"samples of the probe must be at least one of each client; "
            f"got {n} samples over {len(distinct_sources)} clients."
        )
    sample_counts = [
        n // len(distinct_sources) + (k < n % len(distinct_sources))
        for k in range(len(distinct_sources))
    ]
    return _join([*chain.from_iterable(map(_first, distinct_sources, sample_counts))])


def probe_of(
    subjects: Sequence[ClientModel], probe: Data | None, samples: int, seed: int
) -> Tensor:
    """Return the samples x [m, ...] on which all models are compared: ``probe``, else the clients' first samples.

    They are read once.

    Args:
        subjects: the clients with their data.
        probe: samples with any labels. None means the clients' own, equally many of
            each.
        samples: number of samples of all clients together; at least one of each is
            taken.
        seed: seed of the order of a loader that shuffles.

    Raises:
        UsageError: samples have different shapes, or as
            :func:`diagnostics.measurement.batches`.
    """
    with torch_seeded(
        seed_of(seed, "diagnose", "probe")
    ):  # a shuffling loader draws its order
        if probe is None:
            return shared_probe(
                [subject.data for subject in subjects], max(samples, len(subjects))
            )[0]
        return _join(list(batches(probe, None)))[0]


def _first(source: Data, count: int) -> Iterator[Batch]:
    for x, y in batches(source, count):
        yield x[:count], y[:count]
        count -= len(x)
        if count <= 0:
            return


def _join(pairs: Sequence[Batch]) -> Batch:
    shapes = sorted({tuple(x.shape[1:]) for x, _ in pairs})
    if len(shapes) > 1:
        raise UsageError(
            f"shapes of probe samples must be equal; got {shapes[0]} and {shapes[1]}."
        )
    x, y = zip(*pairs, strict=True)
    return torch.cat([part.to(x[0].device) for part in x]), torch.cat(
        [part.to(y[0].device) for part in y]
    )
