"""FedRA's features in a plane: what its Fig. 5 decides, and a small study from end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from torch import nn

from figures import planes, recipe
from figures.__main__ import main
from figures.fedra import features
from figures.planes import CLUSTERED
from fl_core import rows, runner
from fl_core.errors import UsageError
from tests.figures.conftest import drawn, header_of, made, page, small
from tests.figures.test_fedra_depth import images

pytestmark = pytest.mark.filterwarnings("ignore:client")


def header(seeds: int = 3) -> dict[str, object]:
    return header_of(features.STUDY, seeds) | {
        "had": {run: list(range(seeds)) for run in features.RUNS}
    }


def frame_of(silhouettes: dict[str, float], seeds: int = 3) -> pd.DataFrame:
    """Rows of every run: its silhouette by class, with a little noise by seed, and a plane of eight samples."""
    lines = []
    for run in features.RUNS:
        for seed in range(seeds):
            named = {"run": run, "seed": seed, "round": 30}
            lines.append(
                rows.row(
                    "accuracy",
                    0.4,
                    client="photo",
                    model="global",
                    split="test",
                    **named,
                )
            )
            for metric in CLUSTERED:
                lines.append(
                    rows.row(metric, silhouettes.get(run, 0.0) + 0.001 * seed, **named)
                )
        lines.append(rows.row(planes.PERPLEXITY, 2.0, run=run, seed=0))
        for k in range(8):
            what = {
                "client": "photo",
                "variant": f"sample {k}>dog",
                "run": run,
                "seed": 0,
            }
            lines += [
                rows.row(planes.X, float(k), **what),
                rows.row(planes.Y, float(k % 3), **what),
            ]
    return rows.frame(lines)


def held(frame: pd.DataFrame, seeds: int = 3) -> bool | None:
    (finding,) = drawn(features.NAME, header(seeds), frame).findings
    assert finding.verdict == "not comparable"
    return finding.held


def test_silhouettes_decide() -> None:
    assert held(frame_of({"fedra": 0.2})) is True
    assert held(frame_of({"fedra": 0.2, "depthfl": 0.3})) is False
    assert held(frame_of({"fedra": 0.2}, seeds=2), seeds=2) is None
    text = drawn(features.NAME, header(), frame_of({"fedra": 0.2})).text
    assert "| FedRA | 40.0 ± 0.0 | +0.201 ± 0.002 |" in text
    with pytest.raises(UsageError, match="seed 0"):
        drawn(features.NAME, header() | {"had": {}}, frame_of({}))


def test_the_last_attention_is_the_last_blocks_own() -> None:
    blocks = nn.ModuleList(
        nn.ModuleDict({"attn": nn.Identity(), "mlp": nn.Identity()}) for _ in range(2)
    )
    assert features.last_attention(nn.ModuleDict({"blocks": blocks})) == "blocks.1.attn"


@pytest.mark.slow
def test_a_small_study_keeps_the_class_tokens_of_all_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"depth": 4, "embed_dim": 8, "num_heads": 2}
    data = {
        "dataset": images(tmp_path / "styles.npz", 64, 3, 2),
        "model_options": options,
    }
    changes = {"rounds": 1, "batch_size": 8, "eval_every": 1, "checkpoint_every": 1}
    runs = {
        run: config.with_keys(
            **data,
            **changes,
            options={"depths": (4, 2)} if config.federation.options else {},
        )
        for run, config in features.RUNS.items()
    }
    small(monkeypatch, replace(features.STUDY, prepare=recipe.unchanged), runs)
    folder = tmp_path / features.NAME
    main([features.NAME, "--train", "--seeds", "1", "--out", str(tmp_path)])
    assert made(folder) == {f"{run}-0" for run in runs}
    assert "| AllSmall |" in page(features.NAME, tmp_path)
    _, frame = rows.read(folder / "depthfl-0.jsonl")
    assert set(frame.loc[frame["metric"].isin(list(CLUSTERED)), "layer"]) == {
        "model.blocks.3.attn"
    }
    count = len(planes.plane(frame.assign(run="depthfl"), "depthfl"))
    assert 4 <= count <= features.POOLED
    task = runner.assemble(runs["fedra"])
    pooled = features.attended(task.model, task)
    assert pooled.x.shape == (count, 8)
    assert set(pooled.clients) == {"photo", "sketch"}
    assert np.isfinite(pooled.x).all()
