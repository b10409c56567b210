"""A dataset before it is partitioned over clients."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_core.data import categories, preprocessing
from fl_core.data.arrays import Array, Integers
from fl_core.data.categories import Categories
from fl_core.data.preprocessing import Preprocessing
from fl_core.errors import UsageError
from fl_core.tokens import SPECIAL, UNKNOWN, TokenShape

LEAST, MOST = 2, 10_000
"""How often a word must be met to be in a vocabulary, and how many words that has."""


@dataclass(frozen=True, eq=False)
class Source:
    """Samples with their labels and, where the data have them, natural clients and an official test set.

    Attributes:
        name: registry name or path.
        x: uint8 images [n, H, W] or [n, H, W, C], which :meth:`tensor` scales; or float32 [n, ...], taken as it is;
            or int64 codes [n, length] of ``words``.
        y: class indices, int64 [n]; or targets, float32 [n].
        classes: names of the classes; none: ``y`` holds targets, numbers that are to be predicted.
        owner: index of each sample's natural client, int64 [n]; None = no natural clients.
        owner_names: names of the natural clients.
        is_train: false for samples of the official test set, bool [n]; None = there is none.
        mean, std: one number a channel, applied to images scaled to 0..1; empty = not normalised.
        words: of texts, what the codes from ``len(SPECIAL)`` on stand for; None = the samples are no texts.
        shuffled: whether the order in the file carries no meaning, so that the first samples are a fair pool.
        columns: names of a table's features, where it has a header.
        scale, impute: what :meth:`fitted` is to do with a table's numbers; missing ones are NaN until then.
        categories: of a table's columns of words, what the numbers in ``x`` stand for until :meth:`fitted`.
        preprocessing: what a table's numbers have gone through, by :meth:`fitted` or by fixed numbers of the dataset's
            own; None = nothing.
    """

    name: str
    x: Array
    y: Array
    classes: tuple[str, ...]
    owner: Integers | None = None
    owner_names: tuple[str, ...] = ()
    is_train: NDArray[np.bool_] | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    words: tuple[str, ...] | None = None
    shuffled: bool = False
    columns: tuple[str, ...] = ()
    scale: str = "none"
    impute: str = "none"
    categories: Categories = ()
    preprocessing: Preprocessing | None = None

    def __post_init__(self) -> None:
        for name in (*self.classes, *self.owner_names, *(self.words or ())):
            if any("\ud800" <= sign <= "\udfff" for sign in name):
                raise UsageError(f"{self.name}: the name {name!a} is no valid text in UTF-8: rename it")

    def __len__(self) -> int:
        return len(self.y)

    @property
    def labels(self) -> Integers:
        """Class indices, int64 [n]; where numbers are to be predicted all 0: one class."""
        return self.y.astype(np.int64, copy=False) if self.classes else np.zeros(len(self), dtype=np.int64)

    @property
    def is_image(self) -> bool:
        """Whether ``x`` holds raw images."""
        return self.x.dtype == np.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample as :meth:`tensor` gives it; images are (C, H, W), texts a :class:`TokenShape`."""
        if self.words is not None:
            return TokenShape(self.x.shape[1:], len(SPECIAL) + len(self.words))
        if not self.is_image:
            return tuple(self.x.shape[1:])
        height, width, *channels = self.x.shape[1:]
        return (channels[0] if channels else 1, height, width)

    @property
    def prepares(self) -> bool:
        """Whether a table's numbers are to be filled or scaled."""
        return (self.scale, self.impute) != ("none", "none")

    def asked(self, scale: str, impute: str) -> Source:
        """The source with how its numbers are to be scaled and filled; nothing is fitted yet.

        Raises:
            UsageError: something is asked for, and it is no table of numbers, or one that is prepared already.
        """
        asked = replace(self, scale=scale, impute=impute)
        if asked.prepares and (self.words is not None or self.x.ndim != 2):
            what = "texts" if self.words is not None else f"samples of shape {list(self.shape)}"
            raise UsageError(f"{self.name} holds {what}: scale and impute are for tables of numbers; leave them out")
        if asked.prepares and self.preprocessing is not None:
            raise UsageError(f"{self.name} is prepared by fixed numbers of its own: leave out scale and impute")
        return asked

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all arrays and names: equal digests mean the same samples in the same order."""
        names = (self.classes, self.owner_names, self.mean, self.std, *(() if self.words is None else (self.words,)))
        names += (self.scale, self.impute) if self.prepares else ()
        names += (self.categories,) if self.categories else ()
        sha = hashlib.sha256(repr(names).encode())
        for array in (self.x, self.y, self.owner, self.is_train):
            if array is None:
                sha.update(b"none")
            else:
                sha.update(f"{array.dtype.str}{array.shape}".encode())
                sha.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return sha.hexdigest()

    def tensor(self, indices: Integers) -> Tensor:
        """Samples as contiguous float32 [len(indices), *shape]; images scaled to 0..1, then (x - mean) / std.

        Texts are int64 token ids.
        """
        x = torch.from_numpy(self.x[indices])
        if not self.is_image:
            return x
        x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2)
        x = x.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        if self.mean:
            x.sub_(torch.tensor(self.mean).view(-1, 1, 1)).div_(torch.tensor(self.std).view(-1, 1, 1))
        return x

    def fitted(self, train: Integers, made: Preprocessing | None = None) -> Source:
        """The source with what its training samples ``train`` decide: a table filled and scaled, texts encoded.

        A table is preprocessed as was asked for, by what was ``made`` before or is fitted now. A column of words
        becomes a column for each word that these samples have, and one for all others. Texts are encoded over a
        vocabulary, the words that these samples have at least :data:`LEAST` times, at most :data:`MOST` of them,
        by falling frequency and, where that is equal, in alphabetical order. (Words met once have no row of their own
        to learn from, and teach the row of the unknown.)
        """
        if self.prepares or self.categories:
            words = made.categories if made else categories.learned(self.x[train], self.categories)
            x = categories.recoded(self.x, self.categories, words) if self.categories else self.x
            made = made or preprocessing.fitted(x[train], self.scale, self.impute, self.columns, words)
            return replace(self, x=made.transform(x), preprocessing=made, categories=())
        if self.words is None:
            unprepared = self.preprocessing is None and self.columns
            return replace(self, preprocessing=Preprocessing(self.columns)) if unprepared else self
        first = len(SPECIAL)
        counts = np.bincount(self.x[train].reshape(-1), minlength=first + len(self.words))[first:]
        order = np.argsort(-counts, kind="stable")[:MOST]  # words are sorted, so that the stable order is theirs
        return self.spelled(tuple(self.words[k] for k in order[counts[order] >= LEAST]))

    def hashed(self, buckets: int) -> Source:
        """The source of texts with the number of each word's bucket as its code: a vocabulary that nobody has to make.

        The bucket is SHA-256 of the word modulo ``buckets``; words that meet in one are not told apart.
        """
        digests = (hashlib.sha256(word.encode()).digest() for word in self.words or ())
        ids = [*range(len(SPECIAL)), *(len(SPECIAL) + int.from_bytes(each[:8], "big") % buckets for each in digests)]
        return replace(
            self, x=np.array(ids, dtype=np.int64)[self.x], words=tuple(f"bucket {k}" for k in range(buckets))
        )

    def spelled(self, vocabulary: tuple[str, ...]) -> Source:
        """The source of texts with the codes of another vocabulary; a word that it does not have is the unknown."""
        code = {word: len(SPECIAL) + k for k, word in enumerate(vocabulary)}
        ids = [*range(len(SPECIAL)), *(code.get(word, UNKNOWN) for word in self.words or ())]
        return replace(self, x=np.array(ids, dtype=np.int64)[self.x], words=vocabulary)

    def take(self, indices: Integers) -> Source:
        """The source restricted to these samples, in this order; classes and clients stay the same."""
        return replace(
            self,
            x=self.x[indices],
            y=self.y[indices],
            owner=None if self.owner is None else self.owner[indices],
            is_train=None if self.is_train is None else self.is_train[indices],
        )

    def first(self, samples: int) -> Source:
        """The first ``samples`` samples in file order, as :meth:`first_indices` has them."""
        return self if samples == len(self) else self.take(self.first_indices(samples))

    def first_indices(self, samples: int) -> Integers:
        """Which samples are the first ``samples`` in file order, ascending.

        The first of each group, and as many of a group as its share of all samples asks for; groups are the natural
        clients, the two sides of an official test set and, unless the file is ``shuffled``, the classes (a file
        sorted by class would otherwise give a pool of one class).

        Raises:
            UsageError: fewer than one sample, or more than there are.
        """
        if not isinstance(samples, int) or not 1 <= samples <= len(self):
            raise UsageError(f"max_samples={samples!r}: {self.name} has {len(self)} samples; ask for 1 to {len(self)}")
        if samples == len(self):
            return np.arange(samples)
        labels = None if self.shuffled or not self.classes else self.y
        keys = [key for key in (self.owner, self.is_train, labels) if key is not None]
        if not keys:
            return np.arange(samples)
        _, group = np.unique(np.stack([key.astype(np.int64) for key in keys]), axis=1, return_inverse=True)
        group = group.reshape(-1)
        sizes = np.bincount(group)
        quota, rest = np.divmod(sizes * samples, len(self))
        quota[np.argsort(-rest, kind="stable")[: samples - quota.sum()]] += 1
        chosen = [np.flatnonzero(group == k)[:count] for k, count in enumerate(quota)]
        return np.sort(np.concatenate(chosen)).astype(np.int64)
