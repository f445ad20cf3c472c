"""What a unit of Table 1 does: train a variational autoencoder by one method, and judge it.

What comes of it, and why it is done in this way, is in :mod:`rvrs.experiments.vae`.
"""

import base64
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rvrs import datasets, vae_training
from rvrs.core.problem import PRNGKey
from rvrs.experiments import vae_steps
from rvrs.experiments.experiment import DivergedError, Outcome, Report, Unit
from rvrs.vae import VAE, Params, apply_network
from rvrs.vae_training import Method

REFERENCE, STEP_TIMES = "standard", "step-times"
TRAINED = (
    REFERENCE,
    *("iwae-10", "iwae-20", "iwae-40"),
    *("iwae-10-warm", "iwae-20-warm"),
    *("uha-10", "uha-20"),
    *("rvrs-0.1", "rvrs-0.05", "rvrs-0.025"),
)
"""Those of the paper's table, and IWAE from where RVRS and UHA start."""

# Images that a bound is estimated for at once.
_IMAGES_AT_ONCE = 100
# Share of all steps that may be without a finite loss.
_MOST_SKIPPED = 0.01
# Samples of the decoder that are kept for a picture.
_NUM_PICTURES = 25


class Kind(NamedTuple):
    """A method as its name tells it."""

    name: str
    """``"standard"``, ``"iwae"``, ``"uha"`` or ``"rvrs"``."""
    number: float
    """K or Z; of the standard ELBO, 1."""
    warm: bool
    """Whether it starts from the networks of the standard one."""


def parse(method: str) -> Kind:
    """Take a name of :data:`TRAINED` apart."""
    name, *rest = method.split("-")
    number = float(rest[0]) if rest else 1.0
    return Kind(name, number, name in ("uha", "rvrs") or "warm" in rest)


def build(autoencoder: VAE, kind: Kind) -> Method:
    """The method that a name stands for."""
    if kind.name == "standard":
        return vae_training.standard(autoencoder)
    if kind.name == "rvrs":
        return vae_training.rvrs(autoencoder, kind.number)
    return vae_training.METHODS[kind.name](autoencoder, int(kind.number))


def autoencoder(settings: Mapping[str, Any], num_pixels: int) -> VAE:
    """The networks, of the size that the settings ask for."""
    return VAE(num_pixels, settings["num_latent"], settings["num_hidden"])


def schedule(settings: Mapping[str, Any], kind: Kind, num_steps: int) -> optax.Schedule:
    """Adam's rates: falling along a cosine, or divided by ten after one and two thirds."""
    start = "warm_learning_rate" if kind.warm else "learning_rate"
    rate = settings["uha_learning_rate" if kind.name == "uha" else start]
    if settings["schedule"] == "cosine":
        return optax.cosine_decay_schedule(rate, num_steps)
    thirds = {num_steps // 3: 0.1, 2 * num_steps // 3: 0.1}
    return optax.piecewise_constant_schedule(rate, thirds)


def run(
    unit: Unit,
    settings: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    report: Report,
    *,
    checkpoint: Path | None = None,
) -> Outcome:
    """Train and judge one method, or time the steps of all."""
    images = datasets.load_images(unit.dataset)
    if unit.method == STEP_TIMES:
        return _step_times(images.train, settings, report)
    kind = parse(unit.method)
    networks = autoencoder(settings, images.train.shape[1])
    if kind.warm and not arrays:
        raise DivergedError(f"{unit.method} starts from {REFERENCE}, which has failed")
    train_key, judge_key = jax.random.split(jax.random.key(unit.seed))
    num_steps = settings["num_epochs"] * (len(images.train) // settings["batch_size"])
    marks: list[tuple[int, float]] = []

    num_skipped = 0

    def callback(done: int, losses: np.ndarray) -> None:
        nonlocal num_skipped
        finite = np.isfinite(losses)
        num_skipped += int(np.sum(~finite))
        if num_skipped > _MOST_SKIPPED * num_steps:
            raise DivergedError(f"{num_skipped} of {done} steps had no finite loss")
        marks.append((done, time.perf_counter()))
        report(0.9 * done / num_steps, f"loss {losses[finite].mean():.2f}")

    exists = checkpoint is not None and checkpoint.is_file()
    try:
        state, losses = vae_training.train(
            build(networks, kind),
            train_key,
            images.train,
            num_epochs=settings["num_epochs"],
            batch_size=settings["batch_size"],
            learning_rate=schedule(settings, kind, num_steps),
            params=_networks(networks, arrays) if kind.warm else None,
            progress=False,
            callback=callback,
            checkpoint=checkpoint,
            resume=checkpoint if exists else None,
            description={"method": unit.method, "settings": dict(settings)},
        )
    except DivergedError:
        if checkpoint is not None:
            # To go on from there would end in the same way.
            checkpoint.unlink(missing_ok=True)
        raise
    figures: dict[str, Any] = {"seconds_per_step": _median_seconds(marks)}
    figures["last_loss"] = float(np.nanmean(losses[-len(losses) // 10 :]))
    figures["num_skipped"] = num_skipped
    figures |= _judge(judge_key, networks, kind, state.params, images, settings, report)
    figures["samples"] = _pictures(judge_key, networks, state.params)
    kept = _flat(state.params) if unit.method == REFERENCE else {}
    return Outcome(figures, kept)


def _median_seconds(marks: Sequence[tuple[int, float]]) -> float | None:
    """Of a step; None where there are not two marks. The first one comes after compilation."""
    if len(marks) < 2:
        return None
    steps, seconds = np.diff(np.array(marks), axis=0).T
    return float(np.median(seconds / steps))


def _judge(
    rng_key: PRNGKey,
    networks: VAE,
    kind: Kind,
    params: Params,
    images: datasets.Images,
    settings: Mapping[str, Any],
    report: Report,
) -> dict[str, Any]:
    """Bounds per image on the first of the training and of the test images."""
    figures: dict[str, Any] = {}
    for place, part in enumerate(("train", "test")):
        some = getattr(images, part)[: settings["num_evaluated"]]
        key = jax.random.fold_in(rng_key, place)
        report(0.9 + 0.03 * place, f"bound on {part} images")
        value, error = own_bound(
            key, networks, kind, params, some, num_draws=settings["num_bound_draws"]
        )
        figures |= {f"{part}_bound": value, f"{part}_bound_error": error}
    report(0.96, "importance-weighted bound on test images")
    some = images.test[: settings["num_evaluated"]]
    bounds = np.asarray(
        networks.importance_bound(
            rng_key, params, some, num_samples=settings["num_importance_draws"]
        ),
        np.float64,
    )
    figures["log_likelihood"] = float(bounds.mean())
    broken = [name for name, value in figures.items() if not math.isfinite(value)]
    if broken:
        raise DivergedError(f"{', '.join(broken)} not finite")
    return figures


def own_bound(
    rng_key: PRNGKey, networks: VAE, kind: Kind, params: Params, images: Any, *, num_draws: int
) -> tuple[float, float]:
    """The bound that a method maximises, per image, and its Monte Carlo standard error.

    ``num_draws`` is that per image: draws of the encoder, steps of all annealed ones of UHA,
    proposals of RVRS (beyond those that its thresholds come from).
    """
    if kind.name == "rvrs":
        guide = vae_training.rvrs_guide(networks, kind.number, sampler="exact")
        found = guide.evaluate(rng_key, params, images, num_local=num_draws)
        return float(found.elbo) / len(images), float(found.elbo_error) / len(images)
    method = build(networks, kind)
    # That of the standard ELBO is 1.
    repeats = max(4, num_draws // int(kind.number))

    @jax.jit
    def losses(keys: jax.Array, images: jax.Array) -> jax.Array:
        return jax.lax.map(lambda key: method.loss(key, params, images), keys)

    totals = np.zeros(repeats)
    for number, first in enumerate(range(0, len(images), _IMAGES_AT_ONCE)):
        some = images[first : first + _IMAGES_AT_ONCE]
        keys = jax.random.split(jax.random.fold_in(rng_key, number), repeats)
        totals -= len(some) * np.asarray(losses(keys, jnp.asarray(some)), np.float64)
    totals /= len(images)
    return float(totals.mean()), float(totals.std(ddof=1) / math.sqrt(repeats))


def _pictures(rng_key: PRNGKey, networks: VAE, params: Params) -> str:
    """Probabilities of pixels at draws of the prior, as bytes that JSON can hold."""
    z = jax.random.normal(rng_key, (_NUM_PICTURES, networks.num_latent))
    probabilities = jax.nn.sigmoid(apply_network(params["decoder"], z))
    levels = np.round(255 * np.asarray(probabilities)).astype(np.uint8)
    return base64.b64encode(levels.tobytes()).decode()


def pictures(figures: Mapping[str, Any]) -> np.ndarray:
    """The square images that :func:`run` has stored, ``(n, side, side)`` from 0 to 1."""
    levels = np.frombuffer(base64.b64decode(figures["samples"]), np.uint8)
    side = math.isqrt(levels.size // _NUM_PICTURES)
    return levels.reshape(_NUM_PICTURES, side, side) / 255


def _flat(params: Params) -> dict[str, np.ndarray]:
    """Weights of both networks by names."""
    return {
        f"{network}-{place}-{name}": np.asarray(value)
        for network in ("encoder", "decoder")
        for place, layer in enumerate(params[network])
        for name, value in layer._asdict().items()
    }


def _networks(networks: VAE, arrays: Mapping[str, np.ndarray]) -> Params:
    """What :func:`_flat` made flat."""
    like = jax.eval_shape(networks.init, jax.random.key(0))
    return {
        network: tuple(
            type(layer)(
                *(jnp.asarray(arrays[f"{network}-{place}-{name}"]) for name in layer._fields)
            )
            for place, layer in enumerate(layers)
        )
        for network, layers in like.items()
    }


def _step_times(images: np.ndarray, settings: Mapping[str, Any], report: Report) -> Outcome:
    report(0.0, "all methods in turns")
    networks = autoencoder(settings, images.shape[1])
    found = vae_steps.measure(
        {name: build(networks, parse(name)) for name in settings["timed"]},
        images[: settings["num_timed"]],
        batch_size=settings["batch_size"],
        num_steps=settings["steps_per_turn"],
    )
    return Outcome({"milliseconds": {each.name: each.milliseconds for each in found}})
