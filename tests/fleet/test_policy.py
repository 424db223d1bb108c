"""What the policy decides: pure functions, tables of what goes in and comes out."""

import datetime as dt
from collections.abc import Sequence
from zoneinfo import ZoneInfo

import pytest

from fleet.policy.decide import Decider
from fleet.policy.forecast import DAY_SLOTS, SLOT_S, Forecast
from fleet.policy.need import Market, batch_plan, critical_share, late_speed, missing_speed
from fleet.policy.schedule import floor_at
from fleet.policy.surges import Surges
from fleet.policy.view import BatchWork, Demand, PlaceView, PoolPlan, PoolView
from fleet.settings import ScheduleSettings

SPEED = 1000.0  # tokens per second of a worker


def pool(
    name: str = "spot", usd: float = 1.0, *, most: int = 20, floor: int = 0, **places: tuple[int, int, bool]
) -> PoolView:
    """``places``: (serving, starting, rests)."""
    views = tuple(PlaceView(place, *numbers) for place, numbers in (places or {"a": (0, 0, False)}).items())
    return PoolView(name, name, usd, SPEED, 120.0, floor, most, views)


def demand(rate: float = 0.0, *, queued: float = 0.0, surge: float = 1.0, **more: object) -> Demand:
    """Of a model that a hosted API serves too: what waits is its business."""
    given = {"idle_s": 1e9, "hosted_usd_per_token": 1.0, **more}
    return Demand(queued, rate, lambda _ahead_s: rate, lambda _share: surge, **given)  # type: ignore[arg-type]


def decide(pools: Sequence[PoolView], wanted: Demand) -> dict[str, PoolPlan]:
    """What a controller decides that has run for long."""
    decider = Decider(max_wait_s=10.0, idle_s=600.0, cool_down_s=60.0)
    decider.decide(pools, wanted, -1e6)
    return {plan.pool: plan for plan in decider.decide(pools, wanted, 0.0)}


def test_a_new_controller_ends_nothing_before_it_knows_what_is_needed() -> None:
    decider = Decider(max_wait_s=10.0, idle_s=600.0, cool_down_s=300.0)
    serving = [pool(a=(3, 0, False))]
    sizes = {now_s: decider.decide(serving, demand(), now_s)[0].size for now_s in (0.0, 299.0, 301.0, 599.0, 601.0)}
    assert sizes == {0.0: 3, 299.0: 3, 301.0: 1, 599.0: 1, 601.0: 1}  # what the last worker was there for is kept, too
    assert decider.decide(serving, demand(), 1000.0)[0].size == 0


def test_a_rate_gets_the_workers_that_it_needs_and_its_surges() -> None:
    assert decide([pool()], demand(2500.0))["spot"].size == 3
    assert decide([pool()], demand(2500.0, surge=2.0))["spot"].size == 5


def test_nothing_to_do_needs_nobody_and_a_floor_stays() -> None:
    assert decide([pool(a=(2, 0, False))], demand())["spot"].size == 0
    assert decide([pool(floor=2, a=(3, 0, False))], demand())["spot"].size == 2


def test_one_worker_stays_until_the_last_request_is_long_ago() -> None:
    assert decide([pool(a=(1, 0, False))], demand(idle_s=599.0))["spot"].size == 1
    assert decide([pool(a=(1, 0, False))], demand(idle_s=601.0))["spot"].size == 0


def test_a_model_of_which_nothing_is_known_gets_one_worker() -> None:
    assert decide([pool()], demand(is_unknown=True))["spot"].size == 1


def test_the_cheapest_pool_comes_first_and_what_it_cannot_have_goes_to_the_next() -> None:
    plans = decide([pool("on-demand", 3.0), pool("spot", 1.0, most=2)], demand(5000.0))
    assert (plans["spot"].size, plans["on-demand"].size) == (2, 3)
    resting = pool("spot", 1.0, a=(1, 0, True), b=(0, 0, True))
    plans = decide([pool("on-demand", 3.0), resting], demand(5000.0))
    assert (plans["spot"].size, plans["on-demand"].size) == (1, 4)


def test_machines_spread_over_places_and_leave_out_those_that_rest() -> None:
    plans = decide([pool(a=(1, 0, False), b=(0, 0, False), c=(0, 0, True))], demand(4000.0))
    assert plans["spot"].launches == {"b": 2, "a": 1}


def test_machines_that_are_starting_count() -> None:
    assert decide([pool(a=(1, 2, False))], demand(3000.0))["spot"].launches == {}


def test_a_dearer_machine_ends_only_once_cheaper_ones_serve() -> None:
    dear, starting = pool("on-demand", 3.0, a=(2, 0, False)), pool("spot", 1.0, a=(0, 2, False))
    assert decide([dear, starting], demand(2000.0))["on-demand"].ends == 0
    serving = pool("spot", 1.0, a=(2, 0, False))
    assert decide([dear, serving], demand(2000.0))["on-demand"].ends == 2


def test_where_nothing_else_takes_it_a_pool_is_sized_for_what_has_piled_up_until_it_serves() -> None:
    assert decide([pool()], demand(2500.0, hosted_usd_per_token=None))["spot"].size == 5
    assert decide([pool(a=(3, 0, False))], demand(2500.0, hosted_usd_per_token=None))["spot"].size == 3


def test_machines_stay_while_something_waits_for_them() -> None:
    waiting = demand(500.0, queued=25_000.0, hosted_usd_per_token=None)
    assert decide([pool(a=(4, 0, False))], waiting)["spot"].size == 3
    nothing_waits = demand(500.0, hosted_usd_per_token=None, idle_s=0.0)
    assert decide([pool(a=(4, 0, False))], nothing_waits)["spot"].size == 1


def test_what_waits_counts_as_far_as_help_comes_in_time() -> None:
    waiting = demand(1000.0, queued=500_000.0)
    assert late_speed(waiting, spare=0.0, present=1000.0, within_s=120.0, max_wait_s=10.0) > 4000
    gone_by_then = demand(0.0, queued=100_000.0)
    assert late_speed(gone_by_then, spare=0.0, present=1000.0, within_s=120.0, max_wait_s=10.0) == 0


def test_how_much_headroom_is_worth_depends_on_what_else_takes_the_work() -> None:
    assert critical_share(1.0, None) == 0.995
    assert critical_share(1.0, 4.0) == 0.75
    assert critical_share(4.0, 1.0) == 0.05


def test_batch_work_is_planned_into_valleys_and_meets_each_deadline() -> None:
    rates = {hour: 1000.0 if hour < 4 else 100.0 for hour in range(9)}
    work = [BatchWork(8 * 3600.0, 8 * 3600 * 500.0)]
    _, speed = batch_plan(work, lambda ahead_s: rates[int(ahead_s // 3600)], lambda _: 1.0, 0.5, Market())
    done = sum(max(0.0, max(speed, rate) - rate) for hour, rate in rates.items() if hour < 8) * 3600
    assert speed == pytest.approx(1000.0, rel=0.15)
    assert done >= work[0].tokens * 0.95
    _, hurried = batch_plan([BatchWork(3600.0, 3600 * 900.0), *work], lambda _: 100.0, lambda _: 1.0, 0.5, Market())
    assert hurried > 1000.0


def test_batch_work_is_done_before_hours_in_which_the_market_has_nothing_to_spare() -> None:
    def expected(ahead_s: float) -> float:
        return 1000.0 if ahead_s > 4 * 3600 else 100.0

    work = [BatchWork(8 * 3600.0, 8 * 3600 * 200.0)]
    _, steady = batch_plan(work, expected, lambda _: 1.5, 0.5, Market())
    _, scarce = batch_plan(work, expected, lambda _: 1.5, 0.5, Market(most=1000.0))
    _, often_gone = batch_plan(work, expected, lambda _: 1.5, 0.5, Market(most=1000.0, had=0.5))
    assert steady < scarce < often_gone
    _, too_much = batch_plan([BatchWork(8 * 3600.0, 8 * 3600 * 2000.0)], expected, lambda _: 1.5, 0.5, Market(1000.0))
    assert too_much > 1000.0


def test_dear_machines_work_for_deadlines_that_cheap_ones_would_miss_and_for_no_others() -> None:
    work = [BatchWork(8 * 3600.0, 8 * 3600 * 500.0)]

    def missing(*market: float) -> float:
        return missing_speed(work, lambda _: 1000.0, Market(*market))

    assert missing() == missing(1600.0, 1.0, 0.0, 60.0) == 0.0
    assert missing(1300.0) == pytest.approx(200.0, rel=0.2)
    assert missing(0.0) == pytest.approx(500.0, rel=0.1)
    assert missing(1600.0, 1.0, 0.0, 3600.0) > 0  # an outage of an hour is believed to last for another one


def test_of_two_dear_pools_only_one_does_what_the_cheap_one_cannot() -> None:
    gone = pool("spot", 1.0, a=(0, 0, True))
    late = demand(batch=(BatchWork(2 * 3600.0, 2 * 3600 * 2000.0),), hosted_usd_per_token=0.5 / 3600 / SPEED)
    plans = decide([gone, pool("reserved", 2.0), pool("on-demand", 3.0)], late)
    assert (plans["reserved"].size, plans["on-demand"].size) == (3, 0)


def test_what_is_only_worth_a_cheap_machine_keeps_no_dear_one() -> None:
    def surge(share: float) -> float:
        return 4.0 if share > 0.6 else 1.0

    pools = [pool("on-demand", 3.0, a=(3, 0, False)), pool("spot", 1.0, most=2, a=(2, 0, False))]
    wanted = Demand(0.0, 2000.0, lambda _: 2000.0, surge, idle_s=1e9, hosted_usd_per_token=3.2 / 3600 / SPEED)
    assert decide(pools, wanted)["on-demand"].ends == 3


def test_each_decision_says_why_in_one_sentence() -> None:
    reason = decide([pool()], demand(2500.0, queued=700.0))["spot"].reason
    assert reason == "2,500 tokens/s expected, capacity for 2,500 is worth its cost; 700 tokens queued"


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (demand(is_unknown=True), "one worker is needed first, to publish how the model's tokens are counted"),
        (demand(idle_s=5.0), "no demand expected; one worker is kept until the model has been idle for idle_s"),
        (demand(), "no demand expected"),
    ],
)
def test_also_why_one_worker_or_none(wanted: Demand, reason: str) -> None:
    assert decide([pool(a=(1, 0, False))], wanted)["spot"].reason == reason


def test_what_the_last_minutes_brought_is_forgotten_at_once_where_nothing_comes_any_more() -> None:
    """Eight machines stood idle for six minutes, because a mean of five minutes fades slowly."""
    forecast = Forecast()
    for second in range(0, 60, 5):
        forecast.observe(1e9 + second, 2000.0, 5.0)
    assert forecast.at(1e9 + 60, 60.0) > 1000.0
    forecast.forget_level()
    assert forecast.at(1e9 + 60, 60.0) == 0.0
    noon_s = 12 * 3600.0
    for slot in range(DAY_SLOTS):
        forecast.learn(slot * SLOT_S, 1000.0)
    assert forecast.at(noon_s, 12 * 3600.0) == pytest.approx(1000.0, rel=0.01)  # what the hour usually brings is not


def test_a_forecast_knows_the_hours_of_the_week_and_the_level_of_today() -> None:
    forecast = Forecast()
    for slot in range(7 * DAY_SLOTS):
        forecast.learn(slot * SLOT_S, 100.0 if slot % DAY_SLOTS < DAY_SLOTS // 2 else 1000.0)
    night_s = 14 * 86_400.0 + 6 * 3600
    for second in range(0, 1800, 5):
        forecast.observe(night_s + second, 200.0, 5.0)
    assert forecast.at(night_s + 1800, 0.0) == pytest.approx(200.0, rel=0.1)
    assert forecast.at(night_s + 1800, 6 * 3600) == pytest.approx(1000.0, rel=0.1)  # noon, and the level is forgotten


def test_a_day_far_above_all_others_is_expected_to_go_on_as_it_is() -> None:
    """Learned at once, its own last slot was taken for what is usual now, beside another day's next one: a fall."""
    forecast = Forecast()
    for slot in range(DAY_SLOTS):
        forecast.learn(slot * SLOT_S, 1000.0)
    ratios = []
    for second in range(86_400, 86_400 + 4 * 3600, 5):
        forecast.observe(second, 8000.0, 5.0)
        ratios.append(forecast.at(second, 180.0) / 8000.0)
    assert 0.9 < min(ratios[60:]) <= max(ratios[60:]) < 1.1


def test_hours_that_are_known_are_foreseen_also_from_one_that_is_not() -> None:
    forecast = Forecast()
    for slot in range(DAY_SLOTS // 4):
        forecast.learn(slot * SLOT_S, 100.0)  # a night
    for second in range(12 * 3600, 13 * 3600, 5):
        forecast.observe(second, 1000.0, 5.0)
    assert forecast.at(13 * 3600, 60.0) == pytest.approx(1000.0, rel=0.05)
    assert forecast.at(13 * 3600, 13 * 3600) == pytest.approx(100.0, rel=0.05)


def test_a_change_is_seen_at_once_and_noise_is_no_change() -> None:
    forecast = Forecast()
    for second in range(0, 3600, 5):
        forecast.observe(second, 1000.0 + (100.0 if second % 10 else -100.0), 5.0)
    assert forecast.recent_tokens_per_s == pytest.approx(1000.0, rel=0.02)
    for second in range(3600, 3635, 5):
        forecast.observe(second, 3000.0, 5.0)
    assert forecast.recent_tokens_per_s == pytest.approx(3000.0, rel=0.1)


def test_after_a_dip_what_is_usual_is_no_surge() -> None:
    surges = Surges(kept_s=180.0)
    for minute in range(3000):
        surges.expect(minute * 60.0, 25.0 if minute % 20 == 0 else 100.0)
        surges.observe(minute * 60.0, 100.0)
    assert surges.quantile(0.97) == pytest.approx(1.0, abs=0.05)


def test_surges_are_learned() -> None:
    surges = Surges(kept_s=0.0)
    for minute in range(3000):
        surges.expect(minute * 60.0, 100.0)
        surges.observe(minute * 60.0, 300.0 if minute % 20 == 0 else 100.0)
    assert surges.quantile(0.5) == pytest.approx(1.0, abs=0.05)
    assert surges.quantile(0.97) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize(
    ("moment", "floor"),
    [
        ("2026-03-02T07:59", 0),
        ("2026-03-02T08:00", 4),
        ("2026-03-02T18:00", 0),
        ("2026-03-06T22:30", 2),  # Friday night
        ("2026-03-07T01:59", 2),  # which ends on Saturday
        ("2026-03-07T02:00", 0),
        ("2026-03-08T01:00", 0),
    ],
)
def test_schedules_are_floors_on_the_clock_of_their_zone(moment: str, floor: int) -> None:
    berlin = ZoneInfo("Europe/Berlin")
    office = ScheduleSettings.model_validate(
        {"days": ["mon", "tue"], "begin": "08:00", "end": "18:00", "min_workers": 4, "time_zone": "Europe/Berlin"}
    )
    night = ScheduleSettings.model_validate(
        {"days": ["fri"], "begin": "22:00", "end": "02:00", "min_workers": 2, "time_zone": "Europe/Berlin"}
    )
    at_s = dt.datetime.fromisoformat(moment).replace(tzinfo=berlin).timestamp()
    assert floor_at([office, night], at_s) == floor
