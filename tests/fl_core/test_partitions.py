"""Partitions: who gets which sample, as a function of labels, parameters and seed alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fl_core.data.partitions import (
    PARTITIONS,
    SPLITS,
    Partition,
    Partitioning,
    Pool,
    check_shares,
    general,
    make,
    partition,
    split_sizes,
)
from fl_core.data.partitions.base import follow
from fl_core.data.sources import Source
from fl_core.errors import UsageError

LABELS = np.arange(600) * 7 % 10


def source(labels=LABELS, owner=None, is_train=None, **fields):
    y = np.asarray(labels, dtype=np.int64)
    x = np.arange(len(y) * 2, dtype=np.float32).reshape(-1, 2)
    names = (
        tuple(f"site {k}" for k in range(owner.max() + 1)) if owner is not None else ()
    )
    classes = tuple("abcdefghij"[: int(y.max()) + 1])
    return Source("toy", x, y, classes, owner, names, is_train, **fields)


def parts_of(kind, labels, clients, seed=0, owner=None, min_size=None, **options):
    """Each client's positions in a pool, if asked with another least size of a client."""
    member = PARTITIONS[kind]
    if min_size is not None:
        member = type(kind, (member,), {"min_size": min_size})
    names = () if owner is None else tuple("abc"[: owner.max() + 1])
    pool = Pool("toy", labels, owner, names)
    return member(**options).fitted(pool, clients).assign(pool, clients, seed)


DEALERS = {
    "iid": lambda labels: {},
    "dirichlet": lambda labels: {"alpha": 0.5, "min_size": 1},
    "capped_dirichlet": lambda labels: {"alpha": 0.5, "min_size": 1},
    "pathological": lambda labels: {"classes_per_client": 2},
    "non_iid_1": lambda labels: {"classes_per_client": 2, "samples_per_client": 2},
    "non_iid_2": lambda labels: {
        "classes_per_client": 2,
        "samples_per_client": len(set(labels)),
        "dominance": 0.5,
    },
}


def deal(kind, labels, clients, seed):
    return parts_of(kind, labels, clients, seed, **DEALERS[kind](labels))


@pytest.mark.parametrize("kind", DEALERS)
@settings(max_examples=40)
@given(clients=st.integers(1, 8), seed=st.integers(0, 2**40), data=st.data())
def test_no_sample_is_dealt_twice(kind, clients, seed, data):
    labels = np.array(
        data.draw(st.lists(st.integers(0, 4), min_size=80, max_size=160))
        + [0, 1, 2, 3, 4] * 8
    )
    parts = deal(kind, labels, clients, seed)
    again = deal(kind, labels.copy(), clients, seed)
    every = np.concatenate(parts)
    assert len(parts) == clients
    assert min(map(len, parts)) >= 1
    assert len(np.unique(every)) == len(every)
    assert all(
        np.array_equal(a, b) and (np.diff(a) > 0).all()
        for a, b in zip(parts, again, strict=True)
    )
    if kind in ("iid", "dirichlet", "capped_dirichlet"):
        assert np.array_equal(np.sort(every), np.arange(len(labels)))


@pytest.mark.parametrize("kind", DEALERS)
def test_another_seed_deals_otherwise(kind):
    one, two = (deal(kind, LABELS, 5, seed) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("kind", DEALERS)
def test_global_random_state_is_neither_read_nor_moved(kind):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = deal(kind, LABELS, 5, 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(first, deal(kind, LABELS, 5, 3), strict=True)
    )


def test_iid_sizes_differ_by_at_most_one():
    sizes = [len(part) for part in parts_of("iid", LABELS[:98], 5, 0)]
    assert sorted(sizes) == [19, 19, 20, 20, 20]


def test_dirichlet_shares_have_the_mean_and_variance_of_the_distribution():
    # a share of a class is Beta(alpha, alpha (K - 1)): mean 1/K, variance (K - 1) / (K^2 (K alpha + 1))
    clients, alpha, size = 4, 0.5, 20_000
    labels = np.zeros(size, dtype=np.int64)
    draws = [
        parts_of("dirichlet", labels, clients, seed, alpha=alpha, min_size=0)
        for seed in range(400)
    ]
    shares = np.array([[len(part) / size for part in parts] for parts in draws])
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    error = math.sqrt(variance / len(draws))
    assert np.abs(shares.mean(0) - 1 / clients).max() < 4 * error
    assert shares.var(0) == pytest.approx(variance, rel=0.25)


def test_dirichlet_is_drawn_again_until_every_client_has_enough():
    for least in (0, 40):
        deals = [
            parts_of("dirichlet", LABELS, 5, seed, alpha=0.3, min_size=least)
            for seed in range(20)
        ]
        assert (min(len(part) for parts in deals for part in parts) >= 40) == (
            least == 40
        )


@given(clients=st.integers(1, 30), k=st.integers(1, 10), seed=st.integers(0, 1000))
def test_pathological_shares_classes_fairly(clients, k, seed):
    parts = parts_of("pathological", LABELS, clients, seed, classes_per_client=k)
    counts = np.array([np.bincount(LABELS[part], minlength=10) for part in parts])
    assert ((counts > 0).sum(1) == k).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    for label in np.flatnonzero(holders):
        own = counts[:, label][counts[:, label] > 0]
        assert own.sum() == 60
        assert own.max() - own.min() <= 1


def histogram(labels, parts):
    return np.array(
        [np.bincount(labels[part], minlength=labels.max() + 1) for part in parts]
    )


@pytest.mark.parametrize("clients", [10, 100])
@pytest.mark.parametrize(("classes", "few"), [(10, 4), (100, 12)])
def test_non_iid_1_deals_a_whole_pool_in_equal_counts_of_a_few_classes(
    clients, classes, few
):
    labels = np.arange(60_000) % classes
    counts = histogram(
        labels,
        parts_of(
            "non_iid_2",
            labels,
            clients,
            0,
            samples_per_client=600,
            classes_per_client=few,
            dominance=1.0,
        ),
    )
    assert ((counts > 0).sum(1) == few).all()
    assert set(counts[counts > 0]) == {600 // few}
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    assert len({tuple(row > 0) for row in counts}) > min(clients, 90) // 2, (
        "classes are drawn, not dealt in turn"
    )


@pytest.mark.parametrize("clients", [10, 100])
@pytest.mark.parametrize(
    ("classes", "few", "dominance", "own", "others"),
    [
        (10, 2, 0.5, {150}, {37, 38}),
        (10, 2, 0.8, {240}, {15}),
        (100, 6, 0.5, {50}, {3, 4}),
    ],
)
def test_non_iid_2_deals_all_classes_and_a_few_more_than_the_others(
    clients, classes, few, dominance, own, others
):
    labels = np.arange(60_000) % classes
    counts = histogram(
        labels,
        parts_of(
            "non_iid_2",
            labels,
            clients,
            1,
            samples_per_client=600,
            classes_per_client=few,
            dominance=dominance,
        ),
    )
    assert (counts.sum(1) == 600).all()
    ranked = np.sort(counts, axis=1)
    assert set(ranked[:, -few:].ravel()) == own
    assert set(ranked[:, :-few].ravel()) == others
    assert (ranked[:, -few:].sum(1) == dominance * 600).all()


@pytest.mark.parametrize(("kind", "few"), [("non_iid_1", 4), ("non_iid_2", 2)])
def test_pfedlas_partitions_pool_an_official_split_and_divide_each_client_alike(
    kind, few
):
    toy = source(np.arange(9_000) % 10, is_train=np.arange(9_000) < 7_000)
    made = make(toy, kind, clients=12, seed=4)
    wanted = {
        "clients": 12,
        "classes_per_client": few,
        "samples_per_client": 90,
        "splits": [0.56, 0.14, 0.3],
    }
    assert made.params == wanted | ({"dominance": 0.5} if kind == "non_iid_2" else {})
    for splits in made.indices.values():
        assert {name: len(each) for name, each in splits.items()} == {
            "train": 50,
            "validation": 13,
            "test": 27,
        }
    assert any((splits["train"] >= 7_000).any() for splits in made.indices.values())
    assert make(toy, kind, clients=100).params["samples_per_client"] == 90
    own = make(
        toy,
        kind,
        clients=3,
        classes_per_client=3,
        samples_per_client=40,
        splits=(0.5, 0.25, 0.25),
    )
    sizes = {name: len(part) for name, part in own.indices["client_0"].items()}
    assert sizes == {"train": 20, "validation": 10, "test": 10}


OWNER = np.repeat([0, 1, 2], [300, 200, 100])


def dealt(labels, clients, each, few, dominance):
    return lambda: parts_of(
        "non_iid_2",
        labels,
        clients,
        0,
        samples_per_client=each,
        classes_per_client=few,
        dominance=dominance,
    )


def of_alpha(alpha, labels=LABELS, clients=5):
    return lambda: parts_of("dirichlet", labels, clients, 0, alpha=alpha)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (of_alpha(0.001, LABELS[:100], 10), r"alpha=0\.001.*larger alpha"),
        *(
            (of_alpha(alpha), r"alpha .*got")
            for alpha in (0, -1.0, math.nan, math.inf, "0.5", True)
        ),
        (of_alpha(1.0, clients=61), "60"),
        (dealt(LABELS, 5, 40, 11, 1.0), "classes_per_client.*10.*11"),
        (dealt(LABELS, 5, 3, 4, 1.0), "samples_per_client.*4.*3"),
        (dealt(LABELS, 5, 9, 2, 0.5), "samples_per_client.*10.*9"),
        (dealt(LABELS, 5, 40, 2, 1.5), r"dominance.*1\.5"),
        (dealt(LABELS, 5, 40, 2, 0), "dominance.*got 0"),
        (dealt(LABELS, 5, 40, 2, True), "dominance.*True"),
        (dealt(LABELS, 2, 61, 1, 1.0), r"class \d.*61.*60"),
        (
            lambda: parts_of("pathological", LABELS, 5, 0, classes_per_client=11),
            "classes_per_client.*10.*11",
        ),
        (
            lambda: parts_of("pathological", LABELS, 5, 0, classes_per_client=0),
            "classes_per_client.*got 0",
        ),
        (
            lambda: parts_of("pathological", LABELS, 5, 0, classes_per_client=2.0),
            r"classes_per_client.*2\.0",
        ),
        (
            lambda: parts_of(
                "pathological", np.array([0, 1, 1, 1, 1]), 4, 0, classes_per_client=2
            ),
            "class 0.*4.*1",
        ),
        (lambda: parts_of("iid", LABELS, 601, 0), "600"),
        (lambda: parts_of("iid", LABELS, 0, 0), "clients.*got 0"),
        (lambda: parts_of("iid", LABELS, 2.0, 0), r"clients.*2\.0"),
        (
            lambda: parts_of("natural", LABELS[:3], 3, owner=np.array([0, 0, 2])),
            r"samples.*\bb\b",
        ),
        *(
            (lambda n=n: split_sizes("va", n, (0.64, 0.16, 0.2)), f"got {n} at 'va'")
            for n in range(3)
        ),
        (lambda: check_shares((0.8, 0.2)), r"splits.*0\.8, 0\.2"),
        (lambda: check_shares((0.8, 0.0, 0.2)), r"splits.*0\.8, 0\.0"),
        (lambda: check_shares((0.8, 0.3, 0.2)), r"splits.*0\.8, 0\.3"),
        (lambda: check_shares((1.2, -0.4, 0.2)), r"splits.*-0\.4"),
        (lambda: check_shares((math.nan, 0.5, 0.5)), "splits.*nan"),
        (lambda: make(source(), "natural"), "natural.*dirichlet, dirichlet"),
        (lambda: make(source(owner=OWNER), "natural", clients=2), r"clients.*\b3\b"),
        (lambda: make(source(), "iid"), "clients.*'iid'"),
        (lambda: make(source(), "dirichlt", clients=3), "'dirichlet'"),
        (lambda: make(source(), "iid", clients=300), "got 2 at 'client_000'"),
        (
            lambda: make(source(is_train=np.arange(600) != 7), "iid", clients=2),
            "official test",
        ),
        (lambda: Partition.from_tree({}), "stored partition"),
        (
            lambda: Partition.from_tree(
                {"meta": torch.tensor([1, 2], dtype=torch.uint8)}
            ),
            "stored partition",
        ),
    ],
)
def test_what_cannot_be_dealt_is_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()


@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=6), n=st.integers(0, 90)
)
def test_test_samples_follow_the_training_proportions(counts, n):
    train = [np.zeros(count, dtype=np.int64) for count in counts]
    parts = follow(train, np.zeros(n, dtype=np.int64), seed=1)
    assert [len(part) for part in parts] == [len(np.unique(part)) for part in parts]
    if sum(counts):
        assert sum(map(len, parts)) == n
        for count, part in zip(counts, parts, strict=True):
            assert abs(len(part) - n * count / sum(counts)) <= 1
    else:
        assert sum(map(len, parts)) == 0


@pytest.mark.parametrize(
    "sizes", [[193, 49, 61], [166, 42, 53], [28, 8, 10], [83, 21, 26]]
)
def test_split_sizes_of_the_four_hospitals(sizes):
    # scikit-learn's train_test_split twice, as the paper does: test 20 %, then 20 % of the rest, both rounded up
    from sklearn.model_selection import train_test_split

    rest, test = train_test_split(range(n := sum(sizes)), test_size=0.2)
    train, validation = train_test_split(rest, test_size=0.2)
    assert (
        split_sizes("a", n, (0.64, 0.16, 0.20))
        == sizes
        == [len(train), len(validation), len(test)]
    )


@given(n=st.integers(3, 3000), a=st.floats(0.01, 0.98), b=st.floats(0.01, 0.98))
def test_split_sizes_are_positive_and_complete(n, a, b):
    total = a + b + 0.5
    shares = (a / total, b / total, 0.5 / total)
    sizes = split_sizes("a", n, shares)
    assert min(sizes) >= 1
    assert sum(sizes) == n
    assert all(
        abs(size - n * share) <= 2 for size, share in zip(sizes, shares, strict=True)
    )


@pytest.mark.parametrize(
    ("kind", "clients"),
    [("iid", 4), ("dirichlet", 4), ("pathological", 5), ("natural", None)],
)
@pytest.mark.parametrize("official", [False, True])
def test_made_partitions_hold_every_sample_once(kind, clients, official):
    is_train = np.arange(600) // 10 % 5 != 0 if official else None
    toy = source(owner=OWNER, is_train=is_train)
    made = make(toy, kind, clients=clients, seed=5)
    made.check(toy)
    every = np.concatenate(
        [made.indices[name][split] for name in made.names for split in SPLITS]
    )
    assert np.array_equal(np.sort(every), np.arange(600))
    assert all(
        made.indices[name][split].dtype == np.int64
        for name in made.names
        for split in SPLITS
    )
    if official:
        tests = np.concatenate([made.indices[name]["test"] for name in made.names])
        assert not is_train[tests].any()
        assert is_train.sum() == 600 - len(tests)
    for splits in made.indices.values():
        size = sum(map(len, splits.values()))
        assert len(splits["validation"]) == math.ceil(
            0.2 * (size - len(splits["test"]))
        )


def test_natural_clients_keep_their_own_official_test_samples():
    toy = source(owner=OWNER, is_train=np.arange(600) % 5 != 0)
    made = make(toy, "natural")
    assert made.names == ("site 0", "site 1", "site 2")
    for number, name in enumerate(made.names):
        assert np.array_equal(
            made.indices[name]["test"],
            np.flatnonzero((number == OWNER) & ~toy.is_train),
        )


def domains(sizes=(300, 200, 100)):
    return np.repeat(np.arange(len(sizes)), sizes)[
        np.random.default_rng(0).permutation(sum(sizes))
    ]


@given(
    alpha=st.sampled_from([0.1, 0.5, 5.0, 1e-300, 1e300]),
    each=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_feature_and_label_skew_keeps_every_sample_with_its_owner(alpha, each, seed):
    owner = domains()
    parts = parts_of("natural_dirichlet", LABELS, 3 * each, seed, owner, 0, alpha=alpha)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(600))
    assert [
        set(owner[part]) <= {number // each} for number, part in enumerate(parts)
    ] == [True] * 3 * each
    again = parts_of(
        "natural_dirichlet", LABELS.copy(), 3 * each, seed, owner.copy(), 0, alpha=alpha
    )
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_feature_and_label_skew_skews_labels_and_caps_sizes():
    owner = domains((400, 200))
    deals = [
        parts_of("natural_dirichlet", LABELS, 8, seed, owner) for seed in range(20)
    ]
    counts = np.array(
        [[np.bincount(LABELS[part], minlength=10) for part in parts] for parts in deals]
    )
    sizes = counts.sum(2)
    assert sizes.min() >= general.WithAlpha.min_size
    # a client is dealt at most one class more once it has its even share: 100 of 400, and 50 of 200
    assert (sizes[:, :4] < 100 + counts[:, :4].max(2)).all()
    assert (sizes[:, 4:] < 50 + counts[:, 4:].max(2)).all()
    shares = counts[:, :4] / counts[:, :4].sum(1, keepdims=True)
    assert shares.std() > 0.15  # dealt evenly they would all be a quarter


def test_feature_and_label_skew_as_a_partition_with_an_official_test_set():
    owner, official = domains(), np.random.default_rng(1).random(600) > 0.3
    data = source(owner=owner, is_train=official)
    made = make(data, "natural_dirichlet", clients=6, alpha=0.5, seed=3)
    assert made.names == (
        "site 0_0",
        "site 0_1",
        "site 1_0",
        "site 1_1",
        "site 2_0",
        "site 2_1",
    )
    assert made.params == {"clients": 6, "alpha": 0.5, "splits": [0.64, 0.16, 0.2]}
    tested = []
    for number, splits in enumerate(made.indices.values()):
        assert set(owner[np.concatenate(list(splits.values()))]) == {number // 2}
        assert not official[splits["test"]].any()
        assert official[splits["train"]].all()
        tested.append(splits["test"])
    for pair in zip(
        tested[::2], tested[1::2], strict=True
    ):  # an owner's classes, each to whoever trains on it
        assert (
            len(np.concatenate(pair))
            == (~official & (owner == owner[pair[0][0]])).sum()
        )
    assert len(make(data, "natural_dirichlet", seed=3, alpha=9.0).names) == 15


@pytest.mark.parametrize(
    ("fields", "given", "message"),
    [
        ({}, {}, "natural clients"),
        ({"owner": domains()}, {"clients": 4}, "multiple.*3.*4"),
        ({"owner": domains()}, {"clients": 3.0}, r"multiple.*3\.0"),
        ({"owner": domains()}, {"alpha": 0.0}, r"alpha.*0\.0"),
        ({"owner": domains()}, {"clients": 33}, r"'site 2'.*10.*11"),
        (
            {
                "labels": np.minimum(LABELS, 9 * (1 - domains((580, 20)))),
                "owner": domains((580, 20)),
            },
            {"clients": 4, "alpha": 1e-3},
            r"2 clients.*'site 1'",
        ),
    ],
)
def test_feature_and_label_skew_that_cannot_be_dealt_is_refused(fields, given, message):
    with pytest.raises(UsageError, match=message):
        make(source(**fields), "natural_dirichlet", **given)


def test_capped_dirichlet_bounds_sizes_from_both_sides(monkeypatch):
    labels = np.repeat(np.arange(10), 600)
    deals = [
        parts_of("capped_dirichlet", labels, 20, seed, alpha=0.1) for seed in range(10)
    ]
    counts = np.array(
        [[np.bincount(labels[part], minlength=10) for part in parts] for parts in deals]
    )
    sizes = counts.sum(2)
    assert sizes.min() >= 40
    assert (
        sizes < 300 + counts.max(2)
    ).all()  # at most one class more once a client has its even share of 300
    plain = [
        parts_of("dirichlet", labels, 20, seed, alpha=0.1, min_size=0)
        for seed in range(10)
    ]
    assert (
        sizes.std()
        < 0.8 * np.array([[len(part) for part in parts] for parts in plain]).std()
    )
    few = parts_of(
        "capped_dirichlet", labels[::100], 5, 0, alpha=5.0
    )  # 60 samples: half of an even share of 12 is asked for
    assert min(map(len, few)) >= 6
    made = make(source(), "capped_dirichlet", clients=6, alpha=0.5, seed=3)
    assert made.params == {"clients": 6, "alpha": 0.5, "splits": [0.64, 0.16, 0.2]}
    is_train = np.arange(len(LABELS)) % 4 > 0  # an official split stays one
    official = make(
        source(is_train=is_train), "capped_dirichlet", clients=6, alpha=0.5, seed=3
    )
    for splits in official.indices.values():
        assert is_train[np.concatenate([splits["train"], splits["validation"]])].all()
        assert not is_train[splits["test"]].any()
    monkeypatch.setattr(general, "_DRAWS", 20)
    with pytest.raises(UsageError, match=r"20 clients.*\d+.*1200"):
        parts_of("capped_dirichlet", labels[:1200], 20, 0, alpha=0.05)
    with pytest.raises(UsageError, match=r"alpha.*0\.0"):
        parts_of("capped_dirichlet", labels, 20, 0, alpha=0.0)


def test_splits_of_a_client_do_not_depend_on_the_other_clients():
    small = make(source(LABELS[:500], OWNER[:500]), "natural", seed=3)
    whole = make(source(owner=OWNER), "natural", seed=3)
    assert np.array_equal(
        small.indices["site 0"]["train"], whole.indices["site 0"]["train"]
    )


def test_a_partition_is_refused_by_other_samples():
    toy = source()
    made = make(toy, "iid", clients=2)
    with pytest.raises(UsageError, match=r"599.*600"):
        made.check(source(LABELS[:599]))
    other = source()
    other.x[17, 1] += 1
    with pytest.raises(UsageError, match="other samples"):
        made.check(other)


def test_damaged_indices_are_refused():
    toy = source()
    twice, outside = make(toy, "iid", clients=2), make(toy, "iid", clients=2)
    twice.indices["client_0"]["test"][0] = twice.indices["client_1"]["train"][0]
    with pytest.raises(UsageError, match="sample twice"):
        twice.check(toy)
    outside.indices["client_0"]["test"][0] = 600
    with pytest.raises(UsageError, match="599"):
        outside.check(toy)


@pytest.mark.parametrize("kind", PARTITIONS.own)
def test_every_partition_says_what_it_is_and_divides_a_source(kind):
    """Of any member: a first line, options with a default, three splits a client, none of which shares a sample."""
    assert 20 < len(PARTITIONS.summaries()[kind]) < 120
    PARTITIONS[kind]()
    labels = np.arange(6000) % 10
    toy = source(
        labels, owner=np.arange(6000) // 2000, is_train=np.arange(6000) // 10 % 4 > 0
    )
    made = make(toy, kind, clients=None if PARTITIONS[kind].natural else 5, seed=2)
    made.check(toy)
    Partition.from_tree(made.to_tree()).check(toy)
    assert made.params["clients"] == len(made.names)
    for splits in made.indices.values():
        rows = np.concatenate([splits[split] for split in SPLITS])
        assert len(np.unique(rows)) == len(rows)
        assert min(map(len, splits.values())) >= 1


def test_a_new_partition_is_one_class(own_members):
    own_members(PARTITIONS)

    @partition
    @dataclass(frozen=True)
    class Turns(Partitioning):
        """Sample after sample to client after client."""

        name = "turns"
        start: int = 0

        def assign(self, pool, clients, seed):
            return [
                np.arange(len(pool))[(client + self.start) % clients :: clients]
                for client in range(clients)
            ]

    made = make(source(), "turns", clients=3, start=1)
    assert made.params == {"clients": 3, "start": 1, "splits": [0.64, 0.16, 0.2]}
    assert {
        int(row) % 3 for row in np.concatenate(list(made.indices["client_0"].values()))
    } == {1}
    with pytest.raises(UsageError, match=r"start.*'iid'.*turns"):
        make(source(), "iid", clients=3, start=1)
    with pytest.raises(UsageError, match=r"'alfa'.*'alpha'"):
        make(source(), "dirichlet", clients=3, alfa=1)
    with pytest.raises(UsageError, match=r"'numpy:arange'"):
        make(source(), "numpy:arange", clients=3)


def test_a_stored_partition_of_code_from_outside_is_checked_without_importing_it():
    toy = source()
    made = replace(
        make(toy, "iid", clients=2), kind="no_such_package.of_this_test:Turns"
    )
    Partition.from_tree(made.to_tree()).check(toy)
    made.indices["client_0"]["test"][0] = made.indices["client_1"]["train"][0]
    with pytest.raises(UsageError, match="sample twice"):
        made.check(toy)
