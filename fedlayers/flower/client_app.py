"""The ClientApp of a site. Each message builds the client's task from the site's own files, and does one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from flwr.app import Context, Message as FlowerMessage
from flwr.clientapp import ClientApp

import fl_core
from fedlayers.flower.federation import Packet, error_packet, federated, packet_of
from fedlayers.flower.site import Site, States
from fedlayers.runs import default_instruments
from fl_core import rows, storage, tree
from fl_core.algorithms.base import Algorithm, Message, Round, State, find
from fl_core.config import RunConfig
from fl_core.data.preprocessing import Preprocessing
from fl_core.errors import UsageError
from fl_core.plan import LayerPlan
from fl_core.rounds.clients import (
    SCORED,
    ClientReply,
    ClientRequest,
    FinetuneRequest,
    ScoreRequest,
    TrainRequest,
    received_bytes,
)
from fl_core.run.runner import check_device
from fl_core.run.task import Task, assemble
from fl_core.training.phases import Training
from fl_core.tree import Tree

NODE_KEY, NUMBER_KEY = "site", "partition-id"
"""Keys of the node config: the site's TOML file, and the number of a simulated node.

All simulated nodes read one file, which the run config names.
"""


def answer(
    work: Callable[[Site, Packet], Packet], message: FlowerMessage, context: Context
) -> FlowerMessage:
    """Answer a message of the server by a function of the site. An error becomes one line, here and at the server.

    Args:
        work: (the site, the contents of the message) -> the contents of the answer.
        message: Flower's message.
        context: Flower's context, whose config names the site's TOML file.
    """
    try:
        node = context.node_config
        number = node.get(NUMBER_KEY)
        run_config = context.run_config
        if number is None:
            run_config = node
        site = Site(str(run_config.get(NODE_KEY, "")), number)
        reply = work(site, packet_of(message.content, storage.memory()))
    except Exception as error:  # carried to the server
        reply = error_packet(error)
        print(f"fedlayers: {reply.head['text']}", flush=True)
    return FlowerMessage(reply.records(), reply_to=message)


def facts(site: Site, packet: Packet) -> Packet:
    """Return the names and sizes that the server needs first: the result of :meth:`Site.facts`.

    Args:
        site: the site.
        packet: the request. Its head has ``version``, the server's version of this package.

    Raises:
        UsageError: the site has another version.
    """
    version = packet.head.get("version")
    if version != fl_core.__version__:
        raise UsageError(
            f"fedlayers must be the server's version, {version}; got {fl_core.__version__}. Install the same."
        )
    return Packet(site.facts())


def begin(site: Site, packet: Packet) -> Packet:
    """Build and check the task of a run, and store the run's description.

    The model is compared with that of the server.

    Args:
        site: the site.
        packet: the request. Its head has ``run`` (the run's name), ``config``, ``data`` (the result of
            :func:`fedlayers.flower.federation.common`), ``plan`` and ``model`` (the digest of the initial model). Its
            trees have ``start``, pretrained weights, which may be empty.

    Returns:
        An empty packet.

    Raises:
        UsageError: the initial model differs from the server's, or the site lacks its
            device.
    """
    job, start = packet.head, packet.trees["start"]
    task = _task(site, job, start)
    check_device(site.file.device, task)
    if tree.digest(tree.full_state(task.model)) != job["model"]:
        raise UsageError(
            "the initial model must be the server's; got other weights. Install the same versions of torch."
        )
    States(site.folder, job["run"]).begin(job, start)
    return Packet({})


def work(site: Site, packet: Packet) -> Packet:
    """Train, fine-tune or score the client's model, as a request of the server asks.

    Args:
        site: the site.
        packet: the request, as :class:`fedlayers.flower.clients.SiteClients` makes it. ``kind`` in its head is
            ``train``, ``tune`` or ``score``.

    Returns:
        The reply. Its head has the form :data:`fedlayers.flower.checks.REPLY`, and its trees are the client's message.
    """
    head = packet.head
    states, task, number, algorithm, state = _restored(site, head)
    if head["kind"] == "train":
        index, exchange, sampled = head["round"]
        rnd = Round(index, exchange, tuple(sampled))
        is_measured = any(phase.observe for phase in algorithm.phases(rnd, number))
        runner = task.client_runner(
            default_instruments().observers if is_measured else None
        )
        runner.use(algorithm)
        reply = runner.run(
            TrainRequest(
                number,
                rnd,
                Message(packet.trees, head["meta"]),
                tuple(head["score"]),
                state=state,
            )
        )
        if head["to"]:
            states.save(head["to"], reply.state, head["from"])
        assert reply.message is not None
        return _packet(head, reply, reply.message, reply.state)
    runner = task.client_runner()
    runner.use(algorithm)
    models = _models(algorithm, head, packet.trees["sent"], state)
    received = received_bytes(models, state)
    version_and_round = (head["from"], head["done"])
    request: ClientRequest
    if head["kind"] == "tune":
        models = {algorithm.evaluates: models[algorithm.evaluates]}
        request = FinetuneRequest(number, head["done"], models=models)
    else:
        models = dict(sorted((models | states.tuned(*version_and_round)).items()))
        request = ScoreRequest(number, head["done"], models=models)
    reply = runner.run(request)
    if head["kind"] == "tune":
        states.save_tuned(*version_and_round, reply.models)
    reply.received = received
    return _packet(head, reply, Message(), state)


def losses(site: Site, packet: Packet) -> Packet:
    """Return sums of a run's losses at the temperatures of :mod:`fedlayers.decision.sums`, after fine-tuning.

    The client's outputs are stored at the site, for :func:`products`.

    Args:
        site: the site.
        packet: the request. Its head has ``run`` (the run's name), ``from`` (the version of the client's state),
            ``done`` (the round), ``amounts`` (fields of :class:`~fedlayers.decision.losses.Tuning`), and the
            ``algorithm``, ``options``, ``plan`` and ``models`` of a score request. Its trees have ``sent``, the tensors
            of the server's model.

    Returns:
        A packet with this head: ``run``; ``sums``, for each amount the sums [2 halves][T][2] of
        :func:`~fedlayers.decision.sums.sums_of_halves`, or None if it diverged; ``base``, the same sums of the base
        rate; ``weights`` and ``labels`` of the halves; and ``excess``, the sum of training losses above the base
        rate's.

    Raises:
        UsageError: the client has only a part of the model, or too few samples
            (:func:`~fedlayers.decision.sums.check_samples`).
    """
    from diagnostics.tuning.copies import Tuner
    from fedlayers.decision import sums
    from fedlayers.decision.losses import Predictor, SeedLosses, Tuning, outputs_after
    from fl_core.run.restore import copy_with

    head, own_name = packet.head, site.name
    states, task, number, algorithm, state = _restored(site, head)
    models = _models(algorithm, head, packet.trees["sent"], state)
    models |= states.tuned(head["from"], head["done"])
    weights = models[rows.used_model(models)]
    if weights.keys() < tree.named_tensors(task.model).keys():
        raise UsageError(
            f"client {own_name!r} must have a whole model to score; got a part of it."
        )
    model, client = copy_with(task.model, weights), task.data.clients[number]
    seed_losses = SeedLosses(task, only=own_name)
    tuner = Tuner(
        model,
        task.criterion,
        Training.of(task.config.training),
        [(client.train, client.validation)],
        task.config.execution.seed,
        head["done"],
        [tree.state_dict(model)],
        samples=None,
        near=[[0, 1]],
        beside=[client.test],
        numbers=[number],
    )
    amounts = [Tuning(*entry) for entry in head["amounts"]]
    outputs_of = outputs_after(
        tuner, task, float(task.config.training.lr or 0), amounts
    )
    by_amount: dict[str, Tree] = {}
    sent_heads: list[Any] = []
    for amount_number, amount in enumerate(amounts):
        if amount not in outputs_of:
            sent_heads.append(None)
            continue
        logits = task.criterion.logits(outputs_of[amount]).double()
        split_logits = logits.split([len(client.validation), len(client.test)])
        outputs = {
            split: {own_name: logits_of_split}
            for split, logits_of_split in zip(SCORED, split_logits, strict=True)
            if len(logits_of_split)
        }
        sent_heads.append(
            sums.sums_of_halves(seed_losses, Predictor("", outputs), own_name)
        )
        by_amount[str(amount_number)] = {
            split: tensor[own_name] for split, tensor in outputs.items()
        }
    states.save_outputs(by_amount)
    return Packet(
        {
            "run": head["run"],
            "sums": sent_heads,
            "base": sums.sums_of_halves(seed_losses, seed_losses.base_rate, own_name),
            "weights": sums.weights_of_halves(seed_losses, own_name),
            "labels": sums.labels_of_halves(seed_losses, own_name),
            "excess": seed_losses.excess(own_name, model),
        }
    )


def products(site: Site, packet: Packet) -> Packet:
    """Return sums and products over groups of the losses of several ways, at their temperatures, in each split.

    Args:
        site: the site.
        packet: the request. Its head has ``base``, the three temperatures of the base rate
            (:class:`~fedlayers.decision.sums.Calibration`); ``first``, the first seed; and ``ways``, for each way its
            ``run``, the position of its ``amount`` of fine-tuning, and its ``temperatures``.

    Returns:
        A packet whose head has the result of :func:`~fedlayers.decision.sums.group_sums` for each split, with
        ``shared``: the number of samples that are in this split in the first seed, too.

    Raises:
        UsageError: the client has too few samples
            (:func:`~fedlayers.decision.sums.check_samples`).
    """
    from fedlayers.decision import sums
    from fedlayers.decision.losses import Predictor, SeedLosses

    head, own_name = packet.head, site.name
    job, start = States(site.folder, head["ways"][0]["run"]).job()
    task = _task(site, job, start)
    seed_losses, predictors = SeedLosses(task, only=own_name), []
    predictors.append((seed_losses.base_rate, sums.Calibration(*head["base"])))
    for way_head in head["ways"]:
        outputs = States(site.folder, way_head["run"]).outputs(str(way_head["amount"]))
        predictor = Predictor(
            "", {split: {own_name: tensor} for split, tensor in outputs.items()}
        )
        predictors.append((predictor, sums.Calibration(*way_head["temperatures"])))
    number, first_seed = list(job["data"]["sites"]).index(own_name), head["first"]
    seed = task.config.execution.seed
    sums_of_split = {}
    for split in SCORED:
        sums_of_split[split] = sums.group_sums(seed_losses, split, own_name, predictors)
        n_shared = site.shared(
            number, first_seed, seed, job["data"]["split_seed"], split
        )
        sums_of_split[split]["shared"] = n_shared
    return Packet(sums_of_split)


def measure(site: Site, packet: Packet) -> Packet:
    """Train the client's first round, and return the rows that metrics make of it.

    Args:
        site: the site.
        packet: the request. Its head has ``run``, the run's name, and ``metrics``, their names.

    Returns:
        A packet with ``header`` and ``rows`` of the report, for this client alone.
    """
    from diagnostics.measure import diagnose_task  # takes long to import

    job, start = States(site.folder, packet.head["run"]).job()
    report = diagnose_task(
        _task(site, job, start),
        packet.head["metrics"],
        clients=[site.name],
        progress=False,
    )
    frame = report.frame[report.frame["client"] == site.name]
    return Packet({"header": report.header, "rows": rows.records(frame)})


def _restored(
    site: Site, head: dict[str, Any]
) -> tuple[States, Task, int, Algorithm, State]:
    """Return what a request needs, from the site's files and the request's head.

    Returns:
        The stored states of the run, its task, the client's number, the algorithm, and
        the client's state. If the request names no version of it, this is the initial
        state.
    """
    states = States(site.folder, head["run"])
    job, start = states.job()
    task = _task(site, job, start)
    number = list(job["data"]["sites"]).index(site.name)
    algorithm = find(head["algorithm"], head["options"])(
        task.task_info, None, head["options"]
    )
    if head["plan"] is not None:
        algorithm = algorithm.with_plan(LayerPlan.from_json(head["plan"]))
    if head["from"]:
        return states, task, number, algorithm, states.load(head["from"])
    state = algorithm.client_state(tree.state_dict(task.model), number).clone()
    return states, task, number, algorithm, state


def _task(site: Site, job: dict[str, Any], start: Tree) -> Task:
    """Return the task of a run with the site's own samples."""
    data_facts = job["data"]
    stored_preprocessing = data_facts["preprocessing"]
    number, seed = list(data_facts["sites"]).index(site.name), job["config"]["seed"]
    preprocessing = (
        None
        if stored_preprocessing is None
        else Preprocessing.from_json(stored_preprocessing)
    )
    client = site.client(number, seed, preprocessing, data_facts["split_seed"])
    data = federated(data_facts, client)
    config = RunConfig(**job["config"], stack="off", device=site.file.device)
    plan = None if job["plan"] is None else LayerPlan.from_json(job["plan"])
    return assemble(config, data=data, plan=plan, start=start or None)


def _models(
    algorithm: Algorithm, head: dict[str, Any], sent: Tree, state: State
) -> dict[str, Tree]:
    """Return the client's models by name, from tensors of the server and its own.

    Args:
        algorithm: makes the models if the request has no template.
        head: the head of the request. ``models`` is the template of
            :class:`~fedlayers.flower.clients.SiteClients`, or None.
        sent: the tensors that the server has sent.
        state: the client's state.
    """
    if head["models"] is None:
        return algorithm.models(State({"model": sent}), state, Round(head["done"]))
    return {
        model: {
            name: sent[source]
            if isinstance(source, str)
            else state.trees[source[0]][source[1]]
            for name, source in parts.items()
        }
        for model, parts in head["models"].items()
    }


def _packet(
    request_head: dict[str, Any], reply: ClientReply, message: Message, state: State
) -> Packet:
    head = {
        "stage": request_head["stage"],
        "meta": message.meta,
        "outline": {kind: list(tensors) for kind, tensors in state.trees.items()},
        "work": reply.work,
        "scores": reply.scores,
        "observations": [asdict(observation) for observation in reply.observations],
        "received": reply.received,
    }
    return Packet(head, message.trees)


def client_app(mods: Sequence[Any] = ()) -> ClientApp:
    """Return the ClientApp of a site.

    Args:
        mods: Flower's modifiers of training, such as a clipped update with noise.
    """
    app = ClientApp()
    app.query("facts")(partial(answer, facts))
    app.query("describe")(
        partial(answer, lambda site, packet: Packet(site.describe(**packet.head)))
    )
    app.query("clipped")(
        partial(answer, lambda site, packet: Packet(site.clipped(**packet.head)))
    )
    app.query("begin")(partial(answer, begin))
    app.query("measure")(partial(answer, measure))
    app.query("losses")(partial(answer, losses))
    app.query("products")(partial(answer, products))
    app.train(mods=list(mods))(partial(answer, work))
    app.evaluate()(partial(answer, work))
    return app


app = client_app()
