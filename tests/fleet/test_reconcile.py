"""What becomes of a machine, by what its provider lists and its worker says."""

from msgspec.structs import replace

from fleet.machine import Machine, ProviderMachine, State
from fleet.reconcile import Beat, Limits, reconciled

NOW = 1_800_000_000_000
LIMITS = Limits(launch_limit_s=120, listed_after_s=60, start_limit_s=600, drain_s=30, listened_s=3600)
THERE = {"m": ProviderMachine("i-1", {})}
BEAT = Beat("w-1", 0.5)
SERVING = Machine("m", "p", "a", State.SERVING, NOW - 3_600_000, "i-1", "w-1", NOW - 3_500_000, NOW - 3_400_000)


def after(
    machine: Machine, listed: dict[str, ProviderMachine] | None, beat: Beat | None, limits: Limits = LIMITS
) -> State:
    return reconciled(machine, listed, beat, limits, NOW).state


def test_a_machine_that_the_provider_no_longer_has_is_lost_or_gone() -> None:
    assert after(SERVING, {}, BEAT) is State.LOST
    assert after(replace(SERVING, state=State.DRAINING), {}, BEAT) is State.GONE
    assert after(SERVING, {"m": ProviderMachine("i-1", {}, is_ending=True)}, BEAT) is State.LOST


def test_nothing_is_concluded_from_a_provider_that_does_not_answer() -> None:
    assert after(SERVING, None, None) is State.SERVING


def test_a_launch_has_time_to_be_listed_and_to_serve() -> None:
    wanted = Machine("m", "p", "a", State.WANTED, NOW - 60_000)
    assert after(wanted, {}, None) is State.WANTED
    assert after(replace(wanted, wanted_unix_ms=NOW - 121_000), {}, None) is State.FAILED
    found = reconciled(wanted, THERE, None, LIMITS, NOW)
    assert (found.state, found.provider_id) == (State.LAUNCHED, "i-1")
    assert after(replace(found, wanted_unix_ms=NOW - 601_000), THERE, None) is State.ENDING
    assert after(found, THERE, BEAT) is State.SERVING


def test_a_silent_worker_s_machine_is_ended_but_not_by_a_controller_that_has_just_begun_to_listen() -> None:
    assert after(SERVING, THERE, None) is State.ENDING
    assert after(SERVING, THERE, replace(BEAT, silent_s=61.0)) is State.ENDING
    assert after(SERVING, THERE, None, replace(LIMITS, listened_s=1.0)) is State.SERVING


def test_a_drained_machine_is_ended_when_its_worker_has_left_or_its_time_is_over() -> None:
    draining = replace(SERVING, state=State.DRAINING, drained_unix_ms=NOW - 10_000)
    assert after(draining, THERE, BEAT) is State.DRAINING
    assert after(draining, THERE, None) is State.ENDING
    assert after(replace(draining, drained_unix_ms=NOW - 61_000), THERE, BEAT) is State.ENDING


def test_a_machine_is_drained_before_its_credentials_expire() -> None:
    assert after(SERVING, THERE, BEAT, replace(LIMITS, life_s=3599.0)) is State.DRAINING
    assert after(SERVING, THERE, BEAT, replace(LIMITS, life_s=3601.0)) is State.SERVING
