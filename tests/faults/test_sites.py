"""Sites of a federation that send what no site can send, and files that are wrong."""

import copy
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Message

import fedlayers as fl
from fedlayers.flower import checks, clients, federation
from fedlayers.flower.clients import Sites
from fedlayers.flower.federation import federated, read_keys
from fedlayers.flower.server_app import ServerFile, federate
from fedlayers.flower.site import States
from fl_core.algorithms import base
from fl_core.algorithms.base import Round, State
from fl_core.errors import CorruptError, DivergedError, UsageError
from fl_core.records.store import Run
from fl_core.rounds.clients import TrainRequest
from fl_core.rounds.engine import Engine, Schedule
from fl_core.run.task import assemble
from tests.conftest import refuses
from tests.faults.injected import ROOT
from tests.fedlayers.flower.grid import (
    PLAIN,
    LocalGrid,
    assert_same,
    over_sites,
    site_files,
)


def forged(kind, change):
    """Return a change of the replies of one site to messages of a kind."""

    def replace(asked, reply):
        if asked.metadata.message_type != kind or asked.metadata.dst_node_id != 3:
            return reply
        packet = federation.packet_of(reply.content, 10**9)
        change(packet)
        return Message(packet.records(), reply_to=asked)

    return replace


def set_work(value):
    return lambda packet: packet.head["work"].update({"train/steps": value})


def set_score(value, metric="accuracy"):
    return lambda packet: packet.head["scores"]["personal"]["test"].update(
        {metric: value}
    )


def lies(**keys):
    return lambda packet: packet.head.update(keys)


def pops(*path):
    def apply(packet):
        entry = packet.head
        for key in path[:-1]:
            entry = entry[key]
        entry.pop(path[-1])

    return apply


def lie_of_moments(row, value):
    return lambda packet: packet.head["moments"][row].__setitem__(0, value)


def add_tree(packet):
    packet.trees["extra"] = {"w": torch.zeros(2)}


def add_head(packet):
    packet.trees["model"]["fc3.linear.bias"] = torch.zeros(2)


def set_tensor(change):
    def apply(packet):
        model = packet.trees["model"]
        name = next(iter(model))
        model[name] = change(model[name])

    return apply


def add_observation(**keys):
    return lambda packet: packet.head["observations"].append(
        {"metric": "alpha", "value": 1.0, **keys}
    )


FORGED = [
    ("fences of site", "query.describe", lies(fences=[[1.0]])),
    ("fences of site", "query.describe", lies(fences=[[1e39] * 3] * 2)),
    ("count the cells", "query.clipped", lies(outside=[1])),
    ("count the cells", "query.clipped", lies(outside=[10**6] * 3)),
    ("must count cells of", "query.clipped", lies(known=[10**6] * 3)),
    ("must have moments", "query.clipped", lies(moments=None)),
    ("moments of site", "query.clipped", lie_of_moments(1, 1e300)),
    ("known is missing", "query.clipped", lambda p: p.head.pop("known")),
    ("must be a count of at most", "train", set_work(1e308)),
    ("train/steps must be a finite number", "train", set_work(np.nan)),
    ("accuracy of personal on test must be from", "evaluate", set_score(1.5)),
    ("test.accuracy must be float", "evaluate", set_score(True)),
    ("must have shape", "train", set_tensor(lambda t: t[:1])),
    ("must be finite", "train", set_tensor(lambda t: t / 0)),
    ("the norm of the update", "train", set_tensor(lambda t: t + 1e9)),
    ("arrays must have at most", "train", set_tensor(lambda t: torch.zeros(10**7))),
    ("update must have tensor", "train", lambda p: p.trees["model"].popitem()),
    (
        "must be a whole number",
        "query.describe",
        lambda p: p.head["sizes"].insert(0, -1),
    ),
    ("must have 1 to", "query.describe", lambda p: p.head.update(sizes=[10**10, 1, 1])),
    (
        "must be those of its",
        "query.describe",
        lambda p: p.head.update(moments=[[-1.0] * 3] * 3),
    ),
    ("client of an observation", "evaluate", add_observation(client=-1)),
    ("unknown field of an observation", "evaluate", add_observation(clint=1)),
    ("must be distinct", "query.facts", lies(name="east")),
    ("must be 1 to 99 printed signs", "query.facts", lies(name="west\x1b[2J")),
    ("must be 1 to 99 printed signs", "query.facts", lies(name=" east")),
    ("classes must be the same", "query.facts", lies(classes=["x"])),
    ("samples that it first", "query.facts", lies(samples=31)),
    ("samples that it first", "query.describe", lies(sizes=[20, 5, 6])),
    ("have classes of", "query.describe", lies(classes=[0, 1, 2])),
    ("moments of site", "query.describe", lie_of_moments(0, 1e6)),
    ("moments of site", "query.describe", lie_of_moments(1, 1e300)),
    ("moments of site", "query.describe", lie_of_moments(2, -1.0)),
    (
        "site 'west': site 'east': ",
        "train",
        lies(error="UsageError", text="site 'east': a\x1b"),
    ),
    ("must be that of", "train", lies(stage=["train", 1, "train"])),
    ("must be that of", "train", lies(stage=["score", 0])),
    ("must be that of", "evaluate", lies(stage=["score", 7])),
    ("received must be at", "evaluate", lies(received=10**12)),
    ("a count of at most", "train", set_work(10**6)),
    ("a count of at most", "train", set_work(1.5)),
    ("work must be what", "train", lambda p: p.head["work"].update({"tune/steps": 1})),
    ("work must be what", "train", lambda p: p.head["work"].update({"train/speed": 1})),
    ("trees and numbers must", "train", add_tree),
    ("trees and numbers must", "train", lambda p: p.head["meta"].update(extra=1)),
    ("meta must be at most", "train", lambda p: p.head["meta"].update(extra=np.nan)),
    ("one that was asked", "train", set_tensor(lambda t: t.double())),
    ("one that was asked", "train", add_head),
    ("scores of personal must", "evaluate", pops("scores", "personal")),
    ("scores of personal", "evaluate", pops("scores", "personal", "validation")),
    ("scores of personal", "evaluate", pops("scores", "personal", "test", "loss")),
    ("must fit", "evaluate", set_score(0.9171)),
    ("must fit", "evaluate", set_score(1.0, "macro_f1")),
    ("must be from", "evaluate", set_score(np.nan)),
    ("must be from", "evaluate", set_score(1e31, "loss")),
    (
        "must be those that were asked",
        "train",
        lies(scores={"local": {"test": {"loss": 0.0}}}),
    ),
    (
        "must be those that were asked",
        "evaluate",
        lambda p: p.head["scores"].update(mine={}),
    ),
]
"""What a site can send that is refused, by words of the message."""


def test_forged_replies_are_refused_by_the_site_s_name(tmp_path):
    grid = LocalGrid(site_files(tmp_path, 'scale = "standard"'))
    sites = Sites(grid, 3)
    sites.connect()
    data = federated(sites.common(0))
    config = fl.RunConfig(**PLAIN, algorithm="fedper", stack="off")
    task = assemble(config, data=data)
    clients = sites.clients(task)

    def described():
        new = Sites(grid, 3)
        new.connect()
        new.common(0)

    algorithm, schedule = task.algorithm(task.plan), Schedule(1, 1.0, 1, 1)
    engine = Engine(algorithm, data, clients.initial, clients, schedule)
    again = {"nodes": sites.nodes, "facts": sites.facts, "samples": sites.samples}
    stages = {
        "query.facts": described,
        "query.describe": lambda: Sites(grid, 3, **again).common(0),
        "query.clipped": lambda: Sites(grid, 3, **again).common(0),
        "train": lambda: engine.exchange(Round(0, "train", (0, 1, 2))),
        "evaluate": engine.evaluate,
    }
    for words, kind, change in FORGED:
        grid.change = forged(kind, change)
        with pytest.raises(UsageError) as caught:
            stages[kind]()
        text = str(caught.value)
        assert words in text, text
        assert "west" in text or "node" in text
        assert text.isprintable()


class Replaying(LocalGrid):
    """A grid that gives each reply again: the same one, in another's name, and under another number."""

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        again = []
        for reply in replies:
            stranger = copy.deepcopy(reply)
            stranger.metadata.__dict__["_src_node_id"] = 9
            unknown = copy.deepcopy(reply)
            unknown.metadata.__dict__["_reply_to_message_id"] = "m-1"
            again += [stranger, reply, reply, unknown]
        return again


@pytest.mark.filterwarnings("ignore:a reply of node:UserWarning")
def test_a_reply_that_comes_again_or_from_another_node_is_left_out(tmp_path):
    files = site_files(tmp_path)
    with pytest.warns(UserWarning, match="a reply of node 9 is left out"):
        over_sites(tmp_path / "run", Replaying(files), rounds=1)
    over_sites(tmp_path / "plain", LocalGrid(files), rounds=1)
    assert_same(tmp_path / "run", tmp_path / "plain")


def test_a_reply_of_an_earlier_round_is_refused(tmp_path):
    """A site, or whoever has its key, sends what it sent before."""
    first = {}

    def old(asked, reply):
        if asked.metadata.message_type == "train" and asked.metadata.dst_node_id == 3:
            content = first.setdefault("content", reply.content)
            return Message(content, reply_to=asked)
        return reply

    with refuses("site 'west': the reply must be that of .'train', 1, 'train'"):
        over_sites(tmp_path / "run", LocalGrid(site_files(tmp_path), old), rounds=2)


def lie_of_update(packet):
    for tensor in packet.trees["model"].values():
        tensor *= 2


def lie_of_place(packet):
    for tensor in packet.trees["model"].values():
        tensor += 1


def test_a_lie_that_is_possible_is_noted_and_can_be_clipped(tmp_path):
    """Rows show the norm, and a diverged run names its site. A far mean is noted."""
    files = site_files(tmp_path, 'scale = "standard"')
    norms = {}
    for clip in (False, True):
        grid = LocalGrid(files, forged("train", lie_of_update))
        out = tmp_path / f"clip{clip}"
        over_sites(out, grid, rounds=1, lr=0.001, clip_updates=clip)
        rows = Run(out).rows()[1]
        recorded = rows[rows["metric"] == "update_norm"].set_index("client")["value"]
        assert recorded["west"] > 100 * recorded["east"]
        shares = rows[rows["metric"] == "weight_share"]["value"]
        assert len(shares) == 3
        assert shares.sum() == pytest.approx(1)
        after = Run(out).checkpoint().server.trees["model"]
        norms[clip] = sum(
            float(tensor.double().square().sum()) for tensor in after.values()
        )
    assert norms[True] < 0.8 * norms[False]
    grid.change = forged("train", lambda packet: set_tensor(lambda t: t + 3e38)(packet))
    with refuses("site 'west'"):
        over_sites(tmp_path / "far", grid, rounds=1)
    grid.change = forged("train", lie_of_place)
    with pytest.raises(DivergedError, match=r"was that of site 'west'\.$"):
        over_sites(tmp_path / "diverged", grid, rounds=3, lr=0.01)
    for row in (1, 2):  # a mean, a spread
        grid.change = forged("query.clipped", lie_of_moments(row, 1e6))
        with pytest.warns(UserWarning, match="'west': the mean of age"):
            over_sites(tmp_path / f"moment{row}", grid, rounds=1)


def reply(meta=1.0, **trees):
    """Return a reply with a model, another tree, and a number."""
    trees = {"model": {"a": torch.ones(2)}, "variates": {"a": torch.ones(2)}} | trees
    return SimpleNamespace(message=base.Message(trees, {"loss": meta}))


OTHER_FORMS = {
    "tensor a of variates": reply(variates={"a": torch.ones(3)}),
    "tensor b of variates": reply(variates={"a": torch.ones(2), "b": torch.ones(1)}),
    "tree more": reply(more={}),
    "meta loss": reply(meta="much"),
}


@pytest.mark.parametrize("place", OTHER_FORMS)
def test_a_reply_of_another_form_is_refused_by_name(place):
    """Of a model each client can be asked for other tensors."""
    honest = {"a": reply(), "b": reply(model={"b": torch.ones(5)})}
    form = checks.check_forms(honest, {})
    assert checks.check_forms({**honest, "c": SimpleNamespace(message=None)}, form) == form  # fmt: skip
    with refuses(f"site 'c': .* as '{place}'"):
        checks.check_forms({**honest, "c": OTHER_FORMS[place]}, {})
    with refuses(f"site 'c': .* as '{place}'"):  # as the last round's
        checks.check_forms({"c": OTHER_FORMS[place], "a": reply()}, form)
    with refuses("must have one form at all sites; got 2 forms at a, c"):
        checks.check_forms({"a": reply(), "c": OTHER_FORMS[place]}, {})


def test_an_update_may_be_a_thousand_times_the_median(monkeypatch):
    monkeypatch.setattr(checks, "_norm", lambda _, norm: norm)
    requests = dict.fromkeys("abc", TrainRequest(0, Round(0, "train", ()), None))
    for largest, fault in ((2000.0, nullcontext()), (2001.0, refuses("'c'.*got 2e"))):
        norms = {"a": 2.0, "b": 2.0, "c": largest}
        with fault:
            checks.check_norms(
                requests, {k: SimpleNamespace(message=v) for k, v in norms.items()}
            )


def test_bad_files_are_one_line(tmp_path):
    (file,) = site_files(tmp_path, wards=("east",))
    text = file.read_text()
    cases = {
        "unknown key 'pth'": text.replace("path", "pth"),
        "name must be given": text.partition("\n")[2],
        "unknown key of how data are read 'scal'": text.replace("scale", "scal"),
        "must be TOML": "name = ",
        "must be a file": text.replace("east.csv", "none.csv"),
        "'diagnosis'": text + 'label_column = "diagnosis"',
        "unknown scale over sites": text.replace("none", "minmax"),
        "unknown class 'ill'": 'classes = ["sick", "well"]\n' + text,
        "vocabulary must be given for texts": 'vocabulary = "words.txt"\n' + text,
        "device must be one that works here": 'device = "meta"\n' + text,
    }
    for words, changed in cases.items():
        file.write_text(changed)
        with pytest.raises(UsageError) as caught:
            over_sites(tmp_path / "run", LocalGrid([file]), sites=1)
        assert words in str(caught.value), str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_numbers_of_a_server_s_file_have_bounds(tmp_path):
    text = 'out = "run"\nsites = 3\n'
    (tmp_path / "server.toml").write_text(text)
    assert read_keys(tmp_path / "server.toml", ServerFile).sites == 3
    for words, line in {
        "sites must be from 1 to 10,000; got 0": "sites = 0",
        "sites must be from 1 to 10,000; got 99": f"sites = {'9' * 18}",
        "min_sites must be from 1 to 3; got 4": f"{text}min_sites = 4",
        "min_sites must be from 1 to 3; got -1": f"{text}min_sites = -1",
        "timeout must be above 0 seconds; got 0": f"{text}timeout = 0",
        "timeout must be above 0 seconds; got nan": f"{text}timeout = nan",
    }.items():
        begun = "" if line.startswith("out") else 'out = "run"\n'
        (tmp_path / "server.toml").write_text(begun + line)
        with refuses(words):
            read_keys(tmp_path / "server.toml", ServerFile)
    for rounds in (0, 10**7):
        file = ServerFile("run", 3, config={"rounds": rounds})
        with refuses("rounds must be from 1 to 1,000,000"):
            federate(None, file)


def test_a_site_that_differs_says_so_and_so_does_the_server(
    tmp_path, monkeypatch, capsys
):
    files = site_files(tmp_path)
    plain = files[2].read_text()
    files[2].write_text(f'classes = ["ill", "well", "dead"]\n{plain}')
    with refuses("^classes must be the same .* at west"):
        over_sites(tmp_path / "run", LocalGrid(files))
    files[2].write_text(plain)
    monkeypatch.setattr(clients, "fl_core", SimpleNamespace(__version__="0.1"))
    with refuses(r"the server.s version, 0\.1"):
        over_sites(tmp_path / "run", LocalGrid(files))
    lines = capsys.readouterr().out.splitlines()
    assert [line[:27] for line in lines] == ["fedlayers: fedlayers must b"] * 3
    assert not (tmp_path / "run").exists()


ORPHAN = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from fedlayers.flower.site import States
from fl_core.algorithms.base import State
folder = Path(sys.argv[1])
states = States(folder, "0" * 64)
states.begin({}, {})
while not (folder / "killed").exists():
    time.sleep(0.05)
try:
    states.save("000001-train", State({}), "")
except Exception as error:
    (folder / "error").write_text(str(error))
(folder / "ended").touch()
"""
"""What a supernode's process does: it begins a run, and saves when the supernode is dead."""


def test_a_child_of_a_killed_supernode_writes_nothing(tmp_path):
    (tmp_path / "child.py").write_text(ORPHAN)
    child = f"{sys.executable} {tmp_path}/child.py {tmp_path}; true"
    supernode = subprocess.Popen(
        ["sh", "-c", f"sh -c '{child}'; true"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    job = tmp_path / ("0" * 64) / "job"
    wait_for(job)
    supernode.kill()
    supernode.wait()
    (tmp_path / "killed").touch()
    wait_for(tmp_path / "ended")
    assert (tmp_path / "error").read_text().startswith("the supernode has ended")
    assert {entry.name for entry in job.parent.iterdir()} == {"job", "lock"}


def wait_for(path):
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_names_from_a_server_lead_nowhere_else(tmp_path):
    with refuses("run must be a digest"):
        States(tmp_path, "../elsewhere")
    states = States(tmp_path, "0" * 64)
    states.begin({"run": "0" * 64}, {})
    with refuses("without empty parts", CorruptError):
        states.save("../000001-train", State({}), "")
    with refuses("000009-train is missing", CorruptError):
        states.load("000009-train")
