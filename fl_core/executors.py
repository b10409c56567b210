"""Where clients train: in this process, or in worker processes. The results are the same bits."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch
from safetensors.torch import load, save

from fl_core.algorithms.base import Algorithm, Message, State
from fl_core.data import ClientData, FederatedData, Split
from fl_core.errors import RunError
from fl_core.site import Job, Result, Site
from fl_core.tree import Tree


class Executor(Protocol):
    """Runs jobs and gives their results in the jobs' order."""

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm; jobs that follow use it. Call again when its plan has changed."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Results in order; an error in a job is raised where its result would have come."""

    def close(self) -> None:
        """Release processes."""


class Serial:
    """Runs every job in this process."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm."""
        self.site.algorithm = algorithm

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Results in order; what crosses is cloned, as a process border would."""
        for job in jobs:
            result = self.site.run(job)
            result.message = result.message.clone()
            yield result

    def close(self) -> None:
        """Nothing to release."""


class Workers:
    """Persistent worker processes, one thread each. They end with this process, however it ends."""

    def __init__(self, site: Site, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        x, y, lengths = _packed(site.data)
        packed = _Packed(site, x.share_memory_(), y.share_memory_(), lengths)
        self._links: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, packed), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm in every worker."""
        for link in self._links:
            self._send(link, ("use", algorithm))

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Results in the jobs' order; a free worker takes the next job.

        However it ends, also by an error or because the caller wants no more, no worker is left with an answer that
        nobody takes.
        """
        busy: dict[Connection, int] = {}
        try:
            yield from self._results(iter(jobs), busy)
        finally:
            for link in busy:
                self._receive(link)

    def _results(self, queue: Iterator[Job], busy: dict[Connection, int]) -> Iterator[Result]:
        idle = deque(self._links)
        done: dict[int, Any] = {}
        sent = given = 0
        exhausted = False
        while True:
            while idle and not exhausted and sent - given < 4 * len(self._links):
                job = next(queue, None)
                if job is None:
                    exhausted = True
                    break
                link = idle.popleft()
                self._send(link, ("run", _flat(job)))
                busy[link] = sent
                sent += 1
            while given in done:
                kind, value = done.pop(given)
                given += 1
                if kind == "error":
                    raise value
                yield _unflat(value)
            if exhausted and not busy:
                return
            for ready in wait(list(busy)) if busy else ():  # nobody is busy when a slow job held the others back
                link = next(link for link in busy if link is ready)
                position = busy.pop(link)
                done[position] = self._receive(link)
                idle.append(link)

    def close(self) -> None:
        """End the workers."""
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()

    def _send(self, link: Connection, message: Any) -> None:
        try:
            link.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died(link) from error

    def _receive(self, link: Connection) -> Any:
        try:
            return link.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._died(link) from error

    def _died(self, link: Connection) -> RunError:
        process = self._processes[self._links.index(link)]
        process.join(timeout=5)
        killed = process.exitcode is not None and process.exitcode < 0
        hint = (
            "if memory ran out, use fewer workers"
            if killed
            else (
                "its own message is above; a model's class must be importable there, so not one defined in a notebook "
                "or inside a function"
            )
        )
        return RunError(f"a worker process ended with exit code {process.exitcode}; {hint}")


def executor(site: Site, workers: int) -> Executor:
    """Serial for 0 or 1 workers."""
    return Serial(site) if workers < 2 else Workers(site, workers)


# --- crossing a process border ---------------------------------------------------------------------------------


class _Packed:
    """A site on its way to a worker: two shared tensors hold all clients' data."""

    def __init__(self, site: Site, x: torch.Tensor, y: torch.Tensor, lengths: list[tuple[str, list[int]]]) -> None:
        self.model, self.training, self.criterion = site.workspace.model, site.training, site.criterion
        self.layers, self.makers, self.device = site.layers, site.makers, str(site.workspace.device)
        self.rest = replace(site.data, clients=())
        self.x, self.y, self.lengths = x, y, lengths

    def unpack(self) -> Site:
        clients, at = [], 0
        for name, sizes in self.lengths:
            splits = []
            for size in sizes:
                splits.append(Split(self.x[at : at + size], self.y[at : at + size]))
                at += size
            clients.append(ClientData(name, *splits))
        data = replace(self.rest, clients=tuple(clients))
        model = copy.deepcopy(self.model)  # its tensors arrived in memory that all processes share
        return Site(model, data, self.training, self.criterion, self.layers, self.makers, self.device)


def _packed(data: FederatedData) -> tuple[torch.Tensor, torch.Tensor, list[tuple[str, list[int]]]]:
    splits = [(c.train, c.validation, c.test) for c in data.clients]
    x = torch.cat([split.x for client in splits for split in client])
    y = torch.cat([split.y for client in splits for split in client])
    return x, y, [(c.name, [len(s) for s in parts]) for c, parts in zip(data.clients, splits, strict=True)]


class _Bytes:
    """A tree as bytes: one write to the pipe, and no file descriptor a tensor."""

    def __init__(self, source: Tree) -> None:
        self.data = save({name: tensor.contiguous() for name, tensor in source.items()})

    def tree(self) -> Tree:
        return load(self.data)


def _map_trees(value: Any, change: Any) -> Any:
    """A job or result with every tree in it changed."""
    if isinstance(value, (State, Message)):
        return replace(value, trees={name: change(t) for name, t in value.trees.items()})
    parts = {}
    for name, part in vars(value).items():
        if isinstance(part, (State, Message)):
            parts[name] = _map_trees(part, change)
        elif name == "tree" and part is not None:
            parts[name] = change(part)
    return replace(value, **parts)


def _flat(value: Any) -> Any:
    return _map_trees(value, _Bytes)


def _unflat(value: Any) -> Any:
    return _map_trees(value, lambda packed: packed.tree())


def _serve(link: Connection, packed: _Packed) -> None:
    """A worker's life: answer until the link closes, and never outlive the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers itself
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    torch.set_num_threads(1)
    site = packed.unpack()
    while True:
        try:
            kind, value = link.recv()
        except EOFError:
            return
        if kind == "use":
            site.algorithm = value
            continue
        try:
            answer: tuple[str, Any] = ("ok", _flat(site.run(_unflat(value))))
        except Exception as error:  # carried to the parent, which raises it
            answer = ("error", _portable(error, traceback.format_exc()))
        try:
            link.send(answer)
        except (BrokenPipeError, ConnectionResetError):  # the parent has closed the link
            return


def _portable(error: Exception, where: str) -> Exception:
    """The error itself with its traceback as a note, or its words where it does not survive pickling."""
    note = f"in a worker process:\n{where}"
    error.add_note(note)
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # whatever a class's own pickling raises
        plain = RunError(f"{type(error).__name__}: {error}")
        plain.add_note(note)
        return plain


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
