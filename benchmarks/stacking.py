"""Benchmark of the steps of stacked perceptrons: written out, as in training, and by torch.func."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks.pairs import Measured, compare
from benchmarks.training import TINY, federation, repeat
from fl_core import batched, tree
from fl_core.task import assemble
from fl_core.training.losses import CrossEntropy
from fl_core.tree import Tree

PAIRS = 25
REPEATS = 20
CLIENTS, SAMPLES, LOSS = 4, 192, CrossEntropy()


def by_vmap(pairs: int = PAIRS) -> list[Measured]:
    """The steps of S3 and heart by torch.func.vmap against the same written out, in CPU time."""
    found = []
    for name, features in (("S3", 10), ("heart", 13)):
        written, forward, whole = sides(features)
        for what, work in (
            ("vmap of the forward pass", forward),
            ("vmap of the gradient", whole),
        ):
            one, other = (partial(repeat, each, REPEATS) for each in (work, written))
            found.append(
                compare(name, what, one, "written out", other, at_most=1, pairs=pairs)
            )
    return found


def sides(features: int) -> tuple[Callable[[], Tree], ...]:
    """Return a round's steps of all clients in three ways: written out, with vmap, and with vmap of the gradient.

    Args:
        features: of a sample.
    """
    data = federation(CLIENTS, SAMPLES, (features,), classes=5)
    model, size = assemble(TINY, data=data).model, int(TINY.training.batch_size or 1)
    operations = batched._perceptron(model)
    assert operations is not None
    start = {
        name: torch.stack([value] * CLIENTS)
        for name, value in tree.state_dict(model).items()
    }
    x, y = (
        torch.stack([getattr(client.train, part) for client in data.clients]).split(
            size, 1
        )
        for part in "xy"
    )
    shares = torch.full((CLIENTS, size), 1 / size)
    logits = vmap(lambda params, x: functional_call(model, params, (x,)))
    gradient = vmap(
        grad(
            lambda params, x, y, share: (
                LOSS.per_sample(functional_call(model, params, (x,)), y) * share
            ).sum()
        )
    )

    def after(
        forward: Callable[[Tree, Tensor], Tensor], params: Tree, x: Tensor, y: Tensor
    ) -> None:
        losses = LOSS.per_sample(forward(params, x).flatten(0, 1), y.flatten())
        losses.view_as(shares).backward(shares)

    def direct(params: Tree, x: Tensor, y: Tensor) -> None:
        found = gradient(
            {name: param.detach() for name, param in params.items()}, x, y, shares
        )
        for name, param in params.items():
            param.grad = found[name]

    def descend(backward: Callable[[Tree, Tensor, Tensor], None]) -> Tree:
        params = {name: value.clone().requires_grad_() for name, value in start.items()}
        optimizer = torch.optim.SGD(params.values(), lr=0.01, fused=True)
        for batch in zip(x, y, strict=True):
            backward(params, *batch)
            optimizer.step()
            optimizer.zero_grad()
        return tree.clone(params)

    written = partial(after, lambda params, x: batched._forward(operations, params, x))
    return tuple(
        partial(descend, each) for each in (written, partial(after, logits), direct)
    )


JOBS = {"vmap": by_vmap}
