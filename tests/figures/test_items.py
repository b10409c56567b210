"""Studies and their views, the papers' scale, and files whose bytes the rows determine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from PIL import Image

from figures import drawing, items, names, recipe
from figures.__main__ import main
from figures.items import Drawing, Finding, Item, View
from figures.page import read_expectations
from fl_core import rows, runner
from fl_core.algorithms import registry
from fl_core.config import RunConfig
from fl_core.errors import UsageError

TINY = RunConfig(
    dataset="digits",
    model="mlp",
    clients=2,
    max_samples=120,
    rounds=1,
    epochs=1,
    batch_size=16,
    lr=0.05,
    optimizer="sgd",
)
STUDY, FIGURE, TABLE = "toy.runs", "toy.fig1", "toy.tableA2"


def drawer(said: str) -> Callable[..., Drawing]:
    def draw(header: dict[str, object], frame: pd.DataFrame) -> Drawing:
        figure, ax = plt.subplots(figsize=(3, 2))
        ax.plot(frame["value"].to_numpy(float), label=said)
        ax.legend()
        table = frame[["run", "seed", "value"]]
        return Drawing(
            figure,
            table,
            f"{said}, {header['seeds']} seeds.",
            (Finding(said, "so it is", True),),
        )

    return draw


def measured(task: runner.Task, run: str, folder: Path | None = None) -> pd.DataFrame:
    found = {
        "algorithm": task.config.federation.algorithm,
        "seed": task.config.execution.seed,
    }
    return rows.frame([rows.row("rounds", task.config.federation.rounds, **found)])


RUNS = {"one": TINY, "two": TINY.with_keys(algorithm="local")}
PAPERS = {name: config.with_keys(rounds=9) for name, config in RUNS.items()}
TOY = {
    "Item": Item(STUDY, "A study", RUNS, 2, "no time", measured, None, PAPERS, 3),
    "Recipe": recipe.Recipe(
        STUDY, "A study", RUNS, 2, "no time", measured, paper=PAPERS
    ),
}


@pytest.fixture(params=["Recipe", pytest.param("Item", marks=pytest.mark.slow)])
def study(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Item:
    """A study and two views of it, alone in the registry."""
    monkeypatch.setattr(items, "REGISTRY", {})
    for name in (FIGURE, TABLE):  # before their source: the order does not matter
        items.register(View(name, f"Title of {name}", STUDY, drawer(name)))
    return items.register(TOY[request.param])


def stored(out: Path) -> set[str]:
    return {
        path.name
        for path in out.iterdir()
        if path.suffix not in (".png", ".pdf", ".csv", ".md")
    }


@pytest.mark.usefixtures("every_format")
def test_a_view_is_drawn_from_the_rows_of_its_source(
    study: Item,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("figures.page.shown", lambda: {FIGURE})
    figure = items.find(FIGURE)
    assert figure.study is study
    assert figure.path(tmp_path) == study.path(tmp_path)
    main([FIGURE, "--train", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert f"trains {STUDY}: no time" in said
    assert stored(tmp_path) == {study.path(tmp_path).name}
    header, frame = figure.read(study.path(tmp_path))
    assert header["item"] == STUDY
    assert header["runs"]["one"]["config"]["rounds"] == 1
    pd.testing.assert_frame_equal(frame, study.read(study.path(tmp_path))[1])
    for kind in ("png", "pdf", "csv", "md"):
        assert [path.stem for path in tmp_path.glob(f"*.{kind}")] == [FIGURE]
    assert pd.read_csv(tmp_path / f"{FIGURE}.csv")["value"].tolist() == [1.0] * 4
    page = (tmp_path / f"{FIGURE}.md").read_text()
    assert page.startswith(f"# Title of {FIGURE}\n")
    lead, picture, finding, *_, settings = page.split("\n\n")[1:]
    assert lead.startswith("**Held: ")
    assert FIGURE in picture
    assert read_expectations(f"{finding}\n\n") == [(FIGURE, "held", "so it is")]
    assert settings.startswith("| setting |")
    assert "| learning rate | 0.05 |" in settings
    assert f"`{header['command']}`" in settings


def test_a_study_without_a_drawing_is_drawn_by_its_views(
    study: Item, tmp_path: Path
) -> None:
    main([STUDY, "--train", "--out", str(tmp_path)])
    assert {path.stem for path in tmp_path.glob("*.png")} == {FIGURE, TABLE}
    with pytest.raises(UsageError, match=f"{STUDY} .*{FIGURE}, {TABLE}"):
        items.redraw(study, study.path(tmp_path), tmp_path)
    own = replace(study, draw=drawer("itself"))
    assert [each.name for each in items.drawings(own)] == [STUDY, FIGURE, TABLE]
    assert items.drawings(items.find(FIGURE)) == [items.find(FIGURE)]


def test_the_state_of_a_view_is_its_source_s(
    study: Item, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "ROWS", tmp_path)
    assert items.find(TABLE).state == study.state == "no rows"
    if isinstance(study, recipe.Recipe):
        recipe.train(study, study.path(), only=["one"], progress=False)
        assert items.find(TABLE).state == study.state == "2 of 4 runs"
        recipe.train(study, study.path(), progress=False)
    else:
        items.train(study, study.path(), progress=False)
    assert items.find(TABLE).state == study.state == "ready"
    assert items.find(TABLE).at("paper").state == "no rows"


def test_a_view_of_some_runs_waits_for_these(
    study: Item, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "ROWS", tmp_path)
    some = replace(items.find(TABLE), runs=["two"])
    whole = not isinstance(study, recipe.Recipe)
    if whole:
        items.train(study, study.path(), progress=False)
    else:
        recipe.train(study, study.path(), only=["one"], progress=False)
        assert study.state == "2 of 4 runs"
    assert some.state == ("ready" if whole else "no rows"), (
        "a file holds all runs, a folder one each"
    )
    if not whole:
        recipe.train(study, study.path(), only=["two"], seeds=1, progress=False)
        assert some.state == "1 of 2 runs"


def test_what_has_no_runs_yet_does_not_keep_a_study_s_other_figures(
    study: Item,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> Drawing:
        raise UsageError("none of its runs")

    monkeypatch.setattr(items, "ROWS", tmp_path)
    main([STUDY, "--train", "--out", str(tmp_path)])
    assert "not drawn yet" not in capsys.readouterr().out
    monkeypatch.setitem(items.REGISTRY, TABLE, replace(items.find(TABLE), draw=refuse))
    main([STUDY, "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert f"{TABLE} is not drawn" in said
    assert f"{FIGURE}.png" in said
    for wanted in ([TABLE], [STUDY, "--train"]):
        with pytest.raises(SystemExit):
            main([*wanted, "--out", str(tmp_path)])
        assert capsys.readouterr().err.endswith("figures: none of its runs\n")


def test_the_papers_scale_is_an_item_of_its_own_with_the_same_runs(
    study: Item, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([TABLE, "--train", "--scale", "paper", "--out", str(tmp_path)])
    command = f"python -m figures {TABLE} --train --scale paper"
    assert capsys.readouterr().out.startswith(f"{command}\ntrains {STUDY}@paper: ")
    paper = study.at("paper")
    assert stored(tmp_path) == {paper.path(tmp_path).name}
    assert paper.path(tmp_path).name.startswith(f"{STUDY}@paper")
    header, frame = items.find(TABLE).at("paper").read(paper.path(tmp_path))
    assert header["item"] == f"{STUDY}@paper"
    assert list(header["runs"]) == ["one", "two"]
    assert set(frame["value"]) == {9.0}
    assert header["seeds"] == (3 if study.paper_seeds else 2)
    assert {path.stem for path in tmp_path.glob("*.p[dn]*")} == {f"{TABLE}@paper"}
    assert (
        f"python -m figures {TABLE}@paper`"
        in (tmp_path / f"{TABLE}@paper.md").read_text()
    )
    assert paper.command == f"python -m figures {STUDY} --scale paper --train"
    with pytest.raises(UsageError, match="no rows"):
        study.read(study.path(tmp_path))
    with pytest.raises(UsageError, match=f"'{STUDY}@paper'"):
        study.read(paper.path(tmp_path))


@pytest.mark.parametrize("name", [STUDY, FIGURE])
@pytest.mark.usefixtures("study")
def test_an_item_without_a_paper_scale_refuses_it(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(items.REGISTRY, STUDY, replace(items.find(STUDY), paper={}))
    with pytest.raises(SystemExit) as stopped:
        main([name, "--scale", "paper", "--train", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "got 'paper'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="mean 'paper'"):
        items.find(name).at("papers")
    assert items.find(name).at("quick") == items.find(name)


def test_what_cannot_be_registered(study: Item) -> None:
    with pytest.raises(ValueError, match=f"two .*{FIGURE}"):
        items.register(View(FIGURE, "", STUDY, drawer("")))
    with pytest.raises(ValueError, match="three"):
        items.register(
            replace(study, name="toy.more", paper={"one": TINY, "three": TINY})
        )
    with pytest.raises(UsageError, match=f"mean '{STUDY}'"):
        View("toy.fig2", "", "toy.rums", drawer("")).path()


@pytest.mark.usefixtures("every_format")
def test_equal_rows_give_equal_bytes(study: Item, tmp_path: Path) -> None:
    main([FIGURE, "--train", "--out", str(tmp_path)])
    first = {path.name: path.read_bytes() for path in tmp_path.glob(f"{FIGURE}.*")}
    assert len(first) == 4
    items.redraw(items.find(FIGURE), study.path(tmp_path), tmp_path)
    assert {
        path.name: path.read_bytes() for path in tmp_path.glob(f"{FIGURE}.*")
    } == first
    other = tmp_path / f"{FIGURE}.png"
    with Image.open(other) as picture:
        picture.load()
    picture.save(
        other, compress_level=1
    )  # the same pixels, compressed by another library
    stored = other.read_bytes()
    items.redraw(items.find(FIGURE), study.path(tmp_path), tmp_path)
    assert other.read_bytes() == stored != first[other.name]
    for changed in (
        picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        picture.resize((8, 8)),
    ):
        changed.save(other)
        items.redraw(items.find(FIGURE), study.path(tmp_path), tmp_path)
        assert other.read_bytes() == first[other.name]
    other.write_bytes(stored[:100])
    items.redraw(items.find(FIGURE), study.path(tmp_path), tmp_path)
    assert other.read_bytes() == first[other.name]
    drawn = first[f"{FIGURE}.pdf"]
    assert b"/CreationDate" not in drawn
    assert b"/FontFile2" in drawn  # TrueType
    assert b"/Type3" not in drawn


@pytest.mark.parametrize(
    ("caption", "shown"),
    [
        ("All of it. Fits.", "All of it. Fits."),
        (
            f"First, see Fig. A.1 of it. Then{' long' * 40}.",
            "First, see Fig. A.1 of it.",
        ),
        (f"{'first ' * 20}of all. Then more.", f"{'first ' * 20}of all."),
    ],
)
def test_beneath_a_picture_stand_whole_sentences_of_its_caption(
    caption: str, shown: str
) -> None:
    beneath = drawing.beneath(caption, 30)
    assert beneath.replace("\n", " ") == shown
    assert max(map(len, beneath.splitlines())) <= 30


def test_names_are_those_of_the_papers() -> None:
    assert [names.title(run) for run in ("fedavg@resnet8", "fedra_cover", "lg_fedavg", "my_own")] == [
        "FedAvg", "FedRA, cover", "LG-FedAvg", "my_own"
    ]  # fmt: skip
    assert names.titles("anti over lg_fedavg") == "Anti over LG-FedAvg"
    assert set(names.ALGORITHMS) <= set(registry()), (
        "a name of an algorithm that there is not"
    )
