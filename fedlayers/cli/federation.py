"""Commands of a federation over the network: keys, superlink, site, federate."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional

from fedlayers import catalogue
from fedlayers.cli import arguments
from fedlayers.cli.arguments import Set, apply_options, option
from fedlayers.cli.base import Command, ConfiguredCommand, ModelCode
from fedlayers.cli.runs import Log, print_result
from fedlayers.cli.superlinks import AT_SITES, ON_THIS_MACHINE, OfSites, Reports
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.storage.files import Folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys(Command):
    """Make the keys and certificates of a federation.

    Keep DIR/server at the server. Send DIR/sites/NAME to the site NAME, over a channel that nobody else can read. A
    site can also make its own key with --own. It sends only NAME.pub, which goes into DIR/server/sites. No key is ever
    overwritten.

    Next: fedlayers federation superlink (server), fedlayers federation site (sites)

    Examples:
        fedlayers federation keys keys --host 127.0.0.1 --sites cleveland hungary
        fedlayers federation keys keys --sites zurich
        fedlayers federation keys mykey --own basel
        fedlayers federation keys keys --renew
    """

    dir: Annotated[Positional[Path], option("Folder of the keys.", "DIR")]
    host: Annotated[
        tuple[str, ...], option("Host names or IP addresses of the server, for its certificate.", "HOST [HOST ...]")
    ] = ()
    sites: Annotated[
        tuple[str, ...], option("Names of the sites. The clients have the same names.", "NAME [NAME ...]")
    ] = ()
    own: Annotated[str, option("At a site: make only the key of this site.", "NAME")] = ""
    renew: Annotated[bool, option("Give the server a new certificate for the same hosts.")] = False

    def main(self, line: str) -> None:
        if self.renew and (self.own or self.host or self.sites):
            raise UsageError(
                "--renew must be alone; got other flags. The new certificate keeps the names of the old one."
            )
        for name, what in (("host", "the server's"), ("sites", "the authority's")):
            if self.own and getattr(self, name):
                raise UsageError(f"--own must be alone; got --{name}, which is for {what} keys. Leave one of them out.")

        from fedlayers.remote import keys

        if self.renew:
            print(f"{keys.renew(self.dir)}\n\nrestart the superlink: it takes the new certificate then")
            return
        if self.own:
            for file in keys.make_site(self.dir, self.own):
                print(file)
            print(f"\nkeep {self.dir / 'key'} here; send {self.own}.pub to the server, and ask it for its ca.crt")
            return
        for file in keys.make(self.dir, self.host, self.sites):
            print(file)
        print(f"\n{self.dir / 'server'} stays here; {self.dir / 'sites'}/NAME goes to the site NAME")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Superlink(Reports, Command):
    """Run the superlink, which passes on all messages.

    Server and sites connect to this process. It has no data and no model. It accepts the sites that have a key in
    DIR/sites. To start a run, one needs the secret in DIR. Ctrl-C stops it.

    Next: fedlayers federation site (sites), then fedlayers federation run (server)

    Examples:
        fedlayers federation keys keys --host 127.0.0.1 --sites cleveland hungary
        fedlayers federation superlink keys/server
        fedlayers federation superlink keys/server --host 0.0.0.0 --port 8443
    """

    dir: Annotated[Positional[Path], option("Folder server of the keys.", "DIR")]
    host: Annotated[str, option("Address to listen at; 0.0.0.0 for all of this machine.", "HOST")] = "127.0.0.1"
    port: Annotated[int, option("Port to listen at; 0 for any free one.", "PORT")] = 8000
    database: Annotated[Path | None, option("File for messages. Default: DIR/superlink.db.", "FILE")] = None
    memory: Annotated[bool, option("Keep messages in memory: faster, but lost at a restart.")] = False

    def main(self, line: str) -> None:
        from fedlayers.remote.flower import superlink

        self.start_reports()

        database = None if self.memory else self.database or self.dir / "superlink.db"
        superlink.serve(self.dir, self.host, self.port, database)

    def interrupted(self) -> str:
        return "the superlink has stopped; the same command continues"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status(Command):
    """Show the connected sites, and how far runs are.

    For each run directory it shows the last stored round, the missing sites, and the last error.

    Examples (with a running superlink):
        fedlayers federation status
        fedlayers federation status runs/playerfl
    """

    runs: Annotated[Positional[tuple[Path, ...]], option("Run directories of this server.", "[DIR ...]")] = ()
    superlink: Annotated[str, option("Address of the superlink.", "HOST:PORT")] = ON_THIS_MACHINE.superlink
    keys: Annotated[Path, option("Folder server of the keys.", "DIR")] = ON_THIS_MACHINE.keys

    def main(self, line: str) -> None:
        from fedlayers.remote import log
        from fedlayers.remote.flower import server
        from fl_core.names import printable
        from fl_core.records.store import Run

        with closing(server.Superlink(self.superlink, self.keys)) as link:
            for name, since in link.connected().items():
                print(f"{name}: {f'connected since {since}' if since else 'not connected'}")
        for path in self.runs:
            rounds, found = Run(path).config["rounds"], log.status(path)
            missing = f"; missing: {', '.join(found['missing'])}" if found["missing"] else ""
            error = f"; last error: {found['error']}" if found["error"] else ""
            at = f" at {found['time']}" if found["time"] else ""
            print(printable(f"{path}: round {found['round']} of {rounds}{at}{missing}{error}"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allow(Command):
    """At a site: allow requests of the server.

    This is for a site with approve = "ask". Without RUN it lists the requests that wait. Their full text is in the
    folder asked of the site.

    Examples (with your own SITE.toml):
        fedlayers federation allow cleveland.toml
        fedlayers federation allow cleveland.toml 3f9a01bc77de
    """

    file: Annotated[Positional[Path], option("Configuration file of the site.", "SITE.toml")]
    requests: Annotated[
        Positional[tuple[str, ...]], option("Requests to allow, by their names in the list.", "[RUN ...]")
    ] = ()

    def main(self, line: str) -> None:
        from fedlayers.remote.sent_log import Approval
        from fedlayers.remote.site_config import SiteFile

        approval = Approval(SiteFile.read(self.file).folder)
        for name in self.requests:
            approval.allow(name)
            print(f"{name} is allowed")
        for name, what in approval.waiting().items():
            print(f"{name} waits: {what}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit(Command):
    """At a site: list what has left it, and check the list.

    Each line has the digest of the line before. Somebody who can write to the file can still replace it as a whole.
    Note the printed digest elsewhere, and give it as --noted next time: this shows it.

    Examples (with your own SITE.toml):
        fedlayers federation audit cleveland.toml
        fedlayers federation audit cleveland.toml --noted DIGEST
    """

    file: Annotated[Positional[Path], option("Configuration file of the site.", "SITE.toml")]
    noted: Annotated[str, option("Digest that an earlier audit printed. The list must still contain it.", "DIGEST")] = (
        ""
    )

    def main(self, line: str) -> None:
        import pandas as pd

        from fedlayers.remote.sent_log import CONTENTS, LEGEND, SentLog
        from fedlayers.remote.site_config import SiteFile

        lines, last = SentLog(SiteFile.read(self.file).folder).check(self.noted)
        frame = pd.DataFrame(lines, columns=["run", "kind", "reply", "bytes", "time"])
        frame["sent"] = frame["reply"].replace(CONTENTS)
        groups = frame.rename(columns={"kind": "request"}).groupby(["run", "request", "sent"], sort=False)
        table = groups.agg(
            replies=("bytes", "size"), bytes=("bytes", "sum"), first=("time", "min"), last=("time", "max")
        )
        print(f"{table.reset_index().to_string(index=False)}\n\n{LEGEND}" if lines else "nothing has left")
        since = "" if self.noted else " Note it elsewhere: it alone shows a list that was cut or forged."
        print(f"\n{len(lines)} lines follow one another. Digest of the last: {last or 'none'}.{since}")


@contextmanager
def _note_errors(out: Path) -> Iterator[None]:
    """Write an error in the block into the status of a run directory, if it was begun."""
    from fedlayers.remote import log

    try:
        yield
    except Exception as error:
        if (out / "config.json").exists():
            log.note(out, error=" ".join(str(error).split()))
        raise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site(Reports, Command):
    """Run a site, which trains on its own data.

    SITE.toml names the data, what may leave the site, and the superlink: see docs/federation.md. The site makes the
    only connection, and reconnects by itself. Ctrl-C stops it.

    Next: fedlayers federation run (server)

    Examples (with your own SITE.toml):
        fedlayers federation site cleveland.toml
    """

    file: Annotated[Positional[Path], option("Configuration file of the site.", "SITE.toml")]

    def main(self, line: str) -> None:
        from fedlayers.remote.flower.site_process import Connection, check_reachable, serve
        from fedlayers.remote.keys import registered_sites
        from fedlayers.remote.secure_sum.keys import Identity
        from fedlayers.remote.site_config import SiteFile

        self.start_reports()
        found = SiteFile.read(self.file)
        connection = Connection.from_table(found.connection, self.file.parent)
        check_reachable(connection.superlink, connection.ca)
        os.umask(0o077)  # nobody else on this machine reads the site's states
        identity = Identity.read(found.name, connection.key, registered_sites(connection.key.parent, least=0))
        found.folder.mkdir(parents=True, exist_ok=True)
        with Folder(found.folder).locked():  # two processes would lose lines of the account and of the audit
            serve(found.site(identity), connection, found.folder / "flower")

    def interrupted(self) -> str:
        return "the site has stopped; the same command continues"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Federate(ConfiguredCommand):
    """Train one algorithm at the sites of a federation.

    It stores a run directory. It waits for all sites, unless --min-sites is set. Models and scores have the same bits
    as those of fedlayers run --stack off on the same samples.

    Next: fedlayers verify DIR, fedlayers plot DIR

    Examples (with a running superlink and sites):
        fedlayers federation run --algorithm playerfl --out runs/playerfl
        fedlayers federation run --min-sites 3 --grace 60 --timeout 3600
        fedlayers federation run --algorithm fedavg --secure-sum
        fedlayers federation run --resume runs/playerfl
    """

    out: Annotated[Path, option("Run directory: new, or an empty folder.", "DIR")] = Path("runs/run")
    resume: Annotated[Path | None, option("Continue this interrupted run.", "DIR")] = None
    allow_code: ModelCode = ()
    secure_sum: Annotated[bool, option("Show the server only the sum of the updates, by secure aggregation.")] = False
    compress: Annotated[Literal["bf16"] | None, option("Send updates in bfloat16: half the bytes, but rounded.")] = None
    network: OfSites = ON_THIS_MACHINE
    config: Annotated[RunConfig, arguments.flags(without=AT_SITES)]
    set: Set = ()
    logger: Log = ()

    def asked_config(self) -> RunConfig:
        return apply_options(self.config, self.set, self.model_option, self.loss_option)

    def main(self, line: str) -> None:
        config = self.asked_config()
        timeouts = self.network.timeouts
        for name in self.logger:
            catalogue.check("logger", name)
        from fl_core.records import store, writing
        from fl_core.restore import FEDERATION, check_at_home

        known: Sequence[str] = ()
        if self.secure_sum and self.resume is None:
            from fedlayers.remote.policy import check_needs_sum

            check_needs_sum(config.algorithm)
        if self.resume is None:
            if self.allow_code:
                raise UsageError("--allow-code is for --resume. A new run names its code by its own flags.")
            writing.check_free(self.out)
        else:
            self._check_of_resumed(self.resume)
            stored = store.Run(self.resume).task_config()
            check_at_home(self.resume, stored, True)
            known = [site["name"] for site in stored[FEDERATION]["sites"]]
            if self.secure_sum and not stored[FEDERATION].get("secure_sum"):
                raise UsageError(
                    f"{self.resume} began without a secure sum. Leave --secure-sum out, or begin a new run."
                )
            if self.compress and stored[FEDERATION].get("compress") != self.compress:
                raise UsageError(f"{self.resume} began without compression. Leave --compress out, or begin a new run.")
        out = self.resume or self.out
        with _note_errors(out), self.network.connect_sites(known) as link:
            from fedlayers.remote import federation
            from fedlayers.remote.rpc import traffic_by_site
            from fedlayers.studies import federation_report as report

            if self.resume is not None:
                its_own: dict[str, Any] = {"allow_code": self.allow_code, "init": config.init}
                engine = federation.resume(self.resume, link, timeouts=timeouts, log=self.logger, **its_own)
            else:
                options: dict[str, Any] = {
                    "timeouts": timeouts,
                    "command": line,
                    "log": self.logger,
                    "secure_sum": self.secure_sum,
                    "compress": self.compress or "",
                }
                engine = federation.federate(config, link, self.out, **options)
            print_result(engine, out)
            print(f"\nbytes that left the sites:\n{traffic_by_site(out).to_string()}")
            print(f"\nreport: {report.write(out)}")

    def _check_of_resumed(self, run: Path) -> None:
        """Refuse flags that would change a run that is resumed.

        Raises:
            UsageError: names the first.
        """
        given = [flag for flag in self.changed_flags() if flag != "--init"]
        given += ["--option"] * bool(self.set) + ["--out"] * (self.out != Federate.out)
        if given:
            raise UsageError(f"{run} must be resumed as it began; got {given[0]}. Leave it out, or begin a new run.")

    def interrupted(self) -> str:
        out = self.resume or self.out
        begun = (out / "config.json").exists()
        where = shlex.join(["--superlink", self.network.superlink, "--keys", str(self.network.keys)])
        return f"fedlayers federation run --resume {out} {where} continues it" if begun else super().interrupted()
