"""Reading and writing of files: atomic writes, digests, and limits of memory.

:class:`Folder` follows no links below it, unless it is told to. Untrusted files are read
here, too: :func:`opened` takes regular files alone. A large file, a packed file that
unpacks to far more, and deep JSON are refused before they fill the memory.
:mod:`fl_core.formats` has the bounds of tables and images.

>>> parsed_json('{"layers": ["fc1", "fc2"]}')
{'layers': ['fc1', 'fc2']}
>>> parsed_json("[" * 5000 + "]" * 5000)
Traceback (most recent call last):
ValueError: JSON that is nested more than 100 times
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import math
import os
import re
import stat
import struct
import sys
import tokenize
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from fl_core.errors import (
    COUNT,
    BusyError,
    CorruptError,
    MapOf,
    UsageError,
    about,
    check_stored,
    damaged,
    validate,
)

if TYPE_CHECKING:
    from torch import Tensor


def sha(data: bytes) -> str:
    """Return the SHA-256 of some bytes, as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """Return data as the bytes of JSON that are stored: indented by 1, with a line end.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return json.dumps(data, indent=1, allow_nan=False).encode() + b"\n"


def sign(data: Mapping[str, Any]) -> bytes:
    """Return the bytes of JSON with an added last entry ``sha256``: the digest of all other entries' bytes of JSON.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return json_bytes({**data, "sha256": sha(json_bytes(data))})


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader sees the old contents or the new ones.

    Missing folders are made. Temporary files of the same file that killed processes have
    left are removed.

    Raises:
        CorruptError: the path is a link, a folder, a pipe or a device.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    Folder(path.parent).write(path.name, data)
    start, end = f"{path.name}.", ".part"
    for name in os.listdir(path.parent):
        if name.startswith(start) and name.endswith(end):
            writer = name[len(start) : -len(end)]
            if writer.isdecimal() and not Path("/proc", writer).exists():
                (path.parent / name).unlink(missing_ok=True)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write data as JSON by :func:`write_atomically`.

    Raises:
        ValueError: a number is NaN or infinite. Nothing is written then.
        CorruptError: as for :func:`write_atomically`.
    """
    write_atomically(path, json_bytes(data))


def check_version(path: Path | str, stored: object, wanted: str) -> bool:
    """Return whether a stored format is ``wanted``, such as ``"fedlayers.plan/2"``, and not of another kind.

    Args:
        path: the file, or words for what was stored, for the message.
        stored: the format in the file.
        wanted: the kind and the version that this version of the package reads.

    Raises:
        UsageError: another version of this package has written it. The message names the file and both formats.
    """
    kind, _, number = wanted.rpartition("/")
    kind_pattern = re.escape(kind)
    match = re.fullmatch(rf"{kind_pattern}/([1-9][0-9]{{0,8}})", str(stored))
    if match and int(match[1]) != int(number):
        newer = int(match[1]) > int(number)
        remedy = "An older fedlayers wrote it: train again"
        if newer:
            remedy = "A newer fedlayers wrote it: update yours"
        raise UsageError(
            f"{path} must have the format {wanted}; got {stored}. {remedy}."
        )
    return bool(match)


def check_folder(path: Path) -> None:
    """Refuse a folder for results that is a run, a file or the root of all folders.

    Raises:
        UsageError: it is one of these. The message names the path.
    """
    real_path = Path(os.path.realpath(path))
    if real_path.parent == real_path:
        raise UsageError(
            f"out must be a folder for results; got {path}, the root of all folders. Write out='out/NAME'."
        )
    is_run = (path / "config.json").exists() and (path / "lock").exists()
    if is_run or (path.exists() and not path.is_dir()):
        what = "a file"
        if is_run:
            what = "a run directory"
        raise UsageError(
            f"out must be a folder for results; got {path}, which is {what}. Choose another folder."
        )


def check_no_links(folder: Path) -> None:
    """Refuse a folder with a symbolic link at any depth below it.

    Runs would be read or written elsewhere. The folder itself may be a link.

    Raises:
        CorruptError: there is a link. The message names it.
    """
    for above, folders, names in os.walk(folder):
        for path in (os.path.join(above, name) for name in (*folders, *names)):
            if os.path.islink(path):
                raise CorruptError(
                    f"{path} is a symbolic link and is not followed. Remove it, or use another folder."
                )


CONTROL = "\x00-\x1f\x7f-\x9f\u2028\u2029"
"""Control characters and line ends, as a part of a regular expression's set."""
NAME_BYTES, PATH_BYTES = 255, 1000
"""The largest number of bytes in the name of a file or folder, and in all names of a relative path."""


def is_file_name(name: str) -> bool:
    r"""Return whether a relative name is valid for a file below a folder on Linux.

    The parts between slashes must not be empty, ``.`` or ``..``. Each part has at most 255
    bytes, and all parts together have at most 1000. No part has a NUL. What Windows forbids
    in addition, such as ``a:b``, is not checked.

    >>> is_file_name("blobs/a.json"), is_file_name("a//b"), is_file_name("../a"), is_file_name("a" * 256)
    (True, False, False, False)
    >>> is_file_name("a\0"), is_file_name("\ud800")
    (False, False)
    """
    try:
        parts = name.encode().split(b"/")
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    lengths = [len(part) for part in parts]
    if {b"", b".", b".."} & {*parts} or "\0" in name:
        return False
    return max(lengths) <= NAME_BYTES and sum(lengths) <= PATH_BYTES


class Folder:
    """The regular files below one directory, by relative name.

    The directory's own path may contain links. Links, pipes and devices below it are refused without waiting for them.

    Args:
        path: path of the directory, which need not exist.
        links: whether links below it are followed, as in a user's cache of models.

    Raises:
        CorruptError: from every method but :meth:`sync`: a name is invalid
            (:func:`is_file_name`), or leads through a link, or to a pipe, a device or a
            folder.
        OSError: from every method, with the file's path: a full disk, no permission.
    """

    def __init__(self, path: Path | str, links: bool = False) -> None:
        self.path = Path(path)
        self.links = links

    def file(self, name: str) -> Path:
        """Return the path of a file's name, after a check of the name and of what is there.

        The file need not exist.
        """
        parts = name.split("/")
        if not is_file_name(name) or re.search(f"[{CONTROL}]", name):
            shown = name[:NAME_BYTES]
            raise CorruptError(
                f"name of a file below {self.path} must be of at most {NAME_BYTES} bytes, without empty parts, '.', "
                f"'..' and control signs; got {shown!r}."
            )
        path = self.path
        for place, part in enumerate(parts, 1):
            path /= part
            is_kind = stat.S_ISDIR
            if place == len(parts):
                is_kind = stat.S_ISREG
            with suppress(FileNotFoundError, NotADirectoryError), no_circle(path):
                mode = os.stat(path, follow_symlinks=self.links).st_mode
                if stat.S_ISLNK(mode):
                    raise CorruptError(
                        f"{path} is a symbolic link, which is not followed"
                    )
                if not is_kind(mode):
                    raise CorruptError(f"{path} is no regular file")
        return path

    def has(self, name: str) -> bool:
        """Return whether a file has this name."""
        return self.file(name).exists()

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names in this folder, or in a folder below it; an empty list if it does not exist."""
        path = self.path
        if folder:
            path = self.file(f"{folder}/-").parent
        if path.exists():
            return sorted(os.listdir(path))
        return []

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            CorruptError: the file does not exist.
        """
        path = self.file(name)
        try:
            return os.stat(path).st_size
        except FileNotFoundError as error:
            raise CorruptError(f"{path} is missing") from error

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return the bytes of an existing file.

        Args:
            name: the file's relative name.
            most: the largest allowed number of bytes. The default is the machine's memory.

        Raises:
            CorruptError: the file does not exist, or is larger. Then nothing is read.
        """
        path = self.file(name)
        check_size(path, self.size(name), most, CorruptError)
        with _named(path):
            return path.read_bytes()

    def read_signed(self, name: str, *shapes: object) -> dict[str, Any]:
        """Return the data of a JSON file that :func:`sign` wrote, after a check of its digest.

        Args:
            shapes: forms that the data must have, all of them, as for :func:`fl_core.errors.validate`.

        Raises:
            CorruptError: the file is missing or too large, any byte differs, or it has
                another form.
        """
        raw = self.read(name, JSON_BYTES)
        path = self.path / name
        with damaged(path):  # no JSON, no UTF-8, nested too deeply, or a NaN
            data = parsed_json(raw)
            if not isinstance(data, dict) or not data.pop("sha256", None):
                raise ValueError("it has no digest")
            if raw != sign(data):
                raise ValueError("its contents do not match its digest")
        for form in shapes:
            check_stored(path, data, form)
        return data

    def read_checked(self, name: str, digest: str) -> bytes:
        """Return the bytes of a file, after a check of its SHA-256.

        Args:
            digest: the expected SHA-256, in hexadecimal.

        Raises:
            CorruptError: the file is missing, or any byte differs.
        """
        data = self.read(name)
        if sha(data) != digest:
            got = sha(data)[:12]
            raise CorruptError(
                f"{self.path / name} is damaged: its digest is {got}…, recorded is {digest[:12]}…"
            )
        return data

    def read_tensors(self, name: str, digest: str) -> dict[str, Tensor]:
        """Return the tensors of a safetensors file by name, after a check of its SHA-256.

        Args:
            digest: the expected SHA-256, in hexadecimal.

        Raises:
            CorruptError: the file is missing, any byte differs, or it is no sound file of tensors.
        """
        data = self.read_checked(name, digest)
        with damaged(self.path / name):
            return tensors(data)

    def write(self, name: str, data: bytes, lasting: bool = True) -> None:
        """Write a file so that a reader sees the old contents or the new, and a power cut keeps one of them.

        Args:
            name: the file's relative name. Its last folder is made if it is missing.
            data: the file's contents.
            lasting: whether the file's name is on the disk, too, when this returns. Otherwise :meth:`sync` its folder.
        """
        path = self.file(name)
        with _named(path):
            with suppress(FileExistsError):
                os.mkdir(path.parent)
            part = f"{path}.{os.getpid()}.part"
            with suppress(FileNotFoundError):
                os.unlink(part)  # from an earlier process with this number
            try:
                handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)
            except BaseException:
                with suppress(OSError):  # a leftover is removed when the run is resumed
                    os.unlink(part)
                raise
            if lasting:
                _sync(path.parent)

    def append(self, name: str, data: bytes) -> None:
        """Append data to a file without waiting for the disk. A missing file is created."""
        path = self.file(name)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with _named(path), os.fdopen(os.open(path, flags, 0o666), "wb") as file:
            file.write(data)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(self.file(name))

    def sync(self, name: str) -> None:
        """Bring an appended file, or the names in a folder, to the disk, if it exists."""
        path = self.path / name
        with suppress(FileNotFoundError), _named(path):
            _sync(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold this folder's lock inside the ``with`` block.

        The lock is one of the operating system, on the file ``lock``. So it also ends with
        its process. A lock that is held already is not waited for.

        Raises:
            BusyError: the lock is held already. The message names the holder's process.
            CorruptError: the file ``lock`` is no regular file.
        """
        path = self.file("lock")
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "rb+")
        try:
            try:
                with _named(path):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = file.read(64).decode(errors="replace").strip() or "unknown"
                raise BusyError(
                    f"{self.path} is being written by another process (pid {holder}). Wait until it ends."
                ) from error
            with _named(path):
                file.truncate()
                file.write(f"{os.getpid()}\n".encode())
                file.flush()
            yield
        finally:
            with _named(path), file:
                pass  # closing the file ends the lock


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error of the operating system name this path."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


_SEPARATOR = "|"  # between the name of a tree and the name of a tensor; module paths have no such character
HEADER_BYTES = 2**24
"""Bytes of a safetensors file's header at most; a tensor takes about 100."""

V = TypeVar("V")


def merge_trees(trees: Mapping[str, Mapping[str, V]]) -> dict[str, V]:
    """Join several trees into one, with a tree's name before each key.

    Nothing is copied; :func:`split_trees` is the inverse.

    Raises:
        UsageError: a tree's name contains the separator.
    """
    for name in trees:
        if _SEPARATOR in name:
            raise UsageError(
                f"name of a tree must be without {_SEPARATOR!r}; got {name!r}."
            )
    merged: dict[str, V] = {}
    for name, tree in trees.items():
        merged |= {f"{name}{_SEPARATOR}{key}": value for key, value in tree.items()}
    return merged


def split_trees(tree: Mapping[str, V], names: Iterable[str]) -> dict[str, dict[str, V]]:
    """Split a tree from :func:`merge_trees` into the original trees.

    ``names`` lists them all, since empty ones have no keys.

    >>> trees = {"model": {"fc|w": 1, "fc.b": 2}, "head": {}}
    >>> split_trees(merge_trees(trees), trees) == trees
    True
    >>> split_trees(merge_trees(trees), ["head"])
    Traceback (most recent call last):
        ...
    ValueError: its tensor 'model|fc|w' belongs to none of its trees

    Raises:
        ValueError: a key begins with none of the names.
    """
    trees: dict[str, dict[str, V]] = {name: {} for name in names}
    for key, value in tree.items():
        name, _, rest = key.partition(_SEPARATOR)
        if name not in trees:
            raise ValueError(f"its tensor {key!r} belongs to none of its trees")
        trees[name][rest] = value
    return trees


def tensors(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, by name.

    The header must be valid. Its tensors must fill the file without gap or overlap. A tensor must have the bytes of
    its shape and type.

    Raises:
        ValueError: a check fails.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    check_header(data)
    try:
        loaded: dict[str, Tensor] = load(data)
        return loaded
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    except KeyError as error:
        raise ValueError(
            f"it has numbers of a type that torch does not load, {error}"
        ) from error


def tensor_sizes(path: Path) -> dict[str, int]:
    """Return the number of elements of each tensor of a safetensors file, by name. Only the header is read.

    Raises:
        UsageError: as for :func:`check_regular`.
        ValueError: the header is damaged, or the file has another size than the header says.
    """
    size = check_regular(path)
    with opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        data = length.to_bytes(8, "little") + file.read(min(length, HEADER_BYTES))
    check_header(data)
    header = parsed_json(data[8:])
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    header.pop("__metadata__", None)
    if fault := validate(
        header, MapOf({"dtype": str, "shape": [COUNT], "data_offsets": [COUNT]})
    ):
        raise ValueError(fault)
    sizes, stored = {}, 0
    for name, entry in header.items():
        sizes[name] = math.prod(entry["shape"])
        start, end = entry["data_offsets"]
        stored += end - start
        if not 0 <= sizes[name] <= end - start:
            raise ValueError(f"{name!r} has more elements than bytes")
    if 8 + length + stored != size:
        raise ValueError("it has another size than its header says")
    return sizes


def check_header(data: bytes) -> None:
    """Refuse the beginning of a safetensors file whose header would take far more memory than it has bytes.

    Args:
        data: the beginning of the file, with the whole header, or the whole file.

    Raises:
        ValueError: the header is too long, or has too many values.
    """
    header = int.from_bytes(data[:8], "little")  # its length
    if header > HEADER_BYTES:
        raise ValueError(
            f"its header must have at most {HEADER_BYTES:,} bytes; got {header:,}"
        )
    check_values(data[8 : 8 + header].decode(errors="replace"))


JSON_BYTES = 2**30
"""Bytes of one file of JSON at most; the manifest of a checkpoint has about 200 for each client."""
DEEPEST = 100
"""Lists and objects of JSON within each other at most."""
VALUES = 2**20
"""Values of one text of JSON at most, or one for every :data:`BYTES_EACH` of its bytes if that is more.

Each of them takes about 64 bytes of memory, however short it is written.
"""
BYTES_EACH = 4
_STRUCTURE = "[{,:"
_VALUE = re.compile(r'(?:[^"\[{,:]++|"(?:[^"\\]++|\\.)*+"?)*+(?:[\[{,:]|\Z)', re.DOTALL)
"""A pattern of the text up to the next sign of structure outside of strings, or up to the end.

A match takes no memory of its own.
"""
_NESTING = frozenset((dict, list))
_NESTED = f"JSON that is nested more than {DEEPEST} times"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
UNPACKED = 2**28
"""Bytes that a packed file may unpack to, however small it is."""
UNPACKED_VARIABLE = "FEDLAYERS_UNPACKED"
"""The environment variable that replaces :data:`UNPACKED` by another number of bytes, such as ``6e9``."""
RATIO = 100
"""Bytes to which each byte of a packed file may unpack, where that is more than :data:`UNPACKED`.

Measured numbers and pictures do not reach 10.
"""


def memory() -> int:
    """Return the bytes of memory of this machine, or a very large number if the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):
        return sys.maxsize


def check_size(
    path: Path | str,
    n_bytes: int,
    most: int | None = None,
    fault: Callable[[str], Exception] = UsageError,
) -> None:
    """Refuse a file before it is read, if it is too large.

    Args:
        n_bytes: the file's size.
        most: the largest allowed number of bytes. The default is the machine's memory.
        fault: the type of the error.

    Raises:
        Exception: the file is larger; the type is ``fault``. The message names the file, its size and the limit.
    """
    if n_bytes > (memory() if most is None else most):
        if most is None:
            available = format_bytes(memory())
            limit = f"this machine's memory of {available}"
        else:
            most_size = format_bytes(most)
            limit = f"the {most_size} of its kind"
        size_text = format_bytes(n_bytes)
        raise fault(f"{path} must have at most {limit}; got {size_text}.")


def check_regular(path: Path | str, most: int | None = None) -> int:
    """Return the size in bytes of a regular file that a user names. Links are followed.

    Nothing is opened, so that no pipe is waited for.

    Args:
        path: the file's path.
        most: the largest allowed number of bytes. The default is the machine's memory.

    Raises:
        UsageError: the path is no regular file, or the file has more than ``most``
            bytes, or far more than the disk holds of it.
    """
    with _there(path):
        status = os.stat(path)
    return _check_status(path, status, most)


def _check_status(path: Path | str, status: os.stat_result, most: int | None) -> int:
    """Return the size of a regular file, as for :func:`check_regular`, from what the system says of it."""
    if not stat.S_ISREG(status.st_mode):
        got = "a pipe or a device"
        if stat.S_ISDIR(status.st_mode):
            got = "a folder"
        raise UsageError(f"{path} must be a file; got {got}. Correct its path.")
    check_size(path, status.st_size, most)
    check_unpacked(path, 512 * status.st_blocks, status.st_size)
    return status.st_size


@contextmanager
def no_circle(
    path: Path | str, fault: Callable[[str], Exception] = CorruptError
) -> Iterator[None]:
    """Refuse a link that leads to itself, and a name that is too long, if the system finds one in the block.

    Args:
        path: the file's path, for the message.
        fault: the type of the error.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
            raise
        reason = "links that lead in a circle"
        if error.errno == errno.ENAMETOOLONG:
            reason = "a name that is too long"
        raise fault(f"{path} must be a file; got {reason}. Correct its path.") from None


@contextmanager
def _there(path: Path | str) -> Iterator[None]:
    """Refuse a path that leads to no file, if the system says so in the ``with`` block."""
    try:
        with no_circle(path, UsageError):
            yield
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{path} must be a file; got no such file. Correct its path."
        ) from None


@contextmanager
def opened(path: Path | str, most: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file that a user names, to read its bytes.

    Args:
        most: the largest allowed number of bytes. The default is the machine's memory.

    Raises:
        UsageError: as for :func:`check_regular`.
    """
    check_regular(path, most)
    with _there(path):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        _check_status(path, os.fstat(handle), most)  # it may be another by now
        yield file


def read_bytes(path: Path | str, most: int | None = None) -> bytes:
    """Return the bytes of a regular file that a user names.

    Args:
        most: the largest allowed number of bytes. The default is the machine's memory.

    Raises:
        UsageError: as for :func:`check_regular`.
    """
    with opened(path, most) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_text(path: Path, most: int | None = None) -> str:
    """Return the text of a regular file that a user names, as UTF-8 of at most ``most`` bytes.

    Every line end becomes a newline. By default the machine's memory is the limit.

    Raises:
        UsageError: as for :func:`check_regular`.
        UnicodeDecodeError: the text is not UTF-8.
    """
    text = read_bytes(path, most).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n")


DOTS = 10
"""Dots of one key of TOML at most; each makes a table."""
ALL_DOTS = 10_000
DIGITS = 18
"""Digits of an integer of TOML at most."""
_TOML_STRINGS = re.compile(
    r'''#[^\n]*+|"""(?:[^"\\]++|\\.|"(?!""))*+(?:""")?|"(?:[^"\\\n]++|\\.)*+"?'''
    r"""|'''(?:[^']++|'(?!''))*+(?:''')?|'[^'\n]*+'?""",
    re.DOTALL,
)
"""Comments and strings of TOML."""
_DOTTED = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{DOTS + 1}}}")
_INTEGER = re.compile(rf"(?<![\w.+-])[+-]?\d[\da-fA-Fxob_]{{{DIGITS},}}+(?![\w.-])")


def read_toml(path: Path, most: int) -> dict[str, Any]:
    """Return the contents of a TOML file of at most ``most`` bytes.

    Raises:
        UsageError: the file is missing, too large or no TOML, or :func:`check_toml`
            refuses its text. The message names the file.
    """
    if not path.is_file():
        what = "no file"
        if path.is_dir():
            what = "a folder"
        raise UsageError(
            f"{path} must be a file of TOML; got {what}. Correct its path."
        )
    kinds = (ValueError, RecursionError)
    with about(f"{path} must be TOML", kinds, way="Correct the file."):
        text = read_text(path, most)
        check_toml(text)
        return tomllib.loads(text)


def check_toml(text: str) -> None:
    """Refuse a text of TOML before it is parsed, if its tables or integers would take far more memory than the text.

    >>> check_toml("a.b = 0.25 # 1.2.3.4.5.6.7.8.9.10.11.12")
    >>> check_toml("a" + ".a" * 11 + " = 1")
    Traceback (most recent call last):
        ...
    ValueError: a key has more than 10 dots
    >>> check_toml("a = 1234567890123456789")
    Traceback (most recent call last):
        ...
    ValueError: an integer has more than 18 digits

    Raises:
        ValueError: a key or the whole text has too many dots, or an integer has too many digits. The message has the
            limit.
    """
    bare = _TOML_STRINGS.sub("s", text)
    if _DOTTED.search(bare):
        raise ValueError(f"a key has more than {DOTS} dots")
    if bare.count(".") > ALL_DOTS:
        raise ValueError(f"it has more than {ALL_DOTS:,} dots")
    if _INTEGER.search(bare):
        raise ValueError(f"an integer has more than {DIGITS} digits")


def check_unpacked(path: Path | str, packed: int, unpacked: int) -> None:
    """Refuse a packed file before it is unpacked, if that would take far more bytes than the file has.

    Args:
        path: the file's path, for the message.
        packed: size of the file in bytes.
        unpacked: number of bytes that it would take.

    Raises:
        UsageError: it would take more than :func:`most_unpacked` and :data:`RATIO`
            times its size, or more than this machine's memory. The message names the
            file and the sizes. In the first case it has the setting that allows them.
    """
    check_size(f"{path}, unpacked,", unpacked)
    if unpacked > max(most_unpacked(), RATIO * packed):
        unpacked_size = format_bytes(unpacked)
        packed_size = format_bytes(packed)
        raise UsageError(
            f"{path} must unpack to at most {RATIO} times its size; "
            f"got {unpacked_size} from {packed_size}. "
            f"If the data are meant, allow it: {UNPACKED_VARIABLE}={1.06 * unpacked:.1e}."
        )


def most_unpacked() -> int:
    """Return the bytes that a small packed file may unpack to: :data:`UNPACKED`, or as the environment says.

    Raises:
        UsageError: the value of :data:`UNPACKED_VARIABLE` is no number.
    """
    text = os.environ.get(UNPACKED_VARIABLE, "")
    if not text:
        return UNPACKED
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        raise UsageError(
            f"{UNPACKED_VARIABLE} must be a number of bytes, such as 6e9; got {text!r}. Correct it."
        ) from None


DIRECTORY_BYTES = 2**22
"""Bytes that a zip archive's list of files may have; a file in it takes at least 46, and ten times that in memory."""
ENTRIES = 10_000
"""Files of a zip archive at most, each of which takes time."""
PACKINGS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""Ways of packing. Others unpack all at once, however little is read: 700 bytes are then 400 MB."""
DAMAGED = (
    *(ValueError, TypeError, AttributeError, LookupError, OSError, EOFError),
    *(RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error, struct.error),
    *(SyntaxError, tokenize.TokenError),  # of an array's header, written as Python
)
"""The types of errors that reading a damaged archive, or a file in it, can raise."""


class _Bounded(io.BufferedReader):
    """A file of which no part larger than :data:`DIRECTORY_BYTES` is read at once while ``bounded`` is True."""

    bounded = True

    def read(self, size: int | None = -1, /) -> bytes:
        if self.bounded and size and size > DIRECTORY_BYTES:
            size_text = format_bytes(size)
            raise ValueError(f"its directory has {size_text}")
        return super().read(size)


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive whose list of files is not too long.

    Raises:
        DAMAGED: it is no zip archive, its list has more than :data:`DIRECTORY_BYTES` bytes or :data:`ENTRIES` files, or
            a file is packed in another way than :data:`PACKINGS`.
        UsageError: as for :func:`check_regular`.
    """
    with (
        opened(path) as raw,
        _Bounded(io.FileIO(raw.fileno(), closefd=False)) as file,
        zipfile.ZipFile(file) as archive,
    ):
        file.bounded = False
        entries = archive.infolist()
        if len(entries) > ENTRIES:
            raise ValueError(f"it has more than {ENTRIES:,} files")
        if not {entry.compress_type for entry in entries} <= PACKINGS:
            raise ValueError(
                "its files must be stored or deflated; got another packing"
            )
        yield archive


def parsed_json(text: str | bytes) -> Any:
    """Return the contents of a text of JSON, which is refused if it would take far more memory than its bytes.

    Raises:
        ValueError: the text is no JSON or no UTF-8, or has half of a surrogate pair, too
            many values (:data:`VALUES`), or lists and objects that are nested more than
            :data:`DEEPEST` times.
    """
    if isinstance(text, bytes):
        text = text.decode()
    check_values(text)
    try:
        content = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(_NESTED) from error
    level = [content] if type(content) in _NESTING else []
    for _ in range(DEEPEST):
        if not level:
            return content
        parts = [item.values() if isinstance(item, dict) else item for item in level]
        parts = [
            part for part in parts if not _NESTING.isdisjoint(map(type, part))
        ]  # rarely any of a line of rows
        inner = chain.from_iterable(parts)
        level = [item for item in inner if type(item) in _NESTING]
    if level:
        raise ValueError(_NESTED)
    return content


def check_values(text: str) -> None:
    """Refuse a text of JSON before it is parsed, if its values would take far more memory than the text.

    Raises:
        ValueError: there are too many values. The message has the limit.
    """
    most = max(VALUES, len(text) // BYTES_EACH)
    if sum(map(text.count, _STRUCTURE)) <= most:
        return
    count = sum(1 for _ in islice(_VALUE.finditer(text), most + 2))
    if count > most + 1:  # the end of the text is one of them
        size_text = format_bytes(len(text))
        raise ValueError(f"more than {most:,} values in {size_text}")


def format_bytes(n_bytes: float) -> str:
    """Return a number of bytes as text with a unit, such as ``1.5 MB``.

    >>> format_bytes(999), format_bytes(999_700), format_bytes(5_440_000)
    ('999 B', '1 MB', '5.44 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:  # more would be rounded to 1e+03
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"
