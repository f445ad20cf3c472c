"""Reparameterized variational rejection sampling on JAX and NumPyro."""

from rvrs import proposals as proposals
from rvrs import vi as vi
from rvrs.guides import AutoRVRS as AutoRVRS

__all__ = ["AutoRVRS", "proposals", "vi"]
