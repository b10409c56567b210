"""Files of a configuration: ``--config FILE`` reads one as flags, ``--print-config`` writes one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fl_core.bounds import check_type
from fl_core.config import GROUPS, KEYS, RunConfig
from fl_core.defaults import resolve
from fl_core.errors import UsageError, check_known, listing
from fl_core.limits import read_toml

LARGEST = 2**20
"""Bytes of a configuration file at most."""
OPTIONS = {
    "options": "--option",
    "model_options": "--model-option",
    "loss_options": "--loss-option",
}
"""The keys whose values are options, and the flag of one option."""


def expand_config(
    words: Sequence[str], command: str, keys: Collection[str]
) -> list[str]:
    """Replace ``--config FILE`` by the flags that the file stands for; flags that are given stay and win.

    Args:
        command: the name of the command.
        keys: those that it has flags for.

    Raises:
        UsageError: the file is missing, no TOML, or has an unknown group or key, or one that the command has no flag
            for.
    """
    rest, file = _without_file(words)
    if file is None:
        return rest
    values = _read(file)
    if other := [key for key in values if key not in keys]:
        raise UsageError(
            f"keys of {file} must be options of fedlayers {command}; got {listing(other)}. Remove "
            f"{'them' if len(other) > 1 else 'it'} from the file."
        )
    given = {_flag_and_value(word)[0] for word in rest if word.startswith("--")}
    own = _given_options(rest)
    flags: list[str] = []
    for key, value in values.items():
        if key in OPTIONS:
            for name, each in value.items():
                if (OPTIONS[key], name) not in own:
                    flags += [OPTIONS[key], f"{name}={_text(each)}"]
        elif (flag := f"--{key.replace('_', '-')}") not in given:
            flags += _words(flag, value, switch=KEYS[key].hint == bool | None)
    return [*rest, *flags]


def to_toml(config: RunConfig, keys: Collection[str]) -> str:
    """Return these keys of a configuration as TOML, in groups, with the dataset's defaults filled in.

    Raises:
        UsageError: a value is wrong.
    """
    import tomli_w

    filled = resolve(config)
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, key in KEYS.items():
        value = filled.value(name)
        if name in keys and value not in (None, {}):
            groups[key.group][name] = value
    return tomli_w.dumps(groups)


def _without_file(words: Sequence[str]) -> tuple[list[str], Path | None]:
    rest, file = list(words), None
    while place := next(
        (n for n, word in enumerate(rest, 1) if word.partition("=")[0] == "--config"), 0
    ):
        _, equals, name = rest.pop(place - 1).partition("=")
        if not equals:
            if place > len(rest):
                raise UsageError(
                    "--config must be followed by a file; got nothing. Name one that --print-config wrote."
                )
            name = rest.pop(place - 1)
        file = Path(name)
    return rest, file


def _flag_and_value(word: str) -> list[str]:
    """Split ``--flag=value``. A flag may have underscores for its hyphens, as the parser reads it."""
    flag, *value = word.split("=", 1)
    return [flag.replace("_", "-"), *value]


def _given_options(words: Sequence[str]) -> set[tuple[str, str]]:
    """Return flag and key of each option among the words."""
    joined = [
        part
        for word in words
        for part in (_flag_and_value(word) if word.startswith("--") else [word])
    ]
    return {
        (flag, text.partition("=")[0])
        for flag, text in pairwise(joined)
        if flag in OPTIONS.values()
    }


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UsageError(
            f"--config must name a file; got {file}. Write one with --print-config."
        )
    values: dict[str, Any] = {}
    for group, keys in read_toml(file, LARGEST).items():
        check_known(f"group of {file}", group, GROUPS)
        names = [name for name, key in KEYS.items() if key.group == group]
        if not isinstance(keys, Mapping):
            raise UsageError(
                f"{group} of {file} must be a group, [{group}]; got {keys!r}."
            )
        for name, value in keys.items():
            check_known(f"key in [{group}] of {file}", name, names)
            check_type(f"{name} in [{group}] of {file}", value, KEYS[name].hint)
            values[name] = value
    return values


def _words(flag: str, value: Any, switch: bool) -> list[str]:
    """Return a flag with its value as words of a command line; a ``switch`` takes True or False after it."""
    if isinstance(value, bool) and not switch:
        return [flag] if value else []
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
