"""PLayer-FL's networks by layer: the study makes what its figures need, and the figures draw what is there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from diagnostics.plots.drawing import both_ways
from figures import items, layerwise, recipe
from figures.player_fl import (
    expectations as player_fl_expectations,
    rests_on as player_fl_rests_on,
)
from figures.player_fl.layers import (
    FEDERATED,
    FIRST,
    MOMENTS,
    NAME,
    NETWORKS,
    STUDY,
    run_of,
)
from figures.player_fl.views import FIGURES
from figures.verdicts import of_share
from fl_core import runner
from fl_core.config import RunConfig
from fl_core.defaults import resolve

VIEWS = [f"player_fl.{name}" for name in FIGURES]
TINY = {
    "rounds": 2,
    "eval_every": 2,
    "checkpoint_every": 2,
    "keep_optimizer": True,
    "loss": "cross_entropy",
}
pytestmark = pytest.mark.filterwarnings("ignore:client")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of three small runs of a network with convolutions, three seeds, and of one with text."""
    root = tmp_path_factory.mktemp("rows")
    lines = [
        {"text": f"{'bad' if k % 2 else 'fine'} flight {k % 7}", "label": str(k % 2), "airline": "ab"[k % 3 > 0]}
        for k in range(40)
    ]  # fmt: skip
    (root / "tweets.jsonl").write_text("\n".join(map(json.dumps, lines)))
    narrow = {"model": "fmnist_cnn", "model_options": {"width": 0.1}}
    images = RunConfig(
        dataset="large_digits",
        clients=2,
        max_samples=60,
        batch_size=8,
        **narrow,
        **TINY,
    )
    texts = RunConfig(
        dataset=str(root / "tweets.jsonl"), client_column="airline", model_options={"width": 16}, batch_size=8, **TINY
    )  # fmt: skip
    runs = {}
    for dataset, config in (("fashion_mnist", images), ("airline_tweets", texts)):
        for moment in MOMENTS:
            algorithm = "fedavg" if moment == FEDERATED else "local"
            runs[run_of(dataset, moment)] = config.with_keys(algorithm=algorithm)
    small = replace(STUDY, runs=runs, more_seeds={})
    digits = [name for name in runs if name.startswith("fashion")]
    recipe.train(small, root / NAME, only=digits, progress=False)
    recipe.train(small, root / NAME, seeds=1, progress=False)
    return root


@pytest.fixture(scope="module")
def stored(folder: Path) -> tuple[dict[str, object], pd.DataFrame]:
    return STUDY.read(folder / NAME)


def of(frame: pd.DataFrame, run: str, metric: str, variant: str) -> pd.DataFrame:
    return frame[
        (frame["run"] == run)
        & (frame["metric"] == metric)
        & (frame["variant"] == variant)
    ]


def table_of(name: str, header: dict[str, object], frame: pd.DataFrame) -> pd.DataFrame:
    """A figure's table; nothing is written."""
    drawing = items.find(f"player_fl.{name}").draw(header, frame)
    plt.close(drawing.figure)
    return drawing.table


@pytest.mark.parametrize("scale", items.SCALES)
def test_recipes_differ_only_in_algorithm_and_rounds(scale: str) -> None:
    study = STUDY.at(scale)
    assert set(study.runs) == {
        run_of(dataset, moment) for dataset in NETWORKS for moment in MOMENTS
    }
    for dataset in NETWORKS:
        first, alone, federated = (
            resolve(study.runs[run_of(dataset, moment)]) for moment in MOMENTS
        )
        assert federated.with_keys(algorithm="local") == alone
        assert (
            first.with_keys(
                rounds=alone.federation.rounds,
                eval_every=alone.execution.eval_every,
                checkpoint_every=alone.federation.rounds,
            )
            == alone
        )
        assert alone.execution.eval_every == alone.federation.rounds
        assert (
            alone.training.optimizer,
            alone.training.amsgrad,
            alone.training.weight_decay,
            alone.training.loss,
        ) == (
            "adamw",
            True,
            0.01,
            "cross_entropy",
        )


@pytest.mark.slow
def test_each_run_has_both_definitions_of_each_quantity(
    stored: tuple[dict[str, object], pd.DataFrame],
) -> None:
    frame = stored[1]
    common = {
        ("grad_variance", "epoch"), ("grad_variance", "batch"), ("hessian_trace", "per_parameter"),
        ("hessian_trace", "absolute"), ("hessian_trace", "released"), ("cka", "flatten"), ("procrustes", "released"),
        (layerwise.SENSITIVITY, "after"), (layerwise.SENSITIVITY, "figure"),
    }  # fmt: skip
    for run, own in frame.groupby("run"):
        first = run.endswith(FIRST)
        extra = {(layerwise.SENSITIVITY, "training")} if first else set()
        assert set(zip(own["metric"], own["variant"], strict=True)) == common | extra
        assert set(own["round"]) == {0 if first else 2}
        assert (own["client"] != "").all()
        assert own["value"].notna().all()


def test_first_epoch_is_that_of_training_alone_and_of_federated_training() -> None:
    config = STUDY.runs["heart-federated"].with_keys(
        rounds=1,
        eval_every=1,
        checkpoint_every=1,
        stack="off",
    )
    first = layerwise.Epoch(runner.assemble(config)).models
    for algorithm in ("fedavg", "local"):
        after = layerwise.after_run(
            runner.assemble(config.with_keys(algorithm=algorithm))
        )
        assert after.round == 1
        for name, model in after.models.items():
            for key, tensor in model.state_dict().items():
                assert torch.equal(tensor, first[name].state_dict()[key])


def test_models_of_the_last_round_are_trained_and_not_yet_averaged() -> None:
    config = STUDY.runs["heart-federated"].with_keys(
        rounds=2, eval_every=2, checkpoint_every=2
    )
    sites = layerwise.after_run(runner.assemble(config))
    alone = layerwise.after_run(runner.assemble(config.with_keys(algorithm="local")))
    weights = {
        name: model.state_dict()["fc4.linear.weight"]
        for name, model in sites.models.items()
    }
    a, b, *_ = weights.values()
    assert not torch.equal(a, b)
    assert all(
        not torch.equal(w, alone.models[name].state_dict()["fc4.linear.weight"])
        for name, w in weights.items()
    )


@pytest.mark.parametrize(
    "name",
    [
        "fig1",
        "figA6",
        "rests_on",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("fig3", "fig4", "figA8")
        ),
    ],
)
@pytest.mark.slow
def test_figures_draw_what_is_there(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("assemble", "run", "train_first_round"):
        monkeypatch.setattr(runner, each, None)
    name = f"player_fl.{name}"
    drawing = items.redraw(items.find(name), folder / NAME, tmp_path)
    assert "3 seeds" in drawing.caption
    assert np.isfinite(drawing.table["measured"].astype(float)).all()
    page = (tmp_path / f"{name}.md").read_text()
    decided = [
        finding for finding in drawing.findings if "Fashion-MNIST" in finding.expected
    ]
    assert decided
    assert all(
        " seeds, " in finding.measured or "intervals" in finding.measured
        for finding in decided
    )
    tweets = [
        finding for finding in drawing.findings if "airline tweets" in finding.expected
    ]
    assert {(finding.held, finding.verdict) for finding in tweets} <= {
        (None, "not comparable")
    }
    if name in VIEWS:
        ways, moments = FIGURES[name.removeprefix("player_fl.")][1:3]
        assert "cannot be had" in page
        assert f"airline_tweets-{moments[0]} 1 2" in page
        assert drawing.table.groupby(["dataset", "definition"]).ngroups == 2 * len(ways)


@pytest.mark.parametrize("name", ["fig1", "fig2", "fig3", "fig4"])
@pytest.mark.slow
def test_pictures_name_their_quantity_and_a_row_has_one_axis(
    name: str, folder: Path
) -> None:
    item = items.find(f"player_fl.{name}")
    assert item.draw is not None
    figure = item.draw(*item.read(folder / NAME)).figure
    grid = np.array(figure.axes).reshape(2, -1)
    plt.close(figure)
    words = {
        "fig1": "variance",
        "fig2": "Hessian",
        "fig3": "dissimilarity",
        "fig4": "sensitivity",
    }
    assert words[name] in grid[0, 0].get_ylabel()
    for row in grid:
        assert len({ax.get_ylim() for ax in row}) == 1


@pytest.mark.slow
def test_tables_agree_with_rows_by_brute_force(
    stored: tuple[dict[str, object], pd.DataFrame],
) -> None:
    header, frame = stored
    own = of(frame, "fashion_mnist-independent", "hessian_trace", "released")
    ratios = [
        each.set_index("layer")["value"]["fc2"] / each["value"].min()
        for _, each in own.groupby(["seed", "client"])
    ]
    table = table_of("figA5", header, frame)
    line = table[
        (table["dataset"] == "fashion_mnist") & (table["layer"] == "fc2")
    ].set_index("quantity")
    assert line.loc["hessian_nuclear / min", "measured"] == pytest.approx(
        np.median(ratios)
    )
    assert line["published_low"].isna().all()  # published ranges are of the first epoch
    angles = both_ways(of(frame, "fashion_mnist-first", "procrustes", "released"))
    fc1 = angles[angles["layer"] == "fc1"].groupby(["seed", "client"])["value"].mean()
    table = table_of("figA7", header, frame)
    line = table[
        (table["quantity"] == "procrustes_angle") & (table["layer"] == "fc1")
    ].set_index("dataset")
    assert line.loc["fashion_mnist", "measured"] == pytest.approx(fc1.median())
    known = items.published("player_fl")
    known = known[(known["place"] == "Fig. 3A") & (known["layer"] == "fc1")]
    assert line.loc["fashion_mnist", "published_high"] == known["high"].item()


@pytest.mark.slow
def test_choices_are_what_they_say(
    stored: tuple[dict[str, object], pd.DataFrame],
) -> None:
    frame = stored[1]
    found = player_fl_rests_on.choices(frame, "fashion_mnist")
    n = (
        frame[frame["metric"] == "grad_variance"]
        .groupby(["layer", "run"])["n_params"]
        .first()
    )
    sizes = (
        n.xs("fashion_mnist-first", level="run")
        .reindex(found["variance"].index)
        .astype(float)
    )
    again = found["variance"].div(sizes / sizes.iloc[0], axis=0)
    pd.testing.assert_frame_equal(found["divided"].astype(float), again.astype(float))
    trace = of(frame, "fashion_mnist-first", "hessian_trace", "absolute")
    all_params = trace.groupby("layer", sort=False)["n_params"].first().astype(float)
    whole = found["trace"].mul(all_params / all_params.iloc[0], axis=0)
    pd.testing.assert_frame_equal(found["whole"].astype(float), whole.astype(float))
    moved = (
        player_fl_rests_on.with_offset(found["angle"], NETWORKS["fashion_mnist"])
        - found["angle"]
    )
    assert moved.mean(axis=1).tolist() == pytest.approx([0, 0, 0, 0.5, 0.5])
    assert player_fl_rests_on.with_offset(found["angle"], NETWORKS["heart"]).equals(
        found["angle"] + 0.0
    )
    assert player_fl_rests_on.choices(frame, "cifar10") == {}


def curve(
    *medians: float,
    seeds: int = 8,
    layers: tuple[str, ...] = ("conv1", "conv3", "fc1", "fc2"),
) -> pd.DataFrame:
    columns = pd.MultiIndex.from_product(
        [range(seeds), ["a", "b"]]
    )  # two clients a seed
    return pd.DataFrame(
        np.repeat([[m] for m in medians], 2 * seeds, 1),
        index=pd.Index(layers, name="layer"),
        columns=columns,
    )


NOTHING = pd.DataFrame(
    np.nan, index=["conv1", "conv3", "fc1", "fc2"], columns=["low", "high"]
)


@pytest.mark.parametrize(
    ("expect", "values", "held"),
    [
        (player_fl_expectations.rises, (2, 1, 10, 100), [True, True]),
        (player_fl_expectations.rises, (1, 2, 10, 100), [False, True]),
        (player_fl_expectations.rises, (2, 1, 9, 100), [True, False]),
        (player_fl_expectations.no_cliff, (0, 1, 2, 3), [True, True]),
        (player_fl_expectations.no_cliff, (0, 1, 0.9, 3), [False, False]),
        (player_fl_expectations.kink, (1, 1.05, 1.5, 9), [True]),
        (player_fl_expectations.kink, (1, 1.2, 1.5, 9), [False]),
        (player_fl_expectations.offset, (0.1, 0.2, 0.4, 0.5), []),
    ],
)
def test_expectations(expect, values: tuple[float, ...], held: list[bool]) -> None:
    network = NETWORKS["fashion_mnist"]
    assert [
        finding.held for finding in expect(network, "it", curve(*values), NOTHING)
    ] == held
    for few in (2, 3):  # six curves of three seeds would decide, their seeds do not
        open_ = expect(network, "it", curve(*values, seeds=few), NOTHING)
        assert [finding.held for finding in open_] == [None] * len(held)


@pytest.mark.parametrize(
    ("angles", "held"), [((0.1, 0.4, 0.4, 0.4), True), ((0.1, 0.4, 0.8, 0.9), False)]
)
def test_offset_asks_which_published_angle_is_nearer(
    angles: tuple[float, ...], held: bool
) -> None:
    known = NOTHING.assign(low=[0.1, 0.4, 0.8, 0.8], high=[0.1, 0.4, 0.9, 0.9])
    known.attrs["where"] = "Fig. 3A"
    found = player_fl_expectations.offset(
        NETWORKS["fashion_mnist"], "the angle", curve(*angles), known
    )
    assert [finding.held for finding in found] == [held]


@pytest.mark.parametrize(
    ("counts", "far", "held"),
    [
        ((8, 8), "", True),
        ((8, 0), "", False),
        ((8, 0), "few", None),
        ((8, 8), "few", True),
        ((0, 8), "few", False),
    ],
)
def test_a_network_that_is_not_comparable_contradicts_no_claim(
    counts: tuple[int, int], far: str, held: bool
) -> None:
    fair, other = (of_share(count, 8) for count in counts)
    found = player_fl_expectations.whole(
        "x", {"a": ("1", fair, ""), "b": ("2", other, far)}
    )
    assert found.held is held
    assert ("b 2, not comparable" in found.measured) is bool(far)
    assert found.incomparable == ""
