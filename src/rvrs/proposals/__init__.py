"""Families of proposal distributions over flat vectors.

Calling a constructor twice gives the same object, so that compiled programs are found again.
"""

from rvrs.proposals.affine_flow import Flow as Flow
from rvrs.proposals.family import Proposal as Proposal
from rvrs.proposals.flow import coupling_flow as coupling_flow
from rvrs.proposals.flow import masked_autoregressive_flow as masked_autoregressive_flow
from rvrs.proposals.given_flow import from_flowjax as from_flowjax
from rvrs.proposals.normal import DiagonalNormal as DiagonalNormal
from rvrs.proposals.normal import FullRankNormal as FullRankNormal
from rvrs.proposals.normal import LowRankNormal as LowRankNormal
from rvrs.proposals.normal import diagonal_normal as diagonal_normal
from rvrs.proposals.normal import full_rank_normal as full_rank_normal
from rvrs.proposals.normal import low_rank_normal as low_rank_normal

__all__ = [
    "DiagonalNormal",
    "Flow",
    "FullRankNormal",
    "LowRankNormal",
    "Proposal",
    "coupling_flow",
    "diagonal_normal",
    "from_flowjax",
    "full_rank_normal",
    "low_rank_normal",
    "masked_autoregressive_flow",
]
