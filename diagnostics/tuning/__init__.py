"""Whether clients differ, and which layers can absorb it: short training from a shared model."""
