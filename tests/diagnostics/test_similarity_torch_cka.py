"""The package torch-cka as a second witness of minibatch CKA, where it has no fault."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_cka import CKA

from tests.diagnostics.test_similarity import by_layer
from tests.diagnostics.test_similarity_options import measured


@pytest.mark.filterwarnings("ignore")
def test_torch_cka_agrees() -> None:
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)) for _ in range(2)
    ]
    x, y, names = torch.randn(48, 6), torch.arange(48) % 4, ["0", "2"]
    ours = measured("cka", models, (x, y), batch=12, estimator="minibatch")
    package = CKA(*models, "a", "b", names, names, device="cpu")
    package.compare(DataLoader(TensorDataset(x, y), 12))
    theirs = package.export()["CKA"].diagonal().tolist()
    assert [by_layer(ours)[name] for name in names] == pytest.approx(theirs, abs=1e-4)
