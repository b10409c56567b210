"""One-line errors of flags: the parser's message without its box, with the nearest flag."""

from __future__ import annotations

import re

_RULE = r"(?m)^[─-]+$"
_WORDS = (
    (r"Unrecognized options: (.*)", r"unrecognized: \1"),
    (r"Error parsing (\S+): no type matching (.+?) could be instantiated from \['(.*)'\].*", r"\1 takes \2, not '\3'"),
    (r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)", r"\1 takes INT, not \2"),
    (r"Error parsing (\S+): could not convert string to float: (.*)", r"\1 takes FLOAT, not \2"),
    (r"Error parsing (\S+): takes (.*)", r"\1 takes \2"),
    (r"Error parsing (\S+): (.*)", r"\1: \2"),
    (r"Missing value for argument '(\S+)'\..*", r"\1 needs a value"),
    (r"Missing from fedlayers (\w+): (\S+) .*", r"\1 needs \2"),
)  # fmt: skip


def one_line(box: str, command: str) -> str:
    """Return the parser's message without its frame and its help. A message of another form keeps all its words.

    >>> print(one_line('''
    ... ╭─ Unrecognized options ──────────────────────╮
    ... │ Unrecognized options: --rond                │
    ... │ ─────────────────────────────────────────── │
    ... │ Perhaps you meant:                          │
    ... │     --rounds INT                            │
    ... ╰─────────────────────────────────────────────╯''', "run"))
    unrecognized: --rond; did you mean --rounds? fedlayers run --help shows all flags
    """
    rows = [row.strip("│").strip() for row in box.strip().splitlines() if row[:1] not in ("╭", "╰")]
    sections = [part.strip() for part in re.split(_RULE, "\n".join(rows))]
    if "╭" not in box and len(sections) > 1:  # without a frame, where output is ASCII, the title is a part by itself
        sections.pop(0)
    wrong = " ".join(sections[0].split("\n\n")[0].split())
    for said, ours in _WORDS:
        if re.fullmatch(said, wrong):
            wrong = re.sub(said, ours, wrong)
            break
    near = [flag for part in sections[1:] if part.startswith("Perhaps") for flag in re.findall(r"(?m)^--[\w-]+", part)]
    meant = f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
    return f"{wrong}; {meant}fedlayers {command} --help shows all flags"
