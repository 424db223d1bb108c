from typing import Any
from zoneinfo import ZoneInfo

from console.dashboard.alerts import Alert
from console.dashboard.charts import Chart, Line, distribution, heat_map
from console.dashboard.render import render
from console.dashboard.view import make_view
from console.dashboard.waterfall import waterfall
from ledger.queries.distributions import LengthHistogram
from ledger.queries.log import RequestHistory

START_MS = 1_800_000_000_000


def attempt(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "attempt": 1,
        "worker_id": "w-1",
        "pool": "p",
        "provider": "aws",
        "region": "r",
        "tier": "spot",
        "engine": "local",
        "outcome": "ok",
        "error_code": None,
        "started_unix_ms": START_MS + 100,
        "queue_ms": 100.0,
        "ttft_ms": 200.0,
        "total_ms": 900.0,
        "engine_queue_ms": 50.0,
        "completion_tokens": 9,
        "resumed_tokens": 0,
        "rescue": None,
    }
    return values | changes


def test_a_waterfall_places_each_phase_on_one_axis() -> None:
    request = {"received_unix_ms": START_MS, "total_ms": 2000.0}
    lost = attempt(outcome="failed", ttft_ms=None, total_ms=400.0)
    second = attempt(attempt=2, started_unix_ms=START_MS + 1000, queue_ms=500.0, total_ms=1000.0)
    drawn = waterfall(RequestHistory(request, [lost, second]))
    assert [(phase.kind, phase.x, phase.width) for phase in drawn.bars[0].phases] == [("queue", 0, 5), ("lost", 5, 20)]
    assert [(phase.kind, phase.x, phase.width) for phase in drawn.bars[1].phases] == [
        ("queue", 25, 25),
        ("engine", 50, 2.5),
        ("prefill", 52.5, 7.5),
        ("decode", 60, 40),
    ]
    assert [text for _, text in drawn.ticks] == ["0 ms", "500 ms", "1.00 s", "1.50 s", "2.00 s"]


def test_a_worker_whose_clock_is_behind_begins_at_the_start() -> None:
    drawn = waterfall(
        RequestHistory({"received_unix_ms": START_MS, "total_ms": 900.0}, [attempt(started_unix_ms=START_MS - 700)])
    )
    assert drawn.bars[0].phases[0].x == 0
    assert all(0 <= phase.x <= 100 and phase.width <= 100 for phase in drawn.bars[0].phases)


def test_a_distribution_leaves_its_empty_ends_out() -> None:
    drawn = distribution(LengthHistogram((0, 1, 2, 4, 8, 16), (0, 0, 3, 0, 6)), "tokens")
    assert [(bar.label, bar.count, bar.width) for bar in drawn.bars] == [
        ("3–4", 3, 50),
        ("5–8", 0, 0),
        ("9–16", 6, 100),
    ]
    assert distribution(LengthHistogram((0, 1), (0,)), "tokens").bars == ()


def test_a_heat_map_shades_by_the_greatest() -> None:
    rows = [[0] * 24 for _ in range(7)]
    rows[2][13], rows[6][0] = 90, 1
    drawn = heat_map(rows, "requests")
    shades = {cell.title: cell.shade for cell in drawn.cells if cell.shade}
    assert shades == {"Wed 13:00–14:00: 90 requests": 9, "Sun 00:00–01:00: 1 requests": 1}
    assert max(cell.x for cell in drawn.cells) < 100


def test_no_name_of_a_model_can_end_the_chart_s_data() -> None:
    view = make_view({"model": "</script><b>"}, {}, START_MS)
    steps = view.window.steps("hour")
    chart = Chart("T", "requests", steps, [Line("</script><b>", [1.0] * len(steps), 1)], view)
    values = {
        "page": "Pools",
        "choices": {"model": ["</script><b>"]},
        "chart": chart,
        "failovers": [],
        "lost": [],
        "pools": [],
        "queues": [],
    }
    page = render("pools.html", view, None, values)
    assert "</script><b>" not in page
    assert "\\u003c/script>\\u003cb>" in page


def test_the_time_zone_s_name_is_written_where_scripts_read_it() -> None:
    view = make_view({}, {"spillway_zone": "Asia/Kolkata"}, START_MS)
    page = render("error.html", view, None, {"page": "", "message": "It is away."})
    assert view.zone == ZoneInfo("Asia/Kolkata")
    assert 'data-zone="Asia/Kolkata"' in page
    assert "It is away." in page


def test_the_frame_links_to_grafana_and_shows_the_first_alert() -> None:
    view = make_view({}, {}, START_MS)
    values: dict[str, Any] = {"page": "Webhooks", "endpoints": []}
    plain = render("webhooks.html", view, None, values)
    assert "Grafana" not in plain
    assert "notice" not in plain
    alerts = [Alert("A", "page", "The first.", "Do it.", ""), Alert("B", "ticket", "The second.", "Do it.", "")]
    page = render("webhooks.html", view, None, {**values, "alerts": alerts, "grafana_url": "https://g.example/d"})
    assert '<a href="https://g.example/d" rel="noreferrer">Grafana</a>' in page
    assert "2 active alerts</a>: The first." in page
    assert "The second." not in page
