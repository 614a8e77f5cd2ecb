"""Request bodies of OpenAI's API. Every field is honoured, refused, or described as "without effect".

OpenAI fields without support in the engine are accepted only at their neutral value. `timeout`, `top_k`, `min_p`,
`min_tokens`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`, `draft_length`, `continuous_usage_stats` and
`response_format` in completions are extensions. Null fields count as absent. Validation stops at the first error, which
bounds its time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from bass_core.exactness.processors import Bias, MinTokens, Penalties, Processor
from bass_lab.grammar import Grammar

MOST_STOPS = 16
MOST_LIKELY = 20
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
LONGEST_GRAMMAR = 2**16  # characters; compiling takes time and memory
Source = Annotated[str, StringConstraints(max_length=LONGEST_GRAMMAR)]
BiasValue = Annotated[float, Field(ge=-100, le=100)]
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
TAGS = ("<str>", "<int>", "<list>")  # tags of union branches, which pydantic adds to an error's location


def _by(tag: Callable[[Any], str]) -> Discriminator:
    return Discriminator(tag, custom_error_type="branch", custom_error_message="this type is not accepted")


def _kind(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _kind_of_items(values: list) -> str:
    return _kind(values[0]) if values else "<str>"


Text = Annotated[str, Tag("<str>")]
Prompts = Annotated[
    Annotated[Items[str], Tag("<str>")]
    | Annotated[Items[TokenId], Tag("<int>")]
    | Annotated[Items[Items[TokenId]], Tag("<list>")],
    _by(_kind_of_items),
]
Stops = Annotated[
    Annotated[Stop, Tag("<str>")] | Annotated[Items[Stop], Field(max_length=MOST_STOPS), Tag("<list>")], _by(_kind)
]


def neutral(about: str) -> Any:
    return Field(None, description=f"{about}: the engine does not support other values")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Return the fields without nulls."""
        return {name: value for name, value in given.items() if value is not None} if type(given) is dict else given


def unused(kind: str) -> Any:
    return Field(None, description=f"{kind} without effect")


class TextFormat(_Body):
    type: Literal["text"]


class JsonFormat(_Body):
    type: Literal["json_object"]

    def grammar(self) -> Grammar:
        """Return the grammar of JSON objects."""
        return Grammar.json()


class Schema(_Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(_Body):
    type: Literal["json_schema"]
    json_schema: Schema

    def grammar(self) -> Grammar:
        """Return the grammar of JSON by the schema. Raises ValueError for a long schema."""
        if len(json.dumps(self.json_schema.schema_)) > LONGEST_GRAMMAR:
            raise ValueError(f"the schema has more than {LONGEST_GRAMMAR} characters")
        return Grammar.json(self.json_schema.schema_)


class RegexFormat(_Body):
    type: Literal["regex"]
    regex: Source

    def grammar(self) -> Grammar:
        """Return the grammar of the expression's matches."""
        return Grammar.regex(self.regex)


class LarkFormat(_Body):
    type: Literal["lark"]
    lark: Source

    def grammar(self) -> Grammar:
        """Return the grammar of the rules."""
        return Grammar.lark(self.lark)


Format = Annotated[TextFormat | JsonFormat | SchemaFormat | RegexFormat | LarkFormat, Discriminator("type")]


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool = False


class Sampled(_Body):
    """Fields of both kinds of requests."""

    model: str | None = Field(None, description="the name of the served model, or null")
    n: int | None = Field(1, ge=1, le=4096, description="an integer >= 1, the answers per prompt")
    temperature: float | None = Field(1.0, ge=0, le=100, description="a number from 0 (greedy) to 100")
    top_p: float | None = Field(1.0, gt=0, le=1, description="a number in (0, 1]")
    top_k: int | None = Field(0, ge=0, lt=2**31, description="an integer >= 0; 0 is off")
    min_p: float | None = Field(0.0, ge=0, le=1, description="a number in [0, 1]")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="a number from 0.01 to 100; 1 is off")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="a signed 64-bit integer")
    stop: Stops | None = Field(
        None, description=f"a string or up to {MOST_STOPS} strings, each with 1 to 1000 characters"
    )
    ignore_eos: bool | None = Field(False, description="true or false")
    stream: bool | None = Field(False, description="true or false")
    stream_options: StreamOptions | None = Field(
        None, description='an object {"include_usage": true}; "continuous_usage_stats": true adds counts to every chunk'
    )
    timeout: float | None = Field(None, gt=0, le=10**6, description="seconds > 0 until rows end with a partial text")
    user: str | None = unused("a string")
    metadata: dict[str, str] | None = unused("strings by name,")
    presence_penalty: float | None = Field(0.0, ge=-2, le=2, description="a number from -2 to 2")
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2, description="a number from -2 to 2")
    logit_bias: dict[Annotated[str, StringConstraints(pattern=r"^(0|[1-9]\d{0,8})$")], BiasValue] | None = Field(
        None, max_length=1024, description="up to 1024 numbers from -100 to 100, by token id"
    )
    min_tokens: int | None = Field(0, ge=0, lt=2**31, description="an integer >= 0, the tokens before an end")
    stop_token_ids: Items[TokenId] | None = Field(
        None, max_length=1024, description="up to 1024 token ids that end a row"
    )
    draft_length: int | None = Field(
        None, ge=0, le=256, description="an integer from 0 (no drafts) to 256; null: the server's policy"
    )
    response_format: Format | None = Field(
        None,
        description='{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}}, '
        '{"type": "regex", "regex": …} or {"type": "lark", "lark": …}',
    )

    @property
    def processors(self) -> dict[str, Callable[[], Processor]]:
        """Functions for the request's processors, by field. Some raise ValueError."""
        made: dict[str, Callable[[], Processor]] = {}
        if self.presence_penalty or self.frequency_penalty:
            made["presence_penalty"] = lambda: Penalties(1.0, self.presence_penalty, self.frequency_penalty)
        if self.logit_bias:
            made["logit_bias"] = lambda: Bias({int(each): value for each, value in self.logit_bias.items()})
        if self.min_tokens:
            made["min_tokens"] = lambda: MinTokens(self.min_tokens)
        if self.response_format is not None and not isinstance(self.response_format, TextFormat):
            made["response_format"] = self.response_format.grammar
        return made


class CompletionBody(Sampled):
    """POST /v1/completions."""

    @property
    def likeliest(self) -> int:
        """Number of likeliest tokens to return at each position."""
        return self.logprobs or 0

    prompt: Annotated[Text | Annotated[Prompts, Tag("<list>")], _by(_kind)] = Field(
        description="a text, a list of texts, token ids, or a list of lists of token ids"
    )
    max_tokens: int | None = Field(16, ge=0, lt=2**31, description="an integer >= 0")
    logprobs: int | None = Field(
        None, ge=0, le=MOST_LIKELY, description="an integer from 0 to 20, the likeliest tokens beside the chosen one"
    )
    echo: Literal[False] | None = neutral("false")
    best_of: Annotated[int, Field(ge=1, le=1)] | None = neutral("1")
    suffix: Literal[""] | None = neutral("an empty string")


class Part(_Body):
    type: Literal["text"]
    text: str


Nothing = Annotated[list | dict, Field(max_length=0)]


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | Annotated[Items[Part], Tag("<list>")], _by(_kind)]
    name: str | None = None
    # Fields of OpenAI's answers, empty in this server's answers
    refusal: Literal[""] | None = None
    annotations: Nothing | None = None
    audio: Nothing | None = None
    tool_calls: Nothing | None = None
    function_call: Nothing | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Return the fields without nulls. An assistant's message without content has an empty text."""
        given = _Body._without_nulls(given)
        return {"content": ""} | given if type(given) is dict and given.get("role") == "assistant" else given

    @property
    def plain(self) -> dict[str, str]:
        """The message in the format of chat templates."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class ChatBody(Sampled):
    """POST /v1/chat/completions."""

    @property
    def likeliest(self) -> int:
        """Number of likeliest tokens to return at each position."""
        return self.top_logprobs or 0

    messages: Items[Message] = Field(
        min_length=1, description='a list of {"role": …, "content": …}, content a text or parts of type "text"'
    )
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="an integer >= 0; null: up to the context length")
    max_completion_tokens: int | None = Field(None, ge=0, lt=2**31, description="an integer >= 0; same as max_tokens")
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY, description="an integer from 0 to 20; needs logprobs")
    tools: Annotated[list, Field(max_length=0)] | None = neutral("an empty list")
    tool_choice: Literal["none", "auto"] | None = neutral('"none"')
    modalities: Items[Literal["text"]] | None = neutral('["text"]')
    store: Literal[False] | None = neutral("false")
    parallel_tool_calls: bool | None = unused("true or false,")
    prompt_cache_key: str | None = unused("a string")
    reasoning_effort: str | None = unused("a string")
    safety_identifier: str | None = unused("a string")
    service_tier: str | None = unused("a string")
    verbosity: str | None = unused("a string")


def complaint(body: type[BaseModel], errors: list[dict[str, Any]]) -> tuple[str, str | None]:
    """Return a line about the first error of a request, and the path of the field, such as messages.1.content."""
    first = errors[0]
    where = [str(each) for each in first["loc"][1:] if each not in TAGS]
    if first["type"] == "json_invalid" or not where:
        return "the body must be one JSON object", None
    path = " ".join(".".join(where).split())[:100]
    problems = {"extra_forbidden": "this field is unknown", "missing": "this field is missing"}
    problem = problems.get(first["type"], " ".join(first["msg"].split())[:200])
    field = body.model_fields.get(where[0])
    takes = (
        f"{where[0]} must be {field.description}" if field else f"The fields are {', '.join(sorted(body.model_fields))}"
    )
    return f"{path}: {problem}. {takes}", path
