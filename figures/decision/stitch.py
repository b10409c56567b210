"""One run instead of four: Ditto's two models stitched at a depth, then FedPer for the last rounds.

The layers below come from the server, the layers above from the client. Validation chooses the depth by forward passes.
``REGISTERED_MIX.md`` says what is asked of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from fl_core import tree
from fl_core.algorithms.base import Round, State
from fl_core.algorithms.fedper import FedPer
from fl_core.plan import LayerPlan
from fl_core.storage.blobs import merge_trees, split_trees
from fl_core.tree import Tree

SHARE = 0.2
"""The last rounds, as a share of all, in which FedPer trains the stitched models."""
NAME = f"{__name__}:Continued"


class Continued(FedPer):
    """FedPer whose clients start from local layers of their own, in a file of :func:`save_heads`."""

    name = "continued"

    @dataclass(frozen=True)
    class Config:
        heads: str

    def client_state(self, initial: Tree, client: int) -> State:
        kept = self.local_tensors(Round(0), client)
        stored = {name: value for name, value in load_file(self.config.heads).items() if name.startswith(f"{client}|")}
        return State({"model": tree.select(split_trees(stored, [str(client)])[str(client)], kept)})


def save_heads(path: Path, models: Mapping[int, Tree]) -> None:
    """Write every client's model to one file, from which :class:`Continued` reads the local layers."""
    save_file(merge_trees({str(client): tree.clone(model) for client, model in models.items()}), path)


def stitched(plan: LayerPlan, server: Tree, own: Mapping[int, Tree]) -> dict[int, Tree]:
    """Return each client's model: the plan's shared layers of the server's model under the client's own others.

    Args:
        own: each client's personal model.
    """
    body = plan.body_tensors
    return {
        client: {name: server[name] if name in body else value for name, value in model.items()}
        for client, model in own.items()
    }


def last_rounds(trained: int) -> int:
    """Return how many rounds follow these, so that they are :data:`SHARE` of all; at least one.

    >>> last_rounds(80)
    20
    """
    return max(1, round(trained * SHARE / (1 - SHARE)))
