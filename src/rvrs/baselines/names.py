"""The names of methods: ``mf``, ``iwae-24``, ``semi-rvrs-0.1``, ``rvrs-0.1-truncated@paper``."""

import re
from typing import NamedTuple, cast

from rvrs.baselines.task import Schedule
from rvrs.core.arguments import shown

KINDS = ("mf", "mvn", "flow", "iwae-K", "uha-K", "rvrs-Z", "rvrs-Z-truncated", "vrs-Z", "nuts")
"""K is a whole number and Z a target acceptance, as in ``"iwae-24"`` and ``"rvrs-0.1"``. Any of
them may be followed by ``@paper``, for the paper's way of training."""
LOCAL_KINDS = ("oracle", "semi-dais-K", "semi-rvrs-Z")
"""Those that only a task with local latents can be given."""

_PATTERN = re.compile(
    r"(?:(?P<plain>mf|mvn|flow|nuts|oracle)"
    r"|(?P<counted>iwae|uha|semi-dais)-(?P<count>[1-9]\d*)"
    r"|(?P<rejecting>rvrs|vrs|semi-rvrs)-(?P<acceptance>\d*\.?\d+)(?P<truncated>-truncated)?)"
    r"(?:@(?P<schedule>own|paper))?"
)


class Method(NamedTuple):
    """A method, as its name tells it.

    >>> from rvrs import baselines
    >>> baselines.parse("rvrs-0.1").target_acceptance
    0.1
    """

    kind: str
    """The name without its numbers, as ``"mf"``, ``"iwae"`` or ``"rvrs"``."""
    number: int | None = None
    """K: draws of IWAE, steps of UHA and semi-DAIS."""
    target_acceptance: float | None = None
    truncated: bool = False
    """Whether the gradient of the model's own parameters is the paper's biased one."""
    schedule: Schedule = "own"


def parse(name: str) -> Method:
    """The method of a name; ValueError with the known names for any other.

    >>> from rvrs import baselines
    >>> method = baselines.parse("iwae-24")
    >>> method.kind, method.number
    ('iwae', 24)
    """
    found = _PATTERN.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(
            f"method must be one of {', '.join(KINDS + LOCAL_KINDS)} (K a whole number as in "
            "iwae-24, Z an acceptance as in rvrs-0.1), or one of them with @paper behind; got "
            f"{shown(name)}."
        )
    parts = found.groupdict()
    schedule = cast(Schedule, parts["schedule"] or "own")
    if parts["plain"]:
        return Method(parts["plain"], schedule=schedule)
    if parts["counted"]:
        return Method(parts["counted"], number=int(parts["count"]), schedule=schedule)
    acceptance = float(parts["acceptance"])
    if not 0 < acceptance <= 1:
        raise ValueError(f"the acceptance in {name!r} must be above 0 and at most 1.")
    return Method(
        parts["rejecting"],
        target_acceptance=acceptance,
        truncated=parts["truncated"] is not None,
        schedule=schedule,
    )
