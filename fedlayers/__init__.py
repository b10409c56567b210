"""The public interface: ``import fedlayers as fl``. Find out which layers to federate and which to keep local.

Each name is imported when it is first used.

>>> import fedlayers as fl
>>> result = fl.run(dataset="heart", algorithm="fedavg", rounds=1, progress=False)
>>> result
1 round of fedavg on heart, 4 clients: cleveland, hungarian, switzerland, va
macro_f1 on test samples, mean over clients: local 0..., global 0...
"""

# ruff: noqa: F401 - the names below are imported on first use, by `attach`

from fl_core.interrupts import quiet_imports

quiet_imports("fedlayers")

from typing import TYPE_CHECKING  # noqa: E402

from fl_core.lazy import attach, check_neighbour  # noqa: E402

check_neighbour("diagnostics", __file__)

if TYPE_CHECKING:
    from diagnostics import measure, plots
    from diagnostics.capture import batches
    from diagnostics.client_model import ClientModel, Measurement
    from diagnostics.decide.explain import explain
    from diagnostics.decide.rules.base import RULES, Rule, rule
    from diagnostics.decide.select import select
    from diagnostics.diagnosis import diagnose
    from diagnostics.metrics.base import METRICS, Metric, metric
    from diagnostics.report import Report
    from diagnostics.representation.probe import probe_set
    from fedlayers.run_result import RunResult
    from fedlayers.runs import resume, run
    from fedlayers.studies.choice import Choice
    from fedlayers.studies.choose import choose
    from fedlayers.studies.compare import compare
    from fedlayers.studies.comparison import Comparison, display_name
    from fedlayers.studies.regret import Regret, regret
    from fedlayers.studies.study import study
    from fedlayers.studies.tune import Tuning, tune
    from fedlayers.studies.tuned import Tuned
    from fl_core import __version__
    from fl_core.algorithms.base import Algorithm, Message, Round, State, Update, register
    from fl_core.config import RunConfig
    from fl_core.costs.plans import plan_cost
    from fl_core.costs.rounds import cost_steps
    from fl_core.data.federated import FederatedData
    from fl_core.data.loading import available_datasets, load
    from fl_core.data.partitions.registry import partition
    from fl_core.data.registry import dataset
    from fl_core.data.silos import from_clients
    from fl_core.errors import RunError, UsageError
    from fl_core.exported import Exported, Predictions, export, predict
    from fl_core.joining import join
    from fl_core.layers import Layer, layers_of
    from fl_core.loggers.base import LoggedRun, Logger, logger
    from fl_core.models.registry import model
    from fl_core.newcomer import Newcomer
    from fl_core.plan import LayerPlan
    from fl_core.records.store import Run
    from fl_core.rows import Row, row
    from fl_core.runner import train_first_round
    from fl_core.stored_models import load_models
    from fl_core.task import assemble
    from fl_core.training.context import Context
    from fl_core.training.phases import Phase
    from fl_core.untouched import set_mode

__getattr__, __dir__, __all__ = attach(__name__, __file__)
