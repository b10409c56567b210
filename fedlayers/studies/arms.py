"""The candidates (arms) of a study: an algorithm with its settings and the layers that it shares."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_core.algorithms.base import ALGORITHMS, find
from fl_core.errors import UsageError, as_list, check_known
from fl_core.layers import PARTS, Layer
from fl_core.plan import CANDIDATE, Evidence, LayerPlan, frozen_in
from fl_core.registry import is_outside

Names = tuple[str, ...]
Ways = str | Sequence[str | LayerPlan] | None
"""Arms by hand; None for the steps of a decision."""
CUTS: dict[str, Callable[[Names], Names]] = {
    "all": lambda names: names,
    "nothing": lambda names: (),
    "half": lambda names: names[: max(1, len(names) // 2)],
    "head_local": lambda names: names[:-1],
    "first_half_local": lambda names: _without_first_half(names),
}
"""The shared layers of each cut, out of those that train."""
FIRST = ("all", "nothing")
"""The arms with which a decision begins: FedAvg, and training alone."""
ENDS = ("head_local", "first_half_local")
"""The arms that follow where clients differ. With adapters ``lora_A`` takes the place of the first."""
OLD = "all_but_last"
"""The name of ``head_local`` in earlier versions, which this version still reads."""
FROZEN = ("fedbabu", {"finetune_epochs": 0})
"""The algorithm of ``frozen_K``: layers that are not shared keep their initial values."""
_COUNTED = re.compile(r"(first|last|frozen)_([0-9]+)")
EXTREMES = {"local": "nothing", "fedavg": "all"}
"""Algorithms without a plan that equal one of the two extremes."""


@dataclass(frozen=True)
class Arm:
    """A candidate of a study: an algorithm with its plan and its settings.

    Attributes:
        name: as it was asked for.
        algorithm: registry name.
        plan: the one that it uses; None for an algorithm that uses no plan, or has its own default.
        settings: keys of the configuration that are its own.
        options: the algorithm's own keys. By default those of the configuration, if that names the same algorithm.
        epochs, rate: each client's own epochs after its best run, once that is known.
    """

    name: str
    algorithm: str
    plan: LayerPlan | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] | None = None
    epochs: int = 0
    rate: float = 0.0

    @property
    def folder(self) -> str:
        """The arm's name as the name of a folder."""
        return re.sub(r"[^\w.-]", "_", self.name)

    @property
    def extreme(self) -> str:
        """``nothing`` or ``all`` if the arm shares no layer or every layer, else empty."""
        if self.plan is None:
            return EXTREMES.get(self.algorithm, "")
        shared = [name in self.plan.shared for name in self.plan.trainable]
        return "all" if all(shared) else "" if any(shared) else "nothing"


def trained_layers(plan: LayerPlan) -> tuple[list[str], list[str]]:
    """Return the layers that train, as people read them: the shared ones, and the local ones."""
    trained = [layer for layer in plan.layers if layer.name in plan.trainable]
    shared = [layer.label for layer in trained if layer in plan.body]
    return shared, [layer.label for layer in trained if layer in plan.head]


def _without_first_half(names: Names) -> Names:
    """Return the layers without the first half of those before the head, rounded up; of whole blocks if there are any.

    >>> _without_first_half(("fc1", "fc2", "fc3")), _without_first_half(("stem", "s.0.a", "s.0.b", "s.1.a", "fc"))
    (('fc2', 'fc3'), ('s.1.a', 'fc'))
    >>> _without_first_half(("a.lora_A", "a.lora_B", "b.lora_A", "b.lora_B", "c.lora_A", "c.lora_B", "fc"))
    ('c.lora_A', 'c.lora_B', 'fc')
    """
    blocks = [_BLOCK.match(name) for name in names[:-1]]
    of_layer = [
        name if block is None else block[0]
        for name, block in zip(names, blocks, strict=False)
    ]
    distinct = list(dict.fromkeys(of_layer))
    local = set(distinct[: (len(distinct) + 1) // 2])
    kept = [
        name for name, block in zip(names, of_layer, strict=False) if block not in local
    ]
    return (*kept, *names[-1:])


_BLOCK = re.compile(r"^(.*?\.)?\d+(?=\.)|^.*(?=\.lora_[AB]$)")
"""A block within a layer's name, such as ``encoder.layer.3`` in ``encoder.layer.3.output``, or an adapter's layer."""


def ends_of(layers: Sequence[Layer], thorough: bool = False) -> Names:
    """Return the names of the arms that follow where clients differ, or of all cuts from both ends."""
    names = LayerPlan(tuple(layers), ()).trainable
    if thorough:
        counts = range(1, len(names))
        return tuple(f"{end}_{k}" for end in ("first", "last") for k in counts)
    adapters = any(name.endswith(".lora_A") for name in names)
    return ("lora_A", ENDS[1]) if adapters else ENDS


def arms_of(
    names: str | Sequence[str | LayerPlan],
    layers: Sequence[Layer],
    algorithm: str = "fedper",
    distinct: bool = True,
) -> tuple[Arm, ...]:
    """Make the arms with the given names.

    Args:
        names: each is ``all``, ``nothing``, ``head_local`` (all but the last layer are shared), ``first_half_local``
            (the first half of the layers before the head is local), or ``half`` (the first half of the layers is
            shared); ``first_K`` or ``last_K``, the first or the last K layers are shared; ``frozen_K``, the first K
            layers keep their initial values; ``lora_A`` or ``lora_B``, one factor of all adapters; a plan or its path;
            an algorithm with its own default plan; or ``ALGORITHM:CUT``, such as ``fedrep:half``.
        layers: the model's.
        algorithm: uses the cuts that are named alone.
        distinct: refuse two equal arms. Otherwise they count once.

    Raises:
        UsageError: an unknown or repeated name, two equal arms, a cut that the model does not have, or a cut with an
            algorithm that uses no plan.

    >>> layers = [Layer(name, (f"{name}.weight",)) for name in ("conv1", "conv2", "fc1", "fc2")]
    >>> for arm in arms_of((*FIRST, *ENDS), layers):
    ...     print(arm.name, arm.plan.shared)
    all ('conv1', 'conv2', 'fc1', 'fc2')
    nothing ()
    head_local ('conv1', 'conv2', 'fc1')
    first_half_local ('fc1', 'fc2')
    >>> for arm in arms_of(("half", "first_3", "last_2", "frozen_1", "fedrep:half", "ditto"), layers):
    ...     print(arm.algorithm, arm.plan and arm.plan.shared)
    fedper ('conv1', 'conv2')
    fedper ('conv1', 'conv2', 'fc1')
    fedper ('fc1', 'fc2')
    fedbabu ('conv2', 'fc1', 'fc2')
    fedrep ('conv1', 'conv2')
    ditto None
    >>> arms_of(("all_but_last", "fedrep:all_but_last"), layers) == arms_of(("head_local", "fedrep:head_local"), layers)
    True
    >>> adapted = [Layer(name, (name,)) for name in ("a.lora_A", "a.lora_B", "b.lora_A", "b.lora_B", "head")]
    >>> [arm.plan.shared for arm in arms_of(("lora_A", "fedrep:lora_B"), adapted)]
    [('a.lora_A', 'b.lora_A'), ('a.lora_B', 'b.lora_B')]
    """
    names = as_list("arms", names)
    arms: dict[Any, Arm] = {}
    for name in names:
        arm = arm_of(name, tuple(layers), algorithm)
        same = arms.setdefault((arm.algorithm, arm.plan and arm.plan.digest), arm)
        if same is not arm and distinct:
            raise UsageError(
                f"arms must differ; got {same.name!r} and {name!r}, which share the same layers. Leave one out."
            )
    if len(names) < 2:
        raise UsageError(
            f"a race must have at least two arms; got {len(names)}. Add one, such as nothing."
        )
    return tuple(arms.values())


def arm_of(name: str | LayerPlan, layers: tuple[Layer, ...], algorithm: str) -> Arm:
    """Return the arm of a name or of a plan, as of :func:`arms_of`."""
    if isinstance(name, LayerPlan):
        plan = _checked(name, layers)
        return Arm(f"plan_{plan.digest[:6]}", algorithm, plan)
    if name.endswith(OLD):
        name = name.removesuffix(OLD) + ENDS[0]
    over, _, cut = name.rpartition(":")
    known = cut in CUTS or cut in PARTS or cut.endswith(".json")
    if over and (known or _COUNTED.fullmatch(cut)):
        return Arm(name, over, _plan(cut, layers, over))
    if name in ALGORITHMS or is_outside(name):
        return Arm(name, name, None)
    plan = _plan(name, layers, algorithm)
    if name.startswith("frozen_") and _COUNTED.fullmatch(name):
        return Arm(name, FROZEN[0], plan, options=FROZEN[1])
    return Arm(name, algorithm, plan)


def _plan(cut: str, layers: tuple[Layer, ...], algorithm: str) -> LayerPlan:
    if not find(algorithm).uses_plan:
        raise UsageError(
            f"{algorithm} uses no plan. Name it as an arm without {cut!r}."
        )
    if cut.endswith(".json"):
        return _checked(LayerPlan.load(Path(cut)), layers)
    none = LayerPlan(layers, (), Evidence(rule=f"{CANDIDATE} {cut}"))
    names, counted = none.trainable, _COUNTED.fullmatch(cut)
    if cut in PARTS:
        shared = tuple(name for name in names if name.endswith(f".{cut}"))
        if not shared:
            raise UsageError(
                f"arm {cut!r} must have a model with adapters; got one without. Use adapt='lora:r=8'."
            )
    elif counted:
        size = int(counted[2])
        if size > len(names):
            raise UsageError(
                f"arm {cut!r} must share fewer layers: the model has {len(names)} layers that train."
            )
        shared = {
            "first": names[:size],
            "last": names[len(names) - size :],
            "frozen": names[size:],
        }[counted[1]]
    else:
        known = [*CUTS, *PARTS, "first_1", "last_1", "frozen_1", "PLAN.json"]
        shared = CUTS[check_known("arm (a cut, a plan or an algorithm)", cut, known)](
            names
        )
    return none.with_shared((*shared, *frozen_in(layers)))


def _checked(plan: LayerPlan, layers: Sequence[Layer]) -> LayerPlan:
    """Return a plan that fits, without own epochs: they are chosen again."""
    plan.check_tensors(tensor for layer in layers for tensor in layer.tensors)
    return plan.with_shared(plan.shared, detail={})
