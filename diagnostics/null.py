"""What a metric shows of shuffled data or untrained models; such a *null* keeps model, batch size and client sizes.

A curve means little by itself: the network and its initialisation shape it too. A null takes one thing away (what the
labels say, how clients differ, the training), measures the same again, and shows how much of the curve is left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from fl_core.data.federated import ClientData, FederatedData, Split
from fl_core.data.partitions import SPLITS
from fl_core.errors import UsageError, check_known
from fl_core.seeds import numpy_generator

Shuffled = tuple[dict[str, Split], dict[str, np.ndarray]]
"""Of one split: each client's samples, and their positions in the source."""


@dataclass(frozen=True)
class Null:
    """One null: what it measures, in words, and how its data are made.

    Attributes:
        title: what is measured, as in "the same plan comes from ...".
        same: what follows where a decision stays the same on it.
        shuffle: (data, split, seed, draw) -> that split's samples by client; None = the data stay, untrained models are
            measured.
        together: whether it takes the samples or labels of all clients together.
    """

    title: str
    same: str
    shuffle: Callable[[FederatedData, str, int, int], Shuffled] | None = None
    together: bool = False


def null_data(data: FederatedData, null: str, seed: int, draw: int = 1) -> FederatedData:
    """The federation with its labels permuted or its samples dealt at random; the given one stays as it is.

    Every client keeps its name and its number of samples in each split, and no sample or label leaves its split.

    >>> import fedlayers as fl
    >>> data = fl.load("heart")
    >>> dealt = null_data(data, "clients", seed=0)
    >>> dealt.weights == data.weights, dealt.digest == data.digest
    (True, False)

    Args:
        null: one of :data:`NULLS`; of ``fresh``, which is about models, the data are the same.
        seed: of the draw, with its number ``draw``, from 1.

    Raises:
        UsageError: an unknown null.
    """
    shuffle = NULLS[check_known("null", null, NULLS)].shuffle
    if shuffle is None:
        return data
    shuffled = {split: shuffle(data, split, seed, draw) for split in SPLITS}
    names = [client.name for client in data.clients]
    clients = tuple(ClientData(name, **{split: shuffled[split][0][name] for split in SPLITS}) for name in names)
    indices = {name: {split: shuffled[split][1][name] for split in SPLITS} for name in names}
    digest = hashlib.sha256(f"{data.digest}|null {null}|{seed}|{draw}".encode()).hexdigest()
    return replace(data, clients=clients, partition=replace(data.partition, indices=indices), digest=digest)


def check_nulls(nulls: str | Sequence[str], draws: int) -> tuple[str, ...]:
    """The names of nulls, each once.

    Raises:
        UsageError: an unknown null, or less than one draw.
    """
    if draws < 1:
        raise UsageError(f"null_draws={draws}; a number of at least 1 is needed")
    names = (nulls,) if isinstance(nulls, str) else nulls
    return tuple(dict.fromkeys(check_known("null", name, NULLS) for name in names))


# --- how the data are shuffled ---------------------------------------------------------------------------------


def _labels(data: FederatedData, split: str, seed: int, draw: int) -> Shuffled:
    """The labels of all clients together, permuted."""
    labels = torch.cat([client.split(split).y for client in data.clients])
    order = numpy_generator(seed, "null labels", split, draw).permutation(len(labels))
    permuted = labels[torch.from_numpy(order).to(labels.device)].split([len(c.split(split)) for c in data.clients])
    samples = {c.name: Split(c.split(split).x, y.clone()) for c, y in zip(data.clients, permuted, strict=True)}
    return samples, _positions(data, split)


def _labels_within(data: FederatedData, split: str, seed: int, draw: int) -> Shuffled:
    """Each client's labels, permuted."""
    samples = {}
    for client in data.clients:
        x, y = client.split(split).x, client.split(split).y
        order = numpy_generator(seed, "null labels_within", split, draw, client.name).permutation(len(y))
        samples[client.name] = Split(x, y[torch.from_numpy(order).to(y.device)])
    return samples, _positions(data, split)


def _clients(data: FederatedData, split: str, seed: int, draw: int) -> Shuffled:
    """All clients' samples, dealt to them at random."""
    x, y = (torch.cat([getattr(client.split(split), name) for client in data.clients]) for name in "xy")
    positions = np.concatenate(list(_positions(data, split).values()))
    order = numpy_generator(seed, "null clients", split, draw).permutation(len(y))
    ends = np.cumsum([len(client.split(split)) for client in data.clients])[:-1]
    samples, indices = {}, {}
    for client, taken in zip(data.clients, np.split(order, ends), strict=True):
        taken = taken[np.argsort(positions[taken], kind="stable")]  # a partition's positions ascend
        rows = torch.from_numpy(taken).to(y.device)
        samples[client.name], indices[client.name] = Split(x[rows], y[rows]), positions[taken]
    return samples, indices


def _positions(data: FederatedData, split: str) -> dict[str, np.ndarray]:
    return {client.name: data.partition.indices[client.name][split] for client in data.clients}


NULLS: dict[str, Null] = {
    "labels": Null("permuted labels", "this evidence does not depend on your data's labels", _labels, together=True),
    "labels_within": Null(
        "labels permuted within each client",
        "this evidence does not depend on which of a client's samples has which label",
        _labels_within,
    ),
    "clients": Null(
        "samples dealt to clients at random", "this evidence does not depend on how your clients differ", _clients, True
    ),
    "fresh": Null("the untrained common start", "this evidence does not depend on training"),
}
"""The nulls by name. Labels and samples are shuffled split by split: no test sample is trained on."""


# --- their rows ------------------------------------------------------------------------------------------------

_MARK = rf"null ({'|'.join(NULLS)}) (\d+)"


def marked(table: pd.DataFrame, null: str, draw: int) -> pd.DataFrame:
    """The rows as those of a null's draw, which their column ``model`` says: ``null labels 1``."""
    return table.assign(model=f"null {null} {draw}")


def of_null(table: pd.DataFrame) -> pd.Series:
    """Which rows are those of a null, [rows] of bool."""
    models = table["model"] if "model" in table else pd.Series("", index=table.index)
    return models.astype("string").str.fullmatch(_MARK).fillna(False).astype(bool)


def nulls_in(table: pd.DataFrame) -> dict[str, list[pd.DataFrame]]:
    """The rows of each null in a frame, of each draw apart, without the mark, as rows of a diagnosis of their own."""
    nulls: dict[str, list[pd.DataFrame]] = {}
    rows = table[of_null(table)]
    for model, part in rows.groupby("model", sort=False):
        nulls.setdefault(str(model).split()[1], []).append(part.assign(model="").reset_index(drop=True))
    return nulls
