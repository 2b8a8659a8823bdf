"""What any part may need of the machine: native builds, logs, environment, topology."""
