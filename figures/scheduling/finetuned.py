"""Layer scheduling's Anti and FedBABU fine-tuned for other numbers of epochs, each from one trained model.

The paper does not say how long models are fine-tuned. From the global model after the last round every client trains
all layers for some epochs. FedPer is not fine-tuned. Its rows are those of :mod:`figures.scheduling.runs`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors.torch import save

from figures import items, names
from figures.differences import Difference, difference, joint
from figures.items import Drawing, Finding, Item
from figures.page import markdown, means, missing_runs
from figures.recipe import labels, tested, trained, where
from figures.scheduling.runs import ACCURACY, RIVAL, THAW, finished, judge
from figures.verdicts import LEAD, TRAIL, points
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.run import runner
from fl_core.storage import write_atomically

NAME = "scheduling.finetuned"
DATASET = "tiny_imagenet"
METHODS = ("anti", "fedbabu")
EPOCHS = (1, 5, 20)


def _recipes() -> dict[str, RunConfig]:
    """The training of Sec. 5.3 by run, without its own evaluations of fine-tuned models before the end."""
    runs = {}
    for method in METHODS:
        config = THAW.runs[f"{DATASET}.{method}"]
        options = {
            **config.federation.options,
            "finetune_epochs": min(EPOCHS),
            "finetune_at": (),
        }
        longest = config.federation.rounds
        runs[f"{DATASET}.{method}"] = config.with_keys(
            options=options, eval_every=longest
        )
    return runs


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Train once, fine-tune the global model on every client, and record accuracy by the number of epochs."""
    engine, _ = trained(task)
    model = engine.models(0)["global"]
    named, lines = labels(task), []
    with tempfile.TemporaryDirectory() as place:
        start = Path(place) / "global.safetensors"
        write_atomically(start, save({key: x.contiguous() for key, x in model.items()}))
        for epochs in EPOCHS:
            config = task.config.with_keys(
                algorithm="local",
                options={},
                rounds=1,
                epochs=epochs,
                participation=1.0,
                eval_every=1,
                checkpoint_every=1,
                init=str(start),
            )
            _, frame = trained(runner.assemble(config, loaded=task.data))
            last = where(tested(frame), round=1, model="local")
            sizes = last["n_samples"].astype(float)
            lines.append(
                rows.row(
                    ACCURACY,
                    np.average(last["value"], weights=sizes),
                    round=task.config.federation.rounds,
                    variant=f"{epochs}",
                    split="test",
                    n_samples=int(sizes.sum()),
                    **named,
                )
            )
    return rows.frame(lines)


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """Return accuracy on all clients' test samples after the last round, (run, epochs) x seeds.

    FedPer has 0 epochs of fine-tuning.
    """
    tuned = where(frame, metric=ACCURACY).astype({"seed": int, "variant": int})
    keys = [tuned["run"].str.partition(".")[2], tuned["variant"], tuned["seed"]]
    table = tuned.groupby(keys)["value"].mean().unstack("seed")
    rival = finished(THAW.read(THAW.path())[1]).loc[f"{DATASET}.{RIVAL}"]
    table.loc[(RIVAL, 0), :] = rival.iloc[-1].reindex(table.columns)
    return table


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    values = scores(frame)
    leads: dict[str, Difference] = {}
    for epochs in EPOCHS:
        for other, length in (("fedbabu", epochs), (RIVAL, 0)):
            other_title = names.title(other)
            name = f"Anti over {other_title} with {epochs}"
            leads[name] = difference(values, ("anti", epochs), (other, length))
    sides = [
        judge({key: gap for key, gap in leads.items() if word in key}, check)
        for word, check in (("FedBABU", LEAD), ("FedPer", TRAIL))
    ]
    finding = Finding(
        "after 1, 5 and 20 epochs of fine-tuning Anti lies above FedBABU and below FedPer",
        "; ".join(side.text for side in sides),
        joint([side.held for side in sides]),
    )
    rival_title = names.title(RIVAL)
    cells = {
        "epochs": list(map(str, EPOCHS)),
        **{
            names.title(method) + " %": means(values, [(method, k) for k in EPOCHS])
            for method in METHODS
        },
        f"{rival_title} %": means(values, [(RIVAL, 0)] * len(EPOCHS)),
    }
    for other in ("FedBABU", "FedPer"):
        cells[f"Anti minus {other}"] = [
            points(gap.interval) for name, gap in leads.items() if other in name
        ]
    table = pd.DataFrame(
        [
            {"method": method, "epochs": epochs, "seed": seed, "accuracy": value}
            for (method, epochs, seed), value in values.stack().items()
        ]
    )
    missing_text = missing_runs(header)
    caption = (
        "Accuracy after round 300 on all clients' test samples, by the number of epochs for which the global model "
        "is fine-tuned on every client. FedPer is not fine-tuned. ± is half the 95 % interval over seeds. Data and "
        f"training are those of `scheduling.sec53`.{missing_text}"
    )
    return Drawing(None, table, caption, (finding,), markdown(cells))


items.register(Item(
    NAME, "Anti and FedBABU on Tiny-ImageNet by the number of epochs of fine-tuning",
    _recipes(), seeds=3, budget="about an hour of one core; a run takes some eight minutes", measure=_measure,
    draw=_draw,
))  # fmt: skip
