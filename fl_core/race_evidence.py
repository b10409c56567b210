"""The evidence of a race in a plan: the arms' scores, their differences with intervals, seeds and rounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fl_core.bounds import COUNT, check_form, check_names, form_of
from fl_core.display import MANY, printable
from fl_core.errors import check_known, listing
from fl_core.rows import TABLE, in_column, in_points, label_of


@dataclass(frozen=True)
class ArmEvidence:
    """The scores of one arm on validation samples, means over seeds. Missing numbers are None.

    Attributes:
        value: its mean in the race's ``metric``.
        score: by which arms are ordered: z(metric) - z(loss), or what a judge forecasts.
        difference: the first arm's value minus this arm's in the metric, with the simultaneous 95 % interval ``low`` to
            ``high``.
        p_value: of the difference, corrected by Holm.
        forecast: where a judge stopped the race early: how far the arm is expected to end above the kept one.
    """

    name: str
    value: float | None
    loss: float | None
    score: float | None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    forecast: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with the forecast if there is one."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name != "forecast" or value is not None
        }


@dataclass(frozen=True)
class RaceEvidence:
    """The evidence of a race.

    Attributes:
        metric: name of the score by which arms are compared.
        rounds: the round after which the race was judged.
        verdict: how certain the decision is.
        used: the arm whose plan this is.
        arms: all arms, the leader first: it has the best ``score``.
    """

    metric: str
    rounds: int
    seeds: tuple[int, ...]
    verdict: str
    used: str
    arms: tuple[ArmEvidence, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, from which :meth:`from_json` gives equal evidence."""
        return {
            **asdict(self),
            "seeds": list(self.seeds),
            "arms": [arm.to_json() for arm in self.arms],
        }

    @classmethod
    def from_json(cls, data: Any) -> RaceEvidence:
        """Read the evidence of a race.

        Raises:
            UsageError: a name is unknown or missing, or a value has another type or is not finite.
        """
        form = {**form_of(cls), "rounds": COUNT}
        check_form("the race", data, form)
        check_known("metric of the race", data["metric"], TABLE)
        for arm in data["arms"]:
            check_names("an arm of the race", arm, form_of(ArmEvidence))
        arms = tuple(ArmEvidence(**arm) for arm in data["arms"])
        return cls(**{**data, "seeds": tuple(data["seeds"]), "arms": arms})

    def lines(self) -> list[str]:
        """Return the evidence in words: the conditions, a line for each of the first arms, and what "behind" means."""
        seeds = (
            f"seed{'s' * (len(self.seeds) != 1)} {listing(map(str, self.seeds), MANY)}"
        )
        head = f"race on validation samples, {self.rounds} rounds, {seeds}: {printable(self.verdict)}"
        shown = self.arms[:MANY]
        width = max((len(arm.name) for arm in shown), default=0)
        lines = [
            f"{printable(arm.name):<{width}}  {self._numbers(arm)}" for arm in shown
        ]
        more = [f"and {len(self.arms) - MANY} more"] if len(self.arms) > MANY else []
        differ = any(arm.difference is not None for arm in shown)
        return [
            head,
            *(f"  {line}" for line in (*lines, *more)),
            *([f"  {self._legend()}"] if differ else []),
        ]

    def _legend(self) -> str:
        """Return what a difference measures, its unit and its direction."""
        score = TABLE[self.metric]
        better = f"{label_of(self.metric)}, {'higher' if score.higher_is_better else 'lower'} is better"
        return (
            f"behind: the value of {printable(self.arms[0].name)} minus the arm's, in {'points of ' * score.share}"
            f"{better}; brackets: 95 % intervals for all arms together"
        )

    def _numbers(self, arm: ArmEvidence) -> str:
        if arm.value is None:
            if arm.forecast is None:
                return "failed"
            side = "below" if arm.forecast < 0 else "above"
            gain = f", forecast {in_points(self.metric, abs(arm.forecast))} {side} the kept one"
            return f"judged by then, no final score{' (used)' if arm.name == self.used else gain}"
        parts = [
            f"{label_of(self.metric)} {in_column(self.metric, arm.value)}"
            + " %" * TABLE[self.metric].share
        ]
        parts += [] if arm.loss is None else [f"loss {arm.loss:.3f}"]
        if arm.difference is not None:
            difference = f"behind by {in_column(self.metric, arm.difference)}"
            known = arm.low is not None and arm.high is not None
            ends = [
                in_column(self.metric, end)
                for end in (arm.low, arm.high)
                if end is not None
            ]
            parts.append(f"{difference} [{', '.join(ends)}]" if known else difference)
        return ", ".join(parts) + " (used)" * (arm.name == self.used)
