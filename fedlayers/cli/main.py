"""The program ``fedlayers COMMAND``: finds and runs the command, and reports whatever ends it in one line.

Nothing heavy is imported before a command needs it: what only asks, or is mistaken, is answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from fl_core import interrupts
from fl_core.errors import RunError, UsageError, WorkerError, check_known

if TYPE_CHECKING:
    from fedlayers.cli.base import Command

COMMANDS = {
    "study": "studies",
    "run": "runs",
    "resume": "runs",
    "verify": "runs",
    "runs": "folders",
    "clean": "folders",
    "diagnose": "layers",
    "select": "layers",
    "plot": "pictures",
    "export": "exports",
    "predict": "exports",
    "choose": "studies",
    "compare": "studies",
    "tune": "studies",
    "regret": "studies",
    "keys": "federation",
    "superlink": "federation",
    "site": "federation",
    "federate": "federation",
    "list": "listings",
}
"""The module of each command, which is a class of the command's name there."""
MENDED_BY = {
    "ENOSPC EDQUOT EFBIG": "make room there",
    "EMFILE ENFILE": "allow more open files (ulimit -n 4096)",
    "EIO ESTALE ENODEV": "see to that disk or its network",
    "EROFS": "make that file system writable",
    "EXDEV": "keep that folder on one file system",
}
"""What mends an error of the operating system, by the names of its numbers."""
KINDS = {f"--{kind}": kind for kind in ("algorithm", "dataset", "partition", "model", "rule")}
CHECKED = {
    **{
        name: {**KINDS, "--algorithms": "algorithm"}
        for name in ("run", "federate", "study", "choose", "compare", "regret")
    },
    "diagnose": {"--dataset": "dataset", "--partition": "partition", "--metrics": "metric"},
}
"""Of each command the flags whose names are looked up before the parser is made, which takes longer."""
ABOUT = "Measure which layers of a network to federate and which to keep local, and check the choice."


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 2 for a usage error, 1 for a failure, 128 + N after signal N, and one line says why."""
    try:
        try:
            with interrupts.ending():
                _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _main(words: Sequence[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        sys.exit(0)
    try:
        check_names(words)
        command = parsed(words)
    except UsageError as error:
        _leave(2, str(error))
    import shlex
    import traceback
    import warnings

    try:
        with interrupts.ending(command.interrupted), warnings.catch_warnings():
            warnings.showwarning = _Notes()
            command.main(shlex.join(["fedlayers", *words]))
    except BrokenPipeError:
        raise
    except Exception as error:
        if command.debug:
            traceback.print_exc()
        foreseen = isinstance(error, (UsageError, RunError, OSError))
        reason = str(error) if foreseen else f"{type(error).__name__}: {error} (--debug shows where)"
        _leave(2 if isinstance(error, UsageError) else 1, f"{reason}{_way_out(error, command)}")


def _way_out(error: Exception, command: Command) -> str:
    """What the user can do after an error outside the run: mend what failed, and continue what was begun."""
    import errno

    from fedlayers.cli.base import Command

    name = errno.errorcode.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    steps = [step for names, step in MENDED_BY.items() if name in names.split()]
    begun = command.interrupted() if (steps or isinstance(error, WorkerError)) else ""
    if begun and begun != Command.interrupted(command):
        steps.append(begun)
    return f"; {', then '.join(steps)}" if steps else ""


def overview() -> str:
    """All commands with a line of description each, read from their sources."""
    from fl_core.source_scan import Sources

    sources = Sources("fedlayers.cli")
    width = max(map(len, COMMANDS))
    lines = [
        f"  {name.ljust(width)}  {sources.summary(f'fedlayers.cli.{module}', name.capitalize())}"
        for name, module in COMMANDS.items()
    ]
    usage = "usage: fedlayers COMMAND [FLAGS]"
    return "\n".join([usage, "", ABOUT, "", *lines, "", "fedlayers COMMAND --help shows flags and examples."])


def command_class(name: str) -> type[Command]:
    """The class of the command with this name.

    Raises:
        UsageError: there is none, with the nearest.
    """
    from importlib import import_module

    module = COMMANDS[check_known("command", name, COMMANDS)]
    return getattr(import_module(f"fedlayers.cli.{module}"), name.capitalize())


def check_names(words: Sequence[str]) -> None:
    """Refuse an unknown algorithm, dataset, partition, model, rule or metric before the parser of all flags is made.

    Raises:
        UsageError: unknown, with the nearest name.
    """
    from itertools import takewhile

    given = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    flags = CHECKED.get(words[0], {})
    if flags.keys().isdisjoint(given) or not {"-h", "--help", "--debug"}.isdisjoint(words):  # the command answers these
        return
    from fedlayers import catalogue

    for place, flag in enumerate(given, 1):
        if flag in flags:
            names = takewhile(lambda following: not following.startswith("-"), given[place:])
            for name in list(names)[: None if flag.endswith("s") else 1]:
                catalogue.check_value(flags[flag], name)


def parsed(words: Sequence[str]) -> Command:
    """The command with its flags parsed; help ends the program.

    Raises:
        UsageError: an unknown command, or flags that do not parse.
    """
    command = command_class(words[0])
    import inspect
    import io
    from contextlib import redirect_stderr

    import tyro

    from fedlayers.cli.arguments import MARKERS
    from fedlayers.cli.refusals import one_line

    text, said = inspect.getdoc(command), io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(command, prog=f"fedlayers {words[0]}", description=text, args=words[1:], config=MARKERS)
    except SystemExit as ended:
        if ended.code == 2:
            raise UsageError(one_line(said.getvalue(), words[0])) from None
        raise


class _Notes:
    """Shows each warning only once, on one line."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, message: Warning | str, *_: object, **__: object) -> None:
        text = " ".join(str(message).split())
        if text not in self.seen:
            self.seen.add(text)
            line, bars = f"fedlayers: note: {text}", sys.modules.get("tqdm")
            if bars is None:
                print(line, file=sys.stderr)
            else:  # on a line of its own, above the bar of a run that goes on
                bars.tqdm.write(line, file=sys.stderr)


def _leave(code: int, reason: str) -> NoReturn:
    print(f"fedlayers: {' '.join(reason.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
