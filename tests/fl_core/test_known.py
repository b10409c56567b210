"""Federations with a known answer, held against their samples by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fl_core.data.named.known import KINDS, federation, permuted_inputs
from fl_core.data.named.small import digits

CLIENTS, SAMPLES, TEST = 5, 40, 30


@pytest.fixture(scope="module")
def plain():
    """Samples whose first pixel is their number, so that a changed one is found again."""
    source = digits()
    x = source.x.copy()
    x[:, 0, 0, 0] = np.arange(len(x)) + 2  # beyond every other pixel
    return replace(source, x=x)


@pytest.mark.parametrize("kind", KINDS)
def test_clients_differ_in_what_their_federation_says(plain, kind):
    changed = federation(plain, "made", kind, CLIENTS, SAMPLES, TEST)
    numbers = changed.x.reshape(len(changed.x), -1).max(1).astype(int) - 2
    codes, orders = [], []
    for client in range(CLIENTS):
        of_client = changed.owner == client
        assert of_client.sum() == SAMPLES + TEST
        assert changed.is_train[of_client].sum() == SAMPLES
        truth = plain.y[numbers[of_client]]
        pairs = {*zip(truth.tolist(), changed.y[of_client].tolist(), strict=True)}
        assert len(pairs) == len(plain.classes)  # a code has one word a digit
        codes.append(tuple(sorted(pairs)))
        orders.append(int(changed.x[of_client][0].argmax()))
    tests = [
        {*numbers[(changed.owner == k) & ~changed.is_train]} for k in range(CLIENTS)
    ]
    assert all(part == tests[0] for part in tests)
    assert len({*numbers[changed.is_train]}) == CLIENTS * SAMPLES
    several = {"labels": 5, "both": 5, "outlier": 2, "clusters": 2}
    assert len({*codes}) == several.get(kind, 1)
    assert (len({*orders}) > 1) == (kind in ("inputs", "both"))
    if kind == "clusters":
        assert codes[0] == codes[1] == codes[2] != codes[3] == codes[4]


@pytest.mark.parametrize(
    "x", [np.zeros((4, 3, 5, 6), np.float32), np.zeros((4, 5, 6, 3), np.uint8)]
)
def test_pixels_move_with_all_their_channels(x):
    """Each pixel of a sample has a number of its own, in all channels."""
    channel_axis = x.shape.index(3)
    numbers = np.moveaxis(x, channel_axis, -1)
    numbers += np.arange(30, dtype=x.dtype).reshape(5, 6, 1)
    changed = np.moveaxis(permuted_inputs(x, 0), channel_axis, -1)
    assert (changed == changed[:1, ..., :1]).all()
    assert not (changed == numbers).all()
    assert sorted(changed[0, ..., 0].ravel()) == [*range(30)]


def test_small_clothes_are_means_of_the_images(tmp_path):
    """Averaged to 14 x 14, of an archive that torchvision did not make."""
    from fl_core.data.registry import DATASETS

    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (1500, 28, 28), dtype=np.uint8)
    y = np.arange(1500) % 10
    np.savez(tmp_path / "fashion_mnist.npz", x=x, y=y)
    source = DATASETS["fashion_neither"].open(tmp_path, False)
    first = source.x[0].astype(float)
    blocks = x.reshape(-1, 14, 2, 14, 2).astype(float).mean((2, 4))
    assert np.abs(blocks - first).max((1, 2)).min() <= 0.5
    assert [int((source.owner == k).sum()) for k in range(5)] == [438] * 5


def test_tweets_for_adapters_have_the_words_of_the_base(tmp_path, monkeypatch):
    """Two airlines make the vocabulary; no two samples of the others are equal."""
    from fl_core.data.named import small
    from fl_core.data.registry import DATASETS

    monkeypatch.setattr(small, "TWEET_SAMPLES", 4)
    monkeypatch.setattr(small, "TWEET_TESTS", 3)
    airlines = ["Virgin America", "United", "Southwest", "Delta", "US Airways"]
    tweets = []
    for k, airline in enumerate([*airlines, "American"]):
        for number in range(20 * k, 20 * k + 20):  # of an airline alone, as its bits
            signs = " ".join(f"{place}" for place in range(10) if number >> place & 1)
            text = f"flight {signs} {airline.split()[0]} rare{number}"
            tweet = {"label": (number + k) % 3, "airline": airline, "text": text}
            tweets += [tweet, tweet]
    lines = "".join(f"{json.dumps(tweet)}\n" for tweet in tweets)
    (tmp_path / "airline_tweets.jsonl").write_text(lines)
    base, adapters = (
        DATASETS[name].open(tmp_path) for name in ("tweets_base", "tweets_adapters")
    )
    assert base.owner_names == ("US Airways", "United")
    assert adapters.owner_names == ("American", "Delta", "Southwest", "Virgin America")
    assert base.words == adapters.words
    assert {"flight", "united", "us", "0", "6"} <= {*base.words}
    assert not {"american", "delta", "southwest", "virgin"} & {*base.words}
    assert "rare20" not in base.words  # in two tweets
    assert len(base) == 2 * 20
    for source in (base, adapters):
        assert len(np.unique(source.x, axis=0)) == len(source)
        assert source.fit(np.arange(5)).words == base.words
    for client in range(4):
        of_client = adapters.owner == client
        assert (of_client.sum(), adapters.is_train[of_client].sum()) == (7, 4)
