"""Models of several inputs and of other outputs: they are trained, measured, and given back as they came."""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedlayers as fl
from fl_core import tree
from fl_core.data.loading import pair_of
from tests.conftest import on_first_use, refuses
from tests.made import Wired

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
hf = on_first_use("transformers")


class Two(nn.Module):
    """Two inputs, one of them token ids."""

    def __init__(self, outputs=3):
        super().__init__()
        self.table, self.fc = nn.Embedding(9, 4), nn.Linear(6, outputs)

    def forward(self, x, tokens):
        return self.fc(torch.cat([x, self.table(tokens).mean(1)], 1))


class OfDict(Two):
    """It takes the dict itself."""

    def forward(self, inputs):
        return {"logits": super().forward(inputs["x"], inputs["tokens"])}


def network(kind=Two, **how):
    torch.manual_seed(0)
    return kind(**how)


torch.manual_seed(1)
X, TOKENS, Y = torch.randn(60, 2), torch.randint(9, (60, 5)), torch.arange(60) % 3
HOW = {"rounds": 1, "clients": 2}


ROWS = [{"x": X[k], "tokens": TOKENS[k], "labels": int(Y[k])} for k in range(60)]


class Table:
    """Samples as those of the package datasets: lists by name, and ``label``."""

    column_names = ("x", "tokens", "label")

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, k):
        x, tokens, label = ROWS[k].values()
        return {"x": x.tolist(), "tokens": tokens.tolist(), "label": label}


def run(data, model, **how):
    return fl.run(data=data, model=model, **{**HOW, **how})


def test_inputs_of_every_form_train_the_same_model():
    inputs = {"x": X, "tokens": TOKENS}
    first = run(((X, TOKENS), Y), network()).models["client_0"]
    for data, kind in (
        ((inputs, Y), Two),
        ({**inputs, "labels": Y}, Two),
        (TensorDataset(X, TOKENS, Y), Two),
        (DataLoader(ROWS, batch_size=7, shuffle=True), Two),
        (Table(), Two),
        ((inputs, Y), OfDict),
    ):
        model = run(data, network(kind)).models["client_0"]
        assert type(model) is kind
        torch.testing.assert_close(
            model.state_dict(), first.state_dict(), rtol=0, atol=0
        )
    assert first(X, TOKENS).shape == (60, 3)
    result = run(((X, TOKENS), X.sum(1)), network(outputs=1), task="regression")
    assert "r2" in result.scores


@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
def test_objects_of_the_package_datasets_are_samples():
    library, collate = import_module("datasets"), hf.default_data_collator
    dataset = library.Dataset.from_list([Table()[k] for k in range(60)])
    shown, wanted = (
        dataset.with_format("torch"),
        run(Table(), network()).models["client_0"],
    )
    for data in (dataset, shown, DataLoader(shown, collate_fn=collate)):
        trained = run(data, network()).models["client_0"]
        assert tree.distance(trained.state_dict(), wanted.state_dict()) == 0
    fl.diagnose(
        network(), library.DatasetDict(a=dataset, b=dataset), metrics="grad_norm"
    )
    for data, message in (
        (dataset.to_iterable_dataset(), "must have a length"),
        (library.DatasetDict(train=dataset, test=dataset), "no splits of one dataset"),
    ):
        with refuses(message):
            run(data, network())


def test_a_run_of_several_inputs_is_stored_and_measured(tmp_path):
    pair = ((X, TOKENS), Y)
    data, out = dict.fromkeys("ab", pair), tmp_path / "run"
    result = run(data, network(), out=str(out), clients=None)
    values = [
        fl.diagnose(result, metrics="grad_norm"),
        fl.diagnose(result.models, data, "grad_norm"),
    ]
    for report in values:
        assert list(report.values("grad_norm").index) == ["table", "fc"]
    models, _ = fl.load_models(str(out), which="global", data=data, model=network())
    assert models["a"](X, TOKENS).shape == (60, 3)
    with refuses("one input"):
        fl.export(
            str(out), tmp_path / "a.safetensors", client="a", data=data, model=network()
        )
    for wrong, words in (
        ({"a": pair, "b": (X, Y)}, "form|inputs"),
        ({"a": pair, "b": ((TOKENS, X), Y)}, "inputs of client 'a'"),
        (((X, TOKENS[:3]), Y), "one entry a sample"),
    ):
        with refuses(words):
            run(wrong, network(), clients=None)
    with refuses("model of your own"):
        run(pair, "mlp")
    with refuses("Pass out="):
        fl.diagnose(run(data, network(), clients=None), model="personal")
    assert fl.diagnose(result, metrics="layer_tuning")
    with refuses(r"fl\.tsne"):
        fl.diagnose(result, metrics="tsne")


def test_a_run_s_models_know_the_names_of_their_classes():
    """Labels may be the names, and indices where the names are words."""
    plain = dict.fromkeys("ab", (X, Y))
    for names in ((10, 20, 35), ("a", "b", "c")):
        data = dict.fromkeys("ab", (X, np.array(names)[Y.numpy()]))
        models = run(data, "mlp", clients=None).models
        assert models["a"].label_names == tuple(map(str, names))
        by_name = fl.diagnose(models, data, "grad_norm")
        wrong = dict.fromkeys("ab", (X, np.array(["d", "9"] * 30)))
        with refuses("class of the run"):
            fl.diagnose(models, wrong, "grad_norm")
        for model in models.values():
            del model.label_names
        by_index = fl.diagnose(models, plain, "grad_norm")
        assert by_name.values("grad_norm").equals(by_index.values("grad_norm"))
        with refuses("must be" if names[0] == 10 else "words"):
            fl.diagnose(models, data, "grad_norm")


class Extra(nn.Module):
    """It returns features next to its logits, in a tuple or in a dict."""

    def __init__(self, names=None):
        super().__init__()
        self.hidden, self.fc, self.names = nn.Linear(2, 4), nn.Linear(4, 3), names

    def forward(self, x):
        hidden = self.hidden(x)
        both = self.fc(hidden), hidden
        return dict(zip(self.names, both, strict=True)) if self.names else both


def test_which_of_several_outputs_counts_is_said():
    diagnose = partial(fl.diagnose, metrics="grad_norm")
    for use in (lambda model, data, **how: run(data, model, **how), diagnose):
        with pytest.warns(UserWarning, match=r"2 tensors: the first, \[3\]"):
            use(Extra(), (X, Y))
        use(Extra(("logits", "z")), (X, Y))
        with pytest.warns(UserWarning, match="two passes .* differ"):
            use(
                nn.Sequential(nn.Linear(2, 3), Wired(lambda m, x: F.dropout(x))), (X, Y)
            )
        with refuses("got a dict of out, z"):
            use(Extra(("out", "z")), (X, Y))
        with pytest.warns(UserWarning, match="takes a, b, and not alike"):
            use(
                Wired(towers, f=nn.Linear(2, 3)), (X, Y), loss=lambda z, y: z["a"][:, 0]
            )


def towers(m, x):
    return {"a": m.f(x), "b": m.f(-x), "alike": m.f(x) @ m.f(-x).T}


def test_parts_of_a_table_that_do_not_belong_together_are_refused():
    x, y = pd.DataFrame(X.numpy()), pd.Series(Y.numpy())
    for data, message in (
        ({"a": (x[::-1], y)}, "'a': x and y must have the same index"),
        ({"a": (x, y), "b": (x[[1, 0]], y)}, "'b' must have the columns .* 0, 1"),
        ({"a": (np.ma.masked_less(X.numpy(), 0), Y)}, "must be finite"),
        ({"a": (X.to_sparse(), Y)}, "must be dense"),
        ({1: (X, Y), "1": (X, Y)}, "distinct as text"),
    ):
        with refuses(message):
            run(data, nn.Linear(2, 3), clients=None)
        with refuses(message):
            fl.diagnose(nn.Linear(2, 3), data, "grad_norm")
    model = nn.Linear(2, 3)
    read = [fl.diagnose(model, pair, "grad_norm").frame for pair in ((x, y), (X, Y))]
    assert read[0].equals(read[1])


def test_a_model_of_several_outputs_is_exported(tmp_path):
    out, arguments = str(tmp_path / "run"), {"data": {"a": (X, Y), "b": (X, Y)}}
    model = run(arguments["data"], Extra(), out=out, clients=None).models["a"].eval()
    fl.export(out, tmp_path / "a.safetensors", model=Extra(), **arguments)
    predicted = fl.predict(tmp_path / "a.safetensors", X, model=Extra())
    assert torch.equal(predicted.logits, model(X)[0])


class Chain(nn.Module):
    """Blocks and a classifier as in timm, for several forms of inputs and outputs."""

    def __init__(self, form, classes=3):
        super().__init__()
        self.form = form
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(7, 7), nn.ReLU()) for _ in range(2))
        )
        self.norm, self.head = nn.LayerNorm(7), nn.Linear(7, classes)

    def forward(self, x=None, tokens=None):
        x = x if tokens is None else torch.cat([x, tokens.float()], 1)
        logits = self.head(self.norm(self.blocks(x)))
        forms = {"tensor": logits, "dict": {"logits": logits, "x": x}}
        return forms.get(self.form, SimpleNamespace(logits=logits))


BOTH = {"x": X, "tokens": TOKENS}
INPUTS = {
    "tensor": (torch.cat([X, TOKENS], 1), Y),
    "tuple": ((X, TOKENS), Y),
    "dict": (BOTH, Y),
    "batch": {**BOTH, "labels": Y},
}
CALLERS = {
    "adapt": {"adapt": "lora:r=2", "algorithm": "fedper"},
    "heads": {"algorithm": "fedrod"},
    "init": {},
    "blocks": {"algorithm": "fedra", "options": {"lora_targets": None}},
    "tuning": {"algorithm": "fedbabu"},
}


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("k", range(4))
def test_the_last_layer_is_found_behind_each_form(caller, k, tmp_path):
    """Inputs and outputs of other forms give the same bits as tensors."""
    forms = ("tensor", ".logits", "dict")
    how = dict(CALLERS[caller])
    if caller == "adapt":
        pytest.importorskip("peft")
    if caller == "init":
        how["init"] = str(tmp_path / "four.pt")
        torch.save(network(Chain, form="", classes=4).state_dict(), how["init"])
    heads = []
    for inputs, form in (("tensor", "tensor"), (list(INPUTS)[k], forms[k % 3])):
        result = run(INPUTS[inputs], network(Chain, form=form), **how)
        heads.append(tree.digest(result.models["client_0"].state_dict()))
    assert heads[0] == heads[1]


def test_samples_as_dicts_are_padded_by_their_mask_or_refused():
    ragged = [{"tokens": [1] * (k % 3 + 1), "labels": k % 3} for k in range(30)]
    masked = [{**row, "attention_mask": [1] * len(row["tokens"])} for row in ragged]
    x, _ = pair_of(masked, "a")
    assert (
        x["tokens"].sum()
        == x["attention_mask"].sum()
        == sum(len(row["tokens"]) for row in ragged)
    )
    for rows, words in (
        (ragged, "one shape; got several for tokens"),
        ([{"text": "a", "label": 0}], "numbers; got words or objects for text"),
    ):
        with refuses(f"client 'a': .*{words}"):
            run({"a": rows, "b": (X, Y)}, "mlp", clients=None)
