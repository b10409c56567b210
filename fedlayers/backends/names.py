"""Backends by name: ``local:N`` (processes of this machine), ``ray``, or none (this process)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext

from fedlayers.backends.base import Backend, InProcessBackend
from fedlayers.live import open_live
from fl_core.errors import UsageError

RAY = "ray"


def check_backend(name: str) -> None:
    """Refuse an unknown name of a backend.

    Raises:
        UsageError: lists the names.

    >>> check_backend("local:2"), check_backend("ray"), check_backend("ray:10.0.0.1:6379")
    (None, None, None)
    >>> check_backend("x")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: backend must be local:N, ray or ray:HOST:PORT; got 'x'. Use local:2 for two processes.
    """
    kind, colon, rest = name.partition(":")
    if kind == "local" and re.fullmatch("[1-9][0-9]{0,3}", rest):
        return
    if kind == RAY and (not colon or re.fullmatch(r"[^\s/]+:[0-9]{1,5}", rest)):
        return
    raise UsageError(
        f"backend must be local:N, {RAY} or {RAY}:HOST:PORT; got {name!r}. Use local:2 for two processes."
    )


@contextmanager
def open_backend(
    backend: Backend | str,
    workers: int = 0,
    *,
    progress: bool = True,
    live: bool = False,
) -> Iterator[Backend]:
    """Open a backend by name and close it at the end. An open one stays open. No name means this process.

    Args:
        workers: the configuration's; runs that are trained elsewhere have none.
        progress: show the progress of the runs that are trained there.
        live: draw them in the notebook's cell, again at most once a second.

    Raises:
        UsageError: an unknown name, a package that is not installed, or workers as well.
    """
    found: AbstractContextManager[Backend]
    if isinstance(backend, Backend):
        found = nullcontext(backend)
    elif backend and workers > 1:
        raise UsageError(
            "--backend trains whole runs side by side, each in one process. Leave --workers out."
        )
    else:
        found = closing(_backend(backend))
    with found as place, open_live(live) as place.live:
        place.progress = progress
        yield place


def open_parallel(
    backend: Backend | str, workers: int, **shown: bool
) -> AbstractContextManager[Backend]:
    """Open a backend for runs without workers; without a name, ``workers`` processes train them."""
    return (
        open_backend(f"local:{workers}", **shown)
        if workers > 1 and not backend
        else open_backend(backend, workers, **shown)
    )


def _backend(name: str) -> Backend:
    if not name:
        return InProcessBackend()
    check_backend(name)
    kind, _, rest = name.partition(":")
    if kind == RAY:
        from fedlayers.backends.cluster import Cluster

        return Cluster(rest)
    from fedlayers.backends.local import Local

    return Local(int(rest)) if int(rest) > 1 else InProcessBackend()
