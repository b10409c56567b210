"""Token ids and what a folder of transformers says of its inputs: its tokenizer, and the size of its images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_core import storage
from fl_core.errors import UsageError, about
from fl_core.models import token_files
from fl_core.models.token_files import LENGTH as LENGTH

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fl_core.models.adapter import Layout

PAD, UNKNOWN, START = 0, 1, 2

SPECIAL = ("<pad>", "<unknown>", "<start>")
"""Names of the first token ids: padding, a word outside the vocabulary, and the start of a sequence."""
FILE = "tokenizer.json"
"""The file of a tokenizer, and the only one that is read."""
MOST_BYTES = 2**26
"""Bytes of a tokenizer's file at most. Those of the largest vocabularies have about half."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a transformers folder. The library tokenizers reads it from one file, without code.

    Attributes:
        folder: path of the folder.
        sha256: digest of its :data:`FILE`.
        tokens: number of token ids.
        pad: the id of padding.
        length: tokens of a sample: where the file cuts texts, and at most
            :data:`fl_core.models.token_files.LENGTH`.
    """

    folder: str
    sha256: str
    tokens: int
    pad: int
    length: int

    @classmethod
    def read(cls, folder: str) -> Tokenizer:
        """Return the tokenizer of a folder.

        Raises:
            UsageError: its file is missing, larger than :data:`MOST_BYTES`, no
                tokenizer, or has no padding. Or the library tokenizers is not
                installed.
        """
        with about(f"{folder}/{FILE} must be a tokenizer", Exception):
            content = storage.Folder(folder, links=True).read(FILE, MOST_BYTES)
            facts = token_files.facts(content)
        return cls(folder, storage.sha(content), **facts)

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], int, str]:
        """Return the ids of texts, int64 [n, length], how many are cut, and at which side: ``left`` or ``right``.

        Texts are cut and padded by the tokenizer's own rules. Only the length is :attr:`length`.

        Raises:
            UsageError: the file is another one by now, or does not take the texts.
        """
        with about(f"{self.folder}/{FILE} must read texts as before", Exception):
            model_folder = storage.Folder(self.folder, links=True)
            content = model_folder.read_checked(FILE, self.sha256)
            token_files.facts(content)
            from tokenizers import Tokenizer

            try:
                tokenizer = Tokenizer.from_buffer(content)
                token_files.arrange(tokenizer, self.length, self.pad)
                with token_files.quiet():  # a panic prints its stack
                    encodings = tokenizer.encode_batch([*texts])
            except BaseException as error:
                if type(error).__name__ != "PanicException":  # of Rust
                    raise
                raise UsageError(f"the library ended: {str(error)[:200]}") from None
            rows = [encoding.ids for encoding in encodings]
            token_files.check_ids(rows, self.length, self.tokens)
        n_cut = sum(bool(encoding.overflowing) for encoding in encodings)
        import numpy as np  # help needs none

        ids = np.array(rows, dtype=np.int64).reshape(-1, self.length)
        return ids, n_cut, (tokenizer.truncation or {}).get("direction", "right")


def pixels_of(config: Mapping[str, Any]) -> int | None:
    """Return the side of the square images of a configuration of transformers, or None.

    It is None for images of other sides, and without a whole number above 0 under
    ``image_size``.

    >>> [pixels_of({"image_size": size}) for size in (224, [32, 32], [32, 48], "large")], pixels_of({})
    ([224, 32, None, None], None)
    """
    size = config.get("image_size")
    sides = [*size] if isinstance(size, list | tuple) else [size]
    is_square = all(type(side) is int and side > 0 for side in sides)
    if is_square and len({*sides}) == 1:
        return sides[0]
    return None


class TokenShape(tuple[int, ...]):
    """The shape (length,) of a sample that is a sequence of token ids, int64 in 0..tokens-1.

    Attributes:
        tokens: number of token ids, the special ones included.
        tokenizer: the tokenizer of the ids. None for ids of words.
    """

    tokens: int
    tokenizer: Tokenizer | None

    def __new__(
        cls, shape: Iterable[int], tokens: int = 0, tokenizer: Tokenizer | None = None
    ) -> TokenShape:
        token_shape = super().__new__(cls, shape)
        token_shape.tokens, token_shape.tokenizer = tokens, tokenizer
        return token_shape

    @property
    def layout(self) -> Layout | None:
        """Return the layout of a tokenizer's ids and their mask, as a model takes them; None for ids of words."""
        if not self.tokenizer:
            return None
        import torch

        from fl_core.models.adapter import Layout

        keys, shapes = ("input_ids", "attention_mask"), (tuple(self), tuple(self))
        return Layout(keys, shapes, (torch.int64, torch.int64), self.tokenizer.pad)

    def __repr__(self) -> str:
        shape = tuple(self)
        return f"{shape} of {self.tokens} tokens"
