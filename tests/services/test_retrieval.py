"""Indices find what the formulas say, whatever the text; they appear whole or not at all, and what is stale is refused."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieved import ROWS, small_index, write_rows

from posttrain.cli.main import main
from posttrain.core.types import UserError
from posttrain.services.retrieval.bm25 import Vocabulary, _write_words
from posttrain.services.retrieval.index_folder import MANIFEST
from posttrain.services.retrieval.passage_index import build, open_index
from posttrain.services.retrieval.passages import PassageSource, read_passages, taken
from posttrain.services.retrieval.top_k import best
from posttrain.services.retrieval.words import LONGEST_WORD, STOP_WORDS, query_words, words_of

ALPHABET = [f"w{i}" for i in range(12)]
NASTY = ["", " ", "\x00", "a\x00b", "\ud800", "\U0001f642", "the the", "e\u0301" * 50, "(" * 500, "ﷺ" * 100, "x" * 100_000,
         "\n\r\t", "' OR 1=1 --", "\u202eabc", "ａｂｃ", "١٢٣", "-" * 999, "東京" * 500]  # fmt: skip


def by_the_formula(texts: list[str], query: str, k1: float, b: float) -> list[tuple[int, float]]:
    """(place, score) by decreasing score, equal ones by place, of those above 0."""
    split = [Counter(words_of(text)) for text in texts]
    length = [sum(words.values()) for words in split]
    mean = sum(length) / len(length)
    scores = []
    for place, words in enumerate(split):
        score = 0.0
        for word in query_words(query):
            n = sum(word in other for other in split)
            idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
            score += idf * words[word] / (k1 * (1 - b + b * length[place] / mean) + words[word]) if n else 0.0
        scores.append((place, score))
    return sorted(((p, s) for p, s in scores if s > 0), key=lambda one: (-one[1], one[0]))


# -- by words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.5, 0.75), (0.2, 1.0)])
def test_bm25_is_the_formula(tmp_path: Path, k1: float, b: float) -> None:
    rng = random.Random(f"{k1} {b}")
    texts = [" ".join(rng.choices(ALPHABET[:9], k=rng.randint(1, 30))) for _ in range(60)]
    build([{"id": i, "text": text} for i, text in enumerate(texts)], tmp_path / "i", k1=k1, b=b)
    index = open_index(tmp_path / "i")
    contents = [f'""\n{text}' for text in texts]
    for _ in range(40):
        query = " ".join(rng.choices(ALPHABET, k=rng.randint(1, 6)))
        expected = by_the_formula(contents, query, k1, b)
        [found] = index.search([query], 60)
        scores = dict(expected)
        assert {int(hit.passage.id) for hit in found} == set(scores)
        assert [hit.score for hit in found] == pytest.approx([score for _, score in expected], rel=1e-5)
        assert [hit.score for hit in found] == pytest.approx([scores[int(hit.passage.id)] for hit in found], rel=1e-5)


def test_the_best_three_begin_the_best_ten_and_equals_are_in_order(tmp_path: Path) -> None:
    rows = [{"id": i, "text": "same words" if i % 3 else "other words here"} for i in range(30)]
    index = open_index(small_index(tmp_path / "i", rows))
    whole = [int(hit.passage.id) for hit in index.search(["words"], 30)[0]]
    assert whole == [i for i in range(30) if i % 3] + [i for i in range(30) if not i % 3]
    for k in (1, 3, 10, 29):
        assert [int(hit.passage.id) for hit in index.search(["words"], k)[0]] == whole[:k]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 45))
def test_the_best_are_those_of_a_stable_sort(values: list[int], k: int) -> None:
    scores = np.array(values, dtype=np.float32)
    expected = sorted(range(len(values)), key=lambda place: (-values[place], place))[:k]
    assert best(scores, k).tolist() == expected
    above = np.flatnonzero(scores > 1)
    assert best(scores, k, above).tolist() == [p for p in sorted(above, key=lambda p: (-values[p], p))][:k]


def test_words_are_the_same_in_any_writing() -> None:
    assert words_of("Beyoncé") == words_of("BEYONCE\u0301") == words_of("ｂｅｙｏｎｃｅ") == ["beyonce"]
    assert words_of("1,000 U.S. e-mails_x") == ["1", "000", "u", "s", "e", "mails_x"]
    assert words_of("Straße") == ["strasse"] and words_of("한국어") == ["한국어"]
    assert all(len(word) <= LONGEST_WORD for word in words_of("x" * 1000 + " é" * 3))
    assert query_words("the of") == ["the", "of"] and query_words("the Tiber") == ["tiber"]
    assert not STOP_WORDS & set(query_words("who is the author of it"))


@pytest.mark.parametrize("query", NASTY, ids=range(len(NASTY)))
def test_any_query_has_an_answer(tmp_path: Path, query: str) -> None:
    index = open_index(small_index(tmp_path / "i", [*ROWS, {"id": "x", "text": "東京 abc 123 x a b"}]))
    for hit in index.search([query, "capital of Italy"], 3)[0]:
        assert hit.score > 0
    assert index.search([query, "capital of Italy"], 3)[1][0].title == "Rome"


@settings(max_examples=50, deadline=None)
@given(
    words=st.sets(st.text(min_size=1, max_size=8).filter(lambda w: w.isprintable()), max_size=30),
    other=st.text(max_size=8),
)
def test_every_word_has_its_number_and_no_other_word_has_one(
    tmp_path_factory: Any, words: set[str], other: str
) -> None:
    folder = tmp_path_factory.mktemp("words")
    numbers = {word: number for number, word in enumerate(sorted(words, key=hash))}
    _write_words({"a": len(numbers)} | numbers, folder)
    vocabulary = Vocabulary(folder)
    assert all(vocabulary.get(word) == number for word, number in numbers.items())
    if other not in numbers and other != "a" and other.isprintable():
        assert vocabulary.get(other) is None


def test_the_vocabulary_stays_on_the_disk(tmp_path: Path) -> None:
    """190 MB of an index of 1 GB were in the memory of every process."""
    words = [f"word{i}" for i in range(300_000)]
    rows = [{"text": " ".join(words[i : i + 5000])} for i in range(0, len(words), 5000)]
    small_index(tmp_path / "i", rows)
    code = """
import sys
def own():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous")) / 1024
import posttrain.envs.play.env_worker
before = own()
from posttrain.services.retrieval.passage_index import open_index
index = open_index(sys.argv[1])
found = index.search([f"word{i} nothing" for i in range(0, 300_000, 9_973)], 3)
assert all(found)
print(own() - before)
"""
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path / "i")], capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 20


# -- passages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"id": "a", "text": "x"', r"rows.jsonl:2: not valid JSON: .* at column"),
        ("[1]", "rows.jsonl:2: a row must be an object with named columns, not a list"),
        ('{"id": "a"}', "rows.jsonl:2: no column 'text'"),
        ('{"id": "a", "text": ["x"]}', r"rows.jsonl:2: column text is \['x'\] \(list\); it must be text"),
        ('{"id": "a", "text": null}', "rows.jsonl:2: column text is None"),
        ('{"id": "a", "text": "  "}', "rows.jsonl:2: column text is empty; leave the row out"),
        ('{"id": "a", "contents": ""}', "rows.jsonl:2: column contents is empty"),
        ('{"id": 1.5, "text": "x"}', "rows.jsonl:2: column id is 1.5"),
        ('{"id": "", "text": "x"}', "rows.jsonl:2: column id is ''"),
        ('{"id": true, "text": "x"}', "rows.jsonl:2: column id is True"),
        ('{"id": "a", "title": 3, "text": "x"}', "rows.jsonl:2: column title is 3"),
        ('{"id": "a", "text": "x\\ud800"}', r"rows.jsonl:2: column text has half a character .* at 2"),
        (
            '{"id": "a", "text": "' + "x" * 100_000 + '"}',
            "rows.jsonl:2: the passage has 100,003 characters.*: split it",
        ),
        ('{"id": "rome", "text": "x"}', "rows.jsonl:2: the id 'rome' is that of rows.jsonl:1"),
    ],
)
def test_a_broken_row_is_told_with_file_row_and_column(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(UserError, match=told):
        build(file, tmp_path / "index")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_not_utf8_is_told_with_file_and_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps(ROWS[0]).encode() + b'\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl:2: byte 0xff is not UTF-8"):
        build(file, tmp_path / "index")


def test_rows_may_be_of_many_forms(tmp_path: Path) -> None:
    whole = {"id": 7, "contents": '"A "b" c"\nText\nof two lines.'}
    named = PassageSource(
        [{"k": "a", "heading": " A\n b ", "body": "Text."}], fields={"id": "k", "title": "heading", "text": "body"}
    )
    assert [tuple(p) for p in read_passages(PassageSource([whole]))] == [("7", whole["contents"])]
    [passage] = read_passages(named)
    assert (passage.id, passage.title, passage.text) == ("a", "A b", "Text.")
    [passage] = read_passages(PassageSource([{"text": "Text."}]))
    assert (passage.id, passage.title, passage.contents) == ("0", "", '""\nText.')
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS[0]).encode()))
    assert [p.id for p in read_passages(PassageSource(tmp_path / "rows.jsonl.gz"))] == ["rome"]
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert [p.id for p in read_passages(PassageSource(tmp_path / "rows.parquet"))] == [row["id"] for row in ROWS]
    file = tmp_path / "rows.csv"
    file.write_text("id,title,text\n1,A,one\n2,B,two\n3,C,three\n")
    assert [p.id for p in read_passages(PassageSource(str(file), limit=2))] == ["1", "2"]
    with pytest.raises(UserError, match=r"--fields.body: passages have id, title, text, contents"):
        list(read_passages(PassageSource([whole], fields={"body": "x"})))
    with pytest.raises(UserError, match=r"row 1: no column 'nix'"):
        list(read_passages(PassageSource([whole], fields={"text": "nix"})))


# -- on disk -----------------------------------------------------------------------------------------------------------


def test_an_index_is_that_of_its_rows_however_it_is_made(tmp_path: Path) -> None:
    first = build(write_rows(tmp_path / "rows.jsonl"), tmp_path / "a")
    second = build(ROWS, str(tmp_path / "b"))
    assert first.fingerprint == second.fingerprint and first.files == second.files
    assert build(ROWS, tmp_path / "c", b=0.5).fingerprint != first.fingerprint
    assert build(ROWS[::-1], tmp_path / "d").fingerprint != first.fingerprint


BUILD = """
import os, signal, sys
from pathlib import Path
from posttrain.services.retrieval import index_folder as folder, passage_index as index, passages
from retrieved import ROWS
at, place = sys.argv[1:]
def die(*args): os.kill(os.getpid(), signal.SIGKILL)
if at == "passages":
    def rows():
        yield ROWS[0]
        die()
    index.build(rows(), place, overwrite=True)
module, name = {"files": (index, "finish"), "manifest": (folder, "_move"), "aside": (folder, "sync")}[at]
before = getattr(module, name)
if at == "aside":  # the old one has been moved away, and the new one is not there yet
    Path.rename = lambda self, to, move=Path.rename: die() if ".draft" in str(self) else move(self, to)
else:
    setattr(module, name, die)
index.build(ROWS, place, overwrite=True)
"""


@pytest.mark.parametrize("before", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("at", ["passages", "files", "manifest", "aside"])
def test_a_build_that_is_killed_leaves_no_half_of_an_index(tmp_path: Path, at: str, before: bool) -> None:
    place = tmp_path / "index"
    if before:
        small_index(place, ROWS[:3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run([sys.executable, "-c", BUILD, at, str(place)], env=environment, timeout=60)
    assert ran.returncode == -signal.SIGKILL
    if before and at != "aside":
        assert len(open_index(place)) == 3
    else:
        with pytest.raises(UserError, match=f"there is no index in {place}: posttrain retriever build"):
            open_index(place)
    if before:
        with pytest.raises(UserError, match="replace it with --overwrite"):
            build(ROWS, place)
        assert len(open_index(place)) == 3, "it was put back"
    build(ROWS, place, overwrite=before)
    assert len(open_index(place)) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["index"], "what was left has been cleared away"


def test_names_that_are_like_each_other_are_kept_apart(tmp_path: Path) -> None:
    """What a killed build of one index has left is not that of another."""
    left = small_index(tmp_path / ".a.b.12-0123abcd.old")
    build(ROWS[:2], tmp_path / "a")
    build(ROWS[:3], tmp_path / "[a]*")
    assert left.exists() and len(open_index(tmp_path / "a")) == 2 and len(open_index(tmp_path / "[a]*")) == 3
    with pytest.raises(UserError, match="already has an index"):
        build(ROWS, tmp_path / "a.b")
    assert len(open_index(tmp_path / "a.b")) == 5 and not left.exists()


def test_builds_of_one_index_at_once_leave_one_of_them(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(build, ROWS[:n], tmp_path / "index", overwrite=True) for n in (2, 3, 4, 5)]
    done = [n for n, one in zip((2, 3, 4, 5), made, strict=True) if one.exception() is None]
    assert done and all(isinstance(one.exception(), UserError | None) for one in made)
    assert len(open_index(tmp_path / "index")) in done and [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    place = small_index(tmp_path / "index", ROWS[:2])
    with pytest.raises(UserError, match="row 2: column text is 3"):
        build([ROWS[0], {"text": 3}], place, overwrite=True)
    with pytest.raises(UserError, match="has no rows"):
        build([], place, overwrite=True)
    with pytest.raises(UserError, match="no passage has a word"):
        build([{"text": "..."}], place, overwrite=True)
    with pytest.raises(UserError, match="already has an index: replace it with --overwrite"):
        build(ROWS, place)
    assert len(open_index(place)) == 2 and [path.name for path in tmp_path.iterdir()] == ["index"]
    build(ROWS, place, overwrite=True)
    assert len(open_index(place)) == 5


def test_what_is_no_index_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place in ("notes", "file"):
        with pytest.raises(UserError, match="holds files that are not an index"):
            build(ROWS, tmp_path / place, overwrite=True)
    other = small_index(tmp_path / "other")
    (other / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds notes.txt beside an index: move it away"):
        build(ROWS, other, overwrite=True)
    assert len(open_index(other)) == 5
    (tmp_path / "link").symlink_to(small_index(tmp_path / "index"))
    with pytest.raises(UserError, match="holds files that are not an index"):
        build(ROWS, tmp_path / "link", overwrite=True)
    (tmp_path / "empty").mkdir()
    build(ROWS, tmp_path / "empty")
    for place in (tmp_path / "file" / "index", "a\x00b", "x" * 5000, ""):
        with pytest.raises(UserError, match="cannot write to|cannot hold an index"):
            build(ROWS, place)
        with pytest.raises(UserError, match="index"):
            open_index(place)


FILES = [
    "bm25.passages.npy", "bm25.scores.npy", "bm25.starts.npy", "passages.jsonl", "passages.offsets.npy", "words.ends.npy",
    "words.numbers.npy", "words.txt", MANIFEST,
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["gone", "cut", "flipped", "emptied", "junk"])
def test_a_damaged_file_is_told_in_one_line(
    tmp_path: Path, name: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = small_index(tmp_path / "index")
    assert sorted([*FILES]) == sorted(path.name for path in place.iterdir())
    file = place / name
    content = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    elif how == "flipped":
        content[len(content) // 2] ^= 0x5A
        file.write_bytes(content)
    else:
        file.write_bytes({"cut": content[:-1], "emptied": b"", "junk": b"[" * 100_000}[how])
    if name == MANIFEST and how in ("cut", "flipped"):
        (place / MANIFEST).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError) as told:
        open_index(place)
    assert str(place) in str(told.value) and "posttrain retriever build" in str(told.value)
    assert main(["retriever", "serve", str(place), "--port", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"form": 2}, {"kind": 3}, {"files": {"words.txt": 3}}, {"count": 4}, {"count": 6}, {"kind": "dense"}, {"more": 1},
        {"files": {"a\0b": [1, 2]}}, {"files": {"../index.json": [1, 2]}}, {"source": {"qath": "rows.jsonl"}},
        {"source": {"path": "a\0b", "size": 1, "time": 1, "content": ""}},
        {"source": {"path": 5, "size": 1, "time": 1, "content": ""}},
    ],
)  # fmt: skip
def test_a_manifest_that_lies_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    place = small_index(tmp_path / "index")
    manifest = json.loads((place / MANIFEST).read_text())
    (place / MANIFEST).write_text(json.dumps({**manifest, **changes}))
    with pytest.raises(UserError, match="posttrain retriever build"):
        open_index(place)


def test_files_that_no_checksum_guards_are_damaged_only_for_those_who_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large index sizes alone are compared: what is wrong inside it shows when it is read."""
    from posttrain.services.retrieval import index_folder

    monkeypatch.setattr(index_folder, "CHECKED", 0)
    place = small_index(tmp_path / "index")
    found = np.load(place / "bm25.passages.npy")
    np.save(place / "bm25.passages.npy", found + 1000)
    index = open_index(place)
    with pytest.raises(UserError, match="is damaged"):
        index.search(["Tiber"], 3)
    small_index(place, overwrite=True)
    lines = (place / "passages.jsonl").read_bytes()
    (place / "passages.jsonl").write_bytes(lines.replace(b'"rome"', b'"rome}'))
    with pytest.raises(UserError, match="is damaged"):
        open_index(place).search(["Tiber"], 3)
    assert open_index(place).search(["Oxford"], 3)[0][0].title == "Tolkien"


def test_a_stale_index_is_refused(tmp_path: Path) -> None:
    file, place = write_rows(tmp_path / "rows.jsonl"), tmp_path / "index"
    build(file, place)
    content = file.read_bytes()
    os.utime(file, ns=(1, 1))
    assert len(open_index(place)) == 5, "another time alone is no change"
    file.write_bytes(content.replace(b"Tiber", b"Tibre"))
    with pytest.raises(UserError, match=f"{file} has changed since the index in {place} was made of it"):
        open_index(place)
    file.unlink()
    assert len(open_index(place)) == 5, "an index may be moved to where its rows are not"
    moved = tmp_path / "moved"
    shutil.move(place, moved)
    assert open_index(moved).search(["Tiber"], 1)[0][0].title == "Rome"


def test_rows_that_change_during_a_build_are_told(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl")

    class Changing:
        @property
        def identity(self) -> dict[str, str]:
            return {"name": "changing"}

        def encode(self, texts: Any, kind: str) -> Any:
            write_rows(file, ROWS[:1])
            return np.ones((len(texts), 2))

    with pytest.raises(UserError, match="has changed while the index was made of it"):
        build(file, tmp_path / "index", encoder=Changing())
    assert not (tmp_path / "index").exists()


def test_the_command_builds_and_says_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, place = write_rows(tmp_path / "rows.jsonl"), tmp_path / "index"
    words = ["retriever", "build", "--passages", str(file), "--out", str(place)]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "5 passages, bm25 (k1 0.9, b 0.4" in told and f"posttrain retriever serve {place}" in told
    assert "columns     " in told
    assert main(words) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--limit", "2", "--b", "0.75"]) == 0
    assert len(open_index(place)) == 2 and open_index(place).manifest.settings["b"] == 0.75
    for wrong, said in (
        (["--b", "2"], "--b must be at least 0 and at most 1, not 2"),
        (["--limit", "2.5"], "--limit is a whole number, not 2.5"),
        (["--faiss", "Flat"], "--faiss has no effect without --encoder"),
        (["--pooling", "last"], "--pooling has no effect without --encoder"),
        (["--nix", "1"], "unknown option --nix"),
    ):
        assert main([*words, "--overwrite", *wrong]) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1
    assert main(["retriever", "build", "--passages", str(tmp_path / "rosw.jsonl")]) == 2
    assert "did you mean 'rows.jsonl'" in capsys.readouterr().err
    assert main(["retriever", "build"]) == 2 and "--passages is missing" in capsys.readouterr().err
    for k in (0, 1001):
        with pytest.raises(UserError, match="k is"):
            open_index(place).search(["x"], k)


@pytest.mark.parametrize(
    ("row", "fields", "told"),
    [
        ({"id": "a", "title": "t", "text": "x"}, {}, "id, title, text"),
        ({"text": "x", "url": "u"}, {}, "text; not read: url"),
        ({"heading": "t", "body": "x"}, {"text": "body"}, "text from 'body'; not read: heading"),
        (
            {"id": "a", "title": "t", "contents": "x"},
            {},
            "id, contents; not read: title (the first line of 'contents' is the title)",
        ),
    ],
)
def test_it_is_told_which_columns_are_read(row: dict[str, str], fields: dict[str, str], told: str) -> None:
    source = PassageSource([row], fields=fields)
    assert taken(source) == told
    [passage] = read_passages(source)
    assert ("t" in passage.title) == ("title" in told.partition(";")[0])


def test_recall_of_real_questions(data: Path, tmp_path: Path) -> None:
    """A plain BM25 was measured at .868 of SQuAD's and .976 of PopQA's gold passages among the best five."""
    build(data / "retrieval" / "passages.jsonl", tmp_path / "index")
    index = open_index(tmp_path / "index")
    rows = [json.loads(line) for line in (data / "retrieval" / "questions.jsonl").read_text().splitlines()]
    for dataset, least in (("squad", 0.868), ("popqa", 0.976)):
        asked = [row for row in rows if row["dataset"] == dataset and row["gold_ids"]][
            :: 10 if dataset == "squad" else 1
        ]
        found = index.search([row["question"] for row in asked], 5)
        hits = [any(hit.passage.id in row["gold_ids"] for hit in own) for row, own in zip(asked, found, strict=True)]
        assert sum(hits) / len(hits) >= least
