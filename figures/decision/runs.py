"""Trains every cut on every federation of the study, and what is compared with the cuts; keeps scores, not models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from diagnostics import measure
from diagnostics.decide import select
from figures import items
from figures.decision import sets
from figures.decision.federations import FEDERATIONS, FURTHER, PRETRAINED, PRETRAINING, cuts
from figures.recipe import Recipe, labels
from fl_core import data as datasets, rows, runner, statistics, tree
from fl_core.algorithms.fedper import FedPer
from fl_core.algorithms.model_template import ModelTemplate
from fl_core.config import RunConfig
from fl_core.data import Split
from fl_core.engine import Engine
from fl_core.errors import NonFiniteError, RunError
from fl_core.execution.requests import TUNED, FinetuneRequest
from fl_core.plan import CANDIDATE, Evidence, LayerPlan
from fl_core.training import evaluate
from fl_core.training.phases import Phase
from fl_core.tree import Tree

NAME = "decision.runs"
HELD_OUT = "held_out"
"""The split that scores a choice: test samples together with samples that the federation left over."""
WORST = "worst_"
SCORES = ("accuracy", "macro_f1", "loss")
RULES = ("sensitivity_ratio", "largest_jump", "change_point")
DECISION = "decision of a rule"
DITTO = "ditto"
OWN_EPOCHS = (1, 2)
TRAINED, PERSONALISED = "trained", "personalised"
WEIGHTS = "start.safetensors"


class Personalised(FedPer):
    """Fine-tunes a copy of a client's model, and of that what the plan keeps local."""

    name = "personalised"

    def finetuning(self, done: int, client: int) -> tuple[Phase, ...]:
        assert self.plan is not None
        train = self.plan.head_tensors & self.task_info.tensors
        return (Phase("finetune", train, done, batch_stream="finetune"),) if train else ()


def configurations(confirming: bool = True) -> dict[str, RunConfig]:
    """The federations' configurations, by name.

    Args:
        confirming: those among them that were named last, for the race to the end alone.
    """
    return {name: each.config for name, each in FEDERATIONS.items() if confirming or each.part != "confirming"}


class Scores:
    """Scores of clients' models on validation and held-out samples, as rows."""

    def __init__(self, task: runner.Task) -> None:
        config = task.config
        source = datasets.open_named(config.dataset, data_root=config.data_root)
        whole = source.with_methods(config.scale or "none", config.impute)
        self.task, self.further = task, datasets.extra_test_samples(whole, task.data, FURTHER // len(task.data.clients))
        self.model = copy.deepcopy(task.model)

    def held_out(self, number: int) -> Split:
        """A client's test samples and what was left over for it."""
        client = self.task.data.clients[number]
        more = self.further.get(client.name)
        if more is None:
            return client.test
        return Split(torch.cat([client.test.x, more.x]), torch.cat([client.test.y, more.y]))

    def rows(self, kind: str, variant: str, models: Mapping[int, Tree], **columns: Any) -> list[rows.Row]:
        """Return each score on each split: its mean over clients by training samples, and the worst client's."""
        lines = []
        weights = [self.task.data.weights[number] for number in models]
        for split in ("validation", HELD_OUT):
            parts = {
                number: self.held_out(number) if split == HELD_OUT else self.task.data.clients[number].validation
                for number in models
            }
            found = {number: self._score(model, parts[number]) for number, model in models.items()}
            n_samples = sum(len(part) for part in parts.values())
            about = {"estimator": kind, "variant": variant, "split": split, "n_samples": n_samples, **columns}
            for metric in SCORES:
                values = [scores[metric] for scores in found.values()]
                lines.append(rows.row(metric, statistics.combine(values, weights), **about, **labels(self.task)))
                worst = min(values) if evaluate.SCORES[metric] else max(values)
                lines.append(rows.row(WORST + metric, worst, **about, **labels(self.task)))
        return lines

    def _score(self, model: Tree, split: Split) -> dict[str, float]:
        tree.load(self.model, model)
        with tree.one_thread():
            return evaluate.scores(
                evaluate.predict(self.model, split.x), split.y, self.task.criterion, self.task.data.positive_index
            )


def measure_federation(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Train all cuts and Ditto, personalise FedAvg's model at every depth, and let the one-epoch rules decide."""
    scores, lines = Scores(task), []
    nothing = LayerPlan(task.layers, (), Evidence(rule=CANDIDATE))
    for cut, count in cuts(len(nothing.trainable)).items():
        try:
            engine = runner.run(task.config, loaded=task.data, plan=nothing.with_first(count), progress=False)
        except NonFiniteError as error:
            lines.append(rows.row("macro_f1", None, status=str(error), estimator=TRAINED, variant=cut, **labels(task)))
            continue
        lines += rounds_of(task, engine, cut)
        models = {number: engine.models(number)["personal"] for number in range(len(task.data.clients))}
        lines += scores.rows(TRAINED, cut, models, round=engine.done)
        if cut == "all":
            lines += _personalised(task, scores, models, nothing)
    ditto = replace(task.config, algorithm=DITTO)
    engine = runner.run(ditto, loaded=task.data, progress=False)
    models = {number: engine.models(number)["personal"] for number in range(len(task.data.clients))}
    lines += scores.rows(TRAINED, DITTO, models, round=engine.done)
    lines += decisions(task)
    sizes = dict(zip((client.name for client in task.data.clients), task.data.weights, strict=True))
    lines += [
        rows.row("samples", n, client=name, n_train=n, split="train", **labels(task)) for name, n in sizes.items()
    ]
    return rows.frame(lines)


def rounds_of(task: runner.Task, engine: Engine, cut: str) -> list[rows.Row]:
    """Macro-F1 and loss on validation samples after every evaluated round."""
    frame = engine.to_frame()
    frame = frame[(frame["split"] == "validation") & (frame["model"] == "personal")]
    frame = frame[frame["metric"].isin(["macro_f1", "loss"]) & (frame["round"] > 0)]
    return [
        rows.row(
            str(metric), statistics.combine(part["value"], part["n_train"]),
            estimator=TRAINED, variant=cut, split="validation", round=int(str(done)), model="personal", **labels(task),
        )
        for (metric, done), part in frame.groupby(["metric", "round"])
    ]  # fmt: skip


def _personalised(task: runner.Task, scores: Scores, models: Mapping[int, Tree], nothing: LayerPlan) -> list[rows.Row]:
    """FedAvg's model with a few epochs of each client's own, of the layers above each cut."""
    lines = []
    client_runner = task.client_runner()
    for cut, count in cuts(len(nothing.trainable)).items():
        if cut == "all":
            continue
        client_runner.use(Personalised(task.task_info, nothing.with_first(count), {}))
        for epochs in OWN_EPOCHS:
            trees = {}
            for number, model in models.items():
                with tree.one_thread():
                    result = client_runner.run(FinetuneRequest(number, epochs, ModelTemplate({TUNED: model}), TUNED))
                trees[number] = {**model, **result.models[TUNED]}
            lines += scores.rows(f"{PERSONALISED} {epochs}", cut, trees, round=int(task.config.rounds or 0))
    return lines


def decisions(task: runner.Task) -> list[rows.Row]:
    """The cut of each one-epoch rule, in layers, from federation sensitivity after the clients' first epoch."""
    lines = []
    report = measure.diagnose_task(task, (measure.SENSITIVITY,), progress=False)
    for rule in RULES:
        cut, status = None, "ok"
        try:
            cut = select.select(report, rule, threshold=task.config.threshold).cut
        except RunError as error:
            status = str(error)
        lines.append(rows.row(DECISION, cut, variant=rule, status=status, **labels(task)))
    return lines


def _prepare(config: RunConfig, run: str, folder: Path) -> RunConfig:
    """Pretrain the transformer, once for all seeds, where a run starts from it."""
    if run != PRETRAINED:
        return config
    path = folder / WEIGHTS
    if not path.is_file():
        pretraining = runner.assemble(replace(PRETRAINING, data_root=config.data_root))
        engine = runner.run(pretraining.config, loaded=pretraining.data, progress=False)
        plain = copy.deepcopy(pretraining.model)
        tree.load(plain, engine.server.trees["model"])
        n_classes = datasets.load(config.dataset, data_root=config.data_root, max_samples=config.max_samples).n_classes
        sets.adapted_start(plain, pretraining.data.shape, n_classes, path)
    return replace(config, init=str(path))


ITEM = items.register(
    Recipe(
        NAME,
        "Every cut on every federation",
        configurations(),
        seeds=4,
        budget="about 2.7 hours of one core a seed",
        measure=measure_federation,
        prepare=_prepare,
    )
)
