"""Low-rank adapters (LoRA; Hu et al. 2022) of any model by peft, around a frozen base.

With ``--adapt`` only the adapters and the classifier train. Everything else is the base. Its tensors become buffers
that no state dict has. So they are in no layer, no message and no checkpoint, and every algorithm works as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Annotated, Any

from torch import Tensor, nn

from fl_core import tree
from fl_core.errors import (
    BELOW_1,
    Count,
    Positive,
    UsageError,
    check_known,
    needs_package,
    read_options,
)
from fl_core.layers import PARTS, Layer, is_inside
from fl_core.models.extended import head_path
from fl_core.seeds import seed_of, torch_seeded
from fl_core.tree import Tree

ALL, ATTENTION = "all", "attn"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LINEAR = (nn.Linear, *_CONVOLUTIONS)


def _is_linear(module: nn.Module) -> bool:
    module_class = type(module)  # GPT-2's linear layers are transformers' Conv1D
    is_conv1d = (
        module_class.__name__ == "Conv1D"
        and module_class.__module__.startswith("transformers.")
    )
    return is_conv1d or isinstance(module, _LINEAR)


@dataclass(frozen=True)
class Lora:
    """The adapters that ``--adapt lora:r=8,targets=attn`` asks for.

    Attributes:
        r: rank of an update, at least 1.
        rank_pattern: other ranks by the end of a module path, such as ``query:4``. In the text they are separated by
            ``+``.
        targets: ``all`` linear and convolutional layers but the classifier and those of
            :func:`left_out`, ``attn`` for the linear layers of attention among them, or
            ends of module paths such as ``attn.qkv``. In the text they are separated by
            ``+``.
        alpha: an update is alpha / r times B A. None means r.
        dropout: share of an adapter's inputs that training drops, from 0 to below 1.
        rates: multiples of the learning rate for the factors A or B, such as
            ``lora_B:16`` (LoRA+; Hayou et al. 2024).

    Raises:
        UsageError: an entry of ``rates`` is not a factor's name and a number above 0, or
            a factor is named twice.
    """

    r: Count = 8
    targets: tuple[str, ...] = (ALL,)
    alpha: Positive | None = None
    dropout: Annotated[float, BELOW_1] = 0.0
    rank_pattern: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, _ in self.factors:
            check_known("factor of rates", name, PARTS)

    @property
    def factors(self) -> tuple[tuple[str, float], ...]:
        """Return pairs (part of a tensor's name, factor of its learning rate), one for each entry of ``rates``."""
        return tuple(numbers_of("rates", self.rates, float).items())


def numbers_of(key: str, entries: Iterable[str], kind: Any) -> dict[str, Any]:
    """Parse the entries ``name:number`` of a key, and return {name: number}.

    >>> numbers_of("rates", ["lora_B:16"], float)
    {'lora_B': 16.0}

    Args:
        key: the key, for messages.
        entries: the entries.
        kind: the type of the numbers, int or float.

    Raises:
        UsageError: an entry has another form, its number is not above 0, or a name is
            there twice.
    """
    numbers: dict[str, Any] = {}
    for entry in entries:
        name, _, number = entry.rpartition(":")
        if name in numbers:
            raise UsageError(
                f"{key} of adapt must have each name once; got {name!r} twice. Leave one out."
            )
        with suppress(ValueError):
            numbers[name] = kind(number)
        if not name or not 0 < numbers.get(name, 0) < math.inf:
            raise UsageError(
                f"{key} of adapt must be NAME:NUMBER, above 0; got {entry!r}. Write {key}=NAME:4+OTHER:8."
            )
    return numbers


def parse(text: str) -> Lora:
    """Parse the text of ``--adapt``, and return the adapters that it asks for.

    >>> parse("lora:r=4,targets=attn.qkv+attn.proj")
    Lora(r=4, targets=('attn.qkv', 'attn.proj'), alpha=None, dropout=0.0, rank_pattern=(), rates=())

    Raises:
        UsageError: another method than lora, an unknown or repeated key, or a value out of range.
    """
    method, _, settings_text = text.partition(":")
    check_known("method of adapt", method, ("lora",))
    values: dict[str, Any] = {}
    for setting in filter(None, settings_text.split(",")):
        key, _, value = setting.partition("=")
        check_known("key of adapt", key, [field.name for field in fields(Lora)])
        if key in values:
            raise UsageError(
                f"{key} of adapt must be given once; got {text!r}. Separate targets by +."
            )
        takes_several = key in ("targets", "rank_pattern", "rates")
        values[key] = value.split("+") if takes_several else value
    adapters: Lora = read_options("adapt", Lora, values)
    return adapters


def with_adapters(
    model: nn.Module, lora: Lora, layers: Sequence[Layer], example: Tensor, seed: int
) -> tuple[nn.Module, tuple[Layer, ...]]:
    """Freeze a model as the base of adapters, and return it and the layers that train.

    The model is changed. Its predictions stay, since B starts at zero. A starts at draws of the run's seed. In each
    layer of the model the factors A are one layer and the factors B another. The classifier trains as before, but not
    the last layer of a language model.

    Args:
        model: the model.
        lora: the adapters.
        layers: the layers of the model without adapters.
        example: a batch that the model takes.
        seed: the run's seed.

    Raises:
        UsageError: peft is not installed, the model has adapters already or no linear
            layer to adapt, a target is unknown, or a rank is too large.
    """
    head = head_path(model, example, exact=False)
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    # a language model's last layer is pretrained, and often tied to the embedding
    trained_head: str | None = head
    if outputs is model.get_submodule(head):
        trained_head = None
    names = {id(tensor): name for name, tensor in tree.named_tensors(model).items()}
    paths = _target_paths(model, lora, head)
    name_by_path = {path: names[id(model.get_submodule(path).weight)] for path in paths}
    model = adapt(model, lora, head, seed)
    if trained_head is None:
        model.get_submodule(head).requires_grad_(False)
    _freeze(model, trained_head)
    tensors = tree.named_tensors(model)
    new_layers = (_parts(layer, name_by_path, tensors) for layer in layers)
    return model, tuple(chain.from_iterable(new_layers))


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has adapters of peft already."""
    names = [name for name, _ in model.named_parameters()]
    return hasattr(model, "peft_config") or any(".lora_A." in name for name in names)


def adapt(model: nn.Module, lora: Lora, head: str, seed: int) -> nn.Module:
    """Add adapters by peft to a model, drawn from the seed, and return the model.

    The model is changed. Only the adapters and the classifier train then.

    Args:
        model: the model.
        lora: the adapters.
        head: the path of the classifier.
        seed: the run's seed.

    Raises:
        UsageError: peft is not installed, the model has adapters already or no linear
            layer to adapt, a target is unknown, or a rank is too large.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise needs_package("peft", "train low-rank adapters", "lora") from None
    if has_adapters(model):
        raise UsageError(
            "lora_targets must be none with adapt, which adapts the model. Add options={'lora_targets': 'none'}."
        )
    paths = _target_paths(model, lora, head)
    ranks = numbers_of("rank_pattern", lora.rank_pattern, int)
    path_ends = sorted({*chain.from_iterable(map(_ends, paths))})
    for target, rank in ranks.items():
        check_known("target of rank_pattern", target, path_ends)
        target_paths = [path for path in paths if target in _ends(path)]
        _check_rank(f"rank_pattern of {target!r}", rank, model, target_paths)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            # its fused pass in evaluation would use the weights without adapters
            module.activation_relu_or_gelu = 0
    # peft takes each target as a regular expression
    rank_pattern = {re.escape(target): rank for target, rank in ranks.items()}
    config: Any = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha or lora.r,
        lora_dropout=lora.dropout,
        # a list would also take longer paths with these ends
        target_modules="|".join(re.escape(path) for path in paths),
        rank_pattern=rank_pattern,
        alpha_pattern={} if lora.alpha else rank_pattern,
    )
    with torch_seeded(seed_of(seed, "adapters")):
        adapted_model: nn.Module = inject_adapter_in_model(config, model)
    for parameter in adapted_model.get_submodule(head).parameters():
        parameter.requires_grad_(True)
    return adapted_model


def _parts(layer: Layer, name_by_path: Mapping[str, str], live: Tree) -> list[Layer]:
    """Return the layers of what trains of a layer: the factors A, the factors B, and tensors that are not frozen.

    A layer without adapters and with frozen tensors alone gives none.

    Args:
        layer: the layer of the model without adapters.
        name_by_path: the weight's former name of each module with adapters, by the
            module's path.
        live: the tensors of the model with adapters.
    """
    adapter_paths = [
        path for path, name in name_by_path.items() if name in layer.tensors
    ]
    part_layers = [
        Layer(
            f"{layer.name}.{part}",
            tuple(f"{path}.{part}.default.weight" for path in adapter_paths),
            (),
            layer.output,
            layer.used,
        )
        for part in PARTS
        if adapter_paths
    ]
    remaining_layer = replace(
        layer,
        parameters=tuple(name for name in layer.parameters if name in live),
        buffers=tuple(name for name in layer.buffers if name in live),
        frozen=(),
    )
    if remaining_layer.tensors:
        return [*part_layers, remaining_layer]
    return part_layers


def _target_paths(model: nn.Module, lora: Lora, head: str) -> list[str]:
    """Return the module paths of the layers that get adapters.

    Args:
        model: the model.
        lora: the adapters.
        head: the path of the classifier, which gets none.

    Raises:
        UsageError: there is no layer to adapt, a target is unknown, or ``r`` is above
            the largest width of a target.
    """
    left_paths = left_out(model)
    attention_prefixes = tuple(
        f"{path}."
        for path, module in model.named_modules()
        if re.search("(?i)attention|attn", type(module).__name__)
    )
    suitable_modules = {
        path: module
        for path, module in model.named_modules()
        if _is_linear(module)
        and path != head
        and not any(is_inside(path, left_path) for left_path in left_paths)
    }
    paths_by_target = {
        ALL: list(suitable_modules),
        ATTENTION: [
            path
            for path, module in suitable_modules.items()
            if not isinstance(module, _CONVOLUTIONS)
            and path.startswith(attention_prefixes)
        ],
    }
    for path in suitable_modules:
        for path_end in _ends(path):
            paths_by_target.setdefault(path_end, []).append(path)
    paths_by_target = {
        target: paths for target, paths in paths_by_target.items() if paths
    }
    if not paths_by_target:
        model_class = type(model).__name__
        raise UsageError(
            f"{model_class} must have a linear layer before its classifier to adapt; got none."
        )
    widest_paths: set[str] = set()
    for target in lora.targets:
        widest_paths.update(
            paths_by_target[check_known("target of adapt", target, paths_by_target)]
        )
    _check_rank("r of adapt", lora.r, model, widest_paths)
    return [path for path in suitable_modules if path in widest_paths]


def _check_rank(name: str, rank: int, model: nn.Module, paths: Iterable[str]) -> None:
    """Refuse a rank above the largest number of inputs of the layers that get it.

    Args:
        name: the setting, for the message.
        rank: the rank.
        model: the model.
        paths: the module paths of the layers. There is at least one.

    Raises:
        UsageError: the rank is larger.
    """
    widths = [_width(model.get_submodule(path)) for path in paths]
    if rank > max(widths):
        raise UsageError(
            f"{name} must be at most {max(widths)}, the largest width of a target; got {rank}. Lower it."
        )


def _width(module: Any) -> int:
    """Return the number of inputs of one output of a linear or convolutional layer."""
    weight: Tensor = module.weight
    if isinstance(module, _LINEAR):
        return weight[0].numel()
    return len(weight)  # that of transformers' Conv1D is [inputs, outputs]


def _ends(path: str) -> list[str]:
    """Return all ends of a module path between its dots, from the whole path to its last name."""
    path_parts = path.split(".")
    return [".".join(path_parts[k:]) for k in range(len(path_parts))]


def left_out(model: nn.Module) -> list[str]:
    """Return the module paths of linear maps that get no adapters.

    These are grouped convolutions, which peft could not merge,
    ``torch.nn.MultiheadAttention``, and linear layers with parametrised weights.
    """
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        or (isinstance(module, _CONVOLUTIONS) and module.groups > 1)
        or (_is_linear(module) and "weight" not in module._parameters)
    ]


def _freeze(model: nn.Module, head: str | None) -> None:
    """Turn all tensors that do not train into buffers outside of the state dict, in place.

    A module with such tensors has their names in its attribute ``frozen_base``. Tied
    tensors stay one.

    Args:
        model: the model with adapters.
        head: the path of the classifier, whose tensors stay as they are. None means
            that there is none.
    """
    frozen_by_id: dict[int, Tensor] = {}  # tied tensors stay one
    for path, module in model.named_modules():
        if path == head:
            continue
        parameters = [
            name
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.requires_grad
        ]
        buffers = [
            name
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        for name in parameters:
            tensor = module._parameters.pop(name)
            assert tensor is not None
            module.register_buffer(
                name,
                frozen_by_id.setdefault(id(tensor), tensor.detach()),
                persistent=False,
            )
        module._non_persistent_buffers_set.update(buffers)
        if parameters or buffers:
            module.frozen_base = (*parameters, *buffers)


# --- files of a trained model --------------------------------------------------------------------------------------


def merged(model: nn.Module) -> nn.Module:
    """Return a copy with the adapters added to the base, so that all tensors have their names without adapters.

    A model without a frozen base is returned as it is, not copied.
    """
    if not tree.frozen_base(model):
        return model
    from peft.tuners.lora import LoraLayer

    model = tree.copied(model)
    for path, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            model.set_submodule(path, module.get_base_layer())
    for module in model.modules():
        module._non_persistent_buffers_set.difference_update(
            getattr(module, "frozen_base", ())
        )
    return model
