"""The same run on a GPU, where there is one."""

import pytest
import torch

import fedlayers as fl
from diagnostics.measure import instruments
from fl_core.config import RunConfig
from fl_core.run import runner
from fl_core.tree import distance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="this machine has no CUDA device"
    ),
]


@pytest.mark.parametrize("algorithm", ["fedavg", "playerfl", "ditto", "fedbabu"])
def test_a_gpu_run_is_a_cpu_run_up_to_rounding(algorithm):
    engines = [
        runner.run(
            RunConfig(
                algorithm=algorithm, rounds=2, device=device, optimizer="sgd", lr=0.01
            ),
            instruments=instruments,
        )
        for device in ("cpu", "cuda")
    ]
    assert (
        distance(engines[0].server.trees["model"], engines[1].server.trees["model"])
        < 1e-4
    )
    assert all(
        tensor.device.type == "cpu"
        for tensor in engines[1].server.trees["model"].values()
    )


def test_a_users_module_may_lie_on_the_gpu():
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    result = fl.run(
        data={"a": (x, y), "b": (x, y)},
        model=torch.nn.Linear(3, 2).cuda(),
        rounds=1,
        device="cuda",
    )
    assert {p.device.type for p in result.models["a"].parameters()} == {"cpu"}
