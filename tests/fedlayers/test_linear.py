"""The linear layer of a federation: what it sees of each kind of samples, and of which it cannot be built."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedlayers as fl
from fedlayers.backends.local import no_progress
from fedlayers.decision.linear import COUNTS, MODEL, linear_model_of
from fedlayers.decision.training import make_question, with_linear
from fedlayers.decision.ways import ELSEWHERE, LINEAR
from fl_core import models
from fl_core.config import with_own
from fl_core.models.papers import WordCounts
from fl_core.models.tokens import Tokenizer, TokenShape
from tests.conftest import TOY
from tests.made import frame, lines

DRAW = np.random.default_rng(0)
LABELS = np.arange(120) % 2


def clients_of(x, y=LABELS):
    """Return two clients with half of the samples each."""
    return {"a": (x[:60], y[:60]), "b": (x[60:], y[60:])}


FLOATS = (DRAW.normal(size=(120, 3, 4)) + LABELS[:, None, None]).astype(np.float32)
PIXELS = DRAW.integers(0, 200, (120, 64, 16), dtype=np.uint8)
PIXELS[LABELS == 1, :32] += 50
PIXELS[LABELS == 0, 32:] += 50
KINDS = {
    # samples, weights a class, and options that read them
    "columns": (frame(120), 3, {}),
    "numbers": (clients_of(FLOATS), 12, {}),
    "pixels": (clients_of(PIXELS), 32 * 16, {"lr": 0.002}),
    "words": (pd.DataFrame(lines()), None, {"text_column": "text"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_fedavg_trains_one_linear_layer_on_prepared_samples(kind):
    samples, width, keys = KINDS[kind]
    keys = {"rounds": 8, "lr": 0.05, "patience": 0, "optimizer": "adamw", **keys}
    config = fl.RunConfig(**keys)
    task = fl.assemble(config, data=samples)
    options = linear_model_of(task.data)
    assert options == {}
    linear = config.with_keys(model=MODEL, model_options=options)
    task = fl.assemble(linear, data=samples)
    (layer,) = (
        module for module in task.model.modules() if isinstance(module, nn.Linear)
    )
    assert layer.in_features == (width or task.data.shape.tokens)
    assert [layer.name for layer in task.layers] == ["fc"]
    result = fl.run(linear, data=samples, progress=False)
    if kind != "columns":  # whose labels are random
        assert result.scores["accuracy"].min() > 0.8


def test_words_are_hashed_over_sites():
    texts = fl.assemble(
        fl.RunConfig(text_column="text", rounds=1),
        data=pd.DataFrame(lines()),
    ).data
    remote = texts.without_samples()
    assert linear_model_of(remote) == {"counts": COUNTS}
    assert linear_model_of(TOY.without_samples()) == {}
    shape = TokenShape((4,), 5000)
    model = models.build(MODEL, shape, 2, options={"counts": COUNTS})
    assert model.get_submodule("fc").in_features == COUNTS
    ids = torch.tensor([[2, 3, 3 + COUNTS, 0]])
    counts = model.get_submodule("features")(ids)
    assert counts[0, [0, 2, 3]].tolist() == [0.0, 1.0, 2.0]
    assert counts.sum() == 3
    few = WordCounts(9, COUNTS)
    assert torch.equal(few(ids % 9), WordCounts(9)(ids % 9))


def test_the_reason_is_added_to_those_of_other_ways(tmp_path):
    config = fl.RunConfig(dataset="heart", rounds=1, model="linear")
    arguments = *with_own(config), tmp_path, None, [0], 0, False, no_progress
    question = make_question(*arguments)
    question = with_linear(replace(question, not_tried={"fallback": ELSEWHERE}))
    assert question.not_tried.keys() == {"fallback", LINEAR}
    assert question.not_tried["fallback"] == ELSEWHERE


def test_other_samples_have_a_reason():
    ids = replace(TOY, shape=TokenShape((6,), 9), integers=True)
    assert "token ids" in linear_model_of(ids)
    tokenizer = Tokenizer("folder", "", 9, 0, 6)
    assert "token ids" in linear_model_of(replace(TOY, shape=TokenShape((6,), 9, tokenizer)))  # fmt: skip
    x = torch.rand(40, 3)
    y = torch.arange(40) % 2
    several = fl.from_clients({"a": ((x, x), y), "b": ((x, x), y)})
    assert linear_model_of(several) == "it takes one input, and a sample has several"
    numbers = fl.from_clients({"a": (x, x), "b": (x, x)}, task="regression")
    assert linear_model_of(numbers).startswith("it gives one prediction a sample")
