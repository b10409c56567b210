"""The report of a diagnosis: rows, and a header that describes the measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fl_core import rows
from fl_core.display import Displayed, Summary
from fl_core.errors import UsageError, as_list, check_known, listing
from fl_core.layers import Layer
from fl_core.plan import layer_from_json

from .decide.curve import both_ways
from .metrics.base import metric_or_placeholder
from .null import of_null, split_resamples

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, repr=False)
class Report(Displayed):
    """The result of a diagnosis: rows of the common schema, and a header that describes the measurement.

    >>> import fedlayers as fl, torch
    >>> model = torch.nn.Linear(4, 3)
    >>> data = {"north": (torch.randn(20, 4), torch.arange(20) % 3)}
    >>> report = fl.diagnose(model, data, ["weight_magnitude"], progress=False)
    >>> report.frame[["client", "metric", "variant", "status"]].values.tolist()[0]
    ['north', 'weight_magnitude', 'mean_abs', 'ok']
    >>> report.write("rows.jsonl")
    >>> Report.read("rows.jsonl").values("weight_magnitude").equals(report.values("weight_magnitude"))
    True

    Attributes:
        frame: the rows.
        resamples: the rows of resampled batches, if requested. See :mod:`diagnostics.null`.
        nulls: the rows of nulls, if requested. Their column ``model`` names the null. See :mod:`diagnostics.null`.
    """

    frame: pd.DataFrame
    header: dict[str, Any]
    resamples: pd.DataFrame = field(default_factory=lambda: rows.frame([]))
    nulls: pd.DataFrame = field(default_factory=lambda: rows.frame([]))

    @property
    def table(self) -> pd.DataFrame:
        """All rows, including resamples and nulls."""
        further = [table for table in (self.resamples, self.nulls) if len(table)]
        return (
            pd.concat([self.frame, *further], ignore_index=True)
            if further
            else self.frame
        )

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers of the model with their tensors, from input to output."""
        return tuple(layer_from_json(item) for item in self.header["layers"])

    def values(self, metric: str, variant: str | None = None) -> pd.DataFrame:
        """Return the values of one metric, layers x clients.

        A missing value is NaN, and the frame's status gives the reason. For a metric of pairs, a client's value is its
        mean over the other clients. If layers are compared ``against`` a reference layer, it is the mean of the
        client's layer with the others' reference layer. A single client is then compared with its own. The default
        variant is the metric's first that was measured.

        Raises:
            UsageError: a metric or variant was not measured, or a metric of pairs has no pair.
        """
        selected = self._rows(metric)
        present = list(dict.fromkeys(selected["variant"]))
        if variant is None:
            variant = _usual(metric, present)
        check_known(f"variant of {metric}", variant, present)
        every = selected[selected["variant"] == variant]
        selected = every[every["client"] != ""]
        if selected.empty:
            raise UsageError(
                f"no {metric} of single clients (status: {listing(every['status'].unique())})"
            )
        others = selected["client"] != selected["client_b"]
        selected = both_ways(
            selected[others] if others.any() else selected
        )  # one model: of its own layers
        table = (
            selected.groupby(["layer", "client"], sort=False)["value"]
            .mean(skipna=False)
            .unstack()
        )
        order = [layer.name for layer in self.layers if layer.name in table.index]
        return table.reindex(
            index=order, columns=list(dict.fromkeys(selected["client"]))
        )

    def plot(self, metric: str, ax: Axes | None = None) -> Axes:
        """Draw one metric over the layers.

        Raises:
            UsageError: the metric is not there.
        """
        from . import plots

        self._rows(metric)
        tables = [last_round(table) for table in (self.frame, self.nulls) if len(table)]
        return plots.metric(pd.concat(tables, ignore_index=True), metric, ax)

    def write(self, path: Path | str) -> None:
        """Write header and rows to a file of JSON lines."""
        rows.write(Path(path), self.header, rows.records(self.table))

    @classmethod
    def read(cls, path: Path | str) -> Report:
        """Read a report from a file that :meth:`write` wrote.

        Raises:
            UsageError: the file does not exist or is not a diagnosis.
            CorruptError: a line is damaged.
        """
        header, frame = rows.read(Path(path))
        if "layers" not in header:
            raise UsageError(
                f"{path} must be a diagnosis; got a header with no layers."
            )
        own, again = split_resamples(frame)
        nulls = frame[of_null(frame)]
        return cls(
            own.reset_index(drop=True),
            header,
            again.reset_index(drop=True),
            nulls.reset_index(drop=True),
        )

    def _rows(self, metric: str) -> pd.DataFrame:
        check_known(
            "metric of this report", metric, dict.fromkeys(self.frame["metric"])
        )
        return last_round(self.frame[self.frame["metric"] == metric])

    def of_rounds(self, rounds: int | Sequence[int]) -> Report:
        """Return the report of some rounds."""
        tables = [
            table[table["round"].isin(as_list("rounds", rounds))].reset_index(drop=True)
            for table in (self.frame, self.resamples, self.nulls)
        ]
        return Report(tables[0], self.header, *tables[1:])

    def layer_map(self, gains: pd.DataFrame | None = None, width: float = 16.0) -> Any:
        """Draw the layers down and the rounds across (:func:`diagnostics.plots.layer_map`)."""
        from . import plots

        return plots.layer_map(self, gains, width)

    def summary(self) -> Summary:
        """Return the mean over clients of each metric's default variant, a line a layer."""
        columns = {}
        for metric in dict.fromkeys(self.frame["metric"]):
            rows = self._rows(metric)
            usual = _usual(metric, list(rows["variant"]))
            values = rows[rows["variant"] == usual].groupby("layer")["value"].mean()
            columns[f"{metric} ({usual})" if usual else metric] = values
        table = pd.DataFrame(columns, index=[layer.name for layer in self.layers])
        return Summary.of_frame(self._sentence(), table.rename_axis("layer"))

    def _sentence(self) -> str:
        clients = len(
            {name for name in (*self.frame["client"], *self.frame["client_b"]) if name}
        )
        metrics = ", ".join(dict.fromkeys(self.frame["metric"]))
        missing = int((self.frame["status"] != "ok").sum())
        return f"Report({metrics}; {len(self.layers)} layers, {clients} clients, {missing} rows without a value)"


def last_round(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the last of several rounds."""
    several = table["round"].nunique() > 1
    return table[table["round"] == table["round"].max()] if several else table


def _usual(metric: str, present: Sequence[str]) -> str:
    """Return the default variant: the first of the metric's that was measured."""
    return next(
        (name for name in metric_or_placeholder(metric).variants if name in present),
        present[0],
    )
