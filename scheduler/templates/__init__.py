"""Chat templates: where they are stored, and the killable processes that render them."""
