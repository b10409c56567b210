"""Files of strangers: each reader of the packages, and bombs of each format by kind."""

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow
import torch
from PIL import Image
from pyarrow import parquet
from torch import nn

from diagnostics.load_weights import load_weights
from fedlayers.cli.options import read_config
from fedlayers.decision.search import Tuned
from fedlayers.flower.federation import read_keys
from fedlayers.flower.site import Site, SiteFile
from fl_core import rows, storage
from fl_core.config import RunConfig, with_pixels
from fl_core.data import files
from fl_core.models import weights
from fl_core.models.tokens import Tokenizer
from fl_core.plan import LayerPlan
from fl_core.run import runner, stored_models
from tests.faults.test_strangers import CALLS, archive as pickled

N = 2**20
MARKS = ("a" + "\u0301\u0323" * N).encode()
HEADER = json.dumps({"schema": rows.SCHEMA}).encode() + b"\n"
PLAN = {"format": "fedlayers.plan/2", "why": {}, "sha256": ""}


def data(path):
    return runner.assemble(RunConfig(dataset=str(path)))


def images(path):
    return files.read_images(path.parents[1])


def choice(path):
    models = storage.Folder(path.parent / "models")
    return stored_models._stored(path.parent, models, "")


def onto_linear(path):
    return load_weights(path, into=nn.Linear(3, 2))


def in_folder(path):
    return onto_linear(path.parent)


def tokenizer(path):
    return Tokenizer.read(str(path.parent))


def words(path):
    """Read the words of a federation, which stand next to a site's texts."""
    return Site(path.parent / "site.toml")


def pixels(path):
    """Read the size of images that a folder of transformers names."""
    model = f"hf:{path.parent}"
    return with_pixels(RunConfig(dataset=str(path.parent / "images"), model=model))


def classifier(path):
    """Build the model of a folder of transformers, whose texts have ids."""
    from tests.fl_core.test_model_folders import build

    return build(path.parent)


class Reader(NamedTuple):
    """What reads a file, and its format."""

    read: Callable
    form: str


READERS = {
    "plan.json": Reader(LayerPlan.load, "json"),
    "tuned.json": Reader(Tuned.load, "json"),
    "choice.json": Reader(choice, "json"),
    "rows.jsonl": Reader(rows.read, "jsonl"),
    "run.toml": Reader(partial(read_config, command="run", foreign=()), "toml"),
    "site.toml": Reader(partial(read_keys, kind=SiteFile), "toml"),
    "weights.safetensors": Reader(weights.read, "safetensors"),
    "weights.pt": Reader(weights.read, "pt"),
    "arrays.npz": Reader(onto_linear, "zip"),
    "data.npz": Reader(data, "zip"),
    "data.csv": Reader(data, "csv"),
    "data.jsonl": Reader(data, "jsonl"),
    "data.parquet": Reader(data, "parquet"),
    "images/b/1.png": Reader(images, "image"),
    "model/adapter_config.json": Reader(in_folder, "json"),
    "model/adapter_model.safetensors": Reader(in_folder, "safetensors"),
    "model/model.safetensors.index.json": Reader(in_folder, "json"),
    "words.txt": Reader(words, "text"),
    "pixels/config.json": Reader(pixels, "json"),
    "model/config.json": Reader(classifier, "json"),
    "model/tokenizer.json": Reader(tokenizer, "json"),
}  # fmt: skip
"""Readers of files that a user names, or that somebody else sent, by the names of the files."""


def tensors(**changed):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changed
    return packed_header(json.dumps({"w": entry}).encode())


def packed_header(text, length=None):
    size = len(text) if length is None else length
    return size.to_bytes(8, "little") + text + bytes(4)


def many_tensors(count):
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return packed_header(("{" + ",".join(f'"{k}":{entry}' for k in range(count)) + "}").encode())  # fmt: skip


def archive(shape, n_bytes=0, count=1, packing=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing, compresslevel=1) as target:
        for k in range(count):
            name = ("x", "y")[k] if k < 2 else f"x{k}"
            head = {"descr": "<f4", "shape": shape, "fortran_order": False}
            entry = io.BytesIO()
            np.lib.format.write_array_header_1_0(entry, head)
            target.writestr(f"{name}.npy", entry.getvalue() + bytes(n_bytes))
    return file.getvalue()


def one_block(count):
    """Return an archive whose directory names one entry of 1 MB again and again."""
    content = archive((N // 4,), n_bytes=N)
    start, end = content.find(b"PK\1\2"), content.find(b"PK\5\6")
    entry = content[start:end]
    names = [b"%05d" % k for k in range(count)]
    entries = b"".join(entry[:46] + name + entry[51:] for name in names)
    tail = struct.pack("<HHHHIIH", 0, 0, count, count, len(entries), start, 0)
    return content[:start] + entries + b"PK\5\6" + tail


def large_dictionary():
    """Return an archive packed by LZMA, which claims that 4 GB must be kept while it is unpacked."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as target:
        for name in ("x.npy", "y.npy"):
            target.writestr(name, bytes(N))
    content = bytearray(file.getvalue())
    for entry in target.infolist():
        at = entry.header_offset + 30 + len(entry.filename) + 5
        content[at : at + 4] = b"\xff" * 4
    return bytes(content)


def text_arrays(sign, x=None):
    """Return an archive of samples, and of labels that are one text, or one sign by its number."""
    file, y = io.BytesIO(), np.full(60, sign)
    if y.dtype.kind != "U":
        y = np.full(60, sign, np.uint32).view("U1")
    np.savez(file, x=np.zeros((60, 4), np.float32) if x is None else x, y=y)
    return file.getvalue()


def text_lines(text):
    """Return lines of JSON with a text of one class and a short one of another."""
    pair = [{"text": text, "label": 0}, {"text": "b", "label": 1}]
    lines = [json.dumps(entry, ensure_ascii=False) for entry in pair * 9]
    return "\n".join(lines).encode()


def many_classes(count):
    file = io.BytesIO()
    np.savez_compressed(file, x=np.zeros((count, 2), "f4"), y=np.arange(count))
    return file.getvalue()


def undecodable(count):
    """Return texts of Arrow that are no UTF-8."""
    ends = np.arange(0, 2 * count + 2, 2, dtype=np.int32)
    parts = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"\xff\xfe" * count)]
    return pyarrow.Array.from_buffers(pyarrow.string(), count, parts)


def numbered(count, form):
    return b"".join(form % k for k in range(count))


def parquet_bytes(found, **how):
    file = io.BytesIO()
    parquet.write_table(found, file, **how)
    return file.getvalue()


def table(how=None, /, **columns):
    return parquet_bytes(pyarrow.table(columns), **(how or {}))


PICKLED = {
    "ARROW:extension:name": "arrow.py_extension_type",
    "ARROW:extension:metadata": b"cos\n_exit\n(I3\ntR.",
}
"""Notes of a column whose type is a pickle, which ends the process."""
INDEX = {
    "pandas": json.dumps({
        "index_columns": [{"kind": "range", "name": None, "start": 0, "stop": 2**60, "step": 1}],
        "columns": [{"name": "x", "field_name": "x", "pandas_type": "object", "numpy_type": "O" * 10_000}],
        "column_indexes": [], "pandas_version": "9" * 100_000,
    })
}  # fmt: skip
"""Notes of a table with an index of as many rows as no memory holds."""


def noted(column, whole):
    """Return a table with notes of a column and of the whole."""
    fields = [
        pyarrow.field("x", pyarrow.float64(), metadata=column),
        pyarrow.field("label", pyarrow.int64()),
    ]
    schema = pyarrow.schema(fields, metadata=whole)
    columns = {"x": [0.0] * 50, "label": [0, 1] * 25}
    return parquet_bytes(pyarrow.table(columns, schema=schema))


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


TURN = b"II*\0\x08\0\0\0" + struct.pack("<HHHI4sI", 1, 0x112, 2, 4, b"abc\0", 0)
"""EXIF data whose orientation is a text."""


def png(width, height, pixels, *chunks, kind=0):
    """Return a PNG of 8 bits, whose rows begin with a filter's number, and other chunks. The kind 0 is gray."""
    size = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    chunks_of_file = [
        (b"IHDR", size),
        *chunks,
        (b"IDAT", zlib.compress(pixels)),
        (b"IEND", b""),
    ]
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, content in chunks_of_file:
        parts += [struct.pack(">I", len(content)), kind, content]
        parts += [struct.pack(">I", zlib.crc32(kind + content))]
    return b"".join(parts)


def saved(form, size, **how):
    file = io.BytesIO()
    Image.new("L", size).save(file, form, **how)
    return file.getvalue()


def scans(count, side):
    """Return a JPEG whose last scan, of 14 bytes, comes again and again. Each takes the time of the whole image."""
    content = saved("JPEG", (side, side), progressive=True)
    at = content.rfind(b"\xff\xda")
    return content[:at] + content[at:-2] * count + content[-2:]


def circle(count):
    """Return a TIFF of one sample whose directories lead to each other."""
    entries = [(256, 1), (257, 1), (258, 8), (259, 1), (262, 1), (273, 0), (278, 1), (279, 1)]  # fmt: skip
    fields = b"".join(struct.pack("<HHII", key, 4, 1, value) for key, value in entries)
    start = struct.pack("<H", len(entries)) + fields
    places = [*range(8, 8 + count * (len(start) + 4), len(start) + 4), 8]
    parts = [start + struct.pack("<I", place) for place in places[1:]]
    return b"II*\0" + struct.pack("<I", 8) + b"".join(parts)


def frames(count):
    file = io.BytesIO()
    first, *others = (Image.new("L", (8, 8), k % 255) for k in range(count))
    first.save(file, "GIF", save_all=True, append_images=others)
    return file.getvalue()


def pickled_bytes(content):
    file = io.BytesIO()
    pickled(file, content, bytes(2_000_000))
    return file.getvalue()


def negated(count):
    """Return a file of torch.save of views that negate one number again and again."""
    number, file = torch.zeros(1, dtype=torch.complex128).conj().imag, io.BytesIO()
    torch.save({f"w{k}": number.expand(N) for k in range(count)}, file)
    return file.getvalue()


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
        "letters that become six": lambda: text_lines("\u3316" * (N // 8)),
        "ligatures": lambda: text_lines("\ufdfa" * (N // 4)),
        "marks in a row": lambda: (b'{"text": "' + MARKS + b'", "label": 0}\n{"text": "b", "label": 1}\n') * 9,
        "whole numbers beyond all": lambda: (b'{"x": ' + b"1" * 400 + b', "label": 0}\n{"x": 2, "label": 1}\n') * 30,
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
        "one block in all entries": lambda: one_block(9000),
        "a large dictionary": large_dictionary,
        "another packing": lambda: archive((96 * N,), n_bytes=384 * N, count=2, packing=zipfile.ZIP_BZIP2),
        "marks in a row": lambda: text_arrays("a" + "\u0301\u0323" * (N // 16)),
        "a class for each sample": lambda: many_classes(60_000),
        "half a sign": lambda: text_arrays(0xD800),
        "long texts": lambda: text_arrays("a" * (2 * N)),
        "a sign beyond all": lambda: text_arrays(0x7FFFFFFF),
        "another order of bytes": lambda: text_arrays(65, np.zeros((60, 4), ">f4")),
        "long numbers": lambda: text_arrays(65, np.zeros((60, 4), np.longdouble)),
        "a long string": lambda: b"PK\x05\x06" + b"a" * (4 * N),
        "repeated keys": lambda: b"PK\x05\x06" + bytes(18) + archive((1,), 4, 1) * 2,
    },
    "text": {
        "many values": lambda: b"a b" * N,
        "many lines": lambda: numbered(200_000, b"w%d\n"),
        "repeated lines": lambda: b"a\n" * N,
        "lines of a Mac": lambda: b"a\r" * N,
        "a long string": lambda: b"a" * (16 * N),
        "zeros": lambda: bytes(N),
        "no UTF-8": lambda: b"a\n\xff",
    },
    "csv": {
        "many values": lambda: b"x,label\n" + b"1,2\n" * (2 * N),
        "short lines": lambda: b"a,b,c,d,e,label\n" + b"1\n" * (2 * N),
        "a long string": lambda: b"x,label\n" + b"a" * (16 * N) + b",1\n",
        "an open string": lambda: b'x,label\n"' + b"1,2\n" * N,
        "quotation marks": lambda: b"x,label\n" + b'"' * (4 * N),
        "commas": lambda: b"," * (10 * N),
        "commas below a name of lines": lambda: b'"a' + b"\n" * 20 + b'"' + b"," * (10 * N),
        "wide": lambda: numbered(100_000, b"k%d,") + b"label\n" + b"\n" * 50,
        "columns times lines": lambda: numbered(3000, b"k%d,") + b"label\n" + b"1\n" * 50_000,
        "repeated keys": lambda: b"x," * 100_000 + b"label\n",
        "huge numbers": lambda: b"x,label\n" + b"9" * N + b",1\n",
        "a number beyond all": lambda: b"x,label\n" + b"1e999999999,1\n" * 60,
        "whole numbers beyond all": lambda: b"x,label\n" + b"1" * 400 + b",1\n2,0\n" * 30,
        "no UTF-8": lambda: "x,label\n".encode("utf-16") + b"\xd8" * 999,
        "zeros": lambda: b"x,label\n" + bytes(N),
        "lines of a Mac": lambda: b"a,b,c,d,e,label\r" + b"1\r" * (2 * N),
        "many classes": lambda: b"x,label\n" + numbered(50_000, b"1,w%d\n"),
        "spaces": lambda: b"x,label\n" + b" " * (8 * N) + b"1,1\n",
    },
    "parquet": {
        "many values": lambda: table(x=np.zeros(2 * N, np.int8), label=np.zeros(2 * N, np.int8)),
        "a long string": lambda: table(x=["a" * (4 * N)] * 100, label=[0, 1] * 50),
        "marks in a row": lambda: table(text=[MARKS.decode(), "a"] * 50, label=[0, 1] * 50),
        "many strings": lambda: table(x=["a" * 999] * 300_000, label=["b"] * 300_000),
        "differences": lambda: table(
            {"use_dictionary": False, "column_encoding": {"x": "DELTA_BYTE_ARRAY"}},
            x=["a" * N] * 500,
        ),
        "wide": lambda: table(**{f"x{k}": [] for k in range(9000)}, label=[]),
        "wide and long": lambda: table(**{f"x{k}": np.zeros(9999, np.int8) for k in range(500)}),
        "deep": lambda: table(x=pyarrow.array([nested(60)]), label=[1]),
        "binary": lambda: table(x=[bytes(N)] * 50, label=[0, 1] * 25),
        "objects": lambda: table(x=[{"a": 1}] * 50, label=[0, 1] * 25),
        "repeated keys": lambda: parquet_bytes(
            pyarrow.Table.from_arrays([pyarrow.array([0, 1] * 50)] * 500, ["label"] * 500)
        ),
        "huge numbers": lambda: table(x=pyarrow.array([10**75] * 50, pyarrow.decimal256(76)), label=[0, 1] * 25),
        "a pickled type": lambda: noted(PICKLED, {}),
        "an index of pandas": lambda: noted({}, INDEX),
        "many notes": lambda: noted({}, {f"k{k}": "v" for k in range(200_000)}),
        "a zone of time that is a path": lambda: table(
            x=pyarrow.array([1] * 50, pyarrow.timestamp("ns", "../../etc/passwd")), label=[0, 1] * 25
        ),
        "dates beyond all": lambda: table(x=pyarrow.array([2**31 - 1] * 50, pyarrow.date32()), label=[0, 1] * 25),
        "times beyond all": lambda: table(x=pyarrow.array([-1] * 50, pyarrow.time32("s")), label=[0, 1] * 25),
        "no UTF-8": lambda: table(x=undecodable(50), label=[0, 1] * 25),
        "many groups": lambda: table({"row_group_size": 1}, x=np.zeros(5000), label=np.zeros(5000)),
        "a claimed size": lambda: table(x=[0.0] * 50, label=[0, 1] * 25)[:-8] + b"\xff\xff\xff\x7fPAR1",
        "no end": lambda: b"PAR1" + bytes(N),
    },
    "image": {
        "a claimed size": lambda: png(60_000, 60_000, b""),
        "many values": lambda: png(12_000, 12_000, bytes(12_001 * 12_000)),
        "wide": lambda: png(2**31 - 1, 1, bytes(N)),
        "a long text": lambda: png(8, 8, bytes(72), *[(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**26)))] * 20),
        "a packed profile": lambda: png(8, 8, bytes(72), (b"iCCP", b"a\0\0" + zlib.compress(bytes(2**28)))),
        "repeated keys": lambda: png(8, 8, bytes(72), *[(b"tEXt", b"a\0b")] * 100_000),
        "huge numbers": lambda: b"\x89PNG\r\n\x1a\n" + b"\x7f\xff\xff\xffIHDR" + bytes(N),
        "no palette": lambda: png(8, 8, bytes(72), kind=3),
        "a turn in words": lambda: png(8, 8, bytes(72), (b"eXIf", TURN)),
        "many scans": lambda: scans(30_000, 2000),
        "directories in a circle": lambda: circle(60_000),
        "many frames": lambda: frames(2000),
        "large frames": lambda: saved("GIF", (20_000, 20_000)),
        "tiles": lambda: saved("TIFF", (20_000, 20_000), compression="tiff_adobe_deflate"),
        "a program": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9999 9999\n" + b"{" * N,
        "no image": lambda: bytes(N),
    },
    "pt": {
        "many values": lambda: pickled_bytes(CALLS["lists of a list"]),
        "deep": lambda: pickled_bytes(CALLS["a million lists"]),
        "deep modules": lambda: pickled_bytes(CALLS["deep modules"]),
        "wide": lambda: pickled_bytes(CALLS["20,000 keys"]),
        "a long string": lambda: pickled_bytes(CALLS["a text of 15 MB"]),
        "many names": lambda: pickled_bytes(CALLS["50,000 names"]),
        "huge numbers": lambda: pickled_bytes(b"\x8b" + (4 * N).to_bytes(4, "little") + b"\xff" * 4 * N),
        "a claimed size": lambda: pickled_bytes(CALLS["a storage of 8 GB"]),
        "repeated keys": lambda: pickled_bytes(CALLS["numbers of one hash as keys"]),
        "many entries": lambda: archive((1,), n_bytes=4, count=20_000),
        "negated views": lambda: negated(1000),
        "old": lambda: b"\x80\x02" + b"]" * N + b".",
    },
}  # fmt: skip
"""The bytes of a bomb, by format and kind."""


def special(path, kind):
    """Put what is no regular file, or is far larger than it is on the disk."""
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link to itself":
        path.symlink_to(path.name)
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


SPECIAL = (
    *("a pipe", "a link to itself", "a link to a device", "a link to a pipe"),
    *("a folder", "a sparse file"),
)
