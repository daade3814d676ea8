"""Runs episodes: environments show turns, the engine and services answer, transcripts grow, rewards come back.

Sampling, tools and scoring overlap, and yet no result depends on timing. If the engine's replies do not depend on other
requests (`Engine.batch_invariant`), every event of an environment is handled on arrival. Otherwise the last bits of a
reply depend on the order of the requests, so that order is fixed: the engine answers all its requests, then all
environments show their next turns, in the order of the episodes. Requests to services, whose answers depend on no
order, are always passed on at once.

An episode that branches is begun a second time with its replies and answers so far: its environment cannot be copied,
but takes the same course again. The turn that it ends with shows whether it did; if not, the branch is Invalid.

An episode whose reward comes with its group's leaves the engine when its last turn is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from posttrain.core.conversation import TextEncoder
from posttrain.core.pictures import PictureError
from posttrain.core.progress import doing
from posttrain.core.protocols import Alone, Engine, ReadingEngine, VisionEngine, World
from posttrain.core.rollouts import Rollout
from posttrain.core.seeds import seed_of
from posttrain.core.types import Ask, Completion, Invalid, InvalidKind, Sampling, StopReason, Turn, UserError, bare
from posttrain.data.mixed_tasks import part_of
from posttrain.envs.play.branch_plan import BranchPlan, Shares
from posttrain.envs.play.env_outputs import AwaitsGroup, Done, Event
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.env_runner import DIVERGED
from posttrain.envs.play.episode import MAX_TURNS, Episode, EpisodeLimits, RunningEpisode, is_tool
from posttrain.envs.play.mixed_pool import MixedPool
from posttrain.envs.play.prompt_tokens import PROMPT_TOKENS, count_prompt
from posttrain.envs.play.service_client import Services
from posttrain.envs.play.task_temperature import task_temperature

__all__ = ["MAX_TURNS", "Episode", "EpisodeLimits", "Player"]

MOST_ASKS = 1024  # most requests of an episode to services; bounds an environment that never returns
PAUSE = 0.001  # seconds between polls of services while nothing else is to be done
LONGEST_PAUSE = 1.0  # seconds between checks whether the rollouts are still wanted
LEAST_SHOWN = 8  # least room, in tokens, in which an observation is cut
PATIENCE = 64  # most empty replies after an episode's limit, so that an environment's loop can end by itself

TooLong = Literal["skip", "truncate", "refuse"]


@dataclass(frozen=True)
class Player:
    """The runner of episodes, with their limits.

    An episode that runs out of context, tokens or turns gets empty replies with the stop reason, and may still score
    its replies.
    """

    pool: EnvPool | MixedPool
    engine: Engine
    tokenizer: TextEncoder
    sampling: Sampling
    context: int
    """Tokens of prompt and replies together that fit."""
    too_long: TooLong = "refuse"
    """The treatment of an episode whose first prompt leaves no room for a reply: it is Invalid ("skip"), the prompt
    loses its beginning ("truncate"), or UserError is raised ("refuse"), as it always is for a prompt of no tokens. With
    "truncate", later observations lose their middle."""
    bounds: EpisodeLimits = EpisodeLimits()
    services: Services = field(default_factory=Services)
    """The services that answer questions of environments."""
    world: World = field(default_factory=Alone)
    """The processes that sample together. Each gets the same episodes, runs its share of the groups, and returns all."""
    parts: Mapping[str, tuple[Sampling, EpisodeLimits]] = field(default_factory=dict)
    """Sampling and limits of each part of a mixture, by its name, instead of the player's."""
    temperature_column: str = ""
    """Column with the sampling temperature of a task; "": none."""
    unwanted: Callable[[], bool] = lambda: False
    """Whether the rollouts in progress are not needed any more."""

    def play(self, episodes: Sequence[Episode], plan: BranchPlan | None = None) -> list[Rollout]:
        """Return the rollouts of these episodes, in their order: one each, or one for each side that the policy played.

        `plan`: how the episodes of a group branch; None: they do not.
        """
        return [rollout for rollout in self._shared(episodes, plan, None) if isinstance(rollout, Rollout)]

    def play_on(self, episodes: Sequence[Episode], tokens: int) -> list[Rollout | Episode]:
        """Return each episode's rollout, or, if it is unfinished after so many further tokens, the episode with its
        reply so far.

        Only for environments whose episodes are one reply.
        """
        assert self.pool.single_turn, "an environment of several turns cannot be interrupted and continued"
        return self._shared(episodes, None, tokens)

    def _shared(
        self, episodes: Sequence[Episode], plan: BranchPlan | None, tokens: int | None
    ) -> list[Rollout | Episode]:
        share = self._share(episodes)
        own = [self.limited(e) for e in episodes if share[e.group] == self.world.rank]
        try:
            found = _RunningEpisodes(self, own, plan, tokens).run()
        finally:
            self.services.forget()
        if self.world.size == 1:
            return found
        groups: dict[str, list[Rollout | Episode]] = {e.group: [] for e in episodes}
        for played in self.world.gather(found):
            for each in played:
                groups[each.group].append(each)
        return [each for group in groups.values() for each in group]

    def limited(self, episode: Episode) -> Episode:
        """Return an episode with the sampling and the limits of its part, if its task belongs to a mixture, and at its
        task's temperature, if it has one.
        """
        if self.parts:
            sampling, limits = self.parts[part_of(episode.task)]
            episode = replace(episode, sampling=episode.sampling or sampling, limits=limits)
        temperature = task_temperature(episode.task, self.temperature_column) if self.temperature_column else None
        if temperature is None:
            return episode
        return replace(episode, sampling=replace(episode.sampling or self.sampling, temperature=temperature))

    def without_exploration(self) -> Player:
        """Return this player with all tokens drawn from the policy, as evaluations need it."""
        parts = {name: (replace(how, epsilon=0.0), limits) for name, (how, limits) in self.parts.items()}
        return replace(self, sampling=replace(self.sampling, epsilon=0.0), parts=parts)

    def _share(self, episodes: Sequence[Episode]) -> dict[str, int]:
        """Return group -> the rank of the process that runs it."""
        groups = dict.fromkeys(episode.group for episode in episodes)
        return {group: place % self.world.size for place, group in enumerate(groups)}


class Unwanted(Exception):
    """The rollouts in progress are not needed any more."""


class _RunningEpisodes:
    """The episodes of one call of `Player.play`. An episode's index is its place in the list of episodes."""

    def __init__(
        self, player: Player, episodes: Sequence[Episode], plan: BranchPlan | None = None, tokens: int | None = None
    ) -> None:
        """`tokens`: most tokens to sample of each reply; unfinished ones are then returned as episodes.

        None: no limit.
        """
        self.tokens = tokens
        self.plan, self.shares = plan, Shares([episode.group for episode in episodes], plan)
        self.player, self.pool, self.engine, self.services = player, player.pool, player.engine, player.services
        # asked once, as this takes some twenty microseconds
        self.reader = self.engine if isinstance(self.engine, ReadingEngine) else None
        self.prompts: dict[str, list[int]] = {}  # a group's prompt is tokenised once
        numbered = zip(episodes, self.shares.member, strict=True)
        self.playing = [RunningEpisode(episode, player.tokenizer, number) for episode, number in numbered]
        self.replayed: set[int] = set()  # branches whose environments are still being replayed
        self.finished: dict[int, list[Rollout] | list[Episode]] = {}
        self.awaiting: dict[int, float] = {}  # episodes that await their group -> seconds of their last step
        self.in_engine = 0  # requests in the engine
        self.requested = [0.0] * len(episodes)  # time of the last request to the engine or the environment
        self.turns: list[tuple[int, Turn, float]] = []  # (episode, turn to show, seconds that it took)
        # a plain reward shows no further turn
        self.in_any_order = self.engine.batch_invariant or self.pool.single_turn

    def run(self) -> list[Rollout | Episode]:
        for index in self.shares.first:
            self._begin(index)
        while len(self.finished) < len(self.playing):
            doing("playing episodes", len(self.finished), len(self.playing))
            if self.player.unwanted():
                raise Unwanted
            self._read_events()
            self._pass_answers()
            self._show_turns()
            for completion in sorted(self.engine.poll(), key=lambda c: c.id) if self.in_engine else ():
                self._pass_reply(completion)
            waits = self.in_engine or self.turns or self.services.pending or self.pool.pending
            assert waits or len(self.finished) == len(self.playing), "an episode waits for nobody"
        return [each for index in range(len(self.playing)) for each in self.finished[index]]

    def _begin(self, index: int) -> None:
        """Begin an episode with its prompt."""
        p = self.playing[index]
        self.requested[index] = p.began = time.perf_counter()
        self.pool.start(index, p.episode.task, p.episode.group)

    def _branch(self, index: int) -> None:
        """Begin further episodes with everything of this one up to the reply that has just been sampled."""
        assert self.plan is not None
        p, known = self.playing[index], index
        for other in self.shares.branch(index, self.plan.branches):
            begun = self.playing[other] = p.branched(self.playing[other].episode, self.shares.member[other])
            for place, context in enumerate(begun.contexts):
                self.engine.copy(self._request(known, place), self._request(other, place), len(context.transcript))
            self.requested[other] = begun.began = time.perf_counter()
            self.pool.branch(index, other)
            self.replayed.add(other)
            known = other  # its state has exactly the tokens that the next branch needs

    def _agrees(self, index: int, event: Event) -> bool:
        """Return whether a branch's environment shows the same turn as the original; if not, end the episode."""
        if event == self.playing[index].last:
            return True
        self.replayed.discard(index)
        if not isinstance(event, Done):
            self.pool.drop(index)
        elif isinstance(event.reward, Invalid):
            self._finish(index, event)
            return False
        self._finish(index, Done(Invalid(DIVERGED, InvalidKind.DIVERGED)))
        return False

    def _read_events(self) -> None:
        """Read the events of environments. Waits only if there is nothing else to do."""
        began = time.perf_counter()
        events = self.pool.poll(0.0 if self.in_engine else PAUSE if self.services.pending else LONGEST_PAUSE)
        now = time.perf_counter()
        if not self.in_engine and self.pool.pending + len(events):
            self.pool.waited += now - began
        elif not self.in_engine:
            self.services.waited += now - began
        for index, event in events:
            if index in self.replayed and not self._agrees(index, event):
                continue
            if isinstance(event, Done):
                self._finish(index, event)
            elif isinstance(event, Turn):
                self.turns.append((index, event, now - self.requested[index]))
            elif isinstance(event, AwaitsGroup):
                self.awaiting[index] = now - self.requested[index]
                self._leave(index)
            elif len(self.playing[index].answers) == MOST_ASKS:
                self._end(index, f"asked services {MOST_ASKS} times, the maximum of an episode")
            else:
                self._ask(index, event)

    def _ask(self, index: int, ask: Ask) -> None:
        self.playing[index].asks = ask.service
        if ask.service == PROMPT_TOKENS:
            self._pass_answer(index, count_prompt(self.playing[index].tokenizer, ask.content))
        else:
            self.services.ask(index, ask)

    def _pass_answers(self) -> None:
        """Pass the answers of services to their environments."""
        for index, answer in self.services.poll() if self.services.pending else ():
            self._pass_answer(index, answer)

    def _pass_answer(self, index: int, answer: Any) -> None:
        """Pass the answer of a service to an environment."""
        p = self.playing[index]
        p.answers.append((p.asks, answer))
        self.requested[index] = time.perf_counter()
        self.pool.send(index, bare(answer))

    def _show_turns(self) -> None:
        """Continue the episodes whose environments show a turn."""
        if not self.in_any_order and (self.in_engine or self.pool.pending or self.services.pending):
            return
        turns, self.turns = self.turns, []
        for index, turn, seconds in sorted(turns, key=lambda answer: answer[0]):
            self._show(index, turn, seconds)

    def _pass_reply(self, completion: Completion) -> None:
        """Pass a reply to its environment."""
        self.in_engine -= 1
        index = completion.id % len(self.playing)
        now, p = time.perf_counter(), self.playing[index]
        if p.episode.begun is not None:
            completion = p.episode.begun.continued(completion)
        if self.tokens is not None:
            before = len(p.context.transcript) + len(completion.tokens)
            unfinished = completion.stop is StopReason.LENGTH and len(completion.tokens) < self._budget(p)
            if unfinished and before < self.player.context:
                self.finished[index] = [replace(p.episode, begun=completion)]
                return self.pool.drop(index)
            if unfinished:
                completion = replace(completion, stop=StopReason.CONTEXT)
        plan = self.plan if self.shares.has(index) and p.may_branch else None
        if plan is not None and plan.branches_after(p.opening, completion.logp):
            self._branch(index)
        temperature = self._temperature(p)
        own = None if temperature == self.player.sampling.temperature else temperature
        reply = p.reply(completion, now - self.requested[index], own)
        self.requested[index] = now
        self.pool.send(index, reply)

    def _show(self, index: int, turn: Turn, seconds: float) -> None:
        """Show a turn to the policy, unless the episode has reached a limit."""
        p = self.playing[index]
        if index in self.replayed:
            self.replayed.discard(index)
            return self._submit(index, turn)
        turn = p.place(turn)
        try:
            tokens = self._tokens(p, turn)
        except UserError as error:
            if not turn.whole and not isinstance(error, PictureError):
                raise
            # written by an agent program
            return self._end(index, f"yielded a turn that the model cannot read: {error}")
        empty = not len(p.context.transcript)
        whole = len(tokens)
        if not empty and turn.tokens is None and self.player.too_long == "truncate" and not p.context.conversation.seen:
            room = self.player.context - len(p.context.transcript)
            tokens = cut_observation(tokens, room, self._most_tokens(p, turn))
        problem = self._problem(p, turn, tokens) if empty else None
        stop = self._exhausted(p, turn, tokens) if problem is None else None
        p.show(turn, tokens if problem is None and stop is None else None, seconds, whole - len(tokens))
        if problem is not None:
            self._end(index, problem)
        elif stop is not None and p.asked_in_vain == PATIENCE:
            vain = f"asked {PATIENCE} times after a reply whose stop was {p.stop}: return a reward, no reply follows"
            self._end(index, vain)
        elif stop is not None:
            told = p.tell(stop, turn.whole)
            self.requested[index] = time.perf_counter()
            self.pool.send(index, told)
        else:
            self._submit(index, turn)

    def _submit(self, index: int, turn: Turn) -> None:
        p = self.playing[index]
        sampling = p.episode.sampling or self.player.sampling
        budget, begun = self._budget(p, turn), p.episode.begun
        asked = len(p.replies) + 1
        seed = p.episode.seed if asked == 1 else seed_of(p.episode.seed, asked)
        tokens, known = p.context.transcript.tokens, 0
        if begun is not None:
            tokens, known = [*tokens, *begun.tokens], len(begun.tokens)
            seed = seed_of(seed, "behind", known)
        if self.tokens is not None:
            budget = min(budget - known, self.tokens)
        stop = turn.stop or sampling.stop
        temperature = self._temperature(p, turn)
        epsilon = sampling.epsilon if temperature else 0.0  # a greedy reply is the policy's own
        sampling = Sampling(temperature, sampling.top_p, sampling.top_k, budget, stop, seed, known, epsilon)
        self.requested[index] = time.perf_counter()
        request = self._request(index, p.contexts.index(p.context))
        keep = not self.pool.single_turn
        try:
            if self.reader is not None:
                self.reader.submit_read(request, tokens, _context_of(p, turn), sampling, keep=keep)
            elif not p.context.transcript.media:
                self.engine.submit(request, tokens, sampling, keep=keep)
            elif isinstance(self.engine, VisionEngine):
                self.engine.submit_with_media(request, tokens, p.context.transcript.media, sampling, keep=keep)
            else:
                raise UserError(
                    f"{self.engine.backend} reads only text, and a prompt has a picture: leave out --engine and --replicas"
                )
        except UserError as error:
            if turn.tokens is None:
                raise
            self._end(index, f"yielded token ids that the model cannot read: {error}")
        else:
            self.in_engine += 1

    def _request(self, index: int, place: int) -> int:
        """Return the id of requests in this context of an episode, so that each context continues its own engine
        state.
        """
        return index + len(self.playing) * place

    def _budget(self, p: RunningEpisode, turn: Turn | None = None) -> int:
        """Return the most tokens of the reply to a turn, by default the last one, within the limit of the episode."""
        turn = turn or p.last
        assert turn is not None
        budget = self._most_tokens(p, turn)
        most = (p.episode.limits or self.player.bounds).tokens
        return budget if most is None else min(budget, most - p.n_sampled)

    def _temperature(self, p: RunningEpisode, turn: Turn | None = None) -> float:
        """Return the temperature of the reply to a turn, by default the last one: its own, or that of the episode."""
        turn = turn or p.last
        assert turn is not None
        whole = 0.0 if p.episode.greedy else (p.episode.sampling or self.player.sampling).temperature
        return whole if turn.temperature is None or whole == 0 else turn.temperature

    def _most_tokens(self, p: RunningEpisode, turn: Turn) -> int:
        """Return the token budget of the reply to a turn, without the limit of the episode."""
        most = (p.episode.sampling or self.player.sampling).max_tokens
        return min(most, turn.max_tokens or most)

    def _tokens(self, p: RunningEpisode, turn: Turn) -> list[int]:
        """Return the tokens that show the turn to the policy."""
        if p.turns:
            return p.read(turn)
        if turn.text is None:
            tokens = p.read(turn)
        else:
            if turn.text in self.prompts:
                p.context.shown(turn)
            else:
                self.prompts[turn.text] = p.read(turn)
            tokens = self.prompts[turn.text]
        cuts = self.player.too_long == "truncate" and not p.context.conversation.seen  # pictures cannot be cut
        if len(tokens) >= self.player.context and turn.tokens is None and cuts:
            sampling = p.episode.sampling or self.player.sampling
            return cut_prompt(tokens, self.player.context, sampling.max_tokens)
        return tokens

    def _problem(self, p: RunningEpisode, turn: Turn, tokens: Sequence[int]) -> str | None:
        """Return why a context cannot begin with these tokens, or None. Raises UserError if that should end the run."""
        first = not p.turns
        if tokens and (not first or len(tokens) < self.player.context):
            return None
        what = f"has {len(tokens)} tokens" if tokens else "is empty"
        holds = f"the model's context holds {self.player.context} tokens, reply included"
        if not first or turn.tokens is not None or (tokens and self.player.too_long == "skip"):
            return f"the prompt {what}; {holds}"
        raise UserError(
            f"the prompt of task {p.episode.task.get('id')!r} {what}; {holds}: shorten it or leave the row out"
        )

    def _exhausted(self, p: RunningEpisode, turn: Turn, tokens: Sequence[int]) -> StopReason | None:
        """Return the stop reason if the episode has reached a limit, else None."""
        bounds = p.episode.limits or self.player.bounds
        if len(p.replies) >= bounds.turns:
            return StopReason.TURNS
        if bounds.tokens is not None and p.n_sampled >= bounds.tokens:
            return StopReason.LENGTH
        if bounds.tool_calls is not None and is_tool(turn) and p.tool_answers >= bounds.tool_calls:
            return StopReason.CALLS
        if bounds.seconds is not None and p.turns and time.perf_counter() - p.began > bounds.seconds:
            return StopReason.TIME
        told = p.context.told and not turn.whole  # a whole turn is judged by itself
        full = len(p.context.transcript) + len(tokens) >= self.player.context or told
        return StopReason.CONTEXT if full else None

    def _end(self, index: int, problem: str) -> None:
        self._finish(index, Done(Invalid(problem, InvalidKind.UNREADABLE)))
        self.pool.drop(index)

    def _finish(self, index: int, done: Done) -> None:
        self.finished[index] = self.playing[index].rollouts(done, self.plan is not None)
        awaited = self.awaiting.pop(index, None)
        for rollout in self.finished[index]:
            assert isinstance(rollout, Rollout), "it has ended"
            rollout.seconds = time.perf_counter() - self.requested[index] if awaited is None else awaited
        if awaited is None:
            self._leave(index)

    def _leave(self, index: int) -> None:
        """Free what the engine keeps of an episode, and begin those that it has not begun."""
        for place in range(0 if self.pool.single_turn else len(self.playing[index].contexts)):
            self.engine.forget(self._request(index, place))
        for other in self.shares.end(index):
            self._begin(other)


def _context_of(p: RunningEpisode, turn: Turn) -> dict[str, Any]:
    """Return the prompt in the form for reward models. Raises UserError if no search can begin with it."""
    if p.replies or p.context.transcript.media:
        raise UserError(
            "--search needs one reply to a text, and this environment asks for several, or shows a picture: leave --search "
            "out"
        )
    if turn.tokens is not None:
        raise UserError(
            "--search needs text, as a reward model cannot read token ids, which this environment shows: leave --search out"
        )
    return {"prompt": turn.text} if turn.messages is None else {"messages": list(turn.messages)}


def cut_observation(tokens: Sequence[int], room: int, max_tokens: int) -> list[int]:
    """Return an observation cut so that a whole reply fits into `room` tokens, or to half of the room if that is more.

    The middle is left out: three quarters of the length are for the beginning, where the best results are, and the rest
    for the end, which closes what was opened.
    """
    if len(tokens) < room or room < LEAST_SHOWN:
        return list(tokens)
    length = max(room // 2, room - max_tokens)
    end = length // 4
    return [*tokens[: length - end], *tokens[len(tokens) - end :]]


def cut_prompt(tokens: Sequence[int], context: int, max_tokens: int) -> list[int]:
    """Return a prompt without its beginning, so that a whole reply fits into the context, or cut to half of the
    context.

    The first token stays, because models rely on the token that opens a context.
    """
    length = max(context // 2, context - max_tokens)
    return [*tokens[:1], *tokens[len(tokens) - length + 1 :]]
