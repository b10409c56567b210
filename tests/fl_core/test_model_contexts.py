"""A block leaves no trace on a model: mode, gradients, buffers, hooks and random state."""

import pytest
import torch

from fl_core.errors import UsageError
from fl_core.model_contexts import preserve_state, set_mode
from tests.networks import snapshot, wired

X = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return wired()


def disturb(model):
    model.eval()
    model.drop.train()
    model.norm.train()
    model.conv.weight.requires_grad_(False)
    model.head.register_forward_hook(lambda m, i, o: None)
    model.head.register_forward_pre_hook(lambda m, i: None)
    model(X).sum().backward()
    model.norm.running_mean = torch.full((3,), 7.0)
    torch.randn(3)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("with_grads", [False, True])
def test_untouched_restores_everything(net, raises, with_grads):
    net.conv.eval()
    net.head.bias.requires_grad_(False)
    kept = net.relu.register_forward_hook(lambda m, i, o: None)
    if with_grads:
        net(X).sum().backward()
    before = snapshot(net)
    try:
        with preserve_state(net):
            disturb(net)
            assert snapshot(net) != before
            if raises:
                raise ArithmeticError
    except ArithmeticError:
        assert raises
    assert snapshot(net) == before
    kept.remove()
    assert not net.relu._forward_hooks


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_set_mode(net, mode):
    net.train(mode == "eval")
    net.drop.eval()
    before = snapshot(net)
    with set_mode(net, mode):
        assert all(module.training == (mode == "train") for module in net.modules())
        net(X)
    assert snapshot(net) == before
    with pytest.raises(UsageError, match="'eval'"), set_mode(net, "evl"):
        pass
