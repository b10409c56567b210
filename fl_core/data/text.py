"""Turns texts into token ids: splitting into words, a vocabulary from the training samples, padding to one length."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fl_core.data import arrays
from fl_core.data.arrays import Integers
from fl_core.data.sources import Source
from fl_core.errors import UsageError
from fl_core.scores import CLASSIFICATION
from fl_core.tokens import PAD, SPECIAL, START

LENGTH = 64
"""Tokens of a sample, the first of which is the start; what is longer is cut off, what is shorter is filled up."""

_TOKEN = re.compile(r"[#@]?\w+(?:['’]\w+)*|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Split a text into tokens: words (with their # or @, and apostrophes inside), and every other sign by itself.

    Lower case, in Unicode's compatibility form; white space only separates.
    """
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


def encode(texts: Sequence[str], length: int = LENGTH) -> tuple[Integers, tuple[str, ...]]:
    """Texts as codes [n, length], and the sorted words that codes from ``len(SPECIAL)`` on stand for.

    These are all words there are: the vocabulary is chosen among them when it is known what clients train on (see
    :meth:`Source.fitted`).
    """
    tokens = [words_of(text)[: length - 1] for text in texts]
    words = sorted({word for sentence in tokens for word in sentence})
    code = {word: len(SPECIAL) + k for k, word in enumerate(words)}
    codes = np.full((len(tokens), length), PAD, dtype=np.int64)
    codes[:, 0] = START
    for row, sentence in enumerate(tokens):
        codes[row, 1 : 1 + len(sentence)] = [code[word] for word in sentence]
    return codes, tuple(words)


def source(
    path: Path,
    columns: Mapping[str, Sequence[str]],
    place: arrays.Place,
    *,
    client: str,
    label: str,
    text: str,
    task: str = CLASSIFICATION,
    classes: Sequence[str] | None = None,
) -> Source:
    """A source of texts from columns of cells; columns other than text, label and client are ignored.

    Args:
        classes: all that there are, if the texts are a silo's and may lack some.

    Raises:
        UsageError: a text without any sign, an empty client or label, or a word among labels that are numbers.
    """
    owner = None
    owner_names: tuple[str, ...] = ()
    if client in columns:
        where = f"{path}, column {client!r}"
        owner, owner_names = arrays.owners(np.array(columns[client], dtype=str), where, place=place)
    where = f"{path}, column {label!r}"
    y, found = arrays.answers(np.array(columns[label], dtype=str), where, task, classes, place, whole=classes is None)
    check(columns[text], f"{path}, column {text!r}", place)
    x, words = encode(columns[text])
    return Source(str(path), x, y, found, owner, owner_names, words=words)


def check(texts: Sequence[str], where: str, place: arrays.Place) -> None:
    """Refuse texts without any sign.

    Raises:
        UsageError: names the first.
    """
    for row, cell in enumerate(texts):
        if not cell.strip():
            raise UsageError(f"{where}, {place(row)}: the text is empty")
