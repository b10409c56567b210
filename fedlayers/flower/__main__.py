"""``python -m fedlayers.flower`` prints the folder of the app, for ``flwr run``."""

from pathlib import Path

if __name__ == "__main__":
    print(Path(__file__).parent / "app")
