"""Token ids and what a folder of transformers says of its inputs: its tokenizer, and the size of its images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_core import storage
from fl_core.errors import about, needs_package

if TYPE_CHECKING:
    from fl_core.models.adapter import Layout

PAD, UNKNOWN, START = 0, 1, 2

SPECIAL = ("<pad>", "<unknown>", "<start>")
"""Names of the first token ids: padding, a word outside the vocabulary, and the start of a sequence."""
LENGTH = 64
"""Tokens of a sample, with the start token first. Longer texts are cut and shorter ones padded."""
FILE = "tokenizer.json"
"""The file of a tokenizer, and the only one that is read."""
MOST_BYTES = 2**26
"""Bytes of it at most. Those of the largest vocabularies have about half."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a folder of transformers, as the library tokenizers reads it from one file, without code.

    Attributes:
        folder: its path.
        sha256: digest of its :data:`FILE`.
        tokens: number of token ids.
        pad: the id of padding.
        length: tokens of a sample: where the file cuts texts, and at most :data:`LENGTH`.
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
            UsageError: its file is missing, a link, larger than :data:`MOST_BYTES`, no tokenizer, or has no padding.
        """
        with about(f"{folder}/{FILE} must be a tokenizer", Exception):
            content = storage.Folder(folder).read(FILE, MOST_BYTES)
            made = _made(content)
            words = made.get_vocab()
            marks = (
                (made.padding or {}).get("pad_token"),
                "[PAD]",
                "<pad>",
                "<|endoftext|>",  # GPT-2's only special token
            )
            pads = [words[mark] for mark in marks if mark in words]
            if not pads:
                raise ValueError(
                    "it has no token for padding. Name one of its tokens that no text has, such as that of an end: "
                    "enable_padding(pad_id=ID, pad_token=TOKEN), and save it"
                )
        cut = made.truncation or {"max_length": LENGTH}
        length = min(cut["max_length"], LENGTH)
        return cls(folder, storage.sha(content), len(words), pads[0], length)

    def encode(self, texts: Sequence[str]) -> Any:
        """Return the library's encodings of texts, cut and padded to :attr:`length`.

        Raises:
            UsageError: the file is another one by now, or does not take the texts.
        """
        with about(f"{self.folder}/{FILE} must read texts as before", Exception):
            made = _made(storage.Folder(self.folder).read_checked(FILE, self.sha256))
            made.enable_truncation(self.length)
            made.enable_padding(length=self.length, pad_id=self.pad)
            return made.encode_batch([*texts])


def _made(content: bytes) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise needs_package("tokenizers", "read texts by it", "lora") from None
    return Tokenizer.from_buffer(content)


def pixels_of(config: Mapping[str, Any]) -> int | None:
    """Return the side of the square images of a configuration of transformers, or None.

    >>> [pixels_of({"image_size": size}) for size in (224, [32, 32], [32, 48], "large")], pixels_of({})
    ([224, 32, None, None], None)
    """
    size = config.get("image_size")
    sides = [*size] if isinstance(size, list | tuple) else [size]
    square = all(type(side) is int and side > 0 for side in sides)
    return sides[0] if square and len({*sides}) == 1 else None


class TokenShape(tuple[int, ...]):
    """The shape (length,) of a sample that is a sequence of token ids, int64 in 0..tokens-1.

    Attributes:
        tokens: number of token ids, the special ones included.
        tokenizer: that they are of. None: of words.
    """

    tokens: int
    tokenizer: Tokenizer | None

    def __new__(
        cls, shape: Iterable[int], tokens: int = 0, tokenizer: Tokenizer | None = None
    ) -> TokenShape:
        made = super().__new__(cls, shape)
        made.tokens, made.tokenizer = tokens, tokenizer
        return made

    @property
    def layout(self) -> Layout | None:
        """Return how a model takes a tokenizer's ids: with the mask of what is no padding."""
        if not self.tokenizer:
            return None
        import torch

        from fl_core.models.adapter import Layout

        keys, form = ("input_ids", "attention_mask"), (tuple(self), tuple(self))
        return Layout(keys, form, (torch.int64, torch.int64), self.tokenizer.pad)

    def __repr__(self) -> str:
        return f"{tuple(self)} of {self.tokens} tokens"
