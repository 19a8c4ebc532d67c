"""Find what is wrong with a run from its files: silent faults, with evidence and the setting to change next."""
