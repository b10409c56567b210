"""A site's requests to its owner, and the list of all replies that have left it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlayers.remote.codec import Packet, PacketError
from fedlayers.remote.log import LOG, now
from fl_core.errors import CorruptError, NonFiniteError, RunError, UsageError, listing
from fl_core.limits import LimitError, parsed_json
from fl_core.names import printable
from fl_core.storage.files import Folder, sha
from fl_core.storage.schema import COUNT, MapOf, validate

SENT = "sent.jsonl"
"""The file in a site's folder with one line per reply. Each line has the digest of the line before."""
LINE = {"time": str, "kind": str, "reply": str, "run": str, "bytes": COUNT, "digest": str, "tensors": MapOf(COUNT),
        "previous": str}  # fmt: skip
CONTENTS = {
    "hello": "facts of the data", "told": "means and squares", "counted": "classes", "joined": "numbers of samples",
    "done": "update or scores", "measured": "measurements", "summed": "part of a secure sum", "refused": "a refusal",
    "failed": "an error", "waiting": "a wait for approval",
}  # fmt: skip
"""What each kind of reply carries, for the site's owner."""
LEGEND = """\
request: what the server asked for. run: the run that it belongs to, if any.
facts of the data: versions, names of columns and classes, numbers of samples, a digest.
means and squares: the mean of each feature and of its squares. classes: how many are in the validation samples.
update or scores: the tensors that the algorithm sends, masked in a secure sum, and scores.
part of a secure sum: keys, and shares of secrets."""
ASKED, ALLOWED = "asked", "allowed"
"""Folders in a site's folder, with the requests that wait for its owner, and with those that are allowed."""
MOST_ASKED, MOST_BYTES = 100, 2**20
LONGEST = 2000
"""Maximum characters of a request in words."""
TO_APPROVE = ("moments", "race", "join")
"""The requests that the owner of a site may want to allow. All others belong to a run that joined, as ``measure``."""
_NAME = re.compile(r"[0-9a-f]{12}")


class NotAllowedError(RunError):
    """A request that waits for the owner of the site."""


class SentLog:
    """The list of a site's replies, each written before it leaves.

    Args:
        folder: the site's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Folder(folder)
        self._last: str | None = None

    def write(self, kind: str, run: str, reply: Packet, data: bytes) -> None:
        """Append a line for one reply.

        Raises:
            CorruptError: the lines before are damaged.
        """
        self.folder.path.mkdir(parents=True, exist_ok=True)
        if self._last is None:
            self._last = self.check()[1]
            if self.folder.has(SENT) and not self.folder.read(SENT).endswith(b"\n"):
                self.folder.write(SENT, "".join(f"{line}\n" for line in self._read()).encode())  # without half a line
        previous, self._last = self._last, None  # after an error the file is read again
        line = json.dumps(
            {
                "time": now(),
                "kind": kind,
                "reply": reply.head["kind"],
                "run": run,
                "bytes": len(data),
                "digest": sha(data),
                "tensors": {name: len(tree) for name, tree in reply.trees.items()},
                "previous": previous,
            }
        )
        self.folder.append(SENT, f"{line}\n".encode())
        self.folder.sync(SENT)
        self._last = sha(line.encode())

    def check(self, noted: str = "") -> tuple[list[dict[str, Any]], str]:
        """Return the lines and the digest of the last one, after a check of the chain.

        The digests have no key. So only a digest that was noted elsewhere shows that a list was cut or rewritten.

        Args:
            noted: the digest of a line that the list must have.

        Raises:
            CorruptError: names the first line that is damaged, or does not follow the one before; or the noted line.
        """
        found: list[dict[str, Any]] = []
        last, known = "", noted
        for number, text in enumerate(self._read(), 1):
            try:
                line = parsed_json(text.encode())
                wrong = validate(line, LINE)
            except ValueError as error:
                wrong = str(error)
            if not wrong and line["previous"] != last:
                wrong = "a line before it was changed, removed or added"
            if wrong:
                raise CorruptError(f"{self.folder.path / SENT} is damaged at line {number}: {wrong}")
            found.append(line)
            last = sha(text.encode())
            known = "" if last == noted else known
        if known:
            raise CorruptError(f"{self.folder.path / SENT} is cut or forged: no line has the noted digest {noted}")
        return found, last

    def _read(self) -> list[str]:
        if not self.folder.has(SENT):
            return []
        whole = self.folder.read(SENT).decode(errors="replace")
        return whole.split("\n")[:-1]  # a last line without its end was cut off before its reply left


class Approval:
    """The requests that the owner of a site has allowed. A request has the same name whenever it is repeated.

    Args:
        folder: the site's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Folder(folder)

    def check(self, packet: Packet) -> None:
        """Refuse a request until its owner allows it, and write it down for the owner.

        Raises:
            NotAllowedError: gives the name to allow. UsageError: too many requests wait.
        """
        if self.allows(packet):
            return
        text = _text(packet)
        if len(text) > MOST_BYTES:
            raise UsageError(
                f"a request for the site's owner must have at most {MOST_BYTES:,} bytes; got {len(text):,}."
            )
        name, waiting = name_of(packet), self.waiting()
        if name not in waiting:
            if len(waiting) >= MOST_ASKED:
                raise UsageError(f"{MOST_ASKED} requests wait for the site's owner already. Ask again after an answer.")
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self.folder.write(f"{ASKED}/{name}", text)
            what = _what(parsed_json(text))
            LOG.warning(f"the server asks to {what}. To allow it: fedlayers federation allow SITE.toml {name}")
        raise NotAllowedError(f"the site's owner has not allowed the request {name} yet. Ask the owner to allow it.")

    def allows(self, packet: Packet) -> bool:
        """Return whether the owner has allowed this text. Other texts may have the same short name."""
        name = f"{ALLOWED}/{name_of(packet)}"
        return self.folder.has(name) and self.folder.read(name) == _text(packet)

    def waiting(self) -> dict[str, str]:
        """Return the requests that wait, by name, in words."""
        names = [name for name in self.folder.names(ASKED) if _NAME.fullmatch(name)]
        return {name: _what(parsed_json(self.folder.read(f"{ASKED}/{name}"))) for name in names}

    def allow(self, name: str) -> None:
        """Allow a request that waits.

        Raises:
            UsageError: none of this name waits.
        """
        waiting = self.waiting()
        if name not in waiting:
            raise UsageError(
                f"RUN must be a request that waits; got {name!r}. These wait: {listing(waiting) or 'none'}."
            )
        self.folder.write(f"{ALLOWED}/{name}", self.folder.read(f"{ASKED}/{name}"))
        self.folder.remove(f"{ASKED}/{name}")


def name_of(packet: Packet) -> str:
    """Return the short name of a request for its owner."""
    return sha(_text(packet))[:12]


def _text(packet: Packet) -> bytes:
    head = {key: value for key, value in packet.head.items() if key != "run"}
    return json.dumps(head, indent=1, sort_keys=True).encode()


def _what(head: Mapping[str, Any]) -> str:
    """Describe a request in words. Its values may be of any type.

    >>> asked = {"kind": "join", "config": {"algorithm": "fedper", "rounds": 20}, "plan": {"shared": ["fc1", "fc2"]}}
    >>> _what({**asked, "sites": [{"name": "a"}, {"name": "b"}]})
    'train fedper for 20 rounds, sharing fc1, fc2, with a, b, each update by itself'
    """

    def listed(found: Any, name: str = "") -> str:
        each = found if isinstance(found, list) else []
        return listing(str(one.get(name) if isinstance(one, dict) else one)[:64] for one in each) or "none"

    if head["kind"] == "join" and isinstance(config := head.get("config"), dict):
        said = f"train {str(config.get('algorithm'))[:64]} for {str(config.get('rounds'))[:20]} rounds"
        plan = head.get("plan")
        said += f", sharing {listed(plan.get('shared'))}" if isinstance(plan, dict) else ", without a plan"
        said += f", with {listed(head.get('sites'), 'name')}"
        said += ", in a secure sum" if head.get("secure_sum") is True else ", each update by itself"
    elif head["kind"] == "race":
        said = f"compare {listed(head.get('arms'), 'algorithm')}"
    elif head["kind"] == "measure":
        said = f"measure {listed(head.get('metrics'))}"
    else:
        said = f"send the moments of its features for seed {str(head.get('seed'))[:20]}"
    said = printable(" ".join(said.split()))
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}…"


def refusal(error: Exception) -> Packet:
    """Return the reply instead of a result: the reason, without the words of other libraries."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, NotAllowedError):
        return Packet({"kind": "waiting", "reason": text[:1000]})
    if isinstance(error, ModuleNotFoundError):
        text = f"the request must need no more packages than the site has; got {error.name!r}. Install it there."
        return Packet({"kind": "refused", "reason": text})
    if isinstance(error, NonFiniteError):
        return Packet({"kind": "failed", "reason": text[:1000], "nonfinite": True})
    if isinstance(error, (LimitError, PacketError, UsageError)):
        return Packet({"kind": "refused", "reason": text[:1000]})
    if not isinstance(error, RunError):  # of another library: it may quote samples
        text = "see the site's log"
    return Packet({"kind": "failed", "reason": f"{type(error).__name__}: {text}"[:1000]})
