"""Weights that another framework stored, loaded into your own module.

Files of torch are read by ``torch.load(weights_only=True)`` alone. A pickled module is
read so too: every name that torch does not know becomes an inert stub. No code of a file
runs. This is the only place of the project that reads a foreign pickle.
"""

from __future__ import annotations

import json
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_core.errors import UsageError, listing, warn
from fl_core.tree import plain

from .measurement import one_line

WRAPPERS = ("model", "state_dict", "model_state", "model_state_dict", "net")
"""Keys under which a checkpoint holds its weights."""
PREFIXES = ("module.", "_orig_mod.", "model.", "net.")
"""Beginnings of names that wrappers add."""
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
REFUSED = frozenset(("os", "posix", "nt", "sys", "subprocess", "builtins"))
ALLOWED = frozenset(f"builtins.{name}" for name in ("getattr", "dict", "list", "set"))
DEEPEST = 100
"""Modules within each other, at most."""


class Stub:
    """An object of a class that this process does not know. It keeps its state and does nothing."""

    state: Any = None

    def __new__(cls, *_: Any, **__: Any) -> Stub:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Stub:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


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
    elif not path.is_file():
        raise UsageError(f"weights must be a file or a folder; {path} does not exist.")
    elif path.suffix == ".npz":
        found = _by_position(path, target, by_position)
    elif path.suffix == ".safetensors":
        found = _safetensors(path)
    else:
        found = _read_torch(path)
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
            model = load_weights(path, into=build(), by_position=by_position)
            models.setdefault(number, {})[fits["client"]] = model
    if not models:
        names = listing(sorted(p.name for p in folder.glob("*")), 4)
        raise UsageError(
            f"pattern must fit files in {folder}; {pattern!r} fits none of {names}."
        )
    return models


# --- files of torch --------------------------------------------------------------------


def _read_torch(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of ``torch.save``, by name."""
    names = _foreign_names(path)
    stubs = {name: type(name.rpartition(".")[2], (Stub,), {}) for name in names}
    known = torch.serialization.safe_globals([(s, n) for n, s in stubs.items()])
    with one_line(f"{path} must be a file of torch.save"), known:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        found = dict(_tensors(_unwrap(stored), "", 0))
    whole = path.stat().st_size
    if sum(tensor.nbytes for tensor in found.values()) > whole:
        raise UsageError(
            f"{path} must hold its tensors; they claim more than the file."
        )
    if not found:
        raise UsageError(f"{path} must hold tensors by name; got none.")
    if names:
        warn(f"{path}: read as inert stubs: {listing(sorted(names), 6)}")
    return found


def _foreign_names(path: Path) -> list[str]:
    """Return the names in a file's pickle that torch does not know.

    Raises:
        UsageError: the file is of the old format, packed, or has a name that is refused.
    """
    if not zipfile.is_zipfile(path):
        raise UsageError(
            f"{path} must be a file of torch.save since torch 1.6; got another. Load it "
            "where it was made, and save its state_dict() again."
        )
    with one_line(f"{path} must be a file of torch.save"):
        with zipfile.ZipFile(path) as stored:
            parts = stored.infolist()
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                raise UsageError(
                    f"{path} must not be packed. Save its state_dict() again."
                )
            if sum(part.file_size for part in parts) > path.stat().st_size:
                raise UsageError(
                    f"{path} must hold its parts; they claim more than the file."
                )
            pickles = [p.filename for p in parts if p.filename.endswith("data.pkl")]
            if len(pickles) != 1:
                raise UsageError(
                    f"{path} must be a file of torch.save; got another archive."
                )
            every = {
                str(argument).replace(" ", ".")
                for code, argument, _ in pickletools.genops(stored.read(pickles[0]))
                if code.name == "GLOBAL"
            }
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    for name in sorted(every):
        if name.partition(".")[0] in REFUSED and name not in ALLOWED:
            raise UsageError(f"{path} must not name {name}. It is no file of weights.")
    return names


def _unwrap(stored: Any) -> Any:
    """Return the weights within the dicts that checkpoints put around them."""
    for _ in range(len(WRAPPERS)):
        inside = next(
            (
                stored[key]
                for key in WRAPPERS
                if isinstance(stored, Mapping)
                and isinstance(stored.get(key), Mapping | Stub)
            ),
            None,
        )
        if inside is None:
            return stored
        stored = inside
    return stored


def _tensors(stored: Any, prefix: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a state dict's tensors, or those that a module has in its registered tables."""
    if depth > DEEPEST:
        raise UsageError(f"modules must be at most {DEEPEST} deep; got more.")
    if not isinstance(stored, Stub):
        pairs = stored.items() if isinstance(stored, Mapping) else ()
        yield from ((str(k), own) for k, v in pairs if (own := _own(v)) is not None)
        return
    state = stored.state if isinstance(stored.state, dict) else {}
    passing = state.get("_non_persistent_buffers_set") or ()
    for table in ("_parameters", "_buffers"):
        for name, value in _table(state, table):
            own = _own(value)
            if own is not None and not (table == "_buffers" and name in passing):
                yield f"{prefix}{name}", own
    for name, module in _table(state, "_modules"):
        if isinstance(module, Stub):
            yield from _tensors(module, f"{prefix}{name}.", depth + 1)


def _table(state: Mapping[Any, Any], name: str) -> Iterator[tuple[Any, Any]]:
    held = state.get(name)
    return iter(dict.items(held) if isinstance(held, dict) else ())


def _own(value: Any) -> Tensor | None:
    """Return a tensor's numbers in memory of their own; None for anything else."""
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    if type(value) not in (Tensor, nn.Parameter):
        return None
    tensor = Tensor.detach(value)  # a file may have set attributes on the object itself
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise UsageError("tensors must be dense numbers in memory; got another kind.")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise UsageError(
            "a tensor must have no more elements than are stored; got more."
        )
    return tensor.clone()


# --- other files -----------------------------------------------------------------------


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} must be a file of safetensors: {error}") from error


def _folder(path: Path) -> tuple[dict[str, Tensor], float]:
    """Return the tensors of a folder of transformers or peft, and the scale of its adapters; 0 without."""
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        config = json.loads(adapter.read_text(encoding="utf-8"))
        rank = max(int(config.get("r") or 1), 1)
        by = rank**0.5 if config.get("use_rslora") else rank
        file = path / "adapter_model.safetensors"
        found = (
            _safetensors(file)
            if file.exists()
            else _read_torch(file.with_suffix(".bin"))
        )
        return found, float(config.get("lora_alpha") or rank) / by
    index = path / "model.safetensors.index.json"
    if index.is_file():
        stored = json.loads(index.read_text(encoding="utf-8"))
        files = sorted({Path(str(name)).name for name in stored["weight_map"].values()})
        parts = [_safetensors(path / name) for name in files]
        return {name: t for part in parts for name, t in part.items()}, 0.0
    if (path / "model.safetensors").is_file():
        return _safetensors(path / "model.safetensors"), 0.0
    if (path / "pytorch_model.bin").is_file():
        return _read_torch(path / "pytorch_model.bin"), 0.0
    raise UsageError(
        f"{path} must be a folder of transformers or peft; it has no model.safetensors, "
        "pytorch_model.bin or adapter_config.json. Name a file."
    )


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
        if weight not in merged or high is None or low.ndim != 2:
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
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = [torch.as_tensor(stored[name]) for name in stored.files]
    except (ValueError, OSError, zipfile.BadZipFile, TypeError) as error:
        raise UsageError(f"{path} must be an .npz of numbers: {error}") from error
    if len(arrays) != len(target):
        raise UsageError(
            f"{path} must have one array for each of the module's {len(target)} tensors; "
            f"got {len(arrays)}."
        )
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
