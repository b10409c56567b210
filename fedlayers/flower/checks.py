"""Checks of what a site replies: names, ranges, shapes, sizes and norms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedlayers.flower.federation import checked
from fl_core import tree
from fl_core.algorithms.base import Message, Observation, State
from fl_core.errors import COUNT, NUMBER, MapOf, UsageError, about, read_as
from fl_core.rounds.clients import (
    LOCAL,
    SCORED,
    TUNED,
    ClientReply,
    ClientRequest,
    TrainRequest,
)
from fl_core.rows import ROUNDING, TABLE, scores_of
from fl_core.storage import merge_trees
from fl_core.tree import Tree

if TYPE_CHECKING:
    from fedlayers.flower.clients import SiteClients
    from fedlayers.flower.packets import Packet

MOST_WORK = 1e12
"""The largest number of steps or samples."""
LARGEST = 1e30
"""The largest loss, and the largest of other numbers. Float32 holds it."""
TIMES_MEDIAN = 1_000.0
"""How often an update's norm may be the median of the others."""
LEAST_UPDATES = 3
"""Updates from which norms are compared."""
REPLY = {
    "meta": dict,
    "outline": MapOf([str]),
    "work": MapOf(NUMBER),
    "scores": MapOf(MapOf(MapOf(float))),
    "observations": list,
    "received": COUNT,
}


def outline(names: Mapping[str, list[str]], version: str) -> State:
    """Return what the server stores of a client's state: its version, and the names of its tensors."""
    empty: dict[str, Tree] = {kind: {} for kind in names}
    return State(empty, {"version": version, "outline": names})


def reply_of(
    site: str, packet: Packet, request: ClientRequest, clients: SiteClients
) -> ClientReply:
    """Return a site's reply if its numbers and tensors are possible.

    Raises:
        UsageError: names the site and the first fault.
    """
    head = checked(site, packet.head, REPLY)
    with about(f"site {site!r}"):
        _check_work(head["work"])
        _check_scores(head["scores"], clients)
        observed = []
        for each in head["observations"]:
            observed.append(read_as(Observation, each, "an observation"))
            ends = {observed[-1].client, observed[-1].client_b}
            if not ends <= {None, *range(len(clients.names))}:
                raise UsageError(
                    f"client of an observation must be below {len(clients.names)}."
                )
        message: Message | None = Message(packet.trees, head["meta"])
        if isinstance(request, TrainRequest):
            if clients.is_lost(request):
                message = None
            else:
                _check_trees(packet.trees, head["meta"], request, clients)
        return ClientReply(
            request.client,
            message,
            head["scores"],
            head["work"],
            observed,
            head["received"],
        )


def _check_work(work: Mapping[str, float]) -> None:
    for name, value in work.items():
        if name.endswith(("/steps", "/samples")):
            sound = 0 <= value <= MOST_WORK and value == int(value)
        else:
            sound = abs(value) <= LARGEST
        if not sound:
            raise UsageError(
                f"work {name!r} must be a count of at most {MOST_WORK:g}, or a loss of at most {LARGEST:g}; "
                f"got {value}."
            )


def _check_scores(
    scores: Mapping[str, Mapping[str, Mapping[str, float]]], clients: SiteClients
) -> None:
    known = {LOCAL, TUNED, "global", clients.algorithm.evaluates}
    metrics = scores_of(clients.task.data.task)
    for model, splits in scores.items():
        for split, values in splits.items():
            for metric, value in values.items():
                named = f"{metric} of {model} on {split}"
                if model not in known or split not in SCORED or metric not in metrics:
                    raise UsageError(
                        f"a score must be one that was asked; got {named}."
                    )
                low, high = TABLE[metric].ends
                low, high = max(low, -LARGEST) - ROUNDING, min(high, LARGEST) + ROUNDING
                if not (math.isnan(value) or low <= value <= high):
                    raise UsageError(
                        f"{named} must be from {low:g} to {high:g}; got {value}."
                    )


def _check_trees(
    trees: Mapping[str, Tree],
    meta: Mapping[str, Any],
    request: TrainRequest,
    clients: SiteClients,
) -> None:
    """Check that tensors are finite, have the model's shapes, and are all that were asked."""
    initial = clients.initial
    for kind, tensors in trees.items():
        for name, tensor in tensors.items():
            like = initial.get(name)
            if like is not None and tensor.shape != like.shape:
                raise UsageError(
                    f"tensor {name!r} of {kind} must have shape {list(like.shape)}; got {list(tensor.shape)}."
                )
            if kind == "model" and (like is None or tensor.dtype != like.dtype):
                raise UsageError(
                    f"tensor {name!r} must be one of the model, of its type; got {tensor.dtype}."
                )
        bad = tree.first_nonfinite(tensors, before=initial)
        if bad is not None:
            raise UsageError(
                f"tensors must be finite; got NaN or infinity in {bad!r} of {kind}."
            )
    if "model" in trees or not (trees or meta):
        names = clients.algorithm.uploaded(request.rnd, request.client)
        lacking = sorted(names - trees.get("model", {}).keys())
        if lacking:
            raise UsageError(f"the update must have tensor {lacking[0]!r}; got none.")


def check_norms(
    asked: Mapping[str, ClientRequest], replies: Mapping[str, ClientReply]
) -> None:
    """Refuse an update that is far larger than the others.

    Raises:
        UsageError: its norm is more than :data:`TIMES_MEDIAN` times the median of the others. Names its site.
    """
    norms = {}
    for name, reply in replies.items():
        request = asked[name]
        if isinstance(request, TrainRequest) and reply.message is not None:
            norms[name] = _norm(request.message, reply.message)
    if len(norms) < LEAST_UPDATES:
        return
    for name, norm in norms.items():
        others = [each for other, each in norms.items() if other != name]
        median = statistics.median(others)
        if 0 < TIMES_MEDIAN * median < norm:
            raise UsageError(
                f"site {name!r}: the norm of the update must be at most {TIMES_MEDIAN:,.0f} times the median of the "
                f"others, {median:.3g}; got {norm:.3g}. Check this site's data."
            )


def _norm(sent: Message, received: Message) -> float:
    """Return the norm of what a client has changed. A tensor that was not sent counts whole."""
    total, before = 0.0, merge_trees(sent.trees)
    for name, tensor in merge_trees(received.trees).items():
        change = tensor.double()
        if name in before and before[name].shape == tensor.shape:
            change = change - before[name].double()
        total += float(change.square().sum())
    return math.sqrt(total)
