"""pFedLA's bytes: real messages are eight times as many as the published numbers."""

from dataclasses import replace

import numpy as np

from figures import training
from figures.pfedla.costs import RETAINED, STUDY
from figures.pfedla.methods import STUDY as METHODS, joined, of_rates

TOTALS = {"mnist": 85_822, "cifar10": 121_278}
PUBLISHED = {
    "mnist": [491.08, 488.65, 312.52],
    "cifar10": [693.96, 418.96, 382.24, 379.81],
}


def test_with_lower_rates_of_the_hypernetwork_pfedla_is_level_with_fedavg():
    rows = of_rates(joined(METHODS.read(METHODS.path())[1])).splitlines()[-2:]
    for row in rows:
        _, _, _, local, fedavg, *_ = row.split("|")
        assert local.split()[0] == "-20.0"
        assert abs(float(fedavg.split()[0])) < 1


def test_rows_made_now_are_the_stored_ones_and_count_right(tmp_path):
    """Costs do not hang on what is in the images, so any of the datasets' shapes will do."""
    files = {}
    for name, shape in {"mnist": (28, 28, 1), "cifar10": (32, 32, 3)}.items():
        x = np.random.default_rng(0).integers(0, 256, (1500, *shape), dtype=np.uint8)
        files[name] = str(tmp_path / f"{name}.npz")
        y, classes = np.arange(1500) % 10, np.array([*"abcdefghij"])
        np.savez(files[name], x=x, y=y, classes=classes)
    runs = {
        run: config.with_keys(
            dataset=files[run.partition(".")[0]], samples_per_client=40
        )
        for run, config in STUDY.runs.items()
    }
    study, path = replace(STUDY, runs=runs), tmp_path / STUDY.name
    training.train(study, path)
    training.pack(study, path)
    frame, stored = STUDY.read(path)[1], STUDY.read(STUDY.path())[1]
    same = ["run", "layer", "metric", "variant", "value"]
    assert stored[same].equals(frame[same])
    sizes = frame[frame["metric"] == "parameters"].set_index(["run", "layer"])["value"]
    sums = frame[frame["metric"] != "parameters"].pivot(
        index="run", columns="metric", values="value"
    )
    for dataset, units in RETAINED.items():
        for k, published in enumerate(PUBLISHED[dataset]):
            run = f"{dataset}.{k}"
            total, kept_size = (
                sizes[run].sum(),
                sum(sizes[run, unit] for unit in units[:k]),
            )
            assert total == TOTALS[dataset]
            assert sums.loc[run, "bytes_up"] == 4 * 600 * 10 * total
            assert sums.loc[run, "bytes_down"] == 4 * 600 * 10 * (total - kept_size)
            moved = sums.loc[run, ["bytes_up", "bytes_down"]].sum() / 2**20
            assert round(moved / 8, 2) == published
