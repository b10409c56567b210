"""Conversion of texts to token ids: splitting into words, a vocabulary from training samples, and padding."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from fl_core.data.arrays import Integers
from fl_core.data.columns import DataFault
from fl_core.errors import warn
from fl_core.tokens import PAD, SPECIAL, START

LENGTH = 64
"""Tokens of a sample, with the start token first. Longer texts are cut and shorter ones padded."""

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0002ffff"
"""Letters of languages without spaces: Thai, Lao, Burmese, Khmer, Japanese and Chinese."""
_SIGN = re.compile(f"[{_UNSPACED}]")
_TOKEN = re.compile(
    rf"[{_UNSPACED}]|[#@]?[^\W{_UNSPACED}]+(?:['’][^\W{_UNSPACED}]+)*|[^\w\s]"
)
NOTED = 0.1
"""Share of tokens that are lost or unknown, or of texts without spaces, from which a warning says so."""


def words_of(text: str) -> list[str]:
    """Split a text into tokens: words (with their # or @, and apostrophes inside), and single other signs.

    Tokens are lower case in Unicode's compatibility form. White space only separates them. Each letter of a language
    without spaces, such as Chinese or Thai, is a token.
    """
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


def encode(
    texts: Sequence[str], length: int = LENGTH
) -> tuple[Integers, tuple[str, ...]]:
    """Return texts as codes [n, length], and the sorted words of the codes from ``len(SPECIAL)`` on.

    These are all words. The vocabulary is chosen from them after the partition (see :mod:`fl_core.data.sources`).
    """
    tokens = [words_of(text)[: length - 1] for text in texts]
    words = sorted({word for sentence in tokens for word in sentence})
    code = {word: len(SPECIAL) + k for k, word in enumerate(words)}
    codes = np.full((len(tokens), length), PAD, dtype=np.int64)
    codes[:, 0] = START
    for row, sentence in enumerate(tokens):
        codes[row, 1 : 1 + len(sentence)] = [code[word] for word in sentence]
    return codes, tuple(words)


def warn_of_losses(texts: Sequence[str], where: str) -> None:
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


def check(texts: Sequence[str]) -> None:
    """Check that no text is blank.

    Raises:
        DataFault: names the first blank text.
    """
    for row, cell in enumerate(texts):
        if not cell.strip():
            rule = "the text must not be empty."
            raise DataFault(rule, "Fill it, or remove the row.", row)
