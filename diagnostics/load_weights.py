"""Weights that another framework stored, loaded into your own module.

:mod:`fl_core.models.weights` reads the files. This module knows folders, adapters and names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_core import storage
from fl_core.data import files
from fl_core.display import printable
from fl_core.errors import (
    ABOVE_0,
    UsageError,
    check_value,
    damaged,
    listing,
    needs_package,
    warn,
)
from fl_core.models import weights
from fl_core.tree import copied, plain

from .measurement import one_line

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")


def load_weights(
    path: Path | str, *, into: nn.Module, by_position: bool = False, key: str = ""
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
            Lightning or NVFlare; a file of safetensors; a folder of transformers or of peft; or an
            ``.npz`` with names of tensors or, with ``by_position``, of Flower.
        into: the module. All its tensors must be in the file, in the same shapes.
        by_position: take the arrays of an ``.npz`` in the order of the module's tensors.
        key: which of several states in a file is meant, such as ``ema``, ``params`` or ``teacher``.

    Raises:
        UsageError: the file is of another kind, refused, damaged, or its tensors do not fit. Nothing is loaded.
    """
    path, into = Path(path), plain(into)
    if by_position and path.suffix != ".npz":
        raise UsageError(
            f"by_position must be left out for files with names; got it with {path}. Leave out by_position=True."
        )
    target = into.state_dict(keep_vars=True)
    if path.is_dir():
        found, config = _folder(path)
        if config is not None:
            found = _with_adapters(into, found, config, path)
    elif path.is_file() and path.suffix == ".npz":
        found = _arrays(path, target, by_position)
    else:
        found = weights.read(path, key)
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


def _folder(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return the tensors of a folder of transformers or peft, and the configuration of its adapters, if any."""
    folder = storage.Folder(path)
    if folder.has("adapter_config.json"):
        name = "adapter_model.safetensors"
        found = folder.file(name if folder.has(name) else "adapter_model.bin")
        return weights.read(found), _json(folder, "adapter_config.json")
    index = "model.safetensors.index.json"
    if folder.has(index):
        names = _json(folder, index).get("weight_map")
        if not isinstance(names, dict):
            raise UsageError(f"{path}/{index} must have a weight_map; got none.")
        parts = [
            weights.read(folder.file(name))
            for name in sorted({*map(str, names.values())})
        ]
        return {name: t for part in parts for name, t in part.items()}, None
    for name in ("model.safetensors", "pytorch_model.bin"):
        if folder.has(name):
            return weights.read(folder.file(name)), None
    way = "Name a file."
    if folder.has(".metadata"):
        way = "Convert its shards by torch.distributed.checkpoint.format_utils.dcp_to_torch_save."
    raise UsageError(
        f"{path} must be a folder of transformers or peft; it has no model.safetensors, "
        f"pytorch_model.bin or adapter_config.json. {way}"
    )


def _json(folder: storage.Folder, name: str) -> dict[str, Any]:
    """Return the object in a folder's file of JSON."""
    with damaged(folder.path / name):
        found = storage.parsed_json(folder.read(name, storage.HEADER_BYTES))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    return found


# --- adapters of peft ------------------------------------------------------------------

_ADAPTER = re.compile(
    r"^base_model\.model\.(.+?)\.((lora_|ia3_)\w+)(\.weight|\.bias)?$"
)
"""The names of a folder's adapters: a module's path, and a part of the adapter."""
_HOW = (
    "lora_alpha",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "feedforward_modules",
)
"""Keys of a folder's configuration that say what its adapters compute. Targets and ranks are those of the tensors."""
_IDLE = (
    *("auto_mapping", "base_model_name_or_path", "bias", "exclude_modules"),
    *("inference_mode", "init_lora_weights", "init_ia3_weights", "layers_pattern"),
    *(
        "layers_to_transform",
        "lora_dropout",
        "modules_to_save",
        "peft_type",
        "revision",
    ),
    *("peft_version", "r", "rank_pattern", "target_modules", "task_type"),
)
"""Keys that the loaded tensors already answer."""


def _with_adapters(
    into: nn.Module, found: Mapping[str, Tensor], config: dict[str, Any], path: Path
) -> dict[str, Tensor]:
    """Return the module's tensors with a folder's adapters merged by peft, and the tensors that it trained whole.

    A module of peft gets the adapters themselves.
    """
    where = f"{path}/adapter_config.json"
    try:
        import peft
    except ImportError:
        raise needs_package(
            "peft", f"load {next(iter(found), path)!r}", "lora"
        ) from None
    _check_config(config, where, peft)
    own = getattr(into, "peft_config", None)
    adapters = {name: t for name, t in found.items() if own or _ADAPTER.match(name)}
    if own:
        mine = vars(next(iter(own.values())))
        for key in ("r", *_HOW):
            given, known = config.get(key) or None, mine.get(key) or None
            if isinstance(known, set):
                given, known = sorted(given or ()), sorted(known)
            if key in mine and given != known:
                raise UsageError(
                    f"{key} of {where} must be that of the module; got {given!r} instead of {known!r}."
                )
        wrapped: Any = copied(into)
    else:
        wrapped = _wrapped(into, adapters, config, where, peft)
    with one_line(f"adapters in {path} must fit the module"):
        result = peft.set_peft_model_state_dict(wrapped, adapters)
    unused = getattr(result, "unexpected_keys", [])
    keys = getattr(result, "missing_keys", [])
    lacking = [key for key in keys if ".lora_" in key or ".ia3_" in key]
    if unused or lacking:
        raise UsageError(
            f"adapters in {path} must fit the module; {sorted([*unused, *lacking])[0]!r} does not. Build the model "
            "that they were trained on."
        )
    if own:
        return dict(wrapped.state_dict())
    merged = dict(wrapped.merge_and_unload().state_dict())
    for name in found.keys() - adapters.keys():
        inside = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if inside not in merged:
            raise UsageError(
                f"{path} must hold tensors of the module; got {name!r}. Build the model that was trained."
            )
        merged[inside] = found[name]
    return merged


def _check_config(config: Mapping[str, Any], where: str, peft: Any) -> None:
    """Refuse what would compute something else than is read here."""
    kind = config.get("peft_type", "LORA")
    if kind not in ("LORA", "IA3"):
        raise UsageError(
            f"peft_type of {where} must be LORA or IA3; got {printable(str(kind))!r}. Merge it where it was trained."
        )
    for name in ("r", "lora_alpha"):
        check_value(f"{name} of {where}", config.get(name) or 1, ABOVE_0)
    usual = {
        each.name: each.default
        for each in fields(peft.LoraConfig if kind == "LORA" else peft.IA3Config)
    }
    others = [
        key
        for key, value in config.items()
        if value and key not in (*_HOW, *_IDLE) and value != usual.get(key)
    ]
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool) and start != "gaussian":
        others.append("init_lora_weights")  # such as pissa, which changes the base
    patterns = [config.get("alpha_pattern") or {}, config.get("rank_pattern") or {}]
    plain_text = all(isinstance(each, dict) for each in patterns) and all(
        re.fullmatch(r"\^?[\w.]+", key) for each in patterns for key in each
    )
    forward = config.get("feedforward_modules") or []
    if others or not plain_text or not isinstance(forward, list):
        what = others[0] if others else "a regular expression"
        raise UsageError(
            f"{where} must describe adapters by known keys and module paths; got {printable(what)}. Merge them where "
            "they were trained."
        )


def _wrapped(
    into: nn.Module,
    adapters: Mapping[str, Tensor],
    config: Mapping[str, Any],
    where: str,
    peft: Any,
) -> Any:
    """Return a copy of the module with adapters at the paths and with the ranks of the tensors."""
    modules = dict(into.named_modules())
    ranks: dict[str, int] = {}
    told = {config.get("r") or 8, *(config.get("rank_pattern") or {}).values()}
    for name, tensor in adapters.items():
        fit = _ADAPTER.match(name)
        assert fit is not None
        path, part = fit[1], fit[2]
        module = modules.get(path)
        if module is None or not isinstance(getattr(module, "weight", None), Tensor):
            raise UsageError(
                f"adapters of {where} must fit linear layers of the module; {name!r} does not. Build the model that "
                "they were trained on."
            )
        rank = tensor.shape[1] if part == "lora_embedding_B" else tensor.shape[0]
        if part in ("lora_A", "lora_embedding_A"):
            ranks[path] = rank
            if rank not in told or rank > max(module.weight.shape):
                raise UsageError(
                    f"r of {where} must be the rank of {name!r}; got {rank}."
                )
        ranks.setdefault(path, 1)
    how = {key: config[key] for key in _HOW if config.get(key)}
    ends = how.pop("feedforward_modules", [])
    if config.get("peft_type") == "IA3":
        forward = [
            path for path in ranks if f".{path}".endswith(tuple(f".{e}" for e in ends))
        ]
        made: Any = peft.IA3Config(target_modules=[*ranks], feedforward_modules=forward)
    else:
        exact = {f"^{re.escape(path)}": rank for path, rank in ranks.items()}
        made = peft.LoraConfig(r=1, target_modules=[*ranks], rank_pattern=exact, **how)
    with one_line(f"adapters of {where} must fit the module"):
        return peft.get_peft_model(copied(into), made)


# --- names -----------------------------------------------------------------------------


def _arrays(
    path: Path, target: Mapping[str, Tensor], by_position: bool
) -> dict[str, Tensor]:
    """Return the arrays of an ``.npz``, by their names or by the module's."""
    headers = files.headers(path)
    names = list(headers)
    for name, (_, dtype) in headers.items():
        if dtype.kind not in "biuf":
            raise UsageError(
                f"array {printable(name)!r} of {path} must be numbers; got {dtype}."
            )
    arrays = files.read_arrays(path, names).values()
    if by_position:
        if len(names) != len(target):
            raise UsageError(
                f"{path} must have one array for each of the module's {len(target)} tensors; "
                f"got {len(names)}: {printable(listing(names, 4))}."
            )
        warn(f"{path}: arrays are taken in the order of the module's state_dict()")
        names = list(target)
    elif "arr_0" in headers:
        raise UsageError(
            f"{path} has arrays without names of tensors. Pass by_position=True "
            "if they are in the order of the module's state_dict()."
        )
    return dict(zip(names, map(torch.as_tensor, arrays), strict=True))


def _prefixes(found: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> list[str]:
    """Return the beginnings of the file's names before those of the module, the shortest first."""
    ends = list(target)[:3]
    starts = {
        name.removesuffix(end)
        for name in found
        for end in ends
        if name.endswith(f".{end}")
    }
    return sorted(starts, key=lambda start: (len(start), start))


def _fit(
    found: Mapping[str, Tensor], target: Mapping[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """Return the tensors by the module's names, without what wrappers add to names."""
    found = {name.replace("._orig_mod.", "."): tensor for name, tensor in found.items()}
    counts = {
        prefix: sum(f"{prefix}{name}" in found for name in target)
        for prefix in ("", *_prefixes(found, target))
    }
    stripped = max(counts, key=lambda prefix: counts[prefix])
    equal = [
        prefix for prefix in counts if prefix and counts[prefix] == counts[stripped]
    ]
    if stripped and len(equal) > 1:
        raise UsageError(
            f"{path} must have one state for the module; got names that begin with "
            f"{listing(map(repr, equal))}. Name one by key=."
        )
    best = {
        name.removeprefix(stripped): tensor
        for name, tensor in found.items()
        if name.startswith(stripped)
    }
    known = {id(tensor): name for name, tensor in target.items() if name in best}
    for (
        name,
        tensor,
    ) in target.items():  # a tied tensor may be stored under another name
        if name not in best and id(tensor) in known:
            best[name] = best[known[id(tensor)]]
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
    notes = [f"stripped {stripped!r} from names"] if stripped else []
    extra = [n for n in found if n.removeprefix(stripped) not in target]
    if extra:
        notes.append(f"left out {listing(extra, 4)}")
    if notes:
        warn(f"{path}: {'; '.join(notes)}")
    return best
