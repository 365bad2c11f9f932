"""What smoe inspect does: any artefact described, two traces compared, and how both are shown."""
