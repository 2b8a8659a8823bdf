"""The draft worker: a process that runs a draft model on the CPU and grows draft trees."""
