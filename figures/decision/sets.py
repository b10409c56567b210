"""Data that only this study has: a table made from texts, and turned digits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

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


# --- tables with rare outcomes ---------------------------------------------------------------------------------

UNITS = ("A", "B", "C", "D")
COLUMNS, INFORMATIVE = 70, 12


def rare_table(
    share: float, own: float = 0.3, seed: int = 0, rows: int = 3000
) -> pd.DataFrame:
    """Draw a table of four units with an outcome that a given share of the rows has.

    Seventy correlated columns of numbers have a tenth of gaps. Twelve of them matter, in part not linearly. Their
    effects differ between units a little, so that pooling helps a little.

    Args:
        own: deviation of a unit's own effects; the common ones have 1.
    """
    draw = np.random.default_rng(seed)
    unit = np.sort(draw.choice(len(UNITS), rows, p=(0.4, 0.3, 0.2, 0.1)))
    mixed = draw.normal(size=(rows, 20)) @ draw.normal(size=(20, COLUMNS)) / 20**0.5
    x = 0.7 * mixed + 0.7 * draw.normal(size=(rows, COLUMNS))
    x += 0.3 * draw.normal(size=(len(UNITS), COLUMNS))[unit]
    effects = draw.normal(size=INFORMATIVE)
    effects = effects + own * draw.normal(size=(len(UNITS), INFORMATIVE))
    risk = (effects[unit] * x[:, :INFORMATIVE]).sum(axis=1)
    risk += x[:, 0] * x[:, 1] + 1.5 * np.abs(x[:, 2]) + 2 * (x[:, 3] > 1)
    risk = 1.6 * (risk - risk.mean()) / risk.std() + draw.logistic(size=rows)
    died = risk > np.quantile(risk, 1 - share)
    x[draw.random(x.shape) < 0.1] = np.nan
    table = pd.DataFrame(x.round(3), columns=[f"v{k}" for k in range(COLUMNS)])
    return table.assign(unit=np.array(UNITS)[unit], died=np.where(died, "yes", "no"))


def _rare(name: str) -> Source:
    kind, percent = name.split("_")
    seed = int(percent) + (100 if kind == "apart" else 0)
    table = rare_table(int(percent) / 100, 0.9 if kind == "apart" else 0.3, seed)
    return Source(
        name,
        table.iloc[:, :COLUMNS].to_numpy(np.float32),
        (table["died"] == "yes").to_numpy(np.int64),
        ("no", "yes"),
        owner=table["unit"].map(UNITS.index).to_numpy(),
        owner_names=UNITS,
    )


def rare_5() -> Source:
    """Rare outcomes of 5 %; the units' effects are nearly the same."""
    return _rare("rare_5")


def rare_14() -> Source:
    """Rare outcomes of 14 %; the units' effects are nearly the same."""
    return _rare("rare_14")


def rare_30() -> Source:
    """Outcomes of 30 %; the units' effects are nearly the same."""
    return _rare("rare_30")


def apart_5() -> Source:
    """Rare outcomes of 5 %; the units' effects differ."""
    return _rare("apart_5")


def apart_14() -> Source:
    """Rare outcomes of 14 %; the units' effects differ."""
    return _rare("apart_14")


def apart_30() -> Source:
    """Outcomes of 30 %; the units' effects differ."""
    return _rare("apart_30")


def heart_yes(data_root: Location | None) -> Source:
    """Fed-Heart with the classes 1 to 4 joined: heart disease or none."""
    heart = open_named("heart", data_root=data_root)
    return replace(
        heart,
        name="heart_yes",
        y=np.greater(heart.y, 0).astype(np.int64),
        classes=("no", "yes"),
    )
