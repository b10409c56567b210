"""Residual blocks are found by structure, under any name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedlayers as fl
from fl_core.models.extended import (
    Exits,
    hold,
    paths_of_blocks,
    split_head,
    with_optional_blocks,
)
from tests.made import normal

X = normal(4, 6)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


class Chained(nn.Module):
    """A stem, a Sequential of blocks under another name, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.final = nn.Linear(6, 8), nn.LayerNorm(8)
        self.stages = nn.Sequential(*(Residual() for _ in range(3)))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.final(self.stages(self.stem(x))))


class Looped(Chained):
    """The same with a list that the model loops over, within another module."""

    def __init__(self) -> None:
        super().__init__()
        del self.stages
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.encoder.layer:
            x = block(x)
        return self.head(self.final(x))


class Counted(Looped):
    """The same with a loop over numbers, which cannot leave a block out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for k in range(3):
            x = self.encoder.layer[k](x)
        return self.head(self.final(x))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


@pytest.mark.parametrize(
    ("kind", "path"), [(Chained, "stages"), (Looped, "encoder.layer")]
)
def test_a_chain_is_found_and_its_blocks_can_be_left_out(kind, path):
    model = with_optional_blocks(made(kind), X)
    assert paths_of_blocks(model) == tuple(f"{path}.{k}" for k in range(3))
    plain = made(kind)
    assert torch.equal(model(X), plain(X))
    names = {name for name, _ in model.named_parameters()}
    hold(model, {name for name in names if not name.startswith(f"{path}.1.")})
    blocks = plain.get_submodule(path)
    right = plain.head(plain.final(blocks[2](blocks[0](plain.stem(X)))))
    assert torch.equal(model(X), right)
    with pytest.raises(fl.UsageError, match="must contain final"):
        hold(model, {name for name in names if name.startswith(f"{path}.2.")})
    assert torch.equal(model(X), right)
    hold(model)
    assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize("kind", [Chained, Looped])
def test_early_classifiers_read_what_the_own_one_would(kind):
    whole = with_optional_blocks(made(kind), X)
    model = Exits(whole, (1, 2), ensemble=True, seed=0, example=X).eval()
    logits = model(X, every=True)
    plain = made(kind)
    blocks = list(plain.stages if kind is Chained else plain.encoder.layer)
    x = plain.stem(X)
    for number, block in enumerate(blocks[:2], 1):
        x = block(x)
        right = model.exits[str(number)](plain.final(x))
        assert torch.equal(logits[number - 1], right)
    assert torch.equal(logits[-1], plain(X))


class Stack(nn.Sequential):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class Called(Chained):
    """The same, with blocks that run by a method of their container."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = Stack(*self.stages)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.final(self.stages.run(self.stem(x))))


class Twice(Chained):
    """A last layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stem(self.stem(x))


class Scaled(Chained):
    """A last layer whose weight is read elsewhere, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x) * self.head.weight.mean())


@pytest.mark.parametrize(
    ("extend", "kind", "message"),
    [
        (with_optional_blocks, Counted, "residual blocks: a Sequential"),
        (
            with_optional_blocks,
            lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)),
            "residual blocks",
        ),
        (with_optional_blocks, Called, "residual blocks"),
        (split_head, Twice, "'stem' only once"),
        (split_head, Scaled, "'head' only once"),
    ],
)
def test_a_model_that_cannot_be_extended_is_refused_and_stays(extend, kind, message):
    model = made(kind)
    modules = dict(model.named_modules())
    with pytest.raises(fl.UsageError, match=message):
        extend(model, X)
    assert dict(model.named_modules()) == modules


@pytest.mark.parametrize("algorithm", ["fedra", "depthfl", "inclusivefl"])
@pytest.mark.parametrize("kind", [Chained, Looped])
def test_algorithms_of_blocks_train_such_models(kind, algorithm):
    def xy(seed):
        draw = torch.Generator().manual_seed(seed)
        y = torch.arange(60) % 3
        return torch.randn(60, 6, generator=draw) + 3 * torch.eye(6)[y], y

    options = {"depths": ("1", "3")} if algorithm != "fedra" else {}
    result = fl.run(
        data={"a": xy(1), "b": xy(2)}, model=made(kind), algorithm=algorithm, rounds=6,
        patience=0, lr=0.05, options=options, progress=False,
    )  # fmt: skip
    assert result.scores["accuracy"].mean() > 0.6


def test_blocks_of_transformers_are_found():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8,
        image_size=8, patch_size=4, num_channels=1, num_labels=3,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    x = torch.randn(2, 1, 8, 8)
    right = model(x).logits
    with_blocks = with_optional_blocks(model, x)
    assert len(paths_of_blocks(with_blocks)) == 3
    assert torch.equal(with_blocks(x).logits, right)


def test_a_model_with_adapters_of_its_own_takes_no_others():
    peft = pytest.importorskip("peft")
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    config = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"])
    tuned = peft.get_peft_model(net, config)
    data = {name: (torch.randn(30, 6), torch.arange(30) % 3) for name in "ab"}
    how = {"data": data, "model": tuned, "rounds": 1, "progress": False}
    with pytest.raises(fl.UsageError, match="Leave adapt out"):
        fl.run(**how, adapt="lora:r=2")
    assert len(fl.run(**how).scores)
