"""Hostile files by seeds: sound files of each format with random changes that no list of bombs has."""

import copy
import io
import json
import random
import zipfile
from itertools import islice

import numpy as np
import pyarrow
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save

from fedlayers.decision.search import Tuned
from fl_core import rows
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from tests.made import frame, lines

MOST = 2**24
"""Bytes of a drawn file at most."""
TEXTS = (
    *("", " ", "\0", "\ud800", "\u202e", "../../x", "/dev/zero", "http://x/y", "__class__"),
    *("nan", "1e999", "9" * 5000, "-", "{}", "%s%n", "é" * 300, "\r\n", "\x1b[31m", "'\"`"),
)  # fmt: skip
FORMS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF")
TOML = """
[model]
model = "mlp"
model_options = {hidden = [8, 4]}

[training]
lr = 0.05
epochs = 2
"""
SITE = "name = 'north'\npath = 'table.csv'\n[columns]\nclient_column = 'ward'\n"


def written(write):
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def sound(folder):
    """Return the sound bytes of a file for each reader, by the file's name. JSON comes as its data."""
    layers = [Layer(name, (f"{name}.weight", f"{name}.bias")) for name in ("a", "b")]
    scored = {"settings": {"fedavg": {"lr": 0.1}}, "values": {"fedavg": 0.5}}
    settings = {"dataset": "heart", "rounds": 3, "seeds": (0, 1), "version": "1"}
    tuned = Tuned(**scored, trials={"fedavg": 3}, score="accuracy", **settings)
    tuned.save(folder / "tuned.json")
    row = rows.row("accuracy", 0.5, client="a", seed=0, round=1)
    rows.write(folder / "rows.jsonl", {"layers": ["a", "b"]}, [row, row])
    state = {"weight": torch.rand(2, 3), "bias": torch.rand(2)}
    x, y = np.random.default_rng(0).random((60, 6), np.float32), np.arange(60) % 2
    table = frame(120)
    names = {"weight": "a.safetensors", "bias": "b.safetensors"}
    picture = Image.effect_noise((8, 8), 40)
    return {
        "plan.json": LayerPlan.all_but_last(layers).to_json(),
        "tuned.json": json.loads((folder / "tuned.json").read_text()),
        "choice.json": {"way": "fedavg", "run": "arms/fedavg-0", "seeds": [0, 1]},
        "rows.jsonl": [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()],
        "run.toml": TOML.encode(),
        "site.toml": SITE.encode(),
        "weights.safetensors": save(state),
        "weights.pt": written(lambda file: torch.save(state, file)),
        "arrays.npz": written(lambda file: np.savez(file, **state)),
        "data.npz": written(lambda file: np.savez(file, x=x, y=y)),
        "data.csv": table.to_csv(index=False).encode(),
        "data.jsonl": [*lines()][:60],
        "data.parquet": written(table.to_parquet),
        "images/b/1.png": picture,
        "model/adapter_config.json": {"r": 1, "lora_alpha": 2, "target_modules": ["0"], "peft_type": "LORA"},
        "model/model.safetensors.index.json": {"metadata": {"total_size": 9}, "weight_map": names},
    }  # fmt: skip


def hostile(content, form, draw):
    """Return the bytes of a hostile file that begins as a sound one.

    Args:
        content: from :func:`sound`: bytes, the data of JSON, or an image. form: its format, as of a reader.
    """
    if form == "image":
        content = image(content, draw)
    elif form in ("json", "jsonl"):
        content = as_json(content, draw)
    elif form in ("zip", "pt") and draw.random() < 0.7:
        content = repacked(content, draw)
    elif form == "parquet" and draw.random() < 0.8:
        content = columns(draw)
    elif form in ("csv", "toml"):
        return as_text(content, draw)[:MOST]
    if draw.random() < 0.6:
        for _ in range(draw.randint(1, 3)):
            content = cut(content, draw)
    return content[:MOST]


# --- bytes -------------------------------------------------------------------------------------------------------


def place(content, draw):
    """Return a place in bytes, often near the beginning or the end, where the sizes are."""
    end = len(content)
    which = draw.random()
    if which < 0.4:
        return draw.randint(0, min(end, 200))
    if which < 0.7:
        return max(0, end - draw.randint(0, 200))
    return draw.randint(0, end)


def repeated(part, count):
    """Return a text or bytes again and again, of at most about :data:`MOST`."""
    return part * min(count, MOST // max(len(part), 1) + 1)


def cut(content, draw):
    """Return bytes with one random change."""
    at, length = place(content, draw), draw.choice([1, 2, 4, 8, 64, 4096])
    part = content[at : at + length]
    new = draw.choice([
        lambda: b"",
        lambda: repeated(part, draw.choice([2, 100, 10_000])),
        lambda: draw.randbytes(length),
        lambda: b"\xff" * length,
        lambda: b"\x7f" + b"\xff" * (length - 1),
        lambda: bytes(length),
        lambda: bytes(draw.choice([2**10, 2**20, 2**23])) + part,
        lambda: part[::-1],
        lambda: content[-length:],
        lambda: draw.choice([b"[", b"{", b'"', b"(", b",", b"\n", b"\\"]) * draw.choice([1, 1000, 10**6]),
    ])()  # fmt: skip
    return (content[:at] + new[:MOST] + content[at + length :])[:MOST]


# --- JSON --------------------------------------------------------------------------------------------------------


def evil(draw, part=None):
    """Return a value that no honest file has."""
    size = draw.choice([3, 300, 30_000])
    deep = part
    for _ in range(draw.choice([5, 50, 99, 150])):
        deep = draw.choice([[deep], {"a": deep}])
    return draw.choice([
        lambda: 10 ** draw.randint(3, 4000),
        lambda: -(2**63),
        lambda: draw.choice([1e308, float("nan"), float("inf"), -0.0, 5e-324]),
        lambda: draw.choice(TEXTS),
        lambda: draw.choice(TEXTS) * draw.choice([1, 50, 2000]),
        lambda: draw.choice([None, True, [], {}, [[]], [None] * size]),
        lambda: deep,
        lambda: [copy.deepcopy(part) for _ in range(min(size, MOST // len(json.dumps(part)) + 1))],
        lambda: {f"{draw.choice(TEXTS)[:9]}{k}": k for k in range(size)},
        lambda: [[0] * 300 for _ in range(300)],
    ])()  # fmt: skip


def paths(value, path=()):
    """Yield the path of each value in data of JSON."""
    yield path
    inner = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        inner = enumerate(value)
    for key, inner_value in inner:
        yield from paths(inner_value, (*path, key))


def as_json(content, draw):
    """Return JSON, or lines of it, with some evil values."""
    content = copy.deepcopy(content)
    in_lines = isinstance(content, list)
    for _ in range(draw.randint(1, 3)):
        places = [path for path in islice(paths(content), 50_000) if path]
        *above, last = draw.choice(places)
        inside = content
        for key in above:
            inside = inside[key]
        if isinstance(inside, dict) and draw.random() < 0.3:
            name = draw.choice(TEXTS) * draw.choice([1, 1000])
            inside[name] = inside.pop(last)
        else:
            inside[last] = evil(draw, inside[last])
    if in_lines:
        texts = [json.dumps(line) for line in content]
        texts[draw.randrange(len(texts))] += draw.choice(["", "\n" * 10**5, "}", "\r", texts[0]])  # fmt: skip
        return "\n".join(texts).encode()
    text = json.dumps(content)
    if draw.random() < 0.3:  # keys come again
        text = text[:-1] + ", " + text[1:]
    return text.encode()


# --- tables and other texts --------------------------------------------------------------------------------------


def as_text(content, draw):
    """Return a text of lines with random changes of cells, lines, ends of lines and encodings."""
    text = content.decode()
    for _ in range(draw.randint(1, 3)):
        lines = text.split("\n")
        k = draw.randrange(len(lines))
        line, cells = lines[k], lines[k].split(",")
        cells[draw.randrange(len(cells))] = str(evil(draw))[: 2**20]
        sign = draw.choice([",", ";", "\t", '"', "'", "[", ".", "#", "=", '"""'])
        lines[k] = draw.choice([
            ",".join(cells),
            repeated(line, draw.choice([2, 1000])),
            repeated(f"{line}\n", draw.choice([2, 1000, 50_000])),
            sign * draw.choice([1, 999, 10**5]) + line,
            "",
            draw.choice(TEXTS) + line,
            repeated(",".join([*cells[::-1], ""]), draw.choice([1, 500])),
        ])  # fmt: skip
        text = "\n".join(lines)[:MOST]
    if draw.random() < 0.3:
        text = text.replace("\n", draw.choice(["\r", "\r\n", "\n\n", "\u2028", "\n\r\n"]))  # fmt: skip
    name = draw.choice(["utf-8"] * 4 + ["utf-16", "utf-7", "utf-32", "cp500"])
    return text.encode(name, errors="replace")


# --- archives, Parquet, images -----------------------------------------------------------------------------------


def repacked(content, draw):
    """Return a zip archive whose entries are changed, packed, repeated or renamed."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    for _ in range(draw.randint(1, 2)):
        k = draw.randrange(len(entries))
        name, data = entries[k]
        head, rest = data[:128], data[128:]
        kind = draw.choice([b"|O ", b"<U9", b"<f2", b"|V9", b"<m8"])
        entries[k] = draw.choice([
            (name, cut(data, draw)),
            (name, data + bytes(draw.choice([2**16, 2**22, 2**26]))),
            (name, head.replace(b"60", b"6" * draw.choice([3, 9, 30])) + rest),
            (name, head.replace(b"<f4", kind) + rest),
            (name + draw.choice(TEXTS), data),
            (draw.choice(entries)[0], data),
        ])  # fmt: skip
    if draw.random() < 0.2:
        name, data = entries[0]
        count = min(3000, MOST // (len(data) + 1))
        entries += [(f"{name}{k}", data) for k in range(count)]
    slow = max(len(data) for _, data in entries) > 2**20
    packings = [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]  # fmt: skip
    packing = draw.choice(packings[: 1 if slow else None])

    def write(file):
        with zipfile.ZipFile(file, "w", packing, compresslevel=1) as archive:
            for name, data in entries:
                archive.writestr(name.encode(errors="replace").decode(), data)

    return written(write)


def columns(draw):
    """Return a Parquet file of columns of random types, packings and encodings."""
    count = draw.choice([0, 1, 60, 5000, 200_000])
    kinds = [
        lambda: np.zeros(count, draw.choice(["i1", "i8", "f2", "f8", "u8", "bool"])),
        lambda: pyarrow.DictionaryArray.from_arrays(np.zeros(count, "i4"), ["a" * draw.choice([0, 9, 3000])]),
        lambda: pyarrow.array([None] * count, draw.choice([pyarrow.null(), pyarrow.string(), pyarrow.date32()])),
        lambda: pyarrow.array(range(count), pyarrow.timestamp(draw.choice(["s", "ns"]), "UTC")),
        lambda: pyarrow.array([[0] * 9] * min(count, 999) + [None] * max(count - 999, 0)),
        lambda: pyarrow.array(range(count)).cast(pyarrow.decimal128(38)),
        lambda: pyarrow.array(range(count), pyarrow.duration("us")),
        lambda: pyarrow.nulls(count, pyarrow.struct([("a", pyarrow.int8())])),
        lambda: pyarrow.array([b"a"] * count),
        lambda: np.arange(count) % 2,
    ]  # fmt: skip
    arrays = [draw.choice(kinds)() for _ in range(draw.choice([1, 3, 12]))]
    names = [draw.choice(["label", "client", "x", *TEXTS[:3]]) for _ in arrays]
    names = [name.encode(errors="replace").decode() for name in names]
    arrays = [pyarrow.array(array) if isinstance(array, np.ndarray) else array for array in arrays]  # fmt: skip
    table = pyarrow.Table.from_arrays(arrays, names)
    options = {
        "compression": draw.choice(["none", "snappy", "gzip", "zstd", "brotli"]),
        "row_group_size": max(1, draw.choice([count, count // 300, 2**20])),
        "data_page_size": draw.choice([None, 1, 2**26]),
        "data_page_version": draw.choice(["1.0", "2.0"]),
        "use_dictionary": draw.choice([True, False]),
    }
    return written(lambda file: parquet.write_table(table, file, **options))


def image(picture, draw):
    """Return an image of a random format and size, with evil notes."""
    form = draw.choice(FORMS)
    side = draw.choice([0, 1, 8, 3000, 9000])
    size, modes = (max(side, 1), draw.choice([1, 8, 3000])), ["L", "RGB", "1"]
    picture = picture.resize(size).convert(draw.choice(modes))
    exif = Image.Exif()
    exif[draw.choice([0x0112, 0x010E, 0x8769])] = draw.choice([9, "a" * 60_000, 6, 0])
    try:
        return written(lambda file: picture.save(file, form, exif=exif, comment="a" * 60_000))  # fmt: skip
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
    ):  # notes that a format cannot hold
        return written(lambda file: picture.save(file, form))


def drawn(content, form, seed):
    """Return the bytes of a hostile file by a seed."""
    return hostile(content, form, random.Random(seed))
