"""The dashboard in a real Chromium, in front of a whole running Spillway."""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

import openai
import pytest
from playwright.sync_api import expect

from tests.acceptance.dashboard.conftest import LONG_AGO_UNIX_MS, Visit
from tests.acceptance.system import System
from tests.waiting import HANGS_S, LONGEST_POLL_S

CHAT: Final = "/v1/chat/completions"
AXE = Path(__file__).with_name("axe.min.js").read_text()
# Tables have rows of one kind, so the first of them are enough. Of minor findings a test makes nothing.
SEARCH = """(only) => {
    const all = axe._audit.rules.filter((rule) => rule.enabled && ["serious", "critical"].includes(rule.impact));
    const runOnly = only.length ? only : all.map((rule) => rule.id);
    return axe.run({exclude: "tbody tr:nth-child(n+13)"}, {runOnly, resultTypes: ["violations"]});
}"""
# What is otherwise in a narrow window and in dark colours; all else is the same document.
OF_LOOKS = ("color-contrast", "link-in-text-block", "scrollable-region-focusable")
PAGES = (
    "/dashboard",
    "/dashboard/tokens?range=30d",
    "/dashboard/latency?range=30d",
    "/dashboard/cost?range=30d",
    "/dashboard?range=1h&refresh=60",
    "/dashboard/alerts",
    "/dashboard/models?range=30d",
    "/dashboard/pools",
    "/dashboard/fleet",
    "/dashboard/requests?range=30d",
    "/dashboard/requests?range=30d&order=slowest",
    "/dashboard/refusals?range=24h",
    "/dashboard/requests/req_refused000",
    "/dashboard/set-aside",
    "/dashboard/batches?range=30d",
    f"/dashboard/batches/batch_{5:024x}",
    "/dashboard/keys",
    "/dashboard/teams/team_default",
    "/dashboard/playground",
    "/dashboard/audit",
    "/dashboard/webhooks",
    "/dashboard/sessions",
    "/dashboard/exports",
)


def test_every_page_is_readable_by_anybody_in_any_window(shaped_visit: Visit, shape: tuple[int, str]) -> None:
    page = shaped_visit.page
    rules = OF_LOOKS if shape[1] == "dark" else ()
    for path in PAGES:
        shaped_visit.go(path)
        expect(page.locator("h1")).to_be_visible()
        if page.locator("[data-chart] script").count():
            expect(page.locator("[data-chart] canvas").first).to_be_visible()
        expect(page.locator("[hx-trigger=load]")).to_have_count(0)
        if "tokens" in path:
            expect(page.locator("svg.heat")).to_be_visible()
        if "latency" in path:
            expect(page.locator("[data-chart] canvas")).to_have_count(4)
        width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1], f"{path} is too wide"
        for details in page.locator("details.numbers").all()[:1]:
            details.locator("summary").click()
        assert faults(shaped_visit, rules) == [], path


def test_a_fault_would_be_found(visit: Visit) -> None:
    visit.go("/dashboard/playground")
    visit.page.evaluate("document.querySelector('main').append(document.createElement('input'))")
    assert any(fault.startswith("label:") for fault in faults(visit))
    visit.page.evaluate("Object.assign(document.querySelector('main h1').style, {color: '#ccc', background: '#ddd'})")
    assert [fault.partition(":")[0] for fault in faults(visit, OF_LOOKS)] == ["color-contrast"]


def faults(visit: Visit, rules: Sequence[str] = ()) -> list[str]:
    """Return what axe-core finds serious or worse. ``rules``: only by these."""
    # By the debugger's way: the page's own policy lets no foreign script in.
    visit.page.evaluate(AXE + "; true")
    found = visit.page.evaluate(SEARCH, rules)
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0]['failureSummary']}"
        for one in found["violations"]
        if one["impact"] in {"serious", "critical"}
    ]


def test_from_a_chart_to_a_request_to_its_waterfall(visit: Visit) -> None:
    page = visit.page
    visit.go("/dashboard?range=7d&model=demo-8b")
    chart = page.locator("[data-chart]", has_text="Requests").first
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.97, box["y"] + 20)
    page.mouse.click(box["x"] + box["width"] * 0.97, box["y"] + 20)
    page.wait_for_url("**/dashboard/requests?**")
    query = parse_qs(urlsplit(page.url).query)
    assert query["model"] == ["demo-8b"]
    assert int(query["until"][0]) - int(query["since"][0]) == 3_600_000
    page.locator("#rows th a").first.click()
    expect(page.locator("svg.waterfall rect").first).to_be_visible()
    assert page.locator("svg.waterfall rect").count() >= 3
    expect(page.locator("dl.facts")).to_contain_text("demo-8b")


def test_tables_are_sorted_and_ready_views_lead_to_extremes(visit: Visit) -> None:
    page = visit.page
    visit.go("/dashboard/requests?range=7d&order=slowest")
    totals = page.locator("#rows tr td:nth-child(10)")
    slowest = totals.first.inner_text()
    page.get_by_role("button", name="Attempts").click()
    expect(page.locator("thead th", has_text="Attempts")).to_have_attribute("aria-sort", "descending")
    attempts = [int(text) for text in page.locator("#rows tr td:nth-child(11)").all_inner_texts()]
    assert attempts == sorted(attempts, reverse=True)
    page.get_by_role("button", name="Total").click()
    assert totals.first.inner_text() == slowest
    page.get_by_role("button", name="Total").click()
    assert totals.last.inner_text() == slowest
    page.get_by_role("link", name="Most attempts").click()
    expect(page.locator("#rows tr td:nth-child(11)").first).to_have_text("3")


def test_the_legend_rests_at_the_latest_and_largest_value_and_moves_nothing(visit: Visit) -> None:
    page = visit.page
    visit.go("/dashboard?range=7d")
    chart = page.locator("[data-chart]", has_text="Requests").first
    expect(chart.locator(".u-legend")).to_contain_text("max")
    box, below = chart.locator(".u-over").bounding_box(), page.locator("h2#groups").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
    expect(chart.locator(".u-legend")).not_to_contain_text("max")
    other = page.locator("[data-chart]", has_text="Tokens").first  # the pointer is at the same time there
    expect(other.locator(".u-legend")).not_to_contain_text("max")
    assert page.locator("h2#groups").bounding_box() == below


def test_estimated_counts_are_marked_as_such(visit: Visit) -> None:
    page = visit.page
    visit.go(f"/dashboard/requests?since={LONG_AGO_UNIX_MS - 1000}&until={LONG_AGO_UNIX_MS + 1000}")
    row = page.locator("#estimated")
    expect(row.locator("abbr[title^=estimated]")).to_have_count(2)
    expect(row).to_contain_text("≈ 1,234")
    row.locator("th a").click()
    expect(page.locator("dl.facts")).to_contain_text("Tokens counted by")
    expect(page.locator("dl.facts")).to_contain_text("estimated")
    expect(page.locator("table.log abbr[title^=estimated]")).to_have_count(1)
    assert faults(visit) == []
    visit.go("/dashboard/requests?range=7d")
    expect(page.locator("#rows th a").first).to_be_visible()
    expect(page.locator("#rows abbr")).to_have_count(0)


def test_a_running_batch_moves_by_itself_and_leads_to_its_requests(visit: Visit, system: System) -> None:
    page = visit.page
    text = "[[tokens=20]] Hello?"
    line = {
        "method": "POST",
        "url": CHAT,
        "body": {"model": "scripted", "messages": [{"role": "user", "content": text}]},
    }
    lines = "\n".join(json.dumps({"custom_id": str(number), **line}) for number in range(4000))
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key=system.api_key) as client:
        file = client.files.create(file=lines.encode(), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        visit.go("/dashboard/batches?range=30d")
        row = page.locator(f"#running tr#{batch.id}")
        expect(row).to_contain_text("of 4,000", timeout=HANGS_S * 1000)  # the page asks again every 5 s
        done = row.locator(".gauge span")
        before = done.inner_text()
        expect(done).not_to_have_text(before, timeout=HANGS_S * 1000)
        assert faults(visit) == []
        row.locator("th a").click()
        expect(page.locator("dl.facts")).to_contain_text("Lines a second")
        expect(page.locator("#files ~ div")).to_contain_text(file.id)
        page.click("text=Requests of this key in this period")
        expect(page.locator("#rows .mark.ok").first).to_be_visible()
        client.batches.cancel(batch.id)
        while client.batches.retrieve(batch.id).status != "cancelled":
            page.wait_for_timeout(LONGEST_POLL_S * 1000)
        visit.go(f"/dashboard/batches/{batch.id}")
        expect(page.locator("h2 .mark", has_text="cancelled")).to_be_visible()
        expect(page.locator("dl.facts")).to_contain_text("Given up")


def test_batches_are_filtered_in_the_url(visit: Visit) -> None:
    page = visit.page
    visit.go("/dashboard/batches?range=30d")
    page.select_option("select[name=endpoint]", "embeddings")
    page.wait_for_url("**endpoint=embeddings**")
    rows = page.locator("tbody tr[id^=batch_]")
    expect(rows.first).to_contain_text("embeddings")
    assert page.locator("tbody tr[id^=batch_]", has_text="chat.completions").count() == 0
    rows.first.locator("th a").click()
    expect(page.locator("h2 code").first).to_contain_text("batch_")
    page.click("text=All batches")
    page.wait_for_url("**endpoint=embeddings**")


def test_filters_live_in_the_url(visit: Visit) -> None:
    page = visit.page
    visit.go("/dashboard/requests?range=30d")
    page.select_option("select[name=outcome]", "failed")
    page.wait_for_url("**outcome=failed**")
    page.wait_for_load_state()
    assert "range=30d" in page.url
    marks = page.locator("#rows .mark")
    assert marks.count() > 5
    assert page.locator("#rows .mark.ok").count() == 0
    page.click("text=Clear")
    page.wait_for_url(re.compile(r"requests\?range=30d$"))
    before = page.locator("#rows tr").count()
    page.click("text=Show older")
    expect(page.locator("#rows tr")).to_have_count(before + 50)
    page.click("nav >> text=Latency")
    page.wait_for_url("**/dashboard/latency?range=30d")


def test_pages_can_be_used_with_the_keyboard_alone(visit: Visit) -> None:
    page = visit.page
    visit.go("/dashboard")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.locator("summary", has_text="Custom").focus()
    page.keyboard.press("Enter")
    expect(page.locator("[name=since]")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("[name=since]")).to_be_hidden()
    assert page.evaluate("document.activeElement.textContent").startswith("Custom")


def test_colours_and_time_zone_are_remembered(visit: Visit) -> None:
    page = visit.page
    visit.go("/dashboard")
    ground = "getComputedStyle(document.body).color"
    light = page.evaluate(ground)
    page.click("#theme")
    assert page.evaluate(ground) != light
    visit.go("/dashboard/cost")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.click("text=Time zone")
    page.fill("[name=zone]", "America/New_York")
    page.click("text=Change")
    page.wait_for_url("**/dashboard/cost")
    expect(page.locator("#zone-name")).to_have_text("America/New_York")


def test_dollars_are_stacked_by_team_beside_the_cost_of_machines(visit: Visit) -> None:
    page = visit.page
    visit.go("/dashboard/cost?range=30d&by=team")
    chart = page.locator("[data-chart]").first
    expect(chart.locator("canvas")).to_be_visible()
    tops, own = page.evaluate("""() => {
        const {data, series} = document.querySelector("[data-chart]").chart;
        const index = data[1].indexOf(Math.max(...data[1]));  // a day of which all is shown
        const numbers = series.map((_, number) => number).slice(1, -1);  // without the times, and without the machines
        const text = (number) => series[number].value(null, data[number][index], number, index);
        return [numbers.map((number) => data[number][index]), numbers.map((number) => Number(text(number).slice(1)))];
    }""")
    assert sum(amount > 0 for amount in own) >= 2
    # Each bar stands on those after it; texts are rounded to tenths of a dollar.
    assert tops == [pytest.approx(sum(own[number:]), abs=0.06 * len(own)) for number in range(len(own))]
    expect(chart).to_contain_text("cost of machines")
    charges = [
        int(text or "")
        for text in page.locator("section[aria-labelledby=charged] data").evaluate_all(
            "all => all.map(one => one.value)"
        )
    ]
    assert sum(charges[:-1]) == charges[-1] > 0
    expect(page.locator("section[aria-labelledby=charged]")).to_contain_text("+ no price")
    month = page.locator(".ranges a", has_text=re.compile(r"^\s*\d{4}-\d\d\s*$")).first
    name = month.inner_text().strip()
    month.click()
    page.wait_for_url(re.compile(rf"/dashboard/cost\?.*\bmonth={name}\b"))
    expect(page.locator(".ranges a[aria-current]")).to_have_text(name)
    with page.expect_download() as download:
        page.click("text=CSV by team, key and model")
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    shown = page.locator("section[aria-labelledby=charged] tfoot data").get_attribute("value")
    assert sum(int(row["charge_nano_usd"]) for row in rows) == int(shown or "")


def test_a_tag_leads_from_its_cost_to_its_requests_and_from_one_of_them_to_the_others(visit: Visit) -> None:
    page = visit.page
    visit.go("/dashboard/cost?range=7d")
    page.locator("section[aria-labelledby=tags] a", has_text="env=staging").click()
    page.wait_for_url("**/dashboard/requests?*tag=env%3Astaging*")
    expect(page.locator("[name=tag]")).to_have_value("env:staging")
    page.locator("#rows th a").first.click()
    page.locator("dl.facts a", has_text="env=staging").click()
    page.wait_for_url("**/dashboard/requests?*tag=env%3Astaging*")
    page.fill("[name=tag]", "env:none such")
    page.press("[name=tag]", "Enter")
    expect(page.locator("#rows")).to_contain_text("No requests in this period match these filters.")
    page.click("text=Clear")
    expect(page.locator("#rows th a").first).to_be_visible()


def test_charts_of_a_page_have_the_same_steps_and_lost_machines_are_marked(visit: Visit) -> None:
    page = visit.page
    visit.go("/dashboard?range=24h")
    expect(page.locator("[data-chart] canvas")).to_have_count(6)
    steps = page.evaluate("[...document.querySelectorAll('[data-chart]')].map((one) => one.chart.data[0].join())")
    assert len(set(steps)) == 1
    marks = page.locator("[data-chart]", has_text="Failovers").locator("a.marks")
    expect(marks).to_contain_text("machines lost")
    marks.click()
    page.wait_for_url("**/dashboard/fleet?range=24h")


def test_fields_of_a_form_stand_on_one_line(visit: Visit) -> None:
    page = visit.page
    page.set_viewport_size({"width": 1440, "height": 900})
    visit.go("/dashboard/keys")
    for name, rows in (("New key", 2), ("New team", 1)):
        page.locator("summary", has_text=name).click()
        form = page.locator("details.create", has_text=name)
        tops = form.locator("form > .fields").evaluate_all(
            "rows => rows.map((row) => new Set([...row.children].map((one) => one.offsetTop)).size)"
        )
        assert tops == [1] * rows


def test_the_playground_streams_and_its_request_appears_in_the_live_tail(visit: Visit, system: System) -> None:
    page = visit.page
    visit.go("/dashboard/playground")
    page.fill("#message", "[[tokens=20]] It's me?")
    page.click("text=Show the request as code")
    expect(page.locator("#as-curl")).to_contain_text("It'\\''s me?")
    expect(page.locator("#as-curl")).to_contain_text(f"curl {system.base_url}/v1/chat/completions")
    expect(page.locator("#as-python")).to_contain_text("messages=[{")
    page.focus("#message")
    page.keyboard.press("Enter")
    figures = page.locator("li.assistant .figures")
    expect(figures).to_contain_text("20 tokens ·")
    expect(figures).to_contain_text("TTFT")
    expect(figures).to_contain_text("tokens/s")
    assert len(page.locator("li.assistant span").inner_text().split()) >= 10
    href = page.get_attribute("li.assistant a", "href")
    assert href is not None
    visit.go("/dashboard/requests?live=1&model=scripted")
    # The ledger's writer stores it within a moment, and the page asks again by itself.
    expect(page.locator(f"#rows a[href='{href}']")).to_be_visible(timeout=HANGS_S * 1000)


def test_live_numbers_and_workers_of_this_moment(visit: Visit) -> None:
    page = visit.page
    visit.go("/dashboard")
    expect(page.locator("[data-live=requests_per_s]")).not_to_have_text("–")
    visit.go("/dashboard/pools")
    expect(page.locator("#workers")).to_be_visible()
    with page.expect_response("**/dashboard/pools/now"):
        pass


@pytest.mark.parametrize("wanted", ["csv"])
def test_an_export_is_downloaded(visit: Visit, wanted: str) -> None:
    page = visit.page
    visit.go("/dashboard/exports?range=30d&outcome=failed")
    page.select_option("select[name=format]", wanted)
    with page.expect_download() as download:
        page.click("button:has-text('Export')")
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert len(rows) > 10
    assert {row["outcome"] for row in rows} == {"failed"}


def test_a_key_made_here_opens_the_api(visit: Visit, system: System) -> None:
    page = visit.page
    visit.go("/dashboard/keys")
    page.click("text=New key")
    page.fill("[name=name]", "made in a browser")
    page.click("text=Create the key")
    token = page.locator("#token").inner_text()
    with system.http() as http:
        answer = http.get("/v1/models", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 200
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("[aria-label='Revoke made in a browser']")
    expect(page.locator("tr", has_text="made in a browser").locator(".mark")).to_have_text("revoked")


def test_a_team_and_its_key_are_limited_with_the_keyboard_and_the_page_shows_what_is_left(
    shaped_visit: Visit, system: System, shape: tuple[int, str]
) -> None:
    page, name = shaped_visit.page, f"limited at {shape[0]}"
    shaped_visit.go("/dashboard/keys")
    page.locator("summary", has_text="New team").press("Enter")
    team = page.locator("form[action='/dashboard/teams']")
    team.get_by_label("Name").fill(name)
    team.get_by_label("Budget in USD").fill("12.50")
    team.get_by_label("Name").press("Enter")
    expect(page.get_by_role("status")).to_have_text(re.compile(f"^{name} was saved"))
    expect(page.locator("tr", has_text=name)).to_contain_text("$0.00 of $12.50 a month")
    page.locator("summary", has_text="New key").press("Enter")
    key = page.locator("form[action='/dashboard/keys']")
    key.get_by_label("Name").fill(name)
    key.locator("select[name=team]").select_option(label=name)
    key.get_by_label("Requests a minute").fill("0")
    key.get_by_label("Name").press("Enter")
    wrong = page.get_by_label("Requests a minute").first
    expect(wrong).to_be_focused()
    expect(wrong).to_have_accessible_description("requests_per_minute: must be positive")
    assert faults(shaped_visit) == []
    wrong.fill("4")
    wrong.press("Enter")
    headers = {"Authorization": f"Bearer {page.locator('#token').inner_text()}"}
    with system.http() as http:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "[[tokens=2]] Hi"}], "max_tokens": 8}
        assert http.post("/v1/chat/completions", headers=headers, json=body).status_code == 200
    page.get_by_label(f"Change {name}", exact=True).click()
    use = page.locator("section", has_text="Limits of this key")
    while "1 of 4 requests a minute" not in page.request.get(page.url).text():  # the gateway reports within a second
        page.wait_for_timeout(LONGEST_POLL_S * 1000)
    page.reload()
    expect(use).to_contain_text("1 of 4 requests a minute")
    expect(use).to_contain_text("3 left")
    assert faults(shaped_visit) == []
    page.get_by_label("Tokens a minute").fill("5000")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("tr", has_text=name).filter(has_text="of 5,000 tokens a minute")).to_be_visible()
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1]
