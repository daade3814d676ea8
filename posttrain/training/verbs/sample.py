"""`posttrain sample`: several checkpoints reply to every prompt over a grid of settings; replies become rows to label.

A reply depends on its checkpoint's place, its settings, its prompt and its number, through counter-based seeds, never
on other replies. So any number of slots gives the same file, an interrupted file is continued exactly, and adaptive
sampling gives the replies that as many --samples would have given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from itertools import combinations, product
from pathlib import Path
from typing import Any

from posttrain.config.inference import Sample
from posttrain.config.resolve import own_judge, validate
from posttrain.config.search_options import check_proposals
from posttrain.config.service_options import named_services
from posttrain.core import run_date, user_files
from posttrain.core.coerce import convert
from posttrain.core.component import setting_of
from posttrain.core.json_text import json_text, number
from posttrain.core.messages import near
from posttrain.core.option_aliases import suggestion
from posttrain.core.rollouts import Rollout
from posttrain.core.seeds import seed_of
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Invalid, Sampling, Task, UserError
from posttrain.data.labels import DETAILS, SAID, to_prompt
from posttrain.data.preference_examples import MOST
from posttrain.data.tasks import Stream, Tasks
from posttrain.data.tasks_from_rows import Convert
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.open_engine import open_engine
from posttrain.engines.search.search_engine import SearchEngine
from posttrain.envs.play.episode import Episode, content_text
from posttrain.envs.play.group_rewards import scores_groups
from posttrain.envs.play.load_env import is_generator_env, load_converter, load_env
from posttrain.envs.play.player import Player
from posttrain.models.checkpoint_folder import load_model
from posttrain.runs import fingerprint
from posttrain.runs.chat_choice import Chatting
from posttrain.runs.checkpoint import resolve
from posttrain.runs.jsonl_writer import Lines
from posttrain.training.playground import count_lines, open_playground, service_counts
from posttrain.training.row_warnings import warn_unread
from posttrain.training.search_setup import SearchTotals, searching, warn_large_search
from posttrain.training.setup import end_tokens, load_tasks, prepare, reply_length_note
from posttrain.training.sources.length_filter import Prompts, TooLong
from posttrain.verify.similarity import edit_similarity

KIND = {
    "samples": int, "temperature": tuple[float, ...], "top_p": tuple[float, ...], "top_k": int, "max_tokens": int,
    "stop": str,
}  # fmt: skip
"""Settings that a kind of prompt may have."""
FREE = {"out", "resume", "overwrite", "quiet", "slots", "replicas", "threads", "device", "env_workers", "tasks", "model",
        "reward_model", "judge", "retriever"}  # fmt: skip
"""Options that do not affect replies, and options whose content is fingerprinted instead."""

PROGRESS_REPORTS = 20  # most progress reports


@dataclass(frozen=True)
class Written:
    """A file of rows with responses."""

    path: Path
    items: int
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield its rows."""
        with user_files.opened(self.path) as file:
            yield from map(json.loads, file)


@dataclass(frozen=True)
class _Cell:
    """A cell of the grid: checkpoint, search, settings, and number of replies."""

    model: int  # index of the checkpoint
    search: str  # "": no search
    sampling: Sampling
    seed: int
    samples: int
    most: int  # samples if the first ones disagree

    def episode(self, task: Task, member: int) -> Episode:
        s = self.sampling
        search = [self.search] if self.search else []
        seed = seed_of(self.seed, "sample", task["id"], self.model, s.temperature, s.top_p, s.top_k, member, *search)
        return Episode(task, str(task["id"]), seed, s)


_Place = tuple[int, int, int]  # a reply's indices: task in the block, cell, member


def sample(config: Sample, rows: Any = None, env: Callable[..., Any] | None = None) -> Written:
    """Sample replies and write the rows. `rows`, `env`: objects in place of the names in the options.

    Raises UserError for a mistake of the caller's.
    """
    validate(config)
    device = prepare(config)
    grids = _Grids(config)
    spec = env or config.env or None
    makes_prompts = spec is not None and is_generator_env(load_env(spec))
    if config.adaptive is not None and spec is not None and scores_groups(load_env(spec)):
        raise UserError(
            "--adaptive does not go with a reward that scores whole groups, as it samples part of a group later: use "
            f"--samples {config.adaptive} instead"
        )
    converter: Convert | None = load_converter(spec) if spec is not None and rows is None else None
    tasks = load_tasks(config, rows, env, () if makes_prompts else ("prompt",), convert=converter or to_prompt)
    if isinstance(tasks, Stream):
        raise UserError("these rows have no end: set the number to sample for with --limit")
    grids.check(tasks)
    warn_large_search(config)
    paths = [resolve(model) for model in config.model]
    said: list[str] = []
    say: Callable[[str], None] = (lambda text: None) if config.quiet else print
    with (
        Lines(Path(config.out), _dependencies(config, tasks, paths, env), config.resume, config.overwrite) as lines,
        run_date.begun(lines.day),
        open_playground(config, env, tasks, device, models=paths) as ground,
        ExitStack() as opened,
    ):
        players: dict[tuple[int, str], tuple[Player, Chatting]] = {}
        fitting = list(range(len(tasks)))
        for place, (path, known) in enumerate(zip(paths, ground.models, strict=True)):
            model, tokenizer, shown = load_model(path, device=device), known.tokenizer, known.chat.of(tasks)
            said += [f"{path}: {line}" if len(paths) > 1 else line for line in known.lines]
            end_tokens(model, tokenizer)
            warn_unread(tokenizer, shown)
            context = model.config.context
            said += reply_length_note({"--max-tokens": config.max_tokens}, context)
            options = EngineOptions(config.slots, config.precision, config.replicas)
            engine = opened.enter_context(closing(open_engine("local", model, tokenizer, options)))
            engine.load(model, 0)
            for name in config.search or ("",):
                own = searching(config, name, engine, path, model, tokenizer, ground.services) if name else engine
                players[place, name] = ground.player(own, tokenizer, context), known.chat
            if ground.pool.single_turn:
                prompts = Prompts(shown, tokenizer, TooLong(config.too_long, context, said.append))
                fitting = [place for place in fitting if prompts.fits(place)]
        if not fitting:
            raise UserError(f"no prompt fits into the context of {' and '.join(config.model)}: shorten them")
        sampler = _Sampler(config, grids, players, scored=spec is not None)
        sampler.write(tasks, fitting, lines, say)
        said += [line for name, totals in sampler.searched.items() for line in totals.lines(name)]
        said += count_lines(service_counts(ground.services))
        return Written(lines.path, lines.count, tuple(dict.fromkeys(said)))


class _Grids:
    """The grid of each kind of prompt."""

    def __init__(self, config: Sample) -> None:
        """Raises UserError for unknown or invalid settings of kinds."""
        self.config = config
        self._of: dict[str | None, list[_Cell]] = {None: self._cells({})}
        for kind, given in config.kinds.items():
            own = _read_kind(kind, given)
            heats = own.get("temperature", config.temperature)
            check_proposals(config, f"--kinds.{kind}.", heats, own.get("top_k", config.top_k))
            self._of[kind] = self._cells(own)

    def of(self, task: Task) -> list[_Cell]:
        kind = task.get(self.config.kind) if self.config.kind else None
        return self._of.get(None if kind is None else str(kind), self._of[None])

    @property
    def largest(self) -> int:
        """The largest number of first replies of a prompt."""
        return max(sum(cell.samples for cell in cells) for cells in self._of.values())

    def check(self, tasks: Tasks) -> None:
        """Raise UserError if no task has the column of kinds, or no task is of a kind with settings."""
        config = self.config
        if not config.kind:
            return
        seen = {str(task[config.kind]) for task in tasks if task.get(config.kind) is not None}
        if not seen:
            raise UserError(f"--kind {config.kind}: no row has this column; the first has {', '.join(tasks[0])}")
        if strange := [kind for kind in config.kinds if kind not in seen]:
            hint = near(strange[0], sorted(seen)) or f"; there are {', '.join(sorted(seen)[:12])}"
            raise UserError(f"--kinds.{strange[0]}: no prompt is of this kind{hint}")

    def _cells(self, own: Mapping[str, Any]) -> list[_Cell]:
        config = self.config

        def chosen(name: str) -> Any:
            return own.get(name, getattr(config, name))

        stop = (own["stop"],) if own.get("stop") else config.stop
        samples = chosen("samples")
        most = max(samples, config.adaptive or 0)
        cells = []
        models, searches = range(len(config.model)), config.search or ("",)
        for model, search, heat, top_p in product(models, searches, chosen("temperature"), chosen("top_p")):
            sampling = Sampling(heat, top_p, chosen("top_k"), chosen("max_tokens"), stop)
            for seed in config.seed if heat else config.seed[:1]:
                cells.append(_Cell(model, search, sampling, seed, samples if heat else 1, most if heat else 1))
            if not heat and chosen("top_p")[0] != top_p:
                cells.pop()  # a greedy reply is the same for any top-p
        if (total := sum(cell.most for cell in cells)) > MOST:
            raise UserError(
                f"a prompt would have {total} replies, and a row holds at most {MOST}: lower --samples, or use a smaller "
                "grid "
                "(--temperature, --top-p, --seed, --model, --search, --adaptive)"
            )
        return cells


def _read_kind(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a kind in their types; bounds are those of the options."""
    where = f"--kinds.{kind}."
    if not isinstance(given, Mapping):
        raise UserError(f"--kinds.{kind} needs settings: --kinds.{kind}.temperature 0.2")
    bounds = {f.name: setting_of(f).bounds for f in fields(Sample)}
    read: dict[str, Any] = {}
    for name, value in given.items():
        plain = name.replace("-", "_")
        if plain not in KIND:
            hint = suggestion(plain, [*KIND]) or f"; there are {', '.join(KIND)}"
            raise UserError(f"{where}{name}: not a setting of a kind{hint}")
        single = KIND[plain] == tuple[float, ...] and isinstance(value, int | float)
        read[plain] = convert((value,) if single else value, KIND[plain], f"{where}{name}")
        if plain != "stop":
            bounds[plain].check(f"{where}{name}", read[plain])
    return read


class _Sampler:
    """Samples blocks of tasks, and writes their rows."""

    def __init__(
        self, config: Sample, grids: _Grids, players: Mapping[tuple[int, str], tuple[Player, Chatting]], scored: bool
    ) -> None:
        """`players`: (checkpoint, search) -> its player, and the chat format for plain prompts; written rows keep the
        prompts.
        """
        self.config, self.grids, self.players, self.scored = config, grids, players, scored
        self.searched: dict[str, SearchTotals] = {}  # by the name of the search

    def write(self, tasks: Tasks, places: Sequence[int], lines: Lines, say: Callable[[str], None]) -> None:
        """Write the remaining rows. An interrupted block is sampled again as a whole."""
        last = lines.last()
        if last is not None and (lines.count > len(places) or last.get("id") != tasks[places[lines.count - 1]]["id"]):
            raise UserError(f"{lines.path} has other rows than these tasks give: use --overwrite")
        size = max(1, 2 * self.config.slots // self.grids.largest)
        for first in range(lines.count // size * size, len(places), size):
            block = [tasks[place] for place in places[first : first + size]]
            before = lines.count
            lines.write(self._items(block)[before - first :])
            if PROGRESS_REPORTS * before // len(places) < PROGRESS_REPORTS * lines.count // len(places):
                say(f"{lines.count} of {len(places)} prompts")

    def _items(self, block: Sequence[Task]) -> list[dict[str, Any]]:
        cells = [self.grids.of(task) for task in block]
        first = [(t, c, m) for t, own in enumerate(cells) for c, cell in enumerate(own) for m in range(cell.samples)]
        replies = self._played(block, cells, first)
        if self.config.adaptive is not None:
            of_task: dict[int, list[Rollout]] = {}
            for place, reply in replies.items():
                of_task.setdefault(place[0], []).append(reply)
            apart = [t for t, own in of_task.items() if self._disagree(own)]
            every = [(t, c, m) for t in apart for c, cell in enumerate(cells[t]) for m in range(cell.most)]
            replies |= self._played(block, cells, [place for place in every if place not in replies])
        found: list[list[tuple[_Cell, int, Rollout]]] = [[] for _ in block]
        for t, c, m in sorted(replies):
            found[t].append((cells[t][c], m, replies[t, c, m]))
        return [self._item(task, own) for task, own in zip(block, found, strict=True)]

    def _played(
        self, block: Sequence[Task], cells: Sequence[Sequence[_Cell]], places: Sequence[_Place]
    ) -> dict[_Place, Rollout]:
        found: dict[_Place, Rollout] = {}
        for (model, search), (player, chat) in self.players.items():
            own = [(t, c, m) for t, c, m in places if (cells[t][c].model, cells[t][c].search) == (model, search)]
            if own:
                rollouts = player.play([cells[t][c].episode(chat.task(block[t]), m) for t, c, m in own])
                if len(rollouts) > len(own):
                    raise UserError(
                        "the environment has several sides, and a row holds replies to one prompt: use posttrain eval "
                        "--out, which writes whole rollouts"
                    )
                found |= zip(own, rollouts, strict=True)
        return found

    def _disagree(self, rollouts: Sequence[Rollout]) -> bool:
        if len(rollouts) < 2:
            return False
        if self.scored:
            scores = [r.reward for r in rollouts if not isinstance(r.reward, Invalid)]
            return bool(scores) and max(scores) - min(scores) >= self.config.disagreement > 0
        return mean_dissimilarity([r.text for r in rollouts]) >= self.config.disagreement

    def _item(self, task: Task, replies: Sequence[tuple[_Cell, int, Rollout]]) -> dict[str, Any]:
        """Return the row of a task with its replies."""
        kept = {name: value for name, value in task.items() if name not in (*SAID, *DETAILS)}
        for cell, _, rollout in replies:
            kept |= self._shown(rollout, self.players[cell.model, cell.search][0])
        samples = [
            {**self._how(cell), "member": m, **_reply_columns(rollout), **self._search_columns(task, cell, m, rollout)}
            for cell, m, rollout in replies
        ]
        texts, rollouts = [r.text for _, _, r in replies], [r for _, _, r in replies]
        if self.config.distinct:
            first = {text: place for place, text in reversed(list(enumerate(texts)))}
            places = sorted(first.values())
            samples = [{**samples[place], "times": texts.count(texts[place])} for place in places]
            texts, rollouts = [texts[place] for place in places], [rollouts[place] for place in places]
        row = {**kept, "responses": texts, "samples": samples}
        return {**row, **scored_columns([(r.reward, r.rewards) for r in rollouts])} if self.scored else row

    def _how(self, cell: _Cell) -> dict[str, Any]:
        s = cell.sampling
        top_k = {"top_k": s.top_k} if s.top_k else {}
        settings = {"temperature": s.temperature, "top_p": s.top_p, **top_k, "max_tokens": s.max_tokens}
        search = {"search": cell.search} if cell.search else {}
        return {"model": self.config.model[cell.model], **search, **settings, "seed": cell.seed}

    def _search_columns(self, task: Task, cell: _Cell, member: int, rollout: Rollout) -> dict[str, Any]:
        """Return the columns that describe the search for a reply, if there was one."""
        engine = self.players[cell.model, cell.search][0].engine
        record = engine.record(cell.episode(task, member).seed) if isinstance(engine, SearchEngine) else None
        if record is None:
            return {}
        totals = self.searched.setdefault(cell.search, SearchTotals())
        totals.add(record, rollout.reward if self.scored else None)
        return record.columns

    def _shown(self, rollout: Rollout, player: Player) -> dict[str, Any]:
        """Return the prompt that the policy saw, as columns of a row. Raises UserError if no row can hold it."""
        task = rollout.task
        if sum(turn.kind is SpanKind.SAMPLED for turn in rollout.turns) > 1 or len(rollout.transcripts) > 1:
            raise UserError(
                f"the environment asked for several replies (task {task['id']!r:.60}), and a row holds single replies: use "
                "posttrain eval --out, which writes whole rollouts"
            )
        if not rollout.turns:  # the environment failed before its first turn
            return {}
        if rollout.transcripts[0].media:
            raise UserError(
                "rows of samples cannot hold pictures: use posttrain eval --out, which writes whole rollouts"
            )
        asked, prompt = task.get("messages"), rollout.prompt
        if asked is not None and prompt == "\n".join(map(content_text, asked)):
            return {}
        if task.get("prompt") == prompt:
            return {}
        seen = rollout.transcripts[0].tokens[: rollout.turns[0].length]
        if seen[-8:] != player.tokenizer.encode(prompt, start=True)[-8:]:
            raise UserError(
                f"the environment shows messages of its own (task {task['id']!r:.60}), which rows of samples cannot hold: "
                'put them into the rows as "messages", with row_to_task'
            )
        return {"prompt": prompt}


def scored_columns(found: Sequence[tuple[float | Invalid, Mapping[str, float]]]) -> dict[str, Any]:
    """Return columns of a row: "scores", a number or null for each response; named parts; and reasons of invalid
    scores.
    """
    invalid = [[place, reward.reason] for place, (reward, _) in enumerate(found) if isinstance(reward, Invalid)]
    columns: dict[str, Any] = {"scores": [None if isinstance(reward, Invalid) else reward for reward, _ in found]}
    if any(parts for _, parts in found):
        columns["parts"] = [{name: number(value) for name, value in parts.items()} for _, parts in found]
    return {**columns, "invalid": invalid} if invalid else columns


def mean_dissimilarity(texts: Sequence[str]) -> float:
    """Return 1 - the mean edit similarity of all pairs of these texts."""
    alike = []
    for a, b in combinations(texts, 2):
        similar = edit_similarity(a, b)
        alike.append(float(a == b) if isinstance(similar, Invalid) else similar)  # one of them is empty
    return 1.0 - sum(alike) / len(alike) if alike else 0.0


def _reply_columns(rollout: Rollout) -> dict[str, Any]:
    """Return columns of a reply: stop reason, tokens, and mean log-probability under its sampling settings."""
    logp = [x for transcript in rollout.transcripts for x in transcript.logp]
    mean = number(sum(logp) / len(logp)) if logp else None
    return {"stop": str(rollout.stop), "tokens": len(logp), "mean_logp": mean}


def _dependencies(
    config: Sample, tasks: Tasks, paths: Sequence[Path], env: Callable[..., Any] | None
) -> dict[str, Any]:
    """Return everything that the file depends on: options, content of tasks and weights, code of rewards."""
    options = {name: value for name, value in vars(config).items() if name not in FREE and not name.startswith("_")}
    found: dict[str, Any] = {"verb": "sample", "tasks": digest_of(tasks), **options}
    named = [("model", name, path) for name, path in zip(config.model, paths, strict=True)]
    named += [("reward model", name, resolve(f)) for name, f in named_services(config.reward_model, "reward-model")]
    judges = named_services(config.judge, "judge")
    named += [("judge", name, Path(file)) for name, file in judges]
    named += [("judge's model", name, resolve(own)) for name, file in judges if (own := own_judge(file))]
    named += [("retriever", name, Path(place)) for name, place in named_services(config.retriever, "retriever")]
    found |= {f"{kind} {name}": fingerprint.path_digest(path) for kind, name, path in named}
    return {**found, "code": fingerprint.code_digest(env or config.env)}


def digest_of(tasks: Tasks) -> str:
    """Return a fingerprint of the tasks' content, in their order."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(json_text(dict(sorted(task.items()))).encode("utf-8", "backslashreplace"))
    return found.hexdigest()
