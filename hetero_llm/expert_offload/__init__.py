"""Experts of a mixture in two places: how many the GPU's bank holds (`plan`), which ones
(`placement`), and what a run remembers of their use (`profile`). No torch."""
