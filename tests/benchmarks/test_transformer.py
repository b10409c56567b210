"""The jobs of the transformer, of a CUDA device and of torch.func."""

from __future__ import annotations

from benchmarks import stacking, transformer
from fl_core import models
from fl_core.tree import distance


def test_the_transformer_has_the_parameters_that_the_page_names() -> None:
    config = transformer.WHOLE
    model = models.build(
        str(config.model.model), (3, 64, 64), 7, options=config.model.model_options
    )
    assert (
        round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1)
        == 9.7
    )


def test_all_ways_of_stacking_take_the_same_steps() -> None:
    written, *others = (each() for each in stacking.sides(10))
    assert all(distance(written, other) < 1e-5 for other in others)
