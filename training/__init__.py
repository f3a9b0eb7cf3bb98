"""Training models to summarise their own reasoning: traces, augmentation, LoRA."""
