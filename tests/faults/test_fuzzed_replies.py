"""Every number, text and tensor of every reply, changed to wrong kinds: refused by the site's name, or harmless.

A federation is recorded once for each algorithm. Then each exchange is played again from its state before, with one
leaf of one site's reply changed, up to the next evaluation.
"""

import copy
import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from flwr.app import Message

from fedlayers.flower import federation
from fedlayers.flower.clients import Sites
from fedlayers.flower.federation import federated
from fedlayers.runs import default_instruments
from fl_core.config import RunConfig
from fl_core.errors import RunError, UsageError
from fl_core.rounds.engine import Engine
from fl_core.run import runner
from fl_core.run.task import assemble
from tests.fedlayers.flower.grid import PLAIN, LocalGrid, site_files

ALGORITHMS = (
    *("fedavg", "fedper", "playerfl", "scaffold", "fedcac"),
    *("pfedhn", "fedfomo", "apfl", "fedlama", "local_adaptation"),
)
"""With a second tree, numbers, fine-tuning, a mixture, other tensors a round, and the plain ones."""
LIAR = "west"
JSON = (
    *(None, True, "\x1b[2J", "", -1, 1.5, 1e308),
    *(10**400, float("nan"), float("inf"), [], {}),
)
"""What a leaf of JSON becomes, where it is another value. Else it is left out."""
TENSORS = (
    lambda t: t.double(),
    lambda t: t.to(torch.complex64),
    lambda t: t.to(torch.uint8),
    lambda t: ~t if t.dtype is torch.bool else t > 0,
    lambda t: t.to(torch.float16),
    lambda t: t[None],
    lambda t: t[:1] if len(t) > 1 else t[:0],
    lambda t: t.reshape(-1, 1, 1),
    lambda t: t.float() * torch.nan,
    lambda t: t.float() / 0 + torch.inf,
    lambda t: t.double() * 0 + 1e300,
    None,
)
"""What a tensor becomes. None: it is left out."""


class Played(LocalGrid):
    """A grid that repeats recorded replies, of which one can be changed."""

    def __init__(self, files):
        super().__init__(files)
        self.replies: dict = {}
        self.forged = None, None

    def _answer(self, message):
        head = json.loads(message.content.config_records["head"]["json"])
        key = (
            message.metadata.dst_node_id,
            message.metadata.message_type,
            str(head.get("stage")),
        )
        if key not in self.replies:
            self.replies[key] = super()._answer(message).content
        content = self.forged[1] if self.forged[0] == key else self.replies[key]
        return Message(content, reply_to=message)


class Stepped(Engine):
    """An engine that notes its state before each exchange."""

    def __init__(self, *args):
        super().__init__(*args)
        self.steps = []

    def _note(self, call, *args):
        self.steps.append((self._state(), call, args))

    def _state(self):
        clients = self.clients
        return {
            "server": self.server.clone(),
            "done": self.done,
            "algorithm": self.algorithm,
            "states": dict(clients.states._states),
            "forms": dict(clients.forms),
            "listeners": [
                {key: copy.copy(value) for key, value in vars(listener).items()}
                for listener in self.listeners
            ],
        }

    def exchange(self, rnd, score=(), keep=()):
        self._note("exchange", rnd, score, keep)
        return super().exchange(rnd, score, keep)

    def ask(self, rnd, requests):
        self._note("tune" if rnd.exchange == "finish" else "evaluate")
        return super().ask(rnd, requests)

    def play(self, place):
        """Repeat a step and what follows, up to the next evaluation."""
        for k, (state, call, args) in enumerate(self.steps[place:]):
            if k == 0:
                self.server = state["server"].clone()
                self.clients.states._states = dict(state["states"])
                self.clients.forms = dict(state["forms"])
                self.use(state["algorithm"])
                for listener, values in zip(
                    self.listeners, state["listeners"], strict=True
                ):
                    vars(listener).update({n: copy.copy(v) for n, v in values.items()})
            elif self.algorithm.plan != state["algorithm"].plan:
                return  # a lie led to another plan, and replies under it are not recorded
            self.done = state["done"]
            self.check_finite()
            if call == "exchange":
                Engine.exchange(self, *args)
            else:
                getattr(Engine, call)(self)
            if call == "evaluate":
                return

    def structure(self):
        return {
            (kind, name): (tensor.dtype, tensor.shape)
            for kind, tensors in self.server.trees.items()
            for name, tensor in tensors.items()
        }


Stepped.tune = Engine.tune
Stepped.evaluate = Engine.evaluate


def leaves(found, path=()):
    """Yield the path of each value in some JSON that holds no others."""
    if isinstance(found, (dict, list)) and found:
        items = found.items() if isinstance(found, dict) else enumerate(found)
        for key, value in items:
            yield from leaves(value, (*path, key))
    else:
        yield path


def changes_of(content):
    """Yield a reply with each change of each leaf: its place, and the records."""
    packet = federation.packet_of(content, 10**9)
    head = {**packet.head, "trees": list(packet.trees)}
    arrays = {
        (kind, name): tensor
        for kind, tensors in packet.trees.items()
        for name, tensor in tensors.items()
    }
    for path in leaves(head):
        for wrong in JSON:
            changed = copy.deepcopy(head)
            place = changed
            for key in path[:-1]:
                place = place[key]
            if place[path[-1]] == wrong and type(place[path[-1]]) is type(wrong):
                del place[path[-1]]
            else:
                place[path[-1]] = wrong
            yield path, forge(content, changed)
    for kind, name in arrays:
        for wrong in TENSORS:
            trees = {key: dict(tensors) for key, tensors in packet.trees.items()}
            if wrong is None:
                del trees[kind][name]
            else:
                trees[kind][name] = wrong(trees[kind][name])
            yield (kind, name), federation.Packet(packet.head, trees).records()


def forge(content, head):
    """Return records with another head, of which each number arrives as it is written."""
    records = federation.packet_of(content, 10**9).records()
    records["head"]["json"] = json.dumps(head)
    for name in ("tensors",):
        if name in content:
            records[name] = content[name]
    return records


def recorded(folder, algorithm, monkeypatch):
    """Run over sites, and return the engine, the grid and its sites."""
    grid = Played(site_files(folder, 'scale = "standard"'))
    sites = Sites(grid, 3)
    sites.connect()
    data = federated(sites.common(0))
    keys = {**PLAIN, "algorithm": algorithm, "stack": "off"}
    with monkeypatch.context() as patched:
        patched.setattr(runner, "Engine", Stepped)
        engine = runner.run(
            RunConfig(**keys),
            data=data,
            clients=lambda task, run, *others: sites.clients(task, "0" * 32),
            instruments=default_instruments,
            progress=False,
            announce=False,
        )
    return engine, grid


def stage_of(engine, place):
    """Return the kind and the stage of the messages of a step."""
    state, call, args = engine.steps[place]
    if call == "exchange":
        return "train", str(["train", args[0].index, args[0].exchange])
    kind = ("train", "tune") if call == "tune" else ("evaluate", "score")
    return kind[0], str([kind[1], state["done"]])


def outcome(play):
    """Return what becomes of a forged reply."""
    try:
        play()
    except (UsageError, RunError) as error:
        text = str(error)
        named = LIAR in text or "node 3" in text
        return "refused" if named and text.isprintable() else f"other: {text}"
    except Exception as error:
        return f"raw: {error!r}"
    return "accepted"


def fuzz(engine, grid, first=0, every=1):
    """Play each change, from one on and then every so many. Return what came of each, with its place."""
    outcomes, k = [], -first
    for place in range(len(engine.steps)):
        key = (3, *stage_of(engine, place))
        grid.forged = None, None
        engine.play(place)
        honest = engine.structure()
        for path, content in changes_of(grid.replies[key]):
            k += 1
            if (k - 1) % every:
                continue
            grid.forged = key, content
            result = outcome(partial(engine.play, place))
            if result == "accepted" and engine.structure() != honest:
                result = "other: tensors at the server"
            outcomes.append((result, key, path))
    return outcomes


def connect(grid):
    sites = Sites(grid, 3)
    sites.connect()
    config = RunConfig(**PLAIN, algorithm="fedavg", stack="off")
    task = assemble(config, data=federated(sites.common(0)))
    sites.clients(task, "0" * 32)


def check(found, refused, accepted):
    others = [outcome for outcome in found if outcome[0] not in ("refused", "accepted")]
    assert others == []
    counts = Counter(outcome[0] for outcome in found)
    assert counts == {"refused": refused, "accepted": accepted}


COUNTS = {
    "fedavg": (1488, 48),
    "fedper": (1483, 65),
    "playerfl": (1697, 79),
    "scaffold": (1956, 108),
    "fedcac": (1644, 60),
    "pfedhn": (1488, 48),
    "fedfomo": (1979, 157),
    "apfl": (2328, 132),
    "fedlama": (1532, 52),
    "local_adaptation": (1776, 60),
    "descriptions": (754, 50),
}
"""Changes that are refused, and accepted and harmless, of each algorithm and of the sites' descriptions."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_leaf_of_each_reply(tmp_path, monkeypatch, algorithm):
    check(fuzz(*recorded(tmp_path, algorithm, monkeypatch)), *COUNTS[algorithm])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ["fedcac", "fedfomo", "playerfl"])
def test_some_leaves_of_each_reply(tmp_path, monkeypatch, algorithm):
    engine, grid = recorded(tmp_path, algorithm, monkeypatch)
    outcomes = fuzz(engine, grid, first=5, every=61)
    assert {outcome[0] for outcome in outcomes} <= {"refused", "accepted"}
    assert len(outcomes) == -((5 - sum(COUNTS[algorithm])) // 61)


@pytest.mark.filterwarnings("ignore")
def test_each_leaf_of_each_description(tmp_path):
    grid = Played(site_files(tmp_path, 'scale = "standard"'))
    connect(grid)
    outcomes = []
    for kind in ("query.facts", "query.describe", "query.clipped", "query.begin"):
        key = 3, kind, "None"
        for path, content in changes_of(grid.replies[key]):
            grid.forged = key, content
            outcomes.append((outcome(partial(connect, grid)), key, path))
    check(outcomes, *COUNTS["descriptions"])


def test_the_page_has_the_counts():
    refused, accepted = map(sum, zip(*COUNTS.values(), strict=True))
    page = Path("SECURITY.md").read_text()
    assert f"{refused + accepted:,} changed leaves" in page
    assert f"{refused:,} are refused" in page
    assert f"{accepted:,} are accepted and harmless" in page
