"""HTTP: what comes in, and how answers go out."""
