"""What is the label is said of each sample and batch of three or more parts."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from diagnostics.inputs import _read
from fl_core.data.loading import pair_of


def parts(count):
    """Return a loader of ten samples, whose part k is k everywhere."""
    tensors = [torch.full((10, 2), float(k)) for k in range(count - 1)]
    last = torch.full((10,), count - 1)
    return DataLoader(TensorDataset(*tensors, last), batch_size=4)


@pytest.mark.parametrize("count", [3, 4])
def test_the_last_of_several_parts_is_the_label_and_said_so(count):
    message = rf"the last of {count} parts of a sample is the label"
    with pytest.warns(UserWarning, match=message) as caught:
        x, y = pair_of(parts(count), "client 'a'")
    assert len(caught) == 1
    assert (y == count - 1).all()
    assert [float(part[0, 0]) for part in x] == list(range(count - 1))
    with pytest.warns(UserWarning, match=message):
        _read(list(parts(count)), None, 0, ())


def test_nothing_is_said_of_pairs():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y = pair_of(parts(2), "client 'a'")
        _read(list(parts(2)), 4, 0, ())
    assert (x.shape, y.shape) == ((10, 2), (10,))
