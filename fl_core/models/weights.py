"""Loading of initial weights from a file. Every tensor must fit."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_core import limits, tree
from fl_core.errors import UsageError, listing
from fl_core.storage import blobs


def copy_into(model: nn.Module, stored: Mapping[str, Tensor], where: str) -> None:
    """Copy a state dict into ``model``. Error messages call it ``where``.

    Tied tensors may be stored under any of their names, or under several names if the values agree.

    Raises:
        UsageError: a name or shape does not fit. The message names the first.
    """
    names: dict[int, list[str]] = {}
    wanted = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    for name, tensor in wanted.items():
        names.setdefault(id(tensor), []).append(name)
    missing = [
        tied[0] for tied in names.values() if not any(name in stored for name in tied)
    ]
    unexpected = [name for name in stored if name not in wanted]
    problems = [
        f"{what}: {listing(keys, 4)}"
        for what, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    ]
    if problems:
        raise UsageError(
            f"weights in {where} must fit the model; got others: {'; '.join(problems)}."
        )
    for name, tensor in stored.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"{tuple(tensor.shape)} in {where}, {tuple(wanted[name].shape)} in the model"
            raise UsageError(f"tensor {name!r} must have the same shape; got {shapes}.")
    for tied in names.values():
        first, *rest = [name for name in tied if name in stored]
        for name in rest:
            if not torch.equal(stored[first], stored[name]):
                raise UsageError(
                    f"tied tensors {first!r} and {name!r} must have the same values; got different ones in {where}."
                )
    tree.assign({name: wanted[name] for name in stored}, stored)


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a state-dict file, on the CPU, without running any code from it.

    Args:
        path: a .safetensors file, or one that torch.load reads with ``weights_only=True``.

    Raises:
        UsageError: the file is missing, or not a state dict.
    """
    if not path.is_file():
        raise UsageError(
            f"weights must be a file; got {path}, which does not exist. Check the path."
        )
    limits.check_size(path, path.stat().st_size)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                limits.check_unpacked(
                    path,
                    path.stat().st_size,
                    sum(entry.file_size for entry in archive.infolist()),
                )
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                blobs.check_header(file.read(8 + blobs.HEADER))
            return load_file(path)
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except Exception as error:  # errors for damaged files have no common type
        first_line = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"{path} must be a readable file of weights: {first_line}. Save it again."
        ) from error
    if not isinstance(stored, dict) or not all(
        isinstance(value, Tensor) for value in stored.values()
    ):
        held = (
            f"keys {listing(map(str, stored), 6)}"
            if isinstance(stored, dict)
            else type(stored).__name__
        )
        raise UsageError(f"{path} must be a state dict, names to tensors; got {held}.")
    return stored
