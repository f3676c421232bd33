"""The operations of a step. `reference` states each in plain torch, for any device; other backends must agree with it."""
