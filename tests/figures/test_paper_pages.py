"""The five papers' pages: a difference with its interval is on a page that is drawn, or is computed again here."""

import re

import pandas as pd
import pytest
from scipy.stats import ttest_1samp

from figures import items
from figures.papers import PAPERS
from tests.figures.recompute import accuracies, by_seed, interval, last_three, rows

NOT_KEPT = {"-0.1 ± 1.1"}
"""Its page says that the rows are not kept."""


def scheduling():
    """Return leads on the paper's own images, after the last round and as a mean of the three rounds of Table 2."""
    curves = accuracies("scheduling.runs")
    for dataset in ("mnist", "cifar10"):
        for method in ("vanilla", "anti"):
            for other, moments in (
                ("fedbabu", ([60], [20, 40, 60])),
                ("local_adaptation", ([20, 40, 60],)),
            ):
                gap = curves.xs(f"{dataset}.{method}") - curves.xs(f"{dataset}.{other}")
                for moment in moments:
                    yield interval(gap.loc[moment].mean())


def player_fl():
    for other in ("ditto", "fedbabu", "local_adaptation"):
        yield interval(by_seed("fed_isic")["playerfl"] - by_seed("fed_isic")[other])


def pfedla():
    """Return pFedLA's leads after local training."""
    studies = ("algorithms.pfedla_overlap", "pfedla.methods")
    local_rows = pd.concat(map(rows, studies)).query(
        "metric == 'accuracy' and client == '' and model == 'local'"
    )
    curves = local_rows.pivot(index=["run", "round"], columns="seed", values="value")
    for other in ("fedavg", "fedbn", "pfedme"):
        yield interval(last_three(curves, "pfedla", other))


def fedra():
    style_rows = rows("algorithms.pacs_depth").query(
        "metric == 'accuracy' and model == 'global'"
    )
    curves = style_rows.groupby(["run", "round", "seed"])["value"].mean().unstack()
    yield interval(last_three(curves, "depthfl", "depthfl_plain"))
    yield interval(last_three(curves, "fedra", "fedra_cover"))


COMPUTED = {
    "scheduling": scheduling,
    "player_fl": player_fl,
    "pfedla": pfedla,
    "fedra": fedra,
}


def differences(text):
    """Return the numbers with an interval, without their sign: a sentence may say *below*."""
    return {
        number.lstrip("+-") for number in re.findall(r"[+-]?\d+\.\d+ ± \d+\.\d+", text)
    }


@pytest.mark.parametrize("paper", PAPERS)
def test_a_difference_in_a_sentence_is_drawn_or_computed_again(paper):
    drawn = "".join(
        path.read_text(encoding="utf-8")
        for path in items.PICTURES.glob("*.md")
        if path.name.startswith((f"{paper}.", "algorithms."))
    )
    computed = " ".join(COMPUTED.get(paper, list)())
    text = (items.HERE / f"{paper}.md").read_text(encoding="utf-8")
    named = differences(text)
    assert len(named) >= 5
    assert named - differences(drawn) - differences(" ".join(NOT_KEPT)) <= differences(
        computed
    )


def test_the_lead_over_random_layers_has_the_p_that_the_page_names():
    scores = by_seed("fashion_mnist")
    lead = (scores["playerfl"] - scores["playerfl_random"]).dropna()
    text = (items.HERE / "player_fl.md").read_text(encoding="utf-8")
    assert len(lead) == 8
    assert f"p = {ttest_1samp(lead, 0).pvalue:.3f} by eight seeds" in text
