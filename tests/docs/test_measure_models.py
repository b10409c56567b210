"""Every block of the page on models of one's own runs."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "measure_models.md"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_block_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 12
    for block in blocks:
        exec(block, names)
    assert not any(tmp_path.iterdir())
