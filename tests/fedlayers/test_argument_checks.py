"""Studies say where what they cannot take belongs."""

import inspect
import pickle
import re
from typing import get_type_hints

import jedi
import mypy.api
import numpy as np
import pytest
import torch
from torch import nn

import fedlayers as fl
from fl_core.config import KEYS
from fl_core.keys import AllKeys
from fl_core.run import runner
from tests.conftest import TOY, refuses
from tests.made import frame, written

TWO = {"algorithms": ["fedavg", "fedprox"]}
STUDIES = {
    "choose": {},
    "compare": TWO,
    "study": {},
    "tune": {**TWO, "search": {"lr": "1e-4..1e-1:log", "mu": "0.01,0.1,1"}},
}
HEART = fl.RunConfig(dataset="heart", algorithm="fedper", rounds=1)
REFUSED = [
    ("compare tune", {"seeds": (1, 1)}, "seeds .*1 twice"),
    ("choose compare", {"backend": "x"}, "backend .*'x'"),
    ("choose compare tune", {"score": "f1"}, "score .*'f1'"),
    ("choose tune", {"score": "c_index"}, "score of .*known: .*auroc"),
    ("choose study", {"config": HEART.with_keys(plan="auto")}, "plan"),
    ("compare tune", {"algorithms": ["fedprox"] * 2}, "fedprox .*twice"),
    ("compare tune", {"options": {"fedrpox": {}}}, "'fedprox'"),
    ("compare", {"plan": {"fedper": None}}, "plan .*LayerPlan"),
    ("study", {"config": HEART.with_keys(model="cifar_cnn")}, "cifar_cnn"),
    ("choose", {"config": HEART.with_keys(monitor="r2")}, "classification 'r2'"),
    ("choose", {"tune_rates": 1}, "2 to 5"),
    ("tune", {"trials": 0}, "trials.*1"),
    ("tune", {"config": HEART.with_keys(lr=0.1)}, "lr .*searched"),
    ("tune", {"options": {"fedprox": {"mu": 1}}}, "mu of fedprox"),
    ("tune", {"config": HEART.with_keys(plan="p.json")}, "plan; got fedavg, fedprox"),
    *(
        ("tune", {"search": search}, message)
        for search, message in (
            ({}, "nothing to"),
            ({"lr": "1..0.1"}, "larger"),
            ({"lr": "0..1:log"}, "above 0"),
            ({"lr": "0..1:lgo"}, "'lgo'.*'log'"),
            ({"lr": "a..1"}, "numbers.*'a..1'"),
            ({"lr": "0.1,0.1"}, "0.1 .*twice"),
            ({"muu": "1"}, "'muu'.*'mu'"),
            ({"fedavg.mu": "1"}, "of fedavg 'mu'"),
            ({"rounds": "1,2"}, "fedavg, fedprox 'rounds'"),
            ({"mu": "1", "fedprox.mu": "2"}, "mu of fedprox.*twice"),
            ({"mu": "-1,1"}, "fedprox.*mu.*0"),
        )
    ),
]


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [(name, given, said) for names, given, said in REFUSED for name in names.split()],
)
def test_what_a_study_cannot_take_is_refused_before_any_work(
    name, given, said, tmp_path
):
    asked = {"config": HEART, **STUDIES[name], "out": tmp_path / "out", **given}
    with refuses(said):
        getattr(fl, name)(**asked)
    assert not list(tmp_path.iterdir())


def test_a_run_takes_a_plan_and_nothing_that_has_one():
    with refuses(r"plan .*; got dict\..*choice\.plan"):
        fl.run(HEART, plan={"fc1": True})


NET = nn.Linear(2, 2)
SAMPLES = {"north": (torch.zeros(4, 2), torch.arange(4) % 2)}
OTHERS = {
    "diagnose": lambda run: (NET, SAMPLES),
    "diagnose_features": lambda run: ({c: {"a": torch.zeros(4, 2)} for c in "ab"},),
    "export": lambda run: (run, run),
    "from_clients": lambda run: (SAMPLES,),
    "layers_of": lambda run: (NET, torch.zeros(2)),
    "load_models": lambda run: (run,),
    "predict": lambda run: (run.parent / "m.safetensors", np.zeros((1, 10))),
    "regret": lambda run: ("largest_rise",),
    "resume": lambda run: (run,),
    "run": lambda run: (HEART,),
    "select": lambda run: (
        fl.diagnose(NET, SAMPLES, "grad_norm", progress=False),
        "manual",
    ),
    "through_time": lambda run: (run,),
    "train_first_round": lambda run: (fl.assemble(HEART), {}),
}
"""Calls of the functions that are no study, where a run is given."""


WRONG = """
import fedlayers as fl
fl.run(dataset="heart", rouds=1)
fl.choose(lr="high")
fl.RunConfig(clients="three")
fl.tune(["fedavg"], {"lr": "0.1,1"}, epochs=1.5)
fl.run(dataset="heart", rounds=1, options={"mu": 0.1}, measure=["cka"], algorithm=fl.Algorithm)
"""


def test_editors_and_type_checkers_know_every_key():
    """Notebooks complete them by jedi. The types are those that the configuration accepts."""
    assert get_type_hints(AllKeys) == {key: KEYS[key].accepts for key in KEYS}
    for name, without in (("run", ()), ("RunConfig", ()), ("choose", ("plan",))):
        script = jedi.Interpreter(f"{name}(", [{name: getattr(fl, name)}])
        shown = {completion.name for completion in script.complete()}
        assert {f"{key}=" for key in KEYS if key not in without} <= shown


@pytest.mark.slow
def test_mypy_refuses_wrong_keys(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    printed, _, _ = mypy.api.run([str(tmp_path / "wrong.py")])
    wrong = [
        int(line.split(":")[1]) for line in printed.splitlines() if ": error:" in line
    ]
    assert sorted({*wrong}) == [3, 4, 5, 6], printed


def arguments_with_lists():
    """Return each public function with each argument that takes several names or numbers."""
    names = []
    for name in fl.__all__:
        function = getattr(fl, name)
        if inspect.isfunction(function):
            for parameter in inspect.signature(function).parameters.values():
                annotation = str(parameter.annotation)
                if re.match(r"(\w+ \| )*(Sequence|Collection)\[(str|int)", annotation):
                    names.append((name, parameter.name))
    return names


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A run, with an exported model next to it."""
    run = tmp_path_factory.mktemp("stored") / "run"
    result = fl.run(dataset="heart", rounds=1, out=run, progress=False)
    fl.export(result, run.parent / "m.safetensors", which="global")
    return run


def test_resume_names_its_options(stored):
    with refuses(r"rounds must be .*init="):
        fl.resume(stored, rounds=3)


@pytest.mark.parametrize(("name", "argument"), arguments_with_lists())
def test_one_value_is_a_list_of_one(name, argument, stored, tmp_path):
    wrong, call = 999 if argument == "rounds" else "no:where", getattr(fl, name)

    def outcome(value):
        arguments = {argument: value}
        try:
            if name in STUDIES:
                study_arguments = {
                    "config": HEART,
                    **STUDIES[name],
                    "out": tmp_path / "out",
                }
                return str(call(**study_arguments | arguments))
            return type(call(*OTHERS[name](stored), **arguments)).__name__
        except fl.UsageError as error:
            return str(error)

    assert outcome(wrong) == outcome([wrong])
    if argument in ("algorithms", "arms", "metrics", "rules", "seeds", "rounds"):
        none = f"{argument} must have at least one value; got none. Name one."
        assert outcome(np.array([])) == outcome([]) == none


def test_one_value_of_a_key_is_a_list_of_one():
    config = fl.RunConfig(measure="cka", columns="age")
    assert (config.execution.measure, config.data.columns) == (["cka"], ["age"])


@pytest.mark.parametrize("name", STUDIES)
def test_a_run_and_a_file_are_no_folder_of_a_study(name, tmp_path):
    for path in ("config.json", "lock", "file"):
        (tmp_path / path).write_text("mine")
    for out, message in ((tmp_path, "is a run"), (tmp_path / "file", "is a file")):
        with refuses(message):
            getattr(fl, name)(HEART, **STUDIES[name], out=out)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", STUDIES)
def test_what_is_no_configuration_and_no_key_is_told(name):
    for args, keys, message in (
        ((TOY,), {}, "config must be RunConfig or none; got FederatedData"),
        ((), {"oot": "here"}, "key 'oot'"),
    ):
        with refuses(message):
            getattr(fl, name)(*args, **keys)


@pytest.mark.parametrize("name", STUDIES)
def test_the_configurations_seed_is_the_first_seed(name, tmp_path, monkeypatch):
    """It may be given as a key."""

    class Assembled(Exception):
        """The first task of a study."""

    def assemble(config, **_):
        raise Assembled(config.execution.seed)

    monkeypatch.setattr(runner, "assemble", assemble)
    keys = {"seed": 5, "rounds": 1, "algorithm": "fedper", "out": tmp_path / "out"}
    with pytest.raises(Assembled, match=f"^{1005 if name == 'tune' else 5}$"):
        getattr(fl, name)(**keys, **STUDIES[name])


class Unused(nn.Linear):
    """A network with a parameter that no pass reads."""

    def __init__(self):
        super().__init__(10, 5)
        self.spare = nn.Parameter(torch.zeros(2))


@pytest.mark.slow
def test_a_warning_names_the_line_of_its_caller(tmp_path):
    config = fl.RunConfig(dataset="heart", rounds=1)
    odd = {"model": Unused()}
    with pytest.warns(UserWarning, match="spare") as of_run:
        fl.run(config, **odd)
    with pytest.warns(UserWarning, match="spare") as of_race:
        fl.choose(config, tmp_path / "race", **odd)
    assert {note.filename for note in (*of_run, *of_race)} == {__file__}


def test_the_columns_of_own_data_are_shown_once(tmp_path, caplog):
    config = fl.RunConfig(
        dataset=str(written(tmp_path / "t.csv", frame())), rounds=1, lr=0.1
    )
    with caplog.at_level("INFO"):
        fl.choose(config, tmp_path / "race", progress=False)
    shown = [text for text in caplog.messages if text.startswith("column ")]
    assert len(shown) == 1


PLAIN = re.compile(
    r"(Path|str|int|float|bool|None|Sequence|Mapping|Collection|RunConfig|LayerPlan|Any|[][|, ])+"
)


@pytest.mark.parametrize("name", fl.__all__)
def test_a_value_of_another_kind_is_told_by_the_name_of_its_argument(name):
    function = getattr(fl, name)
    if not inspect.isfunction(function):
        return
    for parameter in inspect.signature(function).parameters.values():
        annotation = str(parameter.annotation)
        if (
            annotation == "Any"
            or not PLAIN.fullmatch(annotation)
            or parameter.name in KEYS
        ):
            continue
        with refuses(f"^{parameter.name} must be .*; got object"):
            function(**{parameter.name: object()})
    assert pickle.loads(pickle.dumps(function)) is function
