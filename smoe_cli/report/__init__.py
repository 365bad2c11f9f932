"""The report: what a working folder's artefacts say (`document`), and one self-contained page of it (`page`)."""
