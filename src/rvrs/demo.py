"""The demonstrations of ``rvrs demo``: a table and a figure each."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rvrs import files, terminal

if TYPE_CHECKING:
    import jax
    from rich.console import Console
    from rich.table import Table

    from rvrs.experiments import breast_cancer, funnel

_MARGINALS, _FUNNEL = "breast-cancer.png", "funnel.png"


def run(example: str, out: Path, seed: int, steps: int | None) -> None:
    """Show an example, and leave with one line if that fails."""
    try:
        with terminal.results_in("rvrs demo", out):
            (run_funnel if example == "funnel" else run_breast_cancer)(out, seed, steps)
    except KeyboardInterrupt:
        sys.exit("rvrs demo: interrupted.")


def run_breast_cancer(out: Path, seed: int, steps: int | None) -> None:
    """Fit the breast-cancer data by all methods, compare them with NUTS, and draw marginals."""
    import jax
    from rich.console import Console

    from rvrs.experiments import breast_cancer

    console = Console()
    num_steps = breast_cancer.NUM_STEPS if steps is None else steps
    try:
        dataset = breast_cancer.load()
    except ImportError as error:
        sys.exit(f"rvrs demo: {error}")
    terminal.say(
        console,
        f"Logistic regression, {len(dataset.covariates)} patients, "
        f"{dataset.covariates.shape[1]} coefficients",
    )
    reference_key, *keys = jax.random.split(jax.random.key(seed), 1 + len(breast_cancer.METHODS))
    fits = []
    with terminal.progress(console) as progress:
        task = progress.add_task("NUTS", total=1, status="reference")
        reference = breast_cancer.reference(reference_key, dataset)
        progress.update(task, completed=1)
        for key, method in zip(keys, breast_cancer.METHODS, strict=True):
            task = progress.add_task(method.name, total=num_steps, status="compiling")
            report = terminal.reporter(progress, task, num_steps)
            found = breast_cancer.fit(key, method, dataset, num_steps=num_steps, callback=report)
            progress.update(task, status=f"ELBO {found.fit.elbo:.3f}")
            fits.append(found)
    console.print(_comparison_table(fits, reference))
    for found in fits:
        for warning in found.fit.warnings:
            # What is wrong; what to do about it is the table's message.
            terminal.say(console, f"rvrs.fit warns of {found.name}: {warning.split(':')[0]}.")
    with files.together(out) as folder:
        breast_cancer.plot(fits, reference, dataset, folder / _MARGINALS)
    terminal.say(console, f"Marginals: {out / _MARGINALS}")


def _comparison_table(
    fits: "list[breast_cancer.MethodFit]", reference: "breast_cancer.Reference"
) -> "Table":
    from rich import box
    from rich.table import Table

    from rvrs.experiments import breast_cancer

    # Without lines between the columns it fits into 80 characters.
    table = Table(
        title="Logistic regression on breast cancer",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("method", no_wrap=True)
    headings = (
        *("ELBO", "std.\nerror", "log\nevidence", "accep-\ntance", "k-hat", "mean\nerror¹"),
        *("sd\nratio²", "sec-\nonds³"),
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.caption = (
        "¹ largest error of a posterior mean, in standard deviations of NUTS\n"
        "² least and largest standard deviation over that of NUTS\n"
        "³ including compilation"
    )
    for name, fit, draws in fits:
        comparison = breast_cancer.compare(draws, reference)
        table.add_row(
            name,
            f"{fit.elbo:.3f}",
            f"{fit.elbo_error:.3f}",
            f"{fit.log_evidence:.2f}",
            f"{fit.acceptance:.3f}",
            f"{fit.khat:.2f}",
            f"{comparison.mean_error:.2f}",
            f"{comparison.min_sd_ratio:.2f}-{comparison.max_sd_ratio:.2f}",
            f"{fit.seconds:.0f}",
        )
    table.add_row("NUTS", *[""] * (len(headings) - 1), f"{reference.seconds:.0f}")
    return table


def run_funnel(out: Path, seed: int, steps: int | None) -> None:
    """Fit the paper's funnel and draw its Figure 1."""
    import jax
    from rich.console import Console

    from rvrs.experiments import funnel

    console = Console()
    num_steps = funnel.NUM_STEPS if steps is None else steps
    fits = _fit_funnels(console, jax.random.key(seed), num_steps)
    console.print(_funnel_table(fits))
    with files.together(out) as folder:
        funnel.plot(fits, folder / _FUNNEL)
    terminal.say(console, f"Figure 1: {out / _FUNNEL}")


def _fit_funnels(console: "Console", rng_key: "jax.Array", num_steps: int) -> list["funnel.Fit"]:
    from rvrs.experiments import funnel

    fits = []
    with terminal.progress(console) as progress:
        for target_acceptance in funnel.TARGET_ACCEPTANCES:
            name = funnel.method_name(target_acceptance)
            task = progress.add_task(name, total=num_steps, status="compiling")
            report = terminal.reporter(progress, task, num_steps)
            fits.append(
                funnel.fit(
                    rng_key,
                    target_acceptance,
                    num_steps=num_steps,
                    callback=lambda steps, _state, info, report=report: report(steps, info),
                )
            )
            progress.update(task, status=f"ELBO {fits[-1].elbo:.3f}")
    return fits


def _funnel_table(fits: "list[funnel.Fit]") -> "Table":
    from rich.table import Table

    table = Table(title="Figure 1: funnel, best possible ELBO 0")
    table.add_column("method")
    for heading in ("ELBO", "std. error", "acceptance", "T", "seconds*"):
        table.add_column(heading, justify="right")
    table.caption = "* of training, including compilation"
    for fit in fits:
        table.add_row(
            fit.name,
            f"{fit.elbo:.4f}",
            f"{fit.elbo_error:.4f}",
            f"{fit.acceptance:.4f}",
            f"{fit.threshold:.2f}",
            f"{fit.seconds:.1f}",
        )
    return table
