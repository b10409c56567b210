"""Curves and their slopes, the sum of a diagnosis's passes, and parts of commands: each from numbers that are known."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import commands, diagnosis, pairs, scale
from benchmarks.curves import CURVES
from diagnostics.metrics.base import METRICS


def points(seconds: float, megabytes: float) -> pd.DataFrame:
    """As if every curve grew by these exponents, with a little noise from repeat to repeat."""
    return pd.DataFrame(
        {
            "curve": name,
            "size": size,
            "repeat": k,
            "seconds": 0.1 * size**seconds * (1 + 0.02 * k),
            "megabytes": 5 * size**megabytes * (1 + 0.02 * k),
        }
        for name, curve in CURVES.items()
        for size in curve.sizes
        for k in range(3)
    )


def test_a_slope_is_the_exponent_and_its_interval_holds_it() -> None:
    sizes = [10, 10, 100, 100, 1000, 1000]
    exact = [3 * size**1.5 for size in sizes]
    assert scale.slope(sizes, exact) == pytest.approx((1.5, 1.5, 1.5))
    found, low, high = scale.slope(
        sizes, [v * (1.1 if k % 2 else 0.9) for k, v in enumerate(exact)]
    )
    assert low < found < high
    assert found == pytest.approx(1.5, abs=0.05)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.3, "grows slower"), (1.0, "as theory"), (1.4, "grows faster")],
)
def test_growth_is_told_beside_theory(seconds: float, words: str) -> None:
    time, memory = scale.slopes("round-parameters", points(seconds, 1.0))
    assert (time.holds, memory.holds) == (words, "as theory")
    assert time.ratio == pytest.approx(seconds, abs=0.01)


def test_what_is_below_the_grain_or_not_measured_has_no_slope() -> None:
    frame = points(1.0, 0.0)
    frame["megabytes"] = 0.01
    assert [row.holds for row in scale.slopes("round-clients", frame)] == [
        "as theory",
        "at most 0.01: no slope",
    ]
    assert {row.holds for row in scale.slopes("round-clients", frame.iloc[:0])} == {
        "not measured"
    }


def test_points_that_are_there_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def point(name: str, size: int) -> tuple[float, float]:
        asked.append((name, size))
        if len(asked) == 7:
            raise KeyboardInterrupt
        return 1e-6 * size, 2.0

    monkeypatch.setattr(scale, "POINTS", tmp_path / "points.jsonl")
    monkeypatch.setattr(scale, "PICTURE", tmp_path / "scale.png")
    monkeypatch.setattr(scale, "draw", lambda frame: scale.PICTURE.touch())
    monkeypatch.setattr(scale, "point", point)
    with pytest.raises(KeyboardInterrupt):
        scale.scale(repeats=2)
    rows = scale.scale(repeats=2)
    every = [(name, size) for name, curve in CURVES.items() for size in curve.sizes]
    assert sorted([*asked[:6], *asked[7:]]) == sorted(every * 2)
    assert len(rows) == 2 * len(CURVES)
    assert scale.PICTURE.exists()


def test_the_picture_shows_every_curve(tmp_path: Path) -> None:
    assert scale.draw(points(1.0, 0.5), tmp_path / "scale.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CURVES))
def test_every_curve_can_be_measured(name: str) -> None:
    curve = CURVES[name]
    assert list(curve.sizes) == sorted(set(curve.sizes))
    with ExitStack() as stack:
        curve.job(curve.sizes[0], stack)()


@pytest.mark.slow
def test_a_point_is_measured_in_a_process_of_its_own() -> None:
    seconds, megabytes = scale.point("round-parameters", 500_000)
    assert 0 < seconds < 60
    assert 2 < megabytes < 500  # a model of 2 MB


def test_the_passes_of_a_diagnosis_are_each_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From made-up seconds: 1 for a diagnosis itself, 100 for whatever a metric does."""

    def made_up(sides: dict[str, object], turns: int) -> pd.DataFrame:
        members = METRICS.members()
        one = dict.fromkeys(members, 101.0) | {"bn_scale": 1.0}
        alone = sum(
            name != "bn_scale" and not metric.uses_gradient_pass
            for name, metric in members.items()
        )
        features = sum(bool(metric.features) for metric in members.values())
        one |= {
            diagnosis.GRADIENTS: 101.0,
            "all of features": 1 + 100.0 * features,
            "all": 1 + 100 + 100.0 * alone,
        }
        return pd.DataFrame([{name: one.get(name, 10.0) for name in sides}] * turns)

    monkeypatch.setattr(diagnosis, "alternate", made_up)
    distinct, singly, features = diagnosis.all_metrics(6)
    assert (distinct.ratio, distinct.holds) == (pytest.approx(1.0), "yes")
    assert singly.ratio < 1
    assert features.ratio == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("fl_core/training/loop.py", "training"),
        ("fl_core/training/evaluate.py", "evaluation"),
        ("fl_core/engine.py", "rounds: messages, averages, clients"),
        ("diagnostics/gradients/passes.py", "measuring"),
        ("diagnostics/plots/page.py", "drawing"),
        ("fedlayers/studies/choose.py", "deciding and comparing"),
        ("fedlayers/cli/app.py", "command line"),
    ],
)
def test_time_is_charged_to_the_part_that_knows_the_file_best(
    path: str, part: str
) -> None:
    assert (commands.ROOT / path).exists()
    assert commands.part_of_file(str(commands.ROOT / path)) == part


def test_every_place_of_our_own_exists() -> None:
    outside = {"importlib", "matplotlib/", "seaborn/", "torch/optim/"}
    for place in {
        place for places in commands.PARTS.values() for place in places
    } - outside:
        assert any(
            (commands.ROOT / folder / place).exists() for folder in ("", "fedlayers")
        ), place
    assert commands.part_of_file("/usr/lib/python3/json/decoder.py") is None


def test_tables_name_their_command() -> None:
    for path in pairs.RESULTS.glob("*.csv"):
        assert path.read_text(encoding="utf-8").startswith("# python -m benchmarks"), (
            path.name
        )
