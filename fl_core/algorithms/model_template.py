"""What a server hands a client to make its models of: its own part, and names of what the client keeps to itself.

At the server the hook ``models`` gets an outline of the client's state, in which every tensor is an :class:`Own`: a
name that can be given a place in a model, and nothing else. The client puts its tensors where their names are.
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
    """Stands at the server for a tensor that a client keeps.

    >>> weight = ClientTensorRef("model", "head.weight")
    >>> {"body.weight": 1.0, "head.weight": weight}["head.weight"]
    Own('model', 'head.weight')
    >>> weight.sum()
    Traceback (most recent call last):
        ...
    fl_core.errors.PrivateError: 'head.weight' of 'model' is the client's own: a server has its name alone

    Raises:
        PrivateError: whatever else is asked of it.
    """

    __slots__ = ("name", "tree")

    def __init__(self, tree: str, name: str) -> None:
        self.tree, self.name = tree, name

    def __repr__(self) -> str:
        return f"Own({self.tree!r}, {self.name!r})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise PrivateError(f"{self.name!r} of {self.tree!r} is the client's own: a server has its name alone")

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # what Python itself looks for, such as a way to copy
            raise AttributeError(attribute)
        self._refuse()

    __bool__ = __eq__ = __ne__ = __float__ = __int__ = __index__ = __len__ = __iter__ = __getitem__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise PrivateError("a client's own tensor cannot be computed with at the server, which has its name alone")


class _Meta(dict[str, Any]):
    """Plain data of a client, of which a server knows what is as in the beginning; the rest it only knows to differ."""

    def __init__(self, begun: Mapping[str, Any], changed: frozenset[str]) -> None:
        super().__init__({key: value for key, value in begun.items() if key not in changed})
        self._changed = changed

    def _known(self, key: object = None) -> None:
        if key is None or key in self._changed:
            raise PrivateError(f"{key or sorted(self._changed)!r} of a client's state is its own")

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
    """What a server knows of a client's state.

    Attributes:
        trees: names of the tensors of each tree.
        changed: the plain data that are not as in the beginning, by name.
    """

    trees: Mapping[str, tuple[str, ...]]
    changed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, state: State, begun: Mapping[str, Any]) -> StateSchema:
        """The outline of a state; ``begun`` is the plain data of the one in which the client began."""
        keys = state.meta.keys() | begun.keys()
        changed = {key for key in keys if key not in state.meta or key not in begun or state.meta[key] != begun[key]}
        return cls({name: tuple(each) for name, each in state.trees.items()}, frozenset(changed))

    def state(self, begun: Mapping[str, Any]) -> State:
        """The state as a hook at the server gets it: names for tensors, and the plain data of the beginning."""
        trees = {tree: {name: ClientTensorRef(tree, name) for name in names} for tree, names in self.trees.items()}
        meta = _Meta(begun, self.changed) if self.changed else dict(begun)
        return State(cast("dict[str, Tree]", trees), meta)


@dataclass(frozen=True)
class ModelTemplate:
    """Of what a client makes its models.

    Attributes:
        models: by name, the server's tensors and the names of the client's own.
        server: the server's state, of an algorithm that computes with what the client keeps, at the client then.
    """

    models: dict[str, dict[str, Tensor | ClientTensorRef]] = field(default_factory=dict)
    server: State | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the server's tensors in it, each counted once."""
        if self.server is not None:
            return tree.n_bytes(self.server.trees["model"])
        sent = {(name, id(part)): part for each in self.models.values() for name, part in each.items()}
        return sum(tree.n_bytes({"": part}) for part in sent.values() if not isinstance(part, ClientTensorRef))


def make_template(algorithm: Algorithm, server: State, client: State, rnd: Round) -> ModelTemplate:
    """What the server hands a client after a round; ``client`` is an :meth:`StateSchema.state`."""
    try:
        return ModelTemplate(cast(Any, algorithm.models(server, client, rnd)))
    except (PrivateError, TypeError):  # of torch's, where it is given a name for a tensor
        return ModelTemplate(server=server)


def models_of(algorithm: Algorithm, offered: ModelTemplate, state: State, rnd: Round) -> dict[str, Tree]:
    """The client's models, where its state is.

    Raises:
        UsageError: the offer names what the client does not have.
    """
    if offered.server is not None:
        return algorithm.models(offered.server, state, rnd)

    def placed(part: Tensor | ClientTensorRef) -> Tensor:
        return state.trees[part.tree][part.name] if isinstance(part, ClientTensorRef) else part

    return {model: {name: placed(part) for name, part in each.items()} for model, each in offered.models.items()}
