"""Federations with placeholders for samples: of every client, or of all but some."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fl_core.data.federated import ClientData, FederatedData, Split
from fl_core.data.partitions import SPLITS, Partition
from fl_core.scores import CLASSIFICATION, REGRESSION, SURVIVAL
from fl_core.seeds import torch_generator
from fl_core.tokens import TokenShape

NATURAL = "natural"


def placeholder_data(
    name: str,
    facts: Mapping[str, Any],
    sites: Mapping[str, Mapping[str, Any]],
    held: Mapping[str, ClientData] | None = None,
) -> FederatedData:
    """Return the federation with the samples of the clients in ``held``, and for the others zeros without memory.

    Its digest is one over the clients' digests.

    Args:
        name: of the dataset.
        facts: what all samples have in common. ``tokens`` is the number of token ids of texts, otherwise 0. The others
            are ``shape``, ``classes``, ``mean``, ``std`` and ``images``, as in :class:`FederatedData`.
        sites: the ``sizes`` of each client's splits and the ``digest`` of its samples, by the client's name.

    >>> facts = {"shape": [3], "classes": ["no", "yes"], "tokens": 0, "mean": [], "std": [], "images": False}
    >>> sizes = {"train": 9, "validation": 2, "test": 4}
    >>> made = placeholder_data("toy", facts, {"a": {"sizes": sizes, "digest": "5f"}})
    >>> made.weights, made.clients[0].test.x.shape, made.clients[0].test.x.untyped_storage().nbytes()
    ((9,), torch.Size([4, 3]), 4)
    """
    plain = tuple(facts["shape"])
    shape = TokenShape(plain, facts["tokens"]) if facts["tokens"] else plain
    sizes = {client: each["sizes"] for client, each in sites.items()}
    clients = [(held or {}).get(client) or _empty(client, counts, facts) for client, counts in sizes.items()]
    digests = "".join(f"{client}|{each['digest']}\n" for client, each in sites.items())
    source = hashlib.sha256(digests.encode()).hexdigest()
    partition = _partition(sizes, source)
    digest = hashlib.sha256(f"{source}|{partition.digest}".encode()).hexdigest()
    return FederatedData(
        *(name, shape, tuple(facts["classes"]), tuple(clients), partition, source, digest),
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        images=facts["images"],
    )


def placeholder_client(data: FederatedData, name: str, seed: int) -> FederatedData:
    """Return the federation with random samples instead of one client's. Only the number of its own remains.

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
        return Split(x.to(split.x), _draw_targets(data.task, split.y.shape, data.n_classes, draw).to(split.y))

    other = ClientData(name, **{split: like(data.client(name).split(split)) for split in SPLITS})
    return replace(data, clients=tuple(other if each.name == name else each for each in data.clients))


def _draw_targets(task: str, shape: torch.Size, n_classes: int, draw: torch.Generator) -> torch.Tensor:
    """Return random targets of a task, as :func:`placeholder_client` draws them."""
    if task == CLASSIFICATION:
        return torch.arange(shape[0]) % n_classes
    if task == REGRESSION:
        return torch.randn(shape, generator=draw)
    y = torch.randint(2, shape, generator=draw).float()
    if task == SURVIVAL:
        y[:, 0] = torch.randn(shape[0], generator=draw).abs()
    return y


def _empty(name: str, sizes: Mapping[str, int], facts: Mapping[str, Any]) -> ClientData:
    kind, label = torch.zeros((), dtype=torch.int64 if facts["tokens"] else torch.float32), torch.zeros(())
    label = label.long() if facts["classes"] else label
    splits = {split: Split(kind.expand(sizes[split], *facts["shape"]), label.expand(sizes[split])) for split in SPLITS}
    return ClientData(name, **splits)


def _partition(sizes: Mapping[str, Mapping[str, int]], source_digest: str) -> Partition:
    """Return a partition that numbers the samples client by client and split by split."""
    counts = [sum(each[split] for each in sizes.values()) for split in SPLITS]
    numbers = iter(np.split(np.arange(sum(counts)), np.cumsum([each[s] for each in sizes.values() for s in SPLITS])))
    indices = {name: {split: next(numbers) for split in SPLITS} for name in sizes}
    params = {"clients": len(indices), "splits": [count / max(1, sum(counts)) for count in counts]}
    return Partition(NATURAL, params, 0, indices, sum(counts), source_digest)


def digest_of(client: ClientData) -> str:
    """Return the SHA-256 over one client's samples, split by split."""
    sha = hashlib.sha256()
    for split in SPLITS:
        part = client.split(split)
        for tensor in (part.x, part.y):
            sha.update(f"{split}|{tensor.dtype}|{list(tensor.shape)}|".encode())
            sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()
