"""A site's states on disk, by version: the client before and after an exchange, and its reply."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from fedlayers.remote.codec import Packet, PacketError, decode, encode_parts
from fl_core.algorithms.base import State
from fl_core.errors import damaged
from fl_core.storage.files import Folder, sign
from fl_core.storage.schema import COUNT, MapOf
from fl_core.tree import Tree

STATE = "state/"
LOCAL = "local"
TURNS, SESSIONS = "turns.json", 1000
"""The file with the order of a run's requests, and the number of its sessions at most: one for each resume."""
EXCHANGES = 10
"""The number of exchanges of a round at most."""
VOLATILE = ("session", "seq", "saved")
"""Fields in which two requests for the same work may differ."""
TURNS_FORM = {"session": str, "seq": COUNT, "ended": [str], "trained?": MapOf([str])}
_VERSION = re.compile(r"[0-9]{6,12}-[\w.-]{1,60}", re.ASCII)


class StateStore:
    """The versions of one client's state in one run. Each is a file that is written atomically.

    >>> import torch
    >>> versions = StateStore(Path("of_an_example"))
    >>> state = State({"model": {"head.weight": torch.ones(2)}}, {"rounds": 1})
    >>> versions.commit("000001-train", state, {}, "b5bb", Packet({"kind": "done"}))
    >>> versions.state("000001-train").meta, versions.reply("000001-train", "b5bb")
    ({'rounds': 1}, Packet(head={'kind': 'done'}, trees={}))
    >>> versions.keep({"000002-train"})
    >>> versions.names
    []
    """

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, Folder(path)

    @property
    def names(self) -> list[str]:
        """The complete versions, with a reply."""
        found = (name.removesuffix(".reply") for name in self.folder.names() if name.endswith(".reply"))
        return [name for name in found if self.folder.has(f"{name}.state")]

    def commit(self, version: str, state: State, kept: dict[str, Tree], key: str, reply: Packet) -> None:
        """Store a state with its models, then the reply to the work of that :func:`key`."""
        check_version(version)
        self.path.mkdir(parents=True, exist_ok=True)
        self.folder.remove(f"{version}.reply")
        head = {"kind": "state", "meta": state.meta, "kept": list(kept)}
        trees = {STATE + name: each for name, each in state.trees.items()} | kept
        self.folder.write(f"{version}.state", *encode_parts(Packet(head, trees)))
        self.folder.write(f"{version}.reply", key.encode() + b"\n", *encode_parts(reply))

    def state(self, version: str) -> State:
        """Return the state of a version.

        Raises:
            PacketError: there is no such version. CorruptError: it is damaged.
        """
        packet = self._packet(version)
        trees = {name: each for name, each in packet.trees.items() if name.startswith(STATE)}
        return State({name.removeprefix(STATE): each for name, each in trees.items()}, packet.head["meta"])

    def kept(self, version: str) -> dict[str, Tree]:
        """Return the models that were stored with a version. For errors see :meth:`state`."""
        return {name: each for name, each in self._packet(version).trees.items() if not name.startswith(STATE)}

    def reply(self, version: str, key: str) -> Packet | None:
        """Return the reply of this version's work, if its key is the same."""
        if not _VERSION.fullmatch(version) or version not in self.names:
            return None
        stored, _, reply = self.folder.read(f"{version}.reply").partition(b"\n")
        return decode(reply) if stored == key.encode() else None

    def keep(self, versions: set[str]) -> None:
        """Remove all other versions."""
        for name in self.folder.names():
            if Path(name).stem not in versions:
                self.folder.remove(name)

    def put_tuned(self, version: str, done: int, model: Tree) -> None:
        """Store the model that was fine-tuned from a version, or from the start, after ``done`` rounds."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.folder.write(_tuned_name(version, done), *encode_parts(Packet({"kind": "tuned"}, {"model": model})))

    def tuned(self, version: str, done: int) -> Tree | None:
        """Return the model that :meth:`put_tuned` stored, if any."""
        name = _tuned_name(version, done)
        return decode(self.folder.read(name)).trees["model"] if self.folder.has(name) else None

    def _packet(self, version: str) -> Packet:
        if not _VERSION.fullmatch(version) or version not in self.names:
            raise PacketError(f"version must be one of {', '.join(self.names)}; got {version[:80]!r}.")
        with damaged(f"{self.path / version}.state", PacketError):
            return decode(self.folder.read(f"{version}.state"))


class Turns:
    """The order of one run's requests, in a file. Requests of an ended session, and earlier ones, are replays.

    >>> from fl_core.storage.files import Folder
    >>> Path("run").mkdir()
    >>> turns = Turns(Folder("run"), "first")
    >>> turns.begin("second")
    >>> turns.check("first", 7)
    Traceback (most recent call last):
        ...
    fedlayers.remote.codec.PacketError: a request must be of the session that joined last; got an earlier one.

    Args:
        folder: of the run. session: that joined, where there is no file yet.
    """

    def __init__(self, folder: Folder, session: str) -> None:
        self.folder, self.session, self.seq = folder, _short(session), 0
        self._ended: list[str] = []
        self._trained: dict[str, list[str]] = {}  # by lane, the versions of the last round in this session
        if folder.has(TURNS):
            found = folder.read_signed(TURNS, TURNS_FORM)
            self.session, self.seq, self._ended = found["session"], found["seq"], found["ended"]
            self._trained = found.get("trained", {})

    def check_join(self, session: str) -> None:
        """Refuse to join again for a session that has ended, and one session too many.

        Raises:
            PacketError: says which.
        """
        if _short(session) in self._ended:
            raise PacketError("a run must be joined by a new session, or by its last one; got an earlier one.")
        if len(self._ended) >= SESSIONS:
            raise PacketError(f"a run must have at most {SESSIONS} sessions; got more. Begin another run.")

    def begin(self, session: str) -> None:
        """Let a session that has joined take its turns. The one before has ended."""
        if _short(session) != self.session:
            self._ended.append(self.session)
            self.session, self.seq, self._trained = _short(session), 0, {}
        self._write()

    def check(self, session: str, seq: int) -> None:
        """Refuse a request that is not of this session, or of an earlier turn.

        Raises:
            PacketError: says which.
        """
        if _short(session) != self.session:
            raise PacketError("a request must be of the session that joined last; got an earlier one.")
        if seq < self.seq:
            raise PacketError(f"a request's number must be at least {self.seq}; got {seq}.")

    def check_next(self, lane: str, version: str) -> None:
        """Refuse to train a version of an earlier round of this session, or one twice.

        Raises:
            PacketError: names the version, and the last one.
        """
        before = self._trained.get(lane, [])
        number, last = _round_of(version), _round_of(before[-1]) if before else 0
        if number < last or version in before or (number == last and len(before) >= EXCHANGES):
            raise PacketError(
                f"a session must train each exchange of a round once; got {version!r} after {before[-1]!r}. "
                "Resume the run."
            )

    def end(self, seq: int, lane: str = "", version: str = "") -> None:
        """Note the number of an answered request, and the version that it trained."""
        self.seq = seq
        if version:
            before = self._trained.get(lane, [])
            same = [each for each in before if _round_of(each) == _round_of(version)]
            self._trained[lane] = [*same, version]
        self._write()

    def _write(self) -> None:
        stored = {"session": self.session, "seq": self.seq, "ended": self._ended, "trained": self._trained}
        self.folder.write(TURNS, sign(stored))


def _round_of(version: str) -> int:
    return int(version.partition("-")[0])


def _short(session: str) -> str:
    return hashlib.sha256(session.encode(errors="surrogatepass")).hexdigest()[:32]


def _tuned_name(version: str, done: int) -> str:
    return f"{version or 'beginning'}-{done}.tuned"


def check_version(version: str) -> None:
    """Refuse an invalid name of a version.

    Raises:
        PacketError: shows it.
    """
    if not _VERSION.fullmatch(version):
        raise PacketError(f"version must match {_VERSION.pattern}; got {version[:80]!r}.")


def key(head: dict[str, object], request: bytes) -> str:
    """Return a digest of a request without :data:`VOLATILE`. It is the same for two requests for the same work."""
    lasting = {name: value for name, value in head.items() if name not in VOLATILE}
    size = int.from_bytes(request[8:16], "little")
    sha = hashlib.sha256(json.dumps(lasting, sort_keys=True).encode())
    sha.update(memoryview(request)[16 + size :])
    return sha.hexdigest()
