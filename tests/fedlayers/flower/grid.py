"""A grid of sites in this process, which implements Flower's public interface."""

from __future__ import annotations

import time
from itertools import count

import numpy as np
import pandas as pd
from flwr.app import DEFAULT_TTL, Context, Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid

import fedlayers as fl
from fedlayers.flower import clients
from fedlayers.flower.client_app import app
from fedlayers.flower.server_app import ServerFile, federate
from fl_core.records.store import Run

NUMBERS = count()


def new_message(content, node, kind):
    """Return a message as Flower makes it in a process of its own, with a number."""
    metadata = Metadata(
        run_id=1,
        message_id=f"m{next(NUMBERS)}",
        src_node_id=1,
        dst_node_id=node,
        reply_to_message_id="",
        group_id="",
        created_at=time.time(),
        ttl=DEFAULT_TTL,
        message_type=kind,
    )
    return Message(metadata=metadata, content=content)


clients.FlowerMessage = new_message


class LocalGrid(Grid):
    """A grid whose nodes are site files. Each message is answered when it is pulled.

    Args:
        files: of the sites; of a simulation all the same. change: replaces a reply, or loses it by None.
    """

    def __init__(
        self,
        files,
        change=lambda _, reply: reply,
    ):
        self.files = dict(enumerate(files, 1))
        self.change, self.app, self.simulated = change, app, False
        self.asked: list[str] = []
        self._sent: dict[str, Message] = {}

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **keys):
        raise NotImplementedError

    def send_and_receive(self, *args, **keys):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.files)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            ids.append(message.metadata.message_id)
            self.asked.append(message.metadata.message_type)
            self._sent[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids):
        replies = []
        for name in message_ids:
            message = self._sent.pop(name, None)
            if message is not None:
                reply = self.change(message, self._answer(message))
                replies += [] if reply is None else [reply]
        return replies

    def _answer(self, message):
        file = self.files.get(message.metadata.dst_node_id)
        if file is None:
            return Message(Error(5, "node is gone"), reply_to=message)
        node, run = {"site": str(file)}, {}
        if self.simulated:
            node, run = {"partition-id": message.metadata.dst_node_id - 1}, node
        return self.app(message, Context(1, 1, node, RecordDict(), run))


WARDS = ("east", "north", "west")
PLAIN = {"rounds": 2, "eval_every": 1, "lr": 0.1, "model": "mlp"}


def site_files(folder, columns='scale = "none"', wards=WARDS):
    """Write a table and a site file for each ward, with two numbers and a column of words."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for k, ward in enumerate(wards):
        draw = np.random.default_rng(k)
        x = draw.normal(size=(30 + k, 2)).round(3)
        table = pd.DataFrame(x, columns=["age", "dose"])
        table["kind"] = draw.choice(["a", "b", "c"], len(x))
        table["label"] = np.where(x.sum(1) > 0, "ill", "well")
        table.to_csv(folder / f"{ward}.csv", index=False)
        files.append(folder / f"{ward}.toml")
        files[-1].write_text(
            f'name = "{ward}"\npath = "{ward}.csv"\n[columns]\n{columns}\n'
        )
    return files


def over_sites(out, grid, sites=3, **keys):
    """Federate as a server file says."""
    server_keys = {
        key: keys.pop(key)
        for key in ("timeout", "min_sites", "metrics", "arms", "seeds", "clip_updates")
        if key in keys
    }
    file = ServerFile(str(out), sites, config={**PLAIN, **keys}, **server_keys)
    return federate(grid, file)


def at_home(folder, out, **keys):
    """Run in this process on the same tables, with one client a process."""
    tables = ",".join(str(folder / f"{ward}.csv") for ward in WARDS)
    run_keys = {"stack": "off", "checkpoint_every": 1, "patience": 0, "scale": "none"}
    run_keys["dataset"] = tables
    fl.run(out=out, **{**PLAIN, **run_keys, **keys})


def assert_same(run, other):
    """Assert that two runs have the same rows and the same server, bit for bit."""
    one, two = Run(run), Run(other)
    rows = []
    for stored_run in (one, two):
        frame = stored_run.rows()[1].drop(columns="run")
        only_over_sites = frame["metric"].isin(["update_norm", "weight_share"])
        rows.append(frame[~only_over_sites].reset_index(drop=True))
    pd.testing.assert_frame_equal(*rows, check_exact=True)
    trees = [stored_run.checkpoint().server.trees for stored_run in (one, two)]
    assert trees[0].keys() == trees[1].keys()
    for kind, tensors in trees[0].items():
        assert all(tensors[name].equal(trees[1][kind][name]) for name in tensors)
