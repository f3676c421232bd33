"""Chats: messages to a prompt's text, and an answer's text to the parts of a message."""
