"""A site that has another version of the package, or another model of the same name: FILE version|model."""

import sys

from fedlayers.cli.main import main
from fedlayers.remote import protocol, site

file, what = sys.argv[1:]
if what == "version":
    protocol.PROTOCOL = protocol.OLDEST = 1
else:
    site.tree.digest = lambda tensors: "0" * 64
main(["federation", "site", file])
