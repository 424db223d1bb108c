"""The invariants of a simulation: of each answer, the ledger, limits at all times, and the final state."""

import json
from typing import TYPE_CHECKING, Any

from protocol import subjects
from protocol.errors import ErrorCode
from tests.simulation.callers import Caller
from tests.simulation.parts import PRICE, Gateway, PoolWorker
from tests.simulation.virtual_time import EPOCH_S
from tests.simulation.world import World

if TYPE_CHECKING:
    from gateway.dispatch.lifecycle import OpenRequest
    from tests.simulation.plan import Plan
    from tests.simulation.sql import Database

DEADLINE_SLACK_S = 0.5
SPOOL_LIMIT_S = 4.0  # a complete answer may be held this long until its row is sure, beyond any deadline
WINDOW_S = 60.0
# Errors that no client should ever get under any fault.
WRONG_CODES = {ErrorCode.INTERNAL_ERROR, "None"}


class Admitted:
    """An admitted request."""

    def __init__(self, gateway: Gateway, request: "OpenRequest", at_s: float) -> None:
        self.gateway_id = gateway.id
        self.number = int.from_bytes(request.admission.prompt.token_ids[:4], "little")
        self.request = request
        self.at_s = at_s
        self.is_presumed_dead = False  # its gateway's lease expired: others may use its amounts


class Oracle:
    """Observes one simulation, and judges it at its end."""

    def __init__(self, world: World, plan: "Plan", database: "Database") -> None:
        self.world = world
        self.plan = plan
        self.database = database
        self.gateways: list[Gateway] = []
        self.workers: list[PoolWorker] = []
        self.callers: list[Caller] = []
        self.admitted: dict[str, Admitted] = {}
        self.frozen_s = 0.0  # total time that gateways were frozen
        self.lost_gateways: set[str] = set()  # ids of gateway processes that crashed
        self.lost_workers: set[str] = set()

    # --- limits, at every moment --------------------------------------------------------------------------------------

    def on_open(self, gateway: Gateway, request: "OpenRequest") -> None:
        self.world.log("open", request.request_id, gateway.id)
        self.admitted[request.request_id] = one = Admitted(gateway, request, self.world.now_s)
        self.look_at_leases()
        self._check_places(request.admission.principal.key_id)
        self._check_rate(request.admission.principal.key_id, one)

    def look_at_leases(self) -> None:
        """Note expired leases: their requests no longer count as concurrent (docs/reference/limits.md)."""
        for gateway in self.gateways:
            if gateway.quotas is None:
                continue
            for key, book in gateway.quotas._local_accounts.items():
                if book.slice.expires_s < EPOCH_S + self.world.loop.now_s + self.world.server.skew_s:
                    for one in self.admitted.values():
                        if one.gateway_id == gateway.id and one.request.admission.principal.key_id == key:
                            one.is_presumed_dead = True

    def _check_places(self, key: str) -> None:
        limit = self.plan.policies[key].max_concurrent
        if limit is None:
            return
        alive = {gateway.id for gateway in self.gateways if gateway.is_alive}
        running = [
            one.number
            for one in self.admitted.values()
            if one.request.admission.principal.key_id == key
            and one.gateway_id in alive
            and not one.is_presumed_dead
            and one.request.ticket._is_open
        ]
        if len(running) > limit:
            self.world.offend(f"max_concurrent {limit} is exceeded: {len(running)} at once")

    def _check_rate(self, key: str, newest: Admitted) -> None:
        limit = self.plan.policies[key].requests_per_minute
        if limit is None:
            return
        recent = [
            one
            for one in self.admitted.values()
            if one.request.admission.principal.key_id == key and one.at_s > newest.at_s - WINDOW_S
        ]
        if len(recent) > limit:
            self.world.offend(f"requests_per_minute {limit} is exceeded: {len(recent)} within a minute")

    # --- until everything has settled ---------------------------------------------------------------------------------

    def unsettled(self) -> list[str]:
        """Return the deviations from the required final state; they may still resolve."""
        return [*self._wrong_rows(), *self._left_over()]

    def _rows(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for row in self.database.rows("SELECT * FROM requests"):
            found.setdefault(row["request_id"], []).append(row)
        return found

    def _wrong_rows(self) -> list[str]:
        rows = self._rows()
        wrong = [
            f"a row of {request_id}, which no client sent" for request_id in rows if request_id not in self.admitted
        ]
        callers = {caller.question.number: caller for caller in self.callers}
        for request_id, one in self.admitted.items():
            found, caller = rows.get(request_id, []), callers[one.number]
            if len(found) > 1:
                wrong.append(f"{len(found)} rows of request {one.number}")
            elif found:
                wrong += self._wrong_counts(caller, found[0])
            elif self._was_accepted(caller) or one.gateway_id not in self.lost_gateways:
                what = "accepted" if self._was_accepted(caller) else "admitted"
                wrong.append(f"no row of request {one.number}, which was {what}")
        return wrong

    @staticmethod
    def _was_accepted(caller: Caller) -> bool:
        return 200 <= caller.status < 300

    def _wrong_counts(self, caller: Caller, row: dict[str, Any]) -> list[str]:
        question, tokens = caller.question, row["completion_tokens"]
        where = f"the row of request {question.number}"
        if row["prompt_tokens"] != question.prompt_tokens:
            return [f"{where} has {row['prompt_tokens']} prompt tokens instead of {question.prompt_tokens}"]
        is_guess = row["error_code"] == ErrorCode.GATEWAY_LOST and self.lost_workers
        if is_guess:  # the exact counts died with their process: only earlier reports are left
            pass
        elif self.is_answered(caller):
            whole = question.answer_tokens * question.choices
            # If a gateway dies with a record in memory, its answer counts as interrupted.
            outcome = "failed" if row["error_code"] == ErrorCode.GATEWAY_LOST else "ok"
            if row["outcome"] != outcome or tokens != whole:
                return [f"{where} says {row['outcome']} with {tokens} tokens of a complete answer of {whole}"]
        elif tokens < (had := _tokens(caller)):
            return [f"{where} has {tokens} tokens, fewer than the {had} that the client had"]
        if tokens > (made := self.world.made.of(question.number)):
            return [f"{where} has {tokens} tokens, more than the {made} that were generated"]
        return []

    def _left_over(self) -> list[str]:
        left = []
        queue = self.world.server.jetstream.streams.get(subjects.INTERACTIVE_STREAM)
        if queue is None or queue.messages:
            left.append("the queue is not empty" if queue else "there is no queue")
        for gateway in self.gateways:
            if gateway.application is None or gateway.dispatcher is None or gateway.quotas is None:
                left.append(f"{gateway.name} does not serve")
                continue
            if gateway.dispatcher.in_flight or gateway.dispatcher._open or gateway.dispatcher._by_worker:
                left.append(f"{gateway.id} still holds requests")
            if gateway.admission_control is not None and gateway.admission_control._tenants:
                left.append(f"{gateway.id} still counts tenants' requests")
            if gateway.outbox is not None and (gateway.outbox or gateway.outbox.is_behind):
                left.append(f"{gateway.id} still holds records")
            busy = [book.account_id for book in gateway.quotas._local_accounts.values() if any(book.slice.busy)]
            if busy:
                left.append(f"{gateway.id} still holds places of {', '.join(busy)}")
        engines = {worker.id: worker.engine for worker in self.workers if worker.engine is not None}
        left += [f"{id_} still runs something" for id_, engine in engines.items() if engine.running or engine._waiting]
        return left

    # --- at the end ---------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Report violations of the final state."""
        for problem in self.unsettled():
            self.world.offend(problem)
        for caller in self.callers:
            for problem in self._wrong_answer(caller):
                self.world.offend(f"request {caller.question.number}: {problem}")
        self._judge_money()
        for complaint in (*self.world.loop.complaints, *self.world.loop.unheard_errors()):
            self.world.complain(complaint)

    @staticmethod
    def is_answered(caller: Caller) -> bool:
        """Return whether the client has a complete answer by the rules of HTTP."""
        if not caller.is_complete or caller.status != 200:
            return False
        return not caller.question.streams or caller.body.endswith(b"data: [DONE]\n\n")

    def _wrong_answer(self, caller: Caller) -> list[str]:
        question = caller.question
        if caller.ended_s is None:
            return ["it hangs"]
        wrong = []
        if question.deadline_ms is not None and caller.asked_s is not None:
            late_s = caller.ended_s - caller.asked_s - question.deadline_ms / 1000
            if late_s > self.frozen_s + (SPOOL_LIMIT_S if self.is_answered(caller) else DEADLINE_SLACK_S):
                wrong.append(f"it ended {late_s:.1f} s after its deadline")
        expected = [question.text(index) for index in range(question.choices)]
        for text, whole in zip(caller.texts(), expected, strict=True):
            if not whole.startswith(text):
                wrong.append(f"the answer {text!r} is not the beginning of {whole!r}")
        if self.is_answered(caller):
            if caller.texts() != expected:
                wrong.append("a complete answer lacks tokens")
            wrong += _wrong_usage(caller)
        elif not (caller.has_left or caller.was_cut_off):
            code = caller.error_code()
            if caller.asked_s is not None and (code is None or code in WRONG_CODES):
                wrong.append(f"it ended without an answer or a reason: status {caller.status}, code {code}")
        return wrong

    def _judge_money(self) -> None:
        for key, policy in self.plan.policies.items():
            if policy.budget_nano_usd is None:
                continue
            statement = "SELECT prompt_tokens, cached_tokens, completion_tokens, pool FROM requests WHERE key_id = ?"
            spent = sum(
                PRICE.charge_nano_usd(row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"])
                for row in self.database.rows(statement, key)
                if row["pool"] is not None
            )
            if spent > policy.budget_nano_usd:
                self.world.offend(f"a budget of {policy.budget_nano_usd} nano-USD is exceeded: {spent} are spent")


def _tokens(caller: Caller) -> int:
    return sum(text.count(" ") for text in caller.texts())


def _wrong_usage(caller: Caller) -> list[str]:
    question = caller.question
    if question.streams:
        usages = [event["usage"] for event in caller.events() if event != b"[DONE]" and event.get("usage")]
        usage = usages[-1] if usages else None
    else:
        usage = json.loads(caller.body)["usage"]
    whole = question.answer_tokens * question.choices
    if usage is None or (usage["prompt_tokens"], usage["completion_tokens"]) != (question.prompt_tokens, whole):
        return [f"its usage is {usage}"]
    return []
