"""Whole runs, and the clients of one run, on the nodes of a Ray cluster. Only this module imports Ray.

The nodes need no common file system. A run sends its files back after every checkpoint. If its node is lost, it resumes
from there on another. Data are loaded by name on each node. Clients of one run are for models so large that a round
needs several machines.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedlayers.backends.local import (
    RAY,
    Answer,
    Event,
    FileBatch,
    Job,
    Sent,
    WorkerPool,
    answer_job,
    changed_files,
    check_backend,
    write_files,
)
from fl_core import __version__
from fl_core.algorithms.base import Algorithm
from fl_core.config import ExecutionConfig
from fl_core.errors import RunError, UsageError, WorkerError, needs_package, warn
from fl_core.rounds.clients import (
    ClientReply,
    ClientRequest,
    ClientRunner,
    MakesExecutor,
)
from fl_core.rounds.workers import answer_of, in_order
from fl_core.storage import Folder

PERIOD = 1.0
"""Seconds between checks for new files and events."""
REACHED = 10.0
"""Seconds to wait for an answer from the cluster's address."""
STARTS = 3
"""How often a start of a cluster on this machine is tried.

On a busy machine its parts may be late."""
AHEAD = 4
"""Number of file batches that a node may have ready."""


class Hello(tuple[str, str, str]):
    """A node's first message: its name, its id in the cluster, and its version of this package."""


@dataclass(eq=False)
class Sending:
    """A job on a node.

    Attributes:
        items: the job's messages, in order.
        held: the lock on the run directory of this machine.
        name: the node's name in messages.
        node: the node's id in the cluster, known after its first message.
    """

    items: Any
    held: ExitStack
    name: str = "a node"
    node: str = ""


class Cluster(WorkerPool[Sending]):
    """A pool of jobs on a Ray cluster: a remote one, this machine's, or one that is started here.

    Args:
        address: the cluster, HOST:PORT; empty for this machine's, or else a new one.

    Raises:
        UsageError: Ray is not installed, or no cluster answers.
    """

    def __init__(self, address: str = "") -> None:
        self._ray, self._ours = connect(address)
        self.has_room(0)

    def has_room(self, running: int) -> bool:
        cpus = self._ray.cluster_resources().get("CPU", 0)
        self.side_by_side = max(1, int(cpus))
        return running <= self.side_by_side  # one waits for the next node that is free

    def begin(self, work: Job) -> Sending:
        sent_files: dict[str, str] = {}
        with ExitStack() as stack:
            work.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(Folder(work.path).locked())  # keeps other writers out
            parcels = list(changed_files(work.path, sent_files, over=True))
            task = self._ray.remote(
                num_cpus=1,
                num_gpus=work.gpus,
                max_retries=0,
                _generator_backpressure_num_objects=AHEAD,
            )(_on_node)
            items = task.remote(work.sent_to(None), parcels, sent_files)
            return Sending(items, stack.pop_all())

    def events(self, running: dict[Sending, Job]) -> Sequence[Event]:
        items = [handle.items for handle in running]
        ready, _ = self._ray.wait(
            items, num_returns=1, timeout=PERIOD, fetch_local=False
        )
        for handle in running:
            if handle.items in ready:
                return list(self._next(handle))
        return []

    def _next(self, handle: Sending) -> Iterator[Event]:
        errors = self._ray.exceptions
        try:
            item = self._ray.get(next(handle.items))
        except errors.RayTaskError as error:  # it could not start on that node
            cause_type = type(error.cause).__name__
            cause_line = _first(error.cause)
            cause = f"{cause_type}: {cause_line}"
            words = f"{handle.name} cannot train: {cause}; each node needs fedlayers {__version__}"
            yield Event(handle, Answer(None, RunError(words), []))
        except (errors.RayError, StopIteration):
            yield Event(handle, lost=handle.name)
        else:
            if isinstance(item, Hello):
                handle.name, handle.node = f"node {item[0]}", item[1]
                if item[2] != __version__:
                    yield Event(handle, Answer(None, _other_version(*item[::2]), []))
            elif isinstance(item, Answer):
                yield Event(handle, item)
            else:
                yield Event(handle, parcel=item)

    def words(self, running: dict[Sending, Job]) -> str:
        nodes = [handle.node for handle in running if handle.node]
        alive = sum(node["Alive"] for node in self._ray.nodes())
        n_nodes = len(set(nodes))
        return f"{len(nodes)} running on {n_nodes} of {alive} nodes"

    def end(self, handle: Sending) -> None:
        self._ray.cancel(handle.items, force=True)
        handle.held.close()

    def stop(self, running: dict[Sending, Job]) -> None:
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
        local_job = work.sent_to(path)
        for parcel in parcels:
            write_files(path, parcel)
        answers: list[Answer] = []
        training_thread = threading.Thread(
            target=lambda: answers.append(answer_job(local_job)), daemon=True
        )
        training_thread.start()
        while training_thread.is_alive():
            training_thread.join(PERIOD)
            yield from changed_files(path, sent, over=False)
        yield from changed_files(path, sent, over=True)
    yield answers[0]


def connect(address: str) -> tuple[Any, bool]:
    """Connect to a cluster. Return Ray's module, and whether this call connected it and must end it.

    Ray is left as it is if this process is connected already, whatever the address.

    Args:
        address: the cluster, HOST:PORT; empty for this machine's, or else a new one.

    Raises:
        UsageError: Ray is not installed, or no cluster answers.
    """
    ray = reachable(address)
    is_connected_here = not ray.is_initialized()
    ray_options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    tries = 0
    if is_connected_here:
        tries = STARTS
        if address:
            tries = 1
    for tries_left in reversed(range(tries)):
        try:
            ray.init(address=address or None, include_dashboard=False, **ray_options)
            break
        except Exception as error:  # another version of Ray or Python, or a late part: Ray has no kind of its own
            ray.shutdown()
            if not tries_left:
                place = address or "this machine"
                advice = (
                    "Try again when the machine is less busy, or check its versions."
                )
                reason = _first(error).rstrip(".")
                raise UsageError(
                    f"a Ray cluster must be ready at {place}; got: {reason}. {advice}"
                ) from error
    return ray, is_connected_here


def reachable(address: str) -> Any:
    """Return Ray's module after a check that a cluster answers at the address.

    Args:
        address: the cluster, HOST:PORT; empty for no check.

    Raises:
        UsageError: Ray is not installed, or the address does not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    # no notice on tasks without GPUs
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
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
            first_line = _first(error)
            words = f"a Ray cluster must answer at {address}; got {first_line}. Check the address."
            raise UsageError(words) from error
    return ray


def _other_version(node: str, version: str) -> UsageError:
    return UsageError(
        f"fedlayers on node {node} must be {__version__}, as here; got {version}. Install it there."
    )


def _first(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# --- clients of one run ----------------------------------------------------------------------------------------


class Actors:
    """A pool of actors on a Ray cluster. Each trains clients.

    There is one actor per free CPU, or per free GPU for a run on GPUs, at most one per
    client, and at least one. Each receives the model once. Each request brings a
    client's message, state and samples. Results have the same bits as in one process.
    This process puts each client's samples into Ray's store as one object, which nodes
    copy. If a node is lost, its clients are trained by other actors, from copies of
    these objects.

    Args:
        client_runner: the runner that each actor copies.
        address: the cluster, HOST:PORT; empty for this machine's, or else a new one.

    Raises:
        UsageError: Ray is not installed, no cluster answers, or a node has another version of this package.
        RunError: an actor cannot start, since its node lacks something.
        WorkerError: all actors are lost.
    """

    def __init__(self, client_runner: ClientRunner, address: str = "") -> None:
        self._ray, self._ours = connect(address)
        try:
            data = client_runner.data
            gpu = client_runner.workspace.device.type != "cpu"
            n_free = self._ray.available_resources().get("GPU" if gpu else "CPU", 0)
            count = max(1, min(int(n_free), len(data.clients)))
            actor_class = self._ray.remote(
                num_cpus=1, num_gpus=int(gpu), max_restarts=0
            )(_Actor)
            self._samples = [self._put(client) for client in data.clients]
            runner_copy = copy(client_runner)
            runner_copy.data = data.without_samples()
            packed_runner = self._put(runner_copy)
            self._actors = [actor_class.remote(packed_runner) for _ in range(count)]
            self._names = dict(zip(self._actors, self._hello(), strict=True))
        except BaseException:
            self.close()
            raise

    def _put(self, part: object) -> Any:
        return self._ray.put(pickle.dumps(part))

    def _hello(self) -> list[str]:
        try:
            versions = self._ray.get([actor.hello.remote() for actor in self._actors])
        except (
            self._ray.exceptions.RayActorError
        ) as error:  # such as a node that lacks the model's code
            words = next(iter(str(error).strip().splitlines()[-1:]), "it ended")
            raise RunError(
                f"An actor could not start: {words}. Each node needs what this machine has."
            ) from error
        for name, version in versions:
            if version != __version__:
                raise _other_version(name, version)
        return [f"node {name}" for name, _ in versions]

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm in every actor. Each actor works through its queue in order."""
        packed = self._put(algorithm)
        for actor in self._actors:
            actor.use.remote(packed)

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield replies in the order of the requests.

        A free actor takes the next request. A warning says if an actor is lost. Another
        one then takes its request.

        Raises:
            WorkerError: the last actor is lost. An error in a request is raised in the
                place of its reply.
        """
        errors = self._ray.exceptions

        def begin(actor: Any, request: ClientRequest) -> Any:
            return actor.run.remote(
                pickle.dumps(request), self._samples[request.client]
            )

        def answer(actor: object, reference: object) -> Any:
            try:
                return pickle.loads(self._ray.get(reference))
            except (
                errors.RayActorError,
                errors.ObjectLostError,
            ):  # or its reply is lost
                self._actors.remove(actor)
                if not self._actors:
                    raise WorkerError(
                        f"{self._names[actor]} is lost, the last one that trained clients. Start the command again."
                    ) from None
                warn(f"{self._names[actor]} is lost: its client is trained elsewhere")
                return None

        yield from in_order(
            requests,
            deque(self._actors),
            {},
            begin,
            lambda some: self._ray.wait(some)[0],
            answer,
        )

    def close(self) -> None:
        """End the actors, and the connection to the cluster if this object made it.

        A cluster that was started here ends with the connection.
        """
        for actor in getattr(self, "_actors", ()):
            self._ray.kill(actor)
        if self._ours:
            self._ray.shutdown()


class _Actor:
    """A worker on a node that trains one client at a time, in one thread."""

    def __init__(self, packed: bytes) -> None:
        torch.set_num_threads(1)
        self._client_runner = pickle.loads(packed)
        self._data = self._client_runner.data

    def hello(self) -> tuple[str, str]:
        """Return the node's name and its version of this package."""
        return socket.gethostname(), __version__

    def use(self, packed: bytes) -> None:
        """Load a packed algorithm for the requests that follow."""
        self._client_runner.use(pickle.loads(packed))

    def run(self, packed: bytes, samples: bytes) -> bytes:
        """Run a packed request on its client's packed samples, and return the answer.

        The answer is packed, and has the form of
        :func:`fl_core.rounds.workers.answer_of`.
        """
        request, clients = pickle.loads(packed), [*self._data.clients]
        clients[request.client] = pickle.loads(samples)
        self._client_runner.data = replace(self._data, clients=tuple(clients))
        return pickle.dumps(answer_of(self._client_runner, request))


def clients_on(place: str, execution: ExecutionConfig) -> MakesExecutor:
    """Return a function that makes the executor of one run's clients.

    Args:
        place: ``ray`` or ``ray:HOST:PORT``.
        execution: the run's execution settings, with at most one worker, and ``stack``
            not on.

    Raises:
        UsageError: the name is unknown or is ``local:N``, several workers or a stack
            are set, Ray is missing, or no cluster answers.
    """
    check_backend(place)
    kind, _, address = place.partition(":")
    if kind != RAY:
        raise UsageError(
            f"{place!r} is for many runs. Train the clients of one with workers=N, or backend={RAY!r}."
        )
    stacked = execution.stack == "on"
    if execution.workers > 1 or stacked:
        key = "workers"
        if stacked:
            key = "stack"
        raise UsageError(
            f"backend {place!r} trains clients one by one on a cluster. Leave {key} out."
        )
    reachable(address)
    return lambda client_runner: Actors(client_runner, address)
