"""Diagnosis of a federation: sites measure metrics on their own data, and send numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from uuid import uuid4

import numpy as np

from diagnostics.gradients.sensitivity import combine
from diagnostics.metrics.base import DEFAULT, METRICS
from diagnostics.report import Report
from fedlayers.remote import federation, packet_forms
from fedlayers.remote.codec import Packet, PacketError, fields
from fedlayers.remote.link import SiteLink
from fedlayers.remote.measured_rows import check_nulls
from fedlayers.remote.policy import check_alone
from fedlayers.remote.rpc import RpcClient
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.errors import CorruptError, listing
from fl_core.task import Task

MEASURED_BYTES = 2**26
ALONE = tuple(name for name in DEFAULT if not METRICS[name].pairs)
"""The default metrics, without those that compare clients."""
COMBINED = "federation_sensitivity"


def diagnose(
    config: RunConfig,
    link: SiteLink,
    metrics: Sequence[str] = ALONE,
    *,
    measure_batch: int = 256,
    mode: str = "eval",
    layers: Sequence[str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    null: Sequence[str] = (),
    null_draws: int = 1,
    command: str = "",
) -> Report:
    """Measure at every site after its first round of local training, as :func:`diagnostics.measure.diagnose_task` does.

    The rows are the same as in one process with all data. Only variants that combine all clients' samples are missing
    (one probe for everybody's features). ``select`` reads the rows.

    Args:
        config: of the training. metrics: names; those that compare clients are refused.
        measure_batch, mode, layers, options, null_draws: as for ``diagnose_task``; options are plain numbers and text.
        null: ``labels_within``, ``fresh``, or both.

    Returns:
        The report; ``left`` of its header has the bytes that left each site.

    Raises:
        UsageError: something that sites cannot measure alone, before any site is asked.
        RefusedError: a site does not allow it. PacketError: a site sent invalid rows.
    """
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    check(names, null, null_draws)
    line = RpcClient(link)
    facts = federation.request_site_facts(line)
    task = federation.task_of(config, federation.data_of(facts, config.dataset), None)
    run = uuid4().hex
    federation.join(line, task, facts, run)
    head = {
        "kind": "measure",
        "run": run,
        "metrics": names,
        "measure_batch": measure_batch,
        "mode": mode,
        "options": {name: dict(given) for name, given in (options or {}).items()},
        "null": list(null),
        "layers": None if layers is None else list(layers),
        "null_draws": null_draws,
    }
    packets = {name: Packet(dict(head)) for name in line.names}
    found: dict[str, dict[str, Any]] = {}
    for site, packet in line.ask(packets, MEASURED_BYTES):
        found[site] = _check_reply(site, federation.require_answer(site, packet), task, names)
    report = _report([found[name] for name in line.names], task, command or "diagnose")
    return replace(report, header={**report.header, "left": line.tally.by_site()})


def check(metrics: Sequence[str], null: Sequence[str] = (), null_draws: int = 1) -> None:
    """Refuse measurements that sites cannot make alone.

    Raises:
        UsageError: names the metrics that compare clients or the nulls that combine all clients' samples, and what is
            available.
    """
    check_alone(metrics)
    check_nulls(null, null_draws)


def _check_reply(site: str, packet: Packet, task: Task, metrics: Sequence[str]) -> dict[str, Any]:
    """Check and return a site's rows: only its own, with numbers and known names."""
    values = fields(packet.head, packet_forms.MEASURED)
    wanted, there = [layer.name for layer in task.layers], [layer["name"] for layer in values["header"]["layers"]]
    if there != wanted:
        raise PacketError(
            f"layers of site {site!r} must be those of the model, {listing(wanted)}; got {str(there)[:200]}."
        )
    layers, names = ["", *wanted], [METRICS[name].name for name in metrics]
    n_train = next(len(client.train) for client in task.data.clients if client.name == site)
    measured = (*values["rows"], *values["nulls"])
    for row in measured:
        if set(row) != set(rows.COLUMNS):
            raise PacketError(f"rows of site {site!r} must have the columns {', '.join(rows.COLUMNS)}; got others.")
        if row["client"] != site or row["client_b"] or row["metric"] not in names or row["layer"] not in layers:
            what = [row[name] for name in ("metric", "client", "client_b", "layer")]
            raise PacketError(f"rows of site {site!r} must be those of the request; got {str(what)[:200]}.")
        if row["n_train"] != n_train:
            raise PacketError(
                f"n_train of site {site!r} must be {n_train} in its rows; got {str(row['n_train'])[:40]}."
            )
        number = row["value"]
        known = isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
        if known != (row["status"] == "ok") or (number is not None and not known):
            raise PacketError(
                f"values of site {site!r} must be finite numbers with status ok; got {str(number)[:40]!r} with status "
                f"{str(row['status'])[:40]!r}."
            )
    try:
        rows.check_rows(f"what site {site!r} measured", measured)
    except CorruptError as error:
        raise PacketError(str(error)) from error
    return values


def _report(found: Sequence[Mapping[str, Any]], task: Task, command: str) -> Report:
    own = [row for values in found for row in values["rows"]]
    nulls = [row for values in found for row in values["nulls"]]
    first = {name: found[0]["header"][name] for name in packet_forms.MEASURED_HEADER}
    layers = [asdict(layer) for layer in task.layers]
    header = {**task.header(command), **first, "layers": layers, "schema": rows.SCHEMA, "absent": []}
    frames = (rows.frame(_with_combined(part)) for part in (own, nulls))
    frame, of_nulls = frames
    return replace(Report(frame, header), nulls=of_nulls)


def _with_combined(found: Sequence[rows.Row]) -> list[rows.Row]:
    """Return rows by metric, with the weighted mean over clients if the metric has one."""
    made: list[rows.Row] = []
    for metric in dict.fromkeys(row["metric"] for row in found):
        own = [row for row in found if row["metric"] == metric]
        made += own
        if metric == COMBINED:
            groups: dict[tuple[str, str], list[rows.Row]] = {}
            for row in own:
                if row["variant"] != "importance":
                    groups.setdefault((row["model"], row["variant"]), []).append(row)
            made += [row for group in groups.values() for row in _combine(group)]
    return made


def _combine(group: Sequence[rows.Row]) -> list[rows.Row]:
    """Return each layer's weighted mean over clients, or the reason why it is missing."""
    clients, layers = (list(dict.fromkeys(row[name] for row in group)) for name in ("client", "layer"))
    at = {(row["client"], row["layer"]): row for row in group}
    if len(at) < len(group) or len(at) < len(clients) * len(layers):
        raise PacketError(f"{COMBINED} must have one row for each site and layer; got others.")
    values = np.array([[at[c, layer]["value"] for layer in layers] for c in clients], dtype=np.float64)
    means = combine(values, [at[c, layers[0]]["n_train"] for c in clients])
    made = []
    for layer, mean in zip(layers, means.tolist(), strict=True):
        own = [at[client, layer] for client in clients]
        lacking = next((row for row in own if row["status"] != "ok"), None)
        totals = {name: sum(row[name] or 0 for row in own) for name in ("n_samples", "n_train")}
        told = {"value": mean, "status": "ok"}
        if lacking is not None:
            told = {"value": None, "status": f"client {lacking['client']!r}: {lacking['status']}"}
        made.append({**own[0], "client": "", **told, **totals})
    return made
