"""Makes a reference page for each command, from its own help."""

from __future__ import annotations

import io
import os
import textwrap
from contextlib import redirect_stdout, suppress
from unittest.mock import patch

from fedlayers.cli.app import COMMANDS, GROUPS, command_class, overview, parse_command

WIDTH = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
INDEX = "commands/index.md"


def pages() -> dict[str, str]:
    """Return the pages by their place in the site: the overview, and each command's flags."""
    listed = "\n".join(f"/{place_of(name)}" for name in COMMANDS)
    lines = []
    for group, names in GROUPS.items():
        lines += [f"\n**{group}**\n"]
        lines += [
            f"- [fedlayers {name}]({place_of(name).removeprefix('commands/')})"
            for name in names
        ]
    head = f"# Commands\n\n```text\n{overview()}\n```\n"
    index = (
        f"{head}{chr(10).join(lines)}\n\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
    )
    return {INDEX: index, **{place_of(name): page(name) for name in COMMANDS}}


def place_of(name: str) -> str:
    """Return a command's page in the site."""
    return f"commands/{name}.md"


def page(name: str) -> str:
    """Return a command's page: its description, and the help with all flags."""
    summary = str(command_class(name).__doc__).strip().splitlines()[0]
    return f"# fedlayers {name}\n\n{summary}\n\n```text\n{help_of(name)}\n```\n"


def help_of(name: str) -> str:
    """Return the help of a command with all its flags. No line is longer than 88 signs."""
    said = io.StringIO()
    with patch.dict(os.environ, WIDTH), redirect_stdout(said), suppress(SystemExit):
        parse_command([name, "--help-all"])
    lines = (textwrap.fill(line, 88) for line in said.getvalue().splitlines())
    return "\n".join(lines).rstrip()
