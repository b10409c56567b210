"""The sites of a federation as a backend: whole runs, one after another, over the same sites."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from fedlayers.backends.base import InProcessBackend, Job
from fedlayers.remote import federation, packet_forms
from fedlayers.remote.codec import Packet, PacketError, fields
from fedlayers.remote.link import SiteLink
from fedlayers.remote.rpc import RpcClient, TimeoutPolicy
from fl_core.algorithms.base import Round
from fl_core.config import RunConfig
from fl_core.data import FederatedData
from fl_core.plan import LayerPlan
from fl_core.restore import named_files
from fl_core.task import Task

if TYPE_CHECKING:
    from fedlayers.studies.training_job import TrainingJob


class Federations(InProcessBackend):
    """A backend whose clients are the sites of a link. Run directories are on this machine.

    Args:
        timeouts: how long to wait for sites in each exchange; by default for ever.
    """

    def __init__(self, link: SiteLink, timeouts: TimeoutPolicy | None = None) -> None:
        self.link, self.timeouts = link, timeouts
        self._line = RpcClient(link, timeouts)

    @cached_property
    def facts(self) -> list[dict[str, Any]]:
        """The sites' first descriptions of themselves. They must not change later.

        Raises:
            UsageError, RefusedError: see :func:`fedlayers.remote.federation.request_site_facts`.
        """
        return federation.request_site_facts(self._line)

    def task(self, config: RunConfig, *, plan: LayerPlan | None = None, loaded: FederatedData | None = None) -> Task:
        """Return the task of a run over these sites, as the server knows it.

        Args:
            loaded: the data of another task over these sites, to use again.

        Raises:
            UsageError: see :func:`fedlayers.remote.federation.task_of`.
        """
        return federation.task_of(config, loaded or federation.data_of(self.facts, config.dataset), plan)

    def guesses(self, tasks: Sequence[Task]) -> dict[str, float]:
        """Ask the sites to allow the runs of one seed before the first starts. Return the accuracy of guessing.

        Returns:
            As :func:`~.above_chance.guessing_accuracy`, from the number of classes in each site's validation
            samples.

        Raises:
            RefusedError: a site does not allow an algorithm, or never sends a layer that a run shares.
            PacketError: a site's number of classes is impossible.
        """
        seed, classes = tasks[0].config.seed, len(tasks[0].data.classes)
        packets = {}
        for number, name in enumerate(self._line.names):
            head = {"kind": "race", "number": number, "seed": seed, "arms": [_arm(task, number) for task in tasks]}
            packets[name] = Packet(head)
        counts = {}
        for site, packet in self._line.ask(packets, federation.HELLO_BYTES):
            counts[site] = fields(federation.require_answer(site, packet).head, packet_forms.COUNTED)["classes"]
            if not bool(classes) <= counts[site] <= classes:
                raise PacketError(f"site {site!r} has validation samples of {counts[site]} of {classes} classes")
        return {name: 1 / counts[name] for name in self._line.names if counts[name] > 1}

    def carry_out(self, work: Job) -> None:
        """Start or resume a run over the sites. A complete run is left as it is."""
        run = cast("TrainingJob", work)
        options: dict[str, Any] = {"timeouts": self.timeouts, "progress": False, "until": run.until}
        if run.instruments is not None:
            options["instruments"] = run.instruments
        with warnings.catch_warnings(action="ignore") if run.quiet else nullcontext():
            if not run.begun:
                options |= {"plan": run.plan, "command": run.command, "known": self.facts}
                federation.federate(run.config, self.link, run.path, **options)
            elif not run.finished:
                own = named_files(run.config)
                federation.resume(run.path, self.link, allow_code=own["allow_code"], init=own["init"], **options)


def _arm(task: Task, client: int) -> Mapping[str, Any]:
    """Return the algorithm and the layers that a site must allow, because it sends them in the first round."""
    algorithm = task.algorithm(task.plan)
    sent = set(algorithm.uploaded(Round(0), client))
    layers = [layer.name for layer in task.layers if sent & set(layer.tensors)]
    return {"algorithm": algorithm.name, "options": dict(algorithm.options), "layers": layers}
