"""From CUDA sources to launches: compiled by NVRTC, cached as cubins, loaded and launched by the driver."""
