"""The prefill half of an instance: first token, frame announcements, commit."""
