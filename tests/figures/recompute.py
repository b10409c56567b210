"""Recomputes the scorecard's decided numbers from figures/rows a second time, with numpy, pandas and scipy alone.

Nothing here is imported from the package that draws the figures, so that an error there is not repeated here.
``python tests/figures/recompute.py`` prints each line that is covered with its numbers.
"""

import math
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import ndtri, stdtrit
from scipy.stats import friedmanchisquare, spearmanr, studentized_range

ROWS = Path(__file__).resolve().parents[2] / "figures" / "rows"
LINES = {}
"""Lines of the scorecard that are covered, each with what gives its numbers as text."""


def covers(line):
    """Register what recomputes a line."""

    def keep(function):
        LINES[line] = function
        return function

    return keep


@cache
def rows(study, runs="*"):
    """Return the rows of a study's runs."""
    frame = pd.read_parquet(ROWS / f"{study}.parquet")
    return frame[frame["run"].map(lambda run: fnmatchcase(run, runs))].reset_index(
        drop=True
    )


def interval(
    values,
    level=0.95,
    factor=100,
    digits=1,
):
    """Return a mean with half its t interval, as text."""
    x = factor * np.asarray(values, dtype=float)
    x = x[~np.isnan(x)]
    half = stdtrit(len(x) - 1, 0.5 + level / 2) * x.std(ddof=1) / math.sqrt(len(x))
    return f"{x.mean():+.{digits}f} ± {half:.{digits}f}"


def last_three(curves, one, other):
    """Return the differences by seed, each the mean of the last three rounds that both runs have (runs, rounds)."""
    gap = curves.xs(one).sub(curves.xs(other)).dropna(how="all").sort_index()
    return gap[gap.index > 0].tail(3).mean()


# --- differences of accuracies, run by run ---------------------------------------------------------------------

BEFORE = ("global", "personal")


@cache
def accuracies(*studies):
    """Return accuracies, (run, round) x seeds: of the last of these models that a run has in a round."""
    accuracy_rows = pd.concat(map(rows, studies)).query(
        "metric == 'accuracy' and client == '' and variant != 'mean' and model in @BEFORE"
    )
    last = accuracy_rows.sort_values("model").groupby(["run", "seed", "round"]).tail(1)
    return last.pivot(index=["run", "round"], columns="seed", values="value")


def at_the_end(study):
    """Return accuracies of a study of layer scheduling after its last round, 300."""
    return accuracies(study).query("round == 300")


whole = partial(at_the_end, "scheduling.full")
in_hundred = partial(at_the_end, "scheduling.hundred")
CLOSEST = ("local", "fedrep", "fedfomo", "heurpfedla")
RETAINING = [(run, "pfedla") for run in ("heurpfedla", "heurpfedla_2", "heurpfedla_3")]
before = partial(accuracies, "algorithms.pfedla_overlap", "pfedla.methods")
six = partial(accuracies, "pfedla.fig1")
thawed, heads = (
    partial(accuracies, "scheduling.thawing"),
    partial(accuracies, "scheduling.heads"),
)
TINY = "tiny_imagenet"
OVER_HEADS = [
    (f"cifar10.anti_{below}", f"cifar10.{below}")
    for below in ("fedavg", "fedper", "fedrep", "fedrod")
]
HUNDRED = [
    (f"cifar100.{ours}", f"cifar100.{below}")
    for ours, below in (
        ("vanilla", "fedper"),
        ("vanilla", "fedbabu"),
        ("anti", "fedper"),
    )
]
DIFFERENCES = {
    "pfedla.mixture_over_local": (before, [("pfedla", "local")], {}),
    "pfedla.mixture_over_fedavg": (before, [("pfedla", "fedavg")], {}),
    "pfedla.best_before": (before, [("pfedla", other) for other in CLOSEST], {}),
    "pfedla.layers_over_models": (six, [("pfedla", "by_model")], {}),
    "pfedla.retaining_before": (before, RETAINING, {}),
    "scheduling.anti_best": (thawed, [(f"{TINY}.anti", f"{TINY}.{other}") for other in ("fedbabu", "fedper")], {}),
    "scheduling.anti_over_babu_tiny": (thawed, [(f"{TINY}.anti", f"{TINY}.fedbabu")], {}),
    "scheduling.early_thawing": (thawed, [(f"{TINY}.{way}_early", f"{TINY}.{way}") for way in ("vanilla", "anti")], {}),
    "scheduling.timing_matters_little": (thawed, [(f"{TINY}.vanilla_early", f"{TINY}.vanilla")], {"level": 0.9}),
    "scheduling.vanilla_no_loss_tiny": (thawed, [(f"{TINY}.vanilla", f"{TINY}.fedbabu")], {"level": 0.9}),
    "pfedla.one_layer_costs_little": (before, [("pfedla", "heurpfedla")], {}),
    "pfedla.number_retained": (before, [(f"heurpfedla_{k}", "heurpfedla") for k in (2, 3)], {"level": 0.9}),
    "scheduling.anti_over_fedbabu": (whole, [("cifar10.anti", "cifar10.fedbabu")], {}),
    "scheduling.vanilla_no_loss": (whole, [("cifar10.vanilla", "cifar10.fedbabu")], {"level": 0.9}),
    "scheduling.best_cifar100": (in_hundred, HUNDRED, {}),
    "scheduling.anti_over_heads": (heads, OVER_HEADS, {}),
    "scheduling.no_gain_over_heads": (heads, OVER_HEADS, {"level": 0.9}),
}  # fmt: skip
"""By line the curves, the pairs of runs that it compares, and how their interval is written."""


def differences(line):
    curves, pairs, how = DIFFERENCES[line]
    return [interval(last_three(curves(), *pair), **how) for pair in pairs]


LINES |= {line: partial(differences, line) for line in DIFFERENCES}


# --- pFedLA and layer scheduling -------------------------------------------------------------------------------


@covers("pfedla.weights_follow_classes")
def weights_follow_classes():
    correlations = rows("algorithms.pfedla_overlap", "pfedla").query(
        "metric == 'overlap_correlation' and variant == 'pearson' and layer == ''"
    )
    table = correlations.pivot_table(
        index="round", columns="seed", values="value"
    ).sort_index()
    return [interval(table.tail(3).mean(), factor=1, digits=2)]


@covers("pfedla.itself_most")
def itself_most():
    frame = rows("algorithms.pfedla_overlap", "pfedla")
    last = frame[(frame["round"] == frame["round"].max()) & (frame["layer"] != "")]
    pairs = last.query("metric == 'aggregation_weight' and seed == 0")
    tables = [
        part.pivot(index="client", columns="client_b", values="value")
        for _, part in pairs.groupby("layer")
    ]
    first = any(
        float(np.diag(table).min()) > 0 and (table.max(axis=1) == np.diag(table)).all()
        for table in tables
    )
    later = (
        last[last["metric"] == "self_weight_largest"].groupby("seed")["value"].max()
        == 1
    )
    later = later.drop(0, errors="ignore")
    return [f"in {int(first) + int(later.sum())} of {1 + len(later)} seeds"]


@covers("scheduling.early_rounds")
def early_rounds():
    accuracy_rows = rows("scheduling.thawing").query(
        "metric == 'accuracy' and client == '' and variant == 'pooled' and model == 'global'"
    )
    frozen = accuracy_rows[
        (accuracy_rows["round"] > 0) & (accuracy_rows["round"] <= 200)
    ]
    means = frozen.groupby(["run", "seed"])["value"].mean().unstack("seed")
    rival = means.loc[f"{TINY}.fedbabu"]
    return [interval(means.loc[f"{TINY}.{way}"] - rival) for way in ("vanilla", "anti")]


WEIGHTS = {"conv1": 25 * 32, "conv2": 25 * 32 * 64, "fc1": 1024 * 512, "fc2": 512 * 10}
BIASES = {"conv1": 32, "conv2": 64, "fc1": 512, "fc2": 10}
PLACES = {"conv1": 24 * 24, "conv2": 8 * 8, "fc1": 1, "fc2": 1}
"""Of the network for MNIST: positions at which a layer's weights are used."""
THIRDS = {
    "FedAvg": [list(WEIGHTS)] * 3,
    "FedBABU": [["conv1", "conv2", "fc1"]] * 3,
    "Vanilla": [["conv1"], ["conv1", "conv2"], ["conv1", "conv2", "fc1"]],
    "Anti": [["fc1"], ["conv2", "fc1"], ["conv1", "conv2", "fc1"]],
}
"""Layers that train in each third of the rounds."""


def of_fedavg(cost):
    """Return the costs of a run by what its layers cost in a round, over FedAvg's."""
    totals = {name: sum(map(cost, thirds)) for name, thirds in THIRDS.items()}
    whole = totals.pop("FedAvg")
    return [f"{name} {total / whole:.3f}" for name, total in totals.items()]


@covers("scheduling.vanilla_fewest_bytes")
@covers("scheduling.vanilla_fewest_parameters")
def parameters_that_train():
    return of_fedavg(
        lambda layers: sum(WEIGHTS[layer] + BIASES[layer] for layer in layers)
    )


@covers("scheduling.vanilla_fewest_operations")
def operations():
    products = {layer: WEIGHTS[layer] * PLACES[layer] for layer in WEIGHTS}
    order = list(products)

    def cost(layers):
        above = order[order.index(layers[0]) + 1 :]  # whose inputs get a gradient
        return sum(products.values()) + sum(
            products[layer] for layer in (*layers, *above)
        )

    return of_fedavg(cost)


# --- PLayer-FL -------------------------------------------------------------------------------------------------

TITLES = {
    "fashion_mnist": "Fashion-MNIST",
    "fed_isic": "Fed-ISIC",
    "heart": "Fed-Heart",
}


@cache
def tuned(dataset):
    """Return macro-F1 of each client's personal model, or of the global one: (seed, client) x methods."""
    frame = rows("player_fl.tuned", f"{dataset}.*").query("metric == 'macro_f1'")
    frame = frame.assign(method=frame["run"].str.split(".").str[1])
    best_rows = frame.query("model != 'local' or method == 'local'")
    best_rows = (
        best_rows.sort_values("model").groupby(["method", "seed", "client"]).tail(1)
    )  # global < local < personal
    return best_rows.pivot(index=["seed", "client"], columns="method", values="value")


def weights(dataset):
    frame = rows("player_fl.tuned", f"{dataset}.local")
    return frame.groupby(["seed", "client"])["n_train"].first().astype(float)


@cache
def by_seed(dataset):
    """Return the clients' mean by training samples, seeds x methods."""
    values, share = tuned(dataset), weights(dataset)
    share = share.reindex(values.index)
    return (
        values.mul(share, axis=0)
        .groupby(level="seed")
        .sum()
        .div(share.groupby(level="seed").sum(), axis=0)
    )


def leads(reference):
    return [
        f"{TITLES[data]} {interval(by_seed(data)['playerfl'] - by_seed(data)[reference])}"
        for data in TITLES
    ]


@covers("player_fl.fewer_losers")
def fewer_losers():
    shares = []
    for data, title in TITLES.items():
        values = tuned(data)
        lost = values.lt(values["local"], axis=0).groupby(level="seed").mean()
        apart = ["local", "playerfl", "playerfl_minus", "playerfl_plus"]
        others = lost.drop(columns=apart).mean(axis=1)
        shares.append(f"{title} {interval(lost['playerfl'] - others)}")
    return shares


LINES["player_fl.above_fedavg"] = partial(leads, "fedavg")
LINES["player_fl.above_local"] = partial(leads, "local")
LINES["player_fl.over_random"] = partial(leads, "playerfl_random")


def layers(metric, variant, data="fashion_mnist", moment="first"):
    """Return each seed's curves of a network at a moment, layers x clients, over their first layer."""
    layer_rows = rows("player_fl.layers", f"{data}-{moment}").query(
        "metric == @metric and variant == @variant and client != ''"
    )
    order = list(dict.fromkeys(layer_rows["layer"]))
    return {
        int(seed): part.pivot(index="layer", columns="client", values="value")
        .loc[order]
        .pipe(lambda t: t / t.iloc[0])
        for seed, part in layer_rows.groupby("seed")
    }


def seeds_that_hold(curves, holds):
    return [
        f"in {sum(bool(holds(table.median(axis=1))) for table in curves.values())} of {len(curves)} seeds"
    ]


def far(curve):
    return bool(curve["fc1"] >= 10 * curve.min() and curve["fc2"] >= 100 * curve.min())


@covers("player_fl.gradient_variance")
def gradient_variance():
    return seeds_that_hold(layers("grad_variance", "epoch"), far)


@covers("player_fl.curvature")
def curvature():
    return seeds_that_hold(layers("hessian_trace", "per_parameter"), far)


NETWORKS = {
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "fed_isic": "Fed-ISIC",
    "heart": "Fed-Heart",
    "airline_tweets": "airline tweets",
}


@covers("player_fl.sensitivity_spike")
def sensitivity_spike():
    texts = []
    for data, title in NETWORKS.items():
        curves = layers("federation_sensitivity", "training", data)
        (text,) = seeds_that_hold(curves, late_step)
        texts.append(f"{title} {text}".removesuffix(" seeds"))
    return texts


def late_step(curve):
    steps = curve.to_numpy()[1:] / curve.to_numpy()[:-1]
    return bool(2 * (1 + steps.argmax()) >= len(curve))


CONVOLUTIONS = {
    "fashion_mnist": ("Fashion-MNIST", "conv3"),
    "cifar10": ("CIFAR-10", "conv5"),
}


def rises_late(data, last, moment):
    """Return in how many seeds 1 - CKA rises most in the dense layers, and the number of seeds."""
    own = rows("player_fl.layers", f"{data}-{moment}").query(
        "metric == 'cka' and client_b != ''"
    )
    swapped = {"client": "client_b", "client_b": "client"}
    both = pd.concat([own, own.rename(columns=swapped)])
    count, seeds, order = 0, both.groupby("seed"), list(own["layer"].unique())
    for _, part in seeds:
        table = part.pivot_table(index="layer", columns="client", values="value")
        apart = (1 - table.loc[order]).median(axis=1)
        conv, dense = apart[:last], apart[last:][1:]
        late, early = dense.iloc[-1] - conv.iloc[-1], conv.iloc[-1] - conv.iloc[0]
        count += bool(dense.min() > conv.max() and late > early)
    return count, len(seeds)


@covers("player_fl.representations")
def representations():
    lines = []
    for data, (title, last) in CONVOLUTIONS.items():
        count, seeds = rises_late(data, last, "first")
        lines.append(f"{title} in {count} of {seeds} seeds")
    return lines


def last_largest(curve):
    return curve.idxmax() == curve.index[-1]


@covers("player_fl.retained")
def retained():
    """Count the parts of the comparable networks whose Wilson interval lies above one half."""
    counts = []
    for moment in ("independent", "federated"):
        counts.append(rises_late("fashion_mnist", "conv3", moment))
        for data, holds in (("fashion_mnist", far), ("heart", last_largest)):
            for metric, variant, asked in (
                ("grad_variance", "epoch", holds),
                ("hessian_trace", "per_parameter", holds),
                ("federation_sensitivity", "after", late_step),
            ):
                curves = layers(metric, variant, data, moment)
                held = [asked(table.median(axis=1)) for table in curves.values()]
                counts.append((sum(map(bool, held)), len(held)))
    z, there = ndtri(0.975), 0
    for count, n in counts:
        centre, half = (
            (count + z**2 / 2) / (n + z**2),
            z * math.sqrt(count * (n - count) / n + z**2 / 4) / (n + z**2),
        )
        there += centre - half > 0.5
    return [f"{there} of {len(counts)} comparable parts"]


@covers("player_fl.correlates")
def correlates():
    frame, correlations = rows("player_fl.layers", "cifar10-first"), []
    for _, part in frame[frame["client"] != ""].groupby("seed"):
        curves = [
            part.query("metric == @metric and variant == @variant")
            .pivot(index="layer", columns="client", values="value")
            .median(axis=1)
            for metric, variant in (
                ("federation_sensitivity", "training"),
                ("grad_variance", "epoch"),
            )
        ]
        correlations.append(
            spearmanr(*pd.concat(curves, axis=1).T.to_numpy()).statistic
        )
    return [f"CIFAR-10 {np.mean(correlations):+.2f}"]


PRINTED = pd.read_csv(ROWS.parent / "published" / "player_fl.csv")


def friedman_p(place):
    """Return the p of Friedman's test of the methods of a printed table."""
    cells = PRINTED[PRINTED["place"] == place].dropna(subset=["dataset", "value"])
    table = cells.pivot(index="method", columns="dataset", values="value")
    return friedmanchisquare(*table.rank().to_numpy()).pvalue


@covers("player_fl.significant")
def significant():
    """Count Nemenyi's pairs of PLayer-FL: the tail of the studentized range of its distances in mean rank."""
    cells = PRINTED[PRINTED["place"] == "Table 1"].dropna(subset=["dataset", "value"])
    table = cells.pivot(index="method", columns="dataset", values="value")
    ranks = table.rank(ascending=False).mean(axis=1)
    k, n = table.shape
    apart = (ranks - ranks["playerfl"]).abs() / math.sqrt(k * (k + 1) / (6 * n))
    p = studentized_range.sf(apart * math.sqrt(2), k, math.inf)
    count = int((p <= 0.05).sum())
    return [f"from {count} of {k - 1} methods", f"p = {friedman_p('Table 1'):.2g}"]


@covers("player_fl.significant_appendix")
def significant_appendix():
    printed = PRINTED[PRINTED["quantity"] == "friedman p"]
    printed = printed[printed[["value", "high"]].min(axis=1) <= 0.05]["place"]
    return [
        f"{sum(friedman_p(place) < 0.05 for place in printed)} of {len(printed)} tables"
    ]


# --- FedPFT ---------------------------------------------------------------------------------------------------


OWN_WAY, NEW, MAPPED = "origin_accuracy", "probe_accuracy", "match_accuracy"
OTHERS = {"fedper": "FedPer", "fedbn": "FedBN", "fedcac": "FedCAC"}
ALL = {"fedavg": "FedAvg", **OTHERS}


@cache
def after_80_rounds(run, metric):
    """Return means over clients and the last three evaluations, by seed."""
    frame = rows("fedpft.longer", run)
    metric_rows = frame[(frame["metric"] == metric) & (frame["variant"] == "")]
    means = metric_rows.groupby(["round", "seed"])["value"].mean().unstack("seed")
    return means.sort_index().tail(3).mean()


def fedpft_leads(run, ours, others, theirs, level=0.95):
    gaps = {
        name: after_80_rounds(run, ours) - after_80_rounds(other, theirs)
        for other, name in others.items()
    }
    return [f"{name} {interval(gap, level)}".strip() for name, gap in gaps.items()]


LINES |= {
    "fedpft.best": partial(fedpft_leads, "fedpft", OWN_WAY, ALL, OWN_WAY),
    "fedpft.no_contrast": partial(fedpft_leads, "no_contrast", OWN_WAY, ALL, OWN_WAY, 0.9),
    "fedpft.matched": partial(fedpft_leads, "fedpft", NEW, {"fedpft": ""}, OWN_WAY, 0.9),
    "fedpft.no_contrast_matched": partial(fedpft_leads, "no_contrast", NEW, {"no_contrast": ""}, OWN_WAY, 0.9),
    "fedpft.fedavg_extractor": partial(fedpft_leads, "fedavg", NEW, OTHERS, NEW),
    "fedpft.fedavg_linear_map": partial(fedpft_leads, "fedavg", MAPPED, OTHERS, OWN_WAY),
}  # fmt: skip


@covers("fedpft.modules_sent")
def modules_sent():
    widths, norms = [64, 64, 128, 256, 512], [64, 64, 64]
    extractor, counts = 3 * 64 * 49, {}
    for below, width in pairwise(widths):
        extractor += 9 * width * (below + width) + (
            below * width if below != width else 0
        )
        norms += [width] * 3 if below != width else []
        numbers = (
            extractor + 4 * sum(norms) + len(norms)
        )  # weight, bias, running mean and variance, and a counter
        counts[width] = [
            numbers,
            4 * (width**2 + width),
            100 * width + 100,
            128 * width + 128,
        ]
    frame = pd.read_csv(ROWS.parent / "published" / "fedpft.csv")
    cells = frame[(frame["place"] == "Table 10") & frame["method"].isna()]
    printed = cells.groupby("model", sort=False)["note"].apply(list)
    agree = 0
    for model, width in (("resnet8", 256), ("resnet10", 512)):
        for note, count in zip(printed[model], counts[width], strict=True):
            text = note.partition("printed ")[2].partition(" ")[0].rstrip(";,.")
            digits = len(text[:-1].partition(".")[2])
            agree += f"{count / {'K': 1e3, 'M': 1e6}[text[-1]]:.{digits}f}" == text[:-1]
    return [f"{agree} of 8 agree"]


@covers("fedpft.prompt_kinds")
def prompt_kinds():
    frame = rows("fedpft.insides", "fedpft")
    table = frame[frame["metric"] == "purity_client"].pivot(
        index="layer", columns="seed", values="value"
    )
    means = table.mean(axis=1)
    names = {
        "classification prompts": "prompts",
        "contrastive prompts": "contrast_prompts",
    }
    gap = table.loc["prompts"] - table.loc["contrast_prompts"]
    return [
        *(f"{words} {means[layer]:.3g}" for words, layer in names.items()),
        f"difference {interval(gap, factor=1, digits=2)}",
    ]


@covers("fedpft.class_separation")
def class_separation():
    frame = rows("fedpft.separation")
    table = frame[frame["metric"] == "silhouette_class"].pivot(
        index="run", columns="seed", values="value"
    )
    means = table.mean(axis=1)
    gap = interval(table.loc["no_contrast"] - table.loc["fedavg"], factor=1, digits=2)
    return [
        f"FedPFT w/o contrast {means['no_contrast']:.3g}, FedAvg {means['fedavg']:.3g}, difference {gap}"
    ]


def apart(metric):
    frame = rows("fedpft.apart")
    table = frame[frame["metric"] == metric].pivot(
        index="run", columns="seed", values="value"
    )
    means = table.mean(axis=1)
    gap = interval(table.loc["no_contrast"] - table.loc["fedavg"], factor=1, digits=2)
    return [
        f"FedPFT w/o contrast {means['no_contrast']:.3g}, FedAvg {means['fedavg']:.3g}, difference {gap}"
    ]


LINES["fedpft.classes_within"] = partial(apart, "silhouette_within")
LINES["fedpft.classes_across"] = partial(apart, "silhouette_across")


@covers("fedpft.partial")
def partial_participation():
    """Compare each share of the clients with all of them, whose run is another study's, after the last round."""
    some = rows("fedpft.partial").groupby(["run", "seed"])["value"].mean()
    whole = rows("fedpft.insides", "fedpft").query(
        "metric == 'accuracy' and model == 'personal' and client != '' and split == 'test'"
    )
    whole = whole.groupby("seed")["value"].mean()
    return [
        f"{100 * share:.0f} % of the clients {interval((some[f'share_{share}'] - whole).dropna(), 0.9)}"
        for share in (0.9, 0.7, 0.5)
    ]


@covers("fedra.dinov2")
def from_dinov2():
    means = rows("fedra.dinov2").query("metric == 'accuracy' and client == ''")
    curves = means.pivot(index=["run", "round"], columns="seed", values="value")
    return [
        f"{title} {interval(last_three(curves, 'fedra', below))}"
        for title, below in (("InclusiveFL", "inclusivefl"), ("DepthFL", "depthfl"))
    ]


@covers("fedpft.two_stages")
def two_stages():
    means = rows("fedpft.two_stages").groupby(["run", "seed"])["value"].mean()
    return [f"Two-stage {interval(means['fedpft'] - means['two_stage'])}"]


if __name__ == "__main__":
    for name, function in LINES.items():
        print(f"{name}: {'; '.join(function())}")
