"""Rows, pooled features and read pages that several tests of pictures need."""

from html.parser import HTMLParser
from itertools import combinations, product

import numpy as np

from diagnostics.representation.embedding import Pool
from fl_core import rows as schema
from fl_core.layers import Layer
from fl_core.plan import Evidence, LayerPlan
from tests.made import separated

HOSPITALS = {"Cleveland": 193, "Hungarian": 167, "Switzerland": 29, "VA": 83}


LAYERS = ["fc1", "fc2", "fc3", "fc4"]


def diagnosis():
    """Rows as a diagnosis gives them, with different values for every client and layer."""
    lines = []

    def add(metric, variant, value, **columns):
        lines.append(schema.row(metric, value, variant=variant, **columns))

    for (c, (client, n)), (k, layer) in product(
        enumerate(HOSPITALS.items()), enumerate(LAYERS)
    ):
        at = {"client": client, "layer": layer, "n_train": n}
        add("grad_variance", "epoch", 1e-6 * (c + 1) * 5**k, stderr=0.0, **at)
        add("grad_variance", "batch", 2e-6 * (c + 1) * 5**k, stderr=1e-7, **at)
        add("hessian_trace", "per_parameter", 0.01 * (c + k + 1), stderr=1e-3, **at)
        add("hessian_trace", "absolute", 5.0 * (c + k + 1), stderr=0.0, **at)
        add("federation_sensitivity", "after", 1 + k * (c + 1) / 2, **at)
        add("federation_sensitivity", "importance", 1e-9 * (k + 1), **at)
    for k, layer in enumerate(LAYERS):
        add("federation_sensitivity", "after", 1.0 + k, layer=layer)
        for (a, one), (b, other) in combinations(enumerate(HOSPITALS), 2):
            pair = {"client": one, "client_b": other, "layer": layer}
            add("cka", "flatten", 1 - 0.01 * (k + 1) * (a + b), **pair)
    return schema.frame(lines)


def decision(names, cut, **why):
    layers = tuple(Layer(name, (f"{name}.weight",)) for name in names)
    return LayerPlan.prefix(layers, cut, Evidence(**why))


def results():
    """Scores of runs; FedAvg has only a global model, Local only a personal one."""
    recorded = []
    only = {"fedavg": ["global"], "local": ["personal"]}
    for (a, algorithm), seed, rnd in product(
        enumerate(("local", "fedavg", "player_fl")), range(2), (0, 5, 10)
    ):
        run = {"run": f"{algorithm}-{seed}", "algorithm": algorithm, "seed": seed}
        for c, (client, n) in enumerate(HOSPITALS.items()):
            for model in only.get(algorithm, ["global", "personal"]):
                value = 0.1 + 0.05 * a + 0.02 * rnd + 0.01 * c + 0.03 * seed
                value -= 0.05 * (model == "global")
                at = {"round": rnd, "model": model, "split": "test"}
                at |= {"client": client, "n_train": n, **run}
                recorded.append(schema.row("macro_f1", value, **at))
    return schema.frame(recorded)


def pair(n=30, seed=0):
    """Samples of three classes, and their labels."""
    return separated(n, 4, 1.2, seed)


def parted(n=60, d=8):
    """Three classes far apart, two clients that do not differ."""
    rng = np.random.default_rng(0)
    y = np.arange(n) % 3
    x = rng.normal(size=(n, d)) + 20.0 * np.eye(3, d)[y]
    clients = np.array(["a", "b"], dtype=object)[(np.arange(n) // 3) % 2]
    return Pool(x, np.array(list("pqr"), dtype=object)[y], clients, np.arange(n))


VOID = {"meta", "img", "br"}


class Tree(HTMLParser):
    """Checks that tags close in order, and keeps tags with their attributes and the visible text."""

    def __init__(self, html):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.seen: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.seen.append(data)

    @property
    def text(self):
        return " ".join("".join(self.seen).split())

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]
