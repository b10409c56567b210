"""Layer scheduling's Table 1, its symbols: what they are called here, and their values in the paper and here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from figures import items
from figures.items import Drawing, View
from figures.page import seeds_behind, seeds_in_words
from figures.scheduling.runs import NAME, NAMES, STUDY, at_paper
from figures.settings import Setting, Value, agreement, drawing, option

METHOD = "vanilla"
"""The method whose runs are read; Anti's have the same settings."""
NUMBERS = {
    "N, clients": "clients",
    "|D|, all samples": "max_samples",
    "T, global rounds": "rounds",
    "F, rounds of fine-tuning": "finetune_epochs",
    "t_k, rounds at which layers unfreeze": "unfreeze",
    "η, learning rate": "lr",
    "ℒ, loss": "loss",
}
"""Symbols that are settings, by the name of the setting."""
K, HELD = "K, layers of the base", "|D_i|, training samples of client i"
PARTS = {
    "C_i, a client": "client",
    "θ_i, parameters of client i": 'Update.message.trees["model"]',
    "θ_G, the global model": 'State.trees["model"]',
    "θ_{i,b}, the base, shared": "LayerPlan.body",
    "θ_{i,p}, a client's head": "LayerPlan.head",
}
"""Symbols that are no numbers, by what they are called here."""
OPEN = "F, rounds of fine-tuning"
"""What the paper does not say, so that its column has what is assumed here."""


def _settings(header: Mapping[str, Any], frame: pd.DataFrame) -> Iterator[Setting]:
    for name, title in NAMES.items():
        run = f"{name}.{METHOD}"
        if run not in header["runs"]:
            continue
        paper, here = STUDY.paper[run].to_json(), header["runs"][run]["config"]
        for what, called in NUMBERS.items():
            theirs = () if what == OPEN else option(paper, called)
            yield Setting(what, title, theirs, option(here, called), called)
        base = [(float(len(option(config, "unfreeze"))),) for config in (paper, here)]
        yield Setting(K, title, base[0], base[1], "len(LayerPlan.shared)")
        held = frame.loc[
            (frame["run"] == run) & (frame["client"] != ""), "n_train"
        ].dropna()
        range_: tuple[Value, ...] = (
            tuple(sorted({float(held.min()), float(held.max())})) if len(held) else ()
        )
        yield Setting(HELD, title, (), range_, "n_train")
    for what, called in PARTS.items():
        yield Setting(what, "", (), (), called)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    settings = list(_settings(header, frame))
    numbers = {each.called for each in settings if each.paper and each.here}
    same = [each for each in settings if each.what == K]
    scaled = [each for each in settings if each.called in numbers and each not in same]
    far = (
        ""
        if at_paper(header)
        else "fewer clients and images, fewer rounds at a larger rate"
    )
    findings = (
        agreement("the base has the paper's number of layers", same),
        agreement("the other numbers are the paper's", scaled, far),
    )
    caption = (
        f"The symbols' values in the paper's experiments and in Vanilla's runs here, with "
        f"{seeds_in_words(seeds_behind(header))}. Tiny-ImageNet stands in CIFAR-100's place. "
        "Unfreezing at round 0 is not drawn. The paper does not give its rounds of fine-tuning, its loss or the range "
        "of samples by client. Cross-entropy stands for its loss."
    )
    return drawing(settings, caption, findings, line="symbol")


TABLE1 = items.register(View(
    "scheduling.table1", "Symbols and what they are called here (layer scheduling, Table 1)", NAME, _draw,
    settings=True,
))  # fmt: skip
