"""Model options from a file load nothing: no path, no address, and no folder is used."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedlayers.backends.base import (
    Event,
    Job,
    Result,
    Results,
    Watch,
    WorkerPool,
    no_progress,
)
from fedlayers.studies.jobs import TrainingJob, train
from fl_core import exported_model, models, runner, tree
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.models.registry import check_stored
from fl_core.records.store import Run, checkpoint_name
from fl_core.storage.files import Folder, sha, sign
from fl_core.stored_models import load_models
from tests.conftest import CONFIG

ROOT = Path(__file__).parents[2]
VIT = "timm:vit_tiny_patch16_224"
SIZES: dict[str, Any] = {"depth": 1, "embed_dim": 12, "num_heads": 2, "patch_size": 3}
SHORT = CONFIG.with_keys(
    rounds=2, stack="off", model=VIT, model_options=SIZES, participation=1.0
)


@pytest.fixture
def address() -> Iterator[tuple[str, list[str]]]:
    """A server on the loopback, and what it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET  # noqa: N815

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/weights.pth", asked
        server.shutdown()


def hostile(url: str, folder: Path) -> list[dict[str, Any]]:
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


def edited(path: Path, **changes: Any) -> None:
    """Change a run's configuration, digests and all, as whoever hands it on can."""
    folder = Folder(path)
    folder.write("config.json", sign({**folder.read_signed("config.json"), **changes}))
    manifest, data = folder.read_signed("manifest.json"), folder.read("config.json")
    manifest["files"]["config.json"] = {"sha256": sha(data), "bytes": len(data)}
    folder.write("manifest.json", sign(manifest))
    name = checkpoint_name(1)
    folder.write(name, sign({**folder.read_signed(name), "run": Run(path).id}))


def test_a_changed_run_cannot_load_anything(
    tmp_path: Path, address: tuple[str, list[str]]
) -> None:
    url, asked = address
    path = tmp_path / "run"
    runner.run(
        SHORT.with_keys(dataset="digits", clients=2, max_samples=60),
        path,
        progress=False,
        until=1,
    )
    for options in hostile(url, tmp_path / "cache"):
        edited(path, model_options={**SIZES, **options})
        began = time.monotonic()
        with pytest.raises(UsageError, match="|".join(options)):
            runner.resume(path, progress=False)
        if options.keys() == {"pretrained"}:  # trained weights take their place
            assert load_models(path, which="global")
        else:
            with pytest.raises(UsageError, match="|".join(options)):
                load_models(path, which="global")
        assert time.monotonic() - began < 10
    assert not asked
    assert not (tmp_path / "cache").exists()


def test_a_changed_run_cannot_download_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that asks for a download uses local files, and fetches none."""
    import torchvision.datasets.utils as fetching

    path = tmp_path / "run"
    runner.run(
        CONFIG.with_keys(dataset="digits", clients=2, max_samples=60, model="mlp"),
        path,
        progress=False,
        until=1,
    )
    edited(path, dataset="mnist", data_root=str(tmp_path / "cache"), download=True)
    (tmp_path / "cache").mkdir()
    asked: list[str] = []
    monkeypatch.setattr(
        fetching, "_urlretrieve", lambda url, *given, **named: asked.append(url)
    )
    with pytest.raises(UsageError, match="mnist") as refused:
        runner.resume(path, progress=False)
    assert not asked, refused.value


def test_a_changed_export_cannot_load_anything(tmp_path: Path) -> None:
    path = tmp_path / "run"
    runner.run(
        SHORT.with_keys(dataset="digits", clients=2, max_samples=60, rounds=1),
        path,
        progress=False,
    )
    made = exported_model.export(path, tmp_path / "model", which="global")
    about = json.loads((tmp_path / "model.json").read_text())
    about.pop("sha256")
    for options in hostile("http://127.0.0.1:9/x", tmp_path / "cache"):
        changed = {
            **about,
            "model": {**about["model"], "options": {**SIZES, **options}},
        }
        Folder(tmp_path).write("model.json", sign(changed))
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


TINY: tuple[str, dict[str, Any]] = (VIT, SIZES)
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("torchvision:squeezenet1_1", {"dropout": 0.1}),
    ("mlp", {}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("torchvision:resnet18", {"pretrained": True}), ("torchvision:resnet18", {"weights": "DEFAULT"}),
    ("timm:hf-hub:timm/resnet18", {}), ("timm:local-dir:/etc", {}), ("timm:resnet18./etc/passwd", {}),
    ("mlp", {"sizes": "/etc/passwd"}), ("torch.hub:load", {"repo_or_dir": "a/b", "model": "c"}),
]  # fmt: skip


@pytest.mark.slow
def test_while_a_model_is_built_nothing_outside_the_packages_is_touched(
    tmp_path: Path,
) -> None:
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


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (
            {
                "width": 3,
                "rate": 0.5,
                "norm": True,
                "sizes": [3, [4, 5]],
                "depth": None,
                "pretrained": False,
            },
            True,
        ),
        ({"width": "a/b"}, False),
        ({"width": {"url": 1}}, False),
        ({"sizes": [3, "a"]}, False),
        ({"sizes": [1] * 20_000}, False),
        ({"sizes": [[[[[[1]]]]]]}, False),
        ({"pretrained": True}, False),
        ({"weights": 1}, False),
        ({"use_cache": True}, False),
        ({"rate": float("inf")}, False),
    ],
)
def test_a_file_chooses_sizes_and_rates_of_own_code_too(
    options: dict[str, Any], allowed: bool
) -> None:
    if allowed:
        check_stored("a file", "mine:net", options)
    else:
        with pytest.raises(UsageError, match=rf"{next(iter(options))}.*--allow-code"):
            check_stored("a file", "mine:net", options)


def test_what_the_user_says_again_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net_of_options.py").write_text(
        "from torch import nn\n"
        "def net(shape, n_classes, activation='relu'):\n"
        "    return nn.Sequential(nn.Linear(shape[0], 4), nn.Tanh(), nn.Linear(4, n_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    config = RunConfig(
        dataset="heart",
        model="net_of_options:net",
        model_options={"activation": "tanh"},
        rounds=2,
    )
    runner.run(config, "run", progress=False, until=1)
    with pytest.raises(UsageError, match="activation=tanh"):
        runner.resume("run", allow_code=["net_of_options:net"], progress=False)
    with pytest.raises(UsageError, match="activation=tanh"):
        runner.resume(
            "run", allow_code=["net_of_options:net", "activation=relu"], progress=False
        )
    assert (
        runner.resume(
            "run", allow_code=["net_of_options:net", "activation=tanh"], progress=False
        ).done
        == 2
    )


# --- pretrained weights ------------------------------------------------------------------------------------------


@pytest.fixture
def pretrained(tmp_path: Path) -> tuple[Path, RunConfig]:
    """A file of weights, and a run that its user has start from it."""
    path = tmp_path / "weights.safetensors"
    save_file(
        tree.state_dict(models.build(VIT, (1, 8, 8), 4, seed=7, options=SIZES)), path
    )
    return path, SHORT.with_keys(
        dataset="digits",
        clients=2,
        max_samples=60,
        model_options={**SIZES, "pretrained": str(path)},
    )


def test_a_run_keeps_its_pretrained_weights_and_never_loads_them_again(
    tmp_path: Path, pretrained: tuple[Path, RunConfig]
) -> None:
    path, config = pretrained
    whole = runner.run(config, tmp_path / "whole", progress=False)
    runner.run(config, tmp_path / "half", progress=False, until=1)
    start = Run(tmp_path / "half").start()
    assert start is not None
    assert torch.equal(
        start["blocks.0.attn.qkv.weight"],
        tree.state_dict(runner.assemble(config).model)["blocks.0.attn.qkv.weight"],
    )
    path.unlink()
    again = runner.resume(tmp_path / "half", progress=False)
    assert tree.digest(again.server.trees["model"]) == tree.digest(
        whole.server.trees["model"]
    )
    loaded, _ = load_models(tmp_path / "half", which="global")
    assert tree.digest(tree.state_dict(next(iter(loaded.values())))) == tree.digest(
        whole.server.trees["model"]
    )
    made = exported_model.export(tmp_path / "half", tmp_path / "model", which="global")
    assert "pretrained" not in made.about["model"]["options"]


def test_workers_get_pretrained_weights_as_tensors(
    tmp_path: Path, pretrained: tuple[Path, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = pretrained
    run = TrainingJob(tmp_path / "job", config).with_weights()
    assert run.start is not None
    monkeypatch.setattr(
        "fl_core.models.external._pretrained_arguments",
        lambda full, name, wanted: {"pretrained": bool(wanted)},
    )
    run.carry_out()
    assert Run(tmp_path / "job").start() is not None


class Elsewhere(WorkerPool[Any]):
    """Processes that take works, and do nothing."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def results(self, works: Iterable[Job], watch: Watch = no_progress) -> Results:
        for work in works:
            assert isinstance(work, TrainingJob)
            self.sent.append(work.start)
            yield Result(work)

    def has_room(self, running: int) -> bool:
        return False

    def begin(self, work: Job) -> Any: ...

    def events(self, running: dict[Any, Job]) -> list[Event]:
        return []

    def words(self, running: dict[Any, Job]) -> str:
        return ""


def test_whole_runs_go_to_other_processes_with_their_weights(
    tmp_path: Path, pretrained: tuple[Path, RunConfig]
) -> None:
    _, config = pretrained
    runs = [
        TrainingJob(tmp_path / "a", config),
        TrainingJob(tmp_path / "b", config.with_keys(model_options=SIZES)),
    ]
    place = Elsewhere()
    train(runs, place)
    first, second = place.sent
    assert first.keys() == tree.state_dict(runner.assemble(config).model).keys()
    assert second is None
