"""Resampled batches against measurements of the redrawn data, and the decisions that are made of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor, nn

from diagnostics.decide.curve import curve_of
from diagnostics.decide.evidence import stability
from diagnostics.decide.rules.base import RULES
from diagnostics.decide.select import explain, select
from diagnostics.gradients.importance import SensitivityAccumulator
from diagnostics.gradients.sensitivity import Sensitivity, recorded_rows
from diagnostics.measure import diagnose
from diagnostics.measurement import ClientModel, whole_groups
from diagnostics.metrics.of_gradients import GradNorm, GradSimilarity, GradVariance
from diagnostics.null import PARTS, draws, mark_resample, resamples_of, split_resamples
from diagnostics.report import Report
from fedlayers.cli import app as cli
from figures.player_fl.released import ReleasedTables
from fl_core import rows
from fl_core.errors import UsageError
from fl_core.layers import Layer, layers_of
from fl_core.rows import frame, row
from fl_core.training import losses
from tests.diagnostics.calls import one_pass as measure

CE = losses.build("cross_entropy")
C = 3


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, C)).double()


def pair(n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g).double(), torch.randint(C, (n,), generator=g)


def values(found: list[dict[str, Any]], variant: str) -> list[float]:
    return [r["value"] for r in found if r["variant"] == variant]


def test_draws_are_by_seed_and_client_and_one_part_has_none() -> None:
    drawn = draws(4, 50, 7, "a")
    assert np.array(drawn).shape == (50, 4)
    assert {sum(times) for times in drawn} == {4}
    assert drawn == draws(4, 50, 7, "a") != draws(4, 50, 8, "a")
    assert drawn != draws(4, 50, 7, "b")
    assert draws(1, 50, 7, "a") == draws(0, 50, 7, "a") == []


@pytest.mark.parametrize("n_batches", [2, 4, 13])
@pytest.mark.parametrize(
    ("metric", "variant"),
    [
        (Sensitivity(), "after"),
        (Sensitivity(reduce="mean_of_tensors", tensors="all"), "importance"),
        (GradVariance(), "epoch"),
        (GradVariance("batch"), "batch"),
        (GradNorm(), "mean_abs"),
    ],
    ids=str,
)
def test_a_resample_is_the_measurement_of_the_redrawn_batches(
    metric: Any, variant: str, n_batches: int
) -> None:
    """Thirteen batches are dealt to ten parts: batches 0 and 10 are drawn together."""
    model, (x, y) = net(), pair(3 * n_batches)
    layers = layers_of(model, x)
    how: dict[str, Any] = {"loss": CE, "batch": 3}
    found = measure(
        [ClientModel("a", model, (x, y), 9)],
        layers,
        [metric],
        seed=5,
        resamples=4,
        **how,
    )
    plain = measure(
        [ClientModel("a", model, (x, y), 9)], layers, [metric], seed=5, **how
    )
    own, again = split_resamples(frame(found))
    assert own["value"].tolist() == pytest.approx(
        [r["value"] for r in plain], rel=1e-12
    )
    for number, times in enumerate(draws(min(n_batches, PARTS), 4, 5, "a"), 1):
        redrawn = [b for b in range(n_batches) for _ in range(times[b % PARTS])]
        index = torch.tensor([3 * b + k for b in redrawn for k in range(3)])
        expected = measure(
            [ClientModel("a", model, (x[index], y[index]), 9)], layers, [metric], **how
        )
        assert values(found, f"{variant}, resample {number}") == pytest.approx(
            [r["value"] for r in expected if r["variant"] == variant and r["client"]],
            rel=1e-10,
        )
    assert set(again["estimator"].str.rpartition(", ")[2]) == {
        f"{min(n_batches, PARTS)} parts of the batches redrawn"
    }
    assert set(again["client"]) == {"a"}
    assert set(again["status"]) == {"ok"}
    assert again["stderr"].isna().all()


def test_rows_of_one_patient_are_drawn_together() -> None:
    """Each patient has two rows, far apart. A resample of one batch has both."""
    model, (x, y) = net(), pair(12)
    x, y = torch.cat([x, x]), torch.cat([y, y])
    patients = np.arange(24) % 12
    whole = [
        part.tolist() for _, part in whole_groups((x, torch.arange(24)), patients, 6)
    ]
    assert sorted(row for part in whole for row in part) == list(range(24))
    assert all({row % 12 for row in part} == {row % 12 for row in part if row < 12} for part in whole)  # fmt: skip
    together = torch.tensor([row for part in whole for row in part])
    found = [
        measure(
            [ClientModel("a", model, data, 9, groups)],
            layers_of(model, x),
            [GradNorm()],
            loss=CE,
            batch=6,
            seed=5,
            resamples=3,
        )
        for data, groups in (
            ((x, y), patients),
            ((x[together], y[together]), None),
        )
    ]
    for number in range(1, 4):
        variant = f"mean_abs, resample {number}"
        assert values(found[0], variant) == pytest.approx(values(found[1], variant))


def test_metrics_of_one_pass_share_its_resamples_and_pairs_have_none() -> None:
    subjects = [
        ClientModel(name, net(k), pair(12, seed=k), 12) for k, name in enumerate("ab")
    ]
    layers = layers_of(net(), pair(2)[0])
    metrics: list[Any] = [GradVariance(), GradNorm(), GradSimilarity(), Sensitivity()]
    together = measure(subjects, layers, metrics, loss=CE, batch=3, resamples=3)
    for metric in metrics:
        alone = measure(subjects, layers, [metric], loss=CE, batch=3, resamples=3)
        assert alone == [r for r in together if r["metric"] == alone[0]["metric"]]
    _, again = split_resamples(frame(together))
    assert set(again["metric"]) == {
        "grad_variance",
        "grad_norm",
        "federation_sensitivity",
    }
    similar = [r["value"] for r in together if r["metric"] == "grad_similarity"]
    assert similar == pytest.approx(
        [
            r["value"]
            for r in measure(subjects, layers, [GradSimilarity()], loss=CE, batch=3)
        ],
        rel=1e-12,
    )


def test_one_batch_has_no_resample_and_a_negative_number_is_refused() -> None:
    subject = ClientModel("a", net(), pair(5), 5)
    layers = layers_of(net(), pair(2)[0])
    assert split_resamples(
        frame(
            measure([subject], layers, [Sensitivity()], loss=CE, batch=9, resamples=5)
        )
    )[1].empty
    with pytest.raises(UsageError, match="got -1"):
        diagnose(
            net(), pair(5), "grad_variance", progress=False, options={"resamples": -1}
        )


def test_clients_with_one_batch_are_named_by_the_measurement_and_by_the_plan() -> None:
    models = {name: net(k) for k, name in enumerate(("large", "small"))}
    data = {"large": pair(12, 0), "small": pair(4, 1)}

    def measured(
        metrics: Any, batch: int, resamples: int = 3
    ) -> tuple[Report, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = diagnose(
                models,
                data,
                metrics,
                batch=batch,
                progress=False,
                options={"resamples": resamples},
            )
        return report, [str(each.message) for each in caught]

    report, (message,) = measured(["grad_variance", "grad_norm"], 4)
    assert "small" in message
    assert "large" not in message
    assert "measure_batch" in message
    plan = select(report, "largest_jump", metric="grad_variance")
    assert plan.why.detail["stability"]["of"] == "clients and batches of large"
    report, (message,) = measured("grad_variance", 16)
    assert "large, small" in message
    said = explain(select(report, "largest_jump", metric="grad_variance"), full=True)
    assert "at least 2 batches" in said
    for asked in (
        ("grad_variance", 2),
        ("grad_similarity", 16),
        ("grad_variance", 16, 0),
    ):
        assert measured(*asked)[1] == []


def test_training_is_resampled_by_its_steps() -> None:
    layers = [Layer("l", ("w",)), Layer("m", ("v",))]
    seen = SensitivityAccumulator(layers)
    for k in range(12):
        seen.update(
            {"w": torch.ones(2), "v": torch.ones(3)},
            {"w": torch.full((2,), k + 1.0), "v": torch.ones(3)},
        )
    result = json.loads(json.dumps(seen.result()))
    assert [part["steps"] for part in result["parts"]] == [2, 2] + [1] * 8
    assert result["parts"][1]["importance"] == pytest.approx([(2**2 + 12**2) / 2, 1])
    found = recorded_rows({"a": result}, layers, n_train={"a": 7}, resamples=6, seed=3)
    assert values(found, "training") == pytest.approx(
        [1, 1 + 1 / np.mean(np.arange(1, 13) ** 2)] * 2
    )
    for number, times in enumerate(draws(10, 6, 3, "a"), 1):
        steps = [k for k in range(12) for _ in range(times[k % 10])]
        expected = np.mean([(k + 1) ** 2 for k in steps])
        assert values(found, f"importance, resample {number}") == pytest.approx(
            [expected, 1]
        )
        assert values(found, f"training, resample {number}") == pytest.approx(
            [1, 1 + 1 / expected]
        )
    del result["parts"]
    assert split_resamples(
        frame(recorded_rows({"a": result}, layers, n_train={"a": 7}, resamples=6))
    )[1].empty


@pytest.mark.parametrize("reduce", ["pooled", "mean_of_tensors"])
@pytest.mark.parametrize("meter", [SensitivityAccumulator, ReleasedTables])
def test_a_resample_of_an_embedding_table_is_what_the_steps_drawn_give(
    reduce: str, meter: type[SensitivityAccumulator]
) -> None:
    """Also where a short last batch looks up far fewer rows than the others."""
    layers = [Layer("table", ("table",), tables=("table",)), Layer("fc", ("weight",))]
    g = torch.Generator().manual_seed(0)
    params = {
        "table": torch.randn(40, 3, generator=g),
        "weight": torch.randn(3, 2, generator=g),
    }
    grads = []
    for k in range(13):
        rows = torch.zeros(40, 1)
        rows[torch.randperm(40, generator=g)[: 25 if k < 12 else 2]] = 1
        grads.append(
            {
                "table": torch.randn(40, 3, generator=g) * rows,
                "weight": torch.randn(3, 2, generator=g),
            }
        )
    seen = meter(layers, reduce=reduce)

    def fed(to: SensitivityAccumulator, k: int) -> None:
        to.update(params, grads[k])
        if isinstance(
            to, ReleasedTables
        ):  # it sees a table's rows by the samples' tokens
            to._params, to._ids = (
                params,
                {"table": [torch.arange(1 + k).reshape(1, -1)]},
            )
            to.samples(torch.zeros(1), torch.zeros(1), grads[k], {})

    for k in range(13):
        fed(seen, k)
    for times in ([1] * 10, *draws(10, 4, 1, "a")):
        again = meter(layers, reduce=reduce)
        for k in range(13):
            for _ in range(times[k % 10]):
                fed(again, k)
        assert seen.redraw(times).result()["importance"] == pytest.approx(
            again.result()["importance"], rel=1e-12
        )


LAYERS = tuple(
    Layer(name, (f"{name}.weight",), (), name) for name in ("l1", "l2", "l3")
)
N = 4000


def table(
    clients: dict[str, list[list[float]]],
    stderr: float | None = None,
    metric: str = "m",
) -> Any:
    """Of each client its values, then those of its resamples."""
    found = []
    for client, curves in clients.items():
        for number, curve in enumerate(curves):
            own = [
                row(
                    metric,
                    v,
                    client=client,
                    layer=layer.name,
                    variant="x",
                    n_train=1,
                    stderr=stderr,
                    estimator="e",
                )
                for layer, v in zip(LAYERS, curve, strict=True)
            ]
            found += mark_resample(own, number, len(curves) - 1) if number else own
    return frame(found)


def likely(share: float, probability: float) -> bool:
    low, high = binom.interval(1 - 1e-6, N, probability)
    return bool(low <= round(share * N) <= high)


def test_a_decision_over_the_resamples_of_one_client() -> None:
    """Three of four resamples rise at the second layer; the errors of the rows are not counted beside them."""
    late, early = [1.0, 1.0, 2.0], [1.0, 2.0, 2.0]
    curve = curve_of(
        LAYERS, table({"a": [late, late, early, late, late]}, stderr=5.0), "m", "x"
    )
    assert curve.redrawn == {("a",): [late, early, late, late]}
    assert not curve.noisy
    for rule in (RULES["change_point"], RULES["sensitivity_ratio"]):
        found = stability(curve, rule, 1.3, 2, seed=0, resamples=N)
        assert found["of"] == "batches"
        assert likely(found["agreement"], 3 / 4)
        assert likely(found["cuts"]["l1"], 1 / 4)


def test_clients_and_batches_are_resampled_in_two_stages() -> None:
    """S_2 is 1 + (what a's resample adds) with a alone, 1 with b alone, half of it with both; the cut is at 1.3."""
    a, b = [[1.0, 1.0, 3.0], [1.0, 1.5, 3.0], [1.0, 1.7, 3.0]], [[1.0, 1.0, 3.0]] * 3
    curve = curve_of(LAYERS, table({"a": a, "b": b}), "m", "x")
    found = stability(curve, RULES["sensitivity_ratio"], 1.3, 2, seed=0, resamples=N)
    assert found["of"] == "clients and batches"
    assert likely(
        found["cuts"]["l1"], 1 / 4 + 1 / 2 * 1 / 2
    )  # a alone, or both with a's second resample


def test_the_text_says_what_is_resampled() -> None:
    clients = {"a": [[1.0, 1.0, 2.0], [1.0, 1.0, 2.0], [1.0, 2.0, 2.0]]}

    def said(found: dict[str, Any], key: str) -> str:
        return str(
            stability(
                curve_of(LAYERS, table(found), "m", "x"),
                RULES["change_point"],
                1.3,
                2,
                0,
            )[key]
        )

    plain = clients["a"][:1]
    assert said(clients, "of") == "batches"
    assert said({"a": plain}, "status").endswith("nothing to resample")
    assert said({**clients, "b": clients["a"]}, "of") == "clients and batches"
    assert said({**clients, "b": plain}, "of") == "clients and batches of a"


def test_a_resample_without_a_value_decides_nothing() -> None:
    found = table({"a": [[1.0, 1.0, 2.0], [1.0, 1.0, 2.0], [1.0, 1.0, 2.0]]})
    broken = (found["variant"] == "x, resample 2") & (found["layer"] == "l2")
    found.loc[broken, ["value", "status"]] = [np.nan, "not finite"]
    curve = curve_of(LAYERS, found, "m", "x")
    said = stability(curve, RULES["change_point"], 1.3, 2, 0, resamples=N)
    assert likely(said["undecided"], 1 / 2)
    assert resamples_of(found, "x")["resample"].tolist() == [1, 1, 1, 2, 2, 2]


def test_resamples_go_to_disk_and_into_the_evidence_but_not_into_the_frame(
    tmp_path: Path,
) -> None:
    models, data = (
        {name: net(k) for k, name in enumerate("abc")},
        {name: pair(24, k) for k, name in enumerate("abc")},
    )
    how: dict[str, Any] = {"batch": 4, "progress": False}
    metrics = ("grad_variance", "federation_sensitivity", "weight_magnitude")
    plain, report = (
        diagnose(models, data, metrics, **how),
        diagnose(models, data, metrics, **how, options={"resamples": 5}),
    )
    for column in ("metric", "variant", "client", "layer", "status", "estimator"):
        assert plain.frame[column].tolist() == report.frame[column].tolist()
    assert plain.frame["value"].tolist() == pytest.approx(
        report.frame["value"].tolist(), rel=1e-12
    )
    assert plain.resamples.empty
    assert len(report.resamples) == 5 * 3 * 2 * (
        1 + 2
    )  # resamples, clients, layers, variants
    report.write(tmp_path / "rows.jsonl")
    again = Report.read(tmp_path / "rows.jsonl")
    assert again.frame.equals(report.frame)
    assert again.resamples.equals(report.resamples)
    assert len(rows.read(tmp_path / "rows.jsonl")[1]) == len(report.table)
    plans = [
        select(given, "change_point") for given in (report, tmp_path / "rows.jsonl")
    ]
    assert plans[0] == plans[1]
    assert plans[0].shared == select(plain, "change_point").shared
    said = plans[0].why.detail["stability"]
    assert said["of"] == "clients and batches"
    assert "the clients and batches:" in explain(plans[0], full=True)
    assert "--resamples" not in explain(plans[0], full=True)
    assert "--resamples" in explain(select(plain), full=True)
    one = select(
        diagnose(models["a"], data["a"], metrics, **how, options={"resamples": 5}),
        "change_point",
    )
    assert one.why.detail["stability"]["of"] == "batches"


def test_the_command_line_resamples_what_training_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = "diagnose --dataset digits --clients 3 --max-samples 200 --batch-size 8 --metrics federation_sensitivity"
    cli.main([*asked.split(), "--resamples", "9"])
    header, found = rows.read(Path("diagnosis/rows.jsonl"))
    again = resamples_of(found, "training")
    assert set(again["resample"]) == set(range(1, 10))
    assert len(again) == 9 * 3 * len(header["layers"])
    assert set(again["round"]) == {0}
    cli.main(["select", "diagnosis", "--rule", "change_point", "--explain"])
    assert "the clients and batches:\n" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        cli.main([*asked.split(), "--resamples", "-2"])
    assert stopped.value.code == 2
    assert "got -2" in capsys.readouterr().err
