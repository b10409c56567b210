"""``report.html`` of a federation's run: its scores, and the bytes that left each site."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from diagnostics.plots.page import Page
from fedlayers.remote.rpc import traffic_by_site
from fedlayers.studies.comparison import Comparison
from fl_core.errors import listing, plural
from fl_core.plan import LayerPlan
from fl_core.records.store import Run
from fl_core.scores import label_of

REPORT = "report.html"
KINDS = {
    "hello": "greeting",
    "moments": "means and variances",
    "race": "before a race",
    "join": "joining",
    "train": "training",
    "score": "scores",
    "finetune": "fine-tuning",
    "measure": "measurements",
}
"""The names of requests in the report."""
NEVER = "Bytes of all replies. They contain no sample, no label and no local layer."


def add_left(page: Page, path: Path | str, caption: str) -> None:
    """Add the table of a run's traffic from its ``left.jsonl``.

    Raises:
        UsageError: the run is not a federation's.
    """
    found = traffic_by_site(path).rename(columns=KINDS).rename_axis("site")
    page.table(found, caption, dict.fromkeys(map(str, found.columns), ",.0f"))


def write(path: Path | str) -> Path:
    """Write the report of a finished run into its directory. Return the file.

    Raises:
        UsageError: the run is not a federation's, or has no scores at its end.
    """
    run = Run(path)
    result = Comparison(run.rows()[1])
    algorithm, rounds = run.config["algorithm"], run.rounds[-1]
    sites = list(traffic_by_site(path).index)
    length = f"{plural(rounds, 'round')} of `{algorithm}`"
    lead = f"**{len(sites)} sites kept their samples**: {length}."
    plan = run.path / "plan.json"
    if plan.is_file():
        lead += f" {_describe_plan(LayerPlan.load(plan))}"
    page = Page(f"A federation of {len(sites)} sites", lead)
    page.text(f"## What left each site\n\n{NEVER}")
    add_left(page, path, f"{length}.")
    page.text("## Scores")
    table = result.clients.pivot(index="client", columns="metric", values="value").loc[sites]
    names = [name for name in table.columns if name in result.table]
    shown = table[names].rename(columns=partial(label_of, positive=result.positive)).rename_axis("site")
    page.table(
        shown, "Scores on each site's test samples after the last round.", dict.fromkeys(map(str, shown.columns), ".3f")
    )
    page.write(run.path / REPORT)
    return run.path / REPORT


def _describe_plan(plan: LayerPlan) -> str:
    head = listing(layer.name for layer in plan.head)
    return f"Shared layers: {listing(plan.shared) or 'none'}. Layers that stayed at each site: {head or 'none'}."
