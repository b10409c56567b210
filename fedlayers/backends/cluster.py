"""Whole runs on the nodes of a Ray cluster. Only this module imports Ray.

The nodes need no common file system. A run sends its files back after every checkpoint. If its node is lost, it resumes
from there on another. Data are loaded by name on each node.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fedlayers.backends.local import (
    Answer,
    Event,
    FileBatch,
    Sent,
    WorkerPool,
    answer_job,
)
from fl_core import __version__
from fl_core.errors import RunError, UsageError, needs_package

if TYPE_CHECKING:
    from fedlayers.studies.jobs import TrainingJob as Job

PERIOD = 1.0
"""Seconds between checks for new files and events."""
REACHED = 10.0
"""Seconds to wait for an answer from the cluster's address."""
STARTS = 3
"""How often a cluster of this machine is started. On a busy machine its parts may be late."""
AHEAD = 4
"""Number of file batches that a node may have ready."""


class Hello(tuple[str, str, str]):
    """A node's first message: its name, its id in the cluster, and its version of this package."""


class Cluster(WorkerPool[int]):
    """A pool of jobs on a Ray cluster: at an address, of this machine, or started here.

    Raises:
        UsageError: Ray is not installed, or no cluster answers.
    """

    def __init__(self, address: str = "") -> None:
        self._ray, self._ours = connect(address)
        self.side_by_side = self._cpus()
        self._begun = 0
        self._items: dict[int, Any] = {}  # the results of a job, by its handle
        self._held: dict[int, ExitStack] = {}
        self._nodes: dict[int, Hello] = {}

    def _cpus(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 0)))

    def has_room(self, running: int) -> bool:
        self.side_by_side = self._cpus()
        return (
            running < self.side_by_side + 1
        )  # one that waits for the next node that is free

    def begin(self, work: Job) -> int:
        sent: dict[str, str] = {}
        with ExitStack() as held:
            held.enter_context(work.held())
            parcels = list(work.outgoing(sent))
            task = self._ray.remote(num_cpus=1, num_gpus=work.gpus, max_retries=0)(
                _on_node
            )
            self._begun += 1
            self._items[self._begun] = task.options(
                _generator_backpressure_num_objects=AHEAD
            ).remote(work.sent_to(None), parcels, sent)
            self._held[self._begun] = held.pop_all()
        return self._begun

    def events(self, running: dict[int, Job]) -> Sequence[Event]:
        items = [self._items[handle] for handle in running]
        ready, _ = self._ray.wait(
            items, num_returns=1, timeout=PERIOD, fetch_local=False
        )
        first = [
            handle
            for handle in running
            if any(self._items[handle] is each for each in ready)
        ]
        return [event for handle in first for event in self._next(handle)]

    def _next(self, handle: int) -> Iterator[Event]:
        errors = self._ray.exceptions
        try:
            item = self._ray.get(next(self._items[handle]))
        except errors.RayTaskError as error:  # it could not start on that node
            cause = f"{type(error.cause).__name__}: {_first(error.cause)}"
            words = f"{self._name(handle)} cannot train: {cause}; each node needs fedlayers {__version__}"
            yield Event(handle, Answer(None, RunError(words), []))
        except (errors.RayError, StopIteration):
            yield Event(handle, lost=self._name(handle))
        else:
            if isinstance(item, Hello):
                self._nodes[handle] = item
                if item[2] != __version__:
                    words = f"node {item[0]} has fedlayers {item[2]}, this machine {__version__}"
                    yield Event(handle, Answer(None, UsageError(words), []))
            elif isinstance(item, Answer):
                yield Event(handle, item)
            else:
                yield Event(handle, parcel=item)

    def _name(self, handle: int) -> str:
        return f"node {self._nodes[handle][0]}" if handle in self._nodes else "a node"

    def words(self, running: dict[int, Job]) -> str:
        nodes = [self._nodes[handle][1] for handle in running if handle in self._nodes]
        return f"{len(nodes)} running on {len(set(nodes))} of {sum(node['Alive'] for node in self._ray.nodes())} nodes"

    def end(self, handle: int) -> None:
        self._ray.cancel(self._items.pop(handle), force=True)
        self._held.pop(handle).close()
        self._nodes.pop(handle, None)

    def stop(self, running: dict[int, Job]) -> None:
        for handle in running:
            self.end(handle)

    def close(self) -> None:
        if self._ours:
            self._ray.shutdown()


def _on_node(
    work: Job, parcels: list[FileBatch], sent: Sent
) -> Iterator[Hello | FileBatch | Answer]:
    """Run a job in a temporary folder of this node. Yield its files while it runs, then its answer."""
    import ray

    yield Hello(
        (socket.gethostname(), ray.get_runtime_context().get_node_id(), __version__)
    )
    with TemporaryDirectory(prefix="fedlayers-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / work.path.name
        path.mkdir()
        mine = work.sent_to(path)
        for parcel in parcels:
            mine.accept(parcel)
        found: list[Answer] = []
        trains = threading.Thread(
            target=lambda: found.append(answer_job(mine)), daemon=True
        )
        trains.start()
        while trains.is_alive():
            trains.join(PERIOD)
            yield from mine.incoming(sent, over=False)
        yield from mine.incoming(sent, over=True)
    yield found[0]


def connect(address: str) -> tuple[Any, bool]:
    """Connect to a cluster. Return Ray's module, and whether this call connected it and must end it.

    Raises:
        UsageError: Ray is not installed, or no cluster answers.
    """
    ray = reachable(address)
    ours = not ray.is_initialized()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    for left in reversed(range(1 if address else STARTS) if ours else ()):
        try:
            ray.init(address=address or None, include_dashboard=False, **quiet)
            break
        except Exception as error:  # another version of Ray or Python, or a late part: Ray has no kind of its own
            ray.shutdown()
            if not left:
                where = address or "this machine"
                way = "Try again when the machine is less busy, or check its versions."
                raise UsageError(
                    f"a Ray cluster must be ready at {where}; got: {_first(error).rstrip('.')}. {way}"
                ) from error
    return ray, ours


def reachable(address: str) -> Any:
    """Return Ray's module after a check that the address, if any, answers.

    Raises:
        UsageError: Ray is not installed, or the address does not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # no notice on tasks without GPUs
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise needs_package("ray", "use the backend ray", "ray") from error
    if address:  # Ray itself would try for much longer
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection(
                (host.strip("[]"), int(port)), timeout=REACHED
            ).close()
        except (OSError, OverflowError) as error:
            words = f"a Ray cluster must answer at {address}; got {_first(error)}. Check the address."
            raise UsageError(words) from error
    return ray


def _first(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
