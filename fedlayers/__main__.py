"""``python -m fedlayers``: the command line."""

from fedlayers.cli.main import main

main()
