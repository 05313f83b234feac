"""Against engines that nobody here wrote: `make live` installs and runs them.

llama.cpp's server is built once, vLLM has an environment of its own; both are kept outside the repository
(`install.py`). Those that need only llama-server and take seconds run in `make test` where its binary is.
"""
