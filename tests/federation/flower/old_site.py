"""A site that has another version of the package, or another model of the same name: FILE version|model."""

import sys

import fl_core
from fedlayers.cli.main import main
from fedlayers.remote import site

file, what = sys.argv[1:]
if what == "version":
    fl_core.__version__ = "0.0.1"
else:
    site.tree.digest = lambda tensors: "0" * 64
main(["federation", "site", file])
