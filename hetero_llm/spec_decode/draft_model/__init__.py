"""Draft models, engine side: proposer and client of the draft worker; chains on the device."""
