"""A model and its arguments: runs of it, alone or for many draws at once, and the values of its sites."""
