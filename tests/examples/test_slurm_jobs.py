"""Jobs of submitit, in its mode without Slurm."""

import pytest

from examples import slurm_jobs
from fl_core.config import RunConfig
from fl_core.records import store
from fl_core.run import runner

CONFIG = RunConfig(dataset="heart", rounds=2, checkpoint_every=1)


def test_a_job_continues_what_another_began(tmp_path):
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    runner.run(CONFIG, cut, until=1, progress=False)
    assert slurm_jobs.train(CONFIG, whole) == slurm_jobs.train(CONFIG, cut) == 2
    digests = [
        store.Run(path).checkpoint("last").server.trees["model"]
        for path in (whole, cut)
    ]
    assert all(
        bool((digests[0][name] == digests[1][name]).all()) for name in digests[0]
    )


def test_submitit_trains_a_job_for_each_run(tmp_path, capsys):
    pytest.importorskip("submitit", reason="submitit is not installed")
    argv = [
        "--algorithms",
        "local",
        "fedavg",
        "--rounds",
        "1",
        "--cluster",
        "local",
        "--out",
        str(tmp_path),
    ]
    slurm_jobs.main(argv)
    assert capsys.readouterr().out.count("after round 1\n") == 2
    assert {path.name for path in tmp_path.glob("*-0")} == {"local-0", "fedavg-0"}
