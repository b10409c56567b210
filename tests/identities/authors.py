"""Numbers of the authors' own code, on small fixed inputs: ``python -m tests.identities.authors FOLDER``.

The folder has checkouts of the repositories of :data:`COMMITS`. Their code runs as it is, but for what ``corrected``
names. Also needed are the packages jax, dm-haiku and optax. The numbers are kept in ``authors.json``.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

TABLE = Path(__file__).with_name("authors.json")
COMMITS = {
    "apfl": "MLOPTPSU/FedTorch@ab8068dbc96804a5c1a8b898fd115175cfebfe75",
    "fedala": "TsingZ0/PFLlib@d832e76f6a23b833038949ec1e4fdefe63a4d350",
    "mr_mtl": "kenziyuliu/private-cross-silo-fl@f16ff76f7b342d2afba4a118cb1995ec852c7028",
}
"""Repository and commit by algorithm. FedALA's first author wrote PFLlib."""
ROUNDS, LR, SIZES = 4, 0.5, (6, 4, 8)
OPTIONS: dict[str, dict[str, Any]] = {
    "apfl": {"alpha": 0.3},
    "fedala": {"layers": 1, "share": 1.0, "rate": 1.0, "first": 11, "threshold": 0.0},
    "mr_mtl": {"lam": 0.3},
}
CORRECTED = {
    "apfl": [
        "The authors move w before they take v's gradient. Both are taken before either step.",
        "They mix outputs in place of parameters. The network is linear, so both are the same.",
        "Their slope of alpha has a further factor and a decay of 0.02 alpha. Both are taken out.",
        "They learn alpha once a round. A round has one batch.",
    ],
    "fedala": [
        "They learn for one pass more before they test for convergence. Both make 11 passes."
    ],
    "mr_mtl": [],
}
"""Where the code departs from the papers, and how that is put right."""
Tree = dict[str, Tensor]


def inputs() -> dict[str, Any]:
    """Return samples of three clients and initial weights, as lists of rounded numbers."""
    random = np.random.default_rng(0)

    def rounded(*shape: int) -> list[Any]:
        return random.normal(size=shape).round(2).tolist()  # type: ignore[no-any-return]

    clients = [
        {
            "x": rounded(size + 3, 4),
            "y": random.permutation(np.arange(size + 3) % 3).tolist(),
            "train": size,
        }
        for size in SIZES
    ]
    return {"clients": clients, "weights": {"fc1.weight": rounded(5, 4), "fc.weight": rounded(3, 5)},
            "linear": {"fc.weight": rounded(3, 4)}}  # fmt: skip


def network(weights: Mapping[str, Any]) -> nn.Sequential:
    """Return the network of these weights: linear layers without biases, ReLU between them."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name, value in weights.items():
        outputs, width = torch.tensor(value).shape
        parts[name.partition(".")[0]] = nn.Linear(width, outputs, bias=False)
        if name != "fc.weight":
            parts["relu"] = nn.ReLU()
    model = nn.Sequential(parts)
    model.load_state_dict(
        {name: torch.tensor(value) for name, value in weights.items()}
    )
    return model


def samples(given: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Return the training samples of each client."""
    return [
        (
            torch.tensor(each["x"][: each["train"]]),
            torch.tensor(each["y"][: each["train"]]),
        )
        for each in given["clients"]
    ]


def listed(trees: list[Mapping[str, Tensor]]) -> list[dict[str, Any]]:
    """Return trees as lists of numbers with 7 digits."""
    return [
        {n: np.array(t.detach().tolist()).round(7).tolist() for n, t in each.items()}
        for each in trees
    ]


@contextmanager
def checkout(folder: Path, *stand_ins: str) -> Iterator[Callable[[str], Any]]:
    """Return a function that imports a checkout's modules. Packages that it does not need are stood in for."""
    before = set(sys.modules)
    for name in stand_ins:
        sys.modules[name] = MagicMock()
    sys.path.insert(0, str(folder))
    try:
        with redirect_stdout(StringIO()):
            yield importlib.import_module
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if (
                str(folder) in str(getattr(sys.modules[name], "__spec__", ""))
                or name in stand_ins
            ):
                del sys.modules[name]


def mean(models: list[nn.Module], weights: tuple[int, ...] = SIZES) -> Tree:
    """Return the mean of models, weighted by samples."""
    states = [model.state_dict() for model in models]
    total = sum(weights)
    return {
        n: sum(w / total * s[n] for s, w in zip(states, weights, strict=True))
        for n in states[0]
    }  # type: ignore[misc]


# --- each method -------------------------------------------------------------------------------------------------


def apfl(folder: Path, given: Mapping[str, Any]) -> list[Any]:
    """Return every client's mixture and share after each round."""
    server, found = network(given["linear"]), []
    personal = [network(given["linear"]) for _ in SIZES]
    shares = [OPTIONS["apfl"]["alpha"]] * len(SIZES)
    with checkout(folder, "fedtorch.components.dataset") as load:
        infer = load("fedtorch.comms.utils.eval")
        update = load("fedtorch.comms.utils.flow_utils").alpha_update
        infer.accuracy = lambda *_, **__: None
        for _ in range(ROUNDS):
            copies = [copy.deepcopy(server) for _ in SIZES]
            for k, (x, y) in enumerate(samples(given)):
                w, v, alpha = copies[k], personal[k], shares[k]
                loss, _ = infer.inference(w, cross_entropy, (1,), x, y)
                step = torch.autograd.grad(loss, list(w.parameters()))
                w.zero_grad()
                v.zero_grad()
                loss, _ = infer.inference_personal(
                    v, w, alpha, cross_entropy, (1,), x, y
                )
                loss.backward()
                moves = [p.grad.clone() for p in v.parameters()]
                for p, q in zip(w.parameters(), v.parameters(), strict=True):
                    p.grad += q.grad  # (1 - alpha) grad f + alpha grad f
                    q.grad = p.grad.clone()
                shares[k] = float(update(w, v, alpha, LR)) + LR * 0.02 * alpha
                with torch.no_grad():
                    for p, g in zip(
                        [*w.parameters(), *v.parameters()], [*step, *moves], strict=True
                    ):
                        p -= LR * g
            server.load_state_dict(mean(copies))
            found.append({"alpha": list(shares), "models": listed([
                {n: a * v.state_dict()[n] + (1 - a) * t for n, t in server.state_dict().items()}
                for a, v in zip(shares, personal, strict=True)
            ])})  # fmt: skip
    return found


def fedala(folder: Path, given: Mapping[str, Any]) -> list[Any]:
    """Return every client's model after each round."""
    server, own, found = (
        network(given["weights"]),
        [network(given["weights"]) for _ in SIZES],
        [],
    )
    data = samples(given)
    with checkout(folder / "system") as load:
        kind = load("utils.ALA").ALA
        learners = [
            kind(
                k,
                nn.CrossEntropyLoss(),
                list(zip(x, y, strict=True)),
                len(y),
                100,
                1,
                OPTIONS["fedala"]["rate"],
            )
            for k, (x, y) in enumerate(data)
        ]
        for _ in range(ROUNDS):
            for learner, model, (x, y) in zip(learners, own, data, strict=True):
                learner.adaptive_local_aggregation(server, model)
                optimizer = torch.optim.SGD(model.parameters(), lr=LR)
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
            server.load_state_dict(mean(own))
            found.append({"models": listed([model.state_dict() for model in own])})
    return found


def mr_mtl(folder: Path, given: Mapping[str, Any]) -> list[Any]:
    """Return every client's model after each round."""
    data, found = [(x.numpy(), y.numpy()) for x, y in samples(given)], []
    weights = {
        name: np.array(value, dtype=np.float32)
        for name, value in given["weights"].items()
    }
    with checkout(folder, "tensorflow_privacy", "filelock") as load:
        haiku, jax = importlib.import_module("haiku"), importlib.import_module("jax")
        load("model_utils").mnist_model_fn = lambda inputs: haiku.Sequential([
            haiku.Linear(5, with_bias=False, name="fc1"), jax.nn.relu, haiku.Linear(3, with_bias=False, name="fc"),
        ])(inputs)  # fmt: skip
        load("dp_accounting").compute_silo_noise_mults = lambda count, *_: [0.0] * count
        asked = {
            "seed": 0, "lambda": OPTIONS["mr_mtl"]["lam"], "num_rounds": ROUNDS - 1, "inner_mode": "epoch",
            "inner_epochs": 1, "inner_iters": 1, "learning_rate": LR, "l2_reg": 0.0, "dataset": "rotated_mnist",
            "ex_clip": 0.0, "num_clusters": 1, "unweighted_updates": False, "batch_size": -1, "example_dp": False,
            "trainer": "mrmtl", "repeat": 2, "eval_every": 1,
        }  # fmt: skip
        both = [x for x, _ in data], [y for _, y in data]
        trainer = load("trainers.mrmtl").MRMTL(asked, (*both, *both))
        start = {
            name.partition(".")[0]: {"w": jax.numpy.asarray(value.T)}
            for name, value in weights.items()
        }
        trainer.model = trainer.model._replace(init=lambda *_: start)

        def scored(models: list[Any], _: int) -> tuple[float, float]:
            trees = [
                {
                    f"{n}.weight": torch.tensor(np.array(t["w"]).T)
                    for n, t in each.items()
                }
                for each in models
            ]
            found.append({"models": listed(trees)})
            return 0.0, 0.0

        trainer.eval = scored
        trainer.train()
    return found


def main(folder: Path) -> None:
    """Write the table."""
    given = json.loads(json.dumps(inputs()))
    table: dict[str, Any] = {"inputs": given, "algorithms": {}}
    for make in (apfl, fedala, mr_mtl):
        name = make.__name__
        repository = COMMITS[name].partition("/")[2].partition("@")[0]
        table["algorithms"][name] = {
            "code": COMMITS[name], "corrected": CORRECTED[name], "options": OPTIONS[name],
            "outputs": make((folder / repository).resolve(), given),
        }  # fmt: skip
    text = json.dumps(table)
    TABLE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
