"""Layers of any network: every tensor in exactly one, in the order of the forward pass, and no trace left."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_core import tree
from fl_core.layers import Layer, layers_of, sizes
from tests.conftest import on_first_use
from tests.made import Wired, snapshot

timm = on_first_use("timm")


def names(layers):
    return [layer.name for layer in layers]


def layer(layers, name):
    return next(candidate for candidate in layers if candidate.name == name)


linear = nn.Linear


def weight(*shape):
    return nn.Parameter(torch.zeros(*shape))


def order():
    """Defined in another order than used; an in-place ReLU, a norm, and a layer that is never called."""
    parts = {
        "unused": linear(2, 2),
        "norm": nn.BatchNorm1d(4),
        "fc10": linear(4, 2),
        "fc2": linear(4, 4),
    }
    return Wired(
        lambda m, x: m.fc10(F.relu_(m.norm(m.fc2(F.relu_(m.fc1(x)))))),
        **parts,
        fc1=linear(3, 4),
    )


def tied():
    """The output's weight is the embedding's; the output is defined first, so that the tensor has its name."""
    parts = {"out": linear(4, 5), "embedding": nn.Embedding(5, 4), "fc": linear(4, 4)}
    parts["embedding"].weight = parts["out"].weight
    return Wired(lambda m, x: m.out(m.fc(m.embedding(x)).mean(1)), **parts)


def twice():
    """One module used at the start and at the end, and one module under two names."""
    other, again = linear(4, 4), linear(4, 4)
    return Wired(
        lambda m, x: m.again(m.other(m.alias(x))), other=other, again=again, alias=again
    )


def tokens():
    """Loose parameters: used after the first layer, after the last, never; one is looked at before it is used."""

    def run(m, x):
        x = m.project(x.to(m.scale.dtype).reshape(len(x), 1, -1))
        return m.head(torch.cat([m.token.expand(len(x), -1, -1), x], 1)[:, 0]) * m.scale

    loose = {
        "token": weight(1, 1, 4),
        "scale": nn.Parameter(torch.ones(1)),
        "dead": weight(3),
    }
    return Wired(run, **loose, head=linear(4, 2), project=linear(3, 4))


def functional():
    """No module of its own."""
    return Wired(
        lambda m, x: torch.relu(x @ m.w1) @ m.w2, w1=weight(3, 4), w2=weight(4, 2)
    )


def borrowing():
    """Reads the weights of a module that it never calls, and those of a list that cannot be called."""

    def run(m, x):
        for module in m.listed:
            x = x @ module
        return m.head(F.linear(x, m.held.weight, m.held.bias))

    return Wired(
        run,
        head=linear(4, 2),
        held=linear(4, 4),
        listed=nn.ParameterList([weight(3, 4), weight(4, 4)]),
    )


def attention():
    parts = {
        "head": linear(4, 2),
        "norm": nn.LayerNorm(4),
        "attention": nn.MultiheadAttention(4, 2, batch_first=True),
    }
    return Wired(
        lambda m, x: m.head(m.norm(x + m.attention(x, x, x)[0]).mean(1)), **parts
    )


def recurrent():
    lstm = nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True)
    return Wired(lambda m, x: m.head(m.lstm(x)[0][:, -1]), head=linear(8, 2), lstm=lstm)


def skipping():
    """A block that is called but leaves one of its layers, and a whole group, out."""
    parts = {
        "skipped": linear(3, 3),
        "fc": linear(3, 3),
        "group": nn.Sequential(linear(3, 3)),
    }
    block = Wired(lambda m, x: m.fc(x), **parts)
    return Wired(lambda m, x: m.block(x), block=block, layer_groups=("block.group",))


def groups():
    """Declares its own layers; the norm behind the first group has as many channels as a layer before the group."""
    parts = {"head": linear(4, 2), "norm": nn.LayerNorm(4), "before": linear(4, 4)}
    parts["block"] = nn.Sequential(linear(4, 4), nn.ReLU(), linear(4, 4))
    parts["stem"] = nn.Sequential(linear(3, 4), nn.BatchNorm1d(4))
    run = lambda m, x: m.head(m.norm(m.block(m.before(m.stem(x)))))  # noqa: E731
    return Wired(run, **parts, layer_groups=("stem", "block"))


def norms():
    """Norms before any layer, behind one, of another width, and without parameters."""
    parts = {
        "first": nn.BatchNorm2d(1),
        "conv": nn.Conv2d(1, 4, 3, padding=1),
        "relu": nn.ReLU(inplace=True),
    }
    parts |= {
        "behind": nn.BatchNorm2d(4),
        "wide": nn.LayerNorm(8),
        "conv2": nn.Conv2d(4, 6, 3),
    }
    run = lambda m, x: m.bare(m.conv2(m.wide(m.behind(m.relu(m.conv(m.first(x)))))))  # noqa: E731
    return Wired(run, **parts, bare=nn.BatchNorm2d(6, affine=False))


def memory():
    """Changes and replaces buffers in its forward pass, draws random numbers, and may fail."""

    def run(m, x):
        m.count += 1
        m.cache = torch.rand(2)
        if m.fail:
            raise KeyError("no")
        return m.fc(m.drop(x))

    model = Wired(run, fc=linear(3, 2), drop=nn.Dropout(0.5), fail=False)
    model.register_buffer("count", torch.zeros(1))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    return model


def encoder():
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2
    )


def vit():
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3
    )


def mixer():
    return timm.models.mlp_mixer.MlpMixer(
        img_size=32, patch_size=16, num_blocks=2, embed_dim=8, num_classes=3
    )


X3, IMAGE, SEQUENCE = torch.zeros(2, 3), torch.zeros(2, 3, 32, 32), torch.zeros(2, 5, 3)
ZOO = {
    "order": (order, X3),
    "tied": (tied, torch.zeros(2, 3, dtype=torch.long)),
    "twice": (twice, torch.zeros(2, 4)),
    "tokens": (tokens, X3),
    "functional": (functional, X3),
    "borrowing": (borrowing, X3),
    "attention": (attention, torch.zeros(2, 3, 4)),
    "recurrent": (recurrent, SEQUENCE),
    "skipping": (skipping, X3),
    "groups": (groups, X3),
    "norms": (norms, torch.zeros(2, 1, 8, 8)),
    "memory": (memory, X3),
    "bare linear": (lambda: nn.Linear(3, 2), X3),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
        X3,
    ),
    "encoder": (encoder, torch.zeros(2, 3, 4)),
    "timm vit": (vit, IMAGE),
    "timm mixer": (mixer, IMAGE),
    "timm resnet": (
        lambda: timm.create_model("resnet10t", num_classes=3),
        IMAGE,
    ),
    "timm convnext": (
        lambda: timm.models.ConvNeXt(
            depths=(1, 2, 1, 1), dims=(4, 8, 8, 8), num_classes=3
        ),
        IMAGE,
    ),
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
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    assert sorted(tensors) == sorted(tree.named_tensors(model))
    parameters = dict(model.named_parameters())
    assert {tensor for layer in layers for tensor in layer.parameters} == set(
        parameters
    )
    assert len(set(names(layers))) == len(layers)
    modules = dict(model.named_modules())
    assert all(layer.output in modules for layer in layers)
    used = [layer.used for layer in layers]
    assert used == sorted(used, reverse=True)
    assert layers == layers_of(model, example, by=by)
    assert sum(sizes(layers, model).values()) == sum(
        parameter.numel() for parameter in parameters.values()
    )


@pytest.mark.parametrize("name", ZOO)
def test_used_is_what_the_output_depends_on(name):
    """Against autograd: a layer is in use exactly if some weight of it has a gradient."""
    build, example = ZOO[name]
    torch.manual_seed(0)
    model = build().eval()
    layers = layers_of(model, example)
    model(example).sum().backward()
    parameters = dict(model.named_parameters())
    for layer in layers:
        if layer.parameters:
            reached = any(
                parameters[tensor].grad is not None for tensor in layer.parameters
            )
            assert layer.used == reached, layer.name


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["memory", "norms", "timm vit"])
def test_leaves_no_trace(name, training):
    build, example = ZOO[name]
    model = build().train(training)
    next(model.children()).train(not training)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = snapshot(model)
    layers_of(model, example)
    assert snapshot(model) == before
    model.fail = True
    with pytest.raises(KeyError if name == "memory" else ValueError):
        layers_of(model, torch.zeros(2, 7))
    assert snapshot(model) == before


def test_order_of_use_and_unused_last():
    layers = of("order")
    assert names(layers) == ["fc1", "fc2", "fc10", "unused"]
    assert [used_layer.used for used_layer in layers] == [True, True, True, False]
    assert layer(layers, "fc2").parameters == (
        "norm.weight",
        "norm.bias",
        "fc2.weight",
        "fc2.bias",
    )
    assert layer(layers, "fc2").buffers == (
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    )
    assert layer(layers, "fc2").output == "norm"
    assert layer(layers, "unused").output == ""


def test_layers_that_a_called_block_leaves_out():
    assert of("skipping") == (
        Layer("block.fc", ("block.fc.weight", "block.fc.bias"), output="block.fc"),
        Layer(
            "block.skipped", ("block.skipped.weight", "block.skipped.bias"), used=False
        ),
        Layer(
            "block.group", ("block.group.0.weight", "block.group.0.bias"), used=False
        ),
    )


@pytest.mark.parametrize(
    ("name", "by", "wanted"),
    [
        ("tied", "block", "out fc"),  # the tied tensor where it is first used
        ("twice", "block", "again other"),
        ("functional", "block", "model"),
        (
            "borrowing",
            "block",
            "listed held head",
        ),  # weights that are read without a call
        ("recurrent", "block", "lstm head"),
        ("attention", "block", "attention head"),
        ("attention", "module", "attention norm head"),
        ("timm mixer", "block", "stem.proj blocks.0 blocks.1 head"),
        ("timm resnet", "block", "stem layer1.0 layer2.0 layer3.0 layer4.0 fc"),
        # a stage's downsampling goes with the stage's first block, which is not the whole stage
        (
            "timm convnext",
            "block",
            "stem stages.0.blocks.0 stages.1.blocks.0 stages.1.blocks.1 stages.2 stages.3 head",
        ),
    ],
)
def test_layers_stand_in_the_order_of_use(name, by, wanted):
    layers = of(name, by=by)
    assert " ".join(names(layers)) == wanted
    assert all(layer.used for layer in layers)


def test_loose_parameters_join_the_layer_that_ran_last():
    layers = of("tokens")
    assert names(layers) == ["project", "head", "model"]
    assert layer(layers, "project").parameters == (
        "token",
        "project.weight",
        "project.bias",
    )
    assert layer(layers, "head").parameters == ("scale", "head.weight", "head.bias")
    assert layer(layers, "model") == Layer("model", ("dead",), used=False)


def test_norms_join_only_what_they_normalise():
    layers = of("norms")
    assert names(layers) == ["first", "conv", "wide", "conv2"]
    assert "behind.weight" in layer(layers, "conv").parameters
    assert layer(layers, "conv2").buffers == (
        "bare.running_mean",
        "bare.running_var",
        "bare.num_batches_tracked",
    )
    assert [listed.output for listed in layers] == ["first", "behind", "wide", "bare"]


def test_declared_groups():
    layers = of("groups")
    assert names(layers) == ["stem", "before", "block", "norm", "head"]
    assert len(layer(layers, "stem").parameters) == 4
    assert len(layer(layers, "block").parameters) == 4
    assert layer(layers, "block").output == "block"
    # declared groups are of blocks; one layer a module is one layer a module
    assert len(of("groups", by="module")) == 7


def test_a_wrapper_has_the_layers_of_the_model_in_it():
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), torch.zeros(2, 4)
    assert layers_of(nn.DataParallel(net), x) == layers_of(net, x)
