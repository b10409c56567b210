"""The diagnostics that a run uses to decide on its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fl_core.plan_selection import Instruments


def default_instruments() -> Instruments:
    """Return the diagnostics' observers and rules; they are imported at the first call."""
    from diagnostics.measure import instruments

    return instruments()
