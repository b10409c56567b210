"""pFedLA with one weight for the whole model: one unit, and the same training otherwise."""

from dataclasses import replace

import numpy as np
import pytest

from figures import items, training
from figures.pfedla.by_model import BY_LAYER, BY_MODEL, NAME
from figures.pfedla.overlap import WEIGHT
from figures.recipe import where
from tests.figures.conftest import TINY

pytestmark = pytest.mark.filterwarnings("ignore:client")


def test_a_model_has_one_weight_for_each_client(tmp_path):
    study = items.find(NAME)
    keys = {"clients": 3, "rounds": 2, "eval_every": 1}
    runs = {
        run: TINY.with_keys(algorithm=config.federation.algorithm, **keys)
        for run, config in study.runs.items()
    }
    small = replace(study, runs=runs, seeds=1)
    training.train(small, tmp_path / NAME, progress=False)
    frame = small.read(tmp_path / NAME)[1]
    weights = where(frame, metric=WEIGHT).pivot(
        index=["run", "layer"], columns="client", values="value"
    )
    assert list(weights.loc[BY_MODEL].index) == [""]
    assert "" not in weights.loc[BY_LAYER].index
    assert weights.shape[1] == 3
    assert np.all((weights > 0) & (weights < 1))
    means = frame[(frame["client"] == "") & (frame["model"] == "personal")]
    first, last = (means[means["round"] == k].groupby("run")["value"] for k in (1, 2))
    # all models are equal in the first round, so the weights matter from the second on
    assert first.first().nunique() == 1
    assert set(last.first().index) == {BY_LAYER, BY_MODEL}
