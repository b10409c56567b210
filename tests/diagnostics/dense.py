"""Small networks in float64, samples for them, and dense Hessian blocks of their layers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_core.layers import Layer
from fl_core.training.losses import build
from tests.made import Wired

CE, FOCAL = build("cross_entropy"), build("player_focal")


def pair(*shape, classes=3, tokens=0):
    """Return samples of a shape, or of token ids, with labels."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    if tokens:
        x = torch.randint(tokens, shape, generator=g)
    return x, torch.randint(classes, shape[:1], generator=g)


def mlp(activation=nn.ReLU, classes=3):
    """Return three linear layers on samples of four numbers."""
    parts = [nn.Linear(4, 6), activation(), nn.Linear(6, 5), activation()]
    return nn.Sequential(*parts, nn.Linear(5, classes)).double()


def images(activation=nn.GELU):
    """Return a long output grid, then a short one; grouped; a normalisation between."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, padding=1),
        nn.GroupNorm(2, 4),
        activation(),
        nn.Conv2d(4, 4, 3, stride=2, groups=2),
        activation(),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).double()


def tokens():
    """Return an embedding with padding, layer norm, products over tokens and softmax attention."""

    def run(m, given):
        x = m.norm(m.embed(given))
        return m.head(F.gelu(m.wide((m.mix(x) @ x.mT).softmax(-1) @ x)).mean(1))

    parts = {"embed": nn.Embedding(5, 3, padding_idx=0), "norm": nn.LayerNorm(3)}
    parts |= {"mix": nn.Linear(3, 3), "wide": nn.Linear(3, 8), "head": nn.Linear(8, 3)}
    return Wired(run, **parts).double()


def loose(model):
    """Return a layer for each module that owns parameters, in the model's own order."""
    blocks = {}
    for name, _ in model.named_parameters():
        blocks.setdefault(name.rpartition(".")[0], []).append(name)
    return [Layer(o, tuple(names), output=o) for o, names in blocks.items()]


def block(model, data, names, loss=CE, gauss_newton=False):
    """Return the dense Hessian block of the mean loss in the named parameters together.

    With ``gauss_newton`` the network is replaced by its linear approximation.
    """
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    tensors |= {n: b.detach().clone() for n, b in model.named_buffers()}

    def of(vector):
        parts = vector.split([tensors[n].numel() for n in names])
        new = {
            n: v.reshape(tensors[n].shape) for n, v in zip(names, parts, strict=True)
        }
        return functional_call(model, {**tensors, **new}, (data[0],))

    mkldnn = torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
    with mkldnn, sdpa_kernel(SDPBackend.MATH):
        flat = torch.cat([tensors[n].reshape(-1) for n in names])
        if gauss_newton:
            start, slope = of(flat), torch.autograd.functional.jacobian(of, flat)
            of = lambda vector: start + slope @ (vector - flat)  # noqa: E731
        both = lambda vector: loss(of(vector), data[1])  # noqa: E731
        return torch.autograd.functional.hessian(both, flat)
