"""Anthropic's Messages API: its bodies, conversations, answers and errors; built on the modules of chats."""
