"""Studies say where what they cannot take belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedlayers as fl
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
        ((fl.RunConfig(leave_out_client="va"),), {}, r"leave_out_client .*'va'.*fl\.run"),
    ],
)
def test_what_belongs_elsewhere_is_told(name: str, args: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(fl.UsageError, match=rf"^(fl\.{name} )?{said}"):
        getattr(fl, name)(*args, **given)


def test_a_warning_names_the_line_of_its_caller(tmp_path: Path) -> None:
    config = fl.RunConfig(dataset="heart", rounds=1)
    with pytest.warns(UserWarning, match="switzerland") as of_run:
        fl.run(config, progress=False)
    with pytest.warns(UserWarning, match="switzerland") as of_race:
        fl.choose(config, tmp_path / "race", arms=("nothing", "all"))
    assert {note.filename for note in (*of_run, *of_race)} == {__file__}
