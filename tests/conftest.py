import jax

# Mixing dtypes silently is how a float32 program turns into a float64 one, or the reverse.
jax.config.update("jax_numpy_dtype_promotion", "strict")
