"""Every picture that rows allow is found by name; costs are drawn as they were measured."""

import matplotlib.pyplot as plt
import pytest
from PIL import Image

from diagnostics.measure import diagnose
from diagnostics.metrics.base import METRICS
from diagnostics.plots.page import album
from fedlayers.cli.app import main
from fl_core import rows as schema
from fl_core.layers import Layer
from fl_core.plan import Evidence, LayerPlan
from fl_core.records.store import Run
from tests.conftest import refuses
from tests.made import labelled, mlp

LAYERS = ["0", "2"]


@pytest.mark.slow
def test_every_metric_that_is_measured_is_in_the_album():
    models = {name: mlp(4, 3, 3, seed=k) for k, name in enumerate("ab")}
    data = {name: labelled(40, k) for k, name in enumerate("ab")}
    apart = {"update_magnitude", "clients_differ", "layer_tuning"}  # need a start
    names = [*{*METRICS} - apart]
    frame = diagnose(models, data, names, options={"cka": {"variant": "pairs"}}).frame
    pictures = album(frame)
    further = {"cka_matrices", "cka_pairs"}
    assert set(pictures) == {*names, *further, "costs"}
    for draw in pictures.values():
        texts = draw().findobj(plt.Text)
        assert "2 Linear" in {text.get_text() for text in texts}
        plt.close("all")
    assert set(album(frame, ["cka"])) == {"cka", *further}
    with refuses("mean 'cka'"):
        album(frame, ["ckaa"])
    rows = [
        schema.row("grad_norm", 10.0 * r + k, client="a", layer=layer, round=r)
        for r in (1, 4)
        for k, layer in enumerate(LAYERS)
    ]  # of several rounds a curve shows the last
    line = album(schema.frame(rows))["grad_norm"]().axes[0].lines[0]
    assert list(line.get_ydata()) == [40.0, 41.0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(words):
    main(words.split())


def refused(capsys, words):
    with pytest.raises(SystemExit) as left:
        command(words)
    assert left.value.code == 2
    return capsys.readouterr().err


def test_plot_draws_what_is_kept_at_the_asked_resolution(here):
    schema.write(here / "rows.jsonl", {"data": "these"}, norms(here))
    widths = []
    for dpi in (40, 80):
        command(f"plot rows.jsonl --dpi {dpi} --out {dpi}")
        (drawn,) = (here / str(dpi)).iterdir()
        widths.append(Image.open(drawn).width)
    assert drawn.name == "grad_norm.png"
    assert Image.open(drawn).text["data"] == "these"
    assert widths[1] == pytest.approx(2 * widths[0], abs=2)


def norms(folder, **columns):
    """Rows of one layer's gradients, written to a folder."""
    rows = [schema.row("grad_norm", 1.0, client=c, layer="l", **columns) for c in "ab"]
    folder.mkdir(exist_ok=True)
    schema.write(folder / "rows.jsonl", {}, rows)
    return rows


def written(folder):
    return {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}


def test_what_plot_and_metric_options_refuse(here, capsys):
    both = [*norms(here, seed=0), *norms(here, seed=1)]
    schema.write(here / "rows.jsonl", {}, both)
    layers = tuple(Layer(name, (f"{name}.weight",)) for name in ("fc1", "fc2"))
    LayerPlan(layers, ("fc1",), Evidence(rule="manual")).save(here / "plan.json")
    before = sorted(here.iterdir())
    spectrum = "diagnose --dataset heart --metrics hessian_spectrum --option"
    for words, message in (
        ("plot nothing.jsonl", "nothing.jsonl"),
        ("plot rows.jsonl --metrics grad_nor", "mean 'grad_norm'"),
        ("plot rows.jsonl --out rows.jsonl", "which is a file"),
        ("plot rows.jsonl --dpi 3", "20 to 1200"),
        ("plot rows.jsonl", "by seed"),
        ("plot plan.json --metrics cka", "one picture"),
        (f"{spectrum} k=5", "METRIC.k"),
    ):
        assert message in refused(capsys, words)
    assert sorted(here.iterdir()) == before


def test_plot_reads_a_run_and_leaves_its_folder_alone(here, capsys):
    """Also one that was killed in mid line."""
    command("run --dataset heart --rounds 1 --workers 0 --out run")
    before = written(here)
    command("plot run --metrics macro_f1 --out drawn")
    names = {path.name for path in (here / "drawn").iterdir()}
    assert names == {"macro_f1.png", "macro_f1_clients.png"}
    assert "run directory" in refused(capsys, "plot run --out run")
    assert written(here) == before
    with (here / "run/rows.jsonl").open("a") as file:
        file.write('{"run": "ru')
    assert Run("run").verify()
    command("plot run --metrics macro_f1 --out again")
    assert (here / "again/macro_f1.png").is_file()


def test_plot_follows_no_link_out_of_a_folder(here, capsys):
    norms(here / "folder")  # such as a study's
    command("plot folder --dpi 40")
    assert [picture.name for picture in (here / "pictures").iterdir()] == [
        "grad_norm.png"
    ]
    path = here / "folder/rows.jsonl"
    path.rename(here / "elsewhere.jsonl")
    path.symlink_to(here / "elsewhere.jsonl")
    with pytest.raises(SystemExit) as left:
        command("plot folder --out drawn")
    assert left.value.code == 1
    assert "folder/rows.jsonl is a symbolic link" in capsys.readouterr().err
    assert not (here / "drawn").exists()
