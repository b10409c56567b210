"""The limits with default flags, where a faster trainer serves small perceptrons: it must serve both or neither."""

import pytest

from fl_core import runner, tree
from fl_core.config import RunConfig
from fl_core.plan import LayerPlan
from tests.conftest import every_other
from tests.identities.test_limits import FEDAVG_LIMITS
from tests.identities.test_mixing import ALONE

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # of small clients, and of plans that share all

HEART = RunConfig(dataset="heart", rounds=2)
TASK = runner.assemble(HEART)
PLANS = {
    count: LayerPlan.prefix(TASK.layers, count) for count in (0, 1, len(TASK.layers))
}
ALL = len(TASK.layers)
META = {"alpha": 0, "beta": TASK.config.training.lr}

LIMITS = {  # algorithm, its limit, layers shared, options
    **{
        name: (each, "fedavg", ALL if shares else None, given)
        for name, (each, shares, given) in FEDAVG_LIMITS.items()
    },
    **{name: (each, "local", None, given) for name, (each, given) in ALONE.items()},
    "ditto's personal model, lam 0": ("ditto", "local", None, {"lam": 0}),
    "local_head, nothing shared": ("local_head", "local", 0, {}),
    "playerfl, planned": ("playerfl", "fedper", 1, {}),
    "vanilla, nothing frozen": ("vanilla", "fedbabu", None, {"unfreeze": "0,0,0"}),
    "anti, nothing frozen": ("anti", "fedbabu", None, {"unfreeze": "0,0,0"}),
    "per_fedavg, alpha 0": ("per_fedavg", "fedavg", None, {**META, "variant": "fo"}),
    "per_fedavg, alpha 0, hessian-free": (
        "per_fedavg",
        "fedavg",
        None,
        {**META, "variant": "hf"},
    ),
}
PLAYED = {}


def played(algorithm, shared=None, options=None):
    key = repr((algorithm, shared, options))
    if key not in PLAYED:
        config = HEART.with_keys(algorithm=algorithm, options=options or {})
        PLAYED[key] = runner.run(
            config, plan=None if shared is None else PLANS[shared], progress=False
        )
    return PLAYED[key]


def models(engine, which=""):
    """Digests of every client's model of that name; without one, of the model that is evaluated."""
    name = which or engine.algorithm.evaluates
    return [
        tree.digest(engine.models(client)[name]) for client in range(len(engine.names))
    ]


@pytest.mark.parametrize("limit", every_other(LIMITS, of=3))
def test_the_limit_holds_with_default_flags(limit):
    algorithm, other, shared, options = LIMITS[limit]
    which = {
        "ditto": "personal" if other == "local" else "global",
        "per_fedavg": "global",
    }.get(algorithm, "")
    found = models(played(algorithm, shared, options), which)
    assert found == models(played(other, shared if other == "fedper" else None))
    assert tree.digest(tree.state_dict(TASK.model)) not in found, "the models must move"


def test_these_runs_take_the_faster_path():
    assert TASK.config.execution.stack == "on"
