"""Adapters that equal another training: with A the identity, and with nothing shared."""

import pytest
import torch
from torch import nn

from fl_core import tree
from fl_core.models import lora
from fl_core.plan import LayerPlan
from fl_core.runner import assemble, run
from tests.conftest import CONFIG, TOY, network

pytest.importorskip("peft")
ADAPTED = CONFIG.with_keys(adapt="lora:r=2", stack="off", momentum=0.9)


def test_sgd_on_b_is_sgd_on_the_weights_if_a_is_the_identity():
    plain, adapted = network("plain"), network("plain")
    fits = {name: m for name, m in adapted.named_modules() if isinstance(m, nn.Linear)}
    ranks = {name: module.in_features for name, module in fits.items()}
    assert len(set(ranks.values())) > 1
    adapted = lora.inject(
        adapted, fits, 1, 1, 0.0, seed=0, rank_pattern=ranks, alpha_pattern=ranks
    )
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name.endswith("weight"))
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_B" in name)
        if "lora_A" in name:
            nn.init.eye_(parameter)
    config = ADAPTED.with_keys(adapt=None)
    one, other = (
        run(config, data=TOY, model=each, progress=False).server.trees["model"]
        for each in (plain, adapted)
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


def test_a_plan_that_shares_nothing_is_local():
    task = assemble(ADAPTED, data=TOY, model=network("plain"))
    nothing = LayerPlan(task.layers, ())
    config = ADAPTED.with_keys(algorithm="fedper")
    with pytest.warns(UserWarning, match="none of the 5 layers"):
        shared = run(
            config, data=TOY, model=network("plain"), plan=nothing, progress=False
        )
    alone = run(
        config.with_keys(algorithm="local"),
        data=TOY,
        model=network("plain"),
        progress=False,
    )
    for client in range(len(TOY.clients)):
        ours, theirs = (
            shared.models(client)["personal"],
            alone.models(client)["personal"],
        )
        assert tree.digest(ours) == tree.digest(theirs)
        assert float(ours["fc1.lora_B.default.weight"].abs().max()) > 0
