"""A stored configuration cannot make a command read files or folders that the user has not named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from fedlayers.cli.app import main
from fedlayers.studies.jobs import TrainingJob
from fl_core import models, runner, tree
from fl_core.config import KEYS, Mark, RunConfig, marked
from fl_core.errors import CorruptError, UsageError
from fl_core.records.store import Run
from fl_core.storage.files import Folder, sign
from tests.conftest import CONFIG

SMALL = CONFIG.with_keys(
    dataset="digits", clients=2, max_samples=60, model="mlp", rounds=2
)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of weights for the small model."""
    path = tmp_path / "weights.safetensors"
    save_file(tree.state_dict(models.build("mlp", (1, 8, 8), 10, seed=7)), path)
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A file of data."""
    draw = np.random.default_rng(0)
    path = tmp_path / "own.npz"
    x, y = draw.normal(size=(60, 3)).astype(np.float32), draw.integers(0, 2, 60)
    np.savez(path, x=x, y=y, client=np.repeat(["a", "b"], 30))
    return path


def not_begun(path: Path, found: RunConfig, **changes: Any) -> Path:
    """A run that was killed when its configuration was all that there was, and whose file somebody changed."""
    runner.run(found, path, progress=False, until=1)
    for each in path.iterdir():
        if each.name != "config.json":
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    folder = Folder(path)
    folder.write("config.json", sign({**folder.read_signed("config.json"), **changes}))
    return path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that readers of weights, data and plans were asked for."""
    from fl_core import initial, plan
    from fl_core.data import files, loading

    asked: list[str] = []

    def refused(path: object, *given: object, **named: object) -> Any:
        asked.append(str(path))
        raise AssertionError(f"reads {path}")

    monkeypatch.setattr(initial, "_of_run", refused)
    monkeypatch.setattr(initial, "read", refused)
    monkeypatch.setattr(plan.LayerPlan, "load", refused)
    monkeypatch.setattr(files, "read", refused)
    monkeypatch.setattr(loading.files, "read", refused)
    return asked


def test_every_key_is_judged() -> None:
    """A key whose text is free either has a mark, or is never opened or imported."""
    free = {name for name, key in KEYS.items() if key.hint in (str, str | None)}
    assert {*marked(Mark.FILE), *marked(Mark.CODE), "model", "plan"} <= free
    unread = {"positive", "scale", "impute", "task", "separator", "encoding", "decimal"}
    unread |= {"thousands", "client_column", "label_column", "text_column", "adapt"}
    unread |= {"group_column", "class_weights", "device", "monitor"}
    words = {"batchnorm", "layer_granularity", "optimizer", "loss", "precision"}
    words |= {"client_weights", "stack", "on_divergence"}
    judged = {*marked(Mark.FILE), *marked(Mark.CODE), "model", "plan"}
    assert free == judged | unread | words


@pytest.mark.parametrize("key", ["init", "dataset"])
def test_a_changed_configuration_reads_nothing(
    key: str, tmp_path: Path, opened: list[str]
) -> None:
    """It reads only weights and data that the command names."""
    secret = tmp_path / "secret.npz"
    path = not_begun(tmp_path / "run", SMALL, **{key: str(secret)})
    with pytest.raises(UsageError, match=f"--{key} {secret}"):
        runner.resume(path, progress=False)
    with pytest.raises(UsageError, match=f"--{key} {secret}"):
        runner.resume(path, progress=False, **{key: str(tmp_path / "other.npz")})
    assert not opened


def test_a_changed_plan_is_not_read(tmp_path: Path, opened: list[str]) -> None:
    """A run has its plan in its configuration and names no file."""
    path = not_begun(
        tmp_path / "run",
        SMALL.with_keys(algorithm="fedper"),
        plan="/etc/passwd",
        given=None,
    )
    with pytest.raises(CorruptError, match=r"/etc/passwd"):
        runner.resume(path, progress=False)
    assert not opened


def test_a_changed_data_root_is_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the flag and the environment name the folder."""
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    (root / "seen").touch()
    monkeypatch.delenv("FEDLAYERS_DATA_ROOT", raising=False)
    path = not_begun(tmp_path / "run", SMALL, dataset="mnist", data_root=str(root))
    with pytest.raises(UsageError, match="--data-root") as refused:
        runner.resume(path, progress=False)
    assert "seen" not in str(refused.value)
    with pytest.raises(UsageError, match="seen"):
        runner.resume(path, data_root=root, progress=False)
    monkeypatch.setenv("FEDLAYERS_DATA_ROOT", str(other))
    with pytest.raises(UsageError, match=f"below {other}"):
        runner.resume(path, progress=False)


def test_a_run_that_has_not_begun_resumes_by_repeating_the_flag(
    tmp_path: Path, weights: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as without the kill, also within a study."""
    monkeypatch.chdir(tmp_path)
    for client in "ab":
        Path(f"{client}.csv").write_text(
            "age,label\n" + "\n".join(f"{k},{k % 2}" for k in range(30))
        )
    for name, found, flags in (
        (
            "init",
            SMALL.with_keys(init="weights.safetensors"),
            ["--init", "weights.safetensors"],
        ),
        (
            "table",
            RunConfig(dataset="own.npz", rounds=2, stack="off"),
            ["--dataset", "own.npz"],
        ),
        (
            "tables",
            RunConfig(dataset="b.csv,a.csv", rounds=2, stack="off"),
            ["--dataset", "b.csv", "a.csv"],
        ),
    ):
        whole = runner.run(found, tmp_path / f"whole-{name}", progress=False)
        path = not_begun(tmp_path / name, found)
        with pytest.raises(SystemExit):
            main(["resume", str(path)])
        main(["resume", str(path), *flags])
        last = Run(path).checkpoint("last").server
        assert tree.digest(last.trees["model"]) == tree.digest(
            whole.server.trees["model"]
        )
        job = not_begun(tmp_path / f"job-{name}", found)
        TrainingJob(
            job, found
        ).carry_out()  # a study names its files by its own configuration
        assert Run(job).rounds[-1:] == [2]


def test_a_begun_run_needs_no_flag(tmp_path: Path, weights: Path, table: Path) -> None:
    """It has its weights, and checks the digest of its data."""
    for name, found in (
        ("init", SMALL.with_keys(init=str(weights))),
        ("table", RunConfig(dataset=str(table), rounds=2)),
    ):
        runner.run(found, tmp_path / name, progress=False, until=1)
        weights.unlink(missing_ok=True)
        assert runner.resume(tmp_path / name, progress=False).done == 2
