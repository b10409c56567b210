"""Prompt-driven feature transformation: personal prompts that fit a client's features to the common classifier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_core import models, tree
from fl_core.algorithms.base import Observation, Round, State, TaskInfo, register
from fl_core.algorithms.contrastive import QUEUE, Contrasting, Seen
from fl_core.algorithms.prompts import drawn
from fl_core.data.augment import MoCoViews
from fl_core.errors import UsageError
from fl_core.models.heads import split_head
from fl_core.models.prompted import PROMPTS, Prompted, Transform
from fl_core.plan import LayerPlan
from fl_core.seeds import seed_of, torch_seeded
from fl_core.training.local import Context, Group, Phase
from fl_core.tree import Tree

ATTENTION = "prompt_attention"
SPREAD = 0.02  # standard deviation of the initial prompts
SETTINGS: dict[str, dict[str, Any]] = {
    "I": {"prompts": 0, "alternate": False, "contrast": False},
    "II": {"alternate": False, "contrast": False},
    "III": {"contrast": False},
    "IV": {"contrast_prompts": 0},
    "V": {},
    "VI": {"prompts": 0, "alternate": False, "contrast_prompts": 0},
    "VII": {"alternate": False, "contrast_prompts": 0},
    "VIII": {"alternate": False},
}
"""Options of the ablation's settings (FedPFT, Table 3). I keeps the transformation, without prompts; the table's own
number may be that of plain FedAvg."""


@register
class FedPFT(Contrasting):
    """Personal prompts steer a shared attention that fits features to the global classifier (FedPFT; Wu et al. 2025).

    An attention tau stands between extractor phi and classifier h (:class:`fl_core.models.prompted.Transform`). Each
    client has ``prompts`` tokens P of its own for classification and ``contrast_prompts`` tokens Q for a contrastive
    task, which compares views of an image through tau and a linear map g. phi, tau, h and g are averaged.

    A round's E epochs are two phases (Eq. 5 and 6), each with its own optimiser. *Features*, ``feature_epochs``: the
    contrastive loss moves phi, tau and g, the classification loss P and tau, phi receiving no gradient from it.
    *Adapt*, the rest: the classification loss moves phi, tau and h, the contrastive loss Q alone. By default a fifth
    of E is for adapting, at least 1, which gives the 4 + 1 of the paper (3 + 2 for its most skewed data: 3); with a
    single epoch each phase has one.

    Variants: ``contrast=false`` has no second task (w/o L_con); ``alternate=false`` trains all on both losses for E
    epochs (w/o Alter); ``personal_head`` keeps h with the client (p_classifier); :data:`SETTINGS` the ablation's. The
    classification alone, without prompts and without alternating, is FedAvg on the model with tau.

    tau learns at ``transform_lr``: by default a tenth of the run's rate, or half of it without the second task (the
    paper: 0.01 and 0.05 beside 0.1). The second task is MoCo's, version 1: temperature, momentum, and a queue of keys
    that stays with the client. ``queue`` 4096 is below its 65536, which few hundred samples a client hardly fill;
    negatives that no image has given yet are left out (``mask_unfilled``). The key branch holds copies of phi, tau, g
    and Q, made anew every round. Views never move the running statistics while adapting.

    Evaluation records 'prompt_attention' after the last round: how much the features of the first ``attention`` test
    samples attend to themselves and to each prompt, by the prompts' name as the layer (Fig. 6).

    Raises:
        UsageError: a contrastive task on samples that are no images; more feature epochs than epochs; heads that do
            not divide the features; a queue or a temperature of 0.
    """

    name = "fedpft"
    paper = "FedPFT (Wu et al. 2025)"
    trains, travels, keeps = "all, and personal prompts", "all but the prompts", "the prompts, and a queue of keys"
    cost = "2P, of the model with transformation and projection"
    evaluates = "personal"
    added_modules: ClassVar[Mapping[str, str]] = {
        "transform": "shared",
        "projection": "shared",
        "prompts": "personal",
        "contrast_prompts": "personal",
    }

    @dataclass(frozen=True)
    class Config:
        prompts: int = 10
        contrast_prompts: int = 20
        contrast: bool = True
        alternate: bool = True
        personal_head: bool = False
        feature_epochs: int | None = None
        transform_lr: float | None = None
        heads: int = 1
        residual: bool = False
        layernorm: bool = False
        temperature: float = 0.07
        momentum: float = 0.999
        queue: int = 4096
        mask_unfilled: bool = True
        attention: int = 20

        def __post_init__(self) -> None:
            _check(self)

    def __init__(self, task_info: TaskInfo, plan: LayerPlan | None = None, config: Mapping[str, Any] | None = None):
        super().__init__(task_info, plan, config)
        self.views = MoCoViews(task_info.mean, task_info.std)
        if self.config.feature_epochs is not None and self.config.feature_epochs > task_info.epochs:
            raise UsageError(
                f"{self.name}: feature_epochs={self.config.feature_epochs} of only {task_info.epochs} epochs a round"
            )

    # --- the model ---

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: tuple[int, ...], n_classes: int, seed: int
    ) -> nn.Module:
        if cls.compares(config) and len(shape) != 3:
            raise UsageError(
                f"{cls.name} compares views of images (channels, height, width), not of samples of shape {shape}; "
                "fedpft with contrast=false takes any"
            )
        body, head = split_head(model, models.example(shape))
        width = head.in_features
        counts = (config.prompts, config.contrast_prompts if cls.compares(config) else 0)
        empty = {name: head.weight.new_empty(n, width) for name, n in zip(PROMPTS, counts, strict=True) if n}
        with torch_seeded(seed_of(seed, "transform")):
            transform = Transform(width, config.heads, config.residual, config.layernorm)
            built = Prompted(body, head, transform, drawn(empty, SPREAD, seed), cls.compares(config), cls.direct)
        return built.to(head.weight.dtype)

    direct: ClassVar[bool] = False  # whether the second task takes the extractor's features as they are

    @classmethod
    def compares(cls, config: Any) -> bool:
        """Whether the model is built with the second, contrastive task."""
        return bool(config.contrast)

    @property
    def both(self) -> bool:
        """Whether a client trains the classification and the contrastive task at once."""
        return self.compares(self.config)

    @property
    def looks(self) -> bool:
        """Whether training on the classification task also needs the images' augmented views."""
        return self.both

    def part_of(self, *parts: str) -> frozenset[str]:
        """Names of the tensors of the model's parts, such as ``transform`` or ``head``."""
        return frozenset(name for name in self.task_info.tensors if name.partition(".")[0] in parts)

    # --- what travels ---

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return super().shared(rnd, client) - (self.part_of("head") if self.config.personal_head else frozenset())

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        prompts = tree.select(initial, self.part_of(*PROMPTS))
        state.trees["model"].update(drawn(prompts, SPREAD, self.task_info.seed, client))
        if not self.compares(self.config):
            del state.trees[QUEUE]
        return state

    # --- what is trained ---

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        epochs, all_ = self.task_info.epochs, self.task_info.tensors
        if not self.config.alternate:
            return (self.phase("train", all_, epochs, "both_loss"),)
        feature_epochs = self.config.feature_epochs
        features = max(1, epochs - max(1, epochs // 5)) if feature_epochs is None else feature_epochs
        adapting = max(1, epochs - features) if feature_epochs is None else epochs - features
        alone = () if self.both else ("body",)
        first = all_ - self.part_of("head", "contrast_prompts", *alone)
        second = all_ - self.part_of("prompts", "projection")
        return (
            self.phase("features", first, features if epochs else 0, "feature_loss", batch_stream="features"),
            self.phase("adapt", second, adapting if epochs else 0, "adapt_loss"),
        )

    def phase(self, name: str, train: frozenset[str], epochs: int, loss: str, **options: Any) -> Phase:
        """A training phase in which the transformation (tau) has its own learning rate."""
        slower = 10 if self.compares(self.config) else 2
        groups = (Group(self.part_of("transform"), self.config.transform_lr, slower),)
        step = "contrast_step" if self.looks else ""
        return Phase(name, train, epochs, loss=loss, groups=groups, step=step, **options)

    def classify(self, params: Mapping[str, Tensor], batch: Any, ctx: Context, severed: bool = False) -> Tensor:
        """The classification loss of a batch (Eq. 3)."""
        x, y = batch[:2]
        return ctx.part("classify", ctx.criterion(ctx.forward(params, x, severed=severed), y), len(y))

    def second(self, params: Mapping[str, Tensor], batch: Any, ctx: Context, live: Iterable[str] | None = None) -> Any:
        """The contrastive loss, with gradients for ``live`` alone (None: all that trains); 0 without that task."""
        if not self.both:
            return 0.0
        return self.contrast_loss(params if live is None else self.aside(params, batch, live), batch, ctx)

    def both_loss(self, params: Mapping[str, Tensor], batch: Any, ctx: Context) -> Tensor:
        """The classification and the contrastive loss together, over everything that trains."""
        return self.classify(params, batch, ctx) + self.second(params, batch, ctx)

    def feature_loss(self, params: Mapping[str, Tensor], batch: Any, ctx: Context) -> Tensor:
        """The loss of the feature phase: contrastive for the extractor, classification for prompts and tau (Eq. 5)."""
        return self.classify(params, batch, ctx, severed=True) + self.second(params, batch, ctx)

    def adapt_loss(self, params: Mapping[str, Tensor], batch: Any, ctx: Context) -> Tensor:
        """The loss of the adaptation phase: contrastive for the second prompts, classification for the rest (Eq. 6)."""
        live = self.part_of("contrast_prompts")
        return self.classify(params, batch, ctx) + self.second(params, batch, ctx, live)

    # --- what is evaluated ---

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        personal = self.task_info.never_sent | (self.part_of("head") if self.config.personal_head else frozenset())
        return {self.evaluates: {**server.trees["model"], **tree.select(client.trees["model"], personal)}}

    def client_observations(self, model: nn.Module, x: Tensor, rnd: Round, client: int) -> Iterable[Observation]:
        if not self.task_info.may_end(rnd.index) or not isinstance(model, Prompted) or not self.config.attention:
            return
        with torch.no_grad():
            weights = model.attention(x[: self.config.attention])
        for layer, table in weights.items():
            for k, row in enumerate(table.tolist()):
                for j, value in enumerate(row):
                    key = f"prompt {j}" if j else "feature"
                    yield Observation(ATTENTION, value, client, layer=layer, variant=f"sample {k + 1}>{key}")


@register
class TwoStage(FedPFT):
    """Federated MoCo first, then prompted classification from its extractor (FedPFT, appendix E).

    For the first ``stage_rounds`` rounds, by default half of the run, phi and g learn the contrastive task on the
    extractor's features as they are, and only these two travel. Then FedPFT without its second task goes on, phi being
    what the first stage gave: all is trained jointly, or with ``alternate`` by turns; phi, tau and h travel, and tau's
    rate is FedPFT's. The paper says no more of the second stage than its task. With ``watch`` that stage also evaluates
    the contrastive loss, with the projection as each client left it, which takes as long again.

    Raises:
        UsageError: as of fedpft; no number of rounds for the first stage.
    """

    name = "two_stage"
    paper = "FedPFT (Wu et al. 2025), appendix E"
    trains = "the extractor and a projection, then all else and personal prompts"
    travels = "the extractor and a projection, then all but projection and prompts"
    cost = "2P, of the extractor and projection, then of the extractor, transformation and head"
    direct = True

    @dataclass(frozen=True)
    class Config:
        stage_rounds: int | None = None
        prompts: int = 10
        alternate: bool = False
        feature_epochs: int | None = None
        transform_lr: float | None = None
        heads: int = 1
        residual: bool = False
        layernorm: bool = False
        temperature: float = 0.07
        momentum: float = 0.999
        queue: int = 4096
        mask_unfilled: bool = True
        watch: bool = False
        attention: int = 20
        personal_head: ClassVar[bool] = False
        contrast_prompts: ClassVar[int] = 0

        def __post_init__(self) -> None:
            _check(self)

    def __init__(self, task_info: TaskInfo, plan: LayerPlan | None = None, config: Mapping[str, Any] | None = None):
        super().__init__(task_info, plan, config)
        if self.config.stage_rounds is None and not task_info.rounds:
            raise UsageError(f"{self.name} needs a number of rounds for its first stage: stage_rounds")

    @classmethod
    def compares(cls, config: Any) -> bool:
        return True

    @property
    def both(self) -> bool:
        return False

    @property
    def looks(self) -> bool:
        return bool(self.config.watch)

    def first(self, rnd: Round) -> bool:
        """Whether a round belongs to the first stage, MoCo's."""
        stage_rounds = self.config.stage_rounds
        return rnd.index < (self.task_info.rounds // 2 if stage_rounds is None else stage_rounds)

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        stage = ("body", "projection") if self.first(rnd) else ("body", "transform", "head")
        return super().shared(rnd, client) & self.part_of(*stage)

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return (
            self.task_info.tensors
            - (self.part_of("body") - self.task_info.never_sent)
            - self.task_info.not_yet_trained(rnd)
        )

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        if self.first(rnd):
            train = self.part_of("body", "projection")
            return (Phase("contrast", train, self.task_info.epochs, loss="contrast_loss", step="contrast_step"),)
        return tuple(
            replace(phase, train=phase.train - self.part_of("projection")) for phase in super().phases(rnd, client)
        )

    def second(self, params: Mapping[str, Tensor], batch: Any, ctx: Context, live: Iterable[str] | None = None) -> Any:
        if isinstance(batch, Seen):
            with torch.no_grad():
                self.contrast_loss(self.aside(params, batch), batch, ctx)
        return 0.0


def _check(config: Any) -> None:
    for key in ("temperature", "queue"):
        if not getattr(config, key):
            raise UsageError(f"{key} must be above 0")
    if config.momentum > 1:
        raise UsageError(f"momentum={config.momentum} of the key branch must be at most 1")
