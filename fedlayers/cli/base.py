"""The base class of all commands, whose fields are the flags."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from fedlayers.cli.arguments import SetLoss, SetModel, option
from fl_core.config import RunConfig

RunDirectory = Annotated[Positional[Path], option("Run directory.", "DIR")]
ModelCode = Annotated[
    tuple[str, ...],
    option(
        "Custom code that this run may import and call, as package.module:name. A model option that is no size or "
        "rate needs it too, such as pretrained=true.",
        "NAME [NAME ...]",
    ),
]


OwnEpochs = Annotated[
    tuple[int, ...], option("Numbers of epochs to try on the data of the client of --leave-out-client.", "N [N ...]")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command. Its fields are its flags, its docstring is its help."""

    debug: Annotated[bool, option("Show the traceback of an error.")] = False

    def main(self, line: str) -> None:
        """Run the command. ``line`` is the command as it was typed.

        Raises:
            UsageError, RunError: with the reason.
        """
        raise NotImplementedError

    def printed(self) -> str:
        """Return the text that the command prints instead of its work; empty = it works."""
        return ""

    def interrupted(self) -> str:
        """Return what to print after Ctrl-C: how to continue the work."""
        return "nothing was written"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfiguredCommand(Command):
    """Base of the commands that take a run's configuration."""

    model_option: SetModel = ()
    loss_option: SetLoss = ()
    file: Annotated[
        Path | None,
        option(
            "Read options from a TOML file, as --print-config prints it. Options on the command line win.",
            "FILE",
            "config",
        ),
    ] = None
    print_config: Annotated[bool, option("Print the configuration as TOML and stop.")] = False
    help_all: Annotated[bool, option("Show all options; --help shows the usual ones.")] = False

    def asked_config(self) -> RunConfig:
        """Return the configuration of the command line, with names and numbers checked.

        Raises:
            UsageError: a value is wrong, or an option is not KEY=VALUE.
        """
        raise NotImplementedError

    def printed(self) -> str:
        """Return the configuration as TOML, with the dataset's defaults filled in, if it was asked for."""
        if not self.print_config:
            return ""
        from fedlayers.cli.config_files import to_toml

        return to_toml(self.asked_config())
