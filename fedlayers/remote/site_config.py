"""SITE.toml: a site's name, data, policy and connection. Unknown keys are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from fedlayers.remote.policy import Policy
from fedlayers.remote.privacy import Privacy
from fedlayers.remote.site import Site
from fedlayers.remote.site_data import SiteDataset
from fl_core import limits
from fl_core.bounds import check_type
from fl_core.data.columns import READING
from fl_core.data.registry import DATASETS
from fl_core.data.text import HASHED
from fl_core.errors import UsageError, about, check_known
from fl_core.names import in_file_name

if TYPE_CHECKING:
    from fedlayers.remote.secure_sum.keys import Identity

TABLES = ("name", "folder", "device", "data", "policy", "privacy", "connection")
DATA = ("dataset", "client", "classes", "data_root", "vocabulary", "categories", *READING)
FILE_BYTES = 2**20


@dataclass(frozen=True)
class SiteFile:
    """The contents of a SITE.toml. Relative paths in it are relative to the file.

    >>> _ = Path("va.toml").write_text('name = "va"\\n[data]\\ndataset = "heart"\\n[policy]\\nleast_samples = 50\\n')
    >>> found = SiteFile.read("va.toml")
    >>> found.name, found.policy.least_samples
    ('va', 50)
    >>> _ = Path("va.toml").write_text('name = "va"\\n[data]\\ndataset = "heart"\\n[policy]\\nleast_sample = 50\\n')
    >>> SiteFile.read("va.toml")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: va.toml: unknown key of [policy] 'least_sample': did you mean 'least_samples'? known: ...

    Attributes:
        name: of the site and its client. folder: of its states; by default ``NAME-state`` next to the file.
        device: where it trains.
        data: how its data are read, as for :class:`SiteDataset`.
        policy: what it allows. privacy: how it hides its data in replies.
        connection: of the transport, which checks it.
    """

    path: Path
    name: str
    folder: Path
    data: Mapping[str, Any]
    policy: Policy = field(default_factory=Policy)
    privacy: Privacy = field(default_factory=Privacy)
    device: str = "cpu"
    connection: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | str) -> SiteFile:
        """Read a file and check its keys and types. Its data are not read yet.

        Raises:
            UsageError: no such file, no TOML, or an invalid key or value; names it.
        """
        path = Path(path)
        if not path.is_file():
            raise UsageError(f"SITE.toml must be a file; got {path}, which is missing. Correct the path.")
        found = limits.read_toml(path, FILE_BYTES)
        with about(str(path)):
            return cls._of(path, found)

    @classmethod
    def _of(cls, path: Path, found: Mapping[str, Any]) -> SiteFile:
        for key in found:
            check_known("key", key, TABLES)
        for key, kind in (("name", str), ("folder", str), ("device", str), ("data", dict)):
            if not isinstance(found.get(key, kind()), kind):
                raise UsageError(
                    f"{key} must be {'a table' if kind is dict else 'text'}; got {found[key]!r}. Correct the file."
                )
        name, data = found.get("name", ""), dict(found.get("data", {}))
        if not name or not name.strip() or "/" in name:
            raise UsageError(f"name must be text without a slash; got {name!r}. Write the name of the site's key.")
        if "dataset" not in data:
            raise UsageError("[data] must have a dataset; got none. Write a name, or the path of a file.")
        for key in data:
            check_known("key of [data]", key, DATA)
        here = path.parent
        if data["dataset"] not in DATASETS:
            data["dataset"] = str(here / str(data["dataset"]))
        if "data_root" in data:
            data["data_root"] = str(here / str(data["data_root"]))
        if "vocabulary" in data and not str(data["vocabulary"]).startswith(f"{HASHED}:"):
            data["vocabulary"] = str(here / str(data["vocabulary"]))
        policy: Policy = _table("policy", found, Policy)
        privacy: Privacy = _table("privacy", found, Privacy)
        connection = found.get("connection", {})
        if not isinstance(connection, dict):
            raise UsageError(
                f"connection must be a table; got {connection!r}. Write [connection] on a line of its own."
            )
        folder = here / found.get("folder", f"{in_file_name(name)}-state")
        return cls(path, name, folder, data, policy, privacy, found.get("device", "cpu"), connection)

    def site(self, identity: Identity | None = None) -> Site:
        """Return the site, with its data read. A secure sum needs an identity.

        Raises:
            UsageError: its data cannot be read, or its policy requires more samples.
        """
        with about(str(self.path)):
            held = SiteDataset(self.name, **self.data)
            made = Site(held, self.folder, self.policy, self.device, self.privacy, identity)
            made.check_samples()
        return made


def _table(table: str, found: Mapping[str, Any], made: type[Any]) -> Any:
    """Return the policy or the privacy in a table of a site file.

    Raises:
        UsageError: an unknown key, or a value of the wrong type or range.
    """
    given = found.get(table, {})
    if not isinstance(given, dict):
        raise UsageError(f"{table} must be a table; got {given!r}. Write [{table}] on a line of its own.")
    known, hints = {each.name: each for each in fields(made)}, get_type_hints(made)
    for key, value in given.items():
        check_known(f"key of [{table}]", key, known)
        check_type(f"[{table}] {key}", value, hints[key], f"The default is {known[key].default!r}.")
    return made(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})
