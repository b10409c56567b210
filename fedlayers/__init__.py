"""Which layers of a network should be federated, and which should stay local? ``import fedlayers as fl``.

Everything that a user needs has its name here; a name is imported when it is first used.

>>> import fedlayers as fl
>>> engine = fl.run(dataset="heart", algorithm="fedavg", rounds=1, progress=False)
>>> engine.algorithm.name
'fedavg'
"""

from typing import TYPE_CHECKING

from fl_core.lazy import attach

if TYPE_CHECKING:
    from fedlayers.diagnostics.decide.rules.base import Rule as Rule
    from fedlayers.diagnostics.decide.rules.base import rule as rule
    from fedlayers.diagnostics.decide.select import select as select
    from fedlayers.diagnostics.diagnosis import diagnose as diagnose
    from fedlayers.diagnostics.metrics.base import Metric as Metric
    from fedlayers.diagnostics.metrics.base import metric as metric
    from fedlayers.diagnostics.report import Report as Report
    from fedlayers.runs import resume as resume
    from fedlayers.runs import run as run
    from fedlayers.studies.compare import Comparison as Comparison
    from fedlayers.studies.compare import compare as compare
    from fedlayers.studies.regret import Regret as Regret
    from fedlayers.studies.regret import regret as regret
    from fedlayers.studies.study import study as study
    from fl_core import __version__ as __version__
    from fl_core.algorithms.base import Algorithm as Algorithm
    from fl_core.algorithms.base import register as register
    from fl_core.config import RunConfig as RunConfig
    from fl_core.data.federated import FederatedData as FederatedData
    from fl_core.data.registry import dataset as dataset
    from fl_core.data.silos import of_silos as of_silos
    from fl_core.errors import RunError as RunError
    from fl_core.errors import UsageError as UsageError
    from fl_core.layers import Layer as Layer
    from fl_core.layers import layers_of as layers_of
    from fl_core.models.registry import model as model
    from fl_core.plan import LayerPlan as LayerPlan
    from fl_core.runner import load_models as load_models

_HOMES = {
    "Algorithm": "fl_core.algorithms.base",
    "Comparison": "fedlayers.studies.compare",
    "FederatedData": "fl_core.data.federated",
    "Layer": "fl_core.layers",
    "LayerPlan": "fl_core.plan",
    "Metric": "fedlayers.diagnostics.metrics.base",
    "Regret": "fedlayers.studies.regret",
    "Report": "fedlayers.diagnostics.report",
    "Rule": "fedlayers.diagnostics.decide.rules.base",
    "RunConfig": "fl_core.config",
    "RunError": "fl_core.errors",
    "UsageError": "fl_core.errors",
    "__version__": "fl_core",
    "compare": "fedlayers.studies.compare",
    "dataset": "fl_core.data.registry",
    "diagnose": "fedlayers.diagnostics.diagnosis",
    "layers_of": "fl_core.layers",
    "load_models": "fl_core.runner",
    "metric": "fedlayers.diagnostics.metrics.base",
    "model": "fl_core.models.registry",
    "of_silos": "fl_core.data.silos",
    "register": "fl_core.algorithms.base",
    "regret": "fedlayers.studies.regret",
    "resume": "fedlayers.runs",
    "rule": "fedlayers.diagnostics.decide.rules.base",
    "run": "fedlayers.runs",
    "select": "fedlayers.diagnostics.decide.select",
    "study": "fedlayers.studies.study",
}
__all__ = [*_HOMES]
__getattr__, __dir__ = attach(__name__, _HOMES)
