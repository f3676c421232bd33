"""The text of an answer, taken apart into reasoning, content and calls of tools as it comes."""
