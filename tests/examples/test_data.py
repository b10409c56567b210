"""The constructed data of the pages are what the pages say."""

from examples import handwriting
from fl_core.data import load


def test_the_writers_have_folders(tmp_path):
    handwriting.main(str(tmp_path))
    data = load(str(tmp_path))
    assert (len(data.clients), data.n_classes, data.shape) == (10, 10, (1, 32, 32))
