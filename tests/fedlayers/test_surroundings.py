"""What surrounds a call, and odd modules: the usual values, a note, or one line at the start."""

import pytest
import torch
from torch import nn

import fedlayers as fl
from tests.conftest import refuses
from tests.made import Wired, mlp, normal

X, Y = (
    normal(40, 4),
    torch.arange(40) % 3,
)
DATA = dict.fromkeys("ab", (X, Y))


class Float64:
    def __enter__(self):
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_):
        assert torch.get_default_dtype() == torch.float64
        torch.set_default_dtype(torch.float32)


CALLS = {
    "run": lambda model: fl.run(data=DATA, model=model, rounds=1).scores,
    "diagnose": lambda model: (
        fl.diagnose(model, DATA, ["grad_norm", "hessian_trace"]).frame
    ),
    "tsne": lambda model: fl.tsne(model, DATA, iterations=250),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, Float64])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_gives_the_same_in_each_context(call, around):
    plain, model = CALLS[call](mlp(4, 6, 3)), mlp(4, 6, 3)
    with around():
        result = CALLS[call](model)
    assert str(result) == str(plain)


def looked_up(m, x):
    return m.head(m.table(x.long().abs() % 9).mean(1))


def nets():
    listed = Wired(lambda m, x: m.out(m.parts[0]["a"](x)), out=nn.Linear(6, 3))
    listed.parts = [{"a": nn.Linear(4, 6)}]
    exported = torch.export.export(mlp(4, 6, 3), (X[:2],)).module()
    unused = Wired(lambda m, x: m.out(x), out=nn.Linear(4, 3), lazy=nn.LazyLinear(3))
    table = nn.Embedding(9, 5, sparse=True)
    return {
        "sparse": (Wired(looked_up, table=table, head=nn.Linear(5, 3)), None, ""),
        "listed": (listed, UserWarning, "parts holds modules that are never trained"),
        "scripted": (
            nn.Sequential(torch.jit.script(nn.Linear(4, 6)), nn.Linear(6, 3)),
            fl.UsageError,
            "at '0'",
        ),
        "exported": (exported, fl.UsageError, "a GraphModule at ''"),
        "lazy": (unused, fl.UsageError, "'lazy.weight' .* once"),
        "meta": (mlp(4, 6, 3).to("meta"), fl.UsageError, "'0.weight' .* numbers"),
    }


@pytest.mark.parametrize("kind", nets())
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", None])
def test_odd_modules_give_a_value_or_one_line(kind, optimizer):
    model, wanted, words = nets()[kind]

    def call():
        if optimizer is None:
            return fl.diagnose(model, DATA, ["grad_norm"])
        return fl.run(data=DATA, model=model, optimizer=optimizer, rounds=1)

    if wanted is fl.UsageError:
        with refuses(words):
            call()
    elif wanted:
        with pytest.warns(wanted, match=words):
            call()
    else:
        assert call() is not None
    assert kind != "sparse" or model.table.sparse
