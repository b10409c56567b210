"""One picture of each diagnostic, from real data, with the command that makes it: the page ``gallery.md``.

Measuring and drawing never meet. :func:`measured` stores rows and tables. :func:`redraw` makes the pictures and the
page from them alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from diagnostics import measure, plots
from diagnostics.decide import select
from diagnostics.metrics.base import METRICS
from diagnostics.plots.page import album, figure_of
from diagnostics.representation import embedding
from fedlayers.studies.compare import compare
from fedlayers.studies.comparison import Comparison
from fedlayers.studies.regret import regret
from figures import items, packing, training
from figures.drawing import save_png
from figures.fedpft import mismatch
from fl_core import __version__, runner
from fl_core.config import RunConfig
from fl_core.display import csv_bytes
from fl_core.errors import UsageError, listing
from fl_core.plan import LayerPlan
from fl_core.progress import progress_bar

NAME, ROWS = "gallery", f"rows{packing.SUFFIX}"
BUDGET = "about 4 minutes on one core"
PAGE = items.HERE / "gallery.md"
DPI = 110
ROUNDED = "%.5g"

IMAGES = RunConfig(
    dataset="fashion_mnist",
    model="scheduling_cnn",
    clients=4,
    alpha=0.3,
    max_samples=2000,
    epochs=2,
    batch_size=32,
)
TABLES = RunConfig(dataset="heart")
TRAINED = TABLES.with_keys(keep_optimizer=False)
"""Of the runs of several rounds: each begins with a new optimiser."""
SCALES = RunConfig(
    dataset="fashion_mnist",
    model="timm:resnet18",
    clients=3,
    alpha=0.3,
    max_samples=600,
    epochs=2,
    batch_size=32,
)
CONFIGS = {"images": IMAGES, "tables": TABLES, "scales": SCALES}
WHERE = {"hessian_spectrum": "tables", "bn_scale": "scales"}
"""Metrics that are not measured on the images: their cost there, and normalisations, which that network has not."""
AFTER = {"bn_scale": "weight_magnitude"}
"""Where a metric of other data stands on the page: after another one that reads the weights alone."""
WHOLE = "layer_cost"
"""The metric that is drawn in all its variants, each of which has a unit."""
RULES, REGRET_SEEDS, REGRET_ROUNDS = (
    ("sensitivity_ratio", "largest_jump", "change_point"),
    3,
    10,
)
ALGORITHMS, SEEDS = ("local", "fedavg", "fedper", "playerfl"), 5


@dataclass(frozen=True)
class Stored:
    """The stored data of the gallery: rows of metrics, tables by name, and a plan."""

    header: Mapping[str, Any]
    frame: pd.DataFrame
    tables: Mapping[str, pd.DataFrame]
    plan: LayerPlan

    @property
    def metrics(self) -> list[str]:
        """The registered metrics with stored rows, in the order of the rows."""
        names = [str(name) for name in self.frame["metric"].unique() if name in METRICS]
        for name, before in AFTER.items():
            if {name, before} <= set(names):
                names.remove(name)
                names.insert(names.index(before) + 1, name)
        return names

    @property
    def without_rows(self) -> str:
        """A line on registered metrics without rows, and the command that measures them; empty if all have rows."""
        names = sorted(set(METRICS) - set(self.metrics))
        return (
            f"no rows yet: {listing(names)}; measure with: python -m figures {NAME} --train"
            if names
            else ""
        )


@dataclass(frozen=True)
class Entry:
    """One picture of the gallery.

    Attributes:
        name: of the picture's file.
        says: what it shows, which direction is which, and the unit.
        command: what makes such a picture.
        metric: that it needs rows of; empty where it is drawn from a table or a plan.
    """

    name: str
    says: str
    command: str
    draw: Callable[[Stored], Figure]
    metric: str = ""


# --- rows and tables -------------------------------------------------------------------------------------------


def folder(out: Path | None = None) -> Path:
    """The folder of stored rows and tables."""
    return items.ROWS / NAME if out is None else out / NAME


def measured(
    to: Path, *, data_root: str | None = None, command: str = "", progress: bool = True
) -> float:
    """Make the runs, measure, and store rows and tables in ``to``; returns the seconds taken.

    Raises:
        UsageError: data that are not there; RunError: a run failed.
    """
    if not to.parent.is_dir():
        raise UsageError(f"folder {to.parent} must exist; got none. Make it first.")
    began = time.perf_counter()
    tasks = {
        name: runner.assemble(
            config.with_keys(
                data_root=data_root
                if config.data.dataset != TABLES.data.dataset
                else None,
            )
        )
        for name, config in CONFIGS.items()
    }
    task, tables, parts = tasks["images"], {}, []
    with progress_bar(7, NAME, "step", shown=progress) as bar:
        for name, each in tasks.items():
            bar.set_postfix_str(f"metrics of {name}")
            wanted = [
                metric for metric in METRICS if WHERE.get(metric, "images") == name
            ]
            report = measure.diagnose_task(each, wanted, progress=False)
            parts.append(_drawn(report.frame).assign(run=name))
            if name == "images":
                plan = select.select(
                    report, "sensitivity_ratio", threshold=1.2, variant="training"
                )
            bar.update()
        bar.set_postfix_str("features")
        models, _ = runner.train_first_round(task, measure.instruments().observers)
        train = {c.name: (c.train.x, c.train.y) for c in task.data.clients}
        test = {c.name: (c.test.x, c.test.y) for c in task.data.clients}
        counts = task.data.class_counts()
        tables["tsne"] = embedding.tsne(
            models, test, samples=400, classes=list(map(str, counts.columns))
        )
        bar.update()
        parts.append(
            mismatch.mismatch(models, train, test, epochs=30).assign(
                run="images", seed=task.config.execution.seed
            )
        )
        tables["partition"] = counts.rename_axis("client").reset_index()
        bar.update()
        with tempfile.TemporaryDirectory() as scratch:
            bar.set_postfix_str("regret")
            config = TRAINED.with_keys(algorithm="fedper", rounds=REGRET_ROUNDS)
            judged = regret(
                config,
                RULES,
                range(REGRET_SEEDS),
                Path(scratch) / "regret",
                progress=False,
            )
            tables["cuts"], tables["decisions"] = judged.scores, judged.decisions
            bar.update()
            bar.set_postfix_str("comparison")
            instruments = measure.instruments()
            result = compare(
                TRAINED,
                ALGORITHMS,
                range(SEEDS),
                Path(scratch) / "compare",
                instruments=instruments,
                progress=False,
            )
            tables["comparison"] = _scores(result)
            bar.update()
    seconds = time.perf_counter() - began
    header = {
        "item": NAME,
        "version": __version__,
        "command": command,
        "seconds": round(seconds, 1),
        "perplexity": tables["tsne"].attrs["perplexity"],
        "runs": {name: training.about(each) for name, each in tasks.items()},
    }
    to.mkdir(exist_ok=True)
    packing.write(to / ROWS, [(header, pd.concat(parts, ignore_index=True))])
    plan.save(to / "plan.json")
    for name, table in tables.items():
        (to / f"{name}.csv").write_bytes(csv_bytes(table, float_format=ROUNDED))
    return seconds


def _drawn(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows to draw: the variant that the album shows of each metric."""
    parts = []
    for name, part in frame.groupby("metric", sort=False):
        if name == "hessian_spectrum" or name == WHOLE:
            parts.append(part)
        else:
            variants = set(part["variant"])
            shown = "training" if "training" in variants else METRICS[str(name)].variant
            parts.append(part[part["variant"] == shown])
    return pd.concat(parts)


def _scores(result: Comparison) -> pd.DataFrame:
    table = result.table.rename(
        columns={"macro_f1": "value", "macro_f1_low": "low", "macro_f1_high": "high"}
    )
    return table.assign(n=table["seeds"])[["algorithm", "value", "low", "high", "n"]]


# --- the pictures ----------------------------------------------------------------------------------------------


def flags(config: RunConfig) -> str:
    """The flags of a configuration that differ from the defaults."""
    changed = {
        key: value
        for key, value in config.flat().items()
        if value != RunConfig().value(key)
    }
    changed = {"dataset": config.data.dataset, **changed}
    pairs = (
        (name, value) for name, value in changed.items() if not isinstance(value, dict)
    )
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in pairs)


def _diagnose(metric: str) -> str:
    return f"fedlayers diagnose {flags(CONFIGS[WHERE.get(metric, 'images')])} --metrics {metric}"


def _plotted(metric: str, picture: str | None = None) -> Callable[[Stored], Figure]:
    """The album's picture of a metric, or an extra one."""

    def draw(stored: Stored) -> Figure:
        return album(stored.frame[stored.frame["metric"] == metric], [metric])[
            picture or metric
        ]()

    return draw


def _says(metric: str, stored: Stored) -> str:
    """A sentence on a metric: meaning, direction and unit."""
    about = METRICS[metric]
    part = stored.frame[stored.frame["metric"] == metric]
    if metric != WHOLE:
        part = part[part["variant"].isin([about.variant, "training"])]
    variants = {
        str(unit): names
        for unit, names in part.groupby("unit", sort=False)["variant"].unique().items()
    }
    units = [
        f"{unit.replace('^2', '²') or 'none'} ({listing(names)})"
        for unit, names in variants.items()
    ]
    if len(variants) == 1:
        units = [unit.replace("^2", "²") or "none" for unit in variants]
    drawn: list[str] = []
    if about.pairs:
        drawn = [
            f"The curve is each client's mean{'' if about.distance else ' of 1 − value'} over the others"
        ]
    parts = (
        about.description,
        *about.direction.split("; "),
        f"unit: {', '.join(units)}",
        *drawn,
    )
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts)


def entries(stored: Stored) -> list[Entry]:
    """The pictures of the gallery: one of every metric with rows, and further ones."""
    pictures = [
        Entry(
            name,
            _says(name, stored),
            f"{_diagnose(name)}\nfedlayers plot diagnosis --metrics {name}",
            _plotted(name),
            name,
        )
        for name in stored.metrics
    ]
    tables, start = stored.tables, flags(TRAINED)
    pictures += [
        Entry(
            "cka_matrices",
            "The same CKA pair by pair: a matrix of clients for each layer. 1 (bright) = same, 0 = unrelated.",
            f"{_diagnose('cka')}\nfedlayers plot diagnosis --metrics cka",
            _plotted("cka", "cka_matrices"),
            "cka",
        ),
        Entry(
            "costs",
            "Each layer's share of the bytes that are sent, the FLOPs and the memory. A plan that shares the first "
            "layers sends the part left of its border.",
            f"{_diagnose('layer_cost')}\nfedlayers plot diagnosis --metrics layer_cost",
            _plotted("layer_cost", "costs"),
            "layer_cost",
        ),
        Entry(
            "partition",
            "Training samples of each client by class.",
            "task = runner.assemble(config)\nplots.partition(task.data.class_counts())",
            lambda s: figure_of(
                plots.partition(tables["partition"].set_index("client"))
            ),
        ),
        Entry(
            "tsne",
            "The input of the classifier for all clients' test samples, in a plane. Good = classes apart and clients "
            "mixed. The axes have no unit.",
            "models, _ = runner.train_first_round(task, measure.instruments().observers)\n"
            "plots.tsne(embedding.tsne(models, test, samples=400))",
            lambda s: figure_of(plots.tsne(tables["tsne"])),
        ),
        Entry(
            "mismatch",
            "FedPFT's Origin, Probe and Match accuracy on each client's test samples. From 0 to 1, higher = better. "
            "The gap between Origin and the others is the classifier's loss.",
            "mismatch.picture(mismatch.mismatch(models, train, test, epochs=30))",
            lambda s: figure_of(mismatch.picture(s.frame)),
        ),
        Entry(
            "plan",
            "The decision by federation sensitivity S. Layers are federated up to the first ratio of neighbours "
            "above the threshold (bold). Votes show each client's own choice. No unit.",
            f"{_diagnose('federation_sensitivity')}\n"
            "fedlayers select diagnosis --rule sensitivity_ratio --threshold 1.2\nfedlayers plot plan.json",
            lambda s: figure_of(plots.plan(s.plan)),
        ),
        Entry(
            "regret",
            "The validation score of every cut, and the cuts that rules choose. From 0 to 1, higher = better. The "
            "gap between star and choice is a rule's regret.",
            f"fedlayers regret {start} --rules {' '.join(RULES)} --seeds {REGRET_SEEDS} --rounds {REGRET_ROUNDS}",
            lambda s: figure_of(plots.regret(tables["cuts"], tables["decisions"])),
        ),
        Entry(
            "comparison",
            "Test macro-F1 of algorithms after the last round. From 0 to 1, higher = better. Bars show the mean and "
            "95 % interval over the seeds.",
            f"fedlayers compare {start} --algorithms {' '.join(ALGORITHMS)} --seeds {SEEDS}",
            lambda s: figure_of(plots.comparison(tables["comparison"], "macro_f1")),
        ),
    ]
    return [picture for picture in pictures if picture.metric in ("", *stored.metrics)]


def load(at: Path) -> Stored:
    """Read the data that :func:`measured` stored.

    Raises:
        UsageError: it is not there, or the rows are another item's; CorruptError: the rows are damaged.
    """
    if not (at / ROWS).is_file():
        raise UsageError(
            f"The gallery has no rows at {at}. Make them with --train ({BUDGET})."
        )
    ((header, frame),) = packing.read(at / ROWS)
    if header.get("item") != NAME:
        raise UsageError(
            f"rows at {at} must be of the gallery; got rows of {header.get('item')!r}."
        )
    tables = {
        path.stem: pd.read_csv(path, keep_default_na=True)
        for path in sorted(at.glob("*.csv"))
    }
    tables["tsne"]["class"] = tables["tsne"]["class"].astype(str)
    tables["tsne"].attrs["perplexity"] = header["perplexity"]
    tables["cuts"]["last"] = tables["cuts"]["last"].fillna(
        ""
    )  # of the cut that shares nothing
    tables["decisions"]["status"] = tables["decisions"]["status"].fillna("")
    return Stored(header, frame, tables, LayerPlan.load(at / "plan.json"))


def redraw(at: Path, out: Path | None = None) -> Path:
    """Draw the stored rows and tables as pictures, and write the page that shows them; returns the page.

    Raises:
        UsageError, CorruptError: as of :func:`load`.
    """
    stored = load(at)
    page, pictures = (
        (PAGE, items.PICTURES / NAME)
        if out is None
        else (out / "gallery.md", out / NAME)
    )
    pictures.mkdir(exist_ok=True)
    shown = entries(stored)
    for entry in shown:
        figure = entry.draw(stored)
        save_png(figure, pictures / f"{entry.name}.png", DPI, bbox_inches="tight")
        plt.close(figure)
    page.write_text(
        _page(shown, stored, str(pictures.relative_to(page.parent))), encoding="utf-8"
    )
    return page


def _page(shown: list[Entry], stored: Stored, where: str) -> str:
    lead = (
        "# Gallery\n\nOne picture of each diagnostic, from real data. Most show Fashion-MNIST with four clients and "
        "their models after the first local training. The spectrum, regret and comparison use the four hospitals of "
        "the heart-disease data. The scales of normalisations are those of a ResNet-18. Below each picture are its "
        "meaning and the commands that make it. `python -m figures gallery` draws all pictures again from the "
        f"stored rows. With `--train` it measures first ({BUDGET}). That needs Fashion-MNIST below "
        "`FEDLAYERS_DATA_ROOT`."
    )
    parts = [lead]
    for entry in shown:
        kind = "" if entry.command.startswith("fedlayers") else "python"
        title = entry.name.replace("_", " ")
        parts.append(
            f"## {title}\n\n![{title}]({where}/{entry.name}.png)\n\n{entry.says}\n\n```{kind}\n{entry.command}\n```"
        )
    return "\n\n".join(parts) + "\n"
