"""Updates in bfloat16 against those in float32, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlayers.cli.main import main
from fedlayers.remote import federation, rpc
from fedlayers.remote.codec import PacketError
from fedlayers.remote.compression import compress_message, expand_message
from fl_core import tree
from fl_core.algorithms.base import Message
from fl_core.engine import Engine
from fl_core.errors import UsageError
from fl_core.records import store
from tests.federation.test_in_memory import SHORT, link

WHOLE = replace(SHORT, algorithm="fedper", participation=1.0, checkpoint_every=1)


def digests(engine: Engine) -> dict[str, str]:
    return {name: tree.digest(each) for name, each in engine.server.trees.items()}


def sent(engine: Engine, variant: str) -> list[float]:
    return [row["value"] for row in engine.rows if row["metric"] == "bytes_up" and row["variant"] == variant]


def test_a_change_is_within_the_precision_of_bfloat16_and_all_else_stays() -> None:
    draw = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(1000, generator=draw), "n": torch.tensor(7), "mask": torch.zeros(3)}
    end = {"w": start["w"] + 0.01 * torch.randn(1000, generator=draw), "n": torch.tensor(9), "mask": torch.ones(3) > 0}
    extra = {"w": torch.randn(1000, generator=draw)}
    message, received = Message({"model": end, "control": extra}, {"k": 1}), Message({"model": start})
    small = compress_message(message, received, start)
    assert small.trees["model"]["w"].dtype == torch.bfloat16
    back = expand_message(small, received, start)
    assert back.meta == {"k": 1}
    assert torch.equal(back.trees["model"]["n"], end["n"])
    assert torch.equal(back.trees["model"]["mask"], end["mask"])
    change = (end["w"] - start["w"]).abs()
    assert ((back.trees["model"]["w"] - end["w"]).abs() <= change * 2**-8 + 1e-6).all()
    assert ((back.trees["control"]["w"] - extra["w"]).abs() <= extra["w"].abs() * 2**-8).all()
    exact = {"w": torch.full((1000,), 0.5)}
    back = expand_message(compress_message(Message({"control": exact}), Message(), start), Message(), start)
    assert torch.equal(back.trees["control"]["w"], exact["w"])


def test_a_run_sends_half_the_bytes_and_ends_close_to_the_plain_one(tmp_path: Path) -> None:
    plain = federation.federate(WHOLE, link(tmp_path / "a"), progress=False)
    small = federation.federate(WHOLE, link(tmp_path / "b"), progress=False, compress="bf16")
    assert sent(small, "") == sent(plain, "bf16") == []
    assert sent(small, "bf16") == [value / 2 for value in sent(plain, "")]
    assert digests(small) != digests(plain)
    for name, tensor in small.server.trees["model"].items():
        torch.testing.assert_close(tensor, plain.server.trees["model"][name], rtol=0, atol=0.01)


def test_resume_compresses_as_before_and_gives_the_same_bits(tmp_path: Path) -> None:
    whole = federation.federate(WHOLE, link(tmp_path / "a"), progress=False, compress="bf16")
    federation.federate(WHOLE, link(tmp_path / "b"), tmp_path / "run", progress=False, compress="bf16", until=1)
    assert store.Run(tmp_path / "run").task_config()["federation"]["compress"] == "bf16"
    found = federation.resume(tmp_path / "run", link(tmp_path / "b"), progress=False)
    assert found.done == 2
    assert digests(found) == digests(whole)


def test_a_site_that_does_not_compress_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlayers.remote.joined_run.compress_message", lambda message, *_: message)
    with pytest.raises(PacketError, match=r"site 'a'.*bfloat16"):
        federation.federate(WHOLE, link(tmp_path), progress=False, compress="bf16")


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, {"compress": "bf17"}, "'bf16'"),
        ({}, {"compress": "bf16", "secure_sum": True}, "secure sum"),
        ({"algorithm": "scaffold"}, {"compress": "bf16"}, "'scaffold'"),
    ],
)
def test_what_cannot_be_compressed_is_refused(tmp_path: Path, changes: Any, options: Any, reason: str) -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(UsageError, match=reason) as told:
        federation.federate(replace(WHOLE, **changes), link(tmp_path), progress=False, **options)
    assert "\n" not in str(told.value)


def test_a_site_refuses_an_unknown_compression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation, "check_compressed", lambda *_: None)
    with pytest.raises(rpc.RefusedError, match="bf16"):
        federation.federate(WHOLE, link(tmp_path), progress=False, compress="zip")


def test_a_run_without_compression_is_not_resumed_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    federation.federate(WHOLE, link(tmp_path), tmp_path / "run", progress=False, until=1)
    with pytest.raises(SystemExit, match="2"):
        main(["federation", "run", "--resume", str(tmp_path / "run"), "--compress", "bf16"])
    assert "without compression" in capsys.readouterr().err
