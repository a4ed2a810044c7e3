"""The HTML page of a training run: records in, one self-contained file out. Imports no torch.

>>> from neuclip.records import RunFolder
>>> from neuclip.report.page import write_report
>>> write_report(RunFolder("runs/first"))  # doctest: +SKIP
PosixPath('runs/first/report.html')
"""
