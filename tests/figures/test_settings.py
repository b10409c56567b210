"""The papers' settings beside those here: cells, agreement, and what every such table says."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from figures import catalogue, items
from figures.fedpft import settings as fedpft
from figures.papers import published
from figures.scheduling import settings as scheduling
from figures.settings import SHOWN, Setting, agreement, drawing, option
from fl_core.algorithms import registry
from fl_core.algorithms.fedpft import FedPFT
from fl_core.config import KEYS, RunConfig
from fl_core.plan import LayerPlan

TABLES = (
    "player_fl.tableA1",
    "player_fl.tableA3",
    "player_fl.tableA4",
    "scheduling.table1",
    "fedpft.tableK",
)


def test_a_cell_has_one_entry_where_both_agree_in_any_order() -> None:
    assert Setting("a", "b", (2.0, 1.0), (1.0, 2.0 + 1e-12)).text == "2, 1"
    assert Setting("a", "b", (5e-4,), (1e-3,)).text == "0.0005 / 0.001"
    assert (
        Setting("a", "b", ("focal",), ("cross_entropy",)).text
        == "focal / cross_entropy"
    )
    assert Setting("a", "b", (), (60_000.0,)).text == "– / 60,000"
    assert Setting("a", "b").text == "–"
    assert not Setting("a", "b", (1.0,), ("1",)).same


def test_agreement_counts_what_both_have_and_names_the_others() -> None:
    alike, unlike, open_ = (
        Setting("lr", "x", (1.0,), (1.0,)),
        Setting("lr", "y", (1.0,), (2.0,)),
        Setting("lr", "z", (1.0,)),
    )
    found = agreement("all agree", [alike, unlike, open_])
    assert (found.held, found.measured) == (
        False,
        "1 of 2 agree; different (paper / here): y, lr 1 / 2",
    )
    assert agreement("all agree", [alike, open_]).held
    many = agreement(
        "all agree", [Setting("lr", str(k), (1.0,), (2.0,)) for k in range(6)]
    )
    assert many.measured.endswith(f"and {6 - SHOWN} more")


def test_an_option_is_the_algorithm_s_own_before_its_default_and_the_run_s() -> None:
    config = RunConfig(rounds=7, options={"unfreeze": (0, 5)}).to_json()
    assert option(config, "unfreeze") == (0, 5)
    assert option(config, "rounds") == (7,)
    assert option(config, "prompts", {"prompts": 10}) == (10,)
    assert option(config, "alpha") == ()
    with pytest.raises(KeyError):
        option(config, "unfrozen")


def test_a_picture_has_a_panel_for_each_column_with_numbers() -> None:
    made = drawing(
        [
            Setting("|D|", "x", (10.0,), (1.0,), "samples"),
            Setting("|D|", "y", (), (3.0,)),
            Setting("loss", "z", ("a",)),
        ],
        "What is set.",
        line="symbol",
    )
    assert [ax.get_title() for ax in made.figure.axes] == ["x", "y"]
    assert made.text.splitlines()[2] == r"| \|D\| | `samples` | 10 / 1 | – / 3 | – |"
    assert list(made.table["paper"]) == ["10", "", "a"]


def test_what_a_symbol_is_called_exists() -> None:
    schedule = {field.name for field in fields(registry()["vanilla"].Config)} | {
        "finetune_epochs"
    }
    known = {*KEYS}
    assert set(scheduling.NUMBERS.values()) <= known | schedule
    assert all(
        hasattr(LayerPlan, name.partition(".")[2])
        for name in scheduling.PARTS.values()
        if "LayerPlan" in name
    )
    own = {field.name for field in fields(FedPFT.Config)}
    assert set(fedpft.NUMBERS.values()) <= known | own


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.usefixtures("no_training", "read_once")
def test_settings_are_ready_and_say_that_nothing_was_measured(name: str) -> None:
    item = items.find(name)
    entry = next(each for each in catalogue.published() if each.name == name)
    assert entry.state() == "ready"
    assert entry.scale() in ("settings, nothing measured", "nothing trained")
    header, frame = item.read(item.path())
    assert item.draw is not None
    made = item.draw(header, frame)
    assert list(made.table) == ["what", "called", "of", "paper", "here"]
    assert "| --- |" in made.text


def test_table_a3_has_every_printed_rate_of_the_data_at_hand() -> None:
    printed = published("player_fl")
    printed = printed[
        (printed["place"] == "Table A.3")
        & ~printed["dataset"].isin(["emnist", "mimic"])
    ]
    item = items.find("player_fl.tableA3")
    assert item.draw is not None
    made = item.draw(*item.read(item.path())).table
    assert sorted(float(rate) for rate in made["paper"] if rate) == pytest.approx(
        sorted(printed["value"])
    )


def test_every_module_of_fedpft_has_tensors(tmp_path: Path) -> None:
    header, _ = items.find(fedpft.NAME).read(items.find(fedpft.NAME).path())
    parts = fedpft.modules(header["runs"][fedpft.FEDPFT]["layers"])
    assert all(parts.values())
    assert sum(map(len, parts.values())) == sum(
        len(e["parameters"]) for e in header["runs"][fedpft.FEDPFT]["layers"]
    )
