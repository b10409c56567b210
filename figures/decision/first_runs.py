"""Confirm the policy of ``choose`` on tables that no earlier decision saw, against the default of an earlier commit.

    python -m figures.decision.first_runs --old CHECKOUT [--hours 2]

``REGISTERED_FIRST.md`` says what is asked. A row of ``first.parquet`` is one decision, and a stopped call goes on.
CHECKOUT is a clone of the comparator's commit. Each decision is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import tyro

from fl_core.display import csv_bytes

ROWS = Path(__file__).with_name("first.parquet")
RDATASETS = Path(os.environ.get("FEDLAYERS_DATA_ROOT", "data")) / "rdatasets"
"""The csv folder of Rdatasets at the commit that the page names."""
LISTED = Path(__file__).with_name("first_tables.csv")
"""Tables of Rdatasets: file, columns of the client, the outcome and the group, and columns to leave out."""
SEEDS, MOST, LEAST, CLIENTS, LARGEST = (0, 1), 6000, 60, 4, 12
MODES = {"default": "", "macro_f1": "macro_f1", "auroc": "auroc"}
MARGINS = {"loss": 0.01, "macro_f1": 0.5}
SPLITS = (0.48, 0.12, 0.4)
FEATURES = (
    *("coins", "tookphys", "year", "black", "income", "xage", "female", "educdec"),
    *("num", "mhi", "disea", "physlm", "child", "hlthg", "hlthf", "hlthp"),
)


def tables() -> dict[str, pd.DataFrame]:
    """Return the tables at hand with the columns ``client``, ``outcome`` and, for some, ``group``.

    Clients of fewer than :data:`LEAST` rows are left out, and all but the :data:`LARGEST` largest. Larger tables are
    sampled once.
    """
    spec = find_spec("statsmodels")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "datasets"
    fair = pd.read_csv(folder / "fair" / "fair.csv")
    visits = pd.read_csv(folder / "randhie" / "src" / "randhie.csv")
    votes = pd.read_csv(folder / "anes96" / "anes96.csv", sep="\t")
    votes.columns = [name.strip("'\"") for name in votes.columns]
    found = {
        "affairs": fair.assign(client=fair.occupation, outcome=fair.affairs > 0).drop(
            columns=["occupation", "affairs"]
        ),
        "visits": visits[[*FEATURES]].assign(
            client=visits.site, outcome=visits.mdvis > 0, group=visits.zper
        ),
        "votes": votes.assign(client=votes.educ, outcome=votes.vote).drop(
            columns=["educ", "vote"]
        ),
    }
    labels = {
        name: np.where(t["outcome"].astype(bool), "yes", "no")
        for name, t in found.items()
    }
    found = {name: t.assign(outcome=labels[name]) for name, t in found.items()}
    for line in pd.read_csv(LISTED, dtype=str).fillna("").itertuples():
        file = RDATASETS / f"{line.file}.csv"
        if not file.exists():
            continue
        table = pd.read_csv(file, low_memory=False, encoding="latin-1")
        table = table.drop(columns=["rownames", *line.drop.split()], errors="ignore")
        table = table.dropna(subset=[line.client, line.outcome])
        if line.table == "doctor":
            table[line.outcome] = table[line.outcome] > 0
        roles = {line.client: "client", line.outcome: "outcome", line.group: "group"}
        found[line.table] = table.rename(columns=roles)
    for name, table in found.items():
        sizes = table["client"].value_counts()
        kept = sizes[sizes >= LEAST].head(LARGEST).index
        table = table[table["client"].isin(kept)]
        if len(table) > MOST:
            table = table.sample(MOST, random_state=0)
        clients = "c" + table["client"].astype(str).str.removesuffix(".0")
        outcome = "o" + table["outcome"].astype(str).str.removesuffix(".0")
        found[name] = table.assign(client=clients, outcome=outcome).reset_index(
            drop=True
        )
    return {k: t for k, t in found.items() if t["client"].nunique() >= CLIENTS}


def decide(table: str, seed: int, mode: str) -> dict[str, Any]:
    """Make one decision with the package that this process imports, and score its model on test samples once."""
    import fedlayers as fl
    from fl_core.data import load

    frame = tables()[table]
    keys: dict[str, Any] = {"client_column": "client", "label_column": "outcome"}
    keys["impute"] = "mean"
    if "group" in frame:
        keys["group_column"] = "group"
    began = time.process_time()
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{table}.csv"
        path.write_bytes(csv_bytes(frame))
        data = load(path, splits=SPLITS, seed=seed, **keys)
        how: dict[str, Any] = {"model": "mlp", "seed": seed, "progress": False}
        out = Path(folder) / "out"
        choice = fl.choose(data=data, out=out, score=MODES[mode], **how)
        kept = json.loads((Path(folder) / "out" / "choice.json").read_text())
        names = sorted(path.name for path in (Path(folder) / "out" / "arms").iterdir())
    gains = [line["gain"] for line in kept["clients"]]
    facts = choice.facts
    assert facts is not None
    found = {"winner": kept["winner"], "runs": names, "verdict": kept["verdict"]}
    found |= {
        "value": facts.values,
        "loses": gains.count("loses"),
        "clients": len(gains),
    }
    found |= {
        "price": choice.measured.full_runs,
        "seconds": time.process_time() - began,
    }
    found |= {"own_epochs": kept.get("own_epochs"), "fallback": kept.get("fallback")}
    return found


def run(old: Path, hours: float = 2.0, python: str = sys.executable) -> None:
    """Make all decisions that have no row yet, of both commits in turn.

    Args:
        old: a clone of the comparator's commit. hours: no decision begins later.
    """
    here = Path(__file__).resolve().parents[2]
    end = time.monotonic() + 3600 * hours
    lines = [] if not ROWS.exists() else pd.read_parquet(ROWS).to_dict("records")
    done = {
        (each["table"], each["seed"], each["mode"], each["commit"]) for each in lines
    }
    for mode, (table, seed) in product(MODES, product(tables(), SEEDS)):
        for name, folder in (("policy", here), ("comparator", old.resolve())):
            if (table, seed, mode, name) in done or time.monotonic() > end:
                continue
            code = (
                "import json, sys; sys.path.append(sys.argv.pop())\n"
                "import importlib.util as u\n"
                "s = u.spec_from_file_location('first_runs', sys.argv.pop())\n"
                "m = u.module_from_spec(s); s.loader.exec_module(m)\n"
                "a = sys.argv[1:]; print(json.dumps(m.decide(a[0], int(a[1]), a[2])))"
            )
            asked = [table, str(seed), mode, __file__, str(here)]
            ended = subprocess.run(
                [python, "-W", "ignore", "-c", code, *asked],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(folder)},
                capture_output=True,
                text=True,
                check=False,
            )
            failed = "" if ended.returncode == 0 else ended.stderr.strip()[-300:]
            found = "" if failed else ended.stdout.splitlines()[-1]
            line = {"table": table, "seed": seed, "mode": mode, "commit": name}
            lines.append({**line, "found": found, "failed": failed})
            pd.DataFrame(lines).to_parquet(ROWS, index=False)
            print(
                time.strftime("%H:%M"),
                *line.values(),
                failed or found[:160],
                flush=True,
            )


if __name__ == "__main__":
    tyro.cli(run)
