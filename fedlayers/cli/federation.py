"""Commands of a federation over the network: keys, superlink, site, federate."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from fedlayers.cli.arguments import option
from fedlayers.cli.base import Command


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
