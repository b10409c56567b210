"""A model's tensors as trees, pure functions on trees, and the model's mode and hooks for the time of a block.

A tree is a flat dictionary of tensors whose keys are module paths. It has the contents of a model's ``state_dict``
(parameters and buffers). Its tensors are contiguous, and no two keys share memory. All messages between server and
client and all stored states are made of trees.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fl_core.buffers import (
    CONSTANT,
    LARGEST,
    OF_LARGEST_CLIENT,
    SMALLEST,
    BufferRules,
    check_constant,
    check_shape,
)
from fl_core.errors import UsageError, check_known, listing
from fl_core.seeds import forked_random

Tree = dict[str, Tensor]
Module = TypeVar("Module", bound=nn.Module)

GROUP = 8
"""Weighted means are summed in float64 over groups of this many consecutive trees, groups in order."""


def state_dict(module: nn.Module) -> Tree:
    """Return a copy of a module's parameters and persistent buffers, by name.

    Tied tensors appear once, under their first name.
    """
    return clone(named_tensors(module))


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own tensors without copying: parameters and persistent buffers by name.

    Tied tensors appear once, under their first name.
    """
    persistent_names = module.state_dict(keep_vars=True).keys()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: tensor for name, tensor in tensors.items() if name in persistent_names
    }


def frozen_base(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen base tensors of a model's adapters by name, without copying. Most models have none."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for path, module in model.named_modules():
        for name in getattr(module, "frozen_base", ()):
            tensor = getattr(module, name)
            if isinstance(tensor, Tensor):
                tensors.setdefault(id(tensor), (f"{path}.{name}".lstrip("."), tensor))
    return dict(tensors.values())


def full_state(model: nn.Module) -> Tree:
    """Return a copy of the tensors of a model and of the frozen base of its adapters (:func:`frozen_base`)."""
    return {**state_dict(model), **clone(frozen_base(model))}


def load(module: nn.Module, tree: Mapping[str, Tensor]) -> None:
    """Copy a tree into a module's tensors, strictly: the keys must be exactly the module's.

    Args:
        module: the module, which is changed in place.
        tree: the new values.

    Raises:
        UsageError: keys or shapes differ. The message names the first of them.
    """
    targets = named_tensors(module)
    check_same(targets, tree, "the model", "the weights")
    assign(targets, tree)


@torch.no_grad()
def assign(targets: Mapping[str, Tensor], tree: Mapping[str, Tensor]) -> None:
    """Copy a tree's values into the tensors of the same names.

    Args:
        targets: the tensors, which are changed in place.
        tree: the values. It must have all names of the targets. Others are ignored.
    """
    for name, target in targets.items():
        target.copy_(tree[name])


def clone(tree: Mapping[str, Tensor]) -> Tree:
    """Return a deep copy without gradients: contiguous tensors that share no memory with the original."""
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tree.items()
    }


def copy_to_cpu(tree: Mapping[str, Tensor]) -> Tree:
    """Return a deep copy on the CPU, without gradients: contiguous tensors, also of a tree that is there already."""
    return {
        name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, t in tree.items()
    }


def select(tree: Mapping[str, Tensor], names: Iterable[str]) -> Tree:
    """Return the entries of these names, in the tree's order, without copying.

    Raises:
        UsageError: a name is not in the tree.
    """
    wanted_names = set(names)
    missing_keys = wanted_names - tree.keys()
    if missing_keys:
        first_name = next(iter(tree), "none")
        missing_names = listing(sorted(missing_keys), 4)
        raise UsageError(
            f"names must be tensors of the tree, such as {first_name}; got {missing_names}."
        )
    return {name: tensor for name, tensor in tree.items() if name in wanted_names}


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tree:
    """Return ``a - b`` for each floating entry. Other entries, such as integer counters, are left out.

    Raises:
        UsageError: the trees have other keys or shapes than each other.
    """
    check_same(a, b)
    return {name: a[name] - b[name] for name in a if a[name].is_floating_point()}


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the Euclidean distance of two trees over all floating entries, in float64.

    It is 0 for equal trees, and for trees without floating entries.

    Raises:
        UsageError: the trees have other keys or shapes than each other.
    """
    differences = subtract(a, b)
    return (
        sum(
            float(differences[name].double().square().sum())
            for name in sorted(differences)
        )
        ** 0.5
    )


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the inner product over all floating entries, summed in float64 in sorted order of names.

    Raises:
        UsageError: the trees have other keys or shapes than each other.
    """
    check_same(a, b)
    return sum(
        float((a[name].double() * b[name].double()).sum())
        for name in sorted(a)
        if a[name].is_floating_point()
    )


def cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the cosine of the angle between two trees, -1 to 1, or 0 if one of them is zero.

    It is taken over all floating entries (:func:`dot`).

    Raises:
        UsageError: the trees have other keys or shapes than each other.
    """
    sizes = (dot(a, a) * dot(b, b)) ** 0.5
    if sizes:
        return dot(a, b) / sizes
    return 0.0


os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
"""A forked process uses one thread. It has none of its parent's threads, and would wait for them for ever."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread inside the block, since the bits of sums depend on the number of threads."""
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(thread_count)


def n_bytes(tree: Mapping[str, Tensor]) -> int:
    """Return the number of bytes of a tree in a message.

    A bool mask costs one bit per entry, and integer counters cost nothing. Bits are
    rounded up to whole bytes.
    """
    bits = 0
    for tensor in tree.values():
        if tensor.dtype == torch.bool:
            bits += tensor.numel()
        elif tensor.is_floating_point():
            bits += 8 * tensor.numel() * tensor.element_size()
    return -(-bits // 8)


def digest(tree: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, types, shapes and bytes, in sorted order of names, as hexadecimal digits.

    Equal digests mean equal bits.
    """
    sha = hashlib.sha256()
    for name in sorted(tree):
        tensor = tree[name].detach().cpu().contiguous()
        shape = tuple(tensor.shape)
        sha.update(f"{name}|{tensor.dtype}|{shape}|".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def check_same(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    name_a: str = "one",
    name_b: str = "the other",
) -> None:
    """Check that two trees have the same keys and shapes.

    Args:
        name_a, name_b: what has the two trees, for the message.

    Raises:
        UsageError: they differ. The message has the first different keys, or the first different shape.
    """
    if a.keys() != b.keys():
        only_a = sorted(a.keys() - b.keys())
        only_b = sorted(b.keys() - a.keys())
        differences = [
            f"only in {owner}: {listing(keys, 4)}"
            for owner, keys in ((name_a, only_a), (name_b, only_b))
            if keys
        ]
        raise UsageError("tensor names must be the same; got " + "; ".join(differences))
    for key in a:
        if a[key].shape != b[key].shape:
            expected = tuple(a[key].shape)
            got_shape = tuple(b[key].shape)
            shapes = f"{expected} in {name_a}, {got_shape} in {name_b}"
            raise UsageError(f"tensor {key!r} must have the same shape; got {shapes}.")


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity, in one pass and without a copy.

    Tensors of other types than real floats are not checked and count as finite, complex
    ones too. One of 8 bits is copied.

    >>> is_finite(torch.tensor([1.0, float("nan")])), is_finite(torch.zeros(0)), is_finite(torch.tensor([1, 2]))
    (False, True, True)
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.itemsize == 1:
        tensor = tensor.float()
    # NaN is both the minimum and the maximum
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def first_nonfinite(
    tree: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> str | None:
    """Return the first key whose tensor has NaN or infinity that it did not have before, or None.

    A buffer with a mask of -inf is no fault.

    >>> first_nonfinite({"mask": torch.tensor([0.0, -torch.inf])}, {"mask": torch.tensor([0.0, -torch.inf])})
    >>> first_nonfinite({"mask": torch.tensor([0.0, -torch.inf])}, {})
    'mask'

    Args:
        tree: the tensors to check.
        before: the tensors of an earlier time. One that is missing here, or has another
            shape, counts as finite.
    """
    for name, tensor in tree.items():
        if not is_finite(tensor):
            tensor_before = before.get(name)
            if tensor_before is None or tensor_before.shape != tensor.shape:
                was_nonfinite = None
            else:
                was_nonfinite = ~tensor_before.isfinite()
            if was_nonfinite is None or bool(
                (~tensor.isfinite() & ~was_nonfinite).any()
            ):
                return name
    return None


_CHOICES = LARGEST, SMALLEST, CONSTANT, OF_LARGEST_CLIENT
"""Rules that choose among the values of clients instead of averaging them."""


class Mean:
    """A streaming weighted mean that gives the same bits however the work is spread over processes.

    Trees are added in their order. Every key is averaged over the trees that have it:

        mean_k = sum_i w_i t_ik / sum_i w_i

    Sums run in float64 over groups of :data:`GROUP` consecutive trees, then over the groups in order. Buffers follow
    their rules (:mod:`fl_core.buffers`). Without one, floats are averaged and the largest of integers counts. For any
    number of trees, memory holds two sums of each entry and one product.

    Args:
        rules: the rules of the model's buffers. None means the default rule for every
            tensor.
    """

    def __init__(self, rules: BufferRules | None = None) -> None:
        self._rules = rules or BufferRules()
        self._total: dict[str, Tensor] = {}
        self._group: dict[str, Tensor] = {}
        self._weight: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._dtype: dict[str, torch.dtype] = {}
        self._count = 0

    def add(self, tree: Mapping[str, Tensor], weight: float) -> None:
        """Add a tree with a weight above 0, usually the client's number of training samples.

        Raises:
            UsageError: the weight is not above 0 and finite, a shape differs from an
                earlier tree's, or a buffer that must be constant differs.
        """
        if not (weight > 0 and math.isfinite(weight)):
            raise UsageError(
                f"weights of a mean must be above 0 and finite; got {weight}."
            )
        for key, tensor in tree.items():
            rule = self._rules.rule(key, tensor)
            total = self._group.get(key, self._total.get(key))
            if total is not None and total.shape != tensor.shape:
                got_shape = tuple(tensor.shape)
                raise UsageError(
                    f"tensor {key!r} must have the same shape; got {total.shape} and {got_shape}."
                )
            if rule in _CHOICES:
                self._total[key] = self._chosen(key, rule, tensor, weight)
                continue
            self._dtype.setdefault(key, tensor.dtype)
            self._weight[key] = self._weight.get(key, 0.0) + weight
            # a separate product: fused into the sum, its rounding would depend on the hardware
            _add(self._group, key, tensor.detach().double() * weight)
        self._count += 1
        if self._count % GROUP == 0:
            self._close_group()

    def result(self) -> Tree:
        """Return the mean, in the trees' own types. It is empty before anything is added.

        Call it after the last tree, since it ends the current group. A buffer that is
        taken from one tree is not copied.
        """
        self._close_group()
        means = {
            key: _in_type(total / self._weight[key], self._dtype[key])
            if key in self._weight
            else total
            for key, total in self._total.items()
        }
        self._rules.renew(means)
        return means

    def _chosen(self, key: str, rule: str, tensor: Tensor, weight: float) -> Tensor:
        """Return the values of a key that count by a rule, among those so far and those of a further tree.

        The largest and the smallest are taken for each entry.
        """
        total = self._total.get(key)
        if total is None:
            self._largest[key] = weight
            return tensor
        if rule == LARGEST:
            return torch.maximum(total, tensor)
        if rule == SMALLEST:
            return torch.minimum(total, tensor)
        if rule == CONSTANT:
            check_constant(key, total, tensor)
            return total
        if weight <= self._largest[key]:
            return total
        self._largest[key] = weight
        return tensor

    def _close_group(self) -> None:
        for key, value in self._group.items():
            _add(self._total, key, value)
        self._group = {}


def _in_type(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mean in a type; integers are rounded."""
    return (total if dtype.is_floating_point else total.round()).to(dtype)


def _add(sums: Tree, key: str, value: Tensor) -> None:
    sums[key] = sums[key].add_(value) if key in sums else value


def mean(
    trees: Iterable[Mapping[str, Tensor]],
    weights: Iterable[float],
    rules: BufferRules | None = None,
) -> Tree:
    """Return the weighted mean of trees (see :class:`Mean`). Of integers the largest is taken, in any order of trees.

    >>> few, many = {"n": torch.tensor([3, 9]), "m": torch.tensor([True, False])}, {"n": torch.tensor([8, 2])}
    >>> [mean(each, [1, 9])["n"].tolist() for each in ((few, many), (many, few))], mean([few], [2])["m"].tolist()
    ([[8, 9], [8, 9]], [True, False])

    Args:
        trees: the trees. Without any, the mean is empty.
        weights: a weight for each tree, above 0.
        rules: the rules of the model's buffers. None means the default rule for every
            tensor.

    Raises:
        UsageError: a weight is not above 0 and finite, a shape differs, or a constant buffer differs.
        ValueError: there are more trees than weights, or fewer.
    """
    accumulator = Mean(rules)
    for tree, weight in zip(trees, weights, strict=True):
        accumulator.add(tree, weight)
    return accumulator.result()


# --- a model for the time of a block ---------------------------------------------------------------------------

Hook = Callable[[nn.Module, tuple[Any, ...], Any], None]
STAYS = "stays_in_evaluation"
"""The attribute of a module that its author put in evaluation mode."""

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@contextmanager
def preserve_state(*models: nn.Module) -> Iterator[None]:
    """Restore models and random state when the block ends, also after an error.

    These are restored:

    * every module's training flag and hooks
    * every parameter's values, ``requires_grad`` and ``grad``: the same tensor objects with the same values. A forward
      pass may write parameters, as that of ``nn.Embedding(max_norm=...)`` does.
    * an embedding's ``sparse``, which is off within
    * buffers, also non-persistent ones: the same objects with the same values
    * torch's CPU generator, and the CUDA generators if CUDA is in use

    Memory: a copy of all parameters, buffers and existing gradients.

    Raises:
        UsageError: the block has resized a buffer. All is restored before.
    """
    with ExitStack() as stack:
        stack.enter_context(forked_random())
        for model in models:
            stack.callback(_remember(model))
        yield


def make_dense(model: nn.Module) -> list[Any]:
    """Switch embeddings with sparse gradients to dense ones, in place, and return these modules.

    The gradients have the same values. The list is empty if there are no such modules.
    """
    sparse: list[Any] = [m for m in model.modules() if getattr(m, "sparse", 0) is True]
    for module in sparse:
        module.sparse = False
    return sparse


def _remember(model: nn.Module) -> Callable[[], None]:
    modules = list(model.modules())
    sparse = make_dense(model)
    training = [module.training for module in modules]
    hooks = [
        {name: dict(getattr(module, name)) for name in _HOOKS} for module in modules
    ]
    buffers = [dict(module._buffers) for module in modules]
    parameters = list(model.parameters())
    flags = [parameter.requires_grad for parameter in parameters]
    grads = [parameter.grad for parameter in parameters]
    tensors = [t for t in (*parameters, *grads, *model.buffers()) if t is not None]
    values = [tensor.detach().clone() for tensor in tensors]
    first_buffers = {name: b.detach().clone() for name, b in model.named_buffers()}

    @torch.no_grad()
    def restore() -> None:
        for module in sparse:
            module.sparse = True
        for module, mode, saved, tables in zip(
            modules, training, buffers, hooks, strict=True
        ):
            module.training = mode
            module._buffers.clear()
            module._buffers.update(saved)
            # in place: handles refer to the dictionary itself
            for name, table in tables.items():
                current_table = getattr(module, name)
                current_table.clear()
                current_table.update(table)
        for parameter, flag, grad in zip(parameters, flags, grads, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = grad
        buffers_now = {name: buffer.detach() for name, buffer in model.named_buffers()}
        resized = {
            name: buffers_now[name].clone()
            for name, first in first_buffers.items()
            if name in buffers_now and buffers_now[name].shape != first.shape
        }
        for tensor, value in zip(tensors, values, strict=True):
            if tensor.shape != value.shape:
                tensor.resize_(value.shape)
            if tensor.layout is not torch.strided or not torch.equal(tensor, value):
                tensor.copy_(value)
        for name, buffer in resized.items():
            check_shape(model, name, first_buffers[name], buffer)

    return restore


def keep_evaluating(model: nn.Module) -> None:
    """Mark the modules that a model's author put in evaluation mode, so that :func:`train` leaves them in it.

    A model that is in evaluation mode itself gets no marks.
    """
    for module in model.modules():
        if model.training and not module.training:
            setattr(module, STAYS, True)


def train(model: nn.Module) -> None:
    """Put a model in training mode, except for modules that :func:`keep_evaluating` has marked."""
    model.train()
    for module in model.modules():
        if getattr(module, STAYS, False):
            module.training = False


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set training or evaluation mode inside the block, and restore each module's own mode after it.

    In training mode, modules that :func:`keep_evaluating` has marked stay in evaluation
    mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    if any(
        was_training != training for _, was_training in modes
    ):  # setting a module's attribute is slow
        train(model) if training else model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            if module.training != was_training:
                module.training = was_training


@contextmanager
def set_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Put the whole model in ``"eval"`` or ``"train"`` mode inside the block.

    Everything is restored afterwards as by :func:`preserve_state`.

    Raises:
        UsageError: the mode is neither.
    """
    check_known("mode", mode, ("eval", "train"))
    with preserve_state(model):
        model.train(mode == "train")
        yield


@contextmanager
def with_hooks(model: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
    """Call ``hooks[path](module, inputs, output)`` after each call of the module at ``path``.

    The path "" is the model itself. The hooks are removed when the block ends, also after an error.

    Raises:
        UsageError: the model does not have the path. The message names the nearest one.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in hooks:
        check_known("module", path, modules)
    with ExitStack() as stack:
        for path, hook in hooks.items():
            stack.callback(modules[path].register_forward_hook(hook).remove)
        yield


def first_tensor(output: object) -> Tensor | None:
    """Return a module's output tensor: the output itself, or the first tensor in it; None if it has none.

    An LSTM or an attention module returns several tensors, for example.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (Mapping, list, tuple)):
        for value in output.values() if isinstance(output, Mapping) else output:
            tensor = first_tensor(value)
            if tensor is not None:
                return tensor
    return None


def copied(model: Module) -> Module:
    """Return a deep copy of a module.

    Raises:
        UsageError: the module cannot be copied.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        advice = "Leave files, locks and generators out of it."
        if "graph leaves" in str(error):
            advice = "Use weight_norm of torch.nn.utils.parametrizations, and store no outputs."
        model_class = type(model).__name__
        raise UsageError(
            f"{model_class} must be a module that copy.deepcopy can copy; got {error!r}. {advice}"
        ) from error


def plain(model: object) -> Any:
    """Return the module inside nn.DataParallel or torch.compile; other modules are returned as they are.

    That of nn.parallel.DistributedDataParallel is returned, too, also from several such
    wrappers within each other.

    >>> type(plain(nn.DataParallel(nn.Linear(2, 1)))).__name__
    'Linear'
    """
    parallel_classes = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, parallel_classes) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, parallel_classes) else model._orig_mod
    return model
