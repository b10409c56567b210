"""Layers of any network: every tensor in exactly one, in the order of the forward pass, and no trace left."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from fl_core import tree
from fl_core.errors import UsageError
from fl_core.layers import Layer, layers_of, sizes


def names(layers):
    return [layer.name for layer in layers]


def layer(layers, name):
    return next(each for each in layers if each.name == name)


class Order(nn.Module):
    """Defined in another order than used; an in-place ReLU, a norm, and a layer that is never called."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(4)
        self.fc10 = nn.Linear(4, 2)
        self.fc2 = nn.Linear(4, 4)
        self.fc1 = nn.Linear(3, 4)

    def forward(self, x):
        return self.fc10(F.relu_(self.norm(self.fc2(F.relu_(self.fc1(x))))))


class Tied(nn.Module):
    """The output's weight is the embedding's; the output is defined first, so that the tensor has its name."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 5)
        self.embedding = nn.Embedding(5, 4)
        self.fc = nn.Linear(4, 4)
        self.embedding.weight = self.out.weight

    def forward(self, x):
        return self.out(self.fc(self.embedding(x)).mean(1))


class Twice(nn.Module):
    """One module used at the start and at the end, and one module under two names."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.alias = self.again

    def forward(self, x):
        return self.again(self.other(self.alias(x)))


class Tokens(nn.Module):
    """Loose parameters: used after the first layer, after the last, never; one is looked at before it is used."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.scale = nn.Parameter(torch.ones(1))
        self.dead = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(4, 2)
        self.project = nn.Linear(3, 4)

    def forward(self, x):
        x = x.to(self.scale.dtype)
        x = self.project(x.reshape(len(x), 1, -1))
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(x[:, 0]) * self.scale


class Functional(nn.Module):
    """No module of its own."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(3, 4))
        self.w2 = nn.Parameter(torch.zeros(4, 2))

    def forward(self, x):
        return torch.relu(x @ self.w1) @ self.w2


class Borrowing(nn.Module):
    """Reads the weights of a module that it never calls, and those of a list that cannot be called."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.held = nn.Linear(4, 4)
        self.listed = nn.ParameterList([nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(4, 4))])

    def forward(self, x):
        for weight in self.listed:
            x = x @ weight
        return self.head(F.linear(x, self.held.weight, self.held.bias))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.head(self.norm(x + self.attention(x, x, x)[0]).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)
        self.lstm = nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Skipping(nn.Module):
    """A block that is called but leaves one of its layers, and a whole group, out."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.skipped = nn.Linear(3, 3)
            self.fc = nn.Linear(3, 3)
            self.group = nn.Sequential(nn.Linear(3, 3))

        def forward(self, x):
            return self.fc(x)

    layer_groups = ("block.group",)

    def __init__(self):
        super().__init__()
        self.block = self.Block()

    def forward(self, x):
        return self.block(x)


class Groups(nn.Module):
    """Declares its own layers; the norm behind the first group has as many channels as a layer before the group."""

    layer_groups = ("stem", "block")

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.norm = nn.LayerNorm(4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.before = nn.Linear(4, 4)
        self.stem = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def forward(self, x):
        return self.head(self.norm(self.block(self.before(self.stem(x)))))


class Norms(nn.Module):
    """Norms before any layer, behind one, of another width, and without parameters."""

    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm2d(1)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.behind = nn.BatchNorm2d(4)
        self.wide = nn.LayerNorm(8)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.bare = nn.BatchNorm2d(6, affine=False)

    def forward(self, x):
        return self.bare(self.conv2(self.wide(self.behind(self.relu(self.conv(self.first(x)))))))


class Memory(nn.Module):
    """Changes and replaces buffers in its forward pass, draws random numbers, and may fail."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.fail = False

    def forward(self, x):
        self.count += 1
        self.cache = torch.rand(2)
        if self.fail:
            raise KeyError("no")
        return self.fc(self.drop(x))


def vit():
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2, num_classes=3)


def mixer():
    return timm.models.mlp_mixer.MlpMixer(img_size=32, patch_size=16, num_blocks=2, embed_dim=8, num_classes=3)


X3, IMAGE, SEQUENCE = torch.zeros(2, 3), torch.zeros(2, 3, 32, 32), torch.zeros(2, 5, 3)
ZOO = {
    "order": (Order, X3),
    "tied": (Tied, torch.zeros(2, 3, dtype=torch.long)),
    "twice": (Twice, torch.zeros(2, 4)),
    "tokens": (Tokens, X3),
    "functional": (Functional, X3),
    "borrowing": (Borrowing, X3),
    "attention": (Attention, torch.zeros(2, 3, 4)),
    "recurrent": (Recurrent, SEQUENCE),
    "skipping": (Skipping, X3),
    "groups": (Groups, X3),
    "norms": (Norms, torch.zeros(2, 1, 8, 8)),
    "memory": (Memory, X3),
    "bare linear": (lambda: nn.Linear(3, 2), X3),
    "weight norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))), X3),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
        torch.zeros(2, 3, 4),
    ),
    "timm vit": (vit, IMAGE),
    "timm mixer": (mixer, IMAGE),
    "timm resnet": (lambda: timm.create_model("resnet10t", pretrained=False, num_classes=3), IMAGE),
    "timm convnext": (
        lambda: timm.models.convnext.ConvNeXt(depths=(1, 2, 1, 1), dims=(4, 8, 8, 8), num_classes=3),
        IMAGE,
    ),
    "torchvision resnet18": (lambda: torchvision.models.resnet18(num_classes=3), IMAGE),
}


def of(name, **options):
    build, example = ZOO[name]
    return layers_of(build(), example, **options)


@pytest.mark.parametrize("by", ["block", "module"])
@pytest.mark.parametrize("name", ZOO)
def test_every_tensor_is_in_exactly_one_layer(name, by):
    build, example = ZOO[name]
    model = build()
    layers = layers_of(model, example, by=by)
    held = [tensor for each in layers for tensor in each.tensors]
    assert sorted(held) == sorted(tree.live(model))
    parameters = dict(model.named_parameters())
    assert {tensor for each in layers for tensor in each.parameters} == set(parameters)
    assert len(set(names(layers))) == len(layers)
    modules = dict(model.named_modules())
    assert all(each.output in modules for each in layers)
    used = [each.used for each in layers]
    assert used == sorted(used, reverse=True)
    assert layers == layers_of(model, example, by=by)
    assert sum(sizes(layers, model).values()) == sum(parameter.numel() for parameter in parameters.values())


@pytest.mark.parametrize("name", ZOO)
def test_used_is_what_the_output_depends_on(name):
    """Against autograd: a layer is in use exactly if some weight of it has a gradient."""
    build, example = ZOO[name]
    torch.manual_seed(0)
    model = build().eval()
    layers = layers_of(model, example)
    model(example).sum().backward()
    parameters = dict(model.named_parameters())
    for each in layers:
        if each.parameters:
            reached = any(parameters[tensor].grad is not None for tensor in each.parameters)
            assert each.used == reached, each.name


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["memory", "norms", "timm vit"])
def test_leaves_no_trace(name, training, fails):
    build, example = ZOO[name]
    model = build().train(training)
    child = next(model.children()).train(not training)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    buffers = {key: (buffer, buffer.clone()) for key, buffer in model.named_buffers()}
    before = tree.digest(tree.of(model))
    random = torch.get_rng_state()
    if fails:
        model.fail, example = True, torch.zeros(2, 7)
        with pytest.raises(KeyError if name == "memory" else ValueError):
            layers_of(model, example)
    else:
        layers_of(model, example)
    assert tree.digest(tree.of(model)) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training == training
    assert child.training != training
    for key, buffer in model.named_buffers():
        assert buffer is buffers[key][0]
        assert torch.equal(buffer, buffers[key][1])
    assert all(p.requires_grad and bool((p.grad == 1).all()) for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_order_of_use_and_unused_last():
    layers = of("order")
    assert names(layers) == ["fc1", "fc2", "fc10", "unused"]
    assert [each.used for each in layers] == [True, True, True, False]
    assert layer(layers, "fc2").parameters == ("norm.weight", "norm.bias", "fc2.weight", "fc2.bias")
    assert layer(layers, "fc2").buffers == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert layer(layers, "fc2").output == "norm"
    assert layer(layers, "unused").output == ""


def test_layers_that_a_called_block_leaves_out():
    assert of("skipping") == (
        Layer("block.fc", ("block.fc.weight", "block.fc.bias"), output="block.fc"),
        Layer("block.skipped", ("block.skipped.weight", "block.skipped.bias"), used=False),
        Layer("block.group", ("block.group.0.weight", "block.group.0.bias"), used=False),
    )


def test_by_module_leaves_norms_alone():
    layers = of("order", by="module")
    assert names(layers) == ["fc1", "fc2", "norm", "fc10", "unused"]
    assert layer(layers, "fc2").tensors == ("fc2.weight", "fc2.bias")
    assert layer(layers, "norm").tensors[:2] == ("norm.weight", "norm.bias")


def test_names_are_exact():
    layers = of("order")
    assert layer(layers, "fc1").tensors == ("fc1.weight", "fc1.bias")
    assert layer(layers, "fc10").tensors == ("fc10.weight", "fc10.bias")
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(12)])
    found = layers_of(model, X3)
    assert names(found) == [str(k) for k in range(12)]
    assert all(each.tensors == (f"{each.name}.weight", f"{each.name}.bias") for each in found)


@pytest.mark.parametrize(
    ("name", "by", "wanted"),
    [
        ("tied", "block", "out fc"),  # the tied tensor where it is first used
        ("twice", "block", "again other"),
        ("functional", "block", "model"),
        ("borrowing", "block", "listed held head"),  # weights that are read without a call
        ("recurrent", "block", "lstm head"),
        ("attention", "block", "attention head"),
        ("attention", "module", "attention norm head"),
        ("timm mixer", "block", "stem.proj blocks.0 blocks.1 head"),
        ("timm resnet", "block", "stem layer1.0 layer2.0 layer3.0 layer4.0 fc"),
        # a stage's downsampling goes with the stage's first block, which is not the whole stage
        ("timm convnext", "block", "stem stages.0.blocks.0 stages.1.blocks.0 stages.1.blocks.1 stages.2 stages.3 head"),
    ],
)
def test_layers_stand_in_the_order_of_use(name, by, wanted):
    layers = of(name, by=by)
    assert " ".join(names(layers)) == wanted
    assert all(each.used for each in layers)


def test_loose_parameters_join_the_layer_that_ran_last():
    layers = of("tokens")
    assert names(layers) == ["project", "head", "model"]
    assert layer(layers, "project").parameters == ("token", "project.weight", "project.bias")
    assert layer(layers, "head").parameters == ("scale", "head.weight", "head.bias")
    assert layer(layers, "model") == Layer("model", ("dead",), used=False)


def test_norms_join_only_what_they_normalise():
    layers = of("norms")
    assert names(layers) == ["first", "conv", "wide", "conv2"]
    assert "behind.weight" in layer(layers, "conv").parameters
    assert layer(layers, "conv2").buffers == ("bare.running_mean", "bare.running_var", "bare.num_batches_tracked")
    assert [each.output for each in layers] == ["first", "behind", "wide", "bare"]


def test_declared_groups():
    layers = of("groups")
    assert names(layers) == ["stem", "before", "block", "norm", "head"]
    assert len(layer(layers, "stem").parameters) == 4
    assert len(layer(layers, "block").parameters) == 4
    assert layer(layers, "block").output == "block"
    assert names(of("groups", groups=["block"])) == ["stem.0", "before", "block", "norm", "head"]
    # declared groups are of blocks; one layer a module is one layer a module
    assert len(of("groups", by="module")) == 7


def test_groups_inside_groups():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))), nn.Linear(3, 2))
    layers = layers_of(model, X3, groups=["0", "0.1"])
    assert [each.parameters for each in layers] == [
        ("0.0.weight", "0.0.bias"),
        ("0.1.0.weight", "0.1.0.bias"),
        ("1.weight", "1.bias"),
    ]


def test_parametrised_weights_stay_with_their_module():
    (only,) = of("weight norm")
    assert only.name == "0"
    assert set(only.parameters) == {
        "0.bias",
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    }


def test_timm_transformer():
    layers = of("timm vit")
    assert names(layers) == ["stem", "blocks.0", "blocks.1", "head"]
    assert {"cls_token", "pos_embed"} <= set(layers[0].parameters)
    assert all(name.startswith("blocks.0.") for name in layers[1].parameters)
    assert "norm.weight" in layers[2].parameters
    assert [each.output for each in layers] == ["patch_embed.proj", "blocks.0", "blocks.1", "head"]


def test_torchvision_resnet_joins_each_norm_to_its_convolution():
    layers = of("torchvision resnet18")
    assert len(layers) == 21
    assert names(layers)[:3] == ["conv1", "layer1.0.conv1", "layer1.0.conv2"]
    assert names(layers)[-1] == "fc"
    assert layers[0].parameters == ("conv1.weight", "bn1.weight", "bn1.bias")
    down = layer(layers, "layer2.0.downsample.0")
    assert down.parameters[1:] == ("layer2.0.downsample.1.weight", "layer2.0.downsample.1.bias")
    assert all(each.buffers for each in layers[:-1])


def test_several_arguments():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x, y):
            return self.fc(x) + y

    assert names(layers_of(Two(), (X3, X3))) == ["fc"]


@pytest.mark.parametrize(
    ("parameter", "is_weight"),
    [("fc.weight", True), ("fc.bias", False), ("lstm.bias_ih_l0", False), ("a.in_proj_bias", False), ("cls", True)],
)
def test_weights_are_what_is_no_bias(parameter, is_weight):
    assert Layer("x", (parameter,)).weights == ((parameter,) if is_weight else ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "blok"}, "way of grouping layers 'blok': did you mean 'block'"),
        ({"groups": ["blok"]}, "module 'blok': did you mean 'block'"),
    ],
)
def test_unknown_choices(options, message):
    with pytest.raises(UsageError, match=message):
        of("groups", **options)


def test_nothing_to_federate():
    with pytest.raises(UsageError, match="ReLU has no parameters"):
        layers_of(nn.ReLU(), X3)
