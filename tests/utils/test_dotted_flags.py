"""Keys of mappings on the command line."""

from __future__ import annotations

import pytest

from hetero_llm.core.errors import ConfigError
from hetero_llm.utils.dotted_flags import join_dotted_flags


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        ("serve demo --port 1", "serve demo --port 1"),
        ("--a.b 1 --c --a.d=x", '--a {"b":1,"d":"x"} --c'),
        ("--a_b.c_d.e true --a-b.c_d.f [1] x", '--a-b {"c_d":{"e":true,"f":[1]}} x'),
        ("--a.b+ 1 --a.b+=y", '--a {"b":[1,"y"]}'),
        ("-O.mode 3", '-O {"mode":3}'),
        ("--a.b True --file=x.y ./--a.b", '--a {"b":true} --file=x.y ./--a.b'),
        ("--a.b -1", '--a {"b":-1}'),
        ("x -- --a.b 1", "x -- --a.b 1"),
    ],
)
def test_words_become_an_object(words: str, joined: str) -> None:
    found = [
        word.replace(": ", ":").replace(", ", ",") for word in join_dotted_flags(words.split())
    ]
    assert found == joined.split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--a.b"], "--a.b=None: needs a value"),
        (["--a.b", "--c"], "--a.b=None: needs a value"),
        (["--a.b", "1", "--a.b", "2"], "is given twice"),
        (["--a.b", "1", "--a.b.c", "2"], "'b' has a value of its own"),
        (["--a.b", "1", "--a.b+", "2"], "is given twice"),
        (["--a-x.b", "1", "--a_x={}"], "is given as a whole, too"),
    ],
)
def test_mistakes(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
        join_dotted_flags(words)
