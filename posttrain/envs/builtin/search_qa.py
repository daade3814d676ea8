"""Questions that are answered with a search engine: Search-R1 (Jin et al. 2025, arXiv 2503.09516).

The policy thinks in <think>, searches in <search>, reads passages in <information>, and answers in <answer>. The
templates are those of the authors' code (PeterGriffinJin/Search-R1), to the letter. Passages come from the service
"retriever" (--retriever FOLDER or ADDRESS), so an episode that waits costs nothing, and all workers share one index.

Only text that the policy wrote in the last reply can be its answer. The authors' code reads the last <answer> of the
whole text, including the prompt's example and the passages. An <information> block of the policy's own is counted, and
has no other effect. Tags within passages are rewritten, so that none of them ends its block or looks like an answer.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from posttrain.core.types import OUTCOME, Ask, Invalid, Reply, Task, Turn, UserError
from posttrain.verify.format import tags
from posttrain.verify.short_answer import contains_answer, exact_match
from posttrain.verify.short_answer import f1 as f1_score

SUCCESS = 0.5  # the exact match alone counts 1, and the other terms together less than a half
LONGEST_QUERY = 1000  # characters
STOP = ("</search>", "</answer>")

SEARCH = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as many "
    "times as your want. If you find no further external knowledge needed, you can directly provide the answer inside "
    "<answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)
DIRECT = (
    "Answer the given question. You should first have a reasoning process in mind and then provides the answer. Show your "
    "reasoning in <think> </think> tags and return the final answer in <answer> </answer> tags, for example <answer> "
    "Beijing </answer>. Question: {question}\n"
)
"""The prompt without searches."""
AGAIN = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I want "
    "to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
NOTHING = "Nothing was found."

_TAG = re.compile(r"<(/?(?:think|search|information|answer))>", re.IGNORECASE)


def row_to_task(row: dict[str, Any]) -> Task | None:
    """Return the task of a row with a "question" and "answers" (or "golden_answers", or one "answer"); None without
    answers.
    """
    question = row.get("question", row.get("prompt"))
    if not isinstance(question, str) or not question.strip():
        raise UserError('a row needs a "question"; name its column with --fields.prompt COLUMN')
    given: Any = next((row[name] for name in ("answers", "golden_answers", "answer") if row.get(name) is not None), [])
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise UserError('a row needs "answers", a list of texts')
    answers = [answer for answer in answers if answer.strip()]
    if not answers:
        return None
    question = question.strip()
    question = question if question.endswith("?") else question + "?"
    kept: Task = {name: row[name] for name in ("id", "dataset") if name in row}
    return {**kept, "question": question, "answers": answers, "answer": answers[0], **_right(row, question, answers[0])}


def _right(row: dict[str, Any], question: str, answer: str) -> Task:
    """Return correct replies: the row's own, or one that answers at once and two of which the first searches."""
    if row.get("replies") is not None:
        return {"replies": row["replies"]}
    said = f"<answer> {answer} </answer>"
    search = f"<think> I have to look this up. </think>\n<search> {question} </search>"
    return {
        "response": f"<think> I know this. </think>\n{said}",
        "replies": [search, f"<think> Now I know. </think>\n{said}"],
    }


@dataclass
class _EpisodeActions:
    """Actions of the policy in an episode."""

    searches: int = 0  # number of searches
    invalid: int = 0  # replies that were neither a search nor an answer
    forged: int = 0  # <information> tags that the policy wrote itself
    found: bool = False  # whether a passage shown contained an answer
    in_form: bool = True
    answer: str | None = None


def search_qa(
    task: Task,
    *,
    topk: int = 3,
    searches: int = 4,
    shown: int = 0,
    format: float = 0.0,
    f1: float = 0.0,
    per_search: float = 0.0,
    chat: bool = False,
) -> Generator[Turn | Ask, Any, dict[str, float] | Invalid]:
    """Run an episode. Its reward is (1 - format) * match + format * whether all replies have the required form.

    The match is the exact match, or (1 - f1) * exact match + f1 * F1 of the words of the answer.

    `topk`: passages of a search; `searches`: replies before the last one, which can only answer (0: without a search
    engine); `shown`: most characters shown of a passage (0: all); `format`: weight of the form, as in arXiv 2505.15117;
    `f1`: weight of F1 in the match (1: F1 alone, as in arXiv 2505.04588), where exact matches are too rare to learn from;
    `per_search`: a reward (or, below 0, a cost) for each search, earned by its reply; `chat`: the prompt is a user
    message, rendered by the chat template.
    """
    check_options(topk=topk, searches=searches, shown=shown, format=format, f1=f1, per_search=per_search)
    play = _EpisodeActions()
    prompt = (SEARCH if searches else DIRECT).format(question=task["question"])
    reply = (
        yield Turn(messages=[{"role": "user", "content": prompt}], stop=STOP) if chat else Turn(text=prompt, stop=STOP)
    )
    for left in range(searches, -1, -1):
        if not reply and reply.stop.truncated:  # the episode has run out of turns, tokens or time
            break
        action, content = _read(reply, play)
        if action == "answer":
            play.answer = content
        if action == "answer" or not left:
            break
        if action is None:
            reply = yield Turn(text=AGAIN, stop=STOP)
            continue
        found = yield Ask("retriever", {"query": content, "k": topk})
        passages = _passages(found, shown)
        if isinstance(passages, Invalid):
            return passages
        play.searches += 1
        play.found = play.found or _holds(passages, task["answers"])
        block = f"\n\n<information>{_block(passages)}</information>\n\n"
        reply = yield Turn(text=block, stop=STOP, tool=True, reward=per_search)
    return _reward(play, task, format, f1)


def check_options(
    *, topk: int, searches: int, shown: int, format: float, f1: float, per_search: float, chat: bool = False
) -> None:
    """Raise UserError for options out of range."""
    for name, value, least, most in (("topk", topk, 1, 100), ("searches", searches, 0, 60), ("shown", shown, 0, 10**9)):
        if not least <= value <= most:
            raise UserError(f"{name} is {value}; it must be from {least} to {most}")
    if not 0 <= f1 <= 1:
        raise UserError(f"f1 is {f1:g}; it must be from 0 to 1")
    if not (format >= 0 and format + searches * abs(per_search) < 0.5):
        raise UserError(
            f"format {format:g} and {searches} searches of {per_search:g} may outweigh a right answer: keep their sum below "
            "0.5"
        )


def _read(reply: Reply, play: _EpisodeActions) -> tuple[str | None, str]:
    """Return (action, its content) of a reply: its first complete action, or None as the action if that is invalid."""
    play.forged += len(re.findall(r"</?information>", reply, re.IGNORECASE))
    name, content, end = _first_action(reply)
    if not content or _TAG.search(content) or (name == "search" and len(content) > LONGEST_QUERY):
        name = None
    play.invalid += name is None
    own = reply[:end]
    in_form = name is not None and tags(own, ("think", name)) == 1.0 and len(_TAG.findall(own)) == 4
    play.in_form = play.in_form and in_form
    return name, content


def _first_action(reply: str) -> tuple[str | None, str, int]:
    """Return ("search" or "answer", content, end) of the first closed tag; (None, "", length) without one."""
    found = []
    for name in ("search", "answer"):
        start = reply.find(f"<{name}>")
        end = reply.find(f"</{name}>", start) if start >= 0 else -1
        if end >= 0:
            found.append((start, name, reply[start + len(name) + 2 : end].strip(), end + len(name) + 3))
    return min(found)[1:] if found else (None, "", len(reply))


def _passages(found: Any, shown: int) -> list[tuple[str, str]] | Invalid:
    """Return (title, text) of the passages found.

    A failure is returned as Invalid: an empty block would mean no results.
    """
    if isinstance(found, Invalid):
        return found
    if not isinstance(found, list) or not all(
        isinstance(p, dict) and isinstance(p.get("contents"), str) for p in found
    ):
        return Invalid('the service "retriever" did not answer with passages')
    parts = (_TAG.sub(r"[\1]", passage["contents"]).partition("\n") for passage in found)
    return [(title, text[:shown] if shown else text) for title, _, text in parts]


def _holds(passages: list[tuple[str, str]], answers: list[str]) -> bool:
    """Return whether one of the passages contains an answer."""
    return any(contains_answer("\n".join(passage), answers, words=True) == 1.0 for passage in passages)


def _block(passages: list[tuple[str, str]]) -> str:
    """Return the text between the <information> tags."""
    shown = (f"Doc {number}(Title: {title}) {text}" for number, (title, text) in enumerate(passages, 1))
    return "\n".join(shown).strip() or NOTHING


def _reward(play: _EpisodeActions, task: Task, format: float, f1: float) -> dict[str, float] | Invalid:
    """Return the reward, with further parts that are only logged."""
    exact, words = exact_match(play.answer, task["answers"]), f1_score(play.answer, task["answers"])
    if isinstance(exact, Invalid):
        return exact
    if isinstance(words, Invalid):
        return words
    in_form = float(play.in_form and play.answer is not None)
    return {
        "reward": (1 - format) * ((1 - f1) * exact + f1 * words) + format * in_form,
        "exact": exact,
        **({"f1": words, OUTCOME: exact} if f1 else {}),
        "form": in_form,
        "answered": float(play.answer is not None),
        "searches": float(play.searches),
        "invalid actions": float(play.invalid),
        "found": float(play.found),
        "own information": float(play.forged > 0),
    }
