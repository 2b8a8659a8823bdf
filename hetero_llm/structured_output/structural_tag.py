"""Structural tags: free text with constrained parts, as vLLM and XGrammar describe them.

Two forms are read: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, and {"format":
...}, a tree of the kinds in `_FORMATS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hetero_llm.core.errors import SamplingError

FIELD = "structural_tag"
_TEXT = r"TEXT: /(.|\n)*/"

Embed = Callable[[Any, str], Any]
"""A user's JSON schema, and the field that it stands in, to the one that the grammar embeds."""


class Lark:
    """A grammar of llguidance in the making: rules, and grammars that they name.

    Args:
        special: the tokenizer's special tokens, which never match the bytes of a literal.
        embed: see `Embed`.
    """

    def __init__(self, special: Mapping[str, int], embed: Embed) -> None:
        self._embed = embed
        self._special = special
        self._is_special = re.compile("|".join(map(re.escape, sorted(special, key=len)[::-1])))
        self._rules = [_TEXT]
        self._nested: list[dict[str, Any]] = []

    def literal(self, text: str) -> str:
        """An expression of a text; special tokens in it stand for themselves."""
        if not text:
            return '""'
        if not self._special:
            return json.dumps(text, ensure_ascii=False)
        pieces: list[str] = []
        end = 0
        for found in self._is_special.finditer(text):
            if found.start() > end:
                pieces.append(json.dumps(text[end : found.start()], ensure_ascii=False))
            pieces.append(f"<[{self._special[found[0]]}]>")
            end = found.end()
        if end < len(text):
            pieces.append(json.dumps(text[end:], ensure_ascii=False))
        return " ".join(pieces)

    def schema(self, schema: Any, field: str) -> str:
        """An expression of JSON that follows a schema, which stands in this field."""
        if not isinstance(schema, (Mapping, bool)):
            _fail(field, schema, "must be a JSON schema")
        return f"%json {json.dumps(self._embed(schema, field))}"

    def nested(self, lark: str) -> str:
        """An expression of a grammar with a `start` of its own."""
        name = f"nested_{len(self._nested)}"
        self._nested.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def rule(self, body: str, *, attributes: str = "") -> str:
        """Adds a rule; returns its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def text_until(self, trigger: str) -> str:
        """An expression of text up to the first occurrence of `trigger`, and the trigger itself."""
        if trigger in self._special:
            return f"TEXT {self.literal(trigger)}"
        return self.rule(f"TEXT {self.literal(trigger)}", attributes="[lazy]")

    def finished(self, start: str) -> str:
        """The grammar whose outputs are those of the expression `start`."""
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._nested]})


def structural_tag_grammar(
    tag: str | Mapping[str, Any], embed: Embed, special: Mapping[str, int]
) -> str:
    """The grammar of a structural tag.

    Args:
        special: see `Lark`.

    Raises:
        SamplingError: the tag is none, or of a form that is not known.
    """
    if isinstance(tag, str):
        try:
            tag = json.loads(tag)
        except (ValueError, RecursionError) as error:
            raise SamplingError(FIELD, tag, f"is not valid JSON: {error}") from None
    if not isinstance(tag, Mapping):
        _fail(FIELD, tag, "must be an object")
    lark = Lark(special, embed)
    if "format" in tag:
        return lark.finished(_expression(lark, tag["format"], f"{FIELD}.format"))
    return lark.finished(_triggered(lark, tag, FIELD, tags="structures", body_of=_structure))


def _expression(lark: Lark, form: Any, at: str) -> str:
    if not isinstance(form, Mapping):
        _fail(at, form, "must be an object")
    kind = form.get("type")
    build = _FORMATS.get(kind) if isinstance(kind, str) else None
    if build is None:
        _fail(f"{at}.type", kind, f"must be one of {', '.join(_FORMATS)}")
    return build(lark, form, at)


def _regex(lark: Lark, form: Mapping[str, Any], at: str) -> str:
    from llguidance import LLMatcher

    grammar = json.loads(LLMatcher.grammar_from_regex(_text(form, "pattern", at)))
    return lark.nested(grammar["grammars"][0]["lark_grammar"])


def _grammar(lark: Lark, form: Mapping[str, Any], at: str) -> str:
    from llguidance import gbnf_to_lark

    return lark.nested(gbnf_to_lark.any_to_lark(_text(form, "grammar", at)))


def _elements(lark: Lark, form: Mapping[str, Any], at: str) -> list[str]:
    found = _objects(form, "elements", at)
    return [f"({_expression(lark, one, f'{at}.elements[{i}]')})" for i, one in enumerate(found)]


def _tag(lark: Lark, form: Mapping[str, Any], at: str, *, begun: str = "") -> str:
    """A tag of whose beginning `begun` has been matched."""
    begin, end = _text(form, "begin", at), form.get("end", "")
    if isinstance(end, list):
        end = end[0] if len(end) == 1 else None
    if not isinstance(end, str):
        _fail(f"{at}.end", form.get("end"), "must be a text")
    content = form.get("content", {"type": "any_text"})
    if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
        body = lark.text_until(end)
        return f"{lark.literal(begin[len(begun) :])} {body}"
    body = _expression(lark, content, f"{at}.content")
    return f"{lark.literal(begin[len(begun) :])} ({body}) {lark.literal(end)}"


def _structure(lark: Lark, form: Mapping[str, Any], at: str, *, begun: str) -> str:
    """The older form of a tag with a schema; see `_tag`."""
    begin, end = _text(form, "begin", at), _text(form, "end", at)
    body = lark.schema(form.get("schema", True), f"{at}.schema")
    return f"{lark.literal(begin[len(begun) :])} ({body}) {lark.literal(end)}"


def _triggered(
    lark: Lark,
    form: Mapping[str, Any],
    at: str,
    *,
    tags: str = "tags",
    body_of: Callable[..., str] = _tag,
) -> str:
    """Free text in which a trigger begins one of the tags.

    Args:
        tags: the key that the tags have in `form`.
        body_of: one tag's expression, as `_tag` makes it.
    """
    objects, triggers = _objects(form, tags, at), form.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(triggers):
        _fail(f"{at}.triggers", triggers, "must be a list of texts, at least one")
    found = []
    for index, tag in enumerate(objects):
        where = f"{at}.{tags}[{index}]"
        begin = _text(tag, "begin", where)
        trigger = next((one for one in triggers if begin.startswith(str(one))), None)
        if trigger is None:
            _fail(f"{where}.begin", begin, f"must begin with one of {triggers}")
        body = body_of(lark, tag, where, begun=trigger)
        found.append(f"({lark.text_until(trigger)} {body})")
    rule = lark.rule(" | ".join(found))
    once, first = form.get("at_least_one", False), form.get("stop_after_first", False)
    if first:
        return rule if once else f"{rule} | TEXT"
    return f"{rule}{'+' if once else '*'} TEXT"


def _with_separator(lark: Lark, form: Mapping[str, Any], at: str) -> str:
    """Tags one after the other, with a text between them."""
    objects = _objects(form, "tags", at)
    found = [f"({_tag(lark, tag, f'{at}.tags[{i}]')})" for i, tag in enumerate(objects)]
    tags = lark.rule(" | ".join(found))
    if form.get("stop_after_first", False):
        body = tags
    else:
        body = f"{tags} ({lark.literal(_text(form, 'separator', at))} {tags})*"
    return body if form.get("at_least_one", False) else f"({body})?"


_FORMATS: dict[str, Callable[[Lark, Mapping[str, Any], str], str]] = {
    "const_string": lambda lark, form, at: lark.literal(_text(form, "value", at)),
    "json_schema": lambda lark, form, at: lark.schema(form.get("json_schema"), f"{at}.json_schema"),
    "regex": _regex,
    "grammar": _grammar,
    "any_text": lambda lark, form, at: "TEXT",
    "sequence": lambda lark, form, at: " ".join(_elements(lark, form, at)),
    "or": lambda lark, form, at: " | ".join(_elements(lark, form, at)),
    "tag": _tag,
    "triggered_tags": _triggered,
    "tags_with_separator": _with_separator,
}


def _objects(form: Mapping[str, Any], name: str, at: str) -> list[Mapping[str, Any]]:
    found = form.get(name)
    if not isinstance(found, list) or not found:
        _fail(f"{at}.{name}", found, "must be a list of objects, at least one")
    for index, one in enumerate(found):
        if not isinstance(one, Mapping):
            _fail(f"{at}.{name}[{index}]", one, "must be an object")
    return list(found)


def _text(form: Mapping[str, Any], name: str, at: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        _fail(f"{at}.{name}", value, "must be a text")
    return value


def _fail(field: str, value: Any, reason: str) -> NoReturn:
    raise SamplingError(field, value, reason)
