"""Each sort of buffer has a rule, and a module keeps its own promise after a mean."""

from __future__ import annotations

import inspect
import re
import warnings

import pytest
import timm.layers
import torch
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, prune
from torchvision.ops import FrozenBatchNorm2d

import fedlayers as fl
from fl_core import buffers, tree
from fl_core.buffers import RULES, rules_of
from tests.made import separated

REGISTERED = re.compile(r"register_buffer\(\s*f?\"(\w+)\"")
BUILT = {
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
    nn.LazyInstanceNorm1d,
    nn.LazyInstanceNorm2d,
    nn.LazyInstanceNorm3d,
}
"""Classes that become another one with their first batch."""
TIMM = (
    timm.layers.BatchNormAct2d,
    timm.layers.FrozenBatchNormAct2d,
    timm.layers.EvoNorm2dB0,
    timm.layers.EvoNorm2dB1,
    timm.layers.InplaceAbn,
)


def classes_with_buffers() -> dict[str, tuple[type[nn.Module], set[str]]]:
    """Return the classes of torch with the names that their source registers as buffers."""
    classes = {}
    spaces = (nn, quantization, parametrizations)
    members = [member for space in spaces for member in vars(space).values()]
    members += [FrozenBatchNorm2d, *TIMM]
    for kind in members:
        if not (inspect.isclass(kind) and issubclass(kind, nn.Module)):
            continue
        bases = [base for base in kind.__mro__ if issubclass(base, nn.Module)]
        source = "".join(
            inspect.getsource(base) for base in bases if base is not nn.Module
        )
        names = set(REGISTERED.findall(source.replace("'", '"')))
        if names and kind not in BUILT:
            classes[kind.__name__] = kind, names
    return classes


CLASSES = classes_with_buffers()


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_each_class_with_buffers_has_a_row(name: str) -> None:
    kind, names = CLASSES[name]
    rows: dict[str, str] = {}
    for parent in reversed(kind.__mro__):
        rows |= RULES.get(parent.__name__, {})
    assert names <= rows.keys()


def test_the_walk_reaches_all_sorts() -> None:
    assert len(CLASSES) > 30
    assert {"BatchNorm2d", "_SpectralNorm", "_Orthogonal"} <= CLASSES.keys()
    assert {"HistogramObserver", "FakeQuantize", "EvoNorm2dB0"} <= CLASSES.keys()


# --- promises --------------------------------------------------------------------------


def mean_of(first: nn.Module, *others: nn.Module, weights: tuple[int, ...]) -> None:
    """Give the first module the mean of all, by its rules."""
    trees = [tree.state_dict(module) for module in (first, *others)]
    tree.load(first, tree.mean(trees, weights, rules_of(first)))


def data(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * (1 + seed)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("old", [False, True])
def test_spectral_norm_has_norm_1(old: bool, dim: int) -> None:
    make = nn.utils.spectral_norm if old else parametrizations.spectral_norm
    modules = []
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        modules.append(make(nn.Linear(6, 4), dim=dim))
    first, *_ = modules
    mean_of(*modules, weights=(3, 1, 2))
    first.eval()
    first(torch.ones(2, 6))
    norm = torch.linalg.svdvals(first.weight.detach())[0]
    assert float(norm) == pytest.approx(1, abs=1e-4)


def test_spectral_norm_within_a_chain_of_parametrizations() -> None:
    modules = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        linear = parametrizations.spectral_norm(nn.Linear(5, 5))
        modules.append(nn.Sequential(linear, nn.Linear(5, 2)))
    mean_of(*modules, weights=(1, 1))
    weight = modules[0].eval()[0].weight.detach()
    assert float(torch.linalg.svdvals(weight)[0]) == pytest.approx(1, abs=1e-4)


def test_orthogonal_stays_orthogonal() -> None:
    torch.manual_seed(0)
    first = parametrizations.orthogonal(nn.Linear(4, 4))
    other = parametrizations.orthogonal(nn.Linear(4, 4))
    tree.load(other, tree.state_dict(first))
    part = dict(other.named_parameters())["parametrizations.weight.original"]
    with torch.no_grad():
        part.add_(torch.randn(4, 4))
    mean_of(first, other, weights=(1, 2))
    weight = first.weight.detach()
    torch.testing.assert_close(weight @ weight.T, torch.eye(4), atol=1e-5, rtol=0)


def test_statistics_of_batches_are_averaged_and_counts_are_the_largest() -> None:
    first, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    first(data(1, 8, 3))
    for seed in (2, 3):
        other(data(seed, 8, 3))
    expected = (first.running_mean * 3 + other.running_mean) / 4
    mean_of(first, other, weights=(3, 1))
    torch.testing.assert_close(first.running_mean, expected)
    assert first.num_batches_tracked.tolist() == 2


def test_extremes_cover_all_clients() -> None:
    first, other = quantization.MinMaxObserver(), quantization.MinMaxObserver()
    values = [data(1, 20), data(2, 20)]
    first(values[0])
    other(values[1])
    mean_of(first, other, weights=(1, 1))
    every = torch.cat(values)
    assert (first.min_val, first.max_val) == (every.min(), every.max())


def test_a_histogram_keeps_its_range() -> None:
    modules = [quantization.HistogramObserver(bins=16) for _ in range(3)]
    for seed, module in enumerate(modules):
        module(data(seed, 50))
    state = tree.state_dict(modules[1])
    mean_of(*modules, weights=(1, 5, 5))
    assert tree.digest(tree.state_dict(modules[0])) == tree.digest(state)


@pytest.mark.parametrize(
    "kind", [quantization.FakeQuantize, quantization.FusedMovingAvgObsFakeQuantize]
)
def test_fake_quantisation_has_the_scale_of_its_extremes(kind: type[nn.Module]) -> None:
    first, other = kind(), kind()
    first(data(1, 20))
    other(data(4, 20))
    mean_of(first, other, weights=(1, 2))
    scale, zero_point = first.calculate_qparams()
    torch.testing.assert_close(first.scale, scale)
    assert first.zero_point.tolist() == zero_point.tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.CrossEntropyLoss(torch.rand(3)),
        lambda: FrozenBatchNorm2d(3),
        lambda: prune.random_unstructured(nn.Linear(9, 9), "weight", 0.5),
    ],
)
def test_constants_must_be_equal(make: object) -> None:
    torch.manual_seed(0)
    first, other = make(), make()
    name = next(iter(rules_of(first).by_name))
    assert rules_of(first).by_name[name] == buffers.CONSTANT
    mean_of(first, first, weights=(1, 2))
    changed = tree.state_dict(other)
    changed[name] = changed[name] + 1
    with pytest.raises(fl.UsageError, match=f"buffer '{name}' .* must be equal"):
        tree.mean([tree.state_dict(first), changed], [1, 1], rules_of(first))


# --- runs ------------------------------------------------------------------------------


class Owner(nn.Module):
    """A linear model with a buffer, which a pass may change."""

    def __init__(self, buffer: torch.Tensor, change: object = None) -> None:
        super().__init__()
        self.register_buffer("held", buffer)
        self.linear = nn.Linear(5, 3)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.change is not None:
            self.change(self, x)
        return self.linear(x)


def run(model: nn.Module, **options: object) -> fl.RunResult:
    data = {"a": separated(40, 5, seed=1), "b": separated(50, 5, seed=2)}
    how = {"rounds": 2, "patience": 0, "progress": False, **options}
    return fl.run(data=data, model=model, **how)


@pytest.mark.parametrize(
    "algorithm",
    ["fedavg", "fedper", "feddyn", "fedcac", "pfedla", "pfedhn"],
)
def test_a_run_keeps_spectral_norm(algorithm: str) -> None:
    """Also where the server mixes models part by part, or generates them."""
    torch.manual_seed(0)
    linear = parametrizations.spectral_norm(nn.Linear(5, 8))
    model = nn.Sequential(linear, nn.ReLU(), nn.Linear(8, 3))
    models = run(model, algorithm=algorithm, epochs=5, lr=0.05).models
    norms = [
        torch.linalg.svdvals(m.eval()[0].weight.detach())[0] for m in models.values()
    ]
    assert [float(norm) for norm in norms] == pytest.approx([1, 1], abs=0.02)


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint64, torch.bool]
)
def test_buffers_of_any_type_are_kept_where_they_are_equal(dtype: torch.dtype) -> None:
    buffer = torch.ones(3).to(dtype)
    for model in run(Owner(buffer)).models.values():
        assert buffers.equal(model.held, buffer)


def test_a_buffer_without_a_mean_must_not_change() -> None:
    def turn(model: nn.Module, x: torch.Tensor) -> None:
        model.held.mul_(1j)

    model = Owner(torch.ones(3, dtype=torch.complex64), turn)
    with pytest.raises(fl.UsageError, match=r"buffer 'held' \(complex64\) must not"):
        run(model)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ],
)
def test_sparse_and_quantised_buffers_are_refused_by_name(make: object) -> None:
    with pytest.raises(fl.UsageError, match="buffer 'held' of Owner must be dense"):
        run(Owner(make()))


def test_a_float_buffer_without_a_rule_has_a_note() -> None:
    def move(model: nn.Module, x: torch.Tensor) -> None:
        if model.training:
            model.held = 0.9 * model.held + 0.1 * x.detach().mean(0)

    with pytest.warns(UserWarning, match="buffers 'held' change in training"):
        run(Owner(torch.zeros(5), move))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Owner(torch.zeros(5)))


def test_a_buffer_that_grows_is_refused_by_name() -> None:
    def grow(model: nn.Module, x: torch.Tensor) -> None:
        model.held.resize_(5)

    for call in (
        lambda model: run(model),
        lambda model: fl.diagnose({"a": model}, {"a": separated(30, 5, seed=1)}, ["grad_norm"], progress=False),
    ):  # fmt: skip
        model = Owner(torch.tensor([]), grow)
        with pytest.raises(
            fl.UsageError, match="buffer 'held' of Owner must keep its shape"
        ):
            call(model)
        assert model.held.shape == (0,)
