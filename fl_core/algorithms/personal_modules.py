"""Personal modules next to a common model: prompts for its inputs or features, and gates on its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fl_core import seeds
from fl_core.algorithms import (
    Algorithm,
    Context,
    Phase,
    Round,
    Shape,
    State,
    Tree,
    register,
)
from fl_core.errors import SHARE, UsageError, at_least
from fl_core.models.extended import Gated
from fl_core.models.tokens import TokenShape
from fl_core.seeds import seed_of, torch_seeded
from fl_core.training.loop import Steps, clip_gradients
from fl_core.training.phases import Batch
from fl_core.tree import assign

CLIENT = "prompts"  # the stream of a client's initial prompts


def draw_prompts(like: Tree, scale: float, seed: int, *parts: int | str) -> Tree:
    """Draw initial prompts: normal noise with mean 0 and standard deviation ``scale``.

    Args:
        like: tensors by name. The prompts have their names, shapes and types.
        scale: the standard deviation.
        seed, parts: the run's seed, and what else distinguishes the draw, such as the client's position.
    """
    noise = {}
    for name, tensor in like.items():
        generator = seeds.torch_generator(seed, CLIENT, *parts, name)
        noise[name] = scale * torch.randn(tensor.shape, generator=generator).to(tensor)
    return noise


class Border(nn.Module):
    """A frame of numbers that is added to the outer pixels of every image, whose size stays.

    It covers ``width`` rows at the top and at the bottom, and ``width`` columns at each side.

    Args:
        shape: shape of an image, (channels, height, width).
        width: width of the frame in pixels.
    """

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        channels, height, breadth = shape
        self.width = width
        self.top, self.bottom = (
            nn.Parameter(torch.zeros(channels, width, breadth)) for _ in range(2)
        )
        self.left, self.right = (
            nn.Parameter(torch.zeros(channels, height - 2 * width, width))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the frame to images [n, C, H, W]."""
        padding = x.shape[-1] - self.width
        side_frame = pad(self.left, (0, padding)) + pad(self.right, (padding, 0))
        return x + torch.cat([self.top, side_frame, self.bottom], 1)


class BorderedModel(nn.Module):
    """A model that receives its images with a :class:`Border` added."""

    def __init__(self, inner: nn.Module, border: Border) -> None:
        super().__init__()
        self.border = border
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs [n, outputs] of the inner model for images [n, C, H, W]."""
        return self.inner(self.border(x))


@register
class PFedPT(Algorithm):
    """A personal frame of pixels on every image, for a common model (pFedPT; Li et al. 2023).

    The frame is ``pad`` pixels wide. With pad = 2 it has 720 numbers for 3 x 32 x 32.
    It starts as standard normal noise drawn for each client. A round first trains the
    frame for ``prompt_epochs`` with the model frozen. This uses SGD with ``prompt_lr``
    and ``prompt_momentum``, whatever the run's optimiser is. Then the model trains for
    the run's epochs with the frame frozen.

    While the frame trains, normalisations use the received statistics. In the authors' released code they are still
    updated.

    Raises:
        UsageError: samples that are no images, images too small for the frame, or a
            ``pad`` of 0.
    """

    name = "pfedpt"
    paper = "pFedPT (Li et al. 2023)"
    trains = "a frame of pixels, then all else"
    travels = "all but the frame"
    keeps = "the frame"
    cost = "2P, of the model without the frame"
    evaluates = "personal"
    added_modules: ClassVar[Mapping[str, str]] = {"border": "personal"}

    @dataclass(frozen=True)
    class Config:
        pad: int = 2
        prompt_epochs: int = 5
        prompt_lr: float = 1.0
        prompt_momentum: float = 0.5

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: Shape, n_classes: int, seed: int
    ) -> nn.Module:
        if len(shape) != 3:
            raise UsageError(
                f"pfedpt: samples must be images (channels, height, width); got shape {shape}."
            )
        if not 1 <= config.pad < min(shape[1:]) / 2:
            raise UsageError(
                f"pfedpt: twice pad must be below the image's sides, {shape[1]} x {shape[2]}; got pad={config.pad}."
            )
        border = Border(shape, config.pad)
        frame: Tree = dict(border.named_parameters())
        assign(frame, draw_prompts(frame, 1.0, seed))
        return BorderedModel(model, border)

    @property
    def frame(self) -> frozenset[str]:
        """Return the names of the frame's tensors."""
        return frozenset(
            name for name in self.task_info.parameters if name.startswith("border.")
        )

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        frame = {name: initial[name] for name in self.frame}
        state.trees["model"].update(
            draw_prompts(frame, 1.0, self.task_info.seed, client)
        )
        return state

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        config = self.config
        return (
            Phase(
                "prompt",
                self.frame,
                config.prompt_epochs,
                batch_stream="prompt",
                lr=config.prompt_lr,
                momentum=config.prompt_momentum,
                weight_decay=0.0,
                optimizer="sgd",
            ),
            Phase("train", self.task_info.tensors - self.frame, self.task_info.epochs),
        )


@register
class PFedGate(Algorithm):
    """A personal gate that scales and prunes the shared weights for every batch (pFedGate; Chen et al. 2023).

    See :class:`~fl_core.models.extended.Gated` for how the gate uses ``target`` and ``split``. Gate and model learn
    together, from the loss of the gated model. The gradients of each are clipped separately, at this algorithm's
    ``clip`` instead of the run's.

    The dense model travels. The paper's sparse message would contain the kept blocks only. The budget is (target -
    s_min) of all weights of a group. Together with its first blocks the group then keeps ``target`` of them. The
    authors' released code applies it to the other blocks alone and keeps less.

    Raises:
        UsageError: samples that are texts; an option out of range.
    """

    name = "pfedgate"
    paper = "pFedGate (Chen et al. 2023)"
    trains, travels, keeps = "all, and a personal gate", "all but the gate", "the gate"
    cost = "2P, of the model without the gate"
    evaluates = "personal"
    step = "gated_step"
    added_modules: ClassVar[Mapping[str, str]] = {"gate": "personal"}

    @dataclass(frozen=True)
    class Config:
        target: Annotated[float, SHARE] = 0.5
        split: Annotated[int, at_least(2)] = 5
        clip: float = 10.0

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: Shape, n_classes: int, seed: int
    ) -> nn.Module:
        if isinstance(shape, TokenShape):
            raise UsageError(
                "pfedgate: samples must be images or tables; got token ids."
            )
        with torch_seeded(seed_of(seed, "gate")):
            return Gated(model, shape, config.target, config.split)

    def gated_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one optimiser step of the gate and of the model.

        The gradients of each are clipped separately, at ``clip``.
        """
        grads = steps.gradients(batch, clip=False)
        gate_grads = {
            name: grad for name, grad in grads.items() if name.startswith("gate.")
        }
        model_grads = {
            name: grad for name, grad in grads.items() if name not in gate_grads
        }
        clip = self.config.clip
        steps.descend(
            clip_gradients(gate_grads, clip) | clip_gradients(model_grads, clip)
        )
