"""Measurements at the sites against those of one process that has all data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from diagnostics import measure
from diagnostics.decide import select
from diagnostics.metrics.base import METRICS
from diagnostics.report import Report
from fedlayers.remote.codec import Packet, PacketError, decode, encode
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.policy import Policy
from fedlayers.remote.rpc import RefusedError
from fedlayers.remote.site import Site
from fedlayers.remote.site_data import PresplitData
from fedlayers.remote.site_diagnosis import diagnose
from fl_core import runner
from fl_core.errors import UsageError
from fl_core.rows import COLUMNS
from tests.conftest import TOY
from tests.federation.test_faults import Listening
from tests.federation.test_in_memory import NAMES, SHORT, link

ALONE = [name for name, metric in METRICS.members().items() if not metric.pairs]
KEYS = ["metric", "model", "variant", "layer", "client", "estimator", "unit"]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Report]:
    return measured(tmp_path_factory.mktemp("s"), ALONE)


def measured(folder: Path, metrics: list[str], **options: Any) -> tuple[Report, Report]:
    here = measure.diagnose_task(runner.assemble(SHORT, data=TOY), metrics, measure_batch=16, progress=False, **options)
    return here, diagnose(SHORT, link(folder), metrics, measure_batch=16, **options)


def ordered(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values(KEYS, kind="stable").reset_index(drop=True)[list(COLUMNS)]


def test_numbers_from_the_sites_are_those_of_one_process(both: tuple[Report, Report]) -> None:
    here, there = (ordered(report.frame) for report in both)
    apart = [row.variant not in METRICS[row.metric].pooled_variants for row in here.itertuples()]
    assert not all(apart)
    here = here[apart].reset_index(drop=True)
    assert set(here["metric"]) == set(there["metric"]) == set(ALONE)
    assert (there["client"] == "").any(), "combined rows"
    pd.testing.assert_frame_equal(there, here, check_exact=True, check_dtype=False)


def test_nulls_at_the_sites_are_those_of_one_process(tmp_path: Path) -> None:
    options: dict[str, Any] = {"null": ["labels_within", "fresh"], "null_draws": 2}
    here, there = (
        ordered(each.nulls) for each in measured(tmp_path, ["federation_sensitivity", "grad_norm"], **options)
    )
    assert sorted(set(here["model"])) == ["null fresh 1", "null labels_within 1", "null labels_within 2"]
    pd.testing.assert_frame_equal(there, here, check_exact=True, check_dtype=False)


@pytest.mark.parametrize("metric", ["federation_sensitivity", "grad_variance"])
def test_the_same_layers_are_selected(metric: str, both: tuple[Report, Report]) -> None:
    plans = [select.select(report, METRICS[metric].rule, metric=metric) for report in both]
    assert plans[0].shared == plans[1].shared
    assert plans[0].why.values == plans[1].why.values
    assert plans[0].why.clients == plans[1].why.clients


@pytest.mark.parametrize("metric", [name for name, metric in METRICS.members().items() if metric.pairs])
def test_what_compares_clients_is_refused_by_name(metric: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"got {metric}"):
        diagnose(SHORT, link(tmp_path), ["grad_norm", metric])


def test_what_sites_do_not_allow_is_refused_by_name(tmp_path: Path) -> None:
    for null in ("clients", "labels"):
        with pytest.raises(UsageError, match=f"got {null}"):
            diagnose(SHORT, link(tmp_path), ["grad_norm"], null=[null])
    with pytest.raises(RefusedError, match=r"'grad_norm'.*grad_variance"):
        diagnose(SHORT, link(tmp_path / "a", policy=Policy(metrics=("grad_variance",))), ["grad_norm"])
    with pytest.raises(UsageError, match=r"'grad_nrm'.*'grad_norm'"):
        diagnose(SHORT, link(tmp_path), ["grad_nrm"])
    line = Listening(tmp_path / "b")
    diagnose(SHORT, line, ["weight_magnitude"])
    packet = decode(line.asked["measure"])
    forged = {
        "got cka": {"metrics": ["cka"]},
        "'os:system'": {"metrics": ["os:system"]},
        "'os:popen'": {"options": {"os:popen": {}}},
        "got clients": {"null": ["clients"]},
    }
    for reason, change in forged.items():
        reply = decode(line._sites["a"].answer(encode(Packet({**packet.head, **change}))))
        assert reply.head["kind"] == "refused"
        assert reason in reply.head["reason"]


def test_a_measurement_is_not_repeated_for_a_replayed_request(tmp_path: Path) -> None:
    line = Listening(tmp_path)
    diagnose(SHORT, line, ["weight_magnitude"])
    packet = decode(line.asked["measure"])
    for site in (line._sites["a"], Site(PresplitData(TOY, "a"), tmp_path / "a")):  # also after a restart
        for change, reason in (({"seq": 0}, "number must be at least"), ({"session": "0"}, "earlier one")):
            reply = decode(site.answer(encode(Packet({**packet.head, **change}))))
            assert reply.head["kind"] == "refused"
            assert reason in reply.head["reason"]


FORGED = {
    "columns": {"password": "1"},
    "request": {"client": "c"},
    "'cka'": {"metric": "cka"},
    "'fc99'": {"layer": "fc99"},
    "'many'": {"value": "many"},
    "'odd'": {"status": "odd"},
    "n_train": {"n_train": 10**6},
    r"got \[\{\}": {"metric": {}},
    "damaged": {"variant": []},
    "does not fit": {"n_samples": 0.5},
}


@pytest.mark.parametrize("reason", FORGED)
def test_rows_that_are_not_a_sites_own_numbers_are_refused(reason: str, tmp_path: Path) -> None:
    def forged(reply: Packet) -> bytes:
        first, *rest = reply.head["rows"]
        return encode(Packet({**reply.head, "rows": [{**first, **FORGED[reason]}, *rest]}))

    with pytest.raises(PacketError, match=reason) as told:
        diagnose(replace(SHORT), Listening(tmp_path, forged, "measure"), ["weight_magnitude"])
    assert "site 'b'" in str(told.value)


def test_sites_send_numbers_alone(tmp_path: Path) -> None:
    class Watching(InMemoryTransport):
        def ask(self, requests: Any, timeout: float | None = None, grace: Any = None) -> Any:
            for site, reply in super().ask(requests, timeout):
                assert reply is not None
                packet = decode(reply)
                assert packet.trees == {}, site
                kinds.add(packet.head["kind"])
                yield site, reply

    kinds: set[str] = set()
    sites = link(tmp_path)._sites
    assert list(sites) == NAMES
    diagnose(SHORT, Watching(sites), ["grad_norm", "federation_sensitivity"])
    assert kinds == {"hello", "joined", "measured"}
