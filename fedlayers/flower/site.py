"""One site: its TOML file, its samples and their split, and the states that it stores."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

import fl_core
from fedlayers.flower.packets import read_keys
from fl_core import data as datasets, tree
from fl_core.algorithms.base import State
from fl_core.data import files
from fl_core.data.arrays import Array, Integers
from fl_core.data.categories import learn_categories, recode
from fl_core.data.columns import Reading
from fl_core.data.federated import ClientData, Split
from fl_core.data.partitions import check_shares
from fl_core.data.partitions.base import Pool, split_groups, split_of
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.recipes import SHARES
from fl_core.data.registry import DATASETS
from fl_core.data.sources import Source
from fl_core.errors import BusyError, RunError, UsageError, about, check_known, damaged
from fl_core.limits import parsed_json, read_text
from fl_core.scores import REGRESSION
from fl_core.storage import schema
from fl_core.storage.files import Folder, json_bytes, sha
from fl_core.storage.schema import merge_trees, split_trees
from fl_core.tokens import TokenShape


def ancestors() -> list[int]:
    """Return the numbers of the processes that started this one: Flower's executor, and the supernode above it."""
    parent, found = os.getppid(), []
    for _ in range(2):
        found.append(parent)
        stat = Path(f"/proc/{parent}/stat")
        if parent <= 1 or not stat.exists():
            break
        with suppress(OSError, ValueError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
    return found


STARTED_BY = ancestors()
"""The processes at the start. A child of a killed supernode has others, and must not write."""
WAIT = 60.0
"""Seconds to wait for another process that writes to the same folder."""
META = "json"
"""The name of the JSON in a file of tensors, which is UTF-8. No tree has that name."""
SCALES, IMPUTES = ("none", "standard", "imagenet"), ("none", "mean")
"""What sites can fit together by counts, means and squares."""


@dataclass(frozen=True)
class SiteFile:
    """The keys of a site's TOML file. Its paths are relative to it."""

    name: str
    """The client's name. It is unique in the federation."""
    path: str
    """The site's own table, images or texts, or the name of a dataset."""
    client: str | None = None
    """Whose samples to use, if the data name clients. Default: the site's name."""
    classes: list[str] | None = None
    """All classes of the federation, if the site's own samples lack some."""
    vocabulary: str | None = None
    """The file with the federation's words, one a line. Texts need it."""
    folder: str | None = None
    """Folder for the client's own tensors. Default: the file's name with -states."""
    device: str = "cpu"
    """Device for training."""
    columns: dict[str, Any] | None = None
    """How a table is read: the keys of fl_core.data.columns.Reading."""


class Site:
    """One site with its samples. Their split depends on the client's number alone, as in a run on all data together.

    Args:
        path: of its TOML file.

    Raises:
        UsageError: the file has an unknown key, or its data cannot be read. The message is one line.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.file = read_keys(self.path, SiteFile)
        self.name = self.file.name
        default = f"{self.path.stem}-states"
        self.folder = self.path.parent / (self.file.folder or default)

    @cached_property
    def source(self) -> Source:
        """The site's samples, read from its own files."""
        file = self.file
        with about(f"site {self.name!r}"):
            reading = Reading.with_keys(file.columns or {})
            if file.path in DATASETS:
                files.check_plain(file.path, reading)
                source = datasets.open_named(file.path)
                recipe = DATASETS[file.path].recipe
                most = recipe.max_samples if recipe else None
                source = source.first(min(most or len(source), len(source)))
                scale = reading.scale or SCALES[0]
            else:
                path = self.path.parent / file.path
                if not path.exists():
                    raise UsageError(f"path must be a file or a folder; got {path}.")
                source = files.read(path, reading)
                scale = reading.scale or datasets.default_scale(
                    path, **(file.columns or {})
                )
            check_known("scale over sites", scale, SCALES)
            check_known("impute over sites", reading.impute, IMPUTES)
            source = self._own(source).with_methods(scale, reading.impute)
            return self._in_vocabulary(self._with_classes(source))

    def _own(self, source: Source) -> Source:
        if source.layout is not None:
            raise UsageError("samples over sites must have one input; got several.")
        if source.owner is None:
            return source
        own = check_known("client", self.file.client or self.name, source.owner_names)
        return source.take(
            np.flatnonzero(source.owner == source.owner_names.index(own))
        )

    def _with_classes(self, source: Source) -> Source:
        wanted = self.file.classes
        if wanted is None:
            return source
        places = [
            wanted.index(check_known("class", name, wanted)) for name in source.classes
        ]
        return replace(source, y=np.array(places)[source.y], classes=tuple(wanted))

    def _in_vocabulary(self, source: Source) -> Source:
        if source.words is None:
            return source
        if self.file.vocabulary is None:
            raise UsageError("vocabulary must be given for texts; got none.")
        lines = read_text(self.path.parent / self.file.vocabulary).split("\n")
        return source.with_vocabulary(tuple(filter(None, lines)))

    def facts(self) -> dict[str, Any]:
        """Return the names and numbers that a server needs before it can number the sites."""
        source = self.source
        words = source.words
        tokens = source.shape.tokens if isinstance(source.shape, TokenShape) else 0
        return {
            "name": self.name,
            "version": fl_core.__version__,
            "dataset": self.file.path if self.file.path in DATASETS else "",
            "task": source.task,
            "classes": list(source.classes),
            "shape": list(source.shape),
            "tokens": tokens,
            "words": "" if words is None else sha("\n".join(words).encode()),
            "mean": list(map(float, source.mean)),
            "std": list(map(float, source.std)),
            "images": source.is_image,
            "columns": list(source.columns),
            "worded": [bool(words) for words in source.categories],
            "scale": source.scale,
            "impute": source.impute,
        }

    def describe(self, number: int, seed: int) -> dict[str, Any]:
        """Return the sizes of the client's splits, their digest, and what a table's preparation needs."""
        source, parts = self.source, self._split(number, seed)
        train = parts[0]
        words = learn_categories(source.x[train], source.categories)
        return {
            "sizes": [len(part) for part in parts],
            "digest": sha(f"{source.digest}|{number}|{seed}".encode()),
            "words": [list(each) for each in words],
            "moments": self._moments(train) if source.prepares else None,
        }

    def _moments(self, train: Integers) -> dict[str, list[float]]:
        """Return the count, mean and sum of squared differences of each column, and of the targets of a regression."""
        source = self.source
        values = source.x[train].astype(np.float64)
        values[:, [k for k, words in enumerate(source.categories) if words]] = 0.0
        if source.task == REGRESSION:
            values = np.column_stack([values, source.y[train].astype(np.float64)])
        known = ~np.isnan(values)
        count = known.sum(0)
        mean = np.where(known, values, 0.0).sum(0) / np.maximum(count, 1)
        squares = np.square(np.where(known, values - mean, 0.0)).sum(0)
        return {
            "count": count.tolist(),
            "mean": mean.tolist(),
            "squares": squares.tolist(),
        }

    def client(self, number: int, seed: int, made: Preprocessing | None) -> ClientData:
        """Return the samples, prepared, in the split of the client with this number and seed."""
        source, parts = self.source, self._split(number, seed)
        if made is not None:
            x: Array = recode(source.x, source.categories, made.categories)
            source = replace(source, x=made.transform(x), categories=())

        def split(indices: Integers) -> Split:
            groups = None if source.groups is None else source.groups[indices]
            y = torch.from_numpy(source.y[indices])
            return Split(source.tensor(indices), y, groups)

        return ClientData(self.name, *map(split, parts))

    def _split(self, number: int, seed: int) -> list[Integers]:
        source, shares = self.source, check_shares(SHARES)
        pool = Pool(source.name, source.labels, groups=source.groups)
        train, test = np.arange(len(pool)), None
        if source.is_train is not None:
            train, test = (
                np.flatnonzero(source.is_train),
                np.flatnonzero(~source.is_train),
            )
        if source.groups is None:
            parts = split_of(self.name, number, train, test, shares, seed)
        else:
            parts = split_groups(
                self.name, number, train, test, shares, seed, source.groups
            )
        return [np.sort(part).astype(np.int64) for part in parts]


class States:
    """A client's own states of one run at its site, of the last two rounds in which it trained.

    Files are written atomically, under a lock.

    Args:
        folder: of the site. run: digest that names the run.

    Raises:
        UsageError: the name of a run or of a state is none that a server may give.
    """

    VERSION = re.compile(r"([0-9]{6,18})-[a-z_]{1,40}")
    TUNED = "tuned"

    def __init__(self, folder: Path, run: str) -> None:
        if not re.fullmatch("[0-9a-f]{32,64}", run):
            raise UsageError(f"run must be a digest; got {run[:80]!r}.")
        self.files = Folder(folder / run)

    def begin(self, job: Mapping[str, Any], start: tree.Tree) -> None:
        """Store what the run is. A run that has begun must be the same.

        Raises:
            UsageError: it is another one.
        """
        self.files.path.mkdir(parents=True, exist_ok=True)
        data = json_bytes(job)
        with self._locked():
            if self.files.has("job.json") and self.files.read("job.json") != data:
                raise UsageError(
                    "the run must be the one that began at this site; got another. Use a new folder at the server."
                )
            if start:
                self._write("start", {"": start}, {})
            self.files.write("job.json", data)

    def job(self) -> tuple[dict[str, Any], tree.Tree | None]:
        """Return what the run is, and its initial weights if they are not the seed's."""
        if not self.files.has("job.json"):
            raise UsageError("the run must have begun at this site; got none.")
        started = self.files.has("start.safetensors")
        start = None
        if started:
            tensors, _ = self._tensors("start.safetensors")
            start = split_trees(tensors, [""])[""]
        return parsed_json(self.files.read("job.json")), start

    def load(self, version: str) -> State:
        """Return the state of a version.

        Raises:
            UsageError: it is not among the last two rounds.
        """
        name = f"{self._checked(version)}.safetensors"
        if not self.files.has(name):
            raise UsageError(
                f"the client's state must be one of the last two rounds; got {version}. Begin another run."
            )
        tensors, meta = self._tensors(name)
        return State(split_trees(tensors, meta["trees"]), meta["meta"])

    def save(self, version: str, state: State, before: str) -> None:
        """Store a state, and remove those of earlier rounds than the last two.

        Args:
            before: the version from which it was trained. It stays.
        """
        with self._locked():
            self._write(self._checked(version), state.trees, {"meta": state.meta})
            found = {
                name: match[1]
                for name in self.files.names()
                if (match := self.VERSION.match(name))
            }
            recent = sorted(set(found.values()))[-2:]
            for name, done in found.items():
                if done not in recent and name != f"{before}.safetensors":
                    self.files.remove(name)

    def tuned(self, version: str, done: int) -> tree.Tree | None:
        """Return the model that was fine-tuned from a state after a round, if there is one."""
        if not self.files.has(f"{self.TUNED}.safetensors"):
            return None
        tensors, meta = self._tensors(f"{self.TUNED}.safetensors")
        same = meta["of"] == [version, done]
        return split_trees(tensors, [""])[""] if same else None

    def save_tuned(self, version: str, done: int, model: tree.Tree) -> None:
        """Store a fine-tuned model in place of the one before."""
        with self._locked():
            self._write(self.TUNED, {"": model}, {"of": [version, done]})

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder, once another process has written its file."""
        end = time.monotonic() + WAIT
        while True:
            try:
                with self.files.locked():
                    if ancestors() != STARTED_BY:
                        raise RunError("the supernode has ended: nothing is written.")
                    yield
                    return
            except BusyError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def _checked(self, version: str) -> str:
        if not self.VERSION.fullmatch(version):
            raise UsageError(f"version must be of a round; got {version[:80]!r}.")
        return version

    def _write(
        self, name: str, trees: Mapping[str, tree.Tree], meta: Mapping[str, Any]
    ) -> None:
        text = bytearray(json_bytes({**meta, "trees": list(trees)}))
        tensors = merge_trees(trees) | {META: torch.frombuffer(text, dtype=torch.uint8)}
        whole = {key: each.contiguous().clone() for key, each in tensors.items()}
        self.files.write(f"{name}.safetensors", save(whole))

    def _tensors(self, name: str) -> tuple[tree.Tree, dict[str, Any]]:
        with damaged(self.files.path / name):
            # a copy is aligned as torch aligns its own, which keeps the bits of sums
            found = tree.clone(schema.tensors(self.files.read(name)))
            return found, parsed_json(bytes(found.pop(META).tolist()))
