"""Federations with placeholders for samples: of every client, or of all but some."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fl_core.data.federated import ClientData, FederatedData, Split
from fl_core.data.partitions import SPLITS, Partition
from fl_core.data.preprocessing import Preprocessing
from fl_core.scores import CLASSIFICATION, REGRESSION, SURVIVAL
from fl_core.seeds import torch_generator
from fl_core.tokens import TokenShape

NATURAL = "natural"


@dataclass(frozen=True)
class FederationMetadata:
    """Facts of a federation's data without samples: common properties, and the number of samples of each client.

    Attributes:
        name: of the dataset. sizes: of each client's splits, by the client's name.
        digests: of each client's samples, by the client's name.
        tokens: the number of token ids of texts, otherwise 0. The other fields are as in :class:`FederatedData`.
    """

    name: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    sizes: Mapping[str, Mapping[str, int]]
    digests: Mapping[str, str]
    tokens: int = 0
    words: tuple[str, ...] | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    images: bool = False
    preprocessing: Preprocessing | None = None


def placeholder_data(facts: FederationMetadata, held: Mapping[str, ClientData] | None = None) -> FederatedData:
    """Return the federation with the samples of the clients in ``held``, and for the others zeros without memory.

    Its digest is one over the clients' digests.

    >>> made = placeholder_data(FederationMetadata("toy", (3,), ("no", "yes"), {"a": {"train": 9, "validation": 2,
    ...     "test": 4}}, {"a": "5f"}))
    >>> made.weights, made.clients[0].test.x.shape, made.clients[0].test.x.untyped_storage().nbytes()
    ((9,), torch.Size([4, 3]), 4)
    """
    shape = TokenShape(facts.shape, facts.tokens) if facts.tokens else tuple(facts.shape)
    clients = [(held or {}).get(name) or _empty(name, sizes, facts) for name, sizes in facts.sizes.items()]
    source = hashlib.sha256("".join(f"{name}|{facts.digests[name]}\n" for name in facts.sizes).encode()).hexdigest()
    partition = _partition(facts.sizes, source)
    digest = hashlib.sha256(f"{source}|{partition.digest}".encode()).hexdigest()
    return FederatedData(
        *(facts.name, shape, tuple(facts.classes), tuple(clients), partition, source, digest),
        words=facts.words,
        mean=tuple(facts.mean),
        std=tuple(facts.std),
        images=facts.images,
        preprocessing=facts.preprocessing,
    )


def placeholder_client(data: FederatedData, name: str, seed: int) -> FederatedData:
    """Return the federation with random samples in place of one client's. Only the number of its own remains.

    Features and numbers are drawn from the standard normal distribution, and tokens uniformly. Classes take turns.
    Times are the absolute values of such numbers; events and labels are 0 and 1 with equal probability.

    >>> from fl_core.data import load
    >>> heart = load("heart")
    >>> other = placeholder_client(heart, "va", seed=0).client("va").train
    >>> len(other) == len(heart.client("va").train), other.y[:4].tolist()
    (True, [0, 1, 2, 3])
    """
    draw = torch_generator(seed, "stand-in", name)
    tokens = data.shape.tokens if isinstance(data.shape, TokenShape) else 0

    def like(split: Split) -> Split:
        shape = split.x.shape
        x = torch.randint(tokens, shape, generator=draw) if tokens else torch.randn(shape, generator=draw)
        return Split(x.to(split.x), _drawn(data.task, split.y.shape, data.n_classes, draw).to(split.y))

    other = ClientData(name, **{split: like(data.client(name).split(split)) for split in SPLITS})
    return replace(data, clients=tuple(other if each.name == name else each for each in data.clients))


def _drawn(task: str, shape: torch.Size, n_classes: int, draw: torch.Generator) -> torch.Tensor:
    """Return random targets of a task, as :func:`placeholder_client` draws them."""
    if task == CLASSIFICATION:
        return torch.arange(shape[0]) % n_classes
    if task == REGRESSION:
        return torch.randn(shape, generator=draw)
    y = torch.randint(2, shape, generator=draw).float()
    if task == SURVIVAL:
        y[:, 0] = torch.randn(shape[0], generator=draw).abs()
    return y


def _empty(name: str, sizes: Mapping[str, int], facts: FederationMetadata) -> ClientData:
    kind = torch.int64 if facts.tokens else torch.float32
    label = torch.int64 if facts.classes else torch.float32

    def zeros(n: int) -> Split:
        return Split(torch.zeros((), dtype=kind).expand(n, *facts.shape), torch.zeros((), dtype=label).expand(n))

    return ClientData(name, **{split: zeros(sizes[split]) for split in SPLITS})


def _partition(sizes: Mapping[str, Mapping[str, int]], source_digest: str) -> Partition:
    """Return a partition that numbers the samples client by client and split by split."""
    indices: dict[str, dict[str, Any]] = {}
    at = 0
    for name, counts in sizes.items():
        indices[name] = {}
        for split in SPLITS:
            indices[name][split] = np.arange(at, at := at + counts[split], dtype=np.int64)
    params = {"clients": len(indices), "splits": _shares(sizes)}
    return Partition(NATURAL, params, 0, indices, at, source_digest)


def _shares(sizes: Mapping[str, Mapping[str, int]]) -> list[float]:
    counts: Sequence[int] = [sum(each[split] for each in sizes.values()) for split in SPLITS]
    return [count / max(1, sum(counts)) for count in counts]


def digest_of(client: ClientData) -> str:
    """Return the SHA-256 over one client's samples, split by split."""
    sha = hashlib.sha256()
    for split in SPLITS:
        part = client.split(split)
        for tensor in (part.x, part.y):
            sha.update(f"{split}|{tensor.dtype}|{list(tensor.shape)}|".encode())
            sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()
