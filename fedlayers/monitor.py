"""Measure layers in a training loop of your own or of another framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagnostics.measure import diagnose
from diagnostics.through_time import MAP
from fl_core import tree
from fl_core.errors import UsageError, about, at_least, check_known, check_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from diagnostics.report import Report

PARTITION = "partition-id"
"""The metric of a Flower client's reply that says which client it is, counted from 0."""


class Monitor:
    """Measures the layers of the clients' models every few rounds, as rows of one report.

    >>> import torch
    >>> from torch import nn
    >>> data = {silo: (torch.randn(30, 4), torch.arange(30) % 3) for silo in ("north", "south")}
    >>> monitor = Monitor(data, "grad_norm", every=2)
    >>> models = {silo: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for silo in data}
    >>> for round in range(1, 5):  # your own loop trains the models here
    ...     _ = monitor.step(models, round)
    >>> monitor.report.frame["round"].unique().tolist()
    [2, 4]

    Args:
        data: {client: probe samples}, as of :func:`fl.diagnose <diagnostics.measure.diagnose>`.
        metrics: names of metrics. Default: those of the layer map.
        every: rounds from one measurement to the next.
        samples: samples of each client to measure, at most.
        out: a file for the rows, written again after each measurement.
        options: further arguments of :func:`fl.diagnose <diagnostics.measure.diagnose>`.

    Attributes:
        report: all rows so far; None before the first measurement.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        metrics: str | Sequence[str] = MAP,
        *,
        every: int = 1,
        samples: int = 256,
        out: Path | str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(data, Mapping) or not data:
            raise UsageError(
                f"data must be {{client: samples}}; got {type(data).__name__}. Name each client."
            )
        self.data, self.metrics = dict(data), metrics
        check_value("every", every, at_least(1))
        self.every = every
        self.out = out
        self.report: Report | None = None
        self._options = options.pop("options", {})
        self._how = {"progress": False, "samples": samples, **options}
        self._waiting: dict[int, dict[str, nn.Module]] = {}

    def step(self, models: Mapping[str, nn.Module], round: int) -> Report | None:
        """Measure if it is time, and return the rows of this round, else None.

        The models and torch's random state are left as they were.

        Args:
            models: {client: model} of clients that took part. Others have no rows in this round.
            round: counts from 1. It must grow.

        Raises:
            UsageError: as :func:`fl.diagnose <diagnostics.measure.diagnose>`, the round was measured before, or the
                models have other layers than before.
        """
        if round % self.every:
            return None
        if self.report is not None and round <= self.report.frame["round"].max():
            raise UsageError(
                f"round must grow; got {round} after {self.report.frame['round'].max():.0f}. Count the rounds from 1."
            )
        for client in models:
            check_known("client", client, self.data)
        data = {client: self.data[client] for client in models}
        options = {**self._options, "context": {"round": round}}
        with about(f"round {round}"):
            found = diagnose(models, data, self.metrics, options=options, **self._how)
        if self.report is None:
            self.report = found
        elif found.header["bytes"] != self.report.header["bytes"]:
            raise UsageError(
                f"models must have the same layers in all rounds; got {found.header['bytes']} bytes in round {round}. "
                "Use a monitor for each network."
            )
        else:
            self.report = self.report.with_rows(found.table)
        if self.out is not None:
            self.report.write(self.out)
        return found

    def add(self, client: str, model: nn.Module, round: int) -> None:
        """Keep a copy of a client's model. The last client of a round starts the measurement.

        So every client of the data must come in each measured round. Use :meth:`step` where some do not.

        Raises:
            UsageError: as :meth:`step`, or an unknown client.
        """
        check_known("client", client, self.data)
        if round % self.every:
            return
        models = self._waiting.setdefault(round, {})
        models[client] = tree.copied(model)
        if models.keys() == self.data.keys():
            self.step(self._waiting.pop(round), round)

    def layer_map(self, **how: Any) -> Figure:
        """Draw the layers down and the rounds across, as :meth:`Report.layer_map`.

        Raises:
            UsageError: nothing was measured yet, or no metric of the map.
        """
        if self.report is None:
            raise UsageError(
                f"a monitor must have measured a round; got none of every {self.every}. Call step first."
            )
        return self.report.layer_map(**how)

    # --- in the loops of others ---

    def trainer_callback(self, client: str, round: int | None = None) -> Any:
        """Return a callback for a client's ``transformers.Trainer``.

        Args:
            round: this training's. Default: each epoch is a round.
        """
        from transformers import TrainerCallback

        def at_end(args: Any, state: Any, control: Any, **how: Any) -> None:
            number = int(state.epoch + 0.5) if round is None else round
            self.add(client, how["model"], number)

        callback = TrainerCallback()
        event = "on_epoch_end" if round is None else "on_train_end"
        setattr(callback, event, at_end)
        return callback

    def lightning_callback(self, client: str, round: int | None = None) -> Any:
        """Return a callback for a client's ``lightning.Trainer``.

        Args:
            round: this training's. Default: each epoch is a round.
        """
        from lightning.pytorch import Callback

        def at_end(trainer: Any, module: nn.Module) -> None:
            number = trainer.current_epoch + 1 if round is None else round
            self.add(client, module, number)

        callback = Callback()
        event = "on_train_epoch_end" if round is None else "on_train_end"
        setattr(callback, event, at_end)
        return callback

    def watch(self, strategy: Any, model: nn.Module) -> Any:
        """Let a Flower strategy measure what its clients send, and return it.

        A client's reply has its tensors by name, and the metric :data:`PARTITION`. Tensors that do not travel are
        those of ``model``.

        Args:
            strategy: of ``flwr.serverapp.strategy``.
            model: a module of the clients' kind.
        """
        aggregate = strategy.aggregate_train

        def measured(server_round: int, replies: Iterable[Any]) -> Any:
            replies = list(replies)
            models: dict[str, nn.Module] = {}
            for reply in replies:
                if not reply.has_content():
                    continue
                (arrays,) = reply.content.array_records.values()
                (metrics,) = reply.content.metric_records.values()
                sent = tree.copied(model)
                sent.load_state_dict(arrays.to_torch_state_dict(), strict=False)
                models[list(self.data)[int(metrics[PARTITION])]] = sent
            if models:
                self.step(models, server_round)
            return aggregate(server_round, replies)

        strategy.aggregate_train = measured
        return strategy
