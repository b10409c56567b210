"""The layout of a run directory, and its reader, which checks digests.

The files are::

    partition.safetensors  start.safetensors   written before any training; the second if weights were given
    rows.jsonl                    header and rows, flushed after every round
    config.json                   the configuration, the environment, and the digests of the files above; it comes last
    checkpoints/000010.json       after round 10: the run's id, digests of every state, length and digest of the rows up
                                  to there
    blobs/<sha256>.safetensors    tensors, stored once by content
    timing.jsonl                  wall-clock seconds; not covered, since no two runs agree on them
    lock                          held by the writer

:mod:`fl_core.records.writing` writes the directory, and this module reads it. Torch is
imported only where tensors are returned. No pickle is read, and no link below the
directory is followed.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fl_core import rows, storage
from fl_core.errors import (
    COUNT,
    DIGEST,
    CorruptError,
    MapOf,
    UsageError,
    check_stored,
    damaged,
    listing,
    plural,
)
from fl_core.kinds import wrong_kind
from fl_core.storage import Folder, check_version, json_bytes, sha

if TYPE_CHECKING:
    from torch import Tensor

    from fl_core.algorithms.base import State
    from fl_core.records.stopping import StoppingRule
    from fl_core.tree import Tree

CONFIG, ROWS, PARTITION = "config.json", "rows.jsonl", "partition.safetensors"
START = "start.safetensors"  # of a run that does not start from its seed's weights
BEGINNING = {CONFIG, PARTITION, START, ROWS, "timing.jsonl", "lock"}
"""The files that precede training. A directory with only some of them, and without config.json, is no run yet."""
CODE = "code"
"""The key of the server's stored state for the resumes with changed code.

Each has the ``round`` after which the run was resumed, and the digests of ``code``."""
FORMAT = "fedlayers.run/4"
_COVERED = {"bytes": COUNT, "sha256": DIGEST}
_STATE = {"blob": DIGEST, "trees": [str], "meta": dict}
_CHECKPOINT = {
    "round": COUNT,
    "run": DIGEST,
    "rows": _COVERED,
    "states": {"server": _STATE},
}
CHECKPOINT = (_CHECKPOINT, {"states": MapOf(_STATE)})
_HEADER = {
    "version": str,
    "data": str,
    "checkpoint": str,
    "layers": [{"name": str, "parameters": [str], "buffers": [str]}],
}
_CONFIG = {
    "dataset": str,
    "algorithm": str,
    "rounds": COUNT,
    "seed": COUNT,
    "preprocessing?": ({"columns": [str]}, None),
    "options": dict,
    "model": (str, None),
    "model_options": dict,
    "batchnorm": str,
    "own": [str],
    "given": (dict, None),
    "in_force?": (dict, None),
    "command": str,
    "code": MapOf(DIGEST),
    "words?": [str],
    "environment": {"versions": MapOf(str), "python": str},
    "files": {PARTITION: DIGEST, f"{START}?": DIGEST},
    "rows": _COVERED,
}


@dataclass
class Checkpoint:
    """The state after a round: of the server and of every client, and further models.

    Attributes:
        round: the number of rounds that are done.
        server: the server's state.
        clients: the state of each client, by name.
        models: the models next to the states, by kind (``local`` or ``personal``) and client.
    """

    round: int
    server: State
    clients: Mapping[str, State]
    models: Mapping[str, Mapping[str, Tree]]  # "local" or "personal" -> client -> tree


V = TypeVar("V")


@dataclass(eq=False)
class _Lazy(Mapping[str, V]):
    """Values by name that are read from a manifest's entries, again at each use."""

    _entries: Mapping[str, Mapping[str, Any]]
    _read: Callable[[Mapping[str, Any]], V]

    def __getitem__(self, name: str) -> V:
        return self._read(self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def changed_parts(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of the parts of the user's code whose digests differ.

    Args:
        before, now: digests by part, from :func:`fl_core.run.own_code.digests`.
    """
    return [
        part for part in sorted({*before, *now}) if before.get(part) != now.get(part)
    ]


class Run:
    """A run directory, for reading.

    Raises:
        UsageError: there is no run at ``path``.
        CorruptError: there are checkpoints, but no configuration.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.folder = Folder(path)
        if not self.folder.has(CONFIG):
            if (self.path / "checkpoints").is_dir():
                raise CorruptError(f"{self.path / CONFIG} is missing.")
            raise wrong_kind(self.path, "run", "a directory with a config.json")

    @property
    def config(self) -> dict[str, Any]:
        """Return the resolved configuration, with digests and the environment at the start, as plain data.

        Raises:
            CorruptError: the file is damaged.
            UsageError: another version of this package has written it.
        """
        path = self.path / CONFIG
        config = self.folder.read_signed(CONFIG)
        if not check_version(self.path, config.pop("format", None), FORMAT):
            raise CorruptError(f"{path} is damaged: it must have the format {FORMAT}")
        check_stored(path, config, _CONFIG)
        return config

    @cached_property
    def id(self) -> str:
        """Return the digest of the configuration. Checkpoints name their run by it."""
        return sha(json_bytes(self.config))

    @property
    def rounds(self) -> list[int]:
        """Return the rounds with a complete checkpoint, ascending."""
        names = map(
            re.compile(r"([0-9]{6}|[1-9][0-9]{6,17})\.json").fullmatch,
            self.folder.names("checkpoints"),
        )
        return sorted(int(match[1]) for match in names if match)

    def _begun_rounds(self) -> list[int]:
        """Return the rounds with a complete checkpoint, ascending.

        Raises:
            UsageError: there are none.
        """
        rounds = self.rounds
        if not rounds:
            raise UsageError(
                f"{self.path} must have a checkpoint; got none yet. Resume the run first."
            )
        return rounds

    def rows(self) -> tuple[dict[str, Any], Any]:
        """Return the header and the tidy frame of the rows.

        A line that was begun after the last checkpoint and not finished is left out.

        Raises:
            CorruptError: the file is missing, or another line is damaged.
            UsageError: the first line is no header of this version.
        """
        path = self.folder.file(ROWS)
        storage.check_size(path, self.folder.size(ROWS), fault=CorruptError)
        return rows.read(path, self.covered_rows()["bytes"])

    def header(self) -> dict[str, Any]:
        """Return the header of the rows: version, command, layers, and the digests of data and initial model.

        Raises:
            UsageError: the file is missing, or its first line is no header of this version.
            CorruptError: the header has another form.
        """
        path = self.folder.file(ROWS)
        header = rows.read_header(path)
        check_stored(path, header, _HEADER)
        return header

    def partition(self) -> dict[str, Tensor]:
        """Return the stored partition, as :meth:`fl_core.data.Partition.from_tree` takes it.

        Raises:
            CorruptError: it is damaged.
        """
        return self.folder.read_tensors(PARTITION, self.config["files"][PARTITION])

    def start(self) -> dict[str, Tensor] | None:
        """Return the initial weights, if the run was given any; None if the seed drew them.

        Raises:
            CorruptError: they are damaged.
        """
        digest = self.config["files"].get(START)
        if digest is None:
            return None
        return self.folder.read_tensors(START, digest)

    def manifest(self, which: int) -> dict[str, Any]:
        """Return the manifest of the checkpoint after round ``which``.

        Its keys are ``run``, ``round``, ``rows`` (bytes and digest) and ``states`` (by ``server`` or ``KIND/CLIENT``).

        Raises:
            UsageError: there is no such checkpoint. The message names those that exist.
            CorruptError: it is damaged, or another run's.
        """
        if which < 0 or not self.folder.has(checkpoint_name(which)):
            listed_rounds = ", ".join(map(str, self.rounds)) or "none yet"
            raise UsageError(
                f"round of {self.path} must be one with a checkpoint ({listed_rounds}); got {which}."
            )
        manifest = self.folder.read_signed(checkpoint_name(which), *CHECKPOINT)
        path = self.checkpoint_path(which)
        if manifest["round"] != which:
            raise CorruptError(
                f"{path} is damaged: it is the checkpoint after round {manifest['round']}"
            )
        if manifest["run"] != self.id:
            raise CorruptError(
                f"{path} is another run's: it does not name this run's config.json"
            )
        return manifest

    def checkpoint(self, which: int | str = "last", lazy: bool = False) -> Checkpoint:
        """Return a checkpoint, after a check of every digest.

        Args:
            which: the number of a round with a checkpoint, or ``last``.
            lazy: whether a client's state, or a model next to the states, is read only when it is used, and again each
                time.

        Raises:
            UsageError: there is no such checkpoint.
            CorruptError: a byte of it differs from what was written; with ``lazy``, it may come later.
        """
        if which == "last":
            which = self._begun_rounds()[-1]
        if not str(which).removeprefix("-").isdecimal():
            raise UsageError(f"round must be a number or 'last'; got {which!r}.")
        manifest = self.manifest(int(which))
        entries: dict[str, dict[str, Any]] = {}
        for name, entry in manifest["states"].items():
            state_kind, _, client = name.partition("/")
            entries.setdefault(state_kind, {})[client] = entry
        server = self._state(entries.pop("server")[""])
        clients: Mapping[str, State] = _Lazy(entries.pop("client", {}), self._state)
        models: dict[str, Mapping[str, Tree]] = {
            state_kind: _Lazy(source, self._model)
            for state_kind, source in entries.items()
        }
        if not lazy:
            clients = dict(clients)
            models = {state_kind: dict(source) for state_kind, source in models.items()}
        return Checkpoint(manifest["round"], server, clients, models)

    def _state(self, entry: Mapping[str, Any]) -> State:
        from fl_core.algorithms.base import State

        return State(self._trees(entry), entry["meta"])

    def _model(self, entry: Mapping[str, Any]) -> Tree:
        trees = self._trees(entry)
        if "model" not in trees:
            blob_path = self.path / blob_name(entry["blob"])
            raise CorruptError(
                f"{blob_path} is damaged: it must hold a model, and holds none"
            )
        return trees["model"]

    def _trees(self, entry: Mapping[str, Any]) -> dict[str, Tree]:
        name, digest = blob_name(entry["blob"]), entry["blob"]
        tensors = self.folder.read_tensors(name, digest) if digest else {}
        with damaged(self.path / name):
            return storage.split_trees(tensors, entry["trees"])

    def verify(self) -> list[str]:
        """Check every byte of the run that a digest covers.

        Returns:
            A line for each checked part, as text. The last line has the last round with
            a checkpoint, and says whether the run is finished.

        Raises:
            CorruptError: a file differs from what was written. The message names the first.
            UsageError: another version of this package has written it.
        """
        report_lines = self.check_files()
        ends = [self.config["rows"]]
        blobs: set[str] = set()
        for number in self.rounds:
            manifest = self.manifest(number)
            new_blobs = blobs_of(manifest) - blobs
            for blob in sorted(new_blobs):
                self.folder.read_checked(blob_name(blob), blob)
            blobs |= new_blobs
            ends.append(manifest["rows"])
            report_lines.append(
                f"checkpoint after round {number}: {len(manifest['states'])} states"
            )
        self.check_rows(*ends)
        covered_bytes = ends[-1]["bytes"]
        size = self.folder.size(ROWS)
        beyond_text = (
            f", {size - covered_bytes:,} bytes after the last checkpoint not covered"
        )
        rest_text = ""
        if size > covered_bytes:
            rest_text = beyond_text
        report_lines.append(
            f"{plural(len(blobs), 'blob')}; rows up to {covered_bytes:,} bytes{rest_text}"
        )
        rule = self.stopping_rule()
        for model, best_number in ({} if rule is None else rule.best).items():
            if best_number not in self.rounds:
                checkpoint_path = self.checkpoint_path(best_number)
                raise CorruptError(
                    f"{checkpoint_path} is missing: it is the best round of the {model} models"
                )
            report_lines.append(f"best round of the {model} models: {best_number}")
        initial_state = {"code": self.config["code"]}
        changes = self._meta().get(CODE, [])
        for earlier, environment in pairwise([initial_state, *changes]):
            parts_text = listing(changed_parts(earlier["code"], environment["code"]))
            report_lines.append(
                f"code of {parts_text}: changed after round {environment['round']}"
            )
        last_round = max(self.rounds, default=0)
        planned_rounds = self.config.get("rounds")
        if last_round == planned_rounds:
            report_lines.append(f"{last_round} of {planned_rounds} rounds")
        elif self.finished:
            report_lines.append(
                f"{last_round} of at most {planned_rounds} rounds: stopped by the stopping rule"
            )
        else:
            report_lines.append(
                f"{last_round} of {planned_rounds} rounds: not finished, resume continues it"
            )
        return report_lines

    def check_rows(self, *ends: Mapping[str, Any]) -> bytes:
        """Check the rows up to each of these ascending ends, and return the bytes up to the last one.

        Args:
            ends: dictionaries with ``bytes``, the length of the file up to an end, and ``sha256``, its digest.

        Raises:
            CorruptError: they are missing, or differ from what was written.
        """
        data = self.folder.read(ROWS)
        digest = hashlib.sha256()
        position = 0
        for end in ends:
            digest.update(data[position : end["bytes"]])
            position = end["bytes"]
            if position > len(data) or digest.hexdigest() != end["sha256"]:
                path = self.path / ROWS
                raise CorruptError(
                    f"{path} is damaged within its first {position:,} bytes"
                )
        return data[:position]

    def check_files(self) -> list[str]:
        """Check the files that were written before training.

        Returns:
            What was checked, a line each.

        Raises:
            CorruptError: a file differs from what was written. The message names the first.
        """
        files = self.config["files"]
        for name, digest in files.items():
            self.folder.read_checked(name, digest)
        sizes = {name: self.folder.size(name) for name in (CONFIG, *files)}
        return [f"{name}: {size:,} bytes" for name, size in sizes.items()]

    def code(self) -> dict[str, str]:
        """Return the digests of the user's code that trained last, by part (:func:`fl_core.run.own_code.digests`)."""
        changes = self._meta().get(CODE)
        digests: dict[str, str] = (changes[-1] if changes else self.config)["code"]
        return digests

    def checkpoint_path(self, which: int) -> Path:
        """Return the path of the manifest of the checkpoint after round ``which``."""
        return self.path / checkpoint_name(which)

    def plan(self) -> dict[str, Any] | None:
        """Return the plan in use as plain data, or None if there is none yet.

        It comes from the last checkpoint, or else from the configuration.
        """
        return self._meta().get("plan") or self.config.get("in_force")

    def _meta(self) -> dict[str, Any]:
        """Return the plain data of the server's state at the last checkpoint.

        They are empty without a checkpoint.
        """
        if not self.rounds:
            return {}
        server: dict[str, Any] = self.manifest(self.rounds[-1])["states"]["server"]
        return server["meta"]

    def stopping_rule(self) -> StoppingRule | None:
        """Return the stopping rule with its scores up to the last checkpoint; None without such a rule.

        Raises:
            CorruptError: the stored data are no stopping rule.
        """
        from fl_core.records.stopping import STATE, StoppingRule

        meta = self._meta()
        if STATE not in meta:
            return None
        with damaged(self.checkpoint_path(self.rounds[-1])):
            return StoppingRule.from_json(meta[STATE])

    @property
    def finished(self) -> bool:
        """Return whether training has ended, after all rounds or by its stopping rule."""
        rule = self.stopping_rule()
        return self.rounds[-1:] == [self.config.get("rounds")] or (
            rule is not None and rule.stops
        )

    def best_round(self, model: str | None) -> int:
        """Return the best round of a model by the stopping rule.

        Args:
            model: ``local``, ``personal`` or ``global``. None means the model that decides when to stop.

        Raises:
            UsageError: the run has no stopping rule, or the model no best round.
        """
        rule = self.stopping_rule()
        if rule is None:
            raise UsageError(
                f"round must be one with a checkpoint, or last; got 'best', and {self.path} has no stopping rule. "
                "Train with patience=N to have one."
            )
        model = model or rule.main
        if model not in rule.best:
            listed_models = listing(rule.best) or "none"
            raise UsageError(
                f"model must be one with a best round in {self.path} ({listed_models}); got {model!r}."
            )
        return rule.best[model]

    def used_round(self, model: str | None = None) -> int | str:
        """Return the round of the models that are used if no round is named.

        It is a model's best round under a stopping rule, and ``last`` without one. A
        model without a best round has that of the model that decides when to stop. If
        that one has none either, it is ``last``.

        Args:
            model: as for :meth:`best_round`.
        """
        rule = self.stopping_rule()
        if rule is None:
            return "last"
        best_rounds = rule.best
        return best_rounds.get(model or rule.main, best_rounds.get(rule.main, "last"))

    @property
    def early_round(self) -> int:
        """Return the round after which layers are tuned.

        It is the first round with a checkpoint that is at least 20, and at least a
        tenth of the planned rounds. Without one it is the last round with a checkpoint.

        Raises:
            UsageError: there are no checkpoints.
        """
        rounds = self._begun_rounds()
        late_rounds = (n for n in rounds if n >= max(20, self.config["rounds"] / 10))
        return next(late_rounds, rounds[-1])

    def covered_rows(self) -> dict[str, Any]:
        """Return ``bytes`` and ``sha256`` of the rows up to the last checkpoint, or without one of their header."""
        return (self.manifest(self.rounds[-1]) if self.rounds else self.config)["rows"]


def checkpoint_name(which: int) -> str:
    """Return the file name of a checkpoint's manifest, relative to the run directory.

    Args:
        which: the checkpoint's round.
    """
    return f"checkpoints/{which:06d}.json"


def blob_name(digest: str) -> str:
    """Return the name of the file of tensors with this digest, relative to the run directory."""
    return f"blobs/{digest}.safetensors"


def blobs_of(manifest: Mapping[str, Any]) -> set[str]:
    """Return the digests of the files of tensors that a checkpoint's manifest names."""
    return {entry["blob"] for entry in manifest["states"].values()} - {""}


def commit() -> str:
    """Return the commit of the working directory's git repository, with ``-dirty`` if there are uncommitted changes.

    It is empty without a repository, a commit or git, and if git takes longer than 10 seconds. The configuration of a
    stranger's repository can name programs: filters, hooks, a monitor of files, and a way to fetch. None of them is
    started.
    """
    programs = {"core.fsmonitor": "false", "core.hooksPath": os.devnull}
    try:
        head = _git(programs, "rev-parse", "--verify", "--quiet", "HEAD").stdout.strip()
        if not head:
            return ""
        filters = _git(
            programs, "config", "-z", "--name-only", "--get-regexp", "^filter[.]"
        )
        programs |= dict.fromkeys(filters.stdout.split("\0")[:-1], "")
        plain = ("--no-ext-diff", "--no-textconv", "--ignore-submodules")
        changed = _git(programs, "diff", "--quiet", *plain, "HEAD").returncode
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"{head}-dirty" if changed else head


def _git(
    settings: Mapping[str, str], *command: str
) -> subprocess.CompletedProcess[str]:
    """Run git with settings that replace the repository's. It fetches nothing.

    Args:
        settings: values by the setting's name.
        command: the arguments of git.

    Raises:
        OSError: git cannot be started.
        TimeoutExpired: git runs for more than 10 seconds.
    """
    variables = {"GIT_CONFIG_COUNT": str(len(settings)), "GIT_ALLOW_PROTOCOL": ""}
    for number, (key, value) in enumerate(settings.items()):
        variables |= {
            f"GIT_CONFIG_KEY_{number}": key,
            f"GIT_CONFIG_VALUE_{number}": value,
        }
    return subprocess.run(
        ["git", *command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
