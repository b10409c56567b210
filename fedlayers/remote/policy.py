"""A site's policy: the algorithms and the code that it allows, and its limits. All else is refused by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fl_core.algorithms.base import ALGORITHMS, find
from fl_core.algorithms.fedper import PLayerFL
from fl_core.bounds import ABOVE_0, OneOf, check_fields
from fl_core.config import RunConfig
from fl_core.errors import UsageError, check_known, listing
from fl_core.layers import Layer
from fl_core.limits import LimitError, within_memory, within_seconds
from fl_core.models.options import check_stored
from fl_core.registry import is_outside
from fl_core.restore import code_of

if TYPE_CHECKING:
    from fl_core.training.phases import Phase

MEGABYTE = 10**6
PARAMETERS = 30_000_000
"""Numbers of a model at most, by default."""
MEASURING: tuple[str, dict[str, Any], str] = (PLayerFL.name, {}, "stats")
"""The algorithm, its options and the exchange by which clients measure ahead of a run."""


def memory_for(parameters: int) -> int:
    """Return the megabytes that a site needs for a request to train a plain model with N parameters.

    200 MB are for the code, and 48 bytes for each parameter. Training with Adam took at most 30 bytes when it was
    measured. The rest is reserve for the copies of messages. Batches are not counted.

    >>> memory_for(30_000_000)
    1640
    """
    return 200 + math.ceil(12 * 4 * parameters / MEGABYTE)


def check_alone(names: Sequence[str]) -> None:
    """Refuse metrics that compare clients, since they need data of several clients.

    Raises:
        UsageError: names them, and the metrics that are available.
    """
    from diagnostics.metrics.base import METRICS

    pairs = [name for name in names if METRICS[name].pairs]
    if pairs:
        alone = listing((name for name, metric in METRICS.members().items() if not metric.pairs), 40)
        raise UsageError(f"metrics must be of single clients over sites; got {listing(pairs)}. There are: {alone}.")


def check_needs_sum(name: str) -> None:
    """Refuse an algorithm that needs each client's update.

    >>> check_needs_sum("scaffold")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: the algorithm of a secure sum must need the sum of updates only; got 'scaffold', ...

    Raises:
        UsageError: names it, and those that do with the sum.
    """
    if find(name).needs != "sum":
        others = listing(each for each, algorithm in ALGORITHMS.members().items() if algorithm.needs == "sum")
        raise UsageError(
            f"the algorithm of a secure sum must need the sum of updates only; got {name!r}, which needs each update. "
            f"Use one of: {others}."
        )


def check_joined(config: RunConfig, plan: Mapping[str, Any] | None, asked: Mapping[str, Any]) -> None:
    """Refuse work for another algorithm, other options, another plan or more rounds than a run has joined with.

    Only a measurement ahead of a run without a plan differs. It has its own lane and is PLayer-FL's first exchange.

    Args:
        config, plan: of the run. Without a plan the run chooses one after its first measurement.
        asked: the values of a request for work.

    Raises:
        UsageError: names both.
    """
    own, wanted = (find(config.algorithm).name, config.options), (asked["algorithm"], asked["options"])
    exchange = asked.get("round", {}).get("exchange")
    measures = (*wanted, exchange) == MEASURING and plan is None and asked["plan"] is None
    if (wanted != own) if asked["lane"] == "main" else not measures:
        names = [f"{name[:80]!r} with options {str(options)[:200]}" for name, options in (own, wanted)]
        raise UsageError(
            f"the algorithm must be what the run has joined with, {names[0]}; got {names[1]}. Begin another run."
        )
    if plan is not None and asked["plan"] != plan:
        raise UsageError("the plan must be the same as at the start of the run; got another. Begin another run.")
    done = asked["done"] if "done" in asked else asked["round"]["index"] + 1
    if done > config.rounds:
        raise UsageError(
            f"rounds must be at most {config.rounds}, as at the start of the run; got {done}. Begin another run."
        )


Limit = Annotated[int, ABOVE_0]
MEMORY = memory_for(PARAMETERS)


@dataclass(frozen=True)
class Policy:
    """A site's rules. No server can change them.

    >>> Policy(algorithms=("fedper",)).check_algorithm("fedavg")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: the site's policy does not allow the algorithm 'fedavg'. It allows: fedper.
    >>> Policy().check_algorithm("os:system")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: the site's policy does not allow the code 'os:system'. It allows: none.

    Memory is limited on Linux only, and only that of the processor, not of a GPU.

    Attributes:
        algorithms: that it takes part in; None = all of this package.
        code: of the user's own, ``package.module:name``, that may be imported here; also ``KEY=VALUE`` of model options
            other than sizes and rates.
        metrics: that it measures; by default all that compare no clients.
        never_send: layers whose tensors never leave.
        least_samples: minimum number of samples to take part.
        secure_sum: "allow", or "require": updates leave only in a secure sum with those of other sites.
        approve: "always", or "ask": the site's owner allows each run by hand, before anything but the facts leaves.
        splits: maximum number of splits of its data into training, validation and test samples, one per seed.
        parameters, layers: maximum size of a model; layers are modules with tensors of their own.
        memory: maximum megabytes of requests, in addition to the idle site's; by default what plain training of the
            largest model takes that the default of ``parameters`` allows, by :func:`memory_for`.
        disk: maximum megabytes of the files of all runs in the site's folder, before a new run or fine-tuned model.
        epochs: maximum epochs of a client in one exchange, all phases together.
        seconds: maximum time of one request: a client's work in an exchange, a measurement, or building a model.
    """

    algorithms: tuple[str, ...] | None = None
    metrics: tuple[str, ...] | None = None
    code: tuple[str, ...] = ()
    never_send: tuple[str, ...] = ()
    least_samples: int = 0
    secure_sum: Annotated[str, OneOf("value of [policy] secure_sum", ("allow", "require"))] = "allow"
    approve: Annotated[str, OneOf("value of [policy] approve", ("always", "ask"))] = "always"
    splits: Limit = 5
    parameters: Limit = PARAMETERS
    layers: Limit = 1000
    memory: Limit = MEMORY
    disk: Limit = 50_000
    epochs: Limit = 100
    seconds: Annotated[float, ABOVE_0] = 3600.0

    def __post_init__(self) -> None:
        check_fields(self, "policy: ", "Leave it out for the default.")

    @contextmanager
    def enforce_limits(self, idle: int) -> Iterator[None]:
        """Refuse work in the block that takes too much memory or time.

        Args:
            idle: bytes of data of the idle site.

        Raises:
            LimitError: names the limit.
        """
        time = f"{self.seconds:g} seconds ([policy] seconds)"
        with within_seconds(self.seconds, time), self.limit_memory(idle):
            yield

    def limit_memory(self, idle: int) -> AbstractContextManager[None]:
        """Refuse work in the block that takes too much memory. Arguments and errors: see :meth:`enforce_limits`."""
        return within_memory(idle + self.memory * MEGABYTE, f"{self.memory} megabytes ([policy] memory)")

    def check_size(self, parameters: int, layers: int) -> None:
        """Refuse a model that is too large.

        Raises:
            LimitError: names the limit.
        """
        for name, found in (("parameters", parameters), ("layers", layers)):
            most = getattr(self, name)
            if found > most:
                raise LimitError(
                    f"{name} of a model must be at most {most:,} ([policy] {name}); got {found:,} or more. "
                    "Choose a smaller model."
                )

    def check_disk(self, used: int) -> None:
        """Refuse new files where a site has too many bytes on its disk.

        Raises:
            LimitError: gives both sizes.
        """
        if used > self.disk * MEGABYTE:
            raise LimitError(
                f"files of this site must have at most {self.disk:,} megabytes ([policy] disk); got "
                f"{used // MEGABYTE:,}. Its owner can remove the folders of ended runs."
            )

    def check_phases(self, phases: Iterable[Phase]) -> None:
        """Refuse phases of training with too many epochs in total. For errors see :meth:`check_epochs`."""
        self.check_epochs(sum(phase.epochs for phase in phases))

    def check_epochs(self, epochs: int) -> None:
        """Refuse too many epochs in one exchange.

        Raises:
            LimitError: names the limit.
        """
        if epochs > self.epochs:
            raise LimitError(
                f"epochs of one exchange must be at most {self.epochs} ([policy] epochs); got {epochs}. Ask for fewer."
            )

    def check_algorithm(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Refuse an algorithm, or code in its options, before anything of it is imported.

        Raises:
            UsageError: names it, and what is allowed.
        """
        for each in (name, *(value for value in (options or {}).values() if isinstance(value, str))):
            if is_outside(each):
                self._check(each, "code", self.code)
        if self.algorithms is not None:
            self._check(name, "algorithm", self.algorithms)
        elif not is_outside(name):
            check_known("algorithm", name, ALGORITHMS)

    def check_summed(self, name: str, asked: bool) -> None:
        """Refuse a run without a secure sum if this site requires it, or with one if the algorithm does not allow it.

        Args:
            name: of the algorithm. asked: whether the run has a secure sum.

        Raises:
            UsageError: says what is required.
        """
        if asked:
            check_needs_sum(name)
        elif self.secure_sum == "require":
            raise UsageError("updates of this site must be in a secure sum ([policy] secure_sum). Use --secure-sum.")

    def check_metrics(self, names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse metrics that compare clients or are not allowed, before any is imported.

        Raises:
            UsageError: names the first, and what is allowed.
        """
        from diagnostics.metrics.base import METRICS

        for name in (*names, *options):
            if is_outside(name):
                self._check(name, "code", self.code)
            if self.metrics is not None:
                self._check(name, "metric", self.metrics)
            elif not is_outside(name):
                check_known("metric", name, METRICS)
        check_alone(names)

    def check_code(self, config: RunConfig) -> None:
        """Refuse a configuration that names code which is not allowed, or a model option that loads files.

        Raises:
            UsageError: names it.
        """
        for key, name in code_of(config.to_json()).items():
            if key != "dataset":  # only its name is used
                self._check(name, "code", self.code)
        check_stored("the site's policy", str(config.model), config.model_options, self.code)

    def check_sent(self, names: Iterable[str], layers: Sequence[Layer]) -> None:
        """Refuse to send tensors of layers that never leave.

        Raises:
            UsageError: names the first such layer, or one that the model does not have.
        """
        known = {layer.name: layer for layer in layers}
        for name in self.never_send:
            check_known("layer (never_send)", name, known)
        sent = set(names)
        self.check_layers([layer.name for layer in layers if sent & set(layer.tensors)])

    def check_layers(self, names: Collection[str]) -> None:
        """Refuse to send anything of the named layers if they never leave.

        Raises:
            UsageError: names the first such layer.
        """
        for name in self.never_send:
            if name in names:
                raise UsageError(
                    f"layer {name!r} must stay at the site; got a request for it. Use a plan that keeps it local."
                )

    def check_samples(self, count: int) -> None:
        """Refuse to take part with too few samples.

        Raises:
            UsageError: gives their number.
        """
        if count < self.least_samples:
            least = self.least_samples
            raise UsageError(f"samples must be at least {least} ([policy] least_samples); got {count}. Stop this site.")

    def _check(self, name: str, what: str, allowed: tuple[str, ...]) -> None:
        if name not in allowed:
            known = listing(allowed) or "none"
            raise UsageError(f"the site's policy does not allow the {what} {name!r}. It allows: {known}.")
