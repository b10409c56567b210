"""FedPFT's Tables 1, 4, 5, 7 and 8 on CIFAR-10: accuracy, and the gain of fitted classifiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.decision.comparison import main_model
from figures import items
from figures.differences import EVALUATIONS, NOTHING, Difference, settled
from figures.fedpft.insides import BASE, GUESSING, PRINTED, TITLES, behind
from figures.fedpft.mismatch import (
    MATCH,
    ORIGIN,
    PROBE,
    classifier_input,
    mismatch,
    right_after,
)
from figures.forms import beside_paper, key_above, marks, sheet
from figures.items import Drawing, Finding, Item, set_apart
from figures.names import dataset, title
from figures.page import markdown, means, missing_runs, numbers, span
from figures.recipe import by_method, final_models, labels, paused, tested, where
from figures.verdicts import (
    LEAD,
    LEVEL,
    MARGIN,
    NO_HIGHER,
    NO_LOWER,
    Check,
    judged,
    little_learned,
)
from fl_core import rows
from fl_core.errors import listing
from fl_core.models.extended import PROMPTS, Prompted
from fl_core.rounds.engine import Engine
from fl_core.run import runner
from fl_core.statistics import mean_interval

NAME = "fedpft.longer"
ALPHA = 0.5
"""Of the paper's three parameters of Dirichlet, 0.1, 0.5 and 1."""
ROUNDS, TIMES = 80, 20
"""Rounds, and evaluations over them. After 12 rounds FedPFT's classifier has learned too little to compare it."""
_BASE = BASE.with_keys(
    alpha=ALPHA, samples_per_client=500, batch_size=100, rounds=ROUNDS, eval_every=ROUNDS // TIMES,
    checkpoint_every=ROUNDS,
)  # fmt: skip
RUNS = {
    **by_method(_BASE, ("fedavg", "fedper", "fedbn", "fedcac"), {}),
    "no_contrast": _BASE.with_keys(algorithm="fedpft", options={"contrast": False}),
    "fedpft": _BASE.with_keys(algorithm="fedpft"),
}
QUANTITIES = {
    ORIGIN: "the model's own classifier (Origin)",
    PROBE: "a new classifier (Probe)",
    MATCH: "a linear map before its own (Match)",
}
BARE, CONTRAST = "none", PROMPTS[1]
KINDS = {
    BARE: "no prompts",
    "": "classification prompts",
    CONTRAST: "contrastive prompts",
}
"""What FedPFT's features passed, by the variant in its rows; the empty one is what its classifier takes in."""


# --- measuring -------------------------------------------------------------------------------------------------


def measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record each client's Origin accuracy at every evaluation, and Probe and Match of the models of the last three.

    Of FedPFT, Probe is also recorded behind the other prompts.
    """
    eval_every, rounds = (
        int(task.config.execution.eval_every or 1),
        int(task.config.federation.rounds or 1),
    )
    last_rounds = list(range(eval_every, rounds + 1, eval_every))[-EVALUATIONS:]
    fitted_frames, score_frames = [], [pd.DataFrame()]
    for engine, frame in paused(task, last_rounds):
        fitted_frames.append(
            _fitted(engine, task).assign(round=engine.done, **labels(task))
        )
        score_frames.append(frame)
    origin_rows = origins(score_frames[-1], labels(task))
    return pd.concat(
        [origin_rows[~origin_rows["round"].isin(last_rounds)], *fitted_frames],
        ignore_index=True,
    )


def origins(frame: pd.DataFrame, label_columns: Mapping[str, Any]) -> pd.DataFrame:
    """Return rows of Origin accuracy from a run's rows: of the personal models, else of the global one."""
    personal_rows = main_model(tested(frame), "algorithm")
    personal_rows = personal_rows[
        (personal_rows["round"] > 0) & (personal_rows["client"] != "")
    ]
    row_values = zip(
        personal_rows["value"],
        personal_rows["client"],
        personal_rows["round"],
        personal_rows["n_samples"],
        strict=True,
    )
    return rows.frame([
        rows.row(
            ORIGIN, accuracy, client=client, round=int(round_number), split="test", n_samples=sample_count,
            **label_columns,
        )
        for accuracy, client, round_number, sample_count in row_values
    ])  # fmt: skip


def _fitted(engine: Engine, task: runner.Task) -> pd.DataFrame:
    """Return rows of Origin, Probe and Match accuracy of each client's model as it is now."""
    models, seed = final_models(engine, task.model), task.config.execution.seed
    train, test = (
        {
            client.name: (client.split(split_name).x, client.split(split_name).y)
            for client in task.data.clients
        }
        for split_name in ("train", "test")
    )
    accuracy_rows = mismatch(models, train, test, seed=seed)
    table_rows = []
    for client, model in models.items():
        if not isinstance(model, Prompted) or model.contrast_prompts is None:
            continue
        for kind, (prompted_model, layer) in {
            BARE: (model, "transform"),
            CONTRAST: (behind(model, CONTRAST), "head"),
        }.items():
            train_input, test_input = (
                classifier_input(prompted_model, layer, split_data[client], seed=seed)
                for split_data in (train, test)
            )
            is_right = right_after(
                PROBE, train_input, test_input, model.head, seed=seed
            )
            table_rows.append(
                rows.row(
                    PROBE,
                    float(is_right.double().mean()),
                    variant=kind,
                    client=client,
                    layer=layer,
                    split="test",
                    seed=seed,
                    n_samples=len(test_input[1]),
                    n_train=len(train_input[1]),
                )
            )
    if table_rows:
        return pd.concat([accuracy_rows, rows.frame(table_rows)], ignore_index=True)
    return accuracy_rows


items.register(Item(
    NAME, f"Accuracy, and how well classifiers fit the features, after {ROUNDS} rounds on CIFAR-10 (FedPFT)", RUNS,
    seeds=5, measure=measure,
    budget="some 20 hours of one core, estimated; a run takes 2 to 4 minutes on a GPU, FedPFT's own 12",
))  # fmt: skip


# --- Tables 1, 4, 5, 7 and 8 -----------------------------------------------------------------------------------

Side = tuple[str, str]
"""A line of a table with a quantity."""
CALLED = dict.fromkeys(("Table 3", "Table 7"), "accuracy")
"""What a table calls Origin accuracy, where not as here."""


@dataclass(frozen=True)
class Table:
    """One of the tables.

    Attributes:
        place: the place in the paper.
        lines: what is compared, methods or ``fedpft>KIND`` (:data:`KINDS`), with its name in the published numbers.
        quantities: metrics in their order.
        claims: a line, and those that the paper has below it.
        competitive: lines of the claims that the paper calls competitive, so that a point less is enough.
        dataset: the dataset of the published numbers.
        usual: the run of FedPFT as it is.
        names: what the lines are called, where not as :data:`figures.fedpft.insides.TITLES` have it.
        whole: what all claims say together, where the paper says it too.
    """

    place: str
    lines: Mapping[str, str]
    quantities: tuple[str, ...]
    claims: tuple[tuple[str, Sequence[str]], ...] = ()
    competitive: tuple[str, ...] = ()
    dataset: str = "cifar10"
    usual: str = "fedpft"
    names: Mapping[str, str] = field(default_factory=dict)
    whole: str = ""

    def published(self) -> pd.Series:
        """Return the published shares, by line and quantity."""
        published_rows = items.published("fedpft")
        table_rows = where(published_rows, place=self.place, dataset=self.dataset)
        published_shares = (
            table_rows.set_index(["setting", "method", "quantity"])["value"] / 100
        )
        share_by_line = {}
        for line, published_name in self.lines.items():
            for quantity in self.quantities:
                row_key = (
                    f"dirichlet {ALPHA}",
                    published_name,
                    CALLED.get(self.place, quantity),
                )
                share_by_line[line, quantity] = published_shares[row_key]
        return pd.Series(share_by_line)

    def named(self, line: str) -> str:
        """Return a line in words: its method, or where FedPFT's own are compared what the features passed."""
        method, _, kind = line.partition(">")
        if self.place == "Table 5":
            return KINDS[kind]
        return self.names.get(method) or called(method)


def called(method: str) -> str:
    """Return a method's name in pictures."""
    return TITLES.get(method) or title(method)


def _line(method: str, kind: str) -> str:
    if kind:
        return f"{method}>{kind}"
    return method


def _methods(*methods: str) -> dict[str, str]:
    return {method: PRINTED.get(method, method) for method in methods}


OURS, HALF, FEDAVG = "fedpft", "no_contrast", "fedavg"
REST = (FEDAVG, "fedper", "fedbn", "fedcac")
TABLES = {
    "fedpft.table1": Table("Table 1", _methods(*REST, OURS), tuple(QUANTITIES)),
    "fedpft.table4": Table(
        "Table 4",
        _methods(FEDAVG, HALF, OURS),
        (PROBE,),
        ((OURS, [HALF]), (HALF, [FEDAVG])),
    ),
    "fedpft.table5": Table(
        "Table 5",
        {_line(OURS, kind): f"fedpft, {words}" for kind, words in KINDS.items()},
        (PROBE,),
    ),
    "fedpft.table7": Table(
        "Table 7",
        _methods(*RUNS),
        (ORIGIN,),
        ((OURS, [*REST, HALF]), (HALF, REST)),
        competitive=(HALF,),
    ),
    "fedpft.table8": Table(
        "Table 8", _methods(*RUNS), (PROBE,), ((OURS, [*REST, HALF]),)
    ),
}


def curves(frame: pd.DataFrame) -> pd.DataFrame:
    """Return means over clients, (line, quantity, round) x seeds."""
    chosen_rows = frame[frame["metric"].isin(list(QUANTITIES))]
    line_names = pd.Series(
        [
            _line(run, kind)
            for run, kind in zip(
                chosen_rows["run"], chosen_rows["variant"], strict=True
            )
        ],
        chosen_rows.index,
    )
    group_keys = [
        line_names.rename("line"),
        chosen_rows["metric"],
        chosen_rows["round"].astype(int),
        chosen_rows["seed"],
    ]
    return chosen_rows.groupby(group_keys)["value"].mean().unstack("seed")


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """Return means over clients and the last three evaluations, (line, quantity) x seeds."""
    last_values = (
        curves(frame).groupby(level=["line", "metric"], sort=False).tail(EVALUATIONS)
    )
    return last_values.groupby(level=["line", "metric"], sort=False).mean()


def gap(
    values: pd.DataFrame, minuend: Side, subtrahend: Side, published: pd.Series
) -> Difference:
    """Return one line's quantity minus another's by their last three evaluations.

    Args:
        values: from :func:`curves`.
        published: shares by line and quantity.
    """
    if not {minuend, subtrahend} <= set(values.index.droplevel("round")):
        return NOTHING
    return settled(
        pd.concat([values.loc[minuend], values.loc[subtrahend]], keys=["one", "other"]),
        "one",
        "other",
        printed=published[minuend] - published[subtrahend],
    )


def draw(header: Mapping[str, Any], frame: pd.DataFrame, table: Table) -> Drawing:
    """Draw a table's lines from rows of this study's quantities, with the published numbers."""
    mean_accuracies, published = measured(frame), table.published()
    mean_accuracies = mean_accuracies.reindex(
        [line_key for line_key in published.index if line_key in mean_accuracies.index]
    )
    quantities = {
        quantity_name: QUANTITIES[quantity_name] for quantity_name in table.quantities
    }
    line_height = 0.2 + 0.14 * len(quantities)
    with sheet(6.4, 2.3 + line_height * len(table.lines)) as figure:
        marks(
            figure.subplots(),
            beside_paper(mean_accuracies, published, table.lines, quantities),
            list(map(table.named, table.lines)),
            factor=100,
            xlabel="accuracy, %",
        )
        key_above(figure, 2, size=7.5)
    if len(table.quantities) > 1:
        classifier_text = "three classifiers"
    else:
        classifier_text = QUANTITIES[table.quantities[0]]
    if table.dataset == _BASE.data.dataset:
        published_place = table.place
    else:
        dataset_name = dataset(table.dataset)
        published_place = f"{table.place}, {dataset_name}"
    setting_text = setting(header, mean_accuracies)
    missing_text = missing_runs(header, table.lines)
    caption = (
        f"Mean test accuracy of the clients with {classifier_text}, with 95 % intervals over seeds. "
        f"Hollow marks are the paper's values ({published_place}). "
        f"{setting_text}{missing_text}"
    )
    drawn_table = pd.DataFrame([
        {
            "line": table.named(line), "quantity": quantity, **mean_interval(score.dropna())._asdict(),
            "seeds": int(score.notna().sum()), "published": published[line, quantity],
        }
        for (line, quantity), score in mean_accuracies.iterrows()
    ])  # fmt: skip
    findings = set_apart(
        _findings(curves(frame), table), far(frame, table.dataset, table.usual)
    )
    if table.place == "Table 1":
        findings += _of_fedavg(frame, published)
    return Drawing(
        figure, drawn_table, caption, findings, _page(mean_accuracies, published, table)
    )


def far(frame: pd.DataFrame, dataset_name: str, usual_run: str = OURS) -> str:
    """Return evidence that rows are not comparable with the paper's: other images than its data, or FedPFT's low level.

    Args:
        usual_run: the run of FedPFT as it is.
    """
    published_accuracies = items.published_table(
        "fedpft", "Table 7", setting=f"dirichlet {ALPHA}"
    )
    mean_accuracies = measured(frame).reindex([(usual_run, ORIGIN)])
    levels = (
        float(mean_accuracies.mean(axis=None)),
        published_accuracies["accuracy"][OURS] / 100,
    )
    level_text = little_learned({called(OURS): levels}, (GUESSING, GUESSING))
    has_other_images = dataset_name != _BASE.data.dataset
    images_text = ""
    if has_other_images:
        dataset_title = dataset(dataset_name)
        images_text = f"images of CIFAR-10, not of {dataset_title}"
    return "; ".join(filter(None, [images_text, level_text]))


def setting(header: Mapping[str, Any], values: pd.DataFrame) -> str:
    """Describe the federation, its training and the seeds for a caption. The drawn numbers are lines x seeds."""
    runs = [str(line) for line, _ in values.index if line in header["runs"]]
    config = header["runs"][(runs or list(header["runs"]))[0]]["config"]
    seed_counts = values.notna().sum(axis=1)
    counts_text = span(seed_counts)
    return (
        f"CIFAR-10 is split over {config['clients']} clients by Dirichlet({config['alpha']:g}). "
        f"Each client has {config['samples_per_client']} training images. "
        f"ResNet-8 trains for {config['rounds']} of 1000 rounds of {config['epochs']} epochs, "
        f"with {counts_text} seed{'s' * (int(seed_counts.max()) > 1)}."
    )


def _findings(values: pd.DataFrame, table: Table) -> list[Finding]:
    """Return the paper's claims on the table as findings."""
    published = table.published()
    above, level = partial(_above, published), partial(_level, published)
    if table.place == "Table 1":
        return [
            above(values, "a new classifier is more accurate than FedAvg's own",
                  {"": ((FEDAVG, PROBE), (FEDAVG, ORIGIN))}),
            level(values, "a new classifier is no more accurate than FedPFT's own", (OURS, PROBE), (OURS, ORIGIN)),
        ]  # fmt: skip
    if table.place == "Table 5":
        return [
            level(values,
                  f"features behind {prompt_name} serve a new classifier as those behind classification prompts do",
                  (_line(OURS, kind), PROBE), (OURS, PROBE))
            for kind, prompt_name in KINDS.items() if kind
        ]  # fmt: skip
    quantity = table.quantities[0]
    quantity_text = "accuracy of a new classifier"
    if quantity == ORIGIN:
        quantity_text = "accuracy"
    claim_findings, all_pairs = [], {}
    for upper_line, lower_lines in table.claims:
        upper_name, lower_names = (
            table.named(upper_line),
            list(map(table.named, lower_lines)),
        )
        line_pairs = {}
        for lower_line, lower_name in zip(lower_lines, lower_names, strict=True):
            line_pair = (upper_line, quantity), (lower_line, quantity)
            line_pairs[f"{lower_name} "] = line_pair
            short_names = (
                line_name.partition(":")[0] for line_name in (upper_name, lower_name)
            )
            all_pairs[" over ".join(short_names)] = line_pair
        check, relation = LEAD, "lies above"
        if upper_line in table.competitive:
            check, relation = (
                NO_LOWER,
                f"lies no more than {100 * MARGIN:g} point below",
            )
        expected = f"{quantity_text}: {upper_name} {relation} {listing(lower_names)}"
        claim_findings.append(above(values, expected, line_pairs, check))
    if table.place == "Table 7":
        claim_findings.append(_without_contrast(values))
    if not table.whole:
        return claim_findings
    return [above(values, table.whole, all_pairs), *claim_findings]


def _without_contrast(values: pd.DataFrame) -> Finding:
    """Return whether prompts alone match features and classifier: a new classifier hardly gains."""
    published_tables = [
        TABLES[table_name].published()
        for table_name in ("fedpft.table4", "fedpft.table7")
    ]
    gain = gap(values, (HALF, PROBE), (HALF, ORIGIN), pd.concat(published_tables))
    half_name = called(HALF)
    return judged({"": gain}, NO_HIGHER).finding(
        f"a new classifier gains no more than {100 * MARGIN:g} point over that of {half_name}",
        "points more: ",
    )


def _of_fedavg(frame: pd.DataFrame, published: pd.Series) -> tuple[Finding, ...]:
    """Return the abstract's two claims on FedAvg and other methods. No run of FedPFT is behind them."""
    accuracy_curves, mean_values = curves(frame), measured(frame)
    above = partial(_above, published)
    levels = {
        called(run): (mean_values.loc[(run, ORIGIN)].mean(), published[run, ORIGIN])
        for run in REST
    }
    rest_names = listing(map(called, REST[1:]))
    comparison = (
        above(accuracy_curves, f"{claim} is more accurate than {rest_names} {condition}",
              {called(method): ((FEDAVG, quantity), (method, kind)) for method in REST[1:]})
        for claim, quantity, condition, kind in (
            ("a new classifier behind FedAvg's extractor", PROBE, "with one", PROBE),
            ("FedAvg with a linear map", MATCH, "as they are", ORIGIN),
        )
    )  # fmt: skip
    measured_gap, published_gap = (
        100 * (source_values[FEDAVG, MATCH] - source_values[FEDAVG, PROBE])
        for source_values in (mean_values.mean(axis=1), published)
    )
    fit_text = (
        f"FedAvg's map lies {measured_gap:+.1f} points from a new classifier, {published_gap:+.1f} in "
        "the paper: not explained"
    )
    unexplained_text = ""
    if abs(measured_gap - published_gap) > 100 * MARGIN:
        unexplained_text = fit_text
    return set_apart(
        comparison, little_learned(levels, (GUESSING, GUESSING)) or unexplained_text
    )


def _above(
    published: pd.Series,
    values: pd.DataFrame,
    expected: str,
    pairs: Mapping[str, tuple[Side, Side]],
    check: Check = LEAD,
) -> Finding:
    """Return a finding on whether in every pair the first lies above the second, with the pairs' names."""
    gaps = {
        pair_name.strip(" ,"): gap(values, *line_pair, published)
        for pair_name, line_pair in pairs.items()
    }
    verdict = judged(gaps, check)
    return verdict.finding(expected, "points more: ")


def _level(
    published: pd.Series,
    values: pd.DataFrame,
    expected: str,
    line_key: Side,
    reference_key: Side,
) -> Finding:
    """Return a finding on whether a line lies within :data:`figures.verdicts.MARGIN` of the reference."""
    verdict = judged({"": gap(values, line_key, reference_key, published)}, LEVEL)
    expected = f"{expected}, within {100 * MARGIN:g} point"
    return verdict.finding(expected, "points more: ")


def _page(values: pd.DataFrame, published: pd.Series, table: Table) -> str:
    """Return the numbers as a table, and a note on what they are."""
    columns: dict[str, list[str]] = {"": [table.named(line) for line in table.lines]}
    for quantity in table.quantities:
        quantity_name = quantity.removesuffix("_accuracy").capitalize()
        column_title = f"{quantity_name} %"
        line_keys = [(line, quantity) for line in table.lines]
        columns[column_title] = means(values, line_keys)
        columns[f"{column_title} (published)"] = numbers(100 * published[line_keys])
    sentences = ["± is half the 95 % interval over seeds."]
    if ORIGIN in table.quantities:
        sentences.append("Origin is the model as it is. The paper has its best round.")
    if {PROBE, MATCH} & set(table.quantities):
        sentences.append(
            "Probe is a new linear classifier on the features. Match is a linear map before the model's own "
            "classifier. Both train for 100 epochs of SGD on the client's training images. The extractor stays fixed."
        )
    note = " ".join(sentences)
    table_text = markdown(columns)
    return f"{table_text}\n\n{note}"


WHAT = {
    "fedpft.table1": "Accuracy before and after the classifier is matched to the features, CIFAR-10",
    "fedpft.table4": "Linear separability of three methods' features, CIFAR-10",
    "fedpft.table5": "Linear separability of FedPFT's features, by kind of prompt, CIFAR-10",
    "fedpft.table7": "Accuracy of six of the thirteen methods, CIFAR-10, Dirichlet",
    "fedpft.table8": "Linear separability of six methods' features, CIFAR-10",
}
for _name, _table in TABLES.items():
    _title = f"{WHAT[_name]} (FedPFT, {_table.place}, α = {ALPHA:g})"
    items.register(Item(_name, _title, source=NAME, draw=partial(draw, table=_table)))
