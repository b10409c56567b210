"""The model with prompts: its attention against PyTorch's, its parts against the paper's counts."""

import pytest
import torch
from torch import nn

from fl_core import models, tree
from fl_core.algorithms import find
from fl_core.algorithms.base import read_config
from fl_core.models.extended import (
    Exits,
    Prompted,
    Transform,
    TwoHeads,
    with_optional_blocks,
)
from tests.conftest import TOY, network

D = 6


def transform(heads=1, **options):
    torch.manual_seed(0)
    return Transform(D, heads, **options).double()


def numbers(*shape, seed=1):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("prompts", [0, 1, 5])
def test_a_feature_attends_as_in_pytorchs_attention(heads, prompts):
    ours = transform(heads)
    theirs = nn.MultiheadAttention(D, heads, batch_first=True).double()
    parts = ours.query, ours.key, ours.value
    features, tokens = numbers(7, D), numbers(prompts, D, seed=2)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    z = torch.cat([features[:, None], tokens.expand(7, -1, -1)], 1)
    wanted, weights = theirs(z, z, z, average_attn_weights=False)
    prompt_tokens = tokens if prompts else None
    torch.testing.assert_close(
        ours(features, prompt_tokens), wanted[:, 0], rtol=0, atol=1e-12
    )
    attention = ours.attention(features, prompt_tokens)
    torch.testing.assert_close(attention, weights[:, :, 0], rtol=0, atol=1e-12)


TABLE_10 = {  # FedPFT, for 100 classes: extractor, attention, classifier, projection
    "resnet8": (1_235_401, 263_168, 25_700, 32_896, 23.48),
    "resnet10": (4_911_564, 1_050_624, 51_300, 65_664, 22.49),
}


@pytest.mark.parametrize("name", TABLE_10)
def test_parts_are_as_large_as_in_the_papers_table(name):
    shape, kind = (3, 32, 32), find("fedpft")
    options = {"seed": 0, "shape": shape, "n_classes": 100}
    built = kind.wrap_model(
        models.build(name, shape, 100), read_config(kind, {}), **options
    )
    *wanted, ratio = TABLE_10[name]
    counts = [
        sum(t.numel() for t in tree.named_tensors(built.get_submodule(part)).values())
        for part in ("body", "transform", "head", "projection")
    ]
    assert counts == wanted
    assert 100 * (counts[1] + counts[3]) / (counts[0] + counts[2]) == pytest.approx(
        ratio, abs=0.005
    )
    assert built.prompts.shape[0] == 10
    assert built.contrast_prompts.shape[0] == 20


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_added_classifiers_have_the_type_of_the_models_own(kind):
    heads = TwoHeads(nn.Identity(), nn.Linear(3, 2, dtype=kind))
    example = models.example(TOY.shape)
    blocks = with_optional_blocks(network("vit"), example).to(kind)
    example = example.to(kind)
    exits = Exits(blocks, (1,), ensemble=True, seed=0, example=example)
    for model in (heads, exits):
        assert {tensor.dtype for tensor in model.state_dict().values()} == {kind}
    assert exits(example).dtype == kind


def test_an_added_classifier_is_on_the_device_of_the_models_own():
    heads = TwoHeads(nn.Identity(), nn.Linear(3, 2, device="meta"))
    assert {tensor.device.type for tensor in heads.state_dict().values()} == {"meta"}


def test_prompts_have_no_projection_unless_it_is_wanted():
    parts = nn.Identity(), nn.Linear(D, 2), transform()
    plain = Prompted(*parts, {})
    assert (plain.projection, plain.direct) == (None, False)
    assert (plain.prompts, plain.contrast_prompts) == (None, None)
    assert Prompted(*parts, {}, project=True).projection.in_features == D
