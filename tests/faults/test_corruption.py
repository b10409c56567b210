"""Every damaged or foreign byte is found, no run resumes from one, and no pickle is executed."""

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from diagnostics.measure import instruments
from diagnostics.select import select
from fl_core import rows, storage
from fl_core.config import RunConfig
from fl_core.errors import CorruptError
from fl_core.plan import LayerPlan
from fl_core.records.store import Run
from fl_core.run import runner
from fl_core.run.restore import load_models
from tests.conftest import refuses
from tests.faults.injected import contents, forge

ROUNDS = 3
CONFIG = RunConfig(
    algorithm="playerfl", rounds=ROUNDS, epochs=1, checkpoint_every=1, eval_every=2
)


def blob_of(run, which, state):
    return f"blobs/{run.manifest(which)['states'][state]['blob']}.safetensors"


KINDS = {
    "config": lambda run: "config.json",
    "partition": lambda run: "partition.safetensors",
    "rows": lambda run: "rows.jsonl",
    "first checkpoint": lambda run: "checkpoints/000001.json",
    "last checkpoint": lambda run: f"checkpoints/{run.rounds[-1]:06d}.json",
    "first server": lambda run: blob_of(run, 1, "server"),
    "last server": lambda run: blob_of(run, run.rounds[-1], "server"),
    "last client": lambda run: blob_of(run, run.rounds[-1], "client/va"),
    "last local model": lambda run: blob_of(run, run.rounds[-1], "local/va"),
}


def flip(at):
    def flipped(data):
        index = int(at * (len(data) - 1))
        return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]

    return flipped


DAMAGE = {
    "first byte": flip(0.0),
    "middle byte": flip(0.5),
    "last byte": flip(1.0),
    "last byte cut": lambda data: data[:-1],
    "half cut": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "another file": lambda data: pickle.dumps({"weights": [1.0]}),
    "deleted": None,
}


def harm(path, damage):
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))


def resume(path):
    return runner.resume(path, instruments=instruments)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A finished run that nobody touches."""
    path = tmp_path_factory.mktemp("pristine") / "run"
    runner.run(CONFIG, path, instruments=instruments)
    return path


@pytest.fixture
def finished(pristine, tmp_path):
    """A copy of a finished run, to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "run"))


@pytest.fixture
def unfinished(finished):
    """A copy of a run that was killed after its second round."""
    (finished / f"checkpoints/{ROUNDS:06d}.json").unlink()
    return finished


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        pytest.param(kind, damage, marks=[pytest.mark.slow] * ((i + j) % 2))
        for i, kind in enumerate(KINDS)
        for j, damage in enumerate(DAMAGE)
        if damage != "deleted" or "checkpoint" not in kind
    ],
)
class TestEveryFile:
    def test_verify_names_it(self, finished, kind, damage):
        run = Run(finished)
        path = finished / KINDS[kind](run)
        assert run.verify()
        harm(path, DAMAGE[damage])
        with pytest.raises(CorruptError) as caught:
            Run(finished).verify()
        assert str(path) in str(caught.value)

    def test_resume_refuses_or_is_not_touched_by_it(
        self, pristine, unfinished, kind, damage
    ):
        """Either nothing happens, or the run ends as without the damage."""
        path = unfinished / KINDS[kind](Run(unfinished))
        harm(path, DAMAGE[damage])
        before = contents(unfinished)
        name = str(path.relative_to(unfinished))
        beyond = [("rows", "last byte"), ("rows", "last byte cut")]
        redone = (kind, damage) in beyond  # the last checkpoint
        if not redone and kind not in ("first checkpoint", "first server"):
            with pytest.raises(CorruptError) as caught:
                resume(unfinished)
            assert str(path) in str(caught.value)
            assert contents(unfinished) == before
            return
        resume(unfinished)
        after, undisturbed = contents(unfinished), contents(pristine)
        if redone:
            assert after == undisturbed
            return
        assert {path: data for path, data in after.items() if path != name} == {
            path: data for path, data in undisturbed.items() if path != name
        }
        with pytest.raises(
            CorruptError
        ) as caught:  # what was not needed is still damaged, and still found
            Run(unfinished).verify()
        assert str(path) in str(caught.value)


@settings(
    max_examples=75,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(drawn=st.data())
def test_any_bit_of_any_covered_file(pristine, drawn):
    path = pristine / drawn.draw(st.sampled_from(sorted(contents(pristine))))
    sound = path.read_bytes()
    bit = drawn.draw(st.integers(0, 8 * len(sound) - 1))
    try:
        path.write_bytes(
            sound[: bit // 8]
            + bytes([sound[bit // 8] ^ 1 << bit % 8])
            + sound[bit // 8 + 1 :]
        )
        with pytest.raises(CorruptError) as caught:
            Run(pristine).verify()
        assert str(path) in str(caught.value)
    finally:
        path.write_bytes(sound)
    assert Run(pristine).verify()


class TestTheLastCheckpoint:
    @pytest.mark.parametrize("kind", ["last checkpoint", "last server", "last client"])
    def test_damaged_can_be_given_up(self, pristine, finished, kind):
        """The message says what to remove. The run then resumes from the checkpoint before, with the same end."""
        run = Run(finished)
        harm(finished / KINDS[kind](run), flip(0.5))
        with pytest.raises(CorruptError) as caught:
            resume(finished)
        manifest = finished / f"checkpoints/{ROUNDS:06d}.json"
        assert f"Remove {manifest} " in str(caught.value)
        manifest.unlink()
        resume(finished)
        assert contents(finished) == contents(pristine)

    @pytest.mark.parametrize("which", ["last", 1])
    def test_damaged_gives_no_models(self, finished, which):
        run = Run(finished)
        harm(
            finished
            / KINDS["last local model" if which == "last" else "first server"](run),
            flip(0.5),
        )
        with refuses("blobs", CorruptError):
            load_models(finished, which)
        load_models(finished, 2)

    def test_under_another_round_is_found(self, finished):
        shutil.copy(
            finished / "checkpoints/000001.json", finished / "checkpoints/000002.json"
        )
        with refuses(r"000002\.json.*damaged", CorruptError):
            Run(finished).verify()
        with refuses(r"000002\.json", CorruptError):
            Run(finished).checkpoint(2)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (str(self.trace), "w")


@pytest.fixture
def bomb(tmp_path):
    """(bytes of a pickle, whether it was executed)."""
    trace = tmp_path / "trace"
    data = pickle.dumps(Bomb(trace))
    pickle.loads(data).close()
    assert trace.exists()  # it works
    trace.unlink()
    return data, trace.exists


def test_tensors_of_trees_that_a_state_does_not_have_are_refused(finished):
    forge(last_of(finished), lambda found: change_states(found, trees=["body"]))
    for reader in (Run(finished).checkpoint, lambda: resume(finished)):
        with refuses(r"'model\|.*'", CorruptError):
            reader()


def last_of(run):
    return run / KINDS["last checkpoint"](Run(run))


def change_states(found, **changes):
    for entry in found["states"].values():
        entry.update(changes)


def test_a_pickle_with_a_forged_digest_is_not_executed(finished, bomb):
    """Whoever can write the manifest can name any blob, but no code runs."""
    pickled, executed = bomb
    forged = storage.sha(pickled)
    (finished / "blobs" / f"{forged}.safetensors").write_bytes(pickled)
    forge(last_of(finished), lambda found: change_states(found, blob=forged))
    for reader in (Run(finished).checkpoint, lambda: resume(finished)):
        with refuses(rf"{forged}\.safetensors.*damaged", CorruptError):
            reader()
    assert not executed()


def test_a_pickle_as_a_plan_or_rows_is_not_executed(tmp_path, bomb):
    pickled, executed = bomb
    (tmp_path / "file").write_bytes(pickled)
    for reader in (LayerPlan.load, rows.read, select):
        with refuses(r"a plan|of rows"):
            reader(tmp_path / "file")
    assert not executed()


def test_a_pickle_in_a_dataset_is_not_executed(tmp_path, bomb):
    _, executed = bomb
    path = tmp_path / "data.npz"
    x = np.empty(1, dtype=object)
    x[0] = Bomb(tmp_path / "trace")
    np.savez(path, x=x, y=np.zeros(1, dtype=np.int64), allow_pickle=True)
    with refuses(r"data\.npz"):
        runner.run(RunConfig(dataset=str(path)), tmp_path / "run")
    assert not executed()
    assert not (tmp_path / "run").exists()
