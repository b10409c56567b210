"""Token ids: the special ones, and the shape of a sequence of them."""

from __future__ import annotations

from collections.abc import Iterable

PAD, UNKNOWN, START = 0, 1, 2

SPECIAL = ("<pad>", "<unknown>", "<start>")
"""Names of the first token ids: padding, a word outside the vocabulary, and the start of a sequence."""


class TokenShape(tuple[int, ...]):
    """The shape (length,) of a sample that is a sequence of token ids, int64 in 0..tokens-1.

    Attributes:
        tokens: number of token ids, the special ones included.
    """

    tokens: int

    def __new__(cls, shape: Iterable[int], tokens: int = 0) -> TokenShape:
        made = super().__new__(cls, shape)
        made.tokens = tokens
        return made

    def __repr__(self) -> str:
        return f"{tuple(self)} of {self.tokens} tokens"
