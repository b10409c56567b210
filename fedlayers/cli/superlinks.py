"""Flags of the commands that reach a federation's sites, and the link to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import OmitArgPrefixes

from fedlayers.cli.arguments import option
from fl_core.config import DEALING, READING, RunConfig
from fl_core.errors import UsageError

if TYPE_CHECKING:
    from fedlayers.remote.link import SiteLink
    from fedlayers.remote.rpc import TimeoutPolicy

AT_SITES = (*READING, *DEALING, "leave_out_client", "data_root", "download", "workers", "stack", "device")
"""Keys that sites decide themselves, or that have no meaning if each client is alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reports:
    """Options for the log and the numbers of a federation's process."""

    log_json: Annotated[bool, option("Write the log as JSON, one object per line.")] = False
    metrics_port: Annotated[int | None, option("Serve Prometheus metrics at this port. Default: off.", "PORT")] = None
    metrics_host: Annotated[str, option("Address for --metrics-port.", "HOST")] = "127.0.0.1"

    def start_reports(self) -> None:
        """Start the log, and the metrics if they are asked for.

        Raises:
            UsageError: the port cannot be listened at.
        """
        from fedlayers.remote import log

        log.start(self.log_json)
        if self.metrics_port is not None:
            from fedlayers.remote import metrics

            port = metrics.serve(self.metrics_port, self.metrics_host)
            log.LOG.info(f"metrics on http://{self.metrics_host}:{port}/metrics")


@dataclasses.dataclass(frozen=True)
class _Network:
    superlink: Annotated[str, option("Address of the superlink.", "HOST:PORT")] = ""
    keys: Annotated[Path, option("Folder server of the keys.", "DIR")] = Path("keys/server")
    sites: Annotated[
        tuple[str, ...], option("Sites that take part, in this order. Default: all with a key.", "NAME [NAME ...]")
    ] = ()
    min_sites: Annotated[
        int | None, option("Continue when this many sites have replied. Default: wait for all.", "N")
    ] = None
    timeout: Annotated[
        float | None, option("Seconds to wait for replies to a request. Default: no limit.", "SECONDS")
    ] = None
    grace: Annotated[
        float | None, option("Seconds to wait for the other sites, once --min-sites have replied.", "SECONDS")
    ] = None
    start_timeout: Annotated[
        float | None, option("Seconds to wait for sites at the start. Default: as --timeout.", "SECONDS")
    ] = None


@dataclasses.dataclass(frozen=True)
class Sites(Reports, _Network):
    """Train at the sites of a federation, which keep their data: see docs/federation.md."""

    @property
    def timeouts(self) -> TimeoutPolicy:
        """The limits on waiting for sites.

        Raises:
            UsageError: --min-sites without a limit, a limit without it, or impossible numbers.
        """
        from fedlayers.remote.rpc import TimeoutPolicy

        if (self.min_sites is None) != (self.timeout is None and self.grace is None):
            raise UsageError(
                "--min-sites must be given with --timeout or --grace; got one without the other. "
                "Say how many sites are enough, and after how long."
            )
        return TimeoutPolicy(self.min_sites or 1, self.timeout, self.grace, self.start_timeout)

    @property
    def own_defaults(self) -> tuple[str, ...]:
        """The keys of the configuration that sites decide, if they are used."""
        return AT_SITES if self.superlink else ()

    def check(self, config: RunConfig, without: Sequence[str] = ()) -> bool:
        """Return whether the command uses sites, after a check of its flags.

        Args:
            without: further flags that were given and cannot be used with sites.

        Raises:
            UsageError: names the flag.
        """
        if not self.superlink:
            for field in dataclasses.fields(self):
                if getattr(self, field.name) != field.default:
                    flag = field.name.replace("_", "-")
                    raise UsageError(f"--{flag} is for a federation over sites. Also give --superlink HOST:PORT.")
            return False
        _ = self.timeouts
        for flag in (*changed_keys(config, AT_SITES), *without):
            way = " Each site sets it in [data] of its file." if flag in READING else ""
            raise UsageError(f"--{flag.replace('_', '-')} cannot be set over sites (--superlink). Leave it out.{way}")
        return True

    @contextmanager
    def connect_sites(self, names: Sequence[str] = ()) -> Iterator[SiteLink]:
        """Connect to all sites. A resumed run gives ``names`` instead of the flag.

        Raises:
            UsageError: Flower is not installed, or the superlink cannot be reached. RunError: too few sites came.
        """
        from fedlayers.remote.flower.server import FlowerLink

        start = self.timeout if self.start_timeout is None else self.start_timeout
        self.start_reports()
        link = FlowerLink(self.superlink, self.keys, names or self.sites, self.min_sites, start)
        try:
            yield link
        finally:
            link.close()


OfSites = Annotated[Sites, OmitArgPrefixes]
NOWHERE = Sites()
ON_THIS_MACHINE = Sites("127.0.0.1:8000")


def changed_keys(config: RunConfig, names: Collection[str]) -> list[str]:
    """Return the keys, out of ``names``, whose values are not the defaults."""
    fields = (field for field in dataclasses.fields(RunConfig) if field.name in names)
    return [field.name for field in fields if getattr(config, field.name) != field.default]
