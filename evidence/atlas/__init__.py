"""What the planner's recipes need on any card, for models that people fine-tune: `data/atlas`."""
