"""Mixtures at the limit of their weights: alone."""

import pytest

from tests.identities.test_limits import local, run, settings

ALONE = {
    "fedamp, no pull": ("fedamp", {"lam": 0}),
    "heurfedamp, itself, no pull": ("heurfedamp", {"self_weight": 1, "lam": 0}),
    "heurfedamp, itself, no pull, from the cloud": (
        "heurfedamp",
        {"self_weight": 1, "lam": 0, "start": "cloud"},
    ),
}


@settings(1)
@pytest.mark.parametrize("limit", ALONE)
def test_who_weighs_only_itself_is_alone_bit_for_bit(limit, setting):
    algorithm, options = ALONE[limit]
    assert (
        run(setting, algorithm, options=options).evaluated()
        == local(setting).evaluated()
    )
