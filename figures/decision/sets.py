"""Data that only this study has: a table made from texts, and turned digits."""

from __future__ import annotations

import numpy as np

from benchmarks.leaderboard.federations import rotated_images
from fl_core.data import Source, open_named
from fl_core.data.registry import Location, dataset

COMPONENTS = 32


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
    counts = TfidfVectorizer(
        min_df=5, token_pattern=r"\S+", sublinear_tf=True
    ).fit_transform(texts)
    components = TruncatedSVD(
        COMPONENTS, algorithm="arpack", random_state=0
    ).fit_transform(counts)
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
    "digits_turned", partition="natural", model="mlp", model_options={"sizes": (64, 32)}, batch_size=32, lr=1e-3,
    rounds=30,
    note="of this study",
)  # fmt: skip
def digits_turned(data_root: Location | None) -> Source:
    """Handwritten digits of 8 x 8 pixels, seen from another side by each client."""
    return rotated_images(open_named("digits", data_root=data_root), "digits_turned")
