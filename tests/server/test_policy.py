"""The policy: one definition, set by file, flag and request, and documented."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from paceline_server.policy import (
    Policy,
    PolicyError,
    parse_policy,
    policy_changes,
    policy_fields,
    policy_hash,
    policy_schema,
    policy_table,
)
from paceline_server.policy_file import load_policy
from paceline_server.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "policy.md"


def test_the_documented_table_is_that_of_the_code() -> None:
    assert policy_table() in PAGE.read_text(encoding="utf-8")


def test_every_field_has_limits_and_a_reason() -> None:
    for field in policy_fields():
        assert field.description, field.name
        assert parse_policy({field.name: field.default}) == Policy()
    assert {field.name for field in policy_fields()} == set(policy_schema()["properties"])


def test_given_fields_replace_those_of_the_base() -> None:
    base = Policy(mode="approve", restarts_per_hour=3)
    policy = parse_policy({"hang_patience_seconds": "60", "restarts_per_hour": 4}, base)
    assert policy == Policy(mode="approve", restarts_per_hour=4, hang_patience_seconds=60.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hang_patience": 1}, "not a policy field (did you mean hang_patience_seconds?)"),
        ({"mode": "x", "patience": 1}, "got 'x'; patience is not a policy field"),
        (
            {"backoff_seconds": 400},
            "backoff_maximum_seconds: expected at least backoff_seconds (400), got 300; raise",
        ),
        ({"maintenance_windows": "Sat"}, "maintenance_windows: 'Sat' is not a window: expected D"),
        ({"approvers": 3}, "approvers: expected a list of texts, got 3"),
        ({"patience": 1}, "patience is not a policy field; expected one of mode, resumes, check"),
        (
            {"mode": "manual"},
            "mode: expected one of default, observe, dry-run, approve, auto, got 'manual'",
        ),
        (
            {"node_lease_seconds": 1},
            "node_lease_seconds: expected a number of at least 5 and at most 86400, got 1",
        ),
        (
            {"stop_timeout_seconds": 0},
            "stop_timeout_seconds: expected a number above 0 and at most 86400, got 0",
        ),
        ({"restarts_per_hour": 2.5}, "restarts_per_hour: expected a whole number"),
        ({"hang_patience_seconds": float("nan")}, "got nan"),
        ({"hang_patience_seconds": None}, "got None"),
        ({"quarantine_share": True}, "got True"),
    ],
)
def test_an_invalid_value_is_refused_with_what_was_expected(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(values)
    assert message in str(caught.value)


def test_lists_are_read_from_text_and_from_toml(tmp_path: Path) -> None:
    windows = ("Sat 22:00-06:00 UTC", "daily 02:00-04:00")
    policy = parse_policy({"maintenance_windows": ", ".join(windows), "approvers": ""})
    assert policy == Policy(maintenance_windows=windows)
    path = tmp_path / "policy.toml"
    path.write_text('maintenance_windows = ["Sat 22:00-06:00 UTC", "daily 02:00-04:00"]')
    assert load_policy(path) == policy


def test_the_hash_depends_on_every_value_and_on_nothing_else() -> None:
    policy = Policy(approvers=("alice",))
    assert policy_hash(policy) == policy_hash(parse_policy({"approvers": ["alice"]}))
    assert policy_hash(policy) != policy_hash(Policy())
    [change] = policy_changes(Policy(), policy)
    assert change == ("approvers", (), ("alice",))


def test_a_policy_file_sets_defaults(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('mode = "dry-run"\nbackoff_seconds = 3\n')
    assert load_policy(path) == Policy(mode="dry-run", backoff_seconds=3.0)
    assert load_policy(None) == Policy()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mode = ", "is not valid TOML"),
        ("lease = 3", "lease is not a policy field"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_bad_policy_file_is_refused_before_the_server_starts(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "policy.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValidationError) as caught:
        Settings(policy=path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_stored_policy_reads_back() -> None:
    policy = Policy(mode="observe", hang_patience_seconds=1.5)
    assert msgspec.json.decode(msgspec.json.encode(policy), type=Policy) == policy
