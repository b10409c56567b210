"""Train plans of the truth again with other instructions of the processor, and store how far their scores move.

Each row of ``truth_again.csv`` is a plan of the first seed of a federation. ``avx2`` has the instructions that nearly
all processors have, and that the tests use. ``default`` has no vectors in PyTorch's own loops. Rows that exist are not
made again: ``python -m figures.decision.truth_again``.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import torch
import tyro

from diagnostics.regret import read_truth, source_of, truth_of
from figures.decision.truth import Score, plan_score, task_of
from figures.page import markdown, numbers

ROWS = Path(__file__).with_name("truth_again.csv")
COLUMNS = ("federation", "shared", "instructions", "accuracy", "loss")
INSTRUCTIONS = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    },
    "default": {"ATEN_CPU_CAPABILITY": "default"},
}
"""The environment of each, which libraries read when they load."""
SEED = 0
WHOLE = 16
"""A federation with more plans has every tenth of them, from all layers shared on."""


def rows_of(federation: str) -> pd.DataFrame:
    """Return the rows of the truth that are trained again."""
    truth = read_truth()
    rows = truth[(truth["federation"] == federation) & (truth["seed"] == SEED)]
    if len(rows) > WHOLE:
        return rows[::-1][::10]
    return rows[::-1]


def again(federation: str, shared: str) -> Score:
    """Train a plan of the truth again, at its stored rate.

    Args:
        shared: the names of the shared layers as in the truth, joined by ``+``.
    """
    rows = rows_of(federation)
    rate = float(rows.loc[rows["shared"] == shared, "lr"].iloc[0])
    layer_names = tuple(layer_name for layer_name in shared.split("+") if layer_name)
    return plan_score(task_of(federation, SEED, rate), layer_names)


def written(score: Score) -> tuple[str, str]:
    """Return accuracy and loss with the digits of the truth."""
    return f"{score.accuracy:.3f}", f"{score.loss:.4f}"


def read() -> pd.DataFrame:
    """Return the rows, next to those of the truth: ``accuracy``, ``loss``, ``accuracy_truth`` and ``loss_truth``."""
    truth = read_truth()
    truth = truth[truth["seed"] == SEED]
    plan_keys = ["federation", "shared"]
    return pd.read_csv(ROWS, keep_default_na=False).merge(
        truth[[*plan_keys, "accuracy", "loss"]],
        on=plan_keys,
        suffixes=("", "_truth"),
        validate="many_to_one",
    )


def moves() -> pd.DataFrame:
    """Return how far scores move by source of data and instructions: plans, and the mean and largest move in points.

    ``head_local`` has the points that a local head loses, of the truth and again. It is missing where not all plans
    were trained again.
    """
    rows = read()
    table_rows = []
    for group_key, group_rows in rows.groupby(
        [rows["federation"].map(source_of), "instructions"], sort=False
    ):
        score_moves = (group_rows["accuracy"] - group_rows["accuracy_truth"]).abs()
        table_rows.append(
            (
                *group_key,
                len(group_rows),
                score_moves.mean(),
                score_moves.max(),
                *heads(group_rows),
            )
        )
    columns = ["source", "instructions", "plans", "mean", "largest", "truth", "again"]
    return pd.DataFrame(table_rows, columns=columns)


def heads(group_rows: pd.DataFrame) -> tuple[float, float]:
    """Return the mean points lost by a local head over federations, of the truth and of the plans trained again."""
    lost_pairs = []
    for federation, federation_plans in group_rows.groupby("federation"):
        truth = truth_of(str(federation), SEED)
        assert truth is not None  # the truth is whole
        if len(federation_plans) < len(truth.accuracy):
            return float("nan"), float("nan")
        scores = federation_plans.set_index("shared")["accuracy"]
        head_score = scores["+".join(truth.layers[:-1])]
        lost_pairs.append((truth.head_local, float(scores.max() - head_score)))
    stored_losses, trained_losses = zip(*lost_pairs, strict=True)
    return sum(stored_losses) / len(lost_pairs), sum(trained_losses) / len(lost_pairs)


def table() -> str:
    """Return how far scores move as a table of a page."""
    move_table = moves()
    shown_table = move_table[["source", "instructions", "plans"]].copy()
    for title, column in (
        ("mean move", "mean"),
        ("largest move", "largest"),
        ("lost by head_local", "truth"),
        ("lost by head_local, again", "again"),
    ):
        shown_table[title] = numbers(move_table[column])
    return markdown(shown_table)


def main(instructions: str = "") -> None:
    """Train what has no rows.

    Args:
        instructions: which ones this process has. Without, a process for each begins.
    """
    if not instructions:
        for instructions_name, environment in INSTRUCTIONS.items():
            command = [
                sys.executable,
                "-m",
                __spec__.name,
                "--instructions",
                instructions_name,
            ]
            subprocess.run(command, env=os.environ | environment, check=True)
        return
    torch.set_num_threads(1)
    if not ROWS.exists():
        ROWS.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    stored_rows = pd.read_csv(ROWS, keep_default_na=False)
    done_keys = {*stored_rows[[*COLUMNS[:3]]].itertuples(index=False, name=None)}
    for federation in read_truth()["federation"].unique():
        for shared in rows_of(federation)["shared"]:
            plan_key = federation, shared, instructions
            if plan_key in done_keys:
                continue
            scores = written(again(federation, shared))
            with ROWS.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerow([*plan_key, *scores])
            print(*plan_key, *scores, flush=True)


if __name__ == "__main__":
    tyro.cli(main)
