"""Training sets hold what their callers agreed to, once, whole, and in the same part with every continuation."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.audit import AuditFilter, list_changes
from db.accounts.keys import Grant, create_key
from db.accounts.principal import Policy
from db.engine import create_engine
from db.tables import ApiKeyRow, TeamRow
from ledger.payloads.errors import ExportError, PayloadKeyMissing
from ledger.payloads.sealing import Sealer
from ledger.payloads.store import store_payloads
from ledger.store import store_records
from ledger.training.export import Exporter, ExportPlan
from ledger.training.rows import ExportFilter
from tests.payload_records import payload_record
from tests.usage_records import request_record

UNTIL = 2_000_000_000_000
SYSTEM = {"role": "system", "content": "Be brief."}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def choice(message: dict[str, Any] | str, finish_reason: str = "stop", index: int = 0) -> dict[str, Any]:
    message = {**says(message), "refusal": None} if isinstance(message, str) else message
    return {"index": index, "message": message, "finish_reason": finish_reason}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Kept:
    """A database with payloads, and exports of them."""

    def __init__(self, engine: AsyncEngine, key_id: str, folder: Path) -> None:
        self.engine = engine
        self.key_id = key_id
        self._folder = folder
        self._count = 0

    async def keep(
        self,
        messages: list[dict[str, Any]],
        *choices: dict[str, Any] | str,
        usage: dict[str, Any] | None = None,
        **rest: Any,
    ) -> str:
        self._count += 1
        request_id: str = rest.pop("request_id", f"req {self._count:03}")
        tools = rest.pop("tools", None)
        request: dict[str, Any] = {"model": "demo", "messages": messages} | ({"tools": tools} if tools else {})
        request = rest.pop("request", request)
        answer = {"choices": [choice(one) if isinstance(one, str) else one for one in choices]}
        fields = {"key_id": self.key_id, "received_unix_ms": 1_800_000_000_000 + self._count, **rest}
        await store_payloads(self.engine, [payload_record(request_id, request=request, answer=answer, **fields)])
        if usage != {}:
            await store_records(self.engine, [request_record(request_id, **(usage or {}))])
        return request_id

    async def export(self, name: str = "out", **plan: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The manifest, and the examples for training."""
        wanted = ExportFilter(UNTIL, **plan.pop("wanted", {}))
        plan = {"shares": (1.0,), **plan}
        sealer = plan.pop("sealer", Sealer())
        out = self._folder / name
        manifest = await Exporter(self.engine, sealer, ExportPlan(wanted, **plan), "1").write(out, lambda *_: None)
        assert json.loads((out / "manifest.json").read_text()) == manifest
        assert sorted(path.name for path in out.iterdir()) == sorted(["manifest.json", *manifest["files"]])
        lines = (out / "train.jsonl").read_text().splitlines()
        return manifest, [json.loads(line) for line in lines]

    async def left_out(self, **plan: Any) -> dict[str, int]:
        manifest, examples = await self.export(**plan)
        left_out: dict[str, int] = manifest["left_out"]
        assert manifest["rows_read"] == len(examples) + sum(left_out.values())
        return left_out


@pytest.fixture
async def kept(database_url: str, tmp_path: Path) -> AsyncIterator[Kept]:
    engine = create_engine(database_url)
    key, _ = await create_key(engine, "a", SecretStr("p" * 64), Grant(policy=Policy(log_payload=True, train_ok=True)))
    yield Kept(engine, key.key_id, tmp_path)
    await engine.dispose()


async def test_an_export_is_in_the_audit_log(kept: Kept) -> None:
    await kept.keep([user("Hi")], "Hello!")
    await kept.export(actor="cli:ann", wanted={"model": "demo"})
    (entry,) = [one for one in await list_changes(kept.engine, AuditFilter(), 10) if one.action == "payloads.export"]
    assert (entry.actor, entry.after) == ("cli:ann", {"rows": 1, "until_unix_ms": UNTIL, "model": "demo"})


async def test_both_formats_as_they_are_documented(kept: Kept) -> None:
    await kept.keep([{"role": "developer", "content": "Be brief."}, user("Hi")], "Hello!")
    asked = [SYSTEM, user("Rain in Köln?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    told = {"role": "tool", "tool_call_id": "call_1", "content": "dry"}
    reasoned = {**says("No."), "refusal": None, "reasoning": "dry is no rain", "reasoning_content": "dry is no rain"}
    await kept.keep([*asked, told], choice(reasoned), tools=[WEATHER])
    await kept.keep(
        [user("And Bonn?")], choice({**says(""), "content": None, "tool_calls": [CALL]}, "tool_calls"), tools=[WEATHER]
    )
    _, openai = await kept.export("openai")
    called = {"role": "assistant", "tool_calls": [CALL]}
    assert openai == [
        {"messages": [SYSTEM, user("Hi"), says("Hello!")]},
        {"messages": [SYSTEM, user("Rain in Köln?"), called, told, says("No.")], "tools": [WEATHER]},
        {"messages": [user("And Bonn?"), called], "tools": [WEATHER]},
    ]
    _, sharegpt = await kept.export("sharegpt", format="sharegpt")
    turn = '{"name": "weather", "arguments": {"city": "Köln"}}'
    tools = '[{"name": "weather", "parameters": {"type": "object"}}]'
    assert sharegpt == [
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Hello!"},
            ]
        },
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Rain in Köln?"},
                {"from": "function_call", "value": turn},
                {"from": "observation", "value": "dry"},
                {"from": "gpt", "value": "No."},
            ],
            "tools": tools,
        },
        {
            "conversations": [{"from": "human", "value": "And Bonn?"}, {"from": "function_call", "value": turn}],
            "tools": tools,
        },
    ]


async def test_only_what_was_agreed_to_then_and_now(kept: Kept) -> None:
    await kept.keep([user("1")], "one")
    await kept.keep([user("2")], "two", train_ok=False)
    await kept.keep([user("gone")], "gone", expires_unix_ms=1_800_000_000_000 - 10**11)
    assert await kept.left_out(name="agreed") == {"no_consent": 1}
    async with kept.engine.begin() as connection:
        await connection.execute(update(ApiKeyRow).values(train_ok=False))
    assert await kept.left_out(name="revoked by the key") == {"consent_revoked": 1, "no_consent": 1}
    async with kept.engine.begin() as connection:
        await connection.execute(update(ApiKeyRow).values(train_ok=None))
        await connection.execute(update(TeamRow).values(train_ok=True))
    assert await kept.left_out(name="the team agrees") == {"no_consent": 1}
    async with kept.engine.begin() as connection:
        await connection.execute(update(TeamRow).values(train_ok=None))
    assert await kept.left_out(name="nobody agrees") == {"consent_revoked": 1, "no_consent": 1}
    await kept.keep([user("3")], "three", key_id="key_gone")
    assert (await kept.left_out(name="unknown key"))["consent_revoked"] == 2


async def test_what_did_not_go_well_is_left_out(kept: Kept) -> None:
    await kept.keep([user("1")], "fine")
    await kept.keep([user("2")], choice("cut", "length"))
    await kept.keep([user("3")], "failed", usage={"outcome": "failed"})
    await kept.keep([user("4")], "left", usage={"outcome": "cancelled"})
    await kept.keep([user("5")], "rescued", usage={"attempts": 2})
    await kept.keep([user("6")], "unknown", usage={})
    await kept.keep([user("7")], "large", dropped=True)
    await kept.keep([], {"index": 0, "text": "x", "finish_reason": "stop"}, request={"prompt": "Once"})
    await kept.keep([user("9"), says("begun")], "ended")
    await kept.keep([user("10")], "  ")
    await kept.keep([user("11"), {"role": "tool", "tool_call_id": "c", "content": "x"}], "y")
    await kept.keep([user("12"), {"role": "assistant", "tool_calls": [CALL]}, user("!")], "y", tools=[WEATHER])
    await kept.keep([user("13")], choice({**says(""), "tool_calls": [CALL]}, "tool_calls"))
    broken = {**CALL, "function": {"name": "weather", "arguments": '{"city'}}
    await kept.keep([user("14")], choice({**says(""), "tool_calls": [broken]}, "tool_calls"), tools=[WEATHER])
    endless = {**CALL, "function": {"name": "weather", "arguments": "[" * 100_000}}
    await kept.keep([user("14b")], choice({**says(""), "tool_calls": [endless]}, "tool_calls"), tools=[WEATHER])
    await kept.keep([user("15")], choice("cut", "length"), choice("whole", index=1))
    expected = {
        "truncated": 1,
        "failed": 2,
        "failed_over": 1,
        "no_usage_record": 1,
        "too_large_to_keep": 1,
        "not_a_chat": 1,
        "goes_on_with_an_answer": 1,
        "empty_message": 1,
        "answer_without_call": 1,
        "call_without_answer": 1,
        "unknown_tool": 1,
        "arguments_not_json": 2,
    }
    manifest, examples = await kept.export()
    assert manifest["left_out"] == expected
    assert [example["messages"][-1]["content"] for example in examples] == ["fine", "whole"]
    manifest, examples = await kept.export("with failovers", keep_failovers=True)
    assert [example["messages"][-1]["content"] for example in examples] == ["fine", "rescued", "whole"]


async def test_the_longest_of_each_conversation_once(kept: Kept) -> None:
    first, second = [SYSTEM, user("Hi")], [SYSTEM, user("Hi"), says("Hello!"), user("Bye")]
    await kept.keep(first, "Hello!")
    await kept.keep(second, "Good bye.", choice("See you.", index=1))
    await kept.keep([*second, says("See  you."), user("Wait")], "Yes?")  # went on with the other choice
    await kept.keep([SYSTEM, user(" hi ")], "Something else")  # the same prompt; its answer led nowhere
    await kept.keep([user("Hi")], "Hello!")  # without the system's word it is another
    await kept.keep([user("Hi")], "Hello again!")
    manifest, examples = await kept.export()
    assert manifest["left_out"] == {"continued": 2, "duplicate": 1}
    assert [example["messages"][-1]["content"] for example in examples] == ["Yes?", "Something else", "Hello!"]
    _, examples = await kept.export("long ones", min_turns=3)
    assert len(examples) == 1


async def test_a_shorter_conversation_stays_if_the_longer_one_does_not(kept: Kept) -> None:
    await kept.keep([user("Hi")], "Hello!")
    await kept.keep([user("Hi"), says("Hello!"), user("Tell me more")], choice("It was", "length"))
    _, examples = await kept.export()
    assert [len(example["messages"]) for example in examples] == [2]


async def test_filters_in_pages(kept: Kept) -> None:
    for number in range(7):
        fields: dict[str, Any] = {"model": f"m{number % 2}", "team_id": f"t{number // 4}"}
        fields["received_unix_ms"] = 1000 + number // 2
        await kept.keep([user(str(number))], "x", **fields)

    async def asked(**wanted: Any) -> str:
        _, examples = await kept.export(json.dumps(wanted), wanted=wanted, page_rows=2)
        return "".join(example["messages"][0]["content"] for example in examples)

    assert await asked() == "0123456"
    assert await asked(model="m1") == "135"
    assert await asked(team_id="t1", model="m0") == "46"
    assert await asked(since_unix_ms=1002) == "456"
    assert await asked(key_id="key_other") == ""


async def test_the_same_rows_make_the_same_files(kept: Kept) -> None:
    for number in range(30):
        await kept.keep([user(f"question {number}")], f"answer {number}")
    shares = (0.6, 0.3, 0.1)
    first, _ = await kept.export("first", shares=shares)
    second, _ = await kept.export("second", shares=shares)
    assert first["files"] == second["files"]
    for name, file in first["files"].items():
        data = (kept._folder / "first" / name).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert file["examples"] == len(data.splitlines())
    other, _ = await kept.export("other", shares=shares, seed=1)
    assert other["files"] != first["files"]
    assert sum(file["examples"] for file in other["files"].values()) == 30


async def test_nothing_is_overwritten_and_nothing_is_left_of_a_failure(kept: Kept, tmp_path: Path) -> None:
    await kept.keep([user("Hi")], "Hello!", sealer=Sealer([b"k" * 32]))
    before = names(tmp_path)
    with pytest.raises(PayloadKeyMissing):
        await kept.export()
    assert names(tmp_path) == before
    await kept.export(sealer=Sealer([b"k" * 32]))
    written = (tmp_path / "out" / "train.jsonl").read_bytes()
    with pytest.raises(ExportError, match="overwritten"):
        await kept.export()
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == written
    with pytest.raises(ExportError, match="that sum to 1"):
        await kept.export("bad", shares=(0.5, 0.4))


async def test_sharegpt_says_what_it_cannot(kept: Kept) -> None:
    both = {**says("Let me see."), "tool_calls": [CALL]}
    await kept.keep([user("1")], choice(both, "tool_calls"), tools=[WEATHER])
    await kept.keep([says("Welcome"), user("2")], "x")
    await kept.keep([user("3"), SYSTEM, user("now")], "x")
    await kept.keep([SYSTEM, SYSTEM, user("4"), user("now")], "x")
    manifest, examples = await kept.export(format="sharegpt")
    assert manifest["left_out"] == {"system_in_the_middle": 1, "text_beside_calls": 1, "turns_do_not_alternate": 1}
    [example] = examples
    assert [turn["value"] for turn in example["conversations"]] == ["Be brief.\n\nBe brief.", "4\n\nnow", "x"]
