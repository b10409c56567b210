"""What a file of tensors holds is told without torch, and what cannot be loaded is refused so too."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save

from fl_core.storage import schema

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


def is_loaded(dtype):
    try:
        return (
            schema.tensors(save({"x": torch.zeros(2, dtype=dtype)}))["x"].dtype == dtype
        )
    except (
        KeyError,
        RuntimeError,
        ValueError,
    ):  # a type that has no zeros, is not saved, or is not loaded
        return False


@pytest.mark.parametrize("dtype", [*filter(is_loaded, DTYPES)], ids=str)
def test_types_are_those_that_torch_loads(dtype):
    stored = save({"x": torch.zeros(2, dtype=dtype), "a|b": torch.zeros(0, 3)})
    assert schema.types(stored) == {
        "x": str(dtype).removeprefix("torch."),
        "a|b": "float32",
    }


def file(data=b"\0" * 8, **tensors):
    """A safetensors file with any header: each tensor's type, shape and place."""
    places = {
        name: dict(zip(("dtype", "shape", "data_offsets"), each, strict=True))
        for name, each in tensors.items()
    }
    header = json.dumps(places).encode()
    return len(header).to_bytes(8, "little") + header + data


def test_a_sound_file():
    assert schema.types(file(x=("F32", [2], [0, 8]))) == {"x": "float32"}
    assert schema.tensors(file(x=("F32", [2], [0, 8])))["x"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        pytest.param(b"", "too small", id="nothing"),
        pytest.param(b"\0" * 8, "invalid JSON", id="no header"),
        pytest.param((4).to_bytes(8, "little") + b"{{{{", "invalid JSON", id="no JSON"),
        pytest.param(
            (2**43).to_bytes(8, "little") + b"{}",
            "at most 16,777,216 bytes; got 8,796,093,022,208",
            id="a header longer than the file",
        ),
        pytest.param(
            file(x=("F32", [3], [0, 8])), "invalid shape", id="a shape of another size"
        ),
        pytest.param(
            file(x=("F32", [2**40, 2**40], [0, 8])),
            "overflow",
            id="a shape beyond all memory",
        ),
        pytest.param(
            file(x=("F32", [4], [0, 16])), "fully covered", id="a place beyond the file"
        ),
        pytest.param(
            file(x=("F32", [1], [0, 4])), "fully covered", id="bytes of no tensor"
        ),
        pytest.param(file(x=("F32", [1], [4, 8])), "offset.*`x`", id="a gap"),
        pytest.param(
            file(x=("F32", [2], [0, 8]), y=("F32", [1], [4, 8])), "`y`", id="an overlap"
        ),
        pytest.param(file(x=("F33", [2], [0, 8])), "`F33`", id="an unknown type"),
        pytest.param(
            file(x=("F4", [16], [0, 8])), "'F4'", id="a type that torch does not load"
        ),
    ],
)
@pytest.mark.parametrize("read", [schema.types, schema.tensors])
def test_what_cannot_be_loaded_is_refused(stored, expected, read):
    with pytest.raises(ValueError, match=expected):
        read(stored)


def test_trees_are_parted_by_their_names():
    trees = {"model": {"fc|w": 1, "fc.b": 2}, "head": {}}
    assert schema.split_trees(schema.merge_trees(trees), trees) == trees
    with pytest.raises(ValueError, match=r"'model\|fc\|w'"):
        schema.split_trees(schema.merge_trees(trees), ["head"])
