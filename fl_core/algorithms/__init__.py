"""Federated algorithms by name, and everything needed to write one."""

# ruff: noqa: F401 - the names are for whoever imports this package

from fl_core.algorithms.base import (
    Algorithm,
    Message,
    Observation,
    Round,
    Shape,
    State,
    TaskInfo,
    Update,
    find,
    register,
    registry,
)
from fl_core.training.loop import Steps
from fl_core.training.phases import Batch, Context, Group, Phase
from fl_core.tree import Tree
