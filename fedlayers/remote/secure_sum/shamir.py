"""Shamir's secret sharing: any ``threshold`` of the shares give a secret, and fewer give nothing."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**521 - 1
"""The field's size, a Mersenne prime. Shares are below it."""
SECRET_BYTES, SHARE_BYTES = 32, 66


def make_shares(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return ``count`` shares of a secret: the values of a random polynomial at 1, 2, ..., count.

    >>> shares = make_shares(bytes(31) + b"x", threshold=2, count=3)
    >>> combine({1: shares[0], 3: shares[2]})[-1:]
    b'x'

    Args:
        secret: of :data:`SECRET_BYTES` bytes. threshold: the number of shares that give the secret, 1 to ``count``.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise ValueError(f"shares need a secret of {SECRET_BYTES} bytes and a threshold from 1 to {count}")
    terms = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = []
    for x in range(1, count + 1):
        value = 0
        for term in reversed(terms):
            value = (value * x + term) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of shares, by their points: the polynomial's value at 0.

    Args:
        shares: exactly ``threshold`` of them.

    Raises:
        ValueError: they are not shares of one secret of :data:`SECRET_BYTES` bytes.
    """
    value = 0
    for x, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        value += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    value %= PRIME
    if value >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("the shares are not of one secret")
    return value.to_bytes(SECRET_BYTES, "big")
