"""A folder of transformers as a classifier of texts or images: all of it is bounded, and no code of it runs."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fl_core import storage
from fl_core.display import printable
from fl_core.errors import (
    UsageError,
    check_known,
    check_options,
    listing,
    plural,
    spelled,
    warn,
)
from fl_core.models import weights
from fl_core.models.tokens import FILE, TokenShape, pixels_of
from fl_core.tree import preserve_state

CONFIG, WEIGHTS = "config.json", "model.safetensors"
CONFIG_BYTES = 2**20
CODE = re.compile(
    r"_attn.*|attn_implementation.*|_?experts_implementation.*|.*quantization_config|compression_config|auto_map|custom_pipelines|"
    r"trust_remote_code|code_revision|revision|use_kernels|kernel_config|.*backbone.*|extra_.*files|"
    r"transformers_weights|gguf_file|subfolder|adapter.*|peft_config"
)
"""Keys of a configuration that load or run code, or other files, at any depth."""
OURS = {
    *("model_type", "transformers_version", "_name_or_path", "name_or_path"),
    *("dtype", "torch_dtype", "num_labels", "id2label", "label2id", "problem_type", "pad_token_id"),
}  # fmt: skip
"""Keys that are ignored: the task answers them, or they say where a configuration comes from."""
OLDER = {
    *("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct"),
    *("rotary_emb_base", "global_rope_theta", "local_rope_theta", "sliding_window_pattern"),
    *("original_max_position_embeddings", "tie_word_embeddings"),
}  # fmt: skip
"""Keys of older configurations that transformers still reads, although no class declares them."""
_COUNT = re.compile(r".*(layers?|blocks?|depths?|groups?|experts?|heads?|stages?)(_|$)")
COUNT, NUMBER = 512, 2**25
"""The largest number of layers, heads or experts, and of anything else such as words, in a configuration."""
MODULES = 20_000
"""Parameters and buffers of a model at most."""


def from_transformers(
    folder: str, shape: tuple[int, ...], n_classes: int, options: Mapping[str, Any]
) -> nn.Module:
    """Build the classifier of texts or images that a folder of transformers describes, with the weights of its file.

    The classifier and a pooler start fresh where the folder has none of this size. A warning names them, and the stored
    tensors that are left out. Weights are float32, whatever type they were stored in. Attention is computed by
    operations that can be differentiated twice. Files may be links, as in a cache of models.

    Args:
        folder: path of the folder.
        shape: shape of an image, or a :class:`fl_core.models.tokens.TokenShape` with a tokenizer.
        n_classes: number of outputs.
        options: must be empty.

    Raises:
        UsageError: there are options, or transformers is not installed. Or the samples
            are neither texts read by the folder's tokenizer nor images, or the images
            have other channels or another size. Or a key of the configuration loads
            code, or the folder has no such model or not all of its weights.
    """
    full_name = f"hf:{folder}"
    check_options(f"model {full_name!r}", options, ())
    tokenizer = getattr(shape, "tokenizer", None)
    if isinstance(shape, TokenShape) and not tokenizer:
        raise UsageError(
            f"{folder}/{FILE} is missing: the model's own tokenizer must read its texts. Save it to the folder."
        )
    if not tokenizer and len(shape) != 3:
        raise UsageError(
            f"model {full_name} must have images, or texts and a {FILE}; "
            f"got samples of shape {shape}. Use another model."
        )
    settings = {"pad_token_id": tokenizer.pad} if tokenizer else {}
    model_folder = storage.Folder(folder, links=True)
    with _one_line(f"model {full_name} must be built from its files"), silent():
        import transformers

        classifiers: Any = transformers.AutoModelForImageClassification
        if tokenizer:
            classifiers = transformers.AutoModelForSequenceClassification
        config = configuration(model_folder, n_classes, settings)
        stored_size = storage.tensor_sizes(model_folder.file(WEIGHTS))
        with torch.device("meta"), _bounded(full_name):
            planned_model = classifiers.from_config(config, attn_implementation="eager")
        _check_stored(planned_model, sum(stored_size.values()), model_folder)
        state = weights.read(model_folder.file(WEIGHTS))
        dtypes = {str(t.dtype).removeprefix("torch.") for t in state.values()}
        model, report = type(planned_model).from_pretrained(
            None,
            config=config,
            state_dict=state,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            attn_implementation="eager",
            dtype=torch.float32,
        )
    mismatched_keys = [entry[0] for entry in report["mismatched_keys"]]
    fresh_keys = sorted({*report["missing_keys"], *mismatched_keys})
    lost_keys = [key for key in fresh_keys if _is_body(planned_model, key)]
    if lost_keys:
        raise UsageError(
            f"{folder}/{WEIGHTS} must have all weights of the model; "
            f"got none for {listing(lost_keys, 4)}. Save the model again."
        )
    keys_by_fate = {
        "starts fresh": sorted({key.rpartition(".")[0] for key in fresh_keys}),
        "left out": sorted(report["unexpected_keys"]),
        "stored in another type than float32, in which it is trained": sorted(dtypes - {"float32"}),
    }  # fmt: skip
    notes = [
        f"{fate}: {listing(keys, 4)}" for fate, keys in keys_by_fate.items() if keys
    ]
    if notes:
        notes_text = "; ".join(notes)
        warn(f"model {full_name}: {notes_text}")
    if not tokenizer:
        check_pixels(full_name, model, shape)
    return model


def configuration(
    files: storage.Folder, n_classes: int, task_entries: Mapping[str, Any]
) -> Any:
    """Return the configuration of a folder, of a class that transformers itself has.

    A warning names the keys that this class does not declare. They are left out.

    Args:
        files: the folder, with its :data:`CONFIG`.
        n_classes: number of outputs.
        task_entries: entries that the task sets, such as ``pad_token_id`` for texts.

    Raises:
        UsageError: a key loads code, a number is beyond its bound, or transformers has no such model.
        CorruptError: the file is missing, too large, or no regular file.
        ValueError: the file is no JSON.
    """
    from transformers import CONFIG_MAPPING

    path = files.path / CONFIG
    values = storage.parsed_json(files.read(CONFIG, CONFIG_BYTES))
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UsageError(f"{path} must be an object with a model_type. Save it again.")
    check_entries(str(path), values)
    name = check_known("model_type of transformers", values["model_type"], CONFIG_MAPPING)  # fmt: skip
    config_class = CONFIG_MAPPING[name]
    declared_keys = {
        *inspect.signature(config_class).parameters,
        *config_class.attribute_map,
        *OLDER,
    }
    accepted_entries = {
        key: value
        for key, value in values.items()
        if key in declared_keys and key not in OURS and not CODE.fullmatch(key)
    }
    # which of several classes
    if not isinstance(accepted_entries.get("architectures"), list):
        accepted_entries["architectures"] = []
    if other_keys := sorted({*values} - {*accepted_entries} - OURS):
        texts = [json.dumps(key)[:80] for key in other_keys]
        class_name = config_class.__name__
        warn(
            f"{path}: keys that {class_name} does not declare are left out: {listing(texts, 6)}"
        )
    return config_class.from_dict(
        accepted_entries,
        num_labels=n_classes,
        attn_implementation="eager",
        **task_entries,
    )


def check_entries(where: str, entries: Any, key: str = "") -> None:
    """Refuse keys of a configuration that load code, and integers beyond their bounds, at any depth.

    A key that loads code may be true, false or null.

    >>> check_entries("config.json", {"num_hidden_layers": 12, "vocab_size": 128_256, "auto_map": None})
    >>> check_entries("config.json", {"text_config": {"_attn_implementation": "somebody/kernel"}})
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: config.json must be without '_attn_implementation', which loads code or other files. ...

    Args:
        where: path of the configuration, for messages.
        entries: the configuration, or a value in it.
        key: the key of that value.

    Raises:
        UsageError: there is such a key or integer, or a list is too long. The message
            names the key.
    """
    if isinstance(entries, dict):
        for name, value in entries.items():
            if CODE.fullmatch(name) and not isinstance(value, bool | None):
                raise UsageError(
                    f"{where} must be without {name[:80]!r}, which loads code or other files. Remove the key if the "
                    "model does not need it."
                )
            check_entries(where, value, name)
    elif isinstance(entries, list):
        if len(entries) > COUNT:
            raise UsageError(
                f"{where}: {key!r} must have at most {COUNT} values; got {len(entries):,}."
            )
        for value in entries:
            check_entries(where, value, key)
    elif isinstance(entries, int):
        upper_bound = NUMBER
        if _COUNT.fullmatch(key):
            upper_bound = COUNT
        lower_bound = 0 if upper_bound == COUNT else -upper_bound
        if not lower_bound <= entries <= upper_bound:
            raise UsageError(
                f"{where}: {key!r} must be from {lower_bound:,} to {upper_bound:,}; "
                f"got {str(entries)[:30]}. Use another model."
            )


def check_pixels(full: str, model: nn.Module, shape: tuple[int, ...]) -> None:
    """Check that a model of transformers takes images of these channels and this size.

    The size in the configuration counts only if the model fails on images of another
    size.

    Args:
        full: the model's name, for messages.
        model: the model, with its ``config``.
        shape: shape of an image, (channels, height, width).

    Raises:
        UsageError: the model takes other images.
    """
    config: Any = model.config
    channels = getattr(config, "num_channels", shape[0])
    if channels != shape[0]:
        raise UsageError(
            f"model {full} must have images of {plural(channels, 'channel')}; got {shape[0]}. Convert them."
        )
    side = pixels_of(vars(config))
    if not side or shape[1:] == (side, side):
        return
    try:
        with torch.no_grad(), preserve_state(model):
            model.eval()(torch.zeros(1, *shape))
    except Exception as error:
        raise UsageError(
            f"model {full} must have images of {side} x {side} pixels; got {shape[1]} x {shape[2]}. "
            f"Crop and scale files of images: {spelled(image_size=side)}."
        ) from error


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn any error in the ``with`` block into a UsageError that begins with ``what``.

    The text of a library's error becomes one line of at most 300 characters.
    """
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from error
    except Exception as error:
        reason = printable(" ".join(str(error).split()))[:300]
        what_failed = reason or type(error).__name__
        raise UsageError(f"{what}: {what_failed}") from error


@contextmanager
def _bounded(name: str) -> Iterator[None]:
    """Refuse a model with more than :data:`MODULES` parameters and buffers while it is built in the ``with`` block.

    Raises:
        UsageError: there are more tensors. The message names the model.
    """
    from torch.nn.modules.module import (
        register_module_buffer_registration_hook,
        register_module_parameter_registration_hook,
    )

    count = 0

    def add(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > MODULES:
            raise UsageError(
                f"model {name} must have at most {MODULES:,} parameters. Use a smaller model."
            )

    hooks = [
        register_module_parameter_registration_hook(add),
        register_module_buffer_registration_hook(add),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_stored(planned: nn.Module, stored: int, files: storage.Folder) -> None:
    """Refuse a model whose body has more numbers than are stored, or that takes far more memory than its file.

    Args:
        planned: the model without memory, on the device meta.
        stored: the number of numbers in the file of weights.
        files: the folder.

    Raises:
        UsageError: the model is too large. The message has both numbers or sizes.
    """
    parameters = planned.named_parameters()
    needed_size = sum(p.numel() for key, p in parameters if _is_body(planned, key))
    if needed_size > stored:
        raise UsageError(
            f"{files.path}/{WEIGHTS} must have the {needed_size:,} numbers of the model in {CONFIG}; "
            f"got {stored:,}. Save the model again."
        )
    n_bytes = sum(buffer.nbytes for buffer in planned.buffers())
    n_bytes += sum(p.nbytes for p in planned.parameters())
    storage.check_unpacked(files.path / CONFIG, files.size(WEIGHTS), n_bytes)


def _is_body(model: Any, key: str) -> bool:
    """Return whether a tensor must be stored, since it belongs to the model without classifier and pooler."""
    return key.startswith(f"{model.base_model_prefix}.") and ".pooler." not in key


@contextmanager
def silent() -> Iterator[None]:
    """Silence the reports and progress bars of transformers inside the ``with`` block."""
    from transformers.utils import logging

    level, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bar:
            logging.enable_progress_bar()
