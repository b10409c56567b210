"""The names of algorithms, datasets and networks on pictures and pages."""

from __future__ import annotations

import re

ALGORITHMS = {
    "alllarge": "AllLarge",
    "allsmall": "AllSmall",
    "anti": "Anti",
    "apfl": "APFL",
    "depthfl": "DepthFL",
    "ditto": "Ditto",
    "fedala": "FedALA",
    "fedamp": "FedAMP",
    "fedavg": "FedAvg",
    "fedbabu": "FedBABU",
    "fedbn": "FedBN",
    "fedcac": "FedCAC",
    "feddyn": "FedDyn",
    "fedfomo": "FedFomo",
    "fedlama": "FedLAMA",
    "fedlp": "FedLP",
    "fedper": "FedPer",
    "fedpft": "FedPFT",
    "fedprox": "FedProx",
    "fedra": "FedRA",
    "fedrep": "FedRep",
    "fedrod": "FedRoD",
    "heurfedamp": "HeurFedAMP",
    "heurpfedla": "HeurpFedLA",
    "inclusivefl": "InclusiveFL",
    "lg_fedavg": "LG-FedAvg",
    "local": "Local",
    "local_adaptation": "LocalAdaptation",
    "mr_mtl": "MR-MTL",
    "per_fedavg": "Per-FedAvg",
    "pfedgate": "pFedGate",
    "pfedhn": "pFedHN",
    "pfedla": "pFedLA",
    "pfedme": "pFedMe",
    "pfedpt": "pFedPT",
    "pfedsd": "pFedSD",
    "playerfl": "PLayer-FL",
    "playerfl_minus": "PLayer-FL−1",
    "playerfl_plus": "PLayer-FL+1",
    "playerfl_random": "PLayer-FL-Random",
    "scaffold": "SCAFFOLD",
    "two_stage": "Two-stage",
    "vanilla": "Vanilla",
}
"""As their papers write them; an algorithm that is not listed keeps its own name."""
_WORD = re.compile(r"\w+")
DATASETS = {
    "airline_tweets": "airline tweets",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "digits": "digits",
    "emnist": "EMNIST",
    "fashion_mnist": "Fashion-MNIST",
    "fed_isic": "Fed-ISIC",
    "heart": "Fed-Heart",
    "mnist": "MNIST",
    "pacs": "PACS",
    "pacs84": "PACS at 84 pixels",
    "tiny_imagenet": "Tiny-ImageNet",
    "tiny_imagenet32": "Tiny-ImageNet at 32 pixels",
}
NETWORKS = {
    "cifar_cnn": "PLayer-FL's CNN for CIFAR-10",
    "fmnist_cnn": "PLayer-FL's CNN for Fashion-MNIST",
    "frozen_but_head": "DINOv2-small with a frozen body",
    "heart_mlp": "an MLP",
    "isic_cnn": "PLayer-FL's CNN for Fed-ISIC",
    "pfedla_cnn": "pFedLA's CNN",
    "resnet8": "ResNet-8",
    "scheduling_cnn": "the schedules' CNN",
    "text_blocks": "a transformer of four blocks",
    "text_transformer": "a small transformer",
    "vit_small_patch14_dinov2": "DINOv2-small",
}


OPTIMISERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}


def title(run: str) -> str:
    """Return the name of a run: its algorithm's, and what follows it as words.

    >>> title("fedavg@resnet8"), title("fedra_cover"), title("my_own")
    ('FedAvg', 'FedRA, cover', 'my_own')
    """
    run_name = run.partition("@")[0]
    algorithm = max(
        (
            algorithm_name
            for algorithm_name in ALGORITHMS
            if f"{run_name}_".startswith(f"{algorithm_name}_")
        ),
        key=len,
        default="",
    )
    if not algorithm:
        return run_name
    suffix = run_name.removeprefix(algorithm).removeprefix("_").replace("_", " ")
    return ALGORITHMS[algorithm] + (f", {suffix}" if suffix else "")


def titles(text: str) -> str:
    """Return a text with the display name of every algorithm.

    >>> titles("anti over lg_fedavg")
    'Anti over LG-FedAvg'
    """
    return _WORD.sub(lambda match: ALGORITHMS.get(match[0], match[0]), text)


def dataset(dataset_name: str) -> str:
    """Return a dataset's name; of one that is not listed its own."""
    return DATASETS.get(dataset_name, dataset_name)


def network(network_name: str) -> str:
    """Return a network in words; of one that is not listed its own name."""
    return NETWORKS.get(network_name, network_name)
