"""Between text and token ids: what scheduler/tokens.py has of its own beside the tokenizers library."""
