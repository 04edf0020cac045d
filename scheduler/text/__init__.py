"""From token ids to the client's text, one token and one choice at a time."""
