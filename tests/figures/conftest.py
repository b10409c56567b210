"""What tests of figures share: no training while drawing, rows that are read once, and pictures."""

import copy

import matplotlib.pyplot as plt
import pytest
from PIL import Image

import figures.__main__  # noqa: F401  (registers every item)
from figures import items
from figures.page import missing_runs
from figures.recipe import tested, trained
from fl_core.config import RunConfig
from fl_core.run import runner


@pytest.fixture
def no_training(monkeypatch):
    """Training is an error in this test."""

    def refuse(*args, **kwargs):
        raise AssertionError("drawing must not train")

    for name in ("assemble", "run", "train_first_round"):
        monkeypatch.setattr(runner, name, refuse)


@pytest.fixture(scope="session")
def rows_in_memory():
    return {}


@pytest.fixture
def read_once(monkeypatch, rows_in_memory):
    """The committed rows, which many views are drawn from, are read from their files once a session."""

    def once(read):
        def reading(item, path):
            if items.ROWS not in path.parents:
                return read(item, path)
            if path not in rows_in_memory:
                rows_in_memory[path] = read(item, path)
            header, frame = rows_in_memory[path]
            return copy.deepcopy(header), frame.copy()

        return reading

    monkeypatch.setattr(items.Item, "read", once(items.Item.read))


def check_picture(path):
    """A picture of at least so many pixels either way that is not empty."""
    with Image.open(path) as picture:
        assert min(picture.size) > 300
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 50


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


NAME = "toy.check"


def measured(task, run, folder):
    """The clients' test accuracy after the last round."""
    scores = tested(trained(task)[1])
    last = scores["round"] == task.config.federation.rounds
    return scores[last & scores["model"].isin(["global", "personal"])]


def plotted(header, frame):
    figure, ax = plt.subplots(figsize=(3, 2))
    ax.plot(frame["value"].to_numpy(float), label="value")
    ax.legend()
    text = missing_runs(header)
    finding = items.Finding("a line", "so it is", True)
    return items.Drawing(
        figure, frame[["run", "seed", "value"]], f"A line.{text}", (finding,)
    )


@pytest.fixture
def check(monkeypatch):
    """A study of three small runs and two seeds, registered."""
    runs = {
        name: TINY.with_keys(algorithm=name) for name in ("local", "fedavg", "fedper")
    }
    item = items.Item(
        NAME, "A check", runs, 2, "no time", measured, plotted, partial=True
    )
    monkeypatch.setitem(items.REGISTRY, NAME, item)
    return item


def made(folder):
    return {path.stem for path in folder.glob("*.jsonl")}
