"""stratampi."""
