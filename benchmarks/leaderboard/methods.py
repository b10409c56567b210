"""The methods of the leaderboard, and the tuning trials of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RATES = (1e-3, 3e-3, 1e-2, 3e-2)
"""The learning rates that every method tries first."""
WIDER = {1e-3: 3e-4, 3e-2: 1e-1}
"""The further rate that is tried if an end of the four is the best."""
TUNING, SCORED = 10, (11, 12, 13)
"""The seed on which methods are tuned, and those on which they are scored."""
CLASSES = "benchmarks.leaderboard.algorithms"
"""The module of the methods that the package does not have."""
TRAIN, ADVICE, POOLED, MAJORITY = "train", "advice", "centralised", "majority"
"""Kinds of methods: an algorithm; what ``choose`` advises; one model of all samples; the most frequent class."""


@dataclass(frozen=True)
class Method:
    """A method of the leaderboard.

    Attributes:
        title: as it is shown.
        algorithm: its name, or ``package.module:Class``; empty without training.
        key: the one own key that is tuned; ``threshold`` is a key of the configuration, others of the algorithm.
        values: two values of it that are tried. The default is tried with the rates.
    """

    title: str
    algorithm: str
    key: str = ""
    values: tuple[Any, ...] = ()
    kind: str = TRAIN


METHODS: dict[str, Method] = {
    "fedavg": Method("FedAvg", "fedavg"),
    "fedavg_finetuned": Method(
        "FedAvg with fine-tuning", "local_adaptation", "finetune_epochs", (2, 10)
    ),
    "local": Method("Local", "local"),
    "fedprox": Method("FedProx", "fedprox", "mu", (0.01, 1.0)),
    "scaffold": Method("SCAFFOLD", "scaffold", "server_lr", (0.3, 0.6)),
    "fedper": Method("FedPer", "fedper"),
    "fedrep": Method("FedRep", "fedrep", "head_epochs", (2, 5)),
    "fedbabu": Method("FedBABU", "fedbabu", "finetune_epochs", (2, 10)),
    "lg_fedavg": Method("LG-FedAvg", "lg_fedavg"),
    "fedrod": Method("FedRoD", "fedrod", "gamma", (0.0, 0.5)),
    "ditto": Method("Ditto", "ditto", "lam", (0.01, 1.0)),
    "pfedme": Method("pFedMe", "pfedme", "personal_lr", (0.003, 0.03)),
    "apfl": Method("APFL", "apfl", "alpha", (0.25, 0.75)),
    "fedala": Method("FedALA", "fedala", "layers", (2, 4)),
    "fedfomo": Method("FedFomo", "fedfomo", "downloads", (2, 10)),
    "fedamp": Method("FedAMP", "fedamp", "sigma", (1.0, 10.0)),
    "fedselect": Method("FedSelect", f"{CLASSES}:FedSelect", "limit", (0.3, 0.8)),
    "mr_mtl": Method("MR-MTL", "mr_mtl", "lam", (0.01, 1.0)),
    "knn_per": Method("kNN-Per", f"{CLASSES}:KNNPer", "lam", (0.2, 0.8)),
    "playerfl": Method("PLayer-FL", "playerfl", "threshold", (1.05, 2.0)),
    "advice": Method("advice of choose", "fedper", kind=ADVICE),
    "majority": Method("majority class", "", kind=MAJORITY),
    "centralised": Method("centralised training", "local", kind=POOLED),
}
"""By name, in the order in which they are run."""
REFERENCES = ("fedavg_finetuned", "advice")
"""The methods to which every other one is compared."""
BOUNDS = ("majority", "centralised")
"""Methods that are no federated learning. They are shown, and not ranked."""

Setting = dict[str, Any]
"""What a run sets: ``lr``, ``keep_optimizer``, and one own key at most, or a plan."""


def own_method(algorithm: str) -> Method:
    """Return the method of an algorithm that the leaderboard lacks. Its rates and its optimiser are tuned."""
    return Method(algorithm, algorithm)


def next_setting(
    method: Method, tried: Sequence[tuple[Setting, float]]
) -> Setting | None:
    """Return what the method tries next, given the settings tried so far and their scores; None after the last.

    First come four rates, and one more beyond a chosen end. Two values of the own key follow at the best rate, then the
    optimiser's state at the best of all. Scores are on validation, higher is better; NaN for a failed run.

    >>> best_third = [({"lr": lr, "keep_optimizer": False}, score) for lr, score in zip(RATES, (1, 2, 4, 3))]
    >>> next_setting(METHODS["ditto"], best_third)
    {'lr': 0.01, 'keep_optimizer': False, 'lam': 0.01}
    >>> next_setting(METHODS["fedavg"], best_third)
    {'lr': 0.01, 'keep_optimizer': True}
    """
    done = len(tried)
    if done < len(RATES):
        return {"lr": RATES[done], "keep_optimizer": False}
    rated = [
        setting
        for setting, _ in tried
        if method.key not in setting and not setting["keep_optimizer"]
    ]
    best = best_setting(tried[: len(rated)])
    if len(rated) == len(RATES) == done and best["lr"] in WIDER:
        return {**best, "lr": WIDER[best["lr"]]}
    values = method.values[done - len(rated) :]
    if values:
        return {**best, method.key: values[0]}
    if any(setting["keep_optimizer"] for setting, _ in tried):
        return None
    return {**best_setting(tried), "keep_optimizer": True}


def best_setting(tried: Sequence[tuple[Setting, float]]) -> Setting:
    """Return the setting with the highest score, of equal ones the first. A failed run (NaN) is the worst."""
    return max(
        tried,
        key=lambda each: (each[1] == each[1], each[1] if each[1] == each[1] else 0.0),
    )[0]


def configuration_keys(method: Method, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run's configuration that a setting means.

    >>> configuration_keys(METHODS["fedprox"], {"lr": 0.01, "keep_optimizer": True, "mu": 1.0})
    {'algorithm': 'fedprox', 'lr': 0.01, 'keep_optimizer': True, 'options': {'mu': 1.0}}
    """
    keys: dict[str, Any] = {"algorithm": method.algorithm, "lr": setting["lr"]}
    keys["keep_optimizer"] = setting["keep_optimizer"]
    if method.key in setting:
        value = setting[method.key]
        keys |= (
            {"threshold": value}
            if method.key == "threshold"
            else {"options": {method.key: value}}
        )
    return keys
