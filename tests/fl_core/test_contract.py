"""What an algorithm's docstring promises is what happens, and what breaks the contract is refused by name."""

import inspect
import os
import re
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from fl_core.algorithms import Algorithm, Phase, State, registry
from fl_core.algorithms.averaging import FedAvg, FedProx
from fl_core.algorithms.base import ALGORITHMS
from fl_core.algorithms.fedper import FedPer
from fl_core.rounds.workers import Workers
from fl_core.run import runner
from tests.conftest import CONFIG, TOY, client_runner_of, network, play, refuses

ALL = sorted(registry())
NO_HOOKS = {"call", "method", "with_plan"}  # what the engine uses and nobody overrides
LOG = "FEDLAYERS_TEST_LOG"


def promises():
    """Hook -> its process and its times, from the table in the docstring of Algorithm."""
    table = inspect.getdoc(Algorithm).split("====\n")[2]
    rows = [re.split(r"\s{2,}", line) for line in table.splitlines()]
    return {row[0]: row[1:3] for row in rows if len(row) > 3 and "=" not in row[0]}


def hooks():
    members = vars(Algorithm).items()
    return {
        name
        for name, x in members
        if inspect.isfunction(x) or isinstance(x, classmethod)
    } - NO_HOOKS


HOOKS = sorted(name for name in hooks() if not name.startswith("_"))


def note(name):
    with open(os.environ[LOG], "a") as file:
        file.write(f"{name} {os.getpid()}\n")


def recorded(name):
    """A hook of FedPer that notes its name and its process, and goes on as usual."""
    plain = getattr(FedPer, name)

    def noting(self, *args, **options):
        note(name)
        if inspect.isfunction(plain):
            return plain(self, *args, **options)
        return getattr(super(Recording, self), name)(*args, **options)

    noting.__signature__ = inspect.signature(getattr(Algorithm, name))
    return noting


class Recording(FedPer):
    """FedPer, each of whose hooks leaves a line in a file; with fine-tuning and numbers of its own."""

    name = "recording"

    @classmethod
    def wrap_model(cls, model, config, **about):
        note("wrap_model")
        return super().wrap_model(model, config, **about)

    def finetuning(self, done, client):
        return (
            (Phase("tune", self.task_info.tensors, 1),)
            if done == self.task_info.rounds
            else ()
        )


for _name in HOOKS:
    if inspect.isfunction(getattr(Algorithm, _name)) and _name != "finetuning":
        setattr(Recording, _name, recorded(_name))

CLIENTS, ROUNDS, STEPS = (
    len(TOY.clients),
    2,
    sum(-(-len(client.train) // 8) for client in TOY.clients),
)
TIMES = {
    "1 a start": 1,
    "1 a run": 1,
    "1 a round": ROUNDS,
    "1 an exchange": ROUNDS,
    "1 a reply": ROUNDS * CLIENTS,
    "1 a batch": (ROUNDS + 1) * STEPS,  # and one epoch of fine-tuning
    "1 an evaluation": ROUNDS + 1,
    "1 a scored model": (ROUNDS + 1) * CLIENTS,
}


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    monkeypatch.setitem(ALGORITHMS._members, Recording.name, Recording)
    return tmp_path / "log"


def calls(path):
    return [
        (name, int(process))
        for name, process in (line.split() for line in path.read_text().splitlines())
    ]


def test_the_table_names_every_hook():
    assert set(promises()) == set(HOOKS)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_hooks_are_called_where_and_as_often_as_the_table_says(workers, log):
    config = CONFIG.with_keys(algorithm="recording", rounds=ROUNDS)
    task = runner.assemble(config, data=TOY, model=network("plain"))
    pool = Workers(client_runner_of(task), workers) if workers else None
    try:
        play(config, executor=pool)
    finally:
        if pool is not None:
            pool.close()
    recorded = calls(log)
    here, counts = os.getpid(), Counter(name for name, _ in recorded)
    for hook, (where, times) in promises().items():
        if hook in ("for_options", "finetuning"):
            continue
        places = {process == here for name, process in recorded if name == hook}
        if times != "any":
            assert counts[hook] == TIMES[times], hook
        if workers and where != "both" and places:
            assert places == {where == "server"}, hook


class Assigning(FedAvg):
    name = "assigning"

    def setup(self):
        self.steps = 0

    def loss(self, params, batch, ctx):
        self.steps = 1
        return super().loss(params, batch, ctx)


class Deleting(Assigning):
    name = "deleting"

    def loss(self, params, batch, ctx):
        del self.steps


class Finetuning(FedAvg):
    name = "finetuning"

    def finetuning(self, done, client):
        return (Phase("fine", self.task_info.tensors, 1, state_key="head"),)


def test_a_fine_tuning_phase_trains_the_model_alone():
    config = CONFIG.with_keys(algorithm=f"{__name__}:Finetuning", rounds=1)
    with refuses(r"tree.*'fine'.*'head'.*model"):
        runner.run(config, data=TOY, model=network("plain"))


@pytest.mark.parametrize(
    ("name", "workers"), [("Assigning", 0), ("Assigning", 2), ("Deleting", 0)]
)
def test_setting_an_attribute_during_a_run_is_refused(name, workers):
    """Wherever it happens: with workers, what a client's hook does happens in another process."""
    config = CONFIG.with_keys(algorithm=f"{__name__}:{name}", rounds=1, workers=workers)
    with refuses(r"ing must.*self\.steps.*State\.trees"):
        runner.run(config, data=TOY, model=network("plain"))


@pytest.mark.parametrize(
    ("name", "function", "meant"),
    [
        ("agregate", lambda self, server, updates, rnd: None, "aggregate"),
        ("client_states", lambda self, initial, client: None, "client_state"),
        ("losss", lambda self, params, batch, ctx: None, "loss"),
    ],
)
def test_a_misspelt_hook_is_refused_with_the_name_that_is_meant(name, function, meant):
    with refuses(rf"'{name}'.*'{meant}'"):
        type("Misspelt", (Algorithm,), {name: function})
    type("Helped", (Algorithm,), {f"_{name}": function, name: lambda self, other: None})


@pytest.mark.parametrize("hook", ["phases", "finetuning"])
def test_a_loss_that_a_phase_names_is_no_misspelt_hook(hook):
    def phases(self, *where):
        return (Phase("train", self.task_info.tensors, 1, loss="losses"),)

    def losses(self, params, batch, ctx):
        return Algorithm.loss(self, params, batch, ctx)

    own_class = type("Lossy", (FedAvg,), {hook: phases, "losses": losses})
    type("Lossier", (own_class,), {"losss": losses})
    with refuses("'losses'.*'loss'"):
        type("Misspelt", (FedProx,), {"losses": losses})


def test_a_method_that_another_one_calls_is_no_misspelt_hook():
    class Helped(Algorithm):
        def aggregate(self, server, updates, rnd):
            self.aggregates(server, updates, rnd)

        def aggregates(self, server, updates, rnd):
            super().aggregate(server, updates, rnd)

    assert Helped.aggregates


WRONG = {
    "client_update must return a Message": {"client_update": lambda *args: None},
    "aggregate must have the arguments": {"aggregate": lambda self, server: None},
    "trees.*'model'": {"server_state": lambda self, initial: State({"model": None})},
    "meta.*tensor": {"server_state": lambda *_: State({}, {"a": torch.ones(1)})},
    "unknown model of mine 'personel'": {"evaluates": "personel"},
    "unknown model of mine 'personal'": {
        "evaluates": "personal",
        "models": lambda self, server, client, rnd: {"global": server.trees["model"]},
    },
    "names must be tensors.*fc9": {"shared": lambda *_: ["fc9"]},
    "shared must return a set.*None": {"shared": lambda *_: None},
    "uses_plan = True": {"shared": lambda self, *_: self.plan.body_tensors},
    "depends on what trains": {"loss": lambda *_: torch.ones(())},
    "a forward pass must get all": {
        "loss": lambda self, params, batch, ctx: ctx.forward({}, batch[0]).sum()
    },
}


@pytest.mark.parametrize("says", WRONG)
def test_what_a_hook_returns_is_checked_where_it_is_used(says, monkeypatch):
    def run():
        kind = type("Mine", (Algorithm,), {"name": "mine", **WRONG[says]})
        monkeypatch.setitem(ALGORITHMS._members, "mine", kind)
        config = CONFIG.with_keys(algorithm="mine", rounds=1, stack="off")
        runner.run(config, data=TOY, model=network("plain"))

    with refuses(says):
        run()


def test_options_that_are_no_dataclass_are_refused():
    plain = type("Config", (), {"mu": 0.1})
    with refuses("Config must be a dataclass"):
        type("Plain", (Algorithm,), {"Config": plain})


class Misnamed(FedAvg):
    name = "misnamed"

    @dataclass(frozen=True)
    class Config:
        what: str = "loss"
        late: bool = False

    def near_step(self, steps, batch, ctx): ...

    def phases(self, rnd, client):
        wrong = {
            "loss": "losss",
            "step": "nearr_step",
            "state_key": "modell",
            "observe": ("unheard",),
        }
        if self.config.late and rnd.index == 0:
            return super().phases(rnd, client)
        what = self.config.what
        return (replace(super().phases(rnd, client)[0], **{what: wrong[what]}),)


MISNAMED = {
    "loss": "loss.*'losss'.*'loss'",
    "step": "step.*'nearr_step'.*'near_step'",
    "state_key": "tree.*'modell'.*'model'",
    "observe": "observer.*'unheard'",
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", MISNAMED)
def test_what_a_phase_names_must_be_there(what, late):
    config = CONFIG.with_keys(
        algorithm=f"{__name__}:Misnamed",
        options={"what": what, "late": late},
        rounds=2,
    )
    config = config.with_keys(stack="off")
    with refuses(MISNAMED[what]):
        runner.run(config, data=TOY, model=network("plain"))
