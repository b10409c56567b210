"""How alike the clients' models represent the same samples, layer by layer: linear CKA between all pairs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diagnostics.capture import Batch, Data, Hook, batches, first_tensor, hooked, set_mode
from diagnostics.gradients import Subject, Tick, placed, quiet
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.losses import Loss
from fl_core.rows import Row, row
from fl_core.seeds import seed_of, torch_seeded

if TYPE_CHECKING:
    from fl_core.data import FederatedData

ESTIMATORS = ("full", "minibatch")
PROBE = 512
"""Samples of a probe set, all clients together."""
LEAST = 4
"""Samples that the unbiased HSIC needs."""
_CHUNK = 1 << 16  # entries of each Gram matrix that are in float64 at a time
_PANEL = 64  # rows of a Gram matrix that are computed at a time


# --- the probe: samples that every model sees ------------------------------------------------------------------


def probe_set(data: FederatedData, n: int = PROBE) -> Batch:
    """The first validation samples of every client, equally many, ``n`` in all: (x [m, ...], y [m]), m <= n.

    Where ``n`` does not divide evenly the first clients give one more; a client with fewer gives all that it has.

    Raises:
        UsageError: fewer samples than clients.
    """
    return shared_probe([(client.validation.x, client.validation.y) for client in data.clients], n)


def shared_probe(sources: Sequence[Data], n: int = PROBE) -> Batch:
    """The first samples of each of several data, equally many, ``n`` in all; each data object gives once.

    Raises:
        UsageError: fewer samples than sources, or samples of different shapes.
    """
    distinct = list({id(source): source for source in sources}.values())
    if n < len(distinct):
        raise UsageError(f"a probe of {n} samples over {len(distinct)} clients; at least one of each is needed")
    shares = [n // len(distinct) + (k < n % len(distinct)) for k in range(len(distinct))]
    return _joined([pair for source, share in zip(distinct, shares, strict=True) for pair in _first(source, share)])


def _first(source: Data, count: int) -> Iterator[Batch]:
    for x, y in batches(source, count):
        yield x[:count], y[:count]
        count -= len(x)
        if count <= 0:
            return


def _joined(pairs: Sequence[Batch]) -> Batch:
    shapes = sorted({tuple(x.shape[1:]) for x, _ in pairs})
    if len(shapes) > 1:
        raise UsageError(f"probe samples of different shapes: {shapes[0]} and {shapes[1]}")
    x, y = zip(*pairs, strict=True)
    return torch.cat([part.to(x[0].device) for part in x]), torch.cat([part.to(y[0].device) for part in y])


# --- linear CKA on features ------------------------------------------------------------------------------------


class _NoValue(Exception):
    """Why features have no similarity to anything."""


def linear_cka(x: Tensor, y: Tensor, estimator: str = "full", batch: int | None = None) -> float:
    """Linear CKA of features x [n, d1] and y [n, d2] of the same n samples; 1 = same, 0 = unrelated.

    ``"full"``: ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) with columns centred (Kornblith et al. 2019, Eq. 5), in
    [0, 1]; PLayer-FL, Eq. A.3, without its squared denominator. ``"minibatch"``: HSIC_1(X, Y) /
    sqrt(HSIC_1(X, X) HSIC_1(Y, Y)), each HSIC_1 the unbiased estimator (Song et al. 2012, Eq. 5) averaged over
    batches of ``batch`` samples (Nguyen et al. 2021, Eq. 3); it may fall below 0. Both are invariant to rotation,
    isotropic scale and offset of either side. NaN where one side is constant, not finite, or too short.

    Raises:
        UsageError: numbers of samples that differ, or a ``batch`` below 4 with ``"minibatch"``.
    """
    check_known("estimator of CKA", estimator, ESTIMATORS)
    if len(x) != len(y):
        raise UsageError(f"features of {len(x)} and of {len(y)} samples; CKA compares the same samples")
    bounds = _bounds(len(x), batch or max(len(x), LEAST), estimator)
    grams = []
    for side in (x, y):
        recorder = _Recorder(bounds, estimator)
        for start, stop in bounds:
            recorder.take(start, stop, side[start:stop])
        summary = _kept(recorder)
        if isinstance(summary, str) or summary.gram is None:
            return math.nan
        grams.append(summary.gram.double())
    a, b = grams
    return float(a.dot(b) / (a.dot(a) * b.dot(b)).sqrt())  # the same bits for (y, x)


def _bounds(n: int, batch: int, estimator: str) -> list[tuple[int, int]]:
    """Where batches start and stop; with ``"minibatch"`` a last one that is too small joins the one before it."""
    if estimator == "minibatch" and batch < LEAST:
        raise UsageError(f"minibatch CKA over batches of {batch}; the unbiased HSIC needs at least {LEAST} samples")
    starts = list(range(0, n, batch))
    if estimator == "minibatch" and len(starts) > 1 and n - starts[-1] < LEAST:
        starts.pop()
    return list(zip(starts, [*starts[1:], n], strict=True))


@dataclass(frozen=True)
class _Summary:
    """What is kept of a model's features: entries of the centred Gram matrix, or the centred features [n, d]."""

    gram: Tensor | None = None
    features: Tensor | None = None


class _Recorder:
    """Reduces features [n, d], given batch by batch, so that HSIC is an inner product of two summaries.

    The first batch's mean is taken off at once: CKA does not depend on an offset, but the digits of a float32 Gram
    matrix do. The buffer serves one model after the other.
    """

    def __init__(self, bounds: Sequence[tuple[int, int]], estimator: str, models: int | None = None) -> None:
        self._bounds, self._estimator, self._models = bounds, estimator, models
        self._buffer = torch.empty(0)
        self.begin()

    def begin(self) -> None:
        """Forget the model before."""
        self._taken: set[int] = set()
        self._grams: dict[int, Tensor] = {}
        self._reference = torch.empty(0)
        self._scale = 1.0
        self._fault = ""

    def take(self, start: int, stop: int, output: Tensor) -> None:
        """The output for samples ``start`` to ``stop``; a second call for the same samples replaces the first."""
        if output.ndim == 0 or len(output) != stop - start:
            self._fault = f"shape {tuple(output.shape)} for {stop - start} samples, which must come first"
            return
        if not output.numel():
            self._fault = "no features"
            return
        x = output.reshape(len(output), -1)
        x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        if start == 0:
            self._reference = x.mean(0)
        elif 0 not in self._taken:
            return
        elif x.shape[1:] != self._reference.shape:
            self._fault = f"{x.shape[1]} features after {len(self._reference)} in an earlier batch"
            return
        whole = self._estimator == "full"
        size = (self._bounds[-1][1] if whole else max(e - s for s, e in self._bounds), x.shape[1])
        if self._buffer.shape != size or (self._buffer.dtype, self._buffer.device) != (x.dtype, x.device):
            self._buffer = x.new_empty(size)
        target = self._buffer[start:stop] if whole else self._buffer[: stop - start]
        torch.sub(x, self._reference, out=target)
        if start == 0:
            peak = float(torch.linalg.vector_norm(target, torch.inf))
            self._scale = 1.0 if peak == 0 or 1e-8 < peak < 1e8 else 1 / peak  # so that squares fit the type
        if self._scale != 1.0:
            target *= self._scale
        if not whole:
            self._grams[start] = _gram(target)
        self._taken.add(start)

    def summary(self) -> _Summary:
        """What is kept.

        Raises:
            _NoValue: too few samples, features that were not given for all of them, are not finite or do not vary.
        """
        n = self._bounds[-1][1] if self._bounds else 0
        least = 2 if self._estimator == "full" else LEAST
        if n < least:
            raise _NoValue(f"{n} samples, at least {least} are needed")
        if self._fault:
            raise _NoValue(self._fault)
        if self._taken != {start for start, _ in self._bounds}:
            raise _NoValue("not computed in every forward pass")
        width = len(self._reference)
        if self._estimator == "minibatch":
            return self._minibatch(n)
        if self._models is not None and width * (self._models + 1) / 2 < n:  # fewer numbers and products than a Gram
            x = self._buffer.double()
            x -= x.mean(0)
            norm = self._checked(torch.linalg.vector_norm(x).square(), n).sqrt()
            return _Summary(features=x / norm)
        gram = _gram(self._buffer)
        means = gram.mean(0, dtype=torch.float64)
        shift = (means - means.mean() / 2).to(gram.dtype)
        gram -= shift
        gram -= shift[:, None]
        total = self._checked(gram.diagonal().sum(dtype=torch.float64), n)
        return _Summary(gram=gram.div_(total.to(gram.dtype)).reshape(-1))

    def _minibatch(self, n: int) -> _Summary:
        grams = list(self._grams.values())
        total = self._checked(torch.stack([g.diagonal().sum(dtype=torch.float64) for g in grams]).sum(), n)
        gram = torch.cat([_u_centred(g.div_(total.to(g.dtype))).reshape(-1) for g in grams])
        if not bool(gram.any()):
            raise _NoValue("constant within every batch")
        return _Summary(gram=gram)

    def _checked(self, total: Tensor, n: int) -> Tensor:
        """The features' sum of squares, refused where it is not finite or no more than rounding."""
        if not bool(torch.isfinite(total)):
            raise _NoValue("not finite")
        offset = torch.linalg.vector_norm(self._reference, dtype=torch.float64).mul(self._scale).square() * n
        if not bool(total > 0) or bool(total <= (8 * torch.finfo(self._reference.dtype).eps) ** 2 * offset):
            raise _NoValue("constant over the probe")
        return total


def _gram(x: Tensor) -> Tensor:
    """x x^T, of which only the blocks on and above the diagonal are computed; exactly symmetric."""
    n = len(x)
    gram = x.new_empty(n, n)
    for start in range(0, n, _PANEL):
        stop = min(start + _PANEL, n)
        gram[start:stop, start:] = x[start:stop] @ x[start:].T
        gram[stop:, start:stop] = gram[start:stop, stop:].T
        block = gram[start:stop, start:stop]
        block.copy_((block + block.T) / 2)
    return gram


def _u_centred(gram: Tensor) -> Tensor:
    """A Gram matrix [b, b] U-centred, in place, over sqrt(b (b - 3)): inner products of two of them are HSIC_1.

    The form of Szekely and Rizzo 2014 (their U-centring), which Song's estimator equals: the diagonal is left out,
    and the other entries of each row and column add up to 0.
    """
    b = len(gram)
    before = torch.linalg.vector_norm(gram)
    gram.fill_diagonal_(0)
    rows = gram.sum(0, dtype=torch.float64)
    shift = (rows / (b - 2) - rows.sum() / (2 * (b - 1) * (b - 2))).to(gram.dtype)
    gram -= shift
    gram -= shift[:, None]
    gram.fill_diagonal_(0)
    if bool(torch.linalg.vector_norm(gram) <= 16 * torch.finfo(gram.dtype).eps * before):
        gram.zero_()  # nothing but rounding
    return gram.div_((b * (b - 3)) ** 0.5)


def _hsic(summaries: Sequence[_Summary]) -> Tensor:
    """Inner products of all pairs, [M, M] in float64, exactly symmetric."""
    m = len(summaries)
    features = [s.features for s in summaries if s.features is not None]
    if features:
        x = torch.stack(features, 1)  # [n, M, d]
        h = torch.stack([torch.einsum("nd,nme->dme", x[:, k], x).square().sum((0, 2)) for k in range(m)])
    else:
        grams = [s.gram for s in summaries if s.gram is not None]
        h = torch.zeros(m, m, dtype=torch.float64, device=grams[0].device)
        for start in range(0, len(grams[0]), _CHUNK):
            part = torch.stack([gram[start : start + _CHUNK] for gram in grams]).double()
            h += part @ part.T
    return h.triu() + h.triu(1).T


# --- all pairs of clients --------------------------------------------------------------------------------------


def cka(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss | None = None,
    batch: int | None = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    probe: Data | None = None,
    estimator: str = "full",
    samples: int = PROBE,
) -> list[Row]:
    """One row a layer and pair of clients (in the order given): linear CKA, 1 = same (see :func:`linear_cka`).

    Every model sees the same samples in the same order: a loader is read once, so it may shuffle. Activations are
    flattened, channels and positions together being the features (variant ``"flatten"``). A module that one forward
    pass calls several times is represented by its last call. Kept per model and layer: n x n numbers
    (``"minibatch"``: n x batch), or the features where those are fewer: d (M + 1) / 2 < n for M models.

    Args:
        batch: samples per forward pass; with ``"minibatch"`` also samples per HSIC.
        probe: the samples. Default: the first ``samples`` of the clients' own data, equally many of each.
        estimator: ``"full"`` or ``"minibatch"``.
        loss: not used.

    Raises:
        UsageError: an unknown estimator, a ``batch`` below 4 with ``"minibatch"``, a probe that does not fit.
    """
    check_known("estimator of CKA", estimator, ESTIMATORS)
    if len(subjects) < 2:
        for subject in subjects:
            tick(subject.client)
        status = "needs at least two models"
        common = {"variant": "flatten", "estimator": estimator, "n_samples": 0}
        return [row("cka", None, status=status, layer=layer.name, **common) for layer in layers]
    with torch_seeded(seed_of(seed, "diagnose", "probe")):  # a shuffling loader draws its order
        if probe is None:
            x, _ = shared_probe([subject.data for subject in subjects], max(samples, len(subjects)))
        else:
            x, _ = _joined(list(batches(probe, None)))
    bounds = _bounds(len(x), batch or max(len(x), LEAST), estimator)
    outputs = sorted({layer.output for layer in layers if layer.used})
    recorders = {path: _Recorder(bounds, estimator, len(subjects)) for path in outputs}
    found = []
    for subject in subjects:
        _record(subject, x, bounds, recorders, seed, mode)
        found.append({path: _kept(recorder) for path, recorder in recorders.items()})
        tick(subject.client)
    return [
        row(
            "cka",
            None if isinstance(value, str) else value,
            status=value if isinstance(value, str) else "ok",
            client=subjects[a].client,
            client_b=subjects[b].client,
            layer=layer.name,
            variant="flatten",
            estimator=estimator,
            n_samples=len(x),
        )
        for layer in layers
        for (a, b), value in _pairs(subjects, layer, [own.get(layer.output) for own in found]).items()
    ]


def _record(
    subject: Subject,
    x: Tensor,
    bounds: Sequence[tuple[int, int]],
    recorders: Mapping[str, _Recorder],
    seed: int,
    mode: str,
) -> None:
    """One forward pass of the probe through the subject's model, into the recorders."""
    place = bounds[0]

    def hook_for(path: str) -> Hook:
        recorders[path].begin()

        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is not None:
                recorders[path].take(*place, tensor)

        return hook

    hooks = {path: hook_for(path) for path in recorders}
    seeded = torch_seeded(seed_of(seed, "diagnose", "probe"))
    with set_mode(subject.model, mode), seeded, torch.no_grad(), hooked(subject.model, hooks):
        for place in bounds:
            subject.model(placed(subject.model, x[slice(*place)]))


def _kept(recorder: _Recorder) -> _Summary | str:
    try:
        return recorder.summary()
    except _NoValue as reason:
        return str(reason)


def _pairs(
    subjects: Sequence[Subject], layer: Layer, found: Sequence[_Summary | str | None]
) -> dict[tuple[int, int], float | str]:
    """CKA of each pair of clients at one layer, or why there is none."""
    sound = {c: summary for c, summary in enumerate(found) if layer.used and isinstance(summary, _Summary)}
    place = {c: k for k, c in enumerate(sound)}
    h = _hsic(list(sound.values())).cpu() if sound else torch.empty(0, 0)
    values: dict[tuple[int, int], float | str] = {}
    for pair in itertools.combinations(range(len(subjects)), 2):
        lacking = [c for c in pair if c not in sound]
        if not layer.used:
            values[pair] = "unused in the forward pass"
        elif lacking:
            values[pair] = (
                f"output of layer {layer.name!r} at client {subjects[lacking[0]].client!r}: {found[lacking[0]]}"
            )
        else:
            i, j = (place[c] for c in pair)
            values[pair] = float(h[i, j] / (h[i, i] * h[j, j]).sqrt())
    return values
