"""Code of the user's that misbehaves: rewards, environments, converters of rows, rows of algorithms."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzzing.case import Case
from fuzzing.samples import copy, rows, write_rows
from fuzzing.usual import CHECK, EVAL, RL

HEAD = "import math, os, sys, signal, threading, time\nfrom posttrain import Invalid, Reply, Turn\n"
VALUES = (
    *(
        "1",
        "0.5",
        "True",
        "-3",
        "1e308",
        "-1e308",
        "5e-324",
        "10**400",
        "-(10**400)",
        "math.nan",
        "math.inf",
        "-math.inf",
    ),
    *(
        "None",
        "''",
        "'1'",
        "b'1'",
        "bytearray(9)",
        "1j",
        "1+0j",
        "[]",
        "[1]",
        "[1.0, 2.0]",
        "()",
        "{1}",
        "object()",
        "len",
    ),
    *(
        "{}",
        "{'a': 1}",
        "{'a': None}",
        "{'a': {'b': 1}}",
        "{'reward': 1, 'x': 0.5}",
        "{'reward': 'x'}",
        "{1: 2}",
        "{None: 1}",
    ),
    *(
        "{'a': 1e308, 'b': 1e308}",
        "{'a': math.nan}",
        "{'a' * 100000: 1.0}",
        "{'\\ud800': 1.0}",
        "{'a\\nb': 1}",
        "{'': 1}",
    ),
    *(
        "{str(i): 1.0 for i in range(20000)}",
        "Invalid('no')",
        "Invalid('')",
        "Invalid(None)",
        "Invalid(5)",
        "Invalid(b'x')",
    ),
    *(
        "Invalid('x' * 1000000)",
        "Invalid('\\ud800\\n\\n')",
        "Invalid(object())",
        "Invalid",
        "Turn('x')",
        "Reply('x')",
        "Ellipsis",
    ),
    *(
        "Invalid(lambda: 1)",
        "Weird()",
        "Weird",
        "Liar()",
        "Mutable()",
        "NotMapping()",
        "(lambda: 1)",
        "range(3)",
        "iter([1])",
    ),
    *(
        "__import__('numpy').float64(0.5)",
        "__import__('numpy').array([1, 2])",
        "__import__('numpy').bool_(True)",
        "type",
    ),
    *(
        "__import__('decimal').Decimal('0.5')",
        "__import__('fractions').Fraction(1, 2)",
        "__import__('datetime').date(2020, 1, 1)",
    ),
    *(
        "memoryview(b'x')",
        "sys",
        "NESTED",
        "dict.fromkeys(range(9), NESTED)",
        "(yield_ for yield_ in [1])",
        "threading.Lock()",
    ),
)
CLASSES = """
NESTED = []
for _ in range(100): NESTED = [NESTED]
class Weird:
    def __float__(self): raise SystemExit(3)
    def __repr__(self): raise KeyboardInterrupt
class Liar:
    def __float__(self): return 'x'
    def __repr__(self): return 5
    def __reduce__(self): raise RuntimeError('no pickle')
class Mutable(dict):
    def items(self): raise ValueError('no items')
    def __bool__(self): raise ValueError('no truth')
class NotMapping(float):
    def __reduce__(self): return (os._exit, (7,))
"""
RAISES = (
    *(
        "ValueError('no')",
        "KeyError('anwser')",
        "SystemExit(0)",
        "SystemExit('bye')",
        "KeyboardInterrupt()",
        "MemoryError()",
    ),
    *(
        "RecursionError()",
        "StopIteration(3)",
        "StopAsyncIteration()",
        "GeneratorExit()",
        "BaseException('base')",
        "OSError(28, 'full')",
    ),
    *(
        "BrokenPipeError()",
        "EOFError()",
        "ConnectionResetError()",
        "AssertionError()",
        "UnicodeDecodeError('u', b'x', 0, 1, 'r')",
    ),
    *(
        "Exception('a\\nb' * 100000)",
        "Exception('\\ud800')",
        "Exception(object())",
        "Mine()",
        "TimeoutError()",
        "ImportError()",
    ),
    *(
        "SyntaxError('x')",
        "SyntaxError('x', ('f', None, None, None))",
        "BaseExceptionGroup('g', [KeyboardInterrupt()])",
        "Warning()",
    ),
)
MINE = "class Mine(Exception):\n    def __str__(self): raise ValueError('no text')\n    __repr__ = __str__\n"
ACTS = (
    *(
        "while True: pass",
        "time.sleep(1000)",
        "os._exit(0)",
        "os._exit(9)",
        "os.kill(os.getpid(), 9)",
        "os.kill(os.getpid(), 15)",
    ),
    *(
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "os.close(3); os.close(4); os.close(5)",
        "[os.close(i) for i in range(3, 64)]",
    ),
    *(
        "x = 'a' * 10**10",
        "x = [0] * 10**10",
        "def f(): return f()\n    f()",
        "os.fork()",
        "os.fork() or time.sleep(1000)",
    ),
    *(
        "sys.stdout.close(); sys.stderr.close()",
        "sys.exit()",
        "sys.setrecursionlimit(50)",
        "signal.alarm(1); time.sleep(9)",
    ),
    *(
        "threading.Thread(target=time.sleep, args=(1000,)).start()",
        "os.chdir('/')",
        "sys.path.clear()",
        "sys.modules.clear()",
    ),
    *(
        "os.setsid()",
        "os.write(3, b'garbage' * 1000)",
        "os.write(4, b'x' * 9)",
        "import gc; gc.disable()",
        "task.clear()",
    ),
    *(
        "task['prompt'] = 5",
        "import torch; torch.set_num_threads(10**6)",
        "os.environ.clear()",
        "sys.stdin.read()",
        "input()",
    ),
    *(
        "import ctypes; ctypes.string_at(0)",
        "exec('raise ' * 3)",
        "print('x' * 1000)",
        "os.dup2(1, 3)",
        "assert False, task",
    ),
)
YIELDS = (
    *(
        "'text'",
        "''",
        "Turn('text')",
        "Turn()",
        "Turn('a', [])",
        "Turn(messages=[])",
        "Turn(messages=[{}])",
        "Turn(messages=5)",
    ),
    *(
        "Turn(messages=[{'role': 'user', 'content': 'a'}])",
        "Turn(messages=[{'role': 'user'}])",
        "Turn(messages='abc')",
        "None",
    ),
    *(
        "Turn(messages=[{'role': 'x', 'content': 5}])",
        "Turn(messages=['a'])",
        "Turn('a', reward=None)",
        "Turn('a', reward=1e400)",
    ),
    *(
        "Turn('a', reward=10**400)",
        "Turn('a', reward='1')",
        "Turn('a', max_tokens=0)",
        "Turn('a', max_tokens=10**30)",
        "5",
        "b'x'",
    ),
    *(
        "Turn('a', max_tokens=1.5)",
        "Turn('a', max_tokens=True)",
        "Turn('a', stop='x')",
        "Turn('a', stop=('x', 5))",
        "Turn(b'a')",
    ),
    *(
        "Turn('a', stop=('',))",
        "Turn('a', stop=None)",
        "Turn('a', stop=5)",
        "Turn('a', stop=('x' * 100000,))",
        "'\\ud800'",
        "'\\x00'",
    ),
    *(
        "'1+1=' * 1000000",
        "'x' * 10**8",
        "Turn(messages=[{'role': 'user', 'content': '\\ud800'}])",
        "Turn(reward=1.0)",
        "Reply('x')",
    ),
    *(
        "Turn('a', stop=('\\ud800',))",
        "Turn(messages={'role': 'user'})",
        "Turn(messages=[{'role': 'user', 'content': None}])",
    ),
    *(
        "[Turn('a')]",
        "Turn",
        "Invalid('x')",
        "Weird()",
        "iter([])",
        "Turn(messages=iter([{'role': 'user', 'content': 'a'}]))",
    ),
)
SECONDS = "0.5"


def _command(verb: str, spec: str, workers: int) -> list[str]:
    if verb == "check":
        words = f"check {CHECK} --env-timeout {SECONDS}"
    else:
        words = f"{verb} {RL if verb == 'rl' else EVAL} --model plain --env-timeout {SECONDS}"
        words = words.replace("--env-workers 0", f"--env-workers {workers}")
    return [spec if word == "env.py:reward" else word for word in words.split()]


def _place(random: Random, place: Path, samples: Path, code: str) -> tuple[str, int]:
    copy(samples, "plain", place)
    write_rows(place / "rows.jsonl", rows())
    (place / "own.py").write_text(HEAD + MINE + CLASSES + code, encoding="utf-8")
    return random.choice(["check", "check", "eval", "eval", "eval", "rl"]), random.choice([0, 1, 1, 2])


def _some(random: Random, body: str) -> str:
    """A function body that misbehaves always, sometimes, or in its reply's end."""
    return random.choice(
        [body, body, f"if hash(str(reply)) % 2 or len(task) % 2: {body}" if "\n" not in body else body]
    )


def _prints(body: str) -> bool:
    """Whether the code writes to the terminal: of itself, or since it takes the interpreter apart."""
    return "print" in body or "sys.modules" in body


def reward(random: Random, place: Path, samples: Path) -> Case:
    how = random.randrange(8)
    if how < 4:
        body = f"return {random.choice(VALUES)}"
    elif how < 6:
        body = f"raise {random.choice(RAISES)}"
    else:
        body = random.choice(ACTS)
    code = f"def reward(task, reply):\n    {_some(random, body)}\n    return len(reply) / 100\n"
    verb, workers = _place(random, place, samples, code)
    workers = max(workers, 1) if how >= 6 else workers  # in this very process an endless loop is the user's own
    return Case(
        _command(verb, "own.py:reward", workers),
        f"{verb}, {workers} workers: {body[:100]}",
        prints=_prints(body),
    )


def environment(random: Random, place: Path, samples: Path) -> Case:
    first = random.choice([*YIELDS, "'1+1='", "'1+1='"])
    second = random.choice([*(f"reply = yield {value}" for value in YIELDS), *ACTS, f"raise {random.choice(RAISES)}"])
    if "def f()" in second:
        second = "os._exit(1)"
    last = random.choice([*(f"return {value}" for value in VALUES), f"raise {random.choice(RAISES)}"])
    shape = random.randrange(8)
    body = f"    reply = yield {first}\n    {second}\n    {last}\n"
    if shape == 0:  # never yields, though it is a generator function
        body = f"    {last}\n    yield\n"
    elif shape == 1:
        body = f"    while True:\n        reply = yield {first}\n"
    elif shape == 2:
        end = second if "yield" not in second else last
        body = f"    try:\n        reply = yield {first}\n    finally:\n        {end}\n"
    elif shape == 3:
        body = f"    for reply in range(3):\n        yield {first}\n    {last}\n"
    verb, workers = _place(random, place, samples, f"def play(task):\n{body}")
    workers = max(workers, 1) if any(act in body for act in ACTS) else workers
    return Case(
        _command(verb, "own.py:play", workers),
        f"{verb}, {workers} workers: {body!r:.300}",
        prints=_prints(body),
    )


NOT_FUNCTIONS = (
    *("reward = 5", "reward = None", "class reward: pass", "async def reward(task, reply): return 1", "reward = 'x'"),
    *(
        "def reward(): return 1",
        "def reward(task): return 1",
        "def reward(a, b, c): return 1",
        "reward = len",
        "reward = print",
    ),
    *(
        "def reward(*, task, reply): return 1",
        "reward = lambda *a, **k: 1.0",
        "import functools\nreward = functools.partial(max)",
    ),
    *(
        "class R:\n    def __call__(self, task, reply): return 1.0\nreward = R()",
        "class R:\n    __call__ = 5\nreward = R()",
    ),
    *(
        "def reward(task, reply): return 1\nreward.__wrapped__ = reward",
        "import nowhere",
        "raise SystemExit(0)",
        "1/0",
        "(",
    ),
    *(
        "raise KeyboardInterrupt",
        "import os; os._exit(4)",
        "import time; time.sleep(1000)",
        "def reward(task, reply:\n",
        "\x00",
    ),
    *(
        "from __future__ import nothing",
        "reward = property()",
        "del reward",
        "import sys; sys.exit('no')",
        "\ud800",
        "'" * 99,
    ),
    *(
        "def __getattr__(name): raise RuntimeError(name)",
        "def __dir__(): raise RuntimeError",
        "raise BaseException('x')",
    ),
)


def module(random: Random, place: Path, samples: Path) -> Case:
    """A file of the user's in which there is no reward, or which does not import."""
    copy(samples, "plain", place)
    write_rows(place / "rows.jsonl", rows())
    body = random.choice([text for text in NOT_FUNCTIONS if "sleep" not in text])
    (place / "own.py").write_bytes(body.encode("utf-8", "surrogatepass"))
    spec = random.choice(
        ["own.py:reward"] * 6 + ["own.py", "own.py:", ":reward", "own:reward", "own.py:re ward", "own.py:__name__"]
    )
    verb = random.choice(["check", "eval", "rl"])
    exits = "os._exit" in body  # an import that ends its process ends ours: there is nothing to be said any more
    codes = (0, 2, 4) if exits else (0, 2, 130) if "KeyboardInterrupt" in body else (0, 2)
    return Case(_command(verb, spec, 1), f"{verb} {spec}: {body!r:.100}", None, codes=codes, prints=_prints(body))


ROWS = (
    *(
        "row = 5",
        "row = None",
        "row = 'grpo'",
        "row = Algorithm",
        "row = Algorithm()",
        "row = Algorithm('x')",
        "row = TABLE",
    ),
    *(
        "row = replace(TABLE['grpo'], name=5)",
        "row = replace(TABLE['grpo'], name='')",
        "row = replace(TABLE['grpo'], paper=None)",
    ),
    *(
        "row = replace(TABLE['grpo'], advantage=None)",
        "row = replace(TABLE['grpo'], surrogate=5)",
        "row = replace(TABLE['ppo'], critic=7)",
    ),
    *(
        "row = replace(TABLE['grpo'], aggregate=len)",
        "row = replace(TABLE['grpo'], epochs=0)",
        "row = replace(TABLE['grpo'], epochs=-1)",
    ),
    *(
        "row = replace(TABLE['grpo'], epochs='2')",
        "row = replace(TABLE['grpo'], minibatches=1.5)",
        "row = replace(TABLE['grpo'], nothing=1)",
    ),
    *(
        "row = replace(TABLE['grpo'], advantage=TABLE['ppo'].advantage)",
        "row = replace(TABLE['ppo'], critic=None)",
        "row = TABLE['sac']",
    ),
    *(
        "row = replace(TABLE['grpo'], minibatches=10**9)",
        "row = replace(TABLE['grpo'], surrogate=TABLE['gmpo'].surrogate)",
        "row = TABLE['trpo']",
    ),
    *(
        "row = TABLE['grpo']",
        "row = TABLE['dapo']",
        "class A: pass\nrow = A()",
        "row = lambda: TABLE['grpo']",
        "raise ValueError('no')",
    ),
    *(
        "row = replace(TABLE['grpo'], entropy=5)",
        "row = replace(TABLE['grpo'], correction='truncate')",
        "row = replace(TABLE['grpo'], kl=1)",
    ),
    "row = replace(TABLE['grpo'], advantage=replace(TABLE['grpo'].advantage))",
)


def algorithm(random: Random, place: Path, samples: Path) -> Case:
    copy(samples, "plain", place)
    write_rows(place / "rows.jsonl", rows())
    (place / "env.py").write_text("def reward(task, reply):\n    return len(reply) / 9\n")
    head = "from dataclasses import replace\nfrom posttrain.algorithms.policy import Algorithm\n"
    head += "from posttrain.algorithms.policy_table import TABLE\n"
    body = random.choice(ROWS)
    (place / "own.py").write_text(head + body + "\n")
    spec = random.choice(["own.py:row"] * 5 + ["own.py:raw", "own.py", "nowhere.py:row"])
    words = ["algorithms", spec, *random.choice([[], ["--json"]])]
    if random.random() < 0.5:
        words = [*_command("rl", "env.py:reward", 0), "--algorithm", spec]
    return Case(words, f"{words[0]} {spec}: {body!r:.120}")


CONVERTERS = (
    *VALUES,
    "row",
    "{'prompt': 5}",
    "{'prompt': ''}",
    "{'prompt': 'x', 'id': 5.5}",
    "{'messages': []}",
    "{'prompt': row}",
)


def converter(random: Random, place: Path, samples: Path) -> Case:
    """`row_to_task` beside a reward."""
    value = random.choice(CONVERTERS)
    body = f"return {value}" if random.random() < 0.7 else f"raise {random.choice(RAISES)}"
    code = f"def row_to_task(row):\n    {body}\n\ndef reward(task, reply):\n    return len(reply) / 9\n"
    verb, _ = _place(random, place, samples, code)
    return Case(
        _command(verb, "own.py:reward", 0), f"{verb}: {body}", codes=(0, 2, 130) if "KeyboardI" in body else (0, 2)
    )
