"""Studies say where what they cannot take belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedlayers as fl
from fl_core import runner
from tests.conftest import TOY
from tests.fl_core.test_tables import frame, written

TWO = {"algorithms": ["fedavg", "fedprox"]}
STUDIES: dict[str, dict[str, Any]] = {
    "choose": {},
    "compare": TWO,
    "regret": {},
    "study": TWO,
    "tune": {**TWO, "search": {"lr": "1e-4..1e-1:log", "mu": "0.01,0.1,1"}},
}
HEART = fl.RunConfig(dataset="heart", algorithm="fedper", rounds=1)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("choose compare regret study tune", {"seeds": ()}, "one seed"),
    ("choose compare regret study tune", {"seeds": 3}, r"seeds=\[0, 1, 2\]"),
    ("choose compare regret study tune", {"seeds": (1, 1)}, "seed .*1 twice"),
    ("choose compare regret study tune", {"backend": "x"}, "backend .*'x'"),
    ("choose compare regret tune", {"score": "f1"}, "score .*'f1'"),
    ("choose regret tune", {"score": "c_index"}, "score of .*known: .*auroc"),
    ("choose regret study", {"config": HEART.with_keys(plan="auto")}, "plan"),
    ("compare study tune", {"algorithms": ()}, "one algorithm"),
    ("compare tune", {"algorithms": ["fedprox"] * 2}, "fedprox .*twice"),
    ("compare study tune", {"options": {"fedrpox": {}}}, "'fedprox'"),
    ("compare study", {"algorithms": ["playrfl"]}, "mean 'playerfl'"),
    ("study", {"options": {"fedavg": {"mu": 1}}}, "fedavg must have no options"),
    ("study", {"config": HEART.with_keys(model="cifar_cnn")}, "cifar_cnn"),
    ("choose", {"config": HEART.with_keys(monitor="r2")}, "classification 'r2'"),
    *(("choose", {"tune_rates": count}, "2 to 5") for count in (1, 6, -1)),
    ("regret", {"rules": ["largest_jmp"]}, "mean 'largest_jump'"),
    ("regret", {"rules": ["manual"]}, "'manual'.*largest_jump"),
    ("regret", {"rules": ["sensitivity"]}, "'sensitivity_ratio'(?!.*manual)"),
    ("regret", {"rules": ["kca=largest_jump"]}, "'kca'.*'cka'"),
    ("regret", {"rules": ["largest_jump"] * 2}, "largest_jump .*twice"),
    ("regret", {"rules": []}, "one rule"),
    ("regret", {"config": HEART.with_keys(algorithm="fedavg")}, "fedavg .*plan"),
    ("tune", {"trials": 0}, "trials.*1"),
    ("tune", {"config": HEART.with_keys(lr=0.1)}, "lr .*searched"),
    ("tune", {"options": {"fedprox": {"mu": 1}}}, "mu of fedprox"),
    ("tune", {"config": HEART.with_keys(plan="p.json")}, "plan; got fedavg, fedprox"),
    *(
        ("tune", {"search": search}, said)
        for search, said in (
            ({}, "nothing to"),
            ({"lr": "1..0.1"}, "larger"),
            ({"lr": "0..1:log"}, "above 0"),
            ({"lr": "0..1:lgo"}, "'lgo'.*'log'"),
            ({"lr": "a..1"}, "numbers.*'a..1'"),
            ({"lr": ""}, r"lr=0.1,1"),
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
    name: str, given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    asked = {"config": HEART, **STUDIES[name], "out": tmp_path / "out", **given}
    with pytest.raises(fl.UsageError, match=said):
        getattr(fl, name)(**asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", STUDIES)
def test_a_run_and_a_file_are_no_folder_of_a_study(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    for out, said in ((tmp_path, "is a run"), (tmp_path / "file", "is a file")):
        with pytest.raises(fl.UsageError, match=said):
            getattr(fl, name)(HEART, **STUDIES[name], out=out)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize(
    ("args", "given", "said"),
    [
        ((), {"rounds": 2}, r"rounds .*fl\.\w+\(fl.RunConfig\(rounds="),
        ((TOY,), {}, r".*fl.RunConfig\(...\); got FederatedData"),
        ((), {}, ".*got nothing"),
        ((fl.RunConfig(),), {"oot": "here"}, r".*'oot'.*'out'"),
    ],
)
def test_what_belongs_elsewhere_is_told(
    name: str, args: Any, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(fl.UsageError, match=rf"^(fl\.{name} )?{said}"):
        getattr(fl, name)(*args, **given)


@pytest.mark.parametrize("name", STUDIES)
def test_the_configurations_seed_is_the_first_seed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Assembled(Exception):
        """The first task of a study."""

    def assemble(config: fl.RunConfig, **_: Any) -> None:
        raise Assembled(config.execution.seed)

    monkeypatch.setattr(runner, "assemble", assemble)
    with pytest.raises(Assembled, match=f"^{1005 if name == 'tune' else 5}$"):
        getattr(fl, name)(
            fl.RunConfig(seed=5, rounds=1, algorithm="fedper"),
            out=tmp_path / "out",
            **STUDIES[name],
        )


def test_a_warning_names_the_line_of_its_caller(tmp_path: Path) -> None:
    config = fl.RunConfig(dataset="heart", rounds=1)
    with pytest.warns(UserWarning, match="switzerland") as of_run:
        fl.run(config, progress=False)
    with pytest.warns(UserWarning, match="switzerland") as of_race:
        fl.choose(config, tmp_path / "race", arms=("nothing", "all"))
    assert {note.filename for note in (*of_run, *of_race)} == {__file__}


def test_the_columns_of_own_data_are_shown_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = fl.RunConfig(
        dataset=str(written(tmp_path / "t.csv", frame())), rounds=1, lr=0.1
    )
    with caplog.at_level("INFO"):
        fl.choose(config, tmp_path / "race", arms=("nothing", "all"), progress=False)
    shown = [text for text in caplog.messages if text.startswith("column ")]
    assert len(shown) == 1


def test_a_run_names_what_is_no_configuration() -> None:
    with pytest.raises(fl.UsageError, match=r"fl\.RunConfig.*got str"):
        fl.run("heart")  # type: ignore[arg-type]
