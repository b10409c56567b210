"""The ways to train that a decision compares: an algorithm with its settings, and the layers that it shares."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_core.algorithms.base import ALGORITHMS, find
from fl_core.errors import UsageError, as_list, check_known
from fl_core.layers import PARTS, Layer
from fl_core.plan import (
    CANDIDATE,
    Evidence,
    LayerPlan,
    frozen_in,
    labels_of,
    tensors_in,
)
from fl_core.registry import is_outside

Names = tuple[str, ...]
Ways = str | Sequence[str | LayerPlan] | None
"""Further ways: one or several names or plans; None for no further ones."""
CUTS: dict[str, Callable[[Names], Names]] = {
    "fedavg": lambda names: names,
    "local": lambda names: (),
    "half": lambda names: names[: max(1, len(names) // 2)],
    "head_local": lambda names: names[:-1],
    "first_half_local": lambda names: _without_first_half(names),
}
"""The shared layers of each cut, out of those that train."""
LINEAR = "linear_fedavg"
"""FedAvg of one linear layer."""
OLD_NAMES = {"all": "fedavg", "nothing": "local", "all_but_last": "head_local"}
"""Names of ways in earlier versions, which this version still reads."""
FROZEN = ("fedbabu", {"finetune_epochs": 0})
"""The algorithm of ``frozen_K``: layers that are not shared keep their initial values."""
SHARE_ALL, SHARE_SOME, ALONE, NONE = "share_all", "share_some", "alone", "none"
"""What a decision may recommend."""
ELSEWHERE = "not asked over sites"
"""The reason why a decision over sites leaves out tests of single samples and the fallback."""
_COUNTED = re.compile(r"(first|last|frozen)_([0-9]+)")


@dataclass(frozen=True)
class Way:
    """A way to train: an algorithm with its plan and its settings.

    Attributes:
        name: the way's name, as in the arguments of ``choose``.
        algorithm: the name of the algorithm.
        plan: the plan that the algorithm uses; None if it uses no plan, or has its own default.
        settings: keys of the configuration that differ in this way.
        options: options of the algorithm. By default those of the configuration, if it names the same algorithm.
        own_network: whether it trains the configuration's network, and not another one that ``settings`` name.
    """

    name: str
    algorithm: str
    plan: LayerPlan | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] | None = None
    own_network: bool = True

    @property
    def folder(self) -> str:
        """Return the way's name in a form that can name a folder."""
        return re.sub(r"[^\w.-]", "_", self.name)

    @property
    def action(self) -> str:
        """Return the action of the way: ``share_all``, ``share_some`` or ``alone``.

        A way without a plan shares all, unless its algorithm is ``local``.
        """
        if self.plan is None:
            return ALONE if self.algorithm == "local" else SHARE_ALL
        shared = [name in self.plan.shared for name in self.plan.trainable]
        if all(shared):
            return SHARE_ALL
        return SHARE_SOME if any(shared) else ALONE


def trained_layers(plan: LayerPlan) -> tuple[list[str], list[str]]:
    """Return the layers that train, as people read them: the shared ones, and the local ones."""
    trained_layer_list = [
        layer for layer in plan.layers if layer.name in plan.trainable
    ]
    labels = labels_of(plan.layers)
    shared = [labels[layer.name] for layer in trained_layer_list if layer in plan.body]
    return shared, [
        labels[layer.name] for layer in trained_layer_list if layer in plan.head
    ]


def _without_first_half(names: Names) -> Names:
    """Return the layers without the first half of those before the head, rounded up; of whole blocks if there are any.

    >>> _without_first_half(("fc1", "fc2", "fc3")), _without_first_half(("stem", "s.0.a", "s.0.b", "s.1.a", "fc"))
    (('fc2', 'fc3'), ('s.1.a', 'fc'))
    >>> _without_first_half(("a.lora_A", "a.lora_B", "b.lora_A", "b.lora_B", "c.lora_A", "c.lora_B", "fc"))
    ('c.lora_A', 'c.lora_B', 'fc')
    """
    blocks = [_BLOCK.match(name) for name in names[:-1]]
    block_of_layer = [
        name if block is None else block[0]
        for name, block in zip(names, blocks, strict=False)
    ]
    distinct_blocks = list(dict.fromkeys(block_of_layer))
    local_blocks = set(distinct_blocks[: (len(distinct_blocks) + 1) // 2])
    shared = [
        name
        for name, block in zip(names, block_of_layer, strict=False)
        if block not in local_blocks
    ]
    return (*shared, *names[-1:])


_BLOCK = re.compile(r"^(.*?\.)?\d+(?=\.)|^.*(?=\.lora_[AB]$)")
"""A block within a layer's name, such as ``encoder.layer.3`` in ``encoder.layer.3.output``, or an adapter's layer."""


def default_names(layers: Sequence[Layer]) -> Names:
    """Return the names of the ways of a network that every decision trains.

    >>> layers = [Layer(name, (f"{name}.weight",)) for name in ("fc1", "fc2")]
    >>> default_names(layers)
    ('fedavg', 'local', 'head_local')
    """
    names = LayerPlan(tuple(layers), ()).trainable
    if any(name.endswith(".lora_A") for name in names):
        return ("fedavg", "local", "lora_A")
    return ("fedavg", "local", "head_local") if len(names) > 1 else ("fedavg", "local")


def linear_way(options: Mapping[str, Any]) -> Way:
    """Return the way FedAvg of a linear model. ``options`` are those of the model ``linear``."""
    settings: dict[str, Any] = {
        "model": "linear",
        "model_options": dict(options),
        "adapt": None,
        "init": None,
    }
    return Way(LINEAR, "fedavg", None, settings, {}, own_network=False)


def ways_of(
    names: str | Sequence[str | LayerPlan],
    layers: Sequence[Layer],
    algorithm: str = "fedper",
) -> tuple[Way, ...]:
    """Make the ways with the given names. Equal ones count once.

    Args:
        names: each is ``fedavg``, ``local``, ``head_local`` (all but the last layer are shared), ``first_half_local``
            (the first half of the layers before the head is local), or ``half`` (the first half of the layers is
            shared); ``first_K`` or ``last_K``, the first or the last K layers are shared; ``frozen_K``, the first K
            layers keep their initial values; ``lora_A`` or ``lora_B``, one factor of all adapters; a plan or its path;
            an algorithm with its own default plan; or ``ALGORITHM:CUT``, such as ``fedrep:half``.
        layers: the model's layers.
        algorithm: the algorithm of cuts that are named without one.

    Raises:
        UsageError: an unknown name, a plan of another model, a cut that the model does
            not have, or a cut with an algorithm that uses no plan.

    >>> layers = [Layer(name, (f"{name}.weight",)) for name in ("conv1", "conv2", "fc1", "fc2")]
    >>> for way in ways_of((*default_names(layers), "first_half_local"), layers):
    ...     print(way.name, way.action, way.plan.shared)
    fedavg share_all ('conv1', 'conv2', 'fc1', 'fc2')
    local alone ()
    head_local share_some ('conv1', 'conv2', 'fc1')
    first_half_local share_some ('fc1', 'fc2')
    >>> for way in ways_of(("half", "first_3", "last_2", "frozen_1", "fedrep:half", "ditto"), layers):
    ...     print(way.algorithm, way.plan and way.plan.shared)
    fedper ('conv1', 'conv2')
    fedper ('conv1', 'conv2', 'fc1')
    fedper ('fc1', 'fc2')
    fedbabu ('conv2', 'fc1', 'fc2')
    fedrep ('conv1', 'conv2')
    ditto None
    >>> ways_of(("all", "fedrep:all_but_last"), layers) == ways_of(("fedavg", "fedrep:head_local"), layers)
    True
    >>> adapted = [Layer(name, (name,)) for name in ("a.lora_A", "a.lora_B", "b.lora_A", "b.lora_B", "head")]
    >>> [way.plan.shared for way in ways_of(("lora_A", "fedrep:lora_B"), adapted)]
    [('a.lora_A', 'b.lora_A'), ('a.lora_B', 'b.lora_B')]
    """
    ways: dict[Any, Way] = {}
    for name in as_list("arms", names, empty=True):
        way = way_of(name, tuple(layers), algorithm)
        ways.setdefault((way.algorithm, way.plan and way.plan.digest), way)
    return tuple(ways.values())


def way_of(name: str | LayerPlan, layers: tuple[Layer, ...], algorithm: str) -> Way:
    """Return the way of one name or plan; see :func:`ways_of`."""
    if isinstance(name, LayerPlan):
        plan = _checked(name, layers)
        return Way(f"plan_{plan.digest[:6]}", algorithm, plan)
    base, _, cut = name.rpartition(":")
    cut = OLD_NAMES.get(cut, cut)
    name = f"{base}:{cut}" if base else cut
    if base and _is_cut(cut):
        return Way(name, base, _plan(cut, layers, base))
    if name not in CUTS and (name in ALGORITHMS or is_outside(name)):
        return Way(name, name, None)
    plan = _plan(name, layers, algorithm)
    if name.startswith("frozen_") and _COUNTED.fullmatch(name):
        return Way(name, FROZEN[0], plan, options=FROZEN[1])
    return Way(name, algorithm, plan)


def _is_cut(text: str) -> bool:
    """Return whether a text names layers to share: a cut, a factor of adapters, a count of layers, or a plan's file."""
    is_named = text in CUTS or text in PARTS or text.endswith(".json")
    return is_named or _COUNTED.fullmatch(text) is not None


def _plan(cut: str, layers: tuple[Layer, ...], algorithm: str) -> LayerPlan:
    if not find(algorithm).uses_plan:
        raise UsageError(f"{algorithm} uses no plan. Name it as a way without {cut!r}.")
    if cut.endswith(".json"):
        return _checked(LayerPlan.load(Path(cut)), layers)
    empty_plan = LayerPlan(layers, (), Evidence(rule=f"{CANDIDATE} {cut}"))
    names, count_match = empty_plan.trainable, _COUNTED.fullmatch(cut)
    if cut in PARTS:
        shared = tuple(name for name in names if name.endswith(f".{cut}"))
        if not shared:
            raise UsageError(
                f"way {cut!r} must have a model with adapters; got one without. Use adapt='lora:r=8'."
            )
    elif count_match:
        size = int(count_match[2])
        if size > len(names):
            raise UsageError(
                f"way {cut!r} must share fewer layers: the model has {len(names)} layers that train."
            )
        shared = {
            "first": names[:size],
            "last": names[len(names) - size :],
            "frozen": names[size:],
        }[count_match[1]]
    else:
        cut_names = [*CUTS, *PARTS, "first_1", "last_1", "frozen_1", "PLAN.json"]
        shared = CUTS[
            check_known("way (a cut, a plan or an algorithm)", cut, cut_names)
        ](names)
    return empty_plan.with_shared((*shared, *frozen_in(layers)))


def _checked(plan: LayerPlan, layers: Sequence[Layer]) -> LayerPlan:
    """Return the plan without the further results in its evidence, such as fine-tuning.

    A decision chooses fine-tuning itself.

    Raises:
        UsageError: the plan has other tensors than the layers.
    """
    plan.check_tensors(tensors_in(layers))
    return plan.with_shared(plan.shared, detail={})
