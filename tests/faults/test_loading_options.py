"""Model options from a file load nothing: no path, no address, and no folder is used."""

import socket

import pytest
import torch
from safetensors.torch import save_file

from fedlayers.decision.jobs import TrainingJob
from fl_core import models, tree
from fl_core.config import RunConfig
from fl_core.records.store import Run
from fl_core.run import exported_model, runner
from fl_core.run.own_code import check_allowed_options
from fl_core.run.restore import load_models
from tests.conftest import CONFIG, refuses
from tests.faults.injected import edit, forge

VIT = "timm:vit_tiny_patch16_224"
SIZES = {"depth": 1, "embed_dim": 12, "num_heads": 2, "patch_size": 3}
DIGITS = CONFIG.with_keys(
    rounds=2, stack="off", model=VIT, model_options=SIZES, dataset="digits", clients=2
)
DIGITS = DIGITS.with_keys(max_samples=60)
URL = "http://127.0.0.1:9/weights.pth"
CFG = {"url": URL, "hf_hub_id": None, "num_classes": 3}
HOSTILE = [
    {"pretrained": True, "pretrained_cfg": CFG, "cache_dir": "cache"},
    {"pretrained": "true"},
    {"pretrained": "/etc/passwd"},
    {"checkpoint_path": "/etc/passwd"},
    {"pretrained_cfg_overlay": {"file": "/etc/passwd"}},
    {"features_only": True},
    {"img_size": URL},
    {"global_pool": "cache"},
]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No test asks for an address or makes the folder of a cache."""
    requests = []
    monkeypatch.chdir(tmp_path)
    for owner, name in ((socket.socket, "connect"), (socket, "getaddrinfo")):
        monkeypatch.setattr(owner, name, lambda *to, **how: requests.append(to))
    yield
    assert not requests
    assert not (tmp_path / "cache").exists()


# --- the attack ------------------------------------------------------------------------------------------------


def test_a_changed_run_or_export_cannot_load_anything(tmp_path):
    path = tmp_path / "run"
    runner.run(DIGITS, path, until=1)
    exported = exported_model.export(path, tmp_path / "model", which="global", round=1)
    for options in HOSTILE:
        wrong, named = {**SIZES, **options}, "|".join(options)
        edit(path, model_options=wrong)
        with refuses(named):
            runner.resume(path)
        if options.keys() == {"pretrained"}:  # trained weights take their place
            assert load_models(path, which="global")
        else:
            with refuses(named):
                load_models(path, which="global")
        about = tmp_path / "model.json"
        forge(about, lambda found, w=wrong: found["model"].update(options=w))
        with refuses(named):
            exported_model.read(exported.path).model()


def test_a_changed_run_cannot_download_data(tmp_path):
    """A run that asks for a download uses local files, and fetches none."""
    path = tmp_path / "run"
    config = DIGITS.with_keys(model="mlp", model_options={})
    runner.run(config, path, until=1)
    (tmp_path / "data").mkdir()
    edit(path, dataset="mnist", data_root=str(tmp_path / "data"), download=True)
    with refuses("mnist"):
        runner.resume(path)


# --- what a file may choose ---


def test_a_file_chooses_sizes_and_rates_of_own_code_too():
    fine = {"width": 3, "rate": 0.5, "norm": True, "sizes": [3, [4, 5]], "depth": None}
    check_allowed_options("a file", "mine:net", {**fine, "pretrained": False})
    for name, value in (
        ("width", "a/b"),
        ("width", {"url": 1}),
        ("sizes", [3, "a"]),
        ("sizes", [1] * 20_000),
        ("sizes", [[[[[[1]]]]]]),
        ("pretrained", True),
        ("weights", 1),
        ("use_cache", True),
        ("rate", float("inf")),
    ):
        with refuses(rf"{name}.*allow_code="):
            check_allowed_options("a file", "mine:net", {name: value})


def test_what_the_user_says_again_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "net_of_options.py").write_text(
        "from torch import nn\n"
        "def net(shape, n_classes, activation='relu'):\n"
        "    return nn.Sequential(nn.Linear(shape[0], 4), nn.Tanh(), nn.Linear(4, n_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    net = "net_of_options:net"
    config = RunConfig(dataset="heart", model=net, rounds=2)
    config = config.with_keys(model_options={"activation": "tanh"})
    runner.run(config, "run", until=1)
    for more in ([], ["activation=relu"]):
        with refuses("activation=tanh"):
            runner.resume("run", allow_code=[net, *more])
    allowed = [net, "activation=tanh"]
    assert runner.resume("run", allow_code=allowed).done == 2


# --- pretrained weights ------------------------------------------------------------------------------------------


@pytest.fixture
def pretrained(tmp_path):
    """A file of weights, and a run that its user has start from it."""
    path = tmp_path / "weights.safetensors"
    model = models.build(VIT, (1, 8, 8), 4, seed=7, options=SIZES)
    save_file(tree.state_dict(model), path)
    return path, DIGITS.with_keys(model_options={**SIZES, "pretrained": str(path)})


def test_a_run_keeps_its_pretrained_weights_and_never_loads_them_again(
    tmp_path, pretrained
):
    path, config = pretrained
    half, name = tmp_path / "half", "blocks.0.attn.qkv.weight"
    whole = runner.run(config, tmp_path / "whole")
    runner.run(config, half, until=1)
    start = Run(half).start()
    assert start is not None
    first = tree.state_dict(runner.assemble(config).model)
    assert torch.equal(start[name], first[name])
    path.unlink()
    again = runner.resume(half)
    (loaded, *_) = load_models(half, which="global")[0].values()
    trees = [engine.server.trees["model"] for engine in (whole, again)]
    digests = {tree.digest(weights) for weights in (*trees, tree.state_dict(loaded))}
    assert len(digests) == 1
    exported = exported_model.export(half, tmp_path / "model", which="global")
    assert "pretrained" not in exported.about["model"]["options"]


def test_workers_get_pretrained_weights_as_tensors(tmp_path, pretrained, monkeypatch):
    _, config = pretrained
    run = TrainingJob(tmp_path / "job", config).with_weights()
    assert run.start is not None
    monkeypatch.setattr(
        "fl_core.models.building._pretrained_arguments",
        lambda full, name, wanted: {"pretrained": bool(wanted)},
    )
    run.carry_out()
    assert Run(tmp_path / "job").start() is not None
