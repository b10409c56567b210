"""From models and data to evidence about layers, and from evidence to a plan.

The folder is imported as ``fedlayers.diagnostics``, a name that no file beside a user's notebook can take. By its bare
name, ``import diagnostics``, it is the same package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fl_core.lazy import attach

if TYPE_CHECKING:
    from .costs import cost_steps, plan_cost
    from .diagnosis import diagnose
    from .gradients import Subject
    from .importance import SensitivityAccumulator
    from .metrics import METRICS, Metric
    from .report import Report
    from .similarity import linear_cka, probe_set

_HOMES = {
    "METRICS": ".metrics",
    "Metric": ".metrics",
    "Report": ".report",
    "SensitivityAccumulator": ".importance",
    "Subject": ".gradients",
    "cost_steps": ".costs",
    "diagnose": ".diagnosis",
    "linear_cka": ".similarity",
    "plan_cost": ".costs",
    "probe_set": ".similarity",
}
__all__ = [
    "METRICS",
    "Metric",
    "Report",
    "SensitivityAccumulator",
    "Subject",
    "cost_steps",
    "diagnose",
    "linear_cka",
    "plan_cost",
    "probe_set",
]
__getattr__, __dir__ = attach(__name__, _HOMES)

if __name__ == "diagnostics":
    importlib.import_module("fedlayers.naming").by_bare_name(__name__)
