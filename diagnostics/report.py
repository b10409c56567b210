"""The report of a diagnosis, with its rows and header, and a plan in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd

from fl_core import rows as schema
from fl_core.display import MANY, Displayed, Summary, in_order, printable
from fl_core.errors import UsageError, as_list, check_known, listing, plural, read_as
from fl_core.plan import Layer, LayerPlan, labels_of

from . import plots
from .curve import both_ways
from .metrics import facts_of
from .null import NULLS, of_null, split_resamples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Report(Displayed):
    """The result of a diagnosis: rows of the common schema, and a header that describes the measurement.

    >>> import fedlayers as fl, torch
    >>> model = torch.nn.Linear(4, 3)
    >>> data = {"north": (torch.randn(20, 4), torch.arange(20) % 3)}
    >>> report = fl.diagnose(model, data, ["weight_magnitude"], progress=False)
    >>> report.frame[["client", "metric", "variant", "status"]].values.tolist()[0]
    ['north', 'weight_magnitude', 'mean_abs', 'ok']
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> report.write(f"{folder.name}/rows.jsonl")
    >>> Report.read(f"{folder.name}/rows.jsonl").values("weight_magnitude").equals(report.values("weight_magnitude"))
    True

    Attributes:
        table: all rows, also those of nulls and of resampled batches.
        header: the layers, the options, and digests of data and models, as JSON.
    """

    table: pd.DataFrame
    header: dict[str, Any]

    def __post_init__(self) -> None:
        self.table.attrs["labels"] = self.labels  # for pictures of a frame alone

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Return the rows of the measurement, without those of nulls and resampled batches."""
        return split_resamples(self.table)[0].reset_index(drop=True)

    @cached_property
    def resamples(self) -> pd.DataFrame:
        """Return the rows of resampled batches; empty without any.

        See :mod:`diagnostics.null`.
        """
        return split_resamples(self.table)[1].reset_index(drop=True)

    @cached_property
    def nulls(self) -> pd.DataFrame:
        """Return the rows of nulls; empty without any.

        Their column ``model`` names the null and its draw (:mod:`diagnostics.null`).
        """
        return self.table[of_null(self.table)].reset_index(drop=True)

    def with_rows(self, *tables: pd.DataFrame) -> Report:
        """Return a report with further rows. This one stays as it is."""
        return replace(self, table=pd.concat([self.table, *tables], ignore_index=True))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return all layers of the model with their tensors, from input to output."""
        return read_as(tuple[Layer, ...], self.header["layers"], "a report")

    @property
    def labels(self) -> dict[str, str]:
        """Return the names of the layers as people read them, by their exact names.

        >>> import fedlayers as fl, torch
        >>> data = {"north": (torch.randn(20, 4), torch.arange(20) % 3)}
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3))
        >>> report = fl.diagnose(model, data, ["weight_magnitude"], progress=False)
        >>> report.labels, report.text(["weight_magnitude"]).splitlines()[-1].split()[:2]
        ({'0': '0 Linear'}, ['0', 'Linear'])
        """
        return labels_of(self.layers)

    def values(self, metric: str, variant: str | None = None) -> pd.DataFrame:
        """Return the values of one metric, layers x clients.

        A missing value is NaN, and the frame's status gives the reason. For a metric of pairs, a client's value is its
        mean over the other clients. Of several rounds the last counts.

        Args:
            metric: name of the metric.
            variant: name of the variant. Default: the metric's first that was measured.

        Raises:
            UsageError: a metric or variant was not measured, or a metric of pairs has no pair.
        """
        selected = self._rows(metric)
        present_variants = list(dict.fromkeys(selected["variant"]))
        if variant is None:
            variant = _usual(metric, present_variants)
        check_known(f"variant of {metric}", variant, present_variants)
        variant_rows = selected[selected["variant"] == variant]
        selected = variant_rows[variant_rows["client"] != ""]
        if selected.empty:
            raise UsageError(
                f"no {metric} of single clients (status: {listing(variant_rows['status'].unique())})"
            )
        selected = both_ways(selected)
        table = (
            selected.groupby(["layer", "client"], sort=False)["value"]
            .mean(skipna=False)
            .unstack()
        )
        layer_order = [name for name in self.labels if name in table.index]
        return table.reindex(
            index=layer_order, columns=list(dict.fromkeys(selected["client"]))
        )

    def plot(self, metric: str, ax: Axes | None = None) -> Axes:
        """Draw one metric over the layers, and return its Axes.

        Nulls are drawn, too. Of several rounds the last counts.

        Args:
            metric: name of the metric.
            ax: the Axes to draw on. Default: those of a new figure.

        Raises:
            UsageError: the report has no such metric, or several values for one place.
        """
        self._rows(metric)
        tables = [last_round(table) for table in (self.frame, self.nulls) if len(table)]
        return plots.metric(pd.concat(tables, ignore_index=True), metric, ax)

    def write(self, path: Path | str) -> None:
        """Write header and all rows to a file of JSON lines."""
        schema.write(Path(path), self.header, schema.records(self.table))

    @classmethod
    def read(cls, path: Path | str) -> Report:
        """Read a report from a file that :meth:`write` wrote.

        Raises:
            UsageError: the file does not exist or is not a diagnosis.
            CorruptError: a line is damaged.
        """
        header, frame = schema.read(Path(path))
        if "layers" not in header:
            raise UsageError(
                f"{path} must be a diagnosis; got rows without layers, such as a run's scores. "
                "Measure the run's layers first: fedlayers diagnose RUN."
            )
        return cls(frame, header)

    def shown_variants(self, metric: str) -> list[str]:
        """Return the variants of a metric to show first: the default, and the ones that decisions read.

        If options made other variants than the default, the first of them is shown.
        """
        variants = list(self._rows(metric)["variant"].unique())
        preferred_variants = (
            _usual(metric, variants),
            facts_of(metric).default_variant,
        )
        return [name for name in dict.fromkeys(preferred_variants) if name in variants]

    def text(self, metrics: Sequence[str]) -> str:
        """Return the measured values of some metrics as text.

        These are the clients' own values, or their medians for many clients or more
        than two variants. Of several rounds the last counts.

        Raises:
            UsageError: the report has no such metric.
        """
        variants: list[tuple[str, str]] = []
        for metric in metrics:
            variants += [(metric, variant) for variant in self.shown_variants(metric)]
        clients = self.frame["client"].replace("", None).nunique()
        if len(variants) > 2 or clients > MANY:
            return self._medians(variants)
        blocks = []
        for metric, variant in variants:
            title = ", ".join(filter(None, [metric, variant]))
            if direction := facts_of(metric).direction:
                title += f" ({direction})"
            rows = self._rows(metric, variant)
            if split := " and ".join(filter(None, rows["split"].unique())):
                title += f", {split} split"
            table = f"no value: {listing(rows['status'].unique())}"
            if rows["client"].any():
                values = self.values(metric, variant)
                values = values[in_order(values.columns)]
                table = _numbers(values.rename(columns=printable, index=self.labels))
            blocks.append(f"{title}\n{table}")
        return "\n\n".join(blocks)

    def _medians(self, variants: Sequence[tuple[str, str]]) -> str:
        """Format medians over clients as a table of layers by metrics, with a legend.

        Args:
            variants: pairs of a metric and its variant. The first ones that fit are
                shown.
        """
        with_clients = [pair for pair in variants if self._rows(*pair)["client"].any()]
        columns = {
            pair: self.values(*pair).median(axis=1) for pair in with_clients[:MANY]
        }
        table = pd.DataFrame(columns)
        names = [name for name in self.labels if name in table.index]
        table = table.reindex(names).rename(index=self.labels)
        notes = ["medians over the clients (fedlayers plot shows each client)"]
        if absent_metrics := dict.fromkeys(
            metric for metric, variant in variants if (metric, variant) not in columns
        ):
            notes.append(f"not shown: {listing(absent_metrics)}")
        numbers = _numbers(table)
        remarks = "; ".join(notes)
        return f"{numbers}\n\n{remarks}"

    def _rows(self, metric: str, variant: str | None = None) -> pd.DataFrame:
        check_known(
            "metric of this report", metric, dict.fromkeys(self.frame["metric"])
        )
        selected = last_round(self.frame[self.frame["metric"] == metric])
        if variant is None:
            return selected
        return selected[selected["variant"] == variant]

    def of_rounds(self, rounds: int | Sequence[int]) -> Report:
        """Return a new report with the rows of some rounds only. Rounds without rows are ignored."""
        in_rounds = self.table["round"].isin(as_list("rounds", rounds))
        return replace(self, table=self.table[in_rounds].reset_index(drop=True))

    def layer_map(self, width: float = 16.0) -> Figure:
        """Draw layers from top to bottom and rounds from left to right.

        See :func:`diagnostics.plots.layer_map`.

        Args:
            width: width of the picture in cm, 4 to 100.

        Raises:
            UsageError: the report has no metric of the map, or the width is out of
                range.
        """
        return plots.layer_map(self.header, self.table, width)

    def summary(self) -> Summary:
        """Return the mean of each metric's default variant by layer, and a conclusion.

        The mean is over clients, or over pairs. A metric that has a value of all clients
        together (client "") shows that one, which a rule reads. Of several rounds the
        last counts. The reasons for missing values are added (:meth:`reasons`).
        """
        columns = {}
        for metric in dict.fromkeys(self.frame["metric"]):
            rows = self._rows(metric)
            default_variant = _usual(metric, list(rows["variant"]))
            values = _by_layer(rows[rows["variant"] == default_variant])
            columns[f"{metric} ({default_variant})" if default_variant else metric] = (
                values
            )
        table = pd.DataFrame(columns, index=[*self.labels]).rename(index=self.labels)
        ending = "\n".join([*self.reasons(), self.conclusion()]).strip()
        lead_parts = [str(self.header.get("cross_scores") or ""), self._sentence()]
        lead = "\n".join(filter(None, lead_parts))
        return Summary.of_frame(lead, table.rename_axis("layer"), end=ending)

    def reasons(self) -> list[str]:
        """Return why metrics have no value at all, a line for each metric, and which clients have no model.

        >>> import fedlayers as fl, torch
        >>> data = {"north": (torch.randn(20, 4), torch.arange(20) % 3)}
        >>> report = fl.diagnose(torch.nn.Linear(4, 3), data, ["cka"], progress=False)
        >>> report.reasons()
        ['cka has no value: ...']
        """
        lines = []
        for metric, rows in self.frame.groupby("metric", sort=False):
            if (rows["status"] != "ok").all():
                reason = listing(rows["status"].unique(), 2)
                lines.append(f"{metric} has no value: {reason}")
        if absent_clients := self.header.get("absent"):
            names = listing(in_order(absent_clients))
            lines.append(f"without a model in this round: {names}")
        return lines

    def conclusion(self) -> str:
        """Return the conclusion in words: whether clients differ, or at which layer most, and what to do next."""
        test_rows = self.frame[self.frame["metric"] == "clients_differ"]
        results = test_rows.set_index("variant")["value"].dropna()
        if {"differ", "p"} <= {*results.index} and results.index.is_unique:
            verb = "are not shown to"
            if results["differ"]:
                verb = "are shown to"
            return (
                f"Clients {verb} differ in more than their samples (p = {results['p']:.3g}). "
                "This does not say that local layers help: fl.choose trains both."
            )
        ends = {"similarity": "low", "distance": "high"}
        pairs = self.header.get("pairs") or {}
        for metric in dict.fromkeys(self.frame["metric"]):
            end = ends.get(pairs.get(metric, ""), facts_of(metric).differs)
            rows = self._rows(metric)
            default_variant = _usual(metric, list(rows["variant"]))
            values = rows[(rows["variant"] == default_variant) & (rows["layer"] != "")]
            means = _by_layer(values).dropna()
            if not end or len(means) < 2:
                continue
            layer = str(means.idxmax() if end == "high" else means.idxmin())
            label = self.labels.get(layer, layer)
            return (
                f"By {metric}, clients differ most at {label} ({means[layer]:.3g}). "
                "This does not say that keeping it local helps: fl.choose trains both."
            )
        return "These metrics do not say at which layer clients differ: fl.choose trains plans."

    def _sentence(self) -> str:
        clients = len(
            {name for name in (*self.frame["client"], *self.frame["client_b"]) if name}
        )
        metrics = ", ".join(dict.fromkeys(self.frame["metric"]))
        missing = int((self.frame["status"] != "ok").sum())
        parts = [f"{plural(len(self.layers), 'layer')}, {plural(clients, 'client')}"]
        if "round" in self.frame and self.frame["round"].notna().any():
            parts.append(f"round {self.frame['round'].max():.0f}")
        if "loss" in self.header:
            parts.append(f"loss {self.header['loss']}")
        parts.append(f"{plural(missing, 'row')} without a value")
        differences = ", ".join(parts)
        return f"Report({metrics}; {differences})"


def _by_layer(values: pd.DataFrame) -> pd.Series[float]:
    """Return a metric's value by layer: that of all clients together (client ""), or the mean of all rows."""
    of_all = values[values["client"] == ""]
    if len(of_all):
        values = of_all
    return values.groupby("layer", sort=False)["value"].mean()


def _numbers(table: pd.DataFrame) -> str:
    return str(table.to_string(float_format="{:.4g}".format, na_rep="–"))


def last_round(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the last round; all rows if they have no round, or are all of one."""
    several_rounds = table["round"].nunique() > 1
    if several_rounds:
        return table[table["round"] == table["round"].max()]
    return table


def _usual(metric: str, present: Sequence[str]) -> str:
    """Return the default variant of a metric, out of the variants that are present.

    It is the first of the metric's own that is present, or else the first present one.
    """
    return next(
        (name for name in facts_of(metric).variants if name in present), present[0]
    )


Rows: TypeAlias = "Path | str | Report | tuple[Mapping[str, Any], pd.DataFrame]"
"""A diagnosis: its file, its report, or its header and all rows, resamples included."""


def open_diagnosis(rows: Rows) -> tuple[Mapping[str, Any], pd.DataFrame]:
    """Return header and rows of a diagnosis, read from a file if a path is given.

    Args:
        rows: a report, the path of its file, or a pair (header, table).

    Raises:
        UsageError: it is something else, such as a table without a header, or the file
            does not exist or is no rows file.
        CorruptError: a line of the file is damaged.
    """
    if isinstance(rows, (str, Path)):
        return schema.read(Path(rows))
    if isinstance(rows, tuple):
        header, table = rows
        return header, table
    if isinstance(rows, pd.DataFrame):
        raise UsageError(
            "rows must have a header with the layers; got a table alone. Pass the report or its file."
        )
    if not hasattr(rows, "header"):
        rows_type = type(rows).__name__
        raise UsageError(
            f"rows must be a report or its file; got {rows_type}. Measure it first: fl.diagnose(...)."
        )
    return rows.header, rows.table


# --- a plan in words -------------------------------------------------------------------------------------------


def explain(plan: LayerPlan, *, full: bool = False) -> str:
    """Describe a plan: its curve as a table, each client's own choice, and the decisions by other thresholds.

    The result is a text of several lines. Parts without evidence are left out.

    Args:
        plan: the plan, with its evidence.
        full: also show each client's own curve, how often the decision stays over resamples of the clients and their
            batches, the conclusion from each measured null, and the plan's cost in a round.
    """
    evidence = plan.why
    subject = ""
    if evidence.metric:
        subject = f" on {evidence.metric}"
    if evidence.variant:
        subject += f" ({evidence.variant})"
    limit = ""
    if evidence.threshold is not None:
        limit = f", threshold {evidence.threshold:g}"
    parts = [
        f"{evidence.rule}{subject}{limit}: {len(plan.shared)} of {len(plan.layers)} layers are federated",
        _table(plan),
    ]
    if evidence.race:
        parts.append("\n".join(map(printable, evidence.race)))
    if full and evidence.clients:
        parts.append("Each client's own values:\n" + _clients(plan))
    if evidence.votes:
        parts.append(
            "Last shared layer by each client's own values:\n"
            + _tally(evidence.votes, plan, "clients")
        )
    if evidence.alternatives:
        parts.append(
            "Last shared layer by another threshold:\n"
            + _tally(evidence.alternatives, plan)
        )
    if full and evidence.detail.get("stability"):
        parts.append(_stability(evidence.detail["stability"], labels_of(plan.layers)))
    if evidence.detail.get("null"):
        parts.append(in_words(evidence.detail["null"], evidence.variant, full))
    if evidence.detail.get("benchmark"):
        parts.append(evidence.detail["benchmark"])
    if full and evidence.detail.get("cost"):
        parts.append(_cost(evidence.detail["cost"], plan))
    if evidence.status != "ok":
        parts.append(f"Note: {evidence.status}")
    origin = [
        f"{title} {value}"
        for title, value in (
            ("seed", "" if evidence.seed is None else evidence.seed),
            ("data", evidence.data[:12]),
            ("checkpoint", evidence.checkpoint[:12]),
            ("version", evidence.version),
        )
        if value != ""
    ]
    if origin:
        parts.append("Measured with " + ", ".join(origin))
    return "\n\n".join(parts)


def _table(plan: LayerPlan) -> str:
    evidence, values = plan.why, dict(zip(plan.names, plan.why.values, strict=False))
    named_values = [
        (name, value) for name, value in values.items() if value is not None
    ]
    steps = {
        name: next_value / current_value
        for (name, current_value), (_, next_value) in pairwise(named_values)
        if current_value != 0
    }
    threshold = math.inf
    if evidence.rule == "sensitivity_ratio" and evidence.threshold is not None:
        threshold = evidence.threshold
    first_above = next((name for name, step in steps.items() if step > threshold), None)
    metric = facts_of(evidence.metric)
    similarity = metric.pairs and not metric.distance
    symbol = metric.look.symbol or (f"1 - {metric.name}" if similarity else "value")
    labels = labels_of(plan.layers)
    width = max(map(len, (*labels.values(), "layer")))
    lines = (
        [f"  {'layer':<{width}}  {symbol:>9}  {'next/this':>9}"] if named_values else []
    )
    value_texts = {name: f"{value:.4g}" for name, value in named_values}
    for layer in plan.layers:
        step = ""
        if layer.name in steps:
            step = f"{steps[layer.name]:.3f}"
        numbers = ""
        if named_values:
            value_text = value_texts.get(layer.name, "")
            numbers = f"  {value_text:>9}  {step:>9}"
        shared = "local"
        if layer.name in plan.shared:
            shared = "federated"
        note = ""
        if layer.is_frozen:
            note = "frozen"
        note = note if layer.used else "not in the forward pass"
        if layer.name == first_above:
            note = f"first above {threshold:g}"
        label = labels[layer.name].ljust(width)
        lines.append(f"  {label}{numbers}  {shared:<9}  {note}".rstrip())
    return "\n".join(lines)


def _tally(choices: Mapping[str, str], plan: LayerPlan, unit: str = "") -> str:
    """List which clients or thresholds choose which layer, in the order of layers.

    Args:
        choices: the chosen layer of each client or threshold.
        plan: the plan.
        unit: the word for what chooses, such as ``clients``, if each line counts them.
    """
    labels = labels_of(plan.layers)
    width = max(len(labels[choice]) for choice in choices.values())
    lines = []
    for layer in plan.layers:
        voters = [client for client, choice in choices.items() if choice == layer.name]
        if voters and unit:  # thresholds stand as they grow
            clients_text = listing(in_order(voters))
            clients = f"{len(voters)} of {len(choices)} {unit}: {clients_text}"
        else:
            clients = listing(voters)
        if voters:
            label = labels[layer.name].ljust(width)
            lines.append(f"  {label}  {clients}")
    return "\n".join(lines)


def _clients(plan: LayerPlan) -> str:
    """Format a table of layers by clients; for many clients the lowest, the median and the highest."""
    columns = {name: plan.why.clients[name] for name in in_order(plan.why.clients)}
    table = pd.DataFrame(columns, index=[*plan.by_layer()], dtype=float).dropna()
    if len(columns) > MANY:
        ends = {"lowest": 0.0, "median": 0.5, "highest": 1.0}
        table = table.quantile(list(ends.values()), axis=1, interpolation="higher").T
        table.columns = pd.Index(ends)
    table.columns.name = "layer"
    lines = table.to_string(float_format="{:.4g}".format).splitlines()
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _stability(stability: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    if stability["status"] != "ok":
        return f"Stability: {stability['status']}"
    cuts = stability["cuts"].items()
    shares = [f"{labels[name]} {share:.1%}" for name, share in cuts]
    if stability["undecided"] > 1e-9:
        shares += [f"no decision {stability['undecided']:.1%}"]
    head = f"Last shared layer over {stability['resamples']} resamples of the {stability['of']}"
    shares_text = ", ".join(shares)
    lines = [
        f"{head}:",
        f"  the same as here in {stability['agreement']:.1%}",
        f"  {shares_text}",
    ]
    missing_note = "batches were not resampled: diagnose with resamples=N, with at least 2 batches for each client"
    lines += [f"  ({missing_note})"] * ("batches" not in stability["of"])
    return "\n".join(lines)


def _cost(cost: Mapping[str, Any], plan: LayerPlan) -> str:
    """Describe the bytes of each layer, then the plan's bytes compared with sharing everything."""
    width = max(map(len, cost["layers"]))
    lines = []
    for name, value in cost["layers"].items():
        sharing = "federated" if name in plan.shared else "local"
        lines.append(f"  {name:<{width}}  {value:>14,.0f}  {sharing}")
    saved = 1 - cost["shared"] / cost["all"] if cost["all"] else 0.0
    total = f"  federated: {cost['shared']:,.0f} of {cost['all']:,.0f} bytes"
    total += f"; saves {saved:.1%} against sharing every layer"
    return "\n".join(
        ["Bytes that a client uploads a round, and as many down:", *lines, total]
    )


def in_words(
    nulls: Mapping[str, Mapping[str, Any]], variant: str = "", full: bool = False
) -> str:
    """Describe for each null whether it gives the same plan, in one line or in one line per null.

    Args:
        nulls: the evidence's ``detail["null"]``.
        variant: variant of the metric behind the plan. The text mentions a null that was measured by another variant.
        full: use one line per null, with the conclusion.
    """
    lines = [_line(null, draw, variant, full) for null, draw in nulls.items()]
    if not full:
        lines_text = "; ".join(lines)
        return f"Null: {lines_text}"
    head = "Held against nulls, measured in the same way:"
    return "\n".join([head, *(f"  {line}" for line in lines)])


def _line(null: str, result: Mapping[str, Any], variant: str, full: bool) -> str:
    trained_again = bool(result.get("kept"))
    title = NULLS[null].title + " (models trained on the real data)" * trained_again
    if result["variant"] not in ("", variant):
        title += f" (variant {result['variant']})"
    if not result["decided"]:
        return f"no plan comes from {title}" + f": {result['status']}" * full
    if result["same_draws"] and not result["same"]:
        return f"the same plan comes from {result['same_draws']} of {result['draws']} draws of {title}"
    if not full:
        same_word = "the same" if result["same"] else "another"
        return f"{same_word} plan comes from {title}"
    title += f" in all of {result['draws']} draws" * (
        result["same"] and result["draws"] > 1
    )
    title += f" ({result['status']})" * (result["status"] != "ok")
    if not result["same"]:
        shared_names = listing(result["shared"]) or "nothing"
        return f"another plan comes from {title}: it shares {shared_names}"
    same_note = (
        "measuring on other samples changes nothing; what training made of yours may"
    )
    end = same_note if trained_again else NULLS[null].same
    return f"the same plan comes from {title}: {end}"
