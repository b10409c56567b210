"""Weights of other frameworks: eleven formats."""

import copy
import io
import pickle
import pickletools
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fedlayers as fl
from benchmarks import foreign
from diagnostics.load_weights import load_clients, load_weights
from diagnostics.measure import diagnose
from fedlayers.cli.app import main
from fl_core.models import weights
from tests.conftest import every_other, refuses
from tests.made import Wired

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FOREIGN = """
import torch
from torch import nn
class FedAvgCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
        self.head = nn.Linear(12, 2)
        self.scale = nn.Parameter(torch.rand(2))
        self.register_buffer("kept", torch.rand(3))
        self.register_buffer("passing", torch.rand(3), persistent=False)
        self.note = Note()
    def forward(self, x):
        return self.head(self.base(x).flatten(1)) * self.scale
class Note:
    pass
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def pickled():
    """Two modules of a class that exists while they are made and stored."""
    module = types.ModuleType("pfllib_models")
    exec(FOREIGN, module.__dict__)
    for name in ("FedAvgCNN", "Note"):
        getattr(module, name).__module__ = "pfllib_models"
    sys.modules["pfllib_models"] = module
    return module.FedAvgCNN(), module.FedAvgCNN()


def equal(a, b):
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_formats_give_the_weights_bit_for_bit():
    net, fresh = pickled()
    state = net.state_dict()
    save_file({k: v.contiguous() for k, v in state.items()}, "plain.safetensors")
    Path("hf").mkdir()
    save_file({k: v.contiguous() for k, v in state.items()}, "hf/model.safetensors")
    Path("hf/config.json").write_text("{}")
    np.savez("flower.npz", *[v.numpy() for v in state.values()])
    np.savez("named.npz", **{k: v.numpy() for k, v in state.items()})
    stored = {
        "plain.pt": state,
        "old.pt": {"net": net},
        "nvflare.pt": OrderedDict(model=state, train_conf={"train": {"model": "x"}}),
        "pfllib.pt": net,
        "fl4health.pkl": {"model": net, "round": 3},
    }  # fmt: skip
    for name, what in stored.items():
        torch.save(what, name, _use_new_zipfile_serialization=name != "old.pt")
    del sys.modules["pfllib_models"]
    names = [*stored, "plain.safetensors", "hf", "flower.npz", "named.npz"]
    for name in names:
        for tensor in fresh.state_dict().values():
            tensor.fill_(7)
        passing = fresh.passing.clone()
        loaded = load_weights(name, into=fresh, by_position=name == "flower.npz")
        assert equal(loaded, net), name
        assert torch.equal(fresh.passing, passing)


@pytest.fixture(scope="module")
def _families():
    """Import what families need once. That takes longer than all of them, and no test is charged for it."""
    pytest.importorskip("peft")
    foreign.load(next(iter(foreign.FAMILIES)))


@pytest.mark.usefixtures("_families")
@pytest.mark.parametrize("family", every_other(foreign.FAMILIES, of=9))
def test_checkpoints_of_others_load_as_right_or_are_refused(family):
    table = pd.read_csv(foreign.TABLE, index_col="family")
    outcome, _ = foreign.load(family)
    assert outcome == table["outcome"][family] != "silent"


@pytest.mark.parametrize("start", ["", "module.", "encoder.backbone."])
def test_tied_tensors_prefixes_and_named_states(start):
    net = Wired(lambda m, x: m.b(m.a(x)), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    net.b.weight = net.a.weight
    state = {f"{start}{k}": v for k, v in net.state_dict().items() if k != "b.weight"}
    other = {name: tensor + 1 for name, tensor in state.items()}
    both = {"student": other, "teacher": state}
    flat = {f"{k}.{name}": t for k, part in both.items() for name, t in part.items()}
    torch.save(flat, "flat.pt")
    with refuses("student.*teacher.*by key"):
        load_weights("flat.pt", into=net)
    fresh = copy.deepcopy(net)
    nn.init.zeros_(fresh.a.weight)
    assert equal(load_weights("flat.pt", into=fresh, key="teacher"), net)
    assert fresh.b.weight is fresh.a.weight


def test_what_is_read_of_a_file_is_unmistakable():
    """An unknown key has its nearest name, tensors that are left out are named, and no two names become one."""
    net = nn.Linear(3, 2)
    state, one = net.state_dict(), torch.ones(1)
    torch.save({"model": state, "ema": state}, "both.pt")
    with refuses("'emaa'.* did you mean 'ema'"):
        load_weights("both.pt", into=net, key="emaa")
    torch.save({**state, "more": {"w": one}, "masks": [one]}, "more.pt")
    with pytest.warns(UserWarning, match="tensors in more, masks are left out"):
        load_weights("more.pt", into=net)
    torch.save({"a\n": one, r"a\n": one + 1}, "names.pt")
    with refuses("names that differ by more than control characters"):
        load_weights("names.pt", into=net)
    torch.save({"w": torch.quantize_per_tensor(one, 0.1, 0, torch.quint8)}, "q.pt")
    with refuses("it has a torch.QUInt8Storage, not plain numbers"):
        load_weights("q.pt", into=net)


class Renamed(nn.Linear):
    """A linear layer that reads the names that its weights once had."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel").T
        super()._load_from_state_dict(state_dict, prefix, *args)


class Vectors(nn.Module):
    """A module with a buffer of each type, which a view can be loaded into."""

    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("held", torch.zeros(2, 3, dtype=dtype))


VIEWS = {
    "transposed": lambda t: t.T.contiguous().T,
    "strided": lambda t: torch.stack([t, t + 1], -1)[..., 0],
    "expanded": lambda t: t[:1].expand(2, 3),
    "conjugate": lambda t: t.to(torch.complex64).mul(1 + 2j).conj(),
    "negative": lambda t: t.to(torch.complex64).mul(1 + 2j).conj().imag,
    "part of a storage": lambda t: torch.cat([t.flatten(), t.flatten()])[6:].view(2, 3),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_have_the_values_of_torch(view):
    stored = VIEWS[view](torch.arange(6.0).view(2, 3))
    torch.save({"held": stored, "other": stored}, "view.pt")
    right = torch.load("view.pt")["held"]
    loaded = load_weights("view.pt", into=Vectors(stored.dtype))
    assert torch.equal(loaded.held, right.resolve_conj().resolve_neg())
    assert torch.equal(loaded.held, stored.resolve_conj().resolve_neg())


NORMS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "BatchNorm2d": lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)),
    "BatchNorm3d": lambda: nn.BatchNorm3d(4),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
}


@pytest.mark.parametrize("start", ["", "module."])
@pytest.mark.parametrize("kind", NORMS)
def test_batch_counters_may_be_missing(kind, start):
    net, source, fresh = NORMS[kind](), NORMS[kind](), NORMS[kind]()
    for tensor in net.state_dict().values():
        tensor.add_(torch.rand(tensor.shape).to(tensor.dtype))
    state = {k: v for k, v in net.state_dict().items() if "num_batches" not in k}
    source.load_state_dict(state)
    torch.save({start + name: tensor for name, tensor in state.items()}, "old.pt")
    assert equal(load_weights("old.pt", into=fresh), source)


def test_a_module_reads_its_old_names_itself():
    net = Wired(lambda m, x: m.a(x), a=Renamed(3, 2))
    old = {"a.kernel": torch.rand(3, 2), "a.bias": torch.rand(2)}
    torch.save(old, "old.pt")
    loaded = load_weights("old.pt", into=net)
    assert torch.equal(loaded.a.weight, old["a.kernel"].T)
    save_file({f"model.{k}": v for k, v in old.items()}, "old.safetensors")
    loaded = load_weights("old.safetensors", into=copy.deepcopy(net))
    assert torch.equal(loaded.a.weight, old["a.kernel"].T)
    torch.save(old | {"a.other": torch.ones(1)}, "more.pt")
    with refuses("lacks a.weight"):
        load_weights("more.pt", into=net)


def test_weights_that_do_not_fit_change_nothing():
    net = nn.Linear(3, 2)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    torch.save({"weight": torch.ones(2, 3)}, "less.pt")
    torch.save({"weight": torch.ones(2, 4), "bias": torch.ones(2)}, "other.pt")
    torch.save(
        {"weight": torch.ones(1).expand(2, 2**20), "bias": torch.ones(2)}, "vast.pt"
    )
    torch.save([1, 2], "list.pt")
    Path("empty").mkdir()
    Path("empty/.metadata").touch()
    np.savez("objects.npz", a=np.array([object()], dtype=object))
    np.savez("arrays.npz", a=np.ones((2, 3)))
    with zipfile.ZipFile("plain.pt", "w") as file:
        file.writestr("notes.txt", "x")
    torch.save({"epoch": 3, "state_dict": {}}, "nested.pt")
    noise = ("noise.safetensors", "noise.pt", "empty.pt")
    for name in noise:
        Path(name).write_bytes(b"" if name == "empty.pt" else b"not weights at all")
    for name, words in (
        *((name, "file of weights") for name in noise),
        ("nested.pt", "tensors by name; got dict"),
        ("less.pt", "lacks bias"),
        ("other.pt", r"\(2, 4\) in other"),
        ("vast.pt", "more elements than"),
        ("list.pt", "tensors by name; got list"),
        ("empty", "dcp_to_torch_save"),
        ("objects.npz", "must be numbers"),
        ("plain.pt", "no data.pkl"),
        ("missing.pt", "does not exist"),
    ):
        with refuses(words) as caught:
            load_weights(name, into=net)
        assert "\n" not in str(caught.value)
    for path, into in ((net.state_dict(), net), ("less.pt", nn.Linear)):
        with refuses(r"must be .*; got"):
            fl.load_weights(path, into=into)
    for name in ("objects.npz", "arrays.npz"):
        with refuses(r"\.npz"):
            load_weights(name, into=net, by_position=True)
    with refuses("left out for files with names"):
        load_weights("less.pt", into=net, by_position=True)
    torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0)


def test_models_of_a_folder_are_found_by_client_and_round():
    Path("out/a").mkdir(parents=True)
    nets = {(r, c): nn.Linear(3, 2) for r in (1, 2) for c in ("a", "b")}
    for (number, client), net in nets.items():
        torch.save(net.state_dict(), f"out/client_{client}_{number}.pt")

    def build():
        return nn.Linear(3, 2)

    loaded = load_clients("out", "client_{client}_{round}.pt", build)
    assert {(r, c) for r, models in loaded.items() for c in models} == set(nets)
    assert all(equal(loaded[r][c], net) for (r, c), net in nets.items())
    torch.save(net.state_dict(), "out/a/weights.pt")
    with refuses("run directory; it is a folder of weights"):
        diagnose("out/a")
    patterns = {
        "client.pt": "{client} once",
        "{client}.npz": "fit files",
        "{round}/{client}_{round}.pt": "{round} at most once",
    }
    for pattern, words in patterns.items():
        with refuses(words):
            load_clients("out", pattern, build)


def test_a_tensor_s_own_attributes_are_not_used():
    """A pickle can set attributes on a tensor, such as a method of its own."""
    bad = torch.ones(2, 3)
    bad.clone = "not a method"
    torch.save({"weight": bad, "bias": torch.ones(2)}, "bad.pt")
    net = nn.Linear(3, 2)
    load_weights("bad.pt", into=net)
    assert isinstance(net.weight, Tensor)
    assert torch.equal(net.weight, torch.ones(2, 3))


def test_the_command_measures_a_folder_of_models(capsys, monkeypatch):
    Path("own_net.py").write_text(
        "from torch import nn\ndef net(n_classes): return nn.Linear(10, n_classes)\n"
    )
    monkeypatch.syspath_prepend(".")
    Path("server").mkdir()
    for client in ("cleveland", "va"):
        torch.save(nn.Linear(10, 5).state_dict(), f"server/{client}_4.pt")
    words = "diagnose --models server --model own_net:net --dataset heart --metrics cka"
    main([*words.split(), "--pattern", "{client}_{round}.pt", "--out", "rows"])
    printed = capsys.readouterr().out
    assert "round 4" in printed
    assert "without a model in this round: hungarian, switzerland" in printed
    for name in ("best", "3"):
        with pytest.raises(SystemExit):
            main([*words.split(), "--pattern", "{client}_{round}.pt", "--round", name])
        message = capsys.readouterr().err.strip()
        assert f"unknown round of --models '{name}': known: 4, last" in message


def test_limits_of_pickles_hold_for_all_of_a_file_together(monkeypatch):
    content = pickle.dumps([1, {"a": (2.5, True)}], protocol=2)
    n_opcodes = len([*pickletools.genops(content)])
    monkeypatch.setattr(weights, "OPCODES", 2 * n_opcodes)
    parser = weights._Parser(0)
    for _ in range(2):
        assert parser.parse(io.BytesIO(content)) == [1, {"a": (2.5, True)}]
    with refuses(f"more than {2 * n_opcodes:,} opcodes", ValueError):
        parser.parse(io.BytesIO(content))
    names = b"".join(b"cown.module\n%c\n" % letter for letter in b"abb")
    content = b"](" + names + b"e."
    for most in (2, 1):
        monkeypatch.setattr(weights, "NAMES", most)
        parser = weights._Parser(0)
        if most == 2:
            assert len(parser.parse(io.BytesIO(content))) == 3
            assert parser.names == {"own.module.a", "own.module.b"}
        else:
            with refuses("more than 1 different names", ValueError):
                parser.parse(io.BytesIO(content))
