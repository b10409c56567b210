"""Measure layers in a training loop of your own or of another framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagnostics.measure import diagnose
from diagnostics.request import chosen_metrics
from diagnostics.through_time import MAP
from fl_core import tree
from fl_core.errors import (
    UsageError,
    about,
    at_least,
    check_known,
    check_type,
    check_value,
    listing,
    needs_package,
    warn,
)

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
        data: {client: probe samples}, as for :func:`fl.diagnose <diagnostics.measure.diagnose>`.
        metrics: names of metrics, by default those of the layer map.
        every: the number of rounds from one measurement to the next.
        samples: the largest number of samples of each client.
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
        check_type("data", data, dict, "Name each client.")
        check_value("every", every, at_least(1))
        chosen_metrics(metrics)
        self.data = dict(data)
        self.metrics = metrics
        self.every = every
        self.out = out
        self.report: Report | None = None
        self._options = options.pop("options", {})
        self._how = {"progress": False, "samples": samples, **options}
        self._waiting: dict[int, dict[str, nn.Module]] = {}

    def step(self, models: Mapping[str, nn.Module], round: int) -> Report | None:
        """Measure if this round is due, and return its rows; else return None.

        The models and torch's random state are left as they were.

        Args:
            models: {client: model} of clients that took part. Others have no rows in this round.
            round: the number of the round, from 1. It must be above that of the last
                measurement.

        Raises:
            UsageError: the round is not above the last measured one, a client is not in
                the data, the models have other layers than before, or as
                :func:`fl.diagnose <diagnostics.measure.diagnose>`.
        """
        check_type("models", models, dict, "Name each client.")
        if not self._is_due(round):
            return None
        for client in models:
            check_known("client", client, self.data)
        models = {client: models[client] for client in self.data if client in models}
        data = {client: self.data[client] for client in models}
        arguments = self._how | {
            "options": self._options | {"context": {"round": round}}
        }
        with about(f"round {round}"):
            report = diagnose(models, data, self.metrics, **arguments)
        if self.report is None:
            self.report = report
        elif report.header["bytes"] != self.report.header["bytes"]:
            raise UsageError(
                f"models must have the same layers in all rounds; got {report.header['bytes']} bytes in round {round}. "
                "Use a monitor for each network."
            )
        else:
            self.report = self.report.with_rows(report.table)
        if self.out is not None:
            self.report.write(self.out)
        return report

    def add(self, client: str, model: nn.Module, round: int) -> None:
        """Keep a copy of a client's model, and measure once the round has a model of every client of the data.

        Rounds that are not due are ignored. Copies of earlier rounds are dropped after
        a measurement. If some clients sit out a round, call :meth:`step` instead.

        Args:
            client: name of the client, as in the data.
            model: its model after the round.
            round: the number of the round, from 1. It must be above that of the last
                measurement.

        Warns:
            UserWarning: earlier rounds are not measured, since they lack clients.

        Raises:
            UsageError: the client is not in the data, or as :meth:`step`.
        """
        check_known("client", client, self.data)
        if not self._is_due(round):
            return
        models = self._waiting.setdefault(round, {})
        models[client] = tree.copied(model)
        if models.keys() != self.data.keys():
            return
        self.step(self._waiting.pop(round), round)
        earlier_rounds = sorted(number for number in self._waiting if number < round)
        for number in earlier_rounds:
            models = self._waiting.pop(number)
            missing_clients = listing(name for name in self.data if name not in models)
            warn(
                f"round {number} is not measured: it has no model of {missing_clients}"
            )

    def _is_due(self, round: int) -> bool:
        """Return whether a round is measured.

        Raises:
            UsageError: the round is due, and not above the last measured one.
        """
        check_type("round", round, int)
        if round % self.every:
            return False
        last_round = -1 if self.report is None else self.report.frame["round"].max()
        if round <= last_round:
            raise UsageError(
                f"round must grow; got {round} after {last_round:.0f}. Count the rounds from 1."
            )
        return True

    def layer_map(self, **map_arguments: Any) -> Figure:
        """Draw the layers from top to bottom and the rounds from left to right.

        Args:
            map_arguments: as for :meth:`diagnostics.report.Report.layer_map`.

        Raises:
            UsageError: nothing was measured yet, or none of the metrics that a map draws.
        """
        if self.report is None:
            raise UsageError(
                f"a monitor must have measured a round; got none of every {self.every}. Call step first."
            )
        return self.report.layer_map(**map_arguments)

    # --- in the loops of others ---

    def trainer_callback(self, client: str, round: int | None = None) -> Any:
        """Return a callback for a client's ``transformers.Trainer``.

        It calls :meth:`add`.

        Args:
            client: name of the client, as in the data.
            round: the number of the round that this training is. The model is added at
                its end. None adds it after each epoch, which counts as a round.

        Raises:
            UsageError: transformers is not installed, or the client is not in the data.
        """
        try:
            from transformers import TrainerCallback
        except ImportError as error:
            purpose = "watch its trainer"
            raise needs_package("transformers", purpose, "lora") from error
        check_known("client", client, self.data)

        def at_end(args: Any, state: Any, control: Any, **how: Any) -> None:
            number = int(state.epoch + 0.5) if round is None else round
            self.add(client, how["model"], number)

        callback = TrainerCallback()
        event = "on_epoch_end" if round is None else "on_train_end"
        setattr(callback, event, at_end)
        return callback

    def lightning_callback(self, client: str, round: int | None = None) -> Any:
        """Return a callback for a client's ``lightning.Trainer``.

        It calls :meth:`add`.

        Args:
            client: name of the client, as in the data.
            round: the number of the round that this training is. The model is added at
                its end. None adds it after each epoch, which counts as a round.

        Raises:
            UsageError: lightning is not installed, or the client is not in the data.
        """
        try:
            from lightning.pytorch import Callback
        except ImportError as error:
            raise needs_package("lightning", "watch its trainer", "") from error
        check_known("client", client, self.data)

        def at_end(trainer: Any, module: nn.Module) -> None:
            number = trainer.current_epoch + 1 if round is None else round
            self.add(client, module, number)

        callback = Callback()
        event = "on_train_epoch_end" if round is None else "on_train_end"
        setattr(callback, event, at_end)
        return callback

    def watch(self, strategy: Any, model: nn.Module) -> Any:
        """Let a strategy of ``flwr.serverapp.strategy`` measure what its clients send, and return it.

        The strategy is changed in place: it measures each round that is due before it
        aggregates. A client's reply has its tensors by name, and the metric
        :data:`PARTITION`. Replies without content are not measured.

        Args:
            strategy: the strategy.
            model: the network. Tensors that do not travel are those of this one.

        Raises:
            UsageError: during a round, if a reply has not one record of arrays and one
                of metrics, lacks the metric or has another number, or as :meth:`step`.
        """
        aggregate = strategy.aggregate_train

        def measured(server_round: int, replies: Iterable[Any]) -> Any:
            replies = list(replies)
            models: dict[str, nn.Module] = {}
            names = dict(enumerate(self.data))
            for content in (
                content.content for content in replies if content.has_content()
            ):
                array_records = [*content.array_records.values()]
                metric_records = [*content.metric_records.values()]
                if len(array_records) != 1 or len(metric_records) != 1:
                    raise UsageError(
                        "a reply must have one record of arrays and one of metrics to be measured; "
                        f"got {len(array_records)} and {len(metric_records)}. Join them."
                    )
                (arrays,), (metrics,) = array_records, metric_records
                number = metrics.get(PARTITION)
                if number not in names:
                    raise UsageError(
                        f"a reply must have the metric {PARTITION}, from 0 to {len(names) - 1}; got {number}."
                    )
                client = names[number]
                client_model = models[client] = tree.copied(model)
                tensors = arrays.to_torch_state_dict()
                with about(f"client {client!r}"):
                    tree.load(client_model, tree.named_tensors(client_model) | tensors)
            if models:
                self.step(models, server_round)
            return aggregate(server_round, replies)

        strategy.aggregate_train = measured
        return strategy
