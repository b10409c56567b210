"""Measures layers on models and data, and turns the measurements into a plan.

The folder is imported as ``fedlayers.diagnostics``. No file next to a user's notebook can take that name. The bare
``import diagnostics`` gives the same package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fl_core.lazy import attach

if TYPE_CHECKING:
    from .client_model import ClientModel, Measurement
    from .decide.rules.base import RULES, rule
    from .diagnosis import diagnose
    from .gradients.importance import SensitivityAccumulator
    from .metrics.base import METRICS, Metric, metric
    from .plan_costs import cost_steps, plan_cost
    from .report import Report
    from .representation.gram import linear_cka
    from .representation.probe import probe_set

_HOMES = {
    "METRICS": ".metrics.base",
    "Measurement": ".client_model",
    "Metric": ".metrics.base",
    "RULES": ".decide.rules.base",
    "Report": ".report",
    "SensitivityAccumulator": ".gradients.importance",
    "ClientModel": ".client_model",
    "cost_steps": ".plan_costs",
    "diagnose": ".diagnosis",
    "linear_cka": ".representation.gram",
    "metric": ".metrics.base",
    "plan_cost": ".plan_costs",
    "probe_set": ".representation.probe",
    "rule": ".decide.rules.base",
}
__all__ = [
    "METRICS",
    "RULES",
    "ClientModel",
    "Measurement",
    "Metric",
    "Report",
    "SensitivityAccumulator",
    "cost_steps",
    "diagnose",
    "linear_cka",
    "metric",
    "plan_cost",
    "probe_set",
    "rule",
]
__getattr__, __dir__ = attach(__name__, _HOMES)

if __name__ == "diagnostics":
    importlib.import_module("fedlayers.naming").by_bare_name(__name__)
