"""Conversion of texts to token ids: splitting into words, a vocabulary from training samples, and padding."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fl_core import limits
from fl_core.data import arrays, targets
from fl_core.data.arrays import Integers
from fl_core.data.columns import Reading
from fl_core.data.sources import Source
from fl_core.errors import UsageError, warn
from fl_core.scores import CLASSIFICATION
from fl_core.tokens import PAD, SPECIAL, START

LENGTH = 64
"""Tokens of a sample, with the start token first. Longer texts are cut and shorter ones padded."""

HASHED = "hashed"
MOST_WORDS = 2**20

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0002ffff"
"""Letters of languages without spaces: Thai, Lao, Burmese, Khmer, Japanese and Chinese."""
_SIGN = re.compile(f"[{_UNSPACED}]")
_TOKEN = re.compile(rf"[{_UNSPACED}]|[#@]?[^\W{_UNSPACED}]+(?:['’][^\W{_UNSPACED}]+)*|[^\w\s]")
NOTED = 0.1
"""Share of tokens that are lost or unknown, or of texts without spaces, from which a warning says so."""


def words_of(text: str) -> list[str]:
    """Split a text into tokens: words (with their # or @, and apostrophes inside), and single other signs.

    Tokens are lower case in Unicode's compatibility form. White space only separates them. Each letter of a language
    without spaces, such as Chinese or Thai, is a token.
    """
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


def encode(texts: Sequence[str], length: int = LENGTH) -> tuple[Integers, tuple[str, ...]]:
    """Return texts as codes [n, length], and the sorted words of the codes from ``len(SPECIAL)`` on.

    These are all words. The vocabulary is chosen from them after the partition (see :meth:`Source.fit`).
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
    reading: Reading,
) -> Source:
    """Return a source of texts from columns of cells. Columns other than text, label and client are ignored.

    Raises:
        UsageError: a text is blank, a client or label is empty, or a word is among labels that are numbers.
    """
    text = reading.text_column
    owner, owner_names = clients(path, columns, place, reading.client_column)
    y, found = answers(path, columns, place, reading)
    check(columns[text], f"{path}, column {text!r}", place)
    _warn_of_cuts(columns[text], str(path))
    x, words = encode(columns[text])
    return Source(str(path), x, y, found, owner, owner_names, words=words)


def _warn_of_cuts(texts: Sequence[str], where: str) -> None:
    """Warn if many tokens of long texts are lost, or if many texts have no spaces."""
    lengths = np.array([len(words_of(each)) for each in texts])
    lost = np.maximum(lengths - (LENGTH - 1), 0)
    if lost.sum() > NOTED * lengths.sum():
        warn(
            f"{where}: {(lost > 0).sum()} of {len(lost)} texts are cut after {LENGTH - 1} tokens, which loses "
            f"{lost.sum() / lengths.sum():.0%} of all tokens"
        )
    if np.mean([bool(_SIGN.search(each)) for each in texts]) > NOTED:
        warn(f"{where}: texts are in a language without spaces: each letter is a token")


def clients(
    path: Path, columns: Mapping[str, Sequence[str]], place: arrays.Place, name: str
) -> tuple[arrays.Integers | None, tuple[str, ...]]:
    """Return the client of each row of a table, and the clients' names; without that column none."""
    if name not in columns:
        return None, ()
    return arrays.owners(arrays.text_array(columns[name]), f"{path}, column {name!r}", place=place)


def answers(
    path: Path, columns: Mapping[str, Sequence[str]], place: arrays.Place, reading: Reading
) -> tuple[arrays.Array, tuple[str, ...]]:
    """Return the targets in a table's label columns, with the names of classes (:func:`targets.answers`)."""
    numbers = reading.label_numbers or reading.task != CLASSIFICATION
    cells = arrays.text_array(
        [reading.numbers.plain(columns[name]) if numbers else columns[name] for name in reading.labels]
    )
    where, whole = f"{path}, column {reading.label_column!r}", reading.classes is None
    y = cells[0] if len(cells) == 1 else cells.T
    if reading.label_numbers and reading.task == CLASSIFICATION:
        y = arrays.numbers(y.tolist(), where, place)
    return targets.answers(y, where, reading.task, reading.names, place, whole)


def with_vocabulary(texts: Source, vocabulary: Path | str) -> Source:
    """Return a source of texts in a vocabulary that was fixed without reading anybody's texts.

    >>> codes, words = encode(["Late again, thanks"], 6)
    >>> mine = Source("mine", codes, np.zeros(1, dtype=np.int64), ("no", "yes"), words=words)
    >>> _ = Path("words.txt").write_text("thanks\\nlate\\n")
    >>> with_vocabulary(mine, "words.txt").x.tolist()
    [[2, 4, 1, 1, 3, 0]]
    >>> with_vocabulary(mine, "hashed:50").x.tolist()
    [[2, 51, 6, 18, 31, 0]]

    Args:
        vocabulary: a file with one word per line, in the order of token ids. Words outside it become the unknown word.
            Or ``hashed:N``: N buckets for words by their SHA-256.

    Raises:
        UsageError: the file does not exist, a line is not a single word as in :func:`words_of`, a word is repeated, or
            the number of buckets is not from 2 to 2^20.
    """
    kind, _, buckets = str(vocabulary).partition(":")
    if kind == HASHED:
        if not (buckets.isascii() and buckets.isdigit() and 2 <= int(buckets) <= MOST_WORDS):
            raise UsageError(f"vocabulary {HASHED}:N must have N from 2 to {MOST_WORDS:,}; got {vocabulary}.")
        return texts.hash_words(int(buckets))
    return texts.with_vocabulary(read_vocabulary(Path(vocabulary)))


def read_vocabulary(path: Path) -> tuple[str, ...]:
    """Return the words of a file with one per line. Errors are as in :func:`with_vocabulary`."""
    if not path.is_file():
        raise UsageError(
            f"vocabulary must be a file with a word a line, or {HASHED}:N; got {path}, which does not exist."
        )
    try:
        words = limits.read_text(path).splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} must be text in UTF-8: {error}. Save it in UTF-8.") from error
    lines: dict[str, int] = {}
    for number, word in enumerate(words, 1):
        if words_of(word) != [word]:
            raise UsageError(
                f"{path}, line {number}: each line must be a single word in lower case; got {word[:40]!r}."
            )
        if lines.setdefault(word, number) != number:
            raise UsageError(
                f"{path}, line {number}: words must be distinct; "
                f"got {word[:40]!r}, which is in line {lines[word]} already."
            )
    if not 1 <= len(words) <= MOST_WORDS:
        raise UsageError(f"{path} must have from 1 to {MOST_WORDS:,} words; got {len(words):,}.")
    return tuple(words)


def check(texts: Sequence[str], where: str, place: arrays.Place) -> None:
    """Check that no text is blank.

    Raises:
        UsageError: names the first blank text.
    """
    for row, cell in enumerate(texts):
        if not cell.strip():
            raise UsageError(f"{where}, {place(row)}: the text must not be empty. Fill it, or remove the row.")
