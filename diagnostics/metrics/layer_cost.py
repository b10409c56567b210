"""Layer cost: what sending, computing and storing a layer takes."""

from __future__ import annotations

import torch

from fl_core import tree
from fl_core.costs.layers import SIZES, WORK, step_work
from fl_core.rows import Row, row
from fl_core.seeds import seed_of, torch_seeded

from ..capture import batches
from ..client_model import to_device
from .base import Measurement, metric

UNITS = {
    "bytes": "byte",
    "forward_flops": "FLOP",
    "backward_flops": "FLOP",
    "activation_bytes": "byte",
}
SAMPLES = 2
"""Samples of the pass that is counted; normalisation in train mode refuses a single one."""


@metric(
    description="parameters, bytes, training FLOPs and activation memory of a layer",
    direction="higher = costs more",
    how=(
        "FLOPs forward and backward, memory kept for the backward pass; `plan_cost` adds up what a plan sends and saves"
    ),
    unit={
        "bytes": "byte",
        "forward_flops": "FLOP",
        "backward_flops": "FLOP",
        "activation_bytes": "byte",
    },
    variants=(
        "parameters",
        "bytes",
        "forward_flops",
        "backward_flops",
        "activation_bytes",
    ),
    look={"label": "cost of a layer", "log": True, "beside": ("costs",)},
    requires="samples",
    needs_all_layers=True,
)
def layer_cost(measurement: Measurement) -> list[Row]:
    """Return five rows a client and layer.

    The clients' models are alike, so the first model's costs are everyone's. The measurement's layers must be all
    layers of the network.

    * ``parameters``: scalars of its parameters, frozen ones included. Sharing the layer sends them too.
    * ``bytes``: parameters and persistent buffers as they are stored. Sharing the layer sends this much one way.
    * ``forward_flops``, ``backward_flops``: FLOPs of one training sample when every parameter trains
      (:mod:`fl_core.costs.flops`). Matrix products, convolutions and attention count. A multiply-add is two, everything
      elementwise is zero.
    * ``activation_bytes``: what the forward pass of one sample keeps for the backward pass, without parameters and
      buffers. A tensor that several operations keep counts once, at the first.

    An operation belongs to the layer whose module is running. Outside the layers' modules it belongs to the layer that
    ran last, or before any to the first. So the layers sum to the whole network. An unused layer has a size but no
    work.

    Memory: one training step on two samples, whatever the data.
    """
    rows: list[Row] = []
    work, layers, seed = None, measurement.layers, measurement.seed
    for subject in measurement.subjects:
        if work is None:
            with torch_seeded(seed_of(seed, "diagnose", "cost")):
                x, _ = next(batches(subject.data, SAMPLES))
            x = to_device(subject.model, x[:SAMPLES])
            # one sample twice where there is only one
            work = step_work(
                subject.model,
                x if len(x) > 1 else torch.cat([x, x]),
                layers,
                mode=measurement.mode,
                seed=seed,
            )
        tensors, known = (
            tree.named_tensors(subject.model),
            {name for name, _ in subject.model.named_parameters()},
        )
        for layer in layers:
            n = sum(tensors[name].numel() for name in layer.tensors if name in known)
            sizes = {
                "parameters": n,
                "bytes": tree.n_bytes(tree.select(tensors, layer.tensors)),
            }
            for variant in (*SIZES, *WORK):
                lacking = variant in WORK and not layer.used
                value = (
                    sizes.get(variant, 0.0)
                    if variant in SIZES
                    else getattr(work, variant).get(layer.name, 0.0)
                )
                rows.append(
                    row(
                        "layer_cost",
                        None
                        if lacking
                        else value / (1 if variant in SIZES else SAMPLES),
                        status="unused in the forward pass" if lacking else "ok",
                        client=subject.client,
                        layer=layer.name,
                        variant=variant,
                        stderr=None if lacking else 0.0,
                        estimator={
                            "bytes": "storage",
                            "parameters": "count",
                            "activation_bytes": "saved_tensors",
                        }.get(variant, "flop_counter"),
                        unit=UNITS.get(variant, ""),
                        n_params=n,
                        n_samples=0 if variant in SIZES else SAMPLES,
                        n_train=subject.n_train,
                    )
                )
        measurement.tick(subject.client)
    return rows
