"""The gallery: a picture of every metric from the committed rows, and commands that parse."""

import re

import pytest

from diagnostics.metrics.base import METRICS
from fedlayers.cli.app import command_class, parse_command
from figures import gallery, items
from figures.__main__ import main

ROOM = 120_000
STORED = gallery.STUDY.read(gallery.STUDY.path())


@pytest.mark.slow
@pytest.mark.usefixtures("no_training")
def test_the_committed_page_and_pictures_are_of_the_stored_rows(tmp_path):
    main(["gallery", "--out", str(tmp_path)])
    fresh = (
        (tmp_path / "gallery.md")
        .read_text()
        .replace("](gallery/", "](pictures/gallery/")
    )
    assert fresh == gallery.PAGE.read_text()
    names = [entry.name for entry in gallery.entries(*STORED)]
    assert re.findall(r"!\[.*\]\(pictures/gallery/(\w+)\.png\)", fresh) == names
    kept = {path.name for path in (items.PICTURES / "gallery").iterdir()}
    assert kept == {f"{name}.png" for name in names}
    assert kept == {path.name for path in (tmp_path / "gallery").iterdir()}
    assert all(
        (items.PICTURES / "gallery" / name).stat().st_size < ROOM for name in kept
    )


def test_each_picture_says_its_direction_and_how_it_is_made():
    entries = {entry.name: entry for entry in gallery.entries(*STORED)}
    assert set(METRICS) - set(entries) == {"clients_differ", "layer_tuning"}
    for name, entry in entries.items():
        assert entry.says.endswith("."), name
        says = entry.says.casefold()
        if name in METRICS:
            parts = METRICS[name].direction.casefold().split("; ")
            assert all(part in says for part in [*parts, "unit: "])
        lines = entry.command.splitlines()
        if lines[0].startswith("fedlayers"):
            for line in lines:
                words = line.removeprefix("fedlayers ").split()
                assert isinstance(parse_command(words), command_class(words[0]))
        else:
            compile(entry.command, name, "exec")
