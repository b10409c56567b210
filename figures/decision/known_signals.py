"""The decision on a known data set, and what signals say of each layer, all read from one shared model."""

from __future__ import annotations

from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesClassifier

import fedlayers as fl
from diagnostics.tuning.copies import Tuner
from diagnostics.tuning.profile import Profile, every
from fl_core.data.federated import FederatedData
from fl_core.layers import Layer


def chosen(**arguments: Any) -> dict[str, Any]:
    """Return the decision of ``choose``, the accuracy of its model on test samples, and its price in runs."""
    with TemporaryDirectory() as folder:
        answer = fl.choose(**arguments, seeds=1, out=folder, progress=False)
        if answer.trained is None:
            raise RuntimeError("an answer that was trained has its runs")
        accuracy_table = answer.trained.table("accuracy")
    return {
        "named": answer.way,
        "left": [answer.way, *(way_line.way for way_line in answer.also_good)],
        "arms": [way_line.way for way_line in answer.lines if way_line.action],
        "test": accuracy_table.mean(answer.way or "base_rate", "test"),
        "price": answer.cost["full_runs"],
    }


def blocks(layers: Sequence[Layer]) -> list[frozenset[str]]:
    """Return the tensors of each block of adapters, and those of the head."""
    tensors_by_block: dict[str, list[str]] = {}
    for layer in layers:
        tensors_by_block.setdefault(layer.name.partition(".")[0], []).extend(
            layer.tensors
        )
    return [*map(frozenset, tensors_by_block.values())]


def falls(tuner: Tuner, tensor_sets: Sequence[frozenset[str]]) -> list[float]:
    """Return how much the loss falls when each part alone is tuned."""
    profile = Profile(tuner)
    return [
        profile.mean(profile.of(tensor_set).nats).value for tensor_set in tensor_sets
    ]


def signals(
    tuner_arguments: dict[str, Any], layers: Sequence[Layer]
) -> dict[str, list[float]]:
    """Return each signal's value of every layer. The layer with the largest is the one that it names.

    Args:
        tuner_arguments: the arguments of a :class:`Tuner` of the shared model.
    """
    tuner, all_tensors = Tuner(**tuner_arguments), every(layers)
    layer_tensors = [frozenset(layer.tensors) for layer in layers]
    all_fall, *other_falls = falls(
        tuner,
        [all_tensors, *(all_tensors - tensor_set for tensor_set in layer_tensors)],
    )
    values_by_signal = {
        "layer_tuning": falls(tuner, layer_tensors),
        "all but one layer tuned": [
            all_fall - other_fall for other_fall in other_falls
        ],
    }
    tuner.workspace.load(tuner_arguments["starts"][0])
    start_tensors = {n: p.detach().clone() for n, p in tuner.workspace.params.items()}
    parameter_names = [
        [n for n in layer.parameters if n in start_tensors] for layer in layers
    ]

    def vector(tensors: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
        return torch.cat(
            [
                tensors[parameter_name].detach().flatten()
                for parameter_name in parameter_names[layer]
            ]
        )

    gradients, changes = [], []
    for k, client in enumerate(tuner_arguments["clients"]):
        gradients.append(gradient(tuner, k))
        client_tuner = Tuner(
            **(
                tuner_arguments
                | {"clients": [client], "starts": tuner_arguments["starts"][:1]}
            )
        )
        client_tuner.outputs(all_tensors, 3 * client_tuner.training.lr)
        changes.append(
            {n: p - start_tensors[n] for n, p in client_tuner.workspace.params.items()}
        )
    layer_count = len(layers)
    start_norms = [float(vector(start_tensors, k).norm()) for k in range(layer_count)]

    def relative(tensors: list[dict[str, torch.Tensor]]) -> list[float]:
        return [
            float(np.mean([vector(of_client, k).norm() for of_client in tensors]))
            / start_norms[k]
            for k in range(layer_count)
        ]

    unit_gradients = [
        torch.nn.functional.normalize(
            torch.stack([vector(client_gradients, k) for client_gradients in gradients])
        )
        for k in range(layer_count)
    ]
    is_pair = torch.ones(len(gradients), len(gradients)).triu(1).bool()
    return values_by_signal | {
        "share of parameters": [
            float(vector(start_tensors, k).numel()) for k in range(layer_count)
        ],
        "Auto-RGN": relative(gradients),
        "change after tuning all": relative(changes),
        "gradient conflict": [
            -float((unit_gradient @ unit_gradient.T)[is_pair].mean())
            for unit_gradient in unit_gradients
        ],
    }


def gradient(tuner: Tuner, client: int) -> dict[str, torch.Tensor]:
    """Return the gradient of the loss on a client's training samples at its start."""
    tuner.workspace.load(tuner.starts[client])
    _, x, y = tuner.train[client]
    params = tuner.workspace.params
    tuner.workspace.model.eval()
    loss = tuner.loss(tuner.workspace.forward(params, x), y)
    return dict(zip(params, torch.autograd.grad(loss, [*params.values()]), strict=True))


def inputs_differ(data: FederatedData) -> list[float]:
    """Return how often trees name the client of a validation sample from its pooled inputs, and by chance."""

    def pooled(split: str) -> tuple[Any, Any]:
        inputs = [member.split(split).x.flatten(1) for member in data.clients]
        client_numbers = np.repeat(
            np.arange(len(inputs)), [len(client_inputs) for client_inputs in inputs]
        )
        return torch.cat(inputs).numpy(), client_numbers

    trees = ExtraTreesClassifier(100, random_state=0).fit(*pooled("train"))
    _, client_counts = np.unique(pooled("validation")[1], return_counts=True)
    return [
        float(trees.score(*pooled("validation"))),
        client_counts.max() / client_counts.sum(),
    ]
