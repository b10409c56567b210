"""Reading of new samples without labels, prepared for a trained model exactly as its training samples were."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from torch import Tensor

from fl_core.data import arrays, files
from fl_core.data.faults import DataFault, Place, located, row_of_array
from fl_core.data.federated import FederatedData
from fl_core.data.names import Names
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.reading import (
    EARLIER,
    IMAGES,
    PLAIN,
    READING,
    TABLES,
    Reading,
    current,
    images_in,
)
from fl_core.data.registry import path_of
from fl_core.data.sources import Source, encode
from fl_core.data.table.describe import is_named_as_identifier
from fl_core.data.table.prepare import new_rows
from fl_core.data.table.read import Opened, files_of, open_table
from fl_core.data.values import Array, texts_of
from fl_core.errors import (
    UsageError,
    as_list,
    check_known,
    listing,
    read_as,
    warn,
)
from fl_core.models.adapter import as_array
from fl_core.models.tokens import SPECIAL, Tokenizer, TokenShape
from fl_core.rows import CLASSIFICATION

WRITTEN_ALIKE = "Write new samples as training samples were."
"""The advice on new samples that are written in another way than training samples."""


class Samples(NamedTuple):
    """New samples in the form that a model takes.

    Attributes:
        names: numbers from 0 in a table, array or list; paths within a folder of images.
        x: float32 [n, ...]; texts are int64 token ids [n, length].
        ids: the cells of columns that identify a table's records, by column.
        notes: for each sample the columns whose values are unlike the training samples.
            Empty if no column is odd
            (:meth:`fl_core.data.preprocessing.Preprocessing.oddities`).
        clipped: for each sample the columns whose number was clipped. Empty if none was.
    """

    names: Names
    x: Tensor
    ids: Mapping[str, Names] = {}
    notes: Names = ()
    clipped: Names = ()

    def rows(self, rows: Sequence[int]) -> Samples:
        """Return the samples at these positions."""

        def some(values: Names) -> Names:
            if values:
                return tuple(values[row] for row in rows)
            return ()

        return Samples(
            some(self.names),
            self.x[list(rows)],
            {name: some(values) for name, values in self.ids.items()},
            some(self.notes),
            some(self.clipped),
        )


@dataclass(frozen=True)
class Inputs:
    """The inputs of a trained model, with the fitted numbers that prepare raw samples, in a form for JSON.

    >>> from fl_core.data import load
    >>> inputs = Inputs.from_federation(load("heart"))
    >>> inputs.samples(np.zeros((2, 10))).x.shape
    torch.Size([2, 10])

    Attributes:
        shape: shape of one sample; images are (channels, height, width), texts (tokens,).
        images: whether raw samples are uint8 images [n, H, W] or [n, H, W, C], which are scaled to 0..1.
        mean, std: one number for each channel, for the normalisation of images after that. They are empty without it.
        words: the words of the token ids after the special ones, or a tokenizer's digest. None means that the samples
            are not texts.
        tokens: the number of token ids, for rows of integers. 0 for other samples.
        tokenizer: the tokenizer of a transformers folder, for texts. None for others.
        preprocessing: a table's columns in the order of the model's inputs, and the fitted numbers that fill and scale
            it. None without such a preparation.
        reading: the format of tables and texts and the names of their columns.
    """

    shape: tuple[int, ...]
    images: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    words: Names | None = None
    preprocessing: Preprocessing | None = None
    reading: Reading = PLAIN
    tokens: int = 0
    tokenizer: Tokenizer | None = None

    @classmethod
    def from_federation(cls, data: FederatedData, reading: Reading = PLAIN) -> Inputs:
        """Return the inputs of models trained on this federation.

        Args:
            data: the federation.
            reading: the settings by which its tables or texts were read, and by which
                new ones will be.
        """
        return cls(
            tuple(data.shape),
            data.images,
            data.mean,
            data.std,
            data.words,
            data.preprocessing,
            reading,
            0 if data.words is not None else getattr(data.shape, "tokens", 0),
            getattr(data.shape, "tokenizer", None),
        )

    @property
    def columns(self) -> Names:
        """Return the names of a table's features in the order of the model's inputs; empty if unknown."""
        if self.preprocessing is None:
            return ()
        return self.preprocessing.columns

    @property
    def _words(self) -> dict[str, Names]:
        """Return the categories of a table's columns of words, by the column's name."""
        preparation = self.preprocessing or Preprocessing()
        return {
            name: words
            for name, words in zip(
                preparation.columns, preparation.categories, strict=False
            )
            if words
        }

    @property
    def model_shape(self) -> tuple[int, ...]:
        """Return the shape of a sample for building the model. For token ids it is a TokenShape with their number."""
        if self.tokenizer:
            return TokenShape(self.shape, self.tokenizer.tokens, self.tokenizer)
        tokens = self.tokens
        if self.words is not None:
            tokens = len(SPECIAL) + len(self.words)
        if tokens:
            return TokenShape(self.shape, tokens)
        return self.shape

    def to_json(self) -> dict[str, Any]:
        """Return the inputs as a dictionary of plain numbers and text."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        content["reading"] = {
            key: content["reading"][key] for key in READING
        }  # new samples have no labels
        return content

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Inputs:
        """Return the inputs from the dictionary of :meth:`to_json`.

        Raises:
            UsageError: a key is unknown, a value has another type, or the shape is not
                that of the prepared columns or of images.
        """
        if isinstance(values.get("reading"), Mapping):  # else refused below
            values = {**values, "reading": current(values["reading"])[0]}
        inputs: Inputs = read_as(cls, values, "a model's inputs")
        if (preparation := inputs.preprocessing) is not None:
            columns = preparation.width + sum(map(len, preparation.categories))
            if preparation.width and inputs.shape != (columns,):
                got_shape = list(inputs.shape)
                raise UsageError(
                    f"shape of a table must be [{columns}], its prepared columns; got {got_shape}. "
                    "Store it again."
                )
        if inputs.images and len(inputs.shape) != 3:
            raise UsageError(
                f"shape of images must be (channels, height, width); got {inputs.shape}. Store it again."
            )
        return inputs

    # --- new samples -----------------------------------------------------------------------------------------------

    def samples(self, new: Any, ids: str | Sequence[str] | None = None) -> Samples:
        """Return new samples, from a path or from memory, in the form that the model takes.

        Args:
            new: a .csv, .tsv or .parquet table, whose columns other than the features
                are ignored; an .npz file with an array ``x``; a folder of images, at
                any depth; texts in a table or a .jsonl file; or, in memory, a
                DataFrame, an array [n, ...], or a sequence of texts.
            ids: columns that identify a table's records. None means columns with a usual name, such as ``id``, that are
                not features.

        Raises:
            UsageError: the data differ in kind or shape from the training data, or
                ``ids`` name no columns of a table. The message names the file, column
                or line.
        """
        if ids is not None:
            ids = as_list("ids", ids, empty=True)
        try:
            return self._samples_of(new, ids)
        except DataFault as fault:
            raise UsageError(str(fault)) from fault

    def rows_of_clients(self, new: Any) -> dict[str, list[int]]:
        """Return the rows of each client in a table of new samples, by its column of clients.

        Args:
            new: the path of a table or of an .npz file, or a DataFrame.

        Returns:
            The positions of the rows, from 0, by the client's name. Names are in
            ascending order.

        Raises:
            UsageError: the samples are no table or .npz file, there is no such column or
                array, or a row has no client.
        """
        name = self.reading.client_column
        path = None
        if isinstance(new, str | Path):
            path = path_of(new)
        if path is not None and path.suffix == ".npz":
            header: list[str] = list(files.headers(path))
        elif path is not None or isinstance(new, pd.DataFrame):
            table = self._opened(new if path is None else path, [name])
            header = table.header
        else:
            new_type = type(new).__name__
            raise UsageError(
                f"new samples must be a table with the column {name!r}, the client of each row; got "
                f"{new_type}. Predict them with one client's model."
            )
        if name not in header:
            table_name = "the table" if path is None else path
            client_names = listing(map(repr, header))
            raise UsageError(
                f"{table_name} must have the column {name!r}, the client of each row; got "
                f"{client_names}. Add it, or predict the rows of one client with its model alone."
            )
        if path is not None and path.suffix == ".npz":
            owner, names = arrays.owners(files.read_arrays(path, [name])[name])
        else:
            with located(f"{table.where}, column {name!r}", table.place):
                owner, names = arrays.owners(texts_of(table.frame[name]))
        return {
            client: np.flatnonzero(owner == code).tolist()
            for code, client in enumerate(names)
        }

    def _samples_of(self, new: Any, ids: Sequence[str] | None) -> Samples:
        path = None
        if isinstance(new, (str, Path)):
            path = path_of(new)
        suffix = "memory"
        if path is not None:
            files_of(path)
            suffix = "folder" if path.is_dir() else path.suffix.lower()
            suffixes = [".npz"] if self.words is None else [".jsonl"]
            if self.images:
                suffixes.append("folder")
            if self.words is not None or len(self.shape) == 1:
                suffixes = [*TABLES, *suffixes]
            if suffix not in suffixes:
                kinds_text = " or ".join(suffixes)
                raise UsageError(
                    f"new samples must be {self._describe()}, from {kinds_text}; got {path}."
                )
        is_named_table = isinstance(new, pd.DataFrame) and bool(self.columns)
        if self.words is None and (suffix in TABLES or is_named_table):
            return self._table(new if path is None else path, ids)
        if ids:
            got_text = path or "samples in memory"
            raise UsageError(
                f"ids must name columns of a table; got {listing(ids)} for {got_text}. "
                "Leave them out."
            )
        if self.words is not None:
            return self._texts(new if path is None else path)
        if path is not None and suffix == "folder":
            images = images_in(path, "**/[!.]*")
            if not images:
                image_types = ", ".join(IMAGES)
                raise UsageError(f"{path} must have images ({image_types}); got none.")
            side = self.reading.image_size
            x, _ = files.pixels(images, gray=self.shape[0] == 1, side=side)
            names = [file.relative_to(path).as_posix() for file in images]
            with located(str(path)):
                return self._arrays(x, str(path), names)
        if self._words:
            known_words = listing(map(repr, self._words))
            raise UsageError(
                f"samples must be a table with the columns {listing(self.columns)}, with words in "
                f"{known_words}; got an array. Give a file or a DataFrame."
            )
        source_name = "new samples" if path is None else f"{path}, array 'x'"
        raw_samples = new if path is None else files.read_arrays(path, ["x"])["x"]
        with located(source_name):
            features = arrays.features(as_array(raw_samples), missing=True)
            return self._arrays(features, source_name)

    def _opened(self, source: Path | pd.DataFrame, texts: Sequence[str]) -> Opened:
        """Return a table of new samples, read as the training samples were.

        Args:
            source: the path of the table, or the table itself.
            texts: columns whose cells keep their spelling, such as ``007``.

        Raises:
            UsageError: it is written in another way. The message says what differs.
        """
        reading = self.reading
        has_types = isinstance(source, Path) and source.suffix.lower() not in (".csv", ".tsv")  # fmt: skip
        if has_types or isinstance(source, pd.DataFrame):
            options = {k: v for k, v in (reading.csv or {}).items() if k == EARLIER}
            reading = replace(reading, csv=options or None)
        table = open_table(source, reading, texts)
        for fault in table.faults:
            raise DataFault(fault.rule, WRITTEN_ALIKE)
        return table

    def _table(self, source: Path | pd.DataFrame, ids: Sequence[str] | None) -> Samples:
        reading, words, names = self.reading, self._words, list(self.columns)
        id_columns = [name for name in ids or () if name not in names]
        table = self._opened(source, [*words, *id_columns])
        path, header = table.where, table.header
        labels = replace(reading, task=CLASSIFICATION).labels
        if not names:
            names = [k for k in header if k not in (reading.client_column, *labels)]
            if len(names) != self.shape[0]:
                raise UsageError(
                    f"{path}: samples must have {self.shape[0]} columns of features; got {len(names)}."
                )
        for name in ids or ():
            check_known(f"column of {path} (ids)", name, header)
        id_names = list(ids or ())
        if ids is None and self.columns:
            known_names = {*names, reading.client_column, *labels}
            other_names = [name for name in header if name not in known_names]
            id_names = list(filter(is_named_as_identifier, other_names))
        missing_names = [name for name in names if name not in header]
        if missing_names and not (
            reading.fill_missing_columns and len(missing_names) < len(names)
        ):
            lacking_names = listing(map(repr, missing_names))
            header_names = listing(map(repr, header))
            raise UsageError(
                f"{path} must have the columns {listing(names)}; got no {lacking_names}. "
                f"Add or rename columns: it has {header_names}."
            )
        features = new_rows(table, names, words, WRITTEN_ALIKE)
        with located(str(path), table.place):
            samples = self._arrays(features, str(path))
        id_cells = {k: tuple(texts_of(table.frame[k])) for k in id_names}
        return samples._replace(ids=id_cells)

    def _texts(self, new: Any) -> Samples:
        source_name, texts = "texts", new
        row_name: Place = row_of_array
        if isinstance(new, Path):
            name = self.reading.text_column
            table = self._opened(new, [name])
            check_known(f"column of {table.where}", name, table.header)
            source_name, row_name = f"{table.where}, column {name!r}", table.place
            texts = list(texts_of(table.frame[name]))
        elif not isinstance(new, Sequence) or not all(
            isinstance(text, str) for text in new
        ):
            raise UsageError(
                "samples must be texts for this model. Give a list of them, or the path of a .csv or .jsonl file."
            )
        with located(source_name, row_name):
            codes, words = encode(texts, self.shape[0], "", self.tokenizer)
        source = self._source(codes, words)
        if not self.tokenizer:
            source = source.with_vocabulary(self.words or ())
        return self._samples(source)

    def _arrays(
        self, x: Array, where: str, names: Sequence[str] | None = None
    ) -> Samples:
        source = self._source(x)
        notes: Names = ()
        clipped: Names = ()
        expected = self.shape
        if self._words:
            expected = (len(self.columns),)
        if source.is_image != self.images or source.shape != expected:
            got_shape = list(x.shape)
            shape = f"{x.dtype} of shape {got_shape}"
            raise DataFault(f"samples must be {self._describe()}; got {shape}.")
        if x.ndim == 2:
            preparation = self.preprocessing or Preprocessing()
            for k, words in enumerate(preparation.categories):
                if words and (x[:, k] == len(words)).all():
                    some_words = listing(map(repr, words), 4)
                    raise DataFault(
                        f"column {preparation.columns[k]!r} must have words of training samples, such as "
                        f"{some_words}; got others only. Write them as in training."
                    )
            oddities = preparation.oddities(x)
            for name, (oddity, _) in oddities.items():
                warn(f"{where}, column {name}: {oddity}")
            if oddities:
                notes = tuple(
                    ", ".join(name for name, (_, rows) in oddities.items() if rows[row])
                    for row in range(len(x))
                )
            is_outside = preparation.outside(x)
            if is_outside.any():
                column_names = list(map(repr, preparation.columns or range(x.shape[1])))
                clipped = tuple(
                    ", ".join(compress(column_names, row)) for row in is_outside
                )
                counts = is_outside.sum(axis=0)
                columns = [
                    f"{column_names[k]} ({counts[k]:,})" for k in np.flatnonzero(counts)
                ]
                warn(
                    f"{where}: numbers far outside of the training samples' are clipped: {listing(columns, 4)}"
                )
            source = self._source(preparation.transform(x))
        samples = self._samples(source, names)._replace(notes=notes, clipped=clipped)
        if self.tokens:
            return samples._replace(x=samples.x.long())
        return samples

    @staticmethod
    def _samples(source: Source, names: Sequence[str] | None = None) -> Samples:
        rows = range(len(source))
        return Samples(tuple(names or map(str, rows)), source.tensor(np.array(rows)))

    def _source(self, x: Array, words: Names | None = None) -> Source:
        """Return the samples as a dataset with labels of 0, since none is known."""
        return Source(
            "new samples",
            x,
            np.zeros(len(x), dtype=np.int64),
            (),
            mean=self.mean,
            std=self.std,
            words=words,
        )

    def _describe(self) -> str:
        if self.words is not None:
            return "texts"
        if self.columns:
            return f"rows of {len(self.columns)} columns ({listing(self.columns)})"
        if self.images:
            channels, *size = self.shape
            return f"uint8 images of height and width {size}, with channels {channels}"
        sizes = ", ".join(map(str, self.shape))
        return f"numbers [n, {sizes}]"
