"""The section on own tables of docs/federation.md, and two hospitals that have such tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from fl_core import runner, tree
from fl_core.config import RunConfig
from fl_core.records.store import Run

PAGE = Path(__file__).parents[2] / "docs/federation.md"
SITES = ("north", "south")
WHOLE = RunConfig(
    client_column="hospital",
    label_column="disease",
    scale="standard",
    impute="mean",
    algorithm="fedper",
    stack="off",
    patience=0,
)
"""How one process reads the tables of both hospitals together."""


@dataclass(frozen=True)
class Section:
    """What the section shows: the table's header, the site's file, and the commands in their order."""

    header: str
    site: str
    commands: tuple[str, ...]

    def command(self, name: str, changes: Mapping[str, str]) -> list[str]:
        """Return the words of one command after ``fedlayers``, some of them replaced."""
        (line,) = (line for line in self.commands if line.startswith(f"fedlayers {name} "))
        flags = shlex.split(line.removeprefix(f"fedlayers {name} "))  # "keys" is a command and a folder
        return [*name.split(), *(changes.get(word, word) for word in flags)]


def section() -> Section:
    """Read the section."""
    text = PAGE.read_text().partition("## Your own tables")[2].partition("\n## ")[0]
    blocks = re.findall(r"^( *)```(\w+)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    kinds: dict[str, list[str]] = {}
    for indent, kind, body in blocks:
        kinds.setdefault(kind, []).extend(line.removeprefix(indent) for line in body.splitlines())
    return Section(kinds["text"][0], "\n".join(kinds["toml"]) + "\n", tuple(kinds["sh"]))


def same_as_in_one_process(run: Path, whole: Path) -> None:
    """Assert that a run over the sites has the rows and the server's model of a run on the table of all."""
    stored = Run(run).config
    assert stored["dataset"] == "own"
    config = replace(WHOLE, dataset=str(whole), rounds=stored["rounds"])
    expected = runner.run(config, progress=False)
    found = Run(run).rows()[1].drop(columns="run")
    wanted = pd.DataFrame(expected.rows)[list(found.columns)]
    pd.testing.assert_frame_equal(found, wanted, check_exact=True, check_dtype=False)
    assert tree.digest(Run(run).checkpoint().server.trees["model"]) == tree.digest(expected.server.trees["model"])


def write_tables(folder: Path, header: str) -> Path:
    """Write each hospital's table into ``folder``/NAME/patients.csv, and all in one; return the latter."""
    draw = np.random.default_rng(0)
    lines: dict[str, list[str]] = {name: [] for name in SITES}
    for k in range(150):
        ill = draw.random() < 0.4
        cells = [f"{draw.normal(55 + 9 * ill, 8):.0f}", f"{draw.normal(130, 15):.0f}", f"{draw.normal(220, 40):.1f}"]
        cells[k % 3] = cells[k % 3] if k % 4 else ""
        lines[SITES[k % 5 > 2]].append(",".join([*cells, "yes" if ill else "no"]))
    for name, own in lines.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "patients.csv").write_text("\n".join([header, *own, ""]))
    whole = folder / "whole.csv"
    together = [f"{line},{name}" for name in SITES for line in lines[name]]
    whole.write_text("\n".join([f"{header},hospital", *together, ""]))
    return whole
