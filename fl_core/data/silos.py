"""A federation from what each silo holds in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fl_core.data import arrays, partitions
from fl_core.data.arrays import Array
from fl_core.data.federated import FederatedData, gather
from fl_core.data.sources import Source
from fl_core.errors import UsageError


def of_silos(
    silos: Mapping[str, tuple[Any, Any]],
    *,
    classes: Sequence[str] | None = None,
    name: str = "own",
    seed: int = 0,
    splits: Sequence[float] | None = None,
) -> FederatedData:
    """Silos' own tensors or arrays as a federation, a client a silo in the order given: what a run takes as ``data``.

    Args:
        silos: {client: (x, y)}, checked as an .npz file's arrays are (:func:`fl_core.data.files.read`): x are images,
            uint8 [n, H, W] or [n, H, W, C], which are scaled to 0..1, or numbers [n, ...], taken as they are; y are
            whole numbers [n].
        classes: names of labels 0..C-1; default: the distinct labels of all silos together, in ascending order.
        name: of the data, in records.
        seed, splits: how each silo's samples are divided; see :func:`fl_core.data.partitions.make`.

    Raises:
        UsageError: names the silo and the first bad row, or what the silos do not have in common.
    """
    if not silos:
        raise UsageError("a federation needs at least one silo")
    names, twice = tuple(map(str, silos)), [name for name, times in Counter(map(str, silos)).items() if times > 1]
    if twice:
        raise UsageError(f"two silos are called {twice[0]!r}; names are told apart as text")
    parts: list[tuple[Array, Array]] = []
    for silo, pair in silos.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise UsageError(f"silo {silo!r}: give a pair (x, y), not {type(pair).__name__}")
        x, y = (_array(each, f"silo {silo!r}, {part}") for each, part in zip(pair, "xy", strict=True))
        x, y = arrays.features(x, f"silo {silo!r}, x"), arrays.whole_numbers(y, f"silo {silo!r}, y")
        if len(x) != len(y):
            raise UsageError(f"silo {silo!r}: {len(x)} samples and {len(y)} labels")
        first = parts[0][0] if parts else x
        if (x.shape[1:], x.dtype) != (first.shape[1:], first.dtype):
            found, wanted = (f"{a.dtype} samples of shape {list(a.shape[1:])}" for a in (x, first))
            raise UsageError(f"silo {silo!r} has {found}, and {next(iter(silos))!r} has {wanted}")
        parts.append((x, y))
    y, labels = arrays.labels(np.concatenate([y for _, y in parts]), "labels of all silos", classes)
    owner = np.repeat(np.arange(len(parts)), [len(y) for _, y in parts])
    source = Source(name, np.concatenate([x for x, _ in parts]), y, labels, owner, names)
    return gather(source, partitions.make(source, "natural", seed=seed, splits=splits))


def _array(values: Any, where: str) -> Array:
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{where}: {error}") from error
