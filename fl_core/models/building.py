"""The registry of models, and their building by name, also those of timm and torchvision, with a seed and checks."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from fl_core import storage
from fl_core.buffers import training_notes
from fl_core.errors import (
    UsageError,
    about,
    check_known,
    check_options,
    check_values,
    listing,
    spelled,
)
from fl_core.models import weights
from fl_core.models.adapter import (
    CLOSE,
    OWN_LOSS,
    PackedShape,
    adapt,
    check_real,
    pass_notes,
)
from fl_core.models.boosted import BoostedTrees
from fl_core.models.folders import from_transformers
from fl_core.models.tokens import START, TokenShape
from fl_core.registry import Registry, import_object, is_outside, parameters_of
from fl_core.rows import CLASSIFICATION, MULTILABEL
from fl_core.seeds import seed_of, torch_generator, torch_seeded
from fl_core.tree import (
    copied,
    keep_evaluating,
    make_dense,
    plain,
    preserve_state,
    train,
)

Builder = Callable[..., nn.Module]
Function = TypeVar("Function", bound=Builder)

_NAMES = {
    "timm:NAME": "any timm model, fresh or pretrained; channels, classes and image size follow the data",
    "torchvision:NAME": "any torchvision classification model with fresh weights; images of 3 channels",
    "hf:FOLDER": "a model of transformers with its weights, and a fresh classifier; texts by its tokenizer, or images",
    "package.module:callable": "your own: called with shape= and n_classes= if it has parameters of these names",
}


def _adopt(builder: Any, name: str) -> Builder:
    # a module is callable too
    is_module = hasattr(builder, "state_dict") and not isinstance(builder, type)
    if not callable(builder) or is_module:
        builder_type = type(builder).__name__
        raise UsageError(
            f"model {name!r} must be a function or class that makes a model; got a {builder_type}."
        )
    return builder


MODELS: Registry[Builder] = Registry("model", "fl_core.models", _adopt)


def model(builder: Function) -> Function:
    """Register ``builder(shape, n_classes, *, options...)`` as a model under its function's name, as a decorator.

    The first line of its docstring describes it in the list of models. Its keyword-only parameters are its options. For
    an unsuitable shape it should raise a UsageError that names the suitable ones.

    >>> from fl_core import models
    >>> @models.model
    ... def linear_of_an_example(shape, n_classes):
    ...     '''Multinomial logistic regression; tables.'''
    ...     return nn.Linear(shape[0], n_classes)
    >>> models.build("linear_of_an_example", shape=(4,), n_classes=3)
    Linear(in_features=4, out_features=3, bias=True)

    Raises:
        UsageError: another model has that name.
    """
    MODELS.add(builder.__name__, builder, builder)
    return builder


def is_code(name: str) -> bool:
    """Return whether building a model by this name would import and call the user's own code."""
    source, colon, _ = name.partition(":")
    return bool(colon) and source not in LIBRARIES


def describe() -> dict[str, str]:
    """Return the names of all models with a line of description each.

    >>> describe()["heart_mlp"]
    '4 fc for Fed-Heart (PLayer-FL); tables.'
    """
    return {**MODELS.summaries(), **_NAMES}


FITTED = "sklearn:"
"""The beginning of the names of models whose tensors are fitted by scikit-learn. Gradients do not train them."""
PRETRAINED = "pretrained"
"""The option that loads weights. Only the user's own command or call may set it."""
Options = dict[str, Any]
LARGEST = 2**26
"""Numbers of one sample, at most."""
TRIAL = 2**22
"""Numbers of one sample, at most, to try a model that a file describes.

A colour image of 1182 x 1182 is just below it.
"""


def build(
    name: str | Builder,
    shape: tuple[int, ...],
    n_classes: int,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    trial: bool = True,
) -> nn.Module:
    """Build a model by its name, on the CPU and in training mode.

    Equal arguments give equal weights, bit for bit. The model maps samples, float32
    [n, ...], to outputs [n, n_classes], which are logits for classes and labels. Texts
    are token ids, int64 [n, length]. No activation works in place. A model may declare
    ``layer_groups``, the paths of the modules that form one layer each. The papers'
    networks do.

    >>> from fl_core import models
    >>> model = models.build("mlp", shape=(1, 8, 8), n_classes=10, options={"sizes": (16,)})
    >>> model(models.example((1, 8, 8), n=3)).shape
    torch.Size([3, 10])
    >>> models.build("vit", shape=(1, 8, 8), n_classes=10, options={"depth": 10**9})
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: vit: depth must be an integer from 1 to 100,000; got 1000000000. Leave it out for ...

    Args:
        name: one of :func:`describe`: a registered name, ``timm:NAME``,
            ``torchvision:NAME``, ``hf:FOLDER`` or ``package.module:callable`` (called
            with ``shape`` and ``n_classes`` if it has parameters of these names). Or
            such a callable itself, or ``sklearn:NAME`` for tensors that scikit-learn
            fits.
        shape: shape of one sample. Images have (channels, height, width) and tables (features,). Texts have a
            :class:`fl_core.models.tokens.TokenShape`, which is (length,) with the number of ``tokens``.
        n_classes: number of the model's outputs.
        seed: seed of the weights.
        options: options of the model.
        trial: whether to check the model's output for noise. A model with lazy layers
            is always checked, since the check gives these layers their shapes. The
            package's own models check the shape of images and tables themselves, and
            are tried with texts only.

    Raises:
        UsageError: the name or an option is unknown, the shape does not fit, the
            weights exceed this machine's memory, or the output is not [n, n_classes].
    """
    shape = _check_shape(shape)
    model_options = dict(options or {})
    if type(n_classes) is not int or n_classes < 1:
        raise UsageError(f"n_classes must be at least 1; got {n_classes!r}.")
    if isinstance(name, str):
        build_function, label = (None, name)
    else:
        build_function, label = (
            name,
            getattr(name, "__qualname__", type(name).__name__),
        )
    own_builder = MODELS.own.get(label)
    is_own = own_builder is not None and build_function in (None, own_builder)
    layout = getattr(shape, "layout", None)
    if layout and is_own:
        raise UsageError(
            f"data of several inputs must have a model of your own, or hf:FOLDER for texts; got {label!r}."
        )
    source, colon, library_name = label.partition(":")
    with torch_seeded(seed_of(seed, "model")), bounded(label):
        if build_function is None and colon and source in LIBRARIES:
            model = LIBRARIES[source](library_name, shape, n_classes, model_options)
        else:
            if build_function is None:
                is_named = is_outside(label) or not colon
                if is_named and label not in MODELS:
                    _check_no_torchvision(label)
                if is_named:
                    build_function = MODELS[label]
                else:
                    build_function = import_object("model", label)
            if is_own:
                advice = "Leave it out for the default."
                check_values(model_options, build_function, f"{label}: ", advice)
            model = call_builder(label, build_function, shape, n_classes, model_options)
    if layout:
        model = adapt(model, layout)
    # a hook on the module before an in-place one would see its output overwritten
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            setattr(module, "inplace", False)  # noqa: B010 (mypy takes a module's attributes for tensors)
    make_dense(model)
    model.train()
    if is_own and not isinstance(shape, TokenShape):
        trial = False  # their builders refuse what they cannot take
    has_lazy = any(map(is_lazy, (*model.parameters(), *model.buffers())))
    if trial or has_lazy:
        model = check_fit(label, model, shape, n_classes)
    check_real(model)
    return model


@contextmanager
def bounded(name: str) -> Iterator[None]:
    """Refuse a model whose weights exceed this machine's memory while it is built in the ``with`` block.

    >>> with bounded("wide"), torch.device("meta"):
    ...     nn.Linear(10**9, 10**9)
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: model wide must have weights of at most ... memory; got more. Make it smaller.

    Args:
        name: the model's name, for the message.

    Raises:
        UsageError: the weights exceed the memory.
    """
    most_bytes = storage.memory()
    size = 0

    def add(module: nn.Module, key: str, parameter: Tensor) -> None:
        nonlocal size
        size += 0 if is_lazy(parameter) else parameter.nbytes
        if size > most_bytes:
            most_size = storage.format_bytes(most_bytes)
            raise UsageError(
                f"model {name} must have weights of at most {most_size}, this machine's memory; "
                "got more. Make it smaller."
            )

    hook = register_module_parameter_registration_hook(add)
    try:
        yield
    finally:
        hook.remove()


def with_loss(model: Any, loss: Any) -> Any:
    """Attach a loss from Python to a model, outside of its state. Without a loss the model stays as it is.

    The result is a shallow copy of a module. For a name or a callable it is a callable
    that builds the model.

    Args:
        model: a module, a name, or a callable that builds a module.
        loss: a callable, or None for no loss from Python.

    Raises:
        UsageError: there is a loss, but no model.
    """
    if loss is None:
        return model
    if model is None:
        raise UsageError("a loss from Python must have a model; got none. Pass model=.")
    is_module = isinstance(model, nn.Module)
    copied_model = copy.copy(model) if is_module else functools.partial(build, model)
    vars(copied_model)[OWN_LOSS] = loss
    return copied_model


def copy_user_model(
    model: Any,
    shape: tuple[int, ...],
    n_classes: int,
    *,
    trial: bool = True,
    **built: Any,
) -> nn.Module:
    """Return a copy of the user's module after a check that it fits, or the module that the user's callable builds.

    It is on the CPU and in training mode. Modules that their author put in evaluation
    mode are marked for :func:`fl_core.tree.train`.

    Args:
        model: the user's module, or a name or callable as for :func:`build`.
        shape: shape of one sample.
        n_classes: number of outputs.
        trial: as for :func:`build`.
        built: ``seed`` and ``options`` of :func:`build`, for a callable. A module
            ignores them.

    Raises:
        UsageError: the module does not fit, or cannot be copied. For a callable as for
            :func:`build`.
    """
    if not isinstance(model, nn.Module):
        if hasattr(model, OWN_LOSS):
            (model,) = model.args
        return build(model, shape, n_classes, trial=trial, **built)
    check_real(model)
    model_copy = copied(plain(model)).cpu()
    keep_evaluating(model_copy)
    make_dense(model_copy)
    model_copy.train()
    if layout := getattr(shape, "layout", None):
        model_copy = adapt(model_copy, layout)
    if trial:
        model_copy = check_fit(type(model_copy).__name__, model_copy, shape, n_classes)
    return model_copy


def example(shape: tuple[int, ...], n: int = 2) -> Tensor:
    """Return a fixed example input to trace a model: ``n`` samples of standard normal noise, float32 [n, ...].

    Texts are random token ids, int64, that begin with the start token and have no
    padding. Several inputs are those of real samples, which are repeated if there are
    fewer.

    Args:
        shape: shape of one sample.
        n: number of samples.

    Raises:
        UsageError: a side of the shape or the number of token ids is no integer above 0,
            or a sample has more than :data:`LARGEST` numbers.
    """
    shape = _check_shape(shape)
    generator = torch_generator(0, "example")
    if isinstance(shape, PackedShape):
        return shape.samples[torch.arange(n) % len(shape.samples)]
    if not isinstance(shape, TokenShape):
        return torch.randn(n, *shape, generator=generator)
    last = shape.tokens - 1
    ids = torch.randint(min(1, last), last + 1, (n, *shape), generator=generator)
    ids[..., 0] = min(START, last)
    return ids


def _check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    shape = shape if isinstance(shape, TokenShape | PackedShape) else tuple(shape)
    if not shape or not all(type(side) is int and side > 0 for side in shape):
        raise UsageError(
            f"the shape of a sample must be integers above 0; got {shape}."
        )
    if isinstance(shape, TokenShape) and shape.tokens < 1:
        raise UsageError(
            f"the number of token ids must be above 0; got {shape.tokens}."
        )
    if math.prod(shape) > LARGEST:
        raise UsageError(
            f"a sample must have at most {LARGEST:,} numbers; got shape {shape}. Make it smaller."
        )
    return shape


def output_notes(model: nn.Module, shape: tuple[int, ...], task: str) -> list[str]:
    """Return notes on a user's model: probabilities for logits, several tensors, passes that differ, what cannot train.

    The model sees noise in both modes, and is restored. Two passes in training mode
    begin at one seed and the same persistent buffers, so they differ only by what
    a run cannot restore. A parameter cannot train if no gradient reaches it in either
    mode. A classifier's outputs may be probabilities if all lie in [0, 1], and either
    each sample's sum to 1 or their mean is near 1/2, as that of an untrained sigmoid.
    Without a fault the list is empty.

    Args:
        model: the model.
        shape: shape of one sample.
        task: the kind of task, of :data:`fl_core.rows.TASKS`.

    Raises:
        UsageError: gradients cannot be computed, or training changes a buffer that has no mean.
    """
    x = example(shape, n=8)
    two_samples = x[:2]
    persistent_names = model.state_dict(keep_vars=True)
    trainable = {key: p for key, p in model.named_parameters() if p.requires_grad}

    def output(x: Tensor) -> Tensor:
        buffers = {
            k: b.clone() for k, b in model.named_buffers() if k in persistent_names
        }
        with torch_seeded(0):
            output: Tensor = torch.func.functional_call(model, buffers, (x,))
        return output

    def idle(trained: Tensor, names: list[str]) -> list[str]:
        if not (names and trained.requires_grad):
            return []
        model_class = type(model).__name__
        requirement = f"{model_class} must have gradients"
        with about(requirement, RuntimeError, way="Correct its forward pass."):
            grads = torch.autograd.grad(
                trained.sum(), [trainable[key] for key in names], allow_unused=True
            )
        return [key for key, grad in zip(names, grads, strict=True) if grad is None]

    trained_model = copied(model)
    train(trained_model)
    with torch_seeded(0), torch.no_grad():
        trained_model(x)
    with torch_seeded(0), preserve_state(model):
        with torch.no_grad():
            notes = pass_notes(model.eval(), two_samples)
            outputs = model(x)
        model.train()
        trained_output = output(two_samples)
        idle_names = idle(trained_output, [*trainable])
        with torch.no_grad():
            second_output = output(two_samples)
        # by chance, as by stochastic depth, or an expert that got no sample
        if idle_names:
            model.eval()
            idle_names = idle(output(example(shape, n=16)[8:]), idle_names)
            with torch.no_grad():  # what a module stores has no graph then
                output(two_samples)
    notes += training_notes(model, trained_model)
    if not torch.allclose(trained_output, second_output, *CLOSE, equal_nan=True):
        notes.append(
            "two passes of the model in training mode with one seed differ, so it has a state that clients share and a "
            "resumed run loses: keep it by register_buffer, and draw by torch alone"
        )
    if idle_names:
        notes.append(
            f"no gradient reaches {listing(idle_names, 4)} from noise: "
            "unless samples train them, use them in the model's first output without detach"
        )
    return [*notes, *probability_notes(outputs, task)]


def _check_no_torchvision(name: str) -> None:
    """Refuse a name of torchvision's models without its library.

    Raises:
        UsageError: torchvision has a model of this name. The message has the name with
            its library.
    """
    from torchvision.models import list_models

    if name in list_models():
        raise UsageError(
            f"model must be known here, or named with its library; got {name!r}. "
            f"Write {spelled(model=f'torchvision:{name}')}."
        )


def probability_notes(outputs: Tensor, task: str) -> list[str]:
    """Return a note if a classifier's outputs [n, C] look like probabilities, which the loss would take as logits.

    Otherwise the list is empty, and also for a ``task`` of :data:`fl_core.rows.TASKS`
    without classes or labels.
    """
    in_range = bool(((outputs >= 0) & (outputs <= 1)).all())
    sums_near_1 = (outputs.sum(1) - 1).abs() < 1e-4
    sums_to_1 = outputs.shape[1] > 1 and bool(sums_near_1.all())
    is_centred = 0.25 < float(outputs.mean()) < 0.75
    if task not in (CLASSIFICATION, MULTILABEL) or not in_range:
        return []
    if not (sums_to_1 or is_centred):
        return []
    sums_text = " and sum to 1" if sums_to_1 else ""
    return [
        f"all outputs of the model lie in [0, 1]{sums_text}: the loss takes logits, so "
        "leave out a softmax or sigmoid at the model's end"
    ]


def outputs_of(model: nn.Module, shape: tuple[int, ...]) -> int | None:
    """Return the number of outputs of a user's module, or None if it does not take samples of this shape.

    It counts all numbers of a sample's output. Of a tuple of tensors the first counts.
    It is 1 for a module whose output only a loss of its own can take, such as a dict of
    several tensors without ``logits``. The module itself stays as it is.

    Args:
        model: the module.
        shape: shape of one sample.

    Raises:
        UsageError: the module cannot be copied, or the shape is one that
            :func:`example` refuses.
    """
    samples = example(shape)
    model_copy = copied(plain(model)).cpu().eval()
    adapted_model = adapt(model_copy, getattr(shape, "layout", None))
    try:
        with torch.no_grad(), torch_seeded(0):
            output = adapted_model(samples)
    except UsageError:  # several outputs, which its own loss takes
        return 1
    except Exception:  # of any kind: check_fit names it
        return None
    return output.shape[1]


def check_fit(
    name: str, model: nn.Module, shape: tuple[int, ...], n_classes: int
) -> nn.Module:
    """Check that a model maps samples [n, ...] to [n, n_classes], in training mode and in evaluation mode.

    Args:
        name: the model's name, for messages.
        model: the model.
        shape: shape of one sample.
        n_classes: number of outputs.

    Returns:
        The model in training mode; adapted if it returns ``.logits``, ``["logits"]``, a
        tuple, or numbers [n].

    Raises:
        UsageError: the model fails on such samples, or its outputs have another shape.
    """

    def outputs(model: nn.Module) -> Any:
        buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
        with torch.no_grad(), torch_seeded(0):
            return torch.func.functional_call(model, buffers, (example(shape),))

    with fitting(model, example(shape), name):
        for training in (True, False):
            model.train(training)
            output = outputs(model)
            if not isinstance(output, Tensor) or output.ndim == 1:
                model = adapt(model)
                output = outputs(model)
            if output.shape != (2, n_classes):
                mode = "evaluation"
                if training:
                    mode = "training"
                got_shape = tuple(output.shape)
                raise UsageError(
                    f"model {name} must give logits of shape (2, {n_classes}) for 2 samples of shape {shape}; "
                    f"got shape {got_shape} in {mode} mode. Change its last layer."
                )
    return model.train()


@contextmanager
def fitting(model: nn.Module, x: Tensor, name: str = "") -> Iterator[None]:
    """Turn any error in the ``with`` block into a UsageError of one line: the model does not take these samples.

    Packed inputs are named as the model gets them.

    >>> from fl_core.models.adapter import pack
    >>> _, layout = pack({"ids": torch.ones(2, 3, dtype=torch.int64)})
    >>> with fitting(adapt(nn.Linear(3, 1), layout), torch.zeros(2, 3)):
    ...     raise KeyError("x")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: model Linear must fit ... takes Layout(keys=('ids',), shapes=((3,),), ...

    Args:
        model: the model.
        x: the samples, [n, ...].
        name: the model's name, for the message. Default: its class.

    Raises:
        UsageError: an error came in the block. A UsageError stays as it is.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
        shape = list(x.shape)
        expected = getattr(model, "layout", None) or f"{x.dtype} {shape}"
        advice = f"Correct it until it takes {expected}."
        if "dtype" in str(error) and (other_dtypes := dtypes - {"float32"}):
            other_names = listing(sorted(other_dtypes))
            advice = f"Call .float() on it: it has {other_names}."
        if hasattr(model, "prepare_decoder_input_ids_from_labels"):
            advice = "Give the key decoder_input_ids, of model.prepare_decoder_input_ids_from_labels(labels)."
        model_name = name or type(model).__name__
        got_shape = tuple(x.shape[1:])
        raise UsageError(
            f"model {model_name} must fit samples of shape {got_shape}; got {error!r}. {advice}"
        ) from error


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that can keep running statistics, by path: batch and instance normalisations."""
    return {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, nn.modules.batchnorm._NormBase)
    }


def normalises_batches(model: nn.Module, training: bool) -> bool:
    """Return whether a model normalises over the samples of a batch, in training or evaluation mode.

    The output for a sample then depends on the others, and a single sample may fail.
    Only modules of batch normalisation are examined.

    Args:
        model: the model.
        training: whether the question is for training mode. In evaluation mode a module
            with running statistics does not normalise by the batch.
    """
    return any(
        training or module.running_mean is None
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    )


def tensors_of(path: str, module: nn.Module) -> frozenset[str]:
    """Return the names in the model of a module's parameters and persistent buffers.

    Tied tensors have all their names.

    Args:
        path: the module's path in the model.
        module: the module.
    """
    return frozenset(f"{path}.{key}".lstrip(".") for key in module.state_dict())


def statistics_of(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's running statistics, and of the counters of batches next to them."""
    names: list[str] = []
    for path, norm in batch_norms(model).items():
        names += [f"{path}.{key}".lstrip(".") for key, _ in norm.named_buffers()]
    return frozenset(names)


def drop_statistics(model: nn.Module) -> None:
    """Remove running statistics from batch normalisations, so that they normalise by each batch, also in prediction.

    The model is changed in place. Instance normalisations lose theirs, too.
    """
    for module in batch_norms(model).values():
        module.track_running_stats = False  # type: ignore[assignment]
        for key in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(module, key, None)


def without_weights(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without timm's option that loads weights, for a model that receives trained ones.

    Args:
        model: the model's name. The options of models other than timm's are returned
            unchanged, as a copy.
        options: the model's options.
    """
    return {
        key: value
        for key, value in options.items()
        if not (model.startswith("timm:") and key == PRETRAINED)
    }


def wants_weights(model: str | None, options: Mapping[str, Any]) -> bool:
    """Return whether building a model with these options would load pretrained weights.

    A model ``hf:FOLDER`` always does, and one of timm with the option
    :data:`PRETRAINED`. None is no name, and does not.
    """
    return str(model).startswith("hf:") or (
        str(model).startswith("timm:")
        and str(options.get(PRETRAINED, False)).lower() != "false"
    )


def image_shape(
    model: str, shape: tuple[int, ...], smallest: int = 1
) -> tuple[int, int, int]:
    """Return channels, height and width of the images that a model is built for.

    Args:
        model: the model's name, for messages.
        shape: the shape of a sample.
        smallest: the least height and width that the model takes.

    Raises:
        UsageError: the samples are not images, or too small.
    """
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise UsageError(
            f"model {model}: samples must be images (channels, height, width) of at least {smallest} x {smallest}; got "
            f"shape {shape}. Use mlp for any shape."
        )
    channels, height, width = shape
    return channels, height, width


def call_builder(
    name: str, builder: Any, shape: tuple[int, ...], n_classes: int, options: Options
) -> nn.Module:
    """Build a model by calling the user's function or class.

    Its arguments are ``shape`` and ``n_classes``, if its parameters have these names, and the options.

    Args:
        name: the model's name, for messages.
        builder: the function or class.
        shape: shape of one sample.
        n_classes: number of outputs.
        options: further arguments by name.

    Raises:
        UsageError: an option is unknown or missing, the call fails, or the result is not a module.
    """
    parameters, takes_others = parameters_of(builder)
    known_arguments = {"shape": shape, "n_classes": n_classes}
    arguments = {
        key: value for key, value in known_arguments.items() if key in parameters
    }
    if not takes_others:
        check_options(f"model {name!r}", options, parameters.keys() - arguments.keys())
    for parameter, required in parameters.items():
        if required and parameter not in arguments and parameter not in options:
            raise UsageError(
                f"model {name!r} must have a value for the option {parameter!r}; got none. "
                f"Add model_options={{{parameter!r}: VALUE}}."
            )
    try:
        model = builder(**{**arguments, **options})
    except UsageError:
        raise
    except Exception as error:  # of the user's code, or of torch on odd values
        raise option_error(name, options, error) from error
    if not isinstance(model, nn.Module):
        model_class = type(model).__name__
        raise UsageError(
            f"model {name!r} must return a torch.nn.Module; got a {model_class}."
        )
    return model


def option_error(model: str, options: Options, error: Exception) -> UsageError:
    """Return the UsageError for a model that ``error`` keeps from being built, with its options if there are some."""
    error_type = type(error).__name__
    text = " ".join(str(error).split())
    reason = f"{error_type}: {text}".rstrip(".")
    if not options:
        return UsageError(f"model {model} must be built; got {reason}. Correct it.")
    return UsageError(
        f"options of model {model} must fit it; got {options}: {reason}. Correct model_options."
    )


# --- libraries -------------------------------------------------------------------------------------------------


def from_timm(
    name: str, shape: tuple[int, ...], n_classes: int, options: Options
) -> nn.Module:
    """Build a timm model. ``in_chans`` follows the shape, and so does ``img_size`` if the model takes it.

    Its weights are fresh by default. With the option ``pretrained`` as true they are timm's own, from its cache or the
    network. It may also be the path of a file of weights. timm adapts weights to other classes and channels. In a ViT
    it also adapts them to other image sizes.

    Args:
        name: timm's name of the model.
        shape: shape of an image, (channels, height, width).
        n_classes: number of outputs.
        options: ``pretrained``, and further arguments of the model.

    Raises:
        UsageError: the name or an option is unknown, the samples are no images, or the
            weights are not available or do not fit.
    """
    import timm

    full_name = f"timm:{name}"
    architecture = name.partition(".")[0]
    check_known("timm model", architecture, timm.list_models())
    options = dict(options)
    pretrained = _pretrained_arguments(full_name, name, options.pop(PRETRAINED, False))
    channels, height, width = image_shape(full_name, shape)
    pretrained_config = timm.get_pretrained_cfg(architecture)
    size: Options = {"img_size": height if height == width else (height, width)}
    if "img_size" in options or (
        pretrained_config is not None
        and tuple(pretrained_config.input_size[1:]) == (height, width)
    ):
        size = {}
    create = functools.partial(
        timm.create_model, name, num_classes=n_classes, in_chans=channels, **pretrained
    )
    if not pretrained["pretrained"]:
        return _call_maker(full_name, create, options, size)
    random_state = torch.random.get_rng_state()
    try:
        model = _call_maker(full_name, create, options, size)
        torch.random.set_rng_state(random_state)
        fresh_model = _call_maker(
            full_name, functools.partial(create, pretrained=False), options, size
        )
        _check_loaded(model, fresh_model)
    except UsageError as error:
        reason = str(error).removesuffix(".")
        raise UsageError(
            f"pretrained weights cannot be used: {reason}. "
            "Use timm's cache, the network, or a file, pretrained=PATH."
        ) from error
    return model


def _check_loaded(model: Any, fresh: nn.Module) -> None:
    """Check that pretrained weights set every layer except the classifier, since timm does not warn.

    Args:
        model: the model with pretrained weights.
        fresh: the same model without them, from the same random state.

    Raises:
        UsageError: a tensor with several values is the same in both. The message names
            it.
    """
    heads = model.get_classifier()
    modules = heads if isinstance(heads, tuple) else (heads,)
    parameters = chain.from_iterable(head.parameters() for head in modules)
    head_ids = {id(param) for param in parameters}
    fresh_parameters = dict(fresh.named_parameters())
    unset_names = [
        name
        for name, param in model.named_parameters()
        if id(param) not in head_ids
        and len(param.unique()) > 1
        and torch.equal(param, fresh_parameters[name])
    ]
    if unset_names:
        raise UsageError(
            f"pretrained weights must be of the whole model; got none for {listing(unset_names, 4)}."
        )


def _pretrained_arguments(full: str, name: str, wanted: Any) -> Options:
    """Return timm's arguments for pretrained weights. A model without any is refused: timm would start it at random.

    Args:
        full: the model's name with its library, for messages.
        name: timm's name of the model.
        wanted: the value of the option: true, false, or the path of a file of weights.

    Raises:
        UsageError: timm has no such weights, the file cannot be read, or the value is
            another one.
    """
    import timm

    choice = str(wanted).lower()
    if choice == "false":
        return {"pretrained": False}
    if choice == "true":
        with about(f"model {full}", RuntimeError):  # a tag that it does not know
            published_config = timm.get_pretrained_cfg(name)
        if published_config is None or not published_config.has_weights:
            raise UsageError(
                f"model {full} must have pretrained weights in timm; got none. Give a file, pretrained=PATH."
            )
        return {"pretrained": True}
    if not isinstance(wanted, str) or not Path(wanted).is_file():
        raise UsageError(
            f"model {full}: pretrained must be true, false or the path of a file; got {wanted!r}."
        )
    overlay = {"state_dict": weights.read(Path(wanted))}
    return {"pretrained": True, "pretrained_cfg_overlay": overlay}


def from_torchvision(
    name: str, shape: tuple[int, ...], n_classes: int, options: Options
) -> nn.Module:
    """Build a torchvision classification model with fresh weights. All of them take images of 3 channels.

    Args:
        name: torchvision's name of the model.
        shape: shape of an image, (3, height, width).
        n_classes: number of outputs.
        options: arguments of torchvision's function.

    Raises:
        UsageError: the name or an option is unknown, or the samples are no images of 3 channels.
    """
    import torchvision

    full_name = f"torchvision:{name}"
    check_known(
        "torchvision model",
        name,
        torchvision.models.list_models(module=torchvision.models),
    )
    channels, _, _ = image_shape(full_name, shape)
    if channels != 3:
        raise UsageError(
            f"model {full_name}: images must have 3 channels; got {channels}. Use a timm model for other numbers."
        )
    create = functools.partial(
        torchvision.models.get_model_builder(name), weights=None, num_classes=n_classes
    )
    return _call_maker(full_name, create, options, {})


def from_sklearn(
    name: str, shape: tuple[int, ...], n_classes: int, options: Options
) -> nn.Module:
    """Build a model of scikit-learn for tensors that were fitted by it. Gradients do not train it.

    Args:
        name: ``boosted_trees``.
        shape: shape of one sample, (features,).
        n_classes: number of outputs.
        options: ``trees`` and ``depth`` of :class:`fl_core.models.boosted.BoostedTrees`.

    Raises:
        UsageError: the name or an option is unknown, or the shape does not fit.
    """
    builders = {"boosted_trees": BoostedTrees}
    builder = builders[check_known("scikit-learn model", name, builders)]
    return call_builder(f"{FITTED}{name}", builder, shape, n_classes, options)


def _call_maker(
    model: str, make: Builder, options: Options, size: Options
) -> nn.Module:
    """Call ``make(**size, **options)``, without ``size`` if the function has no such parameter.

    Args:
        model: the model's name, for messages.
        make: the function that builds the model.
        options: the model's options.
        size: the argument for the image's size, or an empty dict.

    Raises:
        UsageError: an option is unknown, or the model cannot be built with them.
    """
    try:
        if size:
            with suppress(TypeError):
                return make(**size, **options)
        return make(**options)
    except TypeError as error:
        match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if match:
            option_names, _ = parameters_of(type(make()))
            check_options(
                f"model {model!r}",
                match.groups(),
                option_names.keys() - {"num_classes", "in_chans"},
            )
        raise option_error(model, options, error) from error
    except Exception as error:
        raise option_error(model, {**size, **options}, error) from error


LIBRARIES: dict[str, Builder] = {
    "timm": from_timm,
    "torchvision": from_torchvision,
    "hf": from_transformers,
    "sklearn": from_sklearn,
}
"""The function that builds the models of a library, by the beginning of their names."""
