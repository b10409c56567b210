"""A file of tensors that cannot be loaded is refused, and says why."""

import pytest

from fl_core import storage


def test_trees_are_parted_by_their_names():
    trees = {"model": {"fc|w": 1, "fc.b": 2}, "head": {}}
    assert storage.split_trees(storage.merge_trees(trees), trees) == trees
    with pytest.raises(ValueError, match=r"'model\|fc\|w'"):
        storage.split_trees(storage.merge_trees(trees), ["head"])
