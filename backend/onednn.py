"""oneDNN's caches of compiled kernels, bounded."""

__all__ = ["BOUNDED_KERNEL_CACHES"]

# oneDNN compiles a kernel for every shape that it sees, and PyTorch keeps what wraps it; both keep 1,024 by default.
# The rows of agents' episodes hardly ever have the same length twice, so most of what full caches hold is never used
# again. What repeats, layer after layer within one row, is far fewer. Read when torch is first used, so it goes into a
# process's environment before.
BOUNDED_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
