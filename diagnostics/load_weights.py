"""Weights that another framework stored, loaded into your own module.

:mod:`fl_core.models.weights` reads the files. This module knows folders, adapters and names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_core import storage
from fl_core.data import files
from fl_core.display import printable
from fl_core.errors import ABOVE_0, UsageError, check_value, damaged, listing, warn
from fl_core.models import weights
from fl_core.tree import plain

PREFIXES = ("module.", "_orig_mod.", "model.", "net.")
"""Beginnings of names that wrappers add."""
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")


def load_weights(
    path: Path | str, *, into: nn.Module, by_position: bool = False
) -> nn.Module:
    """Load the weights at ``path`` into a module, and return it.

    What was stripped from names, and what was left out, is said in a warning.

    >>> import torch
    >>> net = nn.Linear(3, 2)
    >>> torch.save({"state_dict": {"module." + k: v for k, v in net.state_dict().items()}}, "net.pt")
    >>> fresh = load_weights("net.pt", into=nn.Linear(3, 2))
    >>> torch.equal(fresh.weight, net.weight)
    True

    Args:
        path: a state dict of torch, wrapped or prefixed; a pickled module (PFLlib, FL4Health); a checkpoint of
            Lightning or NVFlare; a file of safetensors; a folder of transformers or of peft; or, with
            ``by_position``, an ``.npz`` of Flower.
        into: the module. All its tensors must be in the file, in the same shapes.
        by_position: take the arrays of an ``.npz`` in the order of the module's tensors.

    Raises:
        UsageError: the file is of another kind, refused, damaged, or its tensors do not fit. Nothing is loaded.
    """
    if not isinstance(path, str | Path):
        raise UsageError(
            f"path must be a file or a folder; got {type(path).__name__}. Load a state dict by "
            "module.load_state_dict."
        )
    if not isinstance(into, nn.Module):
        raise UsageError(f"into must be a module; got {into!r}. Build one first.")
    path, into = Path(path), plain(into)
    if by_position and path.suffix != ".npz":
        raise UsageError(
            f"by_position must be left out for files with names; got it with {path}. Leave out by_position=True "
            "(--by-position)."
        )
    target = into.state_dict()
    if path.is_dir():
        found, scale = _folder(path)
        if scale:
            found = _merged(target, found, scale, path)
    elif path.is_file() and path.suffix == ".npz":
        found = _by_position(path, target, by_position)
    else:
        found = weights.read(path)
    fitting = _fit(found, target, path)
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(fitting[name])
    return into


def folder_kind(path: Path | str) -> str:
    """Return what a folder is that is no run, or ""."""
    path = Path(path)
    for name, kind in (
        ("adapter_config.json", "a folder of peft"),
        ("model.safetensors", "a folder of transformers"),
        ("model.safetensors.index.json", "a folder of transformers"),
        ("pytorch_model.bin", "a folder of transformers"),
    ):
        if (path / name).is_file():
            return kind
    kinds = {entry.suffix for entry in path.glob("*")}
    only = kinds and kinds <= {*SUFFIXES, ".safetensors", ".npz", ".pkl"}
    return "a folder of weights" if only else ""


def load_clients(
    folder: Path | str,
    pattern: str,
    build: Callable[[], nn.Module],
    *,
    by_position: bool = False,
) -> dict[int, dict[str, nn.Module]]:
    """Return the models of a folder by round and client.

    >>> import torch
    >>> from pathlib import Path
    >>> Path("server").mkdir()
    >>> for name in ("north", "south"):
    ...     torch.save(nn.Linear(3, 2).state_dict(), f"server/client_{name}_3.pt")
    >>> models = load_clients("server", "client_{client}_{round}.pt", lambda: nn.Linear(3, 2))
    >>> {number: sorted(found) for number, found in models.items()}
    {3: ['north', 'south']}

    Args:
        pattern: the files' names below the folder, with ``{client}``, and ``{round}`` if there are several.
        build: makes a new module.

    Raises:
        UsageError: the pattern lacks ``{client}``, no file fits, or a file cannot be loaded.
    """
    folder = Path(folder)
    if pattern.count("{client}") != 1:
        raise UsageError(f"pattern must have {{client}} once; got {pattern!r}.")
    form = re.escape(pattern).replace(r"\{client\}", "(?P<client>[^/]+?)")
    form = form.replace(r"\{round\}", r"(?P<round>\d+)")
    models: dict[int, dict[str, nn.Module]] = {}
    for path in sorted(folder.rglob("*")):
        fits = re.fullmatch(form, path.relative_to(folder).as_posix())
        if fits:
            number = int(fits.groupdict().get("round") or 0)
            storage.Folder(folder).file(path.relative_to(folder).as_posix())
            model = load_weights(path, into=build(), by_position=by_position)
            models.setdefault(number, {})[fits["client"]] = model
    if not models:
        names = listing(sorted(p.name for p in folder.glob("*")), 4)
        raise UsageError(
            f"pattern must fit files in {folder}; {pattern!r} fits none of {names}."
        )
    return models


# --- other files -----------------------------------------------------------------------


def _folder(path: Path) -> tuple[dict[str, Tensor], float]:
    """Return the tensors of a folder of transformers or peft, and the scale of its adapters; 0 without."""
    folder = storage.Folder(path)
    if folder.has("adapter_config.json"):
        config = _json(folder, "adapter_config.json")
        rank = config.get("r") or 1
        alpha = config.get("lora_alpha") or rank
        for name, value in (("r", rank), ("lora_alpha", alpha)):
            check_value(f"{name} of {path}/adapter_config.json", value, ABOVE_0)
        name = "adapter_model.safetensors"
        found = folder.file(name if folder.has(name) else "adapter_model.bin")
        by = rank**0.5 if config.get("use_rslora") else rank
        return weights.read(found), alpha / by
    index = "model.safetensors.index.json"
    if folder.has(index):
        names = _json(folder, index).get("weight_map")
        if not isinstance(names, dict):
            raise UsageError(f"{path}/{index} must have a weight_map; got none.")
        parts = [
            weights.read(folder.file(name))
            for name in sorted({*map(str, names.values())})
        ]
        return {name: t for part in parts for name, t in part.items()}, 0.0
    for name in ("model.safetensors", "pytorch_model.bin"):
        if folder.has(name):
            return weights.read(folder.file(name)), 0.0
    raise UsageError(
        f"{path} must be a folder of transformers or peft; it has no model.safetensors, "
        "pytorch_model.bin or adapter_config.json. Name a file."
    )


def _json(folder: storage.Folder, name: str) -> dict[str, Any]:
    """Return the object in a folder's file of JSON."""
    with damaged(folder.path / name):
        found = storage.parsed_json(folder.read(name, storage.HEADER_BYTES))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    return found


def _merged(
    target: Mapping[str, Tensor], found: Mapping[str, Tensor], scale: float, path: Path
) -> dict[str, Tensor]:
    """Return the module's tensors with a folder of peft's adapters added, W + scale B A.

    A module of peft gets the adapters themselves.
    """
    known = {name.replace(".default.", "."): name for name in target}
    if any(name in known for name in found):
        own = {known[name]: t for name, t in found.items() if name in known}
        return {**target, **own}
    merged = dict(target)
    for name, low in found.items():
        if ".lora_A." not in name:
            continue
        weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
        high = found.get(name.replace(".lora_A.", ".lora_B."))
        shapes = None if high is None else (high.shape[:1] + low.shape[1:])
        if weight not in merged or high is None or merged[weight].shape != shapes:
            raise UsageError(
                f"adapters in {path} must fit linear layers of the module; {name!r} does "
                f"not. Build the model that they were trained on."
            )
        merged[weight] = merged[weight] + scale * (high.float() @ low.float())
    return merged


def _by_position(
    path: Path, target: Mapping[str, Tensor], by_position: bool
) -> dict[str, Tensor]:
    if not by_position:
        raise UsageError(
            f"{path} has arrays without names of tensors. Pass by_position=True "
            "(--by-position) if they are in the order of the module's state_dict()."
        )
    headers = files.headers(path)
    if len(headers) != len(target):
        raise UsageError(
            f"{path} must have one array for each of the module's {len(target)} tensors; "
            f"got {len(headers)}: {printable(listing(headers, 4))}."
        )
    for name, (_, dtype) in headers.items():
        if dtype.kind not in "biuf":
            raise UsageError(
                f"array {printable(name)!r} of {path} must be numbers; got {dtype}."
            )
    arrays = map(torch.as_tensor, files.read_arrays(path, list(headers)).values())
    warn(f"{path}: arrays are taken in the order of the module's state_dict()")
    return dict(zip(target, arrays, strict=True))


def _fit(
    found: Mapping[str, Tensor], target: Mapping[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """Return the tensors by the module's names, without what wrappers add to names."""
    found = {name.replace("._orig_mod.", "."): tensor for name, tensor in found.items()}
    best, stripped = dict(found), ""
    tried = [("", dict(found))]
    for _ in range(3):
        tried = [
            (before + p, {k[len(p) :]: v for k, v in names.items() if k.startswith(p)})
            for before, names in tried
            for p in PREFIXES
        ]
        for prefix, names in tried:
            if len(names.keys() & target.keys()) > len(best.keys() & target.keys()):
                best, stripped = names, prefix
    missing = [name for name in target if name not in best]
    if missing:
        raise UsageError(
            f"{path} must have all tensors of the module; it lacks {listing(missing, 4)}, "
            f"and has {listing(sorted(best), 4)}. Build the model that was trained."
        )
    for name, tensor in target.items():
        if best[name].shape != tensor.shape:
            raise UsageError(
                f"{path}: {name!r} must be {list(tensor.shape)} as in the module; got "
                f"{list(best[name].shape)}."
            )
    left = len(found) - len(target)
    notes = [f"stripped {stripped!r} from names"] if stripped else []
    if left > 0:
        extra = [n for n in found if n.removeprefix(stripped) not in target]
        notes.append(f"left out {listing(extra, 4)}")
    if notes:
        warn(f"{path}: {'; '.join(notes)}")
    return best
