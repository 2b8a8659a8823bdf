"""A third set of prompts for `any_prompt`: no constant of the engine was chosen on it.

Rule: 50 prompts of seven kinds, made from the Python that runs and from seeds, without a network,
and the same for one version of Python:

- packages (10): 600 characters of modules inside packages of the standard library, spread over
  their names, from two fifths of the file;
- languages (8): a paragraph in Italian, Dutch, Portuguese, Swedish, Korean, Chinese, Arabic, Hindi;
- tables (7): comma-separated and Markdown tables of names and numbers, a log, a matrix;
- lists (7): numbered, with dashes, with check boxes, of names, of dates, of equations, of paths;
- markup (6): HTML, XML, YAML, INI, SQL and TeX with random names;
- uniform (6) and skewed (6): tokens drawn from the vocabulary, alike or by Zipf's law, of lengths
  from 8 to 600.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

_SEED = 1907
_CHARS = 600
_NUM_PACKAGES = 10
_LENGTHS = (8, 24, 64, 128, 300, 600)
_ZIPF = 1.2  # exponent

_LANGUAGES = (
    "Il faro si spense a mezzanotte, e il guardiano scese le scale con una lampada in mano. Le "
    "barche erano già tornate, tranne una, quella di suo fratello, che pescava sempre dove gli "
    "altri non osavano. Aspettò sulla riva finché",
    "Op zolderkamer nummer vier woonde een klokkenmaker die nooit buiten kwam. De buren brachten "
    "hem brood, en hij gaf hun horloges terug die precies gelijk liepen. Toen de winter begon "
    "hoorden ze hem op een ochtend",
    "A professora escreveu no quadro três perguntas e saiu da sala. Ninguém falou durante um "
    "minuto. Depois o mais novo levantou-se, apagou a segunda pergunta com a manga e disse que a "
    "resposta dela estava",
    "Bagaren öppnade luckan klockan fem, men snön hade blåst in över tröskeln och degen ville inte "
    "jäsa. Han eldade ännu en gång, satte radion på låg volym och räknade säckarna som stod",
    "할머니는 해마다 첫눈이 오는 날에 편지를 한 통씩 썼다. 받는 사람의 이름은 적지 "
    "않았고, 우체통에 넣지도 않았다. 올해는 손녀가 그 상자를 열어 보고는 조용히",
    "老王每天早上六点把茶摊摆在桥头。下雨的时候客人少，他就拿出一本旧书来读。那天有一个年轻人放下一把伞，没有喝茶就走了，"
    "第二天他又来，问",
    "في آخر الشارع دكان صغير يبيع الخرائط القديمة. صاحبه لا يسأل الزبائن عن المدينة التي يريدونها، "
    "بل عن الطريق الذي ضاعوا فيه. دخلت ذات مساء امرأة تحمل",
    "नदी के उस पार एक पुराना पुल था जिस पर अब कोई नहीं चलता था। बच्चे कहते थे कि रात को वहाँ से घंटियों की "
    "आवाज़ आती है। एक दिन डाकिया रास्ता भूलकर",
)  # fmt: skip

Prompt = str | list[int]


def third_prompts(vocab_size: int) -> dict[str, Prompt]:
    """All prompts by name."""
    rng = np.random.default_rng(_SEED)
    ranks = np.arange(1, vocab_size - 2, dtype=np.float64) ** -_ZIPF
    ids = 3 + rng.permutation(vocab_size - 3)
    kinds: dict[str, list[Prompt]] = {
        "packages": list(_modules()),
        "languages": list(_LANGUAGES),
        "tables": list(_tables(rng)),
        "lists": list(_lists(rng)),
        "markup": list(_markup(rng)),
        "uniform": [rng.integers(3, vocab_size, size).tolist() for size in _LENGTHS],
        "skewed": [rng.choice(ids, size, p=ranks / ranks.sum()).tolist() for size in _LENGTHS],
    }
    return {
        f"{kind} {index}": prompt
        for kind, prompts in kinds.items()
        for index, prompt in enumerate(prompts)
    }


def _modules() -> list[str]:
    """Pieces of modules in packages of the standard library, tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        path
        for path in sorted(root.glob("[a-z]*/[a-z]*.py"))
        if path.parent.name not in ("test", "site-packages", "idlelib", "lib2to3")
        and path.stat().st_size > 3 * _CHARS
    ]
    texts = []
    for index in range(_NUM_PACKAGES):
        path = found[index * len(found) // _NUM_PACKAGES]
        text = path.read_text(encoding="utf-8", errors="replace")
        begin = len(text) * 2 // 5
        texts.append(text[begin : begin + _CHARS].rstrip())
    return texts


def _word(rng: np.random.Generator, least: int = 3, most: int = 9) -> str:
    """A pronounceable word."""
    size = int(rng.integers(least, most))
    pairs = [rng.choice(list("bcdfgklmnprstvz")) + rng.choice(list("aeiou")) for _ in range(size)]
    return "".join(pairs)[:size]


def _number(rng: np.random.Generator, most: int = 10**5) -> int:
    return int(rng.integers(0, most))


def _tables(rng: np.random.Generator) -> list[str]:
    def word() -> str:
        return _word(rng)

    def rows(count: int, columns: int, separator: str) -> str:
        lines = [
            separator.join([word(), *(str(_number(rng)) for _ in range(columns))])
            for _ in range(count)
        ]
        return "\n".join(lines)

    dates = [f"{2000 + _number(rng, 25)}-{1 + _number(rng, 12):02d}" for _ in range(8)]
    log = "\n".join(
        f"{date}-03 {_number(rng, 24):02d}:{_number(rng, 60):02d} {word().upper()} {word()}: "
        f"{word()} took {_number(rng, 900)} ms"
        for date in dates
    )
    matrix = "\n".join(
        " ".join(f"{value:7.3f}" for value in row) for row in rng.normal(size=(9, 6))
    )
    markdown = "| name | a | b |\n|---|---|---|\n| " + rows(9, 2, " | ").replace("\n", " |\n| ")
    return [
        "name,count,price\n" + rows(12, 2, ","),
        "\t".join([word(), word(), word(), word()]) + "\n" + rows(9, 3, "\t"),
        markdown,
        log,
        matrix,
        rows(14, 1, ": "),
        "; ".join(f"{word()}={_number(rng)}" for _ in range(30)),
    ]


def _lists(rng: np.random.Generator) -> list[str]:
    def word() -> str:
        return _word(rng)

    def line() -> str:
        return " ".join(word() for _ in range(1 + _number(rng, 5)))

    dates = [
        f"{1 + _number(rng, 28)}.{1 + _number(rng, 12)}.{1900 + _number(rng, 120)}"
        for _ in range(14)
    ]
    return [
        "\n".join(f"{index}. {line()}" for index in range(1, 13)),
        "\n".join(f"- {line()}" for _ in range(14)),
        "\n".join(f"[{rng.choice(['x', ' '])}] {line()}" for _ in range(12)),
        ", ".join(word().capitalize() for _ in range(40)),
        "\n".join(f"{date}: {line()}" for date in dates),
        "\n".join(
            f"{_number(rng, 99)} + {_number(rng, 99)} * x = {_number(rng)}" for _ in range(14)
        ),
        "\n".join("/" + "/".join(word() for _ in range(4)) + ".txt" for _ in range(12)),
    ]


def _markup(rng: np.random.Generator) -> list[str]:
    def word() -> str:
        return _word(rng)

    items = "".join(
        f'  <li class="{word()}"><a href="/{word()}/{_number(rng)}">{word()}</a></li>\n'
        for _ in range(7)
    )
    nodes = "".join(f'  <{word()} id="{_number(rng)}">{word()}</{word()}>\n' for _ in range(9))
    keys = "".join(
        f"  - {word()}:\n      {word()}: {_number(rng)}\n      {word()}: {word()}\n"
        for _ in range(6)
    )
    ini = "".join(
        f"[{word()}]\n{word()} = {word()}\n{word()} = {_number(rng)}\n\n" for _ in range(6)
    )
    sql = "".join(
        f"INSERT INTO {word()} VALUES ({_number(rng)}, '{word()}', {_number(rng)});\n"
        for _ in range(8)
    )
    tex = "".join(
        f"\\item ${word()[0]}_{{{_number(rng, 9)}}} \\leq {_number(rng, 99)}$, {word()}\n"
        for _ in range(12)
    )
    return [
        f"<html>\n<body>\n<ul>\n{items}".rstrip(),
        f'<?xml version="1.0"?>\n<{word()}>\n{nodes}'.rstrip(),
        f"{word()}:\n{keys}".rstrip(),
        ini.rstrip(),
        f"CREATE TABLE {word()} ({word()} INTEGER, {word()} TEXT);\n{sql}".rstrip(),
        f"\\begin{{itemize}}\n{tex}".rstrip(),
    ]
