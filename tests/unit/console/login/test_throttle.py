from collections.abc import Callable

import pytest

from console.login.throttle import MAX_PER_ADDRESS, MAX_PER_BROWSER, MAX_PER_NAME, MAX_UNKNOWN, WINDOW_S, LoginThrottle
from db.accounts.errors import TooManyLogins


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("console.login.throttle.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def tries() -> LoginThrottle:
    return LoginThrottle()


def is_let_in(tries: LoginThrottle, address: str, browser: str | None = None, name: str = "admin") -> bool:
    try:
        known = tries.begin(name, address, browser)
    except TooManyLogins:
        return False
    tries.succeeded(name, address, known)
    return True


def fail(tries: LoginThrottle, count: int, address: str | Callable[[int], str], **rest: str) -> None:
    for number in range(count):
        tries.begin(rest.get("name", "admin"), address if isinstance(address, str) else address(number), None)


def test_the_sixth_wrong_password_in_a_minute_is_not_looked_at(tries: LoginThrottle, clock: list[float]) -> None:
    fail(tries, MAX_PER_NAME, "10.0.0.1")
    assert not is_let_in(tries, "10.0.0.1")
    assert is_let_in(tries, "10.0.0.2")  # the same person elsewhere
    assert is_let_in(tries, "10.0.0.1", name="somebody else")
    clock[0] += WINDOW_S
    fail(tries, MAX_PER_NAME - 1, "10.0.0.1")
    assert is_let_in(tries, "10.0.0.1")
    fail(tries, MAX_PER_NAME, "10.0.0.1")


def test_an_address_that_tries_many_names_is_stopped(tries: LoginThrottle) -> None:
    for number in range(MAX_PER_ADDRESS):
        fail(tries, 1, "10.0.0.1", name=f"name {number}")
    assert not is_let_in(tries, "10.0.0.1", name="another")
    assert is_let_in(tries, "10.0.0.2", name="another")


def test_no_stranger_keeps_a_known_browser_out(tries: LoginThrottle) -> None:
    fail(tries, MAX_PER_NAME, "10.0.0.1")
    assert is_let_in(tries, "10.0.0.1", "mine")
    fail(tries, MAX_UNKNOWN - MAX_PER_NAME, lambda number: f"10.1.{number}.1")
    assert not is_let_in(tries, "10.0.0.2")  # the strangers' hashing has its bound
    assert is_let_in(tries, "10.0.0.2", "mine")


def test_a_known_browser_that_fails_often_is_a_stranger(tries: LoginThrottle) -> None:
    for _ in range(MAX_PER_BROWSER):
        assert tries.begin("admin", "10.0.0.1", "mine")
    assert not tries.begin("admin", "10.0.0.1", "mine")
    fail(tries, MAX_PER_NAME - 1, "10.0.0.1")
    assert not is_let_in(tries, "10.0.0.1", "mine")


def test_what_succeeds_costs_nobody_anything(tries: LoginThrottle) -> None:
    for number in range(2 * MAX_UNKNOWN):
        assert is_let_in(tries, "10.0.0.1", name=f"name {number}")


def test_one_ipv6_network_is_one_caller(tries: LoginThrottle) -> None:
    fail(tries, MAX_PER_NAME, lambda number: f"2001:db8:1:2::{number}")
    assert not is_let_in(tries, "2001:db8:1:2:ffff::1")
    assert is_let_in(tries, "2001:db8:1:3::1")


def test_what_is_remembered_is_bounded() -> None:
    tries = LoginThrottle(max_remembered=3)
    fail(tries, MAX_PER_NAME, "first")
    fail(tries, 1, "second")
    assert is_let_in(tries, "first")
