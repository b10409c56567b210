"""Random seeds and generators derived from the purpose of a draw, independent of all other draws.

Every draw comes from a generator seeded by a hash of (run seed, purpose, round, client, stream). The algorithm's name
is never part of it. Two algorithms with the same definition therefore see the same batches and stay equal bit for bit.
A resumed run needs no stored random state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def seed_of(run_seed: int, purpose: str, *parts: int | str) -> int:
    """Return a 63-bit seed for one purpose: the first 8 bytes of SHA-256 over the given parts and their types.

    Another hash would change the draws of every run.

    >>> seed_of(0, "batches", 3, 1, "main"), seed_of(7, "model")
    (4773734824482452809, 1699993276643476965)
    >>> parts = (1, "1"), ("1", 1), ("ab", "c"), ("a", "bc"), (12,), (1, 2), (1,), ("1",), (), ("",)
    >>> len({seed_of(0, "batches", *each) for each in parts}) == len(parts)
    True

    Args:
        run_seed: the run's seed.
        purpose: a word for what is drawn.
        parts: what further tells draws of this purpose from each other, such as round, client and stream.
    """
    words = []
    for part in (int(run_seed), purpose, *parts):
        kind = type(part).__name__
        words.append(f"{kind}:{part}")
    text = "\x1f".join(words)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def torch_generator(run_seed: int, purpose: str, *parts: int | str) -> torch.Generator:
    """Return a generator of torch for one purpose, seeded by :func:`seed_of` with the same arguments.

    It is on the CPU even if training is on a GPU, so that devices have the same draws.
    """
    import torch

    return torch.Generator().manual_seed(seed_of(run_seed, purpose, *parts))


def numpy_generator(
    run_seed: int, purpose: str, *parts: int | str
) -> np.random.Generator:
    """Return a generator of NumPy for one purpose, seeded by :func:`seed_of` with the same arguments."""
    return np.random.default_rng(seed_of(run_seed, purpose, *parts))


def forked_random() -> AbstractContextManager[None]:
    """Return a context that restores torch's global generators at its end, and those of CUDA if it is in use."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return torch.random.fork_rng(devices=range(count))


@contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generators inside the block and restore them after it, also after an error.

    This is for modules that draw from the global generator (dropout, initialisation).

    >>> import torch
    >>> _, (_, expected) = torch.manual_seed(1), torch.rand(2)
    >>> _, first = torch.manual_seed(1), torch.rand(1)
    >>> try:
    ...     with torch_seeded(5):
    ...         drawn = torch.rand(3)
    ...         raise KeyError
    ... except KeyError:
    ...     pass
    >>> torch.equal(torch.rand(1)[0], expected)
    True
    >>> with torch_seeded(5):
    ...     torch.equal(torch.rand(3), drawn)
    True
    """
    import torch

    with forked_random():
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # the same for the CPU, without the other's records for devices not yet found
            torch.default_generator.manual_seed(seed)
        yield
