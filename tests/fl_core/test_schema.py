"""A file of tensors that cannot be loaded is refused, and says why."""

import json

import pytest

from fl_core import storage


def file(**tensors):
    """A safetensors file with any header: each tensor's type, shape and place."""
    places = {
        name: dict(zip(("dtype", "shape", "data_offsets"), each, strict=True))
        for name, each in tensors.items()
    }
    header = json.dumps(places).encode()
    return len(header).to_bytes(8, "little") + header + b"\0" * 8


def test_a_sound_file():
    assert storage.tensors(file(x=("F32", [2], [0, 8])))["x"].tolist() == [0.0, 0.0]


def test_what_cannot_be_loaded_is_refused():
    for stored, expected in (
        (b"", "too small"),
        ((4).to_bytes(8, "little") + b"{{{{", "invalid JSON"),
        ((2**43).to_bytes(8, "little") + b"{}", "16,777,216 bytes; got 8,796,093"),
        (file(x=("F32", [3], [0, 8])), "invalid shape"),
        (file(x=("F32", [2**40, 2**40], [0, 8])), "overflow"),
        (file(x=("F32", [4], [0, 16])), "fully covered"),
        (file(x=("F32", [2], [0, 8]), y=("F32", [1], [4, 8])), "`y`"),
        (file(x=("F33", [2], [0, 8])), "`F33`"),
        (file(x=("F4", [16], [0, 8])), "'F4'"),
    ):
        with pytest.raises(ValueError, match=expected):
            storage.tensors(stored)


def test_trees_are_parted_by_their_names():
    trees = {"model": {"fc|w": 1, "fc.b": 2}, "head": {}}
    assert storage.split_trees(storage.merge_trees(trees), trees) == trees
    with pytest.raises(ValueError, match=r"'model\|fc\|w'"):
        storage.split_trees(storage.merge_trees(trees), ["head"])
