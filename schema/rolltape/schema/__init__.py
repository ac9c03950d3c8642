"""What an event is. Needs pyarrow (and the numpy that comes beside it), nothing heavier."""
