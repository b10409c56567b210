"""Checks of what a site replies: names, ranges, shapes, sizes and norms."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fedlayers.flower.federation import FACTS, LARGEST, Packet, checked
from fl_core import tree
from fl_core.algorithms.base import Algorithm, Message, Observation, State
from fl_core.data import FederatedData
from fl_core.errors import COUNT, NUMBER, MapOf, UsageError, about, listing, read_as
from fl_core.rounds.clients import (
    LOCAL,
    SCORED,
    TUNED,
    ClientReply,
    ClientRequest,
    FinetuneRequest,
    LocalClients,
    ScoreRequest,
    TrainRequest,
)
from fl_core.rows import ROUNDING, TABLE, scores_of
from fl_core.storage import merge_trees
from fl_core.training.phases import Phase
from fl_core.tree import Tree

OWN_STEP = 1000
"""The most gradients of a batch that an algorithm's own step takes.

pFedMe takes ``inner_steps``, and others up to three. A wrong count below it changes
only that site's rows of work, so the number need not be close.
"""
TIMES_MEDIAN = 1_000.0
"""The largest ratio of an update's norm to the median norm of the others."""
LEAST_UPDATES = 3
"""The fewest updates whose norms are compared."""
CLIP = 10.0
"""The ratio to the median norm to which a longer update can be shortened."""
PERFECT = ("accuracy", "macro_f1", "balanced_accuracy")
"""Scores of which each is 1 if and only if the others are."""
REPLY = {
    "stage": list,
    "meta": dict,
    "outline": MapOf([str]),
    "work": MapOf(NUMBER),
    "scores": MapOf(MapOf(MapOf(float))),
    "observations": list,
    "received": COUNT,
}


def check_alike(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse sites whose data differ in kind, such as in columns or classes.

    Args:
        facts: the result of :meth:`Site.facts <fedlayers.flower.site.Site.facts>` of each site, by the site's name.

    Raises:
        UsageError: two kinds of data occur. The message names the sites of each.
    """
    for key in [key for key in FACTS if key not in ("name", "samples")]:
        values = {
            name: json.dumps(facts_of_site[key])
            for name, facts_of_site in facts.items()
        }
        commonest = statistics.mode(values.values())
        if odd_sites := [name for name in values if values[name] != commonest]:
            other_sites = listing(name for name in values if name not in odd_sites)
            raise UsageError(
                f"{key} must be the same at all sites; got {commonest:.60} at {other_sites}, "
                f"and {values[odd_sites[0]]:.60} at {listing(odd_sites)}. Let all sites have the same."
            )


def outline(names: Mapping[str, list[str]], version: str) -> State:
    """Return the part of a client's state that the server stores: its version, and the names of its tensors.

    Args:
        names: the names of the tensors in each tree of the state, by the tree's name.
        version: the name of the state at the site (:func:`fedlayers.flower.clients.version_of`).
    """
    empty: dict[str, Tree] = {kind: {} for kind in names}
    return State(empty, {"version": version, "outline": names})


def reply_of(
    site: str,
    packet: Packet,
    request: ClientRequest,
    clients: LocalClients,
    data: FederatedData,
    most_bytes: int,
) -> ClientReply:
    """Return a site's reply if its numbers and tensors are possible.

    Its message is None if the client's message counts as lost in this round.

    Args:
        site: the site's name.
        packet: the contents of its message.
        request: the request that it answers.
        clients: the clients of the run.
        data: the federation without samples, for the clients' sizes.
        most_bytes: bytes that a site may have received.

    Raises:
        UsageError: they are not. The message names the site and the first fault.
    """
    head = checked(site, packet.head, REPLY)
    with about(f"site {site!r}"):
        if head["stage"] != stage_of(request):
            stage = stage_of(request)
            raise UsageError(
                f"the reply must be that of {stage}; got {head['stage']!s:.60}."
            )
        if head["received"] > most_bytes:
            raise UsageError(f"received must be at most {most_bytes:,} bytes.")
        _check_work(head["work"], request, clients.algorithm, data)
        _check_scores(head["scores"], request, clients, data)
        observations = []
        for entry in head["observations"]:
            observations.append(read_as(Observation, entry, "an observation"))
            ends = {observations[-1].client, observations[-1].client_b}
            if not ends <= {None, *range(len(clients.names))}:
                raise UsageError(
                    f"client of an observation must be below {len(clients.names)}."
                )
        sent_message = Message(packet.trees, head["meta"])
        message: Message | None = sent_message
        if isinstance(request, TrainRequest):
            if clients.is_lost(request):
                message = None
            else:
                _check_message(sent_message, request, clients)
        return ClientReply(
            request.client,
            message,
            head["scores"],
            head["work"],
            observations,
            head["received"],
        )


def stage_of(request: ClientRequest) -> list[Any]:
    """Return the values that identify a request within its run. A reply repeats them, so no reply is used twice."""
    if isinstance(request, TrainRequest):
        return ["train", request.rnd.index, request.rnd.exchange]
    return ["tune" if isinstance(request, FinetuneRequest) else "score", request.done]


def _check_work(
    work: Mapping[str, float],
    request: ClientRequest,
    algorithm: Algorithm,
    data: FederatedData,
) -> None:
    """Check steps, samples and losses of the phases that were asked.

    Args:
        work: the site's numbers, by "phase/quantity".
        request: the request that it answers.
        algorithm: the algorithm, which names the phases.
        data: the federation without samples, for the client's size.

    Raises:
        UsageError: a phase was not asked, or a number is not possible.
    """
    phases: Sequence[Phase] = ()
    if isinstance(request, TrainRequest):
        phases = algorithm.phases(request.rnd, request.client)
    elif isinstance(request, FinetuneRequest):
        phases = algorithm.finetuning(request.done, request.client)
    n_train = len(data.clients[request.client].train)
    limits = {
        phase.name: phase.epochs * n_train * (OWN_STEP if phase.step else 1)
        for phase in phases
    }
    for name, value in work.items():
        phase, _, kind = name.partition("/")
        kind = kind.partition("/")[0]
        if phase not in limits or kind not in ("steps", "samples", "loss"):
            raise UsageError(f"work must be what was asked; got {name!r}.")
        if kind == "loss":
            is_possible = abs(value) <= LARGEST
        else:
            is_possible = 0 <= value <= limits[phase] and value == int(value)
        if not is_possible:
            raise UsageError(
                f"work {name!r} must be a count of at most {limits[phase]:,}, or a loss of at most {LARGEST:g}; "
                f"got {value}."
            )


def _check_scores(
    scores: Mapping[str, Mapping[str, Mapping[str, float]]],
    request: ClientRequest,
    clients: LocalClients,
    data: FederatedData,
) -> None:
    """Check that all scores that were asked are there and are possible, and no others.

    A score may be NaN if the client's samples cannot give it.

    Raises:
        UsageError: scores are missing, were not asked, lie outside their range, or do
            not fit each other or the number of samples.
    """
    evaluated_model = clients.algorithm.evaluates
    models, splits = {LOCAL, TUNED, "global", evaluated_model}, set(SCORED)
    if not isinstance(request, ScoreRequest):
        models, splits, evaluated_model = {LOCAL}, set(), LOCAL
    if isinstance(request, TrainRequest) and not clients.is_lost(request):
        splits = set(request.score)
    if splits and evaluated_model not in scores:
        raise UsageError(f"scores of {evaluated_model} must be there; got none.")
    metrics = set(scores_of(data.task))
    for model, parts in scores.items():
        scores_name = f"scores of {model}"
        if model not in models or set(parts) != splits:
            raise UsageError(
                f"{scores_name} must be those that were asked; got others."
            )
        for split, values in parts.items():
            if set(values) != metrics:
                expected = listing(sorted(metrics))
                metric_names = listing(values) or "none"
                raise UsageError(
                    f"{scores_name} on {split} must be {expected}; got {metric_names}."
                )
            count = len(getattr(data.clients[request.client], split))
            for metric, value in values.items():
                low, high = TABLE[metric].ends
                low, high = max(low, -LARGEST) - ROUNDING, min(high, LARGEST) + ROUNDING
                may_be_missing = math.isnan(value) and (
                    TABLE[metric].missing or not count
                )
                if not (may_be_missing or low <= value <= high):
                    raise UsageError(
                        f"{metric} of {model} on {split} must be from {low:g} to {high:g}; got {value}."
                    )
            n_right = values.get("accuracy", 0.0) * count
            perfect_scores = {
                values[name] > 1 - 1e-9 for name in PERFECT if name in values
            }
            if count and (
                abs(n_right - round(n_right)) > 1e-3 or len(perfect_scores) > 1
            ):
                raise UsageError(
                    f"{scores_name} on {split} must fit {count} samples and each other; got {n_right:g} right."
                )


def _check_message(
    message: Message, request: TrainRequest, clients: LocalClients
) -> None:
    """Check that tensors and numbers are finite, and that the model's are all that were asked, and no others.

    A tensor of any tree whose name the model has must have the model's shape. A message
    with other trees or numbers may lack the model's tree.

    Raises:
        UsageError: the message does not fit. The error names the tensor or the number.
    """
    initial = clients.initial
    names = clients.algorithm.uploaded(request.rnd, request.client)
    for kind, tensors in message.trees.items():
        for name, tensor in tensors.items():
            reference = initial.get(name)
            if reference is not None and tensor.shape != reference.shape:
                expected = list(reference.shape)
                got_shape = list(tensor.shape)
                raise UsageError(
                    f"tensor {name!r} of {kind} must have shape {expected}; got {got_shape}."
                )
            matches = (
                reference is not None
                and name in names
                and tensor.dtype == reference.dtype
            )
            if kind == "model" and not matches:
                raise UsageError(
                    f"tensor {name!r} must be one that was asked, of the model's type; got {tensor.dtype}."
                )
        nonfinite_name = tree.first_nonfinite(tensors, before=initial)
        if nonfinite_name is not None:
            raise UsageError(
                f"tensors must be finite; got NaN or infinity in {nonfinite_name!r} of {kind}."
            )
    is_empty = not (message.trees or message.meta)
    missing_names = sorted(names - message.trees.get("model", {}).keys())
    if missing_names and ("model" in message.trees or is_empty):
        raise UsageError(f"the update must have tensor {missing_names[0]!r}; got none.")
    for number in _numbers(message.meta):
        if not abs(number) <= LARGEST:
            raise UsageError(
                f"numbers of meta must be at most {LARGEST:g}; got {number}."
            )


def _numbers(value: object) -> Iterator[float]:
    """Yield all numbers in a value of JSON, also in its lists and objects."""
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)):
        yield value


Form = dict[str, object]
"""What replies of one exchange have in common, by the name of each part."""


def check_forms(replies: Mapping[str, ClientReply], last: Form) -> Form:
    """Refuse a reply whose trees or numbers differ in form from those of most others.

    A form has the names of all trees, the names, shapes and types of each tensor, and the kinds of the numbers. The
    model's tensors are checked before, since each client can be asked for others. If two forms are as frequent, that
    of the last round counts.

    Args:
        replies: the reply of each site, by name. Replies without a message are not
            compared.
        last: the form of the last round. It is empty before.

    Returns:
        The form of most replies in this round, or ``last`` if none has a message.

    Raises:
        UsageError: a reply has another form. The message names its site, or all sites if no form is the commonest.
    """
    forms = {
        name: _form(reply.message)
        for name, reply in replies.items()
        if reply.message is not None
    }
    if not forms:
        return last
    texts = {name: str(sorted(form.items())) for name, form in forms.items()}
    (commonest, times), *other_forms = Counter(texts.values()).most_common()
    if other_forms and other_forms[0][1] == times:
        commonest = str(sorted(last.items()))
    for name, form in forms.items():
        if texts[name] == commonest:
            continue
        common_form = next(
            (forms[site] for site in forms if texts[site] == commonest), None
        )
        if common_form is None:
            raise UsageError(
                f"trees and numbers must have one form at all sites; got {len(other_forms) + 1} forms at "
                f"{listing(forms)}. Install the same version at each."
            )
        places = sorted(form.keys() | common_form.keys())
        place = next(key for key in places if form.get(key) != common_form.get(key))
        form_text = form.get(place, "none")
        right_text = common_form.get(place, "none")
        raise UsageError(
            f"site {name!r}: trees and numbers must be as those of others; got {form_text!s:.200} "
            f"as {place!r}, and others have {right_text!s:.200}."
        )
    return next(forms[name] for name in forms if texts[name] == commonest)


def _form(message: Message) -> Form:
    """Return the form of a message (:func:`check_forms`).

    The model's tensors are left out, since each client can be asked for others.
    """
    form: Form = {f"tree {kind}": "a tree" for kind in message.trees}
    for kind, tensors in message.trees.items():
        if kind == "model":
            continue
        for name, tensor in tensors.items():
            shape = list(tensor.shape)
            form[f"tensor {name} of {kind}"] = f"{tensor.dtype} of shape {shape}"
    for key, value in message.meta.items():
        form[f"meta {key}"] = _kind(value)
    return form


def _kind(value: object) -> object:
    """Return the kind of some JSON. Names in an object can differ between clients: an algorithm checks those."""
    if isinstance(value, list):
        return [_kind(item) for item in value]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number:
        return "number"
    return type(value).__name__


def check_norms(
    requests: Mapping[str, ClientRequest], replies: Mapping[str, ClientReply]
) -> dict[str, float]:
    """Return the norm of each site's update, by name, and refuse one that is far larger than the others.

    An update is the reply of a training request minus the message that was sent. Fewer than :data:`LEAST_UPDATES` are
    not compared. Replies without a message have no norm.

    Args:
        requests, replies: the request and the reply of each site, by name.

    Raises:
        UsageError: a norm is more than :data:`TIMES_MEDIAN` times the median of the others. It names the site.
    """
    norms = {}
    for name, reply in replies.items():
        request = requests[name]
        if isinstance(request, TrainRequest) and reply.message is not None:
            norms[name] = _norm(request.message, reply.message)
    if len(norms) < LEAST_UPDATES:
        return norms
    for name, norm in norms.items():
        other_norms = [norm for other_name, norm in norms.items() if other_name != name]
        median = statistics.median(other_norms)
        if 0 < TIMES_MEDIAN * median < norm:
            raise UsageError(
                f"site {name!r}: the norm of the update must be at most {TIMES_MEDIAN:,.0f} times the median of the "
                f"others, {median:.3g}; got {norm:.3g}. Check this site's data."
            )
    return norms


def clip(
    requests: Mapping[str, ClientRequest],
    replies: Mapping[str, ClientReply],
    norms: Mapping[str, float],
) -> None:
    """Shorten updates to :data:`CLIP` times the median norm, without a change of direction, in the replies themselves.

    Args:
        requests, replies: the request and the reply of each site, by name.
        norms: the norm of each site's update, as :func:`check_norms` returns it.
    """
    limit = math.inf
    if norms:
        limit = CLIP * statistics.median(norms.values())
    for name, norm in norms.items():
        request, message = requests[name], replies[name].message
        if norm <= limit or message is None or not isinstance(request, TrainRequest):
            continue
        for kind, tensors in message.trees.items():
            sent_tree = request.message.trees.get(kind, {})
            for key, tensor in tensors.items():
                if tensor.is_floating_point():
                    start = sent_tree.get(key, torch.zeros_like(tensor))
                    tensors[key] = start + (tensor - start) * (limit / norm)


def _norm(sent: Message, received: Message) -> float:
    """Return the Euclidean norm of the difference between two messages.

    A received tensor that was not sent, or has another shape, counts as a whole.
    """
    total = 0.0
    sent_tensors = merge_trees(sent.trees)
    for name, tensor in merge_trees(received.trees).items():
        change = tensor.double()
        if name in sent_tensors and sent_tensors[name].shape == tensor.shape:
            change = change - sent_tensors[name].double()
        total += float(change.square().sum())
    return math.sqrt(total)
