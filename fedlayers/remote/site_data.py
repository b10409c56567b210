"""The data of a site: one client's samples, their split, and the facts that a server may know."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fl_core.data import FederatedData, files, text
from fl_core.data.arrays import Array, Integers, MissingError
from fl_core.data.categories import check_categories, width
from fl_core.data.columns import Reading
from fl_core.data.federated import ClientData, Split
from fl_core.data.loading import open_named
from fl_core.data.partitions import SPLITS
from fl_core.data.partitions.base import check_shares, split_of
from fl_core.data.placeholder import digest_of
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.recipes import SHARES
from fl_core.data.registry import DATASETS
from fl_core.data.sources import Source
from fl_core.errors import UsageError, check_known, listing
from fl_core.scores import CLASSIFICATION, REGRESSION
from fl_core.tokens import TokenShape

STANDARD = "standard"
FEWEST = 10
"""Minimum number of values of a feature for which their mean is sent. The mean of one value is that value."""


class SiteData(Protocol):
    """The interface to one site's data.

    Attributes:
        name: of the client. sizes: samples of each split.
        fixed: whether the split is the same for every number and seed.
    """

    name: str
    sizes: Mapping[str, int]
    fixed: bool

    def facts(self) -> dict[str, Any]:
        """Return names and numbers for a greeting, without samples."""

    def drawn(self, number: int, seed: int, scaling: Preprocessing | None = None) -> ClientData:
        """Return the samples, scaled, in the split of the client with this number and seed."""

    def moments(self, number: int, seed: int) -> Moments:
        """Return the moments of the features of that split's training samples.

        Raises:
            UsageError: the data are not to be scaled or filled, or a feature has too few values.
        """

    def rows(self, number: int, seed: int) -> Mapping[str, Counter[bytes]]:
        """Return digests of the samples of each split with their counts, to count changed rows."""

    def classes(self, number: int, seed: int) -> int:
        """Return the number of classes in that split's validation samples; 0 for a regression."""


@dataclass(frozen=True)
class Moments:
    """The moments that a scaling needs: the number of samples, and of each feature its values' mean and spread.

    >>> one = Moments.from_features(np.array([[1.0, 5.0], [3.0, np.nan]]))
    >>> other = Moments.from_features(np.array([[8.0, 5.0]]))
    >>> both = one.merge(other)
    >>> both.count, both.present, both.mean, [round(each, 9) for each in both.squares]
    (3, (3, 2), (4.0, 5.0), [26.0, 0.0])

    Attributes:
        count: number of samples. present: number of values of each feature.
        mean, squares: of these values the mean, and the sum of squared differences from it.
    """

    count: int
    present: tuple[int, ...]
    mean: tuple[float, ...]
    squares: tuple[float, ...]

    @classmethod
    def from_features(cls, x: Array) -> Moments:
        """Return the moments of features [n, d]; NaN values are missing."""
        values = x.astype(np.float64)
        known = ~np.isnan(values)
        present = known.sum(0)
        mean = np.where(known, values, 0.0).sum(0) / np.maximum(present, 1)
        squares = np.square(np.where(known, values - mean, 0.0)).sum(0)
        return cls(len(values), tuple(present.tolist()), tuple(mean.tolist()), tuple(squares.tolist()))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both together (Chan, Golub and LeVeque 1983)."""
        own, more = np.array(self.present), np.array(other.present)
        present = own + more
        gap = np.array(other.mean) - np.array(self.mean)
        mean = np.array(self.mean) + gap * more / np.maximum(present, 1)
        squares = np.array(self.squares) + np.array(other.squares) + gap**2 * own * more / np.maximum(present, 1)
        count = self.count + other.count
        return Moments(count, tuple(present.tolist()), tuple(mean.tolist()), tuple(squares.tolist()))

    def preprocessing(self, columns: Sequence[str], scale: str, impute: str) -> Preprocessing:
        """Return the preprocessing that fills missing values with the mean, and scales to mean 0 and variance 1.

        Each part is used only if it is asked for. A constant feature is only shifted.

        Raises:
            UsageError: a column has no value to fill it with.
        """
        empty = [columns[k] if columns else str(k) for k, n in enumerate(self.present) if not n]
        if empty:
            raise UsageError(
                f"every column must have a value at some site; got none in {listing(empty)}. "
                "Leave it out at all sites with drop, in [data] of their files."
            )
        fill = () if impute == "none" else self.mean
        if scale == "none":
            return Preprocessing(tuple(columns), scale, impute, fill)
        spread = np.sqrt(np.array(self.squares) / self.count)  # a filled value is the mean, and adds no square
        spread[spread == 0] = 1.0
        return Preprocessing(tuple(columns), scale, impute, fill, self.mean, tuple(spread.tolist()))


class PresplitData:
    """A client of data that are split already.

    >>> import fedlayers as fl
    >>> holding = PresplitData(fl.load("heart"), "va")
    >>> holding.name, holding.sizes
    ('va', {'train': 83, 'validation': 21, 'test': 26})
    """

    fixed = True

    def __init__(self, data: FederatedData, client: str) -> None:
        self.name, self._data, self._client = client, data, data.client(client)
        _check_task(client, data.task)
        self.sizes: Mapping[str, int] = {split: len(self._client.split(split)) for split in SPLITS}

    def facts(self) -> dict[str, Any]:
        data = self._data
        return {
            "name": self.name,
            "dataset": data.name if data.name in DATASETS else "",
            "sizes": dict(self.sizes),
            "digest": digest_of(self._client),
            "shape": list(data.shape),
            "classes": list(data.classes),
            "tokens": data.shape.tokens if isinstance(data.shape, TokenShape) else 0,
            "words": digest_of_words(data.words),
            "mean": [float(each) for each in data.mean],
            "std": [float(each) for each in data.std],
            "images": data.images,
            "scale": "none",
            "impute": "none",
            "columns": [] if data.preprocessing is None else list(data.preprocessing.columns),
        }

    def drawn(self, number: int, seed: int, scaling: Preprocessing | None = None) -> ClientData:
        return self._client

    def moments(self, number: int, seed: int) -> Moments:
        raise UsageError(f"moments must be of data without scaling; got {self.name!r}.")

    def rows(self, number: int, seed: int) -> Mapping[str, Counter[bytes]]:
        parts = {split: self._client.split(split) for split in SPLITS}
        return {split: Counter(digests_of(part.x.numpy(), part.y.numpy())) for split, part in parts.items()}

    def classes(self, number: int, seed: int) -> int:
        return len(self._client.validation.y.unique()) if self._data.classes else 0


def _check_task(name: str, task: str) -> None:
    if task not in (CLASSIFICATION, REGRESSION):
        raise UsageError(f"site {name!r}: task must be {CLASSIFICATION} or {REGRESSION} over the network; got {task}.")


def digests_of(x: Array, y: Array) -> list[bytes]:
    """Return a digest of 16 bytes for each sample with its label."""
    pairs = zip(np.ascontiguousarray(x), np.ascontiguousarray(y), strict=True)
    return [hashlib.blake2b(sample.tobytes() + label.tobytes(), digest_size=16).digest() for sample, label in pairs]


def digest_of_words(words: Sequence[str] | None) -> str | None:
    """Return the digest for comparing sites' vocabularies or categories; None if the data have neither."""
    return None if words is None else hashlib.sha256("\n".join(words).encode()).hexdigest()


def _read(name: str, path: Path, how: Reading) -> Source:
    """Read a site's file. Its errors on missing values name what a site can do about them."""
    try:
        return files.read(path, how)
    except UsageError as error:
        if not isinstance(error.__cause__, MissingError):
            raise
        raise UsageError(
            f'site {name!r}: {error.__cause__}. Set impute = "mean" in [data] of all sites to fill what is missing '
            "with the mean over all sites, or leave columns out with drop."
        ) from None


def _with_vocabulary(name: str, source: Source, vocabulary: Path | str | None) -> Source:
    """Return a site's texts in the federation's vocabulary; other data unchanged."""
    if source.words is None:
        if vocabulary is not None:
            raise UsageError(
                f"site {name!r}: vocabulary must be for texts; got {source.name}, which holds none. Leave it out."
            )
        return source
    if vocabulary is None:
        raise UsageError(
            f"site {name!r}: vocabulary must be one on which all sites agreed; got none. "
            'Add vocabulary = "words.txt" (a word a line) or "hashed:4096" to [data].'
        )
    return text.with_vocabulary(source, vocabulary)


class SiteDataset:
    """One client's own data, read at the client: its file, or one natural client of a dataset.

    Its split is the same as in a run on all clients' data together, since it depends on the client's number alone.

    >>> silo = SiteDataset("va", "heart")
    >>> silo.sizes, len(silo.drawn(number=3, seed=0).test)
    ({'train': 83, 'validation': 21, 'test': 26}, 26)

    Args:
        name: of the client. dataset: a name, or the path of a file as for :func:`fl_core.data.files.read`.
        client: whose samples to use if the data have clients; by default those of ``name``.
        classes: all classes of the federation, some of which a file may lack; by default those of the file.
        data_root: of named datasets.
        vocabulary: of texts, the same at all sites: a file with a word a line, or ``hashed:N``, as for
            :func:`fl_core.data.text.with_vocabulary`.
        categories: of a table's columns of words, all words of the federation. All unlisted words count as one more.
        reading: how a file is read, see :class:`fl_core.data.columns.Reading`. ``scale="standard"`` scales by the
            means and variances of all sites' training samples. Each site sends its own. ``impute="mean"`` fills missing
            values with the same means.

    Raises:
        UsageError: no such data or client, or data that one client cannot prepare alone.
    """

    fixed = False

    def __init__(
        self,
        name: str,
        dataset: Path | str,
        *,
        client: str | None = None,
        classes: Sequence[str] | None = None,
        data_root: Path | str | None = None,
        vocabulary: Path | str | None = None,
        categories: Mapping[str, Sequence[str]] | None = None,
        **reading: Any,
    ) -> None:
        self.name = name
        how = replace(Reading.with_keys(reading), classes=None if classes is None else tuple(map(str, classes)))
        _check_task(name, how.task)
        how = replace(how, scale=how.scale or "none")  # a mean leaves a site only if it is asked for
        how = replace(how, categories=check_categories(categories or {}))
        if str(dataset) in DATASETS:
            files.check_plain(str(dataset), how)
            if categories:
                raise UsageError(f"{dataset} has no columns of words. Leave categories out.")
            if classes is not None:
                raise UsageError(f"{dataset} has its own classes. Leave classes out.")
            source = open_named(str(dataset), data_root=data_root)
            pool = DATASETS[str(dataset)].recipe
            source = source.first(min(pool.max_samples or len(source) if pool else len(source), len(source)))
        else:
            path = Path(dataset)
            if not path.exists():
                raise UsageError(f"site {name!r}: dataset must be a name or a file; got {str(dataset)!r}. Correct it.")
            source = _read(name, path, how)
        if source.owner is not None:
            own = check_known(f"client of {dataset}", client or name, source.owner_names)
            source = source.take(np.flatnonzero(source.owner == source.owner_names.index(own)))
        elif client is not None:
            raise UsageError(f"{dataset} names no clients. Leave client out; got {client!r}.")
        if how.scale not in ("none", STANDARD) or how.impute not in ("none", "mean"):
            raise UsageError(
                f"site {name!r}: scale must be none or {STANDARD}, and impute none or mean; got {how.scale} and "
                f"{how.impute}. Choose these: the others need all sites' samples."
            )
        source = _with_vocabulary(name, source, vocabulary)
        asked = source.with_methods(how.scale, how.impute)
        self._scale, self._impute, self._prepares = asked.scale, asked.impute, asked.prepares
        self._dataset = str(dataset) if str(dataset) in DATASETS else ""
        self._source = source
        self._shares = check_shares(SHARES)
        self.sizes: Mapping[str, int] = {
            split: len(each) for split, each in zip(SPLITS, self._split(0, 0), strict=True)
        }

    def facts(self) -> dict[str, Any]:
        source = self._source
        scale = (source.mean, source.std) if source.is_image else ((), ())
        return {
            "name": self.name,
            "dataset": self._dataset,
            "sizes": dict(self.sizes),
            "digest": source.digest,
            "shape": [width(len(source.columns), source.categories)] if source.categories else list(source.shape),
            "classes": list(source.classes),
            "columns": list(source.columns),
            "tokens": source.shape.tokens if isinstance(source.shape, TokenShape) else 0,
            "words": digest_of_words(list(map(repr, source.categories)) if source.categories else source.words),
            "images": source.is_image,
            "scale": self._scale,
            "impute": self._impute,
            **{key: [float(each) for each in values] for key, values in zip(("mean", "std"), scale, strict=True)},
        }

    def drawn(self, number: int, seed: int, scaling: Preprocessing | None = None) -> ClientData:
        asked = ("none", "none") if scaling is None else (scaling.scale, scaling.impute)
        if asked != (self._scale, self._impute):
            raise UsageError(
                f"scale and impute must be those of site {self.name!r}, {self._scale!r} and {self._impute!r}; got "
                f"{asked[0]!r} and {asked[1]!r}. Let all sites say the same."
            )
        if scaling is not None:
            self._check_scaling(scaling)
        source = self._source
        if scaling is not None or source.categories:
            made = replace(scaling or Preprocessing(source.columns), categories=source.categories)
            source = replace(source, x=made.transform(source.x))

        def taken(indices: Integers) -> Split:
            return Split(source.tensor(indices), torch.from_numpy(source.y[indices]))

        parts = zip(SPLITS, self._split(number, seed), strict=True)
        return ClientData(self.name, **{split: taken(np.sort(each).astype(np.int64)) for split, each in parts})

    def _check_scaling(self, scaling: Preprocessing) -> None:
        """Refuse a scaling of other columns, or one with unusable numbers.

        Raises:
            UsageError: says what it must be.
        """
        width = self._source.x.shape[1]
        filled, scaled = width * (self._impute != "none"), width * (self._scale == STANDARD)
        sizes = (len(scaling.fill), len(scaling.centre), len(scaling.spread))
        sound = sizes == (filled, scaled, scaled) and all(each > 0 for each in scaling.spread)
        if scaling.columns != tuple(self._source.columns) or not sound:
            raise UsageError(
                f"the scaling must have {filled} fills, {scaled} centres and {scaled} spreads above 0, of "
                f"the site's {width} columns; got {str(scaling)[:80]}. Take them from the moments."
            )

    def moments(self, number: int, seed: int) -> Moments:
        if not self._prepares:
            raise UsageError(f"moments must be of data without scaling; got {self.name!r}.")
        x = self._source.x[np.sort(self._split(number, seed)[0])]
        x[:, [k for k, words in enumerate(self._source.categories) if words]] = 0.0  # which tells nothing of words
        found = Moments.from_features(x)
        names = self._source.columns or tuple(map(str, range(len(found.present))))
        few = [name for name, n in zip(names, found.present, strict=True) if 0 < n < FEWEST]
        if few:
            raise UsageError(
                f"site {self.name!r} must have {FEWEST} or more values of a column in its training samples, or none; "
                f"got fewer of {listing(few)}. Leave these columns out at all sites with drop."
            )
        return found if self._scale == STANDARD else replace(found, squares=(0.0,) * len(found.squares))

    def rows(self, number: int, seed: int) -> Mapping[str, Counter[bytes]]:
        parts = zip(SPLITS, self._split(number, seed), strict=True)
        return {split: Counter(self._digests[k] for k in indices.tolist()) for split, indices in parts}

    @cached_property
    def _digests(self) -> list[bytes]:
        return digests_of(self._source.x, self._source.y)

    def classes(self, number: int, seed: int) -> int:
        validation = self._split(number, seed)[SPLITS.index("validation")]
        return len(np.unique(self._source.y[validation])) if self._source.classes else 0

    def _split(self, number: int, seed: int) -> tuple[Integers, ...]:
        source = self._source
        if source.is_train is None:
            return split_of(self.name, number, np.arange(len(source)), None, self._shares, seed)
        train, test = np.flatnonzero(source.is_train), np.flatnonzero(~source.is_train)
        return split_of(self.name, number, train, test, self._shares, seed)
