"""FedRA's tables from the runs on PACS: the paper's order, and how many pairs of methods lie as there."""

from __future__ import annotations

import pandas as pd
import pytest

from figures import items
from figures.fedra import depth, tables
from fl_core.errors import UsageError


@pytest.mark.parametrize("dataset", depth.TITLES)
def test_the_methods_are_in_the_papers_order(dataset: str) -> None:
    means = tables._published(dataset)["mean"]
    assert list(means.sort_values(ascending=False).index) == list(tables.METHODS)


@pytest.mark.parametrize(
    ("values", "held", "said"),
    [
        ([0.5, 0.4, 0.3, 0.2, 0.1], True, "10 as there"),
        (
            [0.5, 0.4, 0.3, 0.1, 0.2],
            False,
            "9 as there; 1 the other way round (DepthFL - AllSmall -10.0 ± 0.0)",
        ),
    ],
)
def test_pairs_are_counted(values: list[float], held: bool, said: str) -> None:
    means = pd.DataFrame(
        {seed: [v + seed / 100 for v in values] for seed in range(3)},
        index=list(tables.METHODS),
    )
    finding = tables._order(means)
    assert (finding.held, finding.measured) == (held, said)
    fewer = tables._order(means[[0, 1]])
    assert fewer.held is None
    assert fewer.measured.startswith("10 with too few")
    twins = means.copy()
    twins.loc["fedra"] = means.loc["alllarge"]
    same = tables._order(twins)
    assert same.held is False
    assert "1 equal (AllLarge - FedRA +0.0 " in same.measured
    noisy = means.copy()
    noisy.loc["fedra"] = means.loc["alllarge"] + [0.01, -0.01, 0.005]
    assert "1 undecided (AllLarge - FedRA -0.2 " in tables._order(noisy).measured


def test_it_draws_what_is_there_and_needs_the_whole_models() -> None:
    header, frame = items.find("fedra.table1").read(items.find("fedra.table1").path())
    drawing = tables._draw(header, frame[frame["run"] != "depthfl"])
    assert set(drawing.table["method"]) == set(tables.METHODS) - {"depthfl"}
    assert "DepthFL" not in drawing.findings[0].measured
    with pytest.raises(UsageError, match=r"algorithms\.pacs_depth .*alllarge"):
        tables._draw(header, frame[frame["run"] != "alllarge"])
