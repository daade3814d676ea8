"""A recipe in the making: options with a comment each, those of the other trainer without an equal, and the TOML of both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from posttrain.apps.migration.foreign_run import ForeignRun, Unresolved, is_known, shown, value_of
from posttrain.config.verbs import VERBS
from posttrain.core.coerce import convert
from posttrain.core.extras import install
from posttrain.core.foreign_options import ANSWERS, ELSEWHERE
from posttrain.core.messages import clip, inline, safe, safe_json
from posttrain.core.option_aliases import answer, direct, entry
from posttrain.core.several_files import names_of
from posttrain.core.types import UserError

LARGEST_NUMBER = 1e15
_LONGEST_COMMENT = 600
NEVER = 1_000_000
"""A number of steps that no run has: of checkpoints that are never written before the end."""

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine",  # of one cycle, unless more are given
}
ESTIMATORS = {
    **dict.fromkeys(("kl", "k1"), "k1"),
    **dict.fromkeys(("mse", "k2", "k1+", "k3+", "kl+", "low_var_kl+"), "k2"),
    **dict.fromkeys(("low_var_kl", "k3"), "k3"),
    "full": "exact",
}
_PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
}
OPTIMIZERS = {
    **dict.fromkeys(("adam", "AdamW", "adamw", "adamw_torch", "adamw_torch_fused", "torch.optim:AdamW"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "bitsandbytes.optim:AdamW8bit"), "adamw8bit"),
    **dict.fromkeys(("adafactor", "torch.optim:Adafactor"), "adafactor"),
    **dict.fromkeys(("lion_32bit", "bitsandbytes.optim:Lion"), "lion"),
    **dict.fromkeys(("sgd", "SGD", "torch.optim:SGD"), "torch.optim:SGD"),  # without momentum, as there
    **dict.fromkeys(("muon", "torch.optim:Muon"), "muon"),
    **dict.fromkeys(("Adam", "torch.optim:Adam"), "adam"),
    **{name: name for name in ("adagrad", "rmsprop")},
    "lion_8bit": "bitsandbytes.optim:Lion8bit",
    "paged_adamw_32bit": "bitsandbytes.optim:PagedAdamW",
    "paged_adamw_8bit": "bitsandbytes.optim:PagedAdamW8bit",
    "paged_lion_32bit": "bitsandbytes.optim:PagedLion",
    "paged_lion_8bit": "bitsandbytes.optim:PagedLion8bit",
}
"""Names of transformers and TRL, verl and OpenRLHF -> optimizers here."""
_CHOICES: dict[str, Mapping[Any, Any]] = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "kl_estimator": ESTIMATORS,
    "precision": _PRECISIONS,
    "weights": _PRECISIONS,
    "frozen_weights": _PRECISIONS,
    "scale": {True: "group", False: "none"},
    "too_long": {
        "error": "refuse",
        "keep_start": "truncate",
        "keep_end": "truncate",
        "left": "truncate",
        "right": "truncate",
        "middle": "truncate",
        True: "truncate",
        False: "skip",
    },
}
"""Option -> what its values are called in the other trainers, where that differs from here."""

_OF_OTHERS = re.compile(r"(critic|reward|reward_model|eval|distillation|.*\.ref|.*\.val_kwargs|.*\.profiler)\.")
"""Names of options of models that are not the policy: only an entry of their own takes them over."""

_NONE = "no counterpart in posttrain"
_OF_THE_CRITIC = "the critic learns in the policy's updates here: it has no such option of its own"

_SECRET = re.compile(
    r"(wandb\.key|wandb_key|use_wandb|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!stop_)(?<!image_)token|secret|password|api_key)$"
)
"""Names of options whose values no file may repeat: tokens of a model are none."""

_SAME_IN_ANY_CASE = re.compile(
    r"(?!.*(qat|aux_|freeze|dropout(?!_fusion)|moe_router))("
    r"(transfer_queue|skip|ray_kwargs|logger|eval|ckpt|vllm|wandb|ds|global_profiler)\.|.*\.(fsdp_config|fsdp|megatron|checkpoint|checkpoint_engine|"
    r"prometheus|trace|disaggregation|engine_kwargs|profiler|val_kwargs|fused_kernel_options|tiled_mlp)\.|"
    r"(.*\.)?(eval_|val_|save_|log|hub_|push_|fsdp|ddp_|deep(speed|compile)|vllm_|sglang_|dataloader_|tpu_|include_|torch_|ref_log|"
    r"async_save|nnodes|num_(workers|nodes|gpus)|WANDB|output_dir|default_local_dir|out$|max_(num|mem|colocate)|n_gpus|resume|report_to|wandb|swanlab|use_(shm|ms|torch|cpu|"
    r"mbridge|remove|prefix|legacy)|enable_(prefix|chunked|sleep|ema)|calculate_|balance_|profile|test_freq|default_hdfs|validation)|"
    r".*(micro_batch|per_gpu|worker|dynamic_b|memory|gpu|parallel|offload|shard|compile|flash|attn|attention_backend|eager|cuda|"
    r"nccl|kernel|chunk|prefetch|timeout|address|colocate|sleep|sync_|determinis|load_format|recompute|checkpointing|tensorboard|"
    r"hybrid_engine|perf$|value_head_prefix|_fusion|use_reward_loop|overlap_|use_precision_aware|wake_up|_metrics|_ckpt|pad_to_|local_rank|experiment|project|run_name|run_id|trust_remote|fast_tokenizer|disable_log|image_patch_size|rollout\.(prompt|response)_length)|"
    r"(.*\.)?(\w*seed|device|mode|reward_fn_key|return_raw_\w+|strategy|tf32|max_concurrent|skip_tokenizer_init|ema_beta|actor\.shuffle|"
    r"scheduling_policy|num_proc)$)"
)
"""Names of options that change memory, speed, logs, checkpoints or evaluations, and not what is learned."""

_LEARNED = re.compile(
    r"(shuffle|shuffle_dataset|do_sample|min_lr_ratio|lr_scheduler_kwargs|lora_dropout|neftune_noise_alpha|ref_model|ref_pretrain|"
    r"ref_model_name_or_path|reference_model|min_p|repetition_penalty|suppress_tokens|normalize_reward|normalize_enable|"
    r"reward_clip_range|override_config|interaction_config_path|partial_rollout|partial_rollout_enable|resume_from_path)"
)
"""Last parts of names that have an answer in the table of option names, and change what is learned."""
_IF_FALSE = re.compile("shuffle|do_sample")
"""Those of them that change it by the value false."""

_GUESS = re.compile(r"(, not known here: \w+'s default).*", re.DOTALL)
"""A comment on a value that the script does not show: what would follow is true of the script's own value."""

_UNKNOWN = re.compile(r"FILE\d*\.parquet")
"""Files in place of those whose names only a script computes."""

TRACKERS = ("wandb", "trackio", "mlflow", "swanlab")


@dataclass
class RecipeDraft:
    """The recipe of a verb for a run of another trainer.

    `defaults` are those of the other trainer. An option that `read` returns counts as treated; `finish` treats the others by
    the table of option names.
    """

    run: ForeignRun
    verb: str
    defaults: Mapping[str, Any]
    lines: dict[str, tuple[Any, str]] = field(default_factory=dict)  # option -> its value, comment
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)  # of the algorithm, by place
    parts: dict[str, tuple[str, str]] = field(default_factory=dict)  # of a mixture -> its file, comment
    shares: tuple[list[float], str] = field(default=([], ""))  # weights of the parts, comment
    without: dict[str, list[str]] = field(default_factory=dict)  # what to do -> options
    changes: dict[str, list[str]] = field(default_factory=dict)  # as `without`: of options that change what is learned
    head: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)  # what has to be put right before the first run
    treated: set[str] = field(default_factory=set)
    learned: Collection[str] = ()  # options with an answer that change what is learned
    quiet: Callable[[str], Any] = _SAME_IN_ANY_CASE.match  # whether a name is that of an option that learning ignores
    guessed: dict[str, str] = field(
        default_factory=dict
    )  # option there that has its default here -> what the script has

    def given(self, name: str) -> bool:
        return name in self.run.options

    def read(self, name: str, otherwise: Any = None) -> Any:
        """Return the value of an option there: as given, or its default. A value that is not known is `otherwise`."""
        self.treated.add(name)
        value = self.run.options.get(name, self.defaults.get(name, otherwise))
        if isinstance(value, Unresolved):
            guessed = self.defaults.get(name) is not None
            told = f"only the script computes its value, {value.text}: set it here"
            self.tell(name, told, not guessed and self.is_learned(name))
            if guessed:
                self.guessed[self.run.names.get(name, name)] = value.text
            return self.defaults.get(name, otherwise)
        return value

    def number(self, name: str, otherwise: float | None = None) -> Any:
        """Return a number; the default for none. Raises UserError where something else is given."""
        value = self.read(name, otherwise)
        value = value_of(value) if isinstance(value, str) else value  # as argparse converts it
        if value is None:
            return self.defaults.get(name, otherwise)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER:
            return value
        raise UserError(f"{self.run.framework}'s {name} is a number, not {shown(value)!r:.60}")

    def word(self, name: str) -> Any:
        """Return a choice: text, or a truth value. Raises UserError where several are given."""
        value = self.read(name)
        if isinstance(value, (list, dict)):
            raise UserError(f"{self.run.framework}'s {name} of {self.run.trainer} is one word, not {shown(value)}")
        return value

    def count(self, name: str, otherwise: float | None = None) -> int:
        """Return a whole number above 0. Raises UserError where something else is given."""
        value = self.number(name, otherwise)
        if value is None or value < 1 or value % 1:
            raise UserError(f"{self.run.framework}'s {name} is a whole number above 0, not {shown(value)}")
        return int(value)

    def origin(self, name: str) -> str:
        """Return an option there with its value, as a comment names it."""
        called = self.run.names.get(name, name)
        if isinstance(self.run.options.get(name), Unresolved):
            return f"{called}, not known here: {self.run.framework}'s default"
        if self.given(name):
            return f"{called} = {'***' if _SECRET.search(name) else shown(self.run.options[name])}"
        return f"{called}, not given: {self.run.framework}'s default"

    def put(self, option: str, value: Any, comment: str) -> None:
        self.lines[option] = (value, _GUESS.sub(r"\1; set that of the script", comment))

    def set(self, place: str, value: Any, comment: str) -> None:
        self.settings[place] = (value, comment)

    def note(self, name: str, text: str) -> None:
        """Note an option that has no counterpart in posttrain, with what to do."""
        self._listed(self.without, name, text)

    def differs(self, name: str, text: str) -> None:
        """Note an option without which the recipe learns something else: the command prints it, to be checked."""
        self._listed(self.changes, name, text)

    def tell(self, name: str, text: str, learned: bool) -> None:
        """Note an option as `differs` does if it is `learned`, otherwise as `note` does."""
        self._listed(self.changes if learned else self.without, name, text)

    def is_learned(self, name: str) -> bool:
        """Return whether an option without an equal may change what is learned."""
        return not self.quiet(name)

    def _listed(self, found: dict[str, list[str]], name: str, text: str) -> None:
        names, called = found.setdefault(text, []), self.run.names.get(name, name)
        if called not in names:
            names.append(called)

    def same(self, option: str, name: str, why: str = "same meaning") -> None:
        """Take over an option's value: as given, or the default there where ours is another one."""
        value = self.read(name)
        if value is None or value == "":
            return
        try:
            value = self.fitted(option, value)
        except UserError as error:
            told = f"not taken over as {option}: {inline(str(error))}"
            self.tell(self.origin(name), told, self.is_learned(name))
            return
        if self.given(name) and not isinstance(self.run.options[name], Unresolved):
            self.put(option, value, f"{self.origin(name)}: {why}")
        elif value != self.own_default(option):
            own = self.own_default(option)
            told = f"{self.origin(name)}" + (f" (here: {shown(own)})" if own is not None else "")
            self.put(option, value, told if why == "same meaning" else f"{told}: {why}")

    def tasks(self, name: str) -> None:
        """Take over the rows: one file, or several, which become the parts of a mixture.

        A file whose name only the script computes is left to the reader: the default there is other data.
        """
        value = self.run.options.get(name)
        files = value if isinstance(value, list) else [value]
        if len(files) == 1 and not isinstance(files[0], Unresolved):
            if isinstance(value, list):
                self.run.options[name] = value[0]
            return self.same("tasks", name)
        self.treated.add(name)
        found: list[tuple[str, str]] = []
        for number, file in enumerate(files, 1):
            if isinstance(file, Unresolved):
                place = "FILE.parquet" if len(files) == 1 else f"FILE{number}.parquet"
                found.append((place, f"{name}: {shown(file)}, which only the script knows: name yours"))
            else:
                found.append((self.fitted("tasks", str(file).strip()), f"{name}: same file"))
        if len(files) == 1:
            return self.put("tasks", *found[0])
        self.parts = dict(zip(names_of([place for place, _ in found]), found, strict=True))
        often = "by the weights given" if self.shares[0] else "as often as its size, as one file would be"
        self.head.append(f"Rows: {len(files)} files as parts of a mixture, each {often}.")

    def fitted(self, option: str, value: Any) -> Any:
        """Return the value as an option here takes it. Raises UserError for one that it cannot take."""
        choices = _CHOICES.get(option, {})
        if isinstance(value, (str, bool)) and value in choices:
            value = choices[value]
        if option in ("save_every", "eval_every") and isinstance(value, (int, float)) and value <= 0:
            value = NEVER if option == "save_every" else 0
        if option == "optimizer" and value not in OPTIMIZERS.values():
            raise UserError("there is none of that name here, see posttrain rl --help-all")
        if option in ("lora", "lora_alpha") and value == 0:
            raise UserError("0 means none")
        if option == "track":
            value = [t for t in (value if isinstance(value, list) else [value]) if t in TRACKERS]
        if option == "top_k" and value == -1:
            value = 0
        if option == "lora_targets" and isinstance(value, str):
            value = value.split(",")
        if isinstance(value, str) and option in ("model", "tasks", "eval_tasks", "out", "reward_model", "critic_model"):
            value = str(Path(value).expanduser()) if value.startswith("~") else value
        if isinstance(value, str) and option in ("reward_model", "env_", "eval_tasks"):
            value = [value]
        hint = _kinds(self.verb).get(option.partition(".")[0])
        if hint is None:
            raise UserError(f"posttrain {self.verb} has no such option")
        if isinstance(value, list) and not is_known(value):
            raise UserError("only the script computes a part of it: set it here")
        if isinstance(value, dict) and get_origin(hint) is dict:
            if unknown := [name for name, part in value.items() if not is_known(part)]:
                raise UserError(f"only the script computes its {', '.join(map(str, unknown))}: set it here")
            return {name: part for name, part in value.items() if part is not None}
        if isinstance(value, str) and hint in (int, float, int | None, float | None):
            value = value_of(value)
        if isinstance(value, int) and not isinstance(value, bool) and hint in (float, float | None):
            value = float(value)
        if isinstance(value, float) and value.is_integer() and hint in (int, int | None):
            value = int(value)
        return value if "." in option else convert(value, hint, option)

    def own_default(self, option: str) -> Any:
        """Return the default here; None for settings of algorithms, which have one each."""
        own = next((f for f in fields(VERBS[self.verb].options) if f.name == option), None)
        return own.default if own is not None and own.default is not MISSING else None

    def finish(self) -> None:
        """Treat the options that no rule has read: take over what the table takes over, and list the others."""
        for option, place in (("model", "MODEL"), ("tasks", "rows.jsonl")):
            if option == "tasks" and self.parts:
                continue
            if option not in self.lines and not any(
                direct(name) == option for name in self.run.options if name not in self.treated
            ):
                self.lines = {option: (place, "not in it: name yours"), **self.lines}
        for name, value in self.run.options.items():
            if name in self.treated:
                continue
            self.treated.add(name)
            option, told = direct(name), answer(name)
            if not option and not answer(name) and (own := name.rpartition(".")[2]) in _kinds(self.verb):
                option = own
            if _OF_OTHERS.match(name) and "." not in (here := entry(name, ELSEWHERE)):
                option = ""
                if here and len(here) >= len(entry(name, ANSWERS)):  # of the policy's own option
                    told = _OF_THE_CRITIC if name.startswith("critic.") else _NONE
            if isinstance(value, Unresolved):
                what = f" (here {option})" if option else ""
                told = f"only the script computes its value, {value.text}: set it here{what}"
                self.tell(name, told, self.is_learned(name))
            elif (
                option
                and option not in self.lines
                and option.partition(".")[0] in _kinds(self.verb)
                and value is not None
            ):
                self.same(option, name)
            elif value is not None and value != "":
                last = name.rpartition(".")[2]
                learned = (
                    (told in ("", _NONE, _OF_THE_CRITIC) and self.is_learned(name))
                    or name in self.learned
                    or (bool(_LEARNED.fullmatch(last)) and (not _IF_FALSE.match(last) or value is False))
                )
                self.tell(self.origin(name), told or _NONE, learned)
        self._leave_out_evaluations()
        self.run.notes += [f"what is learned: {line}" for line in map(_grouped, self.changes.items())]

    def _leave_out_evaluations(self) -> None:
        """Leave out how often to evaluate, where nothing is held out: posttrain would refuse it."""
        every, _ = self.lines.get("eval_every", (0, ""))
        if every and not self.lines.keys() & {"held_out", "eval_tasks"}:
            del self.lines["eval_every"]
            self.note(f"evaluation every {every} steps", f"add eval_every = {every} with held_out = 0.1 or eval_tasks")

    def before_the_first_run(self) -> list[str]:
        """Return what has to be put right before the recipe runs, whatever machine imports it."""
        value = {name: content for name, (content, _) in self.lines.items()}
        found: list[str] = []
        unknown = [f"tasks of part {name}" for name, (file, _) in self.parts.items() if _UNKNOWN.fullmatch(file)]
        if unknown:
            found.append(f"name {' and '.join(unknown)}")
        for option, place in (("model", "MODEL"), ("tasks", "rows.jsonl")):
            if value.get(option) == place or _UNKNOWN.fullmatch(str(value.get(option))):
                found.append(f"name {option}")
            elif re.fullmatch(r"(?!runs/)[\w-]+/[\w.-]+(?<!\.jsonl)(?<!\.json)(?<!\.parquet)", str(value.get(option))):
                found.append(
                    f"{option} {value[option]} is on the hub unless a folder has this name: without a network, give a folder"
                )
        found += [*self.run.first, *self.first]
        if self.guessed:
            listed = ", ".join(f"{name} ({inline(clip(text))})" for name, text in list(self.guessed.items())[:8])
            found.append(f"set {listed}: only the script computes it, and here is {self.run.framework}'s default")
        if (server := value.get("engine")) and "engine_url" not in value:
            what = "engine and correction" if "correction" in value else "engine"
            program = {"vllm": "vLLM", "sglang": "SGLang"}[server]
            found.append(f"install {program}, or remove {what}: the local engine samples")
        files = re.findall(r"(?:^|[ +:])([\w/.-]+\.py)(?=$|[:, ])", str(value.get("env")))
        if files := [file for file in dict.fromkeys(files) if file not in self.run.files]:
            found.append(f"{', '.join(files)} must be here, with the functions that env names")
        if tracked := value.get("track"):
            found.append(f"{install(tracked[0])}, or remove track")
        return found

    def toml(self, source: str, file: str) -> str:
        """Return the text of the recipe, to be stored in `file`."""
        head = [
            f"From {source}: {self.run.framework}, {self.run.trainer}. Run it:",
            f"  posttrain {self.verb} --config {file}",
        ]
        head += [*self.head, *(f"Check {note}" for note in self.run.notes)]
        if first := self.before_the_first_run():
            one = f"Before the first run: {'; '.join(first)}."
            head += [one] if len(one) <= _LONGEST_COMMENT else [f"Before the first run: {line}" for line in first]
        out = [_comment(line) for line in head]
        out += ["", f"[{self.verb}]"]
        out += [_line(option, value, comment) for option, (value, comment) in self.lines.items()]
        for number, (name, (file, comment)) in enumerate(self.parts.items()):
            out += ["", f"[{self.verb}.mixture.{name}]", _line("tasks", file, comment)]
            out += [_line("weight", weight, self.shares[1]) for weight in self.shares[0][number : number + 1]]
        if self.settings:
            out += ["", f"[{self.verb}.settings]"]
            out += [_line(json.dumps(place), value, comment) for place, (value, comment) in self.settings.items()]
        if self.without:
            out += ["", f"# Options of {self.run.framework} that are not in this recipe, and what to do:"]
            out += [_comment(line, "#   ") for line in map(_grouped, self.without.items())]
        return "\n".join(out) + "\n"


@cache
def _kinds(verb: str) -> dict[str, Any]:
    """Return the types of a verb's options."""
    kind = VERBS[verb].options
    return {**{name: flag.type for name, flag in kind.flags().items()}, **get_type_hints(kind)}


def _grouped(entry: tuple[str, list[str]]) -> str:
    """Return the options that have the same answer, the first eight by name, and the answer."""
    text, names = entry
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{'; '.join(names[:8])}{more}: {text}"


def _line(option: str, value: Any, comment: str) -> str:
    return f"{option} = {toml_value(value)}  {_comment(comment)}"


def _comment(text: str, before: str = "# ") -> str:
    shown = safe(" ".join(text.encode("utf-8", "replace").decode().split()))
    return before + clip(shown, _LONGEST_COMMENT)


def toml_value(value: Any) -> str:
    """Return a value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_value(str(name))} = {toml_value(part)}' for name, part in value.items())}}}"
    return safe_json(json.dumps(str(value).encode("utf-8", "replace").decode(), ensure_ascii=False))
