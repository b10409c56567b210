"""What the plan of a known answer does for algorithms that use a plan, each against its own default.

python -m figures.decision.known_plans
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

import fedlayers as fl
from figures.page import markdown
from fl_core.statistics import mean_interval

ROWS = Path(__file__).with_name("known_plans.parquet")
LOCAL = {"known_inputs": ["fc1"], "known_both": ["fc1", "fc2"]}
"""The local layers of the best plan. Where labels are coded it is the default of all of them."""
ALGORITHMS, SEEDS = ("fedper", "fedrep", "fedbabu"), list(range(5))


def run() -> pd.DataFrame:
    """Train each algorithm with both plans, and return its accuracy on test samples, a line a run."""
    lines = []
    for name, local in LOCAL.items():
        layers = fl.assemble(fl.RunConfig(dataset=name)).layers
        shared = tuple(each.name for each in layers if each.name not in local)
        known = fl.LayerPlan(layers, shared)
        for kind, plan in (("default", None), ("known", known)):
            with TemporaryDirectory() as out:
                tried = fl.compare(
                    None, ALGORITHMS, SEEDS, out, plan=plan, dataset=name
                )
            found = tried.scores[tried.scores["metric"] == "accuracy"]
            lines.append(
                found.assign(data=name, plan=kind)[
                    ["data", "plan", "algorithm", "seed", "value"]
                ]
            )
    return pd.concat(lines, ignore_index=True)


def algorithms(_: pd.DataFrame) -> str:
    """Return a line for each data set and algorithm: both plans, and the paired difference over seeds."""
    lines = []
    rows = pd.read_parquet(ROWS)
    for (name, algorithm), own in rows.groupby(["data", "algorithm"], sort=False):
        both = 100 * own.pivot(index="seed", columns="plan", values="value")
        gap = mean_interval(both["known"] - both["default"])
        lines.append(
            {
                "federation": f"`{name}`",
                "algorithm": f"`{algorithm}`",
                "default plan": f"{both['default'].mean():.1f}",
                "plan of the known answer": f"{both['known'].mean():.1f}",
                "difference, 95 %": f"{gap[0]:+.1f} [{gap[1]:+.1f}, {gap[2]:+.1f}]",
            }
        )
    return markdown(pd.DataFrame(lines))


if __name__ == "__main__":
    run().to_parquet(ROWS, index=False)
