"""Demonstrations of episodes: imitation sees the tokens, stops and masks that a policy would have had."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from environments import looking_up

from posttrain import rl, sft
from posttrain.cli.main import main
from posttrain.core.batch import Stats
from posttrain.core.transcripts import Mask, SpanKind, Transcript
from posttrain.core.types import Reply, Sampling, StopReason, Task, Turn, UserError
from posttrain.data.tasks import to_tasks
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.scripted import ScriptedEngine
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import Player
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.checkpoint import resolve
from posttrain.runs.record.rollout_reading import read_file, rows_of
from posttrain.runs.terminal.printing import sample
from posttrain.training.sources.demonstrations import cut, demonstration_runner, episode_texts, stored
from posttrain.training.sources.example_stream import progress
from posttrain.training.sources.length_filter import TooLong
from posttrain.training.sources.sft_source import Transcripts
from posttrain.training.verbs import sft as sft_verb

NEED = ("prompt", "response")
ROW: Task = {"id": "a", "prompt": "1+1=", "answer": "2", "replies": ["7a", "b3"]}


def spans(transcript: Transcript) -> list[tuple[str, list[int]]]:
    return [(str(s.kind), transcript.tokens[s.start : s.start + s.length]) for s in transcript.spans]


def made(env: Any, tokenizer: Tokenizer, rows: list[Task], mask: Mask = "assistant", **how: Any) -> list[Any]:
    with EnvPool(env, 0) as pool:
        enact = demonstration_runner(pool, tokenizer, [1])
        tasks = to_tasks(rows, need=NEED)
        return list(Transcripts(tasks, tokenizer, [1], 64, TooLong("skip", 64, print), mask, enact, **how))


def test_what_a_policy_said_is_imitated_token_for_token(tokenizer: Tokenizer) -> None:
    engine = LocalEngine(tiny(tokenizer, context=256), tokenizer, slots=4)
    with EnvPool(looking_up, 0) as pool:
        player = Player(pool, engine, tokenizer, Sampling(max_tokens=200), 256)
        rollouts = player.play(
            [Episode({"id": str(i), "prompt": f"{i}+1=", "answer": "2"}, str(i), i) for i in range(12)]
        )
        stops = {turn.text[-1:] == "7" for r in rollouts for turn in r.turns if turn.kind is SpanKind.SAMPLED}
        assert stops == {True, False}
        tried = 0
        for rollout in rollouts:
            said = [turn.text for turn in rollout.turns if turn.kind is SpanKind.SAMPLED]
            if not all(said) or rollout.stop.truncated:
                continue
            tried += 1
            [(again, reward)] = demonstration_runner(pool, tokenizer, engine.eos_ids)({**rollout.task, "replies": said})
            assert reward == rollout.reward
            for mine, theirs in zip(again, rollout.transcripts, strict=True):
                assert mine.tokens == theirs.tokens
                assert list(mine.scored) == list(theirs.scored)
                assert [s.kind for s in mine.spans] == [
                    SpanKind.IMITATED if s.kind is SpanKind.SAMPLED else s.kind for s in theirs.spans
                ]
    assert tried > 5


def test_of_an_episode_the_last_reply_alone_is_trained_where_the_mask_is_last(tokenizer: Tokenizer) -> None:
    [[every]], [[last]] = (
        made(looking_up, tokenizer, [{**ROW, "replies": ["ab7", "2"]}], mask) for mask in ("assistant", "last")
    )
    assert last.tokens == every.tokens
    assert [text for kind, text in spans(last) if kind == "imitated"] == [
        text for kind, text in spans(every) if kind == "imitated"
    ][-1:]
    assert last.n_scored < every.n_scored


def test_a_reply_ends_with_its_stop_string_or_with_the_end_of_sequence(tokenizer: Tokenizer) -> None:
    [[transcript]] = made(looking_up, tokenizer, [{**ROW, "replies": ["ab7", "2"]}])
    encode = tokenizer.encode
    assert spans(transcript) == [
        ("prompt", encode("1+1=", start=True)),
        ("imitated", encode("ab7")),
        ("tool", encode("ab7")),
        ("imitated", [*encode("2"), 1]),
    ]


def quiet(task: Task) -> Generator[Turn | str, Reply, Any]:
    """The second reply is not learned from, the third has a context of its own."""
    yield task["prompt"]
    yield Turn("x", learn=False, max_tokens=2)
    yield Turn("y", fresh=True)
    return 1.0


def test_masks_and_contexts_are_those_of_the_environment(tokenizer: Tokenizer) -> None:
    [[first, second]] = made(quiet, tokenizer, [{**ROW, "replies": ["a", "bbbb", "c"]}])
    encode = tokenizer.encode
    assert spans(first) == [
        ("prompt", encode("1+1=", start=True)),
        ("imitated", [*encode("a"), 1]),
        ("observation", encode("x")),
        ("observation", encode("bb")),
    ]
    assert spans(second) == [("prompt", encode("y", start=True)), ("imitated", [*encode("c"), 1])]


@pytest.mark.parametrize(
    ("replies", "problem"),
    [
        (["7"], "asks for reply 2, but the row has 1"),
        (["2", "more"], "ends after 1 of its 2 replies"),
        (["a7 and on", "b"], "reply 1 has text after the stop string 'a7'"),
        (["", "b"], "reply 1 is empty"),
        (["raise"], "RuntimeError: as asked"),
    ],
)
def test_replies_that_the_environment_does_not_ask_for_are_refused(
    tokenizer: Tokenizer, replies: list[str], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        made(looking_up, tokenizer, [{**ROW, "replies": replies}])


def test_rows_with_replies_need_an_environment(tokenizer: Tokenizer) -> None:
    tasks = to_tasks([ROW], need=NEED)
    with pytest.raises(UserError, match="row 1: the row has replies: give the environment"):
        Transcripts(tasks, tokenizer, [1], 64, TooLong("skip", 64, print))[0]


def test_episodes_of_too_little_reward_are_left_out(tokenizer: Tokenizer) -> None:
    rows = [{**ROW, "id": "a", "replies": ["2"]}, {**ROW, "id": "b", "replies": ["3"]}]
    with EnvPool(looking_up, 0) as pool:
        tasks, enact = to_tasks(rows, need=NEED), demonstration_runner(pool, tokenizer, [1])
        episodes = Transcripts(
            tasks, tokenizer, [1], 64, TooLong("skip", 64, print), "assistant", enact, min_reward=1.0
        )
        for _ in range(2):  # one that comes again is counted once
            assert [made is not None for made in episodes] == [True, False]
    assert episodes.kept == "--min-reward 1: 1 of 2 episodes kept"
    assert [m is not None for m in made(looking_up, tokenizer, rows)] == [True, True]


# -- rollouts that a run kept ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("enacting")
    rows = [{"id": str(i), "prompt": f"{i}+1=", "answer": str(i + 1), "replies": ["7", str(i + 1)]} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: Any = {
        "quiet": True,
        "tokenizer": "characters",
        "hidden": 16,
        "layers": 1,
        "heads": 2,
        "context": 64,
        "vocab": 40,
    }
    sft(str(folder / "rows.jsonl"), out=str(folder / "sft"), env="environments:looking_up", rows=4, epochs=2, **options)
    how: Any = {"model": str(folder / "sft"), "out": str(folder / "rl"), "quiet": True, "max_tokens": 12}
    rl(str(folder / "rows.jsonl"), env="environments:looking_up", steps=1, prompts=4, group=3, **how)
    return folder


def test_rollouts_of_a_run_are_imitated_as_they_stand(place: Path) -> None:
    file = place / "rl" / "rollouts" / "step-000001.parquet"
    rows = rows_of(read_file(file))
    tokenizer = Tokenizer.load(resolve(place / "sft"))
    for row in rows:
        (transcript,), reward = stored(row, tokenizer)
        assert transcript.tokens == row["tokens"] and reward == row["reward"]
        sampled = [span for span in row["spans"] if span["kind"] == "sampled"]
        learned = [span["start"] + i for span in sampled for i in range(span["length"])]
        assert list(transcript.scored) == learned
    assert stored({**rows[0], "reward": None, "invalid": "no judge"}, tokenizer)[1] is None
    run = sft(str(file), model=str(place / "sft"), out=str(place / "again"), rows=4, min_reward=-1.0, quiet=True)
    assert run.metrics[-1]["loss"] > 0
    with pytest.raises(UserError, match="none of .* reaches --min-reward"):
        sft(str(file), model=str(place / "sft"), out=str(place / "none"), rows=4, min_reward=5.0, quiet=True)


def test_a_rollout_of_another_tokenizer_or_a_damaged_one_is_refused(place: Path) -> None:
    rows = rows_of(read_file(place / "rl" / "rollouts" / "step-000001.parquet"))
    row = max(rows, key=lambda row: len(row["text"]))
    other = Tokenizer.train(["another text 0123456789+="], 40, "characters")
    with pytest.raises(UserError, match="another tokenizer"):
        stored(row, other)
    for damage in ({"turns": [{"role": "sampled"}]}, {"transcripts": [{"tokens": 3}]}, {"transcripts": [7]}):
        with pytest.raises(UserError, match="damaged"):
            stored({**row, **damage}, Tokenizer.load(resolve(place / "sft")))


def test_words_of_a_recorded_turn_are_those_of_its_own_tokens_and_only_the_policys_are_looked_at(place: Path) -> None:
    """A chat template puts more around what an environment says."""
    tokenizer = Tokenizer.load(resolve(place / "sft"))
    rows = rows_of(read_file(place / "rl" / "rollouts" / "step-000001.parquet"))
    row = max(rows, key=lambda row: len(row["text"]))
    framed = [turn if turn["role"] == "sampled" else {**turn, "text": "in a frame"} for turn in row["turns"]]
    assert framed != row["turns"] and stored({**row, "turns": framed}, tokenizer)[0][0].tokens == row["tokens"]
    first = next(turn for turn in row["turns"] if turn["role"] == "sampled" and turn["length"] > 2)
    short = [{**turn, "length": 1} if turn is first else turn for turn in row["turns"]]
    with pytest.raises(UserError, match="another tokenizer"):
        stored({**row, "turns": short}, tokenizer)


# -- read by people ----------------------------------------------------------------------------------------------------


def test_an_episode_reads_like_a_conversation(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(place / "rl"), "--number", "100"]) == 0
    shown = capsys.readouterr().out
    file = place / "rl" / "rollouts" / "step-000001.parquet"
    rows = rows_of(read_file(file))
    assert shown.count("── reward") == len(rows) and shown.count("prompt │") == len(rows)
    assert shown.count("tool   │") == sum(turn["role"] == "tool" for row in rows for turn in row["turns"]) > 0
    assert main(["rollouts", str(file), "--order", "longest", "--number", "1", "--json"]) == 0
    longest = json.loads(capsys.readouterr().out)
    lengths = [sum(turn["length"] for turn in row["turns"]) for row in rows]
    assert sum(turn["length"] for turn in longest["turns"]) == max(lengths)
    group = rows[0]["group"]
    assert main(["rollouts", str(place / "rl"), "--group", group, "--number", "100", "--json"]) == 0
    assert {json.loads(line)["group"] for line in capsys.readouterr().out.splitlines()} == {group}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--step", "7"], "holds no rollouts of step 7: take one of 1"),
        (["--group", "zz"], "there are no rollouts of 'zz' in step 1"),
        (["--order", "odd"], "order"),
    ],
)
def test_what_is_not_there_is_said(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    assert main(["rollouts", str(place / "rl"), *words]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())
    assert main(["rollouts", str(place)]) == 2 and main(["rollouts", str(place / "no.jsonl")]) == 2


def test_calls_of_tools_are_printed_behind_their_reply(capsys: pytest.CaptureFixture[str]) -> None:
    calls = [
        {"tool": "find", "arguments": {"what": "x"}, "end": 4},
        {"tool": "", "arguments": {}, "end": 9, "problem": "odd"},
    ]
    turn = {"role": "sampled", "text": "hm", "reward": 0.0, "transcript": 0, "start": 0, "length": 3, "calls": calls}
    sample([{"group": "g", "reward": 1.0, "advantage": 0.5, "stop": "eos", "turns": [turn]}], 1)
    assert capsys.readouterr().out.splitlines()[1:4] == [
        "reply  │ hm",
        "call   │ find(what='x')",
        "call   │ malformed: odd",
    ]


# -- what is cut and what is left over ---------------------------------------------------------------------------------


def test_what_lies_beyond_the_context_is_cut_from_each_transcript() -> None:
    first, second = Transcript(), Transcript()
    first.observe([1, 2], SpanKind.PROMPT)
    first.imitate([3, 4, 5])
    second.observe([6, 7, 8], SpanKind.PROMPT)
    second.imitate([9])
    assert [t.tokens for t in cut([first, second], None)] == [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert [(t.tokens, list(t.scored)) for t in cut([first, second], 3)] == [([1, 2, 3], [2])]
    assert [t.tokens for t in cut([first, second], 4)] == [[1, 2, 3, 4], [6, 7, 8, 9]]
    with pytest.raises(UserError, match="nothing to learn"):
        cut([first, second], 2)


def test_a_written_reply_that_is_cut_off_is_not_stopped(tokenizer: Tokenizer) -> None:
    for most, length, stop in ((2, 2, StopReason.LENGTH), (3, 3, StopReason.STOP), (9, 3, StopReason.STOP)):
        engine = ScriptedEngine(tokenizer, [1], ["ab7", "x"])
        engine.submit(0, [2], Sampling(max_tokens=most, stop=("7", "b7")))
        [done] = engine.poll()
        assert (len(done.tokens), done.stop) == (length, stop) and engine.left == 1


def test_a_written_reply_ends_behind_the_stop_string_that_is_whole_first(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, [1], ["a7 ", "a7b3"])
    engine.submit(0, [2], Sampling(max_tokens=9, stop=("7 ", "a7")))
    [done] = engine.poll()
    assert done.text == "a7" and done.tokens == tokenizer.encode("a7")
    with pytest.raises(UserError, match="reply 2 has text after the stop string 'a7'"):
        engine.submit(0, [2], Sampling(max_tokens=9, stop=("b3", "7")))


def test_an_episode_of_just_the_reward_asked_for_is_learned_from_and_others_are_counted(tokenizer: Tokenizer) -> None:
    rows = [{**ROW, "id": "a", "replies": ["2"]}, {**ROW, "id": "b", "replies": ["3"]}]
    with EnvPool(looking_up, 0) as pool:
        tasks = to_tasks(rows, need=NEED)
        enact = demonstration_runner(pool, tokenizer, [1])
        found = Transcripts(tasks, tokenizer, [1], 64, TooLong("skip", 64, print), "assistant", enact, min_reward=1.0)
        assert [one is not None for one in found] == [True, False] and found.unwanted == 1
        stats = Stats()
        progress(found, 2, 1, stats)
        assert stats.means()["unwanted"] == 1 and found.unwanted == 0


def not_the_replies(task: Task) -> Generator[str, Reply, float]:
    yield task["prompt"]
    return float("replies" not in task)


def test_an_environment_does_not_see_what_it_is_to_be_told(tokenizer: Tokenizer) -> None:
    with EnvPool(not_the_replies, 0) as pool:
        [(_, reward)] = demonstration_runner(pool, tokenizer, [1])({**ROW, "replies": ["2"]})
    assert reward == 1.0


def test_the_folder_of_a_run_stands_for_its_rollouts(place: Path) -> None:
    run = sft(str(place / "rl"), model=str(place / "sft"), out=str(place / "folder"), rows=4, quiet=True)
    again = sft(str(place / "rl" / "rollouts"), model=str(place / "sft"), out=str(place / "inner"), rows=4, quiet=True)
    assert [m["loss"] for m in run.metrics] == [m["loss"] for m in again.metrics]


def test_replies_are_played_beside_a_response_and_a_least_reward_needs_episodes(tokenizer: Tokenizer) -> None:
    [[transcript]] = made(looking_up, tokenizer, [{**ROW, "response": "2", "replies": ["ab7", "2"]}])
    assert [kind for kind, _ in spans(transcript)] == ["prompt", "imitated", "tool", "imitated"]
    with pytest.raises(UserError, match="--min-reward needs recorded rollouts"):
        made(looking_up, tokenizer, [{"id": "a", "prompt": "1+1=", "response": "2"}], min_reward=1.0)


def nim_rows(count: int) -> list[Task]:
    return [
        {"id": f"{n}", "stones": n, "most": 2, "replies": ["1\n"] * n} for n in range(4, 4 + count)
    ]  # the replies hold one digit, what the environment shows all of them


def test_a_new_tokenizer_knows_what_the_environment_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("characters", "bpe"):
        run = sft(nim_rows(20), env="nim", out=str(tmp_path / kind), tokenizer=kind, vocab=400, hidden=16, layers=1,
                  heads=2, steps=1, rows=4, quiet=True)  # fmt: skip
        known = Tokenizer.load(resolve(str(run.path)))
        shown = "1 taken, 23 left, 1 to 2: "
        assert known.decode(known.encode(shown)) == shown
        if kind == "bpe":
            assert len(known.encode(" taken")) == 1  # learned from what is shown, not a byte at a time
    assert "no token for" not in capsys.readouterr().err


def test_what_an_environment_shows_and_the_model_cannot_read_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small: dict[str, Any] = {"steps": 1, "quiet": True, "threads": 1}
    start = sft([{"prompt": "1 1", "response": "1\n"}] * 4, out=str(tmp_path / "start"), tokenizer="characters", hidden=16,
                layers=1, heads=2, context=256, rows=2, **small)  # fmt: skip
    said = "of what the environment shows"
    sft(nim_rows(2), env="nim", model=str(start.path), out=str(tmp_path / "sft"), rows=2, **small)
    assert said in capsys.readouterr().err
    own = [{key: value for key, value in row.items() if key != "replies"} for row in nim_rows(2)]
    rl(own, "nim", str(start.path), out=str(tmp_path / "rl"), prompts=1, group=2, max_tokens=2, **small)
    assert capsys.readouterr().err.count(said) == 1


# -- rows that cannot be played ----------------------------------------------------------------------------------------


def test_after_a_row_that_cannot_be_played_the_next_one_is_played_as_ever(tokenizer: Tokenizer) -> None:
    wrong: list[Task] = [{**ROW, "replies": replies} for replies in (["7"], ["2", "more"], ["raise"], ["a7 b", "b"])]
    right: Task = {**ROW, "replies": ["7", "2"]}
    for workers in (0, 1):
        with EnvPool(looking_up, workers) as pool:
            enact = demonstration_runner(pool, tokenizer, [1])
            [expected] = enact(right)
            for task in wrong:
                with pytest.raises(UserError):
                    enact(task)
                [([transcript], reward)] = enact(right)
                assert (spans(transcript), reward) == (spans(expected[0][0]), expected[1])
                assert not pool.pending


def test_a_column_of_replies_that_a_row_has_nothing_in_leaves_it_a_demonstration(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    told: Task = {"prompt": "1+1=", "response": "2"}
    script: Task = {**ROW, "replies": ["7", "2"]}
    [[alone]] = made(looking_up, tokenizer, [told])
    plain = spans(alone)
    for nothing in (None, [], 5, "7"):
        rows = [{**told, "replies": nothing}, script]
        first, second = made(looking_up, tokenizer, rows)
        assert spans(first[0]) == plain and len(spans(second[0])) > len(plain)
    rows = [
        told,
        script,
        *({**told, "prompt": f"{i}+1=", "replies": 5} for i in range(5)),
    ]  # the one is found, wherever
    options: Any = {
        "env": "environments:looking_up",
        "out": str(tmp_path / "run"),
        "hidden": 16,
        "layers": 1,
        "heads": 2,
    }
    run = sft(rows, tokenizer="characters", vocab=40, context=64, rows=7, steps=1, quiet=True, **options)
    assert run.metrics[-1]["loss"] > 0
    with pytest.raises(UserError, match="reply 2 must be text"):
        made(looking_up, tokenizer, [{**told, "replies": ["7", 2]}])


def test_a_tokenizer_waits_for_few_episodes_that_cannot_be_played(tokenizer: Tokenizer) -> None:
    tried: list[str] = []

    def enact(task: Task) -> list[tuple[list[Transcript], float]]:
        tried.append(task["id"])
        if task["id"] in ("1", "2", "4", "5", "6"):
            raise UserError("did not return within 10 s")
        shown = Transcript()
        shown.imitate(tokenizer.encode(task["id"]))
        return [([shown], 1.0)]

    rows: list[Task] = [{**ROW, "id": str(i)} for i in range(9)]
    assert list(episode_texts(enact, tokenizer, rows)) == ["0", "3"]
    assert tried == list("0123456")


def test_what_a_tokenizer_reads_is_played_where_it_can_be_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread())
        return demonstration_runner(*args, **kwargs)

    monkeypatch.setattr(sft_verb, "demonstration_runner", noted)
    sft(nim_rows(4), env="nim", out=str(tmp_path / "run"), vocab=300, hidden=16, layers=1, heads=2, steps=1, rows=2,
        quiet=True)  # fmt: skip
    assert threads == {threading.main_thread()}
