"""Routing records of other programs, read into traces.

A format file turns its files into `records.TokenRecords` or `records.CountRecords` and believes nothing it need not;
`layers` finds which decoder layer each entry is, `records.check_rows` passes or rejects every row, `store` splits and
writes. `detect` recognises a format by content. A new format is one file and one row in `detect.FORMATS`.
"""
