"""FedPFT beside twelve methods (Tables 2 and 6), with a part of the clients (Table 9), and beside two stages (Fig. 5b).

Sizes are those of the ablation, :mod:`figures.fedpft.parts`: 12 rounds and 200 images a client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import pandas as pd

from figures import items, names
from figures.fedpft import fitted, insides
from figures.fedpft.fitted import ALPHA, HALF, ORIGIN, OURS, called, gap, measured
from figures.fedpft.insides import BASE, PRINTED, SKEWED
from figures.fedpft.parts import measure
from figures.forms import beside_paper, key_above, marks, sheet
from figures.items import Drawing, Finding, Item, set_apart
from figures.page import markdown, means, missing_runs, numbers
from figures.recipe import by_method, where
from figures.verdicts import LEAD, MARGIN, NO_LOWER, Check, judged, little_learned
from fl_core.config import RunConfig
from fl_core.errors import listing
from fl_core.statistics import mean_interval

METHODS = (
    "local", "fedavg", "fedamp", "fedper", "fedrep", "fedbn", "fedrod", "pfedsd", "pfedgate", "fedcac", "pfedpt",
)  # fmt: skip
ALL_OF_THEM = "share_1"
"""The line with all clients: the run ``fedpft`` of :mod:`figures.fedpft.insides`."""
SHARES = {"share_0.9": 0.9, "share_0.7": 0.7, "share_0.5": 0.5}
"""Shares of the clients that take part in a round, by run (Table 9)."""
CLASSES = {"cifar10": 10, "cifar100": 100, "tiny_imagenet32": 100}
"""Of the data here."""
PAPER_CLASSES = {**CLASSES, "tiny_imagenet32": 200}


@dataclass(frozen=True)
class Claim:
    """A claim on accuracies.

    Attributes:
        expected: the claim in words.
        pairs: upper and lower line of each part, by the part's name.
        check: what is tested of each part.
    """

    expected: str
    pairs: Mapping[str, tuple[str, str]]
    check: Check


@dataclass(frozen=True)
class Column:
    """One column of a table, with its runs.

    Attributes:
        place: the table.
        runs: configurations by line.
        printed: the published method and setting of each line.
        claims: what the paper says of it.
    """

    place: str
    runs: Mapping[str, RunConfig]
    printed: Mapping[str, tuple[str, str]]
    claims: tuple[Claim, ...]

    @property
    def config(self) -> RunConfig:
        """Return the configuration of its first run."""
        return next(iter(self.runs.values()))

    @property
    def dataset(self) -> str:
        """Return the name of the data."""
        return str(self.config.data.dataset)

    def published(self) -> pd.Series:
        """Return the published shares, by line and quantity."""
        table_rows = where(
            items.published("fedpft"),
            place=self.place,
            dataset=self.dataset.removesuffix("32"),
        ).set_index(["method", "setting"])["value"]
        return pd.Series(
            {
                (line, ORIGIN): table_rows[key] / 100
                for line, key in self.printed.items()
            }
        )


def _title(line: str) -> str:
    if line == ALL_OF_THEM:
        return "all clients"
    if line in SHARES:
        return f"{100 * SHARES[line]:g} % of the clients"
    return called(line)


def _claim(upper: str, lowers: Sequence[str], check: Check = LEAD) -> Claim:
    """Return the claim that a line lies above others, or that it is no lower."""
    relation = "above"
    if check is NO_LOWER:
        relation = f"no more than {100 * MARGIN:g} point below"
    pairs = {_title(lower): (upper, lower) for lower in lowers}
    upper_title, lower_titles = _title(upper), listing(list(pairs))
    return Claim(f"{upper_title} lies {relation} {lower_titles}", pairs, check)


def _methods(place: str, dataset: str, setting: str, **keys: Any) -> Column:
    """Return a column with all thirteen methods of the paper."""
    config = BASE.with_keys(dataset=dataset, **keys)
    runs = {
        **by_method(config, METHODS, {}),
        HALF: config.with_keys(algorithm="fedpft", options={"contrast": False}),
        OURS: config.with_keys(algorithm="fedpft"),
    }
    claims = (_claim(OURS, (*METHODS, HALF)), _claim(HALF, METHODS, NO_LOWER))
    printed = {run: (PRINTED.get(run, run), setting) for run in runs}
    return Column(place, runs, printed, claims)


WHOLE = BASE.with_keys(algorithm="fedpft", options=SKEWED)
PARTIAL = Column(
    "Table 9",
    {run: WHOLE.with_keys(participation=share) for run, share in SHARES.items()},
    {
        run: ("fedpft", f"dirichlet 0.1, {100 * share:g} % of the clients")
        for run, share in {ALL_OF_THEM: 1, **SHARES}.items()
    },
    (
        Claim(
            f"FedPFT with a part of the clients lies no more than {100 * MARGIN:g} point below all of them",
            {_title(run): (run, ALL_OF_THEM) for run in SHARES},
            NO_LOWER,
        ),
    ),
)
"""FedPFT with each share of the clients, no lower than with all of them."""
STAGES = ("two_stage", OURS)
TWO_STAGES = Column(
    "Fig. 5b",
    by_method(BASE.with_keys(dataset="cifar100", alpha=ALPHA), STAGES, {}),
    {method: (method, f"dirichlet {ALPHA}") for method in STAGES},
    (_claim(OURS, STAGES[:1]),),
)
"""Two stages have half of the rounds each, so that both methods train as long. In the paper each stage has 1000."""
COLUMNS = {
    "fedpft.partial": PARTIAL,
    "fedpft.few_classes": _methods(
        "Table 6", "cifar10", "2 classes a client", partition="fedpft_pathological", classes_per_client=2, alpha=None,
    ),
    "fedpft.two_stages": TWO_STAGES,
    "fedpft.hundred": _methods("Table 2", "cifar100", f"dirichlet {ALPHA}", alpha=ALPHA),
    "fedpft.tiny": _methods("Table 2", "tiny_imagenet32", f"dirichlet {ALPHA}", alpha=ALPHA),
}  # fmt: skip


def with_all_clients(frame: pd.DataFrame) -> pd.DataFrame:
    """Return rows with those of the run that has all clients, in the seeds that the others have."""
    study = items.find(insides.NAME)
    stored_rows = where(study.read(study.path())[1], run=insides.FEDPFT)
    stored_rows = stored_rows[stored_rows["seed"].isin(frame["seed"].unique())]
    origin_rows = pd.concat(
        [
            fitted.origins(seed_rows, {"seed": int(seed)})
            for seed, seed_rows in stored_rows.groupby("seed")
        ],
        ignore_index=True,
    )
    return pd.concat([origin_rows.assign(run=ALL_OF_THEM), frame], ignore_index=True)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame, column: Column) -> Drawing:
    if column is PARTIAL:
        frame = with_all_clients(frame)
    published, all_values = column.published(), measured(frame)
    keys = [key for key in published.index if key in all_values.index]
    values = all_values.loc[keys]
    titles = {line: _title(line) for line in column.printed}
    with sheet(6.4, 1.8 + 0.3 * len(titles)) as figure:
        marks(
            figure.subplots(),
            beside_paper(values, published, titles, {ORIGIN: "accuracy"}),
            list(titles.values()),
            factor=100,
            xlabel="accuracy, %",
        )
        key_above(figure, 2, size=7.5)
    curves = fitted.curves(frame)
    chance = 1 / CLASSES[column.dataset], 1 / PAPER_CLASSES[column.dataset]
    findings: list[Finding] = []
    for claim in column.claims:
        gaps = {
            part_name: gap(curves, (upper, ORIGIN), (lower, ORIGIN), published)
            for part_name, (upper, lower) in claim.pairs.items()
        }
        levels = {
            titles[line]: (values.loc[line, ORIGIN].mean(), published[line, ORIGIN])
            for line in dict.fromkeys(chain.from_iterable(claim.pairs.values()))
            if (line, ORIGIN) in values.index
        }
        finding = judged(gaps, claim.check).finding(claim.expected, "points more: ")
        findings += set_apart([finding], little_learned(levels, chance))
    config = column.config
    dataset_name, missing_text = names.dataset(column.dataset), missing_runs(header)
    caption = (
        f"Mean test accuracy of the clients, with 95 % intervals over seeds. Hollow marks are the paper's values "
        f"({column.place}). {dataset_name} is split over {config.data.clients} clients with "
        f"{config.data.samples_per_client} training images each. ResNet-8 trains for {config.federation.rounds} of "
        f"1000 rounds.{missing_text}"
    )
    table = pd.DataFrame([
        {"line": titles[line], **mean_interval(score.dropna())._asdict(), "seeds": int(score.notna().sum()),
         "published": published[line, ORIGIN]}
        for (line, _), score in values.iterrows()
    ])  # fmt: skip
    text = markdown({
        "": [titles[line] for line, _ in keys], "accuracy %": means(values, keys),
        "published %": numbers(100 * published[keys]),
    })  # fmt: skip
    return Drawing(figure, table, caption, tuple(findings), text)


ALSO = {
    "fedpft.hundred": ("fedpft.table2",),
    "fedpft.few_classes": ("fedpft.table6",),
    "fedpft.partial": ("fedpft.table9",),
    "fedpft.two_stages": ("fedpft.fig5",),
}
"""The paper's tables and figures that items show."""
BUDGETS = {
    "fedpft.partial": "some 35 minutes of one core; a run takes 3 to 5",
    "fedpft.two_stages": "some 50 minutes of one core; a run takes 6 to 12",
}
for _name, _column in COLUMNS.items():
    _dataset_name = names.dataset(_column.dataset)
    items.register(Item(
        _name, f"Accuracy on {_dataset_name} (FedPFT, {_column.place})", _column.runs, seeds=3,
        budget=BUDGETS.get(_name, "2 to 3 hours of one core; a run takes 3 to 5"), measure=measure,
        draw=partial(_draw, column=_column), partial=True, also=ALSO.get(_name, ()),
    ))  # fmt: skip
