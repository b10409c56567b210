"""Models from elsewhere: timm, torchvision, and any importable callable."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from contextlib import suppress
from typing import Any

from torch import nn

from fl_core.errors import UsageError, check_known
from fl_core.models.registry import Builder, check_options, parameters_of

Options = dict[str, Any]


def from_timm(name: str, shape: tuple[int, ...], n_classes: int, options: Options) -> nn.Module:
    """A timm model with fresh weights; ``in_chans`` follows the shape, and ``img_size`` where the model takes one."""
    import timm

    full, architecture = f"timm:{name}", name.partition(".")[0]
    check_known("timm model", architecture, timm.list_models())
    channels, height, width = _image(full, shape)
    made_for = timm.get_pretrained_cfg(architecture)
    size: Options = {"img_size": height if height == width else (height, width)}
    if "img_size" in options or (made_for is not None and tuple(made_for.input_size[1:]) == (height, width)):
        size = {}
    make = functools.partial(timm.create_model, name, pretrained=False, num_classes=n_classes, in_chans=channels)
    return _made(full, make, options, size)


def from_torchvision(name: str, shape: tuple[int, ...], n_classes: int, options: Options) -> nn.Module:
    """A torchvision classification model with fresh weights; they all take images of 3 channels."""
    import torchvision

    full = f"torchvision:{name}"
    check_known("torchvision model", name, torchvision.models.list_models(module=torchvision.models))
    channels, _, _ = _image(full, shape)
    if channels != 3:
        raise UsageError(f"model {full} takes images of 3 channels, not {channels}; timm's models take any number")
    make = functools.partial(torchvision.models.get_model_builder(name), weights=None, num_classes=n_classes)
    return _made(full, make, options, {})


def from_import(path: str, shape: tuple[int, ...], n_classes: int, options: Options) -> nn.Module:
    """What ``package.module:callable`` returns.

    It is called with those of ``shape`` and ``n_classes`` that are among its named parameters, and with the options.
    """
    target = _imported(path)
    if isinstance(target, nn.Module) or not callable(target):
        raise UsageError(f"model {path!r} is a {type(target).__name__}; name a function or class that makes a model")
    named, takes_others = parameters_of(target)
    given = {key: value for key, value in {"shape": shape, "n_classes": n_classes}.items() if key in named}
    if not takes_others:
        check_options(path, options, named.keys() - given.keys())
    for name, required in named.items():
        if required and name not in given and name not in options:
            raise UsageError(f"model {path!r} needs the option {name!r}")
    model = target(**{**given, **options})
    if not isinstance(model, nn.Module):
        raise UsageError(f"model {path!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _imported(path: str) -> Any:
    module_name, _, attributes = path.partition(":")
    if not module_name or not all(part.isidentifier() for part in (*module_name.split("."), *attributes.split("."))):
        raise UsageError(f"model {path!r} is not of the form package.module:callable")
    if "" not in sys.path:
        sys.path.append("")  # a module in the working directory, after everything that is installed
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise UsageError(f"model {path!r}: there is no module {error.name!r} to import") from error
    for part in attributes.split("."):
        if not hasattr(target, part):
            check_known(f"name in {module_name!r}", part, [name for name in dir(target) if not name.startswith("_")])
        target = getattr(target, part)
    return target


def _made(model: str, make: Builder, options: Options, size: Options) -> nn.Module:
    """``make(**size, **options)``, without ``size`` where the model has no such parameter."""
    try:
        if size:
            with suppress(TypeError):
                return make(**size, **options)
        return make(**options)
    except TypeError as error:
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unexpected:
            known, _ = parameters_of(type(make()))
            check_options(model, unexpected.groups(), known.keys() - {"num_classes", "in_chans"})
        raise _refused(model, options, error) from error
    except Exception as error:
        raise _refused(model, {**size, **options}, error) from error


def _refused(model: str, options: Options, error: Exception) -> UsageError:
    return UsageError(f"model {model} cannot be made with the options {options}: {error}")


def _image(model: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise UsageError(f"model {model} takes images (channels, height, width), not samples of shape {shape}")
    channels, height, width = shape
    return channels, height, width
