"""Data and models that only this study has: a table made from texts, turned images, a transformer with adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.torch import save
from torch import nn

from benchmarks.leaderboard.federations import rotated_images
from fl_core import models
from fl_core.data import Source, open_named
from fl_core.data.registry import Location, dataset
from fl_core.models.adapters import adapt
from fl_core.models.blocks import with_optional_blocks
from fl_core.storage.files import write_atomically

COMPONENTS = 32
VIT = {"depth": 4, "width": 64, "heads": 4, "patch": 4}


@dataset(
    "tweets_table",
    partition="natural",
    model="mlp",
    model_options={"sizes": (64, 32, 16)},
    batch_size=32,
    lr=1e-3,
    rounds=30,
    note="chosen for this study",
)
def tweets_table(data_root: Location | None) -> Source:
    """Tweets to six airlines as a table of 32 latent components of their words.

    The label is whether a tweet is positive (16 %).

    The components (truncated singular vectors of the words' frequencies) are fitted to all texts without labels.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    tweets = open_named("airline_tweets", data_root=data_root)
    assert tweets.words is not None
    texts = [" ".join(map(str, codes[codes > 2])) for codes in tweets.x]
    counts = TfidfVectorizer(min_df=5, token_pattern=r"\S+", sublinear_tf=True).fit_transform(texts)
    components = TruncatedSVD(COMPONENTS, algorithm="arpack", random_state=0).fit_transform(counts)
    table = (components - components.mean(axis=0)) / components.std(axis=0)
    return Source(
        "tweets_table",
        np.ascontiguousarray(table, dtype=np.float32),
        (tweets.y == 2).astype(np.int64),
        ("other", "positive"),
        owner=tweets.owner,
        owner_names=tweets.owner_names,
    )


@dataset(
    "mnist_turned", partition="natural", model="fmnist_cnn", batch_size=16, lr=1e-3, rounds=30, note="of this study"
)
def mnist_turned(data_root: Location | None) -> Source:
    """MNIST, seen from another side by each client."""
    return rotated_images(open_named("mnist", data_root=data_root), "mnist_turned")


@dataset(
    "digits_turned", partition="natural", model="mlp", model_options={"sizes": (64, 32)}, batch_size=32, lr=1e-3,
    rounds=30,
    note="of this study",
)  # fmt: skip
def digits_turned(data_root: Location | None) -> Source:
    """Handwritten digits of 8 x 8 pixels, seen from another side by each client."""
    return rotated_images(open_named("digits", data_root=data_root), "digits_turned")


def lora_vit(shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """A vision transformer of four blocks with adapters of rank 8; these and the classifier train."""
    example = models.example(shape)
    plain = with_optional_blocks(models.build("vit", shape, n_classes, seed=0, options=VIT), example)
    return adapt(plain, ("attn.proj", "mlp.fc2"), rank=8, alpha=8, dropout=0.0, seed=0, example=example)


def adapted_start(plain: nn.Module, shape: tuple[int, ...], n_classes: int, path: Path) -> None:
    """Store a pretrained network's weights in the form of :func:`lora_vit`, except for the classifier."""
    own = plain.state_dict()
    state = lora_vit(shape, n_classes).state_dict()
    for name in state:
        pretrained = own.get(name.replace(".base_layer.", "."))
        if pretrained is not None and not name.startswith("head."):
            state[name] = pretrained.clone()
    write_atomically(path, save({name: tensor.contiguous() for name, tensor in state.items()}))
