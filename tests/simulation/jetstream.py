"""The simulated server's JetStream: streams, durable pull consumers and the API calls that the product uses.

From nats-server 2.15: work-queue and limits retention, "discard new" and maximum bytes, the duplicate window, message
TTL, compare-and-set by a subject's last sequence, roll-ups, prioritized pulls, redelivery after ``ack_wait``. Memory
streams end with the server. File streams are synced before every acknowledgement, as shipped: a power failure loses
only unacknowledged messages.
"""

import base64
import datetime as dt
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tests.simulation.network import Connection, Message
from tests.simulation.virtual_time import EPOCH_S

if TYPE_CHECKING:
    from tests.simulation.server import QueueServer
from tests.simulation.streams import (
    CONSUMER_NOT_FOUND,
    INSUFFICIENT_RESOURCES,
    MAXIMUM_MESSAGES,
    NO_MESSAGE_FOUND,
    NS,
    SEQUENCE_NOT_FOUND,
    STREAM_NAME_IN_USE,
    STREAM_NOT_FOUND,
    WRITE_S,
    WRONG_LAST_SEQUENCE,
    ApiFailure,
    Delivered,
    DurableConsumer,
    Pull,
    Stored,
    Stream,
    decode,
    encode,
)


class JetStream:
    def __init__(self, server: "QueueServer") -> None:
        self._server = server
        self._world = server.world
        self.streams: dict[str, Stream] = {}
        self._prefixes: dict[str, Stream] = {}  # first tokens of subjects → stream
        self.is_full = False  # the disk
        self.is_broken = False  # it was full: nothing is stored until a restart

    def restarted(self) -> None:
        """Lose memory streams and all pulls; redeliver messages that were delivered but not acknowledged."""
        self.streams = {name: stream for name, stream in self.streams.items() if stream.is_file}
        self._find_prefixes()
        self.is_broken = False
        for stream in self.streams.values():
            stream.busy_until_s = 0.0
            for consumer in stream.consumers.values():
                consumer.pulls.clear()
                for sequence, entry in consumer.unanswered.items():
                    entry.timer = self._redelivery(consumer, sequence)

    def _now_s(self) -> float:
        return self._world.loop.now_s

    def _find_prefixes(self) -> None:
        self._prefixes = {}
        for stream in self.streams.values():
            for subject in stream.config["subjects"]:
                self._prefixes[subject[:-2]] = stream

    def stream_of(self, subject: str) -> Stream | None:
        first = subject.partition(".")[0]
        found = self._prefixes.get(first)
        if found is None and first in {"$KV", "$O"}:
            # "$KV.bucket", "$O.bucket.C", "$O.bucket.M"
            found = self._prefixes.get(".".join(subject.split(".")[: 2 if first == "$KV" else 3]))
        return found

    def forget_pulls(self, connection: Connection) -> None:
        for stream in self.streams.values():
            for consumer in stream.consumers.values():
                consumer.pulls = [pull for pull in consumer.pulls if pull.connection is not connection]

    # --- storing ------------------------------------------------------------------------------------------------------

    def store(self, stream: Stream, subject: str, payload: bytes, reply: str, headers: dict[str, str]) -> None:
        if not stream.is_file:
            self._store_now(stream, subject, payload, reply, headers)
            return
        began_s = max(self._now_s(), stream.busy_until_s)
        stream.busy_until_s = began_s + self._world.rng.uniform(*WRITE_S)
        self._server.process.call_at(stream.busy_until_s, self._store_now, stream, subject, payload, reply, headers)

    def _store_now(self, stream: Stream, subject: str, payload: bytes, reply: str, headers: dict[str, str]) -> None:
        answer: dict[str, Any] = {"stream": stream.config["name"]}
        try:
            sequence, is_double = self._put(stream, subject, payload, headers)
            answer |= {"seq": sequence, "duplicate": True} if is_double else {"seq": sequence}
        except ApiFailure as failure:
            answer |= failure.answer
        if reply:
            self._server.send(reply, Message(reply, encode(answer)))

    def _put(self, stream: Stream, subject: str, payload: bytes, headers: dict[str, str]) -> tuple[int, bool]:
        """Store a message; return its sequence, and whether it is a duplicate. Raises ApiFailure."""
        now_s = self._now_s()
        message_id = headers.get("Nats-Msg-Id")
        if message_id is not None:
            until_s, sequence = stream.ids.get(message_id, (0.0, 0))
            if until_s > now_s:
                return sequence, True
        self._refuse(stream, subject, payload, headers)
        if stream.keeps_one and subject in stream.last_of:
            stream.remove(stream.last_of[subject])
        stream.last += 1
        sequence = stream.last
        stored = stream.messages[sequence] = Stored(sequence, subject, payload, headers, now_s)
        stream.bytes += len(payload)
        stream.last_of[subject] = sequence
        if message_id is not None:
            window_s = stream.config.get("duplicate_window", 120 * NS) / NS
            stream.ids[message_id] = (now_s + window_s, sequence)
        if "Nats-TTL" in headers:
            self._server.process.call_at(now_s + float(headers["Nats-TTL"]), stream.remove, sequence)
        self._world.on_stored(stream, stored)
        for consumer in stream.consumers.values():
            if consumer.matches(subject):
                consumer.fresh[sequence] = None
                self._serve(consumer)
        return sequence, False

    def _refuse(self, stream: Stream, subject: str, payload: bytes, headers: dict[str, str]) -> None:
        """Raise ApiFailure if the message cannot be stored."""
        expected = headers.get("Nats-Expected-Last-Subject-Sequence")
        if expected is not None and stream.last_of.get(subject, 0) != int(expected):
            raise ApiFailure(WRONG_LAST_SEQUENCE, f"wrong last sequence: {stream.last_of.get(subject, 0)}")
        if stream.is_file and (self.is_full or self.is_broken):
            self.is_broken = True
            raise ApiFailure(INSUFFICIENT_RESOURCES, "insufficient resources")
        if stream.config.get("discard") == "new" and not (stream.keeps_one and subject in stream.last_of):
            if 0 < stream.config.get("max_msgs", 0) <= len(stream.messages):
                raise ApiFailure(MAXIMUM_MESSAGES, "maximum messages exceeded")
            if 0 < stream.config.get("max_bytes", 0) < stream.bytes + len(payload):
                raise ApiFailure(MAXIMUM_MESSAGES, "maximum bytes exceeded")

    # --- delivering ---------------------------------------------------------------------------------------------------

    def _serve(self, consumer: DurableConsumer) -> None:
        """Deliver messages to waiting pulls: lowest priority number first, then round-robin."""
        while consumer.pulls and (consumer.again or consumer.fresh):
            pull = min(consumer.pulls, key=lambda one: (one.priority, one.number))
            if consumer.again:
                sequence, count = next(iter(consumer.again.items()))
                del consumer.again[sequence]
            else:
                sequence, count = next(iter(consumer.fresh)), 0
                del consumer.fresh[sequence]
            pull.remaining -= 1
            if pull.remaining <= 0:
                consumer.pulls.remove(pull)
            else:
                pull.number = self._world.next_number()
            self._deliver(consumer, pull, sequence, count + 1)

    def _deliver(self, consumer: DurableConsumer, pull: Pull, sequence: int, count: int) -> None:
        stream = consumer.stream
        stored = stream.messages[sequence]
        consumer.delivered += 1
        consumer.unanswered[sequence] = Delivered(count, self._redelivery(consumer, sequence))
        stored_ns = int((EPOCH_S + stored.stored_s + self._server.skew_s) * 1e9)
        pending = len(consumer.fresh) + len(consumer.again)
        name, stream_name = consumer.config["durable_name"], stream.config["name"]
        reply = f"$JS.ACK.{stream_name}.{name}.{count}.{sequence}.{consumer.delivered}.{stored_ns}.{pending}"
        self._server.send(pull.reply, Message(stored.subject, stored.payload, reply, stored.headers))

    def _redelivery(self, consumer: DurableConsumer, sequence: int, after_s: float | None = None) -> Any:
        after_s = consumer.config["ack_wait"] / NS if after_s is None else after_s
        return self._server.process.call_at(self._now_s() + after_s, self._deliver_again, consumer, sequence)

    def _deliver_again(self, consumer: DurableConsumer, sequence: int) -> None:
        entry = consumer.unanswered.pop(sequence, None)
        if entry is not None and sequence in consumer.stream.messages:
            consumer.again[sequence] = entry.count
            self._serve(consumer)

    def _on_pull(self, consumer: DurableConsumer, connection: Connection, reply: str, body: dict[str, Any]) -> None:
        if body.get("no_wait") and not (consumer.fresh or consumer.again):
            self._server.status(reply, "404")
            return
        priority = int(body.get("priority", 0))
        number = self._world.next_number()
        pull = Pull(connection, reply, body["batch"], priority, number, not body.get("no_wait"))
        consumer.pulls.append(pull)
        self._serve(consumer)
        if pull in consumer.pulls:
            if pull.is_patient:
                self._server.process.call_at(self._now_s() + body["expires"] / NS, self._expire, consumer, pull)
            else:
                self._expire(consumer, pull)

    def _expire(self, consumer: DurableConsumer, pull: Pull) -> None:
        if pull in consumer.pulls:
            consumer.pulls.remove(pull)
            self._server.status(pull.reply, "408")

    def _on_answer(self, tokens: list[str], payload: bytes) -> None:
        stream = self.streams.get(tokens[2])
        consumer = stream.consumers.get(tokens[3]) if stream is not None else None
        if stream is None or consumer is None:
            return
        sequence = int(tokens[5])
        if payload.startswith((b"+ACK", b"+TERM")):
            if stream.is_work_queue:
                stream.remove(sequence)
            else:
                consumer.forget(sequence)
        elif payload.startswith(b"-NAK") and sequence in consumer.unanswered:
            entry = consumer.unanswered[sequence]
            entry.timer.cancel()
            delay_ns = decode(payload[5:])["delay"] if len(payload) > 5 else 0
            entry.timer = self._redelivery(consumer, sequence, delay_ns / NS)

    # --- the API ------------------------------------------------------------------------------------------------------

    def take(self, connection: Connection, subject: str, payload: bytes, reply: str) -> bool:
        """Handle a message on a JetStream subject; return False if no stream or API call has it."""
        tokens = subject.split(".")
        if tokens[1] == "ACK":
            self._on_answer(tokens, payload)
            return True
        body = decode(payload) if payload else {}
        if tokens[2:5] == ["CONSUMER", "MSG", "NEXT"]:
            stream = self.streams.get(tokens[5])
            consumer = stream.consumers.get(tokens[6]) if stream is not None else None
            if consumer is not None:
                self._on_pull(consumer, connection, reply, body)
            return consumer is not None
        call = _CALLS[".".join(token for token in tokens[2:5] if token.isupper() and token in _WORDS)]
        try:
            answer = call(self, tokens, body)
        except ApiFailure as failure:
            answer = failure.answer
        self._server.send(reply, Message(reply, encode(answer)))
        return True

    def _stream(self, name: str) -> Stream:
        if name not in self.streams:
            raise ApiFailure(STREAM_NOT_FOUND, "stream not found")
        return self.streams[name]

    def _consumer(self, stream: str, name: str) -> DurableConsumer:
        found = self._stream(stream).consumers.get(name)
        if found is None:
            raise ApiFailure(CONSUMER_NOT_FOUND, "consumer not found")
        return found

    def _create_stream(self, tokens: list[str], body: dict[str, Any]) -> dict[str, Any]:
        there = self.streams.get(tokens[4])
        if there is not None and there.config != body:
            raise ApiFailure(STREAM_NAME_IN_USE, "stream name already in use with a different configuration")
        if there is None:
            self.streams[tokens[4]] = Stream(body, self._now_s())
            self._find_prefixes()
        return self._description(self.streams[tokens[4]])

    def _update_stream(self, tokens: list[str], body: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(tokens[4])
        stream.config = body
        return self._description(stream)

    def _description(self, stream: Stream) -> dict[str, Any]:
        first = next(iter(stream.messages), stream.last + 1)
        state = {"messages": len(stream.messages), "bytes": stream.bytes, "first_seq": first, "last_seq": stream.last}
        times = {"ts": self._time(self._now_s()), "created": self._time(stream.created_s)}
        return {"config": stream.config, "state": state, **times}

    def _time(self, at_s: float) -> str:
        return (
            dt.datetime.fromtimestamp(EPOCH_S + at_s + self._server.skew_s, dt.UTC).isoformat().replace("+00:00", "Z")
        )

    def _stream_info(self, tokens: list[str], body: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(tokens[4])
        info = self._description(stream)
        if "subjects_filter" in body:
            prefix = body["subjects_filter"].removesuffix(">")
            counts: dict[str, int] = {}
            for stored in stream.messages.values():
                if stored.subject.startswith(prefix):
                    counts[stored.subject] = counts.get(stored.subject, 0) + 1
            info["state"]["subjects"] = counts
        return info

    def _purge(self, tokens: list[str], body: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(tokens[4])
        before = [
            stored.sequence
            for stored in stream.messages.values()
            if stored.sequence < body.get("seq", stream.last + 1)
            and stored.subject == body.get("filter", stored.subject)
        ]
        for sequence in before:
            stream.remove(sequence)
        return {"success": True, "purged": len(before)}

    def _get(self, tokens: list[str], body: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(tokens[5])
        found = next(self._found(stream, body), None)
        if found is None:
            raise ApiFailure(NO_MESSAGE_FOUND, "no message found")
        lines = "".join(f"{name}: {value}\r\n" for name, value in found.headers.items())
        hdrs = base64.b64encode(f"NATS/1.0\r\n{lines}\r\n".encode()).decode()
        data = base64.b64encode(found.payload).decode()
        fields = {"subject": found.subject, "seq": found.sequence, "data": data, "time": self._time(found.stored_s)}
        return {"message": fields | ({"hdrs": hdrs} if found.headers else {})}

    def _found(self, stream: Stream, body: dict[str, Any]) -> Iterator[Stored]:
        if "last_by_subj" in body:
            last = stream.last_of.get(body["last_by_subj"])
            if last is not None:
                yield stream.messages[last]
        elif "next_by_subj" in body:
            for stored in stream.messages.values():
                if stored.sequence >= body.get("seq", 0) and stored.subject == body["next_by_subj"]:
                    yield stored
        elif body["seq"] in stream.messages:
            yield stream.messages[body["seq"]]

    def _delete(self, tokens: list[str], body: dict[str, Any]) -> dict[str, Any]:
        if self._stream(tokens[5]).remove(body["seq"]) is None:
            raise ApiFailure(SEQUENCE_NOT_FOUND, "sequence not found")
        return {"success": True}

    def _create_consumer(self, tokens: list[str], body: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(tokens[5])
        there = stream.consumers.get(tokens[6])
        if there is None:
            there = stream.consumers[tokens[6]] = DurableConsumer(stream, body["config"])
            there.fresh = {s: None for s, stored in stream.messages.items() if there.matches(stored.subject)}
        there.config = body["config"]
        return {"config": there.config}

    def _consumer_info(self, tokens: list[str], _body: dict[str, Any]) -> dict[str, Any]:
        consumer = self._consumer(tokens[4], tokens[5])
        waiting = {"num_pending": len(consumer.fresh), "num_ack_pending": len(consumer.unanswered)}
        delivered = next(iter(consumer.fresh), consumer.stream.last + 1) - 1
        sequences = {"ack_floor": {"stream_seq": consumer.floor}, "delivered": {"stream_seq": delivered}}
        return {"config": consumer.config, **sequences, **waiting}

    def _delete_consumer(self, tokens: list[str], _body: dict[str, Any]) -> dict[str, Any]:
        consumer = self._consumer(tokens[4], tokens[5])
        for entry in consumer.unanswered.values():
            entry.timer.cancel()
        del consumer.stream.consumers[tokens[5]]
        return {"success": True}


_WORDS = {"STREAM", "CONSUMER", "MSG", "CREATE", "UPDATE", "INFO", "PURGE", "GET", "DELETE", "DURABLE"}
_CALLS: dict[str, Callable[[JetStream, list[str], dict[str, Any]], dict[str, Any]]] = {
    "STREAM.CREATE": JetStream._create_stream,
    "STREAM.UPDATE": JetStream._update_stream,
    "STREAM.INFO": JetStream._stream_info,
    "STREAM.PURGE": JetStream._purge,
    "STREAM.MSG.GET": JetStream._get,
    "STREAM.MSG.DELETE": JetStream._delete,
    "CONSUMER.DURABLE.CREATE": JetStream._create_consumer,
    "CONSUMER.INFO": JetStream._consumer_info,
    "CONSUMER.DELETE": JetStream._delete_consumer,
}
