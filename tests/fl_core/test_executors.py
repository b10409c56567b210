"""Worker processes give the same bits as this process, bring errors back, and never outlive their parent."""

import math
import os
import re
import socket
import subprocess
import sys
from threading import Thread
from unittest.mock import Mock

import pytest
import torch

from fl_core import tree
from fl_core.algorithms import Message, Round, State, base, registry
from fl_core.algorithms.averaging import FedAvg
from fl_core.errors import NonFiniteError, RunError, WorkerError
from fl_core.rounds.clients import ClientReply, ScoreRequest, TrainRequest
from fl_core.rounds.workers import Child, Workers, receive, send, stream_of
from fl_core.run import runner
from tests.conftest import CONFIG, TOY, client_runner_of, network, play
from tests.processes import alive

MOMENTUM = CONFIG.with_keys(momentum=0.9, weight_decay=0.01, eval_every=2)


class Tantrum(Exception):
    """An error that cannot be rebuilt from its message alone."""

    def __init__(self, what, why):
        super().__init__(f"{what} because of {why}")


class Failing(FedAvg):
    """FedAvg that fails in a given way at the clients from number 1 on."""

    name = "failing"

    def loss(self, params, batch, ctx):
        if ctx.client >= 1 and self.task_info.epochs == 2:
            raise KeyError(f"no such key at client {ctx.client_name}")
        if ctx.client >= 1 and self.task_info.epochs == 3:
            raise Tantrum("no luck", ctx.client_name)
        if ctx.client >= 1 and self.task_info.epochs == 4:
            os._exit(7)
        return super().loss(params, batch, ctx)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    registry()
    monkeypatch.setitem(base.ALGORITHMS._members, Failing.name, Failing)


def test_a_message_arrives_at_both_ends():
    child = Child.__new__(Child)
    child.link, theirs = socket.socketpair()
    child.stream, child.last, stream = stream_of(child.link), None, stream_of(theirs)
    child.send(("a", torch.arange(3)))
    name, numbers = receive(stream)
    assert (name, numbers.tolist()) == ("a", [0, 1, 2])
    send(stream, ("b", numbers + 1))
    name, numbers = child.receive()
    assert (name, numbers.tolist()) == ("b", [1, 2, 3])
    child.close()
    theirs.close()


@pytest.fixture(scope="module")
def workers():
    """Two processes for all tests, since new ones start slowly."""
    task = runner.assemble(MOMENTUM, data=TOY, model=network("drop"))
    pool = Workers(client_runner_of(task), 2)
    yield pool
    pids = [child.process.pid for child in pool._children]
    pool.close()
    assert not any(alive(pid) for pid in pids), "closing ends every worker"


def fail(kind, executor, epochs):
    """Return the error of the failing algorithm."""
    with pytest.raises(kind) as caught:
        play(
            MOMENTUM,
            model="drop",
            executor=executor,
            algorithm="failing",
            epochs=epochs,
        )
    return caught.value


def test_an_error_of_the_users_code_comes_back_with_its_type_and_words(
    workers,
):
    here, there = (fail(KeyError, place, 2) for place in (None, workers))
    assert str(here) == str(there) == repr("no such key at client b")
    notes = "".join(there.__notes__)
    assert "worker" in notes
    assert "in loss" in notes, "the note shows where in the worker it happened"


def test_an_error_that_cannot_be_pickled_comes_back_as_words(workers):
    assert str(fail(RunError, workers, 3)) == "Tantrum: no luck because of b"


def job(client, of):
    """A request to train this model."""
    return TrainRequest(
        client, Round(0), Message({"model": of}), state=State({"model": {}})
    )


def test_results_before_an_error_are_given_first_and_the_pool_goes_on_after_it(
    workers,
):
    task = runner.assemble(MOMENTUM, data=TOY, model=network("drop"))
    start = tree.state_dict(task.model)
    broken = {name: torch.full_like(value, torch.nan) for name, value in start.items()}
    workers.use(task.algorithm(None))

    results = workers.run(job(c, broken if c == 2 else start) for c in range(4))
    assert [next(results).client for _ in range(2)] == [0, 1]
    with pytest.raises(NonFiniteError, match="client 'c'"):
        next(results)
    again = workers.run([job(c, start) for c in (3, 2, 1, 0, 3)])
    assert [result.client for result in again] == [3, 2, 1, 0, 3]


def test_a_worker_that_dies_is_reported_with_its_exit_code():
    workers = Workers(
        client_runner_of(runner.assemble(CONFIG, data=TOY, model=network("plain"))), 1
    )
    try:
        with pytest.raises(RunError, match=r"exit code 7"):
            play(algorithm="failing", epochs=4, executor=workers)
    finally:
        workers.close()


TRAINS = """
import fedlayers as fl
if {}:
    class Own(fl.Algorithm): name = "own of a script"
    fl.run(algorithm=Own, rounds=1, workers=2, stack="off", out="run", progress=False)
"""


@pytest.mark.parametrize(
    ("guard", "way", "said"),
    [
        pytest.param("1", "script.py", "a script .* below if", marks=pytest.mark.slow),
        pytest.param(
            "__name__ == '__main__'",
            "script.py",
            "a script .* define its classes above",
            marks=pytest.mark.slow,
        ),
        ("1", "-", "Own must be sendable to worker processes; got"),
    ],
)
def test_a_script_that_processes_import_is_one_line(guard, way, said, tmp_path):
    text = TRAINS.format(guard)
    (tmp_path / "script.py").write_text(text)
    words = {"input": text, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-W", "ignore", way], **words)
    assert re.search(said, done.stderr.splitlines()[-1])
    assert done.stderr.count("Traceback") == 1
    assert not (tmp_path / "run").exists()


class Answering:
    """A worker that answers every job with its client's number."""

    def __init__(self):
        self.asked, self.seen = [], set()

    def send(self, message):
        client = message[1].client
        assert client not in self.seen, "asked again, without a loss"
        self.seen.add(client)
        self.asked.append(client)

    def receive(self):
        return "ok", ClientReply(self.asked.pop(0))


def hand_driven(monkeypatch, count):
    """Workers without processes, of which the first answers only when no other is busy."""
    workers = Workers.__new__(Workers)
    workers._broken = False
    first, *_ = workers._children = [Answering() for _ in range(count)]

    def ready(busy):
        assert busy, "waits for nobody, for ever"
        return busy[1:2] if busy[0] is first and busy[1:] else busy[:1]

    monkeypatch.setattr("fl_core.rounds.workers.ready", ready)
    return workers


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_slow_worker_holds_nothing_up_for_ever(monkeypatch, count):
    """The others may run ahead only so far; when the slow one answers, all go on."""
    for jobs in (0, 1, 7, 8, 9, 13, 50):
        replies = hand_driven(monkeypatch, count).run(
            ScoreRequest(k, 0, models={"global": {}}) for k in range(jobs)
        )
        assert [result.client for result in replies] == list(range(jobs))


def test_a_caller_that_wants_no_more_leaves_no_answer_behind(monkeypatch):
    for count in range(1, 20):
        workers = hand_driven(monkeypatch, 3)
        requests = (ScoreRequest(k, 0, models={"global": {}}) for k in range(40))
        results = workers.run(requests)
        assert [next(results).client for _ in range(count)] == list(range(count))
        results.close()
        assert not any(worker.asked for worker in workers._children)


@pytest.mark.parametrize("lost_at", ["send", "receive"])
def test_a_worker_that_is_gone_ends_the_run_and_all_workers_at_once(
    monkeypatch, lost_at
):
    workers = hand_driven(monkeypatch, 1)
    child = Mock(end=Mock(return_value=7))
    getattr(child, lost_at).side_effect = EOFError
    workers._children = [child]
    with pytest.raises(WorkerError, match="exit code 7"):
        next(workers.run([ScoreRequest(0, 0, models={"global": {}})]))
    workers.close()
    assert child.end.call_args_list[-1].args == (0,)


def test_an_interrupt_leaves_the_workers_to_be_killed(monkeypatch):
    workers = hand_driven(monkeypatch, 2)
    monkeypatch.setattr(
        "fl_core.rounds.workers.ready", Mock(side_effect=KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        next(workers.run([ScoreRequest(0, 0, models={"global": {}})]))
    assert [len(worker.asked) for worker in workers._children] == [1, 0]
    (child,) = workers._children = [Mock()]
    workers.close()
    child.end.assert_called_once_with(0)


def test_closing_does_not_wait_for_a_process_that_reads_nothing():
    child = Child.__new__(Child)
    child.link, theirs = socket.socketpair()
    child.stream = stream_of(child.link)
    child.link.setblocking(False)
    with pytest.raises(BlockingIOError):
        send(child.stream, [torch.rand(99) for _ in range(9999)])
    child.link.setblocking(True)
    closing = Thread(target=child.close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()
    theirs.close()


def test_tensors_of_every_kind_pass_between_processes():
    ours, theirs = map(stream_of, socket.socketpair())
    table = torch.arange(12.0).reshape(3, 4)
    sent = [
        torch.tensor(0.5),
        torch.empty(0, 3),
        table.T,
        table[:1, 0],
        (table[:1] * 1j).conj().imag[0],
        table.reshape(1, 2, 3, 2).contiguous(memory_format=torch.channels_last),
        table[:, 1].double().requires_grad_(),
        torch.tensor([True, False]),
        table.bfloat16(),
        table.to(torch.complex64),
        table.to_sparse(),
        torch.nn.Parameter(table),
    ]
    send(ours, sent)
    for arrived, tensor in zip(receive(theirs), sent, strict=True):
        assert type(arrived) is type(tensor)
        assert arrived.dtype == tensor.dtype
        assert arrived.requires_grad == tensor.requires_grad
        assert torch.equal(arrived.to_dense(), tensor.to_dense())
        if not arrived.is_sparse:
            assert arrived.data_ptr() % 64 == 0
            assert arrived.stride() in (tensor.stride(), tensor.clone().stride())


def test_a_message_that_cannot_be_loaded_leaves_the_next_one_whole():
    ours, theirs = map(stream_of, socket.socketpair())
    send(ours, [Tantrum("no", "luck"), "more"])
    send(ours, "next")
    with pytest.raises(TypeError):
        receive(theirs)
    assert receive(theirs) == "next"


def test_a_tensor_of_the_last_message_is_sent_again_only_if_it_changed():
    """What the receiver did to its own, and changes that torch does not count, do not matter."""
    (ours, theirs), here, there = map(stream_of, socket.socketpair()), {}, {}
    unchanged, changed = torch.zeros(3), torch.tensor([0.0, -0.0, math.nan])
    for values in ([0.0, -0.0, math.nan], [0.0, 0.0, math.nan], [1.0, 0.0, 2.0]):
        changed.data.copy_(torch.tensor(values))
        send(ours, [unchanged, changed, unchanged], here)
        arrived = receive(theirs, there)
        assert arrived[0] is arrived[2]
        for got, sent in zip(arrived, (unchanged, changed), strict=False):
            assert got.numpy().tobytes() == sent.numpy().tobytes()
            got += 1
    send(ours, None, here)
    receive(theirs, there)
    assert not here
    assert not there
