"""One module per command of `python -m ci`; `ci.__main__` picks up whatever is here.

The module's name is the command's (`base_image.py` is `base-image`), its function `main` is what Typer runs, and that
function's docstring is the help. `main` returns an ExitCode (or None for 0) and lets every CiError rise. Modules that
are no command (`options`) have no `main`.
"""
