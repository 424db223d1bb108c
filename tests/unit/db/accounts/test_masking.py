"""What looks like a key is masked, wherever it stands; what does not stays."""

import pytest

from db.accounts.masking import masked
from db.accounts.token import new_token

OURS = "sk-sw-K09QQVFwzYDaiom6rrP4ku3dMeKLZxYy0Dz9nGPbs6m"
LONG = "abcdefghijklmnop0123456789"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (OURS, "sk-sw-***"),
        (f"/v1/models/{OURS}", "/v1/models/sk-sw-***"),
        (f"/v1/models/x{OURS}x?key={OURS}&a=b", "/v1/models/xsk-sw-***?key=sk-sw-***&a=b"),
        (f"?key%3D{OURS}", "?key%3Dsk-sw-***"),
        (f"no key has the name '{OURS}'", "no key has the name 'sk-sw-***'"),
        (f"Incorrect API key provided: sk-proj-{LONG}.", "Incorrect API key provided: sk-***."),
        (f"?next=%2Fsk-ant-api03-{LONG}", "?next=%2Fsk-***"),
        (f"a\\nsk-or-v1-{LONG}", "a\\nsk-***"),
        (f"\x1b[35msk-or-v1-{LONG}\x1b[0m", "\x1b[35msk-***\x1b[0m"),
        (f"gsk_{LONG} hf_{LONG} AIza{LONG} AKIA{LONG.upper()}", "gsk_*** hf_*** AIza*** AKIA***"),
        (f"authorization: Bearer {LONG}", "authorization: Bearer ***"),
        (f"token eyJhbGciOi{LONG}.eyJzdWIi{LONG}.{LONG}", "token eyJ***"),
        ("nats://spillway:S3cret@nats:4222", "nats://spillway:***@nats:4222"),
        ("postgresql://u:a%40b@[::1]:5432/d", "postgresql://u:***@[::1]:5432/d"),
    ],
)
def test_what_looks_like_a_key_is_masked(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "", "sk-", "sk-wrong", "sk-sw-…", "the model `task-0123456789abcdefghij` is gone",
        "risk-assessment-of-everything", "key_0123456789abcdef", "req_0123456789abcdef0123456789abcdef", "http://host:8000/v1/models/a@b",
        "https://[::1]:8000/x", "nats://user@host:4222", "Bearer token", "eyJ.a.b", "asks hf_hub",
    ],
)  # fmt: skip
def test_what_is_no_key_stays(text: str) -> None:
    assert masked(text) == text


def test_our_own_keys_look_like_keys() -> None:
    assert masked(f"a{new_token()}") == "ask-sw-***"
