"""OpenAI's Responses API: its bodies, input items, answers and events; built on the modules of chats."""
