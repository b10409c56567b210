"""A run's model: what an algorithm adds to it, how layers and plans map to that, and initial weights from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from fl_core import models, tree
from fl_core.algorithms.base import Algorithm, find, read_config
from fl_core.buffers import equal
from fl_core.config import RunConfig
from fl_core.data import FederatedData
from fl_core.errors import UsageError, check_known, listing
from fl_core.layers import Layer, frozen_of, frozen_tensors, is_inside, layers_of
from fl_core.models import weights
from fl_core.models.building import batch_norms, drop_statistics
from fl_core.models.extended import head_path
from fl_core.plan import LayerPlan, tensors_in
from fl_core.records import store
from fl_core.training.losses import Loss
from fl_core.tree import Tree, copied

SHARED, PERSONAL = "shared", "personal"
WRAPPED = ".base_layer"
"""The end of the path of a module inside a wrapper of peft.

The wrapper's output is the representation of the module's layer."""


class BaseModel(NamedTuple):
    """The tensors and modules of a model by name, recorded before an algorithm extends it."""

    tensors: Tree
    modules: dict[str, nn.Module]


class ExtendedModel:
    """A map of layers and plans from a base model to the model that an algorithm built from it.

    A tensor of the base model stays in its layer, whatever its new name. Each path in ``added_modules`` is one new
    layer with the new tensors under it, and states whether it is shared or personal. Any other new tensor joins the
    layer of the nearest module around it that already had tensors, such as an adapter around a weight.

    Args:
        plain: the base model, recorded before the algorithm extended it.
        model: the extended model.
        adds: the algorithm's ``added_modules``: ``shared`` or ``personal`` by path.
        example: a batch that the extended model takes.
        by: the definition of a layer, as for :func:`fl_core.layers.layers_of`.
        cuts: whether the algorithm may have removed tensors of the base model, and with them whole layers.

    Attributes:
        names: the base model's names of tensors, each with the name in the extended
            model. Removed tensors are missing.
        added: the new layers.
        personal: names of the tensors among them that never travel.

    Raises:
        TypeError: a tensor of the base model is gone without permission, or a new one is under no path of
            ``added_modules`` and in no such module. This is an error of the algorithm, not of its user.
        UsageError: ``added_modules`` has another word than ``shared`` or ``personal``.
    """

    def __init__(
        self,
        plain: BaseModel,
        model: nn.Module,
        adds: Mapping[str, str],
        example: Tensor,
        by: str,
        cuts: bool = False,
    ) -> None:
        self.model = model
        self.tensors = tree.named_tensors(model)
        self._parameters = {name for name, _ in model.named_parameters()}
        name_by_id = {id(tensor): name for name, tensor in self.tensors.items()}
        for name, tensor in plain.tensors.items():
            if id(tensor) not in name_by_id and not cuts:
                raise TypeError(
                    f"a wrapped model must keep the original tensors; got another {name!r}."
                )
        self.names = {
            name: name_by_id[id(tensor)]
            for name, tensor in plain.tensors.items()
            if id(tensor) in name_by_id
        }
        self._frozen = frozen_tensors(model)
        self.added: tuple[Layer, ...] = ()
        self.personal: frozenset[str] = frozenset()
        self._adapters: dict[
            str, str
        ] = {}  # new tensor -> an original tensor whose layer it joins
        self._order: dict[str, int] = {}
        path_by_id = {id(module): path for path, module in model.named_modules()}
        self._paths = {
            path: path_by_id.get(id(module), path)
            for path, module in plain.modules.items()
        }
        self._add(plain, adds, layers_of(model, example, by=by))

    def layers(self, plain: Sequence[Layer]) -> tuple[Layer, ...]:
        """Return the layers of the extended model in the order of their first use.

        Args:
            plain: the base model's layers. They get their tensors' new names. A layer
                whose tensors were all removed is left out.
        """
        layers = [
            *(
                self._carry(layer)
                for layer in plain
                if not self.names.keys().isdisjoint(layer.tensors)
            ),
            *self.added,
        ]
        return tuple(
            sorted(
                layers,
                key=lambda layer: min(self._order[name] for name in layer.tensors),
            )
        )

    def plan(self, plan: LayerPlan) -> LayerPlan:
        """Transfer a plan for the base model to the extended one. A plan for the extended model stays unchanged.

        The added layers that are not personal join the shared ones. In the evidence
        they have no value.

        Raises:
            UsageError: it was made for another model.
        """
        plan_tensors = {*tensors_in(plan.layers)}
        if plan_tensors == self.tensors.keys():
            return plan
        plan.check_tensors(self.names)
        layers = self.layers(plan.layers)
        added_names = tuple(
            layer.name
            for layer in self.added
            if self.personal.isdisjoint(layer.tensors)
        )

        def placed(values: tuple[float | None, ...]) -> tuple[float | None, ...]:
            value_by_layer = dict(zip(plan.names, values, strict=False))
            if values:
                return tuple(value_by_layer.get(layer.name) for layer in layers)
            return ()

        clients = {name: placed(values) for name, values in plan.why.clients.items()}
        evidence = replace(plan.why, values=placed(plan.why.values), clients=clients)
        return LayerPlan(layers, (*plan.shared, *added_names), evidence)

    def _add(
        self, plain: BaseModel, adds: Mapping[str, str], traced_layers: Sequence[Layer]
    ) -> None:
        self._order = {}
        for k, layer in enumerate(traced_layers):
            self._order |= dict.fromkeys(layer.tensors, k)
        used_tensors = {*tensors_in(layer for layer in traced_layers if layer.used)}
        old_tensors = set(self.names.values())
        added_tensors: dict[str, list[str]] = {path: [] for path in adds}
        for name in self.tensors:
            if name in old_tensors:
                continue
            path = next((path for path in adds if is_inside(name, path)), None)
            if path is not None:
                added_tensors[path].append(name)
            else:
                self._adapters[name] = self._adapt(name)
        self.added = tuple(
            Layer(
                name=path,
                parameters=tuple(name for name in names if name in self._parameters),
                buffers=tuple(name for name in names if name not in self._parameters),
                output="" if path in self.tensors else path,
                used=not used_tensors.isdisjoint(names),
            )
            for path, names in added_tensors.items()
            if names
        )
        for layer in self.added:
            if (
                check_known(
                    "place of what is added", adds[layer.name], (SHARED, PERSONAL)
                )
                == PERSONAL
            ):
                self.personal |= set(layer.tensors)

    def _adapt(self, name: str) -> str:
        """Return the base model's name of a tensor whose layer a new tensor joins.

        It belongs to the nearest module around the new tensor that has original
        tensors.

        Raises:
            TypeError: there is no such module, or its original tensors come from
                unrelated modules.
        """
        path = _owner(name)
        while path:
            old_names = [
                old_name
                for old_name, new_name in self.names.items()
                if is_inside(new_name, path)
            ]
            if old_names:
                nearest_name = min(old_names, key=lambda old: len(_owner(old)))
                if _owner(nearest_name) and all(
                    is_inside(old_name, _owner(nearest_name)) for old_name in old_names
                ):
                    return nearest_name
                break
            path = _owner(path)
        raise TypeError(
            f"added_modules must say whether {name!r} is shared or personal; got nothing."
        )

    def _carry(self, layer: Layer) -> Layer:
        adapters = sorted(
            name
            for name, neighbour in self._adapters.items()
            if neighbour in layer.tensors
        )
        added_parameters = [name for name in adapters if name in self._parameters]
        added_buffers = (name for name in adapters if name not in added_parameters)
        new_layer = replace(
            layer,
            parameters=(*self._now(layer.parameters), *added_parameters),
            buffers=(*self._now(layer.buffers), *added_buffers),
            output=self._output(layer),
            tables=self._now(layer.tables),
        )
        return frozen_of(new_layer, self._frozen)

    def _now(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(self.names[name] for name in names if name in self.names)

    def _output(self, layer: Layer) -> str:
        """Return the path of the module that now gives the layer's representation.

        It is empty if no module does, as for a layer without one in the base model.
        """
        paths = self._now(
            name for name in layer.tensors if is_inside(name, layer.output)
        )
        path = ""
        if layer.output:
            path = self._paths[layer.output].removesuffix(WRAPPED)
        if all(is_inside(name, path) for name in paths):
            return path
        return _owner(paths[0])


def extend(
    config: RunConfig, data: FederatedData, model: nn.Module, criterion: Loss
) -> ExtendedModel:
    """Add the configured algorithm's parts to a model, and return the extended model with its map of layers.

    Args:
        config: a resolved configuration.
        data: the federation, whose samples the extended model must take.
        model: the base model. It may be changed in place, and shares its tensors with
            the extended model.
        criterion: the loss, which sets the number of outputs.

    Raises:
        UsageError: the extended model does not take the data's samples.
    """
    algorithm = find(config.federation.algorithm, config.federation.options)
    outputs = criterion.outputs(data.n_classes)
    base_model = BaseModel(tree.named_tensors(model), dict(model.named_modules()))
    model = wrapped(
        model,
        algorithm,
        config.federation.options,
        config.model.batchnorm,
        shape=data.shape,
        n_classes=outputs,
        seed=config.execution.seed,
    )
    extended_model = ExtendedModel(
        base_model,
        model,
        algorithm.added_modules,
        models.example(data.shape),
        config.model.layer_granularity,
        cuts=algorithm.removes_layers,
    )
    model_class = type(model).__name__
    subject = f"{model_class}, built for {algorithm.name},"
    models.check_fit(subject, model, data.shape, outputs)
    return extended_model


def wrapped(
    model: nn.Module,
    algorithm: type[Algorithm],
    options: Mapping[str, Any],
    batchnorm: str,
    **how: Any,
) -> nn.Module:
    """Return a model with the parts that an algorithm adds, such as heads or adapters.

    Args:
        model: the model without them, which may be changed in place.
        algorithm: the algorithm's class.
        options: the algorithm's options.
        batchnorm: the configuration's ``batchnorm``. ``drop`` removes the running statistics of the added parts, too.
        how: ``shape``, ``n_classes`` and ``seed``, as for :meth:`fl_core.algorithms.base.Algorithm.wrap_model`.
    """
    model = algorithm.wrap_model(model, read_config(algorithm, options), **how)
    if batchnorm == "drop":
        drop_statistics(model)
    return model


def _owner(name: str) -> str:
    """Return the path of a tensor's module.

    >>> _owner("body.fc1.weight"), _owner("scale")
    ('body.fc1', '')
    """
    return name.rpartition(".")[0]


# --- initial weights from a file, or from the global model or the shared layers of another run -------------------


def start(
    model: nn.Module,
    path: str | Path,
    example: Tensor,
    words: Sequence[str] | None = None,
) -> list[str]:
    """Copy trained weights into a fresh model, and return notes on the parts that stay fresh.

    All tensors must exist under the model's own names and in its shapes, with one exception. The linear layer of the
    logits stays fresh if the weights have another number of classes.

    Args:
        model: the fresh model, which is changed in place.
        path: a file of weights (see :mod:`fl_core.models.weights`), or a run's directory.
            Of a run the global model is read, at the last checkpoint, or at its best round
            under a stopping rule. A run without a global model gives the server's: shared
            layers as trained, and the others as the run began.
        example: a batch that the model takes.
        words: the data's vocabulary, for texts. A run must have the same one. A file does not name its words.

    Returns:
        Notes, one sentence each.

    Raises:
        UsageError: there is nothing or no common model at the path, or the run has adapters
            or another vocabulary. Or tensors are missing, unexpected or of another shape.
            The message then names the first of them.
        CorruptError: the run's bytes are damaged.
    """
    path = Path(path)
    if path.is_dir():
        stored, stored_words, local_norms, local_layers = _of_run(path)
    else:
        stored, stored_words, local_norms, local_layers = (
            weights.read(path),
            None,
            False,
            [],
        )
    if (
        words is not None
        and stored_words is not None
        and list(words) != list(stored_words)
    ):
        raise UsageError(
            f"{path} must have the vocabulary of the data; got another. Leave init out."
        )
    notes = _keep_classifier(model, stored, model.state_dict(), example, path)
    copy_into(model, stored, str(path))
    if local_layers:
        notes.append(
            f"{listing(local_layers)} start as {path} began: its clients kept their own"
        )
    if local_norms and any(
        norm.track_running_stats for norm in batch_norms(model).values()
    ):
        notes.append(
            f"running statistics are those that {path} started with: its clients kept their own (bn=local)"
        )
    return notes


def _of_run(path: Path) -> tuple[Tree, Sequence[str] | None, bool, list[str]]:
    """Return a run's common model, its vocabulary, and what its clients kept.

    Returns:
        The tensors of the common model by name. The words of its texts, or None for
        other data. Whether clients kept the running statistics of batch normalisations.
        The names of the layers that clients kept, which are none for a global model.

    Raises:
        UsageError: the run has adapters, or no common model.
    """
    run = store.Run(path)
    config = run.config
    has_global = bool((run.rows()[1]["model"] == "global").any())
    plan = run.plan()
    if config.get("adapt") is not None:
        raise UsageError(
            f"init must be a run without adapters; got {path}. Export its model, and name that file."
        )
    round_number = run.used_round("global" if has_global else None)
    server = run.checkpoint(round_number, lazy=True).server.trees
    if not (has_global or plan) or "model" not in server:
        raise UsageError(
            "init must be a run with a global model or with shared layers, such as one of fedavg or fedper; "
            f"got {path}, a run of {config['algorithm']}. Choose another run."
        )
    local_norms = config["batchnorm"] == "local"
    if has_global or plan is None:
        return dict(server["model"]), config.get("words"), local_norms, []
    layer_plan = LayerPlan.from_json(plan)
    local_layers = [
        layer.name for layer in layer_plan.layers if layer.name not in layer_plan.shared
    ]
    return dict(server["model"]), config.get("words"), local_norms, local_layers


def _keep_classifier(
    model: nn.Module, stored: Tree, model_state: Tree, example: Tensor, path: Path
) -> list[str]:
    """Put the fresh classifier in place of a stored one of another number of classes, and return a note of it.

    The list is empty, and ``stored`` stays as it is, if the numbers agree, or if the
    classifier has no weight of this form in one of the two.
    """
    try:
        head = head_path(model, example)
    except UsageError:
        return []  # without a linear classifier nothing may differ; this is checked with the rest
    names = [
        name
        for name in (f"{head}.weight".lstrip("."), f"{head}.bias".lstrip("."))
        if name in model_state
    ]
    if not names or any(
        name not in stored or stored[name].shape[1:] != model_state[name].shape[1:]
        for name in names
    ):
        return []
    stored_classes, model_classes = len(stored[names[0]]), len(model_state[names[0]])
    if stored_classes == model_classes:
        return []
    stored.update({name: model_state[name] for name in names})
    classifier = "classifier"
    if head:
        classifier = f"classifier {head!r}"
    return [
        f"the {classifier} starts fresh: {path} is of {stored_classes} classes, the data have {model_classes}"
    ]


def copy_into(model: nn.Module, stored: Mapping[str, Tensor], where: str) -> None:
    """Copy a state dict into ``model`` in place.

    The module's own strict ``load_state_dict`` comes first, with its hooks. Where it refuses, tensors are matched by
    name. Tied tensors may be stored under any of their names, or under several names if the values agree.

    Args:
        model: the model.
        stored: the state dict.
        where: the name of the state dict in error messages.

    Raises:
        UsageError: a name or shape does not fit, or tied tensors have different values. The
            message names the first of them.
    """
    model_tensors = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    names_by_id: dict[int, list[str]] = {}
    for name, tensor in model_tensors.items():
        names_by_id.setdefault(id(tensor), []).append(name)
    source = dict(stored)
    for names in names_by_id.values():
        stored_names = [name for name in names if name in source]
        for name in stored_names[1:]:
            if not equal(source[stored_names[0]], source.pop(name)):
                raise UsageError(
                    f"tied tensors {stored_names[0]!r} and {name!r} must have the same values; "
                    f"got different ones in {where}."
                )
        if stored_names:
            source[names[0]] = source.pop(stored_names[0])
    strict_tensors = strict_state(model, stored)
    if strict_tensors is not None:
        model.load_state_dict(strict_tensors, strict=True)
        return
    targets = {names[0]: model_tensors[names[0]] for names in names_by_id.values()}
    tree.check_same(source, targets, where, "the model")
    tree.assign(targets, source)


def strict_state(
    model: nn.Module, stored: Mapping[str, Tensor]
) -> Mapping[str, Tensor] | None:
    """Return ``stored``, or a plain copy of it, if the module's own strict ``load_state_dict`` takes it; else None.

    The module itself is not changed. ``stored`` can have the versions of the modules'
    formats from the file, and its plain copy has none. Without them torch assumes version
    1, so a batch normalisation adds a counter that is not there.
    """
    for state in (stored, dict(stored)):
        with suppress(Exception):  # of any kind: hooks are code of others
            copied(model).load_state_dict(state, strict=True)
            return state
    return None
