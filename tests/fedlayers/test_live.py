"""The picture that every long call draws again in a notebook's cell."""

import pytest

import fedlayers as fl
from fl_core import progress
from fl_core.run import runner

CONFIG = fl.RunConfig(dataset="heart", algorithm="fedper", rounds=2, eval_every=1)
OUTSIDE = {"progress": False, "live": True}


def resumed(out):
    runner.run(CONFIG.with_keys(rounds=4), out, until=1, progress=False)
    return fl.resume(out, **OUTSIDE)


CALLS = {
    "run": lambda out: fl.run(CONFIG, out, **OUTSIDE),
    "resume": lambda out: resumed(out),
    "choose": lambda out: fl.choose(CONFIG, out, seeds=1, baselines=False, **OUTSIDE),
    "compare": lambda out: fl.compare(
        CONFIG, ["local", "fedavg"], [0, 1], out, **OUTSIDE
    ),
    "tune": lambda out: fl.tune(
        CONFIG, ["fedavg"], {"lr": "0.01,0.1"}, out, trials=2, **OUTSIDE
    ),
}
LINES = {
    "run": ["fedper"],
    "resume": ["fedper"],
    "choose": ["fedavg", "local", "head_local"],
    "compare": ["local (personal)", "fedavg (global)"],
    "tune": ["fedavg-000", "fedavg-001"],
}


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("run", 0.0),
        ("resume", 0.0),
        pytest.param("choose", 0.0, marks=pytest.mark.slow),
        pytest.param("compare", 0.0, marks=pytest.mark.slow),
        pytest.param("tune", 0.0, marks=pytest.mark.slow),
        ("run", 3600.0),
    ],
)
def test_one_cell_shows_all_runs_and_is_drawn_no_oftener_than_due(
    name, seconds, tmp_path, monkeypatch
):
    shown = []
    handles = []

    class Handle:
        def display(self, contents, **how):
            handles.append(self)

        def update(self, contents, **how):
            assert bytes(contents["image/png"]).startswith(b"\x89PNG")

    draw = progress.Cell.show_figure

    def kept(cell, axes):
        shown.append([str(text) for text in axes.get_legend_handles_labels()[1]])
        draw(cell, axes)

    monkeypatch.setattr("IPython.display.DisplayHandle", Handle)
    monkeypatch.setattr(progress.Cell, "show_figure", kept)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(progress, "SECONDS", seconds)
    CALLS[name](tmp_path / "out")
    assert len(handles) == 1
    assert set(LINES[name]) <= set(shown[-1])
    assert len(shown) > 3 if seconds == 0 else len(shown) == 2
