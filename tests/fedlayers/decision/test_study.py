"""A study judges each seed's own decision on test samples that it never saw."""

import numpy as np

from fedlayers.decision.study import POLICY, judged
from fedlayers.decision.table import BASE_RATE, FEDAVG, TEST, recommended
from tests.conftest import refuses
from tests.fedlayers.decision.made import table_of

WAYS = [FEDAVG, "local"]


def test_the_regret_is_that_of_each_seed_s_own_decision():
    table = table_of({BASE_RATE: 1.0, FEDAVG: 0.5, "local": 0.49}, seeds=4, noise=0.3)
    result = judged(table, WAYS)
    for seed, way in result.named.items():
        parts = {key: one for key, one in table.parts.items() if key[0] == seed}
        alone = type(table)(parts, table.score, table.overlap, table.clients)
        assert way == (recommended(alone, WAYS) or BASE_RATE)
    best = min(WAYS, key=lambda way: table.mean(way, TEST))
    scores = [table.parts[seed, way, TEST].mean for seed, way in result.named.items()]
    line = result.table.set_index("way").loc[POLICY]
    np.testing.assert_allclose(
        line["regret"], np.mean(scores) - table.mean(best, TEST), atol=1e-12
    )
    assert result.table.set_index("way").loc[best, "regret"] == 0
    assert result.table["named"].iloc[1:].sum() == 4


def test_one_seed_gives_no_interval_and_what_judges_nothing_is_refused():
    table = table_of({BASE_RATE: 1.0, FEDAVG: 0.5, "local": 0.4})
    assert "no interval" in judged(table, WAYS).text()
    parts = {key: one for key, one in table.parts.items() if key[2] != TEST}
    with refuses(r"one of its ways \(head_local\); got base_rate"):
        judged(table, ["head_local"])
    with refuses("test samples"):
        judged(type(table)(parts, table.score, table.overlap, table.clients), WAYS)
