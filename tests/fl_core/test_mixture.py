"""Exported mixtures: predictions are weighted means of the models' own, and a folder that was changed is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedlayers as fl
from fl_core import exported_model, tree
from fl_core.errors import CorruptError, UsageError
from fl_core.mixture import FILE, MODELS, Member, Mixture, MixtureModel, load
from fl_core.storage.files import sign
from tests.conftest import TOY, kind_for, network

X = np.random.default_rng(2).normal(size=(5, 10)).astype(np.float32)
WEIGHTS = {"half-0": 0.25, "all-0": 0.75}


def mixed(out: Path, weights: dict[str, float]) -> Path:
    """Write the mixture of runs below a folder."""
    members = [
        Member(name, weight, f"arms/{name}", fl.Run(out / "arms" / name).id, 1) for name, weight in weights.items()
    ]
    Mixture(tuple(members)).save(out)
    return out


@pytest.fixture(scope="module")
def choice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("choice")
    keys = {"dataset": "heart", "rounds": 1, "lr": 0.05, "progress": False}
    fl.run(algorithm="fedper", out=out / "arms" / "half-0", **keys)
    fl.run(algorithm="fedavg", out=out / "arms" / "all-0", **keys)
    return mixed(out, WEIGHTS)


@pytest.fixture
def made(choice: Path, tmp_path: Path) -> Path:
    return fl.export(choice, tmp_path / "mix", client="va").path


def test_its_probabilities_are_weighted_means_of_the_models_own(choice: Path, made: Path, tmp_path: Path) -> None:
    own = []
    for name, weight in WEIGHTS.items():
        path = fl.export(choice / "arms" / name, tmp_path / f"{name}.safetensors", client="va").path
        own.append(weight * fl.predict(path, X).probabilities.numpy())
    found = fl.predict(made, X)
    np.testing.assert_allclose(found.probabilities.numpy(), sum(own), rtol=1e-12)
    assert np.array_equal(found.probabilities.argmax(dim=1).numpy().astype(str), np.array(found.labels))
    assert list(found.frame())[2:] == [f"probability {name}" for name in "01234"]
    assert sorted(path.name for path in made.iterdir()) == sorted(
        [FILE, *(f"{name}.safetensors{end}" for name in WEIGHTS for end in ("", ".json"))]
    )


def test_a_mixture_of_one_model_is_that_model_to_the_bit(choice: Path, tmp_path: Path) -> None:
    shutil.copytree(choice, tmp_path / "one")
    made = fl.export(mixed(tmp_path / "one", {"half-0": 1.0}), tmp_path / "mix", client="va")
    alone = fl.export(choice / "arms" / "half-0", tmp_path / "alone", client="va")
    assert torch.equal(fl.predict(made.path, X).outputs, fl.predict(alone.path, X).outputs)


def test_a_weight_of_one_leaves_that_model_s_probabilities() -> None:
    torch.manual_seed(0)
    one, other, x = nn.Linear(3, 4), nn.Linear(3, 4), torch.randn(6, 3)
    found = MixtureModel([one, other], [1.0, 0.0], 4)(x)
    assert torch.equal(found, one(x).double().log_softmax(dim=1))


def test_one_output_for_two_classes_is_mixed_as_two() -> None:
    torch.manual_seed(0)
    members, x = [nn.Linear(3, 1), nn.Linear(3, 1)], torch.randn(6, 3)
    found = MixtureModel(members, [0.3, 0.7], 2)(x).exp()
    expected = 0.3 * members[0](x).double().sigmoid() + 0.7 * members[1](x).double().sigmoid()
    torch.testing.assert_close(found, torch.cat([1 - expected, expected], dim=1))


def test_your_own_model_is_given_again(tmp_path: Path) -> None:
    model = network(kind_for("fedper", "norm"))
    for name in WEIGHTS:
        fl.run(data=TOY, model=model, algorithm="fedper", rounds=1, seed=len(name), out=tmp_path / "arms" / name)
    mixed(tmp_path, WEIGHTS)
    with pytest.raises(UsageError, match="data="):
        fl.export(tmp_path, tmp_path / "mix", client="a", model=model)
    made = fl.export(tmp_path, tmp_path / "mix", client="a", data=TOY, model=model)
    x = TOY.clients[0].test.x
    with pytest.raises(UsageError, match="model="):
        fl.predict(made.path, x)
    assert fl.predict(made.path, x, model=model).probabilities.sum(dim=1).numpy() == pytest.approx(1)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(choice: Path, made: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    for keys, message in (
        ({"client": None}, "Pass --client"),
        ({"client": "vaa"}, "mean 'va'"),
        ({"client": "va", "round": 1}, "got round=1"),
        ({"client": "va", "which": "global"}, "got model=global"),
        ({"client": "va", "format": "peft"}, "got format=peft"),
    ):
        with pytest.raises(UsageError, match=message):
            fl.export(choice, tmp_path / "new", **keys)
    with pytest.raises(UsageError, match="must be a new file"):
        fl.export(choice, made, client="va")
    with pytest.raises(UsageError, match="exported already"):
        fl.export(made, tmp_path / "new")
    with pytest.raises(UsageError, match="fedlayers export"):
        fl.predict(choice, X)
    assert sorted(tmp_path.iterdir()) == before


def test_a_choice_whose_runs_were_changed_is_refused(choice: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(choice, copy)
    half, all_layers = copy / "arms" / "half-0", copy / "arms" / "all-0"
    half.rename(copy / "half-0")
    half.symlink_to(copy / "half-0")
    with pytest.raises(CorruptError, match="symbolic link"):
        fl.export(copy, tmp_path / "new", client="va")
    half.unlink()
    with pytest.raises(UsageError, match="another or none"):
        fl.export(copy, tmp_path / "new", client="va")
    shutil.copytree(all_layers, half)
    with pytest.raises(UsageError, match="another or none"):
        fl.export(copy, tmp_path / "new", client="va")


def test_a_folder_that_was_changed_is_refused(choice: Path, made: Path, tmp_path: Path) -> None:
    half, all_layers = (made / f"{name}.safetensors" for name in WEIGHTS)
    weights, about, file = (path.read_bytes() for path in (half, half.with_name(f"{half.name}.json"), made / FILE))

    def refused(message: str) -> None:
        with pytest.raises((UsageError, CorruptError), match=message):
            fl.predict(made, X)
        half.unlink(missing_ok=True)
        half.write_bytes(weights)
        half.with_name(f"{half.name}.json").write_bytes(about)
        (made / FILE).write_bytes(file)
        assert len(fl.predict(made, X).labels) == 5

    half.write_bytes(weights[:-1] + b"\0")
    refused("damaged: its digest")
    half.unlink()
    refused("missing")
    half.unlink()
    half.symlink_to(all_layers)
    refused("symbolic link")
    half.with_name(f"{half.name}.json").unlink()
    refused("next to it; got none")
    (made / FILE).write_bytes(file.replace(b"0.25", b"0.26"))
    refused("match its digest")
    found = load(made)
    first, second = found.members
    replace(found, members=(replace(first, digest=second.digest), second)).save(made)
    refused("must be those of its")
    replace(found, members=(replace(first, path="../mix/half-0.safetensors"), second)).save(made)
    refused("lie in its folder")
    said = {key: value for key, value in json.loads(about).items() if key != "sha256"}
    for change in ({"classes": ["a", "b"]}, {"task": "multilabel"}, {"model": {**said["model"], "outputs": 3}}):
        half.with_name(f"{half.name}.json").write_bytes(sign({**said, **change}))
        refused("same inputs and classes")
    half.with_name(f"{half.name}.json").write_bytes(sign({**said, "file": {"format": "safetensors"}}))
    refused("exported model")


def test_what_is_read_says_what_it_is_made_of(made: Path) -> None:
    found = exported_model.read(made)
    assert isinstance(found, exported_model.ExportedMixture)
    assert found.about["kind"] == MODELS
    assert [member["weight"] for member in found.about["members"]] == list(WEIGHTS.values())
    assert (found.classes, found.task, len(found.members)) == (tuple("01234"), "classification", 2)
    assert found.n_bytes == sum(path.stat().st_size for path in made.glob("*.safetensors"))
    assert len(tree.state_dict(found.model())) > len(tree.state_dict(found.members[0].model()))
