"""The diagnostics that a run uses to decide on its plan, and to measure its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fl_core.engine import Instruments
    from fl_core.stopping import Listener
    from fl_core.task import Task


def default_instruments() -> Instruments:
    """Return the diagnostics' observers and rules; they are imported at the first call."""
    from diagnostics.measure import instruments

    return replace(instruments(), measuring=_measuring)


def _measuring(task: Task) -> Listener:
    """Return the listener that measures the layers; it is imported only by a run that measures."""
    from diagnostics.through_time import Measuring

    return Measuring(task)
