"""The process that hosts both halves over one engine and one pool."""
