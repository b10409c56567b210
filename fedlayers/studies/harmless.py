"""Predictors next to the base rate: trained runs, and baselines that need no federation, on the same samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diagnostics.tuning.copies import Tuner
from diagnostics.tuning.differ import neighbours
from diagnostics.tuning.permutation import blocks
from fl_core import statistics, tree
from fl_core.data.arrays import nested_groups
from fl_core.errors import UsageError
from fl_core.records import store
from fl_core.rows import CLASSIFICATION, MULTILABEL, SCORES
from fl_core.run.own_code import code_in
from fl_core.run.restore import load_rounds
from fl_core.run.task import Task
from fl_core.statistics import Estimate
from fl_core.training import evaluate
from fl_core.training.losses import ClassWeighted
from fl_core.training.phases import Training

if TYPE_CHECKING:
    from fedlayers.studies.jobs import TrainingJob

BASE_RATE = "base_rate"
VALIDATION, TEST = "validation", "test"
PROBABLE = (CLASSIFICATION, MULTILABEL)
"""The tasks whose predictions are probabilities, which are calibrated."""
BLOCKS = 30
"""The most blocks of a client's groups that a jackknife leaves out, one by one."""
DIGITS = 9
"""Digits of scores that are compared. Later digits differ by rounding."""
LOSES, GAINS = "loses", "gains"
"""What is shown of a client's loss."""
Outputs = Mapping[str, Tensor]
"""Outputs of a predictor [n, C] by client: logits of classes or labels, numbers, or log hazards."""


@dataclass(frozen=True)
class Predictor:
    """A trained run, a baseline or the base rate.

    Attributes:
        outputs: by split, validation or test, its outputs on each client's samples. Clients without samples are
            missing.
        models: those of a linear model, by client.
        known: what a bench has computed of it (:func:`once`).
    """

    name: str
    outputs: Mapping[str, Outputs]
    models: Mapping[str, nn.Module] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict, repr=False)


Method = TypeVar("Method", bound=Callable[..., Any])


def once(method: Method) -> Method:
    """Compute a bench's answer on a predictor once. The predictor keeps it."""

    @wraps(method)
    def known(bench: Bench, one: Predictor, *of: str) -> Any:
        key = method.__name__, *of
        if key not in one.known:
            one.known[key] = method(bench, one, *of)
        return one.known[key]

    return cast(Method, known)


class Loaded(NamedTuple):
    """The models of a run's round by client, their kind, and their task."""

    round: int
    kind: str
    models: dict[str, nn.Module]
    task: Task


class Bench:
    """The validation and test samples of a federation, on which predictors are compared.

    A loss is the calibrated log loss (:func:`fl_core.training.evaluate.fit`), of numbers and of survival that
    of training. Means are over clients by training samples. With class weights, samples count by these too.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.kind = task.data.task
        self.class_weights: Tensor | None = None
        if isinstance(task.criterion, ClassWeighted):
            self.class_weights = torch.tensor(task.criterion.weights).double()
        self.sizes = {client.name: len(client.train) for client in task.data.clients}
        self.bases = {
            client.name: evaluate.base_outputs(task.data, task.criterion, client.name)
            for client in task.data.clients
        }
        self.labels = {
            split: {
                client.name: client.split(split).y
                for client in task.data.clients
                if len(client.split(split))
            }
            for split in (VALIDATION, TEST)
        }
        self.samples = {split: self._samples(split) for split in (VALIDATION, TEST)}

    def _samples(self, split: str) -> pd.DataFrame:
        """Return a line for each sample: its client, its group, and its weight in means over the federation."""
        parts = []
        for client in self.task.data.clients:
            if client.name not in self.labels[split]:
                continue
            own = client.split(split)
            groups = np.arange(len(own)) if own.groups is None else own.groups
            weights = self._weights(client.name, own.y).numpy()
            table = {"client": client.name, "group": groups, "weight": weights}
            parts.append(pd.DataFrame(table))
        if not parts:
            return pd.DataFrame(columns=["client", "group", "weight"])
        found = pd.concat(parts, ignore_index=True)
        return found.assign(group=nested_groups(part["group"] for part in parts))

    # --- predictors ---

    def load(self, path: Path) -> Loaded:
        """Return the models of a finished run, each client's own. Under a stopping rule its best round counts.

        Raises:
            UsageError: the clients hold parts of the model, so that none predicts alone.
        """
        round = "last" if store.Run(path).stopping_rule() is None else "best"
        with warnings.catch_warnings(action="ignore"):
            code = code_in(self.task.config)
            found = load_rounds(path, [round], allow_code=code, **self.task.own)
            return Loaded(*next(found))

    def of_models(self, name: str, models: Mapping[str, nn.Module]) -> Predictor:
        """Return the predictor with a model for each client."""
        logits = self.task.criterion.logits
        return self.predictor(
            name, lambda client, x: logits(evaluate.predict(models[client], x))
        )

    def tuner(self, job: TrainingJob, loaded: Loaded, others: bool = False) -> Tuner:
        """Return what trains own epochs from a run's models, and predicts each client's validation and test samples.

        Args:
            others: predict the validation samples of neighbours, too (:func:`diagnostics.tuning.differ.neighbours`).
        """
        clients, seed = self.task.data.clients, job.config.execution.seed
        near = (
            neighbours(blocks(len(clients), seed))
            if others
            else [[k] for k in range(len(clients))]
        )
        return Tuner(
            loaded.models[clients[0].name],
            loaded.task.criterion,
            Training.of(job.resolved.training),
            [(one.train, one.validation) for one in clients],
            seed,
            loaded.round,
            [tree.state_dict(loaded.models[one.name]) for one in clients],
            samples=None,
            near=[[*sets, len(clients) + k] for k, sets in enumerate(near)],
            beside=[one.test for one in clients],
        )

    def of_parts(self, name: str, parts: Mapping[tuple[int, int], Tensor]) -> Predictor:
        """Return the predictor with some raw outputs of a :meth:`tuner`, by client and set of samples."""
        clients, logits = self.task.data.clients, self.task.criterion.logits
        found = {
            split: {
                one.name: logits(parts[k, k + at]).double()
                for k, one in enumerate(clients)
                if one.name in self.labels[split]
            }
            for split, at in ((VALIDATION, 0), (TEST, len(clients)))
        }
        return Predictor(name, found)

    @cached_property
    def base_rate(self) -> Predictor:
        """The predictor that knows how often each client's training samples have each class."""
        return self.predictor(
            BASE_RATE, lambda client, x: self.bases[client].expand(len(x), -1)
        )

    def predictor(
        self, name: str, predict: Callable[[str, Tensor], Tensor]
    ) -> Predictor:
        """Return a predictor of a function (client, samples) -> outputs."""
        with tree.one_thread():
            outputs = {
                split: {
                    client.name: predict(client.name, client.split(split).x).double()
                    for client in self.task.data.clients
                    if client.name in labels
                }
                for split, labels in self.labels.items()
            }
        return Predictor(name, outputs)

    # --- losses ---

    @cached_property
    def halves(self) -> NDArray[np.int64]:
        """The half of each validation sample, dealt over the federation (:func:`fl_core.statistics.halves`)."""
        samples = self.samples[VALIDATION]
        strata = pd.factorize(samples["client"])[0]
        return statistics.halves(samples["group"].to_numpy(int), strata)

    def calibration(
        self, one: Predictor, half: int | None = None
    ) -> tuple[float, float]:
        """Return the temperature and the weight of the base rate, of validation samples or one half of them.

        Raises:
            UsageError: there are no samples, or an output is not finite.
        """
        if self.kind not in PROBABLE:
            return 1.0, 0.0
        if not self.labels[VALIDATION]:
            raise UsageError(
                "a federation must have validation samples to calibrate a loss; got none. Add samples."
            )
        outputs, y, base = self._joined(one, VALIDATION)
        weights = torch.tensor(self.samples[VALIDATION]["weight"].to_numpy(float))
        part = torch.ones(len(y), dtype=torch.bool)
        if half is not None:
            part = torch.from_numpy(self.halves == half)
        return evaluate.fit(outputs[part], y[part], weights[part], base[part])

    def _joined(self, one: Predictor, split: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, labels and base rates of a split's samples, client after client."""
        names, labels = list(self.labels[split]), self.labels[split]
        outputs = torch.cat([one.outputs[split][name] for name in names])
        base = [self.bases[name].expand(len(labels[name]), -1) for name in names]
        return outputs, torch.cat([labels[name] for name in names]), torch.cat(base)

    @once
    def losses(self, one: Predictor, split: str) -> Outputs:
        """Return the loss of each sample by client.

        On validation the calibration is cross-fitted: each half of the federation's samples has that of the other.
        """
        outputs, y, base = self._joined(one, split)
        if self.kind not in PROBABLE:
            y = y.double() if y.is_floating_point() else y
            found = self.task.criterion.of_logits().per_sample(outputs, y)
        elif split == VALIDATION:
            fitted = torch.tensor([self.calibration(one, half) for half in (1, 0)])
            pairs = fitted.double()[torch.from_numpy(self.halves)]
            hot = outputs / pairs[:, :1] + pairs[:, 1:] * base
            found = evaluate.log_losses(hot, y)
        else:
            hot = evaluate.calibrated(outputs, *self.calibration(one), base)
            found = evaluate.log_losses(hot, y)
        sizes = [len(own) for own in self.labels[split].values()]
        by_client = found.double().split(sizes)
        return dict(zip(self.labels[split], by_client, strict=True))

    def _weights(self, client: str, y: Tensor) -> Tensor:
        """Return the weights of a client's samples, which add up to its number of training samples."""
        weights = torch.ones(len(y), dtype=torch.float64)
        if self.class_weights is not None:
            weights = self.class_weights[y]
        return weights * self.sizes[client] / weights.sum()

    def difference(
        self, one: Predictor, other: Predictor, split: str, score: str = "loss"
    ) -> Estimate:
        """Return how much higher the first one's score is: paired over groups, each client a stratum."""
        first, second = (self._draws(each, split, score) for each in (one, other))
        found = statistics.stratified_mean(
            (first["value"] - second["value"]).round(DIGITS).to_numpy(),
            first["weight"].to_numpy(float),
            first["group"].to_numpy(int),
            pd.factorize(first["client"])[0],
        )
        if score == "loss":
            return found
        scores = [self.scores(each, split)[score] for each in (one, other)]
        return found._replace(value=scores[0] - scores[1])

    @once
    def _draws(self, one: Predictor, split: str, score: str) -> pd.DataFrame:
        """Return values whose mean by client and weight is a score: a line each, with client, group and weight.

        A loss has one for each sample. Another score has the pseudo-values of a jackknife, one for each of up to
        :data:`BLOCKS` blocks of a client's groups. A block without which there is no score changes nothing. Clients
        without a score are left out.
        """
        samples = self.samples[split]
        if score == "loss":
            losses = torch.cat([*self.losses(one, split).values()])
            return samples.assign(value=losses.numpy())
        parts = []
        for client, own in samples.groupby("client", sort=False):
            outputs, y = one.outputs[split][client], self.labels[split][client]
            whole = self._scores(outputs, y)[score]
            block = pd.factorize(own["group"])[0] % BLOCKS
            count = block.max() + 1
            values = np.full(count, whole)
            for left in range(count if count > 1 else 0):
                kept = torch.from_numpy(block != left)
                without = self._scores(outputs[kept], y[kept])[score]
                if not math.isnan(without):
                    values[left] = count * whole - (count - 1) * without
            weight = self.sizes[str(client)] / count
            table = {"client": client, "group": np.arange(count), "weight": weight}
            parts.append(pd.DataFrame({**table, "value": values}).dropna())
        found = pd.concat(parts, ignore_index=True)
        return found.assign(group=nested_groups(part["group"] for part in parts))

    # --- scores ---

    @once
    def by_client(self, one: Predictor, split: str = TEST) -> pd.DataFrame:
        """Return the scores of each client (line), NaN where its samples give none. The loss is calibrated."""
        found = {}
        for client, losses in self.losses(one, split).items():
            y = self.labels[split][client]
            scores = self._scores(one.outputs[split][client], y)
            weights = self._weights(client, y)
            scores["loss"] = float((weights * losses).sum() / weights.sum())
            found[client] = scores
        return pd.DataFrame.from_dict(found, orient="index", dtype=float)

    def _scores(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        data, criterion = self.task.data, self.task.criterion.of_logits()
        known = data.positive_index, data.absent
        return evaluate.scores(outputs.float(), y, criterion, *known)

    def scores(self, one: Predictor, split: str = TEST) -> dict[str, float]:
        """Return a predictor's scores, means over clients that have them by training samples."""
        table = self.by_client(one, split)
        sizes = pd.Series(self.sizes).reindex(table.index)
        means = table.mul(sizes, axis=0).sum() / table.notna().mul(sizes, axis=0).sum()
        return dict(means)

    def line(self, one: Predictor) -> dict[str, float]:
        """Return a predictor's validation scores, how far its loss is ``above`` the base rate's, and its ``score``.

        ``low`` and ``high`` are the ends of the interval of ``above``. ``score`` ranks finished runs, higher is better:
        minus the loss, or the score that selects.
        """
        scores = {**self.scores(one, VALIDATION), "score": self.worth(one)}
        above = self.difference(one, self.base_rate, VALIDATION).interval()
        return scores | dict(zip(("above", "low", "high"), above, strict=True))

    def worth(self, one: Predictor) -> float:
        """Return the score that selects, on validation samples, negative where lower is better."""
        value = self.scores(one, VALIDATION).get(self.selecting, math.nan)
        return value if SCORES[self.selecting] else -value

    @property
    def selecting(self) -> str:
        """The score that ranks finished runs: the loss, or the one that selects rounds."""
        return self.task.config.federation.monitor or "loss"

    def of_clients(self, many: Mapping[str, Predictor]) -> pd.DataFrame:
        """Return each client's test losses by several predictors, and the first one's scores.

        Args:
            many: by the column of its loss.

        Returns:
            Columns ``client``, ``train``, ``test``, for classes ``macro_f1`` and ``accuracy`` with Wilson's 95 %
            interval, which one model's samples give, and the losses. ``gain`` says what is shown of the first loss
            against every other one: :data:`LOSES` where it is higher than one of them, :data:`GAINS` where it is lower
            than the last, else empty. It is Student's t over groups, corrected by Holm for all comparisons.
        """
        losses = {name: self.losses(one, TEST) for name, one in many.items()}
        (first, *others), lines, found = many, [], []
        scores = self.by_client(many[first])
        for client, samples in self.samples[TEST].groupby("client", sort=False):
            y, groups = self.labels[TEST][client], samples["group"].to_numpy(int)
            line: dict[str, Any] = {"client": client, "train": self.sizes[client]}
            line["test"] = len(y)
            if self.kind == CLASSIFICATION:
                line["macro_f1"] = scores.loc[client, "macro_f1"]
                right = (many[first].outputs[TEST][client].argmax(1) == y).numpy()
                effect = statistics.design_effect(right, groups)
                share = statistics.share_interval(int(right.sum()), len(y), effect)
                line |= share.columns("accuracy")
            weights = samples["weight"].to_numpy(float)
            for name, one in many.items():
                line[name] = float(self.by_client(one).loc[client, "loss"])
            lines.append(line)
            paired = [losses[first][client] - losses[name][client] for name in others]
            found.append(
                [
                    statistics.stratified_mean(each.numpy(), weights, groups)
                    for each in paired
                ]
            )
        p = statistics.holm([each.p_value for line in found for each in line])
        for line, own, shown in zip(
            lines, found, p.reshape(len(lines), -1) <= 0.05, strict=True
        ):
            values = np.array([each.value for each in own])
            worse, better = shown & (values > 0), shown & (values < 0)
            line["gain"] = LOSES if worse.any() else GAINS if better[-1:].any() else ""
        return pd.DataFrame(lines)
