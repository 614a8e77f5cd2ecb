"""What a GPU box is asked: `make gpu` and its stages, of which each adds to its files case by case."""
