"""A decision follows from the rows by a rule that can be read off the numbers, or is refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from diagnostics.decide.rules.change import (
    change_point,
    largest_jump,
    ratios,
    sensitivity_ratio,
)
from diagnostics.decide.select import RULES, THRESHOLDS, decide, explain, select
from diagnostics.gradients.sensitivity import recorded_rows
from diagnostics.report import Report
from fl_core import __version__
from fl_core.errors import RunError, UsageError
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.rows import frame, row, write

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


def pairs_of(matrix, metric="cka"):
    """Rows of a metric of pairs from {(client, client): values}."""
    return [
        row(metric, value, client=a, client_b=b, layer=layer.name, variant="flatten")
        for (a, b), values in matrix.items()
        for layer, value in zip(LAYERS, values, strict=False)
    ]


def measured(*rows, **header):
    return {**HEADER, **header}, frame([each for group in rows for each in group])


curves = st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=8)


@given(curves, st.floats(0.5, 3.0))
def test_ratio_rule_by_its_definition(values, threshold):
    """With 1-based layers: the smallest l with S_{l+1}/S_l > t, or L - 1."""
    count = len(values)
    crossed = [l for l in range(1, count) if values[l] / values[l - 1] > threshold]  # noqa: E741
    assert sensitivity_ratio(values, threshold) == (
        min(crossed) if crossed else count - 1
    )


@given(curves)
def test_largest_jump_by_its_definition(values):
    cut = largest_jump(values)
    jumps = {l: values[l] / values[l - 1] for l in range(1, len(values))}  # noqa: E741
    assert all(jumps[cut] >= jump for jump in jumps.values())
    assert all(jumps[earlier] < jumps[cut] for earlier in range(1, cut))


def test_a_ratio_equal_to_the_threshold_does_not_exceed_it():
    assert sensitivity_ratio([1.0, 1.5, 3.0, 3.0], 1.5) == 2
    assert sensitivity_ratio([1.0, 1.5, 2.25], 1.5) == 2
    assert ratios([2.0, 3.0, 1.5]) == [1.5, 0.5]


@given(
    curves,
    st.sampled_from([name for name, rule in RULES.members().items() if rule.decides]),
)
def test_every_rule_keeps_something_on_both_sides(values, name):
    assert 1 <= RULES[name].cut(values, 1.2) <= len(values)


def test_the_curve_is_the_weighted_mean_of_the_clients():
    """Recomputed from the clients' rows: a combined row that says otherwise is not read."""
    wrong = rows_of({"": (400, [1.0, 9.0, 9.0, 9.0])})
    importance = rows_of(
        {"a": (100, [7.0] * 4), "b": (300, [7.0] * 4)}, variant="importance"
    )
    plan = select(measured(wrong, rows_of(), importance))
    assert plan.why.values[:4] == pytest.approx(COMBINED, rel=1e-15)
    assert plan.why.values[4] is None
    assert plan.why.clients == {
        "a": (*SENSITIVITIES["a"][1], None),
        "b": (*SENSITIVITIES["b"][1], None),
    }
    assert plan.why.weights == {"a": 100, "b": 300}
    assert plan.layers == LAYERS
    assert plan.shared == ("conv1", "conv2")
    assert plan.cut == 2


def test_the_evidence():
    why = select(measured(rows_of()), threshold=1.5).why
    assert (why.rule, why.metric, why.variant) == (
        "sensitivity_ratio",
        "federation_sensitivity",
        "training",
    )
    assert (why.threshold, why.status) == (1.5, "ok")
    assert (why.data, why.checkpoint, why.seed, why.version) == (
        "d" * 64,
        "c" * 64,
        3,
        "0.1.0",
    )
    assert why.votes == {"a": "fc1", "b": "conv2"}
    steps = [after / before for before, after in pairwise(COMBINED)]
    names = ["conv1", "conv2", "fc1"]
    for threshold in (1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2, 2.5, 3):
        expected = next(
            (name for name, step in zip(names, steps, strict=True) if step > threshold),
            "fc1",
        )
        assert why.alternatives[f"{threshold:g}"] == expected
    assert why.alternatives["largest_jump"] == names[int(np.argmax(steps))]
    assert len(why.alternatives) == len(THRESHOLDS) + 1


def test_a_file_a_report_and_a_pair_decide_alike(tmp_path):
    header, table = measured(rows_of())
    write(tmp_path / "rows.jsonl", header, rows_of())
    plan = select((header, table))
    assert select(tmp_path / "rows.jsonl") == plan
    assert select(str(tmp_path / "rows.jsonl")) == plan
    assert select(Report(table, header)) == plan
    with pytest.raises(UsageError, match="table"):
        select(table)
    plan.save(tmp_path / "plan.json")
    assert LayerPlan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "rule", [name for name, each in RULES.members().items() if each.decides]
)
def test_votes_are_the_rule_on_one_client(rule):
    plan = select(measured(rows_of()), rule)
    for client, (n_train, values) in SENSITIVITIES.items():
        alone = select(measured(rows_of({client: (n_train, values)})), rule)
        assert plan.why.votes[client] == alone.shared[-1]


def test_largest_jump_has_no_threshold():
    plan = select(measured(rows_of()), "largest_jump", threshold=77)
    assert plan.why.threshold is None
    assert plan.shared == ("conv1", "conv2", "fc1")


def test_no_jump_is_said():
    plan = select(measured(rows_of({"a": (5, [1.0, 1.01, 1.02, 1.03])})))
    assert plan.shared == ("conv1", "conv2", "fc1")
    assert plan.why.status.startswith("no ratio exceeds 1.2: ")
    assert select(measured(rows_of()), threshold=50).why.status.startswith(
        "no ratio exceeds 50"
    )


def test_layers_outside_the_pass_stay_local_wherever_they_stand():
    order = [LAYERS[k] for k in (0, 4, 1, 2, 3)]
    plan = select(measured(rows_of(), layers=[asdict(layer) for layer in order]))
    assert plan.names == ("conv1", "spare", "conv2", "fc1", "fc10")
    assert plan.shared == ("conv1", "conv2")
    assert plan.why.values[1] is None
    assert plan.why.values[2] == pytest.approx(1.1)


def test_order_of_rows_does_not_matter():
    header, table = measured(rows_of())
    shuffled = table.sample(frac=1, random_state=1)
    plan, other = select((header, table)), select((header, shuffled))
    assert other.shared == plan.shared
    assert other.why.clients == plan.why.clients
    assert other.why.values[:4] == pytest.approx(plan.why.values[:4], rel=1e-15)


def test_variant_seen_in_training_comes_first():
    after = rows_of({"a": (1, [1.0, 5.0, 5.0, 5.0])}, variant="after")
    importance = rows_of({"a": (1, [1.0, 1.0, 1.0, 1.0])}, variant="importance")
    assert select(measured(after, rows_of())).why.variant == "training"
    assert select(measured(importance, after)).why.variant == "after"
    assert select(measured(after, rows_of()), variant="after").shared == ("conv1",)
    assert (
        select(measured(importance, after), variant="importance").why.values[:4]
        == (1.0,) * 4
    )


def test_metrics_of_pairs_become_differences():
    matrix = {
        ("a", "b"): [0.99, 0.9, 0.8, 0.7],
        ("a", "c"): [0.97, 0.9, 0.6, 0.5],
        ("b", "c"): [0.98, 0.9, 0.7, 0.6],
    }
    plan = select(
        measured(pairs_of({**matrix, ("a", "a"): [1.0] * 4})),
        metric="cka",
        threshold=4.5,
    )
    means = {
        client: [
            1
            - np.mean([values[k] for pair, values in matrix.items() if client in pair])
            for k in range(4)
        ]
        for client in "abc"
    }
    for client, values in means.items():
        assert plan.why.clients[client][:4] == pytest.approx(values)
    assert plan.why.values[:4] == pytest.approx(np.mean([*means.values()], axis=0))
    assert plan.why.weights == {"a": 1, "b": 1, "c": 1}
    assert plan.shared == ("conv1",)
    assert plan.why.votes == {"a": "conv1", "b": "conv1", "c": "fc1"}
    assert "    1 - cka  next/this" in explain(plan)


def test_a_client_without_ratios_has_no_vote():
    traces = {"a": (1, [1.0, 2.0, 3.0, 4.0]), "b": (1, [1.0, -0.5, 3.0, 4.0])}
    plan = select(
        measured(rows_of(traces, "hessian_trace", "per_parameter")),
        metric="hessian_trace",
    )
    assert plan.why.votes == {"a": "conv1"}
    assert "layer 'conv2' has a hessian_trace of -0.5" in plan.why.status
    assert plan.shared == ("conv1", "conv2")


@pytest.mark.parametrize("layers", ["fc1, conv1", ["fc1", "conv1"], ("conv1", "fc1")])
def test_by_hand(layers):
    plan = select(measured(rows_of()), "manual", layers=layers)
    assert plan.shared == ("conv1", "fc1")
    assert (plan.why.rule, plan.why.threshold, plan.why.values, plan.why.votes) == (
        "manual",
        None,
        (),
        {},
    )
    assert (plan.why.data, plan.why.seed) == ("d" * 64, 3)


def test_by_hand_nothing_or_with_a_curve_beside_it():
    assert select(measured(rows_of()), "manual", layers="").shared == ()
    assert select(measured(rows_of()), "manual", layers=[]).shared == ()
    plan = select(
        measured(rows_of()), "manual", layers="fc10", metric="federation_sensitivity"
    )
    assert plan.shared == ("fc10",)
    assert plan.why.values[:4] == pytest.approx(COMBINED)
    assert plan.why.alternatives["1.2"] == "conv2"
    traces = rows_of(
        {"a": (1, [1.0, -0.5, 3.0, 4.0])}, "hessian_trace", "per_parameter"
    )
    plan = select(measured(traces), "manual", layers="conv1", metric="hessian_trace")
    assert plan.why.values[:4] == (1.0, -0.5, 3.0, 4.0)
    assert plan.why.alternatives == {}


def test_change_point_decides_with_its_own_thresholds():
    plan = select(measured(rows_of()), "change_point", threshold=1.5)
    assert (plan.why.threshold, plan.why.status) == (1.5, "ok")
    assert plan.cut == change_point(COMBINED, 1.5)
    for threshold in THRESHOLDS:
        names = [layer.name for layer in LAYERS]
        assert (
            plan.why.alternatives[f"{threshold:g}"]
            == names[change_point(COMBINED, threshold) - 1]
        )
    flat = select(
        measured(rows_of({"a": (5, [1.0, 1.01, 1.02, 1.03])})), "change_point"
    )
    assert flat.why.status.startswith("no rise of level is worth a step by 1.2: ")


@pytest.mark.parametrize(
    "rule", [name for name, each in RULES.members().items() if each.decides]
)
def test_stability_stands_in_the_evidence(rule):
    """Of two clients a resample holds one, the other, or both: three decisions with probability 1/4, 1/4, 1/2."""
    plan = select(measured(rows_of(seed=9)), rule, threshold=1.7)
    found = plan.why.detail["stability"]
    alone = {
        c: select(measured(rows_of({c: v}, seed=9)), rule, threshold=1.7).cut
        for c, v in SENSITIVITIES.items()
    }
    expected: dict[str, float] = {}
    for cut, share in ((alone["a"], 0.25), (alone["b"], 0.25), (plan.cut, 0.5)):
        expected[LAYERS[cut - 1].name] = expected.get(LAYERS[cut - 1].name, 0) + share
    assert found["cuts"] == pytest.approx(expected, abs=0.1)
    assert found["agreement"] == found["cuts"][plan.shared[-1]]
    assert LayerPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    one = select(measured(rows_of({"a": SENSITIVITIES["a"]})), rule)
    assert one.why.detail["stability"]["status"].startswith("one client")


BYTES = {"conv1": 40, "conv2": 120, "fc1": 800, "fc10": 160, "spare": 32}


def with_bytes(sizes=BYTES):
    header, table = measured(rows_of())
    return {**header, "bytes": sizes}, table


def test_bytes_that_the_rows_record_stand_in_the_evidence():
    cost = select(with_bytes(), threshold=1.5).why.detail["cost"]
    assert cost["layers"] == {
        name: size for name, size in BYTES.items() if name != "spare"
    }
    assert (cost["shared"], cost["all"]) == (160, 1120)
    assert (
        select(with_bytes(), "manual", layers="conv1,spare").why.detail["cost"][
            "shared"
        ]
        == 72
    )
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
    plan = decide(
        LAYERS,
        replies(clients),
        names=names,
        threshold=threshold,
        seed=3,
        data="d" * 64,
    )
    results = dict(zip(names, replies(clients), strict=True))
    weights = {name: n for name, (n, _) in zip(names, clients, strict=True)}
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    header = {**HEADER, "checkpoint": "", "version": __version__}
    write(path, header, recorded_rows(results, LAYERS, n_train=weights))
    assert select(path, threshold=threshold) == plan

    s = np.array([np.cumsum(values) / values[0] for _, values in clients])
    p = np.array([n for n, _ in clients]) / sum(n for n, _ in clients)
    assert plan.why.values[:4] == pytest.approx(p @ s, rel=1e-12)
    assert plan.why.variant == "training"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"importance": [0.0, 1.0, 1.0, 1.0]}, RunError, "'x'.*'conv1'.*0"),
        ({"importance": [None, 1.0, 1.0, 1.0]}, RunError, "'conv1'.*'x'"),
        ({"importance": [1.0, math.nan, 1.0, 1.0]}, RunError, "'conv2'.*'x'"),
        ({"importance": [1.0, 1.0, math.inf, 1.0]}, RunError, "'fc1'.*'x'"),
        ({"importance": [1.0, 1.0]}, UsageError, "'x'.* 2 .* 4"),
        ({"layers": ["conv1", "conv2", "fc1", "fc"]}, UsageError, "layer 'fc'"),
        (
            {"layers": ["conv1", "conv2", "fc1"], "importance": [1.0] * 3},
            RunError,
            "'fc10'.*gradient",
        ),
        ({"client": 5}, UsageError, "client 5"),
        ({"client": -1}, UsageError, "client -1"),
        ({"client": 1}, UsageError, "'y'.*twice"),
        ({"weight": 0}, UsageError, "above 0"),
    ],
)
def test_mid_run_refuses_by_client_and_layer(change, error, message):
    good = replies([(5, [1.0, 1.0, 1.0, 1.0]), (5, [1.0, 1.0, 1.0, 1.0])])
    with pytest.raises(error, match=message):
        decide(LAYERS, [{**good[0], **change}, good[1]], names=("x", "y"))


@pytest.mark.parametrize(
    ("rule", "message"),
    [("manual", "'manual'"), ("sensitivity", "mean 'sensitivity_ratio'")],
)
def test_mid_run_needs_a_rule_that_decides(rule, message):
    with pytest.raises(UsageError, match=message):
        decide(LAYERS, replies([(5, [1.0] * 4)]), names=("x",), rule=rule)
    with pytest.raises(UsageError, match="client"):
        decide(LAYERS, [], names=("x",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
        ({"rule": "vote"}, "'vote' was removed"),
        ({"rule": "budget_bytes"}, "'budget_bytes' was removed"),
    ],
)
def test_requests_that_cannot_be_met(options, message):
    with pytest.raises(UsageError, match=message):
        select(measured(rows_of()), **options)


BARE = [*LAYERS[:2], Layer("norm", (), ("norm.mean",)), *LAYERS[2:]]


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (measured(rows_of(), layers=[]), UsageError, "no layers"),
        (measured(rows_of(), layers=["conv1"]), UsageError, "'conv1'"),
        (measured([row("loss", 1.0, client="a")]), UsageError, "values"),
        (
            measured(rows_of({"": (4, [1.0] * 4)})),
            UsageError,
            "federation_sensitivity.*single",
        ),
        (
            measured(rows_of({"a": (4, [1.0, 2.0, 3.0])})),
            UsageError,
            "no federation_.*'fc10'.*'a'",
        ),
        (measured(rows_of({"a": (None, [1.0] * 4)})), UsageError, "'a'.*n_train"),
        (
            measured(rows_of({"a": (4, [1.0, None, 2.0, 2.0])})),
            RunError,
            "'conv2'.*'a': the loss",
        ),
        (
            measured(rows_of({"a": (4, [1.0, 0.0, 2.0, 2.0])})),
            RunError,
            "'conv2'.*federation_sensitivity of 0",
        ),
        (
            measured(rows_of(), layers=[asdict(LAYERS[0]), asdict(LAYERS[4])]),
            UsageError,
            "1 layer",
        ),
        (
            measured(
                rows_of(
                    {"a": (4, [1.0, 1.0, None, 2.0, 2.0])},
                    names=[layer.name for layer in BARE],
                ),
                layers=[asdict(layer) for layer in BARE],
            ),
            UsageError,
            "layer 'norm'.*'manual'",
        ),
        (
            measured(rows_of(), rows_of({"a": (100, [2.0] * 4)})),
            UsageError,
            "two .*'conv1'.*'a'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_that_allow_no_decision(rows, error, message):
    with pytest.raises(error, match=message):
        select(rows)


def test_an_unknown_metric_with_several_variants():
    rows = [
        *rows_of(metric="depth", variant="x"),
        *rows_of(metric="depth", variant="y"),
    ]
    with pytest.raises(UsageError, match="depth: x, y"):
        select(measured(rows), metric="depth")
    assert select(measured(rows), metric="depth", variant="x").why.variant == "x"


def test_values_that_are_not_finite_whatever_their_status():
    header, table = measured(rows_of())
    table.loc[2, "value"] = math.inf
    with pytest.raises(RunError, match=r"'fc1'.*client 'a'.*finite"):
        select((header, table))


def test_one_model_has_no_pairs():
    rows = [
        row(
            "cka",
            None,
            status="needs at least two models",
            layer=layer.name,
            variant="flatten",
        )
        for layer in LAYERS
    ]
    with pytest.raises(UsageError, match=r"cka.*two models"):
        select(measured(rows), metric="cka")


@pytest.mark.parametrize(
    ("column", "a", "b"),
    [
        ("round", 0, 5),
        ("round", 0, None),
        ("seed", 1, 2),
        ("model", "local", "global"),
        ("algorithm", "fedavg", ""),
    ],
)
def test_several_measurements_are_refused_until_one_is_kept(column, a, b):
    other = {"a": (100, [1.0, 1.0, 1.0, 9.0]), "b": (300, [1.0, 1.0, 1.0, 9.0])}
    header, table = measured(rows_of(**{column: a}), rows_of(other, **{column: b}))
    with pytest.raises(UsageError, match=f"one {column}") as caught:
        select((header, table))
    assert str(a) in str(caught.value)
    kept = table[table[column] == a]
    plan = select((header, kept))
    assert plan.shared == ("conv1", "conv2")
    assert plan.why.seed == (1 if column == "seed" else 3)


def test_the_same_measurement_twice_is_one():
    once = select(measured(rows_of(round=0)))
    assert select(measured(rows_of(round=0), rows_of(round=1))) == once
    assert select(measured(rows_of(round=0), rows_of(round=0))) == once


def test_other_thresholds_are_told_as_they_grow():
    assert "  conv1  1.05, 1.1, 1.2, 1.3, 1.5" in explain(
        select(measured(rows_of({"a": (9, [1.0, 2.0, 2.0, 2.0])})))
    )


def test_explanation():
    """The rows of its tables hold the numbers, decisions and votes; the last line says what was measured."""
    text = explain(select(measured(rows_of()), threshold=1.5))
    cells = [line.split() for line in text.splitlines()]
    for wanted in (
        ["conv1", "1", "1.100", "federated"],
        ["conv2", "1.1", "1.636", "federated", "first", "above", "1.5"],
        ["fc1", "1.8", "1.806", "local"],
        ["fc10", "3.25", "local"],
        ["conv2", "1", "of", "2", "clients:", "b"],
        ["fc1", "1", "of", "2", "clients:", "a"],
        ["conv1", "1.05"],
        ["conv2", "1.1,", "1.2,", "1.3,", "1.5"],
        ["fc1", "1.75,", "2,", "2.5,", "3,", "largest_jump"],
    ):
        assert wanted in cells
    assert [each[:2] for each in cells if each[:1] == ["spare"]] == [["spare", "local"]]
    assert {"federation_sensitivity", "(training),", "1.5:", "2", "5"} <= set(cells[0])
    assert {"3,", f"{'d' * 12},", f"{'c' * 12},", "0.1.0"} <= set(cells[-1])


def test_full_explanation():
    text = explain(select(with_bytes(), threshold=1.5), full=True)
    assert text.startswith(
        explain(select(with_bytes(), threshold=1.5)).split("\n\n")[0]
    )
    cells = [line.split() for line in text.splitlines()]
    at = cells.index(["layer", "a", "b"])
    assert cells[at + 1 : at + 5] == [
        ["conv1", "1", "1"],
        ["conv2", "1.1", "1.1"],
        ["fc1", "1.2", "2"],
        ["fc10", "4", "3"],
    ]
    assert "500 resamples of the clients:" in text
    at = cells.index(["conv1", "40", "federated"])
    assert cells[at + 1 : at + 4] == [
        ["conv2", "120", "federated"],
        ["fc1", "800", "local"],
        ["fc10", "160", "local"],
    ]
    assert {"160", "1,120", "85.7%"} <= set(cells[at + 4])


def test_full_explanation_of_many_clients_shows_their_range():
    many = {f"site{k}": (1, [1.0, 1.1, 1.2 + k / 100, 4.0]) for k in range(30)}
    text = explain(select(measured(rows_of(many))), full=True)
    assert "  layer  lowest  median  highest\n" in text
    assert "  fc1       1.2    1.35     1.49\n" in text


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        (
            LayerPlan.everything(LAYERS),
            ["everything: 5 of 5 layers are federated", "  spare  federated"],
        ),
        (LayerPlan(LAYERS, ()), ["manual: 0 of 5"]),
        (
            LayerPlan.prefix(LAYERS, 2).with_shared([], status="clipped"),
            ["Note: clipped"],
        ),
    ],
)
def test_explanation_of_plans_without_a_curve(plan, parts):
    text = explain(plan)
    assert all(part in text for part in parts)
    assert all(layer.name in text for layer in LAYERS)
