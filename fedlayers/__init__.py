"""Which layers of a network should be federated, and which should stay local? ``import fedlayers as fl``.

Everything that a user needs has its name here; a name is imported when it is first used.
"""

from fl_core import __version__
from fl_core.lazy import attach

_HOMES = {
    "Algorithm": "fl_core.algorithms.base",
    "LayerPlan": "fl_core.plan",
    "Metric": ".diagnostics.metrics.base",
    "Report": ".diagnostics.report",
    "RunConfig": "fl_core.config",
    "compare": ".studies.compare",
    "diagnose": ".diagnostics.diagnosis",
    "layers_of": "fl_core.layers",
    "load_models": "fl_core.runner",
    "of_silos": "fl_core.data.silos",
    "register": "fl_core.algorithms.base",
    "regret": ".studies.regret",
    "resume": "fl_core.runner",
    "run": "fl_core.runner",
    "select": ".diagnostics.decide.select",
    "study": ".studies.study",
}
__all__ = ["__version__", *_HOMES]
__getattr__, __dir__ = attach(__name__, _HOMES)
