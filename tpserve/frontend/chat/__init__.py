"""Chats: messages and tools to a prompt's text, and what constrains and reads the answer to it."""
