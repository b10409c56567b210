"""Who holds which sample: a source dealt to clients, and each client's samples to train, validation and test."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fl_core import seeds
from fl_core.data import deal, draw
from fl_core.data.arrays import Integers
from fl_core.data.sources import Source
from fl_core.errors import UsageError, check_known
from fl_core.tree import Tree

KINDS = (
    *("iid", "dirichlet", "pathological", "natural", "natural_dirichlet", "non_iid_1", "non_iid_2"),
    *("capped_dirichlet", "fedpft_dirichlet", "fedpft_pathological"),
)
SPLITS = ("train", "validation", "test")
SHARES = (0.64, 0.16, 0.20)
NATURAL = ("natural", "natural_dirichlet")
"""Feature skew, and feature and label skew: every client's samples are of one natural owner (domain)."""
PFEDLA = ("non_iid_1", "non_iid_2")
PFEDLA_SHARES = (0.56, 0.14, 0.30)
"""pFedLA tests on 30 %; a fifth of the rest is for validation."""
FEDPFT = ("fedpft_dirichlet", "fedpft_pathological")
FEDPFT_SHARES = (5 / 7, 1 / 7, 1 / 7)
"""FedPFT trains on 500 samples a client and tests on 100; as many are for validation."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Which sample of a source belongs to which client and split.

    Attributes:
        kind: one of :data:`KINDS`.
        params: what the kind was asked for, and ``splits``; plain numbers and lists.
        seed: the seed it was drawn with.
        indices: ``indices[client][split]``, ascending int64 positions in the source; no sample is there twice, except
            that clients of :data:`FEDPFT` may share samples, though never one's test sample with another's training.
        n_samples: size of the source.
        source_digest: :attr:`Source.digest` of the source.
    """

    kind: str
    params: dict[str, Any]
    seed: int
    indices: dict[str, dict[str, Integers]]
    n_samples: int
    source_digest: str

    @property
    def names(self) -> tuple[str, ...]:
        """Client names, in order."""
        return tuple(self.indices)

    @property
    def digest(self) -> str:
        """SHA-256 over the clients' names and indices."""
        sha = hashlib.sha256()
        for name, splits in self.indices.items():
            for split in SPLITS:
                sha.update(f"{name}|{split}|{len(splits[split])}|".encode())
                sha.update(splits[split].astype("<i8").tobytes())
        return sha.hexdigest()

    def to_tree(self) -> Tree:
        """Everything as tensors: int64 indices under ``<client number>/<split>``, the rest as UTF-8 under ``meta``."""
        meta = {
            "kind": self.kind,
            "params": self.params,
            "seed": self.seed,
            "names": self.names,
            "n_samples": self.n_samples,
            "source_digest": self.source_digest,
        }
        tree = {"meta": torch.frombuffer(bytearray(json.dumps(meta).encode()), dtype=torch.uint8).clone()}
        for number, splits in enumerate(self.indices.values()):
            tree |= {f"{number}/{split}": torch.from_numpy(splits[split].copy()) for split in SPLITS}
        return tree

    @classmethod
    def from_tree(cls, tree: Tree) -> Partition:
        """The partition that :meth:`to_tree` was called on.

        Raises:
            UsageError: the tree is no stored partition.
        """
        try:
            meta = json.loads(tree["meta"].cpu().numpy().tobytes())
            names = meta.pop("names")
            indices = {
                name: {split: tree[f"{number}/{split}"].cpu().numpy().astype(np.int64) for split in SPLITS}
                for number, name in enumerate(names)
            }
            return cls(indices=indices, **meta)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"not a stored partition: {type(error).__name__}: {error}") from error

    def check(self, source: Source) -> None:
        """Refuse a source that these indices were not made for.

        Raises:
            UsageError: another number of samples, other samples, or indices that overlap or lie outside.
        """
        if self.n_samples != len(source):
            raise UsageError(f"the stored partition is of {self.n_samples} samples; {source.name} has {len(source)}")
        if self.source_digest != source.digest:
            raise UsageError(
                f"the stored partition was made for other samples than those of {source.name}: "
                f"digest {self.source_digest[:12]}, not {source.digest[:12]}"
            )
        every = np.concatenate([part[split] for part in self.indices.values() for split in SPLITS])
        if every.size and (every.min() < 0 or every.max() >= len(source)):
            raise UsageError(f"the stored partition has indices outside 0..{len(source) - 1}")
        groups = [np.concatenate([part[split] for split in SPLITS]) for part in self.indices.values()]
        if self.kind in FEDPFT:  # clients may share a sample, but none that one of them tests on
            tested, others = (
                np.unique(np.concatenate([part[split] for part in self.indices.values() for split in splits]))
                for splits in (("test",), ("train", "validation"))
            )
            groups.append(np.concatenate([tested, others]))
        else:
            groups = [every]
        if any(len(np.unique(each)) != len(each) for each in groups):
            raise UsageError("the stored partition has a sample twice")


def make(
    source: Source,
    kind: str,
    *,
    clients: int | None = None,
    alpha: float = 0.5,
    classes_per_client: int | None = None,
    samples_per_client: int | None = None,
    dominance: float = 0.5,
    seed: int = 0,
    splits: Sequence[float] | None = None,
) -> Partition:
    """Deal a source to clients and divide each client's samples.

    Without an official test set every client's samples are divided at random into shares ``splits`` (train,
    validation, test). With one, only its training side is dealt; its test side follows: natural clients keep their
    own (those of ``natural_dirichlet`` share what is their owner's), and otherwise each class's test samples go to
    the clients in the proportions of their training samples of that class (a class that no client trains on is left
    out). Then only the ratio of the first two shares is used.

    ``non_iid_1`` and ``non_iid_2`` are pFedLA's (Ma et al. 2022; see :func:`fl_core.data.deal.dominated`): equally
    many samples for every client from both sides of an official split together, each client's divided by shares of
    its own (0.56, 0.14, 0.30 by default). In ``non_iid_1`` a client has a few classes only; in ``non_iid_2`` a few
    classes make up ``dominance`` of its samples, which the paper leaves open.

    ``fedpft_dirichlet`` and ``fedpft_pathological`` are FedPFT's (Wu et al. 2025): every client has equally many
    samples and one label distribution for training, validation and test, drawn from a Dirichlet over classes, or even
    over a few random ones. Each client draws from the whole pool, so that clients may share images; test samples come
    from the official test side or else from one that is set apart first, and nobody trains on those.

    ``natural`` is one client for each natural owner of the data (feature skew); ``natural_dirichlet`` deals each owner
    to several clients that differ in labels as well (see :func:`fl_core.data.deal.natural_dirichlet`).
    ``capped_dirichlet`` is ``dirichlet`` with a bound on the clients' sizes (see
    :func:`fl_core.data.deal.capped_dirichlet`).

    Args:
        clients: number of clients; for ``natural`` None or exactly the number of natural clients; for
            ``natural_dirichlet`` a multiple of that, by default five times.
        classes_per_client: of ``pathological`` (default 2), ``non_iid_1`` (default 4, and 12 of 100 classes or more),
            the dominant ones of ``non_iid_2`` (default 2, and 6 of 100 or more), and ``fedpft_pathological`` (default
            a fifth of all).
        samples_per_client: of ``non_iid_1`` and ``non_iid_2``; default a hundredth of the samples, at most 700, and
            so the same for 10 and 100 clients. For FedPFT's kinds the training samples, default 500; the other splits
            are as large as their shares ask for beside them.
        splits: default 0.64, 0.16, 0.20.

    Raises:
        UsageError: an unknown kind, a parameter out of range, or a client with too few samples to divide.
    """
    check_known("partition", kind, KINDS)
    usual = PFEDLA_SHARES if kind in PFEDLA else FEDPFT_SHARES if kind in FEDPFT else SHARES
    shares = check_shares(usual if splits is None else splits)
    if kind in FEDPFT:
        if clients is None:
            raise UsageError(f"partition {kind!r} needs a number of clients")
        few = classes_per_client if kind == "fedpft_pathological" else None
        drawn, asked = draw.fedpft(source, kind, clients, alpha, few, samples_per_client, shares, seed)
        indices = dict(zip(_numbered(clients), (dict(zip(SPLITS, each, strict=True)) for each in drawn), strict=True))
        return Partition(kind, {**asked, "splits": list(shares)}, int(seed), indices, len(source), source.digest)
    pooled = source.is_train is None or kind in PFEDLA
    train = np.arange(len(source)) if pooled else np.flatnonzero(np.asarray(source.is_train))
    labels = source.y[train]
    names: tuple[str, ...]
    params: dict[str, Any]
    if kind == "natural":
        owner, names = _natural_clients(source, clients)
        parts, params = deal.natural(owner[train], names), {}
    elif kind == "natural_dirichlet":
        owner, owners = _natural_clients(source, None)
        each = _clients_each(source, clients)
        parts = deal.natural_dirichlet(labels, owner[train], owners, each, alpha, seed)
        names, params = tuple(f"{name}_{k}" for name in owners for k in range(each)), {"alpha": float(alpha)}
    else:
        if clients is None:
            raise UsageError(f"partition {kind!r} needs a number of clients")
        if kind == "iid":
            parts, params = deal.iid(labels, clients, seed), {}
        elif kind == "dirichlet":
            parts, params = deal.dirichlet(labels, clients, alpha, seed), {"alpha": float(alpha)}
        elif kind == "capped_dirichlet":
            parts, params = deal.capped_dirichlet(labels, clients, alpha, seed), {"alpha": float(alpha)}
        elif kind == "pathological":
            few = 2 if classes_per_client is None else classes_per_client
            parts, params = deal.pathological(labels, clients, few, seed), {"classes_per_client": int(few)}
        else:
            parts, params = _pfedla(labels, kind, clients, classes_per_client, samples_per_client, dominance, seed)
        names = _numbered(clients)
    parts = [train[part] for part in parts]
    tests = None if pooled else _official_tests(source, kind, parts, seed)
    indices = {}
    for number, (name, part) in enumerate(zip(names, parts, strict=True)):
        shuffled = seeds.numpy_generator(seed, "split", number).permutation(part)
        sizes = split_sizes(name, len(part), shares if tests is None else shares[:2])
        cut = np.split(shuffled, np.cumsum(sizes)[:-1])
        if tests is not None:
            if not len(tests[number]):
                raise UsageError(f"client {name!r} has no sample of the official test set of {source.name}")
            cut.append(tests[number])
        indices[name] = {split: np.sort(each).astype(np.int64) for split, each in zip(SPLITS, cut, strict=True)}
    params = {"clients": len(names), **params, "splits": list(shares)}
    return Partition(kind, params, int(seed), indices, len(source), source.digest)


def _numbered(clients: int) -> tuple[str, ...]:
    return tuple(f"client_{number:0{len(str(clients - 1))}d}" for number in range(clients))


def _pfedla(
    labels: Integers, kind: str, clients: int, few: int | None, samples: int | None, dominance: float, seed: int
) -> tuple[list[Integers], dict[str, Any]]:
    classes = len(np.unique(labels))
    usual = {"non_iid_1": (4, 12), "non_iid_2": (2, 6)}[kind][classes >= 100]
    few = min(usual, classes) if few is None else few
    samples = min(len(labels) // max(clients, 100), 700) if samples is None else samples
    params: dict[str, Any] = {"classes_per_client": int(few), "samples_per_client": int(samples)}
    if kind == "non_iid_2":
        params["dominance"] = float(dominance)
    return deal.dominated(labels, clients, samples, few, params.get("dominance", 1.0), seed), params


def _natural_clients(source: Source, clients: int | None) -> tuple[Integers, tuple[str, ...]]:
    if source.owner is None:
        fitting = ", ".join(kind for kind in KINDS if kind not in NATURAL)
        raise UsageError(f"{source.name} has no natural clients; partitions that fit: {fitting}")
    if clients not in (None, len(source.owner_names)):
        raise UsageError(
            f"clients={clients}: {source.name} has {len(source.owner_names)} natural clients, and all take part; "
            f"leave the number out, or ask for another partition"
        )
    return source.owner, source.owner_names


def _clients_each(source: Source, clients: int | None) -> int:
    owners = len(source.owner_names)
    if clients is None:
        return 5
    if isinstance(clients, bool) or not isinstance(clients, int) or clients < 1 or clients % owners:
        raise UsageError(f"clients={clients!r}: {source.name} has {owners} natural owners; give a multiple of {owners}")
    return clients // owners


def _official_tests(source: Source, kind: str, parts: Sequence[Integers], seed: int) -> list[Integers]:
    """Each client's samples of the official test set."""
    test = np.flatnonzero(~np.asarray(source.is_train))
    if kind == "natural" and source.owner is not None:
        return [test[source.owner[test] == number] for number in range(len(parts))]
    if kind == "natural_dirichlet" and source.owner is not None:
        each, found = len(parts) // len(source.owner_names), []
        for number in range(len(source.owner_names)):
            own, mine = test[source.owner[test] == number], parts[number * each : (number + 1) * each]
            found += [own[part] for part in deal.follow([source.y[part] for part in mine], source.y[own], seed)]
        return found
    return [test[part] for part in deal.follow([source.y[part] for part in parts], source.y[test], seed)]


def check_shares(splits: Sequence[float]) -> tuple[float, float, float]:
    """The shares of train, validation and test as three positive numbers with sum 1.

    Raises:
        UsageError: they are not.
    """
    shares = tuple(float(share) for share in splits)
    if len(shares) != 3 or not all(share > 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise UsageError(
            f"splits={list(splits)}: three positive shares (train, validation, test) with sum 1 are needed"
        )
    return shares


def split_sizes(name: str, n: int, shares: Sequence[float]) -> list[int]:
    """Sizes of a client's splits: the later splits rounded up, from the last to the second, and at least 1 each.

    A share is taken of what the splits after it have left over, so that 46 samples at 64/16/20 % give 28, 8, 10.

    Raises:
        UsageError: fewer samples than splits.
    """
    if n < len(shares):
        kinds = ", ".join(SPLITS[: len(shares)])
        raise UsageError(f"client {name!r} has {n} samples, too few for one in each of {kinds}")
    sizes: list[int] = []
    left = n
    for k in range(len(shares) - 1, 0, -1):
        wanted = math.ceil(round(left * shares[k] / sum(shares[: k + 1]), 9))
        sizes.insert(0, min(max(wanted, 1), left - k))
        left -= sizes[0]
    return [left, *sizes]
