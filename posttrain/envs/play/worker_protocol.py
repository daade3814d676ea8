"""The messages between a pool and its workers, and the checks that decide which are accepted: workers are not trusted.

Messages are frames: the length in eight bytes, then that many bytes. The pool's frames hold pickled commands. A worker,
in which any code runs, answers in JSON that is checked as strictly as values that environments yield: nothing in it is
executed, and an unreadable message is `Garbled`.

    pool -> worker   a `WorkerSetup`, then lists of `WorkerCommand`
    worker -> pool   {"ready": whether a plain reward, "async": whether it is async, "group": whether it scores groups}
                     or {"failed": message}, then for each command, in order unless it is async,
                     {"number": n, "turn": {...}}, {"number": n, "ask": {...}}, {"number": n, "done": {...}},
                     {"number": n, "sides": {side: {...}}} or {"number": n, "group": [[{...}, notes], ...]}, the last
                     three perhaps with "notes": {...}, {"number": n, "awaits": "group"} for an episode whose group scores
                     it, or {"number": n} as a mere acknowledgement: of a dropped episode,
                     and of a replayed step, whose event the pool already has; and at any time
                     {"number": n, "record": [which, result]}
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, NoReturn

from posttrain.core.pictures import MOST_BYTES, PICTURES, PictureError, digests, has_parts, is_name
from posttrain.core.types import Ask, Invalid, InvalidKind, SpanReward, Turn, value_type
from posttrain.envs.play.call_recording import MOST_RECORDS, noted_data
from posttrain.envs.play.env_outputs import (
    LONGEST_TEXT,
    MOST_REWARD,
    MOST_SIDES,
    AwaitsGroup,
    Done,
    Event,
    cleaned,
    plain_data,
    problem_of_side,
    read_ask,
    read_turn,
)

LONGEST_PICTURES = 2 * MOST_BYTES  # most characters of a turn's pictures, in base 64
LONGEST_ANSWER = 8 * LONGEST_TEXT + LONGEST_PICTURES + (1 << 20)
"""Maximum number of bytes of an answer: characters in JSON, pictures, and the rest."""
READ_BYTES = 1 << 18  # bytes of one read
_LENGTH = struct.Struct(">Q")
_WRITER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


class Garbled(ValueError):
    """A message of a worker cannot be read."""


@dataclass(frozen=True)
class WorkerSetup:
    """The first message to a worker."""

    env: str | bytes  # see `load.pack_env`
    name: str  # name of the environment in messages
    memory: float  # memory limit in GiB; 0: no limit
    seconds: float  # limit of a step of async code; the pool enforces that of other code


class WorkerCommand(NamedTuple):
    """A command to a worker."""

    number: int  # of the episode
    task: bytes | None  # pickled task of an episode to begin; None: continue it
    sent: tuple[Any, ...]  # replies and answers of services to send to it, in order
    drop: bool  # forget the episode
    recorded: Mapping[int, Any]  # recorded results, if it is replayed: see `call_recording`
    members: tuple[WorkerCommand, ...] = ()  # score these episodes together, after replaying those with a task


@value_type
class WorkerReply:
    number: int
    event: Event | None  # None: a step is over, without an event


@dataclass(frozen=True)
class CallRecord:
    """The result of a recorded call."""

    number: int  # of the episode
    which: int  # number of the call within the episode
    result: Any


class Greeting(NamedTuple):
    """The kind of an environment."""

    single_turn: bool  # a plain reward
    waits: bool  # written with `async def`
    by_group: bool  # its reward scores whole groups


NOTE_BYTES = 8  # size of the shared memory that holds the episode whose code runs


def write_commands(commands: Iterable[WorkerCommand]) -> bytes:
    """Return a frame of commands. It holds plain tuples, as a class of ours takes pickle several times as long."""
    return framed(pickle.dumps(list(map(tuple, commands))))


def read_commands(content: bytes) -> Iterator[WorkerCommand]:
    return map(WorkerCommand._make, pickle.loads(content))


def noted(number: int) -> bytes:
    return number.to_bytes(NOTE_BYTES, "little")


def framed(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


class Frames:
    """Assembles frames from received bytes. Raises Garbled for a frame of more than `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = bytearray()

    def add(self, more: bytes) -> Iterator[bytes]:
        """Yield the contents of the frames that these bytes complete."""
        self._bytes += more
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self._most:
                raise Garbled(f"a message of {length:,} bytes")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            content = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield content


class FrameSocket:
    """The end of a socket for frames. No method blocks."""

    def __init__(self, end: socket.socket, most: int) -> None:
        """Use the socket from now on. `most`: bytes of a frame that is read."""
        end.setblocking(False)
        self.end, self.unsent, self._frames = end, bytearray(), Frames(most)

    def write(self) -> bool:
        """Write as much of `unsent` as the socket takes; return whether that was all. Raises OSError if the other side
        is gone.
        """
        while self.unsent:
            try:
                del self.unsent[: self.end.send(self.unsent)]
            except BlockingIOError:
                return False
        return True

    def read(self) -> Iterable[bytes]:
        """Return the messages that have arrived.

        Raises EOFError or OSError if the other side is gone, Garbled for invalid data.
        """
        try:
            more = self.end.recv(READ_BYTES)
        except BlockingIOError:
            return ()
        if not more:
            raise EOFError
        return self._frames.add(more)


# -- the worker's side -------------------------------------------------------------------------------------------------


def write_greeting(single_turn: bool, waits: bool, by_group: bool) -> bytes:
    return _written({"ready": single_turn, "async": waits, "group": by_group})


def write_failure(message: str) -> bytes:
    return _written({"failed": cleaned(message)})


def write_answer(number: int, event: Event | None) -> bytes:
    if event is None:
        return _written({"number": number})
    if isinstance(event, Turn):
        turn = {f: getattr(event, f) for f in Turn.__dataclass_fields__}
        held = {digest: PICTURES.take(digest) for digest in digests(event.messages or ())}
        pictures = {digest: b64encode(data).decode() for digest, data in held.items() if data is not None}
        if sum(map(len, pictures.values())) > LONGEST_PICTURES:
            problem = f"yielded a Turn with pictures of more than {LONGEST_PICTURES:,} bytes in base 64"
            return write_answer(number, Done(Invalid(problem, InvalidKind.UNREADABLE)))
        return _written({"number": number, "turn": turn, **({"pictures": pictures} if pictures else {})})
    if isinstance(event, AwaitsGroup):
        return _written({"number": number, "awaits": "group"})
    if isinstance(event, Ask):
        return _written({"number": number, "ask": {"service": event.service, "content": event.content}})
    noted = {"notes": event.notes} if event.notes else {}
    if event.sides:
        sides = {side: _plain_done(done) for side, done in event.sides.items()}
        return _written({"number": number, "sides": sides, **noted})
    if event.group:
        members = [[_plain_done(done), done.notes] for done in event.group]
        return _written({"number": number, "group": members, **noted})
    return _written({"number": number, "done": _plain_done(event), **noted})


def _plain_done(event: Done) -> dict[str, Any]:
    done: dict[str, Any] = {"rewards": event.rewards, "spans": [asdict(span) for span in event.spans]}
    if isinstance(event.reward, Invalid):
        return {**done, "invalid": event.reward.reason, "kind": event.reward.kind}
    return {**done, "reward": event.reward}


def write_record(number: int, which: int, result: Any) -> bytes:
    return _written({"number": number, "record": [which, result]})


def _written(message: dict[str, Any]) -> bytes:
    return framed(_WRITER.encode(message).encode())


# -- the pool's side ---------------------------------------------------------------------------------------------------


def read_greeting(content: bytes) -> Greeting | str:
    """Return the kind of the environment, or the reason why it does not load."""
    message = _read(content)
    if message.keys() == {"ready", "async", "group"} and all(isinstance(flag, bool) for flag in message.values()):
        return Greeting(message["ready"], message["async"], message["group"])
    if message.keys() == {"failed"} and isinstance(message["failed"], str):
        return cleaned(message["failed"])
    raise Garbled("a malformed greeting")


def read_answer(content: bytes) -> WorkerReply | CallRecord:
    """Return a worker's answer. Raises Garbled if it is invalid."""
    message = _read(content)
    number, pictures, notes = message.pop("number", None), message.pop("pictures", {}), message.pop("notes", {})
    if type(number) is not int or len(message) > 1:
        raise Garbled("a malformed answer")
    kind = next(iter(message), None)
    if kind == "record":
        return _read_record(number, message["record"])
    if notes and kind not in ("done", "sides", "group"):
        raise Garbled("notes without an end of an episode")
    if pictures and kind != "turn":
        raise Garbled("pictures without a turn")
    if kind is None:
        return WorkerReply(number, None)
    if kind == "done":
        return WorkerReply(number, _read_done(_object(message["done"]), _read_notes(notes)))
    if kind == "sides":
        return WorkerReply(number, _read_sides(_object(message["sides"]), _read_notes(notes)))
    if kind == "group":
        return WorkerReply(number, _read_group(message["group"], _read_notes(notes)))
    if message == {"awaits": "group"}:
        return WorkerReply(number, AwaitsGroup())
    if kind == "ask":
        asked = _object(message["ask"])
        if asked.keys() != {"service", "content"}:
            raise Garbled("a malformed question")
        ask = read_ask(Ask(**asked))
        return WorkerReply(number, Done(ask) if isinstance(ask, Invalid) else ask)
    if kind != "turn":
        raise Garbled("a malformed answer")
    fields = _object(message["turn"])
    if fields.keys() != Turn.__dataclass_fields__.keys():
        raise Garbled("a malformed turn")
    try:
        _take_pictures(_object(pictures), fields["messages"])
        turn = read_turn(Turn(**fields))
    except (TypeError, ValueError, AttributeError):
        raise Garbled("a malformed turn") from None
    return WorkerReply(number, Done(turn) if isinstance(turn, Invalid) else turn)


def _take_pictures(given: dict[str, Any], messages: Any) -> None:
    """Store the pictures of a turn. Its messages refer to them by name, so that a worker cannot make us read a file."""
    for digest, data in given.items():
        try:
            known = PICTURES.put(b64decode(data, validate=True))
        except (PictureError, ValueError, TypeError):
            raise Garbled("a malformed picture") from None
        if known != f"sha256:{digest}":
            raise Garbled("a picture with a wrong name")
    contents = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    for content in contents:
        for part in content if isinstance(content, list) and has_parts(content) else ():
            if isinstance(part, dict) and part.get("type") == "image" and not is_name(part.get("image")):
                raise Garbled("a picture without a name")


def _read_record(number: int, record: Any) -> CallRecord:
    if not isinstance(record, list) or len(record) != 2 or type(record[0]) is not int:
        raise Garbled("a malformed record")
    which, result = record
    if not 0 <= which < MOST_RECORDS:
        raise Garbled("a record beyond the maximum")
    try:
        return CallRecord(number, which, plain_data(result, [0], 0))
    except ValueError:
        raise Garbled("a malformed record") from None


def _read_notes(notes: Any) -> dict[str, Any]:
    if notes == {}:
        return {}
    try:
        return noted_data(_object(notes))
    except ValueError:
        raise Garbled("malformed notes") from None


def _read_sides(sides: dict[str, Any], notes: dict[str, Any]) -> Done:
    if not 0 < len(sides) <= MOST_SIDES or any(map(problem_of_side, sides)):
        raise Garbled("malformed sides")
    return Done(0.0, sides={side: _read_done(_object(done), {}) for side, done in sides.items()}, notes=notes)


def _read_group(members: Any, notes: dict[str, Any]) -> Done:
    if not isinstance(members, list) or not all(isinstance(one, list) and len(one) == 2 for one in members):
        raise Garbled("a malformed group")
    return Done(0.0, group=tuple([_read_done(_object(done), _read_notes(own)) for done, own in members]), notes=notes)


def _read_done(done: dict[str, Any], notes: dict[str, Any]) -> Done:
    rewards, spans = _object(done.get("rewards")), done.get("spans")
    if not isinstance(spans, list):
        raise Garbled("malformed spans")
    parts = {cleaned(name): _real(value) for name, value in rewards.items()}
    found = tuple([_span(_object(span)) for span in spans])
    if done.keys() == {"rewards", "spans", "reward"}:
        return Done(_real(done["reward"]), parts, found, notes=notes)
    if done.keys() != {"rewards", "spans", "invalid", "kind"} or done["kind"] not in list(InvalidKind):
        raise Garbled("a malformed verdict")
    return Done(Invalid(cleaned(done["invalid"]), InvalidKind(done["kind"])), parts, found, notes=notes)


def _span(span: dict[str, Any]) -> SpanReward:
    end, reply = span.get("end"), span.get("reply")
    if span.keys() != {"end", "reward", "reply"} or type(end) is not int or type(reply) is not int:
        raise Garbled("a malformed span")
    return SpanReward(end, _real(span["reward"]), reply)


def _read(content: bytes) -> dict[str, Any]:
    try:
        text = content.decode()
        message, end = _READER.raw_decode(text)  # `decode` would skip white space
    except (ValueError, RecursionError) as error:
        raise Garbled(str(error)) from None
    if end != len(text):
        raise Garbled("more than one object")
    return _object(message)


def _refuse(word: str) -> NoReturn:
    raise Garbled(f"{word} is not a number")


_READER = json.JSONDecoder(parse_constant=_refuse)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Garbled("no object")
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= MOST_REWARD:
        raise Garbled("no reward")
    return float(value)
