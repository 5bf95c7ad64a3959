"""`make gpu-check`: everything that a new CUDA machine must be able to do, checked in less than twenty minutes."""
