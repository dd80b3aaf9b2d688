"""What sparring does on one GPU, measured by parts: `python -m benchmarks.gpu`."""
