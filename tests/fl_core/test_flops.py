"""FLOPs of single operations, against the same written out in matrix products and against definitions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fl_core.run.costs import FORMULAS, count_flops, unfused

torch.manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, requires_grad=True)


def counts(work, *inputs, model=None):
    """FLOPs of the forward and of the backward pass."""
    with count_flops(model or nn.Identity()) as counter:
        out = work(*inputs)
        forward = counter.total
        if out.requires_grad:
            out.sum().backward()
    return forward, counter.total - forward


def written_out(work, *inputs):
    """The same for a function of matrix products alone, by PyTorch's formulas."""
    with FlopCounterMode(display=False) as counter:
        out = work(*inputs)
        forward = counter.get_total_flops()
        out.sum().backward()
    return forward, counter.get_total_flops() - forward


def attend(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def grouped(x, weight, groups, **how):
    """A convolution as one matrix product a group."""
    side = (x.shape[-1] + 2 * how.get("padding", 0) - weight.shape[-1]) // how.get(
        "stride", 1
    ) + 1
    columns = F.unfold(x, weight.shape[-1], **how).unflatten(1, (groups, -1))
    out = torch.stack(
        [weight.flatten(1).chunk(groups)[g] @ columns[:, g] for g in range(groups)], 1
    )
    return out.flatten(1, 2).unflatten(2, (side, side))


def transposed(x, weight, size, **how):
    return F.fold(weight.flatten(1).T @ x.flatten(2), size, weight.shape[-1], **how)


def lstm(x, own):
    into, onto = own.get_parameter("weight_ih_l0"), own.get_parameter("weight_hh_l0")
    h = c = torch.zeros(x.shape[1], own.hidden_size)
    out = []
    for step in x:
        i, f, g, o = (step @ into.T + h @ onto.T).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out.append(h)
    return torch.stack(out)


RNN = nn.LSTM(3, 4, bias=False)
X, D, T = draw(2, 6, 7, 7), draw(6, 1, 3, 3), draw(6, 4, 3, 3)
SAME = {
    "grouped": (
        lambda x, w: F.conv2d(x, w, groups=3),
        lambda x, w: grouped(x, w, 3),
        (X, draw(9, 2, 3, 3)),
    ),
    "depthwise": (
        lambda x, w: F.conv2d(x, w, groups=6, stride=2, padding=1),
        lambda x, w: grouped(x, w, 6, stride=2, padding=1),
        (X, D),
    ),
    "transposed": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        lambda x, w: transposed(x, w, 15, stride=2),
        (X, T),
    ),
    "attention": (
        F.scaled_dot_product_attention,
        attend,
        (draw(2, 3, 5, 8), draw(2, 3, 6, 8), draw(2, 3, 6, 8)),
    ),
    "baddbmm": (
        lambda c, a, b: torch.zeros_like(c).baddbmm_(a, b) + c,
        lambda c, a, b: c + a @ b,
        (draw(2, 3, 5), draw(2, 3, 4), draw(2, 4, 5)),
    ),
    "lstm": (lambda x: RNN(x)[0], lambda x: lstm(x, RNN), (draw(5, 2, 3),)),
}


@pytest.mark.parametrize("name", SAME)
def test_an_operation_counts_as_its_matrix_products(name):
    work, plain, inputs = SAME[name]
    assert torch.allclose(work(*inputs), plain(*inputs), atol=1e-4)
    assert counts(work, *inputs, model=RNN) == written_out(plain, *inputs)


@pytest.mark.parametrize(
    ("work", "shapes", "products"),
    [
        (torch.mv, [(3, 4), (4,)], 12),
        (torch.dot, [(4,), (4,)], 4),
        (nn.Linear(3, 4), [(5, 3)], 60),
        (nn.LSTMCell(3, 4), [(5, 3)], 5 * 4 * 4 * (3 + 4)),
        (nn.GRUCell(3, 4), [(5, 3)], 5 * 3 * 4 * (3 + 4)),
        (nn.Conv1d(4, 6, 3, groups=2), [(2, 4, 9)], 2 * 7 * 6 * 2 * 3),
        (nn.Conv3d(2, 3, 2), [(1, 2, 4, 4, 4)], 27 * 3 * 2 * 8),
    ],
)
def test_forward_passes_by_hand(work, shapes, products):
    def first(*inputs):
        out = work(*inputs)
        return out[0] if isinstance(out, tuple) else out

    assert counts(first, *(draw(*shape) for shape in shapes))[0] == 2 * products


def test_every_kernel_of_attention_has_both_formulas():
    kernels = [
        name for name in dir(torch.ops.aten) if name.startswith("_scaled_dot_product_")
    ]
    q, k, v, grad = (
        torch.empty(2, 3, s, d) for s, d in ((5, 8), (6, 8), (6, 7), (5, 7))
    )
    products = 2 * 3 * 5 * 6 * (8 + 7)
    for name in kernels:
        if "math" in name:  # runs as plain products
            continue
        inputs = (grad, q, k, v) if name.endswith("backward") else (q, k, v)
        flops = FORMULAS[f"aten.{name}"](*inputs, out_val=None)
        assert flops == 2 * products * (2 if name.endswith("backward") else 1), name


@torch.library.custom_op("fedlayers_test::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@pytest.mark.parametrize(
    ("work", "name"),
    [
        (lambda a: torch.linalg.inv(a), "aten.linalg_inv_ex"),
        (lambda a: product(a, a), "fedlayers_test.product"),
        (lambda a: torch.addmv(a[0], a, a[0]), "aten.addmv"),
    ],
)
def test_unknown_products_are_named(work, name):
    with pytest.warns(UserWarning, match=f"without {name}: no formula"):
        counts(work, torch.eye(3))


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.LSTM(2, 2)])
def test_kernels_are_off_for_recurrent_networks_and_other_settings_stay(model, is_on):
    cudnn, onednn = torch.backends.cudnn, torch.backends.mkldnn

    def settings():
        own = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
        return cudnn.enabled, onednn.enabled, *own

    others = {"benchmark": is_on, "deterministic": is_on, "allow_tf32": not is_on}
    with cudnn.flags(is_on, **others), onednn.flags(is_on, allow_tf32=None):
        before = settings()
        with unfused(model):
            kernels = is_on and not isinstance(model, nn.RNNBase)
            assert settings() == (kernels, kernels, *before[2:])
        with unfused(model, allow_tf32=False):
            assert settings() == (kernels, kernels, *before[2:4], False)
        assert settings() == before
