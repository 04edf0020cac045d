"""From logits to a token: bans, penalties, likelihoods and the draw, on the host or on the device."""
