"""Trackers get a run's numbers under the names of its rows, also offline and after a resumption."""

import sys
from types import SimpleNamespace

import pytest

import fedlayers as fl
from fl_core.rounds.recorder import TRACKERS, numbers_of
from fl_core.run import runner
from tests.conftest import refuses

RUN = {"dataset": "heart", "algorithm": "fedper", "rounds": 2}


class Fake(SimpleNamespace):
    """A package with the calls of W&B."""

    def __init__(self):
        super().__init__(inits=[], logged={}, finished=0)

    def init(self, **how):
        self.inits.append(how)

    def log(self, numbers, step):
        self.logged.setdefault(step, {}).update(numbers)

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_numbers_arrive_once_under_the_names_of_the_rows(name, tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = fl.RunConfig(**RUN)
    runner.run(config, tmp_path / "run", until=1, log=[name])
    result = fl.resume(tmp_path / "run", log=name)
    rows = result.to_frame().to_dict("records")
    assert fake.logged == numbers_of(rows)
    test = result.to_frame().query("metric == 'macro_f1' and round == 2")
    for row in test.to_dict("records"):
        path = f"macro_f1/{row['model']}/{row['split']}/{row['client']}"
        assert fake.logged[2][path] == row["value"]
    assert [how["name"] for how in fake.inits] == ["run", "run"]
    assert fake.finished == 2
    if name == "wandb":
        assert fake.inits[0]["mode"] == "offline"


def test_tensorboard_writes_beside_the_run(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = fl.run(**RUN, out=tmp_path / "run", log="tensorboard")
    events = EventAccumulator(str(tmp_path / "run-tensorboard")).Reload()
    wanted = numbers_of(result.to_frame().to_dict("records"))[2]
    for name, value in wanted.items():
        assert events.Scalars(name)[-1].value == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("name", [*TRACKERS, "trackoi"])
def test_a_tracker_that_is_not_there_stops_before_the_run(name, tmp_path, monkeypatch):
    if name in TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
    message = "did you mean 'trackio'" if name == "trackoi" else f"pip install {name}"
    with refuses(message):
        fl.run(**RUN, out=tmp_path / "run", log=name)
    assert not (tmp_path / "run").exists()


class Events(SimpleNamespace):
    """As TensorBoard's writer."""

    def __init__(self, folder):
        super().__init__(folder=str(folder), written={}, closed=0)

    def add_scalar(self, name, value, step):
        self.written.setdefault(step, {})[name] = value

    def close(self):
        self.closed += 1


def test_tensorboard_receives_each_round_once_and_is_closed(tmp_path, monkeypatch):
    writers = []

    def open_events(folder):
        writers.append(Events(folder))
        return writers[-1]

    monkeypatch.setitem(sys.modules, "tensorboard", SimpleNamespace())
    package = SimpleNamespace(SummaryWriter=open_events)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    result = fl.run(**RUN, out=tmp_path / "run", log="tensorboard")
    (writer,) = writers
    assert writer.folder == str(tmp_path / "run-tensorboard")
    assert writer.written == numbers_of(result.to_frame().to_dict("records"))
    assert writer.closed == 1
    monkeypatch.chdir(tmp_path)
    fl.run(**RUN, log="tensorboard")
    assert writers[1].folder == "fedlayers-tensorboard"
