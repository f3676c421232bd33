"""Clients' grammars are compiled by a child first, which may spend no more time and memory on one than it is given."""
