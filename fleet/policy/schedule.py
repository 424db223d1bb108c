"""Minimum sizes at certain hours of certain days."""

import datetime as dt
from collections.abc import Iterable

from fleet.settings import DAYS, ScheduleSettings


def floor_at(schedules: Iterable[ScheduleSettings], unix_s: float) -> int:
    """Return the highest minimum size in force at a time; 0 if there is none."""
    return max((one.min_workers for one in schedules if _is_in_force(one, unix_s)), default=0)


def _is_in_force(schedule: ScheduleSettings, unix_s: float) -> bool:
    now = dt.datetime.fromtimestamp(unix_s, schedule.time_zone)
    today, yesterday = (DAYS[(now.weekday() - back) % len(DAYS)] in schedule.days for back in (0, 1))
    if schedule.begin < schedule.end:
        return today and schedule.begin <= now.time() < schedule.end
    return (today and now.time() >= schedule.begin) or (yesterday and now.time() < schedule.end)
