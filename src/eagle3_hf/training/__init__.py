"""Training a draft: data and features, the objective, the trainer, and recipes that put them together."""
