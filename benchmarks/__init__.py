"""One script for each reproduced result or measured bar: `python -m benchmarks.NAME`, from the repository root."""
