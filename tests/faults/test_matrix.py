"""Each reader of a file of others meets each kind of bomb: one line, or harmless, within 512 MB and 5 s."""

import ast
import contextlib
import io
import json
import os
import warnings
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedlayers.cli.options import read_config
from fedlayers.decision.tune import Tuned
from fl_core import formats, rows, storage
from fl_core.config import RunConfig
from fl_core.errors import LONGEST, CorruptError, UsageError
from fl_core.models import weights
from fl_core.plan import LayerPlan
from fl_core.run import runner, stored_models
from tests.faults.limited import MEGABYTES, SECONDS, limited

N = 2**20
HEADER = json.dumps({"schema": rows.SCHEMA}).encode() + b"\n"
PLAN = {"format": "fedlayers.plan/2", "why": {}, "sha256": ""}


def folder_of(path):
    return storage.Folder(path.parent, links=True)


def data(path):
    return runner.assemble(RunConfig(dataset=str(path)))


def choice(path):
    found = storage.Folder(path.parent / "models")
    return stored_models._stored(path.parent, found, "")


READERS = {
    # the name of a file, what reads it, and its format
    "plan.json": (LayerPlan.load, "json"),
    "tuned.json": (Tuned.load, "json"),
    "choice.json": (choice, "json"),
    "rows.jsonl": (rows.read, "jsonl"),
    "run.toml": (partial(read_config, command="run", foreign=()), "toml"),
    "weights.safetensors": (weights.read, "safetensors"),
    "data.npz": (data, "zip"),
}
"""Readers of files that a user names, or that somebody else sent."""


def tensors(**changed):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changed
    return packed_header(json.dumps({"w": entry}).encode())


def packed_header(text, length=None):
    size = len(text) if length is None else length
    return size.to_bytes(8, "little") + text + bytes(4)


def many_tensors(count):
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return packed_header(("{" + ",".join(f'"{k}":{entry}' for k in range(count)) + "}").encode())  # fmt: skip


def archive(shape, n_bytes=0, count=1):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as target:
        for k in range(count):
            name = ("x", "y")[k] if k < 2 else f"x{k}"
            head = {"descr": "<f4", "shape": shape, "fortran_order": False}
            entry = io.BytesIO()
            np.lib.format.write_array_header_1_0(entry, head)
            target.writestr(f"{name}.npy", entry.getvalue() + bytes(n_bytes))
    return file.getvalue()


def numbered(count, form):
    return b"".join(form % k for k in range(count))


BOMBS = {
    "json": {
        "many values": lambda: b"[" + b"1," * (2 * N) + b"1]",
        "values in a text": lambda: b'["' + b"[{,:" * N + b'"]',
        "empty lists": lambda: b'{"layers": [' + b"[]," * N + b"[]]}",
        "signs of escape": lambda: b'["' + b'\\"' * (2 * N) + b'"]',
        "a long string": lambda: b'{"format": "' + b"a" * (16 * N) + b'"}',
        "deep": lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "open": lambda: b"[" * N,
        "wide": lambda: b"{" + numbered(100_000, b'"k%d": 1, ') + b'"k": 1}',
        "repeated keys": lambda: b"{" + b'"format": 1, ' * 100_000 + b'"k": 1}',
        "huge numbers": lambda: b'{"format": ' + b"9" * N + b"}",
        "a number beyond all": lambda: b'{"format": 1e999999, "model_type": 1e999}',
        "no UTF-8": lambda: b'"\xff"',
        "half a sign": lambda: b'{"format": "\\ud800", "model_type": "\\ud800"}',
        "many names": lambda: json.dumps(PLAN | {"layers": [], "shared": [f"l{k}" for k in range(100_000)]}).encode(),
    },
    "jsonl": {
        "many values": lambda: HEADER + b"[" + b"1," * (2 * N) + b"1]\n",
        "many lines": lambda: HEADER + b"{}\n" * 100_000,
        "a long string": lambda: b'{"text": "' + b"a" * (16 * N) + b'", "label": 0}\n',
        "deep": lambda: HEADER + b"[" * N,
        "wide": lambda: b"{" + numbered(100_000, b'"k%d": 1, ') + b'"label": 1}\n' + b"{}\n" * 50,
        "keys times lines": lambda: b"{" + numbered(2000, b'"k%d": 1, ') + b'"label": 1}\n' + b"{}\n" * 20_000,
        "repeated keys": lambda: HEADER + b"{" + b'"text": 1, ' * 100_000 + b'"label": 1}\n',
        "huge numbers": lambda: HEADER + b'{"value": ' + b"9" * N + b"}\n",
    },
    "toml": {
        "many values": lambda: b"a = [" + b"1," * (N // 3) + b"]",
        "a long string": lambda: b'a = "' + b"a" * (N // 2) + b'"',
        "an open string": lambda: b'a = """' + b'"\\' * (N // 3),
        "a long word": lambda: b"a" * (N // 2) + b" = 1",
        "deep": lambda: b"a = " + b"[" * 50_000,
        "deep tables": lambda: b"a = " + b"{a=" * 50_000,
        "dots": lambda: b"a" + b".a" * 25_000 + b" = 1",
        "dots with quotes": lambda: b"a" + b" . 'b'" * 9_000 + b" = 1",
        "dots in headers": lambda: numbered(20_000, b"[t%d.a.b.c.d.e.f.g.h.i]\n"),
        "wide": lambda: numbered(50_000, b"k%d = 1\n"),
        "repeated keys": lambda: b"a = 1\n" * 50_000,
        "huge numbers": lambda: b"a = " + b"9" * (N // 2),
        "hexadecimal": lambda: b"a = 0x" + b"F" * (N // 2),
        "no UTF-8": lambda: b'a = "\xff"',
    },
    "safetensors": {
        "many values": lambda: packed_header(b'{"w":[' + b"1," * (2 * N) + b"1]}"),
        "wide": lambda: many_tensors(20_000),
        "deep": lambda: packed_header(b'{"w":' * 20_000 + b"1" + b"}" * 20_000),
        "repeated keys": lambda: packed_header(b"{" + b'"w":{},' * 100_000 + b'"w":{}}'),
        "a long string": lambda: packed_header(b'{"' + b"a" * (4 * N) + b'":{}}'),
        "huge numbers": lambda: tensors(shape=[10**30, 10**30]),
        "a claimed size": lambda: tensors(shape=[2**40], data_offsets=[0, 2**42]),
        "a negative size": lambda: tensors(shape=[-1], data_offsets=[4, 0]),
        "a claimed header": lambda: packed_header(b"{}", 9 << 40),
    },
    "zip": {
        "many values": lambda: archive((96 * N,), n_bytes=384 * N, count=1),
        "a claimed size": lambda: archive((2**40,), count=2),
        "huge numbers": lambda: archive((10**30, 10**30), count=2),
        "wide": lambda: archive((1,), n_bytes=4, count=20_000),
        "a long string": lambda: b"PK\x05\x06" + b"a" * (4 * N),
        "repeated keys": lambda: b"PK\x05\x06" + bytes(18) + archive((1,), 4, 1) * 2,
    },
}  # fmt: skip
"""The bytes of a bomb, by format and kind."""


def special(path, kind):
    """Put what is no regular file, or is far larger than it is on the disk."""
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "a link to a pipe":
        os.mkfifo(path.with_name("pipe"))
        path.symlink_to(path.with_name("pipe"))
    elif kind == "a folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 2**33)


SPECIAL = ("a pipe", "a link to a device", "a link to a pipe", "a folder", "a sparse file")  # fmt: skip


def check(read, path):
    """Return what a reader says: one line that names the file, or nothing."""

    def act():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(path)

    said, megabytes, seconds = limited(act, UsageError, CorruptError)
    assert "\n" not in said
    assert not said.startswith(("raw", "ended")), said[:300]
    assert len(said) <= LONGEST, said[:300]
    assert megabytes < MEGABYTES, said[:300]
    assert seconds < SECONDS, said[:300]
    return said


@pytest.mark.parametrize("name", READERS)
def test_each_reader_meets_each_bomb(name, tmp_path):
    read, form = READERS[name]
    if name.startswith("data."):
        runner.assemble(RunConfig(dataset="heart"))
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(UsageError, CorruptError, OSError):
        read(tmp_path / name)  # what it imports is no cost of a bomb
    faults = []
    for kind in (*BOMBS[form], *SPECIAL):
        path = tmp_path / kind.replace(" ", "_") / name
        path.parent.mkdir(parents=True)
        if kind in SPECIAL:
            special(path, kind)
        else:
            path.write_bytes(BOMBS[form][kind]())
        try:
            said = check(read, path)
            if kind in SPECIAL:
                assert said != "no error"
        except AssertionError as error:
            faults.append(f"{kind}: {str(error)[:300]}")
    assert not faults, "\n".join(faults)


DOORS = {
    *("read_text", "read_bytes", "read_toml", "opened", "open_zip", "open_parquet"),
    *("tensor_sizes", "read_csv", "np.load", "Image.open", "pd.read_table", "pickle.load"),
}  # fmt: skip
"""What opens a file."""
OWN = {
    "fl_core.storage", "fl_core.formats", "fl_core.registry.attach", "diagnostics.metrics._stored",
    "diagnostics.plots.page.Page.html", "diagnostics.regret.read_truth", "diagnostics.regret.read_benchmark",
    "fedlayers.cli.folders.listing_of",
    "fedlayers.cli.options.check_file", "fedlayers.flower.site.supernode", "fl_core.data.named",
    "fl_core.data.loading.load", "fedlayers.flower.site.Site._read", "fl_core.rounds.workers.receive",
    "fedlayers.cli.options._as_option",
}  # fmt: skip
"""The doors themselves, files of the package or of the system, and calls of a reader below."""
ROWS = {
    "diagnostics.load_weights": "tests/faults/test_strangers.py",
    "fedlayers.cli.options.read_config": "run.toml",
    "fedlayers.decision.tune.Tuned.load": "tuned.json",
    "fedlayers.flower.federation.read_keys": "run.toml",
    "fedlayers.flower.site.Site._common": "plan.json",
    "fl_core.config.with_pixels": "tests/fl_core/test_model_folders.py",
    "fl_core.data.files.read_arrays": "data.npz",
    "fl_core.data.files.headers": "data.npz",
    "fl_core.data.files._decoded": "tests/faults/test_bombs.py",
    "fl_core.data.table.read": "tests/faults/test_bombs.py",
    "fl_core.models.folders.from_transformers": "tests/fl_core/test_model_folders.py",
    "fl_core.models.tokens.Tokenizer": "tests/fl_core/test_token_files.py",
    "fl_core.models.weights": "tests/faults/test_strangers.py",
    "fl_core.plan.LayerPlan.load": "plan.json",
    "fl_core.rows.read": "rows.jsonl",
    "fl_core.rows.read_header": "rows.jsonl",
    "fl_core.run.stored_models._stored": "choice.json",
}
"""A row of :data:`READERS`, or the test of its own bombs, for each function that opens a file of others."""


def opening():
    """Yield the name of each function of the packages that calls a door."""
    for package in ("fl_core", "diagnostics", "fedlayers"):
        for path in sorted(Path(package).rglob("*.py")):
            module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            todo = [(module, ast.parse(path.read_text(encoding="utf-8")))]
            while todo:
                name, node = todo.pop()
                for child in ast.iter_child_nodes(node):
                    inner = isinstance(child, ast.FunctionDef | ast.ClassDef)
                    todo.append((f"{name}.{child.name}" if inner else name, child))
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    if {called, called.rpartition(".")[2]} & DOORS:
                        yield name
                    links = any(key.arg == "links" for key in node.keywords)
                    if called.endswith("Folder") and links:
                        yield name


def test_a_reader_without_a_row_is_found():
    found = set(opening())
    known = (*OWN, *ROWS)
    new = [n for n in found if not any(f"{n}.".startswith(f"{k}.") for k in known)]
    assert not new
    assert all(row in READERS or Path(row).exists() for row in ROWS.values())
    gone = [k for k in known if not any(f"{n}.".startswith(f"{k}.") for n in found)]
    assert not gone


def test_honest_tables_of_300_mb_pass_the_bound(tmp_path, monkeypatch):
    """The bound is that of the file's own bytes, and the environment allows more."""
    path = tmp_path / "data.parquet"
    path.write_bytes(b"a")
    monkeypatch.setattr(storage, "check_regular", lambda path: 300_000_000)
    monkeypatch.setattr(storage, "memory", lambda: 64 << 30)
    formats.check_table(path, 7_500_000, 10)  # of 4 bytes each
    formats.check_table(path, 75_000, 1000)
    monkeypatch.setattr(storage, "check_regular", lambda path: 1076)
    with pytest.raises(UsageError) as caught:
        formats.check_table(path, 7_500_000, 10)
    remedy = str(caught.value).rpartition(": ")[2].rstrip(".").split("=")
    monkeypatch.setenv(*remedy)
    formats.check_table(path, 7_500_000, 10)
    monkeypatch.setenv("FEDLAYERS_UNPACKED", "much")
    with pytest.raises(UsageError, match="must be a number of bytes"):
        formats.check_table(path, 7_500_000, 10)
