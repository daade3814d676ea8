"""Questions that are answered with a search engine: Search-R1 (Jin et al. 2025, arXiv 2503.09516).

The policy thinks in <think>, asks in <search>, reads what was found in <information>, and answers in <answer>. The templates
are those of the authors' code (PeterGriffinJin/Search-R1), to the letter. What is found comes from the service "retriever"
(--retriever FOLDER or ADDRESS), so an episode that waits costs nothing, and all workers share one index.

Decided here: only what the policy itself wrote in the reply that ends the episode is its answer. The authors' code reads the
last <answer> of the whole text, in which the prompt's example and the passages stand too. An <information> that the policy
writes is text of its own: it is counted, and nothing else comes of it. Tags within passages are taken apart, so that none
of them ends its block or looks like an answer.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from posttrain.core.types import Ask, Invalid, Reply, Task, Turn, UserError
from posttrain.verify.format import tags
from posttrain.verify.short_answer import contains_answer, exact_match

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
"""Without searches."""
AGAIN = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I want "
    "to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
NOTHING = "Nothing was found."

_TAG = re.compile(r"<(/?(?:think|search|information|answer))>", re.IGNORECASE)


def row_to_task(row: dict[str, Any]) -> Task | None:
    """The task of a row with a "question" and its "answers" (or "golden_answers", or one "answer"); None without answers."""
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
    """Replies that are right: the row's own, or one that answers at once, and two of which the first searches."""
    if row.get("replies") is not None:
        return {"replies": row["replies"]}
    said = f"<answer> {answer} </answer>"
    search = f"<think> I have to look this up. </think>\n<search> {question} </search>"
    return {
        "response": f"<think> I know this. </think>\n{said}",
        "replies": [search, f"<think> Now I know. </think>\n{said}"],
    }


@dataclass
class _Play:
    """Actions of the policy in an episode."""

    searches: int = 0  # that were made
    invalid: int = 0  # replies that were neither a search nor an answer
    forged: int = 0  # <information> tags that the policy wrote itself
    found: bool = False  # whether an answer stood in a passage that it was shown
    in_form: bool = True
    answer: str | None = None


def search_qa(
    task: Task,
    *,
    topk: int = 3,
    searches: int = 4,
    shown: int = 0,
    format: float = 0.0,
    per_search: float = 0.0,
    chat: bool = False,
) -> Generator[Turn | Ask, Any, dict[str, float] | Invalid]:
    """An episode. Its reward is (1 - format) * exact match + format * whether all replies have the asked form.

    `topk`: passages of a search; `searches`: replies before the last one, which can only answer (0: the question is asked
    without a search engine); `shown`: characters of a passage that are shown (0: all); `format`: the share of the form, as
    in arXiv 2505.15117; `per_search`: a reward (or, below 0, a cost) for each search, earned by its reply; `chat`: the
    prompt is a message of the user, rendered by the chat template.
    """
    check_options(topk=topk, searches=searches, shown=shown, format=format, per_search=per_search)
    play = _Play()
    prompt = (SEARCH if searches else DIRECT).format(question=task["question"])
    reply = (
        yield Turn(messages=[{"role": "user", "content": prompt}], stop=STOP) if chat else Turn(text=prompt, stop=STOP)
    )
    for left in range(searches, -1, -1):
        if not reply and reply.stop.truncated:  # told that the episode has run out of something
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
    return _reward(play, task, format)


def check_options(
    *, topk: int, searches: int, shown: int, format: float, per_search: float, chat: bool = False
) -> None:
    """Raises UserError for options that make no sense."""
    for name, value, least, most in (("topk", topk, 1, 100), ("searches", searches, 0, 60), ("shown", shown, 0, 10**9)):
        if not least <= value <= most:
            raise UserError(f"{name} is {value}; it may be from {least} to {most}")
    if not (format >= 0 and format + searches * abs(per_search) < 0.5):
        raise UserError(
            f"format {format:g} and {searches} searches of {per_search:g} may outweigh a right answer: together "
            "they have to stay below 0.5"
        )


def _read(reply: Reply, play: _Play) -> tuple[str | None, str]:
    """The action of a reply and what it says: the first whole one. None: there is none that can be carried out."""
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
    """(search or answer, what stands in it, where it ends) of the first tag that is closed. Goes through a reply once."""
    found = []
    for name in ("search", "answer"):
        start = reply.find(f"<{name}>")
        end = reply.find(f"</{name}>", start) if start >= 0 else -1
        if end >= 0:
            found.append((start, name, reply[start + len(name) + 2 : end].strip(), end + len(name) + 3))
    return min(found)[1:] if found else (None, "", len(reply))


def _passages(found: Any, shown: int) -> list[tuple[str, str]] | Invalid:
    """(title, text) of what was found. A failure is passed on: an empty block would say that there is nothing to find."""
    if isinstance(found, Invalid):
        return found
    if not isinstance(found, list) or not all(
        isinstance(p, dict) and isinstance(p.get("contents"), str) for p in found
    ):
        return Invalid('the service "retriever" answered with something else than passages')
    parts = (_TAG.sub(r"[\1]", passage["contents"]).partition("\n") for passage in found)
    return [(title, text[:shown] if shown else text) for title, _, text in parts]


def _holds(passages: list[tuple[str, str]], answers: list[str]) -> bool:
    """Return whether one of the passages contains an answer."""
    return any(contains_answer("\n".join(passage), answers, words=True) == 1.0 for passage in passages)


def _block(passages: list[tuple[str, str]]) -> str:
    """Return the text between the tags."""
    shown = (f"Doc {number}(Title: {title}) {text}" for number, (title, text) in enumerate(passages, 1))
    return "\n".join(shown).strip() or NOTHING


def _reward(play: _Play, task: Task, format: float) -> dict[str, float] | Invalid:
    """The reward, and beside it what is only logged."""
    exact = exact_match(play.answer, task["answers"])
    if isinstance(exact, Invalid):
        return exact
    in_form = float(play.in_form and play.answer is not None)
    return {
        "reward": (1 - format) * exact + format * in_form,
        "exact": exact,
        "form": in_form,
        "answered": float(play.answer is not None),
        "searches": float(play.searches),
        "invalid actions": float(play.invalid),
        "found": float(play.found),
        "own information": float(play.forged > 0),
    }
