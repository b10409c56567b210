"""The base class of all commands, whose fields are the flags."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from fedlayers.cli.arguments import option
from fl_core.config import RunConfig

RunDirectory = Annotated[Positional[Path], option("A run directory.", "DIR")]
ModelCode = Annotated[
    tuple[str, ...],
    option(
        "Of a run whose model, algorithm, dataset or rule is code: its package.module:name again, since that code is "
        "imported and called. Also KEY=VALUE of its model options that are not sizes or rates, such as "
        "pretrained=true.",
        "NAME [NAME ...]",
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its fields are its flags, its docstring is its help."""

    debug: Annotated[bool, option("Show the whole traceback of an error.")] = False

    def main(self, line: str) -> None:
        """Run the command; ``line`` is the command as it was typed.

        Raises:
            UsageError, RunError: with the reason.
        """
        raise NotImplementedError

    def interrupted(self) -> str:
        """What to tell the user after Ctrl-C: how to continue what was begun."""
        return "nothing was written"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configured(Command):
    """Base of the commands that take a run's configuration."""

    file: Annotated[
        Path | None, option("Read flags from a file that --print-config wrote. Flags win.", "FILE", "config")
    ] = None
    print_config: Annotated[bool, option("Print the configuration as TOML, and stop.")] = False
    help_all: Annotated[bool, option("Show every flag; --help shows the usual ones.")] = False

    def asked_config(self) -> RunConfig:
        """Return the configuration of the command line, with names and numbers checked.

        Raises:
            UsageError: a value is wrong, or an option is not KEY=VALUE.
        """
        raise NotImplementedError

    def printed(self) -> str:
        """Return the configuration as TOML, with the dataset's defaults filled in."""
        from fedlayers.cli.config_files import to_toml

        return to_toml(self.asked_config())
