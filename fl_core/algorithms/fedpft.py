"""Prompt-driven feature transformation: personal prompts adapt a client's features to the common classifier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fl_core import models, seeds, tree
from fl_core.algorithms import (
    Algorithm,
    Batch,
    Context,
    Group,
    Message,
    Observation,
    Phase,
    Round,
    Shape,
    State,
    Steps,
    Tree,
    register,
)
from fl_core.algorithms.personal_modules import draw_prompts
from fl_core.data.augment import MoCoViews
from fl_core.errors import Count, Positive, Share, UsageError
from fl_core.models.extended import (
    CONTRAST_WIDTH,
    PROMPTS,
    Prompted,
    Transform,
    split_head,
)
from fl_core.seeds import seed_of, torch_seeded

QUEUE, KEY = "queue", "key"
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
"""Options of the ablation's settings (FedPFT, Table 3).

Setting I keeps the transformation without prompts. The table's own number may be that of plain FedAvg."""


class ContrastiveBatch(NamedTuple):
    """A batch for both tasks.

    Attributes:
        x: the samples [b, ...].
        y: their labels [b, ...].
        view: an augmented view of each sample, [b, ...].
        keys: the contrastive feature of another view of each sample, [b, 128].
        buffers: running statistics by name, for a pass that must not change the model's.
    """

    x: Tensor
    y: Tensor
    view: Tensor
    keys: Tensor
    # copies, for a pass that leaves the model's running statistics unchanged
    buffers: Tree


@dataclass(frozen=True)
class Prompting:
    """The options that FedPFT and its variants share.

    Attributes:
        prompts: number of each client's prompts for classification.
        feature_epochs: local epochs of the features phase. Default: all but a fifth of the round's epochs.
        transform_lr: learning rate of the attention. Default: a tenth of the run's, or half without the contrastive
            task.
        heads: number of heads of the attention. It must divide the number of features.
        temperature: temperature of the contrastive loss.
        momentum: momentum of the running average of weights that computes the keys of the contrastive loss.
        queue: number of keys of earlier batches that a client keeps.
        attention: number of each client's first test samples whose attention is recorded after the last round, and
            under a stopping rule at each evaluation after a round. 0 means none.
    """

    prompts: int = 10
    feature_epochs: int | None = None
    transform_lr: float | None = None
    heads: int = 1
    temperature: Positive = 0.07
    momentum: Share = 0.999
    queue: Count = 4096
    attention: int = 20


@register
class FedPFT(Algorithm):
    """Personal prompts in a shared attention that adapts features to the global classifier (Wu et al. 2025).

    An attention tau stands between extractor phi and classifier h (:class:`~fl_core.models.extended.Transform`). Each
    client has ``prompts`` tokens P of its own for classification. For a contrastive task it has ``contrast_prompts``
    tokens Q. That task compares views of an image through tau and a linear map g. The server averages phi, tau, h and
    g.

    A round's E epochs form two phases (Eq. 5 and 6), each with its own optimiser:

    - *Features*, ``feature_epochs``: the contrastive loss trains phi, tau and g. The classification loss trains P and
      tau and gives phi no gradient.
    - *Adapt*, the other epochs: the classification loss trains phi, tau and h. The contrastive loss trains Q alone.

    By default a fifth of E is for adapting, and at least 1. This gives the 4 + 1 of the paper. The paper has 3 + 2 for
    its most skewed data. With a single epoch each phase has one.

    Variants and other options:

    - ``contrast=false``: leave out the contrastive task (w/o L_con).
    - ``alternate=false``: train everything on both losses for E epochs (w/o Alter).
    - ``personal_head``: keep h with the client (p_classifier).
    - ``transform_lr``: the rate of tau, by default a tenth of the run's, or half without the contrastive task. The
      paper has 0.01 and 0.05 with a rate of 0.1.
    - ``temperature``, ``momentum``, ``queue``: of the contrastive task, which is MoCo's version 1. The queue of keys
      stays with the client. Its default 4096 is below MoCo's 65536, which a few hundred samples a client hardly fill.
    - ``attention``: the number of first test samples whose attention is recorded (Fig. 6): after the last round, and
      under a stopping rule at each evaluation after a round. Rows 'prompt_attention' give how much their features
      attend to themselves and to each prompt.

    The key branch holds copies of phi, tau, g and Q that are made again every round. Views never change the running
    statistics while adapting. The ablation's settings are in :data:`SETTINGS`. Classification alone, without prompts
    and without alternating, is FedAvg on the model with tau, if ``transform_lr`` is the run's rate.

    Raises:
        UsageError: a contrastive task on samples that are no images; more feature epochs than epochs; heads that do
            not divide the features; a queue or a temperature of 0.
    """

    name = "fedpft"
    paper = "FedPFT (Wu et al. 2025)"
    trains = "all, and personal prompts"
    travels = "all but the prompts"
    keeps = "the prompts, and a queue of keys"
    cost = "2P, of the model with transformation and projection"
    evaluates = "personal"
    added_modules: ClassVar[Mapping[str, str]] = {
        "transform": "shared",
        "projection": "shared",
        "prompts": "personal",
        "contrast_prompts": "personal",
    }

    @dataclass(frozen=True)
    class Config(Prompting):
        contrast_prompts: int = 20
        contrast: bool = True
        alternate: bool = True
        personal_head: bool = False

    def setup(self) -> None:
        self.views = MoCoViews(self.task_info.mean, self.task_info.std)
        if (
            self.config.feature_epochs is not None
            and self.config.feature_epochs > self.task_info.epochs
        ):
            raise UsageError(
                f"{self.name}: feature_epochs must be at most {self.task_info.epochs}, the epochs of a round; "
                f"got {self.config.feature_epochs}."
            )

    # --- the model ---

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: Shape, n_classes: int, seed: int
    ) -> nn.Module:
        if cls.compares(config) and len(shape) != 3:
            raise UsageError(
                f"{cls.name}: samples must be images (channels, height, width); got shape {shape}. "
                "Use fedpft with contrast=false for other samples."
            )
        body, head = split_head(model, models.example(shape))
        width = head.in_features
        counts = (
            config.prompts,
            config.contrast_prompts if cls.compares(config) else 0,
        )
        empty_prompts = {
            name: head.weight.new_empty(n, width)
            for name, n in zip(PROMPTS, counts, strict=True)
            if n
        }
        with torch_seeded(seed_of(seed, "transform")):
            transform = Transform(width, config.heads)
            prompted_model = Prompted(
                body,
                head,
                transform,
                draw_prompts(empty_prompts, SPREAD, seed),
                cls.compares(config),
                cls.direct,
            )
        return prompted_model.to(head.weight.dtype)

    # whether the contrastive task uses the extractor's features directly
    direct: ClassVar[bool] = False

    @classmethod
    def compares(cls, config: Any) -> bool:
        """Return whether the model is built with the contrastive task."""
        return bool(config.contrast)

    @property
    def both(self) -> bool:
        """Return whether a client trains the classification and the contrastive task in the same phase."""
        return self.compares(self.config)

    def part_of(self, *parts: str) -> frozenset[str]:
        """Return the names of the tensors in the model's parts, such as ``transform`` or ``head``."""
        return frozenset(
            name for name in self.task_info.tensors if name.partition(".")[0] in parts
        )

    # --- what travels ---

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return super().shared(rnd, client) - (
            self.part_of("head") if self.config.personal_head else frozenset()
        )

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        prompts = tree.select(initial, self.part_of(*PROMPTS))
        seed = self.task_info.seed
        state.trees["model"].update(draw_prompts(prompts, SPREAD, seed, client))
        if self.compares(self.config):
            generator = seeds.torch_generator(seed, QUEUE, client)
            keys = torch.randn(self.config.queue, CONTRAST_WIDTH, generator=generator)
            state.trees[QUEUE] = {
                "keys": normalize(keys).to(initial["projection.weight"]),
                "at": torch.tensor(0),
                "filled": torch.tensor(0),
            }
        return state

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        trained.pop(KEY, None)  # built again from the next message
        return super().client_update(state, trained, ctx, rnd, client)

    # --- what is trained ---

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        epochs = self.task_info.epochs
        tensors = self.task_info.tensors
        if not self.config.alternate:
            return (self.phase("train", tensors, epochs, "both_loss"),)
        feature_epochs = self.config.feature_epochs
        n_feature_epochs = feature_epochs
        if n_feature_epochs is None:
            n_feature_epochs = max(1, epochs - max(1, epochs // 5))
        if feature_epochs is None:
            n_adapt_epochs = max(1, epochs - n_feature_epochs)
        else:
            n_adapt_epochs = epochs - n_feature_epochs
        untrained_parts = () if self.both else ("body",)
        feature_tensors = tensors - self.part_of(
            "head", "contrast_prompts", *untrained_parts
        )
        adapt_tensors = tensors - self.part_of("prompts", "projection")
        return (
            self.phase(
                "features",
                feature_tensors,
                n_feature_epochs if epochs else 0,
                "feature_loss",
                batch_stream="features",
            ),
            self.phase(
                "adapt", adapt_tensors, n_adapt_epochs if epochs else 0, "adapt_loss"
            ),
        )

    def phase(
        self, name: str, train: frozenset[str], epochs: int, loss: str, **options: Any
    ) -> Phase:
        """Return a training phase in which the attention (tau) has its own learning rate.

        If both tasks train, its steps are :meth:`contrast_step`.

        Args:
            name: name of the phase.
            train: names of the tensors that train.
            epochs: passes over the training data.
            loss: name of the method that gives the objective.
            options: further fields of :class:`~fl_core.training.phases.Phase`.
        """
        rate_divisor = 10 if self.compares(self.config) else 2
        groups = (
            Group(self.part_of("transform"), self.config.transform_lr, rate_divisor),
        )
        step = ""
        if self.both:
            step = "contrast_step"
        return Phase(
            name, train, epochs, loss=loss, groups=groups, step=step, **options
        )

    def classify(
        self, params: Tree, batch: Any, ctx: Context, severed: bool = False
    ) -> Tensor:
        """Return the classification loss of a batch (Eq. 3), a scalar.

        It is recorded as the part ``classify`` of the phase's loss.

        Args:
            params: the model's parameters by name.
            batch: samples, labels, and any further parts.
            ctx: the client's context.
            severed: whether the extractor gets no gradient from this loss.
        """
        x, y = batch[:2]
        return ctx.part(
            "classify",
            ctx.criterion(ctx.forward(params, x, severed=severed), y),
            len(y),
        )

    def second(
        self, params: Tree, batch: Any, ctx: Context, live: Iterable[str] | None = None
    ) -> Any:
        """Return the contrastive loss of a batch, or 0 if no phase trains both tasks.

        Args:
            params: the model's parameters by name.
            batch: the batch with its views (:class:`ContrastiveBatch`).
            ctx: the client's context.
            live: names of the parameters that get gradients; None means all that train.
                With names, the pass leaves the model's running statistics unchanged.
        """
        if not self.both:
            return 0.0
        if live is not None:
            live_params = {
                name: p if name in live else p.detach() for name, p in params.items()
            }
            params = live_params | batch.buffers
        return self.contrast_loss(params, batch, ctx)

    def both_loss(self, params: Tree, batch: object, ctx: Context) -> Tensor:
        """Return the sum of the classification and the contrastive loss, over everything that trains.

        Without a contrastive task it is the classification loss alone.
        """
        return self.classify(params, batch, ctx) + self.second(params, batch, ctx)

    def feature_loss(self, params: Tree, batch: object, ctx: Context) -> Tensor:
        """Return the loss of the feature phase (Eq. 5).

        The contrastive loss trains extractor, tau and projection. The classification loss trains prompts and tau. Only
        the latter is left without a contrastive task.
        """
        return self.classify(params, batch, ctx, severed=True) + self.second(
            params, batch, ctx
        )

    def adapt_loss(self, params: Tree, batch: object, ctx: Context) -> Tensor:
        """Return the loss of the adapt phase (Eq. 6).

        It is the sum of the classification loss and the contrastive loss. The
        contrastive loss gives gradients to the contrast prompts Q alone. Without a
        contrastive task it is 0.
        """
        live_names = self.part_of("contrast_prompts")
        return self.classify(params, batch, ctx) + self.second(
            params, batch, ctx, live_names
        )

    # --- the contrastive task: MoCo with a queue and a key branch at each client (He et al. 2020, version 1) ---

    def draw_views(self, steps: Steps, batch: Batch, ctx: Context) -> ContrastiveBatch:
        """Return a batch with a view of each image, and with the key of another view.

        First the weights that compute keys move towards the client's present weights,
        as in MoCo. The first call copies these weights and the client's queue to
        ``ctx.scratch``.
        """
        key_model = ctx.scratch.get(KEY)
        if key_model is None:
            key_model = ctx.scratch[KEY] = tree.clone(steps.live)
        ctx.scratch.setdefault(QUEUE, tree.clone(ctx.trees[QUEUE]))
        config, generator = self.config, steps.generator("views")
        x, y = batch
        view, other_view = (self.views(x, generator) for _ in range(2))
        with torch.no_grad():
            for name in self.task_info.parameters:
                key_model[name].lerp_(steps.live[name], 1 - config.momentum)
            keys = ctx.forward(key_model, other_view, task="contrast")
        buffers = {
            name: t.clone()
            for name, t in steps.live.items()
            if name not in self.task_info.parameters
        }
        return ContrastiveBatch(x, y, view, keys, buffers)

    def enqueue(self, seen: ContrastiveBatch, ctx: Context) -> None:
        """Replace the oldest keys in the client's queue by those of the batch ``seen``.

        Of a batch larger than the queue only the last keys enter.
        """
        queue = ctx.scratch[QUEUE]
        queue_size = len(queue["keys"])
        keys = seen.keys[-len(queue["keys"]) :]
        positions = (
            int(queue["at"]) + torch.arange(len(keys), device=keys.device)
        ) % queue_size
        queue["keys"][positions] = keys
        queue["at"].copy_((queue["at"] + len(keys)) % queue_size)
        queue["filled"].copy_((queue["filled"] + len(keys)).clamp(max=queue_size))

    def contrast_loss(
        self, params: Tree, seen: ContrastiveBatch, ctx: Context
    ) -> Tensor:
        """Return MoCo's loss of a batch: -log softmax of the other view's key among the queue's keys (FedPFT, Eq. 4).

        It is the mean over the batch, a scalar, and recorded as the part ``contrast``.
        Features and keys are unit vectors. The scores are divided by the temperature.
        ``seen`` is the batch with its view and keys.
        """
        queue, config = ctx.scratch[QUEUE], self.config
        queue_keys = queue["keys"][: int(queue["filled"])]
        queries = ctx.forward(params, seen.view, task="contrast")
        scores = (
            torch.cat(
                [(queries * seen.keys).sum(1, keepdim=True), queries @ queue_keys.T], 1
            )
            / config.temperature
        )
        return ctx.part(
            "contrast", (scores.logsumexp(1) - scores[:, 0]).mean(), len(seen.y)
        )

    def contrast_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one optimiser step on a batch together with its views.

        Then the batch's keys enter the client's queue.
        """
        views = self.draw_views(steps, batch, ctx)
        steps.descend(steps.gradients(views))
        self.enqueue(views, ctx)

    # --- what is evaluated ---

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        client_tensors = self.task_info.never_sent | (
            self.part_of("head") if self.config.personal_head else frozenset()
        )
        return {
            self.evaluates: {
                **server.trees["model"],
                **tree.select(client.trees["model"], client_tensors),
            }
        }

    def client_observations(
        self, model: nn.Module, x: Tensor, rnd: Round, client: int
    ) -> Iterable[Observation]:
        if (
            not self.task_info.may_end(rnd.index)
            or not isinstance(model, Prompted)
            or not self.config.attention
        ):
            return
        with torch.no_grad():
            weights = model.attention(x[: self.config.attention])
        for layer, table in weights.items():
            for k, row in enumerate(table.tolist()):
                for j, value in enumerate(row):
                    key = "feature"
                    if j:
                        key = f"prompt {j}"
                    yield Observation(
                        ATTENTION,
                        value,
                        client,
                        layer=layer,
                        variant=f"sample {k + 1}>{key}",
                    )


@register
class TwoStage(FedPFT):
    """Federated MoCo first, then prompted classification from its extractor (FedPFT, appendix E).

    In the first half of the run's rounds phi and g learn the contrastive task on the
    extractor's features. Only these two travel. Then FedPFT continues from that phi
    without its contrastive task. It trains everything jointly, or in two phases with
    ``alternate``. In this stage phi, tau and h travel. The rate of tau is FedPFT's. The
    paper describes the second stage only by its task.

    Raises:
        UsageError: as for :class:`FedPFT`.
    """

    name = "two_stage"
    paper = "FedPFT (Wu et al. 2025), appendix E"
    trains = "the extractor and a projection, then all else and personal prompts"
    travels = "the extractor and a projection, then all but projection and prompts"
    cost = "2P, of the extractor and projection, then of the extractor, transformation and head"
    direct = True

    @dataclass(frozen=True)
    class Config(Prompting):
        alternate: bool = False
        personal_head: ClassVar[bool] = False
        contrast_prompts: ClassVar[int] = 0

    @classmethod
    def compares(cls, config: object) -> bool:
        return True

    @property
    def both(self) -> bool:
        return False

    def first(self, rnd: Round) -> bool:
        """Return whether a round belongs to the first stage, MoCo's."""
        return rnd.index < self.task_info.rounds // 2

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        stage_parts = ("projection",) if self.first(rnd) else ("transform", "head")
        return super().shared(rnd, client) & self.part_of("body", *stage_parts)

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return (
            self.task_info.tensors
            - (self.part_of("body") - self.task_info.never_sent)
            - self.task_info.not_yet_trained(rnd)
        )

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        if self.first(rnd):
            train = self.part_of("body", "projection")
            return (
                Phase(
                    "contrast",
                    train,
                    self.task_info.epochs,
                    loss="contrast_loss",
                    step="contrast_step",
                ),
            )
        return tuple(
            replace(phase, train=phase.train - self.part_of("projection"))
            for phase in super().phases(rnd, client)
        )
