"""From logits to a token: bans, penalties, log probabilities and the draw, on the host or on the device."""
