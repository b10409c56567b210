"""Classifiers of images from folders of transformers: their weights, the size of their images, and their layers."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image

import fedlayers as fl
from fl_core import storage
from fl_core.config import RunConfig
from fl_core.models.adapter import original
from fl_core.run.runner import assemble
from tests.conftest import CONFIG, federation, on_first_use, refuses

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
hf = on_first_use("transformers")
SIDE = 12
BLOCKS = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": SIDE,
    "patch_size": 4,
}
STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]}
KINDS = {
    "ViT": BLOCKS,
    "DeiT": BLOCKS,
    "Dinov2": BLOCKS,
    "ConvNext": {**STAGES, "image_size": 32},
    "ResNet": {**STAGES, "embedding_size": 8},
}
ANY_SIZE = ("ConvNext", "ResNet")


@pytest.fixture
def folder(tmp_path):
    def write(kind="ViT", **changed):
        torch.manual_seed(0)
        config = getattr(hf, f"{kind}Config")(
            **{**KINDS[kind], "num_labels": 5, **changed}
        )
        path = tmp_path / "folder"
        getattr(hf, f"{kind}ForImageClassification")(config).save_pretrained(path)
        return path

    return write


def images(side=SIDE, channels=3):
    return federation((24, 24), shape=(channels, side, side))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_its_weights_and_a_fresh_classifier(kind, folder):
    path, data = folder(kind), images(32 if kind in ANY_SIZE else SIDE)
    config = CONFIG.with_keys(model=f"hf:{path}", rounds=1)
    task = assemble(config, data=data)
    model = original(task.model)
    stored = hf.AutoModelForImageClassification.from_pretrained(path).state_dict()
    state = model.state_dict()
    fresh = {
        name for name, tensor in state.items() if tensor.shape != stored[name].shape
    }
    assert all(torch.equal(state[name], stored[name]) for name in stored.keys() - fresh)
    assert {name.split(".")[0] for name in fresh} == {"classifier"}
    assert model.config.num_labels == len(model.config.id2label) == 3
    again = original(assemble(config, data=data).model).state_dict()
    assert all(torch.equal(state[name], again[name]) for name in fresh)
    x = data.clients[0].train.x[:4]
    with torch.no_grad():
        right = model.eval()(pixel_values=x).logits
        torch.testing.assert_close(task.model.eval()(x), right)


@pytest.mark.parametrize("kind", KINDS)
def test_its_layers_have_names_and_train(kind, folder):
    config = CONFIG.with_keys(model=f"hf:{folder(kind)}", rounds=1, algorithm="fedper")
    result = fl.run(config, data=images(32 if kind in ANY_SIZE else SIDE))
    layers = [layer.name for layer in result.plan.layers]
    assert "embed" in layers[0]
    assert layers[-1].startswith("classifier")
    model = original(result.models["a"])
    names = [name for layer in result.plan.layers for name in layer.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


@pytest.mark.parametrize("algorithm", ["fedra", "depthfl", "inclusivefl"])
def test_its_blocks_can_be_left_out(algorithm, folder):
    config = CONFIG.with_keys(
        model=f"hf:{folder(num_hidden_layers=3)}", rounds=1, algorithm=algorithm
    )
    assert fl.run(config, data=images()).done == 1


def test_images_have_the_size_that_its_configuration_names(folder, tmp_path):
    """Image files of other sizes are cropped and scaled, in the run and for new samples."""
    draw = np.random.default_rng(0)
    for client in ("a", "b"):
        for label in ("cat", "dog"):
            place = tmp_path / "data" / client / label
            place.mkdir(parents=True)
            for k in range(8):
                pixels = draw.integers(0, 255, (20 + k, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{k}.png")
    config = CONFIG.with_keys(
        dataset=str(tmp_path / "data"), model=f"hf:{folder()}", rounds=1
    )
    fl.run(config, out=tmp_path / "run")
    assert f'"image_size": {SIDE}' in (tmp_path / "run/config.json").read_text()
    fl.export(tmp_path / "run", tmp_path / "m.safetensors", which="global")
    predictions = fl.predict(
        tmp_path / "m.safetensors", tmp_path / "data" / "a" / "cat"
    )
    assert predictions.logits.shape == (8, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"side": 16}, f"{SIDE} x {SIDE} pixels; got 16 x 16.*image_size={SIDE}"),
        ({"channels": 1}, "3 channels; got 1"),
    ],
)
def test_images_that_do_not_fit_are_refused(data, message, folder):
    with refuses(message):
        assemble(RunConfig(model=f"hf:{folder()}"), data=images(**data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "config.json").unlink(), "config.json is missing"),
        (lambda p: (p / "config.json").write_text("{"), "must be built"),
        (lambda p: (p / "config.json").write_text(json.dumps({"model_type": "x"})), "must be built"),
        (lambda p: (p / "config.json").write_bytes(b" " * (storage.HEADER_BYTES + 1)), "must be built"),
        (lambda p: (p / "model.safetensors").unlink(), "model.safetensors must be a file"),
        (lambda p: (p / "model.safetensors").write_bytes(b"x" * 99), "its header must have"),
        (lambda p: ((p / "config.json").unlink(), (p / "config.json").symlink_to("/dev/zero")), "no regular file"),
        (lambda p: hf.BertModel(hf.BertConfig(num_hidden_layers=1)).save_pretrained(p), "must be built"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused(change, message, folder):
    path = folder()
    change(path)
    with refuses(message):
        assemble(RunConfig(model=f"hf:{path}"), data=images())


def test_other_samples_are_refused(folder):
    with refuses("must have images, or texts"):
        assemble(RunConfig(dataset="heart", model=f"hf:{folder()}"))
