"""A mixture of models: a file with their weights in the folder that has them, and one model made of several."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_core.errors import CorruptError, UsageError
from fl_core.predictions import class_logits
from fl_core.storage.files import Folder, check_version, sign
from fl_core.storage.schema import COUNT, DIGEST, NUMBER, check_stored

FILE = "mixture.json"
FORMAT = "fedlayers.mixture/1"
RUNS, MODELS = "runs", "models"
"""What a mixture's members are: run directories below its folder, or exported models in it."""
MEMBER = {"name": str, "weight": NUMBER, "path": str, "digest": DIGEST, "n_bytes": COUNT}
FORM = {"kind": str, "members": [MEMBER], "evidence": dict}
_PATHS = {RUNS: re.compile(r"arms/[\w.+-]*[\w+-]"), MODELS: re.compile(r"[\w.+-]*[\w+-]")}
"""Paths that members may have, by kind: none leads out of the folder."""


@dataclass(frozen=True)
class Member:
    """One model of a mixture.

    Attributes:
        name: of the arm of the race.
        weight: above 0. The weights of all members have the sum 1.
        path: of the run directory or of the file of weights, relative to the mixture's folder.
        digest: the run's id, or the SHA-256 of the file of weights.
        n_bytes: of one model's tensors.
    """

    name: str
    weight: float
    path: str
    digest: str
    n_bytes: int


@dataclass(frozen=True)
class Mixture:
    """The weights of several models, whose probabilities are averaged by them. They are the same for all clients.

    Attributes:
        members: the models with a weight above 0.
        kind: :data:`RUNS` or :data:`MODELS`.
        evidence: plain data: the race's ``seed`` and ``winner``, the log loss on validation samples of each arm alone
            (``losses``) and of the mixture (``loss``), and the digest of the ``data``.
    """

    members: tuple[Member, ...]
    kind: str = RUNS
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the models that a prediction needs."""
        return sum(member.n_bytes for member in self.members)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as in the file."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "members": [asdict(member) for member in self.members],
            "evidence": dict(self.evidence),
        }

    def save(self, folder: Path) -> None:
        """Write the mixture's file into its folder, with a digest of its contents."""
        Folder(folder).write(FILE, sign(self.to_json()))


def load(folder: Path) -> Mixture:
    """Read a mixture's file from its folder.

    Raises:
        UsageError: there is none, or a newer version of this package wrote it.
        CorruptError: it is damaged, its weights are no weights, or a member lies outside of the folder.
    """
    own, path = Folder(folder), folder / FILE
    if not own.has(FILE):
        raise UsageError(f"{folder} must have a mixture, {FILE}; got none. Make one: fedlayers choose --mix.")
    data = own.read_signed(FILE)
    if not check_version(path, data.get("format"), FORMAT):
        raise UsageError(f"{path} must have the format {FORMAT}; got {data.get('format')!r}. Make the mixture again.")
    check_stored(path, data, FORM)
    members = tuple(Member(**{name: each[name] for name in MEMBER}) for each in data["members"])
    weights = [member.weight for member in members]
    if not members or min(weights) <= 0 or not math.isclose(math.fsum(weights), 1, rel_tol=1e-9):
        raise CorruptError(f"{path} is damaged: weights must be above 0 with the sum 1; got {weights}")
    for member in members:
        if data["kind"] not in _PATHS or not _PATHS[data["kind"]].fullmatch(member.path):
            raise CorruptError(f"{path} is damaged: a member must lie in its folder; got {member.path!r}")
    if len({member.path for member in members}) < len(members):
        raise CorruptError(f"{path} is damaged: a member is there twice")
    return Mixture(members, data["kind"], data["evidence"])


class MixtureModel(nn.Module):
    """A model of several, whose outputs are log sum_k w_k softmax(f_k(x)): log-probabilities, float64 [n, C]."""

    def __init__(self, members: Sequence[nn.Module], weights: Sequence[float], n_classes: int) -> None:
        super().__init__()
        self.members, self.n_classes = nn.ModuleList(members), n_classes
        self.log_weights: Tensor
        self.register_buffer("log_weights", torch.tensor(weights, dtype=torch.float64).log())

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.stack([class_logits(member(x), self.n_classes) for member in self.members])
        return (logits.double().log_softmax(dim=2) + self.log_weights[:, None, None]).logsumexp(dim=0)
