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
    """Return the training of Sec. 5.3 by run, without its own evaluations of fine-tuned models before the end."""
    runs = {}
    for method in METHODS:
        config = THAW.runs[f"{DATASET}.{method}"]
        options = {
            **config.federation.options,
            "finetune_epochs": min(EPOCHS),
            "finetune_at": (),
        }
        rounds = config.federation.rounds
        runs[f"{DATASET}.{method}"] = config.with_keys(
            options=options, eval_every=rounds
        )
    return runs


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Train once, fine-tune the global model on every client, and record accuracy by the number of epochs."""
    engine, _ = trained(task)
    model = engine.models(0)["global"]
    label_columns, table_rows = labels(task), []
    with tempfile.TemporaryDirectory() as temporary_folder:
        model_file = Path(temporary_folder) / "global.safetensors"
        write_atomically(
            model_file,
            save(
                {
                    tensor_name: tensor.contiguous()
                    for tensor_name, tensor in model.items()
                }
            ),
        )
        for epochs in EPOCHS:
            config = task.config.with_keys(
                algorithm="local",
                options={},
                rounds=1,
                epochs=epochs,
                participation=1.0,
                eval_every=1,
                checkpoint_every=1,
                init=str(model_file),
            )
            _, frame = trained(runner.assemble(config, loaded=task.data))
            last_rows = where(tested(frame), round=1, model="local")
            sample_counts = last_rows["n_samples"].astype(float)
            table_rows.append(
                rows.row(
                    ACCURACY,
                    np.average(last_rows["value"], weights=sample_counts),
                    round=task.config.federation.rounds,
                    variant=f"{epochs}",
                    split="test",
                    n_samples=int(sample_counts.sum()),
                    **label_columns,
                )
            )
    return rows.frame(table_rows)


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """Return accuracy on all clients' test samples after the last round, (run, epochs) x seeds.

    FedPer has 0 epochs of fine-tuning.
    """
    tuned_rows = where(frame, metric=ACCURACY).astype({"seed": int, "variant": int})
    group_keys = [
        tuned_rows["run"].str.partition(".")[2],
        tuned_rows["variant"],
        tuned_rows["seed"],
    ]
    accuracy_table = tuned_rows.groupby(group_keys)["value"].mean().unstack("seed")
    rival_scores = finished(THAW.read(THAW.path())[1]).loc[f"{DATASET}.{RIVAL}"]
    accuracy_table.loc[(RIVAL, 0), :] = rival_scores.iloc[-1].reindex(
        accuracy_table.columns
    )
    return accuracy_table


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    accuracies = scores(frame)
    leads: dict[str, Difference] = {}
    for epochs in EPOCHS:
        for rival, rival_epochs in (("fedbabu", epochs), (RIVAL, 0)):
            rival_name = names.title(rival)
            lead_name = f"Anti over {rival_name} with {epochs}"
            leads[lead_name] = difference(
                accuracies, ("anti", epochs), (rival, rival_epochs)
            )
    verdicts = [
        judge(
            {lead_key: gap for lead_key, gap in leads.items() if title in lead_key},
            check,
        )
        for title, check in (("FedBABU", LEAD), ("FedPer", TRAIL))
    ]
    finding = Finding(
        "after 1, 5 and 20 epochs of fine-tuning Anti lies above FedBABU and below FedPer",
        "; ".join(verdict.text for verdict in verdicts),
        joint([verdict.held for verdict in verdicts]),
    )
    rival_title = names.title(RIVAL)
    columns = {
        "epochs": list(map(str, EPOCHS)),
        **{
            names.title(method) + " %": means(accuracies, [(method, k) for k in EPOCHS])
            for method in METHODS
        },
        f"{rival_title} %": means(accuracies, [(RIVAL, 0)] * len(EPOCHS)),
    }
    for rival in ("FedBABU", "FedPer"):
        columns[f"Anti minus {rival}"] = [
            points(gap.interval)
            for lead_name, gap in leads.items()
            if rival in lead_name
        ]
    table = pd.DataFrame(
        [
            {"method": method, "epochs": epochs, "seed": seed, "accuracy": accuracy}
            for (method, epochs, seed), accuracy in accuracies.stack().items()
        ]
    )
    missing_text = missing_runs(header)
    caption = (
        "Accuracy after round 300 on all clients' test samples, by the number of epochs for which the global model "
        "is fine-tuned on every client. FedPer is not fine-tuned. ± is half the 95 % interval over seeds. Data and "
        f"training are those of `scheduling.sec53`.{missing_text}"
    )
    return Drawing(None, table, caption, (finding,), markdown(columns))


items.register(Item(
    NAME, "Anti and FedBABU on Tiny-ImageNet by the number of epochs of fine-tuning",
    _recipes(), seeds=3, budget="about an hour of one core; a run takes some eight minutes", measure=_measure,
    draw=_draw,
))  # fmt: skip
