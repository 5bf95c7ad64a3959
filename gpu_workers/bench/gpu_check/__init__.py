"""`make gpu-check`: checks of everything that a new CUDA machine must be able to do, in less than twenty minutes."""
