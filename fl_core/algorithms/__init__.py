"""Federated algorithms by name, and all that it takes to write one."""

from fl_core.algorithms.base import (
    Algorithm,
    Message,
    Observation,
    Problem,
    Round,
    State,
    Update,
    find,
    register,
    registry,
)
from fl_core.algorithms.over import Over
from fl_core.training.local import Context, Group, Phase
from fl_core.training.steps import Batch, Steps

__all__ = [
    "Algorithm",
    "Batch",
    "Context",
    "Group",
    "Message",
    "Observation",
    "Over",
    "Phase",
    "Problem",
    "Round",
    "State",
    "Steps",
    "Update",
    "find",
    "register",
    "registry",
]
