"""Verifiers that run no code: golden values, independent loops, and replies that are made to be slow."""

from __future__ import annotations

import doctest
import importlib
import json
import math
import random
import re
import string
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from places import TESTS

import posttrain.verify as verify
from posttrain.core.types import Invalid, UserError
from posttrain.verify import cited, clean, contains_answer, distinct, fenced, toxicity
from posttrain.verify.citation import cites_every_sentence, cites_what_was_shown, quotes_verbatim
from posttrain.verify.fenced import code_in
from posttrain.verify.format import sections, tags
from posttrain.verify.json_schema import find_json, matches_schema
from posttrain.verify.language import in_language, language, language_share
from posttrain.verify.length import count, length_error, length_penalty, sentences, within, words
from posttrain.verify.pattern import matches
from posttrain.verify.refusal import refusal_rates, refusal_reward, refuses
from posttrain.verify.repetition import longest_repeat, looping, repetition_penalty
from posttrain.verify.short_answer import exact_match, f1, normalised
from posttrain.verify.similarity import bleu, chrf, edit_similarity, rouge_l
from posttrain.verify.syntax import defines, parses, tree_similarity

VECTORS = TESTS / "vectors"
MODULES = (
    "answer citation json_schema fenced format language length pattern refusal repetition short_answer "
    "similarity syntax toxicity"
).split()


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_are_true(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(f"posttrain.verify.{name}"))
    assert tried.failed == 0


def test_everything_that_is_exported_is_there_and_documented() -> None:
    assert sorted(verify.__all__) == verify.__all__
    assert all(getattr(verify, name).__doc__ for name in verify.__all__)


def reason(found: Any) -> str:
    assert isinstance(found, Invalid), found
    return found.reason


# -- JSON --------------------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        (' [1, 2]\n', [1, 2]),
        ("7", 7),
        ('Here:\n```json\n{"a": 1}\n```\nand {"b": 2}', {"a": 1}),
        ('```json\n{"a": 1}\n```\n```json\n{"a": 2}\n```', {"a": 2}),
        ('```\n{"a": 3}\n```', {"a": 3}),
        ('```python\nx = {}\n```\n{"a": 4}', {"a": 4}),
        ('<think>{"a": 1}</think>{"a": 2}', {"a": 2}),
        ('first {"a": [1, {"b": 2}]} then {"c": 3}.', {"c": 3}),
        ("set {x} and {y}, so {\"z\": 1}", {"z": 1}),
        ('```json\n{"a": oops}\n``` but {"b": 1}', {"b": 1}),
        ('{"a": NaN}', None),
        ('{"a": 1', None),
        ("{'a': 1}", None),
        ("", None),
        ("no", None),
        ('{"a": ' + "9" * 5000 + "}", None),
        ("[" * 100_000 + "]" * 100_000, None),
    ],
)  # fmt: skip
def test_json_of_a_reply_is_its_last_block_or_all_of_it_or_the_last_in_it(reply: str, value: Any) -> None:
    assert find_json(reply) == value


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('{"name": "ada", "age": 36}', 0.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada"}', 0.0),
        ('{"name": "Ada", "age": 36, "more": 1}', 0.0),
        ('{"name": "Ada", "age": 36.5}', 0.0),
        ("Ada is 36", 0.0),
        ("null", 0.0),
    ],
)
def test_schema_tells_replies_apart(reply: str, verdict: float) -> None:
    assert matches_schema(reply, PERSON) == verdict


def test_references_within_a_schema_work_and_deep_data_is_bounded() -> None:
    tree = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    assert matches_schema("[[], [[]]]", tree) == 1.0 and matches_schema("[[], [1]]", tree) == 0.0
    assert matches_schema("[" * 300 + "]" * 300, tree) in (0.0, 1.0)
    named = {"properties": {"$ref": {"type": "integer"}, "default": {"type": "string"}}}
    assert matches_schema('{"$ref": 1, "default": "x"}', named) == 1.0
    assert matches_schema('{"$ref": "x"}', named) == 0.0
    assert matches_schema('{"a": 1}', {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object"}) == 1.0


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "objekt"}, "the schema cannot be used: 'objekt'"),
        ({"$ref": "#"}, "the schema cannot be used: .*RecursionError"),
        ({"$ref": "#/$defs/missing"}, "the schema cannot be used: .*missing"),
        ({"pattern": "("}, "the schema cannot be used"),
        ({"properties": {"a": {"items": [{"$ref": "other.json#/a"}]}}}, "refers to 'other.json#/a'"),
        ({"enum": [{1, 2}]}, "the schema is not JSON"),
    ],
)
def test_what_is_wrong_with_a_schema_is_invalid_for_every_reply(schema: Any, told: str) -> None:
    for reply in ("{}", "no JSON"):
        assert re.search(told, reason(matches_schema(reply, schema)))


def test_a_catastrophic_pattern_of_a_schema_costs_its_time_limit_and_is_wrong() -> None:
    schema = {"properties": {"a": {"pattern": "^(a+)+$"}}}
    began = time.monotonic()
    assert matches_schema(json.dumps({"a": "a" * 40 + "b"}), schema, timeout=0.3) == 0.0
    assert time.monotonic() - began < 50
    assert matches_schema(json.dumps({"a": "aaa"}), schema, timeout=0.3) == 1.0


def test_nothing_is_ever_fetched() -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        for schema in (
            {"$ref": f"{address}/a"},
            {"properties": {"a": {"$ref": f"{address}/b"}}},
            {"$id": f"{address}/base", "$ref": "other"},
            {"$id": f"{address}/base", "$dynamicRef": "#nowhere"},
            {"$schema": f"{address}/meta", "properties": {"a": {"type": "integer"}}},
        ):
            assert not isinstance(matches_schema('{"a": 1}', schema), str)
        from posttrain.verify.json_schema import validate

        with pytest.raises(Exception, match="Unresolvable|NoSuchResource"):
            validate({"$ref": f"{address}/c"}, {})
    finally:
        server.shutdown()
        server.server_close()
    assert asked == []


# -- form --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "languages", "block"),
    [
        ("```\na\n```", (), "a\n"),
        ("```python\na\n```\n```\nb\n```", ("python",), "b\n"),
        ("```PYTHON\na\n```\n```rust\nb\n```", ("python",), "a\n"),
        ("````\n```\na\n```\n````", (), "```\na\n```\n"),
        ("~~~\na\n```\n~~~", (), "a\n```\n"),
        ("```\nnever closed", (), None),
        ("```a```", (), None),
        ("", (), None),
    ],
)
def test_fenced_blocks_are_those_of_commonmark(reply: str, languages: tuple[str, ...], block: str | None) -> None:
    assert fenced(reply, languages) == block


def test_code_of_a_reply_without_a_block_is_the_reply_behind_its_thoughts() -> None:
    assert code_in("<think>x = 1</think>y = 2") == "y = 2"
    assert code_in("```js\nx\n```") == "```js\nx\n```"


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("# Plan\na\n## Answer:\nb", 1.0),
        ("**plan**\na\nANSWER\nb", 1.0),
        ("# Answer\nb\n# Plan\na", 0.0),
        ("# Plan\na\n# Plan\na\n# Answer\nb", 0.0),
        ("# Plan\na", 0.0),
        ("# Plan\n\n# Answer\nb", 0.0),
        ("# Plan\na\n# Answer\n", 0.0),
        ("", 0.0),
    ],
)
def test_sections_stand_once_in_order_and_are_filled(reply: str, verdict: float) -> None:
    assert sections(reply, ["Plan", "Answer"]) == verdict
    if reply == "# Plan\n\n# Answer\nb":
        assert sections(reply, ["Plan", "Answer"], filled=False) == 1.0


@pytest.mark.parametrize(
    ("reply", "pattern", "more", "verdict"),
    [
        ("call 555-1234", r"\d{3}-\d{4}", {}, 1.0),
        ("call 555-1234", r"\d{3}-\d{4}", {"whole": True}, 0.0),
        ("555-1234", r"\d{3}-\d{4}", {"whole": True}, 1.0),
        ("call me", r"\d", {"wanted": False}, 1.0),
        ("call 5", r"\d", {"wanted": False}, 0.0),
        ("YES", "yes", {}, 0.0),
        ("YES", "yes", {"flags": re.IGNORECASE}, 1.0),
        ("\ud800x", "x", {}, 1.0),
    ],
)
def test_a_pattern_is_found_or_not(reply: str, pattern: str, more: dict[str, Any], verdict: float) -> None:
    assert matches(reply, pattern, **more) == verdict


@pytest.mark.parametrize("wanted", [True, False])
def test_a_catastrophic_search_ends_and_earns_nothing_either_way(wanted: bool) -> None:
    began = time.monotonic()
    assert matches("a" * 40 + "b", r"^(a+)+$", wanted=wanted, timeout=0.2) == 0.0
    assert time.monotonic() - began < 50
    assert "cannot be read" in reason(matches("a", "("))


# -- length ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", 3),
        ("Dr. Smith met Mr. Jones at 3.15 p.m. on 5.6.2020.", 1),
        ("It costs $3.50. Cheap!", 2),
        ("e.g. this one. J. Smith said so.", 2),
        ('He said "Stop!" Then he left.', 2),
        ("1. First item\n2. Second item", 1),
        ("It was 1990. Then came more.", 2),
        ("It was I. He left.", 2),
        ("Wait... what? Yes.", 2),
        ("Wait... What? Yes.", 3),
        ("No stop at the end", 1),
        ("A title\n\nA paragraph.", 2),
        ("你好。我很好！你呢？", 3),
        ("Rain fell.[1] Snow fell [2].", 2),
        ("...", 0),
        ("", 0),
    ],
)
def test_sentences_end_where_readers_see_an_end(text: str, expected: int) -> None:
    assert count(text, "sentences") == expected == len(sentences(text))


def test_counts_of_every_unit() -> None:
    text = "First line, it's here.\n\nSecond paragraph\nthird line\n"
    found = {unit: count(text, unit) for unit in ("characters", "words", "lines", "paragraphs")}  # type: ignore[arg-type]
    assert found == {"characters": len(text), "words": 9, "lines": 3, "paragraphs": 2}
    assert count(text, lambda t: t.count("line")) == 2
    assert words("naïve 你好 snake_case") == ["naïve", "你", "好", "snake_case"]
    with pytest.raises(UserError, match="unit is characters"):
        count("a", "word")  # type: ignore[arg-type]


def test_bands_include_their_ends() -> None:
    text = "one two three"
    assert [within(text, n) for n in (2, 3, 4)] == [1.0, 1.0, 0.0]
    assert [within(text, 0, n) for n in (2, 3, 4)] == [0.0, 1.0, 1.0]
    assert within(text, 1, 1, unit="sentences") == 1.0


def test_length_penalty_is_the_one_of_dapo() -> None:
    for n in range(0, 130):
        y, limit, cache = n, 100, 20
        expected = 0.0 if y <= limit - cache else ((limit - cache) - y) / cache if y <= limit else -1.0
        assert length_penalty("w " * n, limit, cache) == pytest.approx(expected)
    for soft in (0, 101):
        with pytest.raises(UserError, match="soft must be"):
            length_penalty("a", 100, soft)


def test_length_error_is_relative_and_bounded() -> None:
    assert [length_error("w " * n, 10) for n in (10, 8, 12, 0, 50)] == pytest.approx([0.0, 0.2, 0.2, 1.0, 1.0])
    with pytest.raises(UserError, match="target"):
        length_error("a", 0)


# -- language ----------------------------------------------------------------------------------------------------------

LANGUAGES = {
    "en": "We need to add the two numbers first, and then we can find the answer.",
    "de": "Zuerst müssen wir die beiden Zahlen addieren, dann finden wir die Antwort.",
    "fr": "Il faut d'abord additionner les deux nombres, puis nous trouvons la réponse.",
    "es": "Primero tenemos que sumar los dos números y luego encontramos la respuesta.",
    "it": "Prima dobbiamo sommare i due numeri e poi troviamo la risposta.",
    "pt": "Primeiro temos de somar os dois números e depois encontramos a resposta.",
    "nl": "Eerst moeten we de twee getallen optellen en dan vinden we het antwoord.",
    "pl": "Najpierw musimy dodać dwie liczby, a potem znajdziemy odpowiedź.",
    "sv": "Först måste vi lägga ihop de två talen och sedan hittar vi svaret.",
    "ru": "Сначала нужно сложить два числа, а потом мы найдём ответ.",
    "uk": "Спочатку потрібно додати два числа, а потім ми знайдемо відповідь.",
    "ar": "أولا يجب أن نجمع العددين ثم نجد الجواب.",
    "hi": "पहले हमें दोनों संख्याओं को जोड़ना होगा, फिर हमें उत्तर मिलेगा।",
    "zh": "首先我们需要把两个数字相加，然后得到答案。",
    "ja": "まず二つの数を足して、それから答えを求めます。",
    "ko": "먼저 두 수를 더한 다음 답을 구합니다.",
    "el": "Πρώτα πρέπει να προσθέσουμε τους δύο αριθμούς.",
    "he": "קודם צריך לחבר את שני המספרים.",
    "th": "ก่อนอื่นเราต้องบวกเลขสองตัวนี้",
}


@pytest.mark.parametrize("code", LANGUAGES)
def test_language_of_a_sentence(code: str) -> None:
    assert language(LANGUAGES[code]) == code
    assert in_language(LANGUAGES[code], code) == 1.0
    assert in_language(LANGUAGES[code], "en" if code != "en" else "de") == 0.0


@pytest.mark.parametrize("text", ["", "42", "x", "```\nfor x in range(3): print(x)\n```", "$$x^2 + y^2$$", "!!! ???"])
def test_what_has_no_words_has_no_language(text: str) -> None:
    assert language(text) is None and in_language(text, "en") == 0.0 and language_share(text, "en") == 0.0


def test_japanese_is_known_by_few_of_its_own_letters_and_a_script_decides_from_half_of_the_letters_on() -> None:
    assert language("東京都庁舎建設計画の概要") == "ja" and language("東京都庁舎建設計画概要") == "zh"
    assert language("φιλοσοφία на доске") == "el" != language("Пишите φιλοσοφία на доске")  # 9 of 16 and of 22 letters


def test_short_sentences_go_with_the_one_before() -> None:
    assert language_share(f"{LANGUAGES['de']} Oh yes.", "de") == 1.0


def test_language_share_is_of_letters_in_sentences() -> None:
    mixed = f"{LANGUAGES['en']} {LANGUAGES['zh']}"
    letters = {code: sum(c.isalpha() for c in LANGUAGES[code]) for code in ("en", "zh")}
    assert language_share(mixed, "en") == pytest.approx(letters["en"] / sum(letters.values()), abs=0.15)
    assert language_share(LANGUAGES["fr"], "fr") == 1.0 and language_share(LANGUAGES["fr"], "en") == 0.0


# -- repetition --------------------------------------------------------------------------------------------------------


def test_distinct_n_is_different_over_all() -> None:
    generator = random.Random(0)
    for _ in range(50):
        items = [generator.choice("abc") for _ in range(generator.randrange(0, 12))]
        for n in (1, 2, 3):
            grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
            expected = len(set(grams)) / len(grams) if grams else 1.0
            assert distinct(items, n) == pytest.approx(expected)
            assert distinct(" ".join(items).upper(), n) == pytest.approx(expected)
            assert repetition_penalty(items, n, most=2.0) == pytest.approx(-2.0 * (1 - expected))
    assert distinct("No, no", 1) == 0.5
    with pytest.raises(UserError, match="n must be"):
        distinct("a", 0)


def test_longest_repeat_is_the_one_that_trying_all_finds() -> None:
    generator = random.Random(0)
    texts = ["", "a", "aa", "ab", "aaaa", "abab", "banana", "\ud800a\ud800a", "👍👍🏽👍🏽"]
    texts += [
        "".join(generator.choice("ab" if i % 2 else "abcd") for _ in range(generator.randrange(2, 60)))
        for i in range(150)
    ]
    for text in texts:
        places = {(i, j) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
        seen = Counter(text[i:j] for i, j in places)
        assert longest_repeat(text) == max((len(s) for s, n in seen.items() if n > 1), default=0), text


def test_looping_is_the_share_of_the_longest_periodic_end() -> None:
    generator = random.Random(0)
    for _ in range(200):
        text = "".join(generator.choice("ab") for _ in range(generator.randrange(1, 25)))
        for times in (2, 3, 4):
            best = 0
            for start in range(len(text)):
                end = text[start:]
                for period in range(1, len(end) // times + 1):
                    if all(end[i] == end[i + period] for i in range(len(end) - period)):
                        best = max(best, len(end))
            assert looping(text, times) == pytest.approx(best / len(text)), text
    assert looping("") == 0.0 and looping("All fine here. " + "no, " * 4) == pytest.approx(17 / 31)
    with pytest.raises(UserError, match="times"):
        looping("a", 1)


def test_looping_looks_at_the_end_of_a_long_text_and_is_a_share_of_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.verify.repetition.LONGEST", 20)
    plain, loop = "abcdefghijklmnopqrstuvwxyz", "no, " * 6
    assert looping(plain + loop) == pytest.approx(20 / 50) and looping(loop + plain) == 0.0


# -- citations ---------------------------------------------------------------------------------------------------------


def test_citations_are_ids_in_brackets() -> None:
    assert cited("A [1][2]. B [3, doc-7; 4]. A [link](http://x). [ ] done") == ["1", "2", "3", "doc-7", "4"]
    assert cites_what_was_shown("A [1]. B [2]. C [3][1].", [1, "2"]) == pytest.approx(3 / 4)
    assert cites_what_was_shown("nothing", [1]) == 0.0
    assert cites_every_sentence("Rain [1]. Snow. Hail.[2] Fog!") == pytest.approx(2 / 4)
    assert cites_every_sentence("") == 0.0


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ('It says "the quick brown fox".', 1.0),
        ("It says “The  Quick\tbrown fox,” and more.", 1.0),
        ('It says "the quick red fox".', 0.0),
        ('It says "the quick brown fox" and "jumps under the dog".', 0.5),
        ('It says "the quick ... the lazy dog".', 1.0),
        ('It says "the quick [...] the happy dog".', 0.0),
        ('It says "the quick ... a dog\'s life".', 0.0),  # each part in another source
        ('A "so-called" fox.', 1.0),
        ('A "quick red fox".', 0.0),
        ('A "red fox".', 1.0),
        ("No quotes at all.", 1.0),
        ('"it’s a dog’s life" he said', 1.0),
    ],
)
def test_quotes_stand_word_for_word_in_a_source(text: str, share: float) -> None:
    sources = ["The quick brown fox jumps over the lazy dog.", "It's a dog's life."]
    assert quotes_verbatim(text, sources) == share


def test_more_quotes_than_are_looked_up_are_not_found() -> None:
    quote = '"the quick brown fox" '
    assert quotes_verbatim(quote * 200, ["the quick brown fox"]) == 1.0
    assert quotes_verbatim(quote * 400, ["the quick brown fox"]) == 0.5


# -- short answers -----------------------------------------------------------------------------------------------------


def official(text: str) -> str:
    """`normalize_answer` of the official evaluation script of SQuAD 2.0, step by step as it has them."""
    lower = text.lower()
    no_punctuation = "".join(ch for ch in lower if ch not in set(string.punctuation))
    no_articles = re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", no_punctuation)
    return " ".join(no_articles.split())


def official_f1(gold: str, said: str) -> float:
    """`compute_f1` of the same script."""
    gold_toks, pred_toks = official(gold).split(), official(said).split()
    num_same = sum((Counter(gold_toks) & Counter(pred_toks)).values())
    if len(gold_toks) == 0 or len(pred_toks) == 0:
        return int(gold_toks == pred_toks)
    if num_same == 0:
        return 0
    precision, recall = num_same / len(pred_toks), num_same / len(gold_toks)
    return (2 * precision * recall) / (precision + recall)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Eiffel Tower", "eiffel tower"),
        ("  an  apple\ta day ", "apple day"),
        ("U.S.A.", "usa"),
        ("Theatre another a-b", "theatre another ab"),
        ("don't", "dont"),
        ("“the” — é", "“ ” — é"),
        ("A", ""),
        ("the, a. an!", ""),
    ],
)
def test_golden_normalisation_of_squad(text: str, expected: str) -> None:
    assert normalised(text) == expected == official(text)


def test_scores_are_those_of_the_official_script() -> None:
    vocabulary = ["the", "a", "cat", "Cat,", "sat", "on-a", "mat.", "THE", "", "an", "x1", "!"]
    generator = random.Random(0)
    for _ in range(300):
        said = " ".join(generator.choices(vocabulary, k=generator.randrange(0, 6)))
        golds = [" ".join(generator.choices(vocabulary, k=generator.randrange(0, 5))) for _ in range(3)]
        known = [gold for gold in golds if official(gold)] or [""]
        assert f1(said, golds) == pytest.approx(max(official_f1(gold, said) for gold in known))
        assert exact_match(said, golds) == float(any(official(gold) == official(said) for gold in known))


@pytest.mark.parametrize(
    ("said", "golds", "em", "best", "inside", "as_words"),
    [
        ("Marie Curie", ["Curie", "Marie Curie"], 1.0, 1.0, 1.0, 1.0),
        ("It was Marie Curie", "Curie", 0.0, 0.4, 1.0, 1.0),
        ("13", "3", 0.0, 0.0, 1.0, 0.0),
        ("", "", 1.0, 1.0, 1.0, 1.0),
        ("something", "the", 0.0, 0.0, 0.0, 0.0),
        ("something", ["the", "something"], 1.0, 1.0, 1.0, 1.0),
        (None, "x", 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_golden_short_answers(
    said: str | None, golds: Any, em: float, best: float, inside: float, as_words: float
) -> None:
    assert (exact_match(said, golds), f1(said, golds), contains_answer(said, golds)) == (
        em,
        pytest.approx(best),
        inside,
    )
    assert contains_answer(said, golds, words=True) == as_words


def test_without_a_gold_nothing_can_be_judged() -> None:
    for judge in (exact_match, f1, contains_answer):
        assert reason(judge("x", [])) == "there is no gold answer" == reason(judge(None, []))
        assert reason(judge("x", [7])) == "gold answers must be text"  # type: ignore[list-item]


# -- Python code -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("x = 1", 1.0),
        ("```python\nx = 1\n```", 1.0),
        ("Here you are: ```x = (```", 0.0),
        ("x = (", 0.0),
        ("", 0.0),
        ("# only a comment", 0.0),
        ("x = '\0'", 0.0),
        ("x = '\ud800'", 0.0),
        ("(" * 10_000, 0.0),
        ("x = 1\n" * 100_000, 0.0),
    ],
)
def test_code_parses_or_not(reply: str, verdict: float) -> None:
    assert parses(reply) == verdict


@pytest.mark.parametrize(
    ("code", "signature", "verdict"),
    [
        ("def f(a, b): pass", "f", 1.0),
        ("def f(a, b): pass", "f(a, b)", 1.0),
        ("def f(a, b): pass", "f(b, a)", 0.0),
        ("def f(a, b): pass", "f(a)", 0.0),
        ("def f(a, b=2): pass", "f(a, b=1)", 1.0),
        ("def f(a, b=2): pass", "f(a, b)", 0.0),
        ("def f(a: int, *, b: str = '') -> int: pass", "f(a, *, b=None)", 1.0),
        ("def f(a, b=None): pass", "f(a, *, b=None)", 0.0),
        ("def f(*args, **kwargs): pass", "f(*args, **kwargs)", 1.0),
        ("async def f(a): pass", "f(a)", 1.0),
        ("class F:\n    pass", "F", 1.0),
        ("class F:\n    def f(self): pass", "f", 0.0),
        ("def f(a): pass\ndef f(a, b): pass", "f(a)", 0.0),
        ("def f(", "f", 0.0),
    ],
)
def test_code_defines_what_was_asked(code: str, signature: str, verdict: float) -> None:
    assert defines(f"```python\n{code}\n```", signature) == verdict


@pytest.mark.parametrize("signature", ["", "1f", "f(a", "f(a))", "f()\nimport os", "f(a): return 1\nx"])
def test_a_signature_that_cannot_be_read_is_refused(signature: str) -> None:
    with pytest.raises(UserError, match="is not a signature"):
        defines("x = 1", signature)


LOOP = "def total(xs):\n    s = 0\n    for x in xs:\n        s += x\n    return s"


def test_trees_are_alike_whatever_the_names_and_comments() -> None:
    renamed = (
        'def add_up(v: list) -> int:\n    """Adds."""\n    r = 0  # 0\n    for e in v:\n        r += e\n    return r'
    )
    assert tree_similarity(renamed, LOOP) == 1.0
    assert tree_similarity(LOOP.replace("+=", "-="), LOOP) < 1.0  # type: ignore[operator]
    assert tree_similarity(LOOP.replace("s = 0", "s = 1"), LOOP) < 1.0  # type: ignore[operator]
    assert tree_similarity("print(len(x))", "print(max(x))") < 1.0  # type: ignore[operator]
    other = tree_similarity("import os\nclass A:\n    x = [1, 2]", LOOP)
    padded = tree_similarity(LOOP + "\n" + "import os\n" * 50, LOOP)
    assert 0 <= other < 0.3 and 0 < padded < 0.9  # type: ignore[operator]


def test_golden_tree_similarity() -> None:
    """Subtrees of "f(1)" are the statement, the call, f and 1; of these "f(2)" has f alone: 2 * 1 / (4 + 4)."""
    assert tree_similarity("f(1)", "f(2)") == pytest.approx(0.25)
    assert tree_similarity("f(1)", "f(1, 1)") == pytest.approx(2 * 2 / (4 + 5))


def test_code_that_cannot_be_compared() -> None:
    assert tree_similarity("x = (", LOOP) == 0.0 and tree_similarity("", LOOP) == 0.0
    assert reason(tree_similarity(LOOP, "x = (")) == "the reference is not Python code"
    assert reason(tree_similarity("-" * 100_000 + "1", "")) == "the reference is not Python code"
    assert tree_similarity("-" * 100_000 + "1", LOOP) == 0.0
    assert "cannot be compared" in reason(tree_similarity(LOOP, "-" * 100_000 + "1"))


# -- similar texts -----------------------------------------------------------------------------------------------------


def vectors() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (VECTORS / "similarity.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("judge", [bleu, chrf, rouge_l])
def test_scores_are_those_of_sacrebleu_and_rouge_score(judge: Callable[..., Any]) -> None:
    """sacrebleu 2.6.0, over 100, and rouge-score 0.1.2, but for the one with umlauts, which that takes for spaces."""
    for vector in vectors():
        assert judge(vector["reply"], vector["references"]) == pytest.approx(vector[judge.__name__], abs=1e-7), vector


def test_edit_similarity_is_twice_the_common_subsequence_over_both_lengths() -> None:
    generator = random.Random(0)
    for _ in range(100):
        one, other = ("".join(generator.choices("abc", k=generator.randrange(1, 12))) for _ in range(2))
        table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
        for i, a in enumerate(one):
            for j, b in enumerate(other):
                table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
        assert edit_similarity(one, other) == pytest.approx(2 * table[-1][-1] / (len(one) + len(other)))


def test_the_best_reference_counts_and_none_is_invalid() -> None:
    for judge in (edit_similarity, rouge_l, chrf, bleu):
        assert judge("the cat sat down", ["a dog", "the cat sat down"]) == pytest.approx(1.0)
        assert "no reference" in reason(judge("x", [])) and "no reference" in reason(judge("x", ["a", " "]))
        assert "more than 20,000" in reason(judge("x", "a" * 20_001))
    with pytest.raises(UserError, match="order"):
        bleu("a", "a", order=0)


def test_beta_of_rouge_l_weighs_recall() -> None:
    assert rouge_l("a b", "a b c d", beta=1.0) == pytest.approx(2 * 0.5 / 1.5)
    assert rouge_l("a b", "a b c d", beta=2.0) == pytest.approx(5 * 0.5 / (0.5 + 4))
    assert chrf("abcd", "ab", order=1, beta=1.0) == pytest.approx(2 * 0.5 / 1.5)


# -- refusals, toxicity ------------------------------------------------------------------------------------------------

REFUSALS = [
    "I'm sorry, but I can't help with that.",
    "I cannot assist with that request.",
    "Sorry, I can’t provide instructions for that.",
    "As an AI language model, I cannot create malware.",
    "I must decline.",
    "I won't help you hurt someone.",
    "I'm unable to provide that.",
    "No, I won't do it.",
    "I'm not comfortable writing this.",
    "It would be unethical to provide this.",
    "I respectfully decline to answer.",
    "That is against my guidelines.",
    "<think>can I?</think>I apologize, but I cannot fulfill this request.",
    "Unfortunately, I can't assist with that.",
    "We are unable to comply with this request.",
    "My guidelines do not allow me to do so.",
    "I cannot in good conscience assist with that.",
]
ANSWERS = [
    "",
    "Paris.",
    "Sure! Here is how.",
    "I'm sorry to hear that. Here are some tips.",
    "I can't believe how great this is!",
    "I cannot stress enough how important sleep is.",
    "The function will not return.",
    "I can help with that.",
    "As an AI assistant, I can show you how to kill a Python process: use kill -9.",
    "Stocks decline in a recession.",
    "He refused to answer. The story goes on.",
    "Sorry for the delay! The answer is 4.",
    "We cannot give x a value here, so y = 2.",
    "<think>I cannot help with that.</think>Of course: first, mix flour and water.",
    "Of course. " + "The recipe goes on. " * 30 + "I cannot help with that.",
]


@pytest.mark.parametrize("reply", REFUSALS)
def test_refusals_are_seen(reply: str) -> None:
    assert refuses(reply) == 1.0


@pytest.mark.parametrize("reply", ANSWERS)
def test_answers_are_no_refusals(reply: str) -> None:
    assert refuses(reply) == 0.0


def test_wanted_refusals_and_over_refusals_are_told_apart() -> None:
    no, yes = REFUSALS[0], "Sure, here it is."
    prices = {"missed": -1.0, "over": -0.5}
    found = [refusal_reward(harmful, reply, **prices) for harmful in (True, False) for reply in (no, yes)]
    assert found == [1.0, -1.0, -0.5, 1.0]
    assert [refusal_reward(harmful, reply) for harmful in (True, False) for reply in (no, yes)] == [1, 0, 0, 1]
    assert [refusal_rates(True, reply) for reply in (no, yes)] == [{"refusal/wanted": 1.0}, {"refusal/wanted": 0.0}]
    assert [refusal_rates(False, reply) for reply in (no, yes)] == [
        {"refusal/unwanted": 1.0},
        {"refusal/unwanted": 0.0},
    ]


def test_a_classifier_takes_the_place_of_the_words() -> None:
    assert refusal_reward(True, "x", refuses=lambda reply: 0.75, missed=-1.0) == pytest.approx(0.5)
    assert refusal_reward(False, "x", refuses=lambda reply: 0.75, over=-1.0) == pytest.approx(-0.5)
    assert reason(refusal_reward(True, "x", refuses=lambda reply: Invalid("no service"))) == "no service"
    assert "between 0 and 1" in reason(refusal_reward(True, "x", refuses=lambda reply: 2.0))
    assert "between 0 and 1" in reason(refusal_rates(True, "x", refuses=lambda reply: float("nan")))
    assert toxicity("you idiot", classifier=lambda text: 0.125) == 0.125
    assert clean("you idiot", 0.2, classifier=lambda text: 0.125) == 1.0
    assert reason(clean("x", classifier=lambda text: Invalid("no service"))) == "no service"
    for outside in (-1.0, 1.5, math.nan):
        assert "between 0 and 1" in reason(toxicity("x", classifier=lambda text, outside=outside: outside))


def test_toxicity_is_the_share_of_listed_words() -> None:
    assert toxicity("you stupid idiot") == pytest.approx(2 / 3)
    assert toxicity("I will kill you now") == pytest.approx(2 / 5)
    assert toxicity("Shut up, shut up, shut up!") == 1.0 and toxicity("I hate you; hate you.") == pytest.approx(4 / 5)
    assert toxicity("A classic assessment of Scunthorpe.") == 0.0 == toxicity("")
    assert toxicity("blue bird", listed={"blue"}, phrases=()) == 0.5
    assert clean("you idiot") == 0.0 and clean("you idiot", most=0.5) == 1.0


# -- replies that are made to be slow ----------------------------------------------------------------------------------

M = 2**19
HOSTILE = {
    "nothing": "",
    "one letter": "a" * M,
    "dots": "." * M + "x",
    "brackets": "[" * M,
    "braces": "{" * M,
    "open strings": '["' * (M // 2),
    "nested to an open string": "[" * 400 + '"' + "x" * M,
    "boxes": "\\boxed{" * (M // 7),
    "fences": "```\n" * (M // 4),
    "a fence without end": "```" + "a" * M + "`",
    "surrogates": "\ud800\udfff \udc00" * (M // 8),
    "null": "\0" * M,
    "quotes": '"a b c" ' * (M // 8),
    "open quotes": "\u201c" * M,
    "citations": "[1] " * (M // 4),
    "lines": "\n" * M,
    "blank lines": "\n " * (M // 2),
    "Chinese": "中文。" * (M // 3),
    "unary": "-" * M + "1",
    "sorry": "i am sorry i " * (M // 13),
    "emoji": "👍🏽" * (M // 2),
    "accents": "a" + "\u0301" * M,
}
JUDGES: dict[str, Callable[[str], Any]] = {
    "find_json": find_json,
    "matches_schema": lambda t: matches_schema(t, PERSON),
    "matches": lambda t: matches(t, r"(a+)+$b", timeout=0.1),
    "exact_match": lambda t: exact_match(t, "a"),
    "f1": lambda t: f1(t, "a b"),
    "contains_answer": lambda t: contains_answer(t, "x y", words=True),
    "words": count,
    "paragraphs": lambda t: count(t, "paragraphs"),
    "in_language": lambda t: in_language(t, "en"),
    "language_share": lambda t: language_share(t, "en"),
    "distinct": distinct,
    "longest_repeat": longest_repeat,
    "looping": looping,
    "cites_every_sentence": cites_every_sentence,
    "quotes_verbatim": lambda t: quotes_verbatim(t, ["a" * M]),
    "parses": parses,
    "defines": lambda t: defines(t, "f(x)"),
    "tree_similarity": lambda t: tree_similarity(t, LOOP),
    "edit_similarity": lambda t: edit_similarity(t, "a b" * 5000),
    "rouge_l": lambda t: rouge_l(t, "a b " * 5000),
    "bleu": lambda t: bleu(t, "a b " * 5000),
    "chrf": lambda t: chrf(t, "a b " * 5000),
    "refuses": refuses,
    "toxicity": toxicity,
    "sections": lambda t: sections(t, ["a"]),
    "tags": tags,
    "code_in": code_in,
}


@pytest.mark.timeout(30)  # all of a verifier's together; quadratic ones would take half an hour
@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES)
def test_no_reply_is_slow_or_breaks_a_verifier_or_makes_it_invalid(judge: Callable[[str], Any]) -> None:
    for name, reply in HOSTILE.items():
        assert not isinstance(judge(reply), Invalid), name
