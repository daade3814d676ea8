"""`--model org/name`: downloaded once, only what is read, the same without a network, and each failure is one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from conftest import tiny
from model_hub import READS, TOKEN, Files, ModelHub, Repository, model_hub, use

from posttrain.core.types import UserError
from posttrain.models import hub_download
from posttrain.models.adapters.adapter_config import AdapterConfig, read_adapter_config, write_adapter_config
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.checkpoint_location import checkpoint_folder, pinned
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.system import hub as system_hub
from posttrain.system.hub import HubName, hub_name, name_in_address

OTHER = {
    "pytorch_model.bin": b"x", "consolidated.safetensors": b"x", "model.fp16.safetensors": b"x",
    "original/params.json": b"{}", "original/model.safetensors": b"x", "onnx/model.onnx": b"x", "picture.png": b"x",
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Files:
    folder = tmp_path_factory.mktemp("model")
    save_model(tiny(tokenizer), folder, tokenizer)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def hub(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    monkeypatch.chdir(tmp_path)
    with model_hub(**{"org/tiny": Repository({**files, **OTHER})}) as served:
        use(monkeypatch, served.address, tmp_path / "cache")
        yield served
    system_hub.reached.cache_clear()


def again(name: str) -> Path:
    """The folder of a model, as another process would find it."""
    hub_download.FOUND.clear()
    return checkpoint_folder(name)


def refused(name: str) -> str:
    with pytest.raises(UserError) as caught:
        again(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_only_what_is_read_is_downloaded_and_once(hub: ModelHub, files: Files) -> None:
    folder = checkpoint_folder("org/tiny")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    assert len(hub.asked("/resolve/")) == 2 * len(files)
    assert checkpoint_folder("org/tiny") == folder
    before = len(hub.seen)
    assert again("org/tiny") == folder
    assert not [path for _, path, _ in hub.seen[before:] if "/resolve/" in path]


def test_the_model_of_the_hub_is_the_one_that_was_saved(hub: ModelHub, tokenizer: Tokenizer) -> None:
    there, own = load_model("org/tiny"), tiny(tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(there.parameters(), own.parameters(), strict=True))


def test_a_revision_is_a_branch_a_tag_or_a_commit_and_keeps_its_files(hub: ModelHub, files: Files) -> None:
    repository = hub.repositories["org/tiny"]
    first = repository.branches["main"]
    repository.commit("main", {**files, "generation_config.json": b'{"eos_token_id": 3}'})
    repository.branches["v1.0"] = first
    assert again("org/tiny@v1.0") == again(f"org/tiny@{first}") != again("org/tiny")
    assert pinned(Path("org/tiny")) == Path(f"org/tiny@{repository.branches['main']}")
    assert pinned(Path("org/tiny@v1.0")) == Path(f"org/tiny@{first}")
    assert "no revision v2" in refused("org/tiny@v2")


@pytest.mark.parametrize("kind", ["datasets", "spaces", "docs"])
def test_a_name_in_an_address_has_its_organisation(kind: str) -> None:
    assert name_in_address(f"https://huggingface.co/{kind}/gsm8k") == "" == name_in_address("hf:one")
    assert name_in_address("https://huggingface.co/spaces/a/b") == ""
    assert name_in_address("hf://datasets/openai/gsm8k") == name_in_address("hf:openai/gsm8k") == "openai/gsm8k"


def test_a_local_folder_comes_before_the_hub_and_is_not_pinned(hub: ModelHub, tmp_path: Path) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert again("org/tiny") == Path("org/tiny") == pinned(Path("org/tiny")) and not hub.seen


def test_without_a_network_the_cache_serves_and_is_named(
    hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = again("org/tiny")
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    assert again("org/tiny") == folder
    offline = []

    def download(*given: Any, **options: Any) -> str:
        offline.append(huggingface_hub.constants.HF_HUB_OFFLINE)
        return ask(*given, **options)

    ask = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    said = refused("org/none")
    assert (
        "127.0.0.1 cannot be reached, and org/none was not downloaded before: give a folder, or run hf download" in said
    )
    assert said.endswith("; the cache has org/tiny")
    assert offline == [True], "the client alone would try for half a minute"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused("org/none") and again("org/tiny") == folder
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "other")
    assert refused("org/none").endswith("the cache is empty")


def test_a_name_server_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    over, tried = threading.Event(), []

    def connect(place: Any, seconds: float) -> Any:
        tried.append((place, seconds))
        over.wait()
        raise OSError

    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("posttrain.system.hub.socket.create_connection", connect)
    assert not system_hub.reached("https://hub.invalid", 0.01)
    over.set()
    assert tried == [(("hub.invalid", 443), 0.01)] and system_hub.SECONDS < 2


def test_a_mistyped_folder_beside_others_is_answered_with_the_folder(hub: ModelHub, tmp_path: Path) -> None:
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    assert again("runs/sft") == Path("runs/sft")
    begin = "there is no folder runs/stf; did you mean 'runs/sft'?; and on the hub: "
    with pytest.raises(UserError, match="did you mean 'runs/sft'"):
        pinned(Path("runs/stf"))
    assert "no folder runs/quite-another (a model is a folder, a .gguf file, or org/name of the hub)" in refused(
        "runs/quite-another"
    )
    assert begin in refused("runs/stf") and "there is no folder" not in refused("org/none")


def test_a_server_that_fails_leaves_the_cache(hub: ModelHub) -> None:
    folder = again("org/tiny")
    hub.refuse["/api"] = 503
    assert again("org/tiny") == folder
    assert "failed with status 503 for org/none" in refused("org/none")


def test_a_connection_that_breaks_off_is_taken_up_where_it_broke(
    hub: ModelHub, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)  # what is kept of a part, 10 MB else
    size = len(files["model.safetensors"])
    hub.cut["model.safetensors"] = size * 2 // 3
    folder = again("org/tiny")
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    ranges = [part for method, path, part in hub.seen if method == "GET" and path.endswith("model.safetensors")]
    assert ranges == ["", f"bytes={size * 2 // 3 // 1024 * 1024}-"]


def test_an_interrupted_download_goes_on_with_the_files_that_are_missing(
    hub: ModelHub, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuse["/org/tiny/resolve/" + hub.repositories["org/tiny"].branches["main"] + "/model.safetensors"] = 403
    assert "your token (HF_TOKEN) has no access" in refused("org/tiny")
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    assert "org/tiny was downloaded in part" in refused("org/tiny")
    use(monkeypatch, hub.address, tmp_path / "cache")
    hub.refuse.clear()
    there = [name for name in files if any((tmp_path / "cache").glob(f"*/snapshots/*/{name}"))]
    before = len(hub.seen)
    folder = again("org/tiny")
    fetched = {
        path.rpartition("/")[2] for method, path, _ in hub.seen[before:] if method == "GET" and "/resolve/" in path
    }
    assert fetched == set(files) - set(there) >= {"model.safetensors"}
    assert {file.name for file in folder.iterdir()} == set(files)


@pytest.mark.parametrize(
    ("token", "gated", "missing"),
    [
        (
            "",
            "accept its licence at {}/org/gated and set HF_TOKEN",
            "no model org/none; correct the name (or it is private",
        ),
        (READS, "accept its licence at {}/org/gated with the account", "has no model org/none; correct the name"),
        ("hf_wrong", "the hub refuses your token (HF_TOKEN)", "the hub refuses your token (HF_TOKEN)"),
    ],
)
def test_access_and_names_are_one_line_with_the_fix(
    token: str, gated: str, missing: str, hub: ModelHub, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/gated"] = Repository(files, gated=True)
    use(monkeypatch, hub.address, tmp_path / "cache", token)
    assert gated.format(hub.address) in refused("org/gated")
    assert missing in refused("org/none")


def test_a_gated_model_opens_with_the_right_token(
    hub: ModelHub, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/gated"] = Repository(files, gated=True)
    use(monkeypatch, hub.address, tmp_path / "cache", TOKEN)
    assert (again("org/gated") / "model.safetensors").is_file()


def test_weights_in_other_formats_are_refused_before_they_are_downloaded(hub: ModelHub) -> None:
    hub.repositories |= {
        "org/bin": Repository({"config.json": b"{}", "pytorch_model.bin": b"x"}),
        "org/gguf": Repository({"tiny.Q8_0.gguf": b"x"}),
        "org/none": Repository({"notes.txt": b"x"}),
    }
    assert "has no safetensors, only pytorch_model.bin" in refused("org/bin")
    assert "hf download org/gguf tiny.Q8_0.gguf" in refused("org/gguf")
    assert "holds no checkpoint" in refused("org/none")
    assert not hub.asked("/resolve/")


def test_names_of_the_hub_are_told_from_paths() -> None:
    assert hub_name("org/name-1.5") == HubName("org/name-1.5")
    assert hub_name("org/name@refs/pr/3") == HubName("org/name", "refs/pr/3")
    assert not any(map(hub_name, ("name", "runs/sft/checkpoints", "../org/name", "/org/name", "org/name@", "a/b@../c")))


def test_the_base_of_an_adapter_keeps_its_revision_in_the_fields_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for base in ("org/name@0a1b", "org/name", "/some/folder"):
        config = AdapterConfig(4, 8.0, False, base, "CAUSAL_LM", ())
        write_adapter_config(tmp_path, config, ["q_proj"])
        assert read_adapter_config(tmp_path) == config
        name, _, revision = base.partition("@")
        told = json.loads((tmp_path / "adapter_config.json").read_text())
        assert (told["base_model_name_or_path"], told["revision"]) == (name, revision or None)
        theirs = peft.PeftConfig.from_pretrained(str(tmp_path))
        assert (theirs.base_model_name_or_path, theirs.revision) == (name, revision or None)
