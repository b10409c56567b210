"""One site: its TOML file, its samples and their split, and the states that it stores."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from fedlayers.flower.federation import read_keys
from fl_core import storage, tree
from fl_core.algorithms.base import State
from fl_core.data.federated import ClientData, split_of
from fl_core.data.loading import opened
from fl_core.data.partitions import SPLITS
from fl_core.data.partitions.base import redraw_groups, split_groups
from fl_core.data.preprocessing import (
    Preprocessing,
    clipped,
    fence,
    learn_categories,
    recode,
)
from fl_core.data.reading import CLIPS
from fl_core.data.registry import DATASETS, SHARES
from fl_core.data.sources import Source
from fl_core.data.values import Array, Floats, Integers
from fl_core.errors import RunError, UsageError, about, check_known, damaged
from fl_core.rounds.clients import TUNED
from fl_core.rows import CLASSIFICATION, REGRESSION
from fl_core.storage import (
    Folder,
    json_bytes,
    merge_trees,
    parsed_json,
    read_text,
    sha,
    split_trees,
)


def supernode() -> str:
    """Return the process id of the supernode, the parent of this process's parent.

    It is empty on systems without ``/proc``.
    """
    stat = Path(f"/proc/{os.getppid()}/stat")
    if stat.exists():
        return stat.read_text().rpartition(")")[2].split()[1]
    return ""


STARTED_BY = supernode()
"""The supernode when this process began.

If it is another one later, that supernode was killed, and this process must not write.
"""
META = "json"
"""The name of the JSON in a file of tensors, which is UTF-8. No tree has that name."""
OUTPUTS = "outputs"
"""The file of what a run's models predict for the client's validation and test samples."""
SCALES, IMPUTES = ("none", "standard", "imagenet"), ("none", "mean")
"""What sites can fit together by counts, means and squares."""


@dataclass(frozen=True)
class SiteFile:
    """The keys of a site's TOML file. Its paths are relative to it."""

    name: str
    """The client's name. It is unique in the federation."""
    path: str
    """The site's own table, images or texts, or the name of a dataset."""
    classes: list[str] | None = None
    """All classes of the federation, if the site's own samples lack some."""
    vocabulary: str | None = None
    """The file with the federation's words, one a line. Texts need it."""
    device: str = "cpu"
    """Device for training."""
    columns: dict[str, Any] | None = None
    """How a table is read: the keys of fl_core.data.reading.Reading."""


OF_SOURCE = (
    *("task", "classes", "shape", "columns"),
    *("mean", "std", "scale", "impute", "clip"),
)
"""What a server needs to know of the samples of each site."""


class Site:
    """One site with its samples.

    Their split depends on the client's number and the seeds alone, as in a run on all
    data together.

    Args:
        path: the path of the site's TOML file.
        number: the number of the client whose samples the site holds, in a simulation.
            The site gets the client's name. None outside of a simulation.

    Attributes:
        name: the client's name.
        file: the keys of the TOML file.
        folder: the folder of the site's states, next to the TOML file.
        source: the site's samples, read from its own files.

    >>> lines = [f"{k % 7},{k % 2}" for k in range(20)]
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = Path(f"{folder.name}/table.csv").write_text("\\n".join(["age,label", *lines]))
    >>> keys = "name = 'north'\\npath = 'table.csv'\\nvocabulary = 'words.txt'"
    >>> _ = Path(f"{folder.name}/site.toml").write_text(keys)
    >>> Site(f"{folder.name}/site.toml")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: site 'north': vocabulary must be given for texts, and texts alone.

    Raises:
        UsageError: the file has an unknown key, or its data cannot be read. The message is one line.
    """

    def __init__(self, path: Path | str, number: int | None = None) -> None:
        self.path = Path(path).absolute()
        self.number = number
        self.file = read_keys(self.path, SiteFile)
        self.name = self.file.name
        self.folder = self.path.parent / f"{self.path.stem}-states"
        if number is not None:
            self.folder /= str(number)
        self.source = self._read()

    def _read(self) -> Source:
        path_or_name, columns = self.file.path, self.file.columns or {}
        location = (
            path_or_name
            if path_or_name in DATASETS
            else self.path.parent / path_or_name
        )
        with about(f"site {self.name!r}"):
            source = self._common(self._own(opened(location, **columns)[0]))
            check_known("scale over sites", source.scale, SCALES)
            check_known("impute over sites", source.impute, IMPUTES)
            return source

    def _own(self, source: Source) -> Source:
        """Return the samples of this site's client.

        They are all samples if the data name no clients. In a simulation the site's
        name becomes that of the client.

        Raises:
            UsageError: a sample has several inputs, or the data have no such client.
        """
        if getattr(source.shape, "layout", None):
            raise UsageError("samples over sites must have one input; got several.")
        if source.owner is None:
            return source
        names = source.owner_names
        if self.number is not None:
            if self.number >= len(names):
                raise UsageError(
                    f"sites must be at most {len(names)}, one for each client."
                )
            self.name = names[self.number]
        number = names.index(check_known("client", self.name, names))
        return source.take(np.flatnonzero(source.owner == number))

    def _common(self, source: Source) -> Source:
        """Return the samples with the classes and the words of the whole federation.

        Raises:
            UsageError: a class is unknown, or ``classes`` or ``vocabulary`` does not
                fit the task.
        """
        class_names = self.file.classes
        vocabulary = self.file.vocabulary
        if class_names is not None:
            if source.task != CLASSIFICATION:
                raise UsageError(f"classes must be left out for task {source.task}.")
            class_positions = [
                class_names.index(check_known("class", name, class_names))
                for name in source.classes
            ]
            y = np.array(class_positions)[source.y]
            source = replace(source, y=y, classes=tuple(class_names))
        if (source.words is None) != (vocabulary is None):
            raise UsageError("vocabulary must be given for texts, and texts alone.")
        if vocabulary is None:
            return source
        path = self.path.parent / vocabulary
        with about(
            f"{path} must be text in UTF-8", UnicodeDecodeError, way="Save it again."
        ):
            lines = read_text(path).split("\n")
        return source.with_vocabulary(tuple(filter(None, lines)))

    def facts(self) -> dict[str, Any]:
        """Return the facts that a server needs before it numbers the sites, such as names and sizes.

        The keys are those of FACTS of :mod:`fedlayers.flower.federation`.
        """
        source = self.source
        words = source.words
        return {
            "name": self.name,
            "samples": len(source),
            "dataset": self.file.path if self.file.path in DATASETS else "",
            "tokens": getattr(source.shape, "tokens", 0),
            "words": "" if words is None else sha("\n".join(words).encode()),
            "images": source.is_image,
            "target": list(source.y.shape[1:]),
            "worded": [bool(words) for words in source.categories],
            **{key: getattr(source, key) for key in OF_SOURCE},
        }

    def describe(
        self, number: int, seed: int, split_seed: int | None = None
    ) -> dict[str, Any]:
        """Return the sizes of the client's splits, their digest and classes, and what a table's preparation needs.

        The keys are those of DESCRIPTION of :mod:`fedlayers.flower.federation`.
        ``moments`` is None for data that are neither scaled nor filled, and ``fences``
        for data that are not clipped.

        Args:
            number: the client's number in the federation.
            seed: the run's seed, which draws training and validation samples.
            split_seed: the seed that draws the test samples. Default: the run's.
        """
        source, parts = self.source, self._split(number, seed, split_seed)
        has_classes = source.task == CLASSIFICATION
        moments = None
        if source.prepares:
            moments = self._moments(self._numbers(parts[0]), parts[0])
        return {
            "sizes": [len(part) for part in parts],
            "digest": source.digest,
            "classes": np.unique(source.y).tolist() if has_classes else [],
            "words": learn_categories(source.x[parts[0]], source.categories),
            "moments": moments,
            "fences": self._fences(parts[0]) if self._clips else None,
        }

    @property
    def _clips(self) -> bool:
        """Return whether a table's cells are clipped to fences, as on one machine."""
        source = self.source
        table = source.prepares or source.categories or source.columns
        return bool(table) and source.clip == CLIPS[0]

    def _numbers(self, train: Integers) -> Floats:
        """Return the columns of training samples, float64 [n, d]. Words are 0."""
        values = self.source.x[train].astype(np.float64)
        words = self.source.categories
        values[:, [k for k, column in enumerate(words) if column]] = 0.0
        return values

    def _fences(self, train: Integers) -> list[list[float]]:
        """Return the client's lower and upper fences of each column (:func:`fl_core.data.preprocessing.fence`)."""
        fences = []
        words = self.source.categories or ((),) * self.source.x.shape[1]
        for values, category_words in zip(self._numbers(train).T, words, strict=True):
            known_values = values[~np.isnan(values)]
            fences.append(fence(known_values[:0] if category_words else known_values))
        return np.array(fences, dtype=float).reshape(-1, 2).T.tolist()

    def clipped(
        self,
        number: int,
        seed: int,
        split_seed: int | None,
        low: list[float],
        high: list[float],
    ) -> dict[str, Any]:
        """Count the training cells outside the federation's fences, and return each column's moments after clipping.

        Args:
            number: the client's number in the federation.
            seed, split_seed: the seeds that draw the splits; see :meth:`describe`.
            low, high: the fences of each column: cells below the one or above the other
                are clipped (:func:`fl_core.data.preprocessing.clipped`).

        Returns:
            ``known``, the number of cells of each column that are not missing;
            ``outside``, the number of those outside the fences; and ``moments``, those
            of all cells that are not missing, after clipping. They are None for data
            that are neither scaled nor filled. The form is CLIPPED of
            :mod:`fedlayers.flower.federation`.
        """
        train = self._split(number, seed, split_seed)[0]
        values = self._numbers(train)
        ends = np.array(low), np.array(high)
        moments = None
        if self.source.prepares:
            moments = self._moments(clipped(values, *ends), train)
        return {
            "known": (~np.isnan(values)).sum(axis=0).tolist(),
            "outside": ((values < ends[0]) | (values > ends[1])).sum(axis=0).tolist(),
            "moments": moments,
        }

    def _moments(self, values: Floats, train: Integers) -> list[list[float]]:
        """Return the moments of each column, [3][columns].

        They are the count, the mean, and the sum of squared differences from the mean.
        Missing values do not count. The targets of a regression are the last column.

        Args:
            values: the columns of the training samples, [n, d].
            train: the positions of these samples, [n].
        """
        source = self.source
        if source.task == REGRESSION:
            values = np.column_stack([values, source.y[train].astype(np.float64)])
        is_known = ~np.isnan(values)
        count = is_known.sum(0)
        mean = np.where(is_known, values, 0.0).sum(0) / np.maximum(count, 1)
        squares = np.square(np.where(is_known, values - mean, 0.0)).sum(0)
        return np.stack([count, mean, squares]).tolist()

    def client(
        self,
        number: int,
        seed: int,
        preparation: Preprocessing | None,
        split_seed: int | None = None,
    ) -> ClientData:
        """Return the prepared samples of the client in their splits.

        Args:
            number: the client's number in the federation.
            seed, split_seed: the seeds that draw the splits; see :meth:`describe`.
            preparation: the federation's preparation of a table; None without one.
        """
        source, parts = self.source, self._split(number, seed, split_seed)
        if preparation is not None:
            x: Array = recode(source.x, source.categories, preparation.categories)
            source = replace(source, x=preparation.transform(x), categories=())
        return ClientData(self.name, *(split_of(source, part) for part in parts))

    def shared(
        self, number: int, first: int, seed: int, split_seed: int | None, split: str
    ) -> int:
        """Return how many samples are in a split in two seeds.

        Args:
            number: the client's number in the federation.
            first, seed: the two seeds.
            split_seed: the seed that draws the test samples; None for each seed's own.
            split: train, validation or test.
        """
        split_number = SPLITS.index(split)
        first_split, other_split = (
            self._split(number, draw_seed, split_seed)[split_number]
            for draw_seed in (first, seed)
        )
        return len(np.intersect1d(first_split, other_split))

    def _split(self, number: int, seed: int, split_seed: int | None) -> list[Integers]:
        """Return the positions of train, validation and test samples.

        Each split is in ascending order. They are the same as on one machine
        (:func:`fl_core.data.partitions.make`).

        Args:
            number: the client's number in the federation.
            seed: the run's seed.
            split_seed: the seed that draws the test samples; None for the run's.
        """
        source = self.source
        first_seed = split_seed
        if first_seed is None:
            first_seed = seed
        train, test = np.arange(len(source)), None
        if source.is_train is not None:
            train, test = map(np.flatnonzero, (source.is_train, ~source.is_train))
        parts = split_groups(
            self.name, number, train, test, SHARES, first_seed, source.groups
        )
        if first_seed != seed:
            parts = redraw_groups(number, parts, seed, source.groups)
        return [np.sort(part).astype(np.int64) for part in parts]


class States:
    """The files of a run at a site: its description, and its client's states and outputs.

    States are kept for the last two rounds in which the client trained. Files are written
    atomically, under a lock.

    Args:
        folder: the site's folder.
        run: the run's name at the sites.

    Raises:
        UsageError: the name of the run is invalid.
    """

    def __init__(self, folder: Path, run: str) -> None:
        if not re.fullmatch("[0-9a-f]{32,64}", run):
            raise UsageError(f"run must be a digest; got {run[:80]!r}.")
        self.files = Folder(folder / run)

    def begin(self, job: dict[str, Any], start: tree.Tree) -> None:
        """Store the run's description and its initial weights.

        Args:
            job: the description, as in the head of the server's first request.
            start: pretrained weights; empty if the seed draws the initial weights.
        """
        self.files.path.mkdir(parents=True, exist_ok=True)
        with self._locked():
            self._write("job", {"start": start}, job)

    def job(self) -> tuple[dict[str, Any], tree.Tree]:
        """Return the run's description and its initial weights. The weights are empty if the seed draws them."""
        trees, job = self._read("job")
        return job, trees["start"]

    def load(self, version: str) -> State:
        """Return the state of a version.

        Raises:
            CorruptError: the state is not stored, as one that is older than the last
                two rounds, or it is damaged.
        """
        return State(*self._read(version))

    def save(self, version: str, state: State, before: str) -> None:
        """Store a state, and remove states that are older than the last two rounds.

        Args:
            before: the version from which the state was trained. It is kept.
        """
        with self._locked():
            self._write(version, state.trees, state.meta)
            names = [name for name in self.files.names() if name[0].isdigit()]
            recent = sorted({name.partition("-")[0] for name in names})[-2:]
            for name in names:
                if name.partition("-")[0] not in recent and name != before:
                    self.files.remove(name)

    def tuned(self, version: str, done: int) -> dict[str, tree.Tree]:
        """Return {name: tensors} of the stored model that was fine-tuned from a state; empty if there is none.

        Args:
            version: the state from which it was fine-tuned.
            done: the round after which it was fine-tuned.
        """
        if not self.files.has(TUNED):
            return {}
        models, version_and_round = self._read(TUNED)
        if version_and_round == [version, done]:
            return models
        return {}

    def save_tuned(
        self, version: str, done: int, models: Mapping[str, tree.Tree]
    ) -> None:
        """Store a fine-tuned model in place of the previous one.

        Args:
            version: the state from which it was fine-tuned.
            done: the round after which it was fine-tuned.
            models: {name: tensors} of the model.
        """
        with self._locked():
            self._write(TUNED, models, [version, done])

    def outputs(self, name: str) -> dict[str, Tensor]:
        """Return the outputs by split that :meth:`save_outputs` stored.

        Args:
            name: the name of the model in the stored outputs.

        Raises:
            CorruptError: none are stored under this name, or they are damaged.
        """
        trees, names = self._read(OUTPUTS)
        with damaged(self.files.path / OUTPUTS):
            tensor_names = names[name]
            return {
                split: trees[OUTPUTS][tensor_name]
                for split, tensor_name in tensor_names.items()
            }

    def save_outputs(self, models: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Store the outputs of models by name and split.

        They replace all earlier outputs of the run.
        """
        tensors, names = dict[str, Tensor](), dict[str, dict[str, str]]()
        for name, splits in models.items():
            names[name] = {split: f"{name}-{split}" for split in splits}
            tensors |= {f"{name}-{split}": tensor for split, tensor in splits.items()}
        with self._locked():
            self._write(OUTPUTS, {OUTPUTS: tensors}, names)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder, and check that the supernode of this process still runs.

        Raises:
            RunError: the supernode has ended, or another process has the lock.
        """
        with self.files.locked():
            if supernode() != STARTED_BY:
                raise RunError("the supernode has ended: nothing is written.")
            yield

    def _write(self, name: str, trees: Mapping[str, tree.Tree], meta: object) -> None:
        text = bytearray(json_bytes({"meta": meta, "trees": list(trees)}))
        tensors = merge_trees(trees) | {META: torch.frombuffer(text, dtype=torch.uint8)}
        copied_tensors = {
            key: tensor.contiguous().clone() for key, tensor in tensors.items()
        }
        self.files.write(name, save(copied_tensors))

    def _read(self, name: str) -> tuple[dict[str, tree.Tree], Any]:
        with damaged(self.files.path / name):
            # a copy is aligned as torch aligns its own, which keeps the bits of sums
            tensors = tree.clone(storage.tensors(self.files.read(name)))
            head = parsed_json(bytes(tensors.pop(META).tolist()))
            return split_trees(tensors, head["trees"]), head["meta"]
