"""Dense search finds the largest products, with FAISS and without; another encoder than that of the index is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from retrieved import ROWS, small_index

from posttrain.cli.main import main
from posttrain.core.types import UserError
from posttrain.services.retrieval import dense
from posttrain.services.retrieval.encoders import load_encoder
from posttrain.services.retrieval.passage_index import PassageIndex, build, open_index

BAG = """
import numpy as np
from zlib import crc32

SIZE = 64


def encode(texts, kind):
    found = np.zeros((len(texts), SIZE))
    for row, text in zip(found, texts):
        for word in text.lower().split():
            row[crc32(word.strip('.,?"').encode()) % SIZE] += 1
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1)


def broken(texts, kind):
    return {"shape": np.ones(3), "rows": np.ones((len(texts) + 1, 2)), "text": np.array([["a"]] * len(texts)),
            "nan": np.full((len(texts), 2), np.nan), "none": None, "raises": 1}[open("how").read()] / 1


def uneven(texts, kind):
    return np.ones((len(texts), 2 if kind == "passage" else 3))


nothing = 3
"""


@pytest.fixture
def bag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bag.py").write_text(BAG)
    return "bag.py:encode"


def products(index: PassageIndex, queries: list[str], k: int) -> list[list[tuple[str, float]]]:
    """The same by the definition, one product at a time."""
    encoder = load_encoder("bag.py:encode")
    passages = list(index.passages)
    found = []
    for query in queries:
        [asked] = encoder.encode([query.replace("\ud83d", "?")], "query")
        scores = [float(np.dot(asked, encoder.encode([p.contents], "passage")[0])) for p in passages]
        order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:k]
        found.append([(passages[place].id, scores[place]) for place in order])
    return found


QUERIES = ["the capital of Italy", "a novel", "river of France", "", "\x00\ud83d nothing of that"]


@pytest.mark.parametrize("faiss", [None, "Flat"])
@pytest.mark.parametrize("block", [65_536, 7])
def test_the_largest_products_are_found(
    bag: str, faiss: str | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "BLOCK", block)
    monkeypatch.setattr(dense, "TOGETHER", 10)
    rows = [{"id": f"{i} {row['id']}", "text": f"{row['text']} number {i}"} for i in range(8) for row in ROWS]
    index = open_index(small_index(Path("index"), rows, encoder=bag, faiss=faiss))
    for k in (1, 5, 60):
        found = index.search(QUERIES, k)
        for place, (own, expected) in enumerate(zip(found, products(index, QUERIES, k), strict=True)):
            assert [hit.score for hit in own] == pytest.approx([score for _, score in expected], abs=1e-6)
            scores = dict(expected)
            if k == 60:
                assert [hit.score for hit in own] == pytest.approx([scores[hit.passage.id] for hit in own], abs=1e-6)
            elif faiss is None:  # FAISS orders equal ones as it likes
                assert [hit.passage.id for hit in own] == [hit.passage.id for hit in index.search(QUERIES, 60)[place]][
                    :k
                ]
    assert index.search([], 3) == []


def test_an_approximate_index_finds_most_of_them(bag: str) -> None:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(200)]
    rows = [{"text": " ".join(rng.choice(words, 12))} for _ in range(600)]
    exact = open_index(small_index(Path("exact"), rows, encoder=bag))
    near = open_index(small_index(Path("near"), rows, encoder=bag, faiss="HNSW16"))
    queries = [" ".join(rng.choice(words, 6)) for _ in range(50)]
    pairs = zip(exact.search(queries, 10), near.search(queries, 10), strict=True)
    shares = [sum(b.score >= a[-1].score - 1e-6 for b in own) / len(a) for a, own in pairs]
    assert np.mean(shares) > 0.8


def test_a_kind_that_faiss_cannot_make_is_told(bag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("Nix", "IVF256,PQ32"):
        with pytest.raises(UserError, match=f"--faiss {kind} does not work for these 5 vectors"):
            small_index(Path("index"), encoder=bag, faiss=kind)
    small_index(Path("index"), encoder=bag, faiss="Flat")
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(UserError, match=r"pip install 'faiss-cpu"):
        open_index("index")


@pytest.mark.parametrize("name", ["vectors.npy", "vectors.faiss"])
def test_damaged_vectors_are_told(bag: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.services.retrieval import index_folder

    small_index(Path("index"), encoder=bag, faiss="Flat")
    content = (Path("index") / name).read_bytes()
    (Path("index") / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"is damaged \\({name} has"):
        open_index("index")
    monkeypatch.setattr(index_folder, "check", lambda *args: None)
    monkeypatch.setattr("posttrain.services.retrieval.passage_index.check", lambda *args: None)
    with pytest.raises(UserError, match="is damaged"):
        open_index("index")


def test_another_encoder_is_refused(bag: str) -> None:
    small_index(Path("index"), encoder=bag)
    assert open_index("index").search(["a novel"], 1)
    Path("bag.py").write_text(BAG.replace("SIZE = 64", "SIZE = 65"))
    with pytest.raises(UserError, match="is not the encoder that the index in index was made with: build it again"):
        open_index("index")
    Path("there").mkdir()
    Path("there/own.py").write_text(BAG)
    assert open_index("index", "there/own.py:encode").search(["a novel"], 1)
    with pytest.raises(UserError, match="is not the encoder"):
        open_index("index", "bag.py:encode")


@pytest.mark.parametrize("how", ["shape", "rows", "text", "nan", "none", "raises"])
def test_an_encoder_that_does_not_work_is_told(bag: str, how: str) -> None:
    Path("how").write_text(how)
    with pytest.raises(UserError, match="encoder"):
        small_index(Path("index"), encoder="bag.py:broken")
    assert not Path("index").exists()


def test_vectors_of_queries_have_to_fit(bag: str) -> None:
    small_index(Path("index"), encoder="bag.py:uneven")
    with pytest.raises(UserError, match="3 dimensions, and those of the index have 2"):
        open_index("index").search(["x"], 1)
    for wrong, told in (
        ("bag.py:nix", "has no 'nix'"),
        ("bag.py:nothing", "is not a function"),
        ("nix", "no such folder"),
    ):
        with pytest.raises(UserError, match=told):
            small_index(Path("other"), encoder=wrong)


def test_an_encoder_may_be_an_object(tmp_path: Path) -> None:
    class Lengths:
        def __init__(self, scale: int) -> None:
            self.identity = {"name": "lengths", "scale": scale}
            self.scale = scale

        def encode(self, texts: Any, kind: str) -> Any:
            return np.array([[len(text) * self.scale, 1] for text in texts])

    build(ROWS, tmp_path / "index", encoder=Lengths(1))
    with pytest.raises(UserError, match=r"was a Python object: open it in Python with open_index\(folder, encoder\)"):
        open_index(tmp_path / "index")
    longest = max(ROWS, key=lambda row: len(row["title"] + row["text"]))
    assert open_index(tmp_path / "index", Lengths(1)).search(["x"], 1)[0][0].passage.id == longest["id"]
    with pytest.raises(UserError, match="is not the encoder"):
        open_index(tmp_path / "index", Lengths(2))


# -- folders of transformers -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder with random weights."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for row in ROWS for word in f"{row['title']} {row['text']}".replace(".", " .").split()})
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "query:", "passage:", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("encoder")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, hidden_dropout_prob=0.3,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("normalised", [True, False])
def test_a_text_is_encoded_as_transformers_does_it_alone(encoder_folder: Path, pooling: str, normalised: bool) -> None:
    import transformers

    encoder = load_encoder(
        str(encoder_folder), pooling=pooling, normalised=normalised, query_prefix="query: ", longest=9
    )
    texts = [row["text"] for row in ROWS] * 20 + ["Rome", ""]
    found = encoder.encode(texts, "query")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(encoder_folder)
    model: Any = transformers.AutoModel.from_pretrained(encoder_folder).eval()
    for text, vector in [*zip(texts, found, strict=True)][::-17]:
        ids = tokenizer(f"query: {text}", return_tensors="pt", truncation=True, max_length=9)["input_ids"]
        hidden = model(ids).last_hidden_state[0].detach()
        expected = {"mean": hidden.mean(0), "first": hidden[0], "last": hidden[-1]}[pooling]
        expected = expected / expected.norm() if normalised else expected
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)


def test_an_index_knows_its_encoder_again(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(encoder_folder, tmp_path / "encoder")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ["retriever", "build", "--passages", "rows.jsonl", "--encoder", "encoder", "--passage-prefix", "passage: "]
    assert main([*words, "--longest", "32", "--out", "index"]) == 0
    assert "5 passages, dense (dimensions 16)" in capsys.readouterr().out
    index = open_index("index")
    assert index.manifest.encoder["passage_prefix"] == "passage: " and index.manifest.encoder["longest"] == 32
    found = index.search(["a novel by Tolkien"], 5)[0]
    assert len(found) == 5 and found[0].score <= 1 + 1e-6
    shutil.move(folder, tmp_path / "elsewhere")
    with pytest.raises(UserError, match="encoder"):
        open_index("index")
    assert [hit.passage for hit in open_index("index", "elsewhere").search(["a novel by Tolkien"], 5)[0]] == [
        hit.passage for hit in found
    ]
    weights = tmp_path / "elsewhere" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="elsewhere is not the encoder that the index in index was made with"):
        open_index("index", "elsewhere")
    assert main([*words, "--out", "other"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
