"""The body of routes that read texts without continuing them: `input`, or `messages` in the model's chat template."""

from scheduler.api.chat import chat_options
from scheduler.api.conversation import ConversationBody
from scheduler.api.field_schemas import AnyPrompt
from scheduler.api.inputs import encode_inputs, fitting, read_inputs
from scheduler.api.messages import read_messages
from scheduler.api.pooling_body import PoolingBody
from scheduler.app_context import AppContext
from scheduler.images.image_part import images_in
from scheduler.tokenizer.truncation import truncate_prompt
from wire.errors import InvalidRequest


class InputBody(ConversationBody, PoolingBody):
    """The fields of a text or a conversation to read."""

    input: AnyPrompt = None
    add_generation_prompt: bool | None = False


async def prompts_of(context: AppContext, body: InputBody) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each text. Raises InvalidRequest, PromptTooLong."""
    tokens, keep, side = context.tokens, body.truncate_prompt_tokens, body.truncation_side or "left"
    if (body.input is None) is (body.messages is None):
        raise InvalidRequest("specify either input or messages", "input")
    if body.messages is None:
        longest = tokens.max_model_len if keep is None else None
        inputs = read_inputs(body.input, max_inputs=context.config.options.max_inputs, longest=longest)
        add_special = body.add_special_tokens is not False
        return await encode_inputs(inputs, tokens, add_special_tokens=add_special, keep=keep, side=side)
    messages = read_messages(body.messages)
    for image in images_in(messages):
        raise InvalidRequest(f"{image.path}: this route does not take images", image.path)
    ids = await tokens.encode_chat(messages, chat_options(body))
    return (fitting(truncate_prompt(ids, keep, room=tokens.max_model_len, side=side), tokens, "messages"),)
