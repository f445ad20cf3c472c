"""NumPyro guides; the only rooms that know NumPyro."""

from rvrs.guides.auto_rvrs import AutoRVRS as AutoRVRS
from rvrs.guides.auto_semi_rvrs import AutoSemiRVRS as AutoSemiRVRS

__all__ = ["AutoRVRS", "AutoSemiRVRS"]
