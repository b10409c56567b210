"""Count what metrics of curvature cost, in gradients of all parameters on the same samples.

``python -m benchmarks.curvature STATE`` adds rows to ``results/curvature.csv``. STATE names the code, such as a commit.
Rows that the table has are not measured again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
import tyro
from torch import Tensor, nn

from benchmarks.measurements import network
from benchmarks.pairs import RESULTS
from diagnostics.measure import diagnose
from fl_core.run.costs import count_flops

PATH = RESULTS / "curvature.csv"
SAMPLES, PIXELS, CLASSES, FEATURES, STEPS = 16, 64, 10, 24, 12
TIMM = (
    "vit_tiny_patch16_224", "resnet10t", "mobilenetv3_small_050", "test_vit", "test_resnet", "test_byobnet",
    "test_efficientnet", "test_convnext", "test_nfnet", "lcnet_035", "tinynet_e", "mnasnet_050", "mobilenetv2_035",
    "ghostnet_050", "edgenext_xx_small", "regnetx_002", "resnet18"
)  # fmt: skip
OWN = ("mlp_tanh", "cnn_gelu", "encoder")
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "3 probes": ("hessian_trace", {"probes": 3}),
    "trace": ("hessian_trace", {}),
    "ggn": ("ggn_trace", {}),
    "spectrum": ("hessian_spectrum", {}),
}
"""Name -> metric and its options."""


class Encoder(nn.Module):
    """A transformer of two blocks on sequences, with a head on the mean of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 64)
        block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(self.first(x)).mean(1))


def build(network_name: str) -> tuple[nn.Module, Tensor]:
    """Return a network with random weights, in eval mode, and random samples."""
    torch.manual_seed(0)
    if network_name in TIMM:
        import timm

        image_size = {"img_size": PIXELS} if "vit" in network_name else {}
        model: nn.Module = timm.create_model(
            network_name, num_classes=CLASSES, **image_size
        )
        shape: tuple[int, ...] = (3, PIXELS, PIXELS)
    elif network_name == "encoder":
        model, shape = Encoder(), (STEPS, FEATURES)
    elif network_name == "cnn_gelu":
        model, shape = network(nn.GELU), (1, 28, 28)
    else:
        hidden_layers = [
            nn.Linear(FEATURES, 64),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Tanh(),
        ]
        model, shape = (
            nn.Sequential(*hidden_layers, nn.Linear(64, CLASSES)),
            (FEATURES,),
        )
    return model.eval(), torch.randn(SAMPLES, *shape)


def seconds_of(work: Callable[[], object]) -> float:
    """Return the processor seconds of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measured(network_name: str, way: str) -> dict[str, Any]:
    """Return what a metric costs on a network, and the share of its values that exceed their error."""
    metric_name, options = WAYS[way]
    model, x = build(network_name)
    y = torch.arange(SAMPLES) % CLASSES
    frames: list[pd.DataFrame] = []

    def gradient() -> None:
        loss = nn.functional.cross_entropy(model(x), y)
        torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)

    def work() -> None:
        arguments: dict[str, Any] = {
            "options": {metric_name: options},
            "progress": False,
        }
        frames.append(diagnose(model, (x, y), metric_name, **arguments).frame)

    gradient()
    gradient_seconds, seconds = (
        min(seconds_of(gradient) for _ in range(5)),
        seconds_of(work),
    )
    with count_flops(model) as counter:
        gradient()
        flops = counter.total
    with count_flops(model) as counter:
        work()
        gradients = counter.total / flops
    frame = frames[0][frames[0]["variant"] != "per_parameter"]
    is_above_error = frame["value"].abs() > frame["stderr"]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": frame["layer"].nunique(),
        "gradients": gradients,
        "seconds": seconds,
        "times_one_gradient": seconds / gradient_seconds,
        "values": int(frame["value"].count()),
        "above_error": is_above_error.mean(),
    }


def main(
    state: tyro.conf.Positional[str],
    networks: tuple[str, ...] = (*OWN, *TIMM),
    ways: tuple[str, ...] = tuple(WAYS),
) -> None:
    """Measure metrics on networks, and write each row when it is there.

    Args:
        state: of the code, such as a commit.
        networks: names of networks.
        ways: what is measured, of :data:`WAYS`.
    """
    torch.set_num_threads(1)
    rows = pd.read_csv(PATH).to_dict("records") if PATH.exists() else []
    measured_keys = {(row["way"], row["network"], row["state"]) for row in rows}
    for way in ways:
        measured(OWN[0], way)  # the first call imports and allocates
        for network_name in networks:
            row_key = way, network_name, state
            if row_key in measured_keys:
                continue
            row = dict(zip(("way", "network", "state"), row_key, strict=True))
            rows.append(row | measured(network_name, way))
            print(rows[-1], flush=True)
            frame = pd.DataFrame(rows).sort_values(["way", "network"], kind="stable")
            frame.round(3).to_csv(PATH, index=False)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmarks.curvature")
