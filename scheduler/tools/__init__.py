"""Tool calls: the tools of a request, calls in the history, forced calls, and the parsers of models' formats."""
