"""The works of a suite that goes through the data sets of logistic regression."""

from collections.abc import Callable

from rvrs.bench import works
from rvrs.bench.report import Row
from rvrs.bench.works import Work


def measure_each(measure: Callable[[Work], list[Row]], *, quick: bool) -> tuple[list[Row], str]:
    """The rows of all data sets, and in words which were left out because they are not there.

    ``quick`` is one small set of made-up data instead. Raises ``FileNotFoundError`` if no data set
    is there at all.
    """
    if quick:
        return measure(works.made_up_logistic(40, 5)), ""
    rows, missing = [], []
    for name in works.LOGISTIC:
        try:
            work = works.logistic(name)
        except FileNotFoundError:
            if name == works.LOGISTIC[-1] and not rows:
                raise
            missing.append(name)
            continue
        rows += measure(work)
    text = f" Left out, as there are no data: {', '.join(missing)} (see rvrs.datasets)."
    return rows, text if missing else ""
