"""Studies say where what they cannot take belongs."""

from __future__ import annotations

from typing import Any

import pytest

import fedlayers as fl
from tests.conftest import TOY

STUDIES = ("choose", "compare", "regret", "study", "tune")


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize(
    ("args", "given", "said"),
    [
        ((), {"rounds": 2}, r"rounds is a key of the configuration: give fl\.\w+\(fl.RunConfig\(rounds="),
        ((TOY,), {}, r"needs a configuration first, fl.RunConfig\(...\), not FederatedData"),
        ((), {}, "needs a configuration first, .*not nothing"),
        ((fl.RunConfig(),), {"oot": "here"}, r"unknown argument of fl\.\w+ 'oot': did you mean 'out'"),
    ],
)
def test_what_belongs_elsewhere_is_told(name: str, args: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(fl.UsageError, match=rf"^(fl\.{name} )?{said}"):
        getattr(fl, name)(*args, **given)
