"""Messages and tools as clients send them, and as a chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from strata.serve.errors import ApiError

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "self"})
"""What a template is given under these names is not for the client to say."""


def _with_a_name(tool: dict[str, Any]) -> dict[str, Any]:
    """Templates write tools out as the client's own JSON, so that nothing but what they read is looked at."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('a tool is {"type": "function", "function": {"name": "...", ...}}')
    return tool


Tool = Annotated[dict[str, Any], AfterValidator(_with_a_name)]


class ContentPart(BaseModel):
    """A part of a message's content; only text parts can be answered."""

    type: str
    text: str | None = None


class FunctionCall(BaseModel):
    """The function that a tool call names, with its arguments as JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(BaseModel):
    """A call in an earlier answer of the assistant."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Templates write the arguments as JSON themselves, so they take them as an object."""
        arguments: Any = self.function.arguments or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                message = "a tool call's arguments are no JSON; send them as they came in the answer"
                raise ApiError(400, message, "invalid_value", "messages") from None
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(BaseModel):
    """One message of a chat."""

    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    """Another name for the same; of other clients it is an object of theirs."""
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as the chat template takes it. Raises ApiError 400 for parts that are not text."""
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer name for the same thing
        message: dict[str, Any] = {"role": role, "content": self._text()}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        extra = {
            "reasoning_content": self.reasoning_content or self._reasoning(),
            "name": self.name,
            "tool_call_id": self.tool_call_id,
        }
        return {**message, **{name: value for name, value in extra.items() if value is not None}}

    def _reasoning(self) -> str | None:
        return self.reasoning if isinstance(self.reasoning, str) else None

    def _text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                message = f"a content part of type {part.type!r} is not supported; send parts of type 'text'"
                raise ApiError(400, message, "unsupported_value", "messages")
        # As vLLM joins them.
        return "\n".join(part.text or "" for part in self.content)


class Conversation(BaseModel):
    """What a chat's prompt is made of."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    tools: list[Tool] | None = Field(None, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def offers_tools(self) -> bool:
        """Whether the model may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def prompt(self, tokenizer: Any) -> str:
        """The text that the chat template makes of it. Raises ApiError 400 or RequestError."""
        variables: dict[str, Any] = dict(self.chat_template_kwargs or {})
        reserved = _RESERVED & variables.keys()
        if reserved:
            message = f"chat_template_kwargs names {min(reserved)}, which cannot be set there; leave it out"
            raise ApiError(400, message, "invalid_value", "chat_template_kwargs")
        if self.tool_choice not in (None, "none", "auto"):
            message = "tool_choice must be 'auto' or 'none': a model cannot be made to call a tool here"
            raise ApiError(400, message, "unsupported_value", "tool_choice")
        if self.offers_tools():
            if not tokenizer.template_takes_tools:
                message = (
                    "this model's chat template has no place for tools; leave tools out, or use another model"
                )
                raise ApiError(400, message, "unsupported_value", "tools")
            variables["tools"] = self.tools
        messages: Sequence[dict[str, Any]] = [message.for_template() for message in self.messages]
        text: str = tokenizer.apply_chat_template(
            messages, add_generation_prompt=self.add_generation_prompt is not False, **variables
        )
        return text
