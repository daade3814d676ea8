"""`--tasks org/name`: rows of a dataset of the hub, again without a network, and each failure is one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_hub import READS, ModelHub, Repository, model_hub, use

from posttrain.core.types import UserError
from posttrain.data.rows import load_rows
from posttrain.system import hub as system_hub

datasets = pytest.importorskip("datasets", reason="hub datasets need the library `datasets`")
ROWS = [{"prompt": f"{number}+1", "response": str(number + 1)} for number in range(5)]


def lines(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def connect(patch: pytest.MonkeyPatch, address: str, cache: Path, token: str = "") -> None:
    use(patch, address, cache, token)
    patch.setattr(datasets.config, "HF_ENDPOINT", address)
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache / "datasets"))
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    monkeypatch.chdir(tmp_path)
    files = {"train.jsonl": lines(ROWS), "test.jsonl": lines(ROWS[:2])}
    with model_hub(**{"datasets/org/rows": Repository(files)}) as served:
        connect(monkeypatch, served.address, tmp_path / "cache")
        yield served
    system_hub.reached.cache_clear()


def refused(name: str, split: str | None = "train") -> str:
    with pytest.raises(UserError) as caught:
        load_rows(name, split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rows_are_downloaded_once_and_are_there_without_a_network(
    hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(load_rows("org/rows", "train")) == ROWS and list(load_rows("org/rows", "test")) == ROWS[:2]
    assert len([1 for method, path, _ in hub.seen if method == "GET" and path.endswith(".jsonl")]) == 2
    assert "several splits" in refused("org/rows", None)
    connect(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    assert list(load_rows("org/rows", "train")) == ROWS
    assert "127.0.0.1 cannot be reached" in refused("org/none")


def test_a_revision_of_a_dataset_keeps_its_rows(hub: ModelHub) -> None:
    repository = hub.repositories["datasets/org/rows"]
    first = repository.branches["main"]
    repository.commit("main", {"train.jsonl": lines(ROWS[:3])})
    assert list(load_rows("org/rows", "train")) == ROWS[:3]
    assert list(load_rows(f"org/rows@{first}", "train")) == ROWS
    assert "org/rows has no revision v3" in refused("org/rows@v3")


@pytest.mark.parametrize(
    ("token", "gated", "missing"),
    [
        ("", "accept its licence at {}/datasets/org/gated and set HF_TOKEN", "the hub has no dataset org/none"),
        (READS, "accept its licence at {}/datasets/org/gated with", "the hub has no dataset org/none"),
        ("hf_wrong", "the hub refuses your token", "the hub refuses your token"),
    ],
)
def test_access_and_names_of_datasets_are_one_line_with_the_fix(
    token: str, gated: str, missing: str, hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["datasets/org/gated"] = Repository({"train.jsonl": lines(ROWS)}, gated=True)
    connect(monkeypatch, hub.address, tmp_path / "cache", token)
    assert gated.format(hub.address) in refused("org/gated")
    assert missing in refused("org/none")


def test_damaged_rows_of_a_dataset_give_the_reason(hub: ModelHub) -> None:
    hub.repositories["datasets/org/rows"].commit("main", {"train.jsonl": lines(ROWS) + b'{"prompt": "1'})
    assert "the dataset org/rows could not be downloaded from the hub: " in refused("org/rows")
    assert "JSON parse error" in refused("org/rows")
