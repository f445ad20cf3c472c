"""Reparameterized variational rejection sampling on JAX and NumPyro."""

from rvrs import proposals as proposals
from rvrs import pymc as pymc
from rvrs import vi as vi
from rvrs.fitting import fit as fit
from rvrs.fitting import load as load
from rvrs.guides import AutoRVRS as AutoRVRS
from rvrs.guides import AutoSemiRVRS as AutoSemiRVRS
from rvrs.result import Fit as Fit
from rvrs.semi_result import SemiFit as SemiFit

__all__ = [
    "AutoRVRS",
    "AutoSemiRVRS",
    "Fit",
    "SemiFit",
    "fit",
    "load",
    "proposals",
    "pymc",
    "vi",
]
