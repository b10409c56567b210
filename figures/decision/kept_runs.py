"""Train the races that confirm which arms end: ``python -m figures.decision.kept_runs TABLES OUT``.

``TABLES`` has a folder with a CSV for each of the ten tables. ``REGISTERED_KEPT.md`` states the question.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

import fedlayers as fl
from fedlayers.studies.harmless import Bench
from fedlayers.studies.race import validation_scores
from fl_core.config import resolve
from fl_core.records.store import Run
from tests.fedlayers.test_harmless import READ, rare_table

TABLES = {
    "icu": ("unit", "In-hospital_death"), "covid": ("clinic_name", "result"), "crashes": ("yearacc", "dead"),
    "churn": ("area_code", "churn"), "arrests": ("year", "released"), "thyroid": ("ref_src", "ThryroidClass"),
    "abortion": ("province", "abortion"), "calls": ("industry", "call"), "jobs": ("protocol", "class"),
    "monica": ("yronset", "outcome"),
}  # fmt: skip
"""The columns of the client and of the outcome."""
SHARES, SEEDS = (0.05, 0.14, 0.30), range(100, 120)
AT = 14
"""The judged round of at most 100."""


def lines_of(
    config: Any, data: Any, out: Path, about: dict[str, Any]
) -> list[dict[str, Any]]:
    """Race all arms to the end, at the best of four rates and at the best of three; return a line for each run."""
    choice = fl.choose(
        config, out / "race", data=data, thorough=True, baselines=False, progress=False
    )
    bench = Bench(choice.task)
    assert resolve(choice.task.config).federation.rounds == 100
    found: dict[str, dict[str, Any]] = {}

    def add(folder: Path) -> None:
        for path in sorted((folder / "arms").iterdir()):
            run = Run(path)
            if not run.finished:
                continue
            arm, lr = path.name.partition("-")[0], float(run.config["lr"])
            one = bench.of_run(path, path.name)
            line, test = bench.line(one), bench.scores(one)
            curve = validation_scores(run.rows()[1], ["macro_f1"], AT)["macro_f1"]
            found[f"{arm}@{lr}"] = {
                **about,
                "arm": arm,
                "lr": lr,
                "rounds": run.rounds[-1],
                **{
                    f"validation_{name}": line[name]
                    for name in ("loss", "above", "macro_f1")
                },
                **{
                    f"test_{name}": test.get(name)
                    for name in ("loss", "auroc", "macro_f1")
                },
                "curve": curve.to_list(),
            }

    add(out / "race")
    trials = [line for line in found.values() if line["arm"] == "all_but_last"]
    best = min(
        sorted(trials, key=lambda line: line["lr"])[:3],
        key=lambda line: line["validation_loss"],
    )
    if f"all@{best['lr']}" not in found:
        arms = ("nothing", "all")
        own = config.with_keys(lr=best["lr"])
        fl.choose(
            own,
            out / "three",
            data=data,
            arms=arms,
            thorough=True,
            baselines=False,
            progress=False,
        )
        add(out / "three")
    base = bench.scores(bench.base_rate)
    nothing = {**about, "arm": "base_rate", "lr": None}
    return [
        *found.values(),
        {
            **nothing,
            **{
                f"test_{name}": base.get(name) for name in ("loss", "auroc", "macro_f1")
            },
        },
    ]


def main(tables: str, out: str) -> None:
    """Train what has no rows yet."""
    made = Path(out)
    (made / "rows").mkdir(parents=True, exist_ok=True)

    def keep(name: str, seed: int, config: Any, data: Any) -> None:
        rows = made / "rows" / f"{name}-{seed}.parquet"
        if rows.exists():
            return
        lines = lines_of(
            config, data, made / f"{name}-{seed}", {"table": name, "seed": seed}
        )
        pd.DataFrame(lines).to_parquet(rows, index=False)
        print(name, seed, flush=True)

    for seed in SEEDS:
        for share in SHARES:
            keep(f"rare_{100 * share:.0f}", seed, READ, rare_table(share, seed))
    for seed in (1, 2):
        for name, (client, label) in TABLES.items():
            config = fl.RunConfig(
                dataset=str(Path(tables) / name / f"{name}.csv"),
                client_column=client,
                label_column=label,
                impute="mean",
                seed=seed,
            )
            keep(name, seed, config, None)


if __name__ == "__main__":
    main(*sys.argv[1:])
