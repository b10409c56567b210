"""Every algorithm gives the stored bits."""

import platform

import pytest

from docs import lists
from tests import processor
from tests.conftest import every_other
from tests.identities.digests import VARIANTS, digests, machine, played, stored

STORED = stored()[0]

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the digests are of x86-64"
)


def test_the_processor_computes_the_bits_of_the_table():
    """Fail for a processor without a table, or if a plugin loads torch before the tests choose the instructions."""
    assert processor.LOADED == []
    assert machine() == STORED["machine"]


def test_the_table_has_every_algorithm():
    names = set(lists.registry("algorithm").own)
    assert set(STORED["runs"]) == names | VARIANTS.keys()


@pytest.mark.parametrize("run", every_other(STORED["runs"]))
def test_one_process(run):
    assert digests(played(run)) == STORED["runs"][run]
