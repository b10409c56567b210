"""Files with valid digests and formats, but with values that no run can write, are refused by name."""

import json
import math
import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch.nn.modules.module import register_module_forward_pre_hook

from diagnostics.measure import diagnose_run, instruments
from diagnostics.select import select
from fedlayers.decision.compare import compare
from fedlayers.decision.search import FORMAT
from fl_core import rows, storage
from fl_core.config import RunConfig
from fl_core.data.preprocessing import NO_FENCE, Preprocessing
from fl_core.errors import CorruptError, RunError, UsageError
from fl_core.models import build
from fl_core.records.store import Run
from fl_core.run import runner
from fl_core.run.exported_model import export, predict, read
from fl_core.run.restore import load_models
from tests.conftest import every_other, refuses
from tests.faults.injected import contents, cover, edit, forge

ROUNDS = 3


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run of three rounds that stopped after its second, and that nobody touches."""
    path = tmp_path_factory.mktemp("sound") / "run"
    config = RunConfig(
        algorithm="playerfl", rounds=ROUNDS, epochs=1, checkpoint_every=1, eval_every=2
    )
    runner.run(config, path, instruments=instruments, until=2)
    return path


def resume(path):
    runner.resume(path, instruments=instruments)


def models(path):
    load_models(path, which="personal")


def refused(act, run, *named):
    """Refused in one line that names one of these files, and nothing is changed."""
    before = contents(run, ("lock",))
    with pytest.raises(CorruptError) as caught:
        act(run)
    message = str(caught.value)
    assert any(str(run / name) in message for name in named), message
    assert "\n" not in message
    assert contents(run, ("lock",)) == before
    return message


LAST = "checkpoints/000002.json"
OTHERS = {
    "null": None,
    "a number": 7,
    "below 0": -7,
    "a text": "x",
    "a list": ["x"],
    "an object": {"x": [1]},
}
PLACES = {  # and what may stand there
    LAST: {
        "round": "a number",
        "run": "",
        "rows": "",
        "rows.bytes": "a number",
        "rows.sha256": "",
        "states": "",
        "states.server": "",
        "states.server.blob": "",
        "states.server.trees": "",
        "states.server.meta": "",
        "states.server.meta.plan": "",
        "states.client/va.blob": "",
        "states.client/va.meta": "an object",
        "states.local/va.trees": "",
    },
    "config.json": {
        "files": "",
        "files.partition.safetensors": "",
        "rows": "",
        "rows.bytes": "a number",
        "environment.versions": "",
        "own": "a list",
        "given": "null",
        "options": "",
        "command": "a text",
        "dataset": "",
        "algorithm": "",
        "rounds": "a number",
        "seed": "a number",
        "preprocessing": "null",
        "lr": ("a number", "null"),
        "workers": "a number",
        "loss_options": "null",
        "model_options": "an object",
    },
}
FORGED = [
    (name, place, other)
    for name, places in PLACES.items()
    for place, sound in places.items()
    for other in OTHERS
    if other not in sound
]


def put(found, place, value):
    """Set what is at a place, a name a step; names may have dots."""
    longest = sorted(found, key=len, reverse=True)
    head = next((name for name in longest if place.startswith(f"{name}.")), None)
    if head is None:
        found[place] = value
    else:
        put(found[head], place.removeprefix(f"{head}."), value)


@pytest.mark.parametrize("start", every_other(range(4), of=4))
def test_a_value_of_another_type(sound, tmp_path, start):
    """The run does not resume. One line names its directory, and nothing in it changes."""
    for k, (name, place, other) in enumerate(FORGED[start::4]):
        run = Path(shutil.copytree(sound, tmp_path / str(k)))
        forge(run / name, lambda found: put(found, place, OTHERS[other]))  # noqa: B023
        if name == "config.json":  # else its digest differs, which is told first
            cover(run, name)
        before = contents(run, ("lock",))
        refusal = refusal_of(resume, run)
        assert refusal, (name, place, other)
        assert contents(run, ("lock",)) == before, (name, place, other)
        others = [refusal_of(act, run) for act in (lambda at: Run(at).verify(), models)]
        for message in filter(None, (refusal, *others)):
            assert str(run) in message
            assert "\n" not in message


def refusal_of(act, run):
    """Return what the refusal says; an empty text if the value was not needed."""
    try:
        act(run)
    except (CorruptError, UsageError) as error:
        return str(error)
    return ""


def forge_blob(run, state, change):
    """Change the tensors of one state in the last checkpoint, whose digests then fit again; their file."""
    entry = json.loads((run / LAST).read_bytes())["states"][state]
    tensors = load((run / f"blobs/{entry['blob']}.safetensors").read_bytes())
    data = save(change(tensors))
    (run / f"blobs/{storage.sha(data)}.safetensors").write_bytes(data)
    forge(
        run / LAST, lambda found: found["states"][state].update(blob=storage.sha(data))
    )
    return f"blobs/{storage.sha(data)}.safetensors"


def test_a_tensor_of_another_shape(sound, tmp_path):
    def shorten(tensors):
        return {**tensors, min(tensors): tensors[min(tensors)][:-1].clone()}

    for k, state in enumerate(("server", "client/va", "local/va")):
        run = Path(shutil.copytree(sound, tmp_path / str(k)))
        name = forge_blob(run, state, shorten)
        refused(resume, run, name, LAST)
        refused(models, run, name, LAST)


def renamed(tensors):
    first = min(tensors)
    return {**without_one(tensors), f"{first}.other": tensors[first]}


def without_one(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != min(tensors)}


def test_a_tensor_of_another_name_or_none(sound, tmp_path):
    """If the algorithm notices only when it needs the tensor, the error names the checkpoint."""
    whole = "must have a whole 'personal' model"
    for k, (state, change, message) in enumerate(
        (
            ("server", renamed, ""),
            ("server", without_one, whole),
            ("client/va", without_one, None),  # only training asks for it
        )
    ):
        run = Path(shutil.copytree(sound, tmp_path / str(k)))
        name = forge_blob(run, state, change)
        if message:
            with refuses(message):
                models(run)
        elif message is not None:
            refused(models, run, name, LAST)
        fails(run, name, LAST)
    run = Path(shutil.copytree(sound, tmp_path / "no client"))

    def rename(found):
        found["states"]["client/nobody"] = found["states"].pop("client/va")

    forge(run / LAST, rename)
    refused(resume, run, LAST)


def fails(run, *named):
    """Fail in one line that names one of these files."""
    with pytest.raises(RunError) as caught:
        resume(run)
    assert any(str(run / name) in str(caught.value) for name in named)
    assert "\n" not in str(caught.value)


def test_meta_of_another_type(tmp_path):
    """An algorithm checks its own values in the next round, and the error names the file."""
    sound = tmp_path / "sound"
    config = RunConfig(algorithm="fedfomo", rounds=3, epochs=1, checkpoint_every=1)
    runner.run(config, sound, until=2)
    meta = json.loads((sound / LAST).read_bytes())["states"]["server"]["meta"]
    assert meta
    for name in meta:
        run = Path(shutil.copytree(sound, tmp_path / name))
        place = f"states.server.meta.{name}"
        forge(run / LAST, lambda found, place=place: put(found, place, "x"))
        fails(run, LAST)


def json_of(text):
    return torch.tensor(list(text), dtype=torch.uint8)


PARTITIONS = {
    "no meta": lambda tree: tree.pop("meta"),
    "other meta": lambda tree: tree.update(meta=json_of(b"[1, 2]")),
    "nested meta": lambda tree: tree.update(meta=json_of(b"[" * 9000)),
    "fractions": lambda tree: tree.update({"0/train": tree["0/train"].double() + 0.5}),
    "a table": lambda tree: tree.update({"0/train": tree["0/train"][None].clone()}),
    "none of a client": lambda tree: tree.pop("0/train"),
}


def test_a_partition_that_is_none(sound, tmp_path):
    for how, change in PARTITIONS.items():
        run = Path(shutil.copytree(sound, tmp_path / how))
        path = run / "partition.safetensors"
        tree = load(path.read_bytes())
        change(tree)
        path.write_bytes(save(tree))
        cover(run, path.name)
        for act in (resume, models):
            refused(act, run, path.name)


def test_a_row_that_no_run_writes(tmp_path):
    """Other types, shares beyond 0 to 1, or a status that does not fit the value. Also headers of other types."""
    path, header = tmp_path / "rows.jsonl", {"schema": rows.SCHEMA}
    row = rows.row("accuracy", 0.5, client="north", n_train=3)
    values = {
        "value": ["x", [1], 1.5, -1e308, math.inf, math.nan, None],
        "round": [1.5, 2**70],
        "client": [["north"]],
        "n_train": [{}],
        "stderr": [math.inf, -1.0],
        "status": ["no samples"],
    }
    forged = [
        (header, {**row, name: v})
        for name, wrong_values in values.items()
        for v in wrong_values
    ]
    forged.append((header, {**row, "metric": "loss", "value": math.nan}))
    layers = ({}, *({"layers": v} for v in (3, [3], [{"name": 3}], {"a": 1})))
    forged += [({**header, **layer_lists}, row) for layer_lists in layers]
    for lines in forged:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises((CorruptError, UsageError)) as caught:
            select(path)
        assert "\n" not in str(caught.value)
    wrong_entries = {
        "seed": ["x", -1, 1.5],
        "layers": [3],
        "metrics": [["cka"]],
        "pairs": [{"cka": 1}],
        "bytes": [{"a": "x"}, {"a": 10**400}],
        "absent": [7, [7]],
        "loss": [7],
    }
    for name, wrong_values in wrong_entries.items():
        for value in wrong_values:
            path.write_text(json.dumps({**header, name: value}) + "\n")
            with refuses(f"line 1 is damaged: {name}", CorruptError):
                rows.read(path)


TUNED = {
    "settings": {"fedavg": {"lr": 0.1}}, "options": {"fedavg": {}}, "values": {"fedavg": 0.5}, "trials": {"fedavg": 3},
    "score": "macro_f1", "dataset": "heart", "rounds": 2, "seeds": [7], "version": "0.2.0",
}  # fmt: skip


def test_a_tuning_with_what_no_search_finds(tmp_path):
    """A file of tuning chooses rates and an algorithm's numbers. It chooses no code, no file and no rounds."""
    trap, settings_place = "tests.faults.injected:trap", "settings.fedavg"
    code = [{key: trap} for key in ("model", "algorithm", "init")]
    settings = [[1], {"lr": "x"}, {"lr": math.nan}, {"rounds": 10**9}, *code]
    path = tmp_path / "tuned.json"
    for place, value in (
        *((settings_place, value) for value in settings),
        ("options.fedavg", [1]),
        ("options.fedavg", {"base": trap}),
        ("options", {}),
        ("seeds", 3),
        ("seeds", [{}]),
        ("trials", []),
        ("more", 1),
    ):
        stored = {"format": FORMAT, **json.loads(json.dumps(TUNED))}
        put(stored, place, value)
        path.write_text(json.dumps(stored))
        how = {"out": tmp_path / "out", "tuned": path}
        message = "tuned must be a file of fedlayers tune"
        with refuses(message) as caught:
            compare(RunConfig(), ["fedavg", "local"], [0], **how)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


DESCRIBED = (
    "model",
    "model.outputs",
    "model.callable",
    "model.class",
    "model.seed",
    "model.extended_by",
    "inputs",
    "inputs.shape",
    "inputs.tokens",
    "inputs.images",
    "inputs.words",
    "inputs.preprocessing",
    "inputs.preprocessing.spread",
    "inputs.reading",
    "inputs.reading.columns",
    "inputs.reading.encoding",
    "classes",
    "task",
    "run",
    "run.client",
    "run.round",
)


@pytest.fixture(scope="module")
def model(sound, tmp_path_factory):
    """An exported model that nobody touches."""
    path = tmp_path_factory.mktemp("exported") / "va.safetensors"
    return export(sound, path, client="va").path


def test_a_description_of_a_model_with_a_value_of_another_type(model, tmp_path):
    """No value raises anything but a refusal in one line. Those that fit its type may be used."""
    path = Path(shutil.copytree(model.parent, tmp_path / "copy")) / model.name
    about = path.with_name(f"{path.name}.json")
    whole = about.read_bytes()
    for place in DESCRIBED:
        count = 0
        for other in (*OTHERS.values(), True, 1e308):
            about.write_bytes(whole)
            forge(about, lambda found, other=other: put(found, place, other))  # noqa: B023
            with suppress(CorruptError, UsageError):
                predict(path, np.zeros((2, 10)))
                count += 1
        assert count <= 3, place


WORDED = {
    "columns": ["age", "sex"], "scale": "standard", "impute": "none", "fill": [], "centre": [0.0, 0.0],
    "spread": [1.0, 1.0], "categories": [[], ["f", "m"]], "low": [], "high": [], "target": [],
    "lowest": [-9.0, -NO_FENCE], "highest": [9.0, NO_FENCE],
}  # fmt: skip
"""A table's preparation with a column of words, as a run stores it."""
BEYOND = {
    "temperature": (5e-324, 1e-300, 1e-9, 1e13, 1e308, 0, -1),
    "base_rate": ([1e308, -1e308], [-1001.0] * 5),
    "model.bn": ("keep", "", "DROP", ["drop"]),
}
"""Numbers and words of a description that no fit and no run gives."""
SCALED = {
    "centre": (1e308, -1e308, 5e-324, -1.0),
    "spread": (5e-324, 0, -0.0, 0.5, 1e308),
    "lowest": (1e308, 5e-324),
    "highest": (5e-324, -1e308, 0, -0.0),
}
"""Numbers that no preparation has for its column of words."""


def test_a_description_of_a_model_with_a_number_that_no_fit_gives(model, tmp_path):
    path = Path(shutil.copytree(model.parent, tmp_path / "copy")) / model.name
    about = path.with_name(f"{path.name}.json")
    whole = about.read_bytes()
    for place, values in BEYOND.items():
        for value in values:
            about.write_bytes(whole)
            forge(about, lambda found: put(found, place, value))  # noqa: B023
            with refuses(place.rpartition(".")[2]) as caught:
                predict(path, np.zeros((2, 10)))
            assert "\n" not in str(caught.value)
    about.write_bytes(whole)
    assert predict(path, np.zeros((2, 10))).probabilities.isfinite().all()


def test_a_preparation_that_scales_words():
    assert Preprocessing.from_json(WORDED).width == 2
    for key, values in SCALED.items():
        for value in values:
            with refuses("column of words must be neither clipped nor scaled"):
                Preprocessing.from_json({**WORDED, key: [WORDED[key][0], float(value)]})


VAST_IMAGE = [3, 2048, 2048]


@pytest.fixture
def passes():
    """The modules through which anything has passed."""
    calls = []
    with register_module_forward_pre_hook(lambda module, inputs: calls.append(module)):
        yield calls


def of_images(model, folder, weights, **changes):
    """A copy of an exported model that describes a network for images."""
    path = Path(shutil.copytree(model.parent, folder / "copy")) / model.name
    path.write_bytes(save(weights))
    places = {
        "model.callable": "torchvision:squeezenet1_1",
        "model.outputs": 2,
        "model.extended_by": None,
        "inputs": {"shape": [3, 64, 64], "images": True},
        "classes": ["a", "b"],
        "base_rate": [0.0, 0.0],
        "file.sha256": storage.sha(path.read_bytes()),
        **changes,
    }

    def change(found):
        for place, value in places.items():
            put(found, place, value)

    forge(path.with_name(f"{path.name}.json"), change)
    return read(path)


@pytest.mark.parametrize("shape", [[3, 64, 64], VAST_IMAGE])
def test_weights_of_another_model_for_images(model, tmp_path, passes, shape):
    """Nothing passes through a model before its tensors are compared with the file's."""
    path = of_images(model, tmp_path, {"w": torch.zeros(1)}, **{"inputs.shape": shape})
    with refuses("tensor names must be the same"):
        path.model()
    assert not passes


@pytest.mark.parametrize("shape", [[3, 64, 64], VAST_IMAGE])
def test_a_description_of_a_model_with_a_vast_image(model, tmp_path, passes, shape):
    """Its weights fit. The model is tried with a usual image, and a vast one has to come from the user."""
    net = build("torchvision:squeezenet1_1", (3, 64, 64), 2, trial=False)
    of_images(model, tmp_path, net.state_dict(), **{"inputs.shape": shape}).model()
    assert bool(passes) == (shape != VAST_IMAGE)


def test_an_algorithm_that_tries_a_model_with_a_vast_image(model, tmp_path, passes):
    """Algorithms find a model's parts by what passes through it."""
    changes = {"model.extended_by": {"algorithm": "fedrod", "options": {}}}
    changes["inputs.shape"] = VAST_IMAGE
    path = of_images(model, tmp_path, {"w": torch.zeros(1)}, **changes)
    with refuses(r"must have samples of at most .* fedrod"):
        path.model()
    assert not passes


@pytest.mark.parametrize("more", [1, 10**18])
def test_a_checkpoint_that_claims_more_rows_than_there_are(run, more):
    """Neither resuming nor verifying takes it, and nothing of that length is read."""

    def claim(found):
        found["rows"]["bytes"] += more

    forge(run / LAST, claim)
    for act in (resume, lambda path: Run(path).verify()):
        refused(act, run, "rows.jsonl", LAST)


def test_a_configuration_without_a_model(run):
    forge(run / "config.json", lambda found: found.pop("model"))
    refused(resume, run, "config.json")


def test_a_configuration_with_a_vast_number(run):
    """Who reads a run does nothing a round of its configuration."""
    begun = time.monotonic()
    for key in ("rounds", "epochs", "eval_every", "checkpoint_every"):
        edit(run, **{key: 10**15})
        for act in (
            lambda path: Run(path).verify(),
            models,
            lambda path: diagnose_run(path, ["weight_norm"]),
        ):
            with suppress(RunError, UsageError):
                act(run)
        if key in ("rounds", "epochs"):
            assert f"{key} must be from" in refused(resume, run, "config.json")
        edit(run, **{key: 2})
    assert time.monotonic() - begun < 60
