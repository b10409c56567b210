"""Keys: what is written, who reads it, and that nothing is overwritten or half written."""

from __future__ import annotations

import datetime
import stat

import pytest
from cryptography import x509

from fedlayers.remote import keys
from fl_core.errors import UsageError


def everything(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_federation_has_one_authority_and_a_key_for_each_site(tmp_path):
    keys.make(tmp_path, ["fed.example.org", "10.0.0.1"], ["a", "b"])
    files = everything(tmp_path)
    assert set(files) == {
        *(f"server/{name}" for name in ("ca.key", "ca.crt", "server.key", "server.crt", "secret")),
        *(f"server/sites/{site}.pub" for site in "ab"),
        *(f"sites/{site}/{name}" for site in "ab" for name in ("key", "ca.crt", "sites/a.pub", "sites/b.pub")),
    }
    assert files["sites/a/ca.crt"] == files["server/ca.crt"]
    assert files["sites/a/key"] != files["sites/b/key"]
    assert list(keys.registered_sites(tmp_path / "server")) == ["a", "b"]
    authority, server = (x509.load_pem_x509_certificate(files[f"server/{name}.crt"]) for name in ("ca", "server"))
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org"]
    assert [str(found) for found in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]


def test_nobody_else_reads_what_is_private(tmp_path):
    keys.make(tmp_path, ["localhost"], ["a"])
    for name in ("server/ca.key", "server/server.key", "server/secret", "sites/a/key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_sites_are_added_and_keys_stay(tmp_path):
    keys.make(tmp_path, ["localhost"], ["a"])
    before = everything(tmp_path)
    keys.make(tmp_path, [], ["b"])
    after = everything(tmp_path)
    assert {name: after[name] for name in before} == before
    assert after["sites/a/sites/b.pub"] == after["sites/b/sites/b.pub"] == after["server/sites/b.pub"]
    assert list(keys.registered_sites(tmp_path / "server")) == ["a", "b"]


@pytest.mark.parametrize(
    ("hosts", "sites", "says"),
    [
        ([], ["b", "a"], "'a'"),
        (["localhost"], ["b"], "--host"),
        ([], ["b", "b"], "twice"),
        ([], ["../b"], "'../b'"),
    ],
)
def test_what_is_refused_leaves_no_file(tmp_path, hosts, sites, says):
    keys.make(tmp_path, ["localhost"], ["a"])
    before = everything(tmp_path)
    with pytest.raises(UsageError, match=says):
        keys.make(tmp_path, hosts, sites)
    assert everything(tmp_path) == before


@pytest.mark.parametrize(("hosts", "says"), [([], "one host"), (["https://x:1"], "https://x:1")])
def test_a_server_needs_a_host(tmp_path, hosts, says):
    with pytest.raises(UsageError, match=says):
        keys.make(tmp_path, hosts, ["a"])
    assert not everything(tmp_path)


def test_a_site_can_make_its_own_key(tmp_path):
    keys.make(tmp_path / "all", ["localhost"], [])
    with pytest.raises(UsageError, match="public key"):
        keys.registered_sites(tmp_path / "all/server")
    keys.make_site(tmp_path / "own", "basel")
    with pytest.raises(UsageError, match="overwritten"):
        keys.make_site(tmp_path / "own", "basel")
    for name in ("basel", "zurich"):
        keys.public_file(tmp_path / "all/server", name).write_bytes((tmp_path / "own/basel.pub").read_bytes())
    with pytest.raises(UsageError, match=r"'basel'.*'zurich'"):
        keys.registered_sites(tmp_path / "all/server")
    keys.public_file(tmp_path / "all/server", "zurich").write_bytes(b"no key")
    with pytest.raises(UsageError, match=r"zurich\.pub"):
        keys.registered_sites(tmp_path / "all/server")


def test_a_renewed_certificate_has_the_old_names_and_authority(tmp_path):
    keys.make(tmp_path, ["fed.example.org", "10.0.0.1"], ["a"])
    before = everything(tmp_path)
    file = keys.renew(tmp_path)
    after = everything(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"server/server.crt", "server/server.key"}
    assert set(after) == set(before)
    assert stat.S_IMODE((tmp_path / "server/server.key").stat().st_mode) == 0o600
    old, new = (x509.load_pem_x509_certificate(each["server/server.crt"]) for each in (before, after))
    new.verify_directly_issued_by(x509.load_pem_x509_certificate(after["server/ca.crt"]))
    names = [each.extensions.get_extension_for_class(x509.SubjectAlternativeName).value for each in (old, new)]
    assert names[0] == names[1]
    assert file.read_bytes() == after["server/server.crt"]
    with pytest.raises(UsageError, match="missing"):
        keys.renew(tmp_path / "sites")


def test_a_certificate_that_ends_soon_is_named(tmp_path):
    keys.make(tmp_path, ["localhost"], ["a"])
    end = x509.load_pem_x509_certificate((tmp_path / "server/server.crt").read_bytes()).not_valid_after_utc
    assert keys.expiry_warnings(tmp_path / "server", end - datetime.timedelta(days=31)) == []
    (line,) = keys.expiry_warnings(tmp_path / "server", end - datetime.timedelta(days=29, hours=23))
    assert "29 days" in line
    assert keys.expiry_warnings(tmp_path / "sites/a", end) == []  # the authority's lasts longer
    assert len(keys.expiry_warnings(tmp_path / "sites/a", end + datetime.timedelta(days=3650))) == 1


def test_a_file_of_keys_that_cannot_be_read_is_named(tmp_path):
    keys.make(tmp_path / "keys", ["127.0.0.1"], ["a"])
    (tmp_path / "keys" / "server" / "sites" / "b.pub").mkdir()
    with pytest.raises(UsageError, match=r"b\.pub"):
        keys.registered_sites(tmp_path / "keys" / "server")
