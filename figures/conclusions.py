"""What each picture of the gallery shows, in one sentence that names a layer or a client, from the stored rows."""

from __future__ import annotations

import pandas as pd

from diagnostics.curve import both_ways
from fl_core.plan import LayerPlan

REPRESENTATIONS = "Clients' representations differ most at {layer}, where {client} is furthest from the others."
CURVED = "The loss curves most at {layer}{there}."
CLASSES_APART = "Classes are easiest to tell apart after {layer}{there}."
SENTENCES = {
    "cca": ("low", REPRESENTATIONS),
    "cka": ("low", REPRESENTATIONS),
    "rbf_cka": ("low", REPRESENTATIONS),
    "svcca": ("low", REPRESENTATIONS),
    "procrustes": ("high", REPRESENTATIONS),
    "federation_sensitivity": (
        "high",
        "The loss depends most on the layers up to {layer}{there}.",
    ),
    "grad_noise": (
        "high",
        "Samples disagree most on the weights of {layer}{there}.",
    ),
    "grad_norm": (
        "high",
        "The loss is steepest in the weights of {layer}{there}.",
    ),
    "grad_similarity": (
        "low",
        "Clients' gradients agree least at {layer}, where {client} is furthest from the others.",
    ),
    "grad_variance": (
        "high",
        "Entries of the gradient are spread widest at {layer}{there}.",
    ),
    "hessian_trace": ("high", CURVED),
    "ggn_trace": ("high", CURVED),
    "hessian_spectrum": ("high", CURVED),
    "knn_probe": ("high", CLASSES_APART),
    "linear_probe": ("high", CLASSES_APART),
    "separability": ("high", CLASSES_APART),
    "layer_cost": ("high", "{layer} has most of the parameters{there}."),
    "layer_swap": (
        "high",
        "Another client's {layer} does the most harm{there}.",
    ),
    "output_disagreement": (
        "high",
        "The predictions of {client} agree least with the others'.",
    ),
    "update_magnitude": (
        "high",
        "Training moves {layer} furthest{there}.",
    ),
    "weight_divergence": (
        "high",
        "Local training moves clients apart most at {layer}, where {client} is furthest from the others.",
    ),
    "weight_magnitude": (
        "high",
        "Weights are largest in {layer}{there}.",
    ),
    "weight_spectrum": (
        "high",
        "Weights act in the most directions in {layer}{there}.",
    ),
    "bn_scale": (
        "high",
        "Normalised channels pass strongest through {layer}{there}.",
    ),
}  # fmt: skip
"""For each metric the end of its scale that is named, and the sentence."""
VARIANTS = {"hessian_spectrum": "top1", "layer_cost": "parameters"}
"""Variants of metrics with several in the rows."""
ALIKE = 0.01
"""Clients whose values lie within this share of the largest are not told from one another."""


def values_of(metric_name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a metric's values, clients x layers in the rows' order; for pairs each client's mean over the others."""
    rows = frame[(frame["metric"] == metric_name) & frame["value"].notna()]
    if metric_name in VARIANTS:
        rows = rows[rows["variant"] == VARIANTS[metric_name]]
    if (rows["client_b"] != "").any():
        rows = both_ways(rows)
    client_values = rows.pivot_table(
        index="client", columns="layer", values="value", sort=False
    )
    return client_values.sort_index()


def conclusion(metric_name: str, frame: pd.DataFrame) -> str:
    """Return the sentence on a metric: the layer at the named end by the mean of clients, and the client there."""
    scale_end, sentence = SENTENCES[metric_name]
    client_values = values_of(metric_name, frame)
    if scale_end == "low":
        client_values = -client_values
    layer = client_values.mean().idxmax()
    layer_values = client_values[layer]
    client = layer_values.idxmax()
    place_text = f", and there most at {client}"
    if layer_values.max() - layer_values.min() <= ALIKE * abs(layer_values.max()):
        place_text = f", at {client} as at the others"
    return sentence.format(layer=layer, client=client, there=place_text)


def of_pairs(frame: pd.DataFrame) -> str:
    """Return which two clients are least alike by CKA, and at which layer."""
    rows = frame[frame["metric"] == "cka"]
    least_row = rows.loc[rows["value"].idxmin()]
    return f"{least_row['client']} and {least_row['client_b']} are least alike, at {least_row['layer']}."


def of_costs(frame: pd.DataFrame) -> str:
    """Return which layer is most of what is sent, and which computes most in the forward pass."""
    cost_rows = frame[frame["metric"] == "layer_cost"]
    mean_costs = cost_rows.groupby(["variant", "layer"])["value"].mean()
    largest_sent, largest_computed = (
        mean_costs["bytes"].idxmax(),
        mean_costs["forward_flops"].idxmax(),
    )
    if largest_sent == largest_computed:
        return f"{largest_sent} is most of what is sent and computed."
    return (
        f"{largest_sent} is most of what is sent, and {largest_computed} computes most."
    )


def of_partition(counts: pd.DataFrame) -> str:
    """Return which client has the largest share of one class. Counts: clients x classes."""
    shares = counts.div(counts.sum(axis=1), axis=0)
    client, class_name = shares.stack().idxmax()
    return f"{client} has the largest share of one class: {shares.loc[client, class_name]:.0%} are {class_name}."


def of_plane(points: pd.DataFrame) -> str:
    """Return which client's features lie furthest from those of all. Columns: client, x, y."""
    means = points.groupby("client")[["x", "y"]].mean()
    squared_distances = ((means - points[["x", "y"]].mean()) ** 2).sum(axis=1)
    client = squared_distances.idxmax()
    return f"The features of {client} lie furthest from the middle of all."


def of_plan(plan: LayerPlan) -> str:
    """Return which layers are federated, and how many clients alone would do the same."""
    last_shared, votes = plan.shared[-1], [*plan.why.votes.values()]
    same_count, vote_count = votes.count(last_shared), len(votes)
    return f"Layers are federated up to {last_shared}: {same_count} of {vote_count} clients alone would do the same."
