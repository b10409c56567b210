"""Sites with tables of their own train, score and measure. Prints what came of it as JSON.

With arguments, modules are looked for in these folders first. It needs nothing but the packages of a site.
"""

import json
import sys
from pathlib import Path
from typing import Any

FILE = """
name = "{name}"
[data]
dataset = "{name}.csv"
label_column = "ill"
classes = ["no", "yes"]
"""
SCALED = 'impute = "mean"\nscale = "standard"\n'
NOISE = "[privacy]\nclip = 0.01\nclip_numbers = 0.01\nnoise = 1.0\nepsilon = 1000.0\n"


def made(name: str, rest: str) -> Any:
    """Return a site whose file ends with some lines."""
    from fedlayers.remote.site_config import SiteFile

    gap = "" if "impute" in rest else "3"
    rows = [f"{20 + k % 50},{gap if k % 9 == 0 else k % 7},{'yes' if k % 3 else 'no'}" for k in range(60)]
    Path(f"{name}.csv").write_text("\n".join(["age,dose,ill", *rows, ""]))
    Path(f"{name}.toml").write_text(FILE.format(name=name) + rest)
    return SiteFile.read(f"{name}.toml").site()


def refused(link: Any, config: Any, metric: str) -> str:
    """Return why the first site does not measure a metric for a server that has its packages."""
    from fedlayers.remote import federation
    from fedlayers.remote.codec import Packet
    from fedlayers.remote.rpc import RefusedError, RpcClient

    line, run = RpcClient(link), "0" * 32
    facts = federation.request_site_facts(line)
    federation.join(line, federation.task_of(config, federation.data_of(facts, config.dataset), None), facts, run)
    head = {"kind": "measure", "run": run, "metrics": [metric], "options": {}, "measure_batch": 8, "mode": "eval"}
    packet = Packet({**head, "layers": None, "null": [], "null_draws": 1})
    try:
        list(line.ask({facts[0]["name"]: packet}))
    except RefusedError as error:
        return str(error)
    return ""


def main() -> None:
    """Run the federations in the current folder."""
    sys.path[:0] = sys.argv[1:]
    from fedlayers.cli.federation import Site  # noqa: F401
    from fedlayers.remote import federation, site_diagnosis
    from fedlayers.remote.flower.site_process import serve  # noqa: F401
    from fedlayers.remote.in_memory import InMemoryTransport
    from fl_core.config import RunConfig

    scaled = InMemoryTransport({name: made(name, SCALED) for name in ("north", "south")})
    noisy = InMemoryTransport({name: made(name, NOISE) for name in ("east", "west")})
    config, found = RunConfig(algorithm="fedper", rounds=1), dict[str, Any]()
    engines = [federation.federate(config, link, progress=False) for link in (scaled, noisy)]
    found["scores"] = [sum(row["metric"] == "accuracy" for row in engine.rows) for engine in engines]
    found["measured"] = len(site_diagnosis.diagnose(config, scaled).frame)
    found["refused"] = refused(scaled, config, metric="linear_probe")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
