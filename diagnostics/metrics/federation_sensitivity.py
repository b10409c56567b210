"""Federation sensitivity: how much the layers up to one matter to a client's loss, relative to the first layer."""

from __future__ import annotations

from fl_core.errors import check_known
from fl_core.rows import Row

from ..gradients.passes import one_pass
from ..gradients.sensitivity import Sensitivity, recorded_rows
from .base import Measurement, metric


@metric(
    description="importance of the layers up to one, relative to the first layer",
    direction="higher = the layers up to here matter more to the loss; 1 at the first layer",
    how="from the gradients of the training epoch itself, or after it",
    unit={"importance": "loss^2"},
    variants=("after", "training", "importance"),
    look={
        "label": "federation sensitivity S",
        "meaning": "first layer = 1, higher = matters more",
        "log": True,
        "symbol": "S",
        "variants": {
            "importance": {
                "label": "importance I",
                "meaning": "higher = matters more",
                "log": True,
            }
        },
    },
    uses_gradient_pass=True,
    default_variant="training",
)
def federation_sensitivity(measurement: Measurement, options: Sensitivity) -> list[Row]:
    """Return rows of S_l for each client and combined (client ""), and of I_l for each client.

    I_l has the variant ``"importance"``. S_l = F_l / F_1 with F_l = sum_{k <= l} (1 / n_k) sum (w g)^2 (PLayer-FL, Eq.
    2). It is 1 at the first layer and never falls. The measurement's layers must be all layers of the network, because
    the sums start at the first.

    Memory: one batch's activations and gradients; of each tensor one number a part of the batches.

    Raises:
        UsageError: ``recorded`` lacks a client, or as in :func:`diagnostics.gradients.passes.one_pass`.
    """
    subjects, recorded = measurement.subjects, options.recorded
    if recorded is None:
        return one_pass(measurement, [options])
    sizes = {
        name: p.numel() for s in subjects[:1] for name, p in s.model.named_parameters()
    }
    rows = recorded_rows(
        {
            s.client: recorded[check_known("recorded client", s.client, recorded)]
            for s in subjects
        },
        measurement.layers,
        n_train={s.client: s.n_train for s in subjects},
        sizes=sizes,
        tensors=options.tensors,
        reduce=options.reduce,
        embeddings=options.embeddings,
    )
    for subject in subjects:
        measurement.tick(subject.client)
    return rows
