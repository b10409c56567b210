"""What objects show of themselves: short as text, plain in a notebook."""

import re

import pytest
import torch

import fedlayers as fl
from fedlayers.decision.comparison import Comparison
from fedlayers.decision.study import judged
from fl_core.algorithms.base import ALGORITHMS
from fl_core.display import LINES, Displayed
from fl_core.run import runner

pytestmark = pytest.mark.filterwarnings("ignore:client")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """An object of each kind that shows itself."""
    config = fl.RunConfig(algorithm="fedper", rounds=1, eval_every=1)
    out = tmp_path_factory.mktemp("shown")
    answer = fl.choose(config, out, seeds=1, baselines=False)
    table = answer.trained.table()
    result = fl.run(config, out=out / "own")
    few = {"fedavg": {"lr": 0.1}}, {"fedavg": 0.5}, {"fedavg": 2}
    tuned = fl.Tuned(*few, "macro_f1", "heart", 1, (0,), "")
    file = fl.export(out / "own", out / "va.safetensors", client="va")
    north = (torch.randn(20, 4), torch.arange(20) % 3)
    crossed = fl.cross_scores(torch.nn.Linear(4, 3), {"north": north, "south": north})
    report = fl.diagnose(torch.nn.Linear(4, 3), {"north": north}, ["weight_magnitude"])
    frame = result.to_frame().assign(algorithm="fedper", seed=0)
    predictions = fl.Predictions(
        tuple(map(str, range(50))), ("no", "yes"), torch.zeros(50, 2)
    )
    return [
        *(config, runner.assemble(config).data, result, result.plan, report),
        *(
            Comparison(frame),
            ALGORITHMS,
            answer,
            judged(table, ["fedavg", "local"]),
            predictions,
        ),
        *(file, tuned, crossed, fl.label_shift(runner.assemble(config).data)),
    ]


def test_every_kind_is_short_as_text_and_plain_in_a_notebook(
    shown,
):
    public = [getattr(fl, name) for name in fl.__all__]
    kinds = [x for x in public if isinstance(x, type) and issubclass(x, Displayed)]
    assert not [x for x in kinds if not any(isinstance(kind, x) for kind in shown)]
    assert len(kinds) >= 9  # with Registry, which has no public name
    for displayed in shown:
        assert 1 <= len(repr(displayed).splitlines()) <= LINES, type(displayed)
        page = displayed._repr_html_()
        assert "<script" not in page
        assert "<svg" not in page  # JupyterLab removes it from what it does not trust
        plan = (
            displayed
            if isinstance(displayed, fl.LayerPlan)
            else getattr(displayed, "plan", None)
        )
        assert (": shared" in page) == (plan is not None and bool(plan.shared))
        tags = re.findall(r"<(/?)(\w+)[^>]*?(/?)>", page)
        opened = [name for end, name, single in tags if not end and not single]
        closed = [name for end, name, _ in tags if end]
        assert sorted(closed) == sorted(name for name in opened if name != "br")
