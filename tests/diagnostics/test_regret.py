"""The benchmark of rules against the stored table, by hand."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedlayers as fl
from diagnostics import regret
from diagnostics.select import RULES
from fedlayers import rule_benchmark
from fl_core.errors import RunError
from fl_core.rows import row
from tests.conftest import refuses

FEDERATION = "known_labels"
KNEE = "examples.rules.knee:knee"


@pytest.fixture(scope="module")
def table():
    return pd.read_csv(regret.TRUTH, keep_default_na=False)


def test_the_table_is_whole_and_small(table):
    assert regret.TRUTH.stat().st_size < 200_000
    assert not table.duplicated(["federation", "seed", "shared"]).any()
    assert (table["lr"].groupby(table["federation"]).nunique() == 1).all()
    assert regret.federations()
    for name in regret.federations():
        for seed in regret.known_seeds(name):
            truth = regret.truth_of(name, seed)
            if name in regret.ADAPTED:
                cuts = [truth.layers[:k] for k in range(len(truth.layers) + 1)]
                assert all("+".join(cut) in truth.accuracy for cut in cuts)
            else:
                assert len(truth.accuracy) == 2 ** len(truth.layers)
            assert min(truth.lost(plan.split("+")) for plan in truth.accuracy) == 0


def test_the_constants_are_those_of_the_table(table):
    """All by hand, from the file."""
    answers = ["fc1"], ["fc1", "fc2", "fc3"]
    left = iter(answers)
    result = fl.regret(lambda run: next(left), federations=[FEDERATION], seeds=2)
    for seed, line in result.rows.set_index("seed").iterrows():
        part = table[(table["federation"] == FEDERATION) & (table["seed"] == seed)]
        points = part.set_index("shared")["accuracy"].astype(float)
        best = points.max()
        assert line["rule"] == best - points["+".join(answers[seed])]
        assert line["fedavg"] == best - points["fc1+fc2+fc3"]
        assert line["head_local"] == best - points["fc1+fc2"]
        assert line["random"] == pytest.approx(best - points.mean())
    assert len(result.rows) == 2
    assert math.isnan(result.mean().low)


def test_a_rule_from_outside_prints_what_its_page_shows():
    """The page was written by another process, on another day."""
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text("utf-8")
    _, _, block = page.partition(f"$ fedlayers regret {KNEE} ")
    command, _, printed = block.partition("```")[0].partition("\n")
    assert command == "--metric grad_norm --federations known_outlier --seeds 1"
    result = fl.regret(KNEE, metric="grad_norm", federations=["known_outlier"], seeds=1)
    assert str(result) == printed.rstrip()
    assert not result.left_out
    assert f"mean over 1: {result.rows['rule'].mean():.2f}" in printed
    best = regret.ranked_lines()[0]
    assert f"best known rule on the public half, {best.name}: mean over 1: " in printed


def made(rows):
    """A result of points lost by federation."""
    lines = [
        dict(zip(regret.COLUMNS, (name, 0, "fc1", lost, 1.0, 2.0, 3.0), strict=True))
        for name, lost in rows.items()
    ]
    return regret.Regret("made", pd.DataFrame(lines), {})


def test_means_over_federations_and_halves():
    lost = {"known_labels": 1.0, "heart": 4.0, "known_both": 0.5, "other": 2.0}
    result = made({"known_inputs": 3.0, **lost})
    values = [3.0, *lost.values()]
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    assert result.mean() == pytest.approx((np.mean(values), low, high))
    public = [v for name, v in lost.items() if name in regret.PUBLIC]
    assert result.mean("rule", "public").value == pytest.approx(np.mean(public))
    of_held_out = [3.0, *[v for n, v in lost.items() if n not in regret.PUBLIC]]
    assert result.mean("rule", "held out").value == pytest.approx(np.mean(of_held_out))
    by_source = result.by_source()  # digits, heart and other
    assert by_source.value == pytest.approx(np.mean([np.mean([1.0, 0.5, 3.0]), 4, 2]))
    with refuses("sources of data must be at least 3.*got 2"):
        result.by_source("rule", "held out")
    everything, public, held_out = str(result).splitlines()[7:10]
    assert f", by source {by_source.value:.2f} [" in everything
    assert "by source none, 2 of at least 3" in public
    assert "by source none, 2 of at least 3" in held_out
    with refuses("'median'"):
        result.mean("median")


def test_the_held_out_half_alone_says_that_a_rule_is_better_than_a_constant():
    """By paired differences. The public half, where the rule loses much, says nothing."""
    lost = {"known_inputs": 0.2, "known_both": 0.5, "known_clusters": 1.0}
    result = made({"known_labels": 9.0, **lost})
    low, high = stats.ttest_1samp([2 - v for v in lost.values()], 0).confidence_interval()  # fmt: skip
    assert result.gain() == pytest.approx((2 - np.mean([*lost.values()]), low, high))
    assert low > 0 > stats.ttest_1samp([1 - v for v in lost.values()], 0).confidence_interval().low  # fmt: skip
    line = next(line for line in str(result).splitlines() if line.startswith("gain"))
    assert f"over head_local +1.43 [{low:+.2f}, {high:+.2f}]" in line
    assert line.endswith("; shown to be better than: head_local, random")
    assert "gain" not in str(made({"known_labels": 9.0, "known_inputs": 0.2}))
    with refuses("a line in a federation"):
        made({"known_labels": 9.0}).gain()


def test_what_is_left_out_has_a_line_a_federation_and_reason():
    left_out = {"a seed 0": "slow", "a seed 1": "slow", "a seed 2": "odd"}
    result = replace(made({"heart": 4.0}), left_out={**left_out, "b": "needs files"})
    assert str(result).splitlines()[-3:] == [
        "left out: a seeds 0, 1: slow",
        "left out: a seed 2: odd",
        "left out: b: needs files",
    ]


def raises(run):
    raise ZeroDivisionError("no slope")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (raises, "ZeroDivisionError: no slope"),
        (lambda run: [], "the shared layers' names, or a plan; got list"),
        (lambda run: None, "the shared layers' names, or a plan; got None"),
        (lambda run: iter(["fc1"]), "the shared layers' names, or a plan; got list_it"),
        (lambda run: ["fc9"], "'fc9'"),
    ],
)
def test_rules_that_name_no_plan_are_left_out_by_name(rule, message):
    result = fl.regret(rule, federations=[FEDERATION], seeds=1)
    assert message in result.left_out[f"{FEDERATION} seed 0"]
    assert f"left out: {FEDERATION} seed 0" in str(result)
    assert "No federation has a line" in str(result)
    with refuses("a line in a federation"):
        result.mean()


def test_a_metric_that_the_network_lacks_is_left_out_and_one_without_an_end_says_so():
    result = fl.regret("top", metric="bn_scale", federations=[FEDERATION], seeds=1)
    assert "bn_scale" in result.left_out[f"{FEDERATION} seed 0"]
    assert "bn_scale after 1 round, which declares no end" in str(result)


@pytest.mark.filterwarnings("ignore:the plan, by above_null")
def test_a_metric_of_the_whole_network_is_left_out_and_a_null_is_measured():
    result = fl.regret(
        "top", metric="clients_differ", federations=[FEDERATION], seeds=1
    )
    why = result.left_out[f"{FEDERATION} seed 0"]
    assert "clients_differ, which has one of the whole network" in why
    result = fl.regret(
        "above_null", metric="grad_norm", federations=[FEDERATION], seeds=1
    )
    assert len(result.rows) + len(result.left_out) == 1
    assert "must have a null" not in str(result)


@pytest.mark.parametrize(
    "answer", [np.array(["fc1", "fc3"]), {"fc3", "fc1"}, ("fc3", "fc1"), np.int64(1)]
)
def test_a_rule_answers_by_any_collection_of_names_or_a_count(answer):
    expected = ("fc1", "fc3")
    if isinstance(answer, np.integer):
        expected = ("fc1",)
    rule = RULES.adopt(lambda values: answer, "made")
    assert rule.shared(["fc1", "fc2", "fc3"], [1.0, 2.0, 3.0]) == expected


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (iter(["fc1"]), "list_iterator"),
        (None, "None"),
        ("fc1", "'fc1'"),
        (True, "True"),
        (1.5, "1.5"),
        (math.nan, "nan"),
        (0, "0"),
        (4, "4"),
    ],
)
def test_an_answer_that_is_no_plan_is_refused_in_one_line(answer, got):
    """Without an address in memory, so that all seeds have one reason."""
    made = RULES.adopt(lambda values: answer, "made")
    with refuses(f"a number from 1 to 3 or a list of names; got {got}[.]", RunError):
        made.shared(["fc1", "fc2", "fc3"], [1.0, 2.0, 3.0])


def test_a_rule_by_its_place_needs_no_decorator(tmp_path, monkeypatch, own_members):
    own_members(fl.RULES)
    (tmp_path / "my_rule.py").write_text(
        "def half_way(values): return len(values) // 2"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = fl.regret(
        "my_rule:half_way", metric="grad_norm", federations="heart", seeds=1
    )
    assert [*result.rows["shared"]] == ["fc1+fc2"]
    assert result.name == "half_way of grad_norm after 1 round"


def by_heart(values):
    return ["fc2"]


def below(values, layers, threshold=1.2):
    """Share the layers below the mean times the threshold."""
    most = threshold * np.mean(values)
    return [name for name, value in zip(layers, values, strict=True) if value < most]


def test_a_rule_may_name_layers_whatever_it_takes(own_members, monkeypatch):
    """Names of its own, or names by a threshold. A federation that is named twice counts once."""
    own_members(fl.RULES)
    monkeypatch.setattr(rule_benchmark, "known_seeds", lambda name: [0])
    for rule in (by_heart, below):
        result = fl.regret(rule, metric="grad_norm", federations=["heart"] * 2, seeds=9)
        assert len(result.rows) == 1
        assert result.left_out == {"heart seeds from 1": "the table has 1 seed, not 9"}


def test_values_that_are_no_numbers_are_left_out_by_name(own_members):
    own_members(fl.METRICS)

    @fl.metric(description="no number", direction="none")
    def hollow(measurement):
        return [
            row("hollow", math.nan, client=subject.client, layer=layer.name, n_train=9)
            for subject in measurement.subjects
            for layer in measurement.layers
        ]

    result = fl.regret(
        "largest_rise", metric="hollow", federations=[FEDERATION], seeds=1
    )
    assert result.rows.empty
    assert "hollow" in result.left_out[f"{FEDERATION} seed 0"]


class Callable:
    """An object that can be called, but is no function."""

    def __call__(self, values):
        return 1


def test_requests_that_cannot_be_met():
    for options, message in (
        ({"rule": "largest_ris"}, "'largest_ris'.*'largest_rise'"),
        ({"metric": "ckaa"}, "'ckaa'.*'cka'"),
        ({"federations": ["known_label"]}, "'known_label'.*'known_labels'"),
        ({"rounds": 0}, "rounds.*0"),
        ({"treshold": 2.0}, "'treshold'.*'threshold'"),
        ({"rule": "manual", "metric": "cka"}, "rule that decides by itself.*'manual'"),
        ({"seeds": 0}, "seeds.*0"),
        ({"rounds": 1.5}, "rounds must be int; got 1.5"),
        ({"k": 2.5}, "k must be int; got 2.5"),
        ({"threshold": 0}, "threshold must be above 0"),
        ({"rule": Callable(), "metric": "cka"}, "a function; got Callable"),
        ({"rule": "a/mine.py:half"}, "package.module:name.*without .py: a.mine:half"),
    ):
        with refuses(message):
            fl.regret(**options)


def test_federations_whose_files_are_not_here_are_left_out_by_name(monkeypatch):
    monkeypatch.delenv("FEDLAYERS_DATA_ROOT", raising=False)
    names, missing = rule_benchmark.available()
    assert {*names} | {*missing} == {*regret.federations()}
    assert "heart" in names
    assert all(name.startswith("known_") for name in {*names} - {"heart"})
    monkeypatch.setenv("FEDLAYERS_DATA_ROOT", "somewhere")
    assert rule_benchmark.available() == (regret.federations(), {})
    result = fl.regret(lambda run: ["fc1"], federations=["activity", "heart"], seeds=1)
    assert [*result.rows["federation"]] == ["heart"]
    assert "somewhere" in result.left_out["activity seed 0"]


def test_the_plans_of_adapters_are_cuts_and_parts():
    layers = [f"{block}.lora_{kind}" for block in "abc" for kind in "AB"] + ["head"]
    plans = regret.cuts_and_parts(layers)
    assert len({*plans}) == len(plans)
    for k in range(len(layers) + 1):
        assert {tuple(layers[:k]), tuple(layers[k:])} <= {*plans}
    for part in (["a.lora_B"], ["b.lora_A", "b.lora_B"]):
        assert tuple(name for name in layers if name not in part) in plans
    assert ("b.lora_A", "b.lora_B") in plans
    assert all([*plan] == sorted(plan, key=layers.index) for plan in plans)


def test_the_benchmark_s_lines_by_hand():
    table = pd.read_csv(regret.BENCHMARK, keep_default_na=False)
    names = [name for name in table if name not in (*regret.LINE, "plans")]
    row = table[(table["metric"] == "grad_norm") & (table["rule"] == "top")]
    row = row[row["rounds"] == 5].iloc[0]
    lost = [float(row[name]) for name in names]
    line = regret.benchmark_line("grad_norm", "top", 6)
    assert (line.rounds, line.mean) == (5, pytest.approx(np.mean(lost)))
    assert f"loses {np.mean(lost):.2f} points" in line.text()
    head = table[table["rule"] == "head_local"].iloc[0]
    assert line.head_local == {name: float(head[name]) for name in names}
    held_out = [name for name in names if name not in regret.PUBLIC]
    gains = [float(head[name]) - float(row[name]) for name in held_out]
    low, high = stats.ttest_1samp(gains, 0).confidence_interval()
    gain = f"gains {np.mean(gains):+.2f} [{low:+.2f}, {high:+.2f}] points"
    assert f"In {len(held_out)} of them, held out, it {gain}" in line.text()
    assert regret.benchmark_line("grad_norm", "top", math.nan).rounds == 1
    assert regret.benchmark_line("grad_norm", "knee", 1) is None
    public = [
        np.mean([v for n, v in ranked.lost.items() if n in regret.PUBLIC])
        for ranked in regret.ranked_lines()
    ]
    assert public == sorted(public)


def test_a_rule_with_one_plan_says_that_it_sees_nothing():
    line = regret.BenchmarkLine("cka", "mine", 1, {"heart": 2.0}, {"heart": 1.0}, 1)
    assert "does not see what differs" in line.text()
    assert "does not see" not in replace(line, plans=2).text()


def test_a_notebook_shows_the_text_and_the_table():
    result = made({"heart": 4.0, "other": 2.0})
    shown = result._repr_html_()
    assert "<table>" in shown
    for name in result.table.columns:
        assert str(name) in shown
    assert str(result).splitlines()[0] in shown
