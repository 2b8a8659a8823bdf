"""Grammars over one tokenizer: checking them, and the states of sequences under them.

llguidance (MIT, Microsoft) does the work: an Earley parser over lexers that are built as they are
needed, so that a grammar costs next to nothing to compile, and a mask some 50 us.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_llm.core.errors import ConfigError, SamplingError
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.structured_outputs import StructuredOutputsParams, ToolOutputParams
from hetero_llm.structured_output.grammar_text import (
    ConstraintGrammar,
    constraint_grammar,
    schema_text,
)
from hetero_llm.structured_output.json_schema import (
    keyword_in,
    place_of,
    schemas_below,
    schemas_in,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

M = TypeVar("M", bound="Matcher")
_KEPT_GRAMMARS = 64
_SHORT_SCHEMA = 1 << 14
"""Bytes of a pickled JSON schema that is written as a grammar in half a millisecond."""
_SLOW_KEYWORDS = (b"$ref", b"multipleOf")
"""Schemas with these are compared with each other."""
_FIRST_FUEL, _STEP_FUEL = 200_000, 50_000
"""Expressions that a lexer may make for the first mask and for a later one. llguidance's own limits
are 1,000,000 and 200,000, with which `((a{100}){100}){100}` takes 5 s of a step (here 0.5), and
grammars of 128 KB need no more than these."""
_SHARED = ("$schema", "$defs", "definitions")
"""Keywords of a root that its parts refer to."""
_OWN = ("#/$defs/", "#/definitions/")
_MOST_SECONDS = 0.05
"""CPU time for compiling parts of a schema to find out which one is wrong."""
_FEATURE = "structured_outputs"
_ASIDE = re.compile(r"\n<|\n *while processing|\. Enable '")
_CROWDED = re.compile(r"Current row has (\d+) items; max is (\d+)")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as grammars see it.

    Attributes:
        fast: Hugging Face's tokenizer object of the tokenizers library; None: use `token_bytes`.
        token_bytes: id to the bytes that a token adds to a text; None where that depends on others.
        special: special tokens and their ids.
        size: number of logits. Ids above the tokenizer's are never allowed.
        eos_ids: end-of-sequence tokens, the only ones allowed behind a complete output.
    """

    fast: Any
    token_bytes: Callable[[int], bytes | None]
    special: dict[str, int]
    size: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pristine:
    """A compiled grammar.

    Attributes:
        matcher: at its beginning, not to be changed. It may be in error.
        why_useless: why no output can follow the grammar; "" if one can.
    """

    matcher: LLMatcher
    why_useless: str


class GrammarCompiler:
    """Compiles and keeps the grammars of an engine's requests. Thread-safe.

    The tokenizer's trie is built at the first use, or by `warm_up`; a large vocabulary takes some
    seconds.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._built: LLTokenizer | None = None
        self._pristine: OrderedDict[str, Future[_Pristine]] = OrderedDict()
        self._written: OrderedDict[bytes, ConstraintGrammar] = OrderedDict()

    def warm_up(self) -> None:
        """Builds the tokenizer's trie, if llguidance is installed."""
        try:
            self._tokenizer()
        except (ConfigError, SamplingError):
            return  # a request with a constraint will say so

    def warm_up_beside(self) -> None:
        """The same in a thread of its own."""
        threading.Thread(target=self.warm_up, name="hetero-llm-grammars", daemon=True).start()

    def grammar(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a request's constraint, checked.

        Raises:
            SamplingError: it cannot be followed; names the field, and the place within a schema.
            ConfigError: llguidance is not installed.
        """
        self._tokenizer()
        written = self._write(params)
        if written.answer is not None:
            self._check(written.answer)
        self._check(written)
        return _grammar(written, params)

    def unchecked_grammar(self, params: StructuredOutputsParams) -> Grammar:
        """The same without compiling it, in a third of the time: a sequence that begins with it may
        be in error at once.

        Raises:
            SamplingError: the constraint is not in the form of its kind, or a schema has a keyword
                that is not followed.
            ConfigError: llguidance is not installed.
        """
        self._tokenizer()
        return _grammar(self._write(params), params)

    def writes_quickly(self, params: StructuredOutputsParams) -> bool:
        """Whether `unchecked_grammar` takes little more time than waking up a thread for it: the
        constraint is a short and simple schema, or was written before."""
        key = _key(params)
        if key is None:
            return False
        is_short = params.json is not None and len(key) <= _SHORT_SCHEMA
        if is_short and not any(word in key for word in _SLOW_KEYWORDS):
            return True
        with self._lock:
            return key in self._written

    def _write(self, params: StructuredOutputsParams) -> ConstraintGrammar:
        """`constraint_grammar`, which takes half a millisecond for a schema of 10 KB, and is kept:
        agents send the same schemas again and again."""
        key = _key(params)
        if key is None:
            return constraint_grammar(params, self._vocabulary.special)
        with self._lock:
            found = self._written.get(key)
            if found is not None:
                self._written.move_to_end(key)
                return found
        written = constraint_grammar(params, self._vocabulary.special)
        with self._lock:
            self._written[key] = written
            if len(self._written) > _KEPT_GRAMMARS:
                self._written.popitem(last=False)
        return written

    def check(self, grammar: Grammar, params: StructuredOutputsParams) -> None:
        """Checks the `unchecked_grammar` of a constraint.

        Raises:
            SamplingError: as `grammar`.
        """
        beside = isinstance(params, ToolOutputParams) and params.answer is not None
        if beside or self._compiled(grammar.text).why_useless:
            self.grammar(params)  # which knows the parts that an error is named after

    def _check(self, written: ConstraintGrammar) -> None:
        """Raises SamplingError: the grammar cannot be followed."""
        reason = self._compiled(written.text).why_useless
        if reason:
            self._forget(written.text)
            raise self._refused(written, reason)

    def _refused(self, written: ConstraintGrammar, reason: str) -> SamplingError:
        """The error of a grammar that cannot be followed, which names the first of its schemas that
        cannot be followed alone."""
        for one in written.schemas:
            why = reason if one.text == written.text else self._made(one.text).why_useless
            if why:
                schema = one.source.schema
                path, value = place_of(why, schema) or self._innermost(schema, why)
                keyword = keyword_in(why, value)
                if keyword is not None:
                    path, value = f"{path}.{keyword}", value[keyword]
                return SamplingError(one.source.at(path), value, _plain(why))
        return SamplingError(written.field, written.value, _plain(reason))

    def _innermost(self, schema: Any, why: str) -> tuple[str, Any]:
        """The path and value of the innermost schema that cannot be followed for this reason; the
        whole schema if none of its parts tells, or takes too long. Parts that refer to others are
        not tried alone, except for definitions."""
        path, value = "", schema
        if not isinstance(schema, dict):
            return path, value
        shared = {name: schema[name] for name in _SHARED if name in schema}
        parts = list(schemas_below(schema))
        end = time.thread_time() + _MOST_SECONDS
        while parts and time.thread_time() < end:
            place, part = parts.pop(0)
            references = (one["$ref"] for _, one in schemas_in(part) if "$ref" in one)
            if not all(str(one).startswith(_OWN) for one in references):
                continue
            reason = self._made(schema_text({**part, **shared})).why_useless
            if _plain(reason) == _plain(why):
                path, value, parts = path + place, part, list(schemas_below(part))
        return path, value

    def knows(self, grammar: Grammar) -> bool:
        """Whether the grammar is compiled, so that `open` takes microseconds."""
        with self._lock:
            found = self._pristine.get(grammar.text)
        return found is not None and found.done()

    def prepare(self, grammar: Grammar) -> None:
        """Compiles a grammar, for a later `open`. An error is found there."""
        self._compiled(grammar.text)

    def open(self, grammar: Grammar, output_ids: Sequence[int]) -> Matcher:
        """The state of a sequence with these output tokens; see `core.grammar.OpenMatcher`."""
        return self.open_as(Matcher, grammar, output_ids)

    def open_as(self, kind: type[M], grammar: Grammar, output_ids: Sequence[int]) -> M:
        """The same as a subclass of `Matcher`."""
        pristine = self._compiled(grammar.text).matcher
        matcher = kind(pristine.deep_copy(), grammar, self._vocabulary.eos_ids)
        for token in output_ids:
            matcher.observe(token)
        return matcher

    def _compiled(self, text: str) -> _Pristine:
        """A compiled grammar. A thread that asks while another one compiles it waits for that
        one."""
        with self._lock:
            found = self._pristine.get(text)
            first = found is None
            if found is None:
                found = self._pristine[text] = Future()
                if len(self._pristine) > _KEPT_GRAMMARS:
                    self._pristine.popitem(last=False)
            else:
                self._pristine.move_to_end(text)
        if first:
            try:
                found.set_result(self._made(text))
            except BaseException as error:
                self._forget(text)
                found.set_exception(error)
                raise
        return found.result()

    def _made(self, text: str) -> _Pristine:
        """A grammar compiled anew."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            verbose_errors=False, initial_lexer_fuel=_FIRST_FUEL, step_lexer_fuel=_STEP_FUEL
        )
        made = LLMatcher(self._tokenizer(), text, log_level=0, limits=limits)
        empty = False
        if not made.is_error():
            # A lexer that has exceeded its limits says so at the next mask only, hence the first.
            made.deep_copy().compute_bitmask()
            # Copies keep the second one, so that no step has to compute the first mask.
            empty = not any(made.compute_bitmask()) and not made.is_error()
        reason = made.get_error()
        if empty or reason.startswith("NoExtension"):
            reason = "allows no output at all"
        return _Pristine(made, reason)

    def _forget(self, text: str) -> None:
        with self._lock:
            self._pristine.pop(text, None)

    def _tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._built is None:
                self._built = _build(self._vocabulary)
            return self._built


class Matcher:
    """The state of one sequence under its grammar; `core.grammar.GrammarMatcher`.

    Attributes:
        error: see there.
    """

    def __init__(self, matcher: LLMatcher, grammar: Grammar, eos_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._eos_ids = eos_ids
        opens = grammar.may_begin_with
        # The last tokens of the free text before the grammar begins; None once it has begun.
        self._before: tuple[int, ...] | None = (
            () if grammar.begins_after and opens is None else None
        )
        self._may_open = opens is not None  # the next token may begin a free text
        self.error = f"the grammar: {_plain(matcher.get_error())}" if matcher.is_error() else None

    def observe(self, token_id: int) -> None:
        """Takes in the next output token; see `GrammarMatcher`."""
        if self.error is not None or self._observe_free(token_id):
            return
        if token_id in self._eos_ids and self._matcher.is_stopped():
            return  # with ignore_eos further end tokens follow a complete output
        if not self._matcher.consume_token(token_id):
            reason = _plain(self._matcher.get_error())
            self.error = f"the grammar refuses token {token_id}: {reason}"

    def try_observe(self, token_id: int) -> bool:
        """Takes in the next token of a draft, unless it is refused; see `GrammarMatcher`."""
        if self.error is not None:
            return False
        may_open = self._may_open
        if self._observe_free(token_id):
            return True
        if token_id in self._eos_ids and self._matcher.is_stopped():
            return True
        taken = self._matcher.try_consume_tokens([token_id]) == 1
        self._may_open = may_open and not taken
        return taken

    def copy(self) -> Matcher:
        """A state of its own that has taken in the same tokens."""
        other = Matcher(self._matcher.deep_copy(), self._grammar, self._eos_ids)
        other._before, other._may_open, other.error = self._before, self._may_open, self.error
        return other

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        """Writes which tokens may come next; see `GrammarMatcher`."""
        if self._before is not None:
            return False
        if self.error is not None:
            mask.fill(0)
            return True
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self.error = f"the grammar: {_plain(self._matcher.get_error())}"
            mask.fill(0)
        elif self._may_open:
            opens = self._grammar.may_begin_with
            assert opens is not None
            mask.view(np.uint32)[opens // 32] |= np.uint32(1 << opens % 32)
        return True

    def _observe_free(self, token_id: int) -> bool:
        """Takes in a token of free text before the grammar begins; False: it is none."""
        may_open, self._may_open = self._may_open, False
        if may_open and token_id == self._grammar.may_begin_with:
            self._before = ()
            return True
        if self._before is None:
            return False
        self._before = text_before(self._grammar, self._before, token_id)
        return True


def text_before(grammar: Grammar, before: tuple[int, ...], token_id: int) -> tuple[int, ...] | None:
    """The last tokens of the free text behind `before` and another token; None: the grammar begins
    there."""
    last = (*before, token_id)[-len(grammar.begins_after) :]
    return None if last == grammar.begins_after else last


def _key(params: StructuredOutputsParams) -> bytes | None:
    """Equal keys are equal constraints; nothing reads them. None for a constraint with a value that
    is no JSON, whose error names its place."""
    try:
        return pickle.dumps(params)
    except Exception:
        return None


def _grammar(written: ConstraintGrammar, params: StructuredOutputsParams) -> Grammar:
    return Grammar(written.text, tuple(params.begins_after or ()), params.may_begin_with)


def _build(vocabulary: Vocabulary) -> LLTokenizer:
    """llguidance's tokenizer.

    Raises:
        ConfigError: llguidance is not installed.
        SamplingError: the tokenizer does not tell what its tokens are.
    """
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        reason = f"structured output needs llguidance (pip install llguidance): {error}"
        raise ConfigError(_FEATURE, None, reason) from None
    if not vocabulary.eos_ids:
        raise SamplingError(_FEATURE, None, "this model has no end-of-sequence token")
    eos = list(vocabulary.eos_ids)
    if vocabulary.fast is not None:
        copy = type(vocabulary.fast).from_str(vocabulary.fast.to_str())
        copy.no_padding()
        copy.no_truncation()
        # A decoder that llguidance does not know is a ValueError.
        with contextlib.suppress(ValueError):
            return LLTokenizer(copy.to_str(), n_vocab=vocabulary.size, eos_token=eos)
    return LLTokenizer(TokenizerWrapper(_Words(vocabulary)), n_vocab=vocabulary.size, eos_token=eos)


class _Words:
    """What llguidance asks of a tokenizer that is not one of the tokenizers library."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.special.values())
        self.tokens = [vocabulary.token_bytes(token) for token in range(vocabulary.size)]
        unknown = sum(word is None for word in self.tokens)
        if unknown:
            reason = f"this tokenizer does not tell the bytes of {unknown} of its tokens"
            raise SamplingError(_FEATURE, None, reason)
        special = set(self.special_token_ids)
        self._ids = {word: i for i, word in enumerate(self.tokens) if word and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """The longest tokens that make up these bytes. The tokenizer itself may add a space where a
        text begins, and these bytes stand within one."""
        found: list[int] = []
        begin = 0
        while begin < len(text):
            for end in range(min(begin + self._longest, len(text)), begin, -1):
                token = self._ids.get(text[begin:end])
                if token is not None:
                    found.append(token)
                    begin = end
                    break
            else:
                break  # no token begins like this: llguidance falls back to its own way
        return found


def _plain(text: str) -> str:
    """llguidance's message without the parser's state, and without its advice to those who write
    grammars or set its options."""
    plain = _ASIDE.split(text, maxsplit=1)[0].strip()
    crowded = _CROWDED.search(plain)
    if crowded is None:
        return plain
    return f"too much may come next: {crowded[1]} states of the parser, {crowded[2]} are possible"
