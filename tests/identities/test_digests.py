"""Every algorithm gives the stored bits."""

import json
import platform

import pytest

from diagnostics.measure import instruments
from fedlayers import catalogue
from fl_core import runner
from tests import processor
from tests.conftest import TOY
from tests.identities.digests import TABLE, config_for, digests, machine

STORED = json.loads(TABLE.read_text(encoding="utf-8"))
SHARED = {"data": TOY, "instruments": instruments(), "progress": False}

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the digests are of x86-64"
)


def test_the_processor_computes_the_bits_of_the_table():
    """Fail for a processor without AVX2, or if a plugin loads torch before the tests choose the instructions."""
    assert processor.LOADED == []
    assert machine() == STORED["machine"]


def test_the_table_has_every_algorithm():
    assert set(STORED["runs"]) == set(catalogue.registry("algorithm").own)


@pytest.mark.parametrize("name", sorted(catalogue.registry("algorithm").own))
def test_one_process(name):
    assert digests(runner.run(config_for(name), **SHARED)) == STORED["runs"][name]
