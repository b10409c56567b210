"""An operating system that fails on demand, between the run directory's files and the real one; what is left."""

import json
import os
import shutil
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

from fl_core.storage import json_bytes, sha, sign

CALLS = (
    "open",
    "mkdir",
    "write",
    "close",
    "fsync",
    "replace",
    "unlink",
    "stat",
    "listdir",
)
"""What is asked of the operating system when files of a run are written, and can fail."""


class FailingOS:
    """The module ``os``, whose so many-th call of one kind fails; to be put in the place of it.

    Args:
        call: one of :data:`CALLS`; None fails never.
        which: counted from 1.
        code: the error's number.
        done: whether what was asked for is done all the same, as when a server's answer is lost.

    Attributes:
        counts: calls so far, by kind.
        failed: whether the call came.
    """

    def __init__(self, call=None, which=0, code=0, done=False):
        self.call, self.which, self.code, self.done = call, which, code, done
        self.counts = Counter()
        self.failed = False

    def __getattr__(self, name):
        real = getattr(os, name)
        if name == "fdopen":
            return lambda handle, mode: _File(self, real(handle, mode))
        return (
            (lambda *given, **named: self.act(name, real, *given, **named))
            if name in CALLS
            else real
        )

    def act(self, name, real, *given, **named):
        """Do what was asked for, or fail."""
        self.counts[name] += 1
        if name != self.call or self.counts[name] != self.which:
            return (
                None if name == "fsync" else real(*given, **named)
            )  # which only a power cut would tell
        self.failed = True
        if self.done or name == "close":  # which closes in any case
            with suppress(OSError):
                real(*given, **named)
        named_file = (
            [given[0]] if given and isinstance(given[0], (str, os.PathLike)) else []
        )
        raise OSError(self.code, os.strerror(self.code), *named_file)


class _File:
    """A file whose writing and closing can fail; what fails has written a half."""

    def __init__(self, system, file):
        self.system, self.file = system, file

    def write(self, data):
        before = self.system.failed
        try:
            return self.system.act("write", self.file.write, data)
        except OSError:
            if self.system.failed and not before and not self.system.done:
                self.file.write(data[: len(data) // 2])
            raise

    def __enter__(self):
        return self

    def __exit__(self, *why):
        self.system.act("close", self.file.close)

    def __getattr__(self, name):
        return getattr(self.file, name)


def contents(path, but=("lock", "timing.jsonl")):
    """The files below a folder but those of these names; equal runs have all but locks and times alike."""
    files = (
        file for file in path.rglob("*") if file.is_file() and file.name not in but
    )
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


BEGUN = {
    "dataset": "heart",
    "algorithm": "fedavg",
    "rounds": 3,
    "seed": 0,
    "model": None,
    "batchnorm": "global",
    "command": "",
    "options": {},
    "model_options": {},
    "own": [],
    "given": None,
    "code": {},
    "environment": {"versions": {"torch": "x"}, "python": "x"},
}
"""The least that a stored configuration has."""


def cut_back(source, target, after):
    """The run as if it had been killed while it worked on the round after that one."""
    shutil.copytree(source, target / "run")
    for file in (target / "run" / "checkpoints").glob("*.json"):
        if int(file.stem) > after:
            file.unlink()
    return target / "run"


def read_all(found):
    """Read every state of a checkpoint, if there is one, as a run does that resumes from it."""
    for part in () if found is None else (found.clients, *found.models.values()):
        for name in part:
            part[name]


def forge(path, change):
    """Change a file of signed JSON, whose digest then fits again."""
    stored = json.loads(path.read_bytes())
    stored.pop("sha256", None)
    change(stored)
    path.write_bytes(sign(stored))


def cover(run, name):
    """Let the configuration name a file's new digest, and the checkpoints the configuration's."""
    config = run / "config.json"
    if name != config.name:
        digest = sha((run / name).read_bytes())
        forge(config, lambda found: found["files"].update({name: digest}))
    began = json.loads(config.read_bytes())
    config_digest = sha(
        json_bytes({k: began[k] for k in began if k not in ("format", "sha256")})
    )
    for path in run.glob("checkpoints/*.json"):
        forge(path, lambda found: found.update(run=config_digest))


def edit(run, **changes):
    """Change a run's configuration, digests and all, as whoever hands it on can."""
    forge(run / "config.json", lambda found: found.update(changes))
    cover(run, "config.json")


ROOT = Path(__file__).parents[2]


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
