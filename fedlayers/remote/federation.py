"""The server of a federation: an ordinary run whose clients live at sites."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any
from uuid import uuid4

import fl_core
from fedlayers.instruments import default_instruments
from fedlayers.remote import packet_forms, protocol
from fedlayers.remote.codec import Packet, PacketError, fields
from fedlayers.remote.compression import check_compressed
from fedlayers.remote.joined_run import HERE, check_over_sites
from fedlayers.remote.link import SiteLink
from fedlayers.remote.policy import check_needs_sum
from fedlayers.remote.remote_clients import RemoteClients
from fedlayers.remote.rpc import RpcClient, TimeoutPolicy
from fedlayers.remote.secure_sum import require
from fedlayers.remote.site_data import Moments
from fl_core import runner, tree
from fl_core.config import AUTO, RunConfig
from fl_core.data import FederatedData
from fl_core.data.placeholder import placeholder_data
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.registry import DATASETS
from fl_core.dropout import read_trace
from fl_core.engine import Engine
from fl_core.errors import UsageError, about, check_distinct, listing, warn
from fl_core.loggers.base import Logger, loggers_of
from fl_core.models import lora
from fl_core.models.options import without_weights
from fl_core.names import printable
from fl_core.plan import LayerPlan
from fl_core.plan_selection import Instruments
from fl_core.records import store, writing
from fl_core.restore import FEDERATION, check_at_home
from fl_core.schedule import sampled_clients
from fl_core.task import Task, assemble

ALIKE = ("shape", "classes", "tokens", "words", "mean", "std", "images", "columns", "scale", "impute")
"""Facts in which all sites of a federation must agree."""
HELLO_BYTES = 2**24
MOST = 2.0**128
"""No 32-bit number is larger, so no feature is."""
OWN = "own"
"""The dataset's name if sites bring their own data."""


def federate(
    config: RunConfig,
    link: SiteLink,
    out: Path | str | None = None,
    *,
    plan: LayerPlan | None = None,
    timeouts: TimeoutPolicy | None = None,
    instruments: Instruments | None = None,
    command: str = "",
    progress: bool = True,
    until: int | None = None,
    log: Collection[str | Logger] = (),
    secure_sum: bool = False,
    compress: str = "",
    known: Sequence[Mapping[str, Any]] = (),
) -> Engine:
    """Run an algorithm over the sites of a link.

    Rows and the server's state have the same bits as with ``fedlayers run --stack off``.

    Args:
        config: of the run. Its dataset is that of the sites (:func:`data_of`); each site says how its data are read.
        out: the run directory. It is an ordinary one, without clients' states.
        timeouts: how long to wait for clients; by default for ever. Rows ``reply_lost`` name missing clients.
        plan, instruments, command, progress, until, log: as for :func:`fl_core.runner.run`.
        secure_sum: the server receives updates only as their sum, in fixed point, so that bits differ from those of one
            process (:mod:`fedlayers.remote.secure_sum`). Each row ``secure_sum`` has the number of summed clients.
        compress: ``bf16`` sends updates in half the bytes, so that bits differ from those of one process
            (:mod:`fedlayers.remote.compression`). The rows ``bytes_up`` name it.
        known: the facts from an earlier :func:`request_site_facts`, which must be unchanged.

    Warns:
        UserWarning: the plan was edited by hand, or shares none or all of the layers that train.

    Raises:
        UsageError: sites that do not fit together, or a configuration that needs what only sites have; before anything
            is written.
        RefusedError: a site refuses; gives its name and reason.
    """
    line = RpcClient(link, timeouts)
    if secure_sum:
        check_summable(config, line.names)
    if compress:
        check_compressed(compress, config.algorithm)
        if secure_sum:
            raise UsageError("compress must be left out with a secure sum, which has fixed-point numbers; got both.")
    facts = request_site_facts(line)
    if known:
        check_same(list(map(_identity_of, known)), facts, "this federation")
    data = data_of(facts, config.dataset)
    task = task_of(config, data, plan)
    instruments = instruments or default_instruments()
    runner.plan_selection_of(task, instruments).check(task.algorithm(task.plan))
    if task.config.dropout_trace is not None:
        task.lost_replies = read_trace(task.config.dropout_trace, line.names)
    if out is not None:
        writing.check_free(Path(out))
    for note in (*task.said, *task.algorithm_notes()):  # on their data the sites are silent
        warn(note)
    run = uuid4().hex
    ways = {key: value for key, value in (("secure_sum", secure_sum), ("compress", compress)) if value}
    home = join(line, task, facts, run, **ways)
    beside = {FEDERATION: {"run": run, **ways, "sites": [_identity_of(each) for each in facts]}}
    how = runner.Execution(progress, until, loggers=loggers_of(log), clients=home)
    return runner.start(task, out, instruments, how, beside=beside, command=command)


def resume(
    out: Path | str,
    link: SiteLink,
    *,
    timeouts: TimeoutPolicy | None = None,
    instruments: Instruments | None = None,
    allow_code: str | Collection[str] = (),
    init: Path | str | None = None,
    progress: bool = True,
    until: int | None = None,
    log: Collection[str | Logger] = (),
) -> Engine:
    """Resume a federation's run from its last checkpoint, with the same final bits as an uninterrupted run.

    Raises:
        UsageError: not a federation's run, or its sites have changed.
        CorruptError: stored files are damaged. RefusedError: as for :func:`federate`.
    """
    stored = store.Run(out).task_config()
    check_at_home(Path(out), stored, True)
    line = RpcClient(link, timeouts)
    facts = request_site_facts(line)
    known = stored[FEDERATION]
    check_same(known["sites"], facts, str(out))
    data = server_view(facts, stored["dataset"])

    def home(_: Mapping[str, Any], task: Task) -> RemoteClients:
        ways = {key: known[key] for key in packet_forms.OPTIONAL if known.get(key)}
        return join(line, task, facts, known["run"], **ways)

    return runner.resume(
        out,
        instruments=instruments or default_instruments(),
        data=data,
        allow_code=allow_code,
        init=init,
        progress=progress,
        until=until,
        log=log,
        clients=home,
    )


def check_summable(config: RunConfig, sites: Sequence[str]) -> None:
    """Refuse a run that cannot have a secure sum.

    Raises:
        UsageError: the algorithm needs each update, the plan needs measurements, or too few sites take part in a round.
    """
    require()
    check_needs_sum(config.algorithm)
    if config.plan == AUTO:
        raise UsageError("plan must be a given one with a secure sum; got 'auto', which measures single clients.")
    from fedlayers.remote.secure_sum.members import check_group  # here alone: it needs cryptography

    check_group([sites[client] for client in sampled_clients(config.seed, 0, len(sites), config.participation)])


def check_same(before: Sequence[Mapping[str, Any]], facts: Sequence[Mapping[str, Any]], what: str) -> None:
    """Check that the sites and their data are unchanged.

    Args:
        before: name, sizes and digest of each site at the start.

    Raises:
        UsageError: names the first changed site, or all.
    """
    for then, now in zip(before, map(_identity_of, facts), strict=False):
        if then != now:
            raise UsageError(
                f"site {now['name']!r} must have the data with which {what} began, as {then['name']!r}; got others. "
                "Bring the data back, or begin in another directory."
            )
    if len(facts) != len(before):
        names = listing(site["name"] for site in before)
        raise UsageError(f"{what} must have the sites of its beginning, {names}; got {len(facts)}. Start those sites.")


def require_answer(site: str, packet: Packet | None) -> Packet:
    """Return the reply of a site that must reply.

    Raises:
        UsageError: no reply came in time.
    """
    if packet is None:
        raise UsageError(f"site {site!r} does not answer. Start it again, or give it more time (--timeout).")
    return packet


def request_site_facts(line: RpcClient) -> list[dict[str, Any]]:
    """Ask every site for its facts. Return them in the federation's order.

    Raises:
        UsageError: no sites, two with one name, or one that does not fit the others.
        RefusedError: a site refuses.
    """
    check_distinct("a federation", "site", line.names)
    hello = Packet({"kind": "hello", **protocol.versions()})
    found = {}
    for site, packet in line.ask(dict.fromkeys(line.names, hello), HELLO_BYTES, line.timeouts.start):
        reply = require_answer(site, packet)
        protocol.check_spoken(f"site {site!r}", reply.head)
        with about(f"site {site!r}", PacketError):
            found[site] = fields(reply.head, packet_forms.FACTS)
    facts = [found[site] for site in line.names]
    _check_alike(line.names, facts)
    return facts


WAYS = {
    "classes": "Name all of the federation in each site's file: classes = [...].",
    "words": "List the same vocabulary or categories in each site's file, in the same order.",
}
"""Ways to make the sites agree on a key."""


def _check_alike(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> None:
    first = facts[0]
    for name, each in zip(names, facts, strict=True):
        if each["name"] != name:
            raise UsageError(
                f"the name in the file of site {name!r} must be that of its key; got {each['name']!r}. Correct it."
            )
        for package, key, own in (("fedlayers", "version", fl_core.__version__), ("torch", "torch", protocol.TORCH)):
            if each[key] != own:
                note = f"site {name!r} has {package} {_short(each[key])}, the server {own}: bits may differ"
                warn(note)
        for what in ALIKE:
            if each[what] != first[what]:
                way = WAYS.get(what, f"Let all sites have the same {what}.")
                raise UsageError(
                    f"{what} of site {name!r} must be that of site {names[0]!r}, {_short(first[what])}; got "
                    f"{_short(each[what])}. {way}"
                )
        if (count := sum(each["sizes"].values())) > packet_forms.MOST_SAMPLES:
            raise UsageError(
                f"site {name!r} must have at most {packet_forms.MOST_SAMPLES:,} samples; got {count:,}. Stop this site."
            )
        if not each["sizes"]["train"]:
            raise UsageError(f"site {name!r} must have at least 1 training sample; got 0. Stop this site.")


def _short(value: object) -> str:
    text = printable(str(value))
    return text if len(text) <= 60 else f"{text[:60]}…"


def data_of(facts: Sequence[Mapping[str, Any]], asked: str) -> FederatedData:
    """Return the federation's data under the name of the sites' common dataset. A run uses that dataset's defaults.

    Sites with data of their own have no such name. Their data are called :data:`OWN` and use the defaults of their
    shape.

    Args:
        asked: the name in a run's configuration: that dataset, the default, or any name for the sites' own data.

    Raises:
        UsageError: another registered dataset was asked for.
    """
    held = {each["dataset"] for each in facts}
    name = held.pop() if len(held) == 1 else ""
    if asked in DATASETS and asked not in (name, RunConfig.dataset):
        has = repr(name) if name else "data of their own"
        raise UsageError(f"dataset must be what the sites have, {has}; got {asked!r}. Leave --dataset out.")
    return server_view(facts, name or (OWN if asked in DATASETS else asked))


def server_view(facts: Sequence[Mapping[str, Any]], dataset: str) -> FederatedData:
    """Return the federation's data as the server knows them."""
    return placeholder_data(dataset, facts[0], {each["name"]: each for each in facts})


def task_of(config: RunConfig, data: FederatedData, plan: LayerPlan | None) -> Task:
    """Return the task of a run over sites, with clients one by one.

    Raises:
        UsageError: the configuration needs what only sites have, or asks for stacked clients.
    """
    check_over_sites(config)
    if config.stack == "on":
        raise UsageError("stack must be off over sites; got 'on'. Leave it out, because each site trains one client.")
    return assemble(replace(config, stack="off", workers=0), data=data, plan=plan)


def join(line: RpcClient, task: Task, facts: Sequence[Mapping[str, Any]], run: str, **ways: Any) -> RemoteClients:
    """Let every site build the run's task with its own samples. Return the client backend.

    Args:
        ways: ``secure_sum`` and ``compress`` as of :func:`federate`, without those that are off.

    Raises:
        RefusedError: a site does not allow it, or has a different model.
    """
    config = {key: value for key, value in task.config.to_json().items() if key not in (*HERE, "dataset")}
    config["model_options"] = without_weights(str(task.config.model), task.config.model_options)  # the start has them
    initial = tree.state_dict(task.model)
    whole = lora.full_state(task.model)
    prepares = (facts[0]["scale"], facts[0]["impute"]) != ("none", "none")
    common = {
        "kind": "join",
        "run": run,
        "session": line.session,
        "dataset": task.data.name,
        "config": config,
        "plan": protocol.run_position(task.algorithm(task.plan))["plan"],
        "sites": [_identity_of(each) for each in facts],
        "model": tree.digest(whole),
        "layers": [layer.name for layer in task.layers],
        "scaling": scaling_of(line, facts, task.config.seed).to_json() if prepares else None,
        **ways,
    }
    packets = {name: Packet({**common, "number": number}, {"start": whole}) for number, name in enumerate(line.names)}
    for site, packet in line.ask(packets, HELLO_BYTES, line.timeouts.start):
        fields(require_answer(site, packet).head, packet_forms.JOINED)
    if ways.get("secure_sum"):
        from fedlayers.remote.secure_sum.at_server import SummingClients  # here alone: it needs cryptography

        return SummingClients(line, line.names, initial, task.data.task, run)
    return RemoteClients(line, line.names, initial, task.data.task, run, compress=ways.get("compress", ""))


def scaling_of(line: RpcClient, facts: Sequence[Mapping[str, Any]], seed: int) -> Preprocessing:
    """Return the preprocessing that scales and fills features, from the moments of all sites' training samples.

    Raises:
        RefusedError: a site refuses to send moments. PacketError: a site sent invalid moments.
        UsageError: no site has a value of one feature.
    """
    packets = {name: Packet({"kind": "moments", "number": k, "seed": seed}) for k, name in enumerate(line.names)}
    trained = {name: each["sizes"]["train"] for name, each in zip(line.names, facts, strict=True)}
    found: dict[str, Moments] = {}
    for site, packet in line.ask(packets, HELLO_BYTES, line.timeouts.start):
        told = fields(require_answer(site, packet).head, packet_forms.TOLD)
        width, present = len(facts[0]["columns"]) or facts[0]["shape"][0], told["present"]
        if {len(told[key]) for key in ("present", "mean", "squares")} != {width}:
            raise PacketError(f"moments of site {site!r} must be those of {width} features; got others.")
        if told["count"] != trained[site] or max(present) > trained[site]:
            raise PacketError(f"moments of site {site!r} must be those of its {trained[site]} samples; got others.")
        mean, squares = told["mean"], told["squares"]
        if max(map(abs, mean)) > MOST or min(squares) < 0 or max(squares) > 4 * MOST**2 * trained[site]:
            raise PacketError(f"moments of site {site!r} must be those of 32-bit numbers; got others.")
        found[site] = Moments(told["count"], tuple(present), tuple(map(float, mean)), tuple(map(float, squares)))
    all_sites = reduce(Moments.merge, (found[name] for name in line.names))
    return all_sites.preprocessing(facts[0]["columns"], facts[0]["scale"], facts[0]["impute"])


def _identity_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: facts[key] for key in ("name", "sizes", "digest")}
