"""Anthropic's Messages API: its bodies, conversations, answers and errors, over what chats are made of."""
