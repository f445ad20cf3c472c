"""Imports point down only: every module may import what stands below it, and nothing else."""

import ast
from pathlib import Path

import rvrs

ROOT = Path(rvrs.__file__).parent

# From the top down; a package stands for all of its modules.
LAYERS = [
    "rvrs",
    "rvrs.cli",
    "rvrs.comparison",
    "rvrs.comparison_report",
    "rvrs.fit_command",
    "rvrs.demo",
    "rvrs.reproduction",
    "rvrs.terminal",
    "rvrs.model_file",
    "rvrs.bench",
    "rvrs.experiments",
    "rvrs.baselines",
    "rvrs.vae_training",
    "rvrs.vae",
    "rvrs.pymc",
    "rvrs.pymc_model",
    "rvrs.fitting",
    "rvrs.semi_fitting",
    "rvrs.semi_result",
    "rvrs.run",
    "rvrs.result",
    "rvrs.plots",
    "rvrs.diagnostics",
    "rvrs.processes",
    "rvrs.storage",
    "rvrs.training",
    "rvrs.semi_training",
    "rvrs.row_adam",
    "rvrs.batches",
    "rvrs.spread",
    "rvrs.guides",
    "rvrs.warmstart",
    "rvrs.datasets",
    "rvrs.files",
    "rvrs.vi",
    "rvrs.engine",
    "rvrs.settings",
    "rvrs.loop",
    "rvrs.proposals",
    "rvrs.core.evidence",
    "rvrs.core.objectives",
    "rvrs.core.threshold",
    "rvrs.core.rejection",
    "rvrs.core.randomness",
    "rvrs.core.mesh",
    "rvrs.core.problem",
    "rvrs.core.acceptance",
    "rvrs.core.arguments",
    "rvrs.core",
]

# Layers whose modules may import each other.
PACKAGES = ["rvrs.baselines", "rvrs.bench", "rvrs.experiments", "rvrs.guides", "rvrs.proposals"]


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("rvrs", *path.relative_to(ROOT).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def layer(name):
    matches = [i for i, prefix in enumerate(LAYERS) if f"{name}.".startswith(f"{prefix}.")]
    return max(matches, key=lambda i: len(LAYERS[i]))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_down_only():
    for name, path in modules():
        for target in imported(path):
            if not target.startswith("rvrs"):
                continue
            below = layer(name) < layer(target)
            same_package = layer(name) == layer(target) and LAYERS[layer(name)] in PACKAGES
            assert below or same_package, f"{name} imports {target}"


def test_the_core_knows_arrays_only():
    # NumPy's are among what users pass, and is checked.
    allowed = {"rvrs", "jax", "numpy", "jaxtyping", "math", "typing", "collections", "functools"}
    for name, path in modules():
        if name.startswith("rvrs.core"):
            assert {target.split(".")[0] for target in imported(path)} <= allowed, name
