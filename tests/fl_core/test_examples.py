"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import fl_core.data
import fl_core.models
from fl_core import calling
from fl_core.data.partitions import PARTITIONS
from fl_core.data.registry import DATASETS
from fl_core.models.registry import MODELS

MODULES = [
    importlib.import_module(info.name)
    for package in (fl_core.data, fl_core.models)
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]


@pytest.mark.parametrize("module", [calling, *MODULES], ids=lambda module: module.__name__)
def test_examples_do_what_they_show(module, own_members):
    for registry in (DATASETS, MODELS, PARTITIONS):
        own_members(registry)
    assert not doctest.testmod(module).failed


@pytest.mark.parametrize("package", [fl_core.data, fl_core.models, fl_core.data.partitions], ids=lambda p: p.__name__)
def test_names_of_a_package_are_there_when_asked_for(package):
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert set(package._HOMES) <= set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize(
    "door",
    [
        *(fl_core.data.load, fl_core.data.dataset, fl_core.data.of_silos, fl_core.data.Partitioning),
        *(fl_core.data.Recipe, fl_core.models.build, fl_core.models.describe, fl_core.models.model),
    ],
    ids=lambda door: door.__name__,
)
def test_a_door_shows_a_run_of_itself(door):
    assert any(test.examples for test in doctest.DocTestFinder(recurse=False).find(door))
