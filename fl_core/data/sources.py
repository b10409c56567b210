"""A dataset before it is partitioned over clients: its samples, made of arrays, and the token ids of texts."""

from __future__ import annotations

import hashlib
import numbers
import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fl_core.data import preprocessing
from fl_core.data.arrays import (
    answers,
    features,
    finite_entries,
    is_text,
    joined,
    loses_digits,
    task_of_entries,
)
from fl_core.data.columns import ColumnTable
from fl_core.data.faults import DataFault, located
from fl_core.data.names import Names, composed
from fl_core.data.preprocessing import Categories, Preprocessing
from fl_core.data.reading import CLIPS, IMAGENET, SCALES
from fl_core.data.values import Array, Bools, Integers, refuse_where
from fl_core.errors import (
    Bound,
    UsageError,
    about,
    check_value,
    listing,
    spelled,
    warn,
)
from fl_core.models.tokens import (
    LENGTH,
    PAD,
    SPECIAL,
    START,
    UNKNOWN,
    Tokenizer,
    TokenShape,
)
from fl_core.rows import CLASSIFICATION, REGRESSION, task_of

if (
    TYPE_CHECKING
):  # torch is imported where tensors are made: a table is checked without it
    from torch import Tensor

    from fl_core.models.adapter import Layout

OWN_NAME = "own"
"""The name of data from Python, in records and messages."""
EXAMPLES = 8
"""Samples of several inputs that serve as an example of them."""
LEAST_COUNT, MOST_WORDS = 2, 10_000
"""The minimum count of a word in a vocabulary, and the maximum number of its words."""

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0002ffff"
"""Letters of languages without spaces: Thai, Lao, Burmese, Khmer, Japanese and Chinese."""
_TOKEN = re.compile(
    rf"[{_UNSPACED}]|[#@]?[^\W{_UNSPACED}]+(?:['’][^\W{_UNSPACED}]+)*|[^\w\s]"
)
ROWS = 4096
"""Rows that are hashed at once."""
NOTED = 0.1
"""Share of texts that are cut, or of words that are unknown, from which a warning says so."""


@dataclass(frozen=True, eq=False)
class Source:
    """Samples with their labels, and possibly natural clients and an official test set.

    Attributes:
        name: registry name or path.
        x: uint8 images [n, H, W] or [n, H, W, C], which :meth:`tensor` scales; or float32 [n, ...], not scaled; or a
            table, float64 or float32 [n, d]; or int64 codes [n, length] of ``words``, or a tokenizer's ids.
        y: class indices, int64 [n]; targets, float32 [n]; times and events,
            float32 [n, 2]; labels of 0 and 1, float32 [n, L]; or labels at positions
            and several targets, int64 or float32 [n, ...]. Targets that float32 would
            merge are float64.
        classes: names of the classes or labels. Empty for all other targets.
        owner: index of each sample's natural client, int64 [n], or None without natural clients.
        owner_names: names of the natural clients. Empty without them.
        is_train: false for samples of the official test set, bool [n], or None without one.
        groups: the number of each sample's group, such as a patient, int64 [n], or None. A group has one client, and
            its samples are in one split.
        mean, std: one number for each channel, applied to images scaled to 0..1. Empty means no normalisation.
        words: the words of the codes from ``len(SPECIAL)`` on, or the digest of a tokenizer that has read texts. None
            if the samples are not texts.
        tokenizer: the tokenizer of a transformers folder that has read texts; None for others.
        fixed_words: whether ``words`` is the vocabulary, as of a pretrained network. Otherwise :meth:`fit` chooses it.
        shuffled: whether the order in the file has no meaning, so that the first samples are a fair pool.
        columns: names of a table's features, if it has a header.
        scale, impute, clip: how :meth:`fit` prepares a table's numbers. Missing ones are NaN until then.
        categories: the words of each column. Until :meth:`fit` the numbers in ``x`` are their indices.
        preprocessing: the preparation of a table's numbers, by :meth:`fit` or by fixed numbers of the dataset. None
            before it.
        table: the role or kind of each column of a table.
        indices: whether labels are whole numbers from Python without names.
        integers: whether rows [n, d] came as integers from Python, which may be token ids.
        layout: how several inputs lie side by side in ``x``, or None for one input.
        kind: the task, if ``y`` does not say it alone: labels at positions, or several
            numbers a sample. Otherwise empty.

    Raises:
        UsageError: a name of a class or client, or a word, is no valid UTF-8.
    """

    name: str
    x: Array
    y: Array
    classes: Names
    owner: Integers | None = None
    owner_names: Names = ()
    is_train: Bools | None = None
    groups: Integers | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    words: Names | None = None
    tokenizer: Tokenizer | None = None
    fixed_words: bool = False
    shuffled: bool = False
    columns: Names = ()
    scale: str = "none"
    impute: str = "none"
    clip: str = CLIPS[0]
    categories: Categories = ()
    preprocessing: Preprocessing | None = None
    table: ColumnTable = field(default_factory=ColumnTable)
    indices: bool = False
    integers: bool = False
    layout: Layout | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        for name in (*self.classes, *self.owner_names, *(self.words or ())):
            try:
                name.encode()
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"{self.name}: names must be valid UTF-8; got {name!a}. Rename it."
                ) from error

    def __len__(self) -> int:
        return len(self.y)

    @property
    def labels(self) -> Integers:
        """Return class indices, int64 [n]. They are 0 if the task is another one."""
        y = self.y if self.task == CLASSIFICATION else np.zeros(len(self))
        return y.astype(np.int64, copy=False)

    @property
    def task(self) -> str:
        """Return the task: one of :data:`fl_core.rows.TASKS`, or ``kind`` if that is set."""
        return self.kind or task_of(self.y.ndim, self.classes)

    def counts(self) -> pd.DataFrame:
        """Count the samples of each natural client (rows) by class.

        For other tasks than classification there is a column ``samples``. For survival
        there is also a column ``events``, and for multilabel one for each label. A
        label named ``samples`` has the column ``samples (label)``. Without natural
        clients there is one row, ``all``.
        """
        owner = self.owner
        if owner is None:
            owner = np.zeros(len(self), dtype=int)
        client = np.array(self.owner_names or ("all",))[owner]
        columns: dict[str, Any] = {"samples": 1}
        if self.task == CLASSIFICATION:
            columns = {name: self.y == k for k, name in enumerate(self.classes)}
        elif self.y.ndim == 2 and not self.kind:
            column_names = self.classes or ("", "events")
            pairs = zip(column_names, self.y.T, strict=True)
            for name, values in pairs:
                column = f"{name} (label)" if name in columns else name
                if name:
                    columns[column] = values > 0
        return pd.DataFrame(columns, index=client).groupby(level=0, sort=False).sum()

    @property
    def is_image(self) -> bool:
        """Return whether ``x`` holds raw images."""
        return self.x.dtype == np.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a sample from :meth:`tensor`.

        It is (C, H, W) for images, and a :class:`TokenShape` for texts.
        For several inputs it is a :class:`~fl_core.models.adapter.PackedShape`, with
        their layout and some samples.
        """
        if self.tokenizer:
            return TokenShape(self.x.shape[1:], self.tokenizer.tokens, self.tokenizer)
        if self.words is not None:
            return TokenShape(self.x.shape[1:], len(SPECIAL) + len(self.words))
        if self.layout is not None:
            from fl_core.models.adapter import PackedShape

            packed_shape = PackedShape(self.x.shape[1:])
            packed_shape.layout = self.layout
            packed_shape.samples = self.tensor(np.arange(min(EXAMPLES, len(self))))
            return packed_shape
        if not self.is_image:
            return tuple(self.x.shape[1:])
        height, width, *channels = self.x.shape[1:]
        return (channels[0] if channels else 1, height, width)

    @property
    def prepares(self) -> bool:
        """Return whether there is a method for filling or scaling a table's numbers."""
        return (self.scale, self.impute) != ("none", "none")

    def with_methods(self, scale: str, impute: str) -> Source:
        """Return the source with methods for scaling and filling its numbers. Nothing is fitted yet.

        Args:
            scale: one of :data:`fl_core.data.reading.SCALES`. ``imagenet`` is for
                colour images alone, and sets their ``mean`` and ``std``.
            impute: one of :data:`fl_core.data.reading.IMPUTES`.

        Raises:
            UsageError: a method is not ``none``, and the source is no table of numbers or
                has a fixed scaling. Or ``scale`` is ``imagenet``, and the source has no
                colour images or a normalisation of its own.
        """
        if scale == SCALES[-1]:
            if not self.is_image or self.shape[0] != 3 or self.mean:
                raise UsageError(
                    f"scale imagenet must have colour images without their own scaling; got {self.name}. Leave it out."
                )
            mean, std = IMAGENET
            return replace(self, mean=mean, std=std).with_methods("none", impute)
        source = replace(self, scale=scale, impute=impute)
        is_table = type(self.shape) is tuple and self.x.ndim == 2
        if source.prepares and not (is_table and self.preprocessing is None):
            obstacle = "no table of numbers"
            if is_table:
                obstacle = "its fixed scaling"
            raise UsageError(
                f"scale and impute must be none for {self.name}; got data with {obstacle}. Leave them out."
            )
        return source

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 over arrays, names of classes and clients, and scaling.

        Words of texts and tables count, too. Equal digests mean the same samples in the
        same order. The names of the source and of a table's columns do not count, nor
        does ``clip``.
        """
        names: list[Any] = [self.classes, self.owner_names, self.mean, self.std]
        if self.words is not None:
            names.append(self.words)
        if self.prepares:
            names += [self.scale, self.impute]
        names += [
            attribute for attribute in (self.categories, self.layout) if attribute
        ]
        arrays = [self.x, self.y, self.owner, self.is_train]
        if self.groups is not None:
            arrays.append(self.groups)
        sha = hashlib.sha256(repr(tuple(names)).encode())
        for array in arrays:
            if array is None:
                sha.update(b"none")
            else:
                sha.update(f"{array.dtype.str}{array.shape}".encode())
                for rows in np.array_split(array, 1 + len(array) // ROWS):
                    block = np.ascontiguousarray(rows).reshape(-1)
                    sha.update(block.view(np.uint8).data)
        return sha.hexdigest()

    def tensor(self, indices: Integers) -> Tensor:
        """Return the samples at ``indices`` as a contiguous tensor, float32 [n, ...].

        Images are scaled to 0..1, and normalised as (x - mean) / std if the source has
        a mean. Texts are int64 token ids [n, length].
        """
        import torch

        x = torch.from_numpy(self.x[indices])
        if not self.is_image:
            if x.is_floating_point():
                return x.float()
            return x
        x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2)
        x = x.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        if self.mean:
            mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (self.mean, self.std))
            x.sub_(mean).div_(std)
        return x

    def fit(
        self,
        train: Integers,
        preparation: Preprocessing | None = None,
        owner: Integers | None = None,
    ) -> Source:
        """Return the source prepared by its training samples: a table filled and scaled, texts encoded.

        A column of words becomes one column for each word in these samples, and one for
        all others. Texts get a vocabulary of the words that occur at least
        :data:`LEAST_COUNT` times in these samples. It has at most :data:`MOST_WORDS`
        words, by falling frequency and then in alphabetical order. Rarer words train
        the row of the unknown word. If a regression's table is scaled, the mean and
        deviation of its training targets are kept, too. A source that needs no
        preparation, or has one, is returned as it is.

        Args:
            train: positions of the training samples.
            preparation: stored numbers for a table. None means that they are fitted now.
                Fixed numbers of the dataset may be given again. Other samples that
                nothing prepares, such as texts, must have None.
            owner: the client of each training sample. The bounds to which a table's numbers are clipped follow from
                the quartiles of each client (:func:`fl_core.data.preprocessing.fences`). None means one client.

        Raises:
            UsageError: a column to fill has no value in a training sample, or a value
                is missing and not filled. Or the stored numbers are of other columns,
                differ from fixed ones, or are given for samples that must have None.
        """
        is_tabular = self.prepares or self.categories or self.columns
        is_prepared = not is_tabular or self.preprocessing is not None
        if preparation is not None:
            self._check_preparation(preparation, is_prepared)
        if self.words is not None and not self.tokenizer and not self.fixed_words:
            first_code, x = len(SPECIAL), self.x[train].reshape(-1)
            counts = np.bincount(x, minlength=first_code + len(self.words))[first_code:]
            # words are sorted, so ties stay in alphabetical order
            order = np.argsort(-counts, kind="stable")[:MOST_WORDS]
            frequent_words = order[counts[order] >= LEAST_COUNT]
            return self.with_vocabulary(tuple(self.words[k] for k in frequent_words))
        merged_columns = []
        if self.scale == "none" and self.x.dtype == np.float64 and self.x.ndim == 2:
            lossy_columns = [
                k for k, column in enumerate(self.x.T) if loses_digits(column)
            ]
            names = [
                repr(self.columns[k]) if self.columns else str(k) for k in lossy_columns
            ]
            merged_columns = [f"column {listing(names)}"] if names else []
        if self.scale == "none" and self.task == REGRESSION and loses_digits(self.y):
            merged_columns.append("the targets")
        if merged_columns:  # nothing scales them
            merged_names = " and ".join(merged_columns)
            warn(
                f"different values of {merged_names} become equal in float32: scale them, such as "
                f"{spelled(scale='standard')}"
            )
        if is_prepared:
            return self
        x, words = self.x, self.categories
        if preparation is not None:
            x = preprocessing.recode(x, words, preparation.categories)
        else:
            rows = x[train]
            words = preprocessing.learn_categories(rows, words)
            x = preprocessing.recode(x, self.categories, words)
            if x is not self.x:
                rows = x[train]
            clients = owner
            if clients is None:
                clients = np.zeros(len(train), dtype=np.int64)
            if self.clip != CLIPS[0]:
                clients = None
            preparation = preprocessing.fitted(
                rows, self.scale, self.impute, self.columns, words, clients
            )
            self._note_clipped(preparation, rows)
            if self.task == REGRESSION and self.scale != "none":
                y = self.y[train].astype(np.float64)
                preparation = replace(
                    preparation, target=(float(y.mean()), float(y.std()) or 1.0)
                )
        words_by_column = dict(
            zip(preparation.columns, preparation.categories, strict=False)
        )
        return replace(
            self,
            x=preparation.transform(x),
            preprocessing=preparation,
            categories=(),
            table=self.table.with_inputs(words_by_column),
        )

    def _check_preparation(self, preparation: Preprocessing, is_prepared: bool) -> None:
        """Refuse stored numbers that are of other columns, or that would have no effect.

        Args:
            preparation: the stored numbers.
            is_prepared: whether nothing is left to prepare. The numbers must then equal
                :attr:`preprocessing`.

        Raises:
            UsageError: they do not fit.
        """
        fits = preparation == self.preprocessing
        if not is_prepared:
            fits = preparation.columns == self.columns and len(
                preparation.categories
            ) == len(self.categories)
        if not fits:
            stored_columns = listing(preparation.columns, 6) or "columns without names"
            raise UsageError(
                f"the stored preprocessing must be of the columns of {self.name}; got {stored_columns}. "
                "Pass the data that the run began with."
            )

    def _note_clipped(self, preparation: Preprocessing, x: Array) -> None:
        """Warn of training samples [n, d] with cells outside the fences."""
        counts = preparation.outside(x).sum(axis=0)
        column_names = self.columns or tuple(map(str, range(len(counts))))
        columns = [
            f"{column_names[k]!r} ({counts[k]:,})" for k in np.flatnonzero(counts)
        ]
        if columns:
            setting = spelled(clip="none")
            warn(
                f"{self.name}: cells of training samples are far outside of all others and are clipped: "
                f"{listing(columns, 4)}. To keep them: {setting}"
            )

    def with_vocabulary(self, vocabulary: Names) -> Source:
        """Return the source of texts with the codes of another vocabulary. Words outside it become the unknown word."""
        code_of_word = {word: k for k, word in enumerate(vocabulary, len(SPECIAL))}
        new_codes = [*range(len(SPECIAL))]
        new_codes += [code_of_word.get(word, UNKNOWN) for word in self.words or ()]
        return replace(
            self, x=np.array(new_codes, dtype=np.int64)[self.x], words=vocabulary
        )

    def take(self, indices: Integers) -> Source:
        """Return the source with these samples only, in this order. Classes and clients stay the same."""
        arrays: dict[str, Any] = {}
        for key in ("x", "y", "owner", "is_train", "groups"):
            array = getattr(self, key)
            arrays[key] = None if array is None else array[indices]
        return replace(self, **arrays)

    def first(self, samples: int) -> Source:
        """Return the source with its first ``samples`` samples, with fair shares of all groups.

        Groups are the natural clients, the two sides of an official test set, and the classes. A ``shuffled`` file has
        no groups by class. Each group contributes its first samples, in proportion to its size. Otherwise a file sorted
        by class would give a pool of one class.

        Raises:
            UsageError: ``samples`` is no whole number, below 1 or above the number of samples.
        """
        rule = f"a whole number from 1 to {len(self)}, the samples of {self.name}"
        bound = Bound(
            rule,
            lambda count: (
                isinstance(count, numbers.Integral) and 0 < int(count) <= len(self)
            ),
        )
        check_value("max_samples", samples, bound)
        if samples == len(self):
            return self
        by_class = not self.shuffled and self.task == CLASSIFICATION
        classes = self.y if by_class else np.zeros(len(self))
        keys = (self.owner, self.is_train, classes)
        groups = pd.Series(classes).groupby(
            [array for array in keys if array is not None]
        )
        quota, remainders = np.divmod(groups.size().to_numpy() * samples, len(self))
        quota[np.argsort(-remainders, kind="stable")[: samples - quota.sum()]] += 1
        is_chosen = groups.cumcount() < quota[groups.ngroup()]
        return self.take(np.flatnonzero(is_chosen))


# --- samples of several parts ----------------------------------------------------------------------------------


def source_of_parts(
    parts: Mapping[str, tuple[Any, Any]],
    name: str = OWN_NAME,
    classes: Sequence[str] | None = None,
    missing: bool = False,
    task: str = CLASSIFICATION,
) -> tuple[Source, list[int]]:
    """Join samples and labels of several parts, and return the source with the size of each part.

    Several inputs of a sample are packed into one. Samples are checked as in :func:`from_clients`.

    Args:
        parts: {name for messages: (x, y)}.
        name: name of the data.
        classes: names of the classes or labels. None means that they follow from the
            labels.
        missing: whether a table's features may be NaN.
        task: one of :data:`fl_core.rows.TASKS`.

    Raises:
        UsageError: a row is invalid, or parts differ in form. The message names the part and the row.
    """
    from fl_core.models.adapter import as_array, check_tables, pack

    check_tables({part_name or "data": pair for part_name, pair in parts.items()})
    xs, ys, forms, all_integers = [], {}, [], True
    for part_name, (inputs, y) in parts.items():
        source_name = f"{name}, {part_name}".removesuffix(", ")
        layout = None
        if isinstance(inputs, Mapping | tuple):
            inputs, layout = pack(inputs)
        with about(source_name, (ValueError, TypeError)):
            x: Any = as_array(inputs)
            y = ys[part_name] = as_array(y)
        are_tokens = x.ndim == 2 and x.dtype.kind in "iu" and bool((x >= 0).all())
        all_integers &= layout is None and are_tokens
        with located(f"{source_name}, x"):
            x = features(x, missing)
        with located(source_name):
            check_lengths(x, y)
        xs.append(x)
        got_shape = list(x.shape[1:])
        forms.append((f"{x.dtype} samples of shape {got_shape}", layout))
        if forms[-1] != forms[0]:
            first_part = next(iter(parts))
            raise UsageError(
                f"{source_name} must have the samples' form and inputs of {first_part}, {forms[0][0]}; "
                f"got {forms[-1][0]}. Convert them alike."
            )
    labels, row_name = joined(ys)
    names: Names = ()
    position_task = "" if classes is not None else task_of_entries(labels, task)
    try:
        with located(name, row_name):
            if position_task:
                y = finite_entries(labels)
            else:
                y, names = answers(labels, task, classes)
    except DataFault as fault:
        if fault.repair.keys() <= {"task"}:
            raise
        raise DataFault(fault.rule, "Correct them, or leave them out.") from fault
    without_names = task == CLASSIFICATION and classes is None and not position_task
    source = Source(
        name,
        np.concatenate(xs),
        y,
        names,
        indices=without_names and not is_text(labels),
        integers=all_integers,
        layout=layout,
        kind=position_task,
    )
    return source, list(map(len, xs))


def check_lengths(x: Sized, y: Sized) -> None:
    """Refuse samples and labels of different number.

    Raises:
        DataFault: the numbers differ. The message has both.
    """
    # an array without rows has no length
    count = len(y) if getattr(y, "ndim", 1) else 0
    if len(x) != count:
        raise DataFault(
            f"there must be one value for each sample; got {len(x)} samples and {count} values."
        )


# --- texts -----------------------------------------------------------------------------------------------------


def tokens_of(text: str, most: int | None = None) -> list[str]:
    """Split a text into tokens: words (with their # or @, and apostrophes inside), and single other characters.

    Tokens are lower case in Unicode's compatibility form. White space only separates them. Each letter of a language
    without spaces, such as Chinese or Thai, is a token. Only the first ``most`` tokens are returned.

    >>> for text in ("Don't fly!", "@United  #Fail...", "\ufb01ne \uff21\uff22 Straße", "a_b 3.5\t😀", "好很"):
    ...     print(*tokens_of(text))
    don't fly !
    @united #fail . . .
    fine ab strasse
    a_b 3 . 5 😀
    好 很
    """
    matches = _TOKEN.finditer(composed(text, "NFKC").casefold())
    return [match.group() for match in islice(matches, most)]


LIGATURES = {"\ufdfa": 18, "\ufdfb": 8}
"""Signs of whole sentences, with their number of signs in Unicode's compatibility form. All others have at most 6."""
MOST_GROWTH, GROWN = 6, 2**20
"""The factor by which that form may lengthen all texts, and their signs from which that counts."""


def check_growth(texts: Sequence[str]) -> None:
    """Refuse texts that Unicode's compatibility form would make far longer.

    >>> check_growth(["\ufdfa"] * 9)
    >>> check_growth(["\ufdfa" * 2000] * 1000)
    Traceback (most recent call last):
        ...
    fl_core.data.faults.DataFault: texts must grow at most 6-fold in Unicode's form NFKC; got 18.0-fold. ...

    Raises:
        DataFault: there are more than :data:`GROWN` signs, most of which are ligatures.
    """
    n_signs = sum(map(len, texts))
    if n_signs < GROWN:
        return
    n_grown = n_signs + sum(
        (size - 1) * sum(text.count(sign) for text in texts)
        for sign, size in LIGATURES.items()
    )
    if n_grown > MOST_GROWTH * n_signs:
        factor = n_grown / n_signs
        raise DataFault(
            f"texts must grow at most {MOST_GROWTH}-fold in Unicode's form NFKC; got {factor:.1f}-fold.",
            "Write ligatures as letters.",
        )


def encode(
    texts: Sequence[str],
    length: int = LENGTH,
    where: str = "",
    tokenizer: Tokenizer | None = None,
) -> tuple[Integers, Names]:
    """Return texts as codes [n, length], and the sorted words of the codes from ``len(SPECIAL)`` on.

    All words of the texts have codes. The vocabulary is chosen from them after the partition (:meth:`Source.fit`). With
    a tokenizer the codes are its ids, and its digest is returned in place of the words.

    Args:
        length: number of codes of a text, the first of which marks the start. Longer texts are cut, and shorter ones
            padded. A tokenizer has its own length.
        where: the data's name, for a warning that many texts are cut. Empty means no warning.
        tokenizer: the tokenizer of a transformers folder. None means the tokens of
            :func:`tokens_of`.

    Raises:
        DataFault: a text is blank. The message names the first. Or as for :func:`check_growth`.
        UsageError: the tokenizer does not take the texts, or its file has changed.
    """
    is_blank = np.array([not text.strip() for text in texts], dtype=bool)
    rule, advice = "the text must not be empty", "Fill it, or remove the row."
    refuse_where(is_blank, texts, rule, advice)
    if tokenizer:
        ids, n_cut, side = tokenizer.encode(texts)
        if where and n_cut > NOTED * len(texts):
            cut_place = "before their last"
            if side == "right":
                cut_place = "after"
            warn(
                f"{where}: {n_cut} of {len(texts)} texts are cut {cut_place} {tokenizer.length} tokens"
            )
        return ids, (tokenizer.sha256,)
    check_growth(texts)
    most_tokens = length - 1
    tokens = [tokens_of(text, most_tokens + 1) for text in texts]
    n_cut = sum(len(sentence) > most_tokens for sentence in tokens)
    if where and n_cut > NOTED * len(texts):
        warn(
            f"{where}: {n_cut} of {len(texts)} texts are cut after {most_tokens} tokens"
        )
    tokens = [sentence[:most_tokens] for sentence in tokens]
    words = sorted({*chain.from_iterable(tokens)})
    code_of_word = {word: k for k, word in enumerate(words, len(SPECIAL))}
    codes = np.full((len(tokens), length), PAD, dtype=np.int64)
    codes[:, 0] = START
    for row, sentence in enumerate(tokens):
        codes[row, 1 : 1 + len(sentence)] = [code_of_word[word] for word in sentence]
    return codes, tuple(words)
