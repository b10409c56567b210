"""The report that a diagnosis returns: rows, and a header on what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fl_core import rows
from fl_core.errors import UsageError, check_known, listing
from fl_core.layers import Layer
from fl_core.plan import layer_from_json

from .decide.curve import both_ways
from .metrics.base import known
from .null import of_null
from .resampling import parted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class Report:
    """The result of a diagnosis: rows of the common schema, and a header on what was measured.

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
        resamples: the rows of resampled batches, where some were asked for; see :mod:`diagnostics.resampling`.
        nulls: the rows of nulls, where some were asked for, which their column ``model`` names; see
            :mod:`diagnostics.null`.
    """

    frame: pd.DataFrame
    header: dict[str, Any]
    resamples: pd.DataFrame = field(default_factory=lambda: rows.frame([]))
    nulls: pd.DataFrame = field(default_factory=lambda: rows.frame([]))

    @property
    def table(self) -> pd.DataFrame:
        """All rows, including those of resamples and nulls."""
        further = [table for table in (self.resamples, self.nulls) if len(table)]
        return pd.concat([self.frame, *further], ignore_index=True) if further else self.frame

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers of the model with their tensors, from input to output."""
        return tuple(layer_from_json(item) for item in self.header["layers"])

    def values(self, metric: str, variant: str | None = None) -> pd.DataFrame:
        """Values of one metric, layers x clients; NaN where there is none (see the frame's status).

        Of a metric of pairs: each client's mean over the others; where layers are compared ``against`` another, of the
        client's own layer with the others' other one (of a single client its own). Default variant: the metric's first
        that was measured.

        Raises:
            UsageError: a metric or variant that was not measured, or one of pairs where there is no pair.
        """
        selected = self._rows(metric)
        present = list(dict.fromkeys(selected["variant"]))
        if variant is None:
            variant = _usual(metric, present)
        check_known(f"variant of {metric}", variant, present)
        every = selected[selected["variant"] == variant]
        selected = every[every["client"] != ""]
        if selected.empty:
            raise UsageError(f"no {metric} of single clients (status: {listing(every['status'].unique())})")
        others = selected["client"] != selected["client_b"]
        selected = both_ways(selected[others] if others.any() else selected)  # one model: of its own layers
        table = selected.groupby(["layer", "client"], sort=False)["value"].mean(skipna=False).unstack()
        order = [layer.name for layer in self.layers if layer.name in table.index]
        return table.reindex(index=order, columns=list(dict.fromkeys(selected["client"])))

    def cka(self, layer: str) -> pd.DataFrame:
        """CKA between all clients at one layer, clients x clients, symmetric, with ones on the diagonal.

        Raises:
            UsageError: CKA was not measured, there or at all.
        """
        pairs = self._rows("cka")
        pairs = pairs[pairs["variant"] == _usual("cka", list(pairs["variant"]))]
        check_known("layer", layer, dict.fromkeys(pairs["layer"]))
        pairs = pairs[pairs["layer"] == layer]
        names = [name for name in dict.fromkeys([*pairs["client"], *pairs["client_b"]]) if name]
        if not names:
            raise UsageError(f"no CKA at layer {layer!r}: {pairs['status'].iloc[0]}")
        matrix = pd.DataFrame(np.eye(len(names)), index=names, columns=names)
        for a, b, value in zip(pairs["client"], pairs["client_b"], pairs["value"], strict=True):
            matrix.loc[a, b] = matrix.loc[b, a] = value
        return matrix

    def plot(self, metric: str, ax: Axes | None = None) -> Axes:
        """Draw one metric over the layers, or what an algorithm recorded of its insides.

        Raises:
            UsageError: a metric that is not there, or Axes for one with its own figure.
        """
        from . import plots
        from .pictures.album import OWN

        self._rows(metric)
        if metric in OWN:
            if ax is not None:
                raise UsageError(f"{metric} is drawn on a figure of its own; leave the Axes out")
            drawn = next(iter(OWN[metric].values()))(self.frame)
            return drawn[0] if isinstance(drawn, list) else drawn
        table = pd.concat([self.frame, self.nulls], ignore_index=True) if len(self.nulls) else self.frame
        return plots.metric(table, metric, ax)

    def write(self, path: Path | str) -> None:
        """Write header and rows to a file of JSON lines."""
        table = self.table
        records = table.astype(object).where(table.notna(), None).to_dict("records")
        rows.write(Path(path), self.header, ({str(name): value for name, value in r.items()} for r in records))

    @classmethod
    def read(cls, path: Path | str) -> Report:
        """Read a report that :meth:`write` wrote.

        Raises:
            UsageError: no such file, or not a diagnosis; CorruptError: a damaged line.
        """
        header, frame = rows.read(Path(path))
        if "layers" not in header:
            raise UsageError(f"{path} is not a diagnosis: its header names no layers")
        own, again = parted(frame)
        nulls = frame[of_null(frame)]
        return cls(own.reset_index(drop=True), header, again.reset_index(drop=True), nulls.reset_index(drop=True))

    def _rows(self, metric: str) -> pd.DataFrame:
        check_known("metric of this report", metric, dict.fromkeys(self.frame["metric"]))
        return self.frame[self.frame["metric"] == metric]

    def __repr__(self) -> str:
        clients = len({name for name in (*self.frame["client"], *self.frame["client_b"]) if name})
        metrics = ", ".join(dict.fromkeys(self.frame["metric"]))
        missing = int((self.frame["status"] != "ok").sum())
        return f"Report({metrics}; {len(self.layers)} layers, {clients} clients, {missing} rows without a value)"


def _usual(metric: str, present: Sequence[str]) -> str:
    """The variant to use if none is named: the first of the metric's that was measured."""
    return next((name for name in known(metric).variants if name in present), present[0])
