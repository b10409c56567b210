"""The exceptions and warnings, and checks of values by annotations or by the form of stored JSON.

>>> from dataclasses import dataclass
>>> from typing import Annotated
>>> @dataclass(frozen=True)
... class Folds:
...     count: Annotated[int, Bound("at least 2", lambda count: count >= 2)] = 5
>>> check_fields(Folds(count=1))
Traceback (most recent call last):
    ...
fl_core.errors.UsageError: count must be at least 2; got 1.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, wraps
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from types import FrameType, MappingProxyType, NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

PACKAGES = ("fl_core", "diagnostics", "fedlayers")


LONGEST = 2000
"""Characters of a message at most. A longer one loses its middle."""


class Shortened(Exception):
    """An error whose message has at most :data:`LONGEST` characters."""

    def __init__(self, *args: Any) -> None:
        if args and isinstance(args[0], str) and len(args[0]) > LONGEST:
            half = LONGEST // 2 - 2
            args = (f"{args[0][:half]} … {args[0][-half:]}", *args[1:])
        super().__init__(*args)


class UsageError(Shortened, ValueError):
    """An invalid request: an unknown name, a missing file, data that do not fit. Exit code 2."""


class RunError(Shortened, RuntimeError):
    """A failure while running a valid request. Exit code 1.

    >>> [issubclass(kind, RunError) for kind in (NonFiniteError, CorruptError, BusyError, UsageError)]
    [True, True, True, False]
    """


class DivergedError(RunError):
    """Divergence of training: a loss far above the initial one. The message names the place."""


class NonFiniteError(DivergedError):
    """NaN or infinity in training or aggregation. The message names the place."""


class WorkerError(RunError):
    """The end of a worker process before its work was done."""


class CorruptError(RunError):
    """Stored data that are damaged: missing, of another form, or different from their recorded digest."""


class BusyError(RunError):
    """A run directory to which another process is writing."""


UNGUARDED = 93
"""Exit code of a worker process that cannot use the user's script.

The script trains while the worker imports it, or then lacks a class that a message has.
"""


def end_unguarded() -> None:
    """End this process with :data:`UNGUARDED` if it is a worker that still imports the user's script.

    It is called where training starts. In any other process it has no effect.
    """
    import multiprocessing  # with sockets, which messages alone do without

    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(UNGUARDED)


def warn(text: str) -> None:
    """Warn at the line that called this project, not at a line within it.

    From Python 3.12 on, the argument ``skip_file_prefixes`` of :func:`warnings.warn` has the same effect.
    """
    frame: FrameType | None = sys._getframe()
    level = outer_level = 1
    while frame is not None:
        level += 1
        if str(frame.f_globals.get("__name__")).partition(".")[0] in PACKAGES:
            outer_level = level
        frame = frame.f_back
    warnings.warn(text, stacklevel=outer_level)


def listing(names: Iterable[str], most: int = 12) -> str:
    """Join names with commas, at most ``most`` of them, followed by the number of the others.

    >>> listing("abc", 3), listing("abcd", 3), listing("")
    ('a, b, c', 'a, b, c and 1 more', '')
    """
    names = list(names)
    others_text = ""
    if len(names) > most:
        others_text = f" and {len(names) - most} more"
    return ", ".join(names[:most]) + others_text


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "round"), plural(3000, "round")
    ('1 round', '3,000 rounds')

    Args:
        count: the number.
        noun: the noun in the singular. Its plural must end in an added s.
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def spelled(**settings: object) -> str:
    """Return settings as keyword arguments of Python. The command line shows them as its flags.

    >>> spelled(label_column="died at", exclude_columns=["id"], keep_ids=True)
    "label_column='died at', exclude_columns=['id'], keep_ids=True"
    """
    return ", ".join(f"{key}={value!r}" for key, value in settings.items())


def needs_package(package: str, purpose: str, extra: str) -> UsageError:
    """Return the error for a missing optional package, with the command that installs it.

    Args:
        purpose: what the package is needed for, such as ``read t.parquet``.
        extra: the optional dependencies of fedlayers that contain the package, such as ``parquet``. It is empty if
            none does.
    """
    requirement = f"'fedlayers[{extra}]'" if extra else package
    return UsageError(
        f"{package} must be installed to {purpose}. Run pip install {requirement}."
    )


def check_known(kind: str, name: str, names: Iterable[str]) -> str:
    """Return ``name`` if it is one of ``names``.

    >>> check_known("algorithm", "ditto", iter(["fedavg", "ditto"]))
    'ditto'
    >>> for name, known in (("fedvag", ["fedavg", "ditto"]), ("conv11", ["conv1", "fc1"]), ("x", [".", ""])):
    ...     try:
    ...         check_known("name", name, known)
    ...     except UsageError as error:
    ...         print(error)
    unknown name 'fedvag': did you mean 'fedavg'? known: fedavg, ditto
    unknown name 'conv11': did you mean 'conv1'? known: conv1, fc1
    unknown name 'x': known: '.', ''

    Args:
        kind: the word for what is named, for the message.
        name: the name to check.
        names: the known names.

    Raises:
        UsageError: the name is unknown. The message has the kind, the nearest known
            name if one is near, and at most 40 known names.
    """
    names = list(names)
    if name in names:
        return name
    nearest_name = nearest(str(name)[:LONGEST], names)
    hint = ""
    if str(name).casefold() in EVERY:
        hint = "name each one that you mean. "
    elif nearest_name:
        hint = f"did you mean {nearest_name!r}? "
    names_text = listing(map(readable, names), 40) or "none"
    raise UsageError(f"unknown {kind} {name!r}: {hint}known: {names_text}")


EVERY = ("all", "*")
"""Words for all names. Where they are no known name, the error asks for each name that is meant."""
MEANT = {
    "train": "run",
    "fit": "run",
    "decide": "choose",
    "recommend": "choose",
    "measure": "diagnose",
    "show": "plot",
    "draw": "plot",
    "validate": "check",
    "ls": "runs",
    "test": "predict",
    "logistic": "linear",
    "logistic_regression": "linear",
    "logreg": "linear",
    "network": "mlp",
    "neural_network": "mlp",
    "transformer": "text_transformer",
    "auc": "auroc",
    "roc_auc": "auroc",
    "f1": "macro_f1",
    "average_precision": "auprc",
    "ce": "cross_entropy",
    "l1": "mae",
    "l2": "mse",
    "logloss": "loss",
    "log_loss": "loss",
    "standalone": "local",
    "finetune": "local_adaptation",
    "fine_tuning": "local_adaptation",
    "hessian": "hessian_trace",
    "delimiter": "sep",
    "separator": "sep",
}
"""Names of this project by the words of other tools. A word counts where its name is among the known ones."""
CLOSE = 0.6
"""Similarity of two names, from 0 to 1, from which one is proposed for the other."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name nearest to ``name``, or an empty text. Case is ignored.

    A name is near if another tool uses the word for the same thing (:data:`MEANT`), or if
    the spelling is similar. Similar names that differ by more than one letter in length
    must have two neighbouring letters in common. Without such a name, one that begins with
    the other is near, from three letters on.

    >>> nearest("HEART.CVS", ["heart.csv", "digits"]), nearest("heart", ["xyz"])
    ('heart.csv', '')
    >>> nearest("logistic", ["isic_cnn", "linear"]), nearest("label", ["x", "label_column"])
    ('linear', 'label_column')
    >>> nearest("iris", ["digits"])
    ''
    """
    import difflib  # for a mistake only

    name_by_fold = {known_name.casefold(): known_name for known_name in known}
    name = name.casefold()
    synonym = MEANT.get(name.replace("-", "_"), "")
    if synonym in name_by_fold:
        return name_by_fold[synonym]
    matches = difflib.get_close_matches(name, name_by_fold, n=1, cutoff=CLOSE)
    letter_pairs = {*map("".join, pairwise(name))}
    if matches and abs(len(matches[0]) - len(name)) > 1:
        common_pairs = letter_pairs.intersection(map("".join, pairwise(matches[0])))
        if not common_pairs:
            matches = []
    if len(name) > 2 and not matches:
        matches = [match for match in name_by_fold if match.startswith(name)]
        matches += [
            match for match in name_by_fold if len(match) > 2 and name.startswith(match)
        ]
    if matches:
        return name_by_fold[matches[0]]
    return ""


class UnknownName(UsageError, KeyError):
    """A key that a dictionary of names does not have. The message has the nearest and the known ones."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class ByName(dict[str, Any]):
    """A dictionary whose error names the known keys.

    >>> ByName("client", {"north": 1})["noth"]
    Traceback (most recent call last):
        ...
    fl_core.errors.UnknownName: unknown client 'noth': did you mean 'north'? known: north

    Args:
        kind: the word for what a key names, such as ``client``.
        values: the contents.

    Raises:
        UnknownName: a key that is looked up is unknown.
    """

    def __init__(
        self, kind: str, values: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        super().__init__(values)
        self.kind = kind

    def __missing__(self, name: str) -> NoReturn:
        try:
            check_known(self.kind, name, self)
        except UsageError as error:
            raise UnknownName(str(error)) from None
        raise KeyError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return ByName, (self.kind, dict(self))


def readable(name: str) -> str:
    """Return a name for a printed list of names.

    It is in quotes if it has a comma, or neither a letter, a digit nor an underscore.

    >>> print(listing(map(readable, ["fc1", ".", ",", "", "a, b"])))
    fc1, '.', ',', '', 'a, b'
    """
    if re.fullmatch(r"[^,]*\w[^,]*", name):
        return name
    return repr(name)


def as_list(
    name: str, listed: Any, *, empty: bool = False, distinct: bool = False
) -> tuple[Any, ...]:
    """Return the values of an argument that takes a list, as a tuple.

    A single text, number or other object is a list of one. None is an empty list. An
    array gives Python's numbers.

    >>> as_list("metrics", "cka"), as_list("rounds", 1), as_list("rounds", range(2))
    (('cka',), (1,), (0, 1))

    Args:
        name: name of the argument, for the message.
        listed: the argument's value.
        empty: whether the list may be empty.
        distinct: whether repeated values are refused.

    Raises:
        UsageError: there is no value unless ``empty``, or a value is repeated with
            ``distinct``.
    """
    listed = listed.tolist() if hasattr(listed, "tolist") else listed  # an array
    if listed is None:
        listed = ()
    is_single = isinstance(listed, str) or not isinstance(listed, Iterable)
    values = (listed,) if is_single else tuple(listed)
    if not values and not empty:
        raise UsageError(f"{name} must have at least one value; got none. Name one.")
    for position, value in enumerate(values if distinct else ()):
        if value in values[:position]:
            raise UsageError(
                f"{name} must be distinct; got {value} twice. Leave one out."
            )
    return values


@contextmanager
def about(
    what: str,
    kind: type[Exception] | tuple[type[Exception], ...] = UsageError,
    raised: type[Exception] = UsageError,
    way: str = "",
) -> Iterator[None]:
    """Let messages of errors in the ``with`` block begin with ``what``.

    >>> with about("heart.csv"):
    ...     raise UsageError("a row is missing")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: heart.csv: a row is missing

    Args:
        what: the text before the message. A colon follows it.
        kind: the types of errors that are changed. Others pass.
        raised: the type of the error that is raised in their place.
        way: advice that ends the message, which is then one line.
    """
    try:
        yield
    except kind as error:
        text = str(error) or type(error).__name__
        if way:
            reason = " ".join(text.split()).rstrip(".")
            text = f"{reason}. {way}"
        raise raised(f"{what}: {text}") from error


def damaged(path: Path | str, *kinds: type[Exception]) -> AbstractContextManager[None]:
    """Raise errors in the ``with`` block as :class:`CorruptError`, with the stored file in the message.

    Args:
        path: the stored file.
        kinds: types of errors; by default ValueError. Others pass.
    """
    return about(f"{path} is damaged", kinds or (ValueError,), CorruptError)


def check_options(
    what: str, options: Iterable[str], option_names: Iterable[str]
) -> None:
    """Check that a function or class takes all given options.

    Args:
        what: what has the options, for messages, such as ``model 'mlp'``.
        options: the given names.
        option_names: the names that it takes.

    Raises:
        UsageError: an option is unknown, or none is taken. The message names it,
            and the known ones as that of :func:`check_known` does.
    """
    option_names = sorted(option_names)
    for option in options:
        if not option_names:
            raise UsageError(
                f"{what} must have no options; got {option!r}. Leave it out."
            )
        check_known(f"option of {what}", option, option_names)


Function = TypeVar("Function", bound=Callable[..., Any])


class Bound(NamedTuple):
    """A bound on a value: its words in an error, and a function that tests a value."""

    words: str
    holds: Callable[[Any], bool]


class OneOf(NamedTuple):
    """A choice of names: the word for one of them, and the valid names."""

    kind: str
    names: Collection[str]


def at_least(least: int) -> Bound:
    """Return a bound for ``Annotated`` that refuses numbers below ``least``."""
    return Bound(f"at least {least}", lambda value: value >= least)


ABOVE_0 = Bound("above 0", lambda value: value > 0)
SHARE = Bound("above 0 and at most 1", lambda value: 0 < value <= 1)
BELOW_1 = Bound("at least 0 and below 1", lambda value: 0 <= value < 1)
INSIDE = Bound("between 0 and 1", lambda value: 0 < value < 1)
SIZE = Bound(
    "an integer from 1 to 100,000",
    lambda value: isinstance(value, int) and 0 < value <= 100_000,
)
Size = Annotated[int, SIZE]
"""The type of a width, a depth or another size of a model."""
Positive = Annotated[float, ABOVE_0]
Count = Annotated[int, at_least(1)]
Share = Annotated[float, Bound("at most 1", lambda value: value <= 1)]
"""Types of an algorithm's options."""


# --- the one check of a value against a type or a bound ---


@dataclass(frozen=True)
class MapOf:
    """A form of stored data: a dictionary with any keys, whose values all have one form."""

    form: Any


class Dialect(NamedTuple):
    """The source of values, such as Python or JSON: its types, and their words in a message.

    Attributes:
        stands_for: the types that are accepted for a type, if they are others than itself.
        words: the word for a type in a message, if it is not the type's name.
        shown: a function that returns a value as text for a message.
    """

    stands_for: Mapping[Any, Any]
    words: Mapping[Any, str]
    shown: Callable[[Any], str]


def short_value(value: object) -> str:
    """Return a value for an error message.

    A text, number or path of at most 80 characters is written out, and so is None. Any
    other value is shown by its type alone, to hide clients' data.
    """
    text = ""
    if isinstance(value, str | int | float | Path | None):
        text = repr(value)
    return text if 0 < len(text) <= 80 else type(value).__name__


def _short_json(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__


_CHECKED = {bool, int, float, str, list, dict, tuple, NoneType}
_PYTHON = Dialect(
    {float: (float, int), tuple: (tuple, list), Path: os.PathLike},
    {NoneType: "none", Path: "a path", Mapping: "dict"},
    short_value,
)
_NUMPY = _PYTHON._replace(
    stands_for=_PYTHON.stands_for | {int: Integral, float: Real}  # type: ignore[operator]
)
"""Arguments of Python with numbers of NumPy, next to :data:`_PYTHON` without them."""
_JSON: Dialect = Dialect(
    {},
    {list: "a list", dict: "an object", MapOf: "an object", NoneType: "null"},
    _short_json,
)
_LISTS = (list, tuple, Sequence, Collection)
_IT = "it"
"""The word for a value without a name."""


def _alternatives(hint: object) -> tuple[Any, ...]:
    if isinstance(hint, UnionType):
        return get_args(hint)
    return (hint,)


def fits(value: object, hint: object, dialect: Dialect = _NUMPY) -> bool:
    """Return whether a value has an annotated type, or is within a :class:`Bound`.

    A single value is accepted for a Sequence or a Collection with an item type, such as 1
    for ``Sequence[int]``. None is accepted there as an empty list. Every item must have the
    first type in the brackets, also in a tuple. Items of dictionaries and iterators are not
    checked. A truth value is no number. An annotation that is no class, such as Literal,
    accepts any value.

    Args:
        value: the value.
        hint: the annotation, or a bound.
        dialect: the types that are accepted for a type. By default these are Python's and NumPy's.
    """
    if isinstance(hint, Bound):
        return bool(hint.holds(value))
    if hint is None:
        return value is None
    arguments, base_type = get_args(hint), get_origin(hint) or hint
    if base_type is UnionType:
        return any(fits(value, argument, dialect) for argument in arguments)
    if base_type in (Sequence, Collection) and isinstance(value, Iterator):
        return True  # it can be read only once
    if base_type in _LISTS and arguments:
        is_kind = base_type in (Sequence, Collection) or fits(value, base_type, dialect)
        values = as_list("", value, empty=True)
        return is_kind and all(fits(item, arguments[0], dialect) for item in values)
    if base_type in (int, float) and isinstance(value, bool):
        return False
    accepted_types = dialect.stands_for.get(base_type, base_type)
    return (
        base_type is Any
        or not isinstance(base_type, type)
        or isinstance(value, accepted_types)
    )


def _words(hint: object, dialect: Dialect) -> str:
    if isinstance(hint, Bound):
        return hint.words
    if isinstance(hint, list | dict | MapOf):
        hint = type(hint)
    base_type = get_origin(hint) or hint
    if base_type in _LISTS and get_args(hint):
        item = _words(get_args(hint)[0], dialect)
        return f"a list of {item}"
    base_type = NoneType if base_type is None else base_type
    return dialect.words.get(base_type) or str(
        getattr(base_type, "__name__", base_type)
    )


def _must_be(
    name: str, hints: Sequence[object], value: object, dialect: Dialect
) -> str:
    """Return the error's sentence that a value has none of these types and bounds, without a full stop."""
    rule = " or ".join(_words(hint, dialect) for hint in hints)
    value_text = dialect.shown(value)
    return f"{name} must be {rule}; got {value_text}"


COUNT = Bound(
    "a whole number from 0",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
)
DIGEST = Bound(
    "a digest, or nothing",
    lambda value: (
        isinstance(value, str) and bool(re.fullmatch(r"([0-9a-f]{64})?", value))
    ),
)
NUMBER = Bound(  # whole numbers beyond all floats are none
    "a finite number",
    lambda value: (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    ),
)
"""The last of three bounds on values that JSON stores, after :data:`COUNT` and :data:`DIGEST`."""


# --- arguments ---


def check_type(
    name: str, value: object, hint: object, way: str = "", *, numpy: bool = False
) -> None:
    """Check that a value has an annotated type. A whole number is also a ``float``, and a truth value is no number.

    A list may stand for a tuple. Only Python's plain types are checked, not ``Literal`` or a class.

    >>> check_type("lr", "fast", float | None)
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: lr must be float or none; got 'fast'.

    Args:
        name: the value's name, for the message.
        value: the value.
        hint: the annotation, one type or several with bars between them.
        way: what to do, for the message.
        numpy: whether a number may be NumPy's.

    Raises:
        UsageError: the value has another type.
    """
    hints = _alternatives(hint)
    dialect = _NUMPY if numpy else _PYTHON
    is_plain = {get_origin(hint_part) or hint_part for hint_part in hints} <= _CHECKED
    if is_plain and not fits(value, hint, dialect):
        fault = _must_be(name, hints, value, dialect)
        raise UsageError(f"{fault}. {way}".rstrip())


def checked(function: Function) -> Function:
    """Return a function that first checks its arguments by its annotations.

    One value may stand for a Sequence or a Collection. Annotations that name a type for
    type checkers alone are not checked. The function runs with gradients, outside of
    inference mode, and with float32 as torch's default type.

    >>> @checked
    ... def train(rounds: int, out: Path | str = "run", layers: Sequence[str] = ()) -> None: ...
    >>> train(2, layers=["fc1", 3])
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: layers must be a list of str; got 3.
    >>> train(2, out=["run"])
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: out must be a path or str; got list.
    >>> train()
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: train(): missing a required argument: 'rounds'

    Raises:
        UsageError: from the returned function, if an argument has another type, or is
            missing or unknown. The message names it.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: object, **options: object) -> Any:
        with about(f"{function.__name__}()", TypeError):
            arguments = signature.bind_partial(*args, **options).arguments
            for name, value in arguments.items():
                if signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                    _check_argument(name, value, argument_hint(function, name))
            signature.bind(*args, **options)
        with _usual_torch():
            return function(*args, **options)

    return with_named_keys(cast(Function, call))


def with_named_keys(function: Function) -> Function:
    """Return a function with a signature that names the keys of its unpacked TypedDict, for notebooks and ``help``.

    A function without such keyword arguments is returned unchanged.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not parameters or "Unpack[" not in str(parameters[-1].annotation):
        return function
    last_parameter = parameters.pop()
    (keys,) = get_args(argument_hint(inspect.unwrap(function), last_parameter.name))
    key_parameters = [
        last_parameter.replace(
            name=name, kind=last_parameter.KEYWORD_ONLY, annotation=hint, default=...
        )
        for name, hint in get_type_hints(keys).items()
    ]

    @wraps(function)
    def call(*args: object, **options: object) -> Any:
        return function(*args, **options)

    call.__signature__ = signature.replace(parameters=[*parameters, *key_parameters])  # type: ignore[attr-defined]
    return cast(Function, call)


@contextmanager
def _usual_torch() -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is None:  # nobody has changed it
        yield
        return
    dtype = torch.get_default_dtype()
    with torch.inference_mode(False), torch.enable_grad():
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


@cache
def argument_hint(function: Callable[..., Any], name: str) -> Any:
    """Return the type of a function's argument; Any if its module imports the type for type checkers only."""
    holder = SimpleNamespace(__annotations__={name: function.__annotations__[name]})
    try:
        return get_type_hints(holder, function.__globals__)[name]
    except (AttributeError, NameError):
        return Any


_WAYS = {
    "config": "Name a dataset by dataset=, or pass samples as data=.",
    "silos": "Give {client: (x, y)}.",
}
"""Advice for the error on an argument of another type, by the argument's name."""


def _check_argument(name: str, value: object, hint: object) -> None:
    if fits(value, hint):
        return
    hints = _alternatives(hint)
    items: tuple[Any, ...] = ()
    takes_list = any(
        (get_origin(hint_part) or hint_part) in _LISTS for hint_part in hints
    )
    if takes_list and not isinstance(value, Mapping):
        items = as_list(name, value, empty=True)
    wrong_items = [item for item in items if not fits(item, hint)] or [value]
    fault = _must_be(name, hints, wrong_items[0], _NUMPY)
    advice = _WAYS.get(name, "")
    raise UsageError(f"{fault}. {advice}".rstrip())


def python_number(value: Any) -> Any:
    """Return NumPy's number or truth value as Python's, and anything else as it is.

    NumPy's float64 is a subclass of ``float``, so it is returned as it is, too.

    >>> import numpy as np
    >>> python_number(np.int64(3)), python_number("3"), type(python_number(np.float32(0.5))).__name__
    (3, '3', 'float')
    >>> python_number(np.True_)
    True
    """
    is_number = isinstance(value, Real) and not isinstance(value, int | float)
    numpy = sys.modules.get("numpy")  # who has its value has imported it
    is_truth = numpy is not None and isinstance(value, numpy.bool_)
    if (is_number and hasattr(value, "item")) or is_truth:
        return value.item()
    return value


def python_values(value: Any) -> Any:
    """Return a value with NumPy's numbers as Python's, also within lists, tuples and dictionaries.

    A vector becomes a list. Numbers are those of :func:`python_number`.

    >>> import numpy as np
    >>> python_values({"sizes": (np.int64(8), 4), "alpha": np.array([0.5, 1.0])})
    {'sizes': (8, 4), 'alpha': [0.5, 1.0]}
    """
    if type(value) is dict:
        return {key: python_values(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(python_values, value))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.ndim == 1:
        return value.tolist()
    return python_number(value)


def check_value(name: str, value: Any, bound: Bound, way: str = "") -> None:
    """Check that a value is a finite number within a bound.

    Args:
        name: the value's name, for the message.
        value: the value.
        bound: the bound.
        way: what to do, for the message.

    Raises:
        UsageError: the value is no finite number, or not within the bound.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    finite_text = ""
    if is_number and not math.isfinite(value):
        finite_text = " and finite"
    if finite_text or not (is_number and bound.holds(value)):
        text = f"{name} must be {bound.words}{finite_text}; got {value!r}. {way}"
        raise UsageError(text.rstrip())


def check_values(
    values: Mapping[str, Any], stated: object, where: str = "", way: str = ""
) -> None:
    """Check values by name against the bounds in the annotations of a class or a function. None is not checked.

    Args:
        values: the values by name. Those without a bound are ignored.
        stated: the class or function. Its bounds are :class:`Bound` and :class:`OneOf`.
        where: the beginning of the message about a :class:`Bound`.
        way: what to do, for that message.

    Raises:
        UsageError: a value is out of bounds, or none of the valid names. The message
            names the first.
    """
    for name, bound in _bounds(stated):
        value = values.get(name)
        if value is None:
            continue
        if isinstance(bound, OneOf):
            check_known(bound.kind, value, bound.names)
        else:
            check_value(f"{where}{name}", value, bound, way)


def check_fields(options: object, where: str = "") -> None:
    """Check the fields of a dataclass object against their annotations, as :func:`check_values` does.

    Args:
        options: the dataclass object.
        where: the beginning of the message about a :class:`Bound`.

    Raises:
        UsageError: as for :func:`check_values`.
    """
    check_values(vars(options), type(options), where)


@cache
def _bounds(stated: object) -> list[tuple[str, Bound | OneOf]]:
    bounds: list[tuple[str, Bound | OneOf]] = []
    for name, hint in get_type_hints(stated, include_extras=True).items():
        for hint_part in (hint, *get_args(hint)):
            for bound in getattr(hint_part, "__metadata__", ()):
                if isinstance(bound, Bound | OneOf):
                    bounds.append((name, bound))
    return bounds


# --- options of an algorithm ---

OPTION_BOUNDS = {
    int: Bound("a number from 0 to 1e9", lambda value: 0 <= value <= 1e9),
    float: Bound("a number from 0 to 1e30", lambda value: 0 <= value <= 1e30),
}
"""What an option may be: a count, and a strength or rate, which float32 must hold."""


def read_options(name: str, config: type, values: Mapping[str, Any]) -> Any:
    """Return a dataclass of options with the given values. Numbers and lists may be texts.

    A list as a text has commas between its values. The text ``none`` means None where
    the type allows it.

    Args:
        name: name of what has the options, for messages.
        config: the dataclass.
        values: the values by option. Names without a field are ignored.

    Raises:
        UsageError: a value has the wrong type or is out of bounds, or an option without a default has no value.
    """
    hints = get_type_hints(config, include_extras=True)
    if missing_name := _missing(config, values):
        raise UsageError(f"{name} must have a value for {missing_name!r}; got none.")
    keys = [field.name for field in fields(config) if field.name in values]
    return config(
        **{key: _read_option(name, key, values[key], hints[key]) for key in keys}
    )


def _read_option(name: str, key: str, value: Any, kind: Any) -> Any:
    subject = f"{name}: {key}"
    alternatives = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    kind = next(k for k in alternatives if k is not NoneType)
    target_type, *bounds = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    if NoneType in alternatives and value in (None, "none"):
        return None
    if get_origin(target_type) is tuple:
        items = value
        if isinstance(value, str):
            items = value.split(",")
        check_type(subject, items, tuple)
        item_type = get_args(target_type)[0]
        return tuple(_read_option(name, key, part, item_type) for part in items)
    if get_origin(target_type) is Literal:
        return check_known(f"{key} of {name}", value, get_args(target_type))
    if target_type not in OPTION_BOUNDS:
        check_type(subject, value, target_type)
        return value
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    for bound in (OPTION_BOUNDS[target_type], *bounds):
        check_value(subject, value, bound)
    if target_type(value) != value:
        raise UsageError(f"{subject} must be a whole number; got {value!r}.")
    return target_type(value)


WAYS = ("block", "module")
"""Definitions of a layer: a weighted module with its normalisation, or every module by itself."""


# --- stored JSON ---


def validate(value: object, form: object, name: str = "") -> str:
    """Describe the first place where a value does not have the expected form, or return ``""``.

    Args:
        value: the value.
        form: a type; None; :data:`COUNT`, :data:`DIGEST` or :data:`NUMBER`; a tuple of
            forms, one of which must hold; ``[form]`` for a list of any length;
            :class:`MapOf`; or a dictionary of forms by name. There a ``?`` marks
            optional names, and other names may have any value.
        name: name of the value, for the text.
    """
    return next(_faults(value, form, name), "")


def _faults(contents: object, form: object, name: str) -> Iterator[str]:
    prefix = f"{name}." if name else ""
    container_type: Any = (list, tuple) if isinstance(form, list) else Mapping
    if isinstance(form, tuple) and not isinstance(form, Bound):
        faults = [validate(contents, alternative, name) for alternative in form]
        subject = name or _IT
        start = f"{subject} must"
        inner_faults = [fault for fault in faults if not fault.startswith(start)]
        if "" not in faults:
            yield inner_faults[0] if inner_faults else _wrong(contents, name, form)
    elif not isinstance(form, (dict, list, MapOf)):
        if not fits(contents, form, _JSON):
            yield _wrong(contents, name, (form,))
    elif not isinstance(contents, container_type):
        yield _wrong(contents, name, (form,))
    elif isinstance(form, list) and isinstance(form[0], Bound | type):
        for position, value in enumerate(contents):  # many, as words are
            if not fits(value, form[0], _JSON):
                yield _wrong(value, f"{prefix}{position}", (form[0],))
    elif isinstance(form, list):
        for position, value in enumerate(contents):
            yield from _faults(value, form[0], f"{prefix}{position}")
    elif isinstance(form, MapOf):
        for key, value in contents.items():
            yield from _faults(value, form.form, f"{prefix}{key}")
    else:
        for key, inner_form in form.items():
            plain_key = key.removesuffix("?")
            if plain_key in contents:
                yield from _faults(contents[plain_key], inner_form, prefix + plain_key)
            elif plain_key == key:
                yield f"{prefix}{key} is missing"


def _wrong(value: object, name: str, forms: tuple[Any, ...]) -> str:
    return _must_be(name or _IT, forms, value, _JSON)


def read_as(kind: Any, value: Any, what: str, name: str = "") -> Any:
    """Rebuild an object from the result of :func:`dataclasses.asdict`. Lists become tuples where the type has them.

    Args:
        kind: a dataclass, a tuple, a list, a dictionary, a plain type, or one of these
            or None.
        value: the stored value.
        what: what has the value, for messages, such as ``a plan``.
        name: name of the value within it.

    Raises:
        UsageError: a field is unknown, missing, or of another type. The message names the first.
    """
    arguments, prefix = get_args(kind), f"{name}." if name else ""
    if isinstance(value, tuple):
        value = list(value)
    if NoneType in arguments:
        (kind,) = (argument for argument in arguments if argument is not NoneType)
        if value is None:
            return None
        return read_as(kind, value, what, name)
    origin = get_origin(kind) or kind
    form = {float: NUMBER, tuple: list}.get(origin, origin)
    if is_dataclass(kind):
        form = dict
    fault = validate(value, form, name)
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    if hints and not fault:
        place_text = f", {name}" if name else ""
        for key in value:
            check_known(f"field of {what}{place_text}", key, hints)
        if missing_field := _missing(kind, value):
            fault = f"{prefix}{missing_field} is missing"
    if fault:
        raise UsageError(
            f"{what} must be as fedlayers writes it; {fault}. Make it again."
        )
    if hints:
        return kind(
            **{k: read_as(hints[k], v, what, f"{prefix}{k}") for k, v in value.items()}
        )
    if origin in (tuple, list):
        numbered_values = enumerate(value)
        return origin(
            read_as(arguments[0], v, what, f"{prefix}{k}") for k, v in numbered_values
        )
    if origin is dict:
        return {
            k: read_as(arguments[1], v, what, f"{prefix}{k}") for k, v in value.items()
        }
    return value


def _missing(kind: Any, values: Mapping[str, Any]) -> str:
    """Return the first field without a default that has no value, or an empty text."""
    for key in fields(kind):
        is_needed = key.default is MISSING and key.default_factory is MISSING
        if is_needed and key.name not in values:
            return key.name
    return ""


def check_stored(path: Path | str, contents: object, form: object) -> None:
    """Check that the contents of a stored file have the expected form.

    Args:
        path: the file, for the message.
        contents: the parsed contents.
        form: the expected form, as for :func:`validate`.

    Raises:
        CorruptError: the contents have another form. The message names the file and the first fault.
    """
    if fault := validate(contents, form):
        raise CorruptError(f"{path} is damaged: {fault}")
