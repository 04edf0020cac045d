"""Reasoning: the formats in which models write their thinking, and the parser that separates it from the answer."""
