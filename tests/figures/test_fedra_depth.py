"""Clients of unequal depth: stretched patches, a small study that pretrains first, and what lacks its runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d

from figures import items, packing, recipe
from figures.__main__ import main
from figures.fedra import depth
from fl_core import models, rows
from fl_core.models import weights
from tests.figures.conftest import made, page, small

pytestmark = pytest.mark.filterwarnings("ignore:client")


def test_stretched_patches_see_the_means_of_two_by_two() -> None:
    options = {"depth": 2, "embed_dim": 16, "num_heads": 2}
    little = models.build(
        depth.MODEL, (3, 32, 32), 5, options={**options, "patch_size": 8}
    )
    large = models.build(depth.MODEL, (3, 64, 64), 7, options=options)
    large.load_state_dict(depth.doubled(little.state_dict(), 7))
    little.eval(), large.eval()
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        large.forward_features(x), little.forward_features(avg_pool2d(x, 2))
    )
    assert not large(x).any()


def images(path: Path, side: int, classes: int, domains: int) -> str:
    draw = np.random.default_rng(0)
    y = np.arange(20 * domains) % classes
    extra = {
        "domain": np.repeat(np.arange(domains), 20),
        "domain_names": np.array(["sketch", "photo"]),
    }  # not sorted
    x = draw.integers(0, 256, (len(y), side, side, 3), dtype=np.uint8)
    names = np.array([f"class {k}" for k in range(classes)])
    np.savez(path, x=x, y=y, classes=names, **(extra if domains > 1 else {}))
    return str(path)


@pytest.mark.slow
def test_depth_pretrains_runs_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"depth": 4, "embed_dim": 8, "num_heads": 2}
    changes = {"rounds": 2, "batch_size": 8, "eval_every": 1, "checkpoint_every": 2}
    pretrain = {
        "dataset": images(tmp_path / "little.npz", 32, 5, 1),
        "model_options": {**options, "patch_size": 8},
    }
    styles = {
        "dataset": images(tmp_path / "styles.npz", 64, 7, 2),
        "model_options": options,
    }
    runs = {}
    for name in (depth.PRETRAINING, "alllarge", "fedra", "inclusivefl", "fedra_3"):
        config = depth.RUNS[name]
        own = pretrain if name == depth.PRETRAINING else styles
        limited = (
            {"options": {"depths": (4, 2)}}
            if config.federation.options.get("depths") == depth.DEPTHS
            else {}
        )
        runs[name] = config.with_keys(**own, **changes, **limited)
    monkeypatch.setattr(depth, "DEPTHS", (4, 2))
    monkeypatch.setattr(depth, "RUNS", runs)
    item = small(monkeypatch, depth.ITEM, runs)
    main([depth.NAME, "--train", "--seeds", "1", "--out", str(tmp_path)])
    folder = tmp_path / depth.NAME
    assert made(folder) == {f"{name}-0" for name in runs}
    stored = weights.read(folder / depth.WEIGHTS)
    assert stored["head.weight"].shape == (7, 8)
    assert not stored["head.weight"].any()
    header, frame = rows.read(folder / "fedra-0.jsonl")
    assert header["about"]["config"]["init"] == depth.WEIGHTS
    assert set(frame.loc[frame["metric"] == "accuracy", "client"]) == {
        "photo",
        "sketch",
    }
    text = page(depth.NAME, tmp_path)
    assert "| FedRA | 1 |" in text
    assert re.search(r"\| AllLarge lies above FedRA.* \| not comparable ", text)
    assert "FedRA 4, 2; InclusiveFL 4, 2" in text
    assert ": k = 3 " in page("fedra.fig4", tmp_path)
    (
        folder / depth.WEIGHTS
    ).unlink()  # they are not kept with the rows, and made again when a run needs them
    recipe.train(item, folder, only=["fedra"], seeds=2, progress=False)
    again = weights.read(folder / depth.WEIGHTS)
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())
    assert made(folder) >= {"fedra-0", "fedra-1"}


def test_what_lacks_its_runs_after_a_part_was_trained_is_named_and_the_rest_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, there = tmp_path / depth.NAME, items.ROWS / depth.NAME
    part = items.find(depth.NAME).parts(there)["allsmall", 0]
    packing.write(recipe.packed_file(own), [part])
    monkeypatch.setattr(recipe, "train", lambda *_, **__: 0.0)
    main([depth.NAME, "--train", "--only", "allsmall", "--out", str(tmp_path)])
    assert "fedra.fig4 is not drawn" in capsys.readouterr().out
    assert (tmp_path / f"{depth.NAME}.png").is_file()
    with pytest.raises(SystemExit):
        main([depth.NAME, "--train", "--out", str(tmp_path)])
