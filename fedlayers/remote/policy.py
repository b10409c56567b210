"""What a site allows: which algorithms, and whose code; everything else is refused by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_core.algorithms.base import ALGORITHMS, find
from fl_core.algorithms.fedper import PLayerFL
from fl_core.config import RunConfig
from fl_core.errors import UsageError, check_known, listing
from fl_core.layers import Layer
from fl_core.limits import LimitError, within_memory, within_seconds
from fl_core.models.options import check_stored
from fl_core.registry import is_outside
from fl_core.restore import code_of

if TYPE_CHECKING:
    from fl_core.training.local import Phase

MEGABYTE = 10**6
MEASURING: tuple[str, dict[str, Any], str] = (PLayerFL.name, {}, "stats")
"""The algorithm, its options and the exchange by which clients measure ahead of a run."""


def check_alone(names: Sequence[str]) -> None:
    """Refuse metrics that compare clients, for which one would have to have what only the other has.

    Raises:
        UsageError: names them, and what there is.
    """
    from fedlayers.diagnostics.metrics.base import METRICS

    pairs = [name for name in names if METRICS[name].pairs]
    if pairs:
        alone = listing((name for name, metric in METRICS.members().items() if not metric.pairs), 40)
        raise UsageError(
            f"{listing(pairs)} compares clients, which sites that share numbers alone cannot; there are: {alone}"
        )


def check_joined(config: RunConfig, asked: Mapping[str, Any]) -> None:
    """Refuse work for another algorithm or other options than a run has joined with.

    Only a measurement ahead of the run differs. It has its own lane and is PLayer-FL's first exchange.

    Args:
        config: of the run. asked: the values of a request for work.

    Raises:
        UsageError: names both.
    """
    own, wanted = (find(config.algorithm).name, config.options), (asked["algorithm"], asked["options"])
    exchange = asked.get("round", {}).get("exchange")
    if wanted != own and (asked["lane"] == "main" or (*wanted, exchange) != MEASURING):
        names = [f"{name[:80]!r} with options {str(options)[:200]}" for name, options in (own, wanted)]
        raise UsageError(f"the algorithm must be what the run has joined with, {names[0]}; got {names[1]}")


@dataclass(frozen=True)
class Policy:
    """A site's rules, which no server can change.

    >>> Policy(algorithms=("fedper",)).check_algorithm("fedavg")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: the site's policy does not allow the algorithm 'fedavg'; it allows: fedper
    >>> Policy().check_algorithm("os:system")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: the site's policy does not allow the code 'os:system'; it allows: none

    Memory is limited on Linux only, and of the processor only, not of a GPU.

    Attributes:
        algorithms: that it takes part in; None = all that the package has.
        code: of the user's own, ``package.module:name``, that may be imported here; and ``KEY=VALUE`` of model options
            other than sizes and rates.
        metrics: that it measures, if it does not measure all that compare no clients.
        never_send: layers of which no tensor leaves.
        least_samples: with fewer than these it takes part in nothing.
        splits: of its data into training, validation and test samples that it answers for, one for each seed.
        parameters, layers: of a model at most; layers are modules with tensors of their own.
        memory: megabytes at most that requests need beyond those of the idle site.
        epochs: of a client's training in one exchange at most, all phases together.
        seconds: that one request takes at most: one client's work in an exchange, a measurement, or a model's building.
    """

    algorithms: tuple[str, ...] | None = None
    metrics: tuple[str, ...] | None = None
    code: tuple[str, ...] = ()
    never_send: tuple[str, ...] = ()
    least_samples: int = 0
    splits: int = 5
    parameters: int = 30_000_000
    layers: int = 1000
    memory: int = 800
    epochs: int = 100
    seconds: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("splits", "parameters", "layers", "memory", "epochs", "seconds"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UsageError(f"policy: {name} must be above 0; got {value}. Leave it out for {_default(name)}.")

    @contextmanager
    def limited(self, idle: int) -> Iterator[None]:
        """Refuse work that takes more memory or seconds.

        Args:
            idle: bytes of data of the idle site.

        Raises:
            LimitError: names the limit.
        """
        time = f"{self.seconds:g} seconds ([policy] seconds)"
        room = f"{self.memory} megabytes ([policy] memory)"
        with within_seconds(self.seconds, time), within_memory(idle + self.memory * MEGABYTE, room):
            yield

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

    def check_phases(self, phases: Iterable[Phase]) -> None:
        """Refuse phases of training whose epochs together are too many; errors as of :meth:`check_epochs`."""
        self.check_epochs(sum(phase.epochs for phase in phases))

    def check_epochs(self, epochs: int) -> None:
        """Refuse to train for too long in one exchange.

        Raises:
            LimitError: names the limit.
        """
        if epochs > self.epochs:
            raise LimitError(
                f"epochs of one exchange must be at most {self.epochs} ([policy] epochs); got {epochs}. Ask for fewer."
            )

    def check_algorithm(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Refuse an algorithm before anything of it is imported, and so what its options name.

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

    def check_metrics(self, names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse metrics before anything of them is imported, and those that compare clients.

        Raises:
            UsageError: names the first, and what is allowed.
        """
        from fedlayers.diagnostics.metrics.base import METRICS

        for name in (*names, *options):
            if is_outside(name):
                self._check(name, "code", self.code)
            if self.metrics is not None:
                self._check(name, "metric", self.metrics)
            elif not is_outside(name):
                check_known("metric", name, METRICS)
        check_alone(names)

    def check_code(self, config: RunConfig) -> None:
        """Refuse a configuration that names code which this site does not allow, or a model option that loads.

        Raises:
            UsageError: names it.
        """
        for key, name in code_of(config.to_json()).items():
            if key != "dataset":  # whose name is all that is taken of it
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
        """Refuse to send something of layers, by name, that never leave.

        Raises:
            UsageError: names the first such layer.
        """
        for name in self.never_send:
            if name in names:
                raise UsageError(
                    f"the site never sends layer {name!r}: a plan or an algorithm that keeps it local does"
                )

    def check_samples(self, count: int) -> None:
        """Refuse to take part with too few samples.

        Raises:
            UsageError: says how many there are.
        """
        if count < self.least_samples:
            raise UsageError(f"the site has {count} samples, and its policy asks for at least {self.least_samples}")

    def _check(self, name: str, what: str, allowed: tuple[str, ...]) -> None:
        if name not in allowed:
            known = listing(allowed) or "none"
            raise UsageError(f"the site's policy does not allow the {what} {name!r}; it allows: {known}")


def _default(name: str) -> object:
    return Policy.__dataclass_fields__[name].default
