"""API keys as a list: what is taken, what is refused, and that no key is ever shown."""

import json
from pathlib import Path

import pytest

from deployments.config import AppArgs, app_args_from
from deployments.keys import Caller, KeyRing, KeysError
from worker.config import ConfigError

SECRET = "sk-very-secret-4711"


def write(tmp_path: Path, entries: object) -> str:
    path = tmp_path / "keys.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return str(path)


def test_a_key_is_known_by_its_tenant_and_rights() -> None:
    ring = KeyRing.parse(
        json.dumps(
            [
                {"key": "a", "tenant": "team-a", "weight": 3, "max_priority": 0},
                {"key": "b", "tenant": "team-b", "admin": True},
                "c",
            ]
        )
    )
    assert ring.caller_of("a") == Caller("team-a", is_admin=False, most_urgent_priority=0)
    assert ring.caller_of("b") == Caller("team-b", is_admin=True)
    assert ring.caller_of("c") == Caller("")
    assert ring.tenants == ("team-a", "team-b")
    assert ring.tenant_weights == {"team-a": 3.0}
    for unknown in ("", "A", "ab", "a ", "a" * 10_000, "\udc80"):
        assert ring.caller_of(unknown) is None


def test_the_list_may_be_yaml() -> None:
    ring = KeyRing.parse("# ours\n- key: one\n  tenant: a\n- two\n")
    assert ring.caller_of("one") == Caller("a")
    assert ring.caller_of("two") == Caller()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "list"),
        ("[]", "at least one"),
        (f"key: {SECRET}", "list"),
        (f"- [{SECRET}", "at line 1"),
        (f"- {{key: {SECRET}, tenant: 'a b'}}", "entry 1: tenant"),
        (f"- {{key: {SECRET}, tenant: 4}}", "entry 1: tenant"),
        (f"- {{key: {SECRET}, admin: 'yes'}}", "entry 1: admin"),
        (f"- {{key: {SECRET}, tenant: a, weight: 0}}", "entry 1: weight"),
        (f"- {{key: {SECRET}, tenant: a, weight: .inf}}", "entry 1: weight"),
        (f"- {{key: {SECRET}, weight: 2}}", "only a tenant"),
        (f"- {{key: {SECRET}, max_priority: 101}}", "entry 1: max_priority"),
        (f"- {{key: x, {SECRET}: 1}}", "entry 1: entry: unknown field"),
        (f"- {{{SECRET}: 1, admin: true}}", "entry 1: key"),
        ("- {key: x, tenent: a}", "entry 1: tenent: unknown field; there are key, tenant, admin, weight, max_priority"),
        ("- x\n- {key: y, is_admin: true}", "entry 2: is_admin: unknown field"),
        ("- {pineapple: 1}", "entry 1: key"),
        (f"- {{tenant: {SECRET}}}", "entry 1: key"),
        ("- {key: 4711}", "entry 1: key"),
        (f"- {{key: '{SECRET} and more'}}", "entry 1: key"),
        ("- ''", "entry 1: key"),
        ("- 7", "entry 1"),
        (f"- x\n- {SECRET}\n- {SECRET}", "entries 2 and 3"),
        (f"- {{key: {SECRET}, tenant: a, weight: 2}}\n- {{key: x, tenant: a, weight: 3}}", "entry 2: weight"),
    ],
)
def test_a_wrong_list_is_refused_without_a_word_of_it(text: str, words: str) -> None:
    with pytest.raises(KeysError, match=words) as caught:
        KeyRing.parse(text)
    assert SECRET not in str(caught.value)
    assert "4711" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_no_key_and_no_digest_is_shown() -> None:
    ring = KeyRing.parse(json.dumps([SECRET]))
    assert SECRET not in repr(ring)
    assert ring.digests[0].hex() not in repr(ring)
    assert repr(ring.digests[0]) not in repr(ring)
    assert SECRET.encode() not in ring.digests


def test_keys_come_from_the_file_or_else_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert AppArgs().key_ring() is None
    monkeypatch.setenv("STALLFREE_API_KEYS", json.dumps(["of-the-environment"]))
    ring = AppArgs().key_ring()
    assert ring is not None
    assert ring.caller_of("of-the-environment")
    ring = AppArgs(api_key_file=write(tmp_path, ["of-the-file"])).key_ring()
    assert ring is not None
    assert ring.caller_of("of-the-file")
    assert not ring.caller_of("of-the-environment")


def test_shares_beside_keys_reach_the_scheduler(tmp_path: Path) -> None:
    path = write(tmp_path, [{"key": "x", "tenant": "a", "weight": 2}, {"key": "y", "tenant": "b"}])
    args = app_args_from({"api_key_file": path, "tenant_weights": "c=4,a=2"})
    assert args.to_engine_config().tenant_weights == {"a": 2.0, "c": 4.0}
    with pytest.raises(ConfigError, match="another weight") as caught:
        app_args_from({"api_key_file": path, "tenant_weights": "a=3"})
    assert caught.value.option == "tenant_weights"


@pytest.mark.parametrize(
    ("content", "values", "option", "words"),
    [
        (None, {}, "api_key_file", "cannot read"),
        (f"- {SECRET}\n- {SECRET}", {}, "api_key_file", "same key"),
        (f"- {SECRET}", {"tenant_header": "x-team"}, "tenant_header", "key says"),
    ],
)
def test_a_wrong_key_file_is_refused_at_start(
    tmp_path: Path, content: str | None, values: dict[str, object], option: str, words: str
) -> None:
    path = str(tmp_path / "missing") if content is None else write(tmp_path, content)
    with pytest.raises(ConfigError, match=words) as caught:
        app_args_from({"api_key_file": path, **values})
    assert caught.value.option == option
    assert SECRET not in str(caught.value)


def test_a_key_file_that_is_no_text_is_refused_without_a_word_of_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xff" + SECRET.encode())
    with pytest.raises(ConfigError, match="UTF-8") as caught:
        app_args_from({"api_key_file": str(path)})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("origins", ["", "example.org", "https://a.org/", "https://a.org, https://b.org", "*,*"])
def test_wrong_origins_are_refused(origins: str) -> None:
    with pytest.raises(ConfigError) as caught:
        app_args_from({"cors_origin": origins})
    assert caught.value.option == "cors_origin"
    assert AppArgs(cors_origin="https://a.org,http://localhost:3000").cors_origins == (
        "https://a.org",
        "http://localhost:3000",
    )
