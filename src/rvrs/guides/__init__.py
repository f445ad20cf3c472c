"""NumPyro guides; the only rooms that know NumPyro."""

from rvrs.guides.auto_rvrs import AutoRVRS as AutoRVRS

__all__ = ["AutoRVRS"]
