"""A copy of a model on a device, for training and evaluation.

Trees of weights are loaded into it and read out again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn

from fl_core import tree
from fl_core.errors import UsageError, listing
from fl_core.models.building import batch_norms, normalises_batches, tensors_of
from fl_core.models.extended import head_path, hold
from fl_core.tree import Tree, in_mode


def memory_format(model: nn.Module, example: Tensor | None = None) -> str:
    """Return the memory layout of images and weights in training: ``contiguous`` or ``channels_last``.

    It is ``channels_last`` for every model with a Conv2d, unless the model fails on such an ``example``, as one that
    flattens maps by ``view`` does. Other errors are raised. The rule is fixed and not based on timing, since the two
    formats round differently. Trees that leave a workspace are contiguous in both.

    Args:
        model: the model.
        example: samples that the model takes. If they are no images [n, C, H, W], the
            layout is ``contiguous``. None: the model is not tried on samples.
    """
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return "contiguous"
    if example is None:
        return "channels_last"
    if example.ndim != 4:
        return "contiguous"
    try:
        with torch.no_grad(), in_mode(model, False):
            dtype = example.dtype
            if dtype.is_floating_point:
                dtype = next(model.parameters()).dtype
            model(example.to(dtype, memory_format=torch.channels_last))
    except RuntimeError as error:
        if "view" not in str(error):
            raise
        return "contiguous"
    return "channels_last"


class Workspace:
    """A copy of a model on a device, into which weights are loaded from trees (tensors by name).

    Args:
        model: the model, which stays unchanged.
        device: the device of the copy.
        memory: memory layout of images, ``contiguous`` or ``channels_last``. None means that of :func:`memory_format`.

    Raises:
        UsageError: the model cannot be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str | torch.device = "cpu",
        memory: str | None = None,
    ) -> None:
        self.memory = memory or memory_format(model)
        self.model = tree.copied(model).to(device)
        pool_first(self.model)
        if self.memory == "channels_last":
            self._format = torch.channels_last
        else:
            self._format = torch.contiguous_format
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.ndim == 4:
                # one channel too, unlike contiguous()
                tensor.data = tensor.data.to(memory_format=self._format)
        self.device = torch.device(device)
        self._live = tree.named_tensors(self.model)
        listed_ids = set(map(id, self._live.values()))
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        for module in self.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in listed_ids:
                    self._buffers.append((module, key, buffer))
        self.params: Tree = dict(self.model.named_parameters())
        # names of the tensors that are present; None = all
        self.submodel: frozenset[str] | None = None
        self._outputs = FrozenPrefixCache()
        self._rest = nn.Sequential()
        self._ahead: tuple[Tensor, Tensor] | None = None
        self._head: nn.Module | None = None
        self.couples = normalises_batches(self.model, training=True)  # samples
        self.norms = [
            (module, tensors_of(name, module))
            for name, module in batch_norms(self.model).items()
        ]

    @property
    def live(self) -> Tree:
        """Return the model's own tensors by name, without copying.

        A forward pass may have put new tensors in place of buffers, as ``self.mean = 0.9 * self.mean + ...`` does.
        Their values are copied into the first ones.

        Raises:
            UsageError: a new one has another shape.
        """
        for module, key, first_buffer in self._buffers:
            if (buffer := module._buffers[key]) is first_buffer:
                continue
            if getattr(buffer, "shape", None) != first_buffer.shape:
                module_class = type(module).__name__
                raise UsageError(
                    f"buffer {key!r} of {module_class} must keep its shape in training; got another. "
                    "Register it with persistent=False."
                )
            module._buffers[key] = first_buffer.copy_(cast(Tensor, buffer).detach())
        return self._live

    def place(self, x: Tensor) -> Tensor:
        """Move samples [n, ...] to the device, images in the workspace's memory layout."""
        if x.ndim == 4:
            return x.to(self.device, memory_format=self._format)
        return x.to(self.device)

    def hold(self, names: frozenset[str] | None = None) -> None:
        """Restrict the model to the submodel of the named tensors; None means the whole model.

        Residual blocks and early exits without any of these tensors are skipped
        (:func:`fl_core.models.extended.hold`).

        Raises:
            UsageError: a tensor is not named, and the forward pass cannot do without
                it.
        """
        if names == self.live.keys():
            names = None
        if names != self.submodel:
            hold(self.model, names)
            self.submodel = names

    def load(self, source: Tree, submodel: frozenset[str] | None = None) -> None:
        """Copy weights into the model, after restricting it to a submodel (:meth:`hold`).

        Args:
            source: the weights, with exactly the names and shapes of the model or submodel.
            submodel: names of the submodel's tensors; None means the whole model.

        Raises:
            UsageError: names or shapes differ, or as :meth:`hold`.
        """
        self.hold(submodel)
        targets = self._present()
        tree.check_same(targets, source, "the model", "the weights")
        tree.assign(targets, source)

    def read(self) -> Tree:
        """Return a copy of the present weights of the model or submodel, as contiguous tensors on the CPU."""
        return tree.copy_to_cpu(self._present())

    def _present(self) -> Tree:
        return tree.select(self.live, self.submodel or self.live)

    def forward(self, params: Tree, x: Tensor, **options: Any) -> Any:
        """Return the model's outputs, such as logits [n, C], in its present mode.

        Under autocast they are converted to float32.

        Args:
            params: parameters by name: :attr:`params` itself, or others that replace the model's.
            x: samples [n, ...].
            options: keywords of an extended model's forward pass, which then defines the result.

        Raises:
            UsageError: a parameter of the model or submodel is missing.
        """
        if params is not self.params:
            outputs = self._call(params, x, options)
        elif self._ahead is not None and x is self._ahead[0] and not options:
            outputs = self._rest(self._ahead[1])
        else:
            outputs = self.model(x, **options)
        if torch.is_autocast_enabled(self.device.type):
            is_tuple = isinstance(outputs, tuple)
            if is_tuple:
                return tuple(map(Tensor.float, outputs))
            return outputs.float()
        return outputs

    def _call(self, params: Tree, x: Tensor, options: dict[str, Any]) -> Any:
        names = self.params.keys()
        missing_tensors = (names & (self.submodel or names)) - params.keys()
        if missing_tensors:
            missing_names = listing(sorted(missing_tensors), 4)
            raise UsageError(
                f"a forward pass must get all parameters of the model; got none for {missing_names}."
            )
        return torch.func.functional_call(self.model, dict(params), (x,), options)

    def frozen_outputs(self, client: int, samples: Tensor, x: Tensor) -> Tensor | None:
        """Return outputs [n, ...] of the frozen first layers. Call it within :meth:`trains`.

        They come from the cache, or are computed and stored there. The result is None without such layers, or if the
        outputs are too large for the cache.

        Args:
            client: the client's position.
            samples, x: the client's own tensor of samples [n, ...], and the result of :meth:`place` for it.
        """
        halves = cut(self.model)
        if halves is None:
            return None
        fixed_part, self._rest = halves
        return self._outputs.outputs(client, fixed_part, samples, x)

    def continue_from(self, x: Tensor, outputs: Tensor) -> None:
        """Start later forward passes over this ``x`` from the frozen layers' outputs for it.

        It takes effect until the next call or the end of :meth:`trains`, for the same tensor object only, and for
        passes with the model's own :attr:`params` and no options.
        """
        self._ahead = x, outputs

    def infer(self, params: Tree, x: Tensor, **options: Any) -> Tensor:
        """Return outputs, such as logits [n, C], in evaluation mode without gradients.

        It can be called during training, too.

        Args:
            params: all tensors of the model by name.
            x: samples [n, ...].
            options: as for :meth:`forward`.

        Raises:
            UsageError: a parameter of the model or submodel is missing.
        """
        with in_mode(self.model, False), torch.no_grad():
            outputs: Tensor = self._call(params, x, options)
        return outputs

    def features(self, params: Tree, x: Tensor) -> Tensor:
        """Return the input [n, d] of the last linear layer for samples x, in the model's present mode.

        Raises:
            UsageError: the model does not end in a linear layer, or a parameter is
                missing.
        """
        if self._head is None:
            self._head = self.model.get_submodule(head_path(self.model, x[:1]))
        inputs_seen: list[Tensor] = []
        hook = self._head.register_forward_pre_hook(
            lambda _, inputs: inputs_seen.append(inputs[0])
        )
        with hook:
            self.forward(params, x)
        return inputs_seen[-1]

    @contextmanager
    def trains(self, names: frozenset[str]) -> Iterator[list[str]]:
        """Let exactly the named tensors have gradients in the ``with`` block, with the model in training mode.

        It yields the names of the parameters that train, sorted. Those that the model's
        author froze are left out. A batch normalisation without any of the named
        tensors runs in evaluation mode.
        """
        flags = {name: param.requires_grad for name, param in self.params.items()}
        trained_names = {
            name for name in names if flags.get(name)
        }  # parameters that the model's author froze stay frozen
        try:
            tree.train(self.model)
            for module, norm_tensors in self.norms:
                module.training &= bool(norm_tensors & names)
            for name, param in self.params.items():
                param.requires_grad_(name in trained_names)
                param.grad = None
            yield sorted(trained_names)
        finally:
            self._ahead = None
            for name, param in self.params.items():
                param.requires_grad_(flags[name])
                param.grad = None


CHUNK = 64  # samples computed at a time, whatever the batch, so that bits depend on model and data alone
KEPT = 1 << 28  # bytes of outputs that one process keeps

_SAMPLEWISE = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Flatten,
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.LayerNorm,
    nn.GroupNorm,
)
_QUIET_IN_EVALUATION = (nn.BatchNorm1d, nn.BatchNorm2d, nn.Dropout, nn.Dropout2d)
_WORK = (nn.Linear, nn.Conv1d, nn.Conv2d)


def cut(model: nn.Module) -> tuple[nn.Sequential, nn.Sequential] | None:
    """Split a model after the layers whose outputs stay the same in every epoch.

    The result is the pair of both parts. It is None if the first part would have no linear or convolutional layer, or
    the model has another form.

    The model must be an ``nn.Sequential`` without hooks. It may contain further ones. Then each module's input is the
    output of the one before it. The first part ends before the first module with one of these properties:

    - It has a tensor that trains.
    - It draws random numbers, uses other samples, or updates statistics. Dropout and batch normalisation do so in
      training mode.
    - Its type is not on the list of PyTorch modules whose behaviour is known.
    """
    modules = chain(model) or []
    fixed_modules = list(takewhile(_is_fixed, modules))
    if not any(type(module) in _WORK for module in fixed_modules):
        return None
    return nn.Sequential(*fixed_modules), nn.Sequential(*modules[len(fixed_modules) :])


class FrozenPrefixCache:
    """A cache of the outputs of a model's frozen first layers, by client.

    It stores the most recently used outputs, up to :data:`KEPT` bytes. All are of the same layers and weights. Other
    layers or weights empty the cache.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._weights: list[Tensor] = []
        self._kept: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()

    def outputs(
        self, client: int, first: nn.Sequential, samples: Tensor, x: Tensor
    ) -> Tensor | None:
        """Return the first layers' outputs for a client's samples, from the cache if nothing has changed.

        Args:
            client: the client's position.
            first: the first layers, from :func:`cut`.
            samples: the client's tensor of samples, recognised by its identity.
            x: the same on the device of the modules.

        Returns:
            The outputs [n, ...], or None if they have more than :data:`KEPT` bytes.
        """
        modules, weights = [*first], [*first.parameters(), *first.buffers()]
        if modules != self._modules or not all(
            map(torch.equal, self._weights, weights)
        ):
            self._kept.clear()
            self._modules = modules
            self._weights = [tensor.detach().clone() for tensor in weights]
        known_samples, outputs = self._kept.pop(client, (None, None))
        if outputs is None or known_samples is not samples:
            if in_chunks(first, x[:1]).nbytes * len(x) > KEPT:
                return None
            outputs = in_chunks(first, x)
        self._kept[client] = samples, outputs
        while sum(value.nbytes for _, value in self._kept.values()) > KEPT:
            self._kept.popitem(last=False)
        return outputs


def in_chunks(first: nn.Sequential, x: Tensor) -> Tensor:
    """Return the outputs of a model's first layers for samples [n, ...], computed :data:`CHUNK` at a time."""
    with torch.no_grad():
        return torch.cat([first(chunk) for chunk in x.split(CHUNK)])


def chain(module: nn.Module) -> list[nn.Module] | None:
    """Return the modules that a sequential model calls one after the other, or None for another model.

    A model with hooks gives None as well, since a hook may read or change what is
    between two modules.
    """
    has_hooks = any(
        submodule._forward_hooks
        or submodule._forward_pre_hooks
        or submodule._backward_hooks
        for submodule in module.modules()
    )
    if has_hooks or type(module).forward is not nn.Sequential.forward:
        return None
    modules: list[nn.Module] = []
    for child in module._modules.values():  # children() leaves out repeated modules
        assert child is not None
        modules += chain(child) or [child]
    return modules


def pool_first(model: nn.Module) -> None:
    """Swap each ReLU of a chain with the max pooling after it, in place, so that ReLU processes fewer values.

    The bits stay the same, since max(relu(x)) = relu(max(x)). Gradients agree too: they go to the first largest element
    if it is above 0. A model that is no chain (:func:`chain`) is left unchanged.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    >>> x, outputs, gradients = torch.randn(4, 1, 8, 8), [], []
    >>> for _ in range(2):
    ...     outputs.append(model(x))
    ...     gradients.append(torch.autograd.grad(outputs[-1].square().sum(), [*model.parameters()]))
    ...     pool_first(model)
    >>> torch.equal(*outputs), [*map(torch.equal, *gradients)]
    (True, [True, True])
    >>> model[1]
    MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)
    """
    if chain(model) is None:
        return
    for (name_a, module_a), (name_b, module_b) in pairwise([*model._modules.items()]):
        is_pooling = type(module_b) is nn.MaxPool2d and not module_b.return_indices
        if is_pooling and type(module_a) is nn.ReLU:
            model._modules |= {name_a: module_b, name_b: module_a}
    for child in model.children():
        pool_first(child)


def _is_fixed(module: nn.Module) -> bool:
    """Return whether a module's output for a sample stays the same in every epoch."""
    if any(param.requires_grad for param in module.parameters()):
        return False
    if type(module) in _QUIET_IN_EVALUATION:
        return not module.training and not normalises_batches(module, False)
    return type(module) in _SAMPLEWISE
