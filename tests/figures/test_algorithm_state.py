"""Pictures of an algorithm's state show the recorded values at their places."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest

from figures.algorithm_state import layers_over_rounds, prompt_attention
from fl_core import rows

LAYERS = ("conv", "fc1", "fc2")


def cells(ax: Any) -> np.ndarray:
    """Return the values of a heat map, rows from the top."""
    mesh = ax.collections[0]
    return mesh.get_array().reshape(mesh.get_coordinates().shape[0] - 1, -1)


def test_attention_is_queries_by_keys_of_the_last_round() -> None:
    values = np.random.default_rng(0).dirichlet(np.ones(4), size=(2, 7))
    frame = rows.frame(
        rows.row(
            "prompt_attention",
            values[r, q, k],
            client="a",
            layer="prompts",
            round=r,
            variant=f"{q}>prompt {k}",
        )
        for r, q, k in np.ndindex(values.shape)
    )
    ax: Any = prompt_attention(frame, plt.subplots()[1], "prompts")
    np.testing.assert_allclose(cells(ax), values[1])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == [
        f"prompt {k}" for k in range(4)
    ]
    assert ax.collections[0].get_clim() == (0, 1)


@pytest.mark.parametrize("metric", ["trained", "retained"])
def test_layers_over_rounds_are_shares_of_the_clients(metric: str) -> None:
    values = np.random.default_rng(1).integers(0, 2, size=(4, 3, 5)).astype(float)
    frame = rows.frame(
        rows.row(metric, values[c, k, r], client=f"c{c}", layer=LAYERS[k], round=r)
        for c, k, r in np.ndindex(4, 3, 5)
    )
    ax: Any = layers_over_rounds(frame, metric)
    np.testing.assert_allclose(cells(ax), values.mean(axis=0))
    assert [tick.get_text() for tick in ax.get_yticklabels()] == list(LAYERS)
    assert ax.figure.axes[-1].get_ylabel().startswith("share of clients")
