"""Every picture that rows allow is found by name; densities and costs are drawn as they were measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from diagnostics import plots
from diagnostics.curvature.spectrum import AT, smooth_density
from diagnostics.measure import diagnose
from diagnostics.metrics.base import METRICS
from diagnostics.plots.collect import album
from fedlayers.cli.app import main
from fl_core import rows as schema
from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.plan import Evidence, LayerPlan
from fl_core.records.store import Run

LAYERS = ["0", "2"]


pytestmark = pytest.mark.usefixtures("closed")


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))


def samples(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(40, 4, generator=drawn), torch.randint(
        0, 3, (40,), generator=drawn
    )


@pytest.fixture(scope="module")
def spectrum() -> Any:
    models = {"north": network(0), "south": network(1)}
    data = {"north": samples(0), "south": samples(1)}
    return diagnose(
        models,
        data,
        "hessian_spectrum",
        options={"hessian_spectrum": {"density": 20}},
        progress=False,
    )


def block(
    model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], layer: int
) -> np.ndarray:
    """The layer's Hessian block, dense, float64."""
    model = model.double()
    module = model[layer]  # type: ignore[index]
    sizes = [module.weight.shape, module.bias.shape]

    def loss(flat: torch.Tensor) -> torch.Tensor:
        weight, bias = (
            flat[: sizes[0].numel()].reshape(sizes[0]),
            flat[sizes[0].numel() :],
        )
        own = {f"{layer}.weight": weight, f"{layer}.bias": bias}
        out = torch.func.functional_call(model, own, (data[0].double(),))
        return nn.functional.cross_entropy(out, data[1])

    start = torch.cat([module.weight.reshape(-1), module.bias]).detach()
    return torch.autograd.functional.hessian(loss, start).numpy()


def test_shares_are_the_eigenvalues_of_the_dense_block(spectrum: Any) -> None:
    """With more steps than parameters: moments of the shares against those of the dense block."""
    frame = spectrum.frame
    for seed, client in enumerate(("north", "south")):
        for layer in (0, 2):
            own = frame[(frame["client"] == client) & (frame["layer"] == str(layer))]
            own = own[own["variant"].str.startswith(AT)]
            nodes = own["variant"].str.removeprefix(AT).astype(float).to_numpy()
            exact = np.linalg.eigvalsh(block(network(seed), samples(seed), layer))
            assert own["value"].sum() == pytest.approx(1.0)
            assert own["value"].between(0, 1).all()
            far = np.abs(nodes[:, None] - exact).min(axis=1)
            assert far[own["value"] > 1e-6].max() < 1e-4 * np.abs(exact).max()
            assert nodes.max() == pytest.approx(exact.max(), rel=1e-4)
            assert set(own["unit"]) == {"share"}


def test_density_is_off_unless_asked_for() -> None:
    report = diagnose(network(), samples(), "hessian_spectrum", progress=False)
    assert not report.frame["variant"].str.startswith(AT).any()
    with pytest.raises(UsageError, match="density=50"):
        plots.spectral_density(report.frame)
    assert list(album(report.frame)) == ["hessian_spectrum"]


@pytest.mark.parametrize("steps", [1, -3])
def test_density_of_too_few_steps_is_refused(steps: int) -> None:
    with pytest.raises(UsageError, match="at least 2"):
        diagnose(
            network(),
            samples(),
            "hessian_spectrum",
            options={"hessian_spectrum": {"density": steps}},
            progress=False,
        )


def test_density_rows_name_their_error() -> None:
    """The mean of all eigenvalues is exact for a block that is written out, and has an error elsewhere."""
    options = {"hessian_spectrum": {"density": 2, "repeats": 7}}
    frame = diagnose(
        network(), samples(), "hessian_spectrum", options=options, progress=False
    ).frame
    exact = frame["n_params"] <= 14
    means = frame["variant"] == "mean"
    assert set(frame.loc[means, "layer"]) == set(LAYERS)
    assert (frame.loc[means & exact, "stderr"] == 0).all()
    assert (frame.loc[means & ~exact, "stderr"] > 0).all()
    assert set(frame.loc[means, "estimator"]) == {
        "dense",
        "lanczos quadrature(steps=2, repeats=7)",
    }


def test_density_curves_integrate_to_one_and_strokes_are_the_largest(
    spectrum: Any,
) -> None:
    ax: Any = plots.spectral_density(spectrum.frame)
    assert [line.get_label() for line in ax.lines] == LAYERS
    for line in ax.lines:
        mass = np.trapezoid(np.nan_to_num(line.get_ydata()), line.get_xdata())
        assert mass == pytest.approx(1.0, abs=0.05)  # the faint tails are not drawn
    assert ax.get_yscale() == "log"
    frame = spectrum.frame
    for layer, strokes in zip(LAYERS, ax.collections, strict=True):
        top = frame[(frame["layer"] == layer) & frame["variant"].str.startswith("top")]
        drawn = [segment[0, 0] for segment in strokes.get_segments()]
        np.testing.assert_allclose(sorted(drawn), sorted(top["value"]))
    assert "mean of 2 clients" in ax.get_ylabel()


def test_one_clients_density_is_its_nodes_smoothed(spectrum: Any) -> None:
    ax: Any = plots.spectral_density(spectrum.frame, "south", width=0.02)
    own = spectrum.frame[
        (spectrum.frame["client"] == "south") & (spectrum.frame["layer"] == "2")
    ]
    own = own[own["variant"].str.startswith(AT)]
    nodes = own["variant"].str.removeprefix(AT).astype(float).to_numpy()
    expected = smooth_density(
        ax.lines[1].get_xdata(), nodes, own["value"].to_numpy(), 0.02 * np.ptp(nodes)
    )
    drawn = ax.lines[1].get_ydata()
    np.testing.assert_allclose(drawn[~np.isnan(drawn)], expected[~np.isnan(drawn)])
    floor = (
        0.05 / 12 / (0.02 * np.ptp(nodes) * np.sqrt(2 * np.pi))
    )  # a twentieth of one of the 12 eigenvalues
    np.testing.assert_array_equal(np.isnan(drawn), expected < floor)
    assert ax.get_ylabel() == "density"
    with pytest.raises(UsageError, match="client"):
        plots.spectral_density(spectrum.frame, "moon")
    with pytest.raises(UsageError, match="above 0"):
        plots.spectral_density(spectrum.frame, width=0)


def test_a_layer_without_second_derivatives_has_a_reason_and_no_curve() -> None:
    model = nn.Sequential(
        nn.Linear(4, 3),
        nn.BatchNorm1d(3, affine=False),
        nn.Linear(3, 3),
        nn.Linear(3, 3),
    )
    model[2].requires_grad_(False)
    frame = diagnose(
        model,
        samples(),
        "hessian_spectrum",
        options={"hessian_spectrum": {"density": 5}},
        progress=False,
    ).frame
    for layer, own in frame.groupby("layer"):
        density = own[own["variant"].str.startswith("at")]
        tops = own[own["variant"] == "top1"]
        assert (density["status"] == "ok").all() == (tops["status"] == "ok").all(), (
            layer
        )
        assert len(density)


def test_costs_are_shares_from_input_to_output() -> None:
    report = diagnose(network(), samples(), "layer_cost", progress=False)
    ax: Any = plots.costs(report.frame)
    kinds = ["bytes", "forward_flops", "backward_flops", "activation_bytes"]
    table = report.frame.pivot(index="variant", columns="layer", values="value").loc[
        kinds, LAYERS
    ]
    share = table.div(table.sum(axis=1), axis=0)
    for layer, bars in zip(LAYERS, ax.containers, strict=True):
        np.testing.assert_allclose([bar.get_width() for bar in bars], share[layer])
        left = share[LAYERS[: LAYERS.index(layer)]].sum(axis=1)
        np.testing.assert_allclose([bar.get_x() for bar in bars], left, atol=1e-12)
    said = [text.get_text() for text in ax.texts]
    assert f"{4 * (4 * 3 + 3 + 3 * 3 + 3):d} B" in said


def test_costs_of_two_models_are_refused() -> None:
    rows = [
        schema.row("layer_cost", v, layer="a", variant="bytes", seed=s)
        for s, v in enumerate((4.0, 8.0))
    ]
    with pytest.raises(UsageError, match="by seed"):
        plots.costs(schema.frame(rows))
    with pytest.raises(UsageError, match="above 0"):
        plots.costs(
            schema.frame([schema.row("layer_cost", 0.0, layer="a", variant="bytes")])
        )


def test_every_metric_that_is_measured_is_in_the_album() -> None:
    models, data = (
        {"a": network(0), "b": network(1)},
        {"a": samples(0), "b": samples(1)},
    )
    names = [name for name in METRICS if name != "update_magnitude"]
    frame = diagnose(models, data, names, progress=False).frame
    pictures = album(frame)
    assert set(pictures) == {*names, "cka_matrices", "costs"}
    for draw in pictures.values():
        assert draw().axes
        plt.close("all")
    assert set(album(frame, ["cka"])) == {"cka", "cka_matrices"}
    with pytest.raises(UsageError, match="mean 'cka'"):
        album(frame, ["ckaa"])


def test_of_several_rounds_a_curve_shows_the_last() -> None:
    rows = [
        schema.row("grad_norm", 10.0 * r + k, client="a", layer=layer, round=r)
        for r in (1, 4)
        for k, layer in enumerate(LAYERS)
    ]
    line = album(schema.frame(rows))["grad_norm"]().axes[0].lines[0]
    assert np.asarray(line.get_ydata()).tolist() == [40.0, 41.0]


def test_a_runs_scores_are_curves_and_clients() -> None:
    rows = [
        schema.row("macro_f1", 0.1 * r + 0.1 * k, algorithm="fedavg", client=client, split="test", model="global",
                   round=r, seed=0)
        for r in range(3)
        for k, client in enumerate(("a", "b"))
    ]  # fmt: skip
    frame = schema.frame(rows)
    pictures = album(frame)
    assert list(pictures) == ["macro_f1", "macro_f1_clients"]
    assert [draw().axes[0].get_xlabel() for draw in pictures.values()] == [
        "round",
        "test macro-F1 (higher is better)",
    ]
    with pytest.raises(UsageError, match="rows"):
        album(schema.frame([]))
    whole = schema.frame([schema.row("silhouette", 0.3)])
    with pytest.raises(UsageError, match="silhouette"):
        album(whole)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    assert left.value.code == 2
    return capsys.readouterr().err


def test_from_the_command_line_to_a_density(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "diagnose",
        "--dataset",
        "heart",
        "--epochs",
        "1",
        "--metrics",
        "hessian_spectrum",
        "--out",
        ".",
    ]
    main(
        [
            *asked,
            "--option",
            "hessian_spectrum.density=6",
            "--option",
            "hessian_spectrum.k=1",
        ]
    )
    main(["plot", "rows.jsonl", "--out", "drawn/here", "--dpi", "60"])
    said = capsys.readouterr().out
    assert sorted(path.name for path in (here / "drawn/here").iterdir()) == [
        "hessian_spectrum.png", "spectral_density.png"
    ]  # fmt: skip
    assert "drawn/here/spectral_density.png" in said
    with Image.open(here / "drawn/here/spectral_density.png") as picture:
        assert picture.info["dpi"] == pytest.approx((60, 60), abs=0.1)
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 50


def test_what_plot_and_metric_options_refuse(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema.write(
        here / "rows.jsonl",
        {},
        [schema.row("held", 1.0, client="a", layer="l", round=1)],
    )
    before = sorted(here.iterdir())
    assert "nothing.jsonl" in refused(capsys, "plot", "nothing.jsonl")
    assert "mean 'held'" in refused(capsys, "plot", "rows.jsonl", "--metrics", "hel")
    assert "which is a file" in refused(
        capsys, "plot", "rows.jsonl", "--out", "rows.jsonl"
    )
    assert "20 to 1200" in refused(capsys, "plot", "rows.jsonl", "--dpi", "3")
    spectrum = (
        "diagnose",
        "--dataset",
        "heart",
        "--metrics",
        "hessian_spectrum",
        "--option",
    )
    assert "mean 'density'" in refused(capsys, *spectrum, "hessian_spectrum.densiti=5")
    assert "got 'many'" in refused(capsys, *spectrum, "hessian_spectrum.density=many")
    assert "'cka'" in refused(capsys, *spectrum, "cka.density=5")
    assert "METRIC.density" in refused(capsys, *spectrum, "density=5")
    assert sorted(here.iterdir()) == before


def test_plot_draws_chosen_rows_and_plans(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        schema.row("grad_norm", 1.0, client=client, layer="l", round=1, seed=seed)
        for seed in (0, 1)
        for client in "ab"
    ]
    schema.write(here / "rows.jsonl", {}, rows)
    assert "by seed" in refused(capsys, "plot", "rows.jsonl")
    assert not (here / "pictures").exists()
    assert "seed '2'" in refused(capsys, "plot", "rows.jsonl", "--where", "seed=2")
    assert "mean 'seed'" in refused(capsys, "plot", "rows.jsonl", "--where", "sed=2")
    assert "COLUMN=VALUE" in refused(capsys, "plot", "rows.jsonl", "--where", "seed")
    main(["plot", "rows.jsonl", "--where", "seed=1", "client=a", "--dpi", "40"])
    assert [path.name for path in (here / "pictures").iterdir()] == ["grad_norm.png"]
    layers = tuple(Layer(name, (f"{name}.weight",)) for name in ("fc1", "fc2"))
    LayerPlan(layers, ("fc1",), Evidence(rule="manual")).save(here / "plan.json")
    assert "one picture" in refused(capsys, "plot", "plan.json", "--metrics", "cka")
    main(["plot", "plan.json", "--out", "plan", "--dpi", "40"])
    assert [path.name for path in (here / "plan").iterdir()] == ["plan.png"]


@pytest.mark.parametrize("where", ["client=b", "client_b=b"])
def test_a_client_is_not_chosen_from_rows_of_pairs(
    where: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pair has one row, so that its second client would lose it."""
    pairs = [
        schema.row("cka", 0.5, client=a, client_b=b, layer="l")
        for a, b in ("ab", "ac", "bc")
    ]
    alone = [schema.row("grad_norm", 1.0, client=client, layer="l") for client in "abc"]
    weights = [
        schema.row(
            "aggregation_weight", 0.5, client=a, client_b="a", layer="l", round=1
        )
        for a in "ab"
    ]
    schema.write(here / "rows.jsonl", {}, [*pairs, *alone, *weights])
    message = refused(capsys, "plot", "rows.jsonl", "--where", where)
    assert "got cka" in message
    assert "Pass --metrics grad_norm aggregation_weight." in message
    assert f"Leave {where} out" in refused(
        capsys, "plot", "rows.jsonl", "--metrics", "cka", "--where", where
    )


def test_a_client_is_chosen_from_rows_of_single_clients_next_to_pairs(
    here: Path,
) -> None:
    rows = [schema.row("grad_norm", 1.0, client=client, layer="l") for client in "ab"]
    schema.write(
        here / "rows.jsonl",
        {},
        [*rows, schema.row("cka", 0.5, client="a", client_b="b", layer="l")],
    )
    main(
        ["plot", "rows.jsonl", "--where", "client=b", "metric=grad_norm", "--dpi", "40"]
    )
    assert [path.name for path in (here / "pictures").iterdir()] == ["grad_norm.png"]


def test_plot_reads_a_run_and_leaves_its_folder_alone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(
        ["run", "--dataset", "heart", "--rounds", "1", "--workers", "0", "--out", "run"]
    )
    before = {path: path.stat().st_mtime_ns for path in (here / "run").rglob("*")}
    main(["plot", "run", "--metrics", "macro_f1", "--out", "drawn"])
    assert {path.name for path in (here / "drawn").iterdir()} == {
        "macro_f1.png",
        "macro_f1_clients.png",
    }
    assert "run directory" in refused(capsys, "plot", "run", "--out", "run")
    assert {
        path: path.stat().st_mtime_ns for path in (here / "run").rglob("*")
    } == before


def test_plot_reads_a_run_that_was_killed_in_mid_line(here: Path) -> None:
    main(
        ["run", "--dataset", "heart", "--rounds", "1", "--workers", "0", "--out", "run"]
    )
    with (here / "run/rows.jsonl").open("a") as file:
        file.write('{"run": "ru')
    assert Run("run").verify()
    main(["plot", "run", "--metrics", "macro_f1", "--out", "drawn"])
    assert (here / "drawn/macro_f1.png").is_file()


@pytest.mark.parametrize("kind", ["run", "folder"])
def test_plot_follows_no_link_out_of_a_folder(
    here: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = here / kind / "rows.jsonl"
    if kind == "run":
        main(
            [
                "run",
                "--dataset",
                "heart",
                "--rounds",
                "1",
                "--workers",
                "0",
                "--out",
                "run",
            ]
        )
    else:  # such as a study's
        path.parent.mkdir()
        schema.write(
            path,
            {},
            [
                schema.row("grad_norm", 1.0, client=client, layer="l", round=1)
                for client in "ab"
            ],
        )
        main(["plot", "folder", "--dpi", "40"])
        assert [path.name for path in (here / "pictures").iterdir()] == [
            "grad_norm.png"
        ]
    path.rename(here / "elsewhere.jsonl")
    path.symlink_to(here / "elsewhere.jsonl")
    with pytest.raises(SystemExit) as left:
        main(["plot", kind, "--out", "drawn"])
    assert left.value.code == 1
    assert f"{kind}/rows.jsonl is a symbolic link" in capsys.readouterr().err
    assert not (here / "drawn").exists()
