"""The tables of what each command sees, next to other code that reads the rows."""

import math
import re

import pandas as pd

from diagnostics.metrics.base import METRICS
from figures.decision import first, known, rules
from figures.decision.known_runs import ROWS

FEWEST = 36
"""Validation samples that the second rule asked for."""


def test_the_page_is_made_from_the_rows():
    for module in (known, first):
        page = module.PAGE.read_text(encoding="utf-8")
        assert module.written(page) == page
    rows, page = known.read(), known.PAGE.read_text(encoding="utf-8")
    assert page.splitlines()[2] == rules.answer()
    assert {name for _, name, _ in known.BLOCK.findall(page)} == set(known.TABLES)
    lines = known.truth(rows).splitlines()[2 : 2 + len(known.KNOWN)]
    plans = [[float(cell) for cell in line.split("|")[2:6]] for line in lines]
    gains = [
        max(accuracies) - accuracies[0]
        for accuracies in plans
        if max(accuracies) > accuracies[0]
    ]
    sentence = f"gained {min(gains):.1f} to {max(gains):.1f} points of accuracy on it"
    assert sentence in (known.PAGE.parents[2] / "README.md").read_text(encoding="utf-8")
    screen = page.partition("## Whether")[0]
    shown = known.tested().groupby("kind")["differ"].agg(["sum", "count"])
    dealt, other = (f"{a} of {b}" for a, b in shown.loc[["dealt", "known"]].to_numpy())
    assert f"in {dealt} cases" in screen
    assert f"in {other} runs" in screen
    profiles = [
        f for k, f in known.of(rows, "profile").items() if k[0] not in known.KNOWN
    ]
    claims = sum(claimed(profile) for profile in profiles if "ratio" in profile)
    sentence = " ".join(METRICS["layer_tuning"].compute.__doc__.split())
    assert f"claimed an end in {claims} of" in sentence
    assert f"claimed an end in {claims} of" in page
    for each in known.of(rows, "commands").values():
        assert each["sensitivity_ratio"][0] == "share fc1"
    for size in known.SMALLER:
        outcomes = known.of(rows, f"size {size}")
        right, runs = map(
            int, known.count(outcomes, "loss", ["known_labels"]).split("of")
        )
        enough = 6 * size // 5 >= FEWEST  # a fifth of the samples validates
        assert enough == (right >= 0.8 * runs)
        assert (
            enough or known.count(outcomes, "loss", known.KNOWN, "not shown")[0] == "0"
        )


def claimed(found):
    """Return whether references lie in order, and the ratio further from their middle than its interval."""
    (ratio, error), labels, inputs = (
        found[f"ratio{end}"] for end in ("", " labels", " permuted")
    )
    middle = (labels[0] + inputs[0]) / 2
    return labels[0] > inputs[0] and abs(ratio - middle) > 1.96 * error


def test_dealt_draws_are_counted_by_the_registered_rules():
    """P at most .05; two standard errors of a lead over other clients; and the gain over the shared model."""
    rows, page = known.read(), known.PAGE.read_text(encoding="utf-8")
    tested = known.tested()
    for kind, runs in (("small", 45), ("unequal", 200), ("seeds", 100), ("dealt", 200)):
        called = tested[tested["kind"] == kind]["differ"]
        limit = math.floor(runs * 0.05 + 2 * math.sqrt(runs * 0.05 * 0.95))
        assert len(called) == runs
        assert called.sum() <= limit
        assert f"{limit} of {runs}" in page
    for arm, end, sentence in (
        ("differ", ", others", "| 20 federations, dealt | 15 of 200 | {} of {} |"),
        ("whether", "", "It called {} of {} dealt draws different"),
    ):
        outcomes = known.of(rows, arm, dealt=True).values()
        called = 0
        for outcome in outcomes:
            pairs = [
                outcome[f"{w}{end}, loss"] for w in ("own epochs", "training alone")
            ]
            called += any(value > 2 * error for value, error in pairs)
        assert sentence.format(called, len(outcomes)) in page


def test_the_registered_questions_on_adapters_are_answered_from_the_rows():
    rows, page = known.read(), known.PAGE.read_text(encoding="utf-8")
    head, first = (known.of(rows, arm) for arm in known.ends(known.ADAPTED[0]))
    right, named, at_head, lost = [], [], [], []
    for key, answer in known.of(rows, "whether").items():
        if key[0] in known.ADAPTED:
            alike = key[0] == known.ADAPTED[0]
            right.append((answer["verdict, loss"] == known.DIFFER) != alike)
            learned = min(answer[arm]["validation"] for arm in ("all", "nothing"))
            if alike or learned > 0.99 * math.log(3):
                continue
            *blocks, last = answer["layer_tuning"]
            ends = head[key], first[key]
            near_end, other = ends if last > max(blocks) else ends[::-1]
            named.append(near_end["test"] > other["test"])
            at_head.append(head[key]["test"] > first[key]["test"])
            both = min(ends, key=lambda each: each["validation"])
            lost.append(100 * (both["test"] - near_end["test"]))
    assert f"right in {sum(right)} of {len(right)} federations" in page
    assert f"right in {sum(named)} of {len(named)} federations that differ" in page
    assert f"the constant answer *head* in {sum(at_head)}." in page
    assert f"{sum(lost) / len(lost):.1f} points against training both" in page
    assert max(lost) > 0.9 * sum(lost)


def test_the_first_lines_on_sharing_first_are_those_of_the_rows():
    loss, runs = (
        first.paired(what, "default").diff(axis=1)["policy"]
        for what in ("value", "price")
    )
    assert first.sided(loss).low > 0 > runs.mean()


def test_the_stored_study_of_depth_is_explained_and_quoted_right():
    rows = pd.read_parquet(ROWS.with_name("depth.parquet"))
    folder = ROWS.parent / "depth_data"
    lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line[:3] == "| `"]
    assert re.findall(r"`(\w+)`", " ".join(cells)) == list(rows.columns)
    scored = rows[(rows["seed"] < 4) & rows["arm"].isin(["0", "6", "12", "all"])]
    points = scored["test_macro_f1"].map(lambda each: 100 * sum(each) / len(each))
    keys = ["source", "dose", "arm"]
    means = points.groupby([scored[key] for key in keys]).mean().unstack()
    assert ((means.idxmax(axis=1) == "all").sum(), len(means)) == (8, 10)
    assert round((means["all"] - means["0"]).min()) == -15
