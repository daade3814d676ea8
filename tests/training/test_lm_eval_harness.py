"""--harness: lm-evaluation-harness asks posttrain's model, and gets the log-probabilities and replies of a plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import tiny
from real_models import real_model

from posttrain.cli import evaluation_tables
from posttrain.cli.main import main
from posttrain.config.inference import Evaluation
from posttrain.core.types import UserError
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import Decoder, causal
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training import harness_figures

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROWS = [
    {"question": f"{a}+{b}=", "choices": [str(a + b), str(a - b), "nothing"], "label": 0}
    for a in range(4) for b in range(2)
]  # fmt: skip
CHOICES = """
The capital of France is|Paris|Rome; The capital of Italy is|Rome|Berlin; The capital of Japan is|Tokyo|Madrid;
The capital of Spain is|Madrid|Oslo; The capital of Egypt is|Cairo|Lima; Water freezes at zero degrees|Celsius|Monday;
Two plus two is|four|nine; Ten minus one is|nine|four; The opposite of hot is|cold|loud; The opposite of big is|small|green;
Grass is usually|green|purple; Snow is usually|white|black; A baby dog is called a|puppy|calf; Ice is frozen|water|sand;
A baby cat is called a|kitten|foal; The sun rises in the|east|west; The sun sets in the|west|east; A week has|seven|twelve;
A year has|twelve months|six months; Bees make|honey|milk; Cows give|milk|honey; Fish live in|water|trees;
Birds can|fly|knit; The largest planet is|Jupiter|Mercury; The red planet is|Mars|Venus; Shakespeare wrote|Hamlet|Faust;
We see with our|eyes|ears; We hear with our|ears|eyes; A triangle has|three sides|five sides; The first month is|January|July
"""
PAIRS = [("1+1=", "2"), ("1+1=", "23 and 4"), ("what is", " it"), ("a" * 60, "bcdefghi"), ("", "one two"), ("b ", "c")]


def loop(model: Decoder, before: list[int], tokens: list[int]) -> tuple[float, bool]:
    """The log-probability of tokens behind others, and whether each is the likeliest, from the whole sequence's logits."""
    both = [*before, *tokens]
    with torch.no_grad():
        logits = model(torch.tensor(both), torch.arange(len(both)), causal) @ model.head.weight.T
    rows = logits.double().log_softmax(-1)[len(before) - 1 : -1]
    right = [int(row.argmax()) == token for row, token in zip(rows, tokens, strict=True)]
    return sum(row[token].item() for row, token in zip(rows, tokens, strict=True)), all(right)


def asked(*args: Any) -> Any:
    return SimpleNamespace(args=args)


@pytest.fixture
def harness(model: Decoder, tokenizer: Tokenizer) -> Any:
    pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
    from posttrain.training.lm_eval_model import PosttrainLM

    return PosttrainLM(model, tokenizer)


def test_likelihoods_are_those_of_a_loop(harness: Any, model: Decoder, tokenizer: Tokenizer) -> None:
    found = harness.loglikelihood([asked(*pair) for pair in PAIRS], disable_tqdm=True)
    for (context, continuation), (logp, greedy) in zip(PAIRS, found, strict=True):
        if context.endswith(" "):
            context, continuation = context.rstrip(), " " + continuation  # as the harness splits them
        before = tokenizer.encode(context, start=True) if context else [tokenizer.eos_id]
        tokens = tokenizer.encode(continuation)
        before = before[len(before) - min(len(before), model.config.context + 1 - len(tokens)) :]
        expected = loop(model, before, tokens)
        assert (logp, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])


def test_answers_with_one_context_are_computed_as_each_alone(harness: Any) -> None:
    answers = [asked("which word: ", word) for word in ("one", "two", "three", "one")]
    together = harness.loglikelihood(answers, disable_tqdm=True)
    for answer, (logp, greedy) in zip(answers, together, strict=True):
        [alone] = harness.loglikelihood([answer], disable_tqdm=True)
        assert (logp, greedy) == (pytest.approx(alone[0], abs=1e-5), alone[1])


def test_a_continuation_without_context_follows_the_prefix_and_not_its_neighbour(
    harness: Any, model: Decoder, tokenizer: Tokenizer
) -> None:
    before, tokens = tokenizer.encode("what is"), tokenizer.encode(" it")
    requests = [(None, before, tokens), (None, [], tokens)]
    found = harness._loglikelihood_tokens(requests)
    for (_, context, _), (logp, _) in zip(requests, found, strict=True):
        assert logp == pytest.approx(loop(model, context or [tokenizer.eos_id], tokens)[0], abs=1e-4)  # type: ignore[list-item]


def test_whole_texts_are_scored_in_windows_of_the_context(harness: Any, model: Decoder, tokenizer: Tokenizer) -> None:
    text = ("one two three four " * 8)[:100]
    tokens, size = tokenizer.encode(text, start=True), model.config.context
    assert len(tokens) > size
    expected = loop(model, [tokenizer.eos_id], tokens[:size])[0]  # type: ignore[list-item]
    rest = len(tokens) - size
    assert rest < size
    expected += loop(model, tokens[-size - 1 : -rest], tokens[-rest:])[0]
    assert harness.loglikelihood_rolling([asked(text)]) == [pytest.approx(expected, abs=1e-3)]


def test_replies_are_greedy_and_end_before_a_stop_string(harness: Any, model: Decoder, tokenizer: Tokenizer) -> None:
    [reply] = harness.generate_until([asked("1+1=", {"until": [], "max_gen_toks": 12})])
    tokens = tokenizer.encode("1+1=", start=True)
    for _ in range(12):
        with torch.no_grad():
            logits = model(torch.tensor(tokens), torch.arange(len(tokens)), causal) @ model.head.weight.T
        tokens.append(int(logits[-1].argmax()))
        if tokens[-1] == tokenizer.eos_id:
            tokens.pop()
            break
    assert reply == tokenizer.decode(tokens[4:])
    if reply:
        stop = reply[len(reply) // 2]
        cut = harness.generate_until([asked("1+1=", {"until": stop, "max_gen_toks": 12})])
        assert cut == [reply[: reply.index(stop)]]
    with pytest.raises(UserError, match="wants replies of 64 tokens, and the model's context is 64"):
        harness.generate_until([asked("1+1=", {"until": [], "max_gen_toks": 64})])


def test_a_task_in_a_file_has_the_accuracy_of_a_loop(
    tmp_path: Path, model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, seed in (("one", 0), ("two", 1)):
        save_model(tiny(tokenizer, seed), tmp_path / name, tokenizer)
    Path("sums.yaml").write_text(TASK)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = "eval --harness lm-eval:sums.yaml --model one --against two --threads 1 --out found.json"
    assert main([*words.split(), "--inspect-log", "log.json"]) == 0
    logs = [json.loads(Path(file).read_text()) for file in ("log.json", "log.against.json")]
    found = json.loads(Path("found.json").read_text())["harness"]
    for name, seed in (("one", 0), ("two", 1)):
        own, right = tiny(tokenizer, seed), 0
        for row in ROWS:
            before = tokenizer.encode(str(row["question"]), start=True)
            scores = [loop(own, before, tokenizer.encode(f" {choice}"))[0] for choice in row["choices"]]  # type: ignore[union-attr]
            right += scores.index(max(scores)) == row["label"]
        assert found[name]["sums"]["acc"]["mean"] == pytest.approx(right / len(ROWS))
        assert sum(sample["scores"]["sums/acc"]["value"] for sample in logs[seed]["samples"]) == right
        assert [sample["input"] for sample in logs[seed]["samples"]] == [row["question"] for row in ROWS]


def test_texts_begin_with_the_tokenizers_own_token_and_continuations_do_not(
    model: Decoder, tokenizer: Tokenizer
) -> None:
    """As of the harness's `hf` model: the token stands before a context, in place of an empty one, and once."""
    pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
    from posttrain.training.lm_eval_model import PosttrainLM

    class Begins:
        """This tokenizer, with a token that begins a context."""

        bos_id, eos_id = tokenizer.encode("<")[0], tokenizer.eos_id

        def encode(self, text: str, start: bool = False) -> list[int]:
            return tokenizer.encode(f"<{text}" if start else text)

    own = PosttrainLM(model, cast(Tokenizer, Begins()))
    found = own.loglikelihood([asked("", "one"), asked("1+1=", "2")], disable_tqdm=True)
    expected = [loop(model, tokenizer.encode(a), tokenizer.encode(b)) for a, b in (("<", "one"), ("<1+1=", "2"))]
    assert [logp for logp, _ in found] == pytest.approx([logp for logp, _ in expected], abs=1e-4)


def test_options_reach_the_harness_and_its_errors_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
    from posttrain.training.lm_eval_model import PosttrainLM

    seen: list[dict[str, Any]] = []

    def evaluated(model: Any, **how: Any) -> dict[str, Any]:
        seen.append(how)
        return {"results": {"sums": {"alias": "sums", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 1,
                                     "f1_stderr,strict": "N/A", "f1_stderr,none": 0.2}}}  # fmt: skip

    (tmp_path / "sums.yaml").write_text(TASK)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lm_eval, "simple_evaluate", evaluated)
    monkeypatch.setattr(PosttrainLM, "load", lambda *_, **how: how)
    for chat in (True, None):
        config = Evaluation(model="one", harness="lm-eval:sums.yaml", limit=3, chat=chat, threads=1)
        figures = harness_figures.harness_figures(config)["one"]["sums"]
        assert figures == {"acc": {"mean": 0.5, "stderr": 0.1}, "f1 (strict)": {"mean": 1.0, "stderr": None}}
    assert [(how["limit"], how["apply_chat_template"]) for how in seen] == [(3, True), (3, False)]


@pytest.mark.long
@pytest.mark.timeout(600)  # some 20 seconds of one core, which a busy machine does not have at once
def test_a_real_model_is_judged_as_by_the_harness_itself(tmp_path: Path) -> None:
    """30 questions: accuracy equal, log-probabilities within 1e-3 nats, greedy replies equal, to lm_eval's `hf` model."""
    pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
    from lm_eval.models.huggingface import HFLM

    from posttrain.training.lm_eval_model import PosttrainLM

    opened, known = load_model(real_model()), Tokenizer.load(real_model())
    save_model(cast(Decoder, opened), tmp_path / "model", known)
    models = PosttrainLM(opened, known), HFLM(pretrained=str(tmp_path / "model"), device="cpu", dtype="float32")
    facts = [fact.strip().split("|") for fact in CHOICES.split(";")]
    answers = [asked(question, f" {answer}") for question, *both in facts for answer in both]
    texts = [asked(f"{question} {right}.") for question, right, _ in facts]
    replies = [asked(question, {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}) for question, *_ in facts]
    ours, theirs = (model.loglikelihood(answers, disable_tqdm=True) for model in models)
    assert len(facts) == 30 and [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [logp for logp, _ in ours] == pytest.approx([logp for logp, _ in theirs], abs=1e-3)
    right = [[side[n][0] > side[n + 1][0] for n in range(0, 60, 2)] for side in (ours, theirs)]
    assert right[0] == right[1] and sum(right[0]) > 20
    ours, theirs = (model.loglikelihood_rolling(texts) for model in models)
    assert ours == pytest.approx(theirs, abs=1e-3)
    ours, theirs = (model.generate_until(replies) for model in models)
    assert ours == theirs


def test_the_folder_of_the_figures_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"one": {"sums": {"acc": {"mean": 0.5, "stderr": None}}}}
    monkeypatch.setattr(evaluation_tables, "harness_figures", lambda config: figures)
    monkeypatch.setattr("posttrain.config.harness_tasks.installed", lambda library: True)
    out = tmp_path / "new" / "found.json"
    assert main(["eval", "--harness", "lm-eval:sums", "--model", "one", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == {"harness": figures}


@pytest.mark.parametrize(
    ("harness_option", "told"),
    [
        ("hellaswag", "must name tasks of lm-evaluation-harness"),
        ("lm-eval:", "must name tasks of lm-evaluation-harness"),
        ("lm-eval:hellaswag", "needs lm-evaluation-harness: pip install 'lm-eval>="),
    ],
)
def test_a_mistake_is_one_line(
    harness_option: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("posttrain.config.harness_tasks.installed", lambda library: False)
    assert main(["eval", "--harness", harness_option, "--model", "nowhere"]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert main(["eval", "--harness", harness_option, "--model", "nowhere", "--suite", "suite.toml"]) == 2
    assert "does not go with --suite" in " ".join(capsys.readouterr().err.split())
    Path("rows.jsonl").touch()
    assert main(["eval", "--harness", harness_option, "--model", ".", "--tasks", "rows.jsonl", "--env", "gsm8k"]) == 2
    assert told in " ".join(capsys.readouterr().err.split()), "before rows are read and replies sampled"
