"""Small datasets: scikit-learn's digits, also with a known answer, patients of four hospitals, and airlines' tweets."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_core.data import arrays
from fl_core.data.preprocessing import FIXED, Preprocessing
from fl_core.data.reading import Reading
from fl_core.data.registry import TEXT, Location, dataset, find_file
from fl_core.data.sources import Source
from fl_core.data.table.prepare import read_table
from fl_core.errors import UsageError, listing
from fl_core.models.tokens import SPECIAL

LABORATORIES = 30
CODES = ("k", "9 - k", "k + 3")


@dataset(
    "digits",
    partition="iid",
    model="mlp",
    batch_size=32,
    rounds=20,
    lr=1e-2,
    note="chosen to train well within seconds",
)
def digits() -> Source:
    """scikit-learn's 1,797 handwritten digits, [1, 8, 8] pixels scaled to 0..1.

    They are floating-point samples. An exported model takes new ones that are scaled alike: divided by 16.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = (bunch.images / 16).astype(np.float32)[:, None]
    return Source(
        "digits", x, bunch.target.astype(np.int64), tuple(map(str, bunch.target_names))
    )


@dataset(
    "large_digits",
    model="pfedla_cnn",
    batch_size=32,
    rounds=30,
    note="chosen to train well within a minute",
)
def large_digits() -> Source:
    """The same digits as grey images of 28 x 28: each pixel 3 x 3, a rim of 2.

    They are for networks that need larger images.
    """
    small_digits = digits()
    x = (small_digits.x[:, 0].astype(float) * 255).round().astype(np.uint8)
    x = np.pad(x.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    return replace(small_digits, name="large_digits", x=x)


@dataset(
    "coded_digits",
    clients=None,
    partition="natural",
    model="mlp",
    batch_size=16,
    rounds=20,
    lr=1e-2,
    keep_optimizer=True,
    note="chosen for the demonstration",
)
def coded_digits() -> Source:
    """The digits at 30 constructed laboratories with three codes for a digit: k, 9 - k and k + 3.

    The pictures are alike everywhere, so first layers may be shared. The labels have another meaning in each code, so
    the last layer must stay local. The data are constructed to have this clear answer. Results on them are no evidence.
    """
    plain_digits = digits()
    owner = np.random.default_rng(0).permutation(
        np.arange(len(plain_digits.x)) % LABORATORIES
    )
    k = plain_digits.y
    y = np.choose(owner % len(CODES), [k, 9 - k, (k + 3) % 10])
    names = tuple(
        f"lab {number + 1:02d}: {CODES[number % len(CODES)]}"
        for number in range(LABORATORIES)
    )
    return replace(
        plain_digits,
        name="coded_digits",
        y=y,
        classes=tuple(f"code {code}" for code in range(10)),
        owner=owner,
        owner_names=names,
    )


# --- patients and tweets ---------------------------------------------------------------------------------------

COLUMNS = (
    "age",
    "sex",
    "cp",
    "trestbps",
    "chol",
    "fbs",
    "restecg",
    "thalach",
    "exang",
    "oldpeak",
)
SCALE = {  # column: (mean, variance), fixed by the released code; not the statistics of these rows
    "age": (53.0872973, 70.1459463),
    "cp": (3.23702703, 0.817756772),
    "trestbps": (132.74405405, 345.493057),
    "chol": (220.23648649, 4884.30934),
    "restecg": (0.64513514, 0.592069868),
    "thalach": (138.75459459, 529.172208),
    "oldpeak": (0.89532432, 1.11317517),
}
_SCALES = [SCALE.get(column, (0.0, 1.0)) for column in COLUMNS]
PREPARED = Preprocessing(
    COLUMNS,
    FIXED,
    centre=tuple(mean for mean, _ in _SCALES),
    spread=tuple(variance**0.5 for _, variance in _SCALES),
)


@dataset(
    "heart",
    clients=4,
    partition="natural",
    model="heart_mlp",
    batch_size=32,
    rounds=20,
    lr=5e-2,
    loss="player_focal",
    loss_options={
        "gamma": 3.0,
        "alpha": [0.12939189, 0.18108108, 0.22331081, 0.22364865, 0.24256757],
    },
    note="PLayer-FL, Table A.4 and released code",
)
@cache
def heart() -> Source:
    """Fed-Heart-Disease: 740 patients of four hospitals, 10 features, diagnosis 0..4 (PLayer-FL).

    Rows with a blank in the ten columns are dropped. Seven columns are standardised with fixed numbers. An exported
    model applies them to raw patients by the columns' names.
    """
    table = pd.read_csv(Path(__file__).with_name("heart.csv"))
    rows = table.dropna(subset=COLUMNS)
    y, classes = arrays.labels(rows["num"].to_numpy())
    owner, owner_names = arrays.owners(rows["hospital"].to_numpy(object))
    x = rows[list(COLUMNS)].to_numpy(np.float64)
    x = arrays.features(PREPARED.transform(x))
    return Source(
        "heart",
        x,
        y,
        classes,
        owner,
        owner_names,
        columns=COLUMNS,
        preprocessing=PREPARED,
    )


@dataset(
    "airline_tweets",
    clients=6,
    partition="natural",
    rounds=20,
    note="no published recipe; values of the nearest dataset that has one: Sent-140's, at a smaller width",
    **TEXT,
)
def airline_tweets(data_root: Location | None) -> Source:
    """14,640 tweets to six airlines, which are the clients: negative, neutral or positive.

    Args:
        data_root: the folder with ``airline_tweets.jsonl``. None means that of the
            environment.

    Raises:
        UsageError: the file is missing, or has other labels than 0, 1 and 2.
    """
    path = find_file("airline_tweets", data_root, "airline_tweets.jsonl")
    tweets = read_table(path, Reading(client_column="airline"))
    if tweets.classes != ("0", "1", "2"):
        raise UsageError(
            f"{path}: labels must be 0, 1 and 2; got {listing(tweets.classes)}."
        )
    return replace(tweets, classes=("negative", "neutral", "positive"))


BASE_AIRLINES = ("United", "US Airways")
"""Airlines of :func:`tweets_base`. The others are those of :func:`tweets_adapters`."""
TWEET_TOKENS, TWEET_SAMPLES, TWEET_TESTS = 16, 138, 400
"""Tokens of a tweet. For each airline of :func:`tweets_adapters`, the number of
training and validation samples, and the maximum number of test samples."""
LEAST_USED = 3
"""The minimum number of tweets to :data:`BASE_AIRLINES` that have a word of the
vocabulary."""
TWEET_BLOCKS: dict[str, Any] = {
    "clients": None,
    "partition": "natural",
    "model": "text_blocks",
    "model_options": {"width": 32},
}


def tweets_of(data_root: Location | None, name: str, base: bool) -> Source:
    """Return the first tokens of tweets to some airlines, each sequence of tokens once.

    A tweet is left out if an earlier one, to any airline, has the same first
    :data:`TWEET_TOKENS` tokens. The vocabulary has the words of at least
    :data:`LEAST_USED` tweets to :data:`BASE_AIRLINES`. All other words are one token.

    Args:
        data_root: the folder of the file, see :func:`airline_tweets`.
        name: name of the dataset.
        base: whether the airlines are :data:`BASE_AIRLINES`, or all others.
    """
    tweets = airline_tweets(data_root)
    owner = tweets.owner
    assert owner is not None
    assert tweets.words is not None
    is_base = np.isin(np.array(tweets.owner_names), BASE_AIRLINES)
    row_in_base = is_base[owner]
    first_word = len(SPECIAL)
    word_uses = np.bincount(
        np.concatenate([np.unique(row) for row in tweets.x[row_in_base]]),
        minlength=first_word + len(tweets.words),
    )[first_word:]
    vocabulary = tuple(tweets.words[k] for k in np.flatnonzero(word_uses >= LEAST_USED))
    tweets = replace(tweets.with_vocabulary(vocabulary), fixed_words=True)
    x = tweets.x[:, :TWEET_TOKENS]
    _, different_rows = np.unique(x, axis=0, return_index=True)
    chosen_rows = np.intersect1d(different_rows, np.flatnonzero(row_in_base == base))
    airlines = np.flatnonzero(is_base == base)
    return replace(
        tweets,
        name=name,
        x=x[chosen_rows],
        y=tweets.y[chosen_rows],
        owner=np.searchsorted(airlines, owner[chosen_rows]),
        owner_names=tuple(tweets.owner_names[k] for k in airlines),
    )


@dataset(
    "tweets_base",
    batch_size=64,
    rounds=5,
    lr=2e-3,
    note="for the base of tweets_adapters",
    **TWEET_BLOCKS,
)
def tweets_base(data_root: Location | None) -> Source:
    """Tweets to two airlines, for the base of adapters: their first 15 words."""
    return tweets_of(data_root, "tweets_base", base=True)


@dataset(
    "tweets_adapters",
    batch_size=16,
    rounds=10,
    lr=3e-3,
    note="chosen for a known answer",
    **TWEET_BLOCKS,
)
def tweets_adapters(data_root: Location | None) -> Source:
    """Tweets to four other airlines, for adapters: 138 training and validation samples of each.

    At most 400 more tweets to each airline are the official test set.
    """
    tweets = tweets_of(data_root, "tweets_adapters", base=False)
    assert tweets.owner is not None
    tweets = tweets.take(np.random.default_rng(0).permutation(len(tweets)))
    rank = pd.Series(tweets.owner).groupby(tweets.owner).cumcount().to_numpy()
    is_train = rank < TWEET_SAMPLES
    chosen_rows = np.flatnonzero(rank < TWEET_SAMPLES + TWEET_TESTS)
    return replace(tweets, is_train=is_train).take(chosen_rows)
