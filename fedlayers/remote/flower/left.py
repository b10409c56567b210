"""What left the sites in a run, by site and kind of reply: kept beside the run, and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from fedlayers.remote.sites import Tally
from fl_core.records.files import write_atomically

FILE = "left_sites.json"
KINDS = {
    "hello": "hello",
    "join": "joining",
    "train": "training",
    "finetune": "fine-tuning",
    "score": "scores",
}
"""The requests that a site answers, as columns of the table."""


def keep(out: Path, tally: Tally) -> None:
    """Add what left the sites to what was kept in this run directory; verification does not cover it."""
    known = _read(out)
    for (site, kind), count in tally.bytes.items():
        entry = known.setdefault(site, {}).setdefault(kind, {"bytes": 0, "replies": 0})
        entry["bytes"] += count
        entry["replies"] += tally.replies[site, kind]
    if known:
        write_atomically(out / FILE, (json.dumps(known, indent=1, sort_keys=True) + "\n").encode())


def table(out: Path) -> pd.DataFrame:
    """One line a site: bytes of its replies by kind, and all of them; no line if nothing is kept there."""
    known = _read(out)
    lines = [
        {"site": site, **{words: kinds.get(kind, {}).get("bytes", 0) for kind, words in KINDS.items()}}
        for site, kinds in sorted(known.items())
    ]
    found = pd.DataFrame(lines, columns=["site", *KINDS.values()])
    found = found.loc[:, [name == "site" or bool(found[name].any()) for name in found.columns]]
    return found.assign(all=found.drop(columns="site").sum(axis=1))


def _read(out: Path) -> dict[str, dict[str, dict[str, int]]]:
    file = out / FILE
    return json.loads(file.read_text()) if file.is_file() else {}
