"""scikit-learn's handwritten digits. They need no files."""

from __future__ import annotations

import numpy as np

from fl_core.data.registry import dataset
from fl_core.data.sources import Source

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
        "digits",
        x,
        bunch.target.astype(np.int64),
        tuple(str(k) for k in bunch.target_names),
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
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = (
        np.round(bunch.images * (255 / 16))
        .astype(np.uint8)
        .repeat(3, axis=1)
        .repeat(3, axis=2)
    )
    x = np.pad(x, ((0, 0), (2, 2), (2, 2)))
    return Source(
        "large_digits",
        x,
        bunch.target.astype(np.int64),
        tuple(str(k) for k in bunch.target_names),
    )


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
    plain = digits()
    owner = np.random.default_rng(0).permutation(np.arange(len(plain.x)) % LABORATORIES)
    k = plain.y
    y = np.choose(owner % len(CODES), [k, 9 - k, (k + 3) % 10])
    names = tuple(
        f"lab {number + 1:02d}: {CODES[number % len(CODES)]}"
        for number in range(LABORATORIES)
    )
    return Source(
        "coded_digits",
        plain.x,
        y,
        tuple(f"code {code}" for code in range(10)),
        owner,
        names,
    )
