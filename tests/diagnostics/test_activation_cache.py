"""Forward passes that several metrics read: made once, the same rows to the bit, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diagnostics import diagnosis
from diagnostics.activation_cache import ActivationCache, See
from diagnostics.measure import diagnose
from diagnostics.metrics.base import METRICS
from diagnostics.report import Report
from diagnostics.representation.features import collect

C = 3
READERS = [name for name, metric in METRICS.members().items() if metric.features]
OPTIONS: dict[str, dict[str, Any]] = {
    "linear_probe": {"folds": 2, "samples": 14},
    "knn_probe": {"folds": 2, "samples": 14},
    "separability": {"samples": 14},
    "hessian_spectrum": {"k": 1, "tol": 0.1},
}
WAYS = {
    "in memory": ("eval", ActivationCache),
    "not at all": ("eval", partial(ActivationCache, most=0)),
    "random draws": ("train", ActivationCache),
}
MEASURED = {"in memory": list(METRICS), "random draws": list(METRICS)}


class Counted(nn.Sequential):
    """A network that counts its forward passes, those of all copies together."""

    passes = 0

    def forward(self, x: Tensor) -> Any:
        Counted.passes += 1
        return super().forward(x)


def net(seed: int) -> Counted:
    torch.manual_seed(seed)
    return Counted(
        *(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout(0.2),
        ),
        *(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(inplace=True), nn.Linear(6, C)),
    )


def measured(*metrics: str, mode: str = "eval", data: Any = None) -> Report:
    g = torch.Generator().manual_seed(1)
    models = {name: net(k) for k, name in enumerate("ab")}
    own = {
        name: (torch.randn(16, 1, 6, 6, generator=g), torch.arange(16) % C)
        for name in models
    }
    options = {name: OPTIONS[name] for name in metrics if name in OPTIONS}
    if "update_magnitude" in metrics:
        options["update_magnitude"] = {"start": net(9)}
    return diagnose(
        models,
        data or own,
        metrics,
        batch=9,
        options={**options, "mode": mode},
        progress=False,
    )


@cache
def together(way: str) -> pd.DataFrame:
    mode, kept = WAYS[way]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnosis, "ActivationCache", kept)
        return measured(*MEASURED.get(way, READERS), mode=mode).frame


@pytest.mark.parametrize(
    ("way", "metric"),
    [(way, name) for way in WAYS for name in MEASURED.get(way, READERS)],
)
def test_a_metric_has_the_same_bits_alone_and_among_others(
    way: str, metric: str
) -> None:
    every = together(way)
    rows = every[every["metric"] == metric].reset_index(drop=True)
    assert rows["value"].notna().any()
    pd.testing.assert_frame_equal(
        rows, measured(metric, mode=WAYS[way][0]).frame, check_exact=True
    )


def passes(*metrics: str) -> int:
    before = Counted.passes
    measured(*metrics)
    return Counted.passes - before


@pytest.mark.parametrize("metric", READERS)
def test_a_second_reader_makes_no_forward_pass(metric: str) -> None:
    others = [
        name
        for name in READERS
        if METRICS[name].features == METRICS[metric].features and name != metric
    ]
    assert passes(others[0], metric) == passes(others[0])
    strangers = [
        name for name in READERS if METRICS[name].features != METRICS[metric].features
    ]
    assert passes(strangers[0], metric) > passes(strangers[0])


def test_passes_are_kept_from_their_first_reader_to_their_last() -> None:
    names = ("cka", "linear_probe", "grad_norm", "cca", "separability")
    given = {
        metric.name: kept
        for metric, kept in diagnosis._share_passes([METRICS[name] for name in names])
    }
    assert given["cka"] is given["cca"] is not None
    assert given["linear_probe"] is given["separability"] is not None
    assert given["cka"] is not given["linear_probe"]
    assert given["grad_norm"] is None
    assert [
        kept
        for _, kept in diagnosis._share_passes([METRICS["cka"], METRICS["knn_probe"]])
    ] == [None, None]


# --- what is kept ----------------------------------------------------------------------------------------------


def calls(*outputs: Tensor) -> tuple[Callable[[See], str], list[int]]:
    """A pass that puts these out at the module ``fc``, and how often it was made."""
    made: list[int] = []

    def make(see: See) -> str:
        made.append(1)
        for k, output in enumerate(outputs):
            see("fc", k, output)
        return "end"

    return make, made


def told(
    kept: ActivationCache, make: Callable[[See], str], key: str = "a", path: str = "fc"
) -> list[Tensor]:
    seen: list[Tensor] = []
    assert (
        kept.replay(key, [path], make, lambda path, call, output: seen.append(output))
        == "end"
    )
    return seen


@pytest.mark.parametrize(
    "output",
    [
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 4).T,
        torch.randn(7, 6)[2:5],
        torch.randn(4, 1, 1),
        torch.tensor(2.0),
        torch.empty(0, 3),
        torch.tensor([torch.nan, -0.0]).double(),
        torch.randn(3).bfloat16(),
    ],
)
def test_an_output_comes_back_with_its_bits_and_layout(output: Tensor) -> None:
    kept, (make, made) = ActivationCache(), calls(output, output + 1)
    first, again = told(kept, make), told(kept, make)
    assert len(made) == 1
    assert kept.size == 2 * output.nbytes
    for a, b in zip(first, again, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert [s for s, size in zip(a.stride(), a.shape, strict=True) if size > 1] == [
            s for s, size in zip(b.stride(), b.shape, strict=True) if size > 1
        ]
        assert torch.equal(
            a.contiguous().view(-1).view(torch.uint8),
            b.contiguous().view(-1).view(torch.uint8),
        )


@pytest.mark.parametrize(
    "output",
    [torch.ones(1, 3).expand(4, 3), torch.ones(4, 6)[:, ::2], torch.ones(3).bool()],
)
def test_what_is_no_block_of_numbers_is_passed_anew(output: Tensor) -> None:
    kept, (make, made) = ActivationCache(), calls(torch.ones(5), output)
    for _ in range(2):
        assert torch.equal(told(kept, make)[1], output)
    assert len(made) == 2
    assert kept.size == 0


def test_a_pass_that_does_not_fit_leaves_room_for_one_that_does() -> None:
    kept = ActivationCache(most=100)
    (large, made), (small, kept_once) = (
        calls(torch.ones(10), torch.ones(20)),
        calls(torch.ones(20)),
    )
    for _ in range(2):
        assert [len(output) for output in told(kept, large)] == [10, 20]
        assert len(told(kept, small, "b")) == 1
    assert (len(made), len(kept_once), kept.size) == (2, 1, 80)


def test_a_pass_that_fails_is_not_kept() -> None:
    def fails(see: See) -> str:
        see("fc", 0, torch.ones(3))
        raise RuntimeError("on purpose")

    kept = ActivationCache()
    with pytest.raises(RuntimeError, match="on purpose"):
        told(kept, fails)
    make, made = calls(torch.zeros(2))
    assert told(kept, make)[0].tolist() == [0, 0]
    assert (len(made), kept.size) == (1, 8)


def test_a_pass_that_watched_more_serves_and_one_that_watched_less_does_not() -> None:
    def make(see: See) -> str:
        made.append(1)
        see("conv", 0, torch.ones(1))
        see("fc", 0, torch.zeros(1))
        return "end"

    kept, made, seen = ActivationCache(), list[int](), list[str]()
    for paths, number in ((["conv", "fc"], 1), (["fc"], 1), (["fc", "out"], 2)):
        kept.replay("a", paths, make, lambda path, call, output: seen.append(path))
        assert len(made) == number
    assert seen == ["conv", "fc", "fc", "conv", "fc"]


def test_features_are_those_of_the_weights_and_samples_as_they_are() -> None:
    """Changed in place, as by somebody's metric that adds noise; a loader's samples are not known before they come."""
    model, kept = net(0), ActivationCache()
    x, y = torch.randn(8, 1, 6, 6), torch.arange(8) % C
    changes: dict[str, tuple[Any, bool]] = {
        "nothing": (lambda: None, False),
        "weights": (lambda: model[8].weight.data.add_(1), True),
        "statistics": (lambda: model[1].running_mean.add_(1), True),
        "nothing again": (lambda: None, False),
    }
    collect(model, ["6", "8"], (x, y), kept=kept)
    for name, (change, anew) in changes.items():
        change()
        before = Counted.passes
        found = collect(model, ["8"], (x, y), kept=kept).at("8")
        assert (Counted.passes > before) == anew, name
        assert (found == collect(model, ["8"], (x, y)).at("8")).all(), name
    loader = DataLoader(TensorDataset(x, y), 4)
    for _ in range(2):
        before = Counted.passes
        collect(model, ["8"], loader, kept=kept)
        assert Counted.passes == before + 2
