"""One tensor in, one tensor [n, outputs] out, for a model of several inputs or of another output.

Several inputs are packed side by side into one tensor, so that samples can be sliced,
joined and shuffled as one. The adapted model unpacks them and calls the model itself.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl_core.errors import UsageError, listing
from fl_core.tree import first_tensor

LABELS = "labels"
"""The key of the labels in a batch dict, as Hugging Face's loaders give it."""
IGNORED = -100
"""The label of positions that do not count, as in torch and in transformers."""
OWN_LOSS = "own_loss"
"""The attribute of a user's module that holds a loss from Python."""
CLOSE = 1e-3, 1e-5
"""Relative and absolute difference up to which two passes of a model are alike."""
ARRAYS = (Tensor, np.ndarray, pd.DataFrame, pd.Series)
"""Types of samples and of labels."""


def check_real(model: nn.Module) -> None:
    """Refuse complex parameters, sparse or quantised buffers, tensors without numbers, and modules without Python code.

    Buffers that no state dict has may be sparse or quantised.

    Raises:
        UsageError: the model has one of these. The message names the tensor, or the
            module.
    """
    for path, module in model.named_modules():
        is_exported = isinstance(module, torch.fx.GraphModule) and "train" in vars(
            module
        )
        if is_exported or isinstance(module, torch.jit.ScriptModule):
            module_class = type(module).__name__
            raise UsageError(
                f"a model must be a module of Python code; got a {module_class} at {path!r}. "
                "Pass the module that was scripted, traced or exported."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            model_class = type(model).__name__
            raise UsageError(
                f"{name!r} of {model_class} must have a shape and numbers; got none yet. Call the model "
                "once, or build it on another device than meta."
            )
    persistent_tensors = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        is_dense = buffer.layout is torch.strided and not buffer.is_quantized
        if name in persistent_tensors and not is_dense:
            model_class = type(model).__name__
            raise UsageError(
                f"buffer {name!r} of {model_class} must be dense and not quantised; got {buffer.dtype} of "
                f"{buffer.layout}. Register it with persistent=False, or as a dense tensor."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            model_class = type(model).__name__
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UsageError(
                f"parameter {name!r} of {model_class} must be real; got "
                f"{dtype}. Store its real and "
                "imaginary parts, as torch.view_as_real gives them."
            )


@dataclass(frozen=True)
class Layout:
    """The places, shapes and types of several inputs that lie side by side in one tensor.

    Attributes:
        keys: names of the inputs of a dict. None for inputs by position.
        shapes, dtypes: shape and type of one sample of each input.
        pad: the id of padding, if the tensor has only token ids. The second input is then their mask.
    """

    keys: tuple[str, ...] | None
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    pad: int | None = None

    def unpack(
        self, x: Tensor, like: torch.dtype
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the inputs by position, as a tuple, and by name, as a dict. One of the two is empty.

        Args:
            x: the packed samples, [n, width].
            like: the type that floating inputs get.
        """
        if self.pad is not None:
            x = torch.cat([x, (x != self.pad).to(x.dtype)], 1)
        widths = [prod(shape) for shape in self.shapes]
        inputs = tuple(
            columns.reshape(len(x), *shape).to(
                like if dtype.is_floating_point else dtype
            )
            for columns, shape, dtype in zip(
                x.split(widths, 1), self.shapes, self.dtypes, strict=True
            )
        )
        if self.keys is None:
            return inputs, {}
        return (), dict(zip(self.keys, inputs, strict=True))

    def join(self, output: Any) -> Tensor:
        """Return several outputs, a dict or a sequence of tensors, side by side as [n, width].

        Only the layout's keys of a dict, or as many of a sequence as the layout has,
        are joined.
        """
        outputs = [output[key] for key in self.keys or range(len(self.shapes))]
        return torch.cat([tensor.reshape(len(tensor), -1) for tensor in outputs], 1)


class PackedShape(tuple[int, ...]):
    """The shape (width,) of a sample of several inputs, side by side.

    Attributes:
        layout: how the inputs lie side by side.
        samples: a few real samples, [n, width], as an example of what the model takes.
    """

    layout: Layout
    samples: Tensor


def as_array(values: Any) -> np.ndarray[Any, Any]:
    """Return a tensor, a list, an array or a part of a table as an array. Masked entries are NaN.

    Masked integers become floats. Masked texts become objects. A tensor or an array may
    share its memory.

    >>> as_array(np.ma.masked_equal([1, 9], 9))
    array([ 1., nan])

    >>> as_array(torch.ones(2, device="meta"))
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: a tensor must have numbers; got one on the device meta. Make it on another device.

    Raises:
        UsageError: a tensor is sparse, or has no numbers.
    """
    if isinstance(values, Tensor):
        return tensor(values).numpy(force=True)
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        element_type = object
        if values.dtype.kind in "biuf":
            element_type = float
        return np.where(
            np.ma.getmaskarray(values), np.nan, values.data.astype(element_type)
        )
    return np.asarray(values)


def check_tables(pairs: Mapping[str, Any]) -> None:
    """Refuse parts of tables that do not belong together.

    Args:
        pairs: {name: (x, y)}. Only pandas' frames and series are checked.

    Raises:
        UsageError: x and y of a pair have other rows or another order, or two x have
            other columns or another order of columns.
    """
    first_columns: tuple[str, list[Any]] | None = None
    for name, pair in pairs.items():
        if isinstance(pair, tuple | list) and len(pair) == 2:
            x, y = pair
        else:
            x, y = (None,) * 2
        indices = [
            table.index
            for table in (x, y)
            if isinstance(table, pd.DataFrame | pd.Series)
        ]
        if len(indices) == 2 and not indices[0].equals(indices[1]):
            raise UsageError(
                f"{name}: x and y must have the same index; got other rows or another order. Write y.loc[x.index]; "
                "or pass arrays, if rows agree by position."
            )
        if not isinstance(x, pd.DataFrame):
            continue
        columns = list(x.columns)
        first_columns = first_columns or (name, columns)
        if columns != first_columns[1]:
            expected = listing(map(str, first_columns[1]))
            columns_text = listing(map(str, columns))
            raise UsageError(
                f"{name} must have the columns of {first_columns[0]} in their order, "
                f"{expected}; got {columns_text}. Write x[columns], or name "
                "them alike."
            )


def tensor(values: Any) -> Tensor:
    """Return an array or a list of numbers as a tensor; float64 arrays and bfloat16 as float32.

    A tensor of another type than bfloat16, also a float64 tensor, is returned as it is.

    NumPy has no bfloat16:

    >>> as_array(torch.ones(2, dtype=torch.bfloat16, requires_grad=True)).dtype
    dtype('float32')

    Raises:
        UsageError: a tensor is sparse or has no numbers, or an array has words.
    """
    if isinstance(values, Tensor):
        if values.layout != torch.strided:
            raise UsageError(
                f"a tensor must be dense; got {values.layout}. Call to_dense() first."
            )
        if values.is_meta:
            raise UsageError(
                "a tensor must have numbers; got one on the device meta. Make it on another device."
            )
        if values.dtype is torch.bfloat16:
            return values.float()
        return values
    array = as_array(values)
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        array = array.astype(np.float32)
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > 16:
        raise UsageError(
            f"values must be numbers; got {array.dtype}. Turn words into numbers first."
        )
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.as_tensor(array if array.flags.writeable else array.copy())


def pack(x: Any) -> tuple[Tensor, Layout | None]:
    """Return several inputs as one tensor [n, d], and their layout; the layout is None for a single tensor or array.

    Integers alone are packed as int64. With floats among the inputs all are float64,
    which is exact for integers up to 2 ** 53. A single tensor or array has no layout,
    and is returned as by :func:`tensor`.

    >>> x, layout = pack({"tokens": torch.tensor([[1, 2]]), "age": torch.tensor([0.5])})
    >>> x, layout.unpack(x, torch.float32)[1]["tokens"]
    (tensor([[1.0000, 2.0000, 0.5000]], dtype=torch.float64), tensor([[1, 2]]))

    Args:
        x: a dict or a sequence of inputs, each with a row for each sample, or one tensor or array.

    Raises:
        UsageError: there are no inputs, they differ in their number of rows, or one cannot be a tensor.
    """
    if isinstance(x, ARRAYS):
        return tensor(x), None
    keys = None
    if isinstance(x, Mapping):
        keys = tuple(map(str, x))
        x = list(x.values())
    inputs = [tensor(input_tensor) for input_tensor in x]
    if not inputs or len({len(input_tensor) for input_tensor in inputs}) > 1:
        shapes_text = (
            ", ".join(str(list(input_tensor.shape)) for input_tensor in inputs)
            or "none"
        )
        raise UsageError(
            f"inputs must have one entry a sample each; got {shapes_text}."
        )
    has_floats = any(map(torch.is_floating_point, inputs))
    dtype = torch.int64
    if has_floats:
        dtype = torch.float64
    packed_inputs = torch.cat(
        [
            input_tensor.reshape(len(input_tensor), -1).to(dtype)
            for input_tensor in inputs
        ],
        1,
    )
    shapes = tuple(tuple(input_tensor.shape[1:]) for input_tensor in inputs)
    return packed_inputs, Layout(
        keys, shapes, tuple(input_tensor.dtype for input_tensor in inputs)
    )


def split_labels(batch: Any) -> tuple[Any, Any]:
    """Return inputs and labels of a batch: a dict with the key :data:`LABELS`, or a tuple that ends with the labels.

    Raises:
        UsageError: the batch has another form.
    """
    if isinstance(batch, Mapping):
        if LABELS not in batch:
            names = ", ".join(map(str, batch))
            raise UsageError(
                f"a dict of inputs must have the key {LABELS!r}; got {names}."
            )
        return {k: v for k, v in batch.items() if k != LABELS}, batch[LABELS]
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        batch_type = type(batch).__name__
        raise UsageError(
            f"data must be pairs (x, y); got {batch_type}. Add the labels."
        )
    return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]


def is_batch(data: Any) -> bool:
    """Return whether data are a dict of inputs with their labels, a tensor or an array, under :data:`LABELS`.

    Hugging Face's loaders give batches in this form.
    """
    labels = None
    if isinstance(data, Mapping):
        labels = data.get(LABELS)
    return isinstance(labels, Tensor | np.ndarray)


def output_of(output: Any, model: nn.Module) -> Tensor:
    """Return a model's output as a tensor: itself, its ``.logits`` or ``["logits"]``, or the first tensor of a tuple.

    If the model's loss takes several outputs, they are returned side by side, [n, width].

    Args:
        output: what the model returned. A dict of a single tensor counts as that
            tensor.
        model: the model, whose ``form`` has the layout of several outputs, if a loss
            takes them.

    Raises:
        UsageError: it is none of these, such as a dict of several tensors without ``logits``.
    """
    form = getattr(model, "form", None)
    if isinstance(form, Layout):
        return form.join(output)
    logits, output_text = getattr(output, "logits", None), type(output).__name__
    if isinstance(output, Mapping):
        logits = output.get("logits", logits)
        tensors = [value for value in output.values() if isinstance(value, Tensor)]
        if len(tensors) > 1 and logits is None:
            names = listing(map(str, output))
            tensors, output_text = [], f"a dict of {names}"
        output = tensors or None
    tensor = first_tensor(output if logits is None else logits)
    if tensor is None:
        model_class = type(model).__name__
        raise UsageError(
            f"{model_class} must return a tensor, .logits, ['logits'] or a "
            f"tuple that begins with a tensor; got {output_text}."
        )
    return tensor


def pass_notes(model: nn.Module, x: Tensor) -> list[str]:
    """Return warnings about a model for its user, from two passes in evaluation mode.

    They report modules that are not registered, several output tensors, and passes that
    differ. Without such a fault the list is empty.

    Args:
        model: the model, which must be in evaluation mode.
        x: the samples of the two passes, [n, ...].

    Raises:
        UsageError: as for :func:`output_of`.
    """
    with torch.no_grad():
        output, second_output = (
            model.own(x) if isinstance(model, Adapter) else model(x) for _ in range(2)
        )
    notes, tensors = [], []
    if hidden_paths := _unregistered(model):
        notes.append(
            f"{listing(hidden_paths, 4)} holds modules that are never trained, sent or measured: use nn.ModuleList or "
            "nn.ModuleDict instead of a list or dict"
        )
    joins_outputs = isinstance(getattr(model, "form", None), Layout)
    if isinstance(output, tuple | list) and not (
        joins_outputs or hasattr(output, "logits")
    ):
        tensors = [value for value in output if isinstance(value, Tensor)]
    if len(tensors) > 1:
        first_shape = list(tensors[0].shape[1:])
        notes.append(
            f"the model returns {len(tensors)} tensors: the first, {first_shape} a sample, is taken as "
            "its output"
        )
    outputs = output_of(output, model), output_of(second_output, model)
    if not torch.allclose(*outputs, *CLOSE, equal_nan=True):
        notes.append(
            "two passes of the model in evaluation mode differ, so results are random: call F.dropout with "
            "training=self.training, and draw nothing in evaluation"
        )
    return notes


def _unregistered(model: nn.Module) -> list[str]:
    """Return the paths of attributes with modules in a Python list, tuple or dict whose parameters are not the model's.

    Attributes whose names begin with an underscore are not searched.
    """
    registered_ids = set(map(id, model.parameters()))
    paths = []
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            modules = [] if key[:1] == "_" else _modules_in(value)
            parameters = chain.from_iterable(
                submodule.parameters() for submodule in modules
            )
            if any(id(parameter) not in registered_ids for parameter in parameters):
                paths.append(f"{path}.{key}".lstrip("."))
    return paths


def _modules_in(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    if isinstance(value, dict | list | tuple):
        for element in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(element)


_MORE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Adapter(nn.Module):
    """A mixin for the class of a model that takes one packed tensor and returns [n, outputs].

    Its instances are copies of a module that share its tensors, modules and hooks (:func:`adapt`).

    Attributes:
        layout: how the inputs lie in the packed tensor. None means that the model takes
            the tensor itself.
    """

    layout: Layout | None
    form: int | Layout | None
    """The axis of the classes, or the layout of several outputs that one loss takes.

    None means an output that is only flattened.
    """
    patched: Callable[..., Any] | None = None
    """A ``forward`` that was set on the module itself, as hooks of libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for packed samples x as [n, outputs].

        With several positions the outputs of a position's classes are next to each other.
        """
        output = self.raw(x)
        if isinstance(self.form, int):
            output = output.movedim(self.form, -1)
        return output.reshape(len(output), -1)

    def raw(self, x: Tensor) -> Tensor:
        """Return the output in the model's own shape, before it is flattened to [n, outputs]."""
        return output_of(self.own(x), self)

    def own(self, x: Tensor) -> Any:
        """Return the output in the model's own form, such as a tuple or an object with ``.logits``."""
        forward = self.patched or super().forward
        if self.layout is None:
            return forward(x)
        floats = (p.dtype for p in self.parameters() if p.is_floating_point())
        dtype = next(floats, torch.float32)
        args, named_inputs = self.layout.unpack(x, dtype)
        parameters = inspect.signature(forward).parameters
        if not any(p.kind in _MORE for p in parameters.values()):
            if not named_inputs and len(parameters) == 1:
                return forward([*args])  # it takes the list itself
            if not named_inputs.keys() <= parameters.keys():
                return forward(named_inputs)  # it takes the dict itself
        return forward(*args, **named_inputs)

    def __reduce__(self) -> Any:
        return adapt, (original(self), self.layout, self.form)


def adapt(
    model: nn.Module, layout: Layout | None = None, form: int | Layout | None = None
) -> Any:
    """Return the model as one that takes packed inputs and returns [n, outputs].

    Names of modules and tensors stay, and tensors are shared. A model that is adapted already keeps its layout and
    form, unless others are given.

    >>> class Two(nn.Module):
    ...     def forward(self, a, b):
    ...         return (a + b, None)
    >>> x, layout = pack((torch.ones(2, 3), torch.ones(2, 3)))
    >>> adapt(Two(), layout)(x)
    tensor([[2., 2., 2.],
            [2., 2., 2.]])

    Args:
        model: the model, which is not changed.
        layout: how the inputs lie in the packed tensor (:func:`pack`). None means that the model takes the tensor.
        form: the axis of the classes in the model's output, or the layout of several
            outputs that one loss takes. None means an output that is only flattened.
    """
    adapted_model: Any = copy.copy(model)
    model_class = type(model)
    if isinstance(model, Adapter):
        layout = layout or model.layout
        if form is None:
            form = model.form
    else:
        attributes = {
            "__doc__": model_class.__doc__,
            "__module__": model_class.__module__,
        }
        adapted_model.__class__ = type(
            model_class.__name__, (Adapter, model_class), attributes
        )
        adapted_model.patched = vars(adapted_model).pop("forward", None)
    adapted_model.layout, adapted_model.form = layout, form
    return adapted_model


def original(model: Any) -> Any:
    """Return a module as it was before :func:`adapt`; other models are returned as they are.

    It shares its tensors, modules and hooks with the adapted model.
    """
    if not isinstance(model, Adapter):
        return model
    plain_model: Any = object.__new__(type(model).__bases__[1])
    added_names = ("layout", "form", "patched")
    plain_model.__dict__.update(
        (k, v) for k, v in vars(model).items() if k not in added_names
    )
    if model.patched is not None:
        plain_model.forward = model.patched
    return plain_model
