"""Warnings about unusual data in a federation that do not prevent training, one line each."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fl_core.data.columns import nearly_equal
from fl_core.data.federated import FederatedData
from fl_core.data.partitions import SPLITS
from fl_core.data.sources import NOTED
from fl_core.display import MANY, in_order
from fl_core.errors import listing, spelled
from fl_core.rows import CLASSIFICATION, REGRESSION, SURVIVAL
from fl_core.tokens import SPECIAL, UNKNOWN

LARGE = 1e4
"""The largest feature without a warning. Beyond it a step with an ordinary learning rate is too long."""
USUAL = 2 / 3
"""Share of samples above which one of two classes is the usual one."""
REPEATED = 0.01
"""Share of validation or test samples equal to training samples from which they are reported."""
SPREAD = 100.0
"""The largest standard deviation of targets without a warning. The smallest is its inverse."""


def notes(data: FederatedData) -> list[str]:
    """Return warnings about a federation's clients, names, classes, scale and repeated samples.

    >>> from fl_core.data import load
    >>> notes(load("heart"))
    []
    >>> notes(load("digits", clients=1, partition="iid"))
    ['there is one client only: nothing is federated, it trains alone']
    """
    names = [client.name for client in data.clients]
    found = []
    if len(names) == 1:
        found.append("there is one client only: nothing is federated, it trains alone")
    for what, words in (("clients", names), ("classes", data.classes)):
        for group in nearly_equal(words):
            found.append(
                f"the {what} {listing(map(repr, group))} differ by spaces or capitals only; each is one of its own"
            )
    found += [*_single(data), *_positive(data), *_large(data)]
    return [*found, *_unknown(data), *_find_repeated(data)]


def client_notes(data: FederatedData, batch: int) -> list[str]:
    """Return warnings about clients with one class or less than a batch, and about the targets' scale."""
    ys = {client.name: client.train.y for client in data.clients}
    alike = "of one class only" if data.task == CLASSIFICATION else "whose targets are all equal"  # fmt: skip
    less = f"training samples, less than a batch of {batch}"
    kinds = {
        f"training samples {alike}": [name for name, y in ys.items() if len(y.unique(dim=0)) < 2],
        less: [name for name, y in ys.items() if len(y) < batch],
    }  # fmt: skip
    if data.task == SURVIVAL:
        none = "no event among its training samples: it learns nothing"
        kinds[none] = [name for name, y in ys.items() if not y[:, 1].any()]
    found = []
    for what, names in kinds.items():
        if len(names) > MANY:
            some = listing(in_order(names), 3)
            found.append(f"{len(names)} of {len(ys)} clients have {what}: {some}")
            continue
        counted = what == less
        for name in names:
            count = f"{len(ys[name])} " if counted else ""
            found.append(f"client {name!r} has {count}{what}")
    if data.task == REGRESSION and not getattr(data.preprocessing, "target", ()):
        spread = float(torch.cat(list(ys.values())).double().std())
        if not 1 / SPREAD <= spread <= SPREAD:
            found.append(
                f"the training targets' standard deviation is {spread:.3g}: scale them to about 1, which learning "
                "rates are made for"
            )
    return found


def _single(data: FederatedData) -> Iterator[str]:
    """Yield classes without samples or of one sample, and integers that are no indices."""
    if data.task != CLASSIFICATION:
        return
    if data.absent:
        empty = [repr(data.classes[k]) for k in data.absent]
        yield f"no sample has class {listing(empty, 6)}: macro-F1 leaves it out"
    if data.indices and data.classes != tuple(map(str, range(data.n_classes))):
        yield (
            f"labels {listing(data.classes, 6)} are the classes 0 to {data.n_classes - 1} of the model, in this order"
        )
    counts = sum(data.class_counts(split).sum() for split in SPLITS)
    single = list(counts.index[counts == 1])
    if 2 * len(single) > data.n_classes:
        yield (
            f"{len(single)} of {data.n_classes} classes have a single sample: is the label column an identifier, or a "
            "number to be predicted?"
        )
    elif single:
        yield f"a single sample has class {listing(map(repr, single), 6)}: is it misspelt, or no label?"


def _positive(data: FederatedData) -> Iterator[str]:
    """Yield the class that AUROC and AUPRC describe, if the user did not choose it and it is the usual one of two."""
    if not data.positive or data.chosen:
        return
    share = float(
        torch.cat([client.train.y for client in data.clients]).double().mean()
    )
    if share > USUAL:
        rare = data.classes[0]
        other = spelled(positive=rare)
        yield f"AUROC and AUPRC describe {data.positive!r}, the class of {share:.0%} of samples; {other}?"


def _large(data: FederatedData) -> Iterator[str]:
    """Yield the largest training feature, if it is too large for training without scaling."""
    largest, where = 0.0, 0
    for client in data.clients:
        x = client.train.x
        if x.is_floating_point() and x.numel():
            sizes = torch.maximum(x.amax(0), -x.amin(0)).flatten()
            if float(sizes.max()) > largest:
                largest, where = float(sizes.max()), int(sizes.argmax())
    if largest > LARGE:
        place = f" in {_feature(data, where)}" if len(data.shape) == 1 else ""
        yield f"features are as large as {largest:.3g}{place}: scale them, or training is likely to diverge"


def _feature(data: FederatedData, k: int) -> str:
    """Return what messages call an input of the model: its column, or its number."""
    made = data.preprocessing
    if made is not None and made.inputs:
        return f"column {made.inputs[k]!r}"
    return f"feature {k} (counted from 0)"


def _unknown(data: FederatedData) -> Iterator[str]:
    """Yield the share of unknown words in validation texts, if it is large."""
    if data.words is None:
        return
    ids = torch.cat([client.validation.x.flatten() for client in data.clients])
    unknown, known = int((ids == UNKNOWN).sum()), int((ids >= len(SPECIAL)).sum())
    share = unknown / max(unknown + known, 1)
    if share > NOTED:
        yield f"{share:.0%} of the words in validation texts are not among the {len(data.words):,} of training texts"


def _find_repeated(data: FederatedData) -> Iterator[str]:
    """Yield validation and test samples with the features of some client's training sample."""
    seen = {key for client in data.clients for key in _keys(client.train.x)}
    for split in SPLITS[1:]:
        keys = [key for client in data.clients for key in _keys(client.split(split).x)]
        again = sum(key in seen for key in keys)
        if again > REPEATED * len(keys):
            yield f"{again:,} of {len(keys):,} {split} samples equal a training sample: scores may be too good"


def _keys(x: torch.Tensor) -> Iterator[int]:
    """Yield a hash of each sample's features."""
    for row in x.numpy():
        yield hash(row.tobytes())
