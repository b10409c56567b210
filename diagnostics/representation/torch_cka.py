"""CKA by the package torch-cka, protected from inputs with wrong or failing results."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..client_model import ClientModel
from .probe import Place, watch


class _Batches(list[tuple[Tensor]]):
    """A fixed list of batches, read in the same order by every pass; torch-cka asks for a ``dataset``."""

    dataset = "probe"


class _Layer(nn.Module):
    """A placeholder model for torch-cka to hook and move, whose output is that of one layer of the real model.

    Each batch's output is a copy in float32, centred, and scaled alike in all batches. CKA depends on none of it.
    """

    def __init__(self, subject: ClientModel, path: str, x: Tensor, seed: int) -> None:
        super().__init__()
        self.layer = nn.Identity()
        self._look = lambda place: _seen(subject, path, x, place, seed)
        self._scale: float | None = None

    def forward(self, place: Tensor) -> Tensor:
        output = self._look((int(place[0]), int(place[1])))
        output = output - output.mean(0)
        if self._scale is None:
            self._scale = float(output.abs().max()) or 1.0
        return self.layer((output / self._scale).float())


def _seen(
    subject: ClientModel, path: str, x: Tensor, place: Place, seed: int
) -> Tensor:
    found: list[Tensor] = []

    def take(path: str, place: Place, module: nn.Module, output: Tensor) -> None:
        found.append(output.reshape(len(output), -1).to(torch.float64, copy=True))

    watch(subject, x, [place], [path], take, seed, "eval")
    return found[-1]


def compare_layers(
    a: ClientModel,
    path_a: str,
    b: ClientModel,
    path_b: str,
    x: Tensor,
    where: Sequence[Place],
    seed: int,
) -> float | str:
    """Return minibatch CKA of a layer of each of two models as torch-cka 0.21 computes it, or why it is missing.

    Both must have a value by our own estimate. The package stops at the first layer without one and does not name it.
    These faults of the package cannot occur here:

    * It reads a shuffling loader twice, in two orders.
    * It keeps outputs that an in-place operation then changes.
    * It fails on tuples, a short last batch, large offsets and large scales.
    * It names rows of layers by another order than it fills them.
    * It leaves hooks, eval mode and a graph behind.
    """
    from torch_cka import CKA

    batches = _Batches((torch.tensor(place),) for place in where)
    models = [
        _Layer(subject, path, x, seed) for subject, path in ((a, path_a), (b, path_b))
    ]
    device = str(next(iter(a.model.parameters()), x).device)
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")  # of names
        package = CKA(
            *models,
            "a",
            "b",
            model1_layers=["layer"],
            model2_layers=["layer"],
            device=device,
        )
        try:
            package.compare(batches, batches)
        except AssertionError as reason:
            return f"torch-cka refuses: {reason}"
    return float(package.export()["CKA"][0, 0])
