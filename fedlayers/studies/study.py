"""A whole study on one dataset: measure, decide, federate, compare; with pictures and a report page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from fedlayers.diagnostics import measure, plots
from fedlayers.diagnostics.decide import select
from fedlayers.diagnostics.pictures.album import album, figure_of
from fedlayers.diagnostics.pictures.page import Page
from fedlayers.diagnostics.report import Report
from fedlayers.studies.compare import Comparison, check_folder, compare, jobs_of, pretty
from fedlayers.studies.pictures import of_comparison, save
from fl_core import __version__, runner
from fl_core.config import RunConfig, resolved
from fl_core.errors import UsageError, listing
from fl_core.plan import LayerPlan

Say = Callable[[str], None]
CAPTIONS = {
    "grad_variance": "Variance over the entries of each layer's weight gradient: how unevenly the layer is pulled.",
    "hessian_trace": "Trace of the loss's Hessian in each layer, per parameter: how sharply the loss curves there.",
    "cka": "How differently the clients' models represent the same samples; 0 is the same representation.",
    "federation_sensitivity": "Federation sensitivity of the layers up to each one, relative to the first; the "
    "decision reads the jumps of the combined line.",
}


@dataclass
class Outcome:
    """The result of a study."""

    report: Report
    plan: LayerPlan
    comparison: Comparison
    page: Path


def study(
    config: RunConfig,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    *,
    options: Mapping[str, dict[str, Any]] | None = None,
    command: str = "",
    say: Say = lambda text: None,
    progress: bool = True,
) -> Outcome:
    """Measure after the first seed's first local training, decide, run every algorithm over all seeds, report.

    Each run of the PLayer-FL family decides for itself, by the same rule and on its own seed's training data: a plan
    of another seed would have seen some of its test samples. The others use their own default. Below ``out``
    appear ``rows.jsonl`` (the diagnosis), ``plan.json``, ``comparison/`` (all runs, their rows and table), the
    pictures as PNG, and ``report.html``. A study that was interrupted goes on when it is started again.

    Raises:
        UsageError: anything unknown or not fitting, or a folder that holds another study; nothing is written then.
        RunError: there is no decision, or a run failed; the same call goes on from there.
    """
    if config.plan is not None:
        raise UsageError("a study decides on its own plan; compare takes one")
    out = Path(out)
    check_folder(out)
    jobs_of(config, algorithms, seeds[:1], None, options)
    config = replace(config, seed=seeds[0], algorithm="playerfl")
    task = runner.assemble(config)
    counts = task.data.class_counts()
    say(f"{task.config.dataset}: {len(counts)} clients, {int(counts.to_numpy().sum())} training samples")
    say(f"{task.config.model}: {', '.join(layer.name for layer in task.layers)}")

    report = measure.of_task(task, command=command, progress=progress)
    plan = select.select(
        report, config.rule, threshold=config.threshold, metric=measure.SENSITIVITY, variant="training"
    )
    say("\n" + select.explain(plan))
    jobs_of(config, algorithms, seeds, out / "comparison", options)
    out.mkdir(parents=True, exist_ok=True)
    report.write(out / "rows.jsonl")
    plan.save(out / "plan.json")

    result = compare(
        config,
        algorithms,
        seeds,
        out / "comparison",
        options=options,
        command=command,
        progress=progress,
    )
    decisions = over_seeds(out / "comparison", seeds)
    if decisions:
        say("\nLast shared layer by seed: " + ", ".join(f"{seed}: {last}" for seed, last in decisions.items()))
    say("\n" + result.text())
    page = write_page(out, task, report, plan, decisions, result, command)
    say(f"\nreport: {page}")
    return Outcome(report, plan, result, page)


def over_seeds(comparison: Path, seeds: Sequence[int]) -> dict[int, str]:
    """The last shared layer that each seed's own PLayer-FL run decided on; empty if there is none."""
    plans = {seed: comparison / "runs" / f"playerfl-{seed}" / "plan.json" for seed in seeds}
    return {seed: LayerPlan.load(path).last_shared for seed, path in plans.items() if path.is_file()}


def _epochs(config: RunConfig) -> str:
    return "one local epoch" if config.epochs == 1 else f"{config.epochs} local epochs"


# --- the page -------------------------------------------------------------------------------------


def write_page(
    out: Path,
    task: runner.Task,
    report: Report,
    plan: LayerPlan,
    decisions: Mapping[int, str],
    result: Comparison,
    command: str,
) -> Path:
    """Write the report page, and its pictures as PNG beside it."""
    config = resolved(task.config)
    shared = ", ".join(plan.shared) or "nothing"
    local = ", ".join(layer.name for layer in plan.head) or "nothing"
    page = Page(
        f"Which layers of {config.model} to federate on {Path(config.dataset).name}",
        f"Federate **{shared}**; keep **{local}** local. Measured in the first local epoch, "
        f"decided by `{plan.why.rule}` with threshold {plan.why.threshold}, then checked by training.",
    )
    page.text("## The data\n\nEach client's training samples by class.")
    _add(page, out, "partition", figure_of(plots.partition(task.data.class_counts())), "Who holds what.")

    page.text(
        f"## What the layers look like\n\nEvery client trains all layers for {_epochs(config)} from the same start."
    )
    for name, draw in album(report.frame).items():
        caption = CAPTIONS.get(name, "CKA between all pairs of clients, layer by layer; 1 is the same representation.")
        _add(page, out, name, draw(), caption)
    missing = report.frame[report.frame["status"] != "ok"]
    if len(missing):
        page.table(missing[["metric", "variant", "client", "layer", "status"]], "Values that could not be computed.")

    page.text("## The decision")
    _add(page, out, "plan", figure_of(plots.plan(plan)), "Federated and local layers, and where each client would cut.")
    others = [(layer, listing(grouped)) for layer, grouped in _inverted(plan.why.alternatives).items()]
    page.table(
        pd.DataFrame(others, columns=["last federated layer", "thresholds and rules"]),
        "What the same measurement would decide under other thresholds and rules.",
    )
    if decisions:
        by_layer = [(last, listing(map(str, of))) for last, of in _inverted(decisions).items()]
        page.table(
            pd.DataFrame(by_layer, columns=["last federated layer", "seeds"]),
            "What each seed's own PLayer-FL run decided, with its own splits, initial weights and batches.",
        )

    page.text("## What it is worth")
    seeds = sorted(result.scores["seed"].unique())
    page.text(
        f"{len(seeds)} seeds, {config.rounds} rounds; PLayer-FL and its variants decide in each seed for themselves."
    )
    page.text(verdict(result))
    for name, figure in of_comparison(result).items():
        _add(page, out, name, figure, _COMPARISON_CAPTIONS[name])
    page.table(pretty(result.table), result.legend)

    facts = (
        *([f"command: `{command}`"] if command else []),
        f"training: {config.rounds} rounds, local epochs {config.epochs}, batch {config.batch}, {config.optimizer}, "
        f"lr {config.lr}, {config.loss}",
        f"seeds: {', '.join(map(str, seeds))}",
        f"fedlayers {__version__}; data `{task.data.digest[:16]}`, plan `{plan.digest[:16]}`",
        "beside this page: `rows.jsonl` (the measurement), `plan.json`, `comparison/` (all runs, their rows and table)",
    )
    page.text("## How it was made")
    page.text("\n".join(f"- {line}" for line in facts))
    path = out / "report.html"
    page.write(path)
    return path


_COMPARISON_CAPTIONS = {
    "comparison": "Macro-F1 of each algorithm's final model, combined over clients by training samples; mean and 95 % "
    "interval over seeds.",
    "clients": "The same score client by client.",
    "learning": "Macro-F1 over the rounds; an algorithm that adapts to the clients only at the end has one point.",
}


def _inverted(choices: Mapping[Any, str]) -> dict[str, list[Any]]:
    """For each choice the keys (seeds, thresholds) that lead to it."""
    keys: dict[str, list[Any]] = {}
    for key, choice in choices.items():
        keys.setdefault(choice, []).append(key)
    return keys


def verdict(result: Comparison, reference: str = "playerfl") -> str:
    """What the scores show, in words: paired differences from the reference, and Friedman's test."""
    if reference not in set(result.table["algorithm"]):
        reference = str(result.table.sort_values("macro_f1").iloc[-1]["algorithm"])
    parts = []
    for line in result.differences(reference).itertuples():
        points = f"{100 * line.value:+.1f} points"
        if pd.isna(line.low):
            parts.append(f"- `{line.algorithm}`: {points} of macro-F1; one seed supports no interval")
            continue
        sign = "higher than" if line.low > 0 else "lower than" if line.high < 0 else "not told apart from"
        parts.append(
            f"- `{line.algorithm}`: {points} of macro-F1 [{100 * line.low:+.1f}, {100 * line.high:+.1f}], {sign} it"
        )
    test = result.friedman
    friedman = (
        f"Friedman test over {test.n_blocks} seeds: p = {test.p_value:.2g}."
        if test.status == "ok"
        else f"No Friedman test: {test.status}."
    )
    text = f"Differences from `{reference}`, paired by seed, with their 95 % intervals:\n\n" + "\n".join(parts)
    return f"{text}\n\n{friedman} Seeds share the data, so this speaks of this dataset only."


def _add(page: Page, out: Path, name: str, figure: Figure, caption: str) -> None:
    page.figure(figure, caption)
    save(figure, out / f"{name}.png")
