"""The program ``fedlayers COMMAND``: finds and runs the command, and reports an error in one line.

Heavy modules are imported only when a command needs them, so help and wrong flags are answered at once.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from fl_core import progress
from fl_core.display import message_line, printable, with_flags
from fl_core.errors import CorruptError, RunError, UsageError, WorkerError, check_known

if TYPE_CHECKING:
    from fedlayers.cli.options import Command

GROUPS = {
    "Begin": {"demo": "train"},
    "Decide": {
        "choose": "train",
        "study": "train",
        "compare": "train",
        "tune": "train",
    },
    "Train": {
        "run": "train",
        "resume": "train",
        "export": "folders",
        "predict": "folders",
        "plan": "folders",
    },
    "Measure": {
        "diagnose": "measure",
        "select": "measure",
        "regret": "measure",
        "plot": "measure",
        "map": "measure",
    },
    "Inspect": {
        "check": "folders",
        "verify": "folders",
        "runs": "folders",
        "clean": "folders",
        "list": "folders",
    },
}
"""The commands in the groups of the help, each with the module of its class in :mod:`fedlayers.cli`."""
COMMANDS = dict(chain.from_iterable(group.items() for group in GROUPS.values()))
MENDED_BY = {
    "ENOSPC EDQUOT EFBIG": "make room there",
    "EMFILE ENFILE": "allow more open files (ulimit -n 4096)",
    "EIO ESTALE ENODEV": "see to that disk or its network",
    "EROFS": "make that file system writable",
    "EXDEV": "keep that folder on one file system",
}
"""The remedy for errors of the operating system, by their names, such as ENOSPC."""
ABOUT = (
    "Measure which layers to federate and which to keep local, and check the choice."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program. An error gives one line, and exit code 2 for usage, 1 for a failure, 128 + N for signal N.

    Several faults of a table give a line each.

    Args:
        argv: the words after the program's name. None takes those of this process.
    """
    # a terminal may lack letters, and a stream may be closed
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    shown_output = _Printable(sys.stdout)
    try:
        with shown_output.until_closed():  # help, too
            _main(list(sys.argv[1:] if argv is None else argv))
    finally:
        shown_output.flush()


def _main(words: Sequence[str]) -> None:
    if words and words[0] == "help":  # of a command that is named after it
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        sys.exit(0)
    if words[0] in ("--version", "-V", "-v", "version"):
        from fl_core import __version__

        print(f"fedlayers {__version__}")
        sys.exit(0)
    from fedlayers.cli.options import FLAGS

    try:
        command = parse_command(words)
    except UsageError as error:
        _leave(2, with_flags(str(error), FLAGS))
    os.environ["MPLBACKEND"] = "Agg"  # draws to files, even if there is a screen
    import logging
    import shlex
    import traceback
    import warnings
    from contextlib import redirect_stdout

    from fl_core.storage import json_bytes

    shown_output = sys.stdout
    if command.json:
        shown_output = sys.stderr
    safe_output = redirect_stdout(cast(TextIO, _Printable(shown_output)))
    shown_warnings: set[str] = set()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        """Show a warning once, on one line."""
        text = message_line(with_flags(str(message), FLAGS))
        line = f"fedlayers: note: {text}"
        if line not in shown_warnings:
            shown_warnings.add(line)
            progress.say(line, sys.stderr)

    try:
        with (
            progress.end_on_signals(command.interrupted),
            warnings.catch_warnings(),
            safe_output,
        ):
            warnings.showwarning = note
            logging.basicConfig(format="%(message)s")
            logging.getLogger("fl_core").setLevel(logging.INFO)
            if (text := command.printed()) is not None:
                print(text, end="")
                return
            answer = command.main(shlex.join(["fedlayers", *words])) or {}
        if command.json:
            print(json_bytes(answer).decode())
        if answer.get("faults"):
            sys.exit(1)
    except Exception as error:
        if command.debug:
            traceback.print_exc()
        code = 2 if isinstance(error, UsageError) else 1
        reason = with_flags(str(error), FLAGS)
        if isinstance(getattr(error, "lines", None), list):  # all faults of a table
            _leave(code, *reason.splitlines())
        if not isinstance(error, (UsageError, RunError, OSError)):
            error_type = type(error).__name__
            reason = f"{error_type}: {reason} (--debug shows where)"
        remedy = _way_out(error, command)
        _leave(code, f"{reason}{remedy}")


def _way_out(error: Exception, command: Command) -> str:
    """Return what the user can do after damage or an error of the operating system.

    The text ends the message: it is the remedy, and how to continue. It is empty if
    neither is known, or if the message of damage already has a remedy.
    """
    import errno

    if isinstance(error, CorruptError):
        stop = "."
        if str(error).endswith("."):
            stop = ""
        if ". " in str(error):
            return ""
        return f"{stop} Restore it from a copy."
    name = errno.errorcode.get(getattr(error, "errno", None) or 0, "")
    steps = [step for names, step in MENDED_BY.items() if name in names.split()]
    resume_text = command.interrupted()
    if "continue" in resume_text and (steps or isinstance(error, WorkerError)):
        steps.append(resume_text)
    gap = ";"
    if str(error).endswith("."):
        gap = ""
    if steps:
        remedy = ", then ".join(steps)
        return f"{gap} {remedy}"
    return ""


def overview() -> str:
    """Return the commands in groups, with a line of description each."""
    lines = ["usage: fedlayers COMMAND [OPTIONS]", "", ABOUT]
    width = max(map(len, COMMANDS))
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        for name in commands:
            description = str(inspect.getdoc(command_class(name))).partition("\n")[0]
            padded_name = name.ljust(width)
            lines.append(f"  {padded_name}  {description}")
    return "\n".join(
        [*lines, "", "fedlayers COMMAND --help shows options and examples."]
    )


def command_class(name: str) -> type[Command]:
    """Return the class of the command with this name.

    Raises:
        UsageError: the name is unknown. The message suggests the nearest.
    """
    module = COMMANDS[check_known("command", name, COMMANDS)]
    return getattr(import_module(f"fedlayers.cli.{module}"), name.capitalize())


def parse_command(words: Sequence[str]) -> Command:
    """Return the command with its flags parsed. Help ends the program.

    Args:
        words: the name of the command, then its flags and their values.

    Raises:
        UsageError: an unknown command, or flags that do not parse.
    """
    from fedlayers.cli.options import parse

    name, *flags = words
    return parse(command_class(name), name, flags, COMMANDS)


class _Printable:
    """A stream that writes control characters as escapes.

    Names in files can contain such characters, and a terminal would obey them. If the
    stream's reader stops early, such as ``head``, the rest of the text is dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self.until_closed():
            self._stream.write("\n".join(map(printable, text.split("\n"))))
        return len(text)

    def flush(self) -> None:
        with self.until_closed():
            self._stream.flush()

    @contextmanager
    def until_closed(self) -> Iterator[None]:
        """Drop the rest of the text once its reader is gone."""
        try:
            yield
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def _leave(code: int, *lines: str) -> NoReturn:
    text = "\n".join(map(message_line, lines))
    print(f"fedlayers: {text}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
