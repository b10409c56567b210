"""Texts at sites: a vocabulary that was agreed on, of which sites tell nothing but its digest."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from diagnostics.measure import instruments
from fedlayers.remote import federation
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.privacy import Privacy
from fedlayers.remote.rpc import RpcClient
from fedlayers.remote.site import Site
from fedlayers.remote.site_config import SiteFile
from fedlayers.remote.site_data import SiteDataset
from fedlayers.remote.site_diagnosis import diagnose
from fedlayers.studies.choose import choose
from fl_core import runner, tree
from fl_core.config import RunConfig
from fl_core.data.placeholder import placeholder_data
from fl_core.errors import UsageError
from fl_core.tokens import SPECIAL, UNKNOWN

NAMES = ("north", "south")
WORDS = ("late", "thanks", "crew", "!")
CONFIG = RunConfig(
    dataset="complaints", model="text_transformer", model_options={"width": 8},
    algorithm="fedper", rounds=2, eval_every=1, batch_size=8, lr=0.01, optimizer="sgd", stack="off",
)  # fmt: skip


def texts(folder: Path, name: str, n: int = 24) -> Path:
    own = {"north": "snow", "south": "sand"}[name]
    made = [("Late again: " + own, "bad") if k % 2 else (f"Thanks, crew {k % 3}!", "good") for k in range(n)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in made))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "words.txt").write_text("\n".join(WORDS) + "\n")
    for name in NAMES:
        texts(tmp_path, name)
    return tmp_path


def silo(folder: Path, name: str, **options: Any) -> SiteDataset:
    return SiteDataset(name, folder / f"{name}.jsonl", **options)


def link(silos: list[SiteDataset], folder: Path, **options: Any) -> InMemoryTransport:
    return InMemoryTransport({each.name: Site(each, folder / "states" / each.name, **options) for each in silos})


@pytest.mark.parametrize("vocabulary", ["words.txt", "hashed:32"])
def test_texts_train_over_sites_as_in_one_process(folder: Path, vocabulary: str) -> None:
    named = vocabulary if ":" in vocabulary else folder / vocabulary
    silos = [silo(folder, name, vocabulary=named) for name in NAMES]
    facts = federation.request_site_facts(RpcClient(link(silos, folder)))
    tokens = len(SPECIAL) + (32 if ":" in vocabulary else len(WORDS))
    assert [each["tokens"] for each in facts] == [tokens, tokens]
    assert not any(word in json.dumps(facts) for word in ("snow", "sand", "crew"))
    held = {each.name: each.drawn(number, CONFIG.seed) for number, each in enumerate(silos)}
    data = placeholder_data("complaints", facts[0], {each["name"]: each for each in facts}, held)
    wanted = runner.run(CONFIG, data=data, instruments=instruments(), progress=False)
    found = federation.federate(CONFIG, link(silos, folder), progress=False)
    assert [{**row, "run": ""} for row in found.rows] == [{**row, "run": ""} for row in wanted.rows]
    assert tree.digest(found.server.trees["model"]) == tree.digest(wanted.server.trees["model"])


@pytest.mark.skipif(find_spec("opacus") is None, reason="the account is opacus', of the extra federation")
def test_texts_are_measured_at_sites_with_noise(folder: Path) -> None:
    silos = [silo(folder, name, vocabulary="hashed:32") for name in NAMES]
    metrics = ["federation_sensitivity", "grad_noise", "knn_probe"]
    quiet = diagnose(CONFIG, link(silos, folder / "quiet"), metrics).frame
    loud = diagnose(CONFIG, link(silos, folder / "loud", privacy=Privacy(1.0, 1.0, 1.0)), metrics).frame
    about = ["metric", "client", "layer", "variant", "unit", "n_params", "n_samples", "n_train", "status"]
    assert loud[about].equals(quiet[about])
    assert (quiet["status"] == "ok").any()


def test_words_have_their_lines_number_and_others_are_unknown(folder: Path) -> None:
    drawn = silo(folder, "north", vocabulary=folder / "words.txt").drawn(0, seed=0)
    seen = torch.cat([drawn.split(split).x for split in ("train", "validation", "test")]).unique().tolist()
    assert UNKNOWN in seen, "again and snow"
    assert seen == list(range(len(SPECIAL) + len(WORDS)))
    ids = [len(SPECIAL) + WORDS.index(word) for word in ("thanks", "crew", "!")]
    polite = next(row for row in drawn.train.x.tolist() if ids[0] in row)
    assert [each for each in polite if each in ids] == ids


def test_the_same_texts_hash_alike_at_every_site(folder: Path) -> None:
    (folder / "south.jsonl").write_bytes((folder / "north.jsonl").read_bytes())
    one, other = (silo(folder, name, vocabulary="hashed:64").drawn(0, seed=0) for name in NAMES)
    assert one.train.x.equal(other.train.x)
    assert one.train.x.max() < len(SPECIAL) + 64


def test_a_race_over_texts_that_the_server_has_not(folder: Path) -> None:
    sites = link([silo(folder, name, vocabulary=folder / "words.txt") for name in NAMES], folder)
    choice = choose(replace(CONFIG, eval_every=None), folder / "out", arms=("half", "nothing"), link=sites)
    assert set(choice.table["arm"]) == {"half", "nothing"}


def test_sites_of_other_vocabularies_do_not_fit_together(folder: Path) -> None:
    (folder / "others.txt").write_text("late\ncrew\nthanks\n!\n")
    named = {"north": "words.txt", "south": "others.txt"}
    silos = [silo(folder, name, vocabulary=folder / named[name]) for name in NAMES]
    with pytest.raises(UsageError, match=r"'south'.*'north'"):
        federation.federate(CONFIG, link(silos, folder), progress=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (None, "vocabulary ="),
        ("gone.txt", r"gone\.txt"),
        ("hashed:many", "hashed:N"),
        ("hashed:1", "hashed:N"),
        ("Late\n", "line 1.*'Late'"),
        ("late\nvery late\n", "line 2.*'very late'"),
        ("late\ncrew\nlate\n", "line 3.*'late'.*1"),
        ("\n", "line 1.*''"),
        ("", "got 0"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(folder: Path, words: str | None, says: str) -> None:
    named: Path | str | None = words
    if words is not None and not words.startswith(("gone", "hashed")):
        named = folder / "mine.txt"
        named.write_text(words)
    elif words == "gone.txt":
        named = folder / words
    with pytest.raises(UsageError, match=says):
        silo(folder, "north", vocabulary=named)


def test_a_table_has_no_vocabulary() -> None:
    with pytest.raises(UsageError, match=r"'va'.*heart"):
        SiteDataset("va", "heart", vocabulary="hashed:8")


@pytest.mark.parametrize(("named", "at"), [("words.txt", "words.txt"), ("hashed:16", None)])
def test_a_site_file_names_the_vocabulary_beside_it(folder: Path, named: str, at: str | None) -> None:
    file = folder / "north.toml"
    file.write_text(f'name = "north"\n[data]\ndataset = "north.jsonl"\nvocabulary = "{named}"\n')
    found = SiteFile.read(file)
    assert found.data["vocabulary"] == (str(folder / at) if at else named)
    assert found.site().holding.facts()["tokens"] == len(SPECIAL) + (len(WORDS) if at else 16)
