"""The table of scores is the one place where they are named."""

import pytest
import torch

from fl_core.rows import (
    CLASSIFICATION,
    MAIN,
    MULTILABEL,
    OWN,
    REGRESSION,
    SHOWN,
    SURVIVAL,
    TABLE,
    TASKS,
    check_score,
    main_score,
)
from fl_core.training import losses
from fl_core.training.evaluate import scores
from tests.conftest import refuses

OF_TASK = {
    CLASSIFICATION: scores(
        torch.eye(3), torch.arange(3), losses.build("cross_entropy")
    ),
    REGRESSION: scores(torch.ones(3, 1), torch.arange(3.0), losses.build("mse")),
    SURVIVAL: scores(torch.ones(3, 1), torch.ones(3, 2), losses.build("cox")),
    MULTILABEL: scores(torch.eye(3), torch.eye(3), losses.build("multilabel_bce")),
}


@pytest.mark.parametrize("task", TASKS)
def test_the_table_has_what_is_computed(task):
    of_task = {name for name, score in TABLE.items() if score.task in (OWN, task)}
    assert set(OF_TASK[task]) == of_task
    assert {MAIN[task], *SHOWN[task]} <= of_task
    assert main_score(OF_TASK[task]) == MAIN[task]
    for name in TABLE:
        if name in of_task:
            assert check_score(name, task) == name
        else:
            with refuses(rf"{task}.*'{name}'"):
                check_score(name, task)


def test_a_perfect_prediction_has_the_best_of_each_score():
    perfect = scores(40 * torch.eye(3), torch.arange(3), losses.build("cross_entropy"))
    worse = scores(-40 * torch.eye(3), torch.arange(3), losses.build("cross_entropy"))
    for name, value in perfect.items():
        assert value == pytest.approx(float(TABLE[name].higher_is_better), abs=1e-6)
        assert (
            value > worse[name] if TABLE[name].higher_is_better else value < worse[name]
        )
        assert TABLE[name].share or name == "loss"
