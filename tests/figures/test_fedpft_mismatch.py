"""Origin, Probe and Match accuracy: what each trains, from where it starts, and what they say of a known mismatch."""

import copy

import torch
from torch import nn

from figures.fedpft import mismatch
from figures.fedpft.mismatch import MATCH, ORIGIN, PROBE, right_after
from fl_core.seeds import torch_generator

D, C = 6, 3


def data(n=90, seed=0):
    """Three classes along three directions."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % C
    return 0.3 * torch.randn(n, D, generator=g) + 2.0 * nn.functional.one_hot(y, D), y


def wrong_head():
    """Right but for the order of its classes."""
    head = nn.Linear(D, C)
    with torch.no_grad():
        head.weight.copy_(torch.eye(C, D).roll(1, 0))
        head.bias.zero_()
    return head


def test_a_mismatched_classifier_is_wrong_and_right_after_a_map_or_when_new():
    train, test, head = data(), data(60, 1), wrong_head()
    before = copy.deepcopy(head.state_dict())
    shares = {
        kind: right_after(kind, train, test, head).double().mean()
        for kind in mismatch.KINDS
    }
    assert shares == {ORIGIN: 0.0, PROBE: 1.0, MATCH: 1.0}
    torch.testing.assert_close(dict(head.state_dict()), before, rtol=0, atol=0)
    assert all(p.requires_grad and p.grad is None for p in head.parameters())


def test_training_is_sgd_with_momentum_in_a_drawn_order(
    monkeypatch,
):
    monkeypatch.setattr(mismatch, "BATCH", 20)
    (x, y), head = data(50), wrong_head()
    head.requires_grad_(False)
    model = nn.Sequential(nn.Linear(D, D), head)
    new, velocity = copy.deepcopy(model), {}
    for epoch in range(3):
        order = torch.randperm(50, generator=torch_generator(4, "probe", epoch))
        for some in order.split(20):
            loss = nn.functional.cross_entropy(new(x[some]), y[some])
            parameters = list(new[0].parameters())
            grads = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for k, (p, g) in enumerate(zip(parameters, grads, strict=True)):
                    velocity[k] = 0.9 * velocity[k] + g if k in velocity else g
                    p -= 0.1 * velocity[k]
    mismatch.fit(model, (x, y), 0.1, 3, 4)
    torch.testing.assert_close(model.state_dict(), new.state_dict())
