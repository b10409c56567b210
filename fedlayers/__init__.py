"""The public interface: ``import fedlayers as fl``. Find out which layers to federate and which to keep local.

Each name is imported when it is first used.

>>> import fedlayers as fl
>>> result = fl.run(dataset="heart", algorithm="fedavg", rounds=1, progress=False)
>>> result
1 round of fedavg on heart, 4 clients: cleveland, hungarian, switzerland, va
macro_f1 on test samples, mean over clients: local 0..., global 0...
"""

from fl_core.interrupts import quiet_imports

quiet_imports("fedlayers")

from typing import TYPE_CHECKING  # noqa: E402

from fl_core.lazy import attach, check_neighbour  # noqa: E402

check_neighbour("diagnostics", __file__)

if TYPE_CHECKING:
    from diagnostics import measure as measure
    from diagnostics import plots as plots
    from diagnostics.capture import batches as batches
    from diagnostics.client_model import ClientModel as ClientModel
    from diagnostics.client_model import Measurement as Measurement
    from diagnostics.decide.explain import explain as explain
    from diagnostics.decide.rules.base import RULES as RULES
    from diagnostics.decide.rules.base import Rule as Rule
    from diagnostics.decide.rules.base import rule as rule
    from diagnostics.decide.select import select as select
    from diagnostics.diagnosis import diagnose as diagnose
    from diagnostics.metrics.base import METRICS as METRICS
    from diagnostics.metrics.base import Metric as Metric
    from diagnostics.metrics.base import metric as metric
    from diagnostics.report import Report as Report
    from diagnostics.representation.probe import probe_set as probe_set
    from fedlayers.run_result import RunResult as RunResult
    from fedlayers.runs import resume as resume
    from fedlayers.runs import run as run
    from fedlayers.studies.choice import Choice as Choice
    from fedlayers.studies.choose import choose as choose
    from fedlayers.studies.compare import compare as compare
    from fedlayers.studies.comparison import Comparison as Comparison
    from fedlayers.studies.comparison import display_name as display_name
    from fedlayers.studies.regret import Regret as Regret
    from fedlayers.studies.regret import regret as regret
    from fedlayers.studies.study import study as study
    from fedlayers.studies.tune import Tuning as Tuning
    from fedlayers.studies.tune import tune as tune
    from fedlayers.studies.tuned import Tuned as Tuned
    from fl_core import __version__ as __version__
    from fl_core.algorithms.base import (
        Algorithm as Algorithm,
    )
    from fl_core.algorithms.base import (
        Message as Message,
    )
    from fl_core.algorithms.base import (
        Round as Round,
    )
    from fl_core.algorithms.base import (
        State as State,
    )
    from fl_core.algorithms.base import (
        Update as Update,
    )
    from fl_core.algorithms.base import (
        register as register,
    )
    from fl_core.config import RunConfig as RunConfig
    from fl_core.costs.plans import plan_cost as plan_cost
    from fl_core.costs.rounds import cost_steps as cost_steps
    from fl_core.data.federated import FederatedData as FederatedData
    from fl_core.data.loading import available_datasets as available_datasets
    from fl_core.data.loading import load as load
    from fl_core.data.partitions.registry import partition as partition
    from fl_core.data.registry import dataset as dataset
    from fl_core.data.silos import from_clients as from_clients
    from fl_core.errors import RunError as RunError
    from fl_core.errors import UsageError as UsageError
    from fl_core.exported import Exported as Exported
    from fl_core.exported import Predictions as Predictions
    from fl_core.exported import export as export
    from fl_core.exported import predict as predict
    from fl_core.joining import join as join
    from fl_core.layers import Layer as Layer
    from fl_core.layers import layers_of as layers_of
    from fl_core.loggers.base import LoggedRun as LoggedRun
    from fl_core.loggers.base import Logger as Logger
    from fl_core.loggers.base import logger as logger
    from fl_core.models.registry import model as model
    from fl_core.newcomer import Newcomer as Newcomer
    from fl_core.plan import LayerPlan as LayerPlan
    from fl_core.records.store import Run as Run
    from fl_core.rows import Row as Row
    from fl_core.rows import row as row
    from fl_core.runner import train_first_round as train_first_round
    from fl_core.stored_models import load_models as load_models
    from fl_core.task import assemble as assemble
    from fl_core.training.context import Context as Context
    from fl_core.training.phases import Phase as Phase
    from fl_core.untouched import set_mode as set_mode

__getattr__, __dir__, __all__ = attach(__name__, __file__)
