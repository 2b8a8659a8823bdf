"""Services of the machine for every package: native builds, logs, environment, topology."""
