"""Measure what default races lose on tables that no design of ``choose`` saw.

    python -m benchmarks.races SOURCES OUT

``SOURCES`` is a folder with the tables of :data:`TABLES`. What is measured is registered in
``figures/decision/REGISTERED_RACES.md``. Runs are kept below ``OUT``, so a stopped call goes on.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import fedlayers as fl
from fedlayers.studies.arms import DEFAULT, arms_of
from fedlayers.studies.harmless import BASE_RATE, Bench
from fl_core import runner

ROWS = Path(__file__).parents[1] / "figures" / "decision" / "races.parquet"
RATES = (0.001, 0.003, 0.01, 0.03)
"""Learning rates of each reference arm."""
SEEDS = (0, 1, 2)
"""The first is the race's; the others choose the reference arm."""
MOST = 6000
"""Rows of a table, at most; more are sampled."""
SCORES = ("macro_f1", "auroc", "loss")


@dataclass(frozen=True)
class Table:
    """A table: its file, the columns of the client and the outcome, rows of a client at least, what is left out."""

    file: str
    client: str
    label: str
    least: int = 1
    exclude: tuple[str, ...] = ()

    def read(self, sources: Path) -> pd.DataFrame:
        """Return the rows that have a client and an outcome."""
        frame = pd.read_csv(sources / self.file, low_memory=False)
        if self.file == "PhysionetChallenge2012-set-a.csv":
            units = frame[["CCU", "CSRU", "SICU"]]
            unit = units.idxmax(axis=1).where(units.any(axis=1), "MICU")
            frame = frame.assign(unit=unit)
        frame = frame.drop(columns=["rownames", *self.exclude], errors="ignore")
        frame = frame.dropna(subset=[self.client, self.label])
        frame = frame[frame[self.label] != "invalid"]
        sizes = frame.groupby(self.client)[self.label].transform("size")
        frame = frame[sizes >= self.least]
        return frame.sample(min(MOST, len(frame)), random_state=0).sort_index()


TABLES = {
    "icu": Table(
        "PhysionetChallenge2012-set-a.csv",
        "unit",
        "In-hospital_death",
        exclude=(
            *("recordid", "SAPS-I", "SOFA", "Length_of_stay", "Survival"),
            *("CCU", "CSRU", "SICU"),
        ),
    ),
    "covid": Table(
        "covid_testing.csv",
        "clinic_name",
        "result",
        300,
        (
            *("subject_id", "fake_first_name", "fake_last_name", "test_id"),
            *("ct_result", "col_rec_tat", "rec_ver_tat"),
        ),
    ),
    "crashes": Table(
        "nassCDS.csv", "yearacc", "dead", exclude=("injSeverity", "caseid", "weight")
    ),
    "churn": Table("mlc_churn.csv", "area_code", "churn", exclude=("state",)),
    "arrests": Table("Arrests.csv", "year", "released"),
    "thyroid": Table("thyroid_disease.csv", "ref_src", "ThryroidClass", 100),
    "abortion": Table(
        "CES11.csv", "province", "abortion", 100, ("id", "population", "weight")
    ),
    "calls": Table("ResumeNames.csv", "industry", "call", 100, ("name", "minimum")),
    "jobs": Table("hpc_data.csv", "protocol", "class", 150),
    "monica": Table("monica.csv", "yronset", "outcome"),
}
"""``icu`` is of github.com/alistairewj/challenge2012, the others of github.com/vincentarelbundock/Rdatasets."""


def measured(name: str, sources: Path, out: Path) -> pd.DataFrame:
    """Return a line for the named model, the base rate and each reference run: its scores on both splits."""
    table, path = TABLES[name], out / name / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    table.read(sources).to_csv(path, index=False)
    config = fl.RunConfig(
        dataset=str(path),
        client_column=table.client,
        label_column=table.label,
        impute="mean",
    )
    lines: list[dict[str, Any]] = []
    choice = fl.choose(config, out / name / "race", baselines=False, progress=False)
    bench = Bench(choice.task)

    def add(bench: Bench, one: Any, **line: Any) -> None:
        for split in ("validation", "test"):
            found = bench.scores(one, split)
            line |= {f"{split}_{score}": found.get(score) for score in SCORES}
        lines.append({"table": name, **line})

    add(bench, bench.base_rate(), arm=BASE_RATE, seed=0)
    if choice.run is not None and choice.winner is not None:
        named = bench.of_run(choice.run, "named")
        add(bench, named, arm="named", seed=0, cut=choice.winner.name)
    chosen: dict[str, set[float]] = {}
    for seed in SEEDS:
        plain = config.with_keys(seed=seed, patience=10)
        task = runner.assemble(plain)
        bench = Bench(task)
        for arm in arms_of(DEFAULT, task.layers):
            for lr in RATES if seed == 0 else sorted(chosen[arm.name]):
                run = out / name / "reference" / f"{arm.name}-{seed}-{lr}"
                if run.exists():
                    fl.resume(run, progress=False)
                else:
                    plan = run.parent / f"{arm.name}.json"
                    plan.parent.mkdir(parents=True, exist_ok=True)
                    assert arm.plan is not None  # each default arm is a cut
                    arm.plan.save(plan)
                    its = plain.with_keys(
                        lr=lr, algorithm=arm.algorithm, plan=str(plan)
                    )
                    fl.run(its, run, progress=False)
                add(bench, bench.of_run(run, "run"), arm=arm.name, seed=seed, lr=lr)
            if seed == 0:
                tried = pd.DataFrame(lines)
                tried = tried[(tried["arm"] == arm.name)].set_index("lr")
                chosen[arm.name] = {
                    float(tried["validation_macro_f1"].idxmax()),
                    float(tried["validation_loss"].idxmin()),
                }
    return pd.DataFrame(lines)


def lost(rows: pd.DataFrame, score: str) -> float:
    """Return what the named model of a table loses on test samples of seed 0, in the score's unit.

    Each arm has the rate with the best validation score of seed 0. The reference is the arm with the best mean test
    score over the other seeds.
    """
    sign = -1.0 if score == "loss" else 1.0
    runs = rows[rows["lr"].notna()].assign(
        validation=lambda x: sign * x[f"validation_{score}"],
        test=lambda x: sign * x[f"test_{score}"],
    )
    first = runs[runs["seed"] == 0].sort_values("validation", ascending=False)
    first = first.drop_duplicates("arm").set_index("arm")
    others = runs[runs["seed"] != 0].set_index("arm")
    others = others[others["lr"] == first["lr"].reindex(others.index)]
    best = others.groupby("arm")["test"].mean().idxmax()
    named = rows.loc[rows["arm"] == "named", f"test_{score}"]
    if named.empty:  # nothing was named, so the base rate is what is used
        named = rows.loc[rows["arm"] == BASE_RATE, f"test_{score}"]
    return float(first.loc[best, "test"] - sign * named.iloc[0])


def main(sources: str, out: str) -> None:
    """Measure each table that has no rows yet, and print what each race lost."""
    rows = pd.read_parquet(ROWS) if ROWS.exists() else pd.DataFrame({"table": []})
    for name in TABLES:
        if name not in set(rows["table"]):
            rows = pd.concat([rows, measured(name, Path(sources), Path(out))])
            rows.to_parquet(ROWS, index=False, compression="zstd")
        own = rows[rows["table"] == name]
        parts = [f"{score} {lost(own, score):.4f}" for score in SCORES]
        print(f"{name}: lost {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
