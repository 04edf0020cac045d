"""OpenAI's Responses API: its bodies, input items, answers and events, over what chats are made of."""
