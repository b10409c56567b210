"""Every site file of the documentation is read, opens its data, and can send for 20 rounds."""

from __future__ import annotations

import re
import textwrap
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from fedlayers.remote import federation
from fedlayers.remote.privacy import Account
from fedlayers.remote.site_config import SiteFile
from fl_core.data.registry import DATASETS
from tests.federation.test_in_memory import NAMES, config_for, link

ROOT = Path(__file__).parents[2]
ROUNDS = 20


def site_files() -> dict[str, str]:
    """The text of each block of TOML that names a site, by its page and place."""
    found = {}
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]):
        blocks = re.findall(r"^ *```toml\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        for place, block in enumerate(map(textwrap.dedent, blocks)):
            if re.search(r"^\[data\]", block, re.MULTILINE):  # others are parts of a file
                found[f"{page.relative_to(ROOT)}-{place}"] = block
    return found


FILES = site_files()


def test_the_documentation_has_a_site_file_with_privacy() -> None:
    assert any("privacy" in tomllib.loads(text) for text in FILES.values())


@pytest.mark.parametrize("name", FILES)
def test_it_is_read_and_opens_its_data(name: str, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(FILES[name])
    data = tomllib.loads(FILES[name])["data"]
    if data["dataset"] not in DATASETS:
        random = np.random.default_rng(0)
        lines = [f"{random.normal():.3f},{random.normal():.3f},{random.choice(data['classes'])}" for _ in range(100)]
        header = f"age,pressure,{data.get('label_column', 'label')}"
        (tmp_path / data["dataset"]).write_text("\n".join([header, *lines, ""]))
    assert sum(SiteFile.read(path).site().holding.sizes.values()) >= 50


@pytest.mark.skipif(find_spec("opacus") is None, reason="the account is opacus', of the extra federation")
@pytest.mark.parametrize("name", [name for name, text in FILES.items() if "privacy" in tomllib.loads(text)])
def test_its_noise_allows_20_rounds(name: str, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(FILES[name])
    privacy = SiteFile.read(path).privacy
    assert privacy.active
    assert privacy.epsilon > 0
    config = replace(config_for("fedavg"), rounds=ROUNDS, participation=1.0)
    found = federation.federate(config, link(tmp_path / "sites", privacy=privacy), progress=False)
    spent = [row["value"] for row in found.rows if row["metric"] == "epsilon"]
    assert len(spent) == ROUNDS * len(NAMES)
    assert max(spent) <= privacy.epsilon
    account = Account(privacy, tmp_path / "of PLayer-FL")  # its first round is two releases
    account.release(ROUNDS + 1)


@pytest.mark.skipif(find_spec("opacus") is None, reason="the account is opacus', of the extra federation")
def test_the_pages_table_is_of_its_site_file() -> None:
    (text,) = (text for text in FILES.values() if "privacy" in tomllib.loads(text))
    page = (ROOT / "docs" / "federation_privacy.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python -m examples.privacy_cost (.*)$", page, re.MULTILINE)
    words = command.split()
    given = {key[2:].replace("-", "_"): float(value) for key, value in zip(words[::2], words[1::2], strict=True)}
    assert given == {**tomllib.loads(text)["privacy"], "seeds": given["seeds"]}
