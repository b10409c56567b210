"""A site that has another version of the package, or another model of the same name: FILE version|model."""

import sys
from dataclasses import replace

from fedlayers.cli.main import main
from fedlayers.remote import joined_run, protocol

file, what = sys.argv[1:]
if what == "version":
    protocol.PROTOCOL = protocol.OLDEST = 1
else:
    assemble = joined_run.assemble
    joined_run.assemble = lambda config, **rest: assemble(
        replace(config, model="mlp", model_options={"sizes": (3,)}), **rest
    )
main(["federation", "site", file])
