"""TPU kernels and their jnp definitions; knows nothing of the model."""
