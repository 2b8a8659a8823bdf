"""Make the parts of an engine: models, runners, drafters, tiers. `engine/factory.py` joins them."""
