"""Layer plans: the layers that are federated, and why. Diagnostics write them as JSON, and algorithms follow them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_core import storage
from fl_core.display import MANY, Displayed, Summary, printable
from fl_core.errors import (
    UsageError,
    as_list,
    check_known,
    listing,
    plural,
    read_as,
    warn,
)
from fl_core.storage import check_version, sha, write_json

if TYPE_CHECKING:
    from torch import nn

FORMAT = "fedlayers.plan/2"
EDITED = "edited by hand"
MOST_NAMES = 10_000
"""Layers at most of a plan that is read."""
MOST_EPOCHS = 1000
"""The most epochs of fine-tuning of a plan."""
CANDIDATE = "candidate"
"""The rule of a plan that is one of several candidates, such as an arm of a race."""


@dataclass(frozen=True)
class Layer:
    """One layer of a model: the unit that is shared or kept local.

    >>> layer = Layer("conv1", ("conv1.weight", "conv1.bias", "norm1.weight", "norm1.bias"), ("norm1.running_mean",))
    >>> layer.weights
    ('conv1.weight', 'norm1.weight')
    >>> len(layer.tensors)
    5

    Attributes:
        name: exact name, a module path if one module has the whole layer.
        parameters: exact names in ``model.named_parameters()``.
        buffers: exact names of persistent buffers, and of the unused tensors that peft keeps.
        output: path of the module whose output is the layer's representation.
        used: whether a forward pass of the example reaches the layer.
        tables: the parameters that are embedding tables. A batch affects only the rows that it looks up.
        frozen: the tensors that no training changes: parameters that the model's author
            froze (``requires_grad`` is False), and buffers of modules or layers whose
            parameters are all frozen.
        also: further names of the layer's tensors in the model's state dict, where weights are tied.
        kind: class of the module, if its name is only a number, as in a Sequential. It
            is for display, and no stored plan has it.
    """

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    output: str = ""
    used: bool = True
    tables: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    kind: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """Return the name for display, with the class of a module that has only a number.

        >>> Layer("0", ("0.weight",), kind="Linear").label
        '0 Linear'
        """
        return f"{self.name} {self.kind}".rstrip()

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the names of the layer's parameters, then of its buffers."""
        return self.parameters + self.buffers

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the names of the parameters that are not biases, as far as their names tell."""
        biases = re.compile(r"(^|\.)bias[^.]*$|bias$")
        return tuple(name for name in self.parameters if not biases.search(name))

    @property
    def is_frozen(self) -> bool:
        """Return whether the layer has parameters and all are frozen. They then have the same values everywhere."""
        return bool(self.parameters) and set(self.parameters) <= set(self.frozen)


def tensors_in(layers: Iterable[Layer]) -> list[str]:
    """Return the names of all tensors of layers, in their order.

    >>> tensors_in([Layer("conv1", ("conv1.weight",)), Layer("fc1", ("fc1.weight", "fc1.bias"))])
    ['conv1.weight', 'fc1.weight', 'fc1.bias']
    """
    return [*chain.from_iterable(layer.tensors for layer in layers)]


def parameters_in(layers: Iterable[Layer]) -> list[str]:
    """Return the names of all parameters of layers, in their order."""
    return [*chain.from_iterable(layer.parameters for layer in layers)]


PEFT_ROOT = "base_model.model."
PEFT_PARTS = re.compile(r"\.(?:modules_to_save|base_layer|default)(?=\.|$)")
"""Parts that peft adds to the names of what it wraps."""


def labels_of(layers: Iterable[Layer]) -> dict[str, str]:
    """Return the layers' names as people read them, by their exact names.

    Parts that peft adds to names are left out, unless two layers would then have one name.

    >>> names = ("base_model.model.head.modules_to_save.default", "base_model.model.block.lora_A")
    >>> labels_of([Layer(name, (f"{name}.weight",)) for name in names])
    {'base_model.model.head.modules_to_save.default': 'head', 'base_model.model.block.lora_A': 'block.lora_A'}
    """
    exact_labels, short_labels = {}, {}
    for layer in layers:
        exact_labels[layer.name] = short_labels[layer.name] = layer.label
        if layer.name.startswith(PEFT_ROOT):
            short_name = PEFT_PARTS.sub("", layer.name.removeprefix(PEFT_ROOT))
            short_labels[layer.name] = replace(layer, name=short_name).label
    if len({*short_labels.values()}) < len(exact_labels):
        return exact_labels
    return short_labels


@dataclass(frozen=True)
class Evidence:
    """The reasons for a plan. Everything here is JSON. Fields that do not apply stay empty.

    Attributes:
        rule: name of the rule, with ``metric``, ``variant`` and ``threshold`` as applied.
        values: the combined metric of each layer, in the plan's order; None for a layer
            without a value.
        clients: each client's own values, in the same order.
        weights: each client's weight in the combination (training samples).
        votes: for each client, the last shared layer that its own values would choose.
        alternatives: for each other threshold, the last shared layer that it would choose.
        detail: further results of the rule: its stability, the costs of its layers, and the learning rate ``lr`` of a
            decision, with each client's epochs of ``fine_tuning`` at ``fine_tuning_rate`` after the last round.
        status: ``ok``, or an adjustment (a clipped cut, for instance).
        data, checkpoint: digests of the measured data and checkpoint.
        seed, version: seed of the measurement, and version of this package.
        race: the outcome in words, if a race decided.
    """

    rule: str = "manual"
    metric: str = ""
    variant: str = ""
    threshold: float | None = None
    values: tuple[float | None, ...] = ()
    clients: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    votes: dict[str, str] = field(default_factory=dict)
    alternatives: dict[str, str] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)
    status: str = "ok"
    data: str = ""
    checkpoint: str = ""
    seed: int | None = None
    version: str = ""
    race: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the evidence as a few lines of text.

        First comes the outcome of a race, or else the metric's values. The settings,
        the nulls, a benchmark and a status other than ``ok`` follow. Without any of
        these the list is empty.
        """
        lines = list(self.race[:MANY])
        if not lines and self.metric:
            metric_text = self.metric
            if self.variant:
                metric_text = f"{self.metric} ({self.variant})"
            values = listing(
                ("none" if value is None else f"{value:.4g}" for value in self.values),
                MANY,
            )
            lines.append(f"{metric_text} of the layers: {values}")
        origin = {
            "learning rate": self.detail.get("lr"),
            "epochs of fine-tuning": self.detail.get("fine_tuning"),
            "their rate": self.detail.get("fine_tuning_rate"),
            "seed": self.seed,
            "data": self.data[:12],
            "checkpoint": self.checkpoint[:12],
        }
        settings = [
            f"{name} {value}"
            for name, value in origin.items()
            if value not in (None, "")
        ]
        if settings:
            measured_names = ", ".join(settings)
            lines += [f"measured with {measured_names}"]
        for null_name, draws in self.detail.get("null", {}).items():
            if draws["same_draws"]:
                draws_text = plural(draws["draws"], "draw")
                times = f"{draws['same_draws']} of {draws_text}"
                lines.append(
                    f"the same plan comes from {times} of the null {null_name!r}"
                )
        if self.detail.get("benchmark"):
            lines.append(self.detail["benchmark"])
        if self.status != "ok":
            lines.append(f"note: {self.status}")
        return [printable(line) for line in lines]

    def to_json(self) -> dict[str, Any]:
        """Return the evidence as plain data for JSON. Without a race it has no key ``race``."""
        data = asdict(self)
        if not data["race"]:
            del data["race"]
        return data


@dataclass(frozen=True, repr=False)
class LayerPlan(Displayed):
    """A plan: ``layers`` from input to output, and the names of the ``shared`` ones.

    The shared layers are the body, the others the head. Either may be empty. The body
    need not be the first layers. Shared names are put in the order of the layers.
    ``why`` has the reasons for the plan.

    >>> layers = [Layer(name, (f"{name}.weight", f"{name}.bias")) for name in ("conv1", "conv2", "fc")]
    >>> plan = LayerPlan.all_but_last(layers)
    >>> plan
    LayerPlan([conv1] [conv2] fc; [] = shared, by all_but_last)
    >>> sorted(plan.head_tensors)
    ['fc.bias', 'fc.weight']
    >>> import tempfile
    >>> where = tempfile.TemporaryDirectory()
    >>> plan.save(f"{where.name}/plan.json")
    >>> LayerPlan.load(f"{where.name}/plan.json") == plan
    True

    Raises:
        UsageError: an item of ``layers`` is no :class:`Layer`, a shared name is not a
            layer, or a layer or tensor is named twice.
    """

    layers: tuple[Layer, ...]
    shared: tuple[str, ...]
    why: Evidence = field(default_factory=Evidence)

    def __post_init__(self) -> None:
        for layer in as_list("layers", self.layers, empty=True):
            if not isinstance(layer, Layer):
                raise UsageError(
                    f"each layer of a plan must be a Layer; got {layer!r}. Take the layers of a task: task.layers."
                )
        shared_names = as_list("shared", self.shared, empty=True)
        names = [layer.name for layer in self.layers]
        tensors = tensors_in(self.layers)
        for noun, checked_names in (
            ("layer", names),
            ("tensor", tensors),
            ("shared layer", shared_names),
        ):
            duplicates = sorted(
                name for name, count in Counter(checked_names).items() if count > 1
            )
            if duplicates:
                raise UsageError(
                    f"a plan must name each {noun} once; got {duplicates[0]!r} twice."
                )
        for name in sorted({*shared_names} - {*names}):
            check_known("layer", name, names)
        shared_set = frozenset(shared_names)
        object.__setattr__(
            self, "shared", tuple(name for name in names if name in shared_set)
        )

    # --- reading it ---

    @property
    def body(self) -> tuple[Layer, ...]:
        """Return the layers that are federated."""
        shared_names = frozenset(self.shared)
        return tuple(layer for layer in self.layers if layer.name in shared_names)

    @property
    def head(self) -> tuple[Layer, ...]:
        """Return the layers that stay local."""
        shared_names = frozenset(self.shared)
        return tuple(layer for layer in self.layers if layer.name not in shared_names)

    @property
    def body_tensors(self) -> frozenset[str]:
        """Return the exact names of the federated tensors, buffers included."""
        return frozenset(tensors_in(self.body))

    @property
    def head_tensors(self) -> frozenset[str]:
        """Return the exact names of the tensors that stay local, buffers included."""
        return frozenset(tensors_in(self.head))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the layers' names from input to output."""
        return tuple(layer.name for layer in self.layers)

    @property
    def fine_tuning(self) -> tuple[int, float]:
        """Return the epochs that each client fine-tunes after the last round, and their learning rate.

        Without fine-tuning both are 0. Earlier versions stored them as ``own_epochs`` and ``own_rate``.

        Raises:
            UsageError: the stored epochs are no whole number from 0 to 1000, or the
                rate of such epochs is not above 0 and finite.
        """
        detail = self.why.detail
        epochs = detail.get("fine_tuning", detail.get("own_epochs", 0))
        rate = detail.get("fine_tuning_rate", detail.get("own_rate", 0.0))
        is_whole = type(epochs) is int and 0 <= epochs <= MOST_EPOCHS
        if not is_whole or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            if epochs != 0:
                raise UsageError(
                    f"fine_tuning of a plan must be from 0 to {MOST_EPOCHS}, at a rate above 0; got {epochs!r} at "
                    f"{rate!r}. Make the plan again: fedlayers choose."
                )
            return 0, 0.0
        return epochs, float(rate)

    @property
    def cut(self) -> int | None:
        """Return the number of shared layers that train if they are the first that train; else None.

        >>> layers = (*(Layer(name, (name,)) for name in "abc"), Layer("unused", ("d",), used=False))
        >>> shared = (), ("a",), ("b", "a"), ("a", "b", "c", "unused"), ("b",), ("a", "c")
        >>> plans = [LayerPlan(layers, names) for names in shared]
        >>> [plan.cut for plan in plans], plans[2].shared, plans[2].head == layers[2:]
        ([0, 1, 2, 3, None, None], ('a', 'b'), True)
        """
        shared_names = tuple(name for name in self.trainable if name in self.shared)
        if shared_names == self.trainable[: len(shared_names)]:
            return len(shared_names)
        return None

    @property
    def last_shared(self) -> str:
        """Return the last shared layer that trains, or ''. Frozen layers are shared at any position."""
        return next(
            (name for name in reversed(self.trainable) if name in self.shared), ""
        )

    @property
    def trainable(self) -> tuple[str, ...]:
        """Return the names of the layers that a forward pass reaches and that have parameters that train."""
        return tuple(
            layer.name
            for layer in self.layers
            if layer.used and layer.parameters and not layer.is_frozen
        )

    def __repr__(self) -> str:
        marks = " ".join(
            f"[{label}]" if is_shared else label
            for label, is_shared in self.by_layer().items()
        )
        if self.why.threshold is None:
            rule_text = self.why.rule
        else:
            rule_text = f"{self.why.rule} t={self.why.threshold:g}"
        word = "" if self.is_edited else "by "
        return f"LayerPlan({marks}; [] = shared, {word}{rule_text})"

    def summary(self) -> Summary:
        """Return the plan as a strip of layers, with its evidence in words."""
        lead = "\n".join([f"By {self.why.rule}", *self.why.lines()])
        return Summary(lead, layers=self.by_layer())

    def by_layer(self) -> dict[str, bool]:
        """Return whether each layer is shared, from input to output, by its name as people read it.

        >>> plan = LayerPlan((Layer("0", ("0.weight",), kind="Linear"),), ("0",))
        >>> plan.by_layer(), plan.to_json()["shared"], "Linear" in str(plan.to_json())
        ({'0 Linear': True}, ['0'], False)
        """
        labels = labels_of(self.layers)
        return {label: name in self.shared for name, label in labels.items()}

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"  {line}" for line in self.why.lines())])

    @property
    def is_edited(self) -> bool:
        """Return whether the plan's file was edited, so that its layers may not follow from its evidence."""
        return self.why.rule.startswith(EDITED)

    def notes(self) -> tuple[str, ...]:
        """Return notes for a user of the plan: it was edited by hand, or shares no layer or all layers.

        A candidate plan (rule :data:`CANDIDATE`) shares none or all on purpose.

        >>> LayerPlan((Layer("fc1", ("fc1.weight",)),), ()).notes()
        ('the plan, by manual, shares 0 of 1 layer to train: every client trains alone',)
        >>> layers = (*(Layer(name, (name,)) for name in "ab"), Layer("unused", ("c",), used=False))
        >>> LayerPlan(layers, ("a",)).notes(), LayerPlan(layers, ("a", "b")).notes()
        ((), ('the plan, by manual, shares all of 2 layers to train: no client has layers of its own',))
        """
        notes = []
        if self.is_edited:
            notes.append(
                f"the plan is {self.why.rule}: what it shares need not follow from its evidence"
            )
        if self.why.rule.startswith(CANDIDATE):
            return tuple(notes)
        shared_names = [name for name in self.trainable if name in self.shared]
        rule_text = self.why.rule if self.is_edited else f"by {self.why.rule}"
        count = len(self.trainable)
        if not shared_names:
            notes.append(
                f"the plan, {rule_text}, shares 0 of {plural(count, 'layer')} to train: every client trains alone"
            )
        elif len(shared_names) == count:
            notes.append(
                f"the plan, {rule_text}, shares all of {plural(count, 'layer')} to train: "
                "no client has layers of its own"
            )
        return tuple(notes)

    # --- making it ---

    @classmethod
    def prefix(
        cls, layers: Sequence[Layer], count: int, why: Evidence | None = None
    ) -> LayerPlan:
        """Return a plan that shares the first ``count`` layers, for the reasons in ``why``, which may be left out."""
        return cls(
            tuple(layers),
            tuple(layer.name for layer in layers[:count]),
            why or Evidence(),
        )

    @classmethod
    def all_but_last(cls, layers: Sequence[Layer]) -> LayerPlan:
        """Return a plan that shares all layers in use but the last one that trains, as FedPer does by default.

        That layer is the classifier.
        """
        head = cls(tuple(layers), ()).trainable[-1:]
        body = tuple(
            layer.name for layer in layers if layer.used and layer.name not in head
        )
        return cls(tuple(layers), body, Evidence(rule="all_but_last"))

    @classmethod
    def last(cls, layers: Sequence[Layer]) -> LayerPlan:
        """Return a plan that shares only the last layer that trains, the classifier; no layer if none trains."""
        return cls(
            tuple(layers), cls(tuple(layers), ()).trainable[-1:], Evidence(rule="last")
        )

    def with_shared(self, shared: str | Iterable[str], **why: Any) -> LayerPlan:
        """Return a plan with the same layers and other shared ones. Keywords replace fields of the evidence.

        Args:
            shared: names of the shared layers, or a single name.
            why: new values of fields of :class:`Evidence`.

        Raises:
            UsageError: a name is not a layer, or is repeated.
        """
        return LayerPlan(
            self.layers, as_list("shared", shared, empty=True), replace(self.why, **why)
        )

    def with_first(self, count: int, **why: object) -> LayerPlan:
        """Return a plan that shares the first ``count`` layers that train, and the frozen ones.

        Frozen layers have the same values at all clients. Keywords replace fields of
        the evidence. If fewer layers train, all are shared.
        """
        return self.with_shared(
            (*self.trainable[:count], *frozen_in(self.layers)), **why
        )

    # --- checking it against a model ---

    def check_fits(self, model: nn.Module) -> None:
        """Check that a model's tensors are exactly the plan's.

        Raises:
            UsageError: they differ. The message names the first tensors that only one of the two has.
        """
        # with torch, which a stored plan goes without
        from fl_core.tree import named_tensors

        self.check_tensors(named_tensors(model))

    def check_tensors(self, names: Iterable[str]) -> None:
        """Check that a model's tensors, given by their names, are exactly the plan's.

        Raises:
            UsageError: as for :meth:`check_fits`.
        """
        plan_names = {*tensors_in(self.layers)}
        model_names = set(names)
        if plan_names != model_names:
            difference_texts = []
            if missing_text := listing(sorted(plan_names - model_names), 4):
                difference_texts.append(f"only in the plan: {missing_text}")
            if unplanned_text := listing(sorted(model_names - plan_names), 4):
                difference_texts.append(f"only in the model: {unplanned_text}")
            differences = "; ".join(difference_texts)
            raise UsageError(
                f"the plan must fit the model; got tensors {differences}. Use a plan that was made for this model."
            )

    # --- on disk, and elsewhere ---

    def to(self, form: str) -> Any:
        """Return the plan in the form of another framework, as plain data for JSON (:data:`FORMS`).

        >>> layers = [Layer("fc1", ("fc1.weight", "fc1.bias")), Layer("fc2", ("fc2.weight", "fc2.bias"))]
        >>> LayerPlan.all_but_last(layers).to("fl4health")
        ['fc1.weight', 'fc1.bias']

        A warning says if the form has no place for the plan's fine-tuning.

        Args:
            form: a name in :data:`FORMS`.

        Raises:
            UsageError: an unknown form, ``peft`` for a plan without adapters, or
                ``names`` or ``nvflare`` for a plan that shares a tensor under one name
                and keeps it local under another.
        """
        content = FORMS[check_known("form of a plan", form, FORMS)](self)
        epochs, rate = self.fine_tuning
        if not epochs:
            return content
        if form == "names":
            return {**content, "fine_tuning": epochs, "fine_tuning_rate": rate}
        warn(
            f"form {form!r} has no place for the plan's fine-tuning: after the last round train each client for "
            f"{plural(epochs, 'epoch')}, at learning rate {rate:g}"
        )
        return content

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data with a digest. :meth:`from_json` makes an equal plan of it."""
        data = {
            "format": FORMAT,
            "layers": [_stored(layer) for layer in self.layers],
            "shared": list(self.shared),
            "why": self.why.to_json(),
        }
        return {**data, "sha256": _signature(data)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LayerPlan:
        """Return the plan from the data of :meth:`to_json`. If the digest does not match, the plan is marked as edited.

        Raises:
            UsageError: the format is another, a key is missing or unknown, or the contents are not a plan.
        """
        if isinstance(data, Mapping):
            stored_format = data.get("format")
        else:
            stored_format = type(data).__name__
        if not isinstance(data, Mapping) or not check_version(
            "the plan", stored_format, FORMAT
        ):
            raise UsageError(
                f"a plan must have the format {FORMAT!r}; got {stored_format!r}. Use plan='auto' to make one."
            )
        contents = {k: v for k, v in data.items() if k not in ("format", "sha256")}
        for key in ("layers", "shared"):
            count = len(contents[key]) if isinstance(contents.get(key), list) else 0
            if count > MOST_NAMES:
                raise UsageError(
                    f"{key} of a plan must be at most {MOST_NAMES:,}; got {count:,}. Make it again."
                )
        plan: LayerPlan = read_as(cls, contents, "a plan")
        if data.get("sha256") != _signature(data) and not plan.is_edited:
            return plan.with_shared(plan.shared, rule=f"{EDITED} (was {plan.why.rule})")
        return plan

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON atomically: a reader never sees a part."""
        write_json(Path(path), self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> LayerPlan:
        """Read a plan from a file.

        Raises:
            UsageError: the file does not exist, or is not JSON or not a plan.
        """
        path = Path(path)
        if not path.is_file():
            fault = "does not exist"
            if path.is_dir():
                fault = "is a folder"
            raise UsageError(
                "plan must be a file that fedlayers choose or select wrote, or auto; "
                f"got {str(path)!r}, which {fault}. Correct its path, or use plan='auto'."
            )
        try:
            return cls.from_json(
                storage.parsed_json(storage.read_text(path, storage.JSON_BYTES))
            )
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error
        except ValueError as error:  # no JSON, no UTF-8, or nested too deeply
            raise UsageError(
                f"{path} must be a plan, as fedlayers choose or select writes it; got no JSON ({error}). "
                "Use plan='auto' to make one."
            ) from error

    @property
    def digest(self) -> str:
        """Return the SHA-256 of layers, sharing and fine-tuning, without the other evidence.

        Raises:
            UsageError: as for :attr:`fine_tuning`.

        >>> layers = [Layer(name, (name,)) for name in "abc"]
        >>> plans = LayerPlan(layers, ("a",)), LayerPlan(layers, ()), LayerPlan(layers[:2], ("a",))
        >>> len({plan.digest for plan in plans}), plans[0].digest == plans[0].with_shared("a", rule="x").digest
        (3, True)
        """
        decisions: list[Any] = [
            [layer.name, list(layer.tensors), layer.name in self.shared]
            for layer in self.layers
        ]
        if self.fine_tuning[0]:
            decisions.append(self.fine_tuning)
        return sha(json.dumps(decisions).encode())


def _stored(layer: Layer) -> dict[str, Any]:
    """Return a layer as a plan stores it: without its class, and without an empty ``also``."""
    data = asdict(layer)
    del data["kind"]
    if not layer.also:
        del data["also"]
    return data


def _signature(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a plan's JSON without its digest, independent of indentation and the order of keys."""
    text = json.dumps(
        {name: value for name, value in data.items() if name != "sha256"}, default=str
    )
    return sha(json.dumps(json.loads(text), sort_keys=True).encode())


def _sent(plan: LayerPlan) -> list[str]:
    """Return the tensors that travel, in the plan's order: the shared ones that training changes."""
    frozen_names = {*chain.from_iterable(layer.frozen for layer in plan.body)}
    return [name for name in tensors_in(plan.body) if name not in frozen_names]


def _named(plan: LayerPlan) -> dict[str, Any]:
    """Return the tensors that travel and the shared modules, and the same of what stays local.

    A frozen tensor stays, also in a shared module. A tensor that stays has all its names.

    Raises:
        UsageError: a tensor travels under one name and stays under another.
    """
    sent_names = _sent(plan)
    local_names = [name for name in tensors_in(plan.layers) if name not in sent_names]
    for layer in plan.layers:
        is_local = layer.name not in plan.shared or layer.is_frozen
        local_names += [
            name for name in layer.also if is_local and name not in local_names
        ]
    if split_names := sorted(set(local_names).intersection(sent_names)):
        raise UsageError(
            f"tied tensors must be shared or kept together; the plan sends {listing(split_names, 4)} and has it under "
            "another name among those that stay. Share both layers, or none."
        )
    contents = {"shared": (sent_names, plan.body), "local": (local_names, plan.head)}
    return {
        name: {"tensors": tensors, "modules": [layer.name for layer in layers]}
        for name, (tensors, layers) in contents.items()
    }


def _for_nvflare(plan: LayerPlan) -> dict[str, Any]:
    """Return the description of a filter of task results. It excludes what stays local.

    Raises:
        UsageError: a tensor travels under one name and stays under another.
    """
    local_names = _named(plan)["local"]["tensors"]
    path = "nvflare.app_common.filters.exclude_vars.ExcludeVars"
    return {"path": path, "args": {"exclude_vars": local_names}}


def _for_peft(plan: LayerPlan) -> dict[str, list[str]]:
    """Return the paths of the modules that have adapters, and of the others that train.

    Raises:
        UsageError: no layer that trains is an adapter.
    """
    modules: dict[str, bool] = {}
    for layer in plan.layers:
        for weight in layer.weights if layer.name in plan.trainable else ():
            path = weight.rpartition(".")[0].removeprefix("base_model.model.")
            path, *adapter = re.split(r"\.lora_[AB]\b", path)
            modules[path] = bool(adapter)
    if not any(modules.values()):
        raise UsageError(
            "the plan must be of a model with adapters; got none. Make it with adapt='lora:r=8'."
        )
    return {
        "target_modules": [name for name, low_rank in modules.items() if low_rank],
        "modules_to_save": [name for name, low_rank in modules.items() if not low_rank],
    }


FORMS: dict[str, Callable[[LayerPlan], Any]] = {
    "names": _named,
    "flower": _sent,
    "nvflare": _for_nvflare,
    "fl4health": _sent,
    "peft": _for_peft,
}
"""The forms of a plan for other frameworks.

- ``names``: tensors and modules that are shared, those that stay local, and fine-tuning
  with its rate, if any. The other forms have no place for fine-tuning, and a warning
  says so.
- ``flower``: the tensors to put into an ``ArrayRecord``. ``fl4health``: the same, for a ``FixedLayerExchanger``.
- ``nvflare``: the filter ``ExcludeVars`` of the task ``train``, for results.
- ``peft``: ``target_modules`` and ``modules_to_save`` of a ``LoraConfig``.

A frozen tensor is in none of those that travel.
"""


def frozen_in(layers: Iterable[Layer]) -> tuple[str, ...]:
    """Return the names of the frozen layers in use. Rules share them at any position."""
    return tuple(layer.name for layer in layers if layer.used and layer.is_frozen)


def shift_plan(plan: LayerPlan, by: int) -> LayerPlan:
    """Return a plan with ``by`` more of the first layers shared, or fewer for a negative number.

    The number of shared layers is clipped to at least 1, and to at most all layers that train but one. If it is
    clipped, the status of the evidence says so.

    Raises:
        UsageError: the shared layers are not the first ones.
    """
    given_length, most_shared = prefix_length(plan), len(plan.trainable) - 1
    wanted_length = given_length + by
    new_length = min(max(wanted_length, 1), max(most_shared, 1))
    notes = [] if plan.why.status == "ok" else [plan.why.status]
    if new_length != wanted_length:
        notes.append(
            f"clipped from {wanted_length} to {new_length} of {len(plan.trainable)} layers"
        )
    return plan.with_first(
        new_length, rule=f"{plan.why.rule} {by:+d}", status="; ".join(notes) or "ok"
    )


def prefix_length(plan: LayerPlan) -> int:
    """Return the number of layers that train and are shared.

    Raises:
        UsageError: they are not the first layers, so "one layer more or less" has no meaning.
    """
    if plan.cut is None:
        raise UsageError(
            "the plan must share the first layers; got others. One layer more or less is not defined for them."
        )
    return plan.cut
