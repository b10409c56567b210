"""The gallery: a picture of every metric from the committed rows, commands that parse, and rows made anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diagnostics.metrics.base import METRICS
from fedlayers.cli.app import command_class, parse_command
from figures import gallery, items
from figures.__main__ import main
from fl_core.config import RunConfig
from tests.figures.conftest import forbid_training

BESIDES = [
    "cka_matrices", "costs", "partition", "tsne", "mismatch", "plan", "regret", "comparison"
]  # fmt: skip
ROOM = 120_000


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gallery drawn from the committed rows, where training is an error."""
    out = tmp_path_factory.mktemp("drawn")
    with pytest.MonkeyPatch.context() as patch:
        forbid_training(patch)
        main(["gallery", "--out", str(out)])
    return out


@pytest.mark.slow
def test_the_committed_page_and_pictures_are_of_the_stored_rows(drawn: Path) -> None:
    fresh = (
        (drawn / "gallery.md").read_text().replace("](gallery/", "](pictures/gallery/")
    )
    assert fresh == gallery.PAGE.read_text()
    names = [*gallery.load(gallery.folder()).metrics, *BESIDES]
    assert re.findall(r"!\[.*\]\(pictures/gallery/(\w+)\.png\)", fresh) == names
    kept = {path.name for path in (items.PICTURES / "gallery").iterdir()}
    assert kept == {f"{name}.png" for name in names}
    assert kept == {path.name for path in (drawn / "gallery").iterdir()}
    assert all(
        (items.PICTURES / "gallery" / name).stat().st_size < ROOM for name in kept
    )
    assert sum(path.stat().st_size for path in gallery.folder().iterdir()) < 300_000


def test_each_picture_says_its_direction_and_how_it_is_made() -> None:
    for entry in gallery.entries(gallery.load(gallery.folder())):
        assert entry.says.endswith("."), entry.name
        says = entry.says.casefold()
        if entry.name in METRICS:
            assert all(
                part in says
                for part in METRICS[entry.name].direction.casefold().split("; ")
            )
            assert "unit: " in says
        if entry.name == "layer_cost":
            units = "none (parameters), byte (bytes, activation_bytes), FLOP (forward_flops, backward_flops)"
            assert units.casefold() in says
        lines = entry.command.splitlines()
        if lines[0].startswith("fedlayers"):
            for line in lines:
                words = line.removeprefix("fedlayers ").split()
                assert isinstance(parse_command(words), command_class(words[0]))
        else:
            compile(entry.command, entry.name, "exec")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:client")
def test_made_anew_on_small_data_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = RunConfig(dataset="digits", model="mlp", clients=2, max_samples=120)
    tables = gallery.TABLES.with_keys(rounds=1)
    monkeypatch.setattr(
        gallery, "CONFIGS", {"images": small, "tables": tables, "scales": small}
    )
    monkeypatch.setattr(gallery, "TABLES", tables)
    monkeypatch.setattr(gallery, "RULES", ("largest_jump",))
    monkeypatch.setattr(gallery, "ALGORITHMS", ("local", "fedavg"))
    for name in ("REGRET_SEEDS", "REGRET_ROUNDS", "SEEDS"):
        monkeypatch.setattr(gallery, name, 1)
    seconds = gallery.measured(tmp_path / "gallery", command="made", progress=False)
    assert seconds > 0
    stored = gallery.load(tmp_path / "gallery")
    assert set(METRICS) <= set(stored.frame["metric"])
    assert list(stored.tables["comparison"]["algorithm"]) == ["local", "fedavg"]
    scales = stored.frame[stored.frame["metric"] == "bn_scale"]
    assert scales["value"].isna().all()
    assert not (scales["status"] == "ok").any()
    page = gallery.redraw(tmp_path / "gallery", tmp_path)
    count = len(METRICS.names()) + len(BESIDES)
    assert len(list((tmp_path / "gallery").glob("*.png"))) == count
    assert page.read_text().count("\n## ") == count
