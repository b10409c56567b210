"""Reads new samples, without labels, and prepares them for a trained model exactly as its training samples were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fl_core.data import arrays, files, tables, text
from fl_core.data.arrays import Array
from fl_core.data.columns import CLIENT_COLUMN, LABEL_COLUMN, TEXT_COLUMN
from fl_core.data.federated import FederatedData
from fl_core.data.sources import Source
from fl_core.errors import UsageError, check_known, listing
from fl_core.tokens import SPECIAL, TokenShape


class Samples(NamedTuple):
    """New samples as a model takes them.

    Attributes:
        names: where each is from: a line of a file, a row of an array (from 0), or an image's path in its folder.
        x: float32 [n, *shape]; texts are int64 token ids [n, length].
    """

    names: tuple[str, ...]
    x: Tensor


@dataclass(frozen=True)
class Inputs:
    """What a trained model takes, and the fitted numbers that turn raw samples into it; plain enough for JSON.

    >>> from fl_core.data import load
    >>> inputs = Inputs.of(load("heart"))
    >>> inputs.samples(np.zeros((2, 10))).x.shape
    torch.Size([2, 10])

    Attributes:
        shape: of one sample; images are (channels, height, width), texts (tokens,).
        images: whether raw samples are uint8 images [n, H, W] or [n, H, W, C], which are scaled to 0..1.
        mean, std: one number a channel, with which images are normalised after that; empty = they are not.
        words: of texts, what the token ids after the special ones stand for; None = the samples are no texts.
        columns: names of a table's features in the order of the model's inputs; empty = they are not known.
        client_column, label_column, text_column: what the columns of a table that are no features are called.
    """

    shape: tuple[int, ...]
    images: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    words: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    client_column: str = CLIENT_COLUMN
    label_column: str = LABEL_COLUMN
    text_column: str = TEXT_COLUMN

    @classmethod
    def of(cls, data: FederatedData, columns: Sequence[str] = (), **named: str) -> Inputs:
        """What models that were trained on this federation take.

        Args:
            columns: names of a table's features, where they are known.
            named: ``client_column``, ``label_column`` and ``text_column``.
        """
        return cls(tuple(data.shape), data.images, data.mean, data.std, data.words, tuple(columns), **named)

    @property
    def model_shape(self) -> tuple[int, ...]:
        """The shape with which the model is built: for texts it has the number of tokens."""
        return self.shape if self.words is None else TokenShape(self.shape, len(SPECIAL) + len(self.words))

    def to_json(self) -> dict[str, Any]:
        """It as a dictionary of plain numbers and text."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Inputs:
        """What :meth:`to_json` wrote.

        Raises:
            UsageError: an unknown key.
        """
        for key in values:
            check_known("key of a model's inputs", key, [field.name for field in fields(cls)])
        found: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**found)

    # --- new samples -----------------------------------------------------------------------------------------------

    def samples(self, new: Any) -> Samples:
        """New samples, from a path or from memory, as the model takes them.

        Args:
            new: a .csv table, whose columns other than the features are passed over; an .npz file with an array ``x``;
                a folder of images, at any depth; texts in a .csv or .jsonl file; or, in memory, an array [n, ...], or
                a sequence of texts.

        Raises:
            UsageError: data of another kind or shape than the model was trained on; names the file, column or line.
        """
        if isinstance(new, (str, Path)):
            return self._read(Path(new))
        if self.words is not None:
            if not isinstance(new, Sequence) or not all(isinstance(each, str) for each in new):
                raise UsageError("the model takes texts: give a list of them, or the path of a .csv or .jsonl file")
            return self._texts(new, "texts", arrays.row_of_array, map(str, range(len(new))))
        x = new.detach().cpu().numpy() if isinstance(new, Tensor) else np.asarray(new)
        return self._arrays(arrays.features(x, "new samples"), "new samples", map(str, range(len(x))))

    def _read(self, path: Path) -> Samples:
        if not path.exists():
            raise UsageError(f"there is no file or folder of new samples at {path}")
        kind = "folder" if path.is_dir() else path.suffix.lower()
        known = (".csv", ".jsonl") if self.words is not None else (".npz", "folder") if self.images else (".npz",)
        if self.words is None and len(self.shape) == 1:
            known = (".csv", *known)
        if kind not in known:
            raise UsageError(f"{path}: the model takes {self._described()}, from {' or '.join(known)}")
        if kind == "folder":
            return self._folder(path)
        if kind == ".npz":
            x = arrays.features(files.array_of(path, "x"), f"{path}, array 'x'")
            return self._arrays(x, f"{path}, array 'x'", map(str, range(len(x))))
        if kind == ".jsonl":
            return self._lines(path, *tables.jsonl_texts(path, self.text_column))
        lines, columns = tables.csv_columns(path)
        if self.words is not None:
            check_known(f"column of {path} (text_column)", self.text_column, columns)
            return self._lines(path, lines, columns[self.text_column])
        return self._table(path, lines, columns)

    def _lines(self, path: Path, lines: Sequence[int], texts: Sequence[str]) -> Samples:
        where = f"{path}, column {self.text_column!r}"
        return self._texts(texts, where, lambda row: f"line {lines[row]}", map(str, lines))

    def _table(self, path: Path, lines: Sequence[int], columns: Mapping[str, Sequence[str]]) -> Samples:
        def place(row: int) -> str:
            return f"line {lines[row]}"

        beside = (self.client_column, self.label_column)
        wanted = self.columns or tuple(name for name in columns if name not in beside)
        for name in wanted:
            check_known(f"feature column of {path}", name, columns)
        if len(wanted) != self.shape[0]:
            raise UsageError(f"{path} has {len(wanted)} columns of features, and the model takes {self.shape[0]}")
        cells = [arrays.numbers(columns[name], f"{path}, column {name!r}", place)[:, None] for name in wanted]
        x = np.concatenate(
            [
                arrays.features(cell, f"{path}, column {name!r}", place)
                for name, cell in zip(wanted, cells, strict=True)
            ],
            axis=1,
        )
        return self._arrays(x, str(path), map(str, lines))

    def _folder(self, path: Path) -> Samples:
        found = files.images_below(path)
        if not found:
            raise UsageError(f"{path}: no images ({', '.join(files.IMAGES)})")
        x = files.pixels(found, gray=self.shape[0] == 1)
        return self._arrays(x, str(path), (file.relative_to(path).as_posix() for file in found))

    def _texts(self, texts: Sequence[str], where: str, place: arrays.Place, names: Any) -> Samples:
        text.check(texts, where, place)
        codes, words = text.encode(texts, self.shape[0])
        source = self._source(codes, words).spelled(self.words or ())
        return Samples(tuple(names), source.tensor(np.arange(len(source))))

    def _arrays(self, x: Array, where: str, names: Any) -> Samples:
        source = self._source(x)
        if source.is_image != self.images or source.shape != self.shape:
            shape = f"{x.dtype} of shape {list(x.shape)}"
            raise UsageError(f"{where}: {shape}, and the model takes {self._described()}")
        return Samples(tuple(names), source.tensor(np.arange(len(source))))

    def _source(self, x: Array, words: tuple[str, ...] | None = None) -> Source:
        """The samples as those of a dataset whose labels are not known."""
        return Source("new samples", x, np.zeros(len(x), dtype=np.int64), (), mean=self.mean, std=self.std, words=words)

    def _described(self) -> str:
        if self.words is not None:
            return "texts"
        if self.images:
            channels, height, width = self.shape
            size = f"[n, {height}, {width}{', 3' if channels == 3 else ''}]"
            return f"{'gray' if channels == 1 else 'colour'} images, uint8 {size}"
        if len(self.shape) == 1:
            named = f" ({listing(self.columns)})" if self.columns else ""
            return f"rows of {self.shape[0]} numbers{named}"
        return f"floating-point samples [n, {', '.join(map(str, self.shape))}]"
