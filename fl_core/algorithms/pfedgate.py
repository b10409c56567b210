"""Personal gates that choose which part of the shared weights a client uses, and how strongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import nn

from fl_core.algorithms import Algorithm, Context, Group, Phase, Round, Shape, register
from fl_core.algorithms.contract import Count
from fl_core.bounds import SHARE, at_least
from fl_core.errors import UsageError
from fl_core.models.extended import Gated
from fl_core.seeds import seed_of, torch_seeded
from fl_core.tokens import TokenShape
from fl_core.training.loop import Batch, Steps, clip_gradients


@register
class PFedGate(Algorithm):
    """A personal gate that scales and prunes the shared weights for every batch (pFedGate; Chen et al. 2023).

    See :class:`~fl_core.models.extended.Gated` for how the gate uses ``target`` and ``split``. Both learn from the loss
    of the adapted model. They learn together, or batch by batch in turn with ``bi_level``, the gate first. The
    gradients of each are clipped at this algorithm's ``clip`` instead of the run's. The gate learns at ``gate_lr``, by
    default the run's rate.

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
    added_modules: ClassVar[Mapping[str, str]] = {"gate": "personal"}

    @dataclass(frozen=True)
    class Config:
        target: Annotated[float, SHARE] = 0.5
        split: Annotated[int, at_least(2)] = 5
        bi_level: bool = False
        gate_lr: float | None = None
        clip: float = 10.0
        eval_batch: Count = 128

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: Shape, n_classes: int, seed: int
    ) -> nn.Module:
        if isinstance(shape, TokenShape):
            raise UsageError(
                "pfedgate: samples must be images or tables; got token ids."
            )
        with torch_seeded(seed_of(seed, "gate")):
            return Gated(model, shape, config.target, config.split, config.eval_batch)

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        gate = frozenset(name for name in self.task_info.tensors if _of_gate(name))
        groups = (
            ()
            if self.config.gate_lr is None
            else (Group(gate, lr=self.config.gate_lr),)
        )
        return (
            Phase(
                "train",
                self.task_info.tensors,
                self.task_info.epochs,
                groups=groups,
                step="gated_step",
            ),
        )

    def gated_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one optimiser step of the gate, of the model, or of both."""
        grads = steps.gradients(batch, clip=False)
        gate_grads = {name: grad for name, grad in grads.items() if _of_gate(name)}
        parts = [
            gate_grads,
            {name: grad for name, grad in grads.items() if name not in gate_grads},
        ]
        if self.config.bi_level:
            parts = [parts[steps.taken % 2]]
        steps.descend(
            {
                name: grad
                for part in parts
                for name, grad in clip_gradients(part, self.config.clip).items()
            }
        )


def _of_gate(name: str) -> bool:
    return name.startswith("gate.")
