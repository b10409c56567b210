"""Models outside of their run: what they predict from new files is what they predict within it, to the bit."""

import csv
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

import fedlayers as fl
from docs import outputs
from fl_core.algorithms.base import Algorithm, registry
from fl_core.data import Source, gather
from fl_core.data.inputs import Inputs
from fl_core.data.named.small import COLUMNS, PREPARED
from fl_core.data.partitions import make
from fl_core.data.preprocessing import Preprocessing
from fl_core.errors import CorruptError, NonFiniteError
from fl_core.run import stored_models
from fl_core.run.exported_model import Predictions
from fl_core.storage import Folder, sign
from fl_core.training import evaluate
from tests.conftest import TOY, every_other, kind_for, network, refuses
from tests.made import lines as text_lines

pytestmark = pytest.mark.filterwarnings(
    "ignore:client"
)  # of a few samples, which is of no interest here
N = 60
Y = np.arange(N) % 2


def table(folder, rows):
    """A table in which a column of notes, the label and the client are no features; without them for new rows."""
    draw = np.random.default_rng(0).normal(size=(N, 3)) + Y[:, None]
    path = folder / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        if rows is None:
            writer.writerow(["age", "outcome", "dose", "ward", "weight"])
            writer.writerows(
                [a, f"c{y}", b, "ns"[k % 3 == 0], c]
                for k, ((a, b, c), y) in enumerate(zip(draw, Y, strict=True))
            )
        else:  # columns are found by name
            writer.writerow(["weight", "note", "dose", "age"])
            writer.writerows([c, "x", b, a] for a, b, c in draw[rows])
    return path


def prepared_table(folder, rows):
    """The same with another separator, and with every third age missing."""
    path = table(folder, rows)
    head, *lines = (line.split(",") for line in path.read_text().splitlines())
    for row, cells in zip(range(N) if rows is None else rows, lines, strict=True):
        cells[head.index("age")] = cells[head.index("age")] if row % 3 else "NA"
    path.write_text("\n".join(";".join(cells) for cells in (head, *lines)))
    return path


def array(x):
    def write(folder, rows):
        path = folder / "array.npz"
        np.savez(
            path,
            **(
                {"x": x, "y": Y, "client": np.arange(N) % 3}
                if rows is None
                else {"x": x[rows]}
            ),
        )
        return path

    return write


def images(folder, rows):
    """Images by client and class; new ones lie in one folder, in the order in which a run reads them."""
    draw = np.random.default_rng(0).integers(0, 256, (N, 8, 8), dtype=np.uint8)
    path = folder / "images"
    files = sorted((f"{'ns'[k % 3 == 0]}/c{y}/{k:02}.png", k) for k, y in enumerate(Y))
    if rows is not None:
        files = [(f"{place:02}.png", files[row][1]) for place, row in enumerate(rows)]
    for name, k in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw[k]).save(path / name)
    return path


def texts(folder, rows):
    entries = pd.DataFrame(text_lines())
    path = folder / "texts.csv"
    entries = entries if rows is None else entries.iloc[rows][["text"]]
    entries.to_csv(path, index=False)
    return path


DRAWN = np.random.default_rng(1)
SEMICOLONS = {"sep": ";", "na_values": ["NA"]}
KINDS = {
    "table": (table, {"client_column": "ward", "label_column": "outcome"}),
    "prepared table": (
        prepared_table,
        {"client_column": "ward", "label_column": "outcome", "csv": SEMICOLONS}
        | {"exclude_columns": ["weight"], "fill_missing_columns": True}
        | {"scale": "standard", "impute": "median"},
    ),
    "numbers": (array(DRAWN.normal(size=(N, 4))), {}),
    "pixels": (array(DRAWN.integers(0, 256, (N, 8, 8), dtype=np.uint8)), {}),
    "folder": (images, {}),
    "texts": (texts, {"model_options": {"width": 16}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_predicted_from_new_files_is_what_the_run_predicts(tmp_path, kind):
    write, keys = KINDS[kind]
    for name in ("own", "new"):
        (tmp_path / name).mkdir()
    run, dataset = tmp_path / "run", str(write(tmp_path / "own", None))
    fl.run(dataset=dataset, algorithm="fedper", rounds=1, out=run, **keys)
    trained, task = fl.load_models(run, which="personal")
    client = task.data.clients[0]
    rows = task.data.partition.indices[client.name]["test"]
    exported = fl.export(run, tmp_path / "to" / "model.safetensors", client=client.name)
    new = write(tmp_path / "new", rows)
    predictions = fl.predict(exported.path, new)
    expected = evaluate.predict(trained[client.name], client.test.x)
    assert torch.equal(predictions.logits, expected)
    assert predictions.classes == task.data.classes
    files = [path.name for path in sorted(new.iterdir())] if new.is_dir() else ()
    assert predictions.samples == tuple(files or map(str, range(len(rows))))
    assert predictions.labels == tuple(
        task.data.classes[k] for k in predictions.logits.argmax(dim=1)
    )
    assert (
        Inputs.from_json(json.loads(json.dumps(exported.inputs.to_json())))
        == exported.inputs
    )


def test_normalised_images_are_normalised_again():
    x = DRAWN.integers(0, 256, (N, 8, 8), dtype=np.uint8)
    source = Source("noise", x, Y, ("0", "1"), mean=(0.4,), std=(0.2,))
    federated = gather(source, make(source, "iid", clients=2))
    inputs = Inputs.from_json(Inputs.from_federation(federated).to_json())
    for client in federated.clients:
        rows = federated.partition.indices[client.name]["test"]
        assert torch.equal(inputs.samples(x[rows]).x, client.test.x)


EXTENDING = [
    name
    for name, kind in registry().items()
    if kind.wrap_model.__func__ is not Algorithm.wrap_model.__func__
]


@pytest.mark.parametrize("algorithm", every_other(EXTENDING, of=3))
def test_what_an_algorithm_built_into_the_model_is_built_again(tmp_path, algorithm):
    model = network(kind_for(algorithm, "norm"))
    keys = {"algorithm": algorithm, "rounds": 1, "batch_size": 8, "batchnorm": "drop"}
    fl.run(data=TOY, model=model, out=tmp_path / "run", **keys)
    which = registry()[algorithm].evaluates
    exported = fl.export(
        tmp_path / "run",
        tmp_path / "a.safetensors",
        which=which,
        client="a",
        data=TOY,
        model=model,
    )
    trained, _ = fl.load_models(tmp_path / "run", which=which, data=TOY, model=model)
    x = TOY.clients[0].test.x
    assert torch.equal(
        fl.predict(exported.path, x, model=model).logits,
        evaluate.predict(trained["a"], x),
    )
    with refuses(r"model="):
        fl.predict(exported.path, x)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "fedper"
    fl.run(
        dataset="heart",
        algorithm="fedper",
        rounds=2,
        checkpoint_every=1,
        out=folder,
    )
    return folder


@pytest.fixture
def model(run, tmp_path):
    return fl.export(run, tmp_path / "va.safetensors", client="va").path


X = np.random.default_rng(2).normal(size=(5, 10)).astype(np.float32)


def test_predictions_are_a_table(model):
    predictions = fl.predict(model, X)
    probabilities, logits = predictions.frame(), predictions.frame("logit")
    columns = ["sample", "predicted"]
    assert list(probabilities) == columns + [f"probability {k}" for k in range(5)]
    values = probabilities.iloc[:, 2:].to_numpy()
    assert np.array_equal(values, predictions.probabilities)
    assert np.allclose(values.sum(axis=1), 1)
    assert list(probabilities["predicted"]) == [str(k) for k in values.argmax(1)]
    assert np.array_equal(
        logits.iloc[:, 2:].to_numpy(np.float32), predictions.logits.numpy()
    )
    assert list(predictions.frame("none")) == columns


def copied(model, name, client):
    """A copy of an exported model in the folder models, as that of another client."""
    beside = model.with_name(f"{model.name}.json")
    about = json.loads(beside.read_text())
    about.pop("sha256")
    about["run"]["client"] = client
    folder = Folder(model.parent / "models")
    folder.write(f"{name}.safetensors", model.read_bytes())
    folder.write(f"{name}.safetensors.json", sign(about))
    return folder.path


def test_files_of_clients_and_their_models_are_told_apart_by_name(model, tmp_path):
    """A folder keeps what follows a point in its name."""
    for number, client in enumerate(("a b", "a/b", "a_b", "v1.5")):
        models = copied(model, f"m{number}", client)
    new = tmp_path / "new"
    (new / "v1.5").mkdir(parents=True)
    with refuses("rows of 10 columns.*v1.5"):  # it is found
        fl.predict(models, new)
    (new / "v1.5").rmdir()
    for name in ("a_b", "a b", "v1.5"):
        np.savez(new / f"{name}.npz", x=X)
    assert list(fl.predict(models, new)) == ["a b", "a_b", "v1.5"]
    pd.DataFrame(X, columns=COLUMNS).to_csv(new / "a_b.csv", index=False)
    with refuses("one file for each client; got a_b.npz and another of 'a_b'"):
        fl.predict(models, new)
    (models / "m2.safetensors.json").unlink()
    with refuses("one client; got that of 'a b', 'a/b'"):
        fl.predict(models, new)
    copied(model, "m9", "v1.5")
    with refuses("got m3.safetensors and m9.safetensors of 'v1.5'"):
        fl.predict(models, new)


def test_files_of_a_folder_of_models_that_are_left_out_are_named(model, tmp_path):
    """A model without a suffix is left out, too."""
    models = copied(model, "m", "a")
    for suffix in ("", ".json"):
        file = models / f"m.safetensors{suffix}"
        (models / f"plain{suffix}").write_bytes(file.read_bytes())
    with pytest.warns(UserWarning, match=r"left out: plain, plain\.json$"):
        rows = fl.predict(models, pd.DataFrame(X, columns=COLUMNS).assign(client="a"))
    assert list(rows) == ["a"]


def test_models_of_clients_with_like_names_have_files_of_their_own():
    clients = ["a b", "a/b", "a_b-0", "c"]
    paths = stored_models._files(Path("m"), clients, None)
    assert len({*paths}) == len(clients)
    assert paths[-1] == Path("m/c.safetensors")


def test_columns_of_ids_do_not_replace_those_of_predictions(model):
    rows = pd.DataFrame(X, columns=COLUMNS).assign(sample="s", place="p")
    assert fl.predict(model, rows, ids="place").frame()["place"].tolist() == ["p"] * 5
    with refuses("ids must name columns other than .*got 'sample'"):
        fl.predict(model, rows, ids=["place", "sample"])


def test_outputs_that_are_not_one_for_each_class_are_not_exported(tmp_path):
    """A loss of the user's own may take any."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8))
    objects = {"data": TOY, "model": net, "loss": far}
    fl.run(out=tmp_path / "run", rounds=1, patience=0, **objects)
    with refuses("outputs must be one for each class; got 8 for 3"):
        fl.export(tmp_path / "run", tmp_path / "m.safetensors", **objects)


def far(outputs, y):
    return (outputs - torch.eye(8)[y.long()]).square().mean(1)


def test_a_single_output_is_the_second_of_two_classes_or_a_number():
    outputs = torch.tensor([[2.0], [-1.0], [0.0]])
    of_two = Predictions(("0", "1", "2"), ("no", "yes"), outputs)
    assert of_two.labels == ("yes", "no", "no")
    assert torch.allclose(
        of_two.probabilities[:, 1], torch.sigmoid(outputs[:, 0].double())
    )
    number = Predictions(("0", "1", "2"), (), outputs)
    assert number.frame().to_dict("list") == {
        "sample": ["0", "1", "2"],
        "predicted": [2.0, -1.0, 0.0],
    }
    with refuses("number"):
        _ = number.labels


def test_the_page_s_lines_write_a_program_for_any_number_of_samples(
    run, model, tmp_path, monkeypatch
):
    shutil.copytree(run, tmp_path / "runs" / "hospitals")
    monkeypatch.chdir(tmp_path)
    page = (outputs.ROOT / "docs/export.md").read_text("utf-8")
    exec(next(outputs.FILE.finditer(page))["text"], {})
    program = torch.export.load("va.pt2").module()
    for n in (1, 5):
        assert torch.equal(
            program(torch.from_numpy(PREPARED.transform(X[:n]))),
            fl.predict(model, X[:n]).logits,
        )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"cleveland, hungarian.*client="),
        ({"client": "vaa"}, "'vaa'.*'va'"),
        ({"client": "va", "which": "global"}, "personal.*'global'"),
        ({"client": "va", "round": 7}, r"1, 2.*\b7\b"),
        (
            {"client": "va", "out": "there/a"},
            "must be a folder .*there, which is a file",
        ),
        ({"client": "va", "out": "there"}, r"/there\b"),
        ({"client": "va", "out": "beside"}, r"beside\.json"),
        ({"client": "va", "out": "m.onnx"}, r"must end in \.safetensors"),
    ],
)
def test_exports_that_cannot_be_are_refused_before_anything_is_written(
    run, tmp_path, keys, message
):
    for name in ("there", "beside.json"):
        (tmp_path / name).touch()
    keys = dict(keys)
    with refuses(message):
        fl.export(run, tmp_path / keys.pop("out", "new"), **keys)
    assert {path.name for path in tmp_path.iterdir()} == {"there", "beside.json"}


ROW = ",".join(["1"] * 10)
HEAD = ",".join(COLUMNS)


def test_samples_unlike_those_of_training_are_refused(tmp_path):
    gray_images = np.zeros((2, 8, 8), dtype=np.uint8)
    for inputs, new, message in (
        ("heart", tmp_path / "nothing.csv", r"nothing\.csv"),
        ("heart", ("a.txt", ""), r"10 columns.*age.*\.csv.*\.npz.*a\.txt"),
        ("heart", ("a.csv", f"{HEAD}\n{ROW[:-1]}inf\n"), "'oldpeak', line 2.*inf"),
        ("heart", ("a.npz", "no zip"), r"a\.npz.*readable"),
        ("heart", np.zeros((4, 9)), r"10 columns.*float64.*\[4, 9\]"),
        ("heart", ["a text"], "must be numbers"),
        (
            "gray",
            gray_images[:, None] / 1.0,
            r"uint8 images of height and width \[8, 8\]",
        ),
        ("gray", tmp_path, "images.*none"),
        ("floats", gray_images, r"numbers \[n, 1, 8, 8\]"),
        ("numbers", ("a.csv", "a,b\n1,2\n"), "3 columns.*2"),
        ("texts", np.zeros((2, 8)), "texts"),
        ("named", ("a.csv", "age,dosis\n1,2\n"), "'dose'.*'dosis'"),
        (
            "named",
            ("a.csv", "age;dose\n1;2\n"),
            "one column.*Write new samples as training",
        ),
        ("named", ("a.csv", "age,dose,age\n1,2,3\n"), "Write new samples as training"),
    ):
        if isinstance(new, tuple):
            new, text = tmp_path / new[0], new[1]
            new.write_text(text)
        with refuses(message):
            INPUTS[inputs].samples(new)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with refuses(r"a\.png.*gray"):
        INPUTS["gray"].samples(tmp_path)


INPUTS = {
    "heart": Inputs((10,), preprocessing=PREPARED),
    "gray": Inputs((1, 8, 8), images=True),
    "floats": Inputs((1, 8, 8)),
    "numbers": Inputs((3,)),
    "texts": Inputs((64,), words=("good",)),
    "named": Inputs((2,), preprocessing=Preprocessing(("age", "dose"))),
}


def test_samples_without_a_finite_answer_are_told(model):
    x = X.copy()
    x[3] = 2.5e38
    with pytest.raises(NonFiniteError, match=r"1 of 5.*\b3\b"):
        fl.predict(model, x)


def test_damaged_and_foreign_files_are_refused(model):
    beside = model.with_name(f"{model.name}.json")
    with refuses(r"other'. nothing there"):
        fl.predict(model.with_name("other"), X)
    sound = model.read_bytes()
    model.write_bytes(sound[:-1] + b"?")
    with refuses(r"va\.safetensors.*damaged", CorruptError):
        fl.predict(model, X)
    model.write_bytes(sound)
    text = beside.read_bytes()
    beside.write_bytes(text.replace(b"heart_mlp", b"other_mlp"))
    with refuses(r"va\.safetensors\.json.*damaged", CorruptError):
        fl.predict(model, X)
    about = json.loads(text)
    about.pop("sha256")
    for change, message in (
        ({"format": "fedlayers.model/2"}, "newer"),
        ({"format": "fedlayers.plan/1"}, "exported model"),
    ):
        Folder(model.parent).write(beside.name, sign({**about, **change}))
        with refuses(message):
            fl.predict(model, X)


def test_code_that_a_file_names_is_named_again(tmp_path, monkeypatch):
    """The module would leave a trace when it is imported."""
    (tmp_path / "my_net_of_export.py").write_text(
        "from pathlib import Path\nfrom torch import nn\nPath('imported').touch()\n"
        "def net(shape, n_classes, width=4):\n"
        "    return nn.Sequential(nn.Linear(shape[0], width), nn.ReLU(), nn.Linear(width, n_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    mine = "my_net_of_export:net"
    keys = {"model": mine, "model_options": {"width": 3}, "rounds": 1}
    fl.run(dataset="heart", out="run", **keys)
    with refuses(rf"'{mine}'.*allow_code=.'{mine}'"):
        fl.export("run", "a", which="global")
    fl.export("run", "a", which="global", allow_code=[mine])
    Path("imported").unlink()
    monkeypatch.delitem(sys.modules, "my_net_of_export")
    with refuses(rf"'{mine}'.*allow_code=.'{mine}'"):
        fl.predict("a", X)
    assert not Path("imported").exists()
    assert fl.predict("a", X, allow_code=[mine]).logits.shape == (5, 5)
