"""Scores of pooled features tell whether classes and clients stand apart."""

import numpy as np

from figures.planes import scores
from tests.diagnostics.test_embedding import parted


def test_the_scores_tell_what_stands_apart():
    found = scores(parted())
    assert found["silhouette_class"] > 0.7
    assert found["purity_class"] == 1
    assert abs(found["silhouette_client"]) < 0.1
    assert 0.35 < found["purity_client"] < 0.65
    alone = parted()
    alone.clients[:] = "a"
    assert np.isnan(scores(alone)["silhouette_client"])
    assert np.isnan(scores(alone)["purity_client"])
