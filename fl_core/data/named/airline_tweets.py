"""Tweets to six airlines, from a file below the data root."""

from __future__ import annotations

from dataclasses import replace

from fl_core.data import tables
from fl_core.data.columns import Reading
from fl_core.data.registry import Location, dataset
from fl_core.data.root import find_file
from fl_core.data.sources import Source
from fl_core.errors import UsageError, listing


@dataset(
    "airline_tweets",
    clients=6,
    partition="natural",
    model="text_transformer",
    model_options={"width": 128},
    batch_size=64,
    lr=1e-3,
    rounds=20,
    note="no published recipe; values of the nearest dataset that has one: Sent-140's, at a smaller width",
)
def airline_tweets(data_root: Location | None) -> Source:
    """14,640 tweets to six airlines, which are the clients: negative, neutral or positive."""
    path = find_file("airline_tweets", data_root, "airline_tweets.jsonl")
    tweets = tables.read_table(path, Reading(client_column="airline"))
    if tweets.classes != ("0", "1", "2"):
        raise UsageError(
            f"{path}: labels must be 0, 1 and 2; got {listing(tweets.classes)}."
        )
    return replace(tweets, classes=("negative", "neutral", "positive"))
