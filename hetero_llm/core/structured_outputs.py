"""What a request's output must follow: a JSON schema, a regular expression, a choice, a grammar.

Names and meanings are vLLM's, today's (`StructuredOutputsParams`) and the TACO-LLM manual's
(`GuidedDecodingParams`, `GuidedDecodingRequest`). `structured_output/` makes grammars of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, NoReturn

from hetero_llm.core.errors import SamplingError

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of `StructuredOutputsParams` of which one is given."""

BACKENDS = ("auto", "guidance", "llguidance", "xgrammar", "outlines", "lm-format-enforcer")
"""vLLM's names of libraries. llguidance does the work whichever is named: all stand for the same
set of outputs."""


@dataclass(slots=True)
class StructuredOutputsParams:
    """A constraint on a request's output. Give one of the first six.

    Args:
        json: A JSON schema, as an object or as text.
        regex: The whole output matches this regular expression (Rust's syntax, no look-around).
        choice: The output is one of these texts.
        grammar: A context-free grammar: llguidance's Lark, or GBNF (EBNF), as llama.cpp's.
        json_object: True: any JSON object.
        structural_tag: Free text with constrained parts: vLLM's object or its text, with
            "structures" and "triggers", or with "format".
        disable_any_whitespace: JSON without whitespace between its parts. Otherwise a run of up to
            64 spaces, tabs and line ends may stand there.
        disable_additional_properties: Objects of the schema that name properties and say nothing
            about additional ones have none.
        whitespace_pattern: Regular expression of the whitespace between parts of JSON.
        begins_after: Token ids behind which the constraint begins, for models that reason first:
            the end of their reasoning. Until then the output is free. Empty: it begins at once.
            None: as the engine's `reasoning_parser` says, at once without one.
        may_begin_with: The token id with which such a reasoning begins, if the model may leave it
            out: then the constraint begins at once, unless this token comes first.
        disable_fallback: Without effect: no other library stands in for llguidance.

    Raises:
        SamplingError: none or several of the first six are given, or a field has a wrong type.
            Whether schemas and grammars can be used is found when the request is made.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    begins_after: Sequence[int] | None = None
    may_begin_with: int | None = None
    disable_fallback: InitVar[bool] = False

    def __post_init__(self, disable_fallback: bool) -> None:
        if not isinstance(disable_fallback, bool):
            _fail("disable_fallback", disable_fallback, "must be True or False")
        self.check()

    def check(self) -> None:
        """Raises SamplingError: see the class."""
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if self.json is False:
            given.append("json")
        if len(given) != 1:
            several = f"{' and '.join(given)} are given" if given else "none is given"
            _fail("structured_outputs", given, f"needs one of {', '.join(CONSTRAINTS)}; {several}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                _fail(name, value, "must be a string")
        if self.json is not None and not isinstance(self.json, (str, Mapping, bool)):
            _fail("json", self.json, "must be a JSON schema: an object, or its text")
        if self.structural_tag is not None and not isinstance(self.structural_tag, (str, Mapping)):
            _fail("structural_tag", self.structural_tag, "must be an object, or its text")
        if self.choice is not None:
            self.choice = _texts("choice", self.choice)
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                _fail(name, value, "must be True or False")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            _fail(
                "whitespace_pattern", self.whitespace_pattern, "contradicts disable_any_whitespace"
            )
        if not all(type(token) is int and token >= 0 for token in self.begins_after or ()):
            _fail("begins_after", self.begins_after, "must be token ids")
        opens = self.may_begin_with
        if opens is not None and (type(opens) is not int or opens < 0):
            _fail("may_begin_with", opens, "must be a token id")
        if opens is not None and not self.begins_after:
            _fail("may_begin_with", opens, "needs begins_after")

    @property
    def given(self) -> tuple[str, Any]:
        """Which of `CONSTRAINTS` is given, and its value."""
        name = next((name for name in CONSTRAINTS if getattr(self, name)), "json")
        return name, getattr(self, name)

    @classmethod
    def of(cls, value: Any, field: str) -> StructuredOutputsParams:
        """Parameters given as such, as the older kind, or as a mapping of their fields.

        Raises:
            SamplingError: the value is none of them, or a field is wrong.
        """
        if isinstance(value, StructuredOutputsParams):
            value.check()
            return value
        if isinstance(value, (GuidedDecodingParams, GuidedDecodingRequest)):
            return value.structured_outputs()
        if not isinstance(value, Mapping):
            _fail(field, value, "must be a StructuredOutputsParams or a mapping of its fields")
        known = {one.name for one in fields(cls)} | {"disable_fallback"}
        for name in value:
            if name not in known:
                _fail(f"{field}.{name}", value[name], "is not a known field")
        return cls(**value)


@dataclass(frozen=True, slots=True)
class EmbeddedSchema:
    """A user's JSON schema to which a grammar of ours refers.

    Attributes:
        field: of the request, in which the schema stands; errors name the place from there.
        shared: the field whose `$defs` and `definitions` were copied into the schema; empty: none.
    """

    schema: Mapping[str, Any] | bool
    field: str
    shared: str = ""

    def at(self, path: str) -> str:
        """The place in the request of a path in the schema, such as ".properties.age"."""
        copied = self.shared and path.startswith((".$defs.", ".definitions."))
        return (self.shared if copied else self.field) + path


@dataclass(slots=True)
class ToolOutputParams(StructuredOutputsParams):
    """The constraint of a message that calls tools: a grammar that refers to the tools' schemas.
    The server makes it; requests cannot give one.

    Args:
        schemas: by name; `grammar` refers to them as `@name`.
        answer: the request's own constraint, which a message without calls follows; None: every
            message follows `grammar`. Where it begins is said here.
    """

    schemas: Mapping[str, EmbeddedSchema] = field(default_factory=dict)
    answer: StructuredOutputsParams | None = None

    @property
    def given(self) -> tuple[str, Any]:
        """The request's field, and where the schemas stand."""
        return "tools", list(dict.fromkeys(one.field for one in self.schemas.values()))


@dataclass(slots=True)
class GuidedDecodingParams:
    """The older name of `StructuredOutputsParams`, with the library's name beside it.

    Args:
        backend: One of `BACKENDS`, perhaps with options behind a colon ("xgrammar:no-fallback").
        backend_was_auto, disable_fallback: vLLM's own; without effect.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    backend: str | None = None
    backend_was_auto: bool = False
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_backend("backend", self.backend)

    @staticmethod
    def from_optional(**given: Any) -> GuidedDecodingParams | None:
        """The parameters given by name; None if no constraint is among them. `json` may be a class
        with `model_json_schema` (pydantic's)."""
        given["json"] = _plain_schema(given.get("json"))
        if all(given.get(name) in (None, False) for name in CONSTRAINTS):
            return None
        return GuidedDecodingParams(**{k: v for k, v in given.items() if v is not None})

    def structured_outputs(self) -> StructuredOutputsParams:
        """The same constraint under today's name."""
        return StructuredOutputsParams(
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OLD_ONLY}
        )


_OLD_ONLY = ("backend", "backend_was_auto", "disable_fallback")


# vLLM's class of this name has these fields.
@dataclass(slots=True)
class GuidedDecodingRequest:
    """What `LLM.generate(guided_options_request=...)` takes; `LLMGuidedOptions` is its mapping."""

    guided_json: str | Mapping[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Sequence[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def structured_outputs(self) -> StructuredOutputsParams:
        """The same constraint under today's name.

        Raises:
            SamplingError: a field is wrong; the message has today's name of it.
        """
        check_backend("guided_decoding_backend", self.guided_decoding_backend)
        return StructuredOutputsParams(
            json=_plain_schema(self.guided_json),
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
            json_object=self.guided_json_object,
            structural_tag=self.structural_tag,
            whitespace_pattern=self.guided_whitespace_pattern,
        )

    @classmethod
    def of(cls, value: Any) -> GuidedDecodingRequest:
        """The request given as such or as a mapping of its fields.

        Raises:
            SamplingError: the value is neither, or has a field that is not known.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            reason = "must be a GuidedDecodingRequest or a mapping of its fields"
            _fail("guided_options_request", value, reason)
        known = {one.name for one in fields(cls)}
        for name in value:
            if name not in known:
                _fail(f"guided_options_request.{name}", value[name], "is not a known field")
        return cls(**value)


def check_backend(field: str, name: Any) -> None:
    """Raises SamplingError unless `name` is None or one of `BACKENDS`."""
    if name is None:
        return
    if not isinstance(name, str) or name.partition(":")[0] not in BACKENDS:
        _fail(field, name, f"must be one of {', '.join(BACKENDS)}")


def _plain_schema(schema: Any) -> Any:
    """A schema, of a class of pydantic's the one that it describes."""
    return schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema


def _texts(field: str, value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        _fail(field, value, "must be a list of texts, at least one")
    for index, text in enumerate(value):
        if not isinstance(text, str) or not text:
            _fail(f"{field}[{index}]", text, "must be a text that is not empty")
    return list(value)


def _fail(field: str, value: Any, reason: str) -> NoReturn:
    raise SamplingError(field, value, reason)
