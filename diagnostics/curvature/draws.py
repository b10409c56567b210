"""Random perturbations of a module's output for each sample, caused by random perturbations of its parameters.

A module's output for sample n is linear in its parameters, z_n = A_n theta + c_n. A draw u_n has E u_n u_n^T = A_n
A_n^T, so that E u_n^T H u_n = tr(A_n^T H A_n). There are two ways to draw. Either u_n = A_n w_n with random signs w_n.
Or u_n = R_n v_n with R_n R_n^T = A_n A_n^T and random signs v_n in the space of the output. The way with fewer signs is
used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .model import rademacher
from .norms import LARGEST, normalised_input, patches_of

Draw = Callable[[torch.Generator], Tensor]
"""A new draw u, shaped as the module's output."""


def draw_of(module: nn.Module, a: Tensor, weight: bool, bias: bool) -> Draw:
    """Return a function that draws output perturbations for one call of ``module`` on ``a`` [n, ...].

    See :func:`.has_formula`.

    Args:
        weight, bias: which of the module's parameters are perturbed.
    """
    a = a.detach()
    if isinstance(module, nn.Embedding):
        return _draw_embedding(module, a)
    if isinstance(module, nn.Linear):
        if a.ndim > 2:
            tokens = a.reshape(len(a), 1, -1, a.shape[-1]).transpose(2, 3)
            draw = _draw_shared(
                lambda rows: tokens[rows],
                tuple(tokens.shape),
                module.out_features,
                weight,
                bias,
                a,
            )
            return lambda g: (
                draw(g)
                .squeeze(1)
                .transpose(1, 2)
                .reshape(*a.shape[:-1], module.out_features)
            )
        size = (a.square().sum(1, keepdim=True) * weight + bias).sqrt()
        return lambda g: size * rademacher(a.new_empty(len(a), module.out_features), g)
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        patches, grid = patches_of(module, a)
        one = patches(slice(0, 1)).shape
        draw = _draw_shared(
            patches,
            (len(a), *one[1:]),
            module.out_channels // module.groups,
            weight,
            bias,
            a,
        )
        return lambda g: draw(g).reshape(len(a), module.out_channels, *grid)
    return _scale_and_shift(module, a, weight, bias)


def _draw_shared(
    patches: Callable[[slice], Tensor],
    shape: tuple[int, ...],
    out: int,
    weight: bool,
    bias: bool,
    like: Tensor,
) -> Draw:
    """Return draws [n, g, out, L] for a convolution or a linear module.

    A weight [out, i] per group is applied to patches [n, g, i, L], and a bias per channel.
    """
    n, groups, inner, length = shape
    if length <= inner:
        return _by_root(patches, shape, out, weight, bias, like)
    piece = max(1, LARGEST // (groups * inner * max(length, out)))

    def by_signs(generator: torch.Generator) -> Tensor:
        parts = []
        for start in range(0, n, piece):
            rows = slice(start, min(start + piece, n))
            size = (rows.stop - start, groups, out)
            u = like.new_zeros(*size, length)
            if weight:
                u = rademacher(like.new_empty(*size, inner), generator) @ patches(rows)
            parts.append(
                u + rademacher(like.new_empty(*size, 1), generator) if bias else u
            )
        return torch.cat(parts)

    return by_signs


def _by_root(
    patches: Callable[[slice], Tensor],
    shape: tuple[int, ...],
    out: int,
    weight: bool,
    bias: bool,
    like: Tensor,
) -> Draw:
    """Return the draws of :func:`_draw_shared` from R [n, g, L, L], a root of the patches' Gram matrix.

    Channels are perturbed independently.
    """
    n, groups, inner, length = shape
    piece = max(1, LARGEST // (groups * inner * length))
    roots = []
    for start in range(0, n, piece):
        u = patches(slice(start, start + piece)).double()
        gram = u.mT @ u * weight + float(bias)
        # of semidefinite matrices, in double precision: what is added to the diagonal is far below the rounding of z
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        diagonal += (
            diagonal.amax(-1, keepdim=True) * 1e-10 + torch.finfo(gram.dtype).tiny
        )
        root, failed = torch.linalg.cholesky_ex(gram)
        if bool(failed.any()):
            values, vectors = torch.linalg.eigh(gram)
            root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        roots.append(root.to(like.dtype))
    transposed = torch.cat(roots).mT
    return lambda g: rademacher(like.new_empty(n, groups, out, length), g) @ transposed


def _scale_and_shift(module: Any, a: Tensor, weight: bool, bias: bool) -> Draw:
    """Return draws for a module that scales and shifts its normalised input."""
    values, keep = normalised_input(module, a)
    shape = [size if dim in keep or dim == 0 else 1 for dim, size in enumerate(a.shape)]

    def draw(generator: torch.Generator) -> Tensor:
        u = (
            values * rademacher(a.new_empty(shape), generator)
            if weight
            else torch.zeros_like(values)
        )
        return u + rademacher(a.new_empty(shape), generator) if bias else u

    return draw


def _draw_embedding(module: nn.Embedding, a: Tensor) -> Draw:
    """Return draws for an embedding table. Equal tokens of a sample share a row."""
    index = a.reshape(len(a), -1)
    first = (index.unsqueeze(2) == index.unsqueeze(1)).to(torch.uint8).argmax(2)
    kept = (
        torch.ones_like(index)
        if module.padding_idx is None
        else (index != module.padding_idx)
    )

    def draw(generator: torch.Generator) -> Tensor:
        rows = rademacher(
            module.weight.new_empty(*index.shape, module.embedding_dim), generator
        )
        rows = rows.gather(1, first.unsqueeze(2).expand_as(rows)) * kept.unsqueeze(2)
        return rows.reshape(*a.shape, module.embedding_dim)

    return draw
