"""Reparameterized variational rejection sampling on JAX."""

from rvrs import proposals as proposals
from rvrs import vi as vi

__all__ = ["proposals", "vi"]
