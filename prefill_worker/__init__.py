"""The prefill half of an instance: first token, announcing frames, commit."""
