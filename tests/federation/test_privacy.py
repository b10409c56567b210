"""Noise on what leaves a site, and the account of it."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diagnostics.metrics.base import METRICS, Measurement
from fedlayers.remote import federation
from fedlayers.remote.codec import Packet, decode, encode
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.measured_rows import put_noised_values
from fedlayers.remote.noise import SPREAD
from fedlayers.remote.policy import Policy
from fedlayers.remote.privacy import Account, Privacy, add_noise_to_numbers, hide_message, spent
from fedlayers.remote.protocol import stamp_of
from fedlayers.remote.rpc import RefusedError
from fedlayers.remote.site import Site
from fedlayers.remote.site_config import SiteFile
from fedlayers.remote.site_data import PresplitData
from fedlayers.remote.site_diagnosis import diagnose
from fl_core.algorithms import Message
from fl_core.algorithms.fedpft import ATTENTION
from fl_core.data import FederatedData
from fl_core.data.federated import Split
from fl_core.errors import CorruptError, NonFiniteError, UsageError
from fl_core.rows import Row, row
from tests.conftest import TOY, federation as federated
from tests.federation.test_faults import Faulty
from tests.federation.test_in_memory import NAMES, SHORT, config_for, link

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="the account is opacus', of the extra federation")

MANY = 20_000
INITIAL = {"w": torch.zeros(MANY), "b": torch.zeros(3), "n": torch.tensor(5)}


def sent(scale: float = 1.0) -> Message:
    trees = {"model": {"w": scale * torch.ones(MANY) + 3, "b": 3 + torch.zeros(3), "n": torch.tensor(7)}}
    return Message(trees, {"layers": ["fc"], "importance": [3.0 * scale, 4.0 * scale], "batches": 4})


RECEIVED = Message({"model": {"w": 3 + torch.zeros(MANY), "b": 3 + torch.zeros(3)}})


def test_what_leaves_is_clipped_around_what_came_and_has_noise_of_that_size() -> None:
    privacy = Privacy(clip=2.0, clip_numbers=0.5, noise=1.5)
    left, count = hide_message(sent(), RECEIVED, INITIAL, privacy)
    moved = left.trees["model"]["w"] - 3
    assert count == 2
    assert float(moved.std()) == pytest.approx(3.0, rel=0.05)
    assert float(moved.mean()) == pytest.approx(2 / math.sqrt(MANY), abs=5 * 3 / math.sqrt(MANY))
    assert left.trees["model"]["w"].dtype == torch.float32
    assert int(left.trees["model"]["n"]) == 7
    assert left.meta["layers"] == ["fc"]
    assert left.meta["batches"] == 4


def test_noise_follows_the_operating_system_and_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded(source: Callable[[int], bytes] | None = None) -> tuple[Tensor, list[float]]:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        with monkeypatch.context() as patched:
            if source is not None:
                patched.setattr("os.urandom", source)
            left, _ = hide_message(sent(), RECEIVED, INITIAL, Privacy(2.0, 0.5, 1.5))
        return left.trees["model"]["w"], left.meta["importance"]

    first, again = seeded(), seeded()
    assert not torch.equal(first[0], again[0])
    assert first[1] != again[1]
    one, same, other = (seeded(random.Random(seed).randbytes) for seed in (1, 1, 2))
    assert torch.equal(one[0], same[0])
    assert one[1] == same[1]
    assert not torch.equal(one[0], other[0])
    assert one[1] != other[1]


def test_what_leaves_lies_on_one_grid_within_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    privacy = Privacy(clip=0.3, clip_numbers=0.7, noise=1.1)
    step = 0.7 * 1.1 / SPREAD
    numbers = np.random.default_rng(0).normal(size=1000).tolist()
    left = np.array(add_noise_to_numbers(numbers, privacy)) / step
    assert np.abs(left - left.round()).max() < 1e-6
    monkeypatch.setattr("fedlayers.remote.privacy.discrete_gaussian", lambda count: np.zeros(count, np.int64))
    clipped = np.array(add_noise_to_numbers(numbers, privacy))
    assert 0.69 < np.linalg.norm(clipped) <= 0.7
    assert np.abs(clipped / step - (clipped / step).round()).max() < 1e-6


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_without_much_noise_the_norm_is_at_most_the_clip(scale: float) -> None:
    left, _ = hide_message(sent(scale), RECEIVED, INITIAL, Privacy(clip=2.0, clip_numbers=0.5, noise=1e-9))
    moved = torch.cat([left.trees["model"]["w"] - 3, left.trees["model"]["b"] - 3]).double()
    assert float(moved.norm()) == pytest.approx(min(2.0, scale * math.sqrt(MANY)), rel=1e-2, abs=1e-3)
    numbers = left.meta["importance"]
    assert math.hypot(*numbers) == pytest.approx(min(0.5, 5 * scale), rel=1e-3)
    assert numbers[1] / numbers[0] == pytest.approx(4 / 3, rel=1e-3)


def test_what_was_not_received_is_clipped_around_the_initial_model_or_zero() -> None:
    message = Message({"model": {"w": torch.ones(MANY)}, "delta": {"w": torch.ones(MANY)}})
    left, count = hide_message(message, Message(), {"w": torch.full((MANY,), 5.0)}, Privacy(1e-3, 1e-3, 1e-6))
    assert count == 1
    assert torch.allclose(left.trees["model"]["w"], torch.tensor(5.0), atol=1e-4)
    assert torch.allclose(left.trees["delta"]["w"], torch.tensor(0.0), atol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_has_no_finite_norm_does_not_leave(value: float) -> None:
    tensors, numbers = sent(), sent()
    tensors.trees["model"]["b"][1] = value
    numbers.meta["importance"][0] = value
    for message in (tensors, numbers):
        with pytest.raises(NonFiniteError, match="finite"):
            hide_message(message, RECEIVED, INITIAL, Privacy(1.0, 1.0, 1.0))


def test_a_site_sends_and_spends_nothing_for_a_reply_that_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fl_core.algorithms.averaging.FedAvg.client_update", lambda *_: Message({}, {"found": [1.0, math.nan]})
    )
    with pytest.raises(NonFiniteError, match=r"site 'a': .*finite"):
        federation.federate(replace(SHORT, participation=1.0), noisy(tmp_path), progress=False)
    assert Account(Privacy(0.5, 0.5, 6.0), tmp_path / "a").spent() == 0


def test_a_mask_cannot_carry_noise() -> None:
    mask = Message({"mask": {"w": torch.ones(3, dtype=torch.bool)}})
    with pytest.raises(UsageError, match=r"'w'.*'mask'"):
        hide_message(mask, RECEIVED, INITIAL, Privacy(1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"releases": 3}', '{"releases": {"x": 1}}', '{"releases": {"0": 1}}',
             '{"releases": {"nan": 1}}', '{"releases": {"1.0": -5}}', '{"releases": {"1.0": 1e400}}']
)  # fmt: skip
def test_a_damaged_account_is_no_reason_to_spend_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / "privacy.json").write_text(text)
    with pytest.raises(CorruptError, match=r"privacy\.json is damaged"):
        Account(Privacy(0.5, 0.5, 6.0), tmp_path)


def test_the_account_is_opacus_and_lasts(tmp_path: Path) -> None:
    privacy = Privacy(1.0, 1.0, noise=8.0)
    account = Account(privacy, tmp_path / "site")
    first = account.release(1)
    assert first == spent({4.0: 1}, privacy.delta)
    assert account.release(2) == spent({4.0: 3}, privacy.delta) > first
    other = Account(replace(privacy, noise=2.0), tmp_path / "site")
    assert other.spent() == spent({4.0: 3}, privacy.delta)
    assert other.release(1) == spent({4.0: 3, 1.0: 1}, privacy.delta)
    # Gaussian mechanism, 3 releases of multiplier 4: its Renyi divergence gives this bound over all orders
    bound = min(3 * a / (2 * 16) + math.log(1 / 1e-5) / (a - 1) for a in (1 + k / 10 for k in range(1, 1000)))
    assert spent({4.0: 3}, 1e-5) <= bound


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ("clip = 1.0", "clip_numbers"),
        ("clip = 1.0\nclip_numbers = 1.0\nnoise = -1.0", "clip_numbers"),
        ("clip = 1.0\nclip_numbers = 1.0\nnoise = 1.0\ndelta = 2.0", "delta"),
        ("clip = 1.0\nclip_numbers = 1.0\nnoise = 1e-12", "clip_numbers"),
        ("clip = 1.0\nclip_numbers = 1.0\nnoise = nan", "clip_numbers"),
        ("epsilon = 3.0", "noise"),
        ("sigma = 1.0", "'sigma'"),
        ('noise = "much"', "float"),
    ],
)
def test_a_site_file_says_it_and_what_is_wrong(keys: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(f'name = "va"\n[data]\ndataset = "heart"\n[privacy]\n{keys}\n')
    with pytest.raises(UsageError, match=reason):
        SiteFile.read(path)


NOISY = {"clip": 0.5, "clip_numbers": 0.5, "noise": 6.0}


def noisy(folder: Path, **options: Any) -> InMemoryTransport:
    return link(folder, privacy=Privacy(**{**NOISY, **options}))


@pytest.mark.parametrize("name", ["fedavg", "fedper", "ditto"])
def test_a_run_says_what_each_site_has_spent(name: str, tmp_path: Path) -> None:
    config = replace(config_for(name), participation=1.0)
    found = federation.federate(config, noisy(tmp_path / "a"), progress=False)
    rows = [row for row in found.rows if row["metric"] == "epsilon"]
    assert [(row["round"], row["client"]) for row in rows] == [(k, name) for k in (1, 2) for name in NAMES]
    assert {row["variant"] for row in rows} == {"delta 1e-05"}
    assert {row["value"] for row in rows} == {spent({3.0: 1}, 1e-5), spent({3.0: 2}, 1e-5)}
    quiet = federation.federate(config, link(tmp_path / "b"), progress=False)
    names = sorted(quiet.server.trees["model"])
    gaps = [found.server.trees["model"][key] - quiet.server.trees["model"][key] for key in names]
    assert any(float(gap.abs().max()) > 0.1 for gap in gaps)


def test_what_is_observed_of_samples_stays_at_a_site_with_noise(tmp_path: Path) -> None:
    config = config_for("fedpft", options={"contrast": False})
    quiet, loud = (
        {row["metric"] for row in federation.federate(config, sites, progress=False).rows}
        for sites in (link(tmp_path / "a"), noisy(tmp_path / "b", noise=0.1))
    )
    assert ATTENTION in quiet
    assert ATTENTION not in loud


def test_beyond_its_limit_a_site_sends_nothing(tmp_path: Path) -> None:
    config = replace(SHORT, participation=1.0)
    limit = spent({3.0: 1}, 1e-5) + 1e-6
    out = tmp_path / "run"
    with pytest.raises(RefusedError, match=r"site 'a'.*epsilon"):
        federation.federate(config, noisy(tmp_path / "s", epsilon=limit), out, progress=False)
    with pytest.raises(RefusedError, match="epsilon"):
        diagnose(config, noisy(tmp_path / "s", epsilon=limit), ["grad_norm"])


def test_measurements_have_noise_and_no_errors_of_their_own(tmp_path: Path) -> None:
    quiet = diagnose(SHORT, link(tmp_path / "a"), ["grad_norm"]).frame
    loud = diagnose(SHORT, noisy(tmp_path / "b"), ["grad_norm"]).frame
    assert loud["stderr"].isna().all()
    assert loud["estimator"].str.contains("noise, epsilon").all()
    assert (loud["value"] != quiet["value"]).all()


class Recording(InMemoryTransport):
    """A link that keeps the last reply of each site."""

    def ask(self, requests: Any, timeout: float | None = None, grace: Any = None) -> Any:
        self.last: dict[str, Packet] = {}
        for site, reply in super().ask(requests, timeout):
            self.last[site] = decode(reply or b"")
            yield site, reply


def telling(measurement: Measurement) -> list[Row]:
    """A metric that tells of its samples wherever it can."""
    made = []
    for subject in measurement.subjects:
        x, y = subject.data
        where: dict[str, Any] = {"n_params": int(y.sum()), "n_samples": int(y[0]), "unit": str(y[1]), "stderr": 0.5}
        for layer in measurement.layers:
            mean = float(x.mean())
            where |= {"client": subject.client, "n_train": len(y), "estimator": f"mean {mean}", "layer": layer.name}
            made.append(row("telling", mean, **where))
            made.append(row("telling", None, status=f"it was {mean}", variant="none", **where))
    return made


def without_values(data: FederatedData, names: list[str], folder: Path, **options: Any) -> list[dict[str, Any]]:
    """What leaves the sites that measure on these data, but for the values."""
    sites = link(folder, data, policy=Policy(code=(TELLING,)), privacy=Privacy(**NOISY))._sites
    line = Recording({name: sites[name] for name in NAMES[:2]})
    diagnose(SHORT, line, names, measure_batch=16, **options)
    heads = [packet.head for _, packet in sorted(line.last.items()) if stamp_of(packet)]
    for head in heads:
        for each in (*head["rows"], *head["nulls"]):
            each["value"] = each["value"] is not None
    return heads


TELLING = f"{__name__}:telling"
EVERY_METRIC = [name for name, each in METRICS.members().items() if not each.pairs]


@pytest.mark.parametrize(
    ("names", "options"),
    [(EVERY_METRIC, {}), ([TELLING, "grad_norm"], {"null": ["labels_within", "fresh"]})],
    ids=["every metric", "one that tells, and nulls"],
)
def test_nothing_but_values_depends_on_the_data_of_a_site_with_noise(
    names: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    one = without_values(TOY, names, tmp_path / "one", **options)
    other = without_values(federated(seed=7), names, tmp_path / "other", **options)
    assert one == other
    assert all(each["stderr"] is None for head in one for each in head["rows"] if each["value"])


def test_a_value_that_the_data_lack_counts_as_0_without_saying_so(tmp_path: Path) -> None:
    first = TOY.clients[0]
    train = Split(first.train.x, torch.zeros_like(first.train.y))
    one_class = replace(TOY, clients=(replace(first, train=train), *TOY.clients[1:]))
    statuses = diagnose(SHORT, link(tmp_path / "a", one_class), ["knn_probe"]).frame["status"]
    assert statuses.str.contains("samples of one class").any()
    found = diagnose(SHORT, link(tmp_path / "b", one_class, privacy=Privacy(**NOISY)), ["knn_probe"]).frame
    other = diagnose(SHORT, link(tmp_path / "c", TOY, privacy=Privacy(**NOISY)), ["knn_probe"]).frame
    assert not found["status"].str.contains("class").any()
    assert found["value"].notna().tolist() == other["value"].notna().tolist()


@pytest.mark.parametrize("wrong", ["an error", "no rows", "infinity"])
def test_whether_the_data_can_be_measured_is_not_told_and_is_spent(wrong: str, tmp_path: Path) -> None:
    """A server could choose a model that overflows on samples beyond a bound, and ask until it knows a value."""
    account = Account(Privacy(0.5, 0.5, 6.0), tmp_path)
    shown = {"rows": [{"metric": "m", "value": 1.0, "stderr": 1.0, "estimator": ""}, {"metric": "n", "value": None}]}

    def measure() -> dict[str, list[dict[str, Any]]]:
        assert account.spent()  # recorded before
        if wrong == "an error":
            raise NonFiniteError("at step 1")
        return {"rows": [] if wrong == "no rows" else [{"metric": "m", "value": math.inf}]}

    put_noised_values(shown, measure, account.privacy, account)
    assert math.isfinite(shown["rows"][0]["value"])
    assert shown["rows"][1]["value"] is None
    with pytest.raises(NonFiniteError, match="without a value"):  # an importance that overflowed
        hide_message(Message({}, {"importance": [0.5, None]}), Message(), {}, account.privacy)


def test_eigenvalues_in_the_names_of_rows_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diagnostics.measure.diagnose_task", lambda *_, **__: pytest.fail("it was measured"))
    options = {"hessian_spectrum": {"density": 50}}
    with pytest.raises(RefusedError, match="density=50"):
        diagnose(SHORT, noisy(tmp_path), ["grad_norm", "hessian_spectrum"], options=options)


def test_a_repeated_request_is_spent_once(tmp_path: Path) -> None:
    faulty = Faulty(tmp_path, twice=True)
    for name, site in faulty.there.items():
        site.privacy = Privacy(0.5, 0.5, 6.0)
        site.account = Account(site.privacy, tmp_path / name)
    federation.federate(replace(SHORT, participation=1.0), faulty, progress=False)
    assert faulty.there["a"].account.spent() == spent({3.0: 2}, 1e-5)


def test_measured_twice_is_answered_from_disk_and_spent_once(tmp_path: Path) -> None:
    sites = noisy(tmp_path)
    requests: list[bytes] = []
    first = sites._sites["a"]
    answer = first.answer
    first.answer = lambda request: (requests.append(request), answer(request))[1]  # type: ignore[method-assign]
    diagnose(SHORT, sites, ["grad_norm"])
    again = noisy(tmp_path)._sites["a"]
    one, other = (decode(each.answer(requests[-1])).head for each in (again, again))
    assert one == other
    assert one["kind"] == "measured"
    assert again.account.spent() == spent({3.0: 1}, 1e-5)


@pytest.mark.parametrize(
    ("name", "options"), [("scaffold", {}), ("feddyn", {}), ("vanilla", {"base": "scaffold"})], ids=str
)
def test_algorithms_whose_clients_keep_what_must_equal_what_left_are_refused(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(RefusedError, match=rf"noise.*'{name}'"):
        federation.federate(config_for(name, options=options), noisy(tmp_path), progress=False)
    assert not list(tmp_path.rglob("*.state"))
    site = Site(PresplitData(TOY, "a"), tmp_path / "race", privacy=Privacy(1.0, 1.0, 1.0))
    head = {"session": "", "seq": 1, "number": 0, "seed": 0}
    arms = [{"algorithm": "fedavg", "options": {}, "layers": []}, {"algorithm": name, "options": options, "layers": []}]
    reply = decode(site.answer(encode(Packet({"kind": "race", **head, "arms": arms}))))
    assert re.search(rf"noise.*'{name}'", reply.head["reason"])


def test_layers_that_never_leave_are_refused_before_training(tmp_path: Path) -> None:
    def sites(folder: str, layer: str) -> InMemoryTransport:
        policy = Policy(never_send=(layer,))
        return InMemoryTransport(
            {name: Site(PresplitData(TOY, name), tmp_path / folder / name, policy) for name in NAMES}
        )

    layers = [layer.name for layer in federation.task_of(SHORT, TOY, None).layers]
    federation.federate(config_for("fedper"), sites("a", layers[-1]), progress=False)
    for name, layer in (("fedavg", layers[-1]), ("fedper", layers[0])):
        with pytest.raises(RefusedError, match=f"layer '{layer}'"):
            federation.federate(config_for(name), sites(name, layer), progress=False)
        assert not list((tmp_path / name).rglob("*.state"))
    with pytest.raises(RefusedError, match="'fc99'"):
        federation.federate(SHORT, sites("c", "fc99"), progress=False)
