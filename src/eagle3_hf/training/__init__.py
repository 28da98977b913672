"""Training a draft: the objective (`objective.py`). The loop itself is in `recipes/`."""
