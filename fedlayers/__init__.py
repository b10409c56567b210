"""The public interface: ``import fedlayers as fl``. Find out which layers to federate and which to keep local.

Each name is imported when it is first used.

>>> import fedlayers as fl
>>> result = fl.run(dataset="heart", algorithm="fedavg", rounds=1, progress=False)
>>> result
1 round of fedavg on heart, 4 clients: cleveland, hungarian, switzerland, va
macro_f1 on test samples, mean over clients: local 0..., global 0...
"""

from fl_core.progress import quiet_imports

quiet_imports("fedlayers")

from typing import TYPE_CHECKING  # noqa: E402

from fl_core.errors import checked  # noqa: E402
from fl_core.registry import attach  # noqa: E402

if TYPE_CHECKING:
    from diagnostics import measure as measure, plots as plots
    from diagnostics.cross_scores import (
        CrossScores as CrossScores,
        cross_scores as cross_scores,
    )
    from diagnostics.label_shift import (
        LabelShift as LabelShift,
        label_shift as label_shift,
    )
    from diagnostics.load_weights import load_weights as load_weights
    from diagnostics.measure import (
        diagnose as diagnose,
        diagnose_features as diagnose_features,
        tsne as tsne,
    )
    from diagnostics.measurement import (
        ClientModel as ClientModel,
        Measurement as Measurement,
        batches as batches,
    )
    from diagnostics.metrics.base import (
        METRICS as METRICS,
        LayerProbe as LayerProbe,
        Metric as Metric,
        layer_metric as layer_metric,
        metric as metric,
    )
    from diagnostics.null import Nulls as Nulls
    from diagnostics.report import Report as Report, explain as explain
    from diagnostics.representation.features import (
        NoValue as NoValue,
        probe_set as probe_set,
    )
    from diagnostics.select import (
        RULES as RULES,
        Rule as Rule,
        rule as rule,
        select as select,
    )
    from diagnostics.through_time import through_time as through_time
    from fedlayers.decision.answer import Answer as Answer
    from fedlayers.decision.choose import choose as choose
    from fedlayers.decision.compare import compare as compare, tune as tune
    from fedlayers.decision.comparison import (
        Comparison as Comparison,
        display_name as display_name,
    )
    from fedlayers.decision.search import Tuned as Tuned
    from fedlayers.decision.study import study as study
    from fedlayers.monitor import Monitor as Monitor
    from fedlayers.rule_benchmark import regret as regret
    from fedlayers.run_result import RunResult as RunResult
    from fedlayers.runs import resume as resume, run as run
    from fl_core import __version__ as __version__
    from fl_core.algorithms.base import (
        Algorithm as Algorithm,
        Message as Message,
        Round as Round,
        State as State,
        Update as Update,
        register as register,
    )
    from fl_core.config import RunConfig as RunConfig
    from fl_core.data.federated import FederatedData as FederatedData
    from fl_core.data.loading import from_clients as from_clients, load as load
    from fl_core.data.partitions.base import partition as partition
    from fl_core.data.registry import dataset as dataset
    from fl_core.errors import RunError as RunError, UsageError as UsageError
    from fl_core.layers import layers_of as layers_of
    from fl_core.models.building import model as model
    from fl_core.plan import Layer as Layer, LayerPlan as LayerPlan
    from fl_core.records.store import Run as Run
    from fl_core.rounds.recorder import LoggedRun as LoggedRun, Logger as Logger
    from fl_core.rows import Row as Row, row as row
    from fl_core.run.costs import cost_steps as cost_steps, plan_cost as plan_cost
    from fl_core.run.exported_model import (
        ExportedModel as ExportedModel,
        Predictions as Predictions,
    )
    from fl_core.run.restore import load_models as load_models
    from fl_core.run.runner import train_first_round as train_first_round
    from fl_core.run.stored_models import export as export, predict as predict
    from fl_core.run.task import assemble as assemble
    from fl_core.training.phases import Context as Context, Phase as Phase
    from fl_core.tree import set_mode as set_mode

__getattr__, __dir__, __all__ = attach(__name__, __file__, checked)
