"""Weights of others: files that try to run code, hang, flood the memory, or end in a raw error."""

import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diagnostics.load_weights import load_weights
from fl_core.errors import CorruptError, UsageError
from tests.conftest import every_other
from tests.faults.limited import MEGABYTES, SECONDS, limited

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value):
    return b"J" + struct.pack("<i", value)


def name(full):
    return "c{}\n{}\n".format(*full.rsplit(".", 1)).encode()


def call(full, *given):
    return name(full) + b"(" + b"".join(given) + b"tR"


def table(*pairs):
    return b"}(" + b"".join(text(key) + value for key, value in pairs) + b"u"


def module(**tables):
    state = table(*((f"_{key}", value) for key, value in tables.items()))
    return name("mine.Net") + b")\x81" + state + b"b"


def tensor(size=(2, 3), stride=(3, 1), offset=0, count=6, key="0", kind="Float"):
    storage = text("storage") + name(f"torch.{kind}Storage") + text(key) + text("cpu")
    storage = b"(" + storage + number(count) + b"tQ"
    shapes = [
        b"(" + b"".join(map(number, numbers)) + b"t" for numbers in (size, stride)
    ]
    arguments = (storage, number(offset), *shapes, b"\x89}")
    return call("torch._utils._rebuild_tensor_v2", *arguments)


WEIGHT, BIAS = tensor(), tensor((2,), (1,))
SOUND = table(("weight", WEIGHT), ("bias", BIAS))


LEAF = module(parameters=table(("weight", WEIGHT))) + b"q\x01"
PAIR = b"}(" + text("a") + b"h\x01" + text("b") + b"h\x01u"
NAMES = [
    "os.system",
    "nt.system",
    "sys.exit",
    "subprocess.Popen",
    "builtins.exec",
    "builtins.__import__",
    "builtins.open",
    "builtins.compile",
    "runpy.run_path",
    "pickle.loads",
    "numpy.load",
    "ctypes.CDLL",
    "torch.hub.load",
    "code.interact",
    "shutil.rmtree",
]
CALLS = {
    # time
    "modules that name the next one twice": LEAF + b"".join([module(modules=PAIR) + b"q\x01"] * 40),
    "a module within itself": name("mine.Net") + b")\x81q\x01" + table(("_modules", PAIR)) + b"b",
    "deep modules": LEAF + b"".join([module(modules=table(("a" * 20, b"h\x01"))) + b"q\x01"] * 200),
    "a tuple twice in a tuple, as a key": b"}(" + b")q\x01" + b"h\x01\x86q\x01" * 60 + b"Nu",
    "deep tuples as a key": b"}()" + b"\x85" * 200_000 + b"Nu",
    "numbers of one hash as keys": b"}("
    + b"".join(b"\x8a\x0a" + (k * (2**61 - 1)).to_bytes(10, "little") + b"N" for k in range(40_000))
    + b"u",
    "names of buffers of each module": b"](" + text("a") * 999 + b"eq\x02" + LEAF
    + b"".join([module(non_persistent_buffers_set=b"h\x02", buffers=b"}", modules=PAIR) + b"q\x01"] * 40),
    "sets of one list": b"](" + text("a") * 999 + b"eq\x01" + call("__builtin__.set", b"h\x01") * 2000,
    "dictionaries of one list": b"](](" + text("a") + b"Ne" + b"eq\x01"
    + call("collections.OrderedDict", b"h\x01") * 2000,
    # memory
    "bytearray": call("__builtin__.bytearray", number(2**31 - 1)),
    "bytes": call("builtins.bytes", number(2**31 - 1)),
    "ByteTensor": call("torch.ByteTensor", number(30_000), number(30_000)),
    "FloatStorage": call("torch.FloatStorage", number(2**31 - 1)),
    "hex of hex": text("ab" * 4000) + b"q\x01"
    + (name("_codecs.encode") + b"h\x01" + text("hex") + b"\x86Rq\x01") * 30,
    "punycode": call("_codecs.encode", text("u" * 200_000), text("punycode")),
    "50,000 names": b"(" + b"".join(name(f"mine.n{k}") for k in range(50_000)) + b"t",
    "a million lists": b"]" * 10**6,
    "lists of a list": b"]q\x01" + b"](h\x01h\x01h\x01eq\x01" * 30_000,
    "20,000 keys": b"}(" + text("k") + WEIGHT + b"q\x01"
    + b"".join(text(f"k{k}") + b"h\x01" for k in range(20_000)) + b"u",
    "4,000 keys of one tensor": b"}(" + text("k") + tensor((500, 1000), (1000, 1), 0, 500_000) + b"q\x01"
    + b"".join(text(f"k{k}") + b"h\x01" for k in range(4000)) + b"u",
    "a text of 15 MB": text("a" * (15 << 20)) + b"q\x01" + b"h\x01" * 1000,
    "a name of 4 MB": table(("a" * (4 << 20), WEIGHT)),
    "a storage of 8 GB": table(("weight", tensor((2,), (1,), 0, 2**31 - 1))),
    # code
    **{each: call(each, text("touch ran")) for each in NAMES},
    "a call within a module": module(parameters=table(("weight", call("posix.system", text("touch ran"))))),
    "eval of Python 2": call("__builtin__.eval", text("open('ran', 'w')")),
    "getattr of a name": call("builtins.getattr", name("torch.hub"), text("load")),
    "torch.load": call("torch.load", text("weights.pt")),
    "a parameter": call("torch._utils._rebuild_parameter", call("pty.spawn", text("touch ran"))),
    "a subclass": call("torch._tensor._rebuild_from_type_v2", name("os.path.join"), name("mine.T"), b")", b"}"),
    "a subclass of subclasses": call(
        *("torch._tensor._rebuild_from_type_v2", name("torch._tensor._rebuild_from_type_v2")),
        *(name("mine.T"), b")", b"}"),
    ),
    "state of a name": name("torch.nn.Linear") + table(("__call__", name("mine.x"))) + b"b",
    "a call of a text": text("a") + b")R",
    "an extension": b"\x82\x01",
    "a name from the stack": b"\x8c\x02os\x8c\x06system\x93)R",
    "an old instance": b"(" + text("a") + b"ios\nsystem\n",
    # shapes
    "strides of 0": table(("weight", tensor((10**6, 10**6), (0, 0)))),
    "beyond the storage": table(("weight", tensor((2, 3), (300, 1)))),
    "an offset": table(("weight", tensor(offset=100))),
    "a negative size": table(("weight", tensor((-2, 3)))),
    "a negative stride": table(("weight", tensor(stride=(-3, 1)))),
    "no elements": table(("weight", tensor((0,) + (2**31 - 1,) * 60, (1,) * 61))),
    "dimensions": table(("weight", tensor((1,) * 1000, (1,) * 1000))),
    "a type that is unknown": table(("weight", tensor(kind="QInt8"))),
    "no storage": table(("weight", tensor(key="missing"))),
    "two sizes of a storage": table(("weight", WEIGHT), ("bias", tensor((2,), (1,), 0, 4))),
    "a sparse tensor": table(("weight", call("torch._utils._rebuild_sparse_tensor", b")"))),
    "a tensor of texts": table(("weight", call("torch._utils._rebuild_tensor_v2", *map(text, "abcdef")))),
    "a tensor of nothing": table(("weight", call("torch._utils._rebuild_tensor_v2"))),
    # damage
    "an empty stack": b"R",
    "a tuple of nothing": b"\x87",
    "an unknown memo": b"h\x09",
    "a text of 4 GB": b"X\xff\xff\xff\xffab",
    "half a surrogate": b"}(X\x03\x00\x00\x00\xed\xa0\x80" + WEIGHT + b"u",
    "an odd dictionary": b"}(" + text("a") + b"u",
    "items of a number": number(1) + b"(Ne",
    "no tensors": b"N",
    "escapes in keys": table(("\x1b[31mred\n", WEIGHT)),
    "escapes in names": table(("a", call("mine.\x1b[31m", b"N")), ("weight", WEIGHT)),
    "a persistent text": text("os.system") + b"Q",
    "a persistent list": b"]Q",
}  # fmt: skip
"""Pickles by what they try: time, memory, code, shapes, damage."""


def archive(
    path, pickled=SOUND, numbers=b"\0" * 24, packing=zipfile.ZIP_STORED, **more
):
    with zipfile.ZipFile(path, "w", packing) as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        file.writestr("archive/data/0", numbers)
        for entry, data in more.items():
            file.writestr(f"archive/{entry}", data)


def entries(count):
    def write(path):
        with zipfile.ZipFile(path, "w") as file:
            for k in range(count):
                file.writestr(f"{k}{'x' * 200}", b"")

    return write


def arrays(path, **found):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for key, array in found.items():
            with file.open(f"{key}.npy", "w") as part:
                np.save(part, array)


def safetensors(header, numbers=b"1234"):
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = struct.pack("<Q", len(data)) + data + numbers
    return lambda path: Path(path).write_bytes(data)


def old(*pickles):
    start = [b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", b"M\xe9\x03", b"}"]
    data = b"".join(
        b"\x80\x02" + pickle_bytes + b"." for pickle_bytes in (*start, *pickles)
    )
    return lambda path: Path(path).write_bytes(data)


def folder(**files):
    """Write a folder; a name's __ is a dot."""

    def write(path):
        Path(path).mkdir()
        for key, data in files.items():
            place = Path(path, key.replace("__", "."))
            if callable(data):
                data(place)
            else:
                place.write_bytes(
                    data if isinstance(data, bytes) else json.dumps(data).encode()
                )

    return write


def low_rank(size):
    tensors = {
        f"base_model.model.lora_{k}.weight": torch.zeros(shape)
        for k, shape in (("A", (1, size)), ("B", (size, 1)))
    }
    return lambda path: save_file(tensors, path)


def vast(path):
    Path(path).touch()
    os.truncate(path, 9 << 40)


INDEX = "model__safetensors__index__json"
DIMS = b'{"w":{"dtype":"F32","shape":[' + b"1," * 2**21 + b'1],"data_offsets":[0,4]}}'
ADAPTER = {"adapter_model__safetensors": low_rank(3)}
SHARDS = {
    f"{name}__safetensors": lambda path, name=name: save_file(
        {f"{name}{k}": torch.zeros(1) for k in range(6000)}, path
    )
    for name in "ab"
}
"""Two files with more tensors together than a model may have."""
FILES = {
    "many.pt": entries(30_000),
    "packed.pt": lambda path: archive(path, numbers=bytes(2**28), packing=zipfile.ZIP_DEFLATED),
    "twice.pt": lambda path: archive(path, **{"b/data.pkl": b"N."}),
    "big.pt": lambda path: archive(path, byteorder=b"big"),
    "short.pt": lambda path: archive(path, numbers=b"12"),
    "vast.pt": vast,
    "pipe.pt": os.mkfifo,
    "noise.pt": lambda path: Path(path).write_bytes(b"\x80\x02" + bytes(range(256))),
    "old_number.pt": old(number(1)),
    "old_keys.pt": old(SOUND, b"](" + text("1") + b"e"),
    "old_numbers.pt": old(SOUND, b"](" + text("0") + b"e"),
    "old_vast.pt": old(table(("weight", tensor((2,), (1,), 0, 2**31 - 1))), b"](" + text("0") + b"e"),
    "vast.npz": lambda path: arrays(path, a=np.zeros(2**26, "f4"), b=np.zeros(2**24, "f4")),
    "objects.npz": lambda path: arrays(path, a=np.array([{}], dtype=object), b=np.zeros(2)),
    "texts.npz": lambda path: arrays(path, a=np.array(["a"]), b=np.zeros(2)),
    "many.npz": entries(30_000),
    "noise.npz": lambda path: Path(path).write_bytes(b"PK\x05\x06" + bytes(18)),
    "vast.safetensors": vast,
    "header.safetensors": lambda path: Path(path).write_bytes(struct.pack("<Q", 9 << 40)),
    "nested.safetensors": safetensors(b'{"w":' * 20_000 + b"1" + b"}" * 20_000),
    "dims.safetensors": safetensors(DIMS),
    "claims.safetensors": safetensors({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}),
    "types.safetensors": safetensors({"w": {"dtype": "\x1b[31m", "shape": [1], "data_offsets": [0, 4]}}),
    "link": folder(model__safetensors=lambda path: path.symlink_to("/etc/passwd")),
    "pipe": folder(model__safetensors=os.mkfifo),
    "deep": folder(**{INDEX: b'{"a":' * 10**5 + b"1" + b"}" * 10**5}),
    "list": folder(**{INDEX: []}),
    "map": folder(**{INDEX: {"weight_map": ["a"]}}),
    "outside": folder(**{INDEX: {"weight_map": {"w": "../../sound.safetensors"}}}),
    "newline": folder(**{INDEX: {"weight_map": {"w": "a\n.safetensors"}}}),
    "circle": folder(model__safetensors=lambda path: path.symlink_to(path.name)),
    "shards": folder(**{INDEX: {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}}, **SHARDS),
    "absolute": folder(**{INDEX: {"weight_map": {"w": "/etc/passwd"}}}),
    "vast": folder(adapter_config__json=vast, **ADAPTER),
    "latin": folder(adapter_config__json=b"\xff", **ADAPTER),
    "rank": folder(adapter_config__json={"r": -1}, **ADAPTER),
    "word": folder(adapter_config__json={"r": "a"}, **ADAPTER),
    "nan": folder(adapter_config__json=b'{"r": 1, "lora_alpha": NaN}', **ADAPTER),
    "product": folder(adapter_config__json={"r": 1}, adapter_model__safetensors=low_rank(30_000)),
    "none": folder(adapter_config__json={"r": 1}),
    "empty": folder(config__json={}),
}  # fmt: skip
"""Whole files and folders, by their names."""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def check(path):
    """Nothing runs and nothing is written. One line ends it, within the limits."""
    net = nn.Linear(3, 2)
    there = sorted(Path().rglob("*"))
    by_position = path.endswith(".npz")

    def act():
        load_weights(path, into=net, by_position=by_position)

    message, megabytes, seconds = limited(act, UsageError, CorruptError)
    assert path in message, message
    assert message.isprintable(), message
    assert not {"raw:", "weights_only", "allow_pickle"} & {*message.split()}, message
    assert megabytes < MEGABYTES
    assert seconds < SECONDS
    assert sorted(Path().rglob("*")) == there
    return message, megabytes, seconds


@pytest.mark.parametrize("attack", every_other(CALLS, of=10))
def test_a_pickle_of_weights(attack):
    archive("weights.pt", CALLS[attack], bytes(2_000_000))
    check("weights.pt")


@pytest.mark.parametrize("path", every_other(FILES, of=10))
def test_a_file_of_weights(path):
    FILES[path](path)
    check(path)


def test_what_is_sound_is_read():
    archive("sound.pt", numbers=np.arange(6, dtype=np.float32).tobytes())
    net = load_weights("sound.pt", into=nn.Linear(3, 2))
    assert net.weight.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_names_of_arrays_are_escaped():
    arrays("a.npz", **{"weight\n": np.zeros((2, 3)), "bias": np.zeros(2)})
    with pytest.raises(UsageError, match="it lacks weight") as caught:
        load_weights("a.npz", into=nn.Linear(3, 2))
    assert str(caught.value).isprintable()
