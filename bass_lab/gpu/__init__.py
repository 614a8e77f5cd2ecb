"""GPU measurements: `make gpu` and its stages. Each stage appends to its files case by case."""
