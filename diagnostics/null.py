"""Nulls: repeated measurements on shuffled data or untrained models.

A curve means little by itself, because the network and its initialisation shape it too. A *null* takes one thing away:
what the labels mean, how clients differ, or the training. Model, batch size and client sizes stay the same. Measuring
the same again shows how much of the curve remains.

The module also marks rows of resampled batches. They estimate what a metric would give
on other draws of a client's batches. A client's batches are assigned in turn to at most
:data:`PARTS` parts. A resample draws that many parts with replacement, and gives the
metric's rows for them. This is the bootstrap of the batches (Efron 1979) in groups. So
a sum is stored for each part instead of each batch.

For a mean over k parts it shows (k - 1) / k of the variance, so few batches look more
certain than they are. One part cannot be resampled. Only means over the steps have
resamples, as federation sensitivity. Resamples of a gradient's length or variance would
be biased: noise inflates these values, and a resample inflates them once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd

from fl_core.config import ROUNDS
from fl_core.data.arrays import nested_groups
from fl_core.data.partitions import SPLITS
from fl_core.errors import UsageError, as_list, check_known, check_value
from fl_core.rows import Row
from fl_core.seeds import numpy_generator, seed_of, torch_seeded
from fl_core.storage import sha

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fl_core.data.federated import FederatedData, Split

    from .measurement import Data

Groups = np.ndarray | None
"""The group of each sample of all clients, such as a patient.

Groups are shuffled whole. None means that single samples are shuffled.
"""
Shuffled = tuple[np.ndarray, np.ndarray]
"""For each place, the sample that gives its inputs, and the one that gives its labels.

Both are positions among the samples of all clients, one client after another.
"""
Retrain: TypeAlias = "Callable[[Mapping[str, Data]], Any]"
"""Trains on a null's data, {client: data}, and returns models as :func:`diagnostics.measure.diagnose` takes them."""


@dataclass(frozen=True)
class Null:
    """One null: a description of what it measures, and how its data are made.

    Attributes:
        title: what is measured, as in "the same plan comes from ...".
        same: the conclusion if a decision stays the same on the null.
        shuffles: whether its data are shuffled. If not, they stay, and untrained models are measured.
    """

    title: str
    same: str
    shuffles: bool = True


@dataclass(frozen=True)
class Nulls:
    """The nulls to measure again on.

    Attributes:
        names: names of :data:`NULLS`.
        draws: random draws of each null that shuffles.
        retrain: a function that trains on a null's data: {client: data} -> models, in the form of ``models`` of
            :func:`~diagnostics.measure.diagnose`. Without it the same models are measured on the shuffled data. They
            have seen the real data, and rows and decisions record that.
        start: the untrained model for the null ``fresh``. Default: a copy whose modules draw their weights again.

    Raises:
        UsageError: a null is unknown, or there is less than one draw.
    """

    names: str | Sequence[str]
    draws: int = 1
    retrain: Retrain | None = None
    start: nn.Module | None = None

    def __post_init__(self) -> None:
        check_value("null_draws", self.draws, ROUNDS)
        names = as_list("null", self.names, empty=True)
        unique = dict.fromkeys(check_known("null", name, NULLS) for name in names)
        object.__setattr__(self, "names", tuple(unique))

    @classmethod
    def of(cls, given: Nulls | str | Sequence[str]) -> Nulls:
        """Return an object of this class, made from names of nulls if it is not one already."""
        if isinstance(given, Nulls):
            return given
        return cls(given)


NO_NULLS = Nulls(())


def null_data(
    data: FederatedData, null: str, seed: int, draw: int = 1
) -> FederatedData:
    """Return the federation with its labels permuted or its samples assigned at random.

    The given federation stays as it is. Every client keeps its name and its number of samples in each split. No sample
    or label leaves its split.

    >>> import fedlayers as fl
    >>> data = fl.load("heart")
    >>> dealt = null_data(data, "clients", seed=0)
    >>> dealt.weights == data.weights, dealt.digest == data.digest
    (True, False)

    Args:
        data: the federation.
        null: one of :data:`NULLS`. For ``fresh``, which changes models, the data are the same.
        seed: seed of the draw, together with its number ``draw`` (from 1).

    Raises:
        UsageError: the null is unknown.
    """
    if not NULLS[check_known("null", null, NULLS)].shuffles:
        return data
    from fl_core.data.federated import ClientData  # with torch, which rows go without

    splits: dict[str, dict[str, Split]] = {client.name: {} for client in data.clients}
    indices: dict[str, dict[str, np.ndarray]] = {
        client.name: {} for client in data.clients
    }
    for split in SPLITS:
        parts = {client.name: client.split(split) for client in data.clients}
        places = np.concatenate([data.partition.indices[n][split] for n in parts])
        for name, null_split, numbers in _shuffled(
            parts, places, null, split, seed, draw
        ):
            splits[name][split], indices[name][split] = null_split, numbers
    clients = tuple(ClientData(name, **splits[name]) for name in splits)
    digest = sha(f"{data.digest}|null {null}|{seed}|{draw}".encode())
    return replace(
        data,
        clients=clients,
        partition=replace(data.partition, indices=indices),
        digest=digest,
    )


def null_samples(
    data: Mapping[str, Data], null: str, seed: int, draw: int = 1, split: str = "train"
) -> dict[str, Data]:
    """Shuffle samples outside a federation, as :func:`null_data` does, and return them by client.

    Samples are pairs (x, y), splits or loaders. A loader becomes a list of batches of
    the same sizes. If all clients have groups, these are shuffled whole, and the
    results are splits. Otherwise they are pairs. For ``fresh``, which changes models,
    samples are returned as they are.

    >>> import torch
    >>> data = {"a": (torch.zeros(3, 1), torch.tensor([0, 0, 0])), "b": (torch.ones(3, 1), torch.tensor([1, 1, 1]))}
    >>> sorted(torch.cat([y for _, y in null_samples(data, "labels", seed=0).values()]).tolist())
    [0, 0, 0, 1, 1, 1]

    Args:
        data: the samples of each client.
        null, seed, draw: as for :func:`null_data`.
        split: the split that the samples belong to. Each split has its own draw.

    Raises:
        UsageError: the null is unknown, or samples cannot be shuffled between clients because there is one client or
            their shapes differ.
    """
    if not NULLS[check_known("null", null, NULLS)].shuffles:
        return dict(data)
    if null == "clients" and len(data) < 2:
        raise UsageError(
            "null 'clients' must have at least 2 clients; got one set of data."
        )
    from fl_core.data.federated import Split

    samples_by_client = {name: _read(samples, seed) for name, samples in data.items()}
    _check_shapes(x for x, _, _ in samples_by_client.values())
    parts = {
        name: Split(x, y, getattr(data[name], "groups", None))
        for name, (x, y, _) in samples_by_client.items()
    }
    places = np.arange(sum(map(len, parts.values())))
    shuffled: dict[str, Data] = {}
    for name, samples, _ in _shuffled(parts, places, null, split, seed, draw):
        if samples.groups is not None:
            shuffled[name] = samples
        else:
            shuffled[name] = (samples.x, samples.y)
        lengths = samples_by_client[name][2]
        if lengths is not None:
            batches_of_client = samples.x.split(lengths), samples.y.split(lengths)
            shuffled[name] = list(zip(*batches_of_client, strict=True))
    return shuffled


def _read(data: Data, seed: int) -> tuple[torch.Tensor, torch.Tensor, list[int] | None]:
    """Return all of a client's samples, and the lengths of its loader's batches.

    The samples are x and y. The lengths are None for a pair.

    Raises:
        UsageError: batches of the loader have different shapes of samples.
    """
    import torch

    from .measurement import batches, full_batch

    pair = full_batch(data)
    if pair is not None:
        return *pair, None
    with torch_seeded(seed_of(seed, "null", "read")):
        batch_list = list(batches(data, None))
    _check_shapes(x for x, _ in batch_list)
    x, y = (torch.cat([batch[k] for batch in batch_list]) for k in (0, 1))
    return x, y, [len(batch[1]) for batch in batch_list]


def _check_shapes(samples: Iterable[torch.Tensor]) -> None:
    shapes = {tuple(x.shape[1:]) for x in samples}
    if len(shapes) > 1:
        shapes_there = ", ".join(map(str, sorted(shapes)))
        raise UsageError(
            f"shapes of shuffled samples must be equal; got {shapes_there}."
        )


def _shuffled(
    parts: Mapping[str, Split],
    places: np.ndarray,
    null: str,
    split: str,
    seed: int,
    draw: int,
) -> Iterator[tuple[str, Split, np.ndarray]]:
    """Yield each client's samples on a null, in the order of their places, and these places.

    Args:
        parts: the samples of each client in the split.
        places: positions of all clients' samples in the source, one client after
            another.
        null: name of a null that shuffles.
        split, seed, draw: name of the split, seed and number of the draw.
    """
    import torch

    from fl_core.data.federated import Split

    x, y = (torch.cat([getattr(p, name) for p in parts.values()]) for name in "xy")
    group_arrays = [client_split.groups for client_split in parts.values()]
    if any(group_array is None for group_array in group_arrays):
        groups = None
    else:
        groups = nested_groups(group_arrays)
    sizes = {name: len(client_split) for name, client_split in parts.items()}
    draws = partial(numpy_generator, seed, f"null {null}", split, draw)
    orders = _orders(null, sizes, draws, groups)
    ends = np.cumsum(list(sizes.values()))[:-1]
    for name, *orders_of_part in zip(
        parts, *(np.split(o, ends) for o in orders), strict=True
    ):
        ascending = np.argsort(
            places[orders_of_part[0]], kind="stable"
        )  # as in partitions
        inputs, labels = (order[ascending] for order in orders_of_part)
        input_positions, label_positions = map(torch.from_numpy, (inputs, labels))
        if groups is None:
            own_groups = None
        else:
            own_groups = groups[inputs]
        client_split = Split(
            x[input_positions.to(x.device)], y[label_positions.to(y.device)], own_groups
        )
        yield name, client_split, places[inputs]


def on_null(
    models: nn.Module | Mapping[str, nn.Module],
    data: Mapping[str, Data],
    options: Mapping[str, Mapping[str, Any]],
    null: str,
    draw: int,
    *,
    seed: int,
    nulls: Nulls,
) -> tuple[Any, dict[str, Data], dict[str, dict[str, Any]]]:
    """Return models, data and metrics' options for measuring again on a null.

    Data and options are returned as new dicts. Models are the same objects, unless they
    are trained again or untrained.

    Args:
        models: one model for all clients, or {client: model}.
        data: {client: samples}.
        options: {metric: {option: value}}. The data of an option ``test`` are shuffled,
            too.
        seed: seed of the random draws.
        null: name of the null, one of :data:`NULLS`.
        draw: number of the draw, from 1.
        nulls: the requested nulls. They may have a function that trains models on the null's data.

    Raises:
        UsageError: as :func:`null_samples` and :func:`untrained_copy`.
    """
    from torch import nn

    settings = {
        metric: dict(given_options) for metric, given_options in options.items()
    }
    if not NULLS[null].shuffles:
        if isinstance(models, nn.Module):
            first_model = models
        else:
            first_model = next(iter(models.values()))
        start_model = nulls.start
        if start_model is None:
            start_model = untrained_copy(first_model, seed)
        return (
            start_model
            if isinstance(models, nn.Module)
            else dict.fromkeys(models, start_model),
            dict(data),
            settings,
        )
    # several models on one set of data
    is_shared_data = (
        len(data) > 1 and len({id(samples) for samples in data.values()}) == 1
    )
    shuffled = null_samples(
        dict([*data.items()][:1]) if is_shared_data else data, null, seed, draw
    )
    if is_shared_data:
        shuffled = dict.fromkeys(data, *shuffled.values())
    for metric_options in settings.values():
        if metric_options.get("test") is not None:
            metric_options["test"] = null_samples(
                metric_options["test"], null, seed, draw, split="validation"
            )
    if nulls.retrain is None:
        null_models = models
    else:
        null_models = nulls.retrain(shuffled)
    return null_models, shuffled, settings


def untrained_copy(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy of a model whose trainable modules have drawn their initial weights again.

    Frozen modules stay as they were. Modules without parameters reset their buffers if
    they have ``reset_parameters``; other buffers stay.

    Raises:
        UsageError: a module has parameters of its own and no ``reset_parameters``. The message names it.
    """
    from fl_core.tree import copied

    model_copy = copied(model)
    with torch_seeded(seed_of(seed, "null", "fresh")):
        for name, module in model_copy.named_modules():
            parameters = list(module.parameters(recurse=False))
            if parameters and not any(
                parameter.requires_grad for parameter in parameters
            ):
                continue
            if not parameters and next(module.buffers(recurse=False), None) is None:
                continue
            reset = getattr(module, "reset_parameters", None) or getattr(
                module, "_reset_parameters", None
            )
            if reset is not None:
                reset()
            elif parameters:  # buffers alone are constants
                if name:
                    module_class = type(module).__name__
                    module_text = f"module {name!r}, a {module_class},"
                else:
                    module_text = type(module).__name__
                raise UsageError(
                    f"null 'fresh': {module_text} cannot draw its weights again. Pass the untrained model as start."
                )
    return model_copy


# --- how the data are shuffled ---------------------------------------------------------------------------------


def _permuted(draw: np.random.Generator, places: np.ndarray, groups: Groups) -> Shuffled:  # fmt: skip
    """Return positions in order and in random order, both [n]. Groups stay together."""
    if groups is None:
        return places, places[draw.permutation(len(places))]
    distinct_groups, group = np.unique(groups[places], return_inverse=True)
    order = draw.permutation(len(distinct_groups))[group]
    return (
        places[np.argsort(group, kind="stable")],
        places[np.argsort(order, kind="stable")],
    )


def _orders(
    null: str,
    sizes: Mapping[str, int],
    draws: Callable[..., np.random.Generator],
    groups: Groups,
) -> Shuffled:
    """Return for each place the samples that give its inputs and labels on a null.

    ``labels`` permutes the labels of all clients, and ``labels_within`` those of each
    client. ``clients`` assigns all samples at random.

    Args:
        null: name of a null that shuffles.
        sizes: number of samples of each client.
        draws: returns a random generator, for a client if its name is given.
        groups: the group of each sample; None for single samples.
    """
    places = np.arange(sum(sizes.values()))
    if null != "labels_within":
        inputs, labels = _permuted(draws(), places, groups)
        if null == "clients":
            return (labels, labels)
        return (inputs, labels)
    ends = np.cumsum([*sizes.values()])[:-1]
    parts = [
        _permuted(draws(name), positions, groups)
        for name, positions in zip(sizes, np.split(places, ends), strict=True)
    ]
    pairs = zip(*parts, strict=True)
    return np.concatenate(next(pairs)), np.concatenate(next(pairs))


NULLS: dict[str, Null] = {
    "labels": Null(
        "permuted labels", "this evidence does not depend on your data's labels"
    ),
    "labels_within": Null(
        "labels permuted within each client",
        "this evidence does not depend on which of a client's samples has which label",
    ),
    "clients": Null(
        "samples dealt to clients at random",
        "this evidence does not depend on how your clients differ",
    ),
    "fresh": Null(
        "the untrained common start", "this evidence does not depend on training", False
    ),
}
"""The nulls by name. Labels and samples are shuffled split by split: no test sample is trained on."""


# --- their rows ------------------------------------------------------------------------------------------------

_KEPT = ", models kept"
_NAMES = "|".join(NULLS)
_MARK = rf"null ({_NAMES}) (\d+)({_KEPT})?"


def mark_null(
    table: pd.DataFrame, null: str, draw: int, kept: bool = False
) -> pd.DataFrame:
    """Return the rows with a null's draw in their column ``model``: ``null labels 1``.

    Args:
        table: the rows.
        null, draw: name of the null, and number of its draw.
        kept: whether the models were trained on the real data and only measured on the null's. The mark adds that.
    """
    mark = ""
    if kept:
        mark = _KEPT
    return table.assign(model=f"null {null} {draw}{mark}")


def rows_of_nulls(
    nulls: Nulls, measured: Callable[[str, int], pd.DataFrame], kept: bool = False
) -> pd.DataFrame:
    """Return the marked rows of all draws of at least one null.

    Untrained models have one draw.

    Args:
        measured: (null, draw) -> its rows.
        kept: as in :func:`mark_null`, for the nulls that shuffle.
    """
    tables = []
    for null in nulls.names:
        shuffles = NULLS[null].shuffles
        for draw in range(1, (nulls.draws if shuffles else 1) + 1):
            table = measured(null, draw)
            tables.append(mark_null(table, null, draw, kept and shuffles))
    return pd.concat(tables, ignore_index=True)


def of_null(table: pd.DataFrame) -> pd.Series:
    """Return whether each row belongs to a null, bool [rows]."""
    is_marked = table["model"].astype("string").str.fullmatch(_MARK)
    return is_marked.fillna(False).astype(bool)


def nulls_in(table: pd.DataFrame) -> dict[str, list[pd.DataFrame]]:
    """Return the rows of each null in a frame, one frame per draw.

    The marks are removed, so that each frame is like a diagnosis of its own.
    """
    nulls: dict[str, list[pd.DataFrame]] = {}
    rows = table[of_null(table)]
    for model, null_rows in rows.groupby("model", sort=False):
        nulls.setdefault(str(model).split()[1], []).append(
            null_rows.assign(model="").reset_index(drop=True)
        )
    return nulls


def kept_in(table: pd.DataFrame) -> frozenset[str]:
    """Return the nulls in a frame whose models were trained on the real data (see :func:`mark_null`)."""
    marks = table.loc[of_null(table), "model"].astype(str).unique()
    return frozenset(mark.split()[1] for mark in marks if mark.endswith(_KEPT))


PARTS = 10
_RESAMPLE = ", resample "


def draws(parts: int, resamples: int, seed: int, client: str) -> list[list[int]]:
    """Return how often each part counts in each resample, [resamples, parts].

    Each row sums to ``parts``. There are no resamples of fewer than two parts. Only the seed and the client's name
    determine the draws, so metrics with the same batches draw the same ones.
    """
    if parts < 2:
        return []
    random = numpy_generator(seed, "resample", client)
    counts: list[list[int]] = random.multinomial(
        parts, [1 / parts] * parts, size=resamples
    ).tolist()
    return counts


def mark_resample(rows: Iterable[Row], number: int, parts: int) -> list[Row]:
    """Return the rows of single clients, marked as a resample in ``variant`` and ``estimator``, without errors.

    Args:
        rows: rows of the resample. Those of pairs and of all clients together are left out.
        number: number of the resample, from 1.
        parts: number of parts of the batches that were drawn, for the estimator.
    """
    return [
        {
            **row,
            "variant": f"{row['variant']}{_RESAMPLE}{number}",
            "estimator": f"{row['estimator']}, {parts} parts of the batches redrawn",
            "stderr": None,
        }
        for row in rows
        if row["client"] and not row["client_b"]
    ]


def split_resamples(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split a frame into the rows of the measurement itself and the rows of resamples.

    Rows of nulls are in neither part.
    """
    table = table[~of_null(table)]
    is_resample = table["variant"].str.contains(_RESAMPLE, regex=False)
    return table[~is_resample], table[is_resample]


def resamples_of(table: pd.DataFrame, variant: str) -> pd.DataFrame:
    """Return the rows that are resamples of a variant, numbered in the new column ``resample``."""
    start = f"{variant}{_RESAMPLE}"
    resample_rows = table[table["variant"].str.startswith(start)]
    return resample_rows.assign(
        resample=resample_rows["variant"].str.removeprefix(start).astype(int)
    )
