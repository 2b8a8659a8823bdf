"""An incremental scanner of one JSON value, or of one Python literal that it rewrites as JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^\"'\\\x00-\x1f]+")}
_WORD = re.compile(r"[A-Za-z0-9_.+\-]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]+")
_CODE_DIGITS = {"u": 4, "x": 2, "U": 8}
_MOST_DEPTH = 512
_MOST_WORD = 4096
"""Characters of a number or a name: longer ones are a mistake of the model."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How values are written.

    Attributes:
        quotes: that may enclose a string.
        words: names of constants, and JSON's name of each.
        closers: the bracket that ends a list or an object, by the one that opens it.
        escapes: characters that may follow a backslash, and how JSON writes the result.
        codes: letters after a backslash that begin a character's number.
    """

    quotes: str
    words: dict[str, str]
    closers: dict[str, str]
    escapes: dict[str, str]
    codes: str


JSON = Dialect(
    quotes='"',
    words={"true": "true", "false": "false", "null": "null"},
    closers={"{": "}", "[": "]"},
    escapes={letter: "\\" + letter for letter in '"\\/bfnrt'},
    codes="u",
)
PYTHON = Dialect(
    quotes="\"'",
    words=JSON.words | {"True": "true", "False": "false", "None": "null"},
    closers=JSON.closers | {"(": ")"},
    escapes={letter: "\\" + letter for letter in '"\\bfnrt'}
    | {"'": "'", "\n": "", "a": "\\u0007", "v": "\\u000b", "0": "\\u0000"},
    codes="uxU",
)


class _Expects(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class JsonScanner:
    """Scans one value; looks at each character once.

    What models often write though JSON forbids it is repaired: control characters inside of strings
    and unknown escapes are escaped.

    Args:
        dialect: `PYTHON` texts are rewritten as JSON.

    Attributes:
        done: the value is complete.
        failed: the text is no value; the scanner stands at the first character that cannot be.
    """

    def __init__(self, dialect: Dialect = JSON) -> None:
        self._dialect = dialect
        self._expects = _Expects.VALUE
        self._closers: list[str] = []
        self._quote = ""
        self._is_key = False
        self._word: list[str] = []
        self._word_length = 0
        self._out: list[str] = []
        self.done = False
        self.failed = False

    def feed(self, text: str, start: int) -> int:
        """Scans `text` from `start`.

        Returns:
            The end of what was scanned: that of the value if it is `done`; else that of the text,
            or the beginning of an escape that is not complete. The rest has to be in the next text.
        """
        at, end = start, len(text)
        while at < end and not (self.done or self.failed):
            if self._quote:
                after = self._in_string(text, at)
                if after == at:
                    break
                at = after
            elif self._word:
                at = self._in_word(text, at)
            else:
                at = self._between(text, at)
        return at

    def finish(self) -> None:
        """Ends the text: a number or a name that it ends with is complete. Of a name that is not,
        the beginning of JSON's name is left."""
        if not self._word:
            return
        word, words = "".join(self._word), self._dialect.words
        name = next((one for one in words if one.startswith(word) and one != word), None)
        if name is None:
            self._end_word()
        else:
            self._word.clear()
            self._out.append(words[name][: len(word)])

    def take(self) -> str:
        """The JSON of what was scanned since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def _between(self, text: str, at: int) -> int:
        """Outside of strings and words."""
        space = _SPACE.match(text, at)
        if space is not None:
            self._out.append(space[0])
            return space.end()
        char, expects = text[at], self._expects
        if self._closers and char == self._closers[-1] and self._may_end():
            self._out.append("}" if char == "}" else "]")
            self._closers.pop()
            self._end_value()
        elif expects is _Expects.COMMA_OR_END and char == ",":
            self._out.append(",")
            in_object = self._closers[-1] == "}"
            self._expects = _Expects.KEY if in_object else _Expects.VALUE
        elif expects is _Expects.COLON and char == ":":
            self._out.append(":")
            self._expects = _Expects.VALUE
        elif expects in (_Expects.KEY, _Expects.KEY_OR_END) and char in self._dialect.quotes:
            self._begin_string(char, is_key=True)
        elif expects in (_Expects.VALUE, _Expects.VALUE_OR_END):
            return self._begin_value(text, at)
        else:
            self.failed = True
            return at
        return at + 1

    def _may_end(self) -> bool:
        return self._expects in (
            _Expects.COMMA_OR_END,
            _Expects.VALUE_OR_END,
            _Expects.KEY_OR_END,
        )

    def _begin_value(self, text: str, at: int) -> int:
        char = text[at]
        closer = self._dialect.closers.get(char)
        if char in self._dialect.quotes:
            self._begin_string(char, is_key=False)
        elif closer is not None and len(self._closers) < _MOST_DEPTH:
            self._closers.append(closer)
            self._out.append("{" if char == "{" else "[")
            self._expects = _Expects.KEY_OR_END if char == "{" else _Expects.VALUE_OR_END
        elif _WORD.match(text, at):
            return self._in_word(text, at)
        else:
            self.failed = True
            return at
        return at + 1

    def _end_value(self) -> None:
        self._expects = _Expects.COMMA_OR_END
        self.done = not self._closers

    # -- strings ------------------------------------------------------------------------------

    def _begin_string(self, quote: str, *, is_key: bool) -> None:
        self._quote, self._is_key = quote, is_key
        self._out.append('"')

    def _in_string(self, text: str, at: int) -> int:
        plain = _PLAIN[self._quote].match(text, at)
        if plain is not None:
            self._out.append(plain[0])
            return plain.end()
        char = text[at]
        if char == self._quote:
            self._out.append('"')
            self._quote = ""
            if self._is_key:
                self._expects = _Expects.COLON
            else:
                self._end_value()
        elif char == '"':
            self._out.append('\\"')
        elif char == "\\":
            return self._escape(text, at)
        else:
            self._out.append(f"\\u{ord(char):04x}")
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        """Returns `at` if the escape is not complete."""
        letter = text[at + 1 : at + 2]
        if not letter:
            return at
        if letter in self._dialect.codes:
            length = _CODE_DIGITS[letter]
            digits = text[at + 2 : at + 2 + length]
            is_hex = _HEX.fullmatch(digits) is not None
            if len(digits) < length and (is_hex or not digits):
                return at
            if is_hex and int(digits, 16) <= 0x10FFFF:
                self._out.append(_code_escape(int(digits, 16), digits))
                return at + 2 + length
        known = self._dialect.escapes.get(letter)
        if known is not None:
            self._out.append(known)
            return at + 2
        self._out.append("\\\\")  # a backslash that stands for itself
        return at + 1

    # -- numbers and names --------------------------------------------------------------------

    def _in_word(self, text: str, at: int) -> int:
        word = _WORD.match(text, at)
        if word is None:
            self._end_word()
            return at
        self._word.append(word[0])
        self._word_length += len(word[0])
        if self._word_length > _MOST_WORD:
            self._out.extend(self._word)
            self._word.clear()
            self.failed = True
        return word.end()

    def _end_word(self) -> None:
        word = "".join(self._word)
        self._word.clear()
        self._word_length = 0
        known = self._dialect.words.get(word)
        if known is None and not _NUMBER.fullmatch(word):
            self._out.append(word)
            self.failed = True
            return
        self._out.append(known or word)
        self._end_value()


def _code_escape(code: int, digits: str) -> str:
    """How JSON writes the character of a number; `digits` as they were written."""
    if code > 0xFFFF:
        return chr(code)
    return f"\\u{digits:0>4}"
