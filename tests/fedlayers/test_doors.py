"""The one import that a newcomer makes: every door opens, says what it is, and shows a run of itself."""

import pytest

import fedlayers as fl
from tests.conftest import TOY, network


@pytest.mark.parametrize("name", sorted(set(fl.__all__) - {"__version__"}))
def test_a_door_opens_and_says_what_it_is(name):
    assert name in dir(fl)
    door = getattr(fl, name)
    assert (door.__doc__ or "").strip(), name


def test_an_unknown_door_is_an_attribute_error():
    with pytest.raises(AttributeError, match="attribute 'diagnosis'"):
        getattr(fl, "diagnosis")  # noqa: B009


def test_run_takes_objects_in_the_place_of_names(tmp_path):
    plan = fl.LayerPlan.all_but_last(
        fl.layers_of(network("plain"), TOY.clients[0].train.x[:2])
    )
    result = fl.run(
        algorithm="fedper",
        rounds=1,
        batch_size=8,
        data=TOY,
        model=network("plain"),
        plan=plan,
    )
    assert result.plan.digest == plan.digest
    plan.save(tmp_path / "plan.json")
    again = fl.run(
        fl.RunConfig(algorithm="fedper", rounds=3, batch_size=8),
        rounds=1,
        data=TOY,
        model=network("plain"),
        plan=tmp_path / "plan.json",
    )
    assert (again.done, again.plan.digest) == (1, plan.digest)
