"""Adapters that equal another training: with A the identity, and with nothing shared."""

import pytest
import torch
from torch import nn

from fl_core.models import lora
from fl_core.run.runner import run
from tests.conftest import CONFIG, TOY, network

pytest.importorskip("peft")
ADAPTED = CONFIG.with_keys(adapt="lora:r=2", stack="off", momentum=0.9)


def test_sgd_on_b_is_sgd_on_the_weights_if_a_is_the_identity():
    plain, adapted = network("plain"), network("plain")
    fits = {name: m for name, m in adapted.named_modules() if isinstance(m, nn.Linear)}
    ranks = {name: module.in_features for name, module in fits.items()}
    assert len(set(ranks.values())) > 1
    pattern = tuple(f"{name}:{rank}" for name, rank in ranks.items())
    adapted = lora.adapt(adapted, lora.Lora(1, rank_pattern=pattern), "", seed=0)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name.endswith("weight"))
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_B" in name)
        if "lora_A" in name:
            nn.init.eye_(parameter)
    config = ADAPTED.with_keys(adapt=None)
    one, other = (
        run(config, data=TOY, model=model).server.trees["model"]
        for model in (plain, adapted)
    )
    for name in fits:
        weight = (
            other[f"{name}.base_layer.weight"] + other[f"{name}.lora_B.default.weight"]
        )
        assert (
            float(
                (one[f"{name}.weight"] - plain.state_dict()[f"{name}.weight"])
                .abs()
                .max()
            )
            > 1e-2
        )
        torch.testing.assert_close(one[f"{name}.weight"], weight, rtol=0, atol=1e-5)
