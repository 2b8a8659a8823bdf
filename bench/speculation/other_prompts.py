"""A second set of prompts for `any_prompt`, of other kinds and origins than the first one.

Rule: 52 prompts of seven kinds, made from the Python that runs and from seeds, without a network,
and the same for one version of Python:

- library (12): 600 characters of modules of the standard library, every n-th file of its first
  folder in the order of the names, from the middle of the file;
- docs (8): docstrings of such modules, at least 400 characters long;
- languages (8): a paragraph in German, French, Spanish, Polish, Turkish, Russian, Greek, Japanese;
- numbers (6): tables of random decimal, hexadecimal and binary numbers, of other widths each;
- json (6): nested records of random names and values, with other indents;
- headers (6): 600 characters of Python's C headers, or of its TOML, XML and text modules where
  there are none;
- random (6): tokens that are drawn alike from the vocabulary, with another seed than the first set.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from pathlib import Path

import numpy as np

_NUM_LIBRARY, _NUM_DOCS, _NUM_HEADERS, _NUM_RANDOM = 12, 8, 6, 6
_CHARS = 600
_LEAST_DOC = 400  # characters
_RANDOM_TOKENS = 64
_SEED = 71
_WIDTHS = (2, 3, 4, 5, 6, 8)  # digits of the numbers of each table
_INDENTS = (None, 0, 1, 2, 3, 4)

_LANGUAGES = (
    "Am frühen Morgen ging die Gärtnerin durch den Hof und zählte die Töpfe, die der Sturm "
    "umgeworfen hatte. Keiner war zerbrochen, aber die Erde lag überall, und der Hund schlief "
    "darauf, als wäre nichts geschehen. Sie holte Besen und Schaufel und",
    "Le train de sept heures n'est pas venu, et les voyageurs se sont assis sur leurs valises "
    "pour attendre le suivant. Un vieil homme a sorti un jeu d'échecs, une fille a compté les "
    "fenêtres de la gare, et personne n'a demandé combien de temps",
    "La bibliotecaria encontró entre dos atlas una carta que nadie había abierto en cuarenta "
    "años. La dirección estaba borrada, pero el sello era de un país que ya no existe. Esa "
    "misma tarde preguntó a sus vecinos, y el panadero le dijo que",
    "W małym miasteczku nad rzeką zegar na wieży spóźniał się o kwadrans, i wszyscy o tym "
    "wiedzieli. Kiedy przyjechał nowy zegarmistrz i go naprawił, przez tydzień nikt nie zdążył "
    "na obiad. W końcu burmistrz poprosił, żeby zegar znowu",
    "Balıkçı sabah erkenden ağlarını topladı ve denizin rengine baktı. Rüzgâr kuzeyden "
    "esiyordu, bulutlar alçaktı, ama martılar kıyıya yaklaşmamıştı. Oğluna bugün uzağa "
    "gitmeyeceklerini söyledi, çünkü dedesi ona hep",
    "Профессор забыл очки дома и поэтому читал лекцию по памяти. Студенты сначала "
    "не заметили, потом стали записывать быстрее, потому что такого в учебнике не было. После "
    "звонка никто не встал, и он рассказал ещё, как",
    "Το πλοίο έφτασε στο λιμάνι δύο ώρες αργότερα, και ο καπετάνιος ζήτησε συγγνώμη με ένα "
    "κουτί γλυκά. Τα παιδιά έτρεξαν στην παραλία, οι μεγάλοι έψαξαν τα κλειδιά τους, και η "
    "γιαγιά κάθισε στη σκιά για να",
    "駅前の古い時計屋は、毎朝七時に店を開ける。主人は客が来ない日でも、棚の時計を一つずつ巻いて、"
    "音を確かめる。ある雨の日、小さな女の子が壊れた目覚まし時計を持ってきて、こう言った。",
)  # fmt: skip

Prompt = str | list[int]


def other_prompts(vocab_size: int) -> dict[str, Prompt]:
    """All prompts by name."""
    rng = np.random.default_rng(_SEED)
    kinds: dict[str, list[Prompt]] = {
        "library": [_middle(path) for path in _modules(_NUM_LIBRARY, offset=0)],
        "docs": list(_docstrings()),
        "languages": list(_LANGUAGES),
        "numbers": [_table(rng, width) for width in _WIDTHS],
        "json": [_records(rng, indent) for indent in _INDENTS],
        "headers": [_middle(path) for path in _headers()],
        "random": [
            rng.integers(3, vocab_size, _RANDOM_TOKENS).tolist() for _ in range(_NUM_RANDOM)
        ],
    }
    return {
        f"{kind} {index}": prompt
        for kind, prompts in kinds.items()
        for index, prompt in enumerate(prompts)
    }


def _library() -> list[Path]:
    """Public modules of the standard library's first folder of more than 2 * `_CHARS` bytes, by
    name. Private ones may hold paths of the machine."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
    return [path for path in paths if path.stat().st_size > 2 * _CHARS]


def _modules(count: int, *, offset: int) -> list[Path]:
    found = _library()
    return [found[(offset + index * len(found) // count) % len(found)] for index in range(count)]


def _middle(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    begin = max((len(text) - _CHARS) // 2, 0)
    return text[begin : begin + _CHARS].rstrip()


def _docstrings() -> list[str]:
    """The ends of long docstrings, spread over the modules that have one."""
    found = []
    for path in _library():
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8", errors="replace")))
        if doc is not None and len(doc) >= _LEAST_DOC:
            found.append(doc[: len(doc) * 2 // 3][-_CHARS:].rstrip())
    return [found[index * len(found) // _NUM_DOCS] for index in range(_NUM_DOCS)]


def _headers() -> list[Path]:
    headers = sorted(Path(sysconfig.get_paths()["include"]).glob("*.h"))
    found = [path for path in headers if path.stat().st_size > 2 * _CHARS]
    if len(found) < _NUM_HEADERS:
        return _modules(_NUM_HEADERS, offset=3)
    return [found[index * len(found) // _NUM_HEADERS] for index in range(_NUM_HEADERS)]


def _table(rng: np.random.Generator, width: int) -> str:
    """Rows of random numbers: decimal, hexadecimal and binary."""
    lines = []
    for values in rng.integers(0, 10**width, (8, 4)).tolist():
        lines.append(f"{values[0]:0{width}d} {values[1]:x} {values[2] / 7:.{width}f} {values[3]:b}")
    return "\n".join(lines)


def _records(rng: np.random.Generator, indent: int | None) -> str:
    """A list of records, of which the last one is cut."""
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))

    def word() -> str:
        return "".join(rng.choice(letters, int(rng.integers(3, 9))).tolist())

    records = [
        {word(): int(rng.integers(0, 10**6)), word(): word(), word(): [word(), float(rng.random())],
         word(): {word(): bool(rng.integers(0, 2)), word(): None}}
        for _ in range(4)
    ]  # fmt: skip
    text = json.dumps(records, indent=indent)
    return text[: len(text) * 9 // 10]
