"""Templates for a client's models: the server's tensors, and references to the client's own.

On the server the hook ``models`` receives a schema of the client's state. Every tensor there is a
:class:`ClientTensorRef`. A hook can give such a name a place in a model and nothing else. The client puts its tensors
in the places of their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from torch import Tensor

from fl_core import tree
from fl_core.algorithms.base import Algorithm
from fl_core.algorithms.exchange import Round, State
from fl_core.errors import PrivateError
from fl_core.tree import Tree


class ClientTensorRef:
    """A reference on the server to a tensor that a client keeps.

    >>> weight = ClientTensorRef("model", "head.weight")
    >>> {"body.weight": 1.0, "head.weight": weight}["head.weight"]
    ClientTensorRef('model', 'head.weight')
    >>> weight.sum()
    Traceback (most recent call last):
        ...
    fl_core.errors.PrivateError: 'head.weight' of 'model' must stay with the client; the server has only its name.

    Raises:
        PrivateError: anything else is asked of it.
    """

    __slots__ = ("name", "tree")

    def __init__(self, tree: str, name: str) -> None:
        self.tree, self.name = tree, name

    def __repr__(self) -> str:
        return f"ClientTensorRef({self.tree!r}, {self.name!r})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise PrivateError(
            f"{self.name!r} of {self.tree!r} must stay with the client; the server has only its name."
        )

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # Python's own look-ups, such as for copying
            raise AttributeError(attribute)
        self._refuse()

    __bool__ = __eq__ = __ne__ = __float__ = __int__ = __index__ = __len__ = (
        __iter__
    ) = __getitem__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = (
        __rtruediv__
    ) = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = (
        _refuse
    )
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise PrivateError(
            "a client's own tensor must stay with the client; the server has only its name."
        )


class _Meta(dict[str, Any]):
    """Plain data of a client on the server: initial values, and the names of changed ones."""

    def __init__(self, begun: Mapping[str, Any], changed: frozenset[str]) -> None:
        super().__init__(
            {key: value for key, value in begun.items() if key not in changed}
        )
        self._changed = changed

    def _known(self, key: object = None) -> None:
        if key is None or key in self._changed:
            raise PrivateError(
                f"{key or sorted(self._changed)!r} of a client's state must stay with the client."
            )

    def __getitem__(self, key: str) -> Any:
        self._known(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._known(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._known(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._known()
        return super().__iter__()

    def _all(self) -> NoReturn:
        self._known()
        raise AssertionError

    keys = values = items = copy = __len__ = _all


@dataclass(frozen=True)
class StateSchema:
    """The server's knowledge of a client's state.

    Attributes:
        trees: names of the tensors of each tree.
        changed: names of the plain data that differ from the initial ones.
    """

    trees: Mapping[str, tuple[str, ...]]
    changed: frozenset[str] = frozenset()

    @classmethod
    def from_state(cls, state: State, begun: Mapping[str, Any]) -> StateSchema:
        """Return the schema of a state. ``begun`` is the plain data of the client's initial state."""
        keys = state.meta.keys() | begun.keys()
        changed = {
            key
            for key in keys
            if key not in state.meta
            or key not in begun
            or state.meta[key] != begun[key]
        }
        return cls(
            {name: tuple(each) for name, each in state.trees.items()},
            frozenset(changed),
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StateSchema:
        """Return the schema of the plain data from :meth:`to_json`."""
        return cls(
            {name: tuple(each) for name, each in values["trees"].items()},
            frozenset(values["changed"]),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        trees = {name: list(each) for name, each in self.trees.items()}
        return {"trees": trees, "changed": sorted(self.changed)}

    def state(self, begun: Mapping[str, Any]) -> State:
        """Return the state for a hook on the server: references for tensors, and the initial plain data."""
        trees = {
            tree: {name: ClientTensorRef(tree, name) for name in names}
            for tree, names in self.trees.items()
        }
        meta = _Meta(begun, self.changed) if self.changed else dict(begun)
        return State(cast("dict[str, Tree]", trees), meta)


@dataclass(frozen=True)
class ModelTemplate:
    """A template from which a client makes its models.

    Attributes:
        models: by name, the server's tensors and references to the client's own.
        server: the server's state, for an algorithm that computes with the client's tensors. It then runs on the
            client.
    """

    models: Mapping[str, Mapping[str, Tensor | ClientTensorRef]] = field(
        default_factory=dict
    )
    server: State | None = None

    @property
    def bytes(self) -> int:
        """Return the bytes of the server's tensors, each counted once."""
        if self.server is not None:
            return tree.n_bytes(self.server.trees["model"])
        sent = {
            (name, id(part)): part
            for each in self.models.values()
            for name, part in each.items()
        }
        return sum(
            tree.n_bytes({"": part})
            for part in sent.values()
            if not isinstance(part, ClientTensorRef)
        )


def make_template(
    algorithm: Algorithm, server: State, client: State, rnd: Round
) -> ModelTemplate:
    """Make the template for a client after a round. ``client`` comes from :meth:`StateSchema.state`."""
    try:
        return ModelTemplate(algorithm.models(server, client, rnd))
    except (
        PrivateError,
        TypeError,
    ):  # torch raises it for a reference in a tensor's place
        return ModelTemplate(server=server)


def models_of(
    algorithm: Algorithm, offered: ModelTemplate, state: State, rnd: Round
) -> dict[str, Tree]:
    """Make the client's models from a template and its state.

    Raises:
        UsageError: the template names a tensor that the client does not have.
    """
    if offered.server is not None:
        return algorithm.models(offered.server, state, rnd)

    def placed(part: Tensor | ClientTensorRef) -> Tensor:
        return (
            state.trees[part.tree][part.name]
            if isinstance(part, ClientTensorRef)
            else part
        )

    return {
        model: {name: placed(part) for name, part in each.items()}
        for model, each in offered.models.items()
    }
