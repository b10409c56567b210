"""Differential privacy at a site: values that leave are clipped and get Gaussian noise. All releases are counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from fedlayers.remote.compression import map_tensors, start_of
from fedlayers.remote.noise import SPREAD, discrete_gaussian
from fl_core.algorithms.base import Message
from fl_core.bounds import ABOVE_0, INSIDE, check_fields, check_value
from fl_core.errors import NonFiniteError, RunError, UsageError, damaged
from fl_core.limits import JSON_BYTES
from fl_core.storage.files import Folder, json_bytes
from fl_core.storage.schema import COUNT, MapOf, parsed
from fl_core.tree import Tree

ACCOUNT = "privacy.json"
DELTA = 1e-5
LEAST, MOST = 1e-9, 1e9
"""Limits of clips and noise, within which whole steps of the noise's grid fit into 64 bits."""


@dataclass(frozen=True)
class Privacy:
    """A site's rules for hiding its data. The unit of privacy is the site: all of its samples together.

    Of each reply, the tensors' difference from what the site received (or from the initial model) is scaled down to the
    norm ``clip``. Then noise of standard deviation ``noise * clip`` is added to each number. The same is done with
    ``clip_numbers`` for plain numbers in a message, such as PLayer-FL's measurements, and for the values of a
    diagnosis. Each of these is one release of the Gaussian mechanism. Two data sets are neighbours if one replaces the
    other. A release then differs by at most twice its clip, so the account uses the multiplier ``noise / 2``.

    Names, statuses and estimators of measured values come from random data of the same shape. What an algorithm
    observes of single samples stays at the site. Scores of models, training losses and numbers of samples are not
    covered: they leave as they are.

    The noise is discrete (:func:`fedlayers.remote.noise.discrete_gaussian`). Clipped values are rounded towards zero on
    a grid of ``noise * clip / SPREAD``. Noise is added in whole steps of that grid. The accounted epsilon is that of
    continuous noise: the bound of Canonne, Kamath and Steinke (2020) has the same form. The bits come from the
    operating system, so a run with noise cannot be repeated bit for bit. A repeated request gets the stored reply.

    >>> Privacy(clip=1.0)
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: [privacy] clip, clip_numbers and noise must each be 1e-09 to 1e+09; got ...

    Attributes:
        clip, clip_numbers: Euclidean norms, of all tensors and of all numbers of a reply.
        noise: standard deviation as a multiple of them.
        delta: of (epsilon, delta).
        epsilon: limit beyond which nothing more is sent, over all runs; 0 = no limit.
    """

    clip: float = 0.0
    clip_numbers: float = 0.0
    noise: float = 0.0
    delta: Annotated[float, INSIDE] = DELTA
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        given = [self.clip, self.clip_numbers, self.noise]
        if any(given) and not all(LEAST <= value <= MOST for value in given):
            raise UsageError(
                f"[privacy] clip, clip_numbers and noise must each be {LEAST:g} to {MOST:g}; got {given}. "
                "Set all three, or none."
            )
        check_fields(self, "[privacy] ", "Use 1 / samples or less.")
        if not 0 <= self.epsilon < math.inf or (self.epsilon and not self.noise):
            raise UsageError(f"[privacy] epsilon must be at least 0, with noise; got {self.epsilon}. Set noise, too.")

    @property
    def active(self) -> bool:
        """True if anything is hidden."""
        return self.noise > 0


class Account:
    """The record of a site's releases over all runs and restarts, and of the privacy that remains.

    Args:
        folder: the site's, in which :data:`ACCOUNT` is stored.
    """

    def __init__(self, privacy: Privacy, folder: Path) -> None:
        self.privacy, self.folder = privacy, folder
        self._releases = Counter[float]()  # by the multiplier of the noise
        if Folder(folder).has(ACCOUNT):
            found = parsed(folder / ACCOUNT, Folder(folder).read(ACCOUNT, most=JSON_BYTES), {"releases": MapOf(COUNT)})
            with damaged(folder / ACCOUNT):
                self._releases.update({float(noise): count for noise, count in found["releases"].items()})
                for noise in self._releases:
                    check_value("noise", noise, ABOVE_0)

    def spent(self, more: int = 0) -> float:
        """Return epsilon at the privacy's delta, of all releases and ``more`` further ones with the present noise."""
        return spent(self._releases + Counter({self.privacy.noise / 2: more}), self.privacy.delta)

    def release(self, count: int) -> float:
        """Record releases before they leave. Return epsilon after them.

        Raises:
            UsageError: they would exceed the site's limit.
        """
        after = self.spent(count)
        if self.privacy.epsilon and after > self.privacy.epsilon:
            raise UsageError(
                f"epsilon must be at most {self.privacy.epsilon:g} at delta {self.privacy.delta:g}; got {after:.3g}. "
                "The site's owner can raise it in [privacy]."
            )
        self._releases[self.privacy.noise / 2] += count
        self.folder.mkdir(parents=True, exist_ok=True)
        Folder(self.folder).write(ACCOUNT, json_bytes({"releases": {str(k): n for k, n in self._releases.items()}}))
        return after


def spent(releases: Mapping[float, int], delta: float) -> float:
    """Return epsilon of releases, {noise multiplier: count}, by opacus' accountant (Renyi differential privacy).

    >>> round(spent({1.0: 1}, delta=1e-5), 3)
    4.729
    >>> spent({}, delta=1e-5)
    0.0
    """
    if not releases:
        return 0.0
    try:
        from opacus.accountants import RDPAccountant
    except ImportError as error:
        raise RunError(
            "opacus must be installed to count privacy. Install it: pip install 'fedlayers[federation]'."
        ) from error
    accountant = RDPAccountant()
    accountant.history = [(multiplier, 1.0, count) for multiplier, count in sorted(releases.items())]
    return float(accountant.get_epsilon(delta=delta))


def hide_message(message: Message, received: Message, initial: Tree, privacy: Privacy) -> tuple[Message, int]:
    """Return a message as it leaves, and its number of releases.

    Args:
        received: what the server sent. initial: the model before the first round.

    Raises:
        UsageError: it has data that cannot carry noise; names it.
        NonFiniteError: its norm is not finite, so it cannot be clipped.
    """
    moved: dict[tuple[str, str], Tensor] = {}
    starts: dict[tuple[str, str], Tensor] = {}
    for kind, each in message.trees.items():
        for name, tensor in each.items():
            if tensor.dtype == torch.bool:
                raise UsageError(
                    f"tensors must be numbers to carry noise; got the mask {name!r} of {kind!r}. "
                    "Use an algorithm without masks, such as fedavg."
                )
            if tensor.is_floating_point():
                like = start_of(kind, name, received, initial)
                starts[kind, name] = torch.zeros_like(tensor) if like is None else like
                moved[kind, name] = tensor.double() - starts[kind, name].double()
    noised = _add_noise(moved, privacy.clip, privacy.noise)

    def leaving(kind: str, name: str, tensor: Tensor) -> Tensor:
        if (kind, name) not in noised:
            return tensor
        return (starts[kind, name].double() + noised[kind, name]).to(tensor.dtype)

    if _has_none(message.meta):  # such as an importance that overflowed, which tells something of the data
        raise NonFiniteError("numbers of a message must be finite; got one without a value. The site has sent nothing.")
    numbers: list[float] = []

    def listed(value: float) -> float:
        numbers.append(value)
        return value

    _each_number(message.meta, listed)
    fresh = iter(add_noise_to_numbers(numbers, privacy))
    meta = _each_number(message.meta, lambda _: next(fresh))
    return Message(map_tensors(message, leaving).trees, meta), bool(moved) + bool(numbers)


def add_noise_to_numbers(numbers: list[float], privacy: Privacy) -> list[float]:
    """Return numbers as they leave: their vector scaled down to ``clip_numbers``, with noise.

    Raises:
        NonFiniteError: as for :func:`hide_message`.
    """
    vector = {("", ""): torch.tensor(numbers, dtype=torch.float64)}
    return _add_noise(vector, privacy.clip_numbers, privacy.noise)["", ""].tolist()


def _add_noise(parts: Mapping[tuple[str, str], Tensor], clip: float, noise: float) -> dict[tuple[str, str], Tensor]:
    norm = math.sqrt(sum(float(part.double().square().sum()) for part in parts.values()))
    if not math.isfinite(norm):  # a NaN would scale nothing down
        raise NonFiniteError(
            "the norm of a message must be finite; got NaN or infinity. The site has sent nothing: use a smaller lr."
        )
    step = clip * noise / SPREAD
    scale = min(1.0, clip / norm if norm else 1.0) * (1 - 2**-32)  # the norm itself may be rounded down
    return {place: (_steps(part * scale, step) + _draws(part)).double() * step for place, part in parts.items()}


def _steps(values: Tensor, step: float) -> Tensor:
    """Return values as whole numbers of steps, rounded towards zero, so that no norm grows."""
    return (values / step).trunc().long()


def _draws(like: Tensor) -> Tensor:
    return torch.from_numpy(discrete_gaussian(like.numel())).reshape(like.shape)


def _has_none(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_none, value.values()))
    return any(map(_has_none, value)) if isinstance(value, (list, tuple)) else value is None


def _each_number(value: Any, change: Callable[[float], float]) -> Any:
    """Return plain data after changing every number that is not an integer, in order."""
    if isinstance(value, float):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _each_number(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_number(each, change) for each in value]
    return value
