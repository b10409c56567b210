"""What a server may wish for at a site: limits of the policy, and every field of every request with hostile values."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import platform
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fedlayers.remote import federation, protocol, site_diagnosis
from fedlayers.remote.codec import Packet, decode, encode
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.joined_run import HERE, JoinedRun
from fedlayers.remote.policy import Policy, memory_for
from fedlayers.remote.site import Site
from fedlayers.remote.site_data import PresplitData
from fl_core import limits, tree
from fl_core.algorithms import find, registry
from fl_core.algorithms.base import Round
from fl_core.errors import UsageError
from fl_core.execution.requests import TrainRequest
from fl_core.limits import LimitError, within_memory, within_seconds
from fl_core.plan import LayerPlan
from fl_core.task import assemble
from tests.conftest import TOY
from tests.federation.test_faults import Listening
from tests.federation.test_in_memory import SHORT, config_for
from tests.federation.test_splits import CONFIG, hospital

ONE = replace(SHORT, participation=1.0, rounds=1, algorithm="local_adaptation")
SECONDS, MEGABYTES = 5.0, 600


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Packet]:
    """A valid request of each kind, for site a."""
    folder = tmp_path_factory.mktemp("sites")
    line = Listening(folder)
    federation.federate(ONE, line, progress=False)
    site_diagnosis.diagnose(SHORT, line, ["grad_norm"], null=["labels_within"])
    stamp = {"session": line.asked and decode(line.asked["train"]).head["session"], "seq": 10**6}
    arms = [{"algorithm": "fedper", "options": {}, "layers": ["fc1"]}]
    found = {kind: decode(request) for kind, request in line.asked.items()}
    found["race"] = Packet({"kind": "race", "number": 0, "seed": 0, "arms": arms, **stamp})
    found["moments"] = Packet({"kind": "moments", "number": 0, "seed": 0, **stamp})
    run = found["join"].head["run"]
    found["measure"].head |= {"run": run, **stamp}
    return found


def answered(site: Site, packet: Packet) -> dict[str, Any]:
    return decode(site.answer(encode(packet))).head


def joined(requests: dict[str, Packet], config: dict[str, Any], site: Site) -> dict[str, Any]:
    join = requests["join"]
    head = {**join.head, "config": {**join.head["config"], **config}}
    return answered(site, Packet({**head, "run": run_of(head)}, join.trees))


def run_of(head: dict[str, Any]) -> str:
    """A run's name for a request to join. A run cannot join again with something else."""
    return hashlib.md5(json.dumps([head["config"], head["plan"]], sort_keys=True).encode()).hexdigest()


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_options": {"sizes": [6000, 6000]}}, "parameters"),
        ({"model_options": {"sizes": [60000, 60000]}}, "parameters|memory"),
        ({"model_options": {"sizes": [8] * 3000}}, "layers"),
        ({"epochs": 101}, "epochs"),
        ({"model": "vit", "model_options": {"patch": 1, "width": 30_000, "heads": 1}}, "parameters|memory"),
    ],
)
def test_a_model_or_training_that_is_too_large_is_refused_at_once(
    config: dict[str, Any], limit: str, requests: dict[str, Packet], tmp_path: Path
) -> None:
    begun, before = time.monotonic(), limits.data_bytes()
    found = joined(requests, config, Site(PresplitData(TOY, "a"), tmp_path))
    assert found["kind"] == "refused"
    assert re.search(rf"\[policy\] ({limit})", found["reason"])
    assert time.monotonic() - begun < 10
    assert limits.data_bytes() - before < 2e8


def of_algorithm(
    requests: dict[str, Packet], site: Site, name: str, options: dict[str, Any], plan: Any = None
) -> dict[str, Any]:
    """The answer to a request to train for an algorithm, after the run has joined with it."""
    asked = {**requests, "join": Packet({**requests["join"].head, "plan": plan}, requests["join"].trees)}
    own = {"algorithm": name, "options": options}
    assert joined(asked, own, site)["kind"] == "joined"
    train, head = requests["train"], asked["join"].head
    run = run_of({**head, "config": {**head["config"], **own}})
    return answered(site, Packet({**train.head, **own, "plan": plan, "run": run}, train.trees))


@pytest.mark.parametrize("config", [{"class_weights": "balanced"}, {"leave_out_client": "a"}])
def test_what_tells_of_the_classes_or_clients_of_other_sites_is_refused(
    config: dict[str, Any], requests: dict[str, Packet], tmp_path: Path
) -> None:
    found = joined(requests, config, Site(PresplitData(TOY, "a"), tmp_path))
    assert found["kind"] == "refused"
    assert found["reason"].startswith(f"{next(iter(config))} must be n")


def test_the_base_of_a_wrapper_must_be_allowed_too(requests: dict[str, Packet], tmp_path: Path) -> None:
    site = Site(PresplitData(TOY, "a"), tmp_path, Policy(algorithms=("vanilla", "fedper")))
    for base, kind in (("fedper", "joined"), ("ditto", "refused")):
        found = joined(requests, {"algorithm": "vanilla", "options": {"base": base}}, site)
        assert found["kind"] == kind, found
    assert "'ditto'" in found["reason"]


def test_epochs_of_an_algorithms_own_are_limited(requests: dict[str, Packet], tmp_path: Path) -> None:
    site = Site(PresplitData(TOY, "a"), tmp_path, Policy(epochs=7))
    plan = LayerPlan.all_but_last(assemble(SHORT, data=TOY).layers).to_json()
    for algorithm, options, given in (("ditto", {"personal_epochs": 9}, None), ("fedrep", {"head_epochs": 7}, plan)):
        found = of_algorithm(requests, site, algorithm, options, given)
        assert "[policy] epochs" in found.get("reason", ""), found


def test_work_is_for_the_algorithm_and_options_that_joined(requests: dict[str, Packet], tmp_path: Path) -> None:
    site = Site(PresplitData(TOY, "a"), tmp_path)
    assert answered(site, requests["join"])["kind"] == "joined"
    other: dict[str, Any]
    for kind in ("train", "finetune", "score"):
        packet = Packet({**requests[kind].head, "seq": 10**6}, requests[kind].trees)
        for other in ({"algorithm": "fedavg", "options": {}}, {"options": {"finetune_epochs": 6}}):
            found = answered(site, Packet({**packet.head, **other}, packet.trees))
            assert found["kind"] == "refused"
            assert "local_adaptation" in found["reason"]
        assert answered(site, packet)["kind"] == "done"


def test_work_is_for_the_plan_and_the_rounds_that_joined(requests: dict[str, Packet], tmp_path: Path) -> None:
    site, (join, train) = Site(PresplitData(TOY, "a"), tmp_path), honest("fedper", requests["join"])
    for packet in (join, train):
        assert answered(site, packet)["kind"] in ("joined", "done")
    plan = LayerPlan.from_json(train.head["plan"])
    for other in (None, plan.with_shared(tuple(layer.name for layer in plan.layers)).to_json()):
        assert "plan" in answered(site, Packet({**train.head, "plan": other}, train.trees)).get("reason", "")
    late = {**train.head, "round": {**train.head["round"], "index": 1}, "to": "000002-train"}
    assert "rounds" in answered(site, Packet(late, train.trees)).get("reason", "")
    site = Site(PresplitData(TOY, "a"), tmp_path / "tuning")
    assert answered(site, requests["join"])["kind"] == "joined"
    for kind in ("finetune", "score"):
        packet = Packet({**requests[kind].head, "done": 2}, requests[kind].trees)
        assert "rounds" in answered(site, packet).get("reason", "")


def test_a_measurement_ahead_is_playerfls_first_exchange_alone(requests: dict[str, Packet], tmp_path: Path) -> None:
    site = Site(PresplitData(TOY, "a"), tmp_path)
    assert answered(site, requests["join"])["kind"] == "joined"
    train = requests["train"]
    stats = {**train.head["round"], "exchange": "stats"}
    ahead = {**train.head, "algorithm": "playerfl", "options": {}, "round": stats, "to": "000001-stats"}
    assert answered(site, Packet({**ahead, "lane": "main"}, train.trees))["kind"] == "refused"
    assert answered(site, Packet({**ahead, "lane": "beside-1"}, train.trees))["kind"] == "done"
    for wrong in ({"round": train.head["round"]}, {"options": {"keep": 0.1}}, {"algorithm": "fedper"}, train.head):
        found = answered(site, Packet({**ahead, **wrong, "lane": "beside-2"}, train.trees))
        assert found["kind"] == "refused", wrong
    plan = LayerPlan.all_but_last(assemble(SHORT, data=TOY).layers).to_json()
    found = answered(site, Packet({**ahead, "plan": plan, "lane": "beside-2"}, train.trees))
    assert found["kind"] == "refused"
    head = {**requests["join"].head, "run": "1" * 32, "plan": plan}  # with a plan there is nothing to measure
    head["config"] = {**head["config"], "algorithm": "fedper"}
    assert answered(site, Packet(head, requests["join"].trees))["kind"] == "joined"
    found = answered(site, Packet({**ahead, "run": "1" * 32, "lane": "beside-1"}, train.trees))
    assert found["kind"] == "refused"


def test_work_that_takes_too_long_is_interrupted_and_the_site_goes_on(
    requests: dict[str, Packet], tmp_path: Path
) -> None:
    site = Site(PresplitData(TOY, "a"), tmp_path, Policy(seconds=1.5))
    begun = time.monotonic()
    found = of_algorithm(requests, site, "pfedme", {"inner_steps": 10**7})
    assert time.monotonic() - begun < 8
    assert found["kind"] == "refused"
    assert "[policy] seconds" in found["reason"]
    assert answered(site, requests["join"])["kind"] == "joined"
    assert answered(site, requests["train"])["kind"] == "done"


@pytest.mark.skipif(not limits.data_bytes(), reason="memory is limited on Linux only")
def test_the_default_memory_trains_any_model_that_the_default_parameters_allow(tmp_path: Path) -> None:
    assert Policy().memory == memory_for(Policy().parameters)
    width = 2500  # the same rule for a smaller model, which leaves little beyond the code's own memory
    sizes, parameters = (width, width), int(1.03 * width**2)
    policy = Policy(parameters=parameters, memory=memory_for(parameters))
    line = InMemoryTransport({"a": Site(PresplitData(TOY, "a"), tmp_path, policy)})
    config = replace(ONE, algorithm="fedavg", optimizer="adam", rounds=2, lr=1e-6, model_options={"sizes": sizes})
    engine = federation.federate(config, line, progress=False)
    assert 0.97 * parameters < sum(tensor.numel() for tensor in engine.initial.values()) <= parameters


@pytest.mark.skipif(not limits.data_bytes(), reason="memory is limited on Linux only")
def test_memory_is_limited_by_the_operating_system() -> None:
    most = limits.data_bytes() + 10**8
    made: list[Callable[[], Any]] = [
        lambda: torch.ones(10**8),
        lambda: bytearray(4 * 10**8),
        lambda: [bytearray(10**6) for _ in range(400)],
    ]
    for large in made:
        with pytest.raises(LimitError, match="100 megabytes"), within_memory(most, "100 megabytes"):
            large()
    assert len(torch.ones(10**8)) == 10**8


@pytest.mark.skipif(not limits.data_bytes(), reason="memory is limited on Linux only")
@pytest.mark.parametrize("percent", [*range(22, 62, 5), 90])
def test_a_packet_that_barely_fits_into_memory_is_refused(percent: int, tmp_path: Path) -> None:
    """Reading one takes about three times its bytes: at some of these sizes the second or third copy has no room."""
    site = Site(PresplitData(TOY, "a"), tmp_path, Policy(memory=100))
    request = encode(Packet({"kind": "join"}, {"start": {"w": torch.zeros(percent * 10**6 // 4)}}))
    site.idle = limits.data_bytes() - len(request)
    found = decode(site.answer(request)).head
    assert found["kind"] == "refused"
    assert re.search("memory of this request|session must be", found["reason"])


def forever() -> None:
    while True:
        pass


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries return memory by themselves, or never")
def test_freed_memory_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    many = [b"x" * 10**5 for _ in range(2000)]  # written to, so that all of it is in memory
    last = bytes(10**5)  # above them in the heap, which therefore cannot become shorter
    before = resident()  # some of it may go back by itself
    del many
    limits.release_freed_memory()
    assert before - resident() > 10**8
    assert len(last) == 10**5


def test_an_interrupt_comes_once_and_never_late() -> None:
    with pytest.raises(LimitError, match="a blink"), within_seconds(0.05, "a blink"):
        forever()
    for _ in range(500):  # where work ends as its time does
        with suppress(LimitError), within_seconds(0.001, "a blink"):
            time.sleep(0.001)
    for watch in [each for each in threading.enumerate() if "watch" in each.name]:
        watch.join(timeout=3)  # one that lives on would wait for its next interrupt, 5 s later
        assert not watch.is_alive()


def test_a_limit_leaves_nothing_to_look_for() -> None:
    def trace(*_: Any) -> Any:
        return trace

    def traced() -> None:  # Python 3.11 starts a traced call again and again while an interrupt is announced
        sys.settrace(trace)
        str(trace())

    for seconds in (60, 0.05):
        with suppress(LimitError), within_seconds(seconds, "a blink"):
            if seconds < 1:
                forever()
        thread = threading.Thread(target=traced, daemon=True)
        thread.start()
        thread.join(timeout=5)
        assert not thread.is_alive()


@pytest.mark.parametrize("name", ["splits", "parameters", "layers", "memory", "disk", "epochs", "seconds"])
def test_a_limit_is_above_nothing(name: str) -> None:
    values: list[Any] = [0, -1, float("nan"), float("inf")]
    for value in values:
        with pytest.raises(UsageError, match=rf"\b{name}\b"):
            Policy(**{name: value})


# --- every field of every request ----------------------------------------------------------------------------------

HOSTILE: list[Any] = [
    None, True, "", "x" * 5000, "a\x00\n<b>", "../../etc/passwd", "os:system", -1, 0, 2**31, 2**63, 10**30, -1.5, 1e308,
    [], [None], ["x"], [[]], [-1], [10**12], list(range(2000)), {}, {"": None}, {"x": 10**12}, {"x": {"y": []}},
]  # fmt: skip
KINDS = ("hello", "moments", "race", "join", "train", "finetune", "score", "measure")
TOLD = {"hello", "told", "counted", "joined", "done", "measured", "refused"}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a request has a value, at any depth."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*at, key))


def changed(head: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(head)
    part: Any = made
    for key in at[:-1]:
        part = part[key]
    part[at[-1]] = value
    return made


def tensors(packet: Packet) -> Iterator[Packet]:
    """The same request with other tensors."""
    first = {"x": torch.ones(3)}
    yield Packet(packet.head, {})
    yield Packet(packet.head, {"start": first, "message/model": first, "server/model": first, "sent/0": first})
    for change in (
        lambda t: t[:0], lambda t: t.double(), lambda t: t * 0 + 3e38, lambda t: t.unsqueeze(0), lambda t: t > 0
    ):  # fmt: skip
        trees = {kind: {name: change(t) for name, t in each.items()} for kind, each in packet.trees.items()}
        yield Packet(packet.head, trees)


def fuzzed(packet: Packet, fields: Callable[[tuple[Any, ...]], bool] = bool) -> Iterator[Packet]:
    """Each field with some of the hostile values, each value at some of the fields, and other tensors."""
    draw = random.Random(0)
    for at in filter(fields, places(packet.head)):
        if at[0] != "kind":
            for value in draw.sample(HOSTILE, 8):
                yield Packet(changed(packet.head, at, value), packet.trees)
    yield from tensors(packet)


def faults(site: Site, packets: Iterable[Packet]) -> list[str]:
    """What is neither refused by name nor answered, takes longer than 10 s, or more than 1 GB of memory."""
    idle, found = limits.data_bytes(), []
    for packet in packets:
        begun = time.monotonic()
        reply = answered(site, packet)
        seconds, more = time.monotonic() - begun, limits.data_bytes() - idle
        sound = reply["kind"] in TOLD or (reply["kind"] == "failed" and reply.get("nonfinite"))
        if not sound or seconds > 10 or more > 1e9 or "\n" in reply.get("reason", ""):
            found.append(f"{str(reply)[:300]} after {seconds:.1f} s, {more / 1e6:.0f} MB: {str(packet.head)[:2000]}")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_any_value_of_any_field_is_refused_by_name_or_answered_within_the_limits(
    kind: str, requests: dict[str, Packet], tmp_path: Path
) -> None:
    site = Site(PresplitData(TOY, "a"), tmp_path, Policy(seconds=SECONDS, memory=MEGABYTES))
    assert answered(site, requests["join"])["kind"] == "joined"
    if kind not in ("join", "train"):
        assert answered(site, requests["train"])["kind"] == "done"
    wrong = faults(site, fuzzed(requests[kind]))
    assert not wrong, "\n".join(wrong)
    for asked, reply in (("join", "joined"), ("train", "done")):  # of a new session: a forged one may have joined
        packet = requests[asked]
        head = {**packet.head, "session": "last", "seq": 10**6}
        assert answered(site, Packet(head, packet.trees))["kind"] == reply


# --- the options of every algorithm --------------------------------------------------------------------------------

VALUES: list[Any] = [
    -1, 0, 3, 0.5, 2**31, 2**62, 10**30, 1e308, None, True, "x", "", "os:system", "1,2", [], [10**12], ["x"], {},
]  # fmt: skip


def honest(name: str, join: Packet) -> tuple[Packet, Packet]:
    """The requests to join and to train first for an algorithm, as a server sends them."""
    task = federation.task_of(replace(config_for(name), participation=1.0, rounds=1), TOY, None)
    algorithm = task.algorithm(task.plan)
    config = {key: value for key, value in task.config.to_json().items() if key not in (*HERE, "dataset")}
    layers = [layer.name for layer in task.layers]
    initial = tree.state_dict(task.model)
    plan = protocol.run_position(algorithm)["plan"]
    head = {**join.head, "config": config, "plan": plan, "layers": layers, "model": tree.digest(initial)}
    rnd = Round(0, algorithm.exchanges(0)[0], tuple(range(len(TOY.clients))))
    server = algorithm.server_state(tree.clone(initial))
    at = {"run": join.head["run"], "lane": "main", "from": "", "to": f"000001-{rnd.exchange}", "saved": ""}
    request = TrainRequest(0, rnd, algorithm.server_message(server, 0, rnd), ())
    stamp = {"session": join.head["session"], "seq": 10**6}
    train = protocol.request_packet(request, protocol.run_position(algorithm, **at))
    return Packet(head, {"start": initial}), Packet({**train.head, **stamp}, train.trees)


def with_options(name: str, packets: tuple[Packet, Packet], each: int) -> Iterator[tuple[Packet, Packet]]:
    """The same two requests without a plan, and with so many hostile values of every option."""
    (join, train), draw = packets, random.Random(name)
    yield join, Packet({**train.head, "plan": None}, train.trees)
    for key in {field.name for kind in (find(name), find(name).base_algorithm({})) for field in fields(kind.Config)}:
        for value in draw.sample(VALUES, each):
            options = {key: value}
            head = {**join.head, "config": {**join.head["config"], "options": options}}
            run = run_of(head)
            yield (
                Packet({**head, "run": run}, join.trees),
                Packet({**train.head, "options": options, "run": run}, train.trees),
            )


def check_options(
    name: str, each: int, requests: dict[str, Packet], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, packets = Site(PresplitData(TOY, "a"), folder / "patient"), honest(name, requests["join"])
    assert [answered(site, packet)["kind"] for packet in packets] == ["joined", "done"]
    site = Site(PresplitData(TOY, "a"), folder / "hasty", Policy(seconds=1.0, memory=MEGABYTES))
    monkeypatch.setattr(JoinedRun, "_take_model", lambda *given: None)  # a server that knows what to send
    for join, train in with_options(name, packets, each):
        wrong = faults(site, [join, train])
        assert not wrong, "\n".join(wrong)
        arm = {"algorithm": name, "options": join.head["config"]["options"], "layers": []}
        assert not faults(site, [Packet({**requests["race"].head, "arms": [arm]}, {})])


@pytest.mark.parametrize("name", sorted(registry()))
def test_any_option_of_an_algorithm_is_refused_by_name_or_answered(
    name: str, requests: dict[str, Packet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_options(name, 1, requests, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(registry()))
def test_every_hostile_value_of_an_option(
    name: str, requests: dict[str, Packet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_options(name, len(VALUES), requests, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedpft", {"queue": 2**62}), ("two_stage", {"queue": 1e308}), ("per_fedavg", {"alpha": 1e308}),
        ("pfedme", {"personal_lr": 1e308}), ("fedra", {"rank": 2**62}), ("fedpft", {"prompts": 1e30}),
    ],
)  # fmt: skip
def test_an_option_that_is_too_large_is_refused_by_its_name(
    name: str, options: dict[str, Any], requests: dict[str, Packet], tmp_path: Path
) -> None:
    site, (join, _) = Site(PresplitData(TOY, "a"), tmp_path), honest(name, requests["join"])
    arms = [{"algorithm": name, "options": options, "layers": []}]
    for packet in (
        Packet({**join.head, "config": {**join.head["config"], "options": options}}, {}),
        Packet({**requests["race"].head, "arms": arms}, {}),
    ):
        found = answered(site, packet)
        assert found["kind"] == "refused"
        assert f"{name}: {next(iter(options))} " in found["reason"]


@pytest.mark.parametrize("value", [1e-308, 1e-12])
def test_a_tiny_participation_is_refused_or_taken(value: float, requests: dict[str, Packet], tmp_path: Path) -> None:
    found = joined(requests, {"participation": value}, Site(PresplitData(TOY, "a"), tmp_path))
    assert found["kind"] == "joined"


def test_any_scaling_is_refused_by_name_or_taken(tmp_path: Path) -> None:
    class Remembering(InMemoryTransport):
        asked: ClassVar[dict[str, Packet]] = {}

        def ask(self, requests: Mapping[str, bytes], timeout: float | None = None, grace: Any = None) -> Any:
            for packet in map(decode, requests.values()):
                self.asked[packet.head["kind"]] = packet
            return super().ask(requests, timeout)

    site = hospital(tmp_path)
    line = Remembering({"north": site})
    federation.federate(CONFIG, line, progress=False)
    assert answered(site, line.asked["join"])["kind"] == "joined"
    wrong = faults(site, fuzzed(line.asked["join"], lambda at: at[0] == "scaling"))
    assert not wrong, "\n".join(wrong)
