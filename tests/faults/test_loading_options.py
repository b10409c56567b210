"""Model options from a file load nothing: no path, no address, and no folder is used."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedlayers.studies.jobs import TrainingJob
from fl_core import exported_model, models, runner, tree
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.models.registry import check_stored
from fl_core.records.store import Run
from fl_core.stored_models import load_models
from tests.conftest import CONFIG
from tests.faults.injected import edit, forge

ROOT = Path(__file__).parents[2]
VIT = "timm:vit_tiny_patch16_224"
SIZES = {"depth": 1, "embed_dim": 12, "num_heads": 2, "patch_size": 3}
SHORT = CONFIG.with_keys(
    rounds=2, stack="off", model=VIT, model_options=SIZES, participation=1.0
)


@pytest.fixture
def address():
    """A server on the loopback, and what it was asked for."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET  # noqa: N815

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/weights.pth", asked
        server.shutdown()


DIGITS = SHORT.with_keys(dataset="digits", clients=2, max_samples=60)


def hostile(url, folder):
    cfg = {"url": url, "hf_hub_id": None, "num_classes": 3}
    return [
        {"pretrained": True, "pretrained_cfg": cfg, "cache_dir": str(folder)},
        {"pretrained_cfg": cfg, "cache_dir": str(folder), "pretrained": True},
        {"pretrained": "true"},
        {"pretrained": "/etc/passwd"},
        {"pretrained": 1},
        {"checkpoint_path": "/etc/passwd"},
        {"checkpoint_path": 3},
        {"pretrained_cfg_overlay": {"file": "/etc/passwd"}},
        {"features_only": True},
        {"img_size": url},
        {"global_pool": str(folder)},
    ]


# --- the attack ------------------------------------------------------------------------------------------------


def test_a_changed_run_cannot_load_anything(tmp_path, address):
    url, asked = address
    path = tmp_path / "run"
    runner.run(DIGITS, path, progress=False, until=1)
    for options in hostile(url, tmp_path / "cache"):
        edit(path, model_options={**SIZES, **options})
        began, named = time.monotonic(), "|".join(options)
        with pytest.raises(UsageError, match=named):
            runner.resume(path, progress=False)
        if options.keys() == {"pretrained"}:  # trained weights take their place
            assert load_models(path, which="global")
        else:
            with pytest.raises(UsageError, match=named):
                load_models(path, which="global")
        assert time.monotonic() - began < 10
    assert not asked
    assert not (tmp_path / "cache").exists()


def test_a_changed_run_cannot_download_data(tmp_path, monkeypatch):
    """A run that asks for a download uses local files, and fetches none."""
    import torchvision.datasets.utils as fetching

    path, cache, asked = tmp_path / "run", tmp_path / "cache", []
    config = DIGITS.with_keys(model="mlp", model_options={})
    runner.run(config, path, progress=False, until=1)
    edit(path, dataset="mnist", data_root=str(cache), download=True)
    cache.mkdir()
    monkeypatch.setattr(fetching, "_urlretrieve", lambda *url: asked.append(url))
    with pytest.raises(UsageError, match="mnist") as refused:
        runner.resume(path, progress=False)
    assert not asked, refused.value


def test_a_changed_export_cannot_load_anything(tmp_path):
    path = tmp_path / "run"
    runner.run(DIGITS.with_keys(rounds=1), path, progress=False)
    made = exported_model.export(path, tmp_path / "model", which="global")
    for options in hostile("http://127.0.0.1:9/x", tmp_path / "cache"):
        wrong = {"options": {**SIZES, **options}}
        forge(tmp_path / "model.json", lambda found, w=wrong: found["model"].update(w))
        with pytest.raises(UsageError, match="|".join(options)):
            exported_model.read(made.path).model()


WATCHED = """
import json, os, sys, sysconfig
from fl_core import models
from fl_core.errors import UsageError
from fl_core.models.registry import check_stored

cases = json.loads(sys.argv[1])
for name, shape, options in cases:  # what is imported lazily is imported now
    try:
        models.build(name, shape, 3, options={k: v for k, v in options.items() if k in ("depth", "embed_dim")})
    except UsageError:
        pass
inside = [os.path.realpath(path) for path in (*sysconfig.get_paths().values(), os.getcwd() + "/fl_core")]
inside += ["/proc/", "/sys/", "/dev/"]
seen = []

def hook(event, arguments):
    if event.startswith("socket.") or event.startswith("urllib."):
        seen.append([event, str(arguments)[:200]])
    elif event in ("open", "os.mkdir", "os.listdir", "os.scandir", "os.rename", "os.remove", "shutil.copyfile"):
        path = arguments[0]
        if isinstance(path, (str, bytes)):
            path = os.path.realpath(os.fsdecode(path))
            if not any(path.startswith(each) for each in inside):
                seen.append([event, path])
        elif event == "open":
            seen.append([event, repr(path)])

sys.addaudithook(hook)
refused = []
for name, shape, options in cases:
    try:
        check_stored("a file", name, options)
        models.build(name, shape, 3, options=options)
        refused.append(False)
    except UsageError:
        refused.append(True)
checked = list(seen)
try:
    open("/etc/hostname").close()
except OSError:
    pass
print(json.dumps({"seen": checked, "control": len(seen) - len(checked), "refused": refused}))
"""


TINY = (VIT, SIZES)
OTHERS = [
    ("torchvision:squeezenet1_1", {"dropout": 0.1}),
    ("mlp", {}),
]
REFUSED = [
    ("torchvision:resnet18", {"pretrained": True}), ("torchvision:resnet18", {"weights": "DEFAULT"}),
    ("timm:hf-hub:timm/resnet18", {}), ("timm:local-dir:/etc", {}), ("timm:resnet18./etc/passwd", {}),
    ("mlp", {"sizes": "/etc/passwd"}), ("torch.hub:load", {"repo_or_dir": "a/b", "model": "c"}),
]  # fmt: skip


@pytest.mark.slow
def test_while_a_model_is_built_nothing_outside_the_packages_is_touched(
    tmp_path,
):
    """An audit hook sees no socket, and only paths of installed packages."""
    shape = (3, 24, 24)
    wrong = [
        (VIT, {**SIZES, **options})
        for options in hostile("http://127.0.0.1:9/x", tmp_path / "cache")
    ]
    honest, wrong = [TINY, *OTHERS], [*wrong, *REFUSED]
    cases = json.dumps([(name, shape, options) for name, options in (*honest, *wrong)])
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, cases],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["seen"] == []
    assert found["control"] == 1, "the hook does see a path"
    assert found["refused"] == [False] * len(honest) + [True] * len(wrong)


# --- what a file may choose ---


@pytest.mark.tries(15)
def test_a_file_chooses_sizes_and_rates_of_own_code_too():
    fine = {"width": 3, "rate": 0.5, "norm": True, "sizes": [3, [4, 5]], "depth": None}
    check_stored("a file", "mine:net", {**fine, "pretrained": False})
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
        with pytest.raises(UsageError, match=rf"{name}.*--allow-code"):
            check_stored("a file", "mine:net", {name: value})


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
    runner.run(config, "run", progress=False, until=1)
    for more in ([], ["activation=relu"]):
        with pytest.raises(UsageError, match="activation=tanh"):
            runner.resume("run", allow_code=[net, *more], progress=False)
    allowed = [net, "activation=tanh"]
    assert runner.resume("run", allow_code=allowed, progress=False).done == 2


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
    whole = runner.run(config, tmp_path / "whole", progress=False)
    runner.run(config, half, progress=False, until=1)
    start = Run(half).start()
    assert start is not None
    first = tree.state_dict(runner.assemble(config).model)
    assert torch.equal(start[name], first[name])
    path.unlink()
    again = runner.resume(half, progress=False)
    (loaded, *_) = load_models(half, which="global")[0].values()
    trees = [each.server.trees["model"] for each in (whole, again)]
    digests = {tree.digest(each) for each in (*trees, tree.state_dict(loaded))}
    assert len(digests) == 1
    made = exported_model.export(half, tmp_path / "model", which="global")
    assert "pretrained" not in made.about["model"]["options"]


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
