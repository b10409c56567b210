"""From models and data to evidence about layers, and from evidence to a plan.

>>> from diagnostics import diagnose
>>> report = diagnose({"a": model_a, "b": model_b}, data)
>>> report.values("hessian_trace"), report.cka("fc1")
"""

from diagnostics.costs import cost_steps, plan_cost
from diagnostics.diagnose import diagnose
from diagnostics.gradients import Subject
from diagnostics.importance import SensitivityAccumulator
from diagnostics.metrics import METRICS, Metric
from diagnostics.report import Report
from diagnostics.similarity import linear_cka, probe_set

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
