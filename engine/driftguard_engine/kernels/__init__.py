"""The CUDA kernels: verification, n-gram drafts and the layers of a model; and their reference in numpy."""
