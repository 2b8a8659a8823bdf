"""Several processes that run one model: their life, the channel of steps, collectives."""
