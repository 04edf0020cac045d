"""Chat templates: where they are written, and the processes that render them and can be killed."""
