"""The losses of one seed: what trained runs, simple models and the base rate predict on the same samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diagnostics.tuning.copies import Tuner
from diagnostics.tuning.profile import every
from fedlayers.decision.jobs import samples_of
from fedlayers.decision.table import BASE_RATE, TEST, VALIDATION, Part, SumPart
from fl_core import statistics, tree
from fl_core.config import Own
from fl_core.data.arrays import nested_groups
from fl_core.errors import NonFiniteError, UsageError
from fl_core.records import store
from fl_core.rows import CLASSIFICATION, MULTILABEL, SCORES
from fl_core.run.own_code import code_in
from fl_core.run.restore import load_rounds
from fl_core.run.task import Task
from fl_core.training import evaluate
from fl_core.training.losses import ClassWeighted
from fl_core.training.phases import Training

if TYPE_CHECKING:
    from fedlayers.decision.jobs import TrainingJob

PROBABLE = (CLASSIFICATION, MULTILABEL)
"""The tasks whose predictions are probabilities, which are calibrated."""
BLOCKS = 30
"""The most blocks of a client's groups that a jackknife leaves out, one by one."""
Outputs = Mapping[str, Tensor]
"""Outputs of a predictor [n, C] by client: logits of classes or labels, numbers, or log hazards."""


@dataclass(frozen=True)
class Predictor:
    """A trained run, a baseline or the base rate, with its outputs on the clients' samples.

    Attributes:
        outputs: by split, validation or test, its outputs on each client's samples. Clients without samples are
            missing.
        models: a simple way's model of each client, by client; empty for others.
        known: results that were computed before (:func:`once`).
    """

    name: str
    outputs: Mapping[str, Outputs]
    models: Mapping[str, nn.Module] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict, repr=False)


Method = TypeVar("Method", bound=Callable[..., Any])


def once(method: Method) -> Method:
    """Cache a method's result in the predictor that is its argument."""

    @wraps(method)
    def known(losses: SeedLosses, one: Predictor, *of: str) -> Any:
        key = method.__name__, *of
        if key not in one.known:
            one.known[key] = method(losses, one, *of)
        return one.known[key]

    return cast(Method, known)


class Loaded(NamedTuple):
    """The models of a run's round by client, their kind, and their task.

    Attributes:
        round: the number of the round.
        kind: the kind of the models, such as ``personal`` or ``global``.
    """

    round: int
    kind: str
    models: dict[str, nn.Module]
    task: Task


THIRD = 1 / 3
"""The learning rate of fine-tuning as a factor of the run's.

FedAvg and the linear model also fine-tune at the run's own rate.
"""


class Tuning(NamedTuple):
    """An amount of fine-tuning after a run: epochs at each client, and the rate as a factor of the run's."""

    epochs: int = 0
    factor: float = 0.0

    def rate(self, lr: float) -> float:
        """Return the learning rate of fine-tuning after a run at the rate ``lr``."""
        return rounded_rate(lr * self.factor)


def rounded_rate(value: float) -> float:
    """Return a learning rate rounded to three significant digits."""
    return float(f"{value:.3g}")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run of a way, and what its clients predict after each amount of fine-tuning.

    Attributes:
        tuned: a predictor for each amount of fine-tuning. If one
            diverged, all amounts at its factor of the rate are missing.
        learned_nothing: whether its training loss is not below that of the base rate,
            before fine-tuning. It is False unless outputs are probabilities.
        loaded: the run's models; None if they are at sites.
        last: the models of the last round, for tests that need models which were not selected on validation samples.
            Without blocks they are the models of ``loaded``.
        cross: for each amount of fine-tuning the outputs of the last round's models, client by client. Each client's
            model predicts the validation samples of all clients of its block. Blocks are the argument ``parts`` of
            :meth:`SeedLosses.finish`. Empty without blocks.
    """

    job: TrainingJob
    tuned: Mapping[Tuning, Predictor]
    learned_nothing: bool = False
    loaded: Loaded | None = None
    last: Loaded | None = None
    cross: Mapping[Tuning, Tensor] = field(default_factory=dict)

    @property
    def lr(self) -> float:
        """Return the learning rate of the run; 0 if it has none."""
        return float(self.job.resolved.training.lr or 0)

    def rate(self, tuning: Tuning) -> float:
        """Return the learning rate of an amount of fine-tuning."""
        return tuning.rate(self.lr)


class SeedLosses:
    """The validation and test samples of a federation in one seed, on which predictors are compared.

    The loss of classes and labels is the calibrated log loss
    (:func:`fl_core.training.evaluate.fit`). That of other tasks is the training loss.
    Means weight clients by training samples, and samples by class weights, if any.

    Args:
        task: the FedAvg task of this seed.
        only: the client whose samples are here, if the others' samples are at their sites.

    Attributes:
        kind: the task of the data, such as one of :data:`fl_core.rows.TASKS`.
        class_weights: the weight of each class, float64 [C]; None without weights.
        sizes: the number of training samples of each client.
        bases: the outputs of each client's base rate, float64 [C].
        labels: by split, the labels [n, ...] of each client that has samples in it.
        samples: by split, a line for each sample: ``client``, ``group`` and ``weight``.
    """

    def __init__(self, task: Task, only: str = "") -> None:
        self.task = task
        clients = [one for one in task.data.clients if only in ("", one.name)]
        self.kind = task.data.task
        self.class_weights: Tensor | None = None
        if isinstance(task.criterion, ClassWeighted):
            self.class_weights = torch.tensor(task.criterion.weights).double()
        self.sizes = {client.name: len(client.train) for client in clients}
        self.bases = {
            client.name: evaluate.base_outputs(task.data, task.criterion, client.name)
            for client in clients
        }
        self.labels = {
            split: {
                client.name: client.split(split).y
                for client in clients
                if len(client.split(split))
            }
            for split in (VALIDATION, TEST)
        }
        self.samples = {split: self._samples(split) for split in (VALIDATION, TEST)}

    def _samples(self, split: str) -> pd.DataFrame:
        """Return a line for each sample: its client, its group, and its weight in means over the federation."""
        client_tables = []
        for client in self.task.data.clients:
            if client.name not in self.labels[split]:
                continue
            part_of_client = client.split(split)
            groups = (
                np.arange(len(part_of_client))
                if part_of_client.groups is None
                else part_of_client.groups
            )
            weights = self.weights(client.name, part_of_client.y).numpy()
            table = {"client": client.name, "group": groups, "weight": weights}
            client_tables.append(pd.DataFrame(table))
        if not client_tables:
            return pd.DataFrame(columns=["client", "group", "weight"])
        all_samples = pd.concat(client_tables, ignore_index=True)
        return all_samples.assign(
            group=nested_groups(client_table["group"] for client_table in client_tables)
        )

    # --- predictors ---

    def load(
        self, path: Path, model: Any = None, round: Literal["best", "last"] = "best"
    ) -> Loaded:
        """Return the models of a finished run, each client's own. Without a stopping rule its last round is its best.

        Args:
            path: the run directory.
            model: the run's model, if it came from Python.
            round: the best round under the stopping rule, or the last one.

        Raises:
            UsageError: the clients hold parts of the model, so that none predicts alone.
        """
        if store.Run(path).stopping_rule() is None:
            round = "last"
        with warnings.catch_warnings(action="ignore"):
            code = code_in(self.task.config)
            objects = Own(data=self.task.own["data"], model=model)
            rounds = load_rounds(path, [round], allow_code=code, **objects)
            return Loaded(*next(rounds))

    def of_models(self, name: str, models: Mapping[str, nn.Module]) -> Predictor:
        """Return the predictor that predicts each client's samples with that client's model.

        Args:
            name: name of the predictor.
            models: {client: module}. Each returns raw outputs.
        """
        logits = self.task.criterion.logits
        return self.predictor(
            name, lambda client, x: logits(evaluate.predict(models[client], x))
        )

    def tuner(
        self, job: TrainingJob, loaded: Loaded, parts: Sequence[Sequence[int]] = ()
    ) -> Tuner:
        """Return a tuner: it fine-tunes a run's models, and predicts each client's validation and test samples.

        Args:
            job: the run.
            loaded: its models, as :meth:`load` returns them.
            parts: blocks of clients. A client's models predict the validation samples of its whole block, too.
        """
        clients, seed = self.task.data.clients, job.config.execution.seed
        sets_by_client = [[k] for k in range(len(clients))]
        for block in parts:
            for k in block:
                sets_by_client[k] = list(block)
        return Tuner(
            loaded.models[clients[0].name],
            loaded.task.criterion,
            Training.of(job.resolved.training),
            [(client.train, client.validation) for client in clients],
            seed,
            loaded.round,
            [tree.state_dict(loaded.models[client.name]) for client in clients],
            samples=None,
            near=[[*sets, len(clients) + k] for k, sets in enumerate(sets_by_client)],
            beside=[client.test for client in clients],
        )

    def finish(
        self,
        job: TrainingJob,
        amounts: Sequence[Tuning] = (Tuning(),),
        parts: Sequence[Sequence[int]] = (),
    ) -> FinishedRun:
        """Return a finished run with what its clients predict after some amounts of fine-tuning.

        Args:
            job: the run, which has ended.
            amounts: the amounts of fine-tuning.
            parts: blocks of clients, lists of their numbers. A client's models predict the validation samples of its
                whole block. Without blocks they predict the client's own samples alone.

        Raises:
            UsageError: the clients hold parts of the model, so that none predicts alone.
            NonFiniteError: the run's models have diverged.
        """
        loaded = self.load(job.path, job.model)
        tuner = self.tuner(job, loaded, parts)
        lr = float(job.resolved.training.lr or 0)
        sets = parts_after(tuner, loaded.task, lr, amounts)
        predictors = {
            amount: self.of_parts(job.arm, by_split)
            for amount, by_split in sets.items()
        }
        last_models, cross = loaded, {}
        if parts:
            if store.Run(job.path).stopping_rule() is not None:
                last_models = self.load(job.path, job.model, "last")
                tuner = self.tuner(job, last_models, parts)
                # the test reads no amount at the full rate
                amounts_read = [amount for amount in amounts if amount.factor != 1.0]
                sets = parts_after(tuner, last_models.task, lr, amounts_read)
            n_own_sets = len(tuner.near)
            for amount, by_split in sets.items():
                outputs_of_own = [
                    set_outputs
                    for (_, split), set_outputs in by_split.items()
                    if split < n_own_sets
                ]
                cross[amount] = torch.cat(outputs_of_own)
        excess = [self.excess(name, model) for name, model in loaded.models.items()]
        learned_nothing = self.kind in PROBABLE and not math.fsum(excess) < 0
        return FinishedRun(job, predictors, learned_nothing, loaded, last_models, cross)

    def excess(self, client: str, model: nn.Module) -> float:
        """Return the sum of a client's training losses minus those of the base rate.

        It is 0 if the task's outputs are no probabilities.

        Args:
            client: the client's name.
            model: the client's model.
        """
        if self.kind not in PROBABLE:
            return 0.0
        train = self.task.data.client(client).train
        logits = self.task.criterion.logits(evaluate.predict(model, train.x))
        base = self.bases[client].expand(len(train), -1)
        gap = evaluate.log_losses(logits.double(), train.y)
        return float((gap - evaluate.log_losses(base, train.y)).sum())

    def of_parts(self, name: str, parts: Mapping[tuple[int, int], Tensor]) -> Predictor:
        """Return a predictor of raw outputs that a :meth:`tuner` has computed.

        Args:
            name: name of the predictor.
            parts: outputs by (client's number k, set of samples). Set k has the client's validation samples, and set
                n_clients + k its test samples.
        """
        clients, logits = self.task.data.clients, self.task.criterion.logits
        outputs = {
            split: {
                client.name: logits(parts[k, k + first_set]).double()
                for k, client in enumerate(clients)
                if client.name in self.labels[split]
            }
            for split, first_set in ((VALIDATION, 0), (TEST, len(clients)))
        }
        return Predictor(name, outputs)

    @cached_property
    def base_rate(self) -> Predictor:
        """Return the predictor without features, from each client's training samples.

        It predicts the share of each class or label, the constant number
        with the least loss, or equal hazards.
        """
        return self.predictor(
            BASE_RATE, lambda client, x: self.bases[client].expand(len(x), -1)
        )

    def predictor(
        self, name: str, predict: Callable[[str, Tensor], Tensor]
    ) -> Predictor:
        """Return a predictor whose outputs ``predict`` computes from a client's name and its samples [n, ...]."""
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
    def dealt(self) -> dict[str, NDArray[np.int64]]:
        """Return the half, 0 or 1, of each validation sample by client, int64 [n].

        Halves are those of :func:`fl_core.statistics.halves_of_one`.
        """
        samples, seed = self.samples[VALIDATION], self.task.config.execution.seed
        half_of = {}
        for number, name in enumerate(self.task.data.names):
            if name in self.labels[VALIDATION]:
                groups = samples["group"][samples["client"] == name]
                half_of[name] = statistics.halves_of_one(
                    groups.to_numpy(int), number, seed
                )
        return half_of

    @cached_property
    def halves(self) -> NDArray[np.int64] | None:
        """Return the half, 0 or 1, of each validation sample, int64 [n].

        Samples are those of all clients, one client after another. The result is None
        if all are in one half.
        """
        halves = np.concatenate([*self.dealt.values(), np.zeros(0, np.int64)])
        return halves if len(np.unique(halves)) > 1 else None

    def calibration(
        self, one: Predictor, half: int | None = None
    ) -> tuple[float, float]:
        """Fit a temperature and a weight of the base rate on the validation samples, and return both.

        If all groups are in one half there is one fit, and the temperature is at least 1. They are (1.0, 0.0) if
        outputs are no probabilities.

        Args:
            one: the predictor that is calibrated.
            half: the half, 0 or 1, whose samples are fitted. Default: all samples.

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
        if self.halves is None:
            temperature, weight = evaluate.fit(outputs, y, weights, base)
            return max(1.0, temperature), weight
        if half is not None:
            in_half = torch.from_numpy(self.halves == half)
            outputs, y = outputs[in_half], y[in_half]
            weights, base = weights[in_half], base[in_half]
        return evaluate.fit(outputs, y, weights, base)

    def _joined(self, one: Predictor, split: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, labels and base rates of a split's samples, client after client.

        Their shapes are [n, C], [n, ...] and [n, C].
        """
        names, labels = list(self.labels[split]), self.labels[split]
        outputs = torch.cat([one.outputs[split][name] for name in names])
        base = [self.bases[name].expand(len(labels[name]), -1) for name in names]
        return outputs, torch.cat([labels[name] for name in names]), torch.cat(base)

    @once
    def losses(self, one: Predictor, split: str) -> Outputs:
        """Return the loss of each sample of a split, float64 [n] by client, for the outputs of a predictor.

        Probabilities are calibrated. On validation samples the calibration is
        cross-fitted: each half is calibrated by a fit on the other half. Other tasks
        have the loss of training.

        Raises:
            UsageError: probabilities cannot be calibrated (:meth:`calibration`).
        """
        outputs, y, base = self._joined(one, split)
        sizes = [
            len(labels_of_client) for labels_of_client in self.labels[split].values()
        ]
        if self.kind not in PROBABLE:
            y = y.double() if y.is_floating_point() else y
            loss = self.task.criterion.of_logits()
            pairs_of = zip(outputs.split(sizes), y.split(sizes), strict=True)
            # risk sets lie within a client
            per_sample = torch.cat(
                [
                    loss.per_sample(z, labels_of_client)
                    for z, labels_of_client in pairs_of
                ]
            )
        elif split == VALIDATION and self.halves is not None:
            calibrations = torch.tensor(
                [self.calibration(one, half) for half in (1, 0)]
            )
            pairs = calibrations.double()[torch.from_numpy(self.halves)]
            calibrated_outputs = outputs / pairs[:, :1] + pairs[:, 1:] * base
            per_sample = evaluate.log_losses(calibrated_outputs, y)
        else:
            calibrated_outputs = evaluate.calibrated(
                outputs, *self.calibration(one), base
            )
            per_sample = evaluate.log_losses(calibrated_outputs, y)
        by_client = per_sample.double().split(sizes)
        return dict(zip(self.labels[split], by_client, strict=True))

    def weights(self, client: str, y: Tensor) -> Tensor:
        """Return the weights of a client's samples, which add up to its number of training samples, float64 [n].

        Args:
            client: the client's name.
            y: labels of the samples, [n, ...]. Weights follow the class weights, if
                any.
        """
        weights = torch.ones(len(y), dtype=torch.float64)
        if self.class_weights is not None:
            weights = self.class_weights[y]
        return weights * self.sizes[client] / weights.sum()

    @property
    def splits(self) -> list[str]:
        """Return those of the two splits, validation and test, that have samples."""
        return [split for split in (VALIDATION, TEST) if self.labels[split]]

    def overlap(self, first: SeedLosses, split: str) -> float:
        """Return the share of the first seed's samples in a split that are in the same split of this seed."""
        first_samples, own_samples = (
            samples_of(losses.task.data.partition, split) for losses in (first, self)
        )
        return len(first_samples & own_samples) / max(1, len(first_samples))

    def parts(
        self, named: Mapping[str, Predictor], split: str, score: str
    ) -> Mapping[str, Part | SumPart]:
        """Return the result of :meth:`part` for each predictor, by name.

        Arguments and errors are those of :meth:`part`.
        """
        return {
            name: self.part(predictor, split, score)
            for name, predictor in named.items()
        }

    def part(self, one: Predictor, split: str, score: str = "loss") -> Part:
        """Return a predictor's score in a split as a part of a :class:`~fedlayers.decision.table.LossTable`.

        Args:
            one: the predictor.
            split: validation or test.
            score: the name of the score, one of :data:`fl_core.rows.SCORES`.

        Raises:
            UsageError: probabilities cannot be calibrated (:meth:`calibration`).
            NonFiniteError: another output is not finite.
        """
        draws = self._draws(one, split, score)
        names = {name: number for number, name in enumerate(self.sizes)}
        weight = draws["weight"].to_numpy(float)
        return Part(
            self.scores(one, split)[score],
            draws["value"].to_numpy(float),
            weight / weight.sum(),
            draws["group"].to_numpy(int),
            draws["client"].map(names).to_numpy(int),
        )

    @once
    def _draws(self, one: Predictor, split: str, score: str) -> pd.DataFrame:
        """Return the values from which a score's standard error follows, a line each.

        Columns are ``client``, ``group``, ``weight`` and ``value``. The loss has a
        value for each sample. Another score has the pseudo-values of a jackknife, one
        for each of up to :data:`BLOCKS` blocks of a client's groups. If the score is
        unknown without a block, the block has the client's score. Clients without the
        score are left out.
        """
        samples = self.samples[split]
        if score == "loss":
            losses = torch.cat([*self.losses(one, split).values()])
            return samples.assign(value=losses.numpy())
        client_tables = []
        for client, rows in samples.groupby("client", sort=False):
            outputs, y = one.outputs[split][client], self.labels[split][client]
            score_of_all = self._scores(outputs, y)[score]
            block = pd.factorize(rows["group"])[0] % BLOCKS
            count = block.max() + 1
            values = np.full(count, score_of_all)
            for omitted_block in range(count if count > 1 else 0):
                is_inside = torch.from_numpy(block != omitted_block)
                score_without = self._scores(outputs[is_inside], y[is_inside])[score]
                if not math.isnan(score_without):
                    values[omitted_block] = (
                        count * score_of_all - (count - 1) * score_without
                    )
            weight = self.sizes[str(client)] / count
            table = {"client": client, "group": np.arange(count), "weight": weight}
            client_tables.append(pd.DataFrame({**table, "value": values}).dropna())
        all_draws = pd.concat(client_tables, ignore_index=True)
        return all_draws.assign(
            group=nested_groups(client_table["group"] for client_table in client_tables)
        )

    # --- scores ---

    @once
    def by_client(self, one: Predictor, split: str = TEST) -> pd.DataFrame:
        """Return a line of scores for each client with samples, NaN where its samples give none.

        The loss is the mean of :meth:`losses`, weighted by :meth:`weights`.
        """
        scores_of = {}
        for client, losses in self.losses(one, split).items():
            y = self.labels[split][client]
            scores = self._scores(one.outputs[split][client], y)
            weights = self.weights(client, y)
            scores["loss"] = float((weights * losses).sum() / weights.sum())
            scores_of[client] = scores
        return pd.DataFrame.from_dict(scores_of, orient="index", dtype=float)

    def _scores(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        data, criterion = self.task.data, self.task.criterion.of_logits()
        known_classes = data.positive_index, data.absent
        return evaluate.scores(outputs.float(), y, criterion, *known_classes)

    def scores(self, one: Predictor, split: str = TEST) -> dict[str, float]:
        """Return a predictor's scores by name: means over the clients that have them.

        Clients are weighted by training samples. A score that no client has is NaN.
        """
        table = self.by_client(one, split)
        sizes = pd.Series(self.sizes).reindex(table.index)
        means = table.mul(sizes, axis=0).sum() / table.notna().mul(sizes, axis=0).sum()
        return dict(means)

    def mean_loss(self, one: Predictor, split: str) -> float:
        """Return the loss of :meth:`scores` without its other scores.

        This takes less time. The loss is NaN if no client has one.
        """
        total = size = 0.0
        for client, losses in self.losses(one, split).items():
            weights = self.weights(client, self.labels[split][client])
            mean = float((weights * losses).sum() / weights.sum())
            if not math.isnan(mean):
                total += self.sizes[client] * mean
                size += self.sizes[client]
        return total / size if size else math.nan

    def worth(self, one: Predictor) -> float:
        """Return a predictor's validation score by :attr:`selecting`, with its sign changed if lower is better."""
        if self.selecting == "loss":
            return -self.mean_loss(one, VALIDATION)
        value = self.scores(one, VALIDATION).get(self.selecting, math.nan)
        return value if SCORES[self.selecting] else -value

    @property
    def selecting(self) -> str:
        """Return the name of the score that ranks finished runs: the loss, or the one that selects rounds."""
        return self.task.config.federation.monitor or "loss"


def parts_after(
    tuner: Tuner, task: Task, lr: float, amounts: Sequence[Tuning]
) -> dict[Tuning, dict[tuple[int, int], Tensor]]:
    """Return the outputs of :func:`outputs_after`, split by (client's number, set of samples).

    The arguments are those of :func:`outputs_after`.
    """
    outputs = outputs_after(tuner, task, lr, amounts)
    return {
        amount: tuner.parts(amount_outputs)
        for amount, amount_outputs in outputs.items()
    }


def outputs_after(
    tuner: Tuner, task: Task, lr: float, amounts: Sequence[Tuning]
) -> dict[Tuning, Tensor]:
    """Return the raw outputs [n, C] of a tuner's samples, before and after some amounts of fine-tuning.

    Amounts are trained together by their factor of the rate. If one diverges, all
    amounts of this factor are left out, shorter ones too.

    Args:
        tuner: trains the copies.
        task: the run's task, whose layers are all fine-tuned.
        amounts: the amounts of fine-tuning, each once, those of a factor in ascending
            epochs. No fine-tuning is always added.
        lr: the learning rate of the run.

    Raises:
        NonFiniteError: the outputs before fine-tuning are not finite.
    """
    names, outputs = every(task.layers), {Tuning(): tuner.start}
    for factor in dict.fromkeys(amount.factor for amount in amounts if amount.epochs):
        amounts_at_factor = [
            amount for amount in amounts if amount.epochs and amount.factor == factor
        ]
        epochs = [amount.epochs for amount in amounts_at_factor]
        try:
            tuned_outputs = tuner.outputs(names, amounts_at_factor[0].rate(lr), epochs)
        except NonFiniteError:
            continue
        outputs |= dict(zip(amounts_at_factor, tuned_outputs, strict=True))
    return outputs
