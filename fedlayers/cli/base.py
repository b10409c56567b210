"""The base class of all commands, whose fields are the flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from fedlayers.cli.arguments import SetLoss, SetModel, keys_of, option
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

OF_RACE = ("lr", "eval_every", "patience")
"""Keys of the configuration for which a race has defaults of its own."""


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

    config: RunConfig
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
    print_config: Annotated[
        bool, option("Print the configuration as TOML and stop.")
    ] = False
    help_all: Annotated[
        bool, option("Show all options; --help shows the usual ones.")
    ] = False

    def asked_config(self) -> RunConfig:
        """Return the configuration of the command line, with names and numbers checked.

        Raises:
            UsageError: a value is wrong, or an option is not KEY=VALUE.
        """
        raise NotImplementedError

    def changed_flags(self) -> list[str]:
        """Return the configuration's flags whose values are not the defaults."""
        default = RunConfig()
        changed = [
            key
            for key, value in self.config.flat().items()
            if value != default.value(key) and key not in ("options", "model_options")
        ]
        given = [
            name for name in ("model_option", "loss_option") if getattr(self, name)
        ]
        return [f"--{name.replace('_', '-')}" for name in (*changed, *given)]

    def own_defaults(self) -> Collection[str]:
        """Return the keys of the configuration for which the command has defaults of its own, not the dataset's."""
        return ()

    def printed(self) -> str:
        """Return the configuration as TOML, with the dataset's defaults filled in, if it was asked for.

        Only keys with a flag of the command are in it. Those with a default of its own are in it if they are given.
        """
        if not self.print_config:
            return ""
        from fedlayers.cli.config_files import to_toml

        given = {**self.config.flat(), **vars(self)}
        left_out = {key for key in self.own_defaults() if given[key] is None}
        return to_toml(self.asked_config(), keys_of(type(self)) - left_out)
