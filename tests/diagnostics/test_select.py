"""A decision follows from the rows by a rule that can be read off the numbers, or is refused by name."""

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from diagnostics.curve import both_ways
from diagnostics.metrics import facts_of
from diagnostics.report import Report, explain
from diagnostics.select import RULES, Rule, decide, ratios, select, sensitivity_ratio
from diagnostics.sensitivity import recorded_rows
from fl_core import __version__
from fl_core.errors import RunError, UsageError
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.rows import frame, row, write
from tests.conftest import refuses

LAYERS = (
    Layer("conv1", ("conv1.weight", "conv1.bias"), (), "conv1"),
    Layer("conv2", ("conv2.weight",), ("conv2.mean",), "conv2"),
    Layer("fc1", ("fc1.weight",), (), "fc1"),
    Layer("fc10", ("fc10.weight",), (), "fc10"),
    Layer("spare", ("spare.weight",), used=False),
)
HEADER = {
    "layers": [asdict(layer) for layer in LAYERS],
    "data": "d" * 64,
    "checkpoint": "c" * 64,
    "seed": 3,
    "version": "0.1.0",
}
SENSITIVITIES = {"a": (100, [1.0, 1.1, 1.2, 4.0]), "b": (300, [1.0, 1.1, 2.0, 3.0])}
COMBINED = [1.0, 1.1, (1.2 + 3 * 2.0) / 4, (4.0 + 3 * 3.0) / 4]


def rows_of(
    clients=SENSITIVITIES,
    metric="federation_sensitivity",
    variant="training",
    names=None,
    **columns,
):
    """One row a client and layer in use; None is a value that could not be computed."""
    return [
        row(
            metric,
            value,
            status="ok" if value is not None else "the loss is not finite",
            client=client,
            layer=layer,
            variant=variant,
            n_train=n_train,
            **columns,
        )
        for client, (n_train, values) in clients.items()
        for layer, value in zip(
            names or [layer.name for layer in LAYERS], values, strict=False
        )
    ]


def pairs_of(matrix):
    """Rows of a metric of pairs from {(client, client): values}."""
    return [
        row("cka", value, client=a, client_b=b, layer=layer.name, variant="flatten")
        for (a, b), values in matrix.items()
        for layer, value in zip(LAYERS, values, strict=False)
    ]


def measured(*rows, **header):
    return {**HEADER, **header}, frame([line for group in rows for line in group])


def of_a(*values, **how):
    """Measured rows of one client with four samples."""
    return measured(rows_of({"a": (4, [*values])}, **how))


KNEE = "examples.rules.knee:knee"
DECIDE = ["sensitivity_ratio", KNEE]
NAMES = [layer.name for layer in LAYERS]


curves = st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=8)


@given(curves, st.floats(0.5, 3.0))
def test_rules_of_ratios_by_their_definitions(values, threshold):
    """With 1-based layers: the smallest l with S_{l+1}/S_l > t, or L - 1."""
    jumps = [after / before for before, after in pairwise(values)]
    crossed = [count for count, jump in enumerate(jumps, 1) if jump > threshold]
    expected = crossed[0] if crossed else len(jumps)
    assert ratios(values) == jumps
    assert sensitivity_ratio(values, threshold) == expected
    assert bool(RULES["sensitivity_ratio"].lacks(values, threshold)) == (not crossed)
    for name in DECIDE:
        assert 1 <= RULES[name].cut(values, threshold) < len(values)
    assert sensitivity_ratio([1.0, 1.5, 3.0, 3.0], 1.5) == 2  # equal is not above


def test_the_curve_is_the_weighted_mean_of_the_clients(tmp_path):
    """Recomputed from the clients' rows, in any order: a combined row that says otherwise is not read."""
    wrong = rows_of({"": (400, [1.0, 9.0, 9.0, 9.0])})
    header, table = measured([*wrong, *rows_of()])
    plan = select((header, table), threshold=1.5)
    why = plan.why
    assert why.values[:4] == pytest.approx(COMBINED, rel=1e-15)
    assert why.values[4] is None
    assert why.clients == {k: (*v, None) for k, (_, v) in SENSITIVITIES.items()}
    assert (plan.layers, plan.shared, plan.cut) == (LAYERS, ("conv1", "conv2"), 2)
    expected = {
        "rule": "sensitivity_ratio",
        "metric": "federation_sensitivity",
        "variant": "training",
        "threshold": 1.5,
        "status": "ok",
        "data": "d" * 64,
        "checkpoint": "c" * 64,
        "seed": 3,
        "version": "0.1.0",
        "weights": {"a": 100, "b": 300},
        "votes": {"a": "fc1", "b": "conv2"},
    }
    assert {key: getattr(why, key) for key in expected} == expected
    shuffled = select((header, table.sample(frac=1, random_state=1)), threshold=1.5)
    assert (shuffled.shared, shuffled.why.clients) == (plan.shared, why.clients)
    path = tmp_path / "rows.jsonl"
    write(path, header, [*wrong, *rows_of()])
    for rows in (path, str(path), Report(table, header)):
        assert select(rows, threshold=1.5) == plan
    with refuses("table"):
        select(table)


def test_layers_outside_the_pass_stay_local_wherever_they_stand():
    order = [LAYERS[k] for k in (0, 4, 1, 2, 3)]
    plan = select(measured(rows_of(), layers=[asdict(layer) for layer in order]))
    assert plan.names == ("conv1", "spare", "conv2", "fc1", "fc10")
    assert plan.shared == ("conv1", "conv2")
    assert plan.why.values[1] is None
    assert plan.why.values[2] == pytest.approx(1.1)


def test_variant_seen_in_training_comes_first():
    after, importance = (
        rows_of({"a": (1, [1.0, *[value] * 3])}, variant=variant)
        for variant, value in (("after", 5.0), ("importance", 1.0))
    )
    both = measured(after, rows_of())
    assert select(both).why.variant == "training"
    assert select(measured(importance, after)).why.variant == "after"
    assert select(both, variant="after").shared == ("conv1",)
    depths = [rows_of(metric="depth", variant=variant) for variant in "xy"]
    with refuses("depth: x, y"):
        select(measured(*depths), "sensitivity_ratio", metric="depth")
    plan = select(measured(*depths), "sensitivity_ratio", metric="depth", variant="x")
    assert plan.why.variant == "x"


def test_metrics_of_pairs_become_differences():
    matrix = {
        ("a", "b"): [0.99, 0.9, 0.8, 0.7],
        ("a", "c"): [0.97, 0.9, 0.6, 0.5],
        ("b", "c"): [0.98, 0.9, 0.7, 0.6],
    }
    rows = pairs_of(matrix)
    plan = select(measured(rows), "sensitivity_ratio", metric="cka", threshold=4.5)
    means = {
        client: 1 - np.mean([v for pair, v in matrix.items() if client in pair], axis=0)
        for client in "abc"
    }
    for client, values in means.items():
        assert plan.why.clients[client][:4] == pytest.approx(values)
    assert plan.why.values[:4] == pytest.approx(np.mean([*means.values()], axis=0))
    assert plan.why.votes == {"a": "conv1", "b": "conv1", "c": "fc1"}


def test_by_hand():
    for layers in ("fc1, conv1", ["fc1", "conv1"]):
        plan = select(measured(rows_of()), "manual", layers=layers)
        assert plan.shared == ("conv1", "fc1")
        assert (plan.why.rule, plan.why.values, plan.why.votes) == ("manual", (), {})
        assert (plan.why.data, plan.why.seed) == ("d" * 64, 3)
    assert select(measured(rows_of()), "manual", layers=[]).shared == ()
    how = {"layers": "fc10", "metric": "federation_sensitivity"}
    plan = select(measured(rows_of()), "manual", **how)
    assert plan.shared == ("fc10",)
    assert plan.why.values[:4] == pytest.approx(COMBINED)
    assert plan.why.alternatives["1.2"] == "conv2"
    traces = of_a(1.0, -0.5, 3.0, 4.0, metric="hessian_trace", variant="per_parameter")
    plan = select(traces, "manual", layers="conv1", metric="hessian_trace")
    assert plan.why.alternatives == {}


def test_a_diagnosis_without_a_seed_is_resampled_as_with_seed_0():
    def drawn(seed):
        plan = select(measured(rows_of(), seed=seed), "sensitivity_ratio")
        return plan.why.detail["stability"]["cuts"]

    assert drawn(None) == drawn(0) != drawn(1)


@pytest.mark.parametrize("rule", DECIDE)
def test_what_a_rule_says_of_clients_and_thresholds(rule):
    """Votes are the rule on one client."""
    plan = select(measured(rows_of(seed=9)), rule, threshold=1.7)
    why = plan.why
    for client, values in SENSITIVITIES.items():
        alone = select(measured(rows_of({client: values}, seed=9)), rule, threshold=1.7)
        assert why.votes[client] == alone.shared[-1]
        assert alone.why.detail["stability"]["status"].startswith("one client")
    assert LayerPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert why.threshold == (None if rule == KNEE else 1.7)
    assert plan.cut == RULES[rule].cut(COMBINED, 1.7)
    flat = select(of_a(1.0, 1.01, 1.02, 1.03), rule).why.status
    assert (flat == "ok") == (rule == KNEE)


BYTES = {"conv1": 40, "conv2": 120, "fc1": 800, "fc10": 160, "spare": 32}


def with_bytes(sizes=BYTES):
    header, table = measured(rows_of())
    return {**header, "bytes": sizes}, table


def test_bytes_that_the_rows_record_stand_in_the_evidence():
    cost = select(with_bytes(), threshold=1.5).why.detail["cost"]
    used = {name: size for name, size in BYTES.items() if name != "spare"}
    assert cost["layers"] == used
    assert (cost["shared"], cost["all"]) == (160, 1120)
    by_hand = select(with_bytes(), "manual", layers="conv1,spare").why.detail
    assert by_hand["cost"]["shared"] == 72
    for lacking in ({}, {"conv1": 40}):
        assert "cost" not in select(with_bytes(lacking), threshold=1.5).why.detail


importances = st.lists(st.floats(1e-12, 1e6), min_size=4, max_size=4)


def replies(clients):
    used = [layer.name for layer in LAYERS if layer.used]
    return [
        {"client": k, "weight": n, "layers": used, "importance": s, "steps": 7}
        for k, (n, s) in enumerate(clients)
    ]


@given(
    st.lists(st.tuples(st.integers(1, 10**6), importances), min_size=1, max_size=5),
    st.floats(1.0, 3.0),
)
@settings(deadline=None, max_examples=8)
def test_mid_run_decides_as_the_file_does(tmp_path_factory, clients, threshold):
    names = [f"site {k}" for k in range(len(clients))]
    answers = replies(clients)
    how = {"names": names, "threshold": threshold, "seed": 3, "data": "d" * 64}
    plan = decide(LAYERS, answers, **how)
    weights = {name: n for name, (n, _) in zip(names, clients, strict=True)}
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    results = dict(zip(names, answers, strict=True))
    header = {**HEADER, "checkpoint": "", "version": __version__}
    write(path, header, recorded_rows(results, LAYERS, n_train=weights))
    assert select(path, threshold=threshold) == plan
    s = np.array([np.cumsum(values) / values[0] for _, values in clients])
    p = np.array([*weights.values()]) / sum(weights.values())
    assert plan.why.values[:4] == pytest.approx(p @ s, rel=1e-12)
    assert plan.why.variant == "training"


def test_mid_run_refuses_by_client_and_layer():
    good = replies([(5, [1.0] * 4)] * 2)
    for change, error, message in (
        ({"importance": [0.0, 1.0, 1.0, 1.0]}, RunError, "'x'.*'conv1'.*0"),
        ({"importance": [1.0, math.nan, 1.0, 1.0]}, RunError, "'conv2'.*'x'"),
        ({"layers": ["conv1", "conv2", "fc1", "fc"]}, UsageError, "layer 'fc'"),
        ({"layers": NAMES[:3], "importance": [1.0] * 3}, RunError, "'fc10'.*gradient"),
        ({"weight": 0}, UsageError, "above 0"),
    ):
        with pytest.raises(error, match=message):
            decide(LAYERS, [{**good[0], **change}, good[1]], names=("x", "y"))
    with refuses("client"):
        decide(LAYERS, [], names=("x",), rule="sensitivity_ratio")


def test_requests_that_cannot_be_met():
    for options, message in (
        ({"rule": "sensitivity_ration"}, "'sensitivity_ration'.*'sensitivity_ratio'"),
        ({"rule": "manual"}, "'manual'.*names"),
        ({"rule": "manual", "layers": "conv"}, "layer 'conv'"),
        ({"rule": "manual", "layers": "fc1,fc1"}, "'fc1' twice"),
        ({"layers": "conv1"}, "'manual'"),
        ({"metric": "hesian_trace"}, "'hesian_trace'.*federation_sensitivity"),
        ({"variant": "figure"}, "'figure'.*training"),
        ({"threshold": 0.0}, "threshold.*0.0"),
        ({"threshold": math.nan}, "threshold.*nan"),
        ({"threshold": math.inf}, "threshold.*inf"),
    ):
        with refuses(message):
            select(measured(rows_of()), **options)


BARE = [*LAYERS[:2], Layer("norm", (), ("norm.mean",)), *LAYERS[2:]]


def test_rows_that_allow_no_decision():
    header, endless = measured(rows_of())
    endless.loc[2, "value"] = math.inf
    bare, alone = [asdict(layer) for layer in BARE], "needs at least two models"
    of_bare = {"a": (4, [1.0, 1.0, None, 2.0, 2.0])}
    named = rows_of(of_bare, names=[layer.name for layer in BARE])
    few = [asdict(LAYERS[0]), asdict(LAYERS[4])]
    single = [row("cka", None, status=alone, layer=n, variant="flatten") for n in NAMES]
    other = rows_of({"a": (100, [2.0] * 4)})
    for rows, error, message in (
        (measured(rows_of(), layers=[]), UsageError, "which has layers"),
        (measured(rows_of(), layers=["conv1"]), UsageError, "'conv1'"),
        (measured([row("loss", 1.0, client="a")]), UsageError, "values"),
        (measured(rows_of({"": (4, [1.0] * 4)})), UsageError, "sensitivity.*single"),
        (of_a(1.0, 2.0, 3.0), UsageError, "no federation_.*'fc10'.*'a'"),
        (measured(rows_of({"a": (None, [1.0] * 4)})), UsageError, "'a'.*n_train"),
        (of_a(1.0, None, 2.0, 2.0), RunError, "'conv2'.*'a': the loss"),
        (of_a(1.0, 0.0, 2.0, 2.0), RunError, "'conv2'.*federation_sensitivity of 0"),
        (measured(rows_of(), layers=few), UsageError, "1 layer"),
        (measured(named, layers=bare), UsageError, "layer 'norm'.*'manual'"),
        (measured(rows_of(), other), UsageError, "two .*'conv1'.*'a'"),
        ((header, endless), RunError, r"'fc1'.*client 'a'.*finite"),
        (measured(single), UsageError, "cka.*two models"),
    ):
        how = {}
        if "cka" in message:
            how = {"metric": "cka", "rule": "sensitivity_ratio"}
        with pytest.raises(error, match=message):
            select(rows, **how)


def test_several_measurements_are_refused_until_one_is_kept():
    other = {name: (n, [1.0, 1.0, 1.0, 9.0]) for name, (n, _) in SENSITIVITIES.items()}
    for column, a, b in (
        ("round", 0, 5),
        ("round", 0, None),
        ("seed", 1, 2),
        ("model", "local", "global"),
        ("algorithm", "fedavg", ""),
    ):
        header, table = measured(rows_of(**{column: a}), rows_of(other, **{column: b}))
        with refuses(f"one {column}.*{a}"):
            select((header, table))
        plan = select((header, table[table[column] == a]))
        assert plan.shared == ("conv1", "conv2")
        assert plan.why.seed == (1 if column == "seed" else 3)
    once = select(measured(rows_of(round=0)))
    assert select(measured(rows_of(round=0), rows_of(round=1))) == once


def test_explanation():
    """The rows of its tables hold the numbers, decisions and votes; the last line says what was measured."""
    plan = select(with_bytes(), threshold=1.5)
    short, full = explain(plan), explain(plan, full=True)
    cells = [line.split() for line in full.splitlines()]
    assert full.startswith(short.split("\n\n")[0])
    for wanted in (
        "conv2 1.1 1.636 federated first above 1.5",
        "fc1 1.8 1.806 local",
        "conv2 1 of 2 clients: b",
        "conv2 1.1, 1.2, 1.3, 1.5",
        "fc1 1.75, 2, 2.5, 3",
        "layer a b",
        "fc10 4 3",
        "conv2 120 federated",
        "fc10 160 local",
    ):
        assert wanted.split() in cells
    assert "500 resamples of the clients:" in full
    assert {"160", "1,120", "85.7%"} <= set(full.split())
    assert {"3,", f"{'d' * 12},", f"{'c' * 12},", "0.1.0"} <= set(short.split())
    many = {f"site{k}": (1, [1.0, 1.1, 1.2 + k / 100, 4.0]) for k in range(30)}
    text = explain(select(measured(rows_of(many))), full=True)
    assert "  fc1       1.2    1.35     1.49\n" in text


@given(curves)
def test_rules_of_the_largest_rise_and_of_the_largest_values(values):
    rises = [after / before for before, after in pairwise(values)]
    count = RULES["largest_rise"].cut(values)
    assert rises[count - 1] == max(rises)
    assert max(rises[: count - 1], default=0) < max(rises)
    names = [f"l{k}" for k in range(len(values))]
    for k in range(1, len(values)):
        shared = RULES["top"].shared(names, values, k=k)
        local = [v for n, v in zip(names, values, strict=True) if n not in shared]
        assert sorted(local) == sorted(values)[-k:]


def test_the_layers_that_differ_most_stay_local_wherever_they_stand():
    rows = measured(rows_of({"a": (4, [1.0, 5.0, 2.0, 3.0])}))
    plan = select(rows, "top")
    assert plan.shared == ("conv1", "fc1", "fc10")
    assert select(rows, "top", k=2).shared == ("conv1", "fc1")
    assert not plan.why.votes
    assert "stability" not in plan.why.detail
    for k in (0, 4):
        with refuses(f"k must.*{k}"):
            select(rows, "top", k=k)


def test_layers_above_a_null_stay_local():
    real = rows_of({"a": (4, [1.0, 5.0, 2.0, 3.0])})
    with refuses("a null for rule 'above_null'"):
        select(measured(real), "above_null")
    null = rows_of({"a": (4, [2.0, 2.0, 2.0, 2.0])}, model="null labels 0")
    plan = select(measured(real, null), "above_null")
    assert plan.shared == ("conv1", "fc1")


def test_a_metric_that_is_low_where_clients_differ_is_turned(monkeypatch):
    facts = replace(facts_of("grad_norm"), differs="low")
    monkeypatch.setattr("diagnostics.select.facts_of", lambda name: facts)
    rows = measured(rows_of({"a": (4, [8.0, 8.0, 7.0, 1.0])}, "grad_norm", ""))
    plan = select(rows, metric="grad_norm")
    assert (plan.why.rule, plan.cut) == ("largest_rise", 3)
    assert plan.why.detail["differs"] == "low"
    assert select(rows, "top", metric="grad_norm").shared == ("conv1", "conv2", "fc1")
    assert select(rows, "top", metric="grad_norm", k=3).shared == ("conv1",)


def test_a_metric_without_a_direction_needs_a_rule():
    rows = measured(rows_of({"a": (4, [1.0, 1.0, 2.0, 3.0])}, "weight_magnitude", "l2"))
    with refuses("'weight_magnitude'.*rule='largest_rise'"):
        select(rows, metric="weight_magnitude")
    plan = select(rows, "largest_rise", metric="weight_magnitude")
    assert (plan.shared, plan.why.detail["differs"]) == (
        ("conv1", "conv2"),
        "not declared",
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [((), "none"), (("fc9",), "fc9"), (0, "0"), (True, "True"), (9, "9")],
)
def test_answers_of_rules_that_are_no_plan(answer, message):
    with pytest.raises(RunError, match=f"'bad'.*{message}"):
        Rule("bad", lambda values: answer, "").shared(NAMES[:4], [1.0, 2.0, 3.0, 4.0])


def test_a_pair_counts_for_both_of_its_clients():
    table = frame(
        [row("cka", 0.5, client="a", client_b="b"), row("loss", 1.0, client="c")]
    )
    both = both_ways(table)
    assert [*zip(both["client"], both["client_b"], strict=True)] == [
        ("a", "b"),
        ("c", ""),
        ("b", "a"),
    ]
    assert both["value"].tolist() == [0.5, 1.0, 0.5]
    assert both.index.tolist() == [0, 1, 2]
