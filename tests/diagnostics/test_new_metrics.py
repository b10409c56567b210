"""Stable rank, disagreement of outputs, swapped layers and saved features, by definition."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from diagnostics.measure import diagnose, diagnose_features
from fl_core.run.costs import count_flops
from tests.conftest import every_other, on_first_use, refuses
from tests.made import mlp

timm = on_first_use("timm")

torch.manual_seed(0)
X, Y = torch.randn(40, 5), torch.arange(40) % 3
DATA = {name: (X + k, Y) for k, name in enumerate("abc")}


net = partial(mlp, 5, 8, 3, norm=True)
MODELS = {name: net(seed=k) for k, name in enumerate(DATA)}


def values(metric, **how):
    frame = diagnose(MODELS, DATA, metric, **how).frame
    keys = ["client", "client_b", "layer", "variant"]
    return dict(zip(map(tuple, frame[keys].values), frame["value"], strict=True))


def test_stable_rank_is_that_of_the_singular_values():
    measured = values("weight_spectrum")
    for name, model in MODELS.items():
        w = model[0].weight.detach().double().numpy()
        v = np.ones(5)
        for _ in range(3000):  # to the direction of the longest image, by powers
            v = w.T @ (w @ v) / np.linalg.norm(v)
        v /= np.linalg.norm(v)
        longest = np.linalg.norm(w @ v)
        rank = (w**2).sum() / longest**2
        assert measured[name, "", "0", "stable_rank"] == pytest.approx(rank, rel=1e-9)
        assert measured[name, "", "0", "spectral_norm"] == pytest.approx(longest)
    noise = nn.Linear(300, 500, bias=False)
    nn.init.normal_(noise.weight)
    frame = diagnose(noise, (torch.randn(9, 300), Y[:9]), "weight_spectrum")
    rank, expected, _ = frame.frame["value"]
    assert rank == pytest.approx(expected, rel=0.05)


def spectrum(layer, x):
    frame = diagnose(layer, (x, Y[: len(x)]), "weight_spectrum").frame
    frame = frame[frame["layer"] == frame["layer"].iloc[0]]
    return dict(zip(frame["variant"], frame["value"], strict=True))


def test_the_null_of_a_small_matrix_is_that_of_random_ones():
    narrow = nn.Sequential(nn.Linear(7, 1), nn.Linear(1, 3))
    assert spectrum(narrow, torch.randn(9, 7))["noise"] == 1
    draws = torch.randn(4000, 4, 30, dtype=torch.float64)
    ranks = draws.square().sum((1, 2)) / torch.linalg.matrix_norm(draws, 2) ** 2
    null = spectrum(nn.Linear(30, 4), torch.randn(9, 30))["noise"]
    assert null == pytest.approx(float(ranks.mean()), rel=0.03)


def test_a_transposed_convolution_has_a_row_for_each_output():
    layer = nn.ConvTranspose1d(4, 6, 3, groups=2, bias=False)
    rows = torch.zeros(6, 2, 3)
    for k in range(6):  # output k reads the two inputs of its group
        rows[k] = layer.weight[2 * (k // 3) : 2 * (k // 3) + 2, k % 3].detach()
    wide = nn.Conv1d(2, 6, 3, bias=False)
    wide.weight.data = rows
    other = spectrum(nn.Sequential(wide, nn.Flatten()), torch.randn(9, 2, 5))
    assert spectrum(nn.Sequential(layer, nn.Flatten()), torch.randn(9, 4, 3)) == other


def test_disagreement_counts_other_predictions():
    measured = values("output_disagreement", options={"probe": (X, Y)})
    with torch.no_grad():
        p = {name: m.eval()(X).softmax(1) for name, m in MODELS.items()}
    for a, b in (("a", "b"), ("a", "c"), ("b", "c")):
        differ = float((p[a].argmax(1) != p[b].argmax(1)).double().mean())
        distance = float((p[a] - p[b]).abs().sum(1).mean()) / 2
        assert measured[a, b, "3", "classes"] == pytest.approx(differ)
        assert measured[a, b, "3", "probabilities"] == pytest.approx(distance, rel=1e-5)
        f, g = (p[n].argmax(1).bincount(minlength=3).double() / len(X) for n in (a, b))
        assert measured[a, b, "3", "chance"] == pytest.approx(1 - float(f @ g))


def test_a_swap_is_the_loss_with_the_other_layer():
    second = {name: net(seed=9 + k) for k, name in enumerate(MODELS)}
    measured = values("layer_swap", options={"layer_swap": {"second": second}})

    def loss(model, name):
        with torch.no_grad():
            return float(cross_entropy(model.eval()(DATA[name][0]), Y))

    for name, model in MODELS.items():
        own_loss = loss(model, name)
        for layer, parts in (("0", (0, 1)), ("3", (3,))):
            rises = []
            for other in [m for n, m in MODELS.items() if n != name] + [second[name]]:
                swapped = copy.deepcopy(model)
                for k in parts:
                    swapped[k].load_state_dict(other[k].state_dict())
                rises.append(loss(swapped, name) - own_loss)
            swap, again = measured[name, "", layer, "swap"], rises.pop()
            assert swap == pytest.approx(np.mean(rises), abs=1e-5)
            assert measured[name, "", layer, "second_seed"] == pytest.approx(
                again, abs=1e-5
            )
    same = diagnose(dict.fromkeys("ab", net()), (X, Y), "layer_swap").frame
    assert same["value"].abs().max() < 1e-6


class Branching(nn.Sequential):
    """A chain whose pass depends on values, so that torch.func.vmap refuses it."""

    def forward(self, x):
        output = super().forward(x)
        return output if output.sum() < 1e9 else x


def test_layers_before_a_swapped_one_are_computed_once():
    """With K clients and L equal layers, layer k costs k + K (L - k) layers in place of K L.

    A few samples more pass each model once, which looks for a softmax at its end.
    """
    chains = {n: [nn.Linear(5, 5) for _ in range(8)] for n in "abcd"}
    one, counted = len(X) * 2 * 5**2, []
    for kind, swaps in (
        (nn.Sequential, 28 + 4 * 36),
        (Branching, 28 + 4 * 36 + 4 * 64),
    ):
        models = {name: kind(*chain) for name, chain in chains.items()}
        with count_flops(models["a"]) as counter:
            frame = diagnose(models, (X, Y), "layer_swap").frame
        assert counter.total == pytest.approx(4 * (8 + swaps) * one, rel=0.02)
        counted.append(frame["value"].to_numpy())
    assert counted[0] == pytest.approx(counted[1], abs=1e-6)


def test_saved_features_give_the_values_of_their_models():
    metrics = ["cka", "svcca", "procrustes", "linear_probe", "separability"]
    with torch.no_grad():
        saved = {
            n: {"0": m.eval()[:2](X).numpy(), "3": m(X).numpy()}
            for n, m in MODELS.items()
        }
    how = {"options": {"probe": (X, Y)}}
    of_models = diagnose(MODELS, (X, Y), metrics, **how)
    of_features = diagnose_features(saved, Y * 10**9 - 7, metrics)
    for metric in metrics:
        a, b = (r.values(metric).values for r in (of_models, of_features))
        assert b == pytest.approx(a, rel=1e-4, abs=1e-4)
    with refuses("features alone"):
        diagnose_features(saved, Y, "grad_norm")
    for features, metric, words in (
        ({"a": {"x": X, "y": X[:3]}}, "cka", "same samples"),
        ({"a": X}, "cka", "'a': features must be"),
        ({"a": {"x": np.array(["u", "v"])}}, "cka", "'a': .*numbers"),
        (saved, "linear_probe", "must have y"),
    ):
        with refuses(words):
            diagnose_features(features, None, metric)


FAMILIES = """
test_resnet test_byobnet test_convnext test_efficientnet test_maxvit test_coatnet test_nfnet test_vit
test_vit_relpos test_mambaout lcnet_050 mobilenetv3_small_050 mobilevit_xxs ghostnet_050 dla46_c
edgenext_xx_small efficientformerv2_s0 efficientvit_b0 mixer_s32_224 dpn48b efficientvit_m0 regnetx_002
efficientformer_l1 repghostnet_050 hrnet_w18_small eva02_tiny_patch14_224 visformer_tiny pvt_v2_b0 hgnetv2_b0
pit_ti_224 poolformer_s12 cs3darknet_s legacy_seresnet18 skresnet18 gcvit_xxtiny xcit_nano_12_p16_224
deit_tiny_patch16_224 convit_tiny
"""


@pytest.mark.parametrize("name", every_other(FAMILIES.split(), of=40))
def test_a_network_of_each_family_of_timm_passes_the_default_metrics(name):
    net = timm.create_model(name, num_classes=3)
    pictures = torch.randn(2, *net.default_cfg["input_size"])
    frame = diagnose(net, (pictures, Y[:2]), budget=9).frame
    assert "ok" in set(frame["status"])
