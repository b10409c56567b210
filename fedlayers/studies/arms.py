"""The candidates (arms) of a study: an algorithm with its settings and the layers that it shares."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_core.algorithms.base import ALGORITHMS, find
from fl_core.errors import UsageError, as_list, check_known, listing
from fl_core.layers import Layer
from fl_core.models.lora import PARTS
from fl_core.plan import CANDIDATE, Evidence, LayerPlan, frozen_in
from fl_core.registry import is_outside

CUTS: dict[str, Callable[[int], int]] = {
    "nothing": lambda n: 0,
    "half": lambda n: max(1, n // 2),
    "all_but_last": lambda n: n - 1,
    "all": lambda n: n,
}
"""The number of shared layers out of n, counted from the input."""
DEFAULT = ("nothing", "half", "all_but_last", "all")
"""The default arms: training alone, a deep split, all but the classifier, and FedAvg."""
_COUNTED = re.compile(r"(first|last)_([0-9]+)")
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
    """

    name: str
    algorithm: str
    plan: LayerPlan | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] | None = None

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

    @property
    def words(self) -> str:
        """The arm in words."""
        if self.plan is None:
            return f"{self.algorithm}, as it is"
        shared = [name for name in self.plan.trainable if name in self.plan.shared]
        local = [name for name in self.plan.trainable if name not in self.plan.shared]
        if not shared:
            return "share nothing: every client trains alone"
        if not local:
            return "share every layer"
        return f"federate {listing(shared)}; keep {listing(local)} local"


def arms_of(
    names: str | Sequence[str],
    layers: Sequence[Layer],
    algorithm: str = "fedper",
) -> tuple[Arm, ...]:
    """Make the arms with the given names.

    Args:
        names: each is ``nothing``, ``half`` (the first half of the layers), ``all_but_last`` or ``all``; ``first_K`` or
            ``last_K``, the first or the last K layers; ``lora_A`` or ``lora_B``, one factor of all adapters; the path
            of a plan; an algorithm with its own default plan; or ``ALGORITHM:CUT``, such as ``fedrep:half``. In a small
            model two default names may be the same cut. It counts once.
        layers: the model's.
        algorithm: uses the cuts that are named alone.

    Raises:
        UsageError: an unknown or repeated name, two equal arms, a cut that the model does not have, or a cut with an
            algorithm that uses no plan.

    >>> layers = [Layer(name, (f"{name}.weight",)) for name in ("conv1", "conv2", "fc1", "fc2")]
    >>> for arm in arms_of(DEFAULT, layers):
    ...     print(arm.name, arm.plan.shared)
    nothing ()
    half ('conv1', 'conv2')
    all_but_last ('conv1', 'conv2', 'fc1')
    all ('conv1', 'conv2', 'fc1', 'fc2')
    """
    names = as_list("arms", names)
    arms: dict[Any, Arm] = {}
    for name in names:
        arm = _arm(name, tuple(layers), algorithm)
        same = arms.setdefault((arm.algorithm, arm.plan and arm.plan.digest), arm)
        if same is not arm and names != DEFAULT:  # whose cuts coincide in small models
            raise UsageError(
                f"arms must differ; got {same.name!r} and {name!r}, which both are: {arm.words}. "
                "Leave one out."
            )
    if len(names) < 2:
        raise UsageError(
            f"a race must have at least two arms; got {len(names)}. Add one, such as nothing."
        )
    return tuple(arms.values())


def _arm(name: str, layers: tuple[Layer, ...], algorithm: str) -> Arm:
    over, _, cut = name.rpartition(":")
    if over and _is_cut(cut):
        return Arm(name, over, _plan(cut, layers, over))
    if name in ALGORITHMS or is_outside(name):
        return Arm(name, name, None)
    return Arm(name, algorithm, _plan(name, layers, algorithm))


def _plan(cut: str, layers: tuple[Layer, ...], algorithm: str) -> LayerPlan:
    if not find(algorithm).uses_plan:
        raise UsageError(
            f"{algorithm} uses no plan. Name it as an arm without {cut!r}."
        )
    if cut.endswith(".json"):
        plan = LayerPlan.load(Path(cut))
        plan.check_tensors(tensor for layer in layers for tensor in layer.tensors)
        return plan
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
        first = counted[1] == "first"
        shared = names[:size] if first else names[len(names) - size :]
    else:
        known = [*CUTS, *PARTS, "first_1", "last_1", "PLAN.json"]
        cut = check_known("arm (a cut, a plan or an algorithm)", cut, known)
        shared = names[: CUTS[cut](len(names))]
    return none.with_shared((*shared, *frozen_in(layers)))


def _is_cut(text: str) -> bool:
    named = text in CUTS or text in PARTS or text.endswith(".json")
    return named or _COUNTED.fullmatch(text) is not None
