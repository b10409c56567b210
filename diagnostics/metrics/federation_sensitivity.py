"""Federation sensitivity: how much the layers up to one matter to a client's loss, relative to the first layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fl_core.errors import UsageError, check_known
from fl_core.rows import Row
from fl_core.seeds import seed_of, torch_generator, torch_seeded

from ..capture import Data, batches
from ..client_model import TENSORS, ClientModel
from ..gradients.importance import EMBEDDINGS, REDUCE, Result
from ..gradients.passes import one_pass
from ..gradients.sensitivity import WHEN, Sensitivity, recorded_rows
from .base import Measurement, metric

FIGURE_BATCH = 64
"""Samples of the one batch behind the published figures."""


@dataclass(frozen=True)
class FederationSensitivity:
    """The options of federation sensitivity: when, on which tensors and on which samples it is measured.

    Attributes:
        when: the row's variant. ``"after"``: the weights stay fixed and (w g)^2 is averaged over the data's batches.
            ``"training"``: what :class:`~diagnostics.gradients.importance.SensitivityAccumulator` saw while the client
            trained, given as ``recorded``. ``"figure"``: as the published figures, one batch of 64 and the mean over a
            layer's tensors.
        single_batch: draw one batch of this many samples, with replacement as the authors' released code does.
        tensors, reduce: as in :class:`~diagnostics.gradients.importance.SensitivityAccumulator`.
        embeddings: how embedding tables count: ``"touched"`` or ``"whole"``, explained there, or ``"released"``, as in
            the authors' released code. See :class:`~diagnostics.gradients.importance.ReleasedTables`. The estimator
            names the choice.
        recorded: client name -> the accumulator's ``result()``.

    Raises:
        UsageError: a choice is unknown, a single batch has no samples, or ``recorded`` is given without
            ``when="training"``.
    """

    when: str = "after"
    single_batch: int | None = None
    tensors: str = "weights"
    reduce: str | None = None
    embeddings: str = "touched"
    recorded: Mapping[str, Result] | None = None

    def __post_init__(self) -> None:
        check_known("when", self.when, WHEN)
        check_known("choice of tensors", self.tensors, TENSORS)
        check_known("reduce", self.reduce or "pooled", REDUCE)
        check_known("embeddings", self.embeddings, EMBEDDINGS)
        if (self.when == "training") != (self.recorded is not None):
            raise UsageError(
                f"recorded must go with when='training'; got when={self.when!r} "
                f"{'without' if self.recorded is None else 'with'} it. Pass both or neither."
            )
        if self.single_batch is not None and self.single_batch < 1:
            raise UsageError(f"single_batch must be at least 1; got {self.single_batch}.")
        if self.recorded is not None and self.single_batch is not None:
            raise UsageError("single_batch does not apply to what was recorded while training")
        if self.recorded is not None and self.embeddings == "released":
            raise UsageError("Training does not record the samples' tokens, which embeddings='released' reads.")

    @property
    def batch(self) -> int | None:
        """Number of samples of the one batch that is drawn; None if all data are read."""
        return self.single_batch or (FIGURE_BATCH if self.when == "figure" else None)

    @property
    def table(self) -> Sensitivity:
        """The object that turns importances into rows."""
        reduce = self.reduce or ("mean_of_tensors" if self.when == "figure" else "pooled")
        return Sensitivity(
            self.when, self.tensors, reduce, "single_batch" if self.batch else "batch_mean", self.embeddings
        )

    def reader(self) -> Sensitivity | None:
        """Return the reader of the shared pass; None if one batch is read, or what training recorded."""
        return None if self.batch or self.recorded is not None else self.table


@metric(
    description="importance of the layers up to one, relative to the first layer",
    direction="higher = the layers up to here matter more to the loss; 1 at the first layer",
    how="from the gradients of the training epoch itself, or after it",
    unit={"importance": "loss^2"},
    variants=("after", "training", "figure", "importance"),
    look={
        "label": "federation sensitivity S",
        "meaning": "first layer = 1, higher = matters more",
        "log": True,
        "symbol": "S",
        "variants": {"importance": {"label": "importance I", "meaning": "higher = matters more", "log": True}},
    },
    uses_gradient_pass=True,
    default_variant="training",
    rule="sensitivity_ratio",
)
def federation_sensitivity(measurement: Measurement, options: FederationSensitivity) -> list[Row]:
    """Return rows of S_l for each client and combined (client ""), and of I_l for each client.

    I_l has the variant ``"importance"``. S_l = F_l / F_1 with F_l = sum_{k <= l} (1 / n_k) sum (w g)^2 (PLayer-FL, Eq.
    2). It is 1 at the first layer and never falls. The measurement's layers must be all layers of the network, because
    the sums start at the first.

    Memory: one batch's activations and gradients; of each tensor one number a part of the batches.

    Raises:
        UsageError: ``recorded`` lacks a client, or as in :func:`diagnostics.gradients.passes.one_pass`.
    """
    subjects = measurement.subjects
    if options.recorded is not None:
        sizes = {name: p.numel() for s in subjects[:1] for name, p in s.model.named_parameters()}
        recorded = options.recorded
        rows = recorded_rows(
            {s.client: recorded[check_known("recorded client", s.client, recorded)] for s in subjects},
            measurement.layers,
            n_train={s.client: s.n_train for s in subjects},
            sizes=sizes,
            tensors=options.tensors,
            reduce=options.reduce or "pooled",
            embeddings=options.embeddings,
        )
        for subject in subjects:
            measurement.tick(subject.client)
        return rows
    if options.batch is not None:
        drawn = [replace(s, data=_draw(s, options.batch, measurement.seed)) for s in subjects]
        measurement = replace(measurement, subjects=drawn, batch=None)
    return one_pass(measurement, [options.table])


def _draw(subject: ClientModel, size: int, seed: int) -> Data:
    """Draw ``size`` samples of the subject's data with replacement."""
    with torch_seeded(seed_of(seed, "diagnose", subject.client)):  # a shuffling loader draws its order
        parts = list(batches(subject.data, None))
    x, y = (torch.cat([part[k] for part in parts]) for k in (0, 1))
    index = torch.randint(len(x), (size,), generator=torch_generator(seed, "sensitivity batch", subject.client))
    return x[index.to(x.device)], y[index.to(y.device)]
