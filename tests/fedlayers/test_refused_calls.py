"""Functions refuse arguments that they cannot use, in one line that names them; each also takes sound ones."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from diagnostics import gradients, load_weights, select
from diagnostics.measure import diagnose_features
from diagnostics.metrics import base
from diagnostics.null import untrained_copy
from diagnostics.plots import page, runs
from diagnostics.representation.embedding import Pool, embed
from fedlayers.cli.options import Command
from fedlayers.decision.study import judged
from fedlayers.decision.table import VALIDATION
from fedlayers.decision.ways import way_of
from fl_core import rows, statistics
from fl_core.algorithms.averaging import ServerMade
from fl_core.algorithms.fedamp import Mixing
from fl_core.data import arrays, files
from fl_core.data.partitions.base import Partitioning
from fl_core.data.partitions.papers import _FedPFT
from fl_core.data.preprocessing import fitted
from fl_core.data.reading import Reading
from fl_core.display import Displayed
from fl_core.errors import CorruptError, RunError
from fl_core.layers import Layer, layers_of
from fl_core.models.adapter import as_array
from fl_core.models.extended import split_head
from fl_core.models.lora import numbers_of
from fl_core.plan import LayerPlan, prefix_length
from fl_core.records.stopping import StoppingRule
from fl_core.rounds.recorder import Logger
from fl_core.run.costs import plan_cost
from fl_core.storage import tensor_sizes
from fl_core.training.evaluate import predict, scores
from fl_core.training.losses import Loss, build
from tests.conftest import refuses
from tests.fedlayers.decision.made import table_of
from tests.made import Wired, mlp, normal

LAYERS = tuple(Layer(name, (f"{name}.w",)) for name in ("a", "b", "c"))
LABELS = np.array([[0, 1], [1, 0]])
PREPARED = fitted(
    np.array([[1.0, 5.0], [3.0, 6.0]]), "standard", "none", ("age", "dose")
)
STOPPING = {
    "patience": 1,
    "metrics": ["loss"],
    "models": {"shared": {"loss": {"0": 1.0}}},
}
TWICE = Wired(lambda m, x: m.fc(m.fc(x)), fc=nn.Linear(3, 3))


def rule(answer):
    """A rule that answers this whatever the values are."""
    return select._make(lambda values: answer, "a rule")


def without_values(metric="accuracy", status="ok"):
    """Rows of costs, of layers that the metric names."""
    lines = [("a", "x", 2.0), ("a", "x", 3.0), ("b", "x", 1.0)]
    table = pd.DataFrame(lines, columns=["layer", "variant", "value"])
    return table.assign(metric=metric)


def intervals(low, high):
    return pd.DataFrame({"algorithm": ["a"], "value": [1.0], "low": [low], "high": [high], "n": [3]})  # fmt: skip


def steps(**columns):
    return pd.DataFrame({"run": [], "round": [], "naive": [], "flops": [], "moved": []} | columns)  # fmt: skip


def stopped(**changes):
    return StoppingRule.from_json(STOPPING | changes)


def of_one_split():
    table = table_of({"base_rate": 1.0, "fedavg": 0.5})
    parts = {key: part for key, part in table.parts.items() if key[2] == VALIDATION}
    return type(table)(**vars(table) | {"parts": parts})


CALLS = {
    "a rule that cuts elsewhere": (lambda: rule(["1"]).cut([1, 2, 3]), "cut the network in two; got layers 1"),
    "a rule of no layer": (lambda: rule([]).cut([1, 2]), "must name layers of 0, 1 to share; got none"),
    "a rule of another layer": (lambda: rule(["0", "7"]).cut([1, 2]), "got 7"),
    "a rule of too many": (lambda: rule(3).cut([1, 2]), "from 1 to 2 or a list of names; got 3"),
    "a rule of 0": (lambda: rule(0).cut([1, 2]), "from 1 to 2 or a list of names; got 0"),
    "a rule of truth": (lambda: rule(True).cut([1, 2]), "from 1 to 2 or a list of names; got True"),
    "a rule without values": (lambda: select._make(lambda: 1, "none"), "must take the values; got 0"),
    "a metric of no arguments": (lambda: base._make(lambda: [1], "none"), "must take a measurement and maybe.*got 0"),
    "a metric of many": (lambda: base._make(lambda a, b, c: [], "many"), "must take a measurement and maybe.*got 3"),
    "a metric of weights": (
        lambda: diagnose_features({"a": {"x": normal(4, 3)}}, metrics=["weight_magnitude"], progress=False),
        "must read features alone; got 'weight_magnitude'",
    ),
    "no features": (lambda: diagnose_features({}, metrics=["cka"]), "of the same samples; got no samples"),
    "features of two sizes": (
        lambda: diagnose_features({"a": {"x": normal(4, 3)}, "b": {"x": normal(5, 3)}}, metrics=["cka"]),
        "of the same samples; got 4, 5 samples",
    ),
    "a module without a draw": (
        lambda: untrained_copy(nn.Sequential(Wired(None, w=nn.Parameter(torch.ones(2)))), 0),
        "module '0', a Wired, cannot draw",
    ),
    "a model without a draw": (lambda: untrained_copy(Wired(None, w=nn.Parameter(torch.ones(2))), 0), ": Wired cannot"),
    "a format of other values": (lambda: page._cell("word", ".2f", "loss"), "column 'loss'.*got '.2f' for 'word'"),
    "an interval above its value": (lambda: runs.comparison(intervals(2.0, 3.0), "loss"), "interval of a must contain"),
    "an interval below its value": (lambda: runs.comparison(intervals(0.0, 0.5), "loss"), "interval of a must contain"),
    "no rounds": (lambda: runs.cost_steps(steps()), "must have rounds; got none"),
    "constant features": (
        lambda: embed(Pool(np.ones((9, 2)), *[np.zeros(9, int)] * 3), perplexity=2.0),
        "must vary over the samples",
    ),
    "a study of one split": (lambda: judged(of_one_split(), ["fedavg"]), "must have test samples.*got none"),
    "more layers than there are": (lambda: way_of("first_4", LAYERS, "fedper"), "share fewer.*has 3 layers"),
    "no adapters": (lambda: way_of("lora_A", LAYERS, "fedper"), "must have a model with adapters"),
    "pictures of many channels": (
        lambda: arrays.features(np.zeros((2, 3, 4, 5), np.uint8)), r"images must be uint8.*got uint8 \[2, 3, 4, 5\]",
    ),
    "a series of whole numbers": (lambda: arrays.features(np.zeros((2, 3, 4), int)), "got int64"),
    "samples without features": (lambda: arrays.features(np.zeros(4)), r"at least one of each; got \[4\]"),
    "an endless value": (lambda: arrays.features(np.array([[1.0, math.inf]])), r"position \[1\].*got inf"),
    "one label of several": (lambda: arrays.several_labels(LABELS[:, :1]), r"two or more labels.*got \[2, 1\]"),
    "labels that never differ": (lambda: arrays.several_labels(LABELS * [1, 0]), "'1' must have both values; got 0"),
    "names of other labels": (lambda: arrays.several_labels(LABELS, ["x"]), "a name for each of 2 labels; got 1"),
    "rows of another width": (lambda: PREPARED.transform(np.ones((2, 3))), r"2 columns; got.* shape \[2, 3\]"),
    "a missing value": (lambda: PREPARED.transform(np.array([[1.0, np.nan]])), "column 'dose' must not be missing"),
    "filled but unasked": (lambda: Reading(fill_missing_columns=True), "impute mean, median"),
    "halves of one group": (lambda: statistics.halves(np.zeros(4, int)), "groups in both halves"),
    "ranks of gaps": (lambda: statistics.ranks(pd.DataFrame([[1.0, np.nan]]), True), "no ranks"),
    "a table of no values": (lambda: statistics._align(first=[], second=[]), "first must have values; got none"),
    "values of two lengths": (lambda: statistics._align(a=[1, 2], b=[1]), r"one length; got shapes.*\(2,\).*\(1,\)"),
    "values of two axes": (lambda: statistics._align(a=[[1, 2]], b=[[1, 2]]), "must be vectors"),
    "a layer twice": (lambda: LayerPlan(LAYERS[:1] * 2, ()), "name each layer once; got 'a' twice"),
    "a tensor twice": (lambda: LayerPlan((LAYERS[0], Layer("d", ("a.w",))), ()), "each tensor once; got 'a.w'"),
    "a shared layer twice": (lambda: LayerPlan(LAYERS, ("a", "a")), "each shared layer once; got 'a'"),
    "a plan that is no cut": (lambda: prefix_length(LayerPlan(LAYERS, ("b",))), "must share the first layers"),
    "a plan of other tensors": (
        lambda: LayerPlan(LAYERS, ()).check_tensors(["a.w", "b.w", "x"]), "only in the plan: c.w; only in the model: x",
    ),
    "no costs": (lambda: plan_cost(LayerPlan(LAYERS, ()), without_values()), "hold no layer_cost"),
    "two costs of a layer": (
        lambda: plan_cost(LayerPlan(LAYERS, ()), without_values("layer_cost")), "two costs of layer 'a'",
    ),
    "numbers of no device": (lambda: as_array(torch.ones(2, device="meta")), "device meta"),
    "a sparse tensor": (lambda: as_array(torch.eye(2).to_sparse()), "must be dense; got torch.sparse_coo"),
    "nothing to predict": (lambda: predict(mlp(2, 2), torch.ones(0, 2)), "samples to predict; got none"),
    "logits that are no numbers": (
        lambda: scores(torch.tensor([[math.nan, 1.0], [0.0, 1.0]]), torch.tensor([0, 1]), build("cross_entropy")),
        "1 of 2 samples have logits",
    ),
    "a stored rule of no score": (lambda: stopped(metrics=[]), "must have a score; got none"),
    "a stored rule of other scores": (
        lambda: stopped(models={"shared": {"accuracy": {}}}), "must have each score of shared; got others",
    ),
    "a stored rule of another form": (lambda: stopped(patience="1"), "patience"),
    "a rank of 0": (lambda: numbers_of("rank_pattern", ["fc:0"], int), "NAME:NUMBER, above 0; got 'fc:0'"),
    "a rank of no name": (lambda: numbers_of("rank_pattern", [":4"], int), "got ':4'"),
    "a rate of no number": (lambda: numbers_of("rates", ["fc:x"], float), "got 'fc:x'"),
    "an endless rate": (lambda: numbers_of("rates", ["fc:inf"], float), "got 'fc:inf'"),
    "a last layer used twice": (lambda: split_head(TWICE, normal(2, 3)), "'fc' only once"),
    "a model without tensors": (lambda: layers_of(nn.ReLU(), normal(2, 3)), "ReLU must have parameters"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_a_call_is_refused(case):
    call, message = CALLS[case]
    with refuses(message, (ValueError, RunError)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_same_calls_take_what_is_sound():
    assert rule(["0", "1"]).cut([1, 2, 3]) == rule(2).cut([1, 2, 3]) == 2
    assert rule(["b", "a"]).shared(["a", "b", "c"], [1, 2, 3]) == ("a", "b")
    assert rule(np.int64(1)).cut([1, 2]) == 1
    assert page._cell(1.234, ".1f", "loss") == "1.2"
    assert way_of("first_2", LAYERS, "fedper").plan.shared == ("a", "b")
    assert prefix_length(LayerPlan(LAYERS, ("a", "b"))) == 2
    LayerPlan(LAYERS, ()).check_tensors(["a.w", "b.w", "c.w"])
    assert numbers_of("rank_pattern", ["fc:4", "x.fc:8"], int) == {"fc": 4, "x.fc": 8}
    assert stopped().to_json() == STOPPING
    numbers, names = arrays.several_labels(LABELS)
    assert (numbers.tolist(), names) == (LABELS.tolist(), ("0", "1"))
    assert PREPARED.transform(np.array([[2.0, 5.5]])).tolist() == [[0.0, 0.0]]
    head = split_head(mlp(3, 4, 2), normal(2, 3))[1]
    assert (head.in_features, head.out_features) == (4, 2)


HEADERS = {
    "no file": (None, "got .* a folder"),
    "no JSON": (b"{", "a first line that is no header"),
    "no object": (b"[]", "a first line without a schema"),
    "no schema": (b"{}", "a first line without a schema"),
    "another schema": (b'{"schema": 0}', "schema|version"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_of_rows_is_refused(case, tmp_path):
    content, message = HEADERS[case]
    if content is not None:
        (tmp_path / "rows.jsonl").write_bytes(content)
    with refuses(message, (ValueError, CorruptError)):
        rows.read_header(tmp_path / "rows.jsonl")


def header(entry, size=8):
    text = json.dumps({"w": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
SIZES = {
    "no object": (b"\2" + bytes(7) + b"[]", "its header is no object"),
    "no shape": (header({"dtype": "F32", "data_offsets": [0, 8]}), "shape"),
    "a negative size": (header(ENTRY | {"shape": [-2]}), "shape"),
    "more elements than bytes": (header(ENTRY | {"shape": [9]}), "'w' has more elements than bytes"),
    "a shorter file": (header(ENTRY, 7), "another size than its header says"),
    "a longer file": (header(ENTRY, 9), "another size than its header says"),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_a_header_of_tensors_is_refused(case, tmp_path):
    content, message = SIZES[case]
    (tmp_path / "a.safetensors").write_bytes(content)
    with refuses(message, ValueError):
        tensor_sizes(tmp_path / "a.safetensors")


def test_a_header_of_tensors_gives_their_sizes(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(header(ENTRY))
    assert tensor_sizes(tmp_path / "a.safetensors") == {"w": 2}


def test_arrays_of_a_file_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((2, 3)))
    with refuses(r"must have arrays x y.*got no 'y' among x"):
        files.read_npz(tmp_path / "a.npz")


def test_files_of_clients_fit_a_pattern(tmp_path):
    for pattern, message in (
        ("{client}/{client}.pt", "{client} once; got"),
        ("models.pt", "{client} once; got 'models.pt'"),
        ("{client}.pt", "fits none of other.txt"),
    ):
        (tmp_path / "other.txt").write_text("")
        with refuses(message):
            load_weights.load_clients(tmp_path, pattern, build=lambda: mlp(2, 2))


UNDEFINED = [
    *((Command, "main"), (Displayed, "summary"), (Logger, "log"), (Loss, "per_sample")),
    *((Loss, "base_rate"), (Mixing, "weights"), (Partitioning, "assign")),
    *((ServerMade, "model_for"), (_FedPFT, "label_distributions")),
    *((gradients.Statistic, "of"), (gradients.Statistic, "variants")),
]


@pytest.mark.parametrize(("base_class", "name"), UNDEFINED)
def test_what_a_subclass_must_define_is_an_error_without_it(base_class, name):
    """A method that says nothing would give None, far from where it was forgotten."""
    method = getattr(base_class, name)
    function = getattr(method, "fget", method)
    count = function.__code__.co_argcount
    with pytest.raises(NotImplementedError):
        function(*[None] * count)
