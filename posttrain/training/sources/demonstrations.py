"""Episodes to imitate: rows with replies run through their environment; recorded rollouts are taken unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Invalid, Sampling, Task, UserError
from posttrain.data.tasks_from_rows import is_script, script
from posttrain.engines.scripted import ScriptedEngine
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import Player
from posttrain.envs.play.service_client import Services
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_rows import said_by, transcripts_of

MOST_FAILED = 3  # consecutive failed episodes after which all are assumed to fail
ENDLESS = 1 << 30  # no limit, in tokens: whether a demonstration fits is checked later

Enact = Callable[[Task], list[tuple[list[Transcript], float]]]
"""Runs a task with its own `replies`; returns (transcripts to imitate, by context, and reward) of each side."""


def demonstration_runner(
    pool: EnvPool, tokenizer: Tokenizer, eos_ids: Sequence[int], services: Services | None = None
) -> Enact:
    """Return a function that runs demonstrations through this environment.

    It raises UserError if replies and environment do not fit together. `services` answer the environment's requests.
    """
    services = services or Services()

    def enact(task: Task) -> list[tuple[list[Transcript], float]]:
        engine = ScriptedEngine(tokenizer, eos_ids, script(task))
        own = {key: value for key, value in task.items() if key != "replies"}
        player = Player(pool, engine, tokenizer, Sampling(max_tokens=ENDLESS), ENDLESS, services=services)
        try:
            rollouts = player.play([Episode(own, str(task.get("id")), 0)])
        except UserError:  # in the middle of an episode; the next row may still succeed
            pool.clear()
            raise
        earned = [rollout.reward for rollout in rollouts if not isinstance(rollout.reward, Invalid)]
        for rollout in rollouts:
            if isinstance(rollout.reward, Invalid):
                raise UserError(f"the environment does not run with its replies: {rollout.reward.reason}")
        if engine.left:
            total = len(task["replies"])
            raise UserError(f"the environment ends after {total - engine.left} of its {total} replies")
        return [(imitated(rollout.transcripts), reward) for rollout, reward in zip(rollouts, earned, strict=True)]

    return enact


def episode_texts(enact: Enact, tokenizer: Tokenizer, tasks: Iterable[Task]) -> Iterator[str]:
    """Yield all texts of such episodes, context by context, to train a tokenizer on.

    `tokenizer`: the one that the episodes run with, which encodes every byte. Tasks without replies, and those whose
    episodes fail, yield nothing; their errors are reported in training. After `MOST_FAILED` consecutive failures no
    more episodes run, as each may have taken all the time that an environment has.
    """
    failed = 0
    for task in filter(is_script, tasks):
        try:
            played = enact(task)
        except UserError:
            failed += 1
            if failed == MOST_FAILED:
                return
            continue
        failed = 0
        for transcripts, _ in played:
            for transcript in transcripts:
                yield tokenizer.decode([token for token in transcript.tokens if token != tokenizer.eos_id])


def imitated(transcripts: Sequence[Transcript]) -> list[Transcript]:
    """Return transcripts of the same tokens, with the trainable ones as demonstrated tokens."""
    found = []
    for transcript in transcripts:
        other = Transcript()
        for span in transcript.spans:
            tokens = transcript.tokens[span.start : span.start + span.length]
            if span.learned:
                other.imitate(tokens)
            else:
                said = span.kind in (SpanKind.SAMPLED, SpanKind.IMITATED)
                other.observe(tokens, SpanKind.OBSERVATION if said else span.kind)
        other.media = list(transcript.media)
        if other.n_scored:
            found.append(other)
    if not found:
        raise UserError("nothing to learn: none of its replies is trained")
    return found


def stored(task: Task, tokenizer: Tokenizer) -> tuple[list[Transcript], float | None]:
    """Return the transcripts of a recorded rollout, and its reward, None if invalid.

    Raises UserError if it is damaged, or was made with another tokenizer.
    """
    try:
        transcripts = transcripts_of(task)
        for turn in task["turns"]:
            if turn["role"] == "sampled" and turn["length"]:
                transcript, start = transcripts[turn["transcript"]], turn["first"]
                text = tokenizer.decode(transcript.tokens[start : start + turn["length"]])
                if not text.startswith(said_by(turn, task["prompt"], task["text"])):
                    raise UserError("the rollout was made with another tokenizer, so its tokens do not match")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the rollout is damaged ({type(error).__name__}: {error})") from None
    reward = task.get("reward")
    return imitated(transcripts), float(reward) if isinstance(reward, int | float) else None


def cut(transcripts: Sequence[Transcript], length: int | None) -> list[Transcript]:
    """Cut each transcript to its first `length` tokens. Raises UserError if nothing is left to learn."""
    if length is None:
        return list(transcripts)
    found = []
    for transcript in transcripts:
        other = Transcript()
        for span in transcript.spans:
            tokens = transcript.tokens[span.start : min(length, span.start + span.length)]
            if span.learned:
                other.imitate(tokens)
            else:
                other.observe(tokens, span.kind)
        other.media = [m for m in transcript.media if m.start + m.length <= length]
        if other.n_scored:
            found.append(other)
    if not found:
        raise UserError("nothing to learn within the context")
    return found
