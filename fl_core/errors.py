"""The exceptions, which separate invalid requests from failed runs, and warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGES = ("fl_core", "diagnostics", "fedlayers")
REMOVED = {
    "dropout_trace": "Use client_dropout to lose replies by chance.",
    "federation": "A federation over sites starts by flwr run; docs/federation.md has the lines.",
    "fedselect": "Use benchmarks.leaderboard.algorithms:FedSelect in a checkout.",
    "join": "Train algorithm local with --init RUN; examples/new_hospital.py shows it.",
    "leave_out_client": "Leave the client out of the data; examples/new_hospital.py shows it.",
    "knn_per": "Use benchmarks.leaderboard.algorithms:KNNPer in a checkout.",
    "link": "A federation over sites starts by flwr run; docs/federation.md has the lines.",
    "local_models": "A checkpoint has the trained models of the round's first 100 clients.",
    "local_scores": "Use eval_every=1 to score locally trained models in every round.",
    "memory_format": "It follows from the model.",
    "mix": "Use the winner's model alone.",
    "race_fraction": "Arms train to the end, or a judge stops them early under --patience.",
    "each_seed": "Choice.of_seed has each seed's own winner with thorough=True.",
    "own_epochs": "Train algorithm local with --init RUN and --rounds; examples/new_hospital.py shows it.",
    "with_finetuning": "Name fine-tuned FedAvg among the arms: local_adaptation.",
    "leaderboard": "Run python -m benchmarks.leaderboard in a checkout.",
    "tuned_defaults": "Use the defaults, or fedlayers tune.",
    "complete": "The winner is always trained to the end.",
    "no_final_run": "The winner is always trained to the end.",
    "onnx": "Call torch.onnx.export on the model of fl.load_models; docs/export.md shows the lines.",
    "superlink": "A federation over sites starts by flwr run; docs/federation.md has the lines.",
    "tell": "Use progress: True, False, or a function that receives the lines.",
    "timeouts": "A federation over sites has timeout in the server's file; docs/federation.md has the lines.",
    "torch_export": "Call torch.export.save on the model of fl.load_models; docs/export.md shows the lines.",
    "null_draws": "Pass null=fl.Nulls(names, draws=...), or --null-draws on the command line.",
    "retrain": "Pass null=fl.Nulls(names, retrain=...).",
    "vote": "Use sensitivity_ratio, largest_jump or change_point, each on one --metric.",
    "budget": "Choose the layers by --rule manual; fl.plan_cost has the bytes of each plan.",
    "budget_bytes": "Choose the layers by --rule manual; fl.plan_cost has the bytes of each plan.",
    "density": "hessian_spectrum has the largest eigenvalues; pyhessian has densities.",
    "on_divergence": "A loss above the limit is noted, in the rows too.",
    "format": "Models are exported as safetensors; docs/export.md has the lines for others.",
    "precision": "Local training computes in float32.",
    "recompute_frozen": "Outputs of frozen first layers are always kept.",
    "budget_flops": "Choose the layers by --rule manual; the metric layer_cost has the FLOPs of each layer.",
}
"""What to use instead of a name that this version removed: a flag, command, option or format, with underscores."""


class UsageError(ValueError):
    """An invalid request: an unknown name, a missing file, data that do not fit. Exit code 2."""


class RunError(RuntimeError):
    """A failure while running a valid request. Exit code 1."""


class DivergedError(RunError):
    """Divergence of training: a loss far above the initial one. The message names the place."""


class NonFiniteError(DivergedError):
    """NaN or infinity in training or aggregation. The message names the place."""


class WorkerError(RunError):
    """The end of a worker process before its work was done."""


class CorruptError(RunError):
    """Stored bytes that differ from their recorded digest."""


class BusyError(RunError):
    """A run directory to which another process is writing."""


def warn(text: str) -> None:
    """Warn at the line that called this project, not at a line within it.

    From Python 3.12 on, the argument ``skip_file_prefixes`` of :func:`warnings.warn` would do.
    """
    frame: FrameType | None = sys._getframe()
    level = outside = 1
    while frame is not None:
        level += 1
        if str(frame.f_globals.get("__name__")).partition(".")[0] in PACKAGES:
            outside = level
        frame = frame.f_back
    warnings.warn(text, stacklevel=outside)


def listing(names: Iterable[str], most: int = 12) -> str:
    """Join names with commas, at most ``most`` of them, followed by the number of the others."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "round"), plural(3, "round")
    ('1 round', '3 rounds')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def needs_package(package: str, purpose: str, extra: str) -> UsageError:
    """Return the error for a missing optional package, with the command that installs it."""
    return UsageError(
        f"{package} must be installed to {purpose}. Run pip install 'fedlayers[{extra}]'."
    )


REMOVED_KINDS = {
    "algorithm",
    "argument",
    "arguments",
    "command",
    "flag",
    "format",
    "key",
    "keyword",
    "option",
    "options",
    "rule",
    "rules",
}
"""Words for what a name in :data:`REMOVED` was."""


def check_known(kind: str, name: str, known: Iterable[str]) -> str:
    """Return ``name`` if it is one of ``known``.

    Raises:
        UsageError: it is unknown. The message names the kind, the nearest valid name, and the known ones. For a
            removed name it says what to use instead.
    """
    known = list(known)
    if name in known:
        return name
    instead = REMOVED.get(str(name).replace("-", "_"))
    if instead and set(kind.split()) & REMOVED_KINDS:
        raise UsageError(f"{kind} {name!r} was removed. {instead}")
    import difflib  # for a mistake only

    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"unknown {kind} {name!r}: {hint}known: {listing(known, 40)}")


def as_list(
    name: str, given: Any, *, empty: bool = False, distinct: bool = False
) -> tuple[Any, ...]:
    """Return the values of an argument that takes a list. One text, number or other object is a list of one.

    None is an empty list. An array gives Python's numbers.

    >>> as_list("metrics", "cka"), as_list("rounds", 1), as_list("rounds", range(2))
    (('cka',), (1,), (0, 1))

    Args:
        name: of the argument, for the message.
        empty, distinct: whether it may have no value, and whether no value may be there twice.

    Raises:
        UsageError: there is no value, or one is there twice.
    """
    given = given.tolist() if hasattr(given, "tolist") else given  # an array
    given = () if given is None else given
    alone = isinstance(given, str) or not isinstance(given, Iterable)
    values = (given,) if alone else tuple(given)
    if not values and not empty:
        raise UsageError(f"{name} must have at least one value; got none. Name one.")
    twice = [value for place, value in enumerate(values) if value in values[:place]]
    if twice and distinct:
        raise UsageError(
            f"{name} must be distinct; got {twice[0]} twice. Leave one out."
        )
    return values


@contextmanager
def about(what: str, kind: type[Exception] = UsageError) -> Iterator[None]:
    """Begin the message of an error with what it is about.

    >>> with about("heart.csv"):
    ...     raise UsageError("a row is missing")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: heart.csv: a row is missing
    """
    try:
        yield
    except kind as error:
        raise kind(f"{what}: {error}") from error


@contextmanager
def damaged(path: Path | str, *kinds: type[Exception]) -> Iterator[None]:
    """Report an error as damage of a stored file.

    Args:
        kinds: of errors; by default ValueError, which says that a value makes no sense.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, kinds or ValueError):
            raise CorruptError(f"{path} is damaged: {error}") from error
        raise
