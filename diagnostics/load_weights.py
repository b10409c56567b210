"""Weights that another framework stored, loaded into your own module.

:mod:`fl_core.models.weights` reads the files. This module knows folders, adapters and names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import chain
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
from fl_core.models.adapter import check_real
from fl_core.run.initial import copy_into, strict_state
from fl_core.seeds import torch_seeded
from fl_core.tree import Tree, copied, plain

from .measurement import one_line

SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".tar", ".pkl", ".npz", ".safetensors"}
WHOLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"
"""The files of weights in a folder of transformers are named :data:`WHOLE`.

If there are several, an index lists them. Its name ends in :data:`INDEX`.
"""
WRAPPED = re.compile(
    r"(?<=\.)_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\."
)
"""What compiling, sharding and checkpointing add inside the names of tensors."""


def load_weights(
    path: Path | str, *, into: nn.Module, by_position: bool = False, key: str = ""
) -> nn.Module:
    """Load the weights at ``path`` into a module in place, and return the module.

    A warning lists prefixes that were stripped from names, and tensors that were left out.

    >>> import torch
    >>> net = nn.Linear(3, 2)
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> torch.save({"state_dict": {"module." + k: v for k, v in net.state_dict().items()}}, f"{folder.name}/net.pt")
    >>> fresh = load_weights(f"{folder.name}/net.pt", into=nn.Linear(3, 2))
    >>> torch.equal(fresh.weight, net.weight)
    True
    >>> load_weights(f"{folder.name}/net.pt", into=nn.Linear(3, 2, device="meta"))
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: 'weight' of Linear must have a shape and numbers; got none yet. ...

    Args:
        path: a state dict of torch, wrapped or prefixed; a pickled module (PFLlib, FL4Health); a checkpoint of
            Lightning or NVFlare; a file of safetensors; a folder of transformers or of peft; or an
            ``.npz`` with names of tensors or, with ``by_position``, of Flower.
        into: the module. All its tensors must be in the file, in the same shapes. A
            folder of peft has adapters alone. They are merged into the module's own
            weights, so load the pretrained weights first. The adapters of a peft module
            are not merged.
        by_position: take the arrays of an ``.npz`` in the order of the module's tensors.
        key: the name of one of several states in a file, such as ``ema``, ``params`` or ``teacher``.

    Returns:
        The module. If it is wrapped by ``DataParallel`` or ``torch.compile``, the inner
        module is returned.

    Raises:
        UsageError: the file is missing, of another kind, refused, damaged, or its
            tensors do not fit. Nothing is loaded.
        CorruptError: a folder's file of JSON is damaged.
    """
    path, into = Path(path), plain(into)
    if by_position and path.suffix != ".npz":
        raise UsageError(
            f"by_position must be left out for files with names; got it with {path}. Leave out by_position=True."
        )
    check_real(into)
    target = into.state_dict(keep_vars=True)
    if path.is_dir():
        tensors, config = _folder(path, key)
        if config is not None:
            tensors = _with_adapters(into, tensors, config, path)
        elif hasattr(into, "base_model_prefix") and not target.keys() <= tensors.keys():
            tensors = _as_transformers(into, tensors, path)
    elif path.is_file() and path.suffix == ".npz":
        tensors = _arrays(path, target, by_position)
    else:
        tensors = weights.read(path, key)
    copy_into(into, _fit(into, tensors, target, path), str(path))
    return into


def folder_kind(path: Path | str) -> str:
    """Return the kind of a folder of weights in words; empty for other folders.

    It is ``a folder of transformers or peft``, or ``a folder of weights`` if it has
    entries and all end as files of weights do, such as ``.pt``.
    """
    path = Path(path)
    for name in ("adapter_config.json", *WHOLE):
        if (path / name).is_file() or (path / f"{name}{INDEX}").is_file():
            return "a folder of transformers or peft"
    kinds = {entry.suffix for entry in path.glob("*")}
    if kinds and kinds <= SUFFIXES:
        return "a folder of weights"
    return ""


def load_clients(
    folder: Path | str,
    pattern: str,
    build: Callable[[], nn.Module],
    *,
    by_position: bool = False,
) -> dict[int, dict[str, nn.Module]]:
    """Return the models of a folder by round and client. Without ``{round}`` in the pattern the round is 0.

    Warnings are those of :func:`load_weights`.

    >>> import torch
    >>> from pathlib import Path
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> Path(f"{folder.name}/server").mkdir()
    >>> for name in ("north", "south"):
    ...     torch.save(nn.Linear(3, 2).state_dict(), f"{folder.name}/server/client_{name}_3.pt")
    >>> models = load_clients(f"{folder.name}/server", "client_{client}_{round}.pt", lambda: nn.Linear(3, 2))
    >>> {number: sorted(found) for number, found in models.items()}
    {3: ['north', 'south']}

    Args:
        folder: the folder. Its subfolders are searched, too.
        pattern: the files' paths below the folder. ``{client}`` stands for the client's
            name and ``{round}``, if there are several, for the number of the round.
        build: a function that makes a new module.
        by_position: as for :func:`load_weights`.

    Raises:
        UsageError: the pattern does not have ``{client}`` once, has ``{round}`` more than
            once, no file fits, or a file cannot be loaded.
        CorruptError: something else than a file fits the pattern, such as a folder.
    """
    folder = Path(folder)
    if pattern.count("{client}") != 1:
        raise UsageError(f"pattern must have {{client}} once; got {pattern!r}.")
    if pattern.count("{round}") > 1:
        raise UsageError(f"pattern must have {{round}} at most once; got {pattern!r}.")
    name_pattern = re.escape(pattern).replace(r"\{client\}", "(?P<client>[^/]+?)")
    name_pattern = name_pattern.replace(r"\{round\}", r"(?P<round>\d+)")
    models: dict[int, dict[str, nn.Module]] = {}
    for path in sorted(folder.rglob("*")):
        match = re.fullmatch(name_pattern, path.relative_to(folder).as_posix())
        if match:
            number = int(match.groupdict().get("round") or 0)
            name = path.relative_to(folder).as_posix()
            storage.Folder(folder, links=True).file(name)
            model = load_weights(path, into=build(), by_position=by_position)
            models.setdefault(number, {})[match["client"]] = model
    if not models:
        names = listing(sorted(p.name for p in folder.glob("*")), 4)
        raise UsageError(
            f"pattern must fit files in {folder}; {pattern!r} fits none of {names}."
        )
    return models


# --- other files -----------------------------------------------------------------------


def _folder(path: Path, key: str) -> tuple[Tree, dict[str, Any] | None]:
    """Return the tensors of a folder of transformers or peft, and peft's configuration.

    The configuration is None for a folder of transformers. A warning names files of
    weights that are not read.

    Raises:
        UsageError: the folder has no such files, or its index has no map of tensors.
        CorruptError: its file of JSON is damaged.
    """
    folder = storage.Folder(path, links=True)
    if folder.has("adapter_config.json"):
        name = "adapter_model.safetensors"
        file = folder.file(name if folder.has(name) else "adapter_model.bin")
        return weights.read(file, key), _json(folder, "adapter_config.json")
    for name in WHOLE:
        names, index = [name], f"{name}{INDEX}"
        if folder.has(index):
            file_of = _json(folder, index).get("weight_map")
            if not isinstance(file_of, dict):
                raise UsageError(f"{path}/{index} must have a weight_map; got none.")
            names = sorted({*map(str, file_of.values())})
        elif not folder.has(name):
            continue
        other_files = {file.name for file in path.iterdir() if file.suffix in SUFFIXES}
        if unread_files := sorted(other_files.difference(names)):
            unread = listing(map(printable, unread_files), 4)
            warn(f"{path}: not read: {unread}")
        tensors: Tree = {}
        n_tensors = 0
        for file_name in names:
            shard = weights.read(folder.file(file_name), key)
            n_tensors += len(shard)
            if n_tensors > weights.VISITS:
                raise UsageError(
                    f"{path} must have at most {weights.VISITS:,} tensors in its files; got more. Use a smaller model."
                )
            tensors |= shard
        return tensors, None
    advice = "Name a file."
    if folder.has(".metadata"):
        advice = "Convert its shards by torch.distributed.checkpoint.format_utils.dcp_to_torch_save."
    raise UsageError(
        f"{path} must be a folder of transformers or peft; it has no model.safetensors, "
        f"pytorch_model.bin or adapter_config.json. {advice}"
    )


def _json(folder: storage.Folder, name: str) -> dict[str, Any]:
    """Return the object in a folder's file of JSON.

    Raises:
        CorruptError: the file is no JSON, or holds no object.
    """
    with damaged(folder.path / name):
        content = storage.parsed_json(folder.read(name, storage.HEADER_BYTES))
        if not isinstance(content, dict):
            raise ValueError("it is no object")
    return content


def _as_transformers(into: Any, tensors: Tree, path: Path) -> Tree:
    """Return the tensors by the module's names, to which transformers translates them.

    A tensor that the module lacks keeps its name, and becomes an empty tensor. Tensors
    of the module that the file lacks are left out.

    Raises:
        UsageError: transformers cannot load the tensors into a module of this class.
    """
    with one_line(f"{path} must fit the module"), torch_seeded(0):
        model, info = type(into).from_pretrained(
            None, config=into.config, state_dict=tensors, output_loading_info=True
        )
    loaded_tensors = {
        n: t for n, t in model.state_dict().items() if n not in info["missing_keys"]
    }
    return dict.fromkeys(info["unexpected_keys"], torch.empty(0)) | loaded_tensors


# --- adapters of peft ------------------------------------------------------------------

_ADAPTER = re.compile(
    r"^base_model\.model\.(.+?)\.((lora_|ia3_)\w+)(\.weight|\.bias)?$"
)
"""The names of a folder's adapters: a module's path, and a part of the adapter."""
_HOW = "lora_alpha alpha_pattern r rank_pattern use_rslora use_dora fan_in_fan_out lora_bias feedforward_modules"
"""Keys of a folder's configuration that say what its adapters compute.

The names of the tensors say which modules have adapters.
"""
_IDLE = """auto_mapping base_model_name_or_path bias exclude_modules inference_mode init_lora_weights
init_ia3_weights layers_pattern layers_to_transform lora_dropout modules_to_save peft_type revision peft_version
target_modules task_type"""
"""Keys of a folder's configuration that the loaded tensors make superfluous."""


def _with_adapters(
    into: nn.Module, tensors: Tree, config: dict[str, Any], path: Path
) -> Tree:
    """Return the module's tensors with a folder's adapters merged by peft.

    The folder's other tensors, which were trained whole, replace the module's own. If
    the module is one of peft, its adapters get the folder's tensors, and nothing is
    merged.

    Raises:
        UsageError: peft is not installed, or configuration or tensors do not fit.
    """
    config_path = f"{path}/adapter_config.json"
    try:
        import peft
    except ImportError:
        first_found = next(iter(tensors), path)
        raise needs_package("peft", f"load {first_found!r}", "lora") from None
    _check_config(config, config_path, peft)
    configs = getattr(into, "peft_config", None)
    adapters = {
        name: t for name, t in tensors.items() if configs or _ADAPTER.match(name)
    }
    if configs:
        module_config = vars(next(iter(configs.values())))
        for key in _HOW.split():
            stored_value, expected_value = (
                config.get(key) or None,
                module_config.get(key) or None,
            )
            if isinstance(expected_value, set):
                stored_value, expected_value = (
                    sorted(stored_value or ()),
                    sorted(expected_value),
                )
            if key in module_config and stored_value != expected_value:
                raise UsageError(
                    f"{key} of {config_path} must be that of the module; "
                    f"got {stored_value!r} instead of {expected_value!r}."
                )
        wrapped_module: Any = copied(into)
    else:
        wrapped_module = _wrapped(into, adapters, config, config_path, peft)
    with one_line(f"adapters in {path} must fit the module"):
        result = peft.set_peft_model_state_dict(wrapped_module, adapters)
    unused_keys = getattr(result, "unexpected_keys", [])
    keys = getattr(result, "missing_keys", [])
    missing_keys = [key for key in keys if ".lora_" in key or ".ia3_" in key]
    if unused_keys or missing_keys:
        first_key = sorted([*unused_keys, *missing_keys])[0]
        raise UsageError(
            f"adapters in {path} must fit the module; {first_key!r} does not. Build the model "
            "that they were trained on."
        )
    if configs:
        return dict(wrapped_module.state_dict())
    merged_tensors = dict(wrapped_module.merge_and_unload().state_dict())
    for name in tensors.keys() - adapters.keys():
        inner_name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if inner_name not in merged_tensors:
            raise UsageError(
                f"{path} must hold tensors of the module; got {name!r}. Build the model that was trained."
            )
        merged_tensors[inner_name] = tensors[name]
    return merged_tensors


def _check_config(config: Mapping[str, Any], where: str, peft: Any) -> None:
    """Refuse a configuration of adapters with settings that this module does not read.

    Args:
        config: the folder's configuration.
        where: its path, for messages.
        peft: the package peft.

    Raises:
        UsageError: the kind of adapters or a key is unknown, a module path is a regular
            expression, or a rank or scale is not above 0. A value of ``r`` or
            ``lora_alpha`` that is missing or 0 passes.
    """
    kind = config.get("peft_type", "LORA")
    if kind not in ("LORA", "IA3"):
        kind_text = printable(str(kind))
        raise UsageError(
            f"peft_type of {where} must be LORA or IA3; got {kind_text!r}. Merge it where it was trained."
        )
    defaults = {
        field.name: field.default
        for field in fields(peft.LoraConfig if kind == "LORA" else peft.IA3Config)
    }
    keys = f"{_HOW} {_IDLE}".split()
    unread_keys = [
        key
        for key, value in config.items()
        if value and key not in keys and value != defaults.get(key)
    ]
    initial_weights = config.get("init_lora_weights", True)
    if not isinstance(initial_weights, bool) and initial_weights != "gaussian":
        unread_keys.append("init_lora_weights")  # such as pissa, which changes the base
    patterns = [config.get("alpha_pattern") or {}, config.get("rank_pattern") or {}]
    plain_text = all(isinstance(pattern, dict) for pattern in patterns)
    if plain_text:
        paths = chain.from_iterable(patterns)
        plain_text = all(re.fullmatch(r"\^?[\w.]+", path) for path in paths)
    forward = config.get("feedforward_modules") or []
    if unread_keys or not plain_text or not isinstance(forward, list):
        description = "a regular expression"
        if unread_keys:
            description = unread_keys[0]
        kind_text = printable(description)
        raise UsageError(
            f"{where} must describe adapters by known keys and module paths; got {kind_text}. Merge them where "
            "they were trained."
        )
    numbers = {"r": config.get("r") or 1, "lora_alpha": config.get("lora_alpha") or 1}
    for pattern in patterns:
        numbers |= pattern
    for name, number in numbers.items():
        check_value(f"{name} of {where}", number, ABOVE_0)


def _wrapped(
    into: nn.Module,
    adapters: Tree,
    config: Mapping[str, Any],
    where: str,
    peft: Any,
) -> Any:
    """Return a copy of the module with adapters, at the paths in the tensors' names.

    Raises:
        UsageError: the module at an adapter's path has no weight or shares it, a rank
            is larger than the widest of these modules, or peft refuses the adapters.
    """
    modules = dict(into.named_modules())
    weights_of = [id(p) for _, p in into.named_parameters(remove_duplicate=False)]
    paths = {}
    for name in adapters:
        path = _ADAPTER.sub(r"\1", name)
        weight = getattr(modules.get(path), "weight", None)
        if not isinstance(weight, Tensor) or weights_of.count(id(weight)) != 1:
            raise UsageError(
                f"adapters of {where} must fit linear layers of the module that share no weight; {name!r} does not. "
                "Build the model that they were trained on, or load them into a module of peft."
            )
        paths[path] = max(weight.shape)
    lora_options = {key: config[key] for key in _HOW.split() if config.get(key)}
    ranks = [lora_options.get("r", 1), *lora_options.get("rank_pattern", {}).values()]
    if max(ranks) > max(paths.values(), default=0):
        raise UsageError(
            f"r of {where} must be at most the width of a layer; got {max(ranks)}."
        )
    ends = tuple(f".{end}" for end in lora_options.pop("feedforward_modules", []))
    if config.get("peft_type") == "IA3":
        forward = [path for path in paths if f".{path}".endswith(ends)]
        peft_config: Any = peft.IA3Config(
            target_modules=[*paths], feedforward_modules=forward
        )
    else:
        peft_config = peft.LoraConfig(target_modules=[*paths], **lora_options)
    with one_line(f"adapters of {where} must fit the module"):
        return peft.get_peft_model(copied(into), peft_config)


# --- names -----------------------------------------------------------------------------


def _arrays(path: Path, target: Tree, by_position: bool) -> Tree:
    """Return the arrays of an ``.npz`` as tensors, by their names or by position.

    By position they get the names in ``target``, in its order.

    Raises:
        UsageError: an array does not hold numbers of at most 64 bits. By position, the
            numbers of arrays and tensors differ. By name, the arrays have no names.
    """
    headers = files.headers(path)
    names = list(headers)
    for name, (_, dtype) in headers.items():
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            shown_name = printable(name)
            raise UsageError(
                f"array {shown_name!r} of {path} must be numbers; got {dtype}."
            )
    arrays = files.read_arrays(path, names).values()
    if by_position:
        if len(names) != len(target):
            shown_names = printable(listing(names, 4))
            raise UsageError(
                f"{path} must have one array for each of the module's {len(target)} tensors; "
                f"got {len(names)}: {shown_names}."
            )
        warn(f"{path}: arrays are taken in the order of the module's state_dict()")
        names = list(target)
    elif "arr_0" in headers:
        raise UsageError(
            f"{path} has arrays without names of tensors. Pass by_position=True "
            "if they are in the order of the module's state_dict()."
        )
    native = (
        array.astype(array.dtype.newbyteorder("="), copy=False) for array in arrays
    )
    printed = map(printable, names)
    return dict(zip(printed, map(torch.as_tensor, native), strict=True))


def _fit(into: nn.Module, tensors: Tree, target: Tree, path: Path) -> Tree:
    """Return the tensors by the module's names, without what wrappers add to names.

    Tensors that the module lacks are left out, unless its own strict
    ``load_state_dict`` takes them. A warning names them, and a prefix that was removed.

    Raises:
        UsageError: a tensor of the module is missing, two prefixes fit equally well, or
            numbers of 8 bits are stored for a tensor of wider ones.
    """
    versions = {
        WRAPPED.sub("", f"{module}.").removesuffix("."): version
        for module, version in weights.versions_of(tensors).items()
    }
    tensors = weights.with_versions(
        {WRAPPED.sub("", name): tensor for name, tensor in tensors.items()}, versions
    )
    prefixes = {""}
    for end in list(target)[:3]:
        prefixes |= {n.removesuffix(end) for n in tensors if n.endswith(f".{end}")}
    counts = {
        start: sum(f"{start}{name}" in tensors for name in target)
        for start in sorted(prefixes, key=lambda start: (len(start), start))
    }
    stripped_prefix = max(counts, key=lambda prefix: counts[prefix])
    equal_prefixes = [
        prefix
        for prefix in counts
        if prefix and counts[prefix] == counts[stripped_prefix]
    ]
    if stripped_prefix and len(equal_prefixes) > 1:
        equal_names = listing(map(repr, equal_prefixes))
        raise UsageError(
            f"{path} must have one state for the module; got names that begin with "
            f"{equal_names}. Name one by key=."
        )
    fitted_tensors = {
        name.removeprefix(stripped_prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(stripped_prefix)
    }
    fitted_tensors = weights.with_versions(
        fitted_tensors, weights.versions_of(tensors, stripped_prefix)
    )
    is_strict = strict_state(into, fitted_tensors) is not None
    if not is_strict:
        fitted_tensors = {
            name: fitted_tensors[name] for name in target if name in fitted_tensors
        }
    covered_ids = {
        id(tensor) for name, tensor in target.items() if name in fitted_tensors
    }
    missing = [name for name, tensor in target.items() if id(tensor) not in covered_ids]
    if missing and not is_strict:
        names_there = listing(sorted(tensors), 4)
        raise UsageError(
            f"{path} must have all tensors of the module; it lacks {listing(missing, 4)}, "
            f"and has {names_there}. Build the model that was trained."
        )
    for name, tensor in fitted_tensors.items():
        if name in target and tensor.itemsize < min(2, target[name].itemsize):
            raise UsageError(
                f"{path}: {name!r} must be numbers of 16 bits or more; got {tensor.dtype}. Store it dequantised."
            )
    notes = [f"stripped {stripped_prefix!r} from names"] if stripped_prefix else []
    if extra_tensors := tensors.keys() - {
        f"{stripped_prefix}{name}" for name in fitted_tensors
    }:
        extra_names = listing(sorted(extra_tensors), 4)
        notes.append(f"left out {extra_names}")
    if notes:
        notes_text = "; ".join(notes)
        warn(f"{path}: {notes_text}")
    return fitted_tensors
