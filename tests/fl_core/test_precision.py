"""Passes in bfloat16: what stays float32, the same bits wherever it is computed, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_core import runner, tree
from fl_core.bounds import PRECISIONS
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.recorder import Recorder
from fl_core.training.phases import Training
from fl_core.training.workspace import Workspace

DIGITS = RunConfig(
    dataset="digits",
    max_samples=120,
    clients=3,
    rounds=2,
    batch_size=16,
    precision="bf16",
)
pytestmark = pytest.mark.filterwarnings("ignore:client")


@pytest.fixture(scope="module")
def plain() -> runner.Engine:
    return runner.run(DIGITS, progress=False)


def test_weights_and_kept_state_are_float32_and_losses_near_those_of_float32(
    plain: runner.Engine,
) -> None:
    full = runner.run(
        DIGITS.with_keys(precision="float32", stack="off"), progress=False
    )
    trees = [
        plain.server.trees["model"],
        *plain.clients.states[plain.names[0]].trees.values(),
    ]
    assert all(
        tensor.dtype in (torch.float32, torch.int64)
        for each in trees
        for tensor in each.values()
    )
    assert tree.digest(plain.server.trees["model"]) != tree.digest(
        full.server.trees["model"]
    )
    ours, theirs = (
        each.listener(Recorder)
        .frame()
        .query("metric == 'train_loss'")["value"]
        .to_numpy()
        for each in (plain, full)
    )
    assert ours == pytest.approx(theirs, rel=0.02)


def test_the_passes_are_in_bfloat16_and_what_comes_out_is_float32() -> None:
    seen: list[torch.dtype] = []

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 3)

        def forward(
            self, x: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            logits = self.fc(x)
            seen.append(logits.dtype)
            return logits, {"twice": 2 * logits}

    workspace, x = Workspace(Two(), precision="bf16"), torch.randn(4, 8)
    logits, more = workspace.forward(workspace.params, x)
    logits.sum().backward()
    assert seen == [torch.bfloat16]
    assert {
        logits.dtype,
        more["twice"].dtype,
        workspace.params["fc.weight"].grad.dtype,
    } == {torch.float32}
    exact = (
        x.double() @ workspace.params["fc.weight"].double().T
        + workspace.params["fc.bias"].double()
    ).detach()
    assert torch.allclose(logits.double(), exact, atol=0.05)
    workspace.infer(workspace.live, x)
    assert seen[-1] == torch.float32


@pytest.mark.parametrize("precision", PRECISIONS)
def test_frozen_first_layers_compute_in_the_precision_of_every_pass(
    precision: str,
) -> None:
    """What is kept of them is what a pass of the whole model has at that place, to the dtype."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    workspace, x = Workspace(model, precision=precision), torch.randn(40, 8)
    with workspace.trains(frozenset({"2.weight", "2.bias"})):
        kept = workspace.frozen_outputs(0, x, x)
        seen: list[torch.Tensor] = []
        handle = workspace.model.get_submodule("2").register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0])
        )
        workspace.forward(workspace.params, x)
        handle.remove()
    assert kept is not None
    torch.testing.assert_close(kept, seen[0], rtol=0, atol=0.02)  # at most a rounding


def test_what_cannot_be_is_refused_and_tables_say_what_was_used() -> None:
    with pytest.raises(UsageError, match=r"'fp16'.*float32, bf16"):
        runner.run(DIGITS.with_keys(precision="fp16"), progress=False)
    with pytest.raises(UsageError, match="precision=bf16"):
        runner.run(
            RunConfig(dataset="heart", precision="bf16", stack="on"), progress=False
        )
    assert Training(precision="bf16").description.endswith(", passes in bf16")
