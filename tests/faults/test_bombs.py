"""A small file that would fill the memory or the stack is refused by name before it does."""

import io
import json
import os
import shutil
import struct
import tracemalloc
import zipfile
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedlayers.cli.options import read_config
from fedlayers.decision.search import Tuned
from fl_core import formats, rows, storage
from fl_core.config import RunConfig
from fl_core.data import files as own_files
from fl_core.data.reading import PLAIN
from fl_core.data.table.describe import Described, identifies
from fl_core.data.table.read import open_table
from fl_core.data.values import texts_of
from fl_core.errors import CorruptError, UsageError
from fl_core.models import weights
from fl_core.plan import LayerPlan
from fl_core.records.store import Run
from fl_core.rounds import recorder
from fl_core.run import runner
from fl_core.run.restore import load_models
from tests.faults.hostile import png, scans
from tests.faults.injected import cover, forge
from tests.faults.limited import limited

VAST = 9 << 40
LITTLE = 200 << 20  # bytes that a refusal may take: a part of a line, a list of names
CONFIG = RunConfig(
    algorithm="fedavg", rounds=2, epochs=1, checkpoint_every=1, eval_every=2
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A finished run that nobody touches."""
    path = tmp_path_factory.mktemp("sound") / "run"
    runner.run(CONFIG, path)
    return path


def refused(act, path, *errors):
    """What is said, in one line that names the file; and nothing much was taken before."""
    tracemalloc.start()
    try:
        with pytest.raises(errors or (CorruptError, UsageError)) as caught:
            act()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert peak_bytes < LITTLE, f"{peak_bytes:,} bytes"
    return message


def readers(path):
    """All ways in which a run directory is read: to be checked, to be gone on with, for its models and its rows."""
    return {
        "verify": lambda: Run(path).verify(),
        "resume": lambda: runner.resume(path),
        "models": lambda: load_models(path, which="global"),
        "rows": lambda: Run(path).rows(),
    }


def grow(path, n_bytes=VAST):
    """As large as asked for, without taking a place: a sparse file."""
    try:
        os.truncate(path, n_bytes)
    except OSError as error:
        pytest.skip(f"no sparse file of that size here: {error}")


def test_a_vast_file_of_a_run(sound, tmp_path):
    blob = Run(sound).manifest(2)["states"]["server"]["blob"]
    for name in (
        "config.json",
        "partition.safetensors",
        "checkpoints/000002.json",
        f"blobs/{blob}.safetensors",
        "rows.jsonl",
    ):
        run = Path(shutil.copytree(sound, tmp_path / name))
        grow(run / name)
        for act in (
            ("verify", "resume", "rows") if name == "rows.jsonl" else ("verify",)
        ):
            refused(readers(run)[act], run / name, CorruptError)


def tensor_file(header, data=b"", length=None):
    """The bytes of a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


CLAIMS = {
    "a header of 9 TiB": tensor_file({}, length=VAST),
    "a tensor of 9 TiB": tensor_file(
        {"w": {"dtype": "U8", "shape": [VAST], "data_offsets": [0, VAST]}}
    ),
    "a shape beyond its bytes": tensor_file(
        {"w": {"dtype": "F32", "shape": [VAST], "data_offsets": [0, 4]}}, b"1234"
    ),
    "a shape that overflows": tensor_file(
        {"w": {"dtype": "F64", "shape": [2**62, 16], "data_offsets": [0, 0]}}
    ),
    "nested JSON": tensor_file(b'{"w":' * 20_000 + b"1" + b"}" * 20_000),
}


def test_tensors_that_claim_what_is_not_there(sound, tmp_path):
    """Their digests match: whoever forges the file forges these too."""
    for claim, data in CLAIMS.items():
        path = tmp_path / "weights.safetensors"
        path.write_bytes(data)
        refused(lambda path=path: weights.read(path), path, UsageError)
        run = Path(shutil.copytree(sound, tmp_path / claim))
        path = run / "partition.safetensors"
        whole = path.read_bytes()
        path.write_bytes(data)
        cover(run, path.name)
        refused(lambda run=run: Run(run).partition(), path, CorruptError)
        path.write_bytes(whole)
        cover(run, path.name)
        path = run / f"blobs/{storage.sha(data)}.safetensors"
        path.write_bytes(data)
        last = run / "checkpoints/000002.json"
        blob = {"blob": storage.sha(data)}
        forge(last, lambda found, blob=blob: found["states"]["server"].update(blob))
        for name in ("resume", "models"):
            refused(readers(run)[name], path, CorruptError)


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000


def test_nested_json_in_a_run(sound, tmp_path):
    """Also with a digest that fits: that nesting can be read, but is too deep for later steps."""
    deeper_than_use = json.loads("[" * 150 + "]" * 150)
    for name in ("config.json", "checkpoints/000002.json"):
        run = Path(shutil.copytree(sound, tmp_path / name))
        whole = (run / name).read_bytes()
        (run / name).write_bytes(DEEP)
        for act in ("verify", "resume", "models"):
            refused(readers(run)[act], run / name, CorruptError)
        (run / name).write_bytes(whole)
        forge(run / name, lambda found: found.update(options=deeper_than_use))
        for act in ("verify", "resume"):
            refused(readers(run)[act], run / name, CorruptError)
    run = Path(shutil.copytree(sound, tmp_path / "unsigned"))
    times = run / "timing.jsonl"
    times.write_bytes(DEEP)
    refused(lambda: recorder.read_pace(times), times, CorruptError)


def own_data(path):
    return runner.assemble(RunConfig(dataset=str(path)))


READERS = {
    "plan.json": LayerPlan.load,
    "rows.jsonl": rows.read,
    "tuned.json": Tuned.load,
    "run.toml": lambda path: read_config(path, "run", ()),
    "weights.pt": weights.read,
    "weights.safetensors": weights.read,
    **{f"data.{end}": own_data for end in ("npz", "csv", "jsonl", "parquet")},
}
"""Readers of files that a user names."""


@pytest.mark.parametrize("name", READERS)
def test_a_vast_file_of_ones_own(tmp_path, name):
    path = tmp_path / name
    for start in ("{", "x,label\n1,0\n", ""):
        path.write_text(start)
        grow(path)
        refused(lambda: READERS[name](path), path)


def arrays_of(header):
    """The bytes of an .npz file whose arrays have this text as their header."""
    text = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("x", "y"):
            archive.writestr(f"{name}.npy", text)
    return file.getvalue()


HEADER = json.dumps({"schema": rows.SCHEMA}).encode() + b"\n"
DIMS = b'{"w":{"dtype":"F32","shape":[' + b"1," * 2**21 + b'1],"data_offsets":[0,4]}}'
NESTED = [
    *((name, DEEP) for name in ("plan.json", "rows.jsonl", "tuned.json", "data.jsonl")),
    ("rows.jsonl", HEADER + DEEP),
    ("rows.jsonl", HEADER + b"[" * 10**6),
    ("run.toml", b"a=" + b"[" * 50_000),
    ("data.jsonl", b'{"text": "a", "label": 0}\n' + DEEP + b"\n"),
    ("data.npz", arrays_of(b"(" * 5000 + b")" * 5000)),
    ("data.npz", arrays_of(b"-" * 9000 + b"1")),
    ("weights.safetensors", tensor_file(DIMS, b"1234")),
]


def test_a_nested_file_of_ones_own(tmp_path):
    for name, data in NESTED:
        path = tmp_path / name
        path.write_bytes(data)
        refused(lambda: READERS[name](path), path)  # noqa: B023


def packed(path, **streams):
    """Write an .npz file of arrays: (shape, dtype, bytes that are 0)."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, (shape, dtype, zeros) in streams.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                header = {"descr": np.dtype(dtype).str, "shape": shape}
                header["fortran_order"] = False
                np.lib.format.write_array_header_1_0(file, header)
                for _ in range(zeros // 2**20):
                    file.write(bytes(2**20))
    assert path.stat().st_size < 2**20


COUNT, NUMBERS = 2**23, ((3,), "i8", 0)
BOMBS = {
    "unpacks to 288 MiB": {"x": ((9 * COUNT,), "f4", 36 * COUNT), "y": NUMBERS},
    "claims 9 TiB": {"x": ((VAST,), "u1", 2**20), "y": NUMBERS},
    "more than there are numbers": {"x": ((2**62, 16), "f8", 2**20), "y": NUMBERS},
    "texts become objects": {
        "x": ((COUNT,), "u1", COUNT),
        "y": ((COUNT,), "U1", 4 * COUNT),
    },
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_packed_dataset(tmp_path, bomb):
    path = tmp_path / "data.npz"
    packed(path, **BOMBS[bomb])
    refused(lambda: own_data(path), path, UsageError)


def test_a_packed_table(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    for count in (2**20, 2**21):  # one value many times takes few bytes
        column = pyarrow.array(np.zeros(count, dtype=np.int8))
        parquet.write_table(pyarrow.table({"x": column, "label": column}), path)
        if count < 2**21:  # numbers stay arrays: as Python's objects they take more
            peak_bytes = peak(lambda: read_part(path))
            assert peak_bytes < 1.1 * 2 * 8 * count
    refused(lambda: own_data(path), path, UsageError)
    path.write_bytes(b"PAR1")
    assert refused(lambda: own_data(path), path, UsageError).endswith("Save it again.")


def test_packed_weights_and_images(tmp_path):
    """Weights of torch.save are a zip archive, and its entries may be packed."""
    plain, path = tmp_path / "plain.pt", tmp_path / "weights.pt"
    torch.save({"w": torch.zeros(3)}, plain)
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
        target.writestr("plain/data/99", bytes(2**28))
    refused(lambda: weights.read(path), path, UsageError)
    assert weights.read(plain)
    images = tmp_path / "images"
    (images / "a").mkdir(parents=True)
    for k in range(8):
        Image.new("L", (6000, 6000)).save(images / f"a/{k}.png")
    refused(lambda: own_data(images), images, UsageError)


def test_a_jpeg_of_very_many_scans(tmp_path):
    """Each takes the time of the whole image: 30,000 of them, in 0.4 MB, take minutes."""
    for name, content in (("a/0.png", png(8, 8, bytes(72))), ("b/1.jpg", b"")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content)
    path = tmp_path / "b/1.jpg"
    path.write_bytes(scans(30_000, 2000))
    message, *_ = limited(lambda: own_files.read_images(tmp_path, 8), UsageError)
    assert (
        message
        == f"{path} must be a readable image: it has more than 100 scans. Save it again."
    )
    honest = scans(0, 64)
    path.write_bytes(honest + b"\xff\xda" * 500)  # a film after the picture
    assert own_files.read_images(tmp_path, 8).x.shape == (2, 8, 8)
    note = b"\xff\xe1\x04\x00" + b"\xff\xda" * 511
    path.write_bytes(honest[:2] + note + honest[2:])
    assert own_files.read_images(tmp_path, 8).x.shape == (2, 8, 8)


def test_a_packed_table_of_texts(tmp_path):
    """Equal texts are in memory once: this column would take 5 GB."""
    pyarrow, parquet = (
        pytest.importorskip("pyarrow"),
        pytest.importorskip("pyarrow.parquet"),
    )
    path, count = tmp_path / "data.parquet", 50_000
    texts = pyarrow.DictionaryArray.from_arrays(
        np.zeros(count, dtype=np.int32), ["a" * 100_000]
    )
    columns = {"x": np.arange(count) / count, "client": texts}
    parquet.write_table(pyarrow.table(columns), path, store_schema=False)

    def read():
        cells = texts_of(read_part(path)["client"])
        assert set(map(len, cells)) == {100_000}

    message, megabytes, _ = limited(read)
    assert message == "no error"
    assert megabytes < LITTLE / 2**20


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_pages_with_any_number_of_empty_cells_are_read(tmp_path, version):
    """The number of empty cells in a page's header is no encoding."""
    parquet = pytest.importorskip("pyarrow.parquet")
    for empty in range(10):
        cells = pd.Series([None] * empty + [1.5] * 400).to_frame("x")
        path = tmp_path / f"{empty}.parquet"
        table = pytest.importorskip("pyarrow").Table.from_pandas(cells)
        parquet.write_table(table, path, data_page_version=version)
        assert read_part(path)["x"].isna().sum() == empty


def test_no_byte_of_a_page_s_header_is_trusted(tmp_path):
    """Another number, or another type of a number, is an error that the reader tells in one line."""
    parquet = pytest.importorskip("pyarrow.parquet")
    path, count = tmp_path / "data.parquet", 0
    table = pytest.importorskip("pyarrow").table({"x": [0.5] * 50})
    for version in ("1.0", "2.0"):
        parquet.write_table(table, path, data_page_version=version)
        content, metadata = path.read_bytes(), parquet.ParquetFile(path).metadata
        for place in range(4, 20):  # after the format's name
            for kind in range(14):  # which is the lower half of a byte
                byte = bytes([content[place] & 0xF0 | kind])
                path.write_bytes(content[:place] + byte + content[place + 1 :])
                try:
                    formats.page_bytes(path, metadata)
                except (ValueError, LookupError, RecursionError):
                    count += 1
    assert count > 200


def read_part(path, texts=()):
    """Read the rows of a table of one file."""
    return open_table(path, PLAIN, texts).frame


def peak(act):
    """The bytes of memory that a call takes at most."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


TIMES = 22
"""Times its bytes that reading a table may take."""


def test_values_within_texts_are_not_counted():
    text = '"' + "[{,:" * storage.VALUES + '\\""'
    assert storage.parsed_json(f"[{text}]") == [json.loads(text)]
    assert len(storage.parsed_json("[" + "1," * 500_000 + "1]")) == 500_001
    with pytest.raises(ValueError, match="1,048,576 values"):
        storage.parsed_json("[" + "1," * storage.VALUES + "1]")


TABLES = {
    ".csv": (b"x,label\n", b"0,1\n"),
    ".tsv": (b"x\tlabel\n", b"12\t34\n"),
    ".jsonl": (b'{"text":"a","label":0}\n', b"{}\n"),
}


def test_a_table_of_very_many_short_rows(tmp_path):
    for suffix, (header, row) in TABLES.items():
        path = tmp_path / f"data{suffix}"
        path.write_bytes(header + row * (2**18 // len(row)))
        names = ("text",) if suffix == ".jsonl" else ("x", "label")

        def act(path=path, names=names):
            with suppress(UsageError):
                read_part(path, names[-1:])

        assert peak(act) < TIMES * path.stat().st_size


LONG = ["z" * 30_000, *("ab" * 1500)]


def test_a_table_with_one_long_cell(tmp_path):
    """An array of text would give each row the length of the longest cell, 0.4 GB in all."""
    names = ("client", "label", "text")
    for suffix, column in product((".csv", ".jsonl", ".parquet"), names[:2]):
        path = tmp_path / f"data{suffix}"
        columns = {name: ["c", *("ab" * 1500)] for name in names}
        table = pd.DataFrame({**columns, column: LONG})
        if suffix == ".csv":
            table.to_csv(path, index=False)
        elif suffix == ".jsonl":
            table.to_json(path, orient="records", lines=True)
        else:
            pytest.importorskip("pyarrow")
            table.to_parquet(path)
        assert peak(lambda path=path: own_files.read(path)) < LITTLE
    column = Described("patient_id", "words", pd.Categorical(LONG))
    assert peak(lambda: identifies(column)) < LITTLE


def test_data_that_compress_well_are_taken(tmp_path):
    """As many equal values as a mask or a background has."""
    x = np.zeros((400, 3, 32, 32), dtype=np.float32)
    x[:, 0, 0, 0] = np.arange(400)
    np.savez_compressed(tmp_path / "data.npz", x=x, y=np.arange(400) % 2)
    assert x.nbytes > 100 * (tmp_path / "data.npz").stat().st_size
    assert own_data(tmp_path / "data.npz").data.clients


def test_an_archive_with_a_comment_is_read(tmp_path):
    """It ends later, and is looked for in the last bytes of the file."""
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros((60, 3), np.float32), y=np.arange(60) % 2)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"from the north"
    assert own_files.headers(path).keys() == {"x", "y"}


def test_lines_without_an_end_count_too(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"{}")
    row = formats.ROW_BYTES + formats.CELL_BYTES * formats.COLUMNS
    fitting = storage.UNPACKED // row
    formats.check_lines(path, b"\n" * (fitting - 1), formats.COLUMNS)
    with pytest.raises(UsageError, match="must unpack to at most"):
        formats.check_lines(path, b"\n" * fitting, formats.COLUMNS)


def test_a_number_that_is_no_round(run):
    """Python accepts each of these as a number, or its digits as digits."""
    for name in ("²", "00000²", "٠٠٠٠٠٣", "0000003", "+00003", "9" * 240):
        shutil.copy(run / "checkpoints/000002.json", run / f"checkpoints/{name}.json")
        assert Run(run).rounds == [1, 2]
        assert Run(run).verify()
