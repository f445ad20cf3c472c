"""The method itself, in JAX alone: B independent targets with S draws each, ``(S, B, ...)``."""
