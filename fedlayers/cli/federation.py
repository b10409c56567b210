"""Commands of a federation over the network: keys, superlink, site, federate."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from fedlayers import catalogue
from fedlayers.cli import arguments
from fedlayers.cli.arguments import Set, SetLoss, SetModel, configured, option
from fedlayers.cli.base import Command
from fedlayers.cli.runs import Log, finished
from fedlayers.cli.superlinks import AT_SITES, ON_THIS_MACHINE, OfSites, say
from fl_core.config import RunConfig
from fl_core.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys(Command):
    """Make the keys of a federation: its authority, the server's certificate and a key for each site.

    DIR/server stays at the server. DIR/sites/NAME goes to the site NAME, by a way that nobody else reads. A site that
    makes its key itself (--own) keeps it and sends only NAME.pub, which belongs into DIR/server/sites.
    Keys are never overwritten.

    Examples:
        fedlayers keys keys --host fed.example.org --sites cleveland hungary
        fedlayers keys keys --sites zurich
        fedlayers keys mykey --own basel
    """

    dir: Annotated[Positional[Path], option("Where the keys are written.", "DIR")]
    host: Annotated[
        tuple[str, ...], option("Names or addresses under which sites reach the server.", "HOST [HOST ...]")
    ] = ()
    sites: Annotated[tuple[str, ...], option("Names of sites, which name the clients.", "NAME [NAME ...]")] = ()
    own: Annotated[str, option("Make only a key for the site of this name, at the site.", "NAME")] = ""

    def main(self, line: str) -> None:
        for name, what in (("host", "the server's"), ("sites", "the authority's")):
            if self.own and getattr(self, name):
                raise UsageError(f"--{name} is for {what} keys; --own makes only the key of one site: leave one out")

        from fedlayers.remote import flower

        flower.require()
        from fedlayers.remote.flower import keys

        if self.own:
            for file in keys.make_site(self.dir, self.own):
                print(file)
            print(f"\nkeep {self.dir / 'key'} here; send {self.own}.pub to the server, and ask it for its ca.crt")
            return
        for file in keys.make(self.dir, self.host, self.sites):
            print(file)
        print(f"\n{self.dir / 'server'} stays here; {self.dir / 'sites'}/NAME goes to the site NAME")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Superlink(Command):
    """Run the server's meeting point, to which sites connect; it holds no data and no model of its own.

    It listens with the certificate that `fedlayers keys` made, and lets in the sites whose keys lie in DIR/sites.
    Whoever starts federations (fedlayers federate) needs the secret in DIR.

    Examples:
        fedlayers superlink keys/server
        fedlayers superlink keys/server --host 0.0.0.0 --port 8443 --database /var/lib/fedlayers/superlink.db
    """

    dir: Annotated[Positional[Path], option("The `server` folder of the keys.", "DIR")]
    host: Annotated[str, option("The address to listen at; 0.0.0.0 for all of this machine.", "HOST")] = "127.0.0.1"
    port: Annotated[int, option("The port to listen at; 0: one that is free.", "PORT")] = 8000
    database: Annotated[Path | None, option("Where it keeps messages; by default DIR/superlink.db.", "FILE")] = None
    memory: Annotated[bool, option("Keep messages in memory: faster, and a restart forgets them.")] = False

    def main(self, line: str) -> None:
        from fedlayers.remote import flower

        flower.require()
        from fedlayers.remote.flower import superlink

        database = None if self.memory else self.database or self.dir / "superlink.db"
        superlink.serve(self.dir, self.host, self.port, database)

    def interrupted(self) -> str:
        return "the superlink has stopped; the same command goes on"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site(Command):
    """Run a site: a lasting process that has its data, its state and its rules, and answers a federation's server.

    SITE.toml says what it has and allows, and in [connection] how it reaches the superlink (docs/federation.md). It
    opens one connection to there, and none is opened to it; it connects again by itself.

    Examples:
        fedlayers site cleveland.toml
    """

    file: Annotated[Positional[Path], option("The site's file.", "SITE.toml")]

    def main(self, line: str) -> None:
        from fedlayers.remote import flower

        flower.require()
        from fedlayers.remote.flower.site import Connection, check_reachable, serve
        from fedlayers.remote.site_config import SiteFile

        found = SiteFile.read(self.file)
        connection = Connection.of(found.connection, self.file.parent)
        check_reachable(connection.superlink, connection.ca)
        os.umask(0o077)  # nobody else on this machine reads the site's states
        serve(found.site(), connection, found.folder / "flower", say)

    def interrupted(self) -> str:
        return "the site has stopped; the same command goes on"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Federate(Command):
    """Run an algorithm over the sites of a federation, into an ordinary run directory.

    The data are the sites': a dataset that all have, or tables of their own, whose classes and columns they tell.
    It waits until all sites are connected, and for each of their answers, as long as that takes; with --min-sites and
    --timeout it goes on without those who do not come. Rows and model have the same bits as of `fedlayers run
    --stack off` on the same samples. An interrupted federation goes on with --resume, to the same bits in the end.

    Examples:
        fedlayers federate --algorithm playerfl --out runs/playerfl
        fedlayers federate --algorithm fedper --rounds 50 --superlink fed.example.org:8443 --keys keys/server
        fedlayers federate --algorithm fedavg --min-sites 3 --timeout 600
        fedlayers federate --resume runs/playerfl --superlink fed.example.org:8443 --keys keys/server
    """

    out: Annotated[Path, option("The run directory, new or empty.", "DIR")] = Path("runs/run")
    resume: Annotated[Path | None, option("Go on with this federation's run instead of a new one.", "DIR")] = None
    federation: OfSites = ON_THIS_MACHINE
    config: Annotated[RunConfig, arguments.flags(without=AT_SITES)]
    set: Set = ()
    model_option: SetModel = ()
    loss_option: SetLoss = ()
    logger: Log = ()

    def main(self, line: str) -> None:
        config = configured(self.config, self.set, self.model_option, self.loss_option)
        patience = self.federation.patience
        for name in self.logger:
            catalogue.check("logger", name)
        from fl_core.records import store, writing
        from fl_core.restore import FEDERATION, check_at_home

        known: Sequence[str] = ()
        if self.resume is None:
            writing.check_free(self.out)
        else:
            stored = store.Run(self.resume).task_config()
            check_at_home(self.resume, stored, True)
            known = [site["name"] for site in stored[FEDERATION]["sites"]]
        with self.federation.linked(known) as link:
            from fedlayers.remote import federation, report
            from fedlayers.remote.remote_clients import left

            out = self.resume or self.out
            if self.resume is not None:
                engine = federation.resume(self.resume, link, init=config.init, patience=patience, log=self.logger)
            else:
                engine = federation.federate(config, link, self.out, patience=patience, command=line, log=self.logger)
            finished(engine, out)
            print(f"\nbytes that left the sites:\n{left(out).to_string()}")
            print(f"\nreport: {report.write(out)}")

    def interrupted(self) -> str:
        out = self.resume or self.out
        begun = (out / "config.json").exists()
        where = shlex.join(["--superlink", self.federation.superlink, "--keys", str(self.federation.keys)])
        return f"fedlayers federate --resume {out} {where} goes on" if begun else super().interrupted()
