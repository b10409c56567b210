"""The decisions of the demo: three answers from any first seed, and others if what differs is gone."""

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fedlayers as fl
from fedlayers.cli.train import DEMO, Demo, Study, Tune
from fedlayers.decision.ways import ALONE, NONE, SHARE_ALL, SHARE_SOME
from fl_core.data import datasets
from fl_core.data.loading import opened

ANSWERS = {"known_neither": SHARE_ALL, "known_labels": SHARE_SOME, "heart": ALONE}


def test_the_demo_has_these_federations():
    assert list(DEMO) == list(ANSWERS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 10, 20])
@pytest.mark.parametrize("name", ANSWERS)
def test_each_federation_has_its_answer_from_other_first_seeds(name, seed, tmp_path):
    answer = fl.choose(
        dataset=name, seed=seed, seeds=3, out=tmp_path / "out", progress=False
    )
    assert answer.action == ANSWERS[name]


def test_with_permuted_labels_no_way_is_recommended(tmp_path):
    source, recipe = opened("known_neither")
    y = np.random.default_rng(0).permutation(source.y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = fl.choose(
            data=replace(source, y=y),
            model=recipe.model,
            out=tmp_path / "out",
            lr=recipe.lr,
            batch_size=recipe.batch_size,
            rounds=5,
            seeds=1,
            progress=False,
        )
    assert answer.action == NONE


def test_without_its_codes_the_shared_head_is_that_of_clients_alike():
    """Their decisions are then those of the first federation: the samples are the same."""
    coded, plain = (opened(name)[0] for name in ("known_labels", "known_neither"))
    for key in ("x", "owner", "is_train"):
        assert np.array_equal(getattr(coded, key), getattr(plain, key))
    for client in range(len(plain.owner_names)):
        of_client = plain.owner == client
        pairs = {
            *zip(plain.y[of_client].tolist(), coded.y[of_client].tolist(), strict=True)
        }
        assert len(pairs) == len(plain.classes)
    recipes = datasets()
    assert recipes["known_labels"] == recipes["known_neither"]


def test_the_demo_decides_each_federation_in_its_folder(monkeypatch, capsys, tmp_path):
    asked = []

    def choose(config, out, **options):
        asked.append((config.data.dataset, config.execution.workers, out, options))
        return SimpleNamespace(text=lambda: f"the answer for {config.data.dataset}")

    monkeypatch.setattr("fedlayers.decision.choose.choose", choose)
    Demo(out=tmp_path).main("")
    options = {"seeds": 3, "progress": False}
    assert asked == [(name, 2, tmp_path / name, options) for name in DEMO]
    shown = capsys.readouterr().out
    for name, words in DEMO.items():
        assert f"{words}:\nthe answer for {name}\n" in shown
    assert shown.endswith(f"{tmp_path}\n")


@pytest.mark.parametrize(
    ("command", "file"), [(Tune, "--tuned out/tuned.json"), (Study, "out/table.csv")]
)
def test_a_result_is_shown_with_its_file(command, file, capsys):
    own = SimpleNamespace(out=Path("out"))
    command.show(own, SimpleNamespace(text=lambda: "the text"), "")
    shown = capsys.readouterr().out.strip().splitlines()
    assert (shown[0], shown[-1].endswith(file)) == ("the text", True)
