"""``examples/five-teams``, as its README says."""

import re
from collections.abc import Callable

import httpx

from tests.acceptance.examples.conftest import Example, serve_by_a_script
from tests.acceptance.examples.terminal import STARTED
from tests.waiting import HANGS_S

TEAMS = ("search", "support", "research", "nightly", "interns")


def test_each_team_has_a_bill_and_one_budget_bites(example: Callable[[str], Example]) -> None:
    teams = example("five-teams")
    serve_by_a_script(teams.folder / "spillway.toml")
    with teams.terminal("first") as first, teams.terminal("second") as second:
        first.type(teams.page.script("Five teams", 0, {}))
        first.wait_for(STARTED)
        printed = second.run(teams.page.script("Five teams", 1, {}))
        answers = re.findall(r"^(\w+): (\d{3}) (.*)$", printed, re.MULTILINE)
        assert [answer for answer in answers if answer[1] != "200"] == [("interns", "429", answers[1][2])]
        assert re.search(r"the team's .*budget", answers[1][2])
        assert sorted(team for team, *_ in answers) == sorted(2 * TEAMS)
        teams.system.wait_for_requests(9)
        bill = {row["team_name"]: row for row in teams.system.usage("team")}
        assert {name: row["requests"] for name, row in bill.items()} == {**dict.fromkeys(TEAMS, 2), "interns": 1}
        assert all(row["charge_nano_usd"] > 0 for row in bill.values())
        look_at_the_dashboard(teams, first.output())
        first.press_ctrl_c()


def look_at_the_dashboard(teams: Example, printed: str) -> None:
    """Log in with the printed password, and find each team on both pages that the README names."""
    found = re.search(r"Login +admin +(\w+) +\(shown only once\)", printed)
    assert found is not None
    with httpx.Client(base_url=teams.system.base_url, timeout=HANGS_S) as browser:
        assert browser.post("/login", data={"name": "admin", "password": found[1]}).status_code == 303
        for path in ("/dashboard/keys", "/dashboard/cost?by=team"):
            page = browser.get(path)
            assert page.status_code == 200, path
            assert [team for team in TEAMS if team not in page.text] == [], path
