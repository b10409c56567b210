"""Keys of a secure sum: a site's lasting identity, keys for one exchange, and masks and envelopes made of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedlayers.remote.codec import PacketError
from fedlayers.remote.secure_sum.fixed_point import Words
from fl_core.errors import UsageError

CHUNK = 2**20
NONCE = 12


class Identity:
    """A site's lasting key, and the public keys of the other sites, so that no server can play a site.

    Args:
        name: the site's. key: its private key. peers: public keys of other sites, by name.
    """

    def __init__(
        self, name: str, key: ec.EllipticCurvePrivateKey, peers: Mapping[str, ec.EllipticCurvePublicKey]
    ) -> None:
        self.name, self.key = name, key
        self.peers = {**peers, name: key.public_key()}

    @classmethod
    def read(cls, name: str, key: Path, peers: Mapping[str, bytes]) -> Identity:
        """Read a private key of ``fedlayers federation keys``, with the other sites' public keys in PEM.

        Raises:
            UsageError: it is no such key.
        """
        try:
            private = serialization.load_ssh_private_key(key.read_bytes(), None)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{key} must be a key of `fedlayers federation keys`: {error}. Make one with it."
            ) from error
        public = {each: serialization.load_pem_public_key(pem) for each, pem in peers.items()}
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise UsageError(f"{key} must be a key of `fedlayers federation keys`; got another kind. Make one with it.")
        curves = {each: found for each, found in public.items() if isinstance(found, ec.EllipticCurvePublicKey)}
        return cls(name, private, curves)

    def sign(self, text: bytes) -> bytes:
        """Return the signature of a text."""
        return self.key.sign(text, ec.ECDSA(hashes.SHA384()))

    def check(self, site: str, text: bytes, signature: bytes, what: str) -> None:
        """Refuse a text that a site has not signed.

        Args:
            what: the text's name in an error.

        Raises:
            UsageError: there is no public key of that site. PacketError: the signature is not the site's.
        """
        if site not in self.peers:
            raise UsageError(
                f"a secure sum must have the public key of each site; got none of {site!r}. "
                f"Put {site}.pub into the folder `sites` next to the key."
            )
        try:
            self.peers[site].verify(signature, text, ec.ECDSA(hashes.SHA384()))
        except InvalidSignature:
            raise PacketError(
                f"the {what} of site {site!r} must be signed by it for this sum; got another signature."
            ) from None


def new_key() -> bytes:
    """Draw a private X25519 key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public(key: bytes) -> bytes:
    """Return the public part of an X25519 key."""
    return X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()


def shared_secret(key: bytes, other: bytes, context: bytes) -> bytes:
    """Return the secret of 32 bytes that a private and a public key have in common, for one use.

    Raises:
        PacketError: the public key is invalid.
    """
    try:
        secret = X25519PrivateKey.from_private_bytes(key).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise PacketError(f"a public key of a secure sum must be valid: {error}.") from None
    return HKDF(hashes.SHA256(), 32, None, context).derive(secret)


def add_mask(words: Words, seed: bytes, sign: int) -> None:
    """Add the stream of ChaCha20 for a seed to words in place, or subtract it, modulo 2^64.

    >>> words = np.arange(3, dtype=np.uint64)
    >>> add_mask(words, bytes(32), 1)
    >>> words.tolist() == [0, 1, 2]
    False
    >>> add_mask(words, bytes(32), -1)
    >>> words.tolist()
    [0, 1, 2]
    """
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    for begin in range(0, len(words), CHUNK):
        part = words[begin : begin + CHUNK]
        mask = np.frombuffer(stream.update(bytes(part.nbytes)), "<u8")
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def encrypt(key: bytes, data: bytes, way: bytes) -> bytes:
    """Encrypt data for the owner of the same key. ``way`` names sender and receiver."""
    nonce = os.urandom(NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, data, way)


def decrypt(key: bytes, data: bytes, way: bytes) -> bytes:
    """Decrypt what :func:`encrypt` encrypted.

    Raises:
        PacketError: it was changed, or is for another way.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(data[:NONCE], data[NONCE:], way)
    except (InvalidTag, ValueError):
        raise PacketError(f"shares {way.decode()} must be sealed for this sum; got forged ones.") from None
