"""Whether the layers' pattern after one epoch of training is there in the last round's models, too (Sec. 5).

The pattern has four parts, one for each quantity of Figs. 1 to 4. Each is asked of every network trained alone and
federated. The models after one epoch stand beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from figures import items
from figures.differences import Difference, joint
from figures.forms import matrix, sheet
from figures.items import Drawing, Finding, Item
from figures.page import markdown, missing_runs, seeds_behind
from figures.player_fl.expectations import (
    far_larger,
    largest_last,
    late_spike,
    rises_late,
)
from figures.player_fl.layers import FIRST, MOMENTS, NAME, NETWORKS, Network, run_of
from figures.player_fl.views import (
    APART,
    CURVATURE,
    MOMENT,
    S_FINAL,
    S_FIRST,
    VARIANCE,
    Way,
)
from figures.verdicts import LEAD, by_seed, judged, of_seeds, plain

RETAINED = "player_fl.retained"
QUANTITIES = (
    "gradient variance",
    "curvature per parameter",
    "federation sensitivity",
    "1 - CKA",
)
SHORT = {FIRST: "epoch 1", "independent": "alone", "federated": "federated"}


@dataclass(frozen=True)
class Part:
    """One quantity of one network at one moment.

    Attributes:
        quantity: one of :data:`QUANTITIES`.
        network: as it is at the moment.
        moment: one of :data:`figures.player_fl.layers.MOMENTS`.
        text: in how many seeds the pattern is there, with the interval.
        held: the verdict by that interval.
        count, seeds: the seeds with the pattern, and all.
    """

    quantity: str
    network: Network
    moment: str
    text: str
    held: bool | None
    count: int
    seeds: int

    @property
    def title(self) -> str:
        """Return quantity, network and moment in words."""
        return f"{self.quantity} of {self.network.title}, {SHORT[self.moment]}"


def way_of(quantity: str, moment: str) -> Way:
    """Return the default's definition of a quantity at a moment."""
    sensitivity = S_FIRST if moment == FIRST else S_FINAL
    ways = (VARIANCE, CURVATURE, sensitivity, APART)
    return dict(zip(QUANTITIES, ways, strict=True))[quantity][0]


def pattern(quantity: str, network: Network) -> Callable[[pd.Series], bool] | None:
    """Return what is asked of a curve; None of dissimilarity in a network without convolutions."""
    if quantity == "federation sensitivity":
        return late_spike
    if quantity == "1 - CKA":
        if not network.last_conv:
            return None
        return partial(rises_late, last_conv=network.last_conv)
    return far_larger if network.last_conv else largest_last


def parts(frame: pd.DataFrame) -> Iterator[Part]:
    """Yield every part that was measured."""
    for quantity in QUANTITIES:
        for dataset, base_network in NETWORKS.items():
            for moment in MOMENTS:
                network = base_network.at(moment)
                has_pattern = pattern(quantity, network)
                run_rows = frame[frame["run"] == run_of(dataset, moment)]
                layer_curves = way_of(quantity, moment).curves(run_rows)
                if has_pattern is None or layer_curves.empty:
                    continue
                text, verdict = of_seeds(layer_curves, has_pattern)
                seed_curves = by_seed(layer_curves)
                pattern_count = sum(
                    has_pattern(seed_curves[seed]) for seed in seed_curves
                )
                yield Part(
                    quantity,
                    network,
                    moment,
                    text,
                    verdict,
                    pattern_count,
                    seed_curves.shape[1],
                )


def in_final_models(measured_parts: list[Part]) -> Finding:
    """Return whether every part holds in the final models.

    A network that is not comparable may leave it open, not contradict it.
    """
    final_parts = [
        measured_part
        for measured_part in measured_parts
        if measured_part.moment != FIRST
    ]
    comparable_parts = [
        measured_part
        for measured_part in final_parts
        if not measured_part.network.incomparable
    ]
    verdicts = []
    for measured_part in final_parts:
        verdict = measured_part.held
        if measured_part.network.incomparable:
            verdict = verdict or None
        verdicts.append(verdict)
    held_count = sum(measured_part.held is True for measured_part in comparable_parts)
    missing_parts = [
        f"{measured_part.title} in {measured_part.count} of {measured_part.seeds}"
        for measured_part in comparable_parts
        if not measured_part.held
    ]
    text = f"{held_count} of {len(comparable_parts)} comparable parts are there"
    if missing_parts:
        missing_text = "; ".join(missing_parts)
        text = f"{text}; not shown: {missing_text}"
    return Finding(
        "the pattern of all four quantities is there in the last round's models, trained alone and federated",
        text,
        joint(verdicts),
    )


def grows_with_training(frame: pd.DataFrame) -> Finding:
    """Return whether the last layer's 1 - CKA is larger in final models than after one epoch, paired by seed.

    Only networks whose final models are comparable are asked.
    """
    way, gaps = way_of("1 - CKA", FIRST), {}
    for dataset, base_network in NETWORKS.items():
        ends = {}
        for moment in MOMENTS:
            run_rows = frame[frame["run"] == run_of(dataset, moment)]
            ends[moment] = by_seed(way.curves(run_rows)).iloc[-1]
        for moment in MOMENTS:
            network = base_network.at(moment)
            if moment != FIRST and not network.incomparable:
                gap = (ends[moment] - ends[FIRST]).dropna()
                gaps[f"{network.title}, {SHORT[moment]}"] = Difference(gap)
    return judged(gaps, LEAD, plain).finding(
        "1 - CKA of the last layer is larger in the last round's models than after one epoch"
    )


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    measured_parts = list(parts(frame))
    titles = []
    for network in NETWORKS.values():
        titles += [f"{network.title}, {SHORT[moment]}" for moment in MOMENTS]
    shares = pd.DataFrame(np.nan, index=titles, columns=list(QUANTITIES))
    count_texts = pd.DataFrame("–", index=titles, columns=shares.columns)
    findings = [in_final_models(measured_parts), grows_with_training(frame)]
    table_rows = []
    for measured_part in measured_parts:
        title = f"{measured_part.network.title}, {SHORT[measured_part.moment]}"
        shares.loc[title, measured_part.quantity] = (
            measured_part.count / measured_part.seeds
        )
        count_texts.loc[title, measured_part.quantity] = (
            f"{measured_part.count} of {measured_part.seeds}"
        )
        reason, moment = (
            measured_part.network.incomparable,
            MOMENT[measured_part.moment],
        )
        expected = f"{measured_part.network.title} ({moment}): the pattern of {measured_part.quantity} is there"
        if measured_part.moment != FIRST:
            findings.append(
                Finding(expected, measured_part.text, measured_part.held, reason)
            )
        table_rows.append({
            "quantity": measured_part.quantity, "dataset": measured_part.network.title, "moment": moment,
            "seeds_with_pattern": measured_part.count, "seeds": measured_part.seeds, "comparable": not reason,
        })  # fmt: skip
    with sheet(6.8, 4.8) as figure:
        matrix(
            figure.subplots(),
            (100 * shares).rename(columns=lambda name: name.replace(" ", "\n", 1)),
            texts=count_texts,
            bar="% of seeds",
            high=100,
            vmin=0,
            colours="Blues",
        )
    columns = {"network and models": titles}
    for quantity in QUANTITIES:
        columns[quantity] = list(count_texts[quantity])
    seeds_text, missing_text = seeds_behind(header), missing_runs(header)
    caption = (
        "Seeds with the pattern that the paper describes, of each network after one epoch and of its final models. "
        "Gradient variance and curvature: at least 10 times the smallest at fc1 and 100 times at fc2, or without "
        "convolutions largest at the last layer. Federation sensitivity: the largest step is in the later half. "
        f"1 - CKA: it rises most in the dense layers. There are {seeds_text} seeds.{missing_text}"
    )
    return Drawing(
        figure, pd.DataFrame(table_rows), caption, tuple(findings), markdown(columns)
    )


items.register(
    Item(
        RETAINED,
        "The layers' pattern after one epoch and in the final models (PLayer-FL, Sec. 5)",
        source=NAME,
        draw=_draw,
    )
)
