"""One report on a real GPU: ``make gpu``, or ``python -m bench.gpu [FOLDER]``."""
