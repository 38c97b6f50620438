"""The parts of `benches/gpu_transfer.py`: what is measured on a GPU, and the verdicts."""
