"""The requests and replies of a federation as packets.

The requests:

- ``hello`` asks for the site's facts: version, shape, classes, sizes and digests.
- ``moments`` asks for a table's counts, means and sums of squares. Tables that are scaled or filled need them.
- ``race`` announces runs. It asks if the site allows them, and for the classes in its validation samples.
- ``join`` begins a run. It has the configuration, all sites' sizes, the site's number and the initial model.
- ``train`` is one exchange. It leads from one version of the client's state to the next.
- ``finetune`` trains a copy of one of the client's models.
- ``score`` evaluates models. It has the server's part, and the names to merge with the client's own part.
- ``measure`` asks for metrics of the client's own model after its first round, numbers alone.
- ``sum_keys`` asks for the client's keys of a secure sum, and ``sum_shares`` for encrypted shares of its secrets.
- ``sum_agree`` asks the client to sign who is in the sum. With enough signatures, ``sum_reveal`` asks for the shares
  that remove the masks from the sum of the received updates.

The replies are ``hello``, ``told`` (moments), ``counted`` (classes), ``joined``, ``done``, ``measured`` and ``summed``.
With a reason, a reply can also be ``refused``, ``failed`` or ``waiting`` (for the site's owner).

Each request has a stamp: the server's session and an increasing number. Its reply has the same stamp, so late replies
are recognised.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import fl_core
from fedlayers.remote import packet_forms
from fedlayers.remote.codec import Packet, PacketError, check_trees, fields
from fedlayers.remote.compression import expand_message
from fl_core.algorithms.base import Algorithm, Message, Observation, Round, State
from fl_core.algorithms.model_template import ClientTensorRef, ModelTemplate, StateSchema
from fl_core.errors import CorruptError, UsageError, about, listing
from fl_core.execution.requests import (
    LOCAL,
    SCORED,
    ClientReply,
    ClientRequest,
    FinetuneRequest,
    ScoreRequest,
    TrainRequest,
)
from fl_core.plan import LayerPlan
from fl_core.rows import check_rows, row
from fl_core.scores import check_scores, why_missing
from fl_core.storage.schema import COUNT, validate
from fl_core.tree import Tree

PROTOCOL, OLDEST = 3, 2
"""The newest and the oldest protocol that this version speaks."""
TORCH = torch.__version__.partition("+")[0]
"""The version of PyTorch without its build."""
MESSAGE, SERVER, SENT = "message/", "server/", "sent/"
MOST_TEXT = 200
"""Maximum characters of a name in a reply."""
MOST_OBSERVATIONS, MOST_WORK = 20_000, 1000
"""Maximum observations of one reply, and numbers of its work."""
NAMES, NAMES_PER_TENSOR = 1000, 32
"""Maximum names in a client's state: a constant, and more for each tensor of the model. Each optimiser takes some."""


def versions() -> dict[str, Any]:
    """Return what a hello says of the sender's version."""
    return {"version": fl_core.__version__, "protocol": PROTOCOL, "oldest": OLDEST}


def check_spoken(who: str, said: Mapping[str, Any]) -> None:
    """Refuse a peer that speaks none of this version's protocols, whatever else its hello has.

    >>> check_spoken("the server", {"version": "1.0", "protocol": PROTOCOL + 1, "oldest": OLDEST})

    Raises:
        UsageError: gives both versions and their protocols.
    """
    newest = said.get("protocol")
    oldest = said.get("oldest", newest)  # protocol 1 has no such entry
    if isinstance(newest, int) and isinstance(oldest, int) and (newest < OLDEST or oldest > PROTOCOL):
        raise UsageError(
            f"protocols of {who} must share one of {OLDEST} to {PROTOCOL} (fedlayers {fl_core.__version__}); got "
            f"{oldest} to {newest} (fedlayers {str(said.get('version'))[:40]}). Install the same version at both ends."
        )


def run_position(algorithm: Algorithm, **rest: Any) -> dict[str, Any]:
    """Return the part of a request that names its exchange, algorithm and plan."""
    plan = None if algorithm.plan is None else LayerPlan(algorithm.plan.layers, algorithm.plan.shared).to_json()
    return {"algorithm": algorithm.name, "options": dict(algorithm.options), "plan": plan, **rest}


def stamp_of(packet: Packet) -> dict[str, Any]:
    """Remove and return the stamp of a packet.

    Raises:
        PacketError: it has no stamp.
    """
    found = {key: packet.head.pop(key, None) for key in packet_forms.STAMP}
    wrong = validate(found, packet_forms.STAMP)
    if wrong:
        raise PacketError(f"a packet {packet.head['kind']!r} is malformed: {wrong}")
    return found


# --- a request ---------------------------------------------------------------------------------------------------


def request_packet(request: ClientRequest, where: Mapping[str, Any]) -> Packet:
    """Return an engine's request as a packet. ``where`` has the values of ``packet_forms.PLACE``."""
    if isinstance(request, TrainRequest):
        head = {
            "kind": "train",
            **where,
            "round": {**asdict(request.rnd), "sampled": list(request.rnd.sampled)},
            "meta": request.message.meta,
            "score": list(request.score),
            "keep": request.keep,
            "lost": request.lost,
        }
        return Packet(head, {MESSAGE + name: each for name, each in request.message.trees.items()})
    models, trees = _offer_parts(request.template)
    head = {"kind": "score", **where, "done": request.done, "models": models, "meta": {}}
    if isinstance(request, FinetuneRequest):
        head |= {"kind": "finetune", "model": request.model}
    return Packet(head, trees)


def _offer_parts(offer: ModelTemplate) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Split a template into the place of each model's tensors, and the tensors, each once.

    A place is a list [tree, name] of the client's own state, or the number of a tree that is sent.
    """
    if offer.server is not None:
        return None, {SERVER + "model": offer.server.trees["model"]}
    trees: list[dict[str, Tensor]] = []
    at: dict[tuple[str, int], int] = {}
    models: dict[str, Any] = {}
    for model, parts in offer.models.items():
        models[model] = {}
        for name, part in parts.items():
            if isinstance(part, ClientTensorRef):
                models[model][name] = [part.tree, part.name]
                continue
            number = at.setdefault(
                (name, id(part)), next((k for k, t in enumerate(trees) if name not in t), len(trees))
            )
            if number == len(trees):
                trees.append({})
            trees[number][name] = part
            models[model][name] = number
    return models, {f"{SENT}{number}": each for number, each in enumerate(trees)}


def request_of(packet: Packet, client: int, model: Mapping[str, Tensor]) -> ClientRequest:
    """Return the request in a packet, for the site's own client.

    Args:
        model: tensors by name, which the server's tensors must match in name, shape and type.

    Raises:
        PacketError: says what is wrong.
    """
    head = packet.head
    values = fields(head, packet_forms.FORMS[head["kind"]])
    check_trees(packet.trees, model, "the server")
    if head["kind"] == "train":
        rnd = Round(values["round"]["index"], values["round"]["exchange"], tuple(values["round"]["sampled"]))
        if client not in rnd.sampled:
            raise PacketError(f"the client of a packet 'train' must be one of the round; got {client}.")
        if not set(values["score"]) <= set(SCORED):
            raise PacketError(f"score of a packet 'train' must be among {list(SCORED)}; got {values['score']}.")
        trees = {name.removeprefix(MESSAGE): each for name, each in packet.trees.items()}
        return TrainRequest(
            client, rnd, Message(trees, values["meta"]), tuple(values["score"]), values["keep"], values["lost"]
        )
    offer = _offer_of(packet, values["models"], model)
    if head["kind"] == "finetune":
        return FinetuneRequest(client, values["done"], offer, values["model"])
    return ScoreRequest(client, values["done"], offer)


def _offer_of(packet: Packet, models: Mapping[str, Any] | None, wanted: Mapping[str, Tensor]) -> ModelTemplate:
    if models is None:
        if list(packet.trees) != [SERVER + "model"]:
            raise PacketError(
                f"a packet {packet.head['kind']!r} must hold the server's model only; got {list(packet.trees)[:9]}."
            )
        return ModelTemplate(server=State({name.removeprefix(SERVER): each for name, each in packet.trees.items()}))
    made: dict[str, dict[str, Tensor | ClientTensorRef]] = {}
    for model, parts in models.items():
        made[model] = {}
        for name, part in parts.items() if isinstance(parts, dict) else ():
            own = isinstance(part, list) and len(part) == 2 and all(isinstance(each, str) for each in part)
            if name not in wanted or not (own or name in packet.trees.get(f"{SENT}{part}", {})):
                raise PacketError(
                    f"tensor {name!r} of the model {model!r} must name its source; got {str(part)[:80]!r}."
                )
            made[model][name] = ClientTensorRef(*part) if own else packet.trees[f"{SENT}{part}"][name]
    return ModelTemplate(made)


# --- a reply -----------------------------------------------------------------------------------------------------


def reply_packet(reply: ClientReply, outline: StateSchema) -> Packet:
    """Return a site's reply as a packet of messages, numbers and names."""
    head = {
        "kind": "done",
        "meta": reply.message.meta,
        "work": reply.work,
        "epsilon": None if reply.epsilon is None else list(reply.epsilon),
        "scores": {
            model: {split: {name: _plain(value) for name, value in each.items()} for split, each in splits.items()}
            for model, splits in reply.scores.items()
        },
        "observations": [{**asdict(each), "value": _plain(each.value)} for each in reply.observations],
        "outline": outline.to_json(),
    }
    return Packet(head, {MESSAGE + name: each for name, each in reply.message.trees.items()})


def reply_of(
    packet: Packet,
    request: ClientRequest,
    model: Tree,
    site: str,
    task: str,
    compress: str = "",
    observes: Collection[str] = (),
) -> tuple[ClientReply, StateSchema]:
    """Return the reply to a server's request.

    Args:
        model: tensors by name, which the site's tensors must match. task: the kind of task, which decides the scores.
        compress: how the site compresses updates. observes: the metrics of its observations.

    Raises:
        PacketError: names the site, and says what is wrong.
    """
    with about(f"the reply of site {site!r}", PacketError):
        values = fields(packet.head, packet_forms.REPLY)
        message = Message({name.removeprefix(MESSAGE): each for name, each in packet.trees.items()}, values["meta"])
        sent = message.bytes
        if compress and isinstance(request, TrainRequest):
            message = expand_message(message, request.message, model)
        check_trees(message.trees, model, f"site {site!r}")
        scores = {
            name: {split: {key: _number(value) for key, value in each.items()} for split, each in splits.items()}
            for name, splits in values["scores"].items()
        }
        _check_scores(scores, request, task)
        if not isinstance(request, TrainRequest) and (packet.trees or values["meta"]):
            raise PacketError("a reply must hold numbers only; got tensors or data.")
        epsilon = values["epsilon"]
        if epsilon is not None and (len(epsilon) != 2 or validate(epsilon, [packet_forms.NUMBER])):
            raise PacketError(f"epsilon and delta must be two numbers; got {str(epsilon)[:80]}.")
        _check_count("numbers of its work", values["work"], MOST_WORK)
        _check_texts(values["work"])
        observations = _observations(values["observations"], request.client, observes)
        _check_outline(values["outline"], model)
    spent = None if epsilon is None else (float(epsilon[0]), float(epsilon[1]))
    reply = ClientReply(request.client, message, scores, values["work"], observations, epsilon=spent)
    reply.compressed = (compress, sent) if compress else None
    return reply, StateSchema.from_json(values["outline"])


def _check_scores(scores: Mapping[str, Mapping[str, Mapping[str, float]]], request: ClientRequest, task: str) -> None:
    """Check that all scores of the request are there, each within its range, and no others.

    The site alone knows whether it has a global or a personal model beside those of the request.
    """
    wanted, more = [LOCAL], list[str]()
    splits: tuple[str, ...] = SCORED
    if isinstance(request, ScoreRequest):
        wanted, more = list(request.template.models), ["global", "personal"]
        if not wanted and not scores:
            raise PacketError("scores must be of a model; got none.")
    elif isinstance(request, FinetuneRequest) or not request.score or (request.lost and not scores):
        wanted = []
    else:
        splits = request.score
    missing, strange = [each for each in wanted if each not in scores], scores.keys() - {*wanted, *more}
    if missing or strange:
        raise PacketError(f"scores must be of the models {wanted or more}; got {sorted(scores)[:9]}.")
    for model, found in scores.items():
        for split, each in found.items():
            try:
                check_scores(each, task)
            except UsageError as error:
                raise PacketError(f"scores of {model!r} on {split[:40]!r}: {error}") from error
        if set(found) != set(splits):
            raise PacketError(f"scores of {model!r} must be on {listing(splits)}; got {sorted(found)[:9]}.")


def _observations(found: Collection[Mapping[str, Any]], client: int, observes: Collection[str]) -> list[Observation]:
    """Return a client's observations. Each must be a row that its algorithm can have."""
    _check_count("observations", found, MOST_OBSERVATIONS)
    made = [_observation(each, client) for each in found]
    strange = next((each.metric for each in made if each.metric not in observes), None)
    if strange is not None:
        known = f"of {listing(observes)}" if observes else "left out"
        raise PacketError(
            f"observations of a client must be {known}; got {strange[:40]!r}. Name it in the algorithm's observes."
        )
    _check_texts(text for each in made for text in (each.layer, each.variant))
    if made:
        try:
            check_rows("an observation", (row(m.metric, m.value, status=why_missing(m.metric, m.value)) for m in made))
        except CorruptError as error:
            raise PacketError(str(error)) from error
    return made


def _check_outline(outline: Mapping[str, Any], model: Collection[str]) -> None:
    """Refuse names that the state of a client cannot have, and too many. They go into every checkpoint."""
    names = [*outline["trees"], *outline["changed"], *(name for each in outline["trees"].values() for name in each)]
    _check_count("names in a client's state", names, NAMES + NAMES_PER_TENSOR * len(model))
    _check_texts(names)
    strange = next((name for name in outline["trees"].get("model", ()) if name not in model), None)
    if strange is not None:
        raise PacketError(f"the tree 'model' of a client's state must have tensors of the model; got {strange!r}.")


def _check_count(what: str, found: Collection[Any], most: int) -> None:
    if len(found) > most:
        raise PacketError(f"{what} must be at most {most:,}; got {len(found):,}.")


def _check_texts(texts: Iterable[str]) -> None:
    strange = next((text for text in texts if len(text) > MOST_TEXT or not text.isprintable()), None)
    if strange is not None:
        raise PacketError(f"a name must have at most {MOST_TEXT} printable characters; got {strange[:40]!r}….")


def _observation(found: Mapping[str, Any], client: int) -> Observation:
    form = {
        "metric": str,
        "value": (*packet_forms.NUMBER, None),
        "client": COUNT,
        "client_b": (COUNT, None),
        "layer": str,
        "variant": str,
    }
    values = fields({"kind": "observation", **found}, form)
    if values["client"] != client:
        raise PacketError(f"observations must be of client {client}; got {values['client']}.")
    return Observation(**{**values, "value": _number(values["value"])})


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else value
