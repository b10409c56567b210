"""Personalised algorithms of one file each: their limits, their steps, and what their clients keep."""

from functools import cache

from tests.conftest import play

HARD = {
    "momentum": 0.9,
    "weight_decay": 0.05,
    "lr": 0.1,
    "rounds": 3,
    "participation": 0.5,
}


@cache
def reference(algorithm):
    """Return a run of an algorithm that others equal at their limits."""
    return play(algorithm=algorithm, model="norm", **HARD)


def test_apfls_global_model_is_fedavgs():
    for options in ({"adapt": False, "alpha": 0.7}, {}):
        found = play(algorithm="apfl", options=options, model="norm", **HARD).server()
        assert found == reference("fedavg").server()


def test_apfl_with_no_share_is_fedavg_and_with_all_of_it_local():
    for alpha, alone in ((0.0, "fedavg"), (1.0, "local")):
        mixed = play(
            algorithm="apfl",
            options={"adapt": False, "alpha": alpha},
            model="norm",
            **HARD,
        )
        assert mixed.evaluated() == reference(alone).evaluated()


def test_fedala_that_learns_nothing_is_fedavg_at_the_server():
    nothing = {"first": 0, "later": 0, "layers": 2}
    for options, same in ((nothing, True), ({"layers": 2}, False)):
        found = play(algorithm="fedala", options=options, model="norm", **HARD)
        assert (found.server() == reference("fedavg").server()) == same


def test_mr_mtl_without_a_pull_is_local_and_with_one_is_not():
    for lam in (0, 1):
        found = play(algorithm="mr_mtl", options={"lam": lam}, model="norm", **HARD)
        assert (found.evaluated() == reference("local").evaluated()) == (lam == 0)
