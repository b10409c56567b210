"""Texts: tokens, the vocabulary of what is trained on, files, and the transformer that takes them."""

import json
import math
import sys
import unicodedata
from collections import Counter

import numpy as np
import pytest
import torch

from fl_core import data, models, tree
from fl_core.data import sources
from fl_core.models.tokens import PAD, SPECIAL, START, UNKNOWN, TokenShape
from tests.conftest import refuses
from tests.made import lines


def write(path, entries=None):
    entries = lines() if entries is None else entries
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def test_the_vocabulary_is_of_the_training_samples_alone(tmp_path):
    entries = list(lines())
    entries[7]["text"] *= 9  # more than is read
    dealt = data.load(write(tmp_path / "t.jsonl", entries), seed=3)
    tokens = [
        sources.tokens_of(entry["text"])[: sources.LENGTH - 1] for entry in entries
    ]
    train = np.concatenate([part["train"] for part in dealt.partition.indices.values()])
    counts = Counter(word for k in train for word in tokens[k])
    ranked = sorted(
        (word for word in counts if counts[word] >= sources.LEAST_COUNT),
        key=lambda w: (-counts[w], w),
    )
    assert dealt.words == tuple(ranked)
    assert dealt.shape == (sources.LENGTH,)
    assert dealt.shape.tokens == len(SPECIAL) + len(ranked)
    ids = {word: len(SPECIAL) + k for k, word in enumerate(ranked)}
    for client in dealt.clients:
        for split in ("train", "validation", "test"):
            positions = dealt.partition.indices[client.name][split]
            for row, k in zip(client.split(split).x, positions, strict=True):
                ids_of_text = [ids.get(word, UNKNOWN) for word in tokens[k]]
                assert row.tolist() == [
                    START,
                    *ids_of_text,
                    *[PAD] * (sources.LENGTH - 1 - len(ids_of_text)),
                ]
    assert client.train.x.dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"text": " "}, {}, "'text', line 3.*empty"),
        ({}, {"text_column": "txt"}, "text_column.*'txt'.*text"),
        ({}, {"client_column": "text"}, "must be different columns"),
    ],
)
def test_bad_texts_are_refused_by_line(tmp_path, change, options, message):
    entries = list(lines(30))
    entries[2] |= change
    with refuses(message):
        data.load(write(tmp_path / "t.jsonl", entries), **options)


def by_hand(model, ids):
    """The architecture in numpy's terms, one sample at a time and without padding."""
    state = {name: tensor.double() for name, tensor in tree.state_dict(model).items()}
    logits = []
    for row in ids:
        row = row[row != PAD]
        x = (
            state["embedding.token.weight"][row]
            + state["embedding.position.weight"][: len(row)]
        )
        q, k, v = (
            x @ state[f"attention.{name}.weight"].T
            for name in ("query", "key", "value")
        )
        seen = torch.softmax(q @ k.T / math.sqrt(x.shape[1]), 1) @ v
        x = x + seen @ state["attention.proj.weight"].T + state["attention.proj.bias"]
        hidden = (
            x @ state["fc1.linear.weight"].T + state["fc1.linear.bias"]
        ).clamp_min(0)
        x = x + hidden @ state["fc1.resid.weight"].T + state["fc1.resid.bias"]
        logits.append(x[0] @ state["fc2.weight"].T + state["fc2.bias"])
    return torch.stack(logits)


def blocks_by_hand(model, ids):
    """Logits of the transformer of blocks, one text after the other, without padding."""
    state, rows = dict(model.named_parameters()), []

    def normalised(x, name):
        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-5)
        return x * state[f"{name}.weight"] + state[f"{name}.bias"]

    for row in ids:
        row = row[row != PAD]
        x = state["embedding.token.weight"][row]
        x = x + state["embedding.position.weight"][: len(row)]
        for k in range(len(model.blocks)):
            block = f"blocks.{k}"
            attention, pair = f"{block}.attention", f"{block}.feed_forward"
            q, key, v = (
                x @ state[f"{attention}.{name}.weight"].T
                for name in ("query", "key", "value")
            )
            seen = torch.softmax(q @ key.T / math.sqrt(x.shape[1]), 1) @ v
            x = x + seen @ state[f"{attention}.proj.weight"].T
            x = normalised(x + state[f"{attention}.proj.bias"], f"{block}.norm1")
            hidden = x @ state[f"{pair}.linear.weight"].T + state[f"{pair}.linear.bias"]
            x = x + hidden.clamp_min(0) @ state[f"{pair}.resid.weight"].T
            x = normalised(x + state[f"{pair}.resid.bias"], f"{block}.norm2")
        rows.append(x.mean(0) @ state["head.weight"].T + state["head.bias"])
    return torch.stack(rows)


def small(tokens=30, length=9, classes=3, **options):
    return models.build(
        "text_transformer",
        TokenShape((length,), tokens),
        classes,
        options={"width": 8, **options},
    )


def batch(n=5):
    ids = models.example(TokenShape((9,), 30), n)
    for row in range(n):
        ids[row, 9 - row :] = PAD
    return ids


def blocks():
    shape = TokenShape((9,), 30)
    return models.build("text_blocks", shape, 3, options={"depth": 2, "width": 8})


@pytest.mark.parametrize(
    ("made", "by_hand"), [(small, by_hand), (blocks, blocks_by_hand)]
)
def test_a_model_is_its_formula_and_padding_does_not_count(made, by_hand):
    model, ids = made().double(), batch()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(
                parameter, generator=torch.Generator().manual_seed(len(name))
            )
    assert torch.allclose(model(ids), by_hand(model, ids), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        model.embedding.token.weight[PAD] = 7.0
    assert torch.allclose(model(ids), by_hand(model, ids), rtol=1e-12, atol=1e-12)


def test_the_named_ligatures_alone_become_more_than_six_signs():
    sizes = {
        sign: len(unicodedata.normalize("NFKC", sign))
        for sign in map(chr, range(sys.maxunicode + 1))
    }
    longest = {sign: size for sign, size in sizes.items() if size > sources.MOST_GROWTH}
    assert longest == sources.LIGATURES
