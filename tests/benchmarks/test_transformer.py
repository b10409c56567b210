"""The job of the transformer."""

from __future__ import annotations

from benchmarks import transformer
from fl_core import models


def test_the_transformer_has_the_parameters_that_the_page_names():
    config = transformer.WHOLE
    model = models.build(
        str(config.model.model), (3, 64, 64), 7, options=config.model.model_options
    )
    assert (
        round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1)
        == 9.7
    )
