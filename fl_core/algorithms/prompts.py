"""Personal prompts that a client learns to add to its inputs or features of a common model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fl_core import seeds
from fl_core.algorithms import Algorithm, Phase, Round, Shape, State, Tree, register
from fl_core.errors import UsageError
from fl_core.tree import assign

CLIENT = "prompts"  # the stream of a client's initial prompts


def draw_prompts(
    like: Mapping[str, Tensor], scale: float, seed: int, *parts: int | str
) -> Tree:
    """Draw initial prompts: normal noise of one standard deviation, with the shapes and types of the given tensors."""
    noise = {}
    for name, tensor in like.items():
        draw = seeds.torch_generator(seed, CLIENT, *parts, name)
        noise[name] = scale * torch.randn(tensor.shape, generator=draw).to(tensor)
    return noise


class Border(nn.Module):
    """A frame of pixels added to every image: ``width`` rows above and below and ``width`` columns at each side."""

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
        rest = x.shape[-1] - self.width
        middle = pad(self.left, (0, rest)) + pad(self.right, (rest, 0))
        return x + torch.cat([self.top, middle, self.bottom], 1)


class BorderedModel(nn.Module):
    """A model that receives its images with a frame of pixels added."""

    def __init__(self, inner: nn.Module, border: Border) -> None:
        super().__init__()
        self.border, self.inner = border, inner

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, C]."""
        return self.inner(self.border(x))


@register
class PFedPT(Algorithm):
    """A personal frame of pixels on every image, for a common model (pFedPT; Li et al. 2023).

    The frame is ``pad`` pixels wide. With pad = 2 it has 720 numbers for 3 x 32 x 32. It starts as standard normal
    noise drawn for each client. A round first trains the frame for ``prompt_epochs`` with the model frozen. This uses
    SGD with rates of its own, whatever the run's optimiser is. Then the model trains for the run's epochs with the
    frame frozen.

    While the frame trains, normalisations use the received statistics. In the authors' released code they are still
    updated.

    Raises:
        UsageError: samples that are no images, or images too small for the frame.
    """

    name = "pfedpt"
    paper = "pFedPT (Li et al. 2023)"
    trains, travels, keeps = (
        "a frame of pixels, then all else",
        "all but the frame",
        "the frame",
    )
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
        frame = dict(border.named_parameters())
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
        rates: dict[str, Any] = {
            "lr": config.prompt_lr,
            "momentum": config.prompt_momentum,
            "weight_decay": 0.0,
        }
        rates["optimizer"] = "sgd"
        return (
            Phase(
                "prompt",
                self.frame,
                config.prompt_epochs,
                batch_stream="prompt",
                **rates,
            ),
            Phase("train", self.task_info.tensors - self.frame, self.task_info.epochs),
        )
