"""FedPFT's notation of its proof (appendix K): what it is called here, and its values in the paper and here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import pandas as pd

from figures import items
from figures.fedpft.insides import FEDPFT, MILD, NAME, STUDY, TITLES
from figures.items import Drawing, View
from figures.settings import Setting, agreement, drawing, option
from fl_core.algorithms.fedpft import FedPFT

NUMBERS = {
    "clients": "clients",
    "local epochs of a round": "epochs",
    "of them for the features": "feature_epochs",
    "global rounds": "rounds",
    "samples of a client": "samples_per_client",
    "samples of a batch": "batch_size",
    "classification prompts of a client": "prompts",
    "contrastive prompts of a client": "contrast_prompts",
    "learning rate of the local problem": "lr",
}
"""What is a number, by the name of the setting; rounds, samples and prompts stand beside those of the appendix."""
SAMPLED = "clients of a round"
PARTS = {
    "extractor": "body",
    "feature transformation": "transform",
    "classifier, the head of the classification": "head",
    "head of the contrastive task": "projection",
    "classification prompts": "prompts",
    "contrastive prompts": "contrast_prompts",
}
"""The modules, by the first part of their tensors' names."""
NOT_HERE = "no such quantity"
OTHERS = {
    "global and local loss": "loss",
    "gradient of the local problem, approximated": "a step of Phase",
    "learning rate of the global problem": "1, as the server takes the mean",
    "bounds of the gradients' errors": NOT_HERE,
    "index of client, local epoch, global epoch": "client, epoch, round",
}


def modules(layers: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Names of a model's parameters by the part of the notation that they belong to.

    Args:
        layers: as the header of rows has them.
    """
    names = [name for layer in layers for name in layer["parameters"]]
    return {
        part: [name for name in names if name.partition(".")[0] == called]
        for part, called in PARTS.items()
    }


def _settings(header: Mapping[str, Any]) -> Iterator[Setting]:
    defaults = asdict(FedPFT.Config())
    for run in (FEDPFT, MILD):
        if run not in header["runs"]:
            continue
        both = STUDY.paper[run].to_json(), header["runs"][run]["config"]
        for what, called in NUMBERS.items():
            theirs, own = (option(config, called, defaults) for config in both)
            yield Setting(what, TITLES[run], theirs, own, called)
        sampled = [
            (float(config["participation"] * config["clients"]),) for config in both
        ]
        yield Setting(SAMPLED, TITLES[run], sampled[0], sampled[1], "participation")
    named = modules(header["runs"][FEDPFT]["layers"])
    for what, called in PARTS.items():
        yield Setting(what, "tensors", (), (float(len(named[what])),), called)
    for what, called in OTHERS.items():
        yield Setting(what, "", (), (), called)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    settings = list(_settings(header))
    cut = ("rounds", "samples_per_client", "batch_size")
    far = "" if items.at_paper(header) else "fewer images a client and rounds"
    findings = (
        agreement(
            "samples, batches and rounds are the paper's",
            [each for each in settings if each.called in cut],
            far,
        ),
    )
    caption = (
        "The notation's quantities in the federation of the paper's Figs. 2 and 3, and here. The paper's epochs, "
        "batches and prompts are lost or not printed. Those values are from its authors' other code. "
        "The symbols are lost in our copy of the text, so each line has its meaning."
    )
    return drawing(settings, caption, findings, line="notation")


TABLE_K = items.register(View(
    "fedpft.tableK", "Notation of the proof of convergence, and what it is called here (FedPFT, appendix K)", NAME,
    _draw, settings=True,
))  # fmt: skip
