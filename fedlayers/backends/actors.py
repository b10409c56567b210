"""Clients of one run on the nodes of a Ray cluster, for models so large that a round needs several machines."""

from __future__ import annotations

import pickle
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fedlayers.backends.cluster import connect, reachable
from fedlayers.backends.local import RAY, check_backend
from fl_core import __version__
from fl_core.algorithms.base import Algorithm
from fl_core.clients import ClientReply, ClientRequest, ClientRunner, MakesExecutor
from fl_core.errors import RunError, UsageError, WorkerError, warn
from fl_core.workers import answer_of, in_order


class Actors:
    """A pool of actors on a Ray cluster. Each trains clients.

    There is one actor per free CPU, or per free GPU for a run on GPUs, and at most one per client. Each receives the
    model and all clients' data once, then a client's message and state with each request. Results have the same bits as
    in one process. If a node is lost, its client is trained by another actor.

    Args:
        client_runner: the runner that each actor copies.
        address: the cluster, HOST:PORT; empty for this machine's.

    Raises:
        UsageError: Ray is not installed, no cluster answers, or a node has another version of this package.
        RunError: an actor cannot start, since its node lacks something. WorkerError: all actors are lost.
    """

    def __init__(self, client_runner: ClientRunner, address: str = "") -> None:
        self._ray, self._ours = connect(address)
        try:
            gpu = client_runner.workspace.device.type != "cpu"
            free = self._ray.available_resources().get("GPU" if gpu else "CPU", 0)
            count = max(1, min(int(free), len(client_runner.data.clients)))
            kind = self._ray.remote(num_cpus=1, num_gpus=int(gpu), max_restarts=0)(
                _Actor
            )
            packed = self._ray.put(pickle.dumps(client_runner.made_of()))
            self._actors = [kind.remote(packed) for _ in range(count)]
            self._names = dict(zip(self._actors, self._hello(), strict=True))
        except BaseException:
            self.close()
            raise

    def _hello(self) -> list[str]:
        try:
            said = self._ray.get([actor.hello.remote() for actor in self._actors])
        except (
            self._ray.exceptions.RayActorError
        ) as error:  # such as a node that lacks the model's code
            words = next(iter(str(error).strip().splitlines()[-1:]), "it ended")
            raise RunError(
                f"An actor could not start: {words}. Each node needs what this machine has."
            ) from error
        names = []
        for name, version in said:
            if version != __version__:
                raise UsageError(
                    f"fedlayers on node {name} must be {__version__}, as here; got {version}. Install it there."
                )
            names.append(f"node {name}")
        return names

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm in every actor. Each actor works through its queue in order."""
        packed = self._ray.put(pickle.dumps(algorithm))
        for actor in self._actors:
            actor.use.remote(packed)

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield replies in the order of the requests. A free actor takes the next request."""
        errors = self._ray.exceptions
        lost = (
            errors.RayActorError,
            errors.ObjectLostError,
        )  # the second: its node has ended, and the reply with it

        def begin(actor: Any, request: ClientRequest) -> Any:
            return actor.run.remote(pickle.dumps(request))

        def answer(actor: Any, reference: Any) -> Any:
            try:
                return pickle.loads(self._ray.get(reference))
            except lost:
                self._lost(actor)
                return None

        yield from in_order(
            requests,
            deque(self._actors),
            {},
            begin,
            lambda some: self._ray.wait(some)[0],
            answer,
        )

    def _lost(self, actor: Any) -> None:
        self._actors.remove(actor)
        if not self._actors:
            raise WorkerError(
                f"{self._names[actor]} is lost, the last one that trained clients. Start the command again."
            )
        warn(f"{self._names[actor]} is lost: its client is trained elsewhere")

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        for actor in getattr(self, "_actors", ()):
            self._ray.kill(actor)
        if self._ours:
            self._ray.shutdown()


class _Actor:
    """A worker on a node that trains one client at a time, in one thread."""

    def __init__(self, packed: bytes) -> None:
        torch.set_num_threads(1)
        self._client_runner = ClientRunner(**pickle.loads(packed))

    def hello(self) -> tuple[str, str]:
        """Return the node's name and its version of this package."""
        return socket.gethostname(), __version__

    def use(self, packed: bytes) -> None:
        """Load an algorithm."""
        self._client_runner.use(pickle.loads(packed))

    def run(self, packed: bytes) -> bytes:
        """Run a request and return its packed answer."""
        return pickle.dumps(answer_of(self._client_runner, pickle.loads(packed)))


def clients_on(place: str, *, stacked: bool, workers: int = 0) -> MakesExecutor:
    """Return a maker of the executor that trains one run's clients.

    Args:
        place: ``ray`` or ``ray:HOST:PORT``.
        stacked: whether the clients are trained together in one process.
        workers: the number of processes that the configuration asks for.

    Raises:
        UsageError: an unknown name, a name together with workers or a stack, Ray is missing, or no cluster answers.
    """
    check_backend(place)
    kind, _, address = place.partition(":")
    if kind != RAY:
        raise UsageError(
            f"{place!r} is for many runs. Train the clients of one by --workers N, or --backend {RAY}."
        )
    if workers > 1 or stacked:
        words = (
            "clients that are trained together (--stack on)"
            if stacked
            else f"--workers {workers}"
        )
        raise UsageError(
            f"--backend {place} trains clients one by one on a cluster. Leave {words} out."
        )
    reachable(address)
    return lambda client_runner: Actors(client_runner, address)
