"""State dicts of 94 families load as torch loads them strictly, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel
from torchvision.ops import FrozenBatchNorm2d

from diagnostics.load_weights import load_weights
from fl_core import buffers

pytestmark = pytest.mark.filterwarnings("ignore")

OF_NN = {
    "Linear": (3, 2),
    "Bilinear": (2, 3, 2),
    "Conv1d": (2, 4, 3),
    "Conv2d": (2, 4, 3),
    "Conv3d": (2, 4, 3),
    "ConvTranspose1d": (2, 4, 3),
    "ConvTranspose2d": (2, 4, 3),
    "ConvTranspose3d": (2, 4, 3),
    "Embedding": (5, 3),
    "EmbeddingBag": (5, 3),
    "RNN": (3, 4),
    "LSTM": (3, 4),
    "GRU": (3, 4),
    "RNNCell": (3, 4),
    "LSTMCell": (3, 4),
    "GRUCell": (3, 4),
    "LayerNorm": (4,),
    "GroupNorm": (2, 4),
    "RMSNorm": (4,),
    "BatchNorm1d": (4,),
    "BatchNorm2d": (4,),
    "BatchNorm3d": (4,),
    "SyncBatchNorm": (4,),
    "InstanceNorm1d": (4, 1e-5, 0.1, True, True),
    "InstanceNorm2d": (4, 1e-5, 0.1, True, True),
    "InstanceNorm3d": (4, 1e-5, 0.1, True, True),
    "PReLU": (3,),
    "MultiheadAttention": (4, 2),
    "TransformerEncoderLayer": (4, 2, 8),
    "TransformerDecoderLayer": (4, 2, 8),
    "Transformer": (4, 2, 1, 1, 8),
    "AdaptiveLogSoftmaxWithLoss": (4, 6, [2, 4]),
    "CrossEntropyLoss": (torch.ones(3),),
    "NLLLoss": (torch.ones(3),),
    "BCELoss": (torch.ones(3),),
    "BCEWithLogitsLoss": (torch.ones(3),),
    "MultiLabelSoftMarginLoss": (torch.ones(3),),
    "MultiMarginLoss": (1, 1.0, torch.ones(3)),
    "ParameterList": ([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))],),
    "ParameterDict": ({"a": nn.Parameter(torch.ones(2))},),
}
"""Classes of torch.nn with tensors, and what builds one of each."""
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float64, torch.complex64),
    *(torch.uint16, torch.uint32, torch.uint64),
)


class Holder(nn.Module):
    """A linear layer next to a buffer, or without one."""

    def __init__(self, held: torch.Tensor | None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("held", held)


class Extra(nn.Linear):
    """A linear layer that stores more than tensors, as quantised modules do."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([1.0, 2.0])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


class Stored(nn.Linear):
    """A linear layer that stores its weight under another name, and reads it there."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}kernel"] = self.weight.detach().T
        destination[f"{prefix}bias"] = self.bias.detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel").T
        super()._load_from_state_dict(state_dict, prefix, *args)


class Grown(nn.Module):
    """A buffer that takes the size of what is stored."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(rows, 2))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.rows = torch.zeros_like(state_dict[f"{prefix}rows"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class Shifted(nn.Module):
    """A parametrization that adds one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def hooked() -> nn.Module:
    """A module with a hook that renames what it reads, and one that renames what it stores."""
    net = nn.Linear(3, 2)

    def before(module, state, prefix, *args):
        state[f"{prefix}weight"] = state.pop(f"{prefix}w")

    def after(module, state, prefix, metadata):
        state[f"{prefix}w"] = state.pop(f"{prefix}weight")

    net.register_load_state_dict_pre_hook(before)
    net.register_state_dict_post_hook(after)
    return net


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    return net


def lazy() -> nn.Module:
    net = nn.Sequential(nn.LazyConv2d(3, 1), nn.LazyBatchNorm2d())
    net(torch.ones(2, 2, 3, 3))
    return net


def seen(observer: nn.Module) -> nn.Module:
    observer(torch.arange(12.0).view(3, 4))
    return observer


def image_of(net: nn.Module) -> nn.Module:
    return net.to(memory_format=torch.channels_last)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    name: lambda name=name: getattr(nn, name)(*OF_NN[name]) for name in OF_NN
}
FAMILIES |= {
    f"a buffer of {dtype}".replace("torch.", ""): lambda dtype=dtype: Holder(
        torch.arange(6).view(2, 3).to(dtype)
    )
    for dtype in DTYPES
}
FAMILIES |= {
    "no bias": lambda: nn.Linear(3, 2, bias=False),
    "a scalar": lambda: nn.ParameterList([nn.Parameter(torch.tensor(2.0))]),
    "no elements": lambda: Holder(torch.zeros(0, 3)),
    "a buffer of None": lambda: Holder(None),
    "frozen": lambda: nn.Linear(3, 2).requires_grad_(False),
    "half": lambda: nn.Linear(3, 2).half(),
    "bfloat16": lambda: nn.Linear(3, 2).bfloat16(),
    "double": lambda: nn.Linear(3, 2).double(),
    "channels last": lambda: image_of(nn.Conv2d(2, 4, 3)),
    "a projected LSTM": lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
    "attention of other widths": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
    "attention with extra biases": lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
    "lists of lists": lambda: nn.ModuleList([nn.ModuleDict({"a": nn.Linear(2, 2)})]),
    "lazy": lazy,
    "tied": tied,
    "extra state": lambda: nn.Sequential(Extra(3, 2)),
    "another name": lambda: nn.Sequential(Stored(3, 2)),
    "hooks": lambda: nn.Sequential(hooked()),
    "grown": lambda: nn.Sequential(Grown()),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 2)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "parametrised": lambda: parametrize.register_parametrization(nn.Linear(3, 2), "weight", Shifted()),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(3, 2), "weight", 2),
    "FrozenBatchNorm2d": lambda: FrozenBatchNorm2d(3),
    "MinMaxObserver": lambda: seen(quantization.MinMaxObserver()),
    "PerChannelMinMaxObserver": lambda: seen(quantization.PerChannelMinMaxObserver()),
    "MovingAverageMinMaxObserver": lambda: seen(quantization.MovingAverageMinMaxObserver()),
    "HistogramObserver": lambda: seen(quantization.HistogramObserver(bins=8)),
    "FakeQuantize": lambda: seen(quantization.FakeQuantize()),
    "FusedMovingAvgObsFakeQuantize": lambda: seen(quantization.FusedMovingAvgObsFakeQuantize()),
    "DataParallel": lambda: nn.DataParallel(nn.Linear(3, 2)),
    "AveragedModel": lambda: AveragedModel(nn.Linear(3, 2)),
    "compiled": lambda: torch.compile(nn.Linear(3, 2)),
    "timm: a transformer": lambda: timm.create_model("test_vit", num_classes=3),
    "timm: a ConvNeXt": lambda: timm.create_model("test_convnext", num_classes=3),
    "timm: an EfficientNet": lambda: timm.create_model("test_efficientnet", num_classes=3),
    "timm: BatchNormAct2d": lambda: timm.layers.BatchNormAct2d(4),
    "timm: EvoNorm2dB0": lambda: timm.layers.EvoNorm2dB0(4),
}  # fmt: skip


def filled(net: nn.Module, seed: int) -> nn.Module:
    """Give a module other values."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in net.state_dict(keep_vars=True).values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.data += torch.rand(tensor.shape, generator=generator).to(
                tensor.dtype
            )
    return net


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_dict_loads_as_torch_loads_it_strictly(family, tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "state.pt"
    torch.save(filled(FAMILIES[family](), 1).state_dict(), path)
    right, into = FAMILIES[family](), FAMILIES[family]()
    right.load_state_dict(torch.load(path), strict=True)
    load_weights(path, into=into)
    one, other = into.state_dict(), right.state_dict()
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert buffers.equal(one[name], other[name]), name
    assert getattr(into, "extra", None) is getattr(right, "extra", None)


def test_the_table_has_94_families():
    assert len(FAMILIES) == 94
