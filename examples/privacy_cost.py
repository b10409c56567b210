"""Measure what a site file's [privacy] costs on Fed-Heart: the accuracy of 20 rounds with and without noise."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import fedlayers as fl
from fedlayers.remote.federation import federate
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.privacy import Privacy
from fedlayers.remote.site import Site
from fedlayers.remote.site_data import PresplitData
from fedlayers.studies.comparison import headline
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.statistics import mean_interval

ALGORITHMS = ("local", "fedavg", "fedper")


def score(algorithm: str, seed: int, rounds: int, privacy: Privacy) -> tuple[float, float]:
    """Train over sites in this process; return their mean test accuracy and the epsilon that each has spent."""
    data = fl.load("heart", seed=seed)
    config = RunConfig(dataset="heart", algorithm=algorithm, rounds=rounds, seed=seed)
    with TemporaryDirectory() as folder:
        sites = {
            client.name: Site(PresplitData(data, client.name), Path(folder) / client.name, privacy=privacy)
            for client in data.clients
        }
        engine = federate(config, InMemoryTransport(sites), progress=False)
        final = headline(rows.frame(engine.rows))
        spent = max(site.account.spent() for site in sites.values()) if privacy.active else 0.0
    return float(final[final["metric"] == "accuracy"]["value"].mean()), spent


def table(privacy: Privacy, algorithms: Sequence[str], seeds: int, rounds: int) -> str:
    """Return a Markdown table with a line for each algorithm; the difference has its 95 % interval over seeds."""
    lines = [
        "| algorithm | accuracy without noise, % | with noise, % | difference, points | epsilon |",
        "|---|---|---|---|---|",
    ]
    for algorithm in algorithms:
        pairs = [
            (score(algorithm, seed, rounds, Privacy()), score(algorithm, seed, rounds, privacy))
            for seed in range(seeds)
        ]
        plain, noisy = ([100 * pair[k][0] for pair in pairs] for k in (0, 1))
        mean, low, high = mean_interval([b - a for a, b in zip(plain, noisy, strict=True)])
        epsilon = max(pair[1][1] for pair in pairs)
        lines.append(
            f"| {algorithm} | {sum(plain) / seeds:.1f} | {sum(noisy) / seeds:.1f} "
            f"| {mean:+.1f} [{low:+.1f}, {high:+.1f}] | {epsilon:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table for the numbers of a [privacy] table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clip", type=float, required=True)
    parser.add_argument("--clip-numbers", type=float, default=1.0)
    parser.add_argument("--noise", type=float, required=True)
    parser.add_argument("--epsilon", type=float, default=0.0)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args(arguments)
    privacy = Privacy(given.clip, given.clip_numbers, given.noise, epsilon=given.epsilon)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # noise makes training diverge, which the table shows
        print(table(privacy, given.algorithms, given.seeds, given.rounds))


if __name__ == "__main__":
    main()
