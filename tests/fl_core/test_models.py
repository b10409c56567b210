import contextlib
import dataclasses
import functools
import math
import sys
import types

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fl_core import models, tree
from fl_core.errors import UsageError
from fl_core.models import weights
from fl_core.models.adapter import PackedShape, _unregistered, pack
from fl_core.models.building import wants_weights
from fl_core.models.tokens import TokenShape
from fl_core.run import initial
from tests.conftest import refuses
from tests.made import Wired

IMAGE, COLOUR, TABLE = (1, 28, 28), (3, 32, 32), (10,)
TEXT = TokenShape((12,), 30)
LIMITS = {  # smallest, oblong, and other samples that a model promises to take
    "fmnist_cnn": [(1, 8, 8), (2, 9, 17)],
    "cifar_cnn": [(1, 1, 1)],
    "isic_cnn": [(3, 8, 8), (2, 9, 17)],
    "scheduling_cnn": [(1, 16, 16), (3, 64, 64), (1, 17, 30)],
    "pfedla_cnn": [(1, 16, 16), (3, 17, 30)],
    "heart_mlp": [(3,)],
    "mlp": [(1, 8, 8)],
    "text_transformer": [TokenShape((3,), 4), TokenShape((64,), 900)],
    "text_blocks": [TokenShape((3,), 4), TokenShape((64,), 900)],
    "vit": [(3, 32, 48), (1, 6, 6)],
}


@functools.cache
def fitting(name):
    """Which of the usual kinds of samples a model takes."""
    shapes = []
    for shape in (IMAGE, COLOUR, TABLE, TEXT):
        with contextlib.suppress(UsageError):
            models.build(name, shape, 3)
            shapes.append(shape)
    return shapes


@pytest.mark.parametrize(
    ("name", "shape", "n_classes", "expected"),
    [
        ("fmnist_cnn", IMAGE, 10, 1_052_758),
        ("cifar_cnn", COLOUR, 10, 3_963_094),
        ("isic_cnn", (3, 200, 200), 4, 1_700_932),
        ("heart_mlp", TABLE, 5, 2_095),
        ("scheduling_cnn", IMAGE, 10, 582_026),
        ("scheduling_cnn", COLOUR, 10, 878_538),
        ("pfedla_cnn", IMAGE, 10, 85_822),
        ("pfedla_cnn", COLOUR, 10, 121_278),
        ("resnet8", COLOUR, 10, 1_232_704 + 256 * 10 + 10),
        ("resnet10", COLOUR, 100, 4_905_792 + 51_300),
        ("mlp", (1, 8, 8), 10, 64 * 64 + 64 + 64 * 32 + 32 + 32 * 10 + 10),
        ("text_transformer", TokenShape((119,), 1000), 2, 7_175_426 + 1000 * 768),
        (
            "vit",
            (3, 224, 224),
            1000,
            5_717_416 + 192 * 3 * (28 * 28 - 16 * 16) - 192 * (14 * 14 - 8 * 8),
        ),
    ],
)
def test_parameter_counts(name, shape, n_classes, expected):
    model = models.build(name, shape, n_classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("name", list(models.MODELS))
def test_maps_samples_to_logits_and_trains(name):
    assert fitting(name), "a model takes images, tables or texts"
    for shape in [*fitting(name)[:1], *LIMITS.get(name, [])]:
        model = models.build(name, shape, 3)
        assert model.training
        logits = model(models.example(shape, 4))
        assert logits.shape == (4, 3)
        assert logits.dtype == torch.float32
        logits.square().sum().backward()
        assert all(p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    "name", ["fmnist_cnn", "cifar_cnn", "isic_cnn", "heart_mlp", "mlp"]
)
def test_kaiming_initialisation(name):
    shape = (1000,) if name in ("heart_mlp", "mlp") else fitting(name)[0]
    for key, parameter in tree.state_dict(models.build(name, shape, 100)).items():
        if key.endswith("bias"):
            assert not parameter.any()
        else:
            fan_in = parameter[0].numel()
            tolerance = 5 / math.sqrt(
                2 * parameter.numel()
            )  # five standard errors of a standard deviation
            assert float(parameter.std()) == pytest.approx(
                math.sqrt(2 / fan_in), rel=tolerance
            )
            assert float(parameter.abs().max()) > math.sqrt(
                6 / fan_in
            )  # normal, not uniform


@pytest.mark.parametrize(
    ("name", "shape"),
    [("fmnist_cnn", IMAGE), ("cifar_cnn", COLOUR)],
)
def test_width_scales_channels_and_hidden_units_and_keeps_the_layers(name, shape):
    whole, half = (
        models.build(name, shape, 10, options={"width": width}) for width in (1, 0.5)
    )
    assert half.layer_groups == whole.layer_groups
    outside = (shape[0], 10)  # what the images and the classes fix
    for (key, t), full in zip(
        half.state_dict().items(), whole.state_dict().values(), strict=True
    ):
        wanted = [n if n in outside else n // 2 for n in full.shape[:2]]
        assert list(t.shape) == [*wanted, *full.shape[2:]], key


# models from elsewhere


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("timm:resnet10t", IMAGE, {}),
        ("timm:vit_tiny_patch16_224", (3, 32, 48), {"depth": 2}),
        ("timm:mobilenetv3_small_050", (2, 28, 20), {}),
        ("torchvision:shufflenet_v2_x0_5", COLOUR, {}),
        ("mine:Tied", (4,), {}),
        ("mine:shaped", (4,), {"wide": True}),
        ("mine:anything", (4,), {"width": 4}),
        ("mine:inner.make", (4,), {}),
        ("torch.nn:Linear", (4,), {"in_features": 4, "out_features": 7}),
    ],
)
def test_models_from_elsewhere_fit_the_data(name, shape, options):
    model = models.build(name, shape, 7, options=options)
    assert model.training
    assert model(models.example(shape)).shape == (2, 7)
    assert not any(getattr(module, "inplace", False) for module in model.modules())


def tied(n_classes, width=4):
    a, b = nn.Linear(width, width), nn.Linear(width, width)
    b.weight = a.weight
    return Wired(
        lambda m, x: m.head(m.b(m.a(x))), a=a, b=b, head=nn.Linear(width, n_classes)
    )


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    module = types.ModuleType("mine")
    module.Tied, module.Flat = tied, nn.Flatten
    module.TwoFaced = lambda: Wired(
        lambda m, x: m.fc(x) if m.training else x, fc=nn.Linear(4, 3)
    )
    module.shaped = lambda shape, n_classes, *, wide=False: nn.Linear(
        shape[0], n_classes, bias=wide
    )
    module.anything = lambda n_classes, **options: tied(n_classes, **options)
    module.number = lambda: 3
    module.made = nn.Linear(4, 3)
    module.inner = types.SimpleNamespace(make=lambda: nn.Linear(4, 7))
    monkeypatch.setitem(sys.modules, "mine", module)


def test_pretrained_weights_of_a_file_are_fitted_and_start_a_timm_model(tmp_path):
    """All but the classifier of another number of classes; a ViT's positions are interpolated to other images."""
    small = {"depth": 2, "embed_dim": 24, "num_heads": 3}
    name = "timm:vit_tiny_patch16_224"
    source = models.build(name, (3, 64, 64), 5, seed=3, options=small)
    path = save(tmp_path / "weights.pth", source.state_dict())
    model = models.build(
        name, (3, 32, 32), 3, options=small | {"pretrained": str(path)}
    )
    wanted, there = tree.state_dict(source), tree.state_dict(model)
    assert there["pos_embed"].shape == (1, 5, 24)
    for key in there:
        if key != "pos_embed" and not key.startswith("head."):
            assert torch.equal(there[key], wanted[key]), key
    assert there["head.weight"].shape == (3, 24)
    deeper = small | {"depth": 3, "pretrained": str(path)}
    with refuses(r"blocks\.2.*pretrained"):
        models.build(name, (3, 32, 32), 3, options=deeper)


# refusals


@dataclasses.dataclass
class Summed:
    """A builder that has no hash, as any dataclass."""

    width: int

    def __call__(self, n_classes):
        fc = nn.Linear(self.width, n_classes)
        return Wired(lambda m, a, b: m.fc(a) + b.sum(1, keepdim=True), fc=fc)


def test_a_builder_for_several_inputs_needs_no_hash():
    x, layout = pack((torch.ones(2, 3), torch.ones(2, 2)))
    shape = PackedShape(x.shape[1:])
    shape.layout, shape.samples = layout, x
    assert models.build(Summed(3), shape, 4)(x).shape == (2, 4)


def test_own_models_are_tried_with_texts_only(monkeypatch):
    """Their builders refuse other samples that do not fit. A pass of large images costs seconds."""
    tried, check_fit = [], models.check_fit
    monkeypatch.setattr(
        "fl_core.models.building.check_fit",
        lambda *args: tried.append(args[0]) or check_fit(*args),
    )
    for name, shape in (
        ("mlp", TABLE),
        ("resnet8", COLOUR),
        ("text_blocks", TEXT),
        (lambda n_classes: nn.Linear(10, n_classes), TABLE),
        ("torchvision:shufflenet_v2_x0_5", COLOUR),
    ):
        models.build(name, shape, 3)
    names = [name.rpartition(".")[2] for name in tried]
    assert names == ["text_blocks", "<lambda>", "torchvision:shufflenet_v2_x0_5"]


def test_bad_requests_are_named():
    vit = "timm:vit_tiny_patch16_224"
    base, squeeze = "timm:vit_base_patch16_18x2_224", "torchvision:squeezenet1_1"
    for name, shape, options, message in (
        ("fmnist_cn", IMAGE, {}, "'fmnist_cnn'"),
        ("fmnist_cnn", TABLE, {}, "images.*mlp"),
        ("fmnist_cnn", (1, 7, 28), {}, "8 x 8.*7, 28"),
        ("cifar_cnn", COLOUR, {"width": 0}, "width.*got 0"),
        ("timm:resnet19", IMAGE, {}, "'resnet18'"),
        ("timm:resnet10t", TABLE, {}, "images"),
        (vit, COLOUR, {"img_size": 64}, "fit.*64"),
        (vit, COLOUR, {"pretrained": "no/file"}, "pretrained.*'no/file'"),
        (base, COLOUR, {"pretrained": True}, "timm.*none.*pretrained=PATH"),
        ("vit", COLOUR, {"patch": 5}, "32 x 32.*5"),
        ("vit", (1, 100, 101), {}, "100 x 101.*{'patch': 1}"),
        ("mixer", (1, 66, 64), {}, "66 x 64.*{'patch': 2}"),
        ("vit", (1, 97, 97), {}, "97 x 97, .*one patch.*96 x 96.*{'patch': 97}"),
        ("mixer", (1, 11, 11), {}, "11 x 11, .*one patch.*8 x 8.*{'patch': 11}"),
        ("vit", COLOUR, {"width": 10, "heads": 3}, "heads=3.*10"),
        (squeeze, IMAGE, {}, "3 channels.*1"),
        (squeeze, COLOUR, {"drop": 0.1}, "'dropout'"),
        ("mine:shaped", (4,), {"width": 4}, "'width'"),
        ("mine:number", (4,), {}, r"\bint\b"),
        ("mine:Flat", (4,), {}, r"logits.*\(2, 3\)"),
        ("mine:TwoFaced", (4,), {}, "shape.*evaluation"),
    ):
        with refuses(message):
            models.build(name, shape, 3, options=options)
    for n_classes in (0, -1, True, 3.0):
        with refuses("n_classes"):
            models.build("mlp", TABLE, n_classes)


# weights


def save(path, tensors):
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


def started(name, shape, path):
    model = models.build(name, shape, 3)
    initial.copy_into(model, weights.read(path), str(path))
    return model


def test_tied_weights_may_be_stored_once_or_twice(tmp_path):
    built = models.build("mine:Tied", (4,), 3, seed=3)
    full = tree.clone(built.state_dict())
    path = tmp_path / "weights.safetensors"
    for dropped in ({"b.weight"}, {"a.weight"}, set()):
        stored = tree.select(full, full.keys() - dropped)
        model = started("mine:Tied", (4,), save(path, stored))
        assert model.a.weight is model.b.weight
        assert tree.digest(model.state_dict()) == tree.digest(full)
    neither = tree.select(full, full.keys() - {"a.weight", "b.weight"})
    unequal = {**full, "b.weight": full["b.weight"] + 1}
    for wrong, says in ((neither, r"a\.weight"), (unequal, r"'a\.weight'.*'b\.w")):
        with refuses(says):
            started("mine:Tied", (4,), save(path, wrong))


def test_the_seed_is_0_where_none_is_given():
    plain, same, other = (
        models.build("mlp", (4,), 2, **seed).state_dict()
        for seed in ({}, {"seed": 0}, {"seed": 1})
    )
    for name, values in plain.items():
        assert torch.equal(values, same[name])
    assert not all(torch.equal(values, other[name]) for name, values in plain.items())


def test_modules_in_lists_are_found_by_their_attribute_unless_it_is_private():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert _unregistered(model) == []
    model[1].shared = [model[0]]  # its parameters are the model's
    model[1]._private = [nn.Linear(2, 2)]
    assert _unregistered(model) == []
    model[1].hidden, model.table = (nn.Linear(2, 2),), {"a": nn.Linear(2, 2)}
    assert _unregistered(model) == ["table", "1.hidden"]


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        (None, {}, False),
        ("mlp", {"pretrained": True}, False),
        ("hf:folder", {}, True),
        ("timm:resnet18", {}, False),
        ("timm:resnet18", {"pretrained": False}, False),
        ("timm:resnet18", {"pretrained": "False"}, False),
        ("timm:resnet18", {"pretrained": True}, True),
        ("timm:resnet18", {"pretrained": "true"}, True),
    ],
)
def test_which_models_begin_with_weights_of_a_library(name, options, wanted):
    assert wants_weights(name, options) is wanted
