"""Tenants are named by their keys, and no name gives a key away."""

import pytest

from server_ext.http.tenants import Tenants

SECRET = b"a secret of the tests, long enough"


@pytest.fixture
def tenants():
    """Return the tenants of a server with API keys."""
    return Tenants(SECRET, has_keys=True)


def tenant(tenants, key):
    """Return the tenant of a request with a key."""
    return tenants.tenant_of({"authorization": f"Bearer {key}"})


def test_each_key_is_a_tenant_of_its_own(tenants):
    """Other keys are other tenants, with other salts; the same key is always the same."""
    names = {tenant(tenants, key) for key in ("key-a", "key-b", "")}
    assert len(names) == 3
    assert len({tenants.cache_salt(name) for name in names}) == 3
    assert tenant(tenants, "key-a") == tenant(Tenants(SECRET, has_keys=True), "key-a")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_key_is_one_tenant_however_its_scheme_is_spelled(tenants, scheme):
    """All spellings are let in by vLLM."""
    assert tenants.tenant_of({"authorization": f"{scheme} key-a"}) == tenant(tenants, "key-a")


def test_without_keys_there_is_one_tenant(tenants):
    """Everybody is it, and its cache is vLLM's own: no salt."""
    single = Tenants(SECRET, has_keys=False)
    assert tenant(single, "key-a") == single.tenant_of({}) == ""
    assert single.cache_salt("") is None


def test_a_salt_of_a_session_is_its_own():
    """It differs between sessions, between tenants, and from the tenants' salts."""
    tenants = Tenants(SECRET, has_keys=True)
    pairs = [(tenant(tenants, key), session_id) for key in ("key-a", "key-b") for session_id in ("s", "t", None)]
    assert len({tenants.cache_salt(name, session_id=session_id) for name, session_id in pairs}) == 6
    assert Tenants(SECRET, has_keys=False).cache_salt("", session_id="s")


def test_no_digest_tells_the_secret_or_the_key(tenants):
    """What is stored and logged is a digest, another one under another secret."""
    name = tenant(tenants, "key-a")
    for told in (name, tenants.cache_salt(name), tenants.cache_salt(name, session_id="s")):
        assert "key-a" not in told
        assert SECRET.decode() not in told
    assert name != tenant(Tenants(b"another secret, long enough too", has_keys=True), "key-a")
