"""What clients send, in the words of OpenAI's API, and the jobs that it asks for.

A field that isn't known is refused by its name, and so is one that is known but not done here:
nothing is left out in silence. Beside OpenAI's own fields there are those of exkv's sampler and of
its jobs; ``tabby`` knows what else TabbyAPI's clients call them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from exkv.decode import Job
from exkv.sampling import Grammar, SamplingParams
from exkv.sampling.exllamav2 import BOUNDS, PLAIN, SERVED

from .tabby import translated
from .tools import Tools

MOST_CHOICES = 16  # of one prompt, and prompts of one request
MOST_TOOLS = 128
_MOST_TEXTS = 64  # of a list of stops, of texts that are banned, or of breakers
_LONGEST_TEXT = 4_000_000  # characters of one text; the context is far shorter

Text: TypeAlias = Annotated[str, Field(max_length=_LONGEST_TEXT)]
Name: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Ids: TypeAlias = list[Annotated[int, Field(ge=0)]]
Encode: TypeAlias = Callable[[str], Sequence[int]]  # a text's token ids

#: What a chat template is told by other fields of a request, or by the server.
_TEMPLATE_OWN = frozenset(("messages", "tools", "template", "add_generation_prompt", "self"))


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid")


if TYPE_CHECKING:
    _Sampling = _Fields
else:
    _Sampling = create_model(
        "_Sampling",
        __base__=_Fields,
        **{
            name: (
                BOUNDS[field].kind | None,
                Field(None, description=f"{PLAIN[field].does}; {BOUNDS[field].words}"),
            )
            for name, field in SERVED.items()
        },
    )


class StreamOptions(_Fields):
    include_usage: bool = False
    include_obfuscation: bool = False  # without effect


class TextPart(_Fields):
    type: Literal["text"]
    text: Text


class CalledFunction(_Fields):
    name: Name
    arguments: Text


class ToolCall(_Fields):
    """A call that an answer had, given back with the conversation."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(_Fields):
    """What may be called: JSON under a schema goes in."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # calls that are asked for always are

    def as_tool(self) -> dict[str, Any]:
        """As chat templates read it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class Tool(_Fields):
    type: Literal["function"]
    function: Function


class ChosenFunction(_Fields):
    name: Name


class ChosenTool(_Fields):
    type: Literal["function"]
    function: ChosenFunction


def chosen_tools(functions: Sequence[Function], choice: str, parallel: bool) -> Tools | None:
    """What a request says of tools; None where there are none, or none may be called.

    Args:
        choice: "auto", "none", "required", or a name.

    Raises:
        ValueError: two have one name, or one is chosen that isn't there.
    """
    names = [function.name for function in functions]
    if len(set(names)) != len(names):
        raise ValueError("tools has two functions of one name")
    if choice not in ("auto", "none", "required", *names) or (choice == "required" and not names):
        raise ValueError(f"tool_choice asks for {choice!r}, and tools has {names or 'none'}"[:300])
    if not names or choice == "none":
        return None
    tools = tuple(function.as_tool() for function in functions)
    return Tools(tools=tools, choice=choice, parallel=parallel)


class Message(_Fields):
    """One message of a chat. Its content may come in parts, of text only."""

    role: Annotated[str, Field(max_length=64)]
    content: Text | list[TextPart] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    refusal: None = None  # as answers have it

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        content = self.content or ""
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        found: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            found["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        others = {"name": self.name, "tool_call_id": self.tool_call_id}
        return found | {key: value for key, value in others.items() if value}


class JsonSchema(_Fields):
    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # it always is


class ResponseFormat(_Fields):
    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: JsonSchema | None = None
    pattern: Text | None = None
    grammar: Text | None = None

    def as_grammar(self) -> Grammar | None:
        """What a completion must be.

        Raises:
            ValueError: the field that goes with the type is missing, or it is no schema.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar.json_schema()
        if self.type == "json_schema":
            given = self.json_schema
            return Grammar.json_schema(_given(given and given.schema_, "json_schema"))
        if self.type == "regex":
            return Grammar.regex(_given(self.pattern, "pattern"))
        return Grammar.lark(_given(self.grammar, "grammar"))


def _given(value: Any, name: str) -> Any:
    if value is None:
        raise ValueError(f"response_format has no {name}, which its type needs")
    return value


class _Generation(_Sampling):
    """What requests for a chat and for a completion have in common."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Text | Annotated[list[Text], Field(max_length=_MOST_TEXTS)] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0

    dry_sequence_breakers: Annotated[list[Text], Field(max_length=_MOST_TEXTS)] | None = None
    banned_tokens: Ids | None = None
    banned_strings: Annotated[list[Text], Field(max_length=_MOST_TEXTS)] = []
    token_healing: bool = False
    cfg_scale: float = 1.0
    negative_prompt: Text | None = None
    json_schema: dict[str, Any] | None = None
    regex_pattern: Text | None = None

    # Without effect: they say nothing about the tokens.
    user: str | None = None
    metadata: Mapping[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _translated(cls, values: Any) -> Any:
        return translated(values)

    def sampling(self, usual: SamplingParams, encode: Encode) -> SamplingParams:
        """How tokens are chosen: as usual, but for what the request says. A text that no
        repetition goes across stands for its last token, as in TabbyAPI.

        Raises:
            ValueError, TypeError: a number out of its range.
        """
        given = {
            field: value
            for name, field in SERVED.items()
            if (value := getattr(self, name)) is not None
        }
        if self.dry_sequence_breakers is not None:
            ids = map(encode, self.dry_sequence_breakers)
            given["dry_sequence_breakers"] = {text[-1] for text in ids if text}
        settings = replace(_drawing(usual) if given.get("temperature") else usual, **given)
        biases = self._biases()
        return settings.with_bias(biases) if biases else settings

    def _biases(self) -> dict[int, float]:
        """OpenAI's -100 forbids a token."""
        biases = dict.fromkeys(self.banned_tokens or (), -math.inf)
        for token, bias in (self.logit_bias or {}).items():
            if not token.isdecimal() or len(token) > 9:
                raise ValueError(f"logit_bias has the key {token!r:.40}; keys are token ids")
            biases[int(token)] = -math.inf if bias <= -100 else bias
        return biases

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are wanted beside each one; None for no
        log-probabilities."""
        raise NotImplementedError

    def grammar(self) -> Grammar | None:
        """What a completion must be, apart from calls of tools.

        Raises:
            ValueError: it is none, or two are given.
        """
        names = ("response_format", "json_schema", "regex_pattern")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: a completion is held to one of them")
        if self.json_schema is not None:
            return Grammar.json_schema(self.json_schema)
        if self.regex_pattern is not None:
            return Grammar.regex(self.regex_pattern)
        return self.response_format.as_grammar() if self.response_format else None

    def jobs(
        self,
        prompts: Sequence[Any],
        usual: SamplingParams,
        most: int,
        grammar: Grammar | None,
        encode: Encode,
    ) -> list[Job]:
        """``n`` jobs for each prompt, in the order of their choices.

        Raises:
            ValueError, TypeError: a number out of its range.
        """
        settings = self.sampling(usual, encode)
        return [
            Job(
                prompt=prompt,
                settings=settings,
                max_new_tokens=most,
                seed=None if self.seed is None else (self.seed + choice) % 2**62,
                stop=self.stop if self.stop is not None else (),
                grammar=grammar,
                priority=self.priority,
                logprobs=self.likeliest,
                banned_strings=self.banned_strings,
                token_healing=self.token_healing,
                guidance_scale=self.cfg_scale,
                negative_prompt=self.negative_prompt if self.cfg_scale != 1 else None,
            )
            for prompt in prompts
            for choice in range(self.n)
        ]


class ChatRequest(_Generation):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def likeliest(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def choices(self) -> int:
        """How many there will be."""
        return self.n

    def template_variables(self) -> dict[str, Any]:
        """What the chat template may ask for, such as ``enable_thinking``; ValueError for what it
        is told in other fields."""
        found = self.chat_template_kwargs or {}
        if taken := sorted(_TEMPLATE_OWN & found.keys()):
            raise ValueError(f"chat_template_kwargs: {taken[0]!r} is not for a request to set")
        return found

    def chosen(self) -> Tools | None:
        """The tools that may be called; errors as of :func:`chosen_tools`."""
        choice = self.tool_choice or "auto"
        name = choice if isinstance(choice, str) else choice.function.name
        functions = [tool.function for tool in self.tools or ()]
        if name == "auto" and not functions:
            return None
        return chosen_tools(functions, name, self.parallel_tool_calls)

    @property
    def most(self) -> int | None:
        """New tokens, at most; None for as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Generation):
    """``/v1/completions``: one prompt or several, texts or token ids."""

    prompt: Text | Ids | Annotated[list[Text | Ids], Field(min_length=1, max_length=MOST_CHOICES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    echo: bool = False
    suffix: Annotated[Text | None, Field(description="refused")] = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def likeliest(self) -> int | None:
        if self.logprobs is not None and self.echo:
            raise ValueError("logprobs beside echo: exkv says them of new tokens only")
        return self.logprobs

    @property
    def choices(self) -> int:
        """How many there will be, over all prompts."""
        return self.n * len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts, or ids; ValueError where a gap is to be filled."""
        if self.suffix:
            raise ValueError("suffix: exkv doesn't write what goes before a text; leave it out")
        if isinstance(self.prompt, list) and not any(isinstance(p, int) for p in self.prompt):
            return self.prompt  # type: ignore[return-value] # texts, or lists of ids
        return [self.prompt]  # type: ignore[list-item] # a text, or ids

    @property
    def most(self) -> int | None:
        return self.max_tokens


class EncodeRequest(_Fields):
    """``/v1/token/encode``, as TabbyAPI's clients call it."""

    text: Text | list[Message]
    add_bos_token: bool = True
    encode_special_tokens: bool = True
    decode_special_tokens: bool = True  # without effect


class DecodeRequest(_Fields):
    """``/v1/token/decode``."""

    tokens: Ids
    decode_special_tokens: bool = True
    add_bos_token: bool = True  # without effect
    encode_special_tokens: bool = True  # without effect


def _drawing(usual: SamplingParams) -> SamplingParams:
    """A temperature asks for drawing, also of a checkpoint whose usual choice is greedy."""
    if not usual.is_greedy:
        return usual
    return SamplingParams(temperature=1.0, top_k=0, top_p=1.0, token_repetition_penalty=1.0)
