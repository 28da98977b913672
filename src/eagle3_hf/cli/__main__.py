"""`python -m eagle3_hf.cli`, which `torchrun` and `accelerate launch` start as a module."""

from . import main

main()
