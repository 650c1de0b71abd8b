"""The tests of strobe.jax, behind .ci/doors/jax: JAX is no requirement of the other tests. Four devices of the CPU stand for four GPUs."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
