"""The offline API's parts: a model in the user's own process, without HTTP."""
