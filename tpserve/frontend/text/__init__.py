"""Text as clients see it: of ids as they come, with its logprobs, up to a stop string."""
