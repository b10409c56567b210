"""One picture of each diagnostic, from real data, with the command that makes it: the page ``gallery.md``.

Its rows are those of an ordinary study. :func:`redraw` makes the pictures and the page from them alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from diagnostics import measure, plots, select
from diagnostics.metrics.base import METRICS
from diagnostics.plots.page import album, figure_of
from diagnostics.representation.embedding import pool
from figures import conclusions, items
from figures.conclusions import conclusion
from figures.drawing import save_png
from figures.planes import placed, plane
from figures.recipe import held, held_by, labels
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.errors import UsageError, listing
from fl_core.run import runner

NAME = "gallery"
BUDGET = "about 4 minutes on one core"
PAGE = items.HERE / "gallery.md"
DPI = 110
TITLE = 60
"""Characters of a line of a picture's title."""

IMAGES: dict[str, Any] = {
    "dataset": "fashion_mnist", "clients": 4, "alpha": 0.3, "max_samples": 2000, "model": "scheduling_cnn",
    "epochs": 2, "batch_size": 32,
}  # fmt: skip
SCALES = {**IMAGES, "clients": 3, "max_samples": 600, "model": "timm:resnet18"}
KEYS = {"images": IMAGES, "tables": {"dataset": "heart"}, "scales": SCALES}
"""The configuration of each run, by key, as its command has it."""
RUNS = {run: RunConfig(**keys) for run, keys in KEYS.items()}
WHERE = {"ggn_trace": "tables", "hessian_spectrum": "tables", "bn_scale": "scales"}
"""Metrics that are not measured on the images: for their cost, as equal to another there, or for want of norms."""
WHOLE = "layer_cost"
"""The metric that is drawn in all its variants, each of which has a unit."""


class Entry(NamedTuple):
    """One picture of the gallery.

    Attributes:
        name: name of the picture's file.
        says: what it shows, which direction is which, and the unit.
        concludes: what to conclude from it, with the name of a layer or a client.
        command: what makes such a picture.
    """

    name: str
    says: str
    concludes: str
    command: str
    draw: Callable[[], Figure]


# --- rows ------------------------------------------------------------------------------------------------------


def metrics_of(run: str) -> list[str]:
    """Return the metrics that are measured in a run. Those of the shared model need more rounds than one."""
    return [
        metric_name
        for metric_name in METRICS
        if not METRICS[metric_name].shared and WHERE.get(metric_name, "images") == run
    ]


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record the metrics of a run, and of the images each client's classes and the features in a plane."""
    report = measure.diagnose_task(task, metrics_of(run), progress=False)
    frames = [_drawn(report.frame)]
    if run == "images":
        models, _ = runner.train_first_round(task, measure.instruments().observers)
        test_data = {client.name: client.test for client in task.data.clients}
        seed, label_columns = task.config.execution.seed, labels(task)
        pooled = pool(
            models, test_data, classes=task.data.classes, samples=400, seed=seed
        )
        count_rows = held(task.data.class_counts(), label_columns)
        frames.append(rows.frame([*count_rows, *placed(pooled, seed, label_columns)]))
    return pd.concat(frames, ignore_index=True)


def _drawn(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows to draw: the variant that the album shows of each metric."""
    frames = []
    for metric_name, metric_rows in frame.groupby("metric", sort=False):
        if metric_name in ("hessian_spectrum", WHOLE):
            frames.append(metric_rows)
        else:
            variants = set(metric_rows["variant"])
            shown_variant = (
                "training"
                if "training" in variants
                else METRICS[str(metric_name)].variant
            )
            frames.append(metric_rows[metric_rows["variant"] == shown_variant])
    return pd.concat(frames)


# --- the pictures ----------------------------------------------------------------------------------------------


def _diagnose(metric_name: str) -> str:
    config_keys = KEYS[WHERE.get(metric_name, "images")]
    flag_names = (config_key.replace("_", "-") for config_key in config_keys)
    flags = [
        f"--{flag} {value}"
        for flag, value in zip(flag_names, config_keys.values(), strict=True)
    ]
    flags_text = " ".join(flags)
    return f"fedlayers diagnose {flags_text} --metrics {metric_name}"


def _says(metric_name: str, frame: pd.DataFrame) -> str:
    """A sentence on a metric: meaning, direction and unit."""
    definition = METRICS[metric_name]
    units = frame.loc[frame["metric"] == metric_name, "unit"].unique()
    unit_names = [str(unit).replace("^2", "²") or "none" for unit in units]
    units_text = ", ".join(unit_names)
    sentences = [
        definition.description,
        *definition.direction.split("; "),
        f"unit: {units_text}",
    ]
    if definition.pairs:
        inverse_text = " of 1 − value"
        if definition.distance:
            inverse_text = ""
        sentences.append(
            f"The curve is each client's mean{inverse_text} over the others"
        )
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)


def entries(header: Mapping[str, Any], frame: pd.DataFrame) -> list[Entry]:
    """Return the pictures of the gallery: one of every metric, and further ones.

    Raises:
        UsageError: a metric has no rows.
    """
    metrics = set(chain.from_iterable(map(metrics_of, RUNS)))
    if missing_metrics := metrics - set(frame["metric"]):
        missing_text = listing(sorted(missing_metrics))
        raise UsageError(
            f"{NAME} must have rows of {missing_text}; got none. Make them: {STUDY.command}"
        )

    def plotted(metric_name: str, picture: str) -> Figure:
        return album(frame[frame["metric"] == metric_name], [metric_name])[picture]()

    def of_metric(metric_name: str, picture: str, says: str, concludes: str) -> Entry:
        diagnose_command = _diagnose(metric_name)
        command = (
            f"{diagnose_command}\nfedlayers plot diagnosis --metrics {metric_name}"
        )
        return Entry(
            picture, says, concludes, command, partial(plotted, metric_name, picture)
        )

    image_rows = frame[frame["run"] == "images"]
    plan = select.select(
        (header["runs"]["images"], image_rows),
        threshold=1.2,
        variant="training",
    )
    diagnose_command = _diagnose("federation_sensitivity")
    return [
        *(
            of_metric(
                metric_name,
                metric_name,
                _says(metric_name, frame),
                conclusion(metric_name, frame),
            )
            for metric_name in chain.from_iterable(map(metrics_of, RUNS))
        ),
        of_metric(
            "cka",
            "cka_matrices",
            "The same CKA pair by pair: a matrix of clients for each layer. 1 (bright) = same, 0 = unrelated.",
            conclusions.of_pairs(frame),
        ),
        of_metric(
            "layer_cost",
            "costs",
            "Each layer's share of the bytes that are sent, the FLOPs and the memory. A plan that shares the first "
            "layers sends the part left of its border.",
            conclusions.of_costs(frame),
        ),
        Entry(
            "partition",
            "Training samples of each client by class.",
            conclusions.of_partition(held_by(frame)),
            "task = runner.assemble(config)\nplots.partition(task.data.class_counts())",
            lambda: figure_of(plots.partition(held_by(frame))),
        ),
        Entry(
            "tsne",
            "The input of the classifier for all clients' test samples, in a plane. Good = classes apart and clients "
            "mixed. The axes have no unit.",
            conclusions.of_plane(plane(frame, "images")),
            "models, _ = runner.train_first_round(task, measure.instruments().observers)\n"
            "plots.tsne(measure.tsne(models, test, samples=400))",
            lambda: figure_of(plots.tsne(plane(frame, "images"))),
        ),
        Entry(
            "plan",
            "The decision by federation sensitivity S. Layers are federated up to the first ratio of neighbours "
            "above the threshold (bold). Votes show each client's own choice. No unit.",
            conclusions.of_plan(plan),
            f"{diagnose_command}\n"
            "fedlayers select diagnosis --rule sensitivity_ratio --threshold 1.2\nfedlayers plot plan.json",
            lambda: figure_of(plots.plan(plan)),
        ),
    ]


def redraw(path: Path, out: Path | None = None) -> Path:
    """Draw the stored rows as pictures, and write the page that shows them; return the page.

    Raises:
        UsageError, CorruptError: as for :meth:`figures.items.Item.read` and :func:`entries`.
    """
    if out is None:
        page, pictures = (PAGE, items.PICTURES / NAME)
    else:
        page, pictures = (out / "gallery.md", out / NAME)
    shown_entries = entries(*STUDY.read(path))
    pictures.mkdir(exist_ok=True)
    for entry in shown_entries:
        figure = entry.draw()
        title = textwrap.fill(entry.concludes, TITLE)
        figure.text(0.5, 1.02, title, ha="center", va="bottom", fontsize=9)
        save_png(figure, pictures / f"{entry.name}.png", DPI, bbox_inches="tight")
        plt.close(figure)
    page.write_text(
        _page(shown_entries, str(pictures.relative_to(page.parent))), encoding="utf-8"
    )
    return page


def _page(gallery_entries: list[Entry], folder_name: str) -> str:
    lead = (
        "# Gallery\n\nOne picture of each diagnostic, from real data. Most show Fashion-MNIST with four clients and "
        "their models after the first local training. Spectrum and Gauss-Newton trace use the four hospitals of the "
        "heart-disease data. The scales of normalisations are those of a ResNet-18. Below each picture are its "
        "meaning and the commands that make it. `python -m figures gallery` draws all pictures again from the "
        f"stored rows. With `--train` it measures first ({BUDGET}). That needs Fashion-MNIST below "
        "`FEDLAYERS_DATA_ROOT`."
    )
    sections = [lead]
    for entry in gallery_entries:
        language = "python"
        if entry.command.startswith("fedlayers"):
            language = ""
        title = entry.name.replace("_", " ")
        picture = f"![{title}]({folder_name}/{entry.name}.png)"
        sentences = f"**{entry.concludes}** {entry.says}"
        code_block = f"```{language}\n{entry.command}\n```"
        sections.append(f"## {title}\n\n{picture}\n\n{sentences}\n\n{code_block}")
    return "\n\n".join(sections) + "\n"


STUDY = items.register(items.Item(
    NAME, "A picture of each diagnostic", RUNS, seeds=1, budget=BUDGET, measure=_measure,
))  # fmt: skip
