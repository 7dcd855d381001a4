"""Whether a resumed run does what the interrupted one did: journal, comparison, verdict."""
