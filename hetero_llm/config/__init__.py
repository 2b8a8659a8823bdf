"""The table of arguments and the frozen configuration objects that are made of it."""
