"""Scores of each client's model on each client's samples: who could use whose model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from fl_core.data.arrays import nested_groups
from fl_core.display import MANY, Displayed, Summary
from fl_core.errors import UsageError, about, check_known, listing
from fl_core.rows import SCORES, main_score
from fl_core.statistics import SIGNIFICANCE, simultaneous, stratified_mean
from fl_core.training.evaluate import scores
from fl_core.training.losses import Loss
from fl_core.tree import preserve_state, set_mode

from .inputs import client_models, fit_outputs
from .measurement import ClientModel, batches
from .request import Request
from .tuning.differ import pair_losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .groups import Alike


@dataclass(frozen=True, repr=False)
class CrossScores(Displayed):
    """Scores of clients' models on each other's samples.

    Attributes:
        table: a line for each model and client of the samples. Columns are ``model``,
            ``client``, the scores by name, ``difference``, ``low``, ``high`` and
            ``p_value``. The difference is the model's mean loss minus that of the
            client's own model, paired over samples. Intervals and p-values hold for all
            pairs together. All four are NaN in the lines of a client's own model.
        score: the score to show.
        losses: the loss of each of K models at each sample of all clients, float64 [K, n]. A log loss has one
            temperature, from 1 to 20, for all pairs of a model and a sample.
        client: the number of each sample's client, int [n].
        group: the number of each sample's group, such as a patient, int [n].
    """

    table: pd.DataFrame
    score: str
    losses: NDArray[np.float64]
    client: NDArray[np.int64]
    group: NDArray[np.int64]

    def matrix(self, score: str = "") -> pd.DataFrame:
        """Return a table of one score: a row for each model, a column for each client of the samples.

        Args:
            score: a column of ``table`` with a score. Default: the attribute ``score``.

        Raises:
            UsageError: the score is unknown.
        """
        score = check_known("score", score or self.score, list(self.table))
        order = dict.fromkeys(self.table["model"])
        matrix = self.table.pivot(index="model", columns="client", values=score)
        return matrix.reindex(index=list(order), columns=list(order))

    @property
    def better(self) -> pd.DataFrame:
        """Return the lines of ``table`` where another client's model has a lower loss than the own one, p <= 0.05."""
        is_significant = (self.table["p_value"] <= SIGNIFICANCE) & (
            self.table["difference"] < 0
        )
        return self.table[is_significant]

    def alike(self, seed: int = 0) -> Alike:
        """Return which clients are alike, and whether they form groups (:func:`diagnostics.groups.alike`).

        Scores compare quality; groups show similarity. No model may have been trained on the samples.

        Args:
            seed: the seed of the 19 random assignments of samples to clients.
        """
        from .groups import alike  # imports scikit-learn

        names = list(dict.fromkeys(self.table["model"]))
        return alike(self.losses, self.client, names, self.group, seed=seed)

    def plot(self, score: str = "", ax: Axes | None = None) -> Axes:
        """Draw one score as a heat map, and return its Axes.

        It has a row for each model, and a column for each client of the samples.

        Args:
            score: as for :meth:`matrix`.
            ax: the Axes to draw on. Default: those of a new figure.

        Raises:
            UsageError: the score is unknown.
        """
        from .plots.drawing import Panel, canvas, heat

        matrix = self.matrix(score)
        side_inches = min(2.0 + 0.35 * len(matrix), 9.0)
        with canvas(ax, side_inches + 1.0, side_inches) as axes:
            panel = Panel(axes, True, True)
            high = max(1.0, float(matrix.max(axis=None)))
            colours = heat(panel, matrix, high=high, square=True)
            axes.figure.colorbar(colours, ax=axes, label=score or self.score)
            axes.set(xlabel="samples of", ylabel="model of")
        return axes

    def summary(self) -> Summary:
        """Return which clients could use another's model, and the scores."""
        uses = self.better.groupby("client", sort=False)["model"]
        lines = [
            f"{name}: the model of {listing(clients, 3)}" for name, clients in uses
        ]
        lead = "No client is shown to gain by another's model."
        if lines:
            ending = ""
            if len(lines) > MANY:
                ending = f" {len(lines) - MANY} more."
            first_lines = "; ".join(lines[:MANY])
            lead = f"A lower loss than their own model: {first_lines}.{ending}"
        table = self.matrix().rename_axis(index="model of", columns=None)
        return Summary.of_frame(f"{lead}\n{self.score} on samples of:", table)


def cross_scores(
    models: Any,
    data: Any = None,
    *,
    loss: Any = None,
    score: str = "",
    batch: int = 256,
) -> CrossScores:
    """Score every client's model on every client's samples. Use samples that no model was trained on.

    >>> import torch
    >>> from torch import nn
    >>> draw = torch.Generator().manual_seed(0)
    >>> x = torch.randn(60, 4, generator=draw)
    >>> data = {"north": (x, (x[:, 0] > 0).long()), "south": (x, (x[:, 1] > 0).long())}
    >>> right = nn.Linear(4, 2)
    >>> _ = right.load_state_dict({"weight": torch.tensor([[0, -9.0, 0, 0], [0, 9.0, 0, 0]]), "bias": torch.zeros(2)})
    >>> scores = cross_scores({"north": nn.Linear(4, 2), "south": right}, data)
    >>> float(scores.matrix("accuracy").loc["south", "south"])
    1.0

    Args:
        models: a run's result, or {client: model}, as for :func:`fl.diagnose <diagnostics.measure.diagnose>`.
        data: {client: samples}, likewise. Default for a result: its test samples, which
            every client must have.
        loss: as for :func:`fl.diagnose <diagnostics.measure.diagnose>`.
        score: the score to show. Default: the task's main score, such as macro-F1 for
            classes and R2 for numbers.
        batch: number of samples in a forward pass.

    Raises:
        UsageError: models and data do not fit, there are fewer than two clients, or the
            score is unknown.
    """
    if hasattr(models, "engine"):
        if data is None:
            clients = models.engine.data.clients
            data = {client.name: client.test for client in clients if len(client.test)}
        models = models.models
    request = Request.of("cka", {"loss": loss, "batch": batch, "seed": 0})
    subjects, _ = client_models(models, data, request)
    if len(subjects) < 2:
        raise UsageError(
            f"models must be of at least 2 clients; got {len(subjects)}. Name each client."
        )
    with preserve_state(
        *{id(subject.model): subject.model for subject in subjects}.values()
    ):
        subjects, criterion = fit_outputs(subjects, request)
        lines_by_model = [
            _scored(model_client, subjects, criterion, batch)
            for model_client in subjects
        ]
    lines = [*chain.from_iterable(lines_by_model)]
    sizes = [len(line["losses"]) for line in lines_by_model[0]]
    pairs = [(line["outputs"], line["y"]) for line in lines]
    losses = pair_losses(criterion, pairs, len(lines_by_model))
    own_loss = {line["client"]: line["losses"] for line in lines if line["own"]}
    other_lines = [line for line in lines if not line["own"]]
    groups = {subject.client: subject.groups for subject in subjects}
    gaps = [
        stratified_mean(
            (line["losses"] - own_loss[line["client"]]).numpy(),
            groups=groups[line["client"]],
        )
        for line in other_lines
    ]
    parts = [
        np.arange(size)
        if model_client.groups is None
        else np.asarray(model_client.groups)
        for model_client, size in zip(subjects, sizes, strict=True)
    ]
    table = pd.DataFrame(lines).drop(columns=["losses", "outputs", "y", "own"])
    comparisons = pd.DataFrame(other_lines)[["model", "client"]].join(
        simultaneous(gaps)
    )
    score_names = [name for name in table if name in SCORES]
    check_known("score", score or score_names[0], score_names)
    return CrossScores(
        table.merge(comparisons, how="left", on=["model", "client"]),
        score or main_score(score_names),
        losses,
        np.repeat(np.arange(len(sizes)), sizes),
        nested_groups(parts),
    )


def _scored(
    subject: ClientModel, subjects: list[ClientModel], criterion: Loss, batch: int
) -> list[dict[str, Any]]:
    """Return the results of one model on all clients' samples, a dict for each client.

    The keys are the scores by name, and ``model`` and ``client``, the names of the two
    clients. Further keys are ``own``, whether these are the same client, ``losses``,
    float64 [n], ``outputs`` and the labels ``y``.
    """
    lines: list[dict[str, Any]] = []
    for sample_client in subjects:
        with (
            about(
                f"the model of {subject.client!r} on samples of {sample_client.client!r}"
            ),
            torch.no_grad(),
            set_mode(subject.model, "eval"),
        ):
            parts = list(batches(sample_client.data, batch, subject.model))
            output = torch.cat([subject.model(x).cpu() for x, _ in parts])
            y = torch.cat([y.cpu() for _, y in parts])
            losses = criterion.per_sample(output, y).double()
            metric_values = scores(output, y, criterion)
        names = {"model": subject.client, "client": sample_client.client}
        facts = {
            "own": sample_client.client == subject.client,
            "losses": losses,
            "outputs": output,
            "y": y,
        }
        lines.append({**names, **metric_values, **facts})
    return lines
