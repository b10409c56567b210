"""Models of timm and torchvision, and pretrained weights of timm."""

from __future__ import annotations

import functools
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_core.errors import UsageError, check_known, check_options, listing
from fl_core.models.building import (
    LIBRARIES,
    PRETRAINED,
    Builder,
    Options,
    image_shape,
    option_error,
)
from fl_core.registry import parameters_of


def from_timm(
    name: str, shape: tuple[int, ...], n_classes: int, options: Options
) -> nn.Module:
    """Build a timm model. ``in_chans`` follows the shape, and so does ``img_size`` if the model takes it.

    Its weights are fresh by default. With the option ``pretrained`` as true they are timm's own, from its cache or the
    network. It may also be the path of a file of weights. timm adapts weights to other classes and channels. In a ViT
    it also adapts them to other image sizes.

    Raises:
        UsageError: the weights are not available or do not fit.
    """
    import timm

    full, architecture = f"timm:{name}", name.partition(".")[0]
    check_known("timm model", architecture, timm.list_models())
    options = dict(options)
    pretrained = _pretrained_arguments(full, name, options.pop(PRETRAINED, False))
    channels, height, width = image_shape(full, shape)
    made_for = timm.get_pretrained_cfg(architecture)
    size: Options = {"img_size": height if height == width else (height, width)}
    if "img_size" in options or (
        made_for is not None and tuple(made_for.input_size[1:]) == (height, width)
    ):
        size = {}
    make = functools.partial(
        timm.create_model, name, num_classes=n_classes, in_chans=channels, **pretrained
    )
    if not pretrained["pretrained"]:
        return _call_maker(full, make, options, size)
    drawn = torch.random.get_rng_state()
    try:
        model = _call_maker(full, make, options, size)
        torch.random.set_rng_state(drawn)
        fresh = _call_maker(
            full, functools.partial(make, pretrained=False), options, size
        )
        _check_loaded(model, fresh)
    except UsageError as error:
        raise UsageError(
            f"pretrained weights cannot be used: {str(error).removesuffix('.')}. "
            "Use timm's cache, the network, or a file, pretrained=PATH."
        ) from error
    return model


def _check_loaded(model: Any, fresh: nn.Module) -> None:
    """Check that pretrained weights set every layer except the classifier, since timm does not warn.

    Args:
        fresh: the same model without them, from the same random state.
    """
    heads = model.get_classifier()
    heads = {
        id(param)
        for head in (heads if isinstance(heads, tuple) else (heads,))
        for param in head.parameters()
    }
    start = dict(fresh.named_parameters())
    left = [
        name
        for name, param in model.named_parameters()
        if id(param) not in heads
        and len(param.unique()) > 1
        and torch.equal(param, start[name])
    ]
    if left:
        raise UsageError(
            f"pretrained weights must be of the whole model; got none for {listing(left, 4)}."
        )


def _pretrained_arguments(full: str, name: str, wanted: Any) -> Options:
    """Return timm's arguments for pretrained weights. A model without any is refused: timm would start it at random."""
    import timm

    choice = str(wanted).lower()
    if choice == "false":
        return {"pretrained": False}
    if choice == "true":
        try:
            published = timm.get_pretrained_cfg(name)
        except RuntimeError as error:  # a tag that it does not know
            raise UsageError(f"model {full}: {error}") from error
        if published is None or not published.has_weights:
            raise UsageError(
                f"model {full} must have pretrained weights in timm; got none. Give a file, pretrained=PATH."
            )
        return {"pretrained": True}
    if not isinstance(wanted, str) or not Path(wanted).is_file():
        raise UsageError(
            f"model {full}: pretrained must be true, false or the path of a file; got {wanted!r}."
        )
    overlay = {"file": wanted, "custom_load": wanted.endswith(".npz")}
    return {"pretrained": True, "pretrained_cfg_overlay": overlay}


def from_torchvision(
    name: str, shape: tuple[int, ...], n_classes: int, options: Options
) -> nn.Module:
    """Build a torchvision classification model with fresh weights. All of them take images of 3 channels."""
    import torchvision

    full = f"torchvision:{name}"
    check_known(
        "torchvision model",
        name,
        torchvision.models.list_models(module=torchvision.models),
    )
    channels, _, _ = image_shape(full, shape)
    if channels != 3:
        raise UsageError(
            f"model {full}: images must have 3 channels; got {channels}. Use a timm model for other numbers."
        )
    make = functools.partial(
        torchvision.models.get_model_builder(name), weights=None, num_classes=n_classes
    )
    return _call_maker(full, make, options, {})


def _call_maker(
    model: str, make: Builder, options: Options, size: Options
) -> nn.Module:
    """Call ``make(**size, **options)``, without ``size`` if the function has no such parameter."""
    try:
        if size:
            with suppress(TypeError):
                return make(**size, **options)
        return make(**options)
    except TypeError as error:
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unexpected:
            known, _ = parameters_of(type(make()))
            check_options(
                f"model {model!r}",
                unexpected.groups(),
                known.keys() - {"num_classes", "in_chans"},
            )
        raise option_error(model, options, error) from error
    except Exception as error:
        raise option_error(model, {**size, **options}, error) from error


LIBRARIES.update(timm=from_timm, torchvision=from_torchvision)
