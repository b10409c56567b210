"""One-line errors of flags: the parser's message without its box, with the nearest flag."""

from __future__ import annotations

import re

from fl_core.errors import REMOVED

_RULE = r"(?m)^[─-]+$"
_WORDS = (
    (r"Unrecognized options: (.*)", r"unrecognized: \1"),
    (r"Error parsing (\S+): no type matching INT could be .* from \[(.*?)\].*", r"\1 must be a whole number; got \2"),
    (r"Error parsing (\S+): no type matching FLOAT could be .* from \[(.*?)\].*", r"\1 must be a number; got \2"),
    (r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)", r"\1 must be a whole number; got \2"),
    (r"Error parsing (\S+): could not convert string to float: (.*)", r"\1 must be a number; got \2"),
    (r"Error parsing (\S+): takes (.*), not (.*)", r"\1 must be \2; got \3"),
    (r"Error parsing (\S+): Could not find valid parse for arguments: \[(.*)\]", r"\1 must be whole numbers; got \2"),
    (r"Error parsing (\S+): (.*)", r"\1: \2"),
    (r"invalid choice (.*) for argument '(\S+)'\. Expected one of \((.*)\)\.", r"\2 must be one of \3; got \1"),
    (r"Missing value for argument '(\S+)'\..*", r"\1 must have a value; got none"),
    (r"Missing from fedlayers ([\w ]+): (\S+) .*", r"\1 must have \2; got none"),
)  # fmt: skip


def one_line(box: str, command: str, helps: str = "--help") -> str:
    """Return the parser's message without its frame and its help. A message of another form keeps all its words.

    Args:
        helps: the flag that shows all options of the command.

    >>> print(one_line('''
    ... ╭─ Unrecognized options ──────────────────────╮
    ... │ Unrecognized options: --rond                │
    ... │ ─────────────────────────────────────────── │
    ... │ Perhaps you meant:                          │
    ... │     --rounds INT                            │
    ... ╰─────────────────────────────────────────────╯''', "run"))
    unrecognized: --rond. Did you mean --rounds? fedlayers run --help shows all options.
    """
    rows = [
        row.strip("│").strip()
        for row in box.strip().splitlines()
        if row[:1] not in ("╭", "╰")
    ]
    sections = [part.strip() for part in re.split(_RULE, "\n".join(rows))]
    if (
        "╭" not in box and len(sections) > 1
    ):  # without a frame, where output is ASCII, the title is a part by itself
        sections.pop(0)
    wrong = " ".join(sections[0].split("\n\n")[0].split())
    for said, ours in _WORDS:
        if re.fullmatch(said, wrong):
            wrong = re.sub(said, ours, wrong)
            break
    flag = re.match(r"unrecognized: --([\w-]+)", wrong)
    if flag and (instead := REMOVED.get(flag[1].replace("-", "_"))):
        return f"--{flag[1]} was removed. {instead}"
    wrong = wrong.replace("'None', ", "").replace(", 'None'", "")
    near = [
        flag
        for part in sections[1:]
        if part.startswith("Perhaps")
        for flag in re.findall(r"(?m)^--[\w-]+", part)
    ]
    meant = f"Did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
    return f"{wrong}. {meant}fedlayers {command} {helps} shows all options."
