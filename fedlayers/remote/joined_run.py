"""A site's part of one run: the task with its own samples, its client's states, and the order of the requests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedlayers.remote import metrics, packet_forms, protocol
from fedlayers.remote.codec import Packet, PacketError, check_trees, decode, encode_parts, fields, most_bytes
from fedlayers.remote.compression import check_compressed, compress_message
from fedlayers.remote.host import Host
from fedlayers.remote.measured_rows import Tables, check_nulls, check_values_alone, own_rows, put_noised_values
from fedlayers.remote.policy import check_joined
from fedlayers.remote.privacy import hide_message
from fedlayers.remote.state_store import StateStore, Turns
from fl_core import tree
from fl_core.algorithms.base import Algorithm, Message, Round, find
from fl_core.algorithms.model_template import ClientTensorRef, ModelTemplate, StateSchema
from fl_core.config import DEALING, READING, RunConfig, check
from fl_core.data.placeholder import placeholder_client, placeholder_data
from fl_core.data.preprocessing import Preprocessing
from fl_core.errors import RunError, UsageError, listing
from fl_core.execution.client_backend import LocalClients
from fl_core.execution.executors import Serial
from fl_core.execution.requests import TUNED, ClientReply, ClientRequest, FinetuneRequest, ScoreRequest, TrainRequest
from fl_core.limits import lacks_memory, parsed_json
from fl_core.models import lora
from fl_core.models.counting import check_while_building
from fl_core.plan import LayerPlan
from fl_core.storage.files import Folder, json_bytes
from fl_core.task import Task, assemble

if TYPE_CHECKING:
    from fedlayers.remote.secure_sum.at_site import SiteSums
    from fedlayers.remote.secure_sum.members import Member

HERE = ("data_root", "download", "init", "dropout_trace", "workers", "device", "stack", "plan", *READING, *DEALING)
"""Configuration keys that a site does not take from the server."""
EXTRA_TREES = 64
PLAN = "plan.json"
"""The file in a run's folder with the plan that a run without one chose."""
_LANE = re.compile(r"main|beside-[0-9]{1,2}")


class JoinedRun:
    """A site's part of one run: the task with its own samples, and its client's states."""

    def __init__(self, site: Host, packet: Packet, turns: Turns) -> None:
        self.site, self.turns = site, turns
        self.asked, asked = Packet(packet.head), fields(packet.head, packet_forms.JOIN, packet_forms.OPTIONAL)
        others = {each["name"]: each for each in asked["sites"]}
        self.number = asked["number"]
        if len(others) < len(asked["sites"]) or list(others)[self.number : self.number + 1] != [site.name]:
            raise PacketError(f"site {self.number} of {list(others)} must be {site.name!r}; got another.")
        config = _config(asked["config"], asked["dataset"], site.device)
        site.policy.check_code(config)
        site.check_algorithm(config.algorithm, config.options)
        site.policy.check_summed(config.algorithm, asked.get("secure_sum", False))
        if "compress" in asked:
            check_compressed(asked["compress"], config.algorithm)
        site.check_samples()
        site.audit.check(self.number, config.seed)
        scaling = None if asked["scaling"] is None else Preprocessing.from_json(asked["scaling"])
        own = site.holding.drawn(self.number, config.seed, scaling)
        facts = site.holding.facts()
        self.sizes = {name: len(own.split(name)) for name in packet_forms.SIZES}
        told = others[site.name]
        if told["sizes"] != self.sizes or told["digest"] != facts["digest"]:
            raise PacketError("the server's digest and sizes must be those of this site's data; got others.")
        try:
            with check_while_building(site.policy.check_size):
                data = placeholder_data(asked["dataset"], facts, others, {site.name: own})
                self.task = assemble(config, data=data)
        except Exception as error:  # of torch or of the model, on values that no check foresees
            if isinstance(error, (UsageError, RunError)) or lacks_memory(error):
                raise
            raise UsageError(f"the model cannot be made at this site: {type(error).__name__}: {error}") from error
        site.policy.check_epochs(int(self.task.config.epochs or 0))
        self._take_model(packet)
        from diagnostics.measure import instruments

        runner_of = self.task.client_runner(instruments().observers)
        self.initial = {  # not a copy: runs train copies of the task's model
            name: tensor.detach().contiguous() for name, tensor in tree.named_tensors(self.task.model).items()
        }
        self.home = LocalClients(Serial(runner_of), data, self.initial)
        self.root = site.folder / asked["run"]
        self.compress = asked.get("compress", "")
        self.sums: SiteSums | None = None
        if asked.get("secure_sum"):
            from fedlayers.remote.secure_sum.at_site import SiteSums  # here alone: it needs cryptography

            self.sums = SiteSums(Folder(self.root), site.identity, list(others))
        self._algorithms: dict[str, Algorithm] = {}
        self._present: tuple[str, str] | None = None  # lane and version of the state that the home has
        self.write_answer("join")
        self._tuned: tuple[str, str, int] | None = None  # the version and round of its tuned model

    def _take_model(self, packet: Packet) -> None:
        """Load the server's initial model. Another version of torch may draw another one from the same seed."""
        layers = [layer.name for layer in self.task.layers]
        if packet.head["layers"] != layers:
            raise UsageError(
                f"layers must be the site's, {layers[:20]}; got {packet.head['layers'][:20]}. Use one model."
            )
        if list(packet.trees) != ["start"]:
            raise PacketError(f"a packet 'join' must have the tree start alone; got {list(packet.trees)[:9]}.")
        lora.load_whole(self.task.model, packet.trees["start"])
        digest = tree.digest(lora.full_state(self.task.model))
        if packet.head["model"] != digest:
            raise PacketError(f"the server's initial model must have the digest that is sent; got {digest[:12]}….")

    def write_answer(self, kind: str) -> None:
        """Record an answer of this run's split."""
        self.site.audit.write(kind, self.number, self.task.config.seed)

    def work(self, packet: Packet, key: str, size: int, session: str, seq: int) -> Packet:
        """Answer one request for work, of a number of bytes."""
        head, form = packet.head, packet_forms.FORMS[packet.head["kind"]]
        in_sum = None if self.sums is None else head.pop("secure_sum", None)
        values = fields(head, form)
        if size > (most := most_bytes(self.initial, len(self.task.data.clients) + EXTRA_TREES)):
            raise PacketError(f"a request must have at most {most:,} bytes for this model; got {size:,}.")
        if not _LANE.fullmatch(values["lane"]):
            raise PacketError(f"lane must match {_LANE.pattern}; got {values['lane'][:80]!r}.")
        lane = StateStore(self.root / values["lane"])
        trains = head["kind"] == "train"
        if trains and (known := lane.reply(values["to"], key)) is not None:
            return known  # asked twice, or again after the reply was lost: trained once
        self.turns.check(session, seq)
        if head["kind"] == "finetune" or (trains and not lane.path.is_dir()):
            self.site.check_disk()
        algorithm = self._algorithm(values)
        asked = protocol.request_of(packet, self.number, self.initial)
        if isinstance(asked, TrainRequest):
            self.site.policy.check_sent(algorithm.uploaded(asked.rnd, self.number), self.task.layers)
            self.site.policy.check_phases(algorithm.phases(asked.rnd, self.number))
        if isinstance(asked, FinetuneRequest):
            self.site.policy.check_phases(algorithm.finetuning(asked.done, self.number))
        if self.sums is not None and not isinstance(asked, TrainRequest):
            self._check_unmixed(algorithm, asked.template)
        if trains:
            self._check_version(values)
        sums = self.sums if isinstance(asked, TrainRequest) and not asked.lost else None
        member = None if sums is None else sums.enter(values, in_sum, key)
        self._enter(lane, values, algorithm, asked)
        (reply,) = self.home.run([asked])
        answer = self._reply(asked, reply, member)
        self.write_answer(head["kind"])
        if isinstance(asked, TrainRequest) and not asked.lost:
            state = self.home.states[self.site.name]
            kept = {kind: dict(each[self.site.name]) for kind, each in self.home.kept.items()}
            lane.commit(values["to"], state, kept, key, answer)
            self._present = (values["lane"], values["to"])
            metrics.set_number("rounds_done", asked.rnd.index + 1)
            lane.keep({values["saved"], values["from"], values["to"]})
        if isinstance(asked, FinetuneRequest):
            lane.put_tuned(values["from"], asked.done, dict(self.home.kept[TUNED][self.site.name]))
            self._tuned = (values["lane"], values["from"], asked.done)
        self.turns.end(seq, values["lane"], values["to"] if trains else "")
        return answer

    def _check_version(self, values: Mapping[str, Any]) -> None:
        """Refuse to train a version of another name than its round's and exchange's, or one again.

        Raises:
            PacketError: names both.
        """
        wanted = f"{values['round']['index'] + 1:06d}-{values['round']['exchange']}"
        if values["to"] != wanted:
            raise PacketError(f"the version of this exchange must be {wanted[:80]!r}; got {values['to'][:80]!r}.")
        self.turns.check_next(values["lane"], values["to"])

    def _check_unmixed(self, algorithm: Algorithm, template: ModelTemplate) -> None:
        """Refuse a model of the server's tensors and of tensors that this client uploads in a secure sum.

        From scores of such models a server of its own making could compute the upload.

        Raises:
            PacketError: names the model.
        """
        uploads = algorithm.uploaded(Round(0, "train", (self.number,)), self.number)
        for name, parts in template.models.items():
            own = [part for part in parts.values() if isinstance(part, ClientTensorRef)]
            if len(own) < len(parts) and any(part.tree == "model" and part.name in uploads for part in own):
                raise PacketError(
                    f"the model {name!r} must have the client's upload in a secure sum whole or not at all; got a part."
                )

    def sum_step(self, packet: Packet, session: str, seq: int) -> Packet:
        """Answer a step of a secure sum other than the masked update."""
        if self.sums is None:
            raise PacketError("this run has joined without a secure sum")
        self.turns.check(session, seq)
        reply = self.sums.answer(packet)
        self.turns.end(seq)
        return reply

    def measure(self, packet: Packet, key: str, session: str, seq: int) -> Packet:
        """Train the first round, measure the model, and reply with numbers. The model is not kept.

        With noise, everything except the values comes from random data of the same shape. So does an error, and
        whether there is one. The reply is stored. A repeated request gets it again, without new noise.
        """
        asked = fields(packet.head, packet_forms.MEASURE)
        if packet.trees:
            raise PacketError("a packet 'measure' must have no tensors; got some.")
        self.site.policy.check_metrics(asked["metrics"], asked["options"])
        check_nulls(asked["null"], asked["null_draws"])
        if self.site.privacy.active:
            check_values_alone(asked["metrics"], asked["options"])
            folder, stored = Folder(self.root), f"measured-{key}"
            if folder.has(stored):
                return decode(folder.read(stored))
        self.turns.check(session, seq)
        if not self.site.privacy.active:
            header, rows = self._measure(self.task, asked)
            self.write_answer("measure")
            self.turns.end(seq)
            return Packet({"kind": "measured", "header": header, **rows})
        other = replace(self.task, data=placeholder_client(self.task.data, self.site.name, self.task.config.seed))
        header, shown = self._measure(other, asked)
        put_noised_values(shown, lambda: self._measure(self.task, asked)[1], self.site.privacy, self.site.account)
        self.write_answer("measure")
        answer = Packet({"kind": "measured", "header": header, **shown})
        folder.write(stored, *encode_parts(answer))
        self.turns.end(seq)
        return answer

    def _measure(self, task: Task, asked: Mapping[str, Any]) -> tuple[dict[str, Any], Tables]:
        """Return the part of a report's header that leaves, and the site's own rows."""
        from diagnostics import measure

        names = ("measure_batch", "mode", "layers", "null", "null_draws", "options")
        settings = {name: asked[name] for name in names if asked[name] is not None}
        report = measure.diagnose_task(task, asked["metrics"], clients=[self.site.name], progress=False, **settings)
        header = {name: report.header[name] for name in packet_forms.MEASURED_HEADER}
        tables = {"rows": report.frame, "nulls": report.nulls}
        return header, {name: own_rows(table, self.site.name) for name, table in tables.items()}

    def _algorithm(self, values: Mapping[str, Any]) -> Algorithm:
        check_joined(self.task.config, self.asked.head["plan"], values)
        if self.asked.head["plan"] is None and values["plan"] is not None:
            self._keep_plan(values["plan"])
        named = json.dumps([values["algorithm"], values["options"], values["plan"]], sort_keys=True)
        if named not in self._algorithms:
            self.site.check_algorithm(values["algorithm"], values["options"])
            made = find(values["algorithm"])(self.task.task_info, None, values["options"])
            if values["plan"] is not None:
                plan = LayerPlan.from_json(values["plan"])
                plan.check_tensors(self.task.task_info.tensors)
                made = made.with_plan(plan)
            elif made.uses_plan and not made.decides:
                raise UsageError(f"the plan of {made.name} must be given; got none. Add --plan.")
            self._algorithms[named] = made
        return self._algorithms[named]

    def _keep_plan(self, plan: Mapping[str, Any]) -> None:
        """Store the first plan of a run that has joined without one, and refuse any other.

        Raises:
            UsageError: it is another one.
        """
        folder = Folder(self.root)
        if not folder.has(PLAN):
            folder.write(PLAN, json_bytes(plan))
        elif parsed_json(folder.read(PLAN)) != plan:
            raise UsageError("the plan must be the one that the run has chosen; got another. Begin another run.")

    def _enter(self, lane: StateStore, values: Mapping[str, Any], algorithm: Algorithm, asked: ClientRequest) -> None:
        """Load the version of the client's state that a request names, with its algorithm and its tuned model."""
        present = (values["lane"], values["from"])
        if self._present != present:
            state = lane.state(values["from"]) if values["from"] else None
            self.home.begin(algorithm)
            self.home.forget()
            if state is not None:
                self.home.states[self.site.name] = state
            self._present = present
        self.home.use(algorithm)
        if isinstance(asked, TrainRequest):  # models kept before are of an earlier state; until its end there is none
            self.home.forget()
            self._tuned = self._present = None
        elif isinstance(asked, ScoreRequest):
            self._take_tuned(lane, (*present, asked.done))

    def _take_tuned(self, lane: StateStore, wanted: tuple[str, str, int]) -> None:
        """Load the fine-tuned model of this state and round if there is one, and drop any other."""
        if self._tuned != wanted:
            self.home.kept.pop(TUNED, None)
            tuned = lane.tuned(wanted[1], wanted[2])
            if tuned is not None:
                self.home.keep(TUNED, self.site.name, tuned)
            self._tuned = wanted

    def _reply(self, asked: ClientRequest, reply: ClientReply, member: Member | None) -> Packet:
        if isinstance(asked, TrainRequest) and asked.lost:
            reply.message = Message()
        names = [name for each in reply.message.trees.values() for name in each]
        self.site.policy.check_sent(names, self.task.layers)
        if self.site.privacy.active:
            reply.observations = []  # numbers of single samples, which nothing clips
        if self.site.privacy.active and isinstance(asked, TrainRequest):
            reply.message, count = hide_message(reply.message, asked.message, self.initial, self.site.privacy)
            reply.epsilon = self.site.account.release(count), self.site.privacy.delta
        begun = self.home.algorithm.client_state(self.initial, self.number).meta
        outline = StateSchema.from_state(self.home.states[self.site.name], begun)
        check_trees(reply.message.trees, self.initial, "this site")
        if self.compress and isinstance(asked, TrainRequest):
            reply.message = compress_message(reply.message, asked.message, self.initial)
        if member is None or self.sums is None:
            return protocol.reply_packet(reply, outline)
        masked = self.sums.mask_update(member, reply.message, self.home.algorithm.task_info, self.number)
        reply.message = Message()
        return Packet(protocol.reply_packet(reply, outline).head, masked)


def check_same_run(folder: Folder, packet: Packet, device: str) -> None:
    """Refuse to join a run of this folder with something else than before, such as another algorithm.

    Otherwise the states that it has kept would train under rules for which they were not made.

    Raises:
        UsageError: names what differs.
    """
    if not folder.has("join"):
        return
    before, now = decode(folder.read("join")).head, dict(packet.head)
    stored, config = before["config"], _config(now["config"], now["dataset"], device).to_json()
    before["config"] = {key: value for key, value in stored.items() if key in config}
    now["config"] = {key: json.loads(json.dumps(config[key])) for key in before["config"]}
    if before.get("plan") is None and folder.has(PLAN) and now["plan"] == parsed_json(folder.read(PLAN)):
        now["plan"] = None  # the run has chosen it
    asked = (*before.keys() & packet_forms.JOIN.keys(), *packet_forms.OPTIONAL)
    if differ := sorted({key for key in asked if before.get(key) != now.get(key)}):
        raise UsageError(
            f"a run must join again with what it has joined with; got another {listing(differ)}. Begin another run."
        )


def _config(found: Mapping[str, Any], dataset: str, device: str) -> RunConfig:
    unasked = sorted(found.keys() & set(HERE))
    if unasked:
        raise PacketError(f"{unasked[0]!r} must be left to this site; got a value of the server.")
    config = RunConfig.from_json({**found, "dataset": dataset, "device": device, "stack": "off"})
    check(config)
    check_over_sites(config)
    return config


def check_over_sites(config: RunConfig) -> None:
    """Refuse settings that need all sites' samples in one place. An error about them would reveal a site's classes.

    Raises:
        UsageError: names the setting.
    """
    if config.class_weights == "balanced":
        raise UsageError(
            "class_weights must be numbers over sites; got 'balanced'. Give a weight for each class, W,W,..."
        )
    if config.leave_out_client is not None:
        raise UsageError(
            f"leave_out_client must be none over sites; got {config.leave_out_client!r}. Stop that site instead."
        )
