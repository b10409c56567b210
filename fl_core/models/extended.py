"""Models that algorithms extend: a split last layer, two heads, prompts, gates on weights, and residual blocks.

Blocks can be left out for small clients, or followed by early exits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import normalize

from fl_core import tree
from fl_core.errors import UsageError, listing
from fl_core.models.adapter import Adapter
from fl_core.seeds import seed_of, torch_seeded
from fl_core.tree import Hook, Tree, first_tensor, in_mode, with_hooks

PROMPTS = ("prompts", "contrast_prompts")
CONTRAST_WIDTH = 128
"""Width of a contrastive feature, as in MoCo."""


class Transform(nn.Module):
    """Self-attention of a feature over itself and prompts; only the feature's row is used (FedPFT, Eq. 2).

    The tokens are Z = [f; p_1; ...; p_k], all of width d. With biases Q, K, V = Z W_q, Z W_k, Z W_v. Each head computes
    A = softmax(Q K^T / sqrt(d / heads)). The result is row 0 of concat(A V) W_o. This has 4 d^2 + 4 d parameters, as
    the paper's Table 10 counts. Without prompts it is an affine map of f.

    Args:
        width: the width d.
        heads: number of heads, which must divide the width.

    Raises:
        UsageError: ``heads`` does not divide the width.
    """

    def __init__(self, width: int, heads: int = 1) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise UsageError(
                f"heads must divide {width}, the number of features; got {heads}."
            )
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width) for _ in range(4)
        )

    def attention(self, features: Tensor, prompts: Tensor | None) -> Tensor:
        """Return the weights [n, heads, 1 + k] of each feature for itself and the prompts. A row sums to 1.

        Args:
            features: the features, [n, d].
            prompts: the prompts, [k, d]; None for none.
        """
        query = self._split(self.query(features))
        scores = (query * self._split(self.key(features))).sum(-1, keepdim=True)
        if prompts is not None:
            scores = torch.cat(
                [
                    scores,
                    torch.einsum("nhc,khc->nhk", query, self._split(self.key(prompts))),
                ],
                -1,
            )
        return (scores / math.sqrt(query.shape[-1])).softmax(-1)

    def forward(self, features: Tensor, prompts: Tensor | None = None) -> Tensor:
        """Transform features [n, d] with prompts [k, d], or None for no prompts, into features [n, d]."""
        weights = self.attention(features, prompts)
        values = weights[..., :1] * self._split(self.value(features))
        if prompts is not None:
            values = values + torch.einsum(
                "nhk,khc->nhc", weights[..., 1:], self._split(self.value(prompts))
            )
        return self.out(values.flatten(1))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


class Prompted(nn.Module):
    """An extractor, an attention over the client's prompts, and a classifier, with an optional contrastive task.

    Args:
        body: the extractor, from samples to features [n, d].
        head: the classifier, a linear layer of the features.
        transform: the attention between them.
        prompts: initial values [k, d] by the names ``prompts`` and
            ``contrast_prompts``, for the classification and the contrastive task.
            Either may be missing.
        project: whether there is a contrastive task, a linear map of the features to :data:`CONTRAST_WIDTH` numbers.
        direct: whether the contrastive task uses the extractor's features directly.
    """

    def __init__(
        self,
        body: nn.Module,
        head: nn.Linear,
        transform: Transform,
        prompts: Tree,
        project: bool = False,
        direct: bool = False,
    ) -> None:
        super().__init__()
        self.body = body
        self.transform = transform
        self.head = head
        self.direct = direct
        self.projection: nn.Module | None = None
        if project:
            self.projection = nn.Linear(head.in_features, CONTRAST_WIDTH)
        self.prompts, self.contrast_prompts = (
            nn.Parameter(prompts[name]) if name in prompts else None for name in PROMPTS
        )

    def forward(
        self, x: Tensor, task: str = "classify", severed: bool = False
    ) -> Tensor:
        """Return logits [n, C], or unit vectors [n, 128] for ``task="contrast"``.

        Args:
            x: the samples, [n, ...].
            task: ``classify`` or ``contrast``. The latter needs ``project``.
            severed: whether the body receives no gradient.
        """
        features = self.body(x)
        if severed:
            features = features.detach()
        if task == "classify":
            return self.head(self.transform(features, self._tokens("prompts")))
        assert self.projection is not None
        if not self.direct:
            features = self.transform(features, self._tokens("contrast_prompts"))
        return normalize(self.projection(features))

    def attention(self, x: Tensor) -> dict[str, Tensor]:
        """Return the attention weights of each sample's feature for itself and the prompts, averaged over heads.

        Returns:
            Weights [n, 1 + k] under ``prompts`` and under ``contrast_prompts``. A name
            is missing if the model has no such prompts.
        """
        features, weights = self.body(x), {}
        for name in PROMPTS:
            prompts = self._tokens(name)
            if prompts is not None:
                weights[name] = self.transform.attention(features, prompts).mean(1)
        return weights

    def _tokens(self, name: str) -> Tensor | None:
        prompts = getattr(self, name)
        # FLOP counters accept no leaf as an input
        if prompts is None:
            return None
        return prompts.view_as(prompts)


class SwitchableNorm(nn.modules.batchnorm._BatchNorm):
    """Normalisation of images by learnt mixtures of instance, layer and batch statistics (Luo et al. 2019).

    Let m_k and v_k be the mean and variance over an image's channel, over an image, and over the batch's channel. The
    output is the value below, times a weight and plus a bias:

        (x - sum_k a_k m_k) / sqrt(sum_k b_k v_k + eps)

    Here a and b are softmaxes of three learnt numbers each. In evaluation mode running statistics replace the batch's.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.means = nn.Parameter(torch.ones(3))
        self.variances = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised images [n, C, H, W]. In training mode the running statistics are updated."""
        statistics: list[tuple[Tensor, Tensor]] = []
        for dims in ((2, 3), (1, 2, 3), (0, 2, 3)):
            variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
            statistics.append((mean, variance))
        if self.running_mean is not None and self.running_var is not None:
            if self.training:
                self._track(*statistics[2], x.numel() // x.shape[1])
            else:
                statistics[2] = (
                    self.running_mean.view(1, -1, 1, 1),
                    self.running_var.view(1, -1, 1, 1),
                )
        a = self.means.softmax(0)
        b = self.variances.softmax(0)
        mean = (
            a[0] * statistics[0][0] + a[1] * statistics[1][0] + a[2] * statistics[2][0]
        )
        variance = (
            b[0] * statistics[0][1] + b[1] * statistics[1][1] + b[2] * statistics[2][1]
        )
        normalised_x = (x - mean) / (variance + self.eps).sqrt()
        return normalised_x * self.weight.view(1, -1, 1, 1) + self.bias.view(
            1, -1, 1, 1
        )

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, n: int) -> None:
        """Update the running statistics as batch normalisation does, with unbiased variance and a batch count.

        Args:
            mean, variance: the batch's mean and biased variance of each channel.
            n: the number of values of a channel in the batch.
        """
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean.flatten(), self.momentum)
        self.running_var.lerp_(variance.flatten() * n / max(n - 1, 1), self.momentum)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)


class Gate(nn.Module):
    """A network that scores a model's blocks of weights for a batch, from 0 to 1.

    Its layers are normalisation, linear layer, normalisation and sigmoid. The first
    normalisation is :class:`SwitchableNorm` for images, and batch normalisation for
    other samples.

    Args:
        shape: shape of one sample. Three sides mean an image.
        blocks: number of blocks.
    """

    def __init__(self, shape: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.inputs: nn.Module = nn.BatchNorm1d(math.prod(shape))
        if len(shape) == 3:
            self.inputs = SwitchableNorm(shape[0])
        self.linear = nn.Linear(math.prod(shape), blocks)
        self.scores = nn.BatchNorm1d(blocks)
        self.images = len(shape) == 3

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the blocks [blocks] for a batch [n, ...], averaged over its samples."""
        x = self.inputs(x if self.images else x.flatten(1))
        return self.scores(self.linear(x.flatten(1))).sigmoid().mean(0)


BATCH = 128
"""Samples that a gate scores together, at most, outside training."""


class Gated(nn.Module):
    """A model whose blocks of weights are multiplied by the gate's score, or by 0 once the budget is spent.

    Every flattened parameter tensor is cut into at most ``split`` blocks of equal size. The last may be smaller. For
    each batch the gate scores all blocks. A score is at least s_min = min(max(1 / split, 0.1), target).

    The first block of each tensor is kept. The others are chosen in two groups, linear layers and all other tensors. In
    each group the blocks with the highest scores, rounded to tenths, are kept within the budget. The budget is (target
    - s_min) of the group's numbers. With ``target`` 1 all blocks are kept.

    A prediction depends on its batch. In evaluation mode batches have at most :data:`BATCH` samples.

    Args:
        inner: the model.
        shape: shape of one sample.
        target: the share of the weights to keep, above 0 and at most 1. What is kept
            differs a little, since blocks are kept whole and the first ones do not count
            in the budget.
        split: largest number of blocks of a tensor, at least 2.
    """

    def __init__(
        self, inner: nn.Module, shape: tuple[int, ...], target: float, split: int
    ) -> None:
        super().__init__()
        self.target = target
        self.least = min(max(1 / split, 0.1), target)
        linear_names: set[str] = set()
        for path, module in inner.named_modules():
            if isinstance(module, nn.Linear):
                names = [name for name, _ in module.named_parameters(recurse=False)]
                linear_names.update(f"{path}.{name}".lstrip(".") for name in names)
        self.blocks: dict[str, list[int]] = {}  # sizes of the blocks of each tensor
        is_first, is_linear = [], []
        for name, parameter in inner.named_parameters():
            size = math.ceil(parameter.numel() / split)
            sizes = [
                len(block) for block in torch.arange(parameter.numel()).split(size)
            ]
            self.blocks[name] = sizes
            is_first += [True] + [False] * (len(sizes) - 1)
            is_linear += [name in linear_names] * len(sizes)
        self.sizes = np.array([*chain.from_iterable(self.blocks.values())])
        self.first = np.array(is_first)
        self.groups = [np.array(is_linear), ~np.array(is_linear)]
        self.gate = Gate(shape, len(self.sizes))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, C] of samples [n, ...], by the scaled weights."""
        if not self.training and len(x) > BATCH:
            return torch.cat([self(batch) for batch in x.split(BATCH)])
        scales = self.scales(x)
        scaled_parameters = {
            name: p * scale
            for (name, p), scale in zip(
                self.inner.named_parameters(), self._entry_factors(scales), strict=True
            )
        }
        logits: Tensor = functional_call(self.inner, scaled_parameters, (x,))
        return logits

    def scales(self, x: Tensor) -> Tensor:
        """Return the factor of each block of weights for a batch, [blocks]: the gate's score, or 0 if pruned."""
        scores = self.gate(x).clamp(min=self.least)
        is_kept = torch.from_numpy(
            self.kept_blocks(scores.float().numpy(force=True))
        ).to(scores.device)
        return torch.where(is_kept, scores, 0.0)

    def kept_blocks(self, scores: np.ndarray) -> np.ndarray:
        """Return which blocks of weights are kept, bool [blocks]: the first of each tensor, and some within the budget.

        Args:
            scores: the gate's score of each block, [blocks].
        """
        if self.target == 1:
            return np.ones(len(scores), dtype=bool)
        is_kept = self.first.copy()
        tenths = np.round(10 * scores)
        for group in self.groups:
            budget = round((self.target - self.least) * self.sizes[group].sum())
            other_blocks = np.flatnonzero(group & ~self.first)
            for block in other_blocks[np.argsort(-tenths[other_blocks], kind="stable")]:
                if self.sizes[block] <= budget:
                    is_kept[block] = True
                    budget -= self.sizes[block]
        return is_kept

    def _entry_factors(self, scales: Tensor) -> Iterator[Tensor]:
        """Yield the factors of the entries of each parameter tensor, in its shape, from those of the blocks."""
        position = 0
        for sizes, parameter in zip(
            self.blocks.values(), self.inner.parameters(), strict=True
        ):
            repeats = torch.tensor(sizes, device=scales.device)
            entry_factors = scales[position : position + len(sizes)].repeat_interleave(
                repeats, output_size=parameter.numel()
            )
            yield entry_factors.view(parameter.shape)
            position += len(sizes)


def head_path(model: nn.Module, example: Tensor, exact: bool = True) -> str:
    """Return the path of the linear layer whose output is the model's own, before an adapter reshapes it.

    It is ``""`` for a model that is a linear layer itself.

    Args:
        model: the model.
        example: a batch that the model takes.
        exact: whether the layer must give the output itself. If not, the linear layer that runs last will do.

    Raises:
        UsageError: the model does not end in a linear layer.
    """
    outputs: dict[str, Any] = {}

    def note(path: str) -> Hook:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs.pop(path, None)
            outputs[path] = output

        return hook

    linear_paths = [
        path for path, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    with (
        with_hooks(model, {path: note(path) for path in linear_paths}),
        in_mode(model, False),
        torch.no_grad(),
    ):
        model_output = (
            model.raw(example) if isinstance(model, Adapter) else model(example)
        )
    path = next(
        (path for path, output in outputs.items() if output is model_output), None
    )
    if path is None and outputs and not exact:
        path = next(reversed(outputs))
    if isinstance(model, nn.Linear):
        path = ""
    if path is None:
        model_class = type(model).__name__
        raise UsageError(
            f"{model_class} must end in a linear layer, the classifier. Choose another model."
        )
    return path


def split_head(model: nn.Module, example: Tensor) -> tuple[nn.Module, nn.Linear]:
    """Split a model into feature extractor and classifier, such that ``head(body(x))`` equals ``model(x)``.

    The model is changed and becomes the extractor: an identity replaces its last linear
    layer. A model that is refused, or is a linear layer itself, stays as it is. The
    latter's extractor is a new identity.

    Args:
        model: the model.
        example: a batch that the model takes.

    Raises:
        UsageError: the model does not end in a linear layer, or uses it for more than its output.
    """
    path = head_path(model, example)
    with in_mode(model, False), torch.no_grad():
        model_output = model(example)
        head = model.get_submodule(path)
        body = model if path else nn.Identity()
        if path:
            model.set_submodule(path, nn.Identity())
        try:
            is_same = torch.equal(head(body(example)), model_output)
        except Exception:  # of any kind: the model needs more of the layer
            is_same = False
        if not is_same:
            if path:
                model.set_submodule(path, head)
            model_class = type(model).__name__
            raise UsageError(
                f"{model_class} must use its last linear layer {path!r} only once. Choose another model."
            )
    assert isinstance(head, nn.Linear)
    return body, head


class TwoHeads(nn.Module):
    """A feature extractor with a generic and a personal head, whose logits are added.

    The personal head starts at zero, so that the first prediction is the generic head's.

    Args:
        body: the extractor, from samples to features [n, d].
        generic: the generic head, a linear layer of the features.
    """

    def __init__(self, body: nn.Module, generic: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.generic = generic
        self.personal = nn.Linear(
            generic.in_features, generic.out_features, bias=generic.bias is not None
        )
        self.personal.to(device=generic.weight.device, dtype=generic.weight.dtype)
        for param in self.personal.parameters():
            nn.init.zeros_(param)

    def forward(self, x: Tensor, both: bool = False) -> Any:
        """Return logits [n, C] of the personal prediction.

        Args:
            x: the samples, [n, ...].
            both: whether to return the pair of generic and personal logits instead. In
                the pair, personal logits have a gradient for the personal head only.
        """
        features = self.body(x)
        generic = self.generic(features)
        if both:
            return generic, generic.detach() + self.personal(features.detach())
        return generic + self.personal(features)


# --- residual blocks --------------------------------------------------------------------------------------------


class Optional(nn.Module):
    """A container whose forward pass leaves out the children named in ``absent``."""

    absent: frozenset[str] = frozenset()

    def present(self) -> Iterator[tuple[str, nn.Module]]:
        """Return pairs of name and child for the children that take part, in order."""
        return (
            (name, child)
            for name, child in self.named_children()
            if name not in self.absent
        )


class Blocks(nn.Sequential, Optional):
    """A chain of residual blocks. An absent block passes its input on."""

    def forward(self, x: Tensor) -> Tensor:
        for _, block in self.present():
            x = block(x)
        return x


def hold(model: nn.Module, names: Iterable[str] | None = None) -> None:
    """Leave residual blocks and early exits out of the forward pass if they have none of the named tensors.

    Args:
        model: the model, whose containers of blocks and exits are changed.
        names: names of the tensors that a client has. With None the forward pass has
            all blocks and exits again.

    Raises:
        UsageError: a tensor is not named but cannot be left out. The message names the first
            ones. The model stays as it was.
    """
    all_names = set(tree.named_tensors(model))
    names_held = all_names if names is None else set(names)
    missing_tensors = all_names - names_held
    absent: dict[Optional, frozenset[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Optional):
            prefixes = {
                name: f"{path}.{name}.".lstrip(".")
                for name, child in module.named_children()
            }
            tensors = {
                name: {t for t in all_names if t.startswith(prefix)}
                for name, prefix in prefixes.items()
            }
            absent[module] = frozenset(
                name
                for name, stored in tensors.items()
                if stored and stored <= missing_tensors
            )
            missing_tensors = missing_tensors.difference(
                *(tensors[name] for name in absent[module])
            )
    if missing_tensors:
        missing_names = listing(sorted(missing_tensors), 4)
        raise UsageError(
            f"the client's submodel must contain {missing_names}: the forward pass needs it."
        )
    for module, names_absent in absent.items():
        module.absent = names_absent


class BlockList(nn.ModuleList, Optional):
    """A list of residual blocks that the model calls itself, one after the other.

    Absent blocks are in no loop over the list and in no slice of it. A number still
    counts all blocks.
    """

    def __iter__(self) -> Iterator[nn.Module]:
        return (block for _, block in self.present())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [*self][index]
        return super().__getitem__(index)


def with_optional_blocks(model: nn.Module, example: Tensor) -> nn.Module:
    """Change a model such that its residual blocks can be left out, and return it.

    They are the longest chain of modules of one class, under any name, whose outputs
    have the shapes of their inputs: a ``torch.nn.Sequential``, or a
    ``torch.nn.ModuleList`` that the model loops over. Of equal chains the first counts.
    A chain of one block must have the path ``blocks``. The model itself cannot be the
    chain.

    Args:
        model: the model.
        example: a batch that the model takes.

    Raises:
        UsageError: there is no such chain. The model is then as it was.
    """
    chains = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Sequential | nn.ModuleList)
        and len(module) > (path != "blocks")  # by the name a single one is known
        and len({type(block) for block in module.children()}) == 1
    }
    for path, chain_module in sorted(chains.items(), key=lambda item: -len(item[1])):
        is_list = isinstance(chain_module, nn.ModuleList)
        blocks = (BlockList if is_list else Blocks)()
        for name, block in chain_module.named_children():
            blocks.add_module(name, block)
        blocks.train(chain_module.training)
        if not path:
            continue
        model.set_submodule(path, blocks)
        if _can_be_left_out(model, blocks, example):
            return model
        model.set_submodule(path, chain_module)
    model_class = type(model).__name__
    raise UsageError(
        f"{model_class} must have residual blocks: a Sequential or ModuleList of modules of one class, run "
        "one after the other with outputs of their inputs' shapes; got none. Use a model such as "
        "timm:vit_tiny_patch16_224 or timm:mixer_b16_224."
    )


def _can_be_left_out(model: nn.Module, blocks: Any, example: Tensor) -> bool:
    """Return whether a model runs each of its blocks once, in order, and also runs without any of them.

    Each output must have the shape of its block's input.
    """
    names = [name for name, _ in blocks.named_children()]
    calls: list[tuple[str, bool]] = []

    def note(name: str) -> Hook:
        def hook(_module: nn.Module, args: Any, output: Any) -> None:
            input_tensor, output_tensor = first_tensor(args), first_tensor(output)
            same_shape = (
                input_tensor is not None
                and output_tensor is not None
                and input_tensor.shape == output_tensor.shape
            )
            calls.append((name, same_shape))

        return hook

    hooks = {name: note(name) for name in names}
    with with_hooks(blocks, hooks), in_mode(model, False), torch.no_grad():
        try:
            model(example)
            runs_all = calls == [(name, True) for name in names]
            if not runs_all:
                return False
            calls.clear()
            blocks.absent = frozenset(names)
            model(example)
        except Exception:  # of any kind: the model needs its blocks, or their container
            return False
        finally:
            blocks.absent = frozenset()
    return not calls


def paths_of_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the blocks that can be left out, from input to output.

    There are none in a model that :func:`with_optional_blocks` has not changed.
    """
    chains = (
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, Blocks | BlockList)
    )
    return tuple(
        chain.from_iterable(
            (f"{path}.{name}" for name, _ in blocks.named_children())
            for path, blocks in chains
        )
    )


def tensors_below(names: Iterable[str], path: str) -> frozenset[str]:
    """Return those of the tensors' names that belong to the module at a path, or to modules in it."""
    return frozenset(name for name in names if name.startswith(f"{path}."))


class Exits(nn.Module):
    """A model of residual blocks with linear classifiers after some of them, next to its own at the end.

    A classifier reads the features that the model's own would read if its blocks ended there. In a ViT this is the
    normalised class token, in an MLP-Mixer the mean over normalised patches. A model of timm gives them in one pass.
    Any other runs again for each classifier, without the blocks behind it.

    Args:
        model: the model, with blocks that can be left out (:func:`with_optional_blocks`).
        after: 1-based numbers of the blocks that a classifier follows.
        ensemble: whether to predict by the mean of all classifiers' logits instead of the last one's.
        seed: the run's seed, for the weights of the classifiers.
        example: a batch that the model takes.

    Raises:
        UsageError: a number in ``after`` is that of no block, or of the last one. Or
            the model does not end in a linear layer.
    """

    def __init__(
        self,
        model: nn.Module,
        after: Sequence[int],
        *,
        ensemble: bool,
        seed: int,
        example: Tensor,
    ) -> None:
        super().__init__()
        blocks = paths_of_blocks(model)
        for number in after:
            if not 1 <= number < len(blocks):
                raise UsageError(
                    f"exits must be from 1 to {len(blocks) - 1}, before the last block; got {number}."
                )
        head = model.get_submodule(head_path(model, example))
        assert isinstance(head, nn.Linear)
        with torch_seeded(seed_of(seed, "classifiers")):
            classifiers = {
                str(k): nn.Linear(head.in_features, head.out_features)
                for k in sorted(set(after))
            }
        self.model = model
        self.ensemble = ensemble
        self._head = head_path(model, example)
        self._chain = blocks[0].rpartition(".")[0]
        self.exits = Classifiers(classifiers).to(
            device=head.weight.device, dtype=head.weight.dtype
        )

    def forward(self, x: Tensor, every: bool = False) -> Any:
        """Return logits [n, C] of the last classifier, or the mean of all with ``ensemble``.

        Args:
            x: the samples, [n, ...].
            every: whether to return the logits of every present classifier instead,
                from input to output, [classifiers, n, C]. The last are the model's own.
        """
        if not (every or self.ensemble):
            return self.model(x)
        features, last_logits = self._features(x)
        early_logits = [
            classifier(features[number]) for number, classifier in self.exits.present()
        ]
        logits = torch.stack([*early_logits, last_logits])
        if every:
            return logits
        return logits.mean(0)

    def _features(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the features that each present early classifier reads, by its number, and the model's own logits."""
        model: Any = self.model
        numbers = [number for number, _ in self.exits.present()]
        if not (
            isinstance(getattr(model, "norm", None), nn.Module)
            and hasattr(model, "forward_head")
        ):
            return {number: self._without(x, int(number)) for number in numbers}, model(
                x
            )
        block_outputs: dict[str, Tensor] = {}

        def note(number: str) -> Hook:
            return lambda _module, _args, output: block_outputs.update({number: output})

        with with_hooks(model.blocks, {str(int(k) - 1): note(k) for k in numbers}):
            last_logits = model(x)
        features = {
            number: model.forward_head(
                model.norm(block_outputs[number]), pre_logits=True
            )
            for number in numbers
        }
        return features, last_logits

    def _without(self, x: Tensor, number: int) -> Tensor:
        """Return the input of the model's own classifier when the blocks after the given number are left out.

        Args:
            x: the samples, [n, ...].
            number: how many of the first blocks take part, unless they are absent
                anyway.
        """
        blocks: Any = self.model.get_submodule(self._chain)
        absent_before = blocks.absent
        names = [name for name, _ in blocks.named_children()]
        inputs: list[Tensor] = []

        def note(_module: nn.Module, args: Any) -> None:
            inputs.append(args[0])

        handle = self.model.get_submodule(self._head).register_forward_pre_hook(note)
        try:
            blocks.absent = absent_before | frozenset(names[number:])
            self.model(x)
        finally:
            blocks.absent = absent_before
            handle.remove()
        return inputs[-1]


class Classifiers(nn.ModuleDict, Optional):
    """The early classifiers, each under the number of the block whose output it reads."""


def last_layers(model: nn.Module) -> list[str]:
    """Return the path within a block of the last linear or 2D convolutional layer of each of its parts.

    The first block that can be left out is taken, and a model must have one. Its parts
    are its direct children. Parts without such a layer are left out. In a ViT the paths
    are ``attn.proj`` and ``mlp.fc2``, in an MLP-Mixer ``mlp_tokens.fc2`` and
    ``mlp_channels.fc2``.
    """
    block = model.get_submodule(paths_of_blocks(model)[0])
    linear_paths = (
        path
        for path, module in block.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    )
    return list({path.partition(".")[0]: path for path in linear_paths}.values())
