"""Verifiers: functions that score a reply. A verdict is a number, or `Invalid` if it could not be computed.

    from posttrain.verify import Weighted, exact_match, tags

No torch here, and no heavy library at import time. Every call takes bounded time and memory, whatever the reply
contains. A verdict is Invalid because of a fault of the task or the machine, never because of the policy's text.
"""

from posttrain.verify.answer import final_answer, last_boxed
from posttrain.verify.citation import cited, cites_every_sentence, cites_what_was_shown, quotes_verbatim
from posttrain.verify.fenced import code_in, fenced, without_thoughts
from posttrain.verify.format import between, sections, tags
from posttrain.verify.json_schema import find_json, matches_schema
from posttrain.verify.language import in_language, language_share
from posttrain.verify.length import count, length_error, length_penalty, within
from posttrain.verify.numeric import same_number
from posttrain.verify.pattern import matches
from posttrain.verify.refusal import refusal_rates, refusal_reward, refuses
from posttrain.verify.repetition import distinct, longest_repeat, looping, repetition_penalty
from posttrain.verify.short_answer import contains_answer, exact_match, f1
from posttrain.verify.similarity import bleu, chrf, edit_similarity, rouge_l
from posttrain.verify.syntax import defines, parses, tree_similarity
from posttrain.verify.toxicity import clean, toxicity
from posttrain.verify.unit_tests import passes_tests, share_of_tests
from posttrain.verify.verdict import final_score, final_verdict
from posttrain.verify.weighted import Weighted

__all__ = [
    "Weighted",
    "between",
    "bleu",
    "chrf",
    "cited",
    "cites_every_sentence",
    "cites_what_was_shown",
    "clean",
    "code_in",
    "contains_answer",
    "count",
    "defines",
    "distinct",
    "edit_similarity",
    "exact_match",
    "f1",
    "fenced",
    "final_answer",
    "final_score",
    "final_verdict",
    "find_json",
    "in_language",
    "language_share",
    "last_boxed",
    "length_error",
    "length_penalty",
    "longest_repeat",
    "looping",
    "matches",
    "matches_schema",
    "parses",
    "passes_tests",
    "quotes_verbatim",
    "refusal_rates",
    "refusal_reward",
    "refuses",
    "repetition_penalty",
    "rouge_l",
    "same_number",
    "sections",
    "share_of_tests",
    "tags",
    "toxicity",
    "tree_similarity",
    "within",
    "without_thoughts",
]
