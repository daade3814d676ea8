"""Chat templates that never end, fill the memory, break out or break down; and random ones made of real parts."""

from __future__ import annotations

from random import Random

ENDLESS = (
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(10**18) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}x{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{% for i in range(99999) %}" + "x" * 99999 + "{% endfor %}",
    "{% set x = 's' * 99999 %}{% for i in range(99999) %}{% for j in range(99999) %}{% set y = x[1:] %}{% endfor %}"
    "{% endfor %}",
    "{% set x = 's' * 9999999 %}{% for j in range(99999) %}{% for k in range(999) %}{{ x[1:] == x[:-1] }}{% endfor %}"
    "{% endfor %}",
    "{% set x = 's' * 9999999 %}{% for j in range(99999) %}{% if 'tt' in x %}{% endif %}{% endfor %}",
    "{% set x = 's' * 9999999 %}{% for j in range(99999) %}{% if x.find('tt') %}{% endif %}{% endfor %}",
    "{% set x = 's' * 9999999 %}{% for j in range(99999) %}{% if x.upper() %}{% endif %}{% endfor %}",
    "{% set x = 's' * 9999999 %}{% for j in range(99999) %}{% if x|trim %}{% endif %}{% endfor %}",
    "{% set x = 's' * 9999999 %}{% for j in range(99999) %}{% if x is upper %}{% endif %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n < 300 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ ('a' * 10**5) * 10**5 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [1] * 10**10 }}",
    "{{ ([0] * 10**5) * 10**5 }}",
    "{{ 9**(9**9) }}",
    "{{ 2**(10**9) }}",
    "{{ 10**(10**10) % 7 }}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x|replace('a', 'aa') %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|string }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x ~ '' }}",
    "{% set ns = namespace(x=(1,), y=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}"
    "{% set ns.y = (ns.y, ns.y) %}{% endfor %}{{ ns.x == ns.y }}",
    "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {}.get(ns.x) }}",
    "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {}[ns.x] }}",
    "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
    "{{ [ns.x, ns.x]|unique|list }}",
    "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "{% set x = ('a' * 9999999)|safe %}{% for i in range(99999) %}{{ x.join }}{% endfor %}",
    "{% set x = ('a' * 9999999) %}{% for i in range(99999) %}{{ [x.join] }}{% endfor %}",
    "{% set x = 'a' * 999999 %}{% for i in range(9999) %}{% if x.strip('b' * 99999 + 'a') %}{% endif %}{% endfor %}",
    "{% set x = 'a' * 999999 %}{% for i in range(9999) %}{% if x.rfind('b' + 'a' * 499999) %}{% endif %}{% endfor %}",
    "{% set x = 'a' * 999999 %}{% for i in range(9999) %}{% if x.rsplit(sep='b' + 'a' * 499999) %}{% endif %}{% endfor %}",
    "{% set x = 'a' * 999999 %}{% for i in range(9999) %}{% if x|trim('b' * 99999 + 'a') %}{% endif %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}"
    + "{% if a.b == 'c' %}{% endif %}" * 500
    + "{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ '" + "x" * 9999 + "' }}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}"
    + "".join(f"{{% set v{n} = 1 %}}" for n in range(3000))
    + "{% for j in range(99999) %}{% if ''.upper() %}{% endif %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(d={}) %}{% for i in range(9999) %}{% set ns.d = {'a': ns.d} %}{% endfor %}"
    "{% for i in range(99999) %}{% set x = [ns.d] * 9999 | map(attribute='a.' * 5000 + 'a')|list %}{% endfor %}",
    "{% set ns = namespace(d={}) %}{% for i in range(9999) %}{% set ns.d = {'a': ns.d} %}{% endfor %}"
    "{% for i in range(99999) %}{% set x = ([ns.d] * 999)|map(attribute=('a.' * 5000) ~ 'a')|list %}{% endfor %}",
    "{% for i in range(99999) %}{% set x = range(0, (2**61 - 1) * 99999, 2**61 - 1)|unique|list %}{% endfor %}",
    "{% set x = [9] * 9999 + [8] %}{% for i in range(99999) %}{% for j in x %}{% if x.index(8) %}{% endif %}{% endfor %}"
    "{% endfor %}",
    "{% for i in range(99999) %}{{ dict(**{'a': 'b' * 999999}) }}{% endfor %}",
    "{% for i in range(99999) %}{% set x %}{% for j in range(999) %}"
    + "y" * 999
    + "{% endfor %}{% endset %}{% endfor %}",
    "{% for i in range(99999) %}{{ strftime_now('%c' * 99999) }}{% endfor %}",
    "{% set x = 'a ' * 999999 %}{% for i in range(99999) %}{% set y = x.split() %}{% endfor %}",
    "{% set x = range(99999)|list %}{% for i in range(99999) %}{% set y = x|sort %}{% endfor %}",
    "{% set x = ('9' * 4000)|int %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set y = ('9' * 9999999)|float %}{% endfor %}{% endfor %}",
    "{% macro f(x) %}{{ caller(x) }}{{ caller(x) }}{% endmacro %}{% call(x) f(1) %}{% call(x) f(x) %}"
    "{{ x }}{% endcall %}{% endcall %}"
    "{% macro g() %}{{ g() ~ g() }}{% endmacro %}{{ g() }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ '\\t'.expandtabs(10**10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ 'a'|center(10**10) }}",
    "{{ ('a\\n' * 1000)|indent(10**8) }}",
    "{{ '%10000000000d'|format(1) }}",
    "{{ ('a' * 9999)|replace('a', 'b' * 9999999) }}",
    "{{ ('a' * 9999).replace('a', 'b' * 9999999) }}",
    "{{ ('a' * 9999).replace('', 'b' * 9999999) }}",
    "{{ ['a'] * 9999|join('b' * 9999999) }}",
    "{{ (['a'] * 9999)|join('b' * 9999999) }}",
    "{{ ('b' * 9999999).join(['a'] * 9999) }}",
    "{{ 'x'|batch(10**10, 'y')|list }}",
    "{{ messages|slice(10**10)|list }}",
    "{{ lipsum(n=10**8) }}",
    "{{ messages|tojson(indent=10**10) }}",
    "{{ messages|tojson(separators=('x' * 99999999, 'y' * 99999999)) }}",
    "{{ 1.0|round(10**9) }}",
    "{{ (1).to_bytes(10**10, 'big') }}",
    "{{ ('a b ' * 9999999)|wordwrap(1) }}",
    "{{ ('<' * 99999)|striptags }}",
    "{{ ('www.' * 99999)|urlize }}",
)
"""Each would run for minutes or take gigabytes."""

BROKEN = (
    *(
        "{% if %}",
        "{{",
        "{% for %}",
        "{{ 'a }}",
        "{% endfor %}",
        "{% unknown %}",
        "{{ x|unknown }}",
        "{{ x is unknown }}",
    ),
    *("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}", "{{ 1 / 0 }}"),
    *(
        "{{ x.y.z }}",
        "{{ messages[99].content }}",
        "{{ messages() }}",
        "{{ 5() }}",
        "{{ messages|attr('__class__')() }}",
    ),
    *(
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import 'x' as y %}",
        "{{ raise_exception('no\nway') }}",
        "{% break %}",
    ),
    *(
        "{{ raise_exception(5) }}",
        "{{ raise_exception() }}",
        "{{ raise_exception('x' * 99999) }}",
        "{{ strftime_now(5) }}",
    ),
    *(
        "{{ 'a'|int(base=99) }}",
        "{{ 1e400|int }}",
        "{{ 'a' + 1 }}",
        "{{ messages + 1 }}",
        "{{ -messages }}",
        "{{ 'a' < 1 }}",
    ),
    *("{{ {}|tojson(cls=5) }}", "{{ namespace|tojson }}", "{{ [[]] in {} }}", "{{ {[]: 1} }}", "{{ ''.join([1]) }}"),
    *("{{ '\\ud800' }}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "[" * 400 + "]" * 400 + " }}"),
    *("{% for i in messages %}" * 30 + "{% endfor %}" * 30, "{% if true %}" * 200 + "{% endif %}" * 200),
    *(
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "not " * 5000 + "1 }}",
        "{{ 1" + " + 1" * 5000 + " }}",
    ),
    *(
        "{{ " + "9" * 5000 + " }}",
        "{{ 'x'" + " ~ 'x'" * 5000 + " }}",
        "{% set messages = 5 %}{% for m in messages %}{% endfor %}",
    ),
    *("{% block a %}{{ super() }}{% endblock %}", "{{ self.a() }}", "{% call x() %}{% endcall %}", "{{ caller() }}"),
    *("{% for m in 5 %}{% endfor %}", "{{ '' % 5 }}", "{{ '%s' % messages }}", "{{ dict(a=1)|dictsort(by='x') }}"),
)
DEEP = "{% set ns = namespace(x=()) %}{% for i in range(99999) %}{% set ns.x = (ns.x,) %}{% endfor %}"
PAIRS = "{% set ns = namespace(x=()) %}{% for i in range(29999) %}{% set ns.x = ({'a': ns.x}.items()|list)[0] %}{% endfor %}"
BROKEN += tuple(
    nested + use
    for nested in (DEEP, PAIRS)
    for use in (
        *(
            "{{ {}[ns.x] }}",
            "{{ {}.get(ns.x) }}",
            "{{ ns.x in {} }}",
            "{{ {ns.x: 1} }}",
            "{{ ns.x is in {} }}",
            "{{ [{}]|map(attribute=ns.x)|list }}",
        ),
        *(
            "{{ ns.x }}",
            "{{ ns.x|tojson }}",
            "{{ ns.x == ns.x }}",
            "{{ dict([[ns.x, 1]]) }}",
            "{{ [ns.x]|unique|list }}",
            "{{ ns.x|string }}",
        ),
        *(
            "{{ ns.x ~ 1 }}",
            "{{ [ns.x].index(ns.x) }}",
            "{{ [{}]|selectattr(ns.x)|list }}",
            "{{ [{}]|sort(attribute=ns.x) }}",
            "x",
        ),
    )
)
"""Must end in one line, or render: never anything else. Python's hash of tuples in tuples overflows its stack."""

HARMLESS = (
    "",
    "  \n",
    "x",
    "\x00",
    "{{ messages[0].content }}",
    "{# a comment #}",
    "{% raw %}{{{% endraw %}",
    "naïve 北京",
)

PIECES = (
    *(
        "messages",
        "messages[0]",
        "message",
        "message.content",
        "message['role']",
        "bos_token",
        "eos_token",
        "tools",
        "x",
    ),
    *(
        "'a'",
        "5",
        "0",
        "-1",
        "none",
        "true",
        "[]",
        "{}",
        "['a', 1]",
        "{'a': 1}",
        "loop.index",
        "loop",
        "range(5)",
        "ns.x",
    ),
    *(
        "namespace(x=1)",
        "messages|length",
        "message|tojson",
        "'a' ~ 'b'",
        "messages[1:]",
        "messages[::-1]",
        "range",
        "1.5",
    ),
)
OPERATORS = (
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "**",
    "~",
    "==",
    "!=",
    "<",
    ">=",
    "in",
    "not in",
    "and",
    "or",
    "is",
    "|",
    ".",
)
FILTERS = (
    *(
        "trim",
        "upper",
        "lower",
        "length",
        "list",
        "tojson",
        "join",
        "first",
        "last",
        "default",
        "string",
        "int",
        "float",
    ),
    *(
        "items",
        "dictsort",
        "sort",
        "unique",
        "reverse",
        "replace('a', 'b')",
        "indent(2)",
        "map('upper')",
        "safe",
        "escape",
    ),
    *(
        "selectattr('role', 'equalto', 'user')",
        "rejectattr('x')",
        "map(attribute='role')",
        "select",
        "reject",
        "sum",
        "abs",
    ),
    *(
        "batch(2)",
        "slice(2)",
        "round",
        "center(9)",
        "truncate(3)",
        "random",
        "groupby('role')",
        "min",
        "max",
        "count",
        "title",
    ),
    *(
        "join(', ')",
        "default('x', true)",
        "tojson(indent=2)",
        "capitalize",
        "format(1)",
        "xmlattr",
        "pprint",
        "wordcount",
    ),
)
TESTS = (
    "defined",
    "undefined",
    "none",
    "string",
    "mapping",
    "iterable",
    "number",
    "sequence",
    "true",
    "in messages",
    "odd",
)
METHODS = (
    *("split('a')", "strip()", "startswith('a')", "get('a')", "items()", "keys()", "format(1)", "append(1)", "upper()"),
    *("split()[-1]", "replace('a', 'b')", "join(messages)", "count('a')", "pop()", "update({})", "title()", "x", "x.y"),
)


def random_template(random: Random) -> str:
    """Statements and expressions put together at random: most fail to render, each in its own way."""
    return "".join(_statement(random, 3) for _ in range(random.randrange(1, 5)))


def _expression(random: Random, depth: int) -> str:
    if depth == 0 or random.random() < 0.3:
        return random.choice(PIECES)
    inner = _expression(random, depth - 1)
    how = random.randrange(6)
    if how == 0:
        return f"({inner} {random.choice(OPERATORS)} {_expression(random, depth - 1)})"
    if how == 1:
        return f"({inner})|{random.choice(FILTERS)}"
    if how == 2:
        return f"({inner} is {random.choice(['', 'not '])}{random.choice(TESTS)})"
    if how == 3:
        return f"({inner}).{random.choice(METHODS)}"
    if how == 4:
        return f"({inner} if {_expression(random, depth - 1)} else {_expression(random, depth - 1)})"
    place = random.choice(("0", "-1", ":2", "::-1", "'a'", inner))
    return f"({inner})[{place}]"


def _statement(random: Random, depth: int) -> str:
    value = _expression(random, 3)
    body = "".join(_statement(random, depth - 1) for _ in range(random.randrange(1, 3))) if depth else "text"
    return random.choice(
        [
            f"{{{{ {value} }}}}",
            f"{{{{- {value} -}}}}",
            f"{{% for message in {value} %}}{body}{{% else %}}none{{% endfor %}}",
            f"{{% for message in messages if {value} %}}{body}{{% break %}}{{% endfor %}}",
            f"{{% if {value} %}}{body}{{% elif {value} %}}b{{% else %}}{body}{{% endif %}}",
            f"{{% set x = {value} %}}",
            f"{{% set ns = namespace(x={value}) %}}{{% set ns.x = {value} %}}{body}",
            f"{{% set x %}}{body}{{% endset %}}{{{{ x|length }}}}",
            f"{{% macro f(x, y=1) %}}{body}{{% endmacro %}}{{{{ f({value}) }}}}",
            f"{{% generation %}}{body}{{% endgeneration %}}",
            f"{{% filter upper %}}{body}{{% endfilter %}}",
            f"{{% with x = {value} %}}{body}{{% endwith %}}",
            f"{{% call(x) f({value}) %}}{body}{{% endcall %}}",
        ]
    )
