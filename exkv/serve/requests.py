"""Request bodies in OpenAI's format, and their translation to engine jobs.

Beside OpenAI's fields there are those of exkv's sampler and of its jobs; ``client_fields`` has
their other names, and what changes no token and is dropped. Any other field is refused by its name,
unless it is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from exkv.decode import Job
from exkv.sampling import Grammar, SamplingParams
from exkv.sampling.exllamav2 import BOUNDS, PLAIN, SERVED

from .client_fields import translated
from .tools import Tools

_MOST_CHOICES = 128  # per prompt; an engine may have fewer rows
_MOST_PROMPTS = 256
MOST_TOOLS = 128
MOST_TEXTS = 64  # entries in a list of stops, banned texts or sequence breakers
_LONGEST_TEXT = 4_000_000  # characters per text; any context is far shorter

Text: TypeAlias = Annotated[str, Field(max_length=_LONGEST_TEXT)]
Name: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Ids: TypeAlias = list[Annotated[int, Field(ge=0)]]
Encode: TypeAlias = Callable[[str], Sequence[int]]  # text -> token ids

#: Chat template variables that other fields of a request, or the server, set.
_TEMPLATE_OWN = frozenset(
    ("messages", "tools", "template", "add_generation_prompt", "continue_final_message", "self")
)


class Fields(BaseModel):
    """Fields of a JSON object. An unknown one is an error unless it is null, and null stands for
    the default of a field that can't be null."""

    model_config = ConfigDict(extra="forbid")

    #: Fields that change no token.
    no_effect: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        return cls.read(values) if isinstance(values, dict) else values

    @classmethod
    def read(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Parse a body; its fields are still to be validated."""
        nullable = {f.alias or name for name, f in cls.model_fields.items() if f.default is None}
        return {
            name: value
            for name, value in values.items()
            if name not in cls.no_effect and (value is not None or name in nullable)
        }


if TYPE_CHECKING:
    _Sampling = Fields
else:
    _Sampling = create_model(
        "_Sampling",
        __base__=Fields,
        **{
            name: (
                BOUNDS[field].kind | None,
                Field(None, description=f"{PLAIN[field].does}; {BOUNDS[field].words}"),
            )
            for name, field in SERVED.items()
        },
    )


class StreamOptions(Fields):
    no_effect = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class TextPart(Fields):
    no_effect = frozenset({"annotations", "cache_control"})

    type: Literal["text"]
    text: Text


class CalledFunction(Fields):
    name: Name
    arguments: Text

    @classmethod
    def read(cls, values: dict[str, Any]) -> dict[str, Any]:
        arguments = values.get("arguments")
        written = {"arguments": json.dumps(arguments)} if isinstance(arguments, dict) else {}
        return super().read({**values, **written})


class ToolCall(Fields):
    """A tool call in an earlier answer."""

    no_effect = frozenset({"index"})

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(Fields):
    """A function that the model may call; a JSON schema describes its arguments."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # required calls always follow the schema

    def as_tool(self) -> dict[str, Any]:
        """As chat templates read it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class Tool(Fields):
    type: Literal["function"]
    function: Function


class ChosenFunction(Fields):
    name: Name


class ChosenTool(Fields):
    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MOST_TOOLS)]


class OnlyAllowed(Fields):
    """OpenAI's ``allowed_tools``: the prompt describes all tools, and only these may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def chosen_tools(
    functions: Sequence[Function],
    choice: str,
    parallel: bool,
    allowed: Sequence[str] | None = None,
) -> Tools | None:
    """The tools of a request; None if there are none, or none may be called.

    Args:
        choice: "auto", "none", "required", or the name of a function to call once.
        allowed: the names that may be called; None for all.

    Raises:
        ValueError: two functions share a name, or the choice names one that isn't there.
    """
    names = [function.name for function in functions]
    if len(set(names)) != len(names):
        raise ValueError(f"tools has two functions of the same name: {names}"[:300])
    if choice not in ("auto", "none", "required", *names) or (choice == "required" and not names):
        raise ValueError(f"tool_choice asks for {choice!r}, but tools has {names or 'none'}"[:300])
    if missing := set(allowed or ()) - set(names):
        raise ValueError(f"tool_choice allows {min(missing)!r}, but tools has {names}"[:300])
    if not names or choice == "none":
        return None
    tools = tuple(function.as_tool() for function in functions)
    callable_ = frozenset((choice,) if choice in names else names if allowed is None else allowed)
    return Tools(tools=tools, names=callable_, forced=choice != "auto", parallel=parallel)


class Message(Fields):
    """One message of a chat. Its content may be split into text parts. Fields that occur only in
    answers are accepted, since clients send answers back."""

    no_effect = frozenset({"annotations", "prefix", "provider_specific_fields"})

    role: Annotated[str, Field(max_length=64)]
    content: Text | list[TextPart] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    function_call: CalledFunction | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None

    @classmethod
    def read(cls, values: dict[str, Any]) -> dict[str, Any]:
        reasoning = values.get("reasoning") if values.get("reasoning_content") is None else None
        values = {name: value for name, value in values.items() if name != "reasoning"}
        return super().read({**values, **({"reasoning_content": reasoning} if reasoning else {})})

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        content = self.content or self.refusal or ""
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role = "tool" if self.role == "function" else self.role
        found: dict[str, Any] = {"role": role, "content": content}
        calls = [call.model_dump() for call in self.tool_calls or ()]
        if self.function_call is not None:
            call = self.function_call.model_dump()
            calls.append({"id": call["name"], "type": "function", "function": call})
        others = {
            "tool_calls": calls,
            "name": self.name,
            "tool_call_id": self.tool_call_id or (self.name if role != self.role else None),
            "reasoning_content": self.reasoning_content,
        }
        return found | {key: value for key, value in others.items() if value}

    @property
    def is_unfinished(self) -> bool:
        """Whether the answer continues this message if it comes last."""
        return self.role == "assistant" and not self.tool_calls and not self.function_call


class JsonSchema(Fields):
    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # the schema is always enforced


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: JsonSchema | None = None
    pattern: Text | None = None
    grammar: Text | None = None

    def as_grammar(self) -> Grammar | None:
        """The grammar that the completion must match.

        Raises:
            ValueError: the type's field is missing, or the schema is invalid.
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
        raise ValueError(f"response_format has no {name}, which its type requires")
    return value


class _Generation(_Sampling):
    """The fields that chat and completion requests share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MOST_TEXTS)] | None = None
    seed: Annotated[int | None, Field(description="-1 for a random one")] = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    ban_eos_token: bool = False
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0

    dry_sequence_breakers: Annotated[list[Text], Field(max_length=MOST_TEXTS)] | None = None
    banned_tokens: Ids | None = None
    banned_strings: Annotated[list[Text], Field(max_length=MOST_TEXTS)] = []
    token_healing: bool = False
    cfg_scale: float = 1.0
    negative_prompt: Text | None = None
    json_schema: dict[str, Any] | None = None
    regex_pattern: Text | None = None

    @classmethod
    def read(cls, values: dict[str, Any]) -> dict[str, Any]:
        return super().read(translated(values))

    def sampling(self, usual: SamplingParams, encode: Encode) -> SamplingParams:
        """Sampling parameters: the request's, with the model's defaults ``usual`` for the rest. A
        sequence breaker stands for its last token, as in TabbyAPI.

        Raises:
            ValueError, TypeError: a number is out of range.
        """
        values = {field: getattr(self, name) for name, field in SERVED.items()}
        given = {field: value for field, value in values.items() if value is not None}
        if self.dry_sequence_breakers is not None:
            ids = map(encode, self.dry_sequence_breakers)
            given["dry_sequence_breakers"] = {text[-1] for text in ids if text}
        settings = replace(_sampled(usual) if given.get("temperature") else usual, **given)
        biases = self._biases()
        return settings.with_bias(biases) if biases else settings

    def _biases(self) -> dict[int, float]:
        """Logit biases; OpenAI's -100 forbids a token."""
        biases = dict.fromkeys(self.banned_tokens or (), -math.inf)
        for token, bias in (self.logit_bias or {}).items():
            if not token.isdecimal() or len(token) > 9:
                raise ValueError(f"logit_bias has the key {token!r:.40}; keys are token ids")
            biases[int(token)] = -math.inf if bias <= -100 else bias
        return biases

    @property
    def likeliest(self) -> int | None:
        """Number of most likely tokens to report per position; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def scores_prompt(self) -> bool:
        """Whether the request wants log-probabilities of the prompt."""
        return False

    @property
    def continues(self) -> bool:
        """Whether the answer continues the prompt's own text."""
        return True

    def grammar(self) -> Grammar | None:
        """The grammar of a completion, without tool calls.

        Raises:
            ValueError: it is invalid, or two are given.
        """
        names = ("response_format", "json_schema", "regex_pattern")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: give only one grammar per completion")
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
        """``n`` jobs of at most ``most`` new tokens per prompt, in the order of their choices.

        Raises:
            ValueError, TypeError: a number is out of range.
        """
        settings = self.sampling(usual, encode)
        seed = None if self.seed == -1 else self.seed  # as in TabbyAPI and llama.cpp
        return [
            Job(
                prompt=prompt,
                settings=settings,
                max_new_tokens=most,
                min_new_tokens=most if self.ban_eos_token else self.min_tokens,
                ignore_eos=self.ignore_eos,
                seed=None if seed is None else (seed + choice) % 2**62,
                stop=self.stop if self.stop is not None else (),
                grammar=grammar,
                priority=self.priority,
                logprobs=self.likeliest,
                prompt_logprobs=self.likeliest if self.scores_prompt else None,
                continues=self.continues,
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

    no_effect = frozenset({"echo"})

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool | None, Field(description="true if the last message is the assistant's")
    ] = None
    reasoning_effort: Annotated[
        str | None, Field(max_length=64, description="a variable of the chat template")
    ] = None
    reasoning_format: Annotated[
        Literal["auto", "deepseek", "none"],
        Field(description="none: reasoning stays in the answer's content"),
    ] = "auto"
    include_reasoning: Annotated[bool, Field(description="false: leave reasoning out")] = True
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | OnlyAllowed | None = None
    functions: Annotated[list[Function], Field(max_length=MOST_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | ChosenFunction | None = None
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
        """Number of choices."""
        return self.n

    @property
    def continues(self) -> bool:
        last, asked = self.messages[-1], self.continue_final_message
        if asked and (self.add_generation_prompt or not last.is_unfinished):
            raise ValueError(
                "continue_final_message needs a last message of the assistant without tool calls, "
                "and no add_generation_prompt"
            )
        return (not self.add_generation_prompt if asked is None else asked) and last.is_unfinished

    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template, such as ``enable_thinking``.

        Raises:
            ValueError: one of them is set by another field.
        """
        found = self.chat_template_kwargs or {}
        if taken := sorted(_TEMPLATE_OWN & found.keys()):
            raise ValueError(f"chat_template_kwargs can't set {taken[0]!r}: leave it out")
        if self.reasoning_effort is not None:
            found = {"reasoning_effort": self.reasoning_effort, **found}
        return {**found, "continue_final_message": True} if self.continues else found

    def chosen(self) -> Tools | None:
        """The tools that may be called; raises as :func:`chosen_tools` does."""
        if self.functions is not None:
            if self.tools is not None:
                raise ValueError("functions is the older name of tools: give tools only")
            called = self.function_call or "auto"
            name = called if isinstance(called, str) else called.name
            return chosen_tools(self.functions, name, parallel=False)
        choice, allowed = self.tool_choice or "auto", None
        if isinstance(choice, OnlyAllowed):
            allowed = [tool.function.name for tool in choice.allowed_tools.tools]
            name = choice.allowed_tools.mode
        else:
            name = choice if isinstance(choice, str) else choice.function.name
        functions = [tool.function for tool in self.tools or ()]
        if name == "auto" and not functions:
            return None
        parallel = self.parallel_tool_calls and not isinstance(choice, ChosenTool)
        return chosen_tools(functions, name, parallel, allowed)

    @property
    def most(self) -> int | None:
        """Upper bound on new tokens; None for as many as fit the context."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Generation):
    """``/v1/completions``: one prompt or several, texts or token ids."""

    no_effect = frozenset({"reasoning_effort", "reasoning_format", "include_reasoning"})

    prompt: Text | Ids | Annotated[list[Text | Ids], Field(min_length=1, max_length=_MOST_PROMPTS)]
    max_tokens: Annotated[
        int | None, Field(ge=0, description="16 if left out; null or -1 for all that fit")
    ] = None
    echo: bool = False
    suffix: Annotated[Text | None, Field(description="refused")] = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        return self.echo

    @property
    def choices(self) -> int:
        """Number of choices, over all prompts."""
        return self.n * len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or lists of ids; ValueError for an empty one, and for fill-in-the-middle."""
        if self.prompt == []:
            raise ValueError("prompt is an empty list: give a text, or at least one token id")
        if self.suffix:
            raise ValueError("suffix: exkv has no fill-in-the-middle; leave it out")
        if isinstance(self.prompt, list) and not any(isinstance(p, int) for p in self.prompt):
            return self.prompt  # type: ignore[return-value] # texts, or lists of ids
        return [self.prompt]  # type: ignore[list-item] # a text, or ids

    @property
    def most(self) -> int | None:
        return self.max_tokens if "max_tokens" in self.model_fields_set else 16


class EncodeRequest(Fields):
    """``/v1/token/encode``, as TabbyAPI's clients call it."""

    no_effect = frozenset({"decode_special_tokens"})

    text: Text | Annotated[list[Message], Field(min_length=1, max_length=4096)]
    add_bos_token: bool = True
    encode_special_tokens: bool = True

    @property
    def continues(self) -> bool:
        """Whether an answer to the chat would continue its last message."""
        return isinstance(self.text, list) and self.text[-1].is_unfinished


class DecodeRequest(Fields):
    """``/v1/token/decode``."""

    no_effect = frozenset({"add_bos_token", "encode_special_tokens"})

    tokens: Ids
    decode_special_tokens: bool = True


def _sampled(usual: SamplingParams) -> SamplingParams:
    """Defaults for a request with a temperature, which samples even from a checkpoint whose
    default is greedy."""
    if not usual.is_greedy:
        return usual
    return SamplingParams(temperature=1.0, top_k=0, top_p=1.0, token_repetition_penalty=1.0)
