"""The search for the first NaN or infinity of a client's job. The job runs again for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fl_core import tree
from fl_core.errors import NonFiniteError

if TYPE_CHECKING:
    from fl_core.layers import Layer
    from fl_core.training.workspace import Workspace
from fl_core.model_contexts import tensors_in

SMALLER = ". Use a smaller lr."


class Watch:
    """A context that checks every number of a model's passes, in the order of their computation.

    First it checks the initial weights. In every step it checks the batch's features, the modules' outputs and the
    loss. Then it checks the gradients from output to input, and the new weights. The first value that is not finite is
    the cause of all later ones. An output counts only if the loss is not finite either, because a mask of -inf is no
    fault.

    Args:
        where: algorithm, round, client and phase, for the message.

    Attributes:
        output: the first output of the step that is not finite, in words. It is empty if all are finite.
    """

    def __init__(self, workspace: Workspace, layers: Sequence[Layer], where: str) -> None:
        self._workspace, self._layers, self._where = workspace, layers, where
        self._handles: list[Any] = []
        self._when = "before the first step"
        self.output = ""
        self._latest = ""  # the layer that was passed last
        self._layer = {name: _layer_with(name, layers) for name, _ in workspace.model.named_modules()}

    def __enter__(self) -> Watch:
        for name, module in self._workspace.model.named_modules():
            self._handles.append(module.register_forward_hook(partial(self._look, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def weights(self, by: str = "") -> None:
        """Look at all weights and statistics that the client has.

        Args:
            by: what has changed them, if anything has.

        Raises:
            NonFiniteError: names the first that is not finite, from input to output.
        """
        held, live = self._workspace.submodel, self._workspace.live
        names = (name for layer in self._layers for name in layer.tensors if name in live)
        bad = tree.first_nonfinite({name: live[name] for name in names if held is None or name in held})
        if bad is not None:
            text = (
                f"{by} leaves {self._tensor(bad)} not finite{SMALLER}" if by else f"{self._tensor(bad)} is not finite"
            )
            raise NonFiniteError(self._said(text))

    def batch(self, x: Tensor, step: int) -> None:
        """Begin the step of that number, from 1 on, with these features [b, ...].

        Raises:
            NonFiniteError: a feature is not finite.
        """
        self._when, self.output, self._latest = f"at step {step}", "", ""
        if not tree.is_finite(x):
            raise NonFiniteError(self._said("the batch has features that are not finite"))

    def passes(self, loss: float, grads: Mapping[str, Tensor]) -> None:
        """Look at what the step's forward and backward passes gave.

        Raises:
            NonFiniteError: names the first output that is not finite, or else the loss, or else the first gradient.
        """
        if not math.isfinite(loss):
            hint = SMALLER if "the output of" in self.output else ""
            raise NonFiniteError(
                self._said(f"{self.output}{hint}" or f"all outputs are finite, and the loss is {loss}")
            )
        backward = [name for layer in reversed(self._layers) for name in reversed(layer.tensors) if name in grads]
        bad = tree.first_nonfinite({name: grads[name] for name in backward})
        if bad is not None:
            first = f"first not finite in the backward pass is the gradient of {self._tensor(bad)}"
            raise NonFiniteError(self._said(f"the loss is {loss:g}, and {first}"))

    def _look(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Note a module's output if it is the first that is not finite; modules end in the order of the pass."""
        layer = self._layer[name]
        if not self.output and not all(map(tree.is_finite, tensors_in(output))):
            bad = tree.first_nonfinite({**dict(module.named_parameters()), **dict(module.named_buffers())})
            place = f" (layer {layer!r})" if layer else f" (after layer {self._latest!r})" if self._latest else ""
            module_name = f"module {name!r}{place}" if name else f"the model{place}"
            side = "output" if all(map(tree.is_finite, tensors_in(inputs))) else "input"
            what = f"the {side} of {module_name}" if bad is None else self._tensor(f"{name}.{bad}".lstrip("."))
            self.output = f"first not finite in the forward pass is {what}"
        self._latest = layer or self._latest

    def _tensor(self, name: str) -> str:
        return f"{name!r} (layer {layer_of(self._layers, name)!r})"

    def _said(self, text: str) -> str:
        return f"{self._where}: {self._when}, {text}"


def layer_of(layers: Iterable[Layer], tensor: str) -> str:
    """Name of the layer that a tensor belongs to, or a question mark."""
    return next((layer.name for layer in layers if tensor in layer.tensors), "?")


def _layer_with(module: str, layers: Iterable[Layer]) -> str:
    """Name of the layer of a module; empty for a module without tensors, or with tensors of several layers."""
    parts = {
        part: layer.name for layer in layers for part in (layer.name, *(n.rpartition(".")[0] for n in layer.tensors))
    }
    around = [part for part in parts if part and (module == part or module.startswith(f"{part}."))]
    return parts[max(around, key=len)] if around else ""
