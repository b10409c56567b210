"""The command line: fedlayers study | run | resume | verify | diagnose | select | plot | compare | regret | list."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import tyro
from tyro.conf import Positional

from diagnostics.commands import arguments
from diagnostics.commands.arguments import option
from diagnostics.commands.base import Command
from diagnostics.commands.layers import Diagnose, Select
from diagnostics.commands.pictures import Plot
from diagnostics.commands.runs import Resume, Run, Verify
from diagnostics.commands.studies import Compare, Regret, Study
from fl_core import interrupts
from fl_core.errors import RunError, UsageError, WorkerError, check_known


@dataclasses.dataclass(frozen=True, kw_only=True)
class List(Command):
    """What can be named, with defaults and one line each.

    Examples:
        fedlayers list algorithms
        fedlayers list datasets
    """

    what: Annotated[Positional[str], option("algorithms, datasets, models, metrics or rules.", "WHAT")]

    def main(self, line: str) -> None:
        from diagnostics import listings

        print(listings.LISTINGS[check_known("listing", self.what, listings.LISTINGS)]())


COMMANDS: dict[str, type[Command]] = {
    "study": Study,
    "run": Run,
    "resume": Resume,
    "verify": Verify,
    "diagnose": Diagnose,
    "select": Select,
    "plot": Plot,
    "compare": Compare,
    "regret": Regret,
    "list": List,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 2 for a usage error, 1 for a failure, 130 after Ctrl-C, with one line that says why."""
    with interrupts.ending():
        _main(list(sys.argv[1:] if argv is None else argv))


def _main(given: Sequence[str]) -> None:
    try:
        command = parsed(given)
    except UsageError as error:
        _leave(2, str(error))
    try:
        with interrupts.ending(command.interrupted), warnings.catch_warnings():
            warnings.showwarning = _Notes()
            command.main(shlex.join(["fedlayers", *given]))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if command.debug:
            traceback.print_exc()
        foreseen = isinstance(error, (UsageError, RunError, OSError))
        reason = str(error) if foreseen else f"{type(error).__name__}: {error} (--debug shows where)"
        _leave(2 if isinstance(error, UsageError) else 1, f"{reason}{_way_out(error, command)}")


def _way_out(error: Exception, command: Command) -> str:
    """What to do after an error that is not the run's own fault: make room, and go on where something was begun."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    begun = command.interrupted() if (full or isinstance(error, WorkerError)) else ""
    steps = ["make room there"] if full else []
    if begun and begun != Command.interrupted(command):
        steps.append(begun)
    return f"; {', then '.join(steps)}" if steps else ""


def parsed(given: Sequence[str]) -> Command:
    """The command that the arguments ask for; help and flags that do not parse end the program.

    Raises:
        UsageError: an unknown command.
    """
    name = given[0] if given else "--help"
    if name.startswith("-"):
        about = "Measure which layers of a network to federate and which to keep local, and check the choice."
        brief: Any = {name: _brief(kind) for name, kind in COMMANDS.items()}
        tyro.extras.subcommand_cli_from_dict(brief, prog="fedlayers", description=about, args=[name])
    kind = COMMANDS[check_known("command", name, COMMANDS)]
    text = inspect.getdoc(kind)
    return tyro.cli(kind, prog=f"fedlayers {name}", description=text, args=given[1:], config=arguments.MARKERS)


def _brief(kind: type[Command]) -> Any:
    """A stand-in for a command in the overview: its first line."""

    def command() -> None: ...

    command.__doc__ = (inspect.getdoc(kind) or "").partition("\n")[0]
    return command


class _Notes:
    """Shows each warning once, in a line."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        if text not in self.seen:
            self.seen.add(text)
            print(f"fedlayers: note: {text}", file=sys.stderr)


def _leave(code: int, reason: str) -> NoReturn:
    print(f"fedlayers: {' '.join(reason.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
