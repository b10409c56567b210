"""Samples that a federation left over are nobody's, and are distributed like the client's own."""

import numpy as np
import pytest
import torch

from fl_core.data import Source, extra_test_samples, gather
from fl_core.data.partitions import make
from tests.conftest import refuses


def skewed(n=900):
    """Samples that hold their own number and are half of class 0, a third of class 1, a sixth of class 2."""
    numbers = np.arange(n)
    labels = np.array([0, 0, 0, 1, 1, 2])[np.random.default_rng(0).permutation(n) % 6]
    names = tuple("abc")
    x = numbers[:, None].astype(np.float32)
    return Source(
        "toy", x, labels, ("0", "1", "2"), owner=numbers % 3, owner_names=names
    )


@pytest.mark.parametrize(
    ("kind", "options"), [("natural", {}), ("dirichlet", {"clients": 4, "alpha": 0.5})]
)
def test_further_samples_are_nobodys_and_have_the_clients_classes_and_owner(
    kind, options
):
    whole = skewed()
    pool = whole.first(300)
    data = gather(pool, make(pool, kind, **options))
    taken = {
        int(x)
        for c in data.clients
        for s in ("train", "validation", "test")
        for x in c.split(s).x[:, 0]
    }
    further = extra_test_samples(whole, data, max_per_client=40)
    assert list(further) == [client.name for client in data.clients]
    for client in data.clients:
        split = further[client.name]
        numbers = split.x[:, 0].long()
        assert len(set(numbers.tolist())) == len(split) == 40
        assert not taken & set(numbers.tolist())
        assert torch.equal(split.y, torch.from_numpy(whole.y)[numbers])
        if kind == "natural":
            assert {whole.owner_names[k % 3] for k in numbers.tolist()} == {client.name}
        own = torch.cat([client.train.y, client.validation.y, client.test.y])
        expected = torch.bincount(own, minlength=3) / len(own) * 40
        assert torch.all((torch.bincount(split.y, minlength=3) - expected).abs() <= 1)


def test_nothing_is_left_of_a_whole_dataset_and_another_dataset_is_refused():
    whole = skewed()
    data = gather(whole, make(whole, "natural"))
    assert extra_test_samples(whole, data) == {}
    with refuses("source"):
        extra_test_samples(
            skewed(600), gather(whole.first(300), make(whole.first(300), "natural"))
        )
