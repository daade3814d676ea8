"""The generated world and its search engine, the episodes played there, what is counted of them, and the unmasked arm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from experiments import reader, retrieved_token_masking, search, search_r1, world
from experiments.behaviours import behaviour, facts_of, means
from experiments.search import AGAIN, answer_of, played, query_of, retrieved, searching
from experiments.world import ENTITIES, RELATIONS, Fact, Question, World, information
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Completion, StopReason, Task, Turn, UserError

WORLD = World(5)
TWO = Question("Babel", ("capital", "mayor"))
FIRST, LAST = WORLD.path(TWO)


def silent(text: str) -> None:
    pass


# -- the world ---------------------------------------------------------------------------------------------------------


def test_answer_of_two_hops_is_the_object_of_the_second_fact_whose_subject_is_the_first_ones_object() -> None:
    assert str(TWO) == " mayor of capital of Babel?"
    assert (FIRST.subject, FIRST.relation, LAST.relation) == ("Babel", "capital", "mayor")
    assert LAST.subject == FIRST.object and WORLD.task(TWO)["answer"] == LAST.object


def test_facts_of_two_worlds_agree_no_more_often_than_by_chance() -> None:
    one, other = World(1), World(2)
    share = float((one.objects == other.objects).mean())
    assert share < 4 / len(ENTITIES)
    assert (World(1).objects == one.objects).all()
    assert all(one.fact(e, r).object != e for e in ENTITIES for r in RELATIONS)


def test_search_finds_the_passages_with_most_words_of_the_query_the_subjects_counting_twice() -> None:
    """Compared with a count word by word over all passages."""

    def held(fact: Fact, query: str) -> int:
        words = query.replace("?", "").split()
        return 2 * (fact.subject in words) + (fact.relation in words) + (fact.object in words)

    every = [WORLD.fact(e, r) for e in ENTITIES for r in RELATIONS]
    for query in (" Babel capital", " Babel", " mayor", str(TWO), f" {FIRST.object} Babel rival", " of"):
        found = WORLD.find(query)
        best = sorted((held(fact, query) for fact in every), reverse=True)[: world.TOP]
        assert [held(fact, query) for fact in found] == best
        assert found == WORLD.find(query) and len(set(found)) == world.TOP
    assert WORLD.find(" Babel capital")[0] == FIRST


def test_question_alone_finds_its_first_fact_but_not_its_second() -> None:
    draw = random.Random(0)
    paths = [(q, WORLD.path(q)) for q in (reader.drawn_question(2, draw) for _ in range(200))]
    found = [(path[0] in WORLD.find(str(q)), path[1] in WORLD.find(str(q))) for q, path in paths]
    assert sum(first for first, _ in found) > 150 and sum(second for _, second in found) < 30


def test_every_word_of_an_episode_is_one_token() -> None:
    tokenizer = world.vocabulary()
    words = len(" mayor of capital of Babel?\n".split()) + 2  # the question mark and the end of the line
    assert len(tokenizer.encode("Search: mayor of capital of Babel?\n", start=True)) == words + 1
    for text in (information([FIRST]), "<think></think><search> Babel capital</search>", AGAIN):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text and tokenizer.unknown_id not in tokens


# -- episodes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply, query, answer",
    [
        ("<think></think><search> Babel capital</search>", "Babel capital", None),
        ("<answer> Babel</answer>", None, "Babel"),
        ("<search> Babel", None, None),
        (" Babel</search>", None, None),
        ("<search></search>", None, None),
        ("<search><information> Babel</search>", None, None),
        ("<search> Dedor<search> Babel</search>", "Babel", None),
        ("<answer> Dedor</answer><search> Babel</search>", "Babel", None),
        ("<answer> Babel</answer> and more", None, None),
        ("", None, None),
    ],
)
def test_a_reply_is_read_by_the_tags_that_it_ends_with(reply: str, query: str | None, answer: str | None) -> None:
    assert query_of(reply) == query and answer_of(reply) == answer


def episode(replies: Sequence[str]) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """(what was said, the verdict) of an episode of these replies; the last one is repeated as often as it is asked."""
    said: list[tuple[str, str]] = []
    playing = searching(WORLD.task(TWO))
    turn, left = next(playing), list(replies)
    while True:
        assert isinstance(turn, Turn) and turn.text is not None
        said.append(("tool" if turn.tool else "prompt", turn.text))
        said.append(("sampled", left.pop(0) if len(left) > 1 else left[0]))
        try:
            turn = playing.send(said[-1][1])
        except StopIteration as end:
            return said, end.value


ASK_FIRST, ASK_LAST = "<search> Babel capital</search>", f"<search> {FIRST.object} mayor</search>"
RIGHT = f"<answer> {LAST.object}</answer>"


def test_two_searches_and_the_right_answer_earn_the_reward() -> None:
    said, verdict = episode([ASK_FIRST, ASK_LAST, RIGHT])
    assert verdict == {"reward": 1.0, "searches": 2.0}
    assert str(FIRST) in said[2][1] and str(LAST) in said[4][1] and said[2][1].startswith("\n<information>")


def test_answer_in_a_passage_or_in_the_policys_own_information_earns_nothing() -> None:
    assert (
        episode([ASK_FIRST, f"<information>{LAST}</information>", f"<search> {LAST.object}</search>"])[1]["reward"] == 0
    )
    assert episode([RIGHT.replace("answer", "search"), "<answer> Babel</answer>"])[1]["reward"] == 0


def test_an_action_that_is_neither_search_nor_answer_is_told_so_and_after_four_actions_the_episode_ends() -> None:
    said, verdict = episode(["<think>"])
    assert [text for kind, text in said if kind == "tool"] == [AGAIN] * search.ACTIONS
    assert verdict == {"reward": 0.0, "searches": 0.0}
    assert episode([*["<think>"] * search.ACTIONS, RIGHT])[1]["reward"] == 1.0
    assert episode([*[ASK_FIRST] * search.ACTIONS, ASK_LAST])[1] == {"reward": 0.0, "searches": 4.0}


def test_scripted_searcher_that_is_never_careless_is_right_whenever_it_searches_and_its_rows_are_its_episode() -> None:
    always = {"precise": 1.0, "searches": 1.0, "goes_on": 1.0, "asks_again": 1.0}
    task = WORLD.task(TWO)
    policy = reader.Careless(task, random.Random(0), always)
    rows, reward = played(searching, task, policy)
    assert reward == 1.0 and len(rows) == 3
    assert [query_of(row["response"]) for row in rows] == ["Babel capital", f"{FIRST.object} mayor", None]
    assert rows[1]["prompt"].startswith(rows[0]["prompt"] + rows[0]["response"]) and str(FIRST) in rows[1]["prompt"]
    assert rows[2]["response"] == f"<think>{FIRST}.{LAST}</think><answer> {LAST.object}</answer>"
    never = {**always, "goes_on": 0.0}
    assert reader.Careless(task, random.Random(0), always)(information([LAST, FIRST])) == rows[2]["response"]
    careless = reader.Careless(task, random.Random(0), never)
    assert query_of(careless(task["prompt"])) and query_of(careless(information([FIRST]))) is None


def test_passages_of_a_reading_row_hold_the_facts_that_it_reads_and_others_in_any_order() -> None:
    draw, places = random.Random(1), set[int]()
    for number in range(100):
        own = World(number)
        row = reader.reading_row(own, draw)
        shown = facts_of(row["prompt"])
        read = facts_of(row["response"].replace("<think>", "").replace("</think>", "\n").replace(".", "\n"))
        assert set(read) < set(shown) and all(own.fact(f.subject, f.relation) == f for f in shown)
        assert row["response"].endswith(f"<answer> {read[-1].object}</answer>")
        places.add(shown.index(read[-1]))
    assert len(places) > 3


def test_what_the_question_finds_is_shown_with_it_where_there_is_no_search() -> None:
    turn = next(retrieved(WORLD.task(TWO)))
    assert isinstance(turn, Turn) and turn.text is not None
    assert turn.text.startswith("Answer:") and facts_of(turn.text) == WORLD.find(str(TWO))


# -- behaviours --------------------------------------------------------------------------------------------------------

VAGUE = "<search> mayor</search>"


@pytest.mark.parametrize(
    "replies, expected",
    [
        ([RIGHT], {"answered": 1}),
        ([ASK_FIRST, ASK_LAST, RIGHT], {"tried": 2, "valid": 2, "useful": 2, "decomposed": 1, "answered": 1}),
        ([ASK_LAST, ASK_FIRST, RIGHT], {"tried": 2, "valid": 2, "useful": 1, "answered": 1}),
        ([ASK_FIRST, VAGUE, ASK_LAST, RIGHT],
         {"tried": 3, "valid": 3, "useful": 2, "refined": 1, "decomposed": 1, "answered": 1}),
        (["<search> capital</search>", "<search> Dedor rival</search>", RIGHT], {"tried": 2, "valid": 2, "answered": 1}),
        ([ASK_FIRST, VAGUE, VAGUE, RIGHT], {"tried": 3, "valid": 3, "useful": 1, "answered": 1}),
        ([ASK_FIRST, ASK_LAST, ASK_LAST, RIGHT],
         {"tried": 3, "valid": 3, "useful": 2, "decomposed": 1, "verified": 1, "answered": 1}),
        (["<search> of</search>", "<search> Babel", "<information>", RIGHT], {"tried": 2, "invented": 1, "answered": 1}),
        ([*[VAGUE] * search.ACTIONS, ASK_FIRST], {"tried": 5, "valid": 4}),
    ],
)  # fmt: skip
def test_behaviours_are_counted_from_what_was_said(replies: list[str], expected: dict[str, float]) -> None:
    found = asdict(behaviour([FIRST, LAST], episode(replies)[0]))
    assert {name: value for name, value in found.items() if value} == expected


def test_share_of_valid_searches_is_that_of_all_that_were_tried() -> None:
    one = behaviour([FIRST, LAST], episode([ASK_FIRST, "<search> Babel", RIGHT])[0])
    other = behaviour([FIRST, LAST], episode([RIGHT])[0])
    assert means([one, other])["valid share"] == 0.5 and means([one, other])["valid"] == 0.5


# -- the gate and the unmasked arm -------------------------------------------------------------------------------------


def test_a_reader_that_cannot_read_is_refused_before_anything_is_learned(tmp_path: Path) -> None:
    settings = {
        **search_r1.EXPERIMENT.settings,
        "reader_hidden": 32,
        "reader_layers": 1,
        "lesson_steps": 1,
        "practice_steps": 1,
    }
    with pytest.raises(UserError, match=r"reader answers 0.0\d of the questions of one hop .* must answer 0.9"):
        search_r1.prepare(0, settings, tmp_path / "seed-0", silent)
    assert not (tmp_path / "seed-0").exists()


def test_unmasked_rollout_scores_the_tokens_of_passages_too_and_never_those_of_the_prompt() -> None:
    transcript = Transcript()
    transcript.observe([1, 2])
    transcript.sample(Completion(0, [3, 4], [-0.5, -0.25], "", StopReason.STOP, 7))
    transcript.observe([5, 6, 7], SpanKind.TOOL)
    transcript.sample(Completion(0, [8], [-1.0], "", StopReason.STOP, 7))
    task: Task = {"id": "0"}
    rollout = Rollout(task, "0", [transcript], 1.0)
    [found] = retrieved_token_masking.unmasked(rollout).transcripts
    assert found.tokens == transcript.tokens and found.logp == transcript.logp
    assert transcript.scored.tolist() == [2, 3, 7] and found.scored.tolist() == [2, 3, 4, 5, 6, 7]
    assert [s.version for s in found.spans if s.kind is SpanKind.SAMPLED] == [7, 7]
