"""The clients of a run at their sites. The server has names, sizes, messages and numbers, and no client's tensors."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch
from flwr.app import Message as FlowerMessage, RecordDict
from flwr.serverapp import Grid

import fl_core
from fedlayers.flower import checks
from fedlayers.flower.federation import (
    CLIPPED,
    DESCRIPTION,
    FACTS,
    Ends,
    Packet,
    checked,
    common,
    packet_of,
    raise_error,
    settled,
    widest,
)
from fl_core import tree
from fl_core.algorithms.base import Algorithm, Observation, Round, State, find
from fl_core.config import AUTO, DataConfig
from fl_core.display import printable
from fl_core.errors import RunError, UsageError, about, listing, plural, warn
from fl_core.records.store import Checkpoint, Run
from fl_core.rounds.clients import (
    ClientReply,
    ClientRequest,
    FinetuneRequest,
    LocalClients,
    ScoreRequest,
    TrainRequest,
)
from fl_core.run import restore
from fl_core.run.task import Task
from fl_core.tree import Tree

POLL = 0.3
"""Seconds between two requests for replies."""
TRIES = 5
"""How often a site is asked, if its supernode or its process is lost each time."""
FACT_BYTES = 2**24
EXTRA_TREES = 16
"""The largest number of trees of the model's size in a reply, next to one for each client."""
UNUSED = {*DataConfig.__dataclass_fields__} - {"positive"}
UNUSED |= {"measure", "measure_every", "workers", "device", "stack", "checkpoint_every"}
"""Keys of a configuration that a server does not use: sites have the data and the devices."""


@dataclass
class Sites:
    """The sites of a federation, which a grid of Flower connects.

    Args:
        grid: Flower's grid.
        count: the number of sites to wait for.
        timeout: seconds to wait for the replies of a stage of training or evaluation.
            Other replies are waited for without a limit.
        least: the smallest number of replies. With fewer in a stage the run ends.
        clip: whether an update is shortened to :data:`fedlayers.flower.checks.CLIP` times the median norm.

    Attributes:
        nodes: Flower's number of each site, by name, in alphabetical order.
        facts: the description of the data at the first site by name.
        samples: the number of samples of each site, by name.
        largest: the site with the largest update of the last exchange; empty before it.
    """

    grid: Grid
    count: int
    timeout: float = math.inf
    least: int = 1
    clip: bool = False
    nodes: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    largest: str = ""
    _common: dict[tuple[int, int | None], dict[str, Any]] = field(default_factory=dict)

    def connect(self) -> None:
        """Wait until enough sites are connected, and ask for their names and facts.

        Raises:
            UsageError: two sites have one name, or one has another version or data of another kind.
            RunError: a site fails.
        """
        while len(nodes := sorted(self.grid.get_node_ids())) < self.count:
            time.sleep(POLL)
        self.nodes = {f"node {node}": node for node in nodes}
        version = Packet({"version": fl_core.__version__})
        packets = dict.fromkeys(self.nodes, version)
        facts = [
            (checked(node, packet.head, FACTS), self.nodes[node])
            for node, packet in self.ask("query.facts", packets, FACT_BYTES).items()
        ]
        facts.sort(key=lambda fact: fact[0]["name"])
        self.nodes = {}
        for site_facts, node in facts:
            name = site_facts["name"]
            if name != name.strip() or not (name.isprintable() and 0 < len(name) < 100):
                raise UsageError(
                    f"name of node {node} must be 1 to 99 printed signs; got {name[:99]!r}."
                )
            if name in self.nodes:
                raise UsageError(
                    f"names of sites must be distinct; got {name!r} from nodes {self.nodes[name]} and {node}."
                )
            self.nodes[name] = node
            self.samples[name] = site_facts["samples"]
        self.facts = facts[0][0]
        checks.check_alike({site_facts["name"]: site_facts for site_facts, _ in facts})

    def common(self, seed: int, split_seed: int | None = None) -> dict[str, Any]:
        """Return the kind and the preparation of the sites' data for the splits of a seed. Each seed is asked once.

        The result is that of :func:`fedlayers.flower.federation.common`.

        Args:
            seed: the run's seed.
            split_seed: the seed that draws the test samples, if it is another one.

        Raises:
            UsageError: a site's description is not possible, or does not fit the
                others.
            RunError: a site fails.
        """
        key = seed, split_seed
        if key not in self._common:
            seeds = {"seed": seed, "split_seed": split_seed}
            packets = {
                name: Packet({"number": number, **seeds})
                for number, name in enumerate(self.nodes)
            }
            replies = self.ask("query.describe", packets, FACT_BYTES)
            sites = {
                name: checked(name, replies[name].head, DESCRIPTION)
                for name in self.nodes
            }
            ends: Ends = ((), ())
            if (widest_fences := widest(self.facts, sites)) is not None:
                low, high = widest_fences
                packets = {
                    name: Packet({**packet.head, "low": low, "high": high})
                    for name, packet in packets.items()
                }
                replies = self.ask("query.clipped", packets, FACT_BYTES)
                counts = {
                    name: checked(name, replies[name].head, CLIPPED) for name in sites
                }
                ends, sites = settled(self.facts, widest_fences, sites, counts)
            arguments = self.facts, sites, self.samples, split_seed, ends
            self._common[key] = common(*arguments)
        return self._common[key]

    def clients(self, task: Task, run: str = "", *others: object) -> SiteClients:
        """Begin a run at the sites, and return its clients.

        Each site builds the task with its own samples, compares its model with the
        server's, and stores the run's description.

        Args:
            task: the run's task, without samples.
            run: the run's name at the sites. An empty text gives a new name.
            others: further arguments of a function that makes clients. They are
                ignored.

        Raises:
            UsageError: a site's model differs, or its data do not fit.
            RunError: a site fails.
        """
        clients = SiteClients(self, task, run or uuid4().hex)
        config = task.config.to_json()
        config = {key: value for key, value in config.items() if key not in UNUSED}
        if config["plan"] != AUTO:  # the plan itself is sent
            del config["plan"]
        job = {
            "run": clients.run_name,
            "config": config,
            "data": self.common(
                task.config.execution.seed, task.data.partition.params.get("split_seed")
            ),
            "plan": None if task.plan is None else task.plan.to_json(),
            "model": tree.digest(tree.full_state(task.model)),
        }
        packet = Packet(job, {"start": task.start or {}})
        self.ask("query.begin", dict.fromkeys(clients.names, packet), FACT_BYTES)
        return clients

    def clients_of(self, run: Run, checkpoint: Checkpoint, task: Task) -> SiteClients:
        """Return the clients of a stored run after a checkpoint's round.

        Their states are at the sites. Training with these clients changes no stored
        state.
        """
        clients = SiteClients(self, task, run.id, store=False)
        algorithm = restore.check(run, checkpoint, task)
        clients.begin(algorithm)
        clients.use(algorithm)
        clients.restore(checkpoint)
        return clients

    def ask(
        self, kind: str, packets: Mapping[str, Packet], most_bytes: int
    ) -> dict[str, Packet]:
        """Send each site its request, and return the replies that come in time.

        Only training and evaluation have a limit of time.

        Args:
            kind: the type of Flower's message.
            packets: the request of each site, by name.
            most_bytes: the largest size of the arrays in a reply.

        Raises:
            UsageError: a reply is no packet or too large, or a site reports a usage error.
            RunError: too few sites reply in time, or a site fails.
        """
        is_limited = not kind.startswith("query")
        deadline = math.inf
        if is_limited:
            deadline = time.monotonic() + self.timeout
        replies: dict[str, Packet] = {}
        for name, records in self._replies(kind, packets, deadline):
            with about(f"site {name!r}"):
                replies[name] = packet_of(records, most_bytes)
            raise_error(name, replies[name].head)
        if missing := sorted(packets.keys() - replies.keys()):
            warn(f"no reply within {self.timeout:g} s from {listing(missing)}")
        if len(replies) < min(self.least, len(packets)):
            raise RunError(
                f"at least {plural(self.least, 'site')} must reply within {self.timeout} s; got {len(replies)}. "
                f"Start the others, {listing(missing)}, and the run again."
            )
        return replies

    def _replies(
        self, kind: str, packets: Mapping[str, Packet], end: float
    ) -> Iterator[tuple[str, RecordDict]]:
        """Yield (site, contents of its reply) until a time, in order of arrival.

        A site whose process or supernode is lost is asked again. Replies that no
        request asked for are left out, with a warning.

        Args:
            kind, packets: as for :meth:`ask`.
            end: the time to stop at, as of ``time.monotonic``.

        Raises:
            RunError: a site was lost :data:`TRIES` times.
        """
        name_by_message: dict[str, str] = {}
        tries = Counter[str]()
        unasked_names, missing = list(packets), set(packets)
        while missing and time.monotonic() < end:
            has_lost_nodes = unasked_names and tries
            connected = set(
                self.grid.get_node_ids() if has_lost_nodes else self.nodes.values()
            )
            names_to_ask = [
                name for name in unasked_names if self.nodes[name] in connected
            ]
            unasked_names = [name for name in unasked_names if name not in names_to_ask]
            messages = [
                FlowerMessage(packets[name].records(), self.nodes[name], kind)
                for name in names_to_ask
            ]
            message_ids = self.grid.push_messages(messages)
            name_by_message |= dict(zip(message_ids, names_to_ask, strict=True))
            arrived_messages = list(self.grid.pull_messages(list(name_by_message)))
            for message in arrived_messages:
                number, node = (
                    message.metadata.reply_to_message_id,
                    message.metadata.src_node_id,
                )
                name = name_by_message.get(number, "")
                is_forged = not message.has_error() and node != self.nodes.get(name)
                if not name or is_forged:  # sent twice, or by another site
                    warn(f"a reply of node {node} is left out: nobody asked it")
                    continue
                del name_by_message[number]
                if not message.has_error():
                    missing.remove(name)
                    yield name, message.content
                    continue
                tries[name] += 1
                if tries[name] == TRIES:
                    reason = " ".join(printable(str(message.error.reason)).split())[
                        -300:
                    ]
                    raise RunError(f"site {name!r} must be able to work; got: {reason}")
                unasked_names.append(name)  # until its supernode is there again
            if not arrived_messages:
                time.sleep(POLL)


class SiteClients(LocalClients):
    """Clients at sites. The server holds no state of a client, only its version and the names of its tensors.

    Args:
        sites: the connected sites.
        task: the run's task.
        run: the run's name at the sites.
        store: whether sites store their states after training.
    """

    def __init__(self, sites: Sites, task: Task, run: str, store: bool = True) -> None:
        self.sites = sites
        self.task = task
        self.run_name = run
        self.store = store
        self.initial = tree.state_dict(task.model)
        self.dropout = task.config.federation.client_dropout
        self.names = task.data.names
        self.kept = {}
        self.forms: dict[str, checks.Form] = {}
        trees = len(self.names) + EXTRA_TREES
        self.most_bytes = trees * (tree.n_bytes(self.initial) + 4096)

    def use(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def start(self, name: str) -> State:
        state = self.algorithm.client_state(self.initial, self.names.index(name))
        names = {kind: list(tensors) for kind, tensors in state.trees.items()}
        return checks.outline(names, "")

    def fork(self) -> SiteClients:
        forked_clients = SiteClients(self.sites, self.task, self.run_name, store=False)
        forked_clients.dropout = 0.0
        return forked_clients

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield the replies in the requests' order, once all are there or time is over.

        A client whose site did not reply in time has a reply that is marked as missing.
        Each training reply gets two observations: the norm of its update, and its share
        of the weights. Long updates are shortened if the sites clip.

        Raises:
            UsageError: a reply is not possible, or differs too much from the others.
            RunError: a site fails, or too few reply in time.
        """
        requests_of = {self.names[request.client]: request for request in requests}
        packets = {
            name: self._packet(name, site_request)
            for name, site_request in requests_of.items()
        }
        scores = all(
            isinstance(site_request, ScoreRequest)
            for site_request in requests_of.values()
        )
        replies_of = self.sites.ask(
            "evaluate" if scores else "train", packets, self.most_bytes
        )
        replies = {
            name: checks.reply_of(
                name,
                replies_of[name],
                requests_of[name],
                self,
                self.task.data,
                self.most_bytes,
            )
            for name in requests_of
            if name in replies_of
        }
        norms = checks.check_norms(requests_of, replies)
        exchanges = {
            site_request.rnd.exchange
            for site_request in requests_of.values()
            if isinstance(site_request, TrainRequest)
        }
        for exchange in exchanges:  # one, or none
            last_forms = self.forms.get(exchange, {})
            self.forms[exchange] = checks.check_forms(replies, last_forms)
        if norms:
            self.sites.largest = max(norms, key=lambda name: norms[name])
        if self.sites.clip:
            checks.clip(requests_of, replies, norms)
        weights = {
            name: self.algorithm.task_info.weight(requests_of[name].client)
            for name in norms
        }
        for name, weight in weights.items():
            client, share = requests_of[name].client, weight / sum(weights.values())
            replies[name].observations += [
                Observation("update_norm", norms[name], client),
                Observation("weight_share", share, client),
            ]
        for name, request in requests_of.items():
            if name not in replies:
                yield ClientReply(request.client, None, missing=True)
                continue
            was_sent = replies[name].message is not None
            if isinstance(request, TrainRequest) and self.store and was_sent:
                version, names = (
                    version_of(request.rnd),
                    replies_of[name].head["outline"],
                )
                self.states[name] = checks.outline(names, version)
            yield replies[name]

    def score_packets(
        self, checkpoint: Checkpoint, more: Mapping[str, Any]
    ) -> dict[str, Packet]:
        """Return requests about every client's models after a checkpoint's round, by site.

        Args:
            checkpoint: the checkpoint, with the server's model.
            more: further values for the head of each request.
        """
        packets = {}
        for number, name in enumerate(self.names):
            request = ScoreRequest(number, checkpoint.round, checkpoint.server)
            packets[name] = self._packet(name, request)
            packets[name].head |= more
        return packets

    def _packet(self, name: str, request: ClientRequest) -> Packet:
        """Return a request as a packet, with names in place of the client's tensors."""
        algorithm = self.algorithm
        meta = self.states[name].meta
        config = self.task.config.federation
        is_registered = type(algorithm) is find(config.algorithm, config.options)
        head: dict[str, Any] = {
            "run": self.run_name,
            "algorithm": config.algorithm if is_registered else algorithm.name,
            "options": dict(algorithm.options),
            "plan": None if algorithm.plan is None else algorithm.plan.to_json(),
            "from": meta["version"],
            "stage": checks.stage_of(request),
        }
        if isinstance(request, TrainRequest):
            rnd, is_lost = request.rnd, self.is_lost(request)
            head |= {
                "kind": "train",
                "round": [rnd.index, rnd.exchange, list(rnd.sampled)],
                "to": version_of(rnd) if self.store and not is_lost else "",
                "meta": request.message.meta,
                "score": [] if is_lost else list(request.score),
            }
            return Packet(head, dict(request.message.trees))
        is_finetuning = isinstance(request, FinetuneRequest)
        head |= {"kind": "tune" if is_finetuning else "score", "done": request.done}
        models, sent_tree = self._template(name, request)
        return Packet({**head, "models": models}, {"sent": sent_tree})

    def _template(
        self, name: str, request: FinetuneRequest | ScoreRequest
    ) -> tuple[dict[str, dict[str, Any]] | None, Tree]:
        """Return the client's models by the names of their parts, and the parts that come from the server.

        In each model a name stands for a tensor. A tensor of the client's state is
        given as [tree, name in it]. A tensor of the server is given as a number in
        text, which is its name in the second result. If the algorithm computes with the
        client's tensors, the first result is None. The site then gets the server's
        model and calls the algorithm itself.

        Raises:
            UsageError: the client's state lacks what the algorithm reads.
        """
        parts: dict[int, Any] = {}
        state = self.algorithm.client_state(self.initial, request.client)
        state.trees = {}
        for kind, names in self.states[name].meta["outline"].items():
            state.trees[kind] = {
                name: torch.empty(0).as_subclass(AtSite) for name in names
            }
            for tensor_name, tensor in state.trees[kind].items():
                parts[id(tensor)] = [kind, tensor_name]
        sent_tree: Tree = {}
        try:
            models = self.algorithm.models(request.server, state, Round(request.done))
        except ComputesError:
            return None, dict(request.server.trees["model"])
        except KeyError as error:
            raise UsageError(
                f"site {name!r}: its state must have what {self.algorithm.name} reads; got none of {error}."
            ) from error
        if isinstance(request, FinetuneRequest):
            models = {self.algorithm.evaluates: models[self.algorithm.evaluates]}
        outline: dict[str, dict[str, Any]] = {}
        for model in models:
            outline[model] = {}
            for key, tensor in models[model].items():
                if id(tensor) not in parts:
                    parts[id(tensor)] = str(len(sent_tree))
                    sent_tree[str(len(sent_tree))] = tensor
                outline[model][key] = parts[id(tensor)]
        return outline, sent_tree


def version_of(rnd: Round) -> str:
    """Return the name of a client's state after an exchange of a round, such as ``000003-0``, counted from round 1."""
    return f"{rnd.index + 1:06d}-{rnd.exchange}"


class ComputesError(Exception):
    """Raised if an algorithm computes at the server with tensors that only a client has."""


class AtSite(torch.Tensor):
    """A tensor that only its site has. Nothing can be computed with it here."""

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: object = (), kwargs: object = None
    ) -> Any:
        raise ComputesError(function)
