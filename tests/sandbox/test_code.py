"""Programs and their unit tests: how tests are read, what they compare, whose fault a failure is; the two environments."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documents
import pytest
from places import DATA
from processes import descendants, gone

from posttrain.core.types import Invalid, Reply, StopReason, Turn
from posttrain.envs.builtin import code as code_env
from posttrain.envs.builtin import interpreter
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.load_env import about
from posttrain.sandbox import shared_sandbox
from posttrain.sandbox.limits import ProgramLimits
from posttrain.verify.test_cases import ComparedCase, PlayedCase, Suite, read_tests
from posttrain.verify.unit_tests import Grade, graded, passes_tests, share_of_tests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")


@pytest.fixture(scope="module", autouse=True)
def one_sandbox() -> Iterator[None]:
    yield
    shared_sandbox.close()


# -- tests, as they are read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "call", "expected"),
    [
        ("assert f(1, [2, (3,)], k={'a': -1}) == {1: 2}", "f(1, [2, (3,)], k={'a': -1})", {1: 2}),
        ("assert (3, 4) == f('x')", "f('x')", (3, 4)),
        ("assert f() == -1, 'why'", "f()", -1),
        ("assert S().g(2) == set()", "S().g(2)", set()),
        ("assert a.b.c(1) == None", "a.b.c(1)", None),
        ("assert sum(10, 15) == 6", "sum(10, 15)", 6),
    ],
)
def test_a_call_beside_a_literal_is_taken_apart(test: str, call: str, expected: Any) -> None:
    assert read_tests([test]) == Suite((ComparedCase(call, expected),))


@pytest.mark.parametrize(
    "test",
    [
        "assert f(x) == 1", "assert f(g(1)) == 1", "assert f(1)", "assert not f(1)", "assert f(1) != 2", "assert f(1) < 2",
        "assert f(1)[0] == 1", "assert math.floor(1.5) == 1", "assert f(1) == g(2)", "assert f(*[1]) == 1",
        "assert f(1) == 1; assert f(2) == 2", "x = f(1)\nassert x == 1", "assert len(f(1)) == 2",
        "assert ''.join('b') == 'b'", "assert f(**{'a': 1}) == 1", "assert str.upper('a') == 'A'",
        "assert f(1) == ...", "assert f(1) is None",
    ],
)  # fmt: skip
def test_whatever_else_computes_is_played(test: str) -> None:
    read = read_tests([test])
    assert isinstance(read, Suite) and read.cases == (PlayedCase(test),)


def test_names_that_tests_do_not_define_are_the_programs_and_pythons_own_are_not() -> None:
    read = read_tests(
        ["def check(c):\n    y = 2\n    assert abs(c(y) - z) < TOLERANCE\ncheck(solve)"], "import re\nz = 1"
    )
    assert isinstance(read, Suite) and read.names == ("TOLERANCE", "solve")
    read = read_tests(["assert set(sum([1])) == math.pi + len(os.sep)"], entry=["sum"])
    assert isinstance(read, Suite) and read.names == ("sum",) and read.setup == "import math\nimport os\n"


@pytest.mark.parametrize("tests", [[], ["assert f(1) =="], ["\0"]])
def test_tests_that_are_none_are_invalid(tests: list[str]) -> None:
    assert isinstance(read_tests(tests), Invalid) and isinstance(graded("x = 1", tests), Invalid)


# -- grades ------------------------------------------------------------------------------------------------------------


def passed(code: str, *tests: str, setup: str = "", entry: tuple[str, ...] = ()) -> tuple[bool, ...]:
    grade = graded(code, tests, setup, entry, ProgramLimits(life=30.0))
    assert isinstance(grade, Grade), grade
    return grade.passed


def test_a_program_is_graded_test_by_test() -> None:
    code = "def f(x):\n    if x == 2: raise ValueError\n    print('noise')\n    return [x, {x: (x,)}]"
    assert passed(code, "assert f(1) == [1, {1: (1,)}]", "assert f(2) == 1", "assert f(3) == 1", "assert f(3)[0] == 3") == (
        True, False, False, True,
    )  # fmt: skip


def test_what_a_program_ends_is_failed_from_there_on() -> None:
    code = "import os\ndef f(x):\n    return x if x != 2 else os._exit(0)"
    tests = [f"assert f({x}) == {x}" for x in (1, 2, 3)]
    grade = graded(code, tests)
    assert isinstance(grade, Grade) and grade.passed == (True, False, False) and "exit code 0" in grade.why
    assert share_of_tests(code, tests) == 1 / 3 and passes_tests(code, tests) == 0.0
    assert passes_tests(f"so:\n```python\n{code}\n```\n", tests[:1]) == 1.0


PLAYED = {
    "HumanEval's form": ("def f(x): return x + 1", "def check(c):\n    assert c(1) == 2\n    assert c(2) == 3\ncheck(f)"),
    "a tolerance": ("def f(x): return x / 3", "assert math.isclose(f(1), 0.333333, rel_tol=1e-4)"),
    "an exception": ("def f(x): raise KeyError(x)", "try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    assert False"),
    "an exception in a loop": (
        "def f(x): raise (KeyError if x else ValueError)(x)",
        "for x, due in ((0, ValueError), (1, KeyError)):\n    try: f(x)\n    except due: continue\n    assert False",
    ),
    "an exception by its text": (
        "def f(x): raise ValueError('no ' + x)",
        "try: f('a')\nexcept Exception as error: found = str(error), type(error)\nassert found == ('no a', ValueError)",
    ),
    "an exception that is handed on": (
        "def f(x): return [][x]",
        "def tried(x):\n    try: return f(x)\n    except IndexError as error: raise ValueError from error\n"
        "try: tried(1)\nexcept ValueError: pass\nelse: assert False",
    ),
    "an exception within a with": (
        "def f(x): raise IndexError(x)",
        "from contextlib import suppress\nfound = []\nfor x in range(1100):\n"
        "    with suppress(IndexError): found.append(f(x))\nassert found == []",
    ),
    "a context manager that expects": (
        "def f(x): raise AttributeError(x)",
        "from contextlib import contextmanager\n@contextmanager\ndef raises(kind):\n    try: yield\n"
        "    except kind: return\n    assert False\nwith raises(AttributeError):\n    f(1)",
    ),
    "assertRaises": (
        "def f(x): raise ValueError(x)",
        "import unittest\ncase = unittest.TestCase()\ncase.assertRaises(ValueError, f, 1)\n"
        "with case.assertRaises(ValueError) as found: f('a')\nassert str(found.exception) == 'a'",
    ),
    "an exception before the end": (
        "def f(x): raise OSError",
        "def tried():\n    try:\n        try: f(1)\n        finally: f.x = 1\n    except OSError: return 1\n"
        "assert tried() == 1 == f.x",
    ),
    "the end of an iterator": (
        "def f():\n    yield 1",
        "g = f()\nassert next(g) == 1 and next(g, 5) == 5\ntry: next(g)\nexcept StopIteration: pass\nelse: assert False",
    ),
    "an attribute that is not there": (
        "class f: x = 1",
        "assert getattr(f(), 'y', 5) == 5 and not hasattr(f(), 'y') and f().x == 1",
    ),
    "iteration by index": (
        "class f:\n    def __getitem__(self, i): return [4, 5][i]",
        "assert list(f()) == [4, 5]\ntry: f()[2]\nexcept IndexError: pass\nelse: assert False",
    ),
    "an argument that is sorted": ("def f(x): x.sort(); x[0].append(1)", "x = [[3], [2]]\nf(x)\nassert x == [[2, 1], [3]]"),
    "a generator": ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2] and sum(f(3)) == 3"),
    "its first values": (
        "def f():\n    i = 0\n    while True:\n        yield (i := i + 1)",
        "g = f()\nassert (next(g), next(g)) == (1, 2)",
    ),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x); return self\n"
        "    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]\n"
        "    def __str__(self): return 'S' + str(self.items)",
        "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s[1] == 2 and s.items == [1, 2] and str(s) == 'S[1, 2]'\n"
        "s.items = [5]\nassert s[0] == 5 and list(s) == [5] and 5 in s and s is s and s == s and s != Stack()",
    ),
    "a function that is passed": (
        "def f(g, xs): return [g(x) for x in xs]",
        "k = 2\nassert f(lambda x: x * k, [1, 2]) == [2, 4]",
    ),
    "one that raises": (
        "def f(g):\n    try: g(0)\n    except ZeroDivisionError as e: return 'caught'",
        "assert f(lambda x: 1 / x) == 'caught'",
    ),
    "one that calls back": ("def f(n, g): return n if n == 0 else g(n - 1)", "assert f(3, lambda n: f(n, abs)) == 1"),
    "a function of Python's": ("def f(g, x): return g(x)", "assert f(len, 'abc') == 3 and f(sorted, [2, 1]) == [1, 2]"),
    "a function that comes back": ("def f(n): return lambda x: x + n", "assert f(2)(3) == 5"),
    "a name of Python's": ("def sum(a, b): return a - b", "assert set([sum(5, 3)]) == {2}"),
    "a constant": ("LIMIT = [1, 2]\ndef f(): return LIMIT", "assert f() == LIMIT and LIMIT[0] == 1"),
    "other types": (
        "from fractions import Fraction\ndef f(): return Fraction(1, 3), range(3)",
        "assert f()[0] * 3 == 1 and list(f()[1]) == [0, 1, 2]",
    ),
    "keywords": ("def f(*, a, b=2): return a, b", "assert f(a=1) == (1, 2) and f(b=[], a=None) == (None, [])"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAYED)
def test_tests_of_any_form_are_played(name: str) -> None:
    code, test = PLAYED[name]
    assert passed(code, test, entry=("sum",)) == (True,)
    assert passed("def f(*args, **kwargs): return 0\nsum = Stack = f\nLIMIT = 5", test, entry=("sum",)) == (False,)


def test_a_verdict_is_not_the_programs_to_give() -> None:
    code = "class A:\n    __eq__ = __bool__ = __lt__ = __contains__ = lambda *args: True\n    value = 3\ndef f(): return A()"
    tests = [
        "assert f()",
        "assert f() == 3",
        "assert f() < 3",
        "assert 3 == f()",
        "assert f().value == 3",
        "assert [f()] == [3]",
    ]
    assert passed(code, *tests) == (False, False, False, False, True, False)


def test_setup_may_use_what_the_program_defines() -> None:
    code = "class Node:\n    def __init__(self, v): self.v, self.left = v, None\n"
    code += "def depth(n): return 0 if n is None else 1 + depth(n.left)"
    setup = "root = Node(1)\nroot.left = Node(2)"
    assert passed(code, "assert depth(root) == 2", "assert root.left.v == 2", setup=setup) == (True, True)
    assert passed("x = 1", "assert depth(root) == 2", setup=setup) == (False,)


@pytest.mark.parametrize(
    ("tests", "setup"),
    [
        (["import nothing_like_it\nassert f(1) == 1"], ""), (["assert f(1) == 1 + 0"], "from nothing_like_it import x"),
        (["assert f(object()) == 1"], ""), (["assert 1 + 1 == 3"], ""), (["x = 1 / 0"], ""), (["while True: pass"], ""),
    ],
)  # fmt: skip
def test_a_test_that_no_program_can_have_failed_is_invalid(tests: list[str], setup: str) -> None:
    for code in ("def f(x): return 1", "import os; f = lambda x: os._exit(0)"):
        found = graded(code, tests, setup, limits=ProgramLimits(cpu=1, life=30.0))
        assert isinstance(found, Invalid) and "test" in found.reason


HARMFUL = {
    "a constant that is none": ("MAX = object()", "assert MAX + 1 == 5"),
    "a constant that breaks a comparison": ("class A: pass\nMAX = A()", "assert MAX > 3"),
    "a value that cannot go back": (
        "def f(x):\n    for _ in range(150): x = [x]\n    return x\ndef g(x): return 0",
        "def deep(x, n): return x if n == 0 else deep([x], n - 1)\nassert g(deep(f(1), 800)) == 1",
    ),
    "names that are left out": ("x = 1", "import math\nassert f(1) == 1"),
    "a name that is text": ("f = 'text'", "assert f(1) == 1"),
    "an exception that imports raise": ("def f(x): raise ImportError('x')", "assert f(1) == 1 + 0"),
    "an end within a test": ("import os\ndef f(x): os._exit(0)", "assert f(1) + 0 == 1"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_no_program_makes_a_test_invalid(name: str) -> None:
    code, test = HARMFUL[name]
    assert passed(code, test) == (False,)


def test_a_sandbox_that_breaks_is_invalid_and_the_next_program_has_another() -> None:
    assert passed("def f(): return 1", "assert f() == 1") == (True,)
    os.kill(shared_sandbox.shared()._process.pid, signal.SIGKILL)
    shared_sandbox.shared()._process.wait()
    assert passed("def f(): return 1", "assert f() == 1") == (True,)
    program = shared_sandbox.shared().start()
    running = descendants(shared_sandbox.shared()._process.pid)
    os.kill(shared_sandbox.shared()._process.pid, signal.SIGKILL)
    gone(*running)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_sandbox.shared(), "start", lambda limits: program)
        assert isinstance(graded("x = 1", ["assert f() == 1"]), Invalid)
    program.close()


def test_a_program_that_is_too_long_is_wrong() -> None:
    assert passed("x = 1\n" * 100_000, "assert f() == 1") == (False,)


# -- environments ------------------------------------------------------------------------------------------------------


def rows() -> list[dict[str, Any]]:
    path = DATA / "code" / "mbpp.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path}, which is not part of the project")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_mbpp_has_tests_that_are_taken_apart_but_for_a_few_and_its_references_pass() -> None:
    found = rows()
    cases = [
        case
        for row in found
        for case in read_tests([*row["test_list"], *row["challenge_test_list"]], row["test_setup_code"]).cases  # type: ignore[union-attr]
    ]
    assert len(cases) == 2938 and sum(isinstance(case, ComparedCase) for case in cases) == 2917
    some = found[::40] + [row for row in found if row["test_setup_code"] or "getsizeof" in row["test_list"][0]]
    for row in some:
        task = code_env.row_to_task(row)
        assert task is not None and row["test_list"][0] in task["prompt"] and row["test_list"][1] not in task["prompt"]
        assert code_env.reward(task, task["response"]) == code_env.all_or_nothing(task, task["response"]) == 1.0
        assert code_env.reward(task, task["response"].replace("return", "raise ValueError or")) == 0.0


def test_the_shown_test_earns_nothing() -> None:
    row = {
        "text": "Double.",
        "test_list": [f"assert f({x}) == {2 * x}" for x in range(3)],
        "code": "def f(x): return 2 * x",
    }
    task = code_env.row_to_task(row)
    assert task is not None and len(task["tests"]) == 2
    assert code_env.reward(task, "def f(x): return {0: 0}.get(x)") == 0.0
    assert code_env.reward(task, "def f(x): return {0: 0, 1: 2}.get(x)") == 0.5
    assert code_env.all_or_nothing(task, "def f(x): return {0: 0, 1: 2}.get(x)") == 0.0
    assert code_env.row_to_task({"text": "", "test_list": []}) is None
    assert code_env.shadowed("def sum(): pass\nclass Node: pass\nlen = 3") == ["sum"] and code_env.shadowed("def") == []


def test_a_program_that_hangs_is_wrong_within_the_limit_of_a_step_and_not_invalid() -> None:
    task = {"id": "t", "prompt": "p", "tests": ["assert f(1) == 1"]}
    before = set(descendants(os.getpid()))
    with EnvPool("code", 1, seconds=3.0) as pool:
        pool.ready()
        for reply in ("def f(x):\n    while True: pass", "import time; time.sleep(60)", "def f(x): return x"):
            pool.start(0, task)
            [(_, shown)] = pool.poll(30)
            assert isinstance(shown, Turn)
            pool.send(0, Reply(reply))
            [(_, done)] = pool.poll(30)
            assert done == Done(float(reply.endswith("return x")))
        left = set(descendants(os.getpid())) - before
    gone(*left)


@pytest.mark.parametrize("mode", ["", "without-namespaces"])
def test_nothing_is_left_of_a_worker_that_was_killed_while_a_program_ran(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_SANDBOX", mode)
    monkeypatch.setenv("TMPDIR", str(place := tmp_path / "place"))
    place.mkdir()
    (tmp_path / "stuck.py").write_text(
        "import time\nfrom posttrain.sandbox.limits import ProgramLimits as Limits\n"
        "from posttrain.sandbox.shared_sandbox import shared\n\n\n"
        "def reward(task, reply):\n    program = shared().start(Limits(life=100.0))\n    program.run('x = 1')\n"
        "    if reply == 'stuck':\n        time.sleep(100)\n    return 1.0\n"
    )
    before = set(descendants(os.getpid()))
    with EnvPool(f"{tmp_path}/stuck.py:reward", 1, seconds=3.0) as pool:
        for reply in ("stuck", "well"):
            pool.start(0, {"id": "t", "prompt": "p"})
            [(_, shown)] = pool.poll(30)
            pool.send(0, Reply(reply))
            [(_, done)] = pool.poll(30)
            assert isinstance(shown, Turn) and isinstance(done, Done)
            assert isinstance(done.reward, Invalid) == (reply == "stuck")
    gone(*set(descendants(os.getpid())) - before)
    assert not list(place.iterdir())


SWALLOWING = (
    "xs, ys = [1, 2], [3, 5]\nassert all(a == b for a, b in zip(map(f, xs), ys))",
    "assert list(map(f, [1, 2])) == []",
    "assert not any(map(f, [1, 2]))",
    "assert list(filter(f, [1, 2])) == []",
    "for made in map(f, [1, 2]):\n    assert made == 7",
    "for made in iter(lambda: f(1), None):\n    assert made == 7",
    "assert next(map(f, [1]), 7) == 7",
    "assert max(map(f, [1]), default=7) == 7",
    "import itertools\nassert list(itertools.takewhile(bool, map(f, [1]))) == []",
    "def each():\n    yield from map(f, [1, 2])\nassert list(each()) == []",
    "assert dict(zip([1, 2], map(f, [1, 2]))) == {}",
    "import contextlib\n@contextlib.contextmanager\ndef around():\n    yield f(1)\n"
    "with around() as made:\n    assert made == 7",
    "class Own:\n    def __iter__(self): return self\n    def __next__(self): return f(1)\nassert list(Own()) == []",
    "import asyncio\nclass Own:\n    def __aiter__(self): return self\n    async def __anext__(self): return f(1)\n"
    "async def main(): return [x async for x in Own()]\nassert asyncio.run(main()) == []",
    "assert sorted([2, 1], key=f) == [1, 2]",
)


@pytest.mark.parametrize(
    "raised", ["StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt"]
)
def test_an_exception_that_python_takes_for_an_end_passes_no_test(raised: str) -> None:
    own = f"class Own({raised}): pass\ndef f(x): raise Own"
    for program in (f"def f(x): raise {raised}", own):
        assert [test for test in SWALLOWING if passes_tests(f"```python\n{program}\n```", [test]) == 1.0] == []


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): raise ValueError('no')", "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False"),
        (
            "def f(xs): return iter(xs)",
            "assert list(f([1, 2])) == [1, 2] and [a + b for a, b in zip(f([1]), f([2]))] == [3]",
        ),
        ("def f(xs):\n    yield from xs", "made = f([1])\nassert next(made) == 1 and next(made, None) is None"),
    ],
)
def test_what_a_program_raises_and_where_its_iterators_end_can_be_tested(program: str, test: str) -> None:
    assert passes_tests(f"```python\n{program}\n```", [test]) == 1.0


def played(task: dict[str, Any], *replies: str) -> tuple[list[Turn], Any]:
    env = interpreter.python(task)
    shown = [next(env)]
    for reply in replies:
        try:
            shown.append(env.send(Reply(reply, StopReason.STOP)))
        except StopIteration as end:
            return shown, end.value
    env.close()
    return shown, None


def test_the_interpreter_answers_what_the_policy_runs_and_judges_what_it_says() -> None:
    task = interpreter.row_to_task({"question": "How many?", "answer": "So: 6 * 7 = 42\n#### 42"})
    assert task is not None and task["answer"] == "42" and task["prompt"].startswith("How many?\nYou may run Python")
    shown, verdict = played(
        task, "I try.\n<python>\nx = 6 * 7\nprint(x)\n</python>", "<python>x + 1</python>", "<python>1/0</python>",
        "so <answer>42</answer>",
    )  # fmt: skip
    texts = [turn.text for turn in shown[1:]]
    assert texts[:2] == ["\n<output>\n42\n</output>\n", "\n<output>\n43\n</output>\n"]
    assert texts[2] is not None and "ZeroDivisionError: division by zero\n</output>" in texts[2]
    assert all(turn.tool and "</python>" in turn.stop for turn in shown[1:]) and not shown[0].tool
    assert verdict == {"reward": 1.0, "calls": 3.0}


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (["<answer>42.0</answer>"], 1.0), (["<answer>41</answer>"], 0.0), (["42"], 0.0), ([""], 0.0),
        (["<output>42</output> <answer></answer>"], 0.0), (["<python>print('<answer>42</answer>')</python>", "done"], 0.0),
        (["</python>", "<answer>42</answer>"], 1.0), (["<python>", "x"], 0.0),
        (["<python>1</python>"] * 4 + ["<python>2</python>"], 0.0),
        (["<python>import os; os._exit(0)</python>", "<python>1</python>", "<answer>42</answer>"], 1.0),
    ],
)  # fmt: skip
def test_the_answer_is_what_the_policy_wrote_itself_last(replies: list[str], reward: float) -> None:
    _, verdict = played({"prompt": "?", "answer": "42"}, *replies)
    assert verdict["reward"] == reward


def test_an_answer_in_words_is_compared_as_short_answers_are() -> None:
    assert interpreter.judged("the Paris!", "Paris") == 1.0 and interpreter.judged(None, "Paris") == 0.0
    assert interpreter.row_to_task({"question": "?", "answer": ""}) is None


def test_an_episode_that_is_given_up_leaves_no_process() -> None:
    before = set(descendants(os.getpid()))
    env = interpreter.python({"prompt": "?", "answer": "42"})
    next(env)
    env.send(Reply("<python>x = 1</python>"))
    env.close()
    running = set(descendants(os.getpid())) - before
    with shared_sandbox.shared().start() as program:  # orders are taken in turn: the one before is seen to by now
        program.finish()
    assert len(set(descendants(os.getpid())) - before) <= len(running)


def test_an_environment_says_which_protections_are_active() -> None:
    for name in ("code", "code-all", "python"):
        [line] = about(name)
        assert line.startswith("sandbox: ") and line.endswith(str(shared_sandbox.shared().protections))
    assert about("gsm8k") == []


# -- the page ----------------------------------------------------------------------------------------------------------


def test_every_block_of_the_page_runs_and_shows_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    page = documents.ROOT / "docs" / "guides" / "sandbox.md"
    shown = [block.text for block in documents.blocks(page) if block.language == "text"]
    ran = sum(documents.run(block) for block in documents.blocks(page) if block.language != "text")
    assert ran == 5
    said = [line.strip(" ~^") for line in capsys.readouterr().out.splitlines()]
    expected = [line.strip() for line in shown[0].splitlines()]
    assert expected == [line for line in said[said.index(expected[0]) :] if line]
    text = "Write a python function to identify non-prime numbers."
    row = {"text": text, "test_list": ["assert is_not_prime(2) == False"]}
    task = code_env.row_to_task(row)
    assert task is not None and all(line in shown[1] for line in task["prompt"].splitlines())
    for limit in (
        ProgramLimits().cpu,
        ProgramLimits().memory >> 20,
        ProgramLimits().processes,
        ProgramLimits().descriptors,
        ProgramLimits().life,
    ):
        assert f"{limit:g}" in page.read_text()
