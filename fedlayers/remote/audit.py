"""The record of a site's answers. It limits the splits of the data, since many answers together reveal samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from fedlayers.remote.log import now
from fedlayers.remote.policy import Policy
from fedlayers.remote.site_data import Moments, SiteData
from fl_core.errors import UsageError, listing
from fl_core.limits import parsed_json
from fl_core.storage.files import Folder
from fl_core.storage.schema import COUNT, parsed

AUDIT = "audit.jsonl"
"""The file in a site's folder with one line per distinct answer."""
ANSWERED = "answered"
"""The folder beneath it, with digests of the rows behind each answer, and with moments that are sent again."""
LEAST_CHANGED = 10
"""Minimum number of changed rows before changed data get new answers."""
LINE = {"kind": str, "number": (COUNT, None), "seed": (int, None), "data": str, "time": str}
ROW_BYTES = 16


class Audit:
    """The record of a site's answers.

    A split depends on the site's number and the seed. Each split is one more view of the same samples, so a site has
    few.

    Args:
        folder: the site's folder. policy: limits the number of splits. holding: the site's data.
    """

    def __init__(self, folder: Path, policy: Policy, holding: SiteData) -> None:
        self.folder, self.policy, self.holding = Folder(folder), policy, holding

    @cached_property
    def digest(self) -> str:
        """The digest of the data."""
        return str(self.holding.facts()["digest"])

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Return one record per distinct answer.

        Raises:
            CorruptError: the file is damaged.
        """
        if not self.folder.has(AUDIT):
            return []
        path = self.folder.path / AUDIT
        return [parsed(path, line, LINE) for line in self.folder.read(AUDIT).splitlines()]

    def check(self, number: int, seed: int) -> None:
        """Refuse a split beyond the policy's limit, and data with only a few changed rows.

        Raises:
            UsageError: names the splits, or the number of changed rows.
        """
        number, seed = self._split(number, seed)
        splits = [(line["number"], line["seed"], line["data"]) for line in self.lines if line["seed"] is not None]
        used = list(dict.fromkeys((n, s) for n, s, data in splits if data == self.digest))
        if not used:
            self._check_changed({data for _, _, data in splits})
        if (number, seed) not in used and len(used) >= self.policy.splits:
            known = listing(f"seed {s} as client {n}" for n, s in used)
            raise UsageError(
                f"the splits of this site's data must be at most {self.policy.splits} ([policy] splits); got another, "
                f"of seed {seed} as client {number}, after {known}. Use a seed of these."
            )

    def write(self, kind: str, number: int | None = None, seed: int | None = None) -> None:
        """Record an answer before it leaves, if it is the first of its kind, split and data."""
        if number is not None and seed is not None:
            number, seed = self._split(number, seed)
        line = {"kind": kind, "number": number, "seed": seed, "data": self.digest}
        if any(line.items() <= known.items() for known in self.lines):
            return
        self.folder.path.mkdir(parents=True, exist_ok=True)
        if seed is not None:
            self._put(f"{self.digest}.rows", self._rows(0, 0))
        latest = {**line, "time": now()}
        text = "".join(json.dumps(each) + "\n" for each in (*self.lines, latest))
        self.folder.write(AUDIT, text.encode())  # whole, so that a crash leaves no half of a line
        self.lines.append(latest)

    def moments(self, number: int, seed: int) -> Moments:
        """Return the moments of a split. They are computed once, then read from disk.

        Raises:
            UsageError: their rows are nearly those of earlier moments. The difference would reveal a few rows.
            CorruptError: the file is damaged.
        """
        name = f"{self.digest}-{number}-{seed}"
        if self.folder.has(f"{ANSWERED}/{name}.moments"):
            found = parsed_json(self.folder.read(f"{ANSWERED}/{name}.moments"))
            return Moments(found["count"], *(tuple(found[name]) for name in ("present", "mean", "squares")))
        made, rows = self.holding.moments(number, seed), self._rows(number, seed, "train")
        for other in self.folder.names(ANSWERED):
            if other.endswith(".train") and other != f"{name}.train":
                apart = sum(_gone_and_new(self._read(other), rows))
                if apart < self._least:
                    raise UsageError(
                        f"the samples of new moments must differ from those of earlier ones by at least {self._least} "
                        f"rows; got {apart}. Use another seed."
                    )
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self._put(f"{name}.train", rows)
        self.folder.write(f"{ANSWERED}/{name}.moments", json.dumps(asdict(made)).encode())
        return made

    def _check_changed(self, before: set[str]) -> None:
        for data in sorted(before):
            changed = max(_gone_and_new(self._read(f"{data}.rows"), self._rows(0, 0)))
            if changed < self._least:
                raise UsageError(
                    f"the site's data must have changed by at least {self._least} rows for new answers; got {changed}. "
                    f"Bring the data of {data[:12]}… back, or wait for more rows."
                )

    @property
    def _least(self) -> int:
        return max(self.policy.least_samples, LEAST_CHANGED)

    def _split(self, number: int, seed: int) -> tuple[int, int]:
        """Return the number and seed that determine a split. Presplit data have one split for all seeds."""
        return (0, 0) if self.holding.fixed else (number, seed)

    def _rows(self, number: int, seed: int, *splits: str) -> Counter[bytes]:
        rows: Mapping[str, Counter[bytes]] = self.holding.rows(number, seed)
        return sum((rows[split] for split in splits or rows), Counter())

    def _put(self, name: str, rows: Counter[bytes]) -> None:
        self.folder.write(f"{ANSWERED}/{name}", b"".join(sorted(rows.elements())))

    def _read(self, name: str) -> Counter[bytes]:
        data = self.folder.read(f"{ANSWERED}/{name}")
        return Counter(data[at : at + ROW_BYTES] for at in range(0, len(data), ROW_BYTES))


def _gone_and_new(before: Counter[bytes], now: Counter[bytes]) -> tuple[int, int]:
    return (before - now).total(), (now - before).total()
