"""Studies say where what they cannot take belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedlayers as fl
from fl_core import runner
from tests.conftest import TOY

STUDIES = ("choose", "compare", "regret", "study", "tune")


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
    more: dict[str, Any] = (
        {} if name in ("choose", "regret") else {"algorithms": ["fedavg"]}
    )
    more |= {"search": {"lr": "0.1,0.2"}} if name == "tune" else {}
    with pytest.raises(Assembled, match=f"^{1005 if name == 'tune' else 5}$"):
        getattr(fl, name)(
            fl.RunConfig(seed=5, rounds=1, algorithm="fedper"),
            out=tmp_path / "out",
            **more,
        )


def test_a_warning_names_the_line_of_its_caller(tmp_path: Path) -> None:
    config = fl.RunConfig(dataset="heart", rounds=1)
    with pytest.warns(UserWarning, match="switzerland") as of_run:
        fl.run(config, progress=False)
    with pytest.warns(UserWarning, match="switzerland") as of_race:
        fl.choose(config, tmp_path / "race", arms=("nothing", "all"))
    assert {note.filename for note in (*of_run, *of_race)} == {__file__}
