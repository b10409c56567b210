"""Tensors of files that somebody else made: safetensors, and files of torch.save.

No pickle is loaded. :mod:`pickletools` lists its opcodes, and :class:`_Parser` acts on a short list of them. It knows
tensors, numbers, texts, lists and dictionaries. Every other name becomes an inert stub, so no code of a file runs.
Opcodes, names, tensors and bytes have limits. They are checked before memory is taken.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fl_core import storage
from fl_core.display import printable
from fl_core.errors import UsageError, check_known, listing, warn

WRAPPERS = ("model", "state_dict", "model_state", "model_state_dict", "net")
"""Keys under which a checkpoint holds its weights."""
PICKLE_BYTES = 2**24
"""Bytes of a pickle at most; a tensor takes about 200."""
OPCODES = 300_000
"""Opcodes of a pickle at most; a tensor takes about 40."""
NAMES = 1_000
"""Different names of functions and classes in a pickle at most."""
VISITS = 10_000
"""Modules and tensors of a file at most."""
LONGEST = 1_000
"""Characters of a tensor's name at most."""
DIMENSIONS = 64
LARGEST = 2**60
"""Elements of a tensor at most, and each of its sizes and strides."""
REPEATED = 2**20
"""Elements at most of a view that reads stored numbers several times, unless as many are
stored."""

REFUSED = frozenset(("os", "posix", "nt", "sys", "subprocess", "builtins"))
ALLOWED = frozenset(f"builtins.{name}" for name in ("getattr", "dict", "list", "set"))
_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_MAGIC = [0x1950A86A20F9469CFC6C, 1001]  # the first values of a file before torch 1.6
_DTYPES = {
    str(dtype): dtype for dtype in vars(torch).values() if type(dtype) is torch.dtype
}
_NUMBERS = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128"
_STORAGES = {"torch.storage.UntypedStorage": torch.uint8}
for _name in _NUMBERS.split():  # torch.FloatTensor has a torch.FloatStorage
    _dtype = _DTYPES[f"torch.{_name}"]
    _kind = torch.empty(0, dtype=_dtype).type().removesuffix("Tensor")
    _STORAGES[f"{_kind}Storage"] = _dtype
_REBUILD = "torch._utils._rebuild_"
_TENSORS = tuple(f"{_REBUILD}tensor{end}" for end in ("", "_v2", "_v3"))
_FIRST = (f"{_REBUILD}parameter", f"{_REBUILD}parameter_with_state", "builtins.set")
"""Names that return their first argument. A set stays a list."""
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_DICT = "collections.OrderedDict"
_KNOWN = {*_DTYPES, *_STORAGES, *_TENSORS, *_FIRST, *ALLOWED, _SUBCLASS, _DICT}
_KNOWN |= {"torch.Tensor", "torch.Size", "_codecs.encode"}
_VALUES = re.compile("BININT[12]?|BINFLOAT|BINUNICODE|SHORT_BINSTRING|LONG1")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TAKES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}
_TAKES |= dict.fromkeys(("TUPLE", "APPENDS", "SETITEMS"), 0)
"""How many values an opcode takes from the stack; 0 for all above the last mark."""


@dataclass(eq=False)
class Stub:
    """An inert stand-in for a class or object that a pickle names. It stores the object's state and runs no code."""

    name: str
    state: Any = None


class _Table(dict[str, Any]):
    """A dictionary in its order, with what torch stores next to a state dict: the versions of modules' formats."""

    metadata: Any = None


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str
    size: int

    @property
    def n_bytes(self) -> int:
        return self.size * self.dtype.itemsize


class _Strided(NamedTuple):
    """A tensor of a file before its numbers are read."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    flags: frozenset[str] = frozenset()  # conj and neg, of a lazy view


def read(path: Path, key: str = "") -> dict[str, Tensor]:
    """Return the tensors of a file of safetensors or of torch.save by name, on the CPU.

    No code of the file is run. Dictionaries around the weights are opened (:data:`WRAPPERS`). A pickled module gives
    its registered tensors. Control characters in names are escaped. Warnings list the pickled names that were not
    loaded, and dictionaries and lists of tensors that are left out. The result keeps torch's ``_metadata``, with the
    version of each module's format.

    Args:
        key: the name of one of several dictionaries of tensors in a file of torch.save, such as ``ema``, or the
            beginning of its names.

    Raises:
        UsageError: the file is missing, of another kind, damaged, or beyond a limit. The message is one line.
    """
    if not path.is_file():
        fault = "does not exist"
        if path.exists():
            fault = "is no regular file"
        shown_path = printable(str(path))
        raise UsageError(
            f"weights must be a file; {shown_path} {fault}. Check the path."
        )
    storage.check_regular(path)
    shown_path = printable(str(path))
    try:
        states: list[str] = []
        if path.suffix == ".safetensors":
            tensors = _safetensors(storage.read_bytes(path))
        else:
            tensors, states = _torch(path, key)
    except storage.DAMAGED as error:
        reason = printable(str(error).strip().partition("\n")[0])[:200]
        raise UsageError(
            f"{shown_path} must be a file of weights that can be read: {reason}. Save its state_dict() again."
        ) from error
    prefix = ""
    if key:
        prefix = f"{key}."
    named_tensors = {
        printable(name.removeprefix(prefix)): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    if key and not named_tensors:
        prefixes = {name.partition(".")[0] for name in tensors if "." in name}
        check_known(f"key of {path}", key, prefixes.union(map(printable, states)))
    n_found = sum(name.startswith(prefix) for name in tensors)
    if len(named_tensors) < n_found:
        raise UsageError(
            f"{path} must have names that differ by more than control characters; got two that do not. Rename one."
        )
    return with_versions(named_tensors, versions_of(tensors, prefix))


def versions_of(state: Mapping[str, Tensor], start: str = "") -> dict[str, Any]:
    """Return the version of each module's format in a state dict, by module path.

    With ``start``, a module path and a dot, only modules at or below that path count. Their paths are relative to it.

    >>> from torch import nn
    >>> versions_of(nn.Sequential(nn.BatchNorm1d(2)).state_dict())
    {'': {'version': 1}, '0': {'version': 2}}
    >>> versions_of(nn.Sequential(nn.BatchNorm1d(2)).state_dict(), "0.")
    {'': {'version': 2}}
    """
    metadata = getattr(state, "_metadata", {})
    return {
        path.removeprefix(start[:-1]).removeprefix("."): version
        for path, version in metadata.items()
        if not start or f"{path}.".startswith(start)
    }


def with_versions(
    tensors: Mapping[str, Tensor], versions: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return tensors as a state dict of torch with the versions of the modules' formats.

    Args:
        tensors: tensors by name.
        versions: each module's version by path, as :func:`versions_of` returns them.
    """
    state: Any = OrderedDict(tensors)
    if versions:
        state._metadata = OrderedDict(versions)
    return cast("dict[str, Tensor]", state)


def _safetensors(data: bytes) -> dict[str, Tensor]:
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    count = header.count(b'"data_offsets"')
    if count > VISITS:
        raise ValueError(f"it has {count:,} tensors, more than {VISITS:,}")
    return storage.tensors(data)


# --- files of torch.save ---------------------------------------------------------------


def _torch(path: Path, key: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of a file of torch.save by name, and the names of its dictionaries of tensors."""
    parser = _Parser(path.stat().st_size)
    with storage.opened(path) as file:
        is_archive = zipfile.is_zipfile(file)
    if is_archive:
        with storage.open_zip(path) as archive:
            root = _check_archive(archive, path)
            pickle_bytes = archive.read(f"{root}data.pkl")
            stored = parser.parse(io.BytesIO(pickle_bytes))
            weights, versions, states = _weights(stored, key)
            tensors = _filled(weights, lambda key: archive.read(f"{root}data/{key}"))
    else:  # one stream, as before torch 1.6
        with storage.opened(path) as file:
            stream = io.BytesIO(file.read(PICKLE_BYTES))
            if [parser.parse(stream), parser.parse(stream)] != _MAGIC:
                raise ValueError("it is no file of torch.save")
            parser.parse(stream)  # sizes of the types of C
            weights, versions, states = _weights(parser.parse(stream), key)
            bytes_by_key = {}
            keys = parser.parse(stream)
            file.seek(stream.tell())
            for storage_key in keys:
                file.read(8)  # the count again
                bytes_by_key[storage_key] = file.read(
                    parser.storages[storage_key].n_bytes
                )
        tensors = _filled(weights, bytes_by_key.__getitem__)
    if stubs := sorted(parser.names - _KNOWN):
        names = [printable(name)[:80] for name in stubs]
        warn(f"{path}: read as inert stubs: {listing(names, 6)}")
    return with_versions(tensors, versions), states


def _check_archive(archive: zipfile.ZipFile, path: Path) -> str:
    """Return the folder of an archive's pickle.

    Raises:
        ValueError: the archive is packed, claims more than the file has, is no file of
            torch.save, or has bytes in another order.
    """
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is packed")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError("its parts claim more than the file has")
    names = {entry.filename for entry in entries}
    pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > PICKLE_BYTES:
        raise ValueError(f"it has no data.pkl of at most {PICKLE_BYTES:,} bytes")
    root = pickles[0].filename.removesuffix("data.pkl")
    byteorder_name = f"{root}byteorder"
    if byteorder_name in names and archive.read(byteorder_name) != b"little":
        raise ValueError("its bytes are in another order")
    return root


@dataclass
class _Parser:
    """A reader of pickles that builds only tensors, texts, numbers, lists, tuples and dictionaries.

    Other objects become stubs. Limits hold for all pickles of one file together.

    Args:
        most: bytes that a storage may have.

    Attributes:
        opcodes: number of opcodes so far.
        names: names of functions and classes so far.
        storages: the storages so far, by their keys.
    """

    most: int
    opcodes: int = 0
    names: set[str] = field(default_factory=set)
    storages: dict[str, _Storage] = field(default_factory=dict)

    def parse(self, stream: io.BytesIO) -> Any:
        """Return the value of the pickle at the stream's place.

        Raises:
            ValueError, IndexError, KeyError, TypeError: it is damaged, has an unknown opcode, or is beyond a limit.
        """
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[Any, Any] = {}
        for opcode, value, _ in pickletools.genops(stream):
            self._count(1)
            code = opcode.name
            if _VALUES.fullmatch(code):
                stack.append(value)
            elif code in ("BINPUT", "LONG_BINPUT"):
                memo[value] = stack[-1]
            elif code in ("BINGET", "LONG_BINGET"):
                stack.append(memo[value])
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
            elif code in ("EMPTY_DICT", "EMPTY_LIST"):
                stack.append({} if code == "EMPTY_DICT" else [])
            elif code == "MARK":
                marks.append(len(stack))
            elif code in _TAKES:
                position = len(stack) - _TAKES[code] if _TAKES[code] else marks.pop()
                if position < 0:
                    raise ValueError("its stack is empty")
                items = stack[position:]
                del stack[position:]
                if code.startswith("TUPLE"):
                    stack.append(tuple(items))
                else:
                    _fill(stack[-1], items)
            elif code == "GLOBAL":
                stack.append(self._name(str(value)))
            elif code == "BINPERSID":
                stack.append(self._storage(stack.pop()))
            elif code in ("REDUCE", "NEWOBJ"):
                arguments = stack.pop()
                stack[-1] = self._built(stack[-1], arguments)
            elif code == "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], Stub):
                    stack[-1].state = state
                elif isinstance(stack[-1], _Table) and isinstance(state, dict):
                    stack[-1].metadata = state.get("_metadata")
            elif code == "STOP":
                return stack.pop()
            elif code != "PROTO":
                raise ValueError(f"it has the opcode {code}")
        raise ValueError("it ends too early")

    def _count(self, more: int) -> None:
        self.opcodes += more
        if self.opcodes > OPCODES:
            raise ValueError(f"it has more than {OPCODES:,} opcodes")

    def _name(self, text: str) -> Stub:
        module, _, name = text.partition(" ")
        new_module = _PYTHON_2.get(module, module)
        full_name = f"{new_module}.{name}"
        if full_name.partition(".")[0] in REFUSED and full_name not in ALLOWED:
            raise ValueError(f"it names {full_name}, which no weights need")
        self.names.add(full_name)
        if len(self.names) > NAMES:
            raise ValueError(f"it has more than {NAMES:,} different names")
        return Stub(full_name)

    def _storage(self, entry: Any) -> Any:
        if entry[0] == "module":
            return entry[1]
        _, storage_class, key, _, count, *_ = entry[:6]
        dtype = None
        if isinstance(storage_class, Stub):
            if storage_class.name not in _STORAGES:
                raise ValueError(f"it has a {storage_class.name}, not plain numbers")
            dtype = _STORAGES[storage_class.name]
        if dtype is None or type(key) is not str or type(count) is not int or count < 0:
            raise ValueError("a storage of it has no type, key and count")
        new_storage = _Storage(dtype, key, count)
        if self.storages.setdefault(key, new_storage) != new_storage:
            raise ValueError(f"its storage {key} has two types or sizes")
        if new_storage.n_bytes > self.most:
            raise ValueError("its tensors claim more than the file has")
        return new_storage

    def _built(self, kind: Any, arguments: Any) -> Any:
        """Return what a name makes of arguments: a tensor, a dictionary, its first argument, or a stub.

        Raises:
            ValueError: ``kind`` is no name, or a tensor has no storage.
        """
        if not isinstance(kind, Stub):
            raise ValueError("it calls what is no name")
        if kind.name == _SUBCLASS:
            kind, arguments = arguments[0], arguments[2]
        if kind.name in _TENSORS:
            data_storage, offset, size, stride, *remaining = arguments[:7]
            if not isinstance(data_storage, _Storage):
                raise ValueError("a tensor of it has no storage")
            # after requires_grad and backward hooks: the type in the third version, and flags of the view
            has_dtype = kind.name == _TENSORS[-1]
            dtype = data_storage.dtype
            if has_dtype:
                dtype = _DTYPES[remaining[2].name]
            flags = arguments[7 if has_dtype else 6 :]
            return _Strided(data_storage, offset, size, stride, dtype, _flags(flags))
        if kind.name in _FIRST:
            return arguments[0]
        if kind.name == _DICT:
            table = _Table()
            for item in arguments[0] if arguments else ():  # as Python 2 wrote it
                self._count(1)
                _fill(table, item)
            return table
        return Stub(kind.name)


def _flags(arguments: Any) -> frozenset[str]:
    """Return which of conj and neg a stored view has.

    Args:
        arguments: the last arguments of a tensor: none, or a dictionary of flags.

    Raises:
        ValueError: another flag is set.

    >>> sorted(_flags([{"conj": True, "neg": False}])), _flags([])
    (['conj'], frozenset())
    >>> _flags([{"swizzled": True}])
    Traceback (most recent call last):
        ...
    ValueError: it has a view of another sort: swizzled
    """
    flags = arguments[0] if arguments else {}
    names = {name for name, value in (flags or {}).items() if value}
    if other_names := names - {"conj", "neg"}:
        raise ValueError(f"it has a view of another sort: {min(other_names)[:80]}")
    return frozenset(names)


def _fill(target: Any, items: list[Any]) -> None:
    """Extend a list or a dictionary. Only texts are keys, since a nested tuple can take for ever to hash.

    Entries of other keys are dropped, and so are the items of a stub.

    >>> _fill(list(), [1]), _fill(Stub("c"), [1])
    (None, None)
    >>> _fill({1}, [2])
    Traceback (most recent call last):
        ...
    ValueError: it adds to what is no list or dictionary

    Raises:
        ValueError: the target is neither of them, and no stub.
    """
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, dict):
        pairs = zip(items[::2], items[1::2], strict=True)
        target.update((key, value) for key, value in pairs if isinstance(key, str))
    elif not isinstance(target, Stub):
        raise ValueError("it adds to what is no list or dictionary")


def _weights(
    stored: Any, key: str = ""
) -> tuple[dict[str, _Strided], dict[str, dict[str, Any]], list[str]]:
    """Return the tensors of a module, or of a state dict within the dictionaries around it.

    Names begin with ``key``, if a dictionary of that name was opened. A warning names
    dictionaries and lists of tensors that are left out.

    Args:
        stored: the value of the pickle.
        key: the name of one of several dictionaries of tensors, or an empty text.

    Returns:
        The tensors by name, the version of each module's format by path, and the names
        of the dictionaries of tensors on the way.

    Raises:
        ValueError: there are none, too many, or some that are not dense.
    """
    name_start = ""
    all_states: list[str] = []
    for _ in WRAPPERS:
        entries = stored if isinstance(stored, dict) else {}
        states = [name for name, value in entries.items() if _is_state(value)]
        all_states += states
        single_state = states
        if key or len(states) > 1 or _is_state(stored):
            single_state = []
        names = (key, *WRAPPERS, *single_state)
        opened_key = next(
            (n for n in names if isinstance(entries.get(n), dict | Stub)), ""
        )
        if not opened_key:
            break
        other_states = [name for name in states if name != opened_key]
        if other_states and opened_key != key:
            other_names = listing(map(printable, other_states), 4)
            warn(
                f"the weights under {opened_key!r} are read, and not "
                f"{other_names}: key= names another"
            )
        stored = entries[opened_key]
        if opened_key == key:
            name_start = f"{key}."
    tensors: dict[str, _Strided] = {}
    visits, pending = 0, [(name_start, stored)]
    while pending:
        prefix, module = pending.pop()
        for table in _tables(module):
            visits += len(table)
            if visits > VISITS:
                raise ValueError(f"it has more than {VISITS:,} modules and tensors")
            for name, value in table.items():
                name = prefix + name
                if len(name) > LONGEST:
                    raise ValueError(f"a name has more than {LONGEST:,} characters")
                if isinstance(value, _Strided):
                    tensors[name] = value
                elif isinstance(value, Stub) and value.name.startswith(_REBUILD):
                    raise ValueError(f"its tensor {name!r} must be dense numbers")
                elif isinstance(value, Stub) and isinstance(module, Stub):
                    pending.append((f"{name}.", value))
    if not tensors:
        got_text = listing(entries or [type(stored).__name__], 6)
        advice = ""
        if states:
            advice = ". Name one of them by key="
        raise ValueError(f"it has no tensors by name; got {got_text}{advice}")
    metadata = None
    if isinstance(stored, _Table):
        metadata = stored.metadata
    versions = {
        f"{name_start}{path}".removesuffix("."): entry
        for path, entry in (metadata if isinstance(metadata, dict) else {}).items()
        if isinstance(entry, dict)
    }
    if isinstance(stored, dict):
        left_names = [name for name, value in stored.items() if _holds_tensors(value)]
        if left_names:
            left_out = listing(map(printable, left_names), 4)
            warn(f"tensors in {left_out} are left out: a state dict has them by name")
    return tensors, versions, all_states


def _holds_tensors(value: Any) -> bool:
    """Return whether a value is a dictionary, list or tuple with tensors directly in it."""
    values = value if isinstance(value, list | tuple) else ()
    return _is_state(value) or any(isinstance(entry, _Strided) for entry in values)


def _is_state(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else ()
    return any(isinstance(entry, _Strided) for entry in values)


def _tables(module: Any) -> list[dict[str, Any]]:
    """Return the tables of a state dict or of a pickled module; none for another value.

    A state dict is its own table. A module has its parameters, buffers and inner
    modules.
    """
    if isinstance(module, dict):
        return [module]
    state = None
    if isinstance(module, Stub):
        state = module.state
    entries = state if isinstance(state, dict) else {}
    tables = [entries.get(name) for name in ("_parameters", "_buffers", "_modules")]
    return [table for table in tables if isinstance(table, dict)]


def _filled(
    views: Mapping[str, _Strided], read: Callable[[str], bytes]
) -> dict[str, Tensor]:
    """Return the tensors with their numbers. A storage is read once.

    Args:
        views: the tensors by name.
        read: a function that returns the bytes of a storage by its key.

    Raises:
        ValueError: a tensor reads beyond its storage, a storage has another size than it
            claims, or negated views have more bytes than are stored.
    """
    storage_tensors: dict[str, Tensor] = {}
    tensors = {}
    n_negated = 0
    for name, tensor in views.items():
        _check(name, tensor)
        key = tensor.storage.key
        if key not in storage_tensors:
            data = bytearray(read(key))
            if len(data) != tensor.storage.n_bytes:
                raise ValueError(f"its storage {key} has another size than it claims")
            storage_tensors[key] = torch.frombuffer(
                data or bytearray(8), dtype=torch.uint8
            )
        stored_numbers = storage_tensors[key][: tensor.storage.n_bytes].view(
            tensor.dtype
        )
        view = stored_numbers.as_strided(tensor.size, tensor.stride, tensor.offset)
        if "conj" in tensor.flags:
            view = view.conj()
        if "neg" in tensor.flags:  # which takes memory of its own
            n_negated += view.nbytes
            if n_negated > sum(data.nbytes for data in storage_tensors.values()):
                raise ValueError("its negated views have more numbers than are stored")
            view = -view
        tensors[name] = view
    return tensors


def _check(name: str, tensor: _Strided) -> None:
    """Refuse a tensor that has more elements than are stored, or that reads beyond them.

    A view that repeats stored numbers may have up to :data:`REPEATED` elements, or as
    many as are stored if these are more.

    Raises:
        ValueError: there is such a fault, or the tensor has no valid shape. The message
            names the tensor.
    """
    data_storage, offset, size, stride, dtype, _ = tensor
    if not (type(size) is type(stride) is tuple and len(size) == len(stride)):
        raise ValueError(f"{name!r} has no shape")
    counts = (offset, *size[:DIMENSIONS], *stride[:DIMENSIONS])
    is_valid = all(type(count) is int and 0 <= count <= LARGEST for count in counts)
    if not is_valid or len(size) > DIMENSIONS:
        raise ValueError(f"sizes of {name!r} are no counts")
    steps = zip(size, stride, strict=True)
    last_position = offset + sum((count - 1) * step for count, step in steps)
    n_elements, n_available = math.prod(size), data_storage.n_bytes // dtype.itemsize
    is_beyond = last_position >= n_available or n_elements > max(n_available, REPEATED)
    if n_elements and is_beyond:
        raise ValueError(f"{name!r} has more elements than are stored")
    if math.prod(max(count, 1) for count in size) > LARGEST:
        raise ValueError(f"{name!r} has more than {LARGEST:,} elements")
