import pytest

from gateway.auth.errors import TooManyLogins
from gateway.web import throttle
from gateway.web.throttle import LoginThrottle


def fail_often(tries: LoginThrottle, *addresses: str) -> None:
    for address in addresses:
        tries.check(address)
        tries.failed(address)


def test_the_sixth_wrong_password_in_a_minute_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(throttle.time, "monotonic", lambda: now[0])
    tries = LoginThrottle()
    fail_often(tries, *["10.0.0.1"] * 5)
    with pytest.raises(TooManyLogins):
        tries.check("10.0.0.1")
    tries.check("10.0.0.2")
    now[0] += 60
    fail_often(tries, *["10.0.0.1"] * 4)
    tries.succeeded("10.0.0.1")
    fail_often(tries, *["10.0.0.1"] * 5)


def test_one_ipv6_network_is_one_caller() -> None:
    tries = LoginThrottle()
    fail_often(tries, *(f"2001:db8:1:2::{number}" for number in range(5)))
    with pytest.raises(TooManyLogins):
        tries.check("2001:db8:1:2:ffff::1")
    tries.check("2001:db8:1:3::1")


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "MAX_ADDRESSES", 2)
    tries = LoginThrottle()
    fail_often(tries, *["first"] * 5, "second", "third")
    tries.check("first")
