"""Keys of a federation: a certificate authority, the server's certificate, and a key for each site.

``KEYS/server`` stays at the server. ``KEYS/sites/NAME`` goes to that site over a private channel. A site that makes its
own key sends only ``NAME.pub``. It belongs into ``KEYS/server/sites``. The files there list who may join, and under
which name. For a secure sum each site has the public keys of all sites, in ``sites`` next to its key.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_core.errors import UsageError, check_distinct, needs_package

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID
except ImportError as error:
    raise needs_package("cryptography", "make keys", "flower") from error

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
AUTHORITY_DAYS, SERVER_DAYS = 3650, 730
WARN_DAYS = 30
PEM = serialization.Encoding.PEM


def make(folder: Path, hosts: Sequence[str], sites: Sequence[str]) -> list[Path]:
    """Write the keys of a new federation, or of more sites of an existing one. Return the files.

    Args:
        folder: new, or with the ``server`` folder of an earlier call.
        hosts: names and addresses under which sites reach the server; only for a new one.
        sites: names of sites, which become names of clients.

    Raises:
        UsageError: a name is bad, repeated or has a key already, or a new server has no host. Nothing is written then.
    """
    server = folder / "server"
    new = not (server / "ca.crt").exists()
    check_names(sites)
    if new:
        check_distinct("a server's certificate", "host", hosts)
        if server.exists() and any(server.iterdir()):
            raise UsageError(f"{server} must be empty or hold keys of before; got other files. Name another folder.")
    elif hosts:
        raise UsageError(f"--host must be given once; got it again for {server}. Leave it out to add sites.")
    taken = [name for name in sites if public_file(server, name).exists() or (folder / "sites" / name).exists()]
    if taken:
        raise UsageError(
            f"site {taken[0]!r} has a key in {folder} already. Choose another name: no key is overwritten."
        )
    written = _server(server, hosts) if new else []
    authority = (server / "ca.crt").read_bytes()
    for name in sites:
        written += [file for file in make_site(folder / "sites" / name, name, authority) if file.suffix != ".pub"]
        written.append(public_file(server, name))
        os.replace(folder / "sites" / name / f"{name}.pub", public_file(server, name))
    for site in (folder / "sites").glob("*/key"):
        (site.parent / "sites").mkdir(exist_ok=True)
        written += [
            _public(site.parent / "sites" / file.name, file.read_bytes())
            for file in sorted((server / "sites").glob("*.pub"))
            if not (site.parent / "sites" / file.name).exists()
        ]
    return written


def make_site(folder: Path, name: str, authority: bytes | None = None) -> list[Path]:
    """Write a site's private key and its public one, ``NAME.pub``, for the server.

    Raises:
        UsageError: a bad name, or a key exists already.
    """
    check_names([name])
    if (folder / "key").exists():
        raise UsageError(f"{folder / 'key'} exists already. Name another folder: no key is overwritten.")
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    written = [private_file(folder / "key", private), _public(folder / f"{name}.pub", public + b"\n")]
    return written + ([_public(folder / "ca.crt", authority)] if authority else [])


def check_names(names: Sequence[str]) -> None:
    """Refuse repeated names of sites, and names that are not valid for a file or a client.

    >>> check_names(["cleveland", "hungary"])

    Raises:
        UsageError: names the first.
    """
    for name in names:
        if not NAME.fullmatch(name):
            rule = "1 to 64 letters, digits and . _ -, with a letter or digit first"
            raise UsageError(f"a site's name must be {rule}; got {name!r}. Choose another name.")
    if names:
        check_distinct("a federation", "site", names)


def public_file(server: Path, name: str) -> Path:
    """Return the path of a site's public key at the server."""
    return server / "sites" / f"{name}.pub"


def registered_sites(server: Path, least: int = 1) -> dict[str, bytes]:
    """Return the public keys of the sites that may join, by name, in PEM.

    Raises:
        UsageError: fewer than ``least`` sites, an invalid key file, or two sites with the same key.
    """
    found, faults = readable_sites(server)
    if faults:
        raise UsageError(faults[0])
    if len(found) < least:
        raise UsageError(
            f"{server / 'sites'} must hold the sites' public keys; got none. See fedlayers federation keys --help."
        )
    return found


def readable_sites(server: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return the public keys as :func:`registered_sites`, b"" for an invalid file, and what is wrong with these."""
    found: dict[str, bytes] = {}
    faults: list[str] = []
    for file in sorted((server / "sites").glob("*.pub")):
        try:
            check_names([file.stem])
            found[file.stem] = _read_key(file, found)
        except UsageError as error:
            found[file.stem] = b""
            faults.append(str(error))
    return found, faults


def _read_key(file: Path, others: Mapping[str, bytes]) -> bytes:
    try:
        key = serialization.load_ssh_public_key(file.read_bytes())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("another kind of key")
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        way = "Make it with `fedlayers federation keys`."
        raise UsageError(f"{file} must be the public key of a site; got {error}. {way}") from None
    pem = key.public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    twin = next((name for name, other in others.items() if other == pem), None)
    if twin:
        raise UsageError(f"{file} must be a key of its own; got that of site {twin!r}. Make a key for {file.stem!r}.")
    return pem


def certificate(folder: Path, hosts: Sequence[str], authority: Path | None = None, days: int = SERVER_DAYS) -> None:
    """Write ``server.key`` and ``server.crt`` for these hosts, signed by a folder's authority, or by itself."""
    key = ec.generate_private_key(ec.SECP384R1())
    names = [_general_name(host) for host in hosts]
    if authority is None:
        signer, issuer = key, "fedlayers"
    else:
        loaded = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        signer, issuer = loaded, "fedlayers authority"
    built = _builder("fedlayers", issuer, key, days).add_extension(x509.SubjectAlternativeName(names), critical=False)
    built = built.add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
    private_file(folder / "server.key", _pkcs8(key))
    _public(folder / "server.crt", built.sign(signer, hashes.SHA256()).public_bytes(PEM))


def renew(folder: Path) -> Path:
    """Write a new certificate of the server, with a new key, for the names of the old one. Return its file.

    The authority stays, so sites need nothing new.

    Raises:
        UsageError: the folder has no server's keys, or not the authority's private key.
    """
    server = folder / "server"
    for name in ("ca.key", "server.crt", "server.key"):
        if not (server / name).is_file():
            raise UsageError(f"{server / name} is missing. Name the folder that `fedlayers federation keys` made.")
    old = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    with tempfile.TemporaryDirectory(dir=server) as new:  # a private folder; whole files replace the old ones
        certificate(Path(new), [str(name.value) for name in names], authority=server)
        for name in ("server.key", "server.crt"):
            os.replace(Path(new) / name, server / name)
    return server / "server.crt"


def expiry_warnings(folder: Path, now: datetime.datetime | None = None) -> list[str]:
    """Return a warning for each certificate in a folder that ends in less than :data:`WARN_DAYS` days."""
    found = []
    for name, way in (("server.crt", "fedlayers federation keys --renew"), ("ca.crt", "make new keys for all sites")):
        if (folder / name).is_file():
            end = x509.load_pem_x509_certificate((folder / name).read_bytes()).not_valid_after_utc
            days = (end - (now or datetime.datetime.now(datetime.UTC))).days
            if days < WARN_DAYS:
                found.append(f"{folder / name} ends on {end:%Y-%m-%d}, in {days} days: {way}")
    return found


def _server(folder: Path, hosts: Sequence[str]) -> list[Path]:
    for host in hosts:
        _general_name(host)
    (folder / "sites").mkdir(parents=True)
    key = ec.generate_private_key(ec.SECP384R1())
    usage = x509.KeyUsage(False, False, False, False, False, key_cert_sign=True, crl_sign=True, encipher_only=False,
                          decipher_only=False)  # fmt: skip
    name = "fedlayers authority"
    built = _builder(name, name, key, AUTHORITY_DAYS).add_extension(x509.BasicConstraints(True, 0), critical=True)
    signed = built.add_extension(usage, critical=True).sign(key, hashes.SHA256())
    private_file(folder / "ca.key", _pkcs8(key))
    _public(folder / "ca.crt", signed.public_bytes(PEM))
    certificate(folder, hosts, authority=folder)
    private_file(folder / "secret", secrets.token_hex(32).encode())
    return [folder / name for name in ("ca.key", "ca.crt", "server.key", "server.crt", "secret")]


def _builder(name: str, issuer: str, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)
    return x509.CertificateBuilder(
        issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]),
        subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=start,
        not_valid_after=start + datetime.timedelta(days=days),
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9*]([A-Za-z0-9.-]{0,252})", host):
        raise UsageError(f"--host must be a host name or an address; got {host!r}. Leave out the port and https://.")
    return x509.DNSName(host)


def _pkcs8(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def private_file(file: Path, content: bytes) -> Path:
    """Write a new file that only its owner can read."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
        handle.write(content)
    return file


def _public(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file
